"""Environments in other processes and on other machines: `rl-core serve` hosts environment files over gRPC, and a run reaches
them through `--env_path grpc://host:port/name`. What is said is in environments.proto. docs/service.md"""
