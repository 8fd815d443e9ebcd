"""Reward models: score conversations in this process or over HTTP.

model = RewardModel("runs/rm/hf/policy")
model.score([[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]])
# [1.25]

python -m rl_core.rewards.reward_model --model runs/rm/hf/policy --port 8001
await remote_scores("http://127.0.0.1:8001", [messages])
# [1.25]

POST /classify  {"messages": [...] or [[...], ...], "tools": [...]}
                -> {"data": [{"index": 0, "score": 1.25}], ...}
GET  /health    -> {"status": "ok", "model": "..."}
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from rl_core.data.canonical_messages import canonical_messages, canonical_tools
from rl_core.data.chat_loading import load_chat
from rl_core.data.pretrained import load_pretrained
from rl_core.errors import keep_ends
from rl_core.http_guard import MAX_LOCAL_STRANGERS, HttpServer, read_json
from rl_core.types import InputImage, Message

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MAX_PAUSE_S = 5.0  # Longest pause between two attempts at a server.


class RewardModel:
    """A sequence classifier with one label, such as --algorithm rm exports. Threads may share one
    instance; they take turns."""

    def __init__(
        self,
        path: str,
        device: str | None = None,
        chat_template: str | None = None,
        batch_tokens: int = 16384,
    ):
        """`batch_tokens`: limit of one forward, padding included. Weights are fp32 on a CPU, else
        in the folder's dtype. Raises ValueError if the folder holds no trained reward model."""
        import torch  # The import takes seconds, which --help avoids.

        from rl_core.models.device import this_device
        from rl_core.models.loading import max_positions
        from rl_core.models.vision import Vision

        self.path, self.batch_tokens = path, batch_tokens
        self.device = this_device() if device is None else torch.device(device)
        self.model = load_classifier(path, self.device)
        self.chat = load_chat(path, chat_template)
        family = self.chat.vision
        self.vision = None if isinstance(family, str) else Vision(family, self.model)
        self.max_tokens = max_positions(self.model.config)[0] or math.inf
        self.lock = threading.Lock()  # Tokenizers are not thread-safe.

    def score(
        self, conversations: Sequence[list[Message]], tools: list | None = None
    ) -> list[float]:
        """A finite score of each conversation; higher means a better last reply. Raises ValueError
        for messages that the chat template refuses, and for more tokens than the model reads."""
        ids = [self.token_ids(messages, tools) for messages in conversations]
        return self.score_ids(ids, self.images_of(conversations))

    def images_of(self, conversations: Sequence[list[Message]]) -> dict[int, InputImage]:
        """The images of conversations by key."""
        images: dict[int, InputImage] = {}
        for messages in conversations:
            for image in self.chat.images_of(canonical_messages(messages)):
                images[image.key] = image
        return images

    def token_ids(self, messages: list[Message], tools: list | None = None) -> list[int]:
        """The conversation's tokens as training scored them: rendered by the chat template."""
        messages, tools = canonical_messages(messages), canonical_tools(tools)
        with self.lock:
            ids = self.chat.prompt_ids(messages, tools, add_generation_prompt=False)
        if not 0 < len(ids) <= self.max_tokens:
            raise ValueError(
                f"a conversation of {len(ids)} tokens; the model reads 1 to {self.max_tokens}"
            )
        return ids

    def score_ids(
        self, conversations: Sequence[list[int]], images: Mapping[int, InputImage]
    ) -> list[float]:
        """Like score(), for token ids, whose negative ones are of `images`. Conversations of
        similar length share a forward."""
        scores = [math.nan] * len(conversations)
        waiting = sorted(range(len(conversations)), key=lambda i: len(conversations[i]))
        with self.lock:
            while waiting:
                # The longest, and as many shorter ones as fit when padded to its length.
                num = max(1, self.batch_tokens // len(conversations[waiting[-1]]))
                batch, waiting = waiting[-num:], waiting[:-num]
                batch_scores = self.forward([conversations[i] for i in batch], images)
                for i, score in zip(batch, batch_scores, strict=True):
                    scores[i] = score
        if not all(map(math.isfinite, scores)):
            raise ValueError(
                f"{self.path} gave a score that is NaN or infinite: its weights are broken, or "
                "overflow in this dtype"
            )
        return scores

    def forward(
        self, conversations: list[list[int]], images: Mapping[int, InputImage]
    ) -> list[float]:
        import torch

        from rl_core.models.heads import scores_of
        from rl_core.models.policy import backbone

        rows = [torch.tensor(ids, device=self.device) for ids in conversations]
        last = torch.tensor([len(ids) - 1 for ids in conversations], device=self.device)
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = (torch.arange(input_ids.shape[1], device=self.device) <= last[:, None]).long()
        # The classifier's forward would look for a padding token, which may also end a
        # conversation.
        arguments = {"input_ids": input_ids}
        if self.vision is not None:
            arguments = self.vision.padded(input_ids, images)
        # Without an image the multimodal model would continue the positions of its last images.
        is_seen = self.vision is not None and self.vision.is_seen(arguments)
        decoder = self.model.base_model if is_seen else backbone(self.model)
        with torch.inference_mode():
            out = decoder(**arguments, attention_mask=mask, use_cache=False)
            hidden = out.last_hidden_state[torch.arange(len(rows), device=self.device), last]
            return scores_of(self.model, hidden).tolist()


def load_classifier(path: str, device: torch.device) -> PreTrainedModel:
    """The model with its head in fp32. Loads weights only from safetensors, and code only from
    transformers."""
    import torch

    from rl_core.models.loading import classifier_class, load_model_config

    options = {"use_safetensors": True, "output_loading_info": True}
    dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        kind = classifier_class(load_model_config(path))
        model, info = load_pretrained(kind, path, dtype=dtype, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"model {path!r} cannot score: {str(error).splitlines()[0]}") from None
    why = [f"it lacks {name}" for name in sorted(info["missing_keys"])]
    if model.config.num_labels != 1:
        why.append(f"it has {model.config.num_labels} labels")
    if not hasattr(model, "score"):
        why.append("its head is not a linear score")
    if why:
        raise ValueError(
            f"model {path!r} is not a trained reward model, {why[0]}: give a sequence classifier "
            "with one label, such as the folder hf/policy of a run with --algorithm rm"
        )
    model.score.float()
    return model.to(device).eval()


async def remote_scores(
    url: str,
    conversations: Sequence[list[Message]],
    tools: list | None = None,
    timeout_s: float = 30.0,
) -> list[float]:
    """Scores of the server at `url`, like RewardModel.score(). Retries until timeout_s if the
    server is busy or not there, then raises ConnectionError. Raises ValueError for requests that
    the server refuses."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            f"{url=} must begin with http:// or https://, such as http://127.0.0.1:8001"
        )
    body = {"messages": list(conversations)} | ({"tools": tools} if tools else {})
    deadline_s, pause_s = asyncio.get_running_loop().time() + timeout_s, 0.1
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        while True:
            try:
                async with session.post(f"{url.rstrip('/')}/classify", json=body) as response:
                    if response.status == 200:
                        return [item["score"] for item in (await response.json())["data"]]
                    reason = f"{response.status}: {keep_ends(await response.text(), 500)}"
                    if response.status < 500 and response.status != 429:
                        raise ValueError(f"{url} refused the request with {reason}")
            except (TimeoutError, aiohttp.ClientError) as error:
                reason = f"{type(error).__name__}: {error}" if str(error) else "no answer"
            if asyncio.get_running_loop().time() + pause_s >= deadline_s:
                raise ConnectionError(
                    f"no scores from {url} within {timeout_s:g} s ({reason}); is the server up?"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


@web.middleware
async def refuse_pages(request: web.Request, handler: Callable) -> web.StreamResponse:
    """Refuses pages in a browser, which send their origin: they would use the model in the name of
    the server's user."""
    if "Origin" in request.headers:
        return web.json_response({"error": "browser pages may not use this server"}, status=403)
    return await handler(request)


class ScoreServer:
    """Answers POST /classify. Requests that arrive while the model computes share the next
    forward."""

    def __init__(self, model: RewardModel):
        self.model, self.turn = model, asyncio.Lock()
        self.waiting: list[tuple[list[list[int]], asyncio.Future]] = []
        self.images: dict[int, InputImage] = {}  # Of the requests that wait.

    async def classify(self, request):
        asked = await read_json(request)
        try:
            messages, tools = asked["messages"], asked.get("tools")
            conversations = [messages] if isinstance(messages[0], dict) else messages
            ids = [self.model.token_ids(m, tools) for m in conversations]
            self.images |= self.model.images_of(conversations)
            scores = await self.scores(ids)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)
        data = [{"index": i, "score": score} for i, score in enumerate(scores)]
        return web.json_response({"object": "list", "model": self.model.path, "data": data})

    async def health(self, request):
        return web.json_response({"status": "ok", "model": self.model.path})

    async def scores(self, conversations: list[list[int]]) -> list[float]:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((conversations, answer))
        async with self.turn:
            if not answer.done():
                jobs, self.waiting = self.waiting, []
                images, self.images = self.images, {}
                try:
                    asked = [ids for conversations, _ in jobs for ids in conversations]
                    scores = iter(await asyncio.to_thread(self.model.score_ids, asked, images))
                    for conversations, future in jobs:
                        future.set_result([next(scores) for _ in conversations])
                except Exception as error:  # Every caller gets the error; the server continues.
                    for _, future in jobs:
                        future.set_exception(error)
        return await answer


