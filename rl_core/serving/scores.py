"""A reward model scores conversations: in this process, or asked for over HTTP.

model = RewardModel("runs/rm/hf/policy")
model.score([[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]])     # [1.25]

python -m rl_core.serving.scores --model runs/rm/hf/policy --port 8001
await remote_scores("http://127.0.0.1:8001", [messages])                                         # [1.25]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rl_core.data.chat import load_chat
from rl_core.data.samples import conversation_ids
from rl_core.data.tasks import check_messages
from rl_core.http import request
from rl_core.types import Message

MAX_PAUSE_S = 5.0  # between two attempts at a server


class RewardModel:
    """A sequence classifier of one label, such as --algorithm rm exports. Threads may share it; they take turns."""

    def __init__(
        self, path: str, device: str | None = None, chat_template: str | None = None, batch_tokens: int = 16384
    ):
        """batch_tokens bounds one forward, padding included. Weights are held in fp32 on a CPU, elsewhere as they are in the
        folder. Raises ValueError if it holds no trained reward model."""
        import torch  # seconds to import, as is transformers, which --help need not wait for

        if device is None:
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        self.path, self.device, self.batch_tokens = path, torch.device(device), batch_tokens
        self.model = load_classifier(path, self.device)
        self.chat = load_chat(path, chat_template)
        self.max_tokens = getattr(self.model.config.get_text_config(), "max_position_embeddings", math.inf)
        self.lock = threading.Lock()  # tokenizers are not safe in threads, and threads would only share the same cores

    def score(self, conversations: Sequence[list[Message]], tools: list | None = None) -> list[float]:
        """A score of each conversation, any finite number: the higher, the better its last reply. Raises ValueError for
        messages that the chat template refuses, and for more tokens than the model reads."""
        return self.score_ids([self.token_ids(messages, tools) for messages in conversations])

    def token_ids(self, messages: list[Message], tools: list | None = None) -> list[int]:
        """The tokens that training scored: the whole conversation as the chat template renders it."""
        try:
            with self.lock:
                ids = conversation_ids(self.chat, check_messages(messages), tools)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the messages cannot be rendered: {type(error).__name__}: {error}") from None
        if not 0 < len(ids) <= self.max_tokens:
            raise ValueError(f"a conversation of {len(ids)} tokens; the model reads 1 to {self.max_tokens}")
        return ids

    def score_ids(self, conversations: Sequence[list[int]]) -> list[float]:
        """As score, of tokens. Those of similar length are computed together."""
        scores = [math.nan] * len(conversations)
        with self.lock:
            for part in padded_batches([len(ids) for ids in conversations], self.batch_tokens):
                for i, score in zip(part, self.forward([conversations[i] for i in part]), strict=True):
                    scores[i] = score
        bad = [score for score in scores if not math.isfinite(score)]
        if bad:
            raise ValueError(f"{self.path} gave a score of {bad[0]}: its weights are broken, or overflow in this dtype")
        return scores

    def forward(self, conversations: list[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, conversations))
        lengths = torch.tensor([len(ids) for ids in conversations])
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in conversations])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        # By the lengths, and not by a padding token as the classifier's own forward: a conversation may end in that.
        with torch.inference_mode():
            inputs = {"input_ids": padded.to(self.device), "attention_mask": mask.to(self.device)}
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            rows = torch.arange(len(conversations), device=self.device)
            return self.model.score(hidden[rows, lengths.to(self.device) - 1].float())[:, 0].tolist()


def load_classifier(path: str, device: Any) -> Any:
    """The model with its head in fp32. Weights come from safetensors alone, code from transformers alone."""
    import torch
    from transformers import AutoModelForSequenceClassification

    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=torch.float32 if device.type == "cpu" else "auto",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"model {path!r} cannot score: {str(error).splitlines()[0]}") from None
    missing = sorted(found["missing_keys"])
    if missing or model.config.num_labels != 1 or not hasattr(model, "score"):
        why = f"it lacks {missing[0]}" if missing else f"it has {model.config.num_labels} labels"
        raise ValueError(
            f"model {path!r} is no trained reward model, {why}: give a sequence classifier with one label, such as "
            "the folder hf/policy of a run with --algorithm rm"
        )
    model.score.float()
    return model.to(device).eval()


def padded_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Indices, longest first, in parts of at most max_tokens once all of a part are padded to its longest."""
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


async def remote_scores(
    url: str, conversations: Sequence[list[Message]], tools: list | None = None, timeout_s: float = 30.0
) -> list[float]:
    """Scores as RewardModel.score, by the server at url. A server that is not there or busy is asked again until timeout_s
    is over, then ConnectionError says why. Raises ValueError for what the server refuses."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"url={url!r} must begin with http:// or https://, such as http://127.0.0.1:8001")
    body = json.dumps({"messages": list(conversations)} | ({"tools": tools} if tools else {})).encode()
    loop, pause_s = asyncio.get_running_loop(), 0.1
    deadline_s = loop.time() + timeout_s
    while True:
        try:
            asked = request(f"{url.rstrip('/')}/classify", body)
            status, content = await asyncio.wait_for(asked, deadline_s - loop.time())
            answer = json.loads(content)
            if status == 200:
                scores = [float(item["score"]) for item in answer["data"]]
                assert len(scores) == len(conversations), (len(scores), len(conversations))
                return scores
            reason = f"{status}: {answer.get('error', answer)}"
            if status < 500 and status != 429:
                raise ValueError(f"{url} refused the request with {reason}")
        except asyncio.TimeoutError:
            reason = "no answer"
        except (OSError, EOFError, json.JSONDecodeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if loop.time() + pause_s >= deadline_s:
            raise ConnectionError(f"no scores from {url} within {timeout_s:g} s ({reason}); is the server up?")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def main(argv: list[str] | None = None) -> int:
    """The exit status of `python -m rl_core.serving.scores`: loads the model once and serves until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m rl_core.serving.scores", allow_abbrev=False)
    parser.add_argument(
        "--model", required=True, help="folder or hub name of a reward model, such as runs/rm/hf/policy"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets other machines ask [127.0.0.1]"
    )
    parser.add_argument("--port", type=int, default=8001, help="0 takes a free one [8001]")
    parser.add_argument("--device", help="such as cuda:1 or cpu; default: the first GPU if there is one")
    parser.add_argument("--batch_tokens", type=int, default=16384, help="tokens of one forward, with padding [16384]")
    parser.add_argument("--max_request_mib", type=float, default=16, help="a larger request is refused [16]")
    args = parser.parse_args(argv)
    from rl_core.serving.score_server import serve

    try:
        model = RewardModel(args.model, args.device, batch_tokens=args.batch_tokens)
        serve(model.token_ids, model.score_ids, args.model, (args.host, args.port), int(args.max_request_mib * 2**20))
    except KeyboardInterrupt:
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
