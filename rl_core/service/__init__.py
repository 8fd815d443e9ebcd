"""Environments in other processes and on other machines: `rl-core serve` hosts environment files
over gRPC, and a run reaches them through `--env_path grpc://host:port/name`. What is said is in
environments.proto. docs/service.md"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# A process with a connection may fork: gRPC's handlers of forks end one child in five with a
# segmentation fault, even one that does not use gRPC. Read before gRPC's first channel.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@contextmanager
def needing_grpc(what: str) -> Iterator[None]:
    """Around imports. Raises ValueError where a package of the extra `service` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} needs gRPC ({error}): pip install 'rl_core[service]'") from None
