# The image of served environments: workers and controllers, no GPU, no torch. docs/service.md
#
#   docker build -f scripts/worker.Dockerfile -t rl-core-worker .   # --build-arg BASE=...: another Python
#   docker run --rm -v ./envs:/envs:ro -p 50051:50051 -e RL_CORE_SERVICE_TOKEN rl-core-worker calculator.py --host 0.0.0.0
#
# What an environment imports comes on top:
#   FROM rl-core-worker
#   USER root
#   RUN pip install --no-cache-dir chess
#   USER 65534
ARG BASE=python:3.12-slim
FROM ${BASE} AS wheel
WORKDIR /src
COPY setup.py README.md ./
COPY rl_core rl_core
COPY envs envs
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
COPY scripts/worker_requirements.txt /requirements.txt
RUN pip install --no-cache-dir --no-compile -r /requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-compile --no-deps /wheels/*.whl
ENV PYTHONUNBUFFERED=1
WORKDIR /envs
USER 65534:65534
EXPOSE 50051 8080
ENTRYPOINT ["rl-core", "serve"]
