#!/usr/bin/env bash
# Writes environments_pb2.py from environments.proto. grpcio-tools 1.76 is of protobuf 6, whose code runs with 6 and 7.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
python -m pip install -q "grpcio-tools==1.76.0"
python -m grpc_tools.protoc -I. --python_out=. rl_core/environments/service/environments.proto
