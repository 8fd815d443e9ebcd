"""Environments in other processes and on other machines: `rl-core serve` hosts environment files over gRPC, and a run reaches
them through `--env_path grpc://host:port/name`. What is said is in environments.proto. docs/service.md"""

import os

# A process with a connection may fork: gRPC's handlers of forks end one child in five with a segmentation fault, even one that
# does not use gRPC. Read before gRPC's first channel.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