async def serve(model: RewardModel, host: str, port: int, max_bytes: int) -> None:
    """Serves until SIGINT or SIGTERM; a larger request is refused. Raises OSError."""
    answers = ScoreServer(model)
    app = web.Application(client_max_size=max_bytes, middlewares=[refuse_pages])
    app.add_routes([web.post("/classify", answers.classify), web.get("/health", answers.health)])
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = HttpServer(app, has_keys=False, max_strangers=MAX_LOCAL_STRANGERS)
    port = await server.listen(host, port)
    print(f"scores of {model.path} at http://{host}:{port}", flush=True)
    await stopped.wait()
    await server.close()


def main(argv: list[str] | None = None) -> int:
    """Loads the model once and serves until Ctrl-C. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rl_core.rewards.reward_model", allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or hub name of a reward model: runs/rm/hf/policy")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all interfaces")
    add("--port", type=int, default=8001, help="[8001]")
    add("--device", help="such as cuda:1 or cpu; default: the first GPU if there is one")
    add("--batch_tokens", type=int, default=16384, help="tokens of one forward [16384]")
    add("--max_request_mib", type=float, default=16, help="a larger request is refused [16]")
    args = parser.parse_args(argv)
    try:
        model = RewardModel(args.model, args.device, batch_tokens=args.batch_tokens)
        asyncio.run(serve(model, args.host, args.port, int(args.max_request_mib * 2**20)))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
