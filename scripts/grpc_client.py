"""Plays episodes of a served environment with nothing but gRPC: pip install grpcio grpcio-tools.

Any language with a gRPC library can do the same from
rl_core/environments/service/environments.proto.

    rl-core serve envs/calculator.py --port 50051
    python scripts/grpc_client.py --address 127.0.0.1:50051 --env calculator

Replace `reply` by an agent. The environment variable RL_CORE_SERVICE_TOKEN may hold a token.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import grpc

PROTO = Path(__file__).parent.parent / "rl_core/environments/service/environments.proto"
TIMEOUT_S = 60


def reply(messages):
    """The reply of an agent that calls a calculator, then repeats the tool's answer."""
    last = messages[-1]
    return last["content"] if last["role"] == "tool" else f"<call>{last['content']}</call>"


def play(stub, pb, metadata, env, task_id):
    """(the conversation, parts of the reward, their sum)."""

    def call(verb, message):
        return getattr(stub, verb)(message, timeout=TIMEOUT_S, metadata=metadata)

    # A retry with the same key returns the same session.
    started = call("Start", pb.StartRequest(env=env, task_id=task_id, key=os.urandom(8).hex()))
    session, messages, done, number = started.session, json.loads(started.messages), False, 0
    while not done:
        number += 1  # A retry with the same number returns the same answer.
        messages.append({"role": "assistant", "content": reply(messages)})
        last = pb.Said(messages=json.dumps(messages[-1:]))
        answer = call("Interact", pb.InteractRequest(session=session, number=number, said=last))
        messages += json.loads(answer.messages)
        done = answer.done or answer.status != pb.RUNNING
    scored = call("Score", pb.ScoreRequest(session=session, number=number + 1)).scores[0]
    call(
        "Cancel", pb.CancelRequest(session=session, status=pb.COMPLETED)
    )  # Frees the slot at once.
    return messages, dict(scored.parts), scored.reward


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:50051", help="HOST:PORT")
    parser.add_argument("--env", default="calculator")
    parser.add_argument("--episodes", type=int, default=3)
    parser.add_argument("--proto", type=Path, default=PROTO)
    args = parser.parse_args()
    sys.path.insert(0, str(args.proto.parent))
    pb, services = grpc.protos_and_services(args.proto.name)
    token = os.environ.get("RL_CORE_SERVICE_TOKEN")
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(args.address) as channel:
        stub = services.EnvironmentsStub(channel)
        tasks = stub.Tasks(
            pb.TasksRequest(env=args.env, split="train", count=args.episodes), metadata=metadata
        )
        print(f"{tasks.total} tasks")
        for index in range(len(tasks.rows)):
            messages, parts, reward = play(stub, pb, metadata, args.env, f"train/{index}")
            for message in messages:
                print(f"{message['role']}: {message['content']}")
            print(f"reward {reward:g}, of {json.dumps(parts)}\n")


if __name__ == "__main__":
    main()
