"""Environments in other processes and on other machines: `rl-core serve` hosts environment files
over gRPC, and a run reaches them through `--env_path grpc://host:port/name`. environments.proto
defines the protocol. docs/service.md"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# A process with a connection may fork. With gRPC's fork handlers, one child in five ends with a
# segmentation fault, even a child that does not use gRPC. gRPC reads the variable when the first
# channel opens.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@contextmanager
def needing_grpc(name: str) -> Iterator[None]:
    """Wraps imports. Raises ValueError if a package of the extra `service` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} needs gRPC ({error}): pip install 'rl_core[service]'") from None
