"""Compose files of tasks in Harbor's format: services, and files that reach for this machine.
tests/agents/test_boxed_containers.py plays a task with services."""

from __future__ import annotations

import textwrap

import pytest
from test_harbor import DOCKERFILE, TEST, TOML, in_box, needs_bwrap

from rl_core.environments.agents.harbor_tasks import check_driver, read_task
from rl_core.sandbox.box_settings import BoxLimits
from rl_core.sandbox.remote_driver import BoxRequest


def composed(folder, services, more=""):
    """A task whose compose file has these services."""
    text = f"services:\n{textwrap.indent(services, '  ')}\n{more}"
    files = {"docker-compose.yaml": text, "Dockerfile": DOCKERFILE, "inside": "X=y\n"}
    files = {f"environment/{name}": text for name, text in files.items()}
    files |= {"task.toml": f'{TOML}env.TAG = "16"\n', "instruction.md": "Go."}
    for name, text in (files | {"tests/test.sh": TEST}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


IN_DB = "db:\n  image: postgres\n  "
HOST = "reaches this machine"


@pytest.mark.parametrize(
    "services, error",
    [
        (IN_DB + "privileged: true", rf"services\.db\.privileged: True {HOST}"),
        (IN_DB + "network_mode: host", rf"services\.db\.network_mode: 'host' {HOST}"),
        (IN_DB + "network_mode: none", "'none': services of a box share one network; set it on"),
        (IN_DB + "network_mode: container:x", rf"'container:x' {HOST}"),
        (IN_DB + "pid: host", rf"services\.db\.pid: 'host' {HOST}"),
        (IN_DB + "devices: [/dev/kvm]", rf"services\.db\.devices: .*{HOST}"),
        (IN_DB + "cap_add: [SYS_ADMIN]", rf"the right SYS_ADMIN {HOST}"),
        (IN_DB + "security_opt: ['seccomp:unconfined']", rf"'seccomp:unconfined' {HOST}"),
        (IN_DB + "volumes: ['/:/host']", rf"volumes: / is not in environment/, and {HOST}"),
        (IN_DB + "volumes: ['/var/run/docker.sock:/s']", rf"docker\.sock .*{HOST}"),
        (IN_DB + "volumes: ['../tests:/tests']", rf"\.\./tests is not in environment/, and {HOST}"),
        (IN_DB + "volumes: [{type: bind, source: /etc, target: /e}]", rf"/etc .*{HOST}"),
        (IN_DB + "volumes: ['x:/a,type=bind,source=/']", "is not an absolute path of a mount"),
        (IN_DB + "volumes: ['./link:/a']", rf"\./link is not in environment/, and {HOST}"),
        (IN_DB + "env_file: ../../.env", rf"\.\./\.\./\.env is not in environment/, and {HOST}"),
        (IN_DB + "env_file: ~/.env", rf"~/\.env is not in environment/, and {HOST}"),
        (
            IN_DB + "environment: [API_KEY]",
            r"environment: API_KEY names a variable of this machine",
        ),
        (IN_DB + "command: echo $API_KEY", r"\$\{API_KEY\} names a variable of this machine"),
        (IN_DB + "build: ..", rf"build: \.\. is not in environment/, and {HOST}"),
        (IN_DB + "build: {context: ., network: host}", "build: network is not supported"),
        (IN_DB + "extends: {file: /x, service: y}", r"services\.db\.extends: is not supported"),
        (IN_DB + "extra_hosts: ['h:host-gateway']", rf"services\.db\.extra_hosts: .*{HOST}"),
        (IN_DB + "networks: {a: {ipv4_address: 10.0.0.5}}", "a.ipv4_address is not supported"),
        (IN_DB + "networks: [apart]", "shares none with main"),
        (IN_DB + "depends_on: {db: {condition: service_started}}", "wait in a circle: db, db"),
        (IN_DB + "volumes: [d:/a]\nweb:\n  image: x\n  volumes: [d:/b]", "d is shared with db"),
        (IN_DB + "x: 1\nmain:\n  depends_on: [cache]", "services.db.x: is not supported"),
        ("main:\n  depends_on: [cache]", "there is no service cache"),
        (
            "main:\n  command: python3 serve.py",
            "services.main.command: is not run in the agent's box",
        ),
        ("'--privileged':\n  image: x", "services.--privileged: is not a host name"),
        ("db:\n  image: --privileged", "'--privileged' is not the name of an image"),
        ("db:\n  init: true", "services.db: needs image or build"),
        (IN_DB + "env_file: .", "env_file: .* is not a file"),
        (IN_DB + "healthcheck: {test: []}", r"\[\] must begin with CMD or CMD-SHELL"),
        (IN_DB + "depends_on: [[a]]", r"\['a'\] must be a text"),
        (IN_DB + "networks: 5", "5 must be a list"),
        (IN_DB + "networks: [[a]]", r"\['a'\] must be a text"),
        (IN_DB + "test: []", "services.db.test: is not supported"),
        ("db: [", "docker-compose.yaml: while parsing"),
        ("".join(f"d{n}: {{image: a}}\n" for n in range(17)), "services: 17 are more than 16"),
    ],
)
def test_a_compose_file_does_not_reach_this_machine(tmp_path, services, error):
    folder = composed(tmp_path, services)
    (folder / "environment/link").symlink_to("/etc")
    with pytest.raises(ValueError, match=error) as refused:
        check_driver(read_task(folder), "docker")
    assert refused.value.reason == "an unsupported docker-compose.yaml"


@pytest.mark.parametrize(
    "more, error",
    [
        ("include: [other.yaml]", "include: is not supported"),
        ("volumes: {d: {driver_opts: {o: bind, device: /}}}", rf"volumes\.d\.driver_opts: {HOST}"),
        ("volumes: {d: {external: true}}", rf"volumes\.d\.external: {HOST}"),
        ("networks: {default: {driver: host}}", rf"networks\.default\.driver: {HOST}"),
        ("networks: {default: {external: true}}", rf"networks\.default\.external: {HOST}"),
        # 9 levels of 9 aliases are a billion values.
        (
            "x-0: &x0 [1]\n"
            + "".join(f"x-{n + 1}: &x{n + 1} [{', '.join([f'*x{n}'] * 9)}]\n" for n in range(9)),
            "has more than 10000 values",
        ),
        (f"x-a: {'[' * 1500}", "recursion|while parsing"),
        (f"x-a: {'a' * 70_000}", "has more than 64 KiB"),
    ],
)
def test_a_compose_file_is_refused_as_a_whole(tmp_path, more, error):
    with pytest.raises(ValueError, match=rf"docker-compose\.yaml: .*{error}"):
        read_task(composed(tmp_path, "main: {}", more))


SERVICES = """\
main:
  image: ${MAIN_IMAGE_NAME}
  command: [sh, -c, sleep infinity]
  environment: {WORD: "yes", TAG: "${TAG}", FLAG: true}
  env_file: inside
  working_dir: /app
  volumes: ["${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}", "./inside:/srv/file:ro"]
"""


# The compose files that Harbor's and Terminal-Bench's tasks are published with.
HARBOR = """\
main:
  build: { context: "${CONTEXT_DIR}" }
  image: ${MAIN_IMAGE_NAME}
  command: [ "sh", "-c", "sleep infinity" ]
  network_mode: ${NETWORK_MODE:-bridge}
  environment: [ "TEST_DIR=${TEST_DIR}" ]
  volumes:
    - ${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}
    - ${HOST_AGENT_LOGS_PATH}:${ENV_AGENT_LOGS_PATH}
  deploy: { resources: { limits: { cpus: "${CPUS}", memory: "${MEMORY}" } } }
"""
TERMINAL_BENCH = """\
main:
  build:
    context: .
    dockerfile: Dockerfile
  image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
  container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
  command: [ "sh", "-c", "sleep infinity" ]
  environment:
    - TEST_DIR=${T_BENCH_TEST_DIR}
  volumes:
    - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
    - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""


@pytest.mark.parametrize(
    "services, has_network",
    [
        (HARBOR, True),
        (HARBOR.replace("${NETWORK_MODE:-bridge}", "none"), False),
        (HARBOR.replace("NETWORK_MODE:-bridge", "NETWORK_MODE:-none"), False),
        (TERMINAL_BENCH, True),
    ],
)
def test_published_compose_files_are_read(tmp_path, services, has_network):
    task = read_task(composed(tmp_path, services))
    main = task.composition.main
    assert (main.environ, main.binds, main.image) == ({"TEST_DIR": "/tests"}, {}, "")
    assert not task.composition.builds and not task.composition.sidecars
    assert (task.allows_network, task.verifiers_have_network) == (has_network, has_network)


@needs_bwrap
def test_a_compose_file_with_main_alone_needs_no_containers(tmp_path):
    check = "cat /srv/file; echo $WORD $TAG $FLAG $X; pwd; echo > /srv/file"
    done = in_box(composed(tmp_path, SERVICES), check)
    assert done.stdout == "X=y\nyes 16 true y\n/app\n" and "Read-only" in done.stderr


@pytest.mark.parametrize(
    "driver, db, error",
    [
        ("", "", "db is a service, which a box by bubblewrap does not have"),
        ("bubblewrap", "", "db is a service, which a box by bubblewrap does not have"),
        ("kubernetes", "build: .", "db is built, which a box by kubernetes does not have"),
        ("kubernetes", "volumes: ['./inside:/x']", "db mounts files, which a box by kubernetes"),
        ("kubernetes", "user: postgres", "db has a user by name, which a box by kubernetes"),
        ("kubernetes", "user: 70", ""),
        ("podman", "build: .", ""),
    ],
)
def test_services_need_a_driver_that_has_them(tmp_path, driver, db, error):
    task = read_task(composed(tmp_path, f"{SERVICES}  depends_on: [db]\n{IN_DB}{db}"))
    if not error:
        assert check_driver(task, driver) is None
        return
    with pytest.raises(ValueError, match=rf"{error}.* set HARBOR_DRIVER=docker") as refused:
        check_driver(task, driver)
    assert refused.value.reason == "services that need docker or podman"


IN_A_POD = """\
db:
  image: postgres:16
  command: [-c, fsync=off]
  user: "70"
  environment: {POSTGRES_PASSWORD: x}
  volumes: [data:/var/lib/data]
  depends_on: {init: {condition: service_completed_successfully}}
  healthcheck: {test: pg_isready, interval: 2s, timeout: 3s, start_period: 10s, retries: 4}
init:
  image: busybox
  entrypoint: "sh -c true"
"""


def test_services_of_a_pod_start_one_after_the_other_before_the_box(tmp_path):
    kubernetes = pytest.importorskip("rl_core.sandbox.box_kubernetes")
    task = read_task(composed(tmp_path, IN_A_POD))
    request = BoxRequest(
        name="a",
        image="python:3.12",
        limits=BoxLimits(memory_mib=64, disk_mib=32),
        network=False,
        run="",
        idle_s=1,
        lifetime_s=1,
        sidecars=task.composition.sidecars,
    )
    spec = kubernetes.manifest(request, [])["spec"]
    assert spec["hostAliases"] == [{"ip": "127.0.0.1", "hostnames": ["init", "main", "db"]}]
    assert spec["volumes"] == [{"name": "service-1-0", "emptyDir": {"sizeLimit": "1Gi"}}]
    init, db = spec["initContainers"]
    [box] = spec["containers"]
    for service in (init, db):
        assert service["resources"] == box["resources"]
        assert service["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert (init["image"], init["command"]) == ("busybox", ["sh", "-c", "true"])
    assert "restartPolicy" not in init and "startupProbe" not in init and "args" not in init
    assert (db["image"], db["args"], db["restartPolicy"]) == (
        "postgres:16",
        ["-c", "fsync=off"],
        "Always",
    )
    assert db["securityContext"]["runAsUser"] == 70 and "command" not in db
    assert db["env"] == [{"name": "POSTGRES_PASSWORD", "value": "x"}]
    assert db["volumeMounts"] == [{"name": "service-1-0", "mountPath": "/var/lib/data"}]
    probe = {"exec": {"command": ["/bin/sh", "-c", "pg_isready"]}, "periodSeconds": 2}
    assert db["startupProbe"] == probe | {"timeoutSeconds": 3, "failureThreshold": 4 + 10 // 2}
