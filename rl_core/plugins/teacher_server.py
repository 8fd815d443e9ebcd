"""A teacher behind a URL: SGLang's /generate, or the /v1/completions of vLLM and of what else gives
logprobs of a prompt's tokens.

It reads each sample as token ids, and says the logprob of each token, or of the K likeliest at each
place. Nothing is sampled there.

M trained tokens of a batch, K likeliest tokens of the teacher.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import torch

from rl_core.data.tasks import shorten
from rl_core.distributed import Ranks, all_gather_json
from rl_core.plugins.teacher import TeacherOutput
from rl_core.types import PackedBatch, RunError

PING_TIMEOUT_S = 10.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # between attempts
MAX_TOLD = 400  # characters of an answer that an error shows
# Above 0 by more than rounding is no logprob.
ROUNDING_NATS = 1e-2
# What the tokens of the teacher and of the student are compared by, when a run starts.
PROBE = "The sum of 12 and 30 is 42.\nWhy? Because 12 + 30 = 42: x = y (all of it)."


class Request(NamedTuple):
    ids: list[int]
    first: int  # token of which logprobs are wanted, above 0


class Scores(NamedTuple):
    """Of the tokens of a request from the first that is wanted on."""

    logprobs: list[float]
    top: list[list[tuple[float, int]]]  # [K] (logprob, id) of each; [] if they were not asked for
    texts: list[str | None]


class SGLangDialect:
    """POST /generate, by its input logprobs."""

    def __init__(self, url: str, client: httpx.Client):
        self.path = f"{url.removesuffix('/')}/generate"

    def body(self, request: Request, num_top: int) -> dict[str, Any]:
        return {
            "input_ids": request.ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            # The first token from there has no logprob.
            "logprob_start_len": request.first - 1,
            "top_logprobs_num": num_top,
            "return_text_in_logprobs": True,
        }

    def scores(self, answer: Any, request: Request, num_top: int) -> Scores:
        """Raises LookupError, TypeError or ValueError for an answer of another form."""
        meta, wanted = answer["meta_info"], request.ids[request.first :]
        rows = meta["input_token_logprobs"][-len(wanted) :]
        if [row[1] for row in rows] != wanted:
            raise ValueError("its input_token_logprobs are of other tokens")
        top = []
        if num_top:
            found = meta["input_top_logprobs"][-len(rows) :]
            top = [[(item[0], item[1]) for item in items] for items in found]
        return Scores([row[0] for row in rows], top, [row[2] for row in rows])


class OpenAIDialect:
    """POST /v1/completions with token ids, by `prompt_logprobs`, which vLLM has beside OpenAI's
    keys."""

    def __init__(self, url: str, client: httpx.Client):
        """`url`: up to and with /v1; #NAME after it is the model's name there, by default the first
        that it lists."""
        url, _, self.model = url.partition("#")
        self.path = f"{url.removesuffix('/')}/completions"
        if not self.model:
            self.model = client.get(f"{url}/models", timeout=PING_TIMEOUT_S).json()["data"][0]["id"]

    def body(self, request: Request, num_top: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": request.ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": num_top,
        }

    def scores(self, answer: Any, request: Request, num_top: int) -> Scores:
        ids, first = request
        rows = answer["choices"][0]["prompt_logprobs"]
        if len(rows) != len(ids):
            raise ValueError(f"it has {len(rows)} prompt_logprobs of {len(ids)} tokens")
        logprobs, top, texts = [], [], []
        for token_id, row in zip(ids[first:], rows[first:], strict=True):
            own = row[str(token_id)]
            logprobs.append(own["logprob"])
            texts.append(own.get("decoded_token"))
            ranked = sorted(((v["logprob"], int(k)) for k, v in row.items()), reverse=True)
            # The token itself comes too, where it is not one of the likeliest.
            top.append(ranked[:num_top])
        return Scores(logprobs, top if num_top else [], texts)


class ServerTeacher:
    """A teacher that a server computes. Each rank asks for its own batches, all at once."""

    models = ()
    copies = ()

    def __init__(self, url: str, num_top: int, ranks: Ranks, max_concurrent: int, timeout_s: float):
        """`num_top`: K, 0 without whole distributions. `timeout_s`: for all batches of a step.
        Raises ValueError if nobody answers at the URL."""
        self.url, self.num_top, self.ranks, self.timeout_s = url, num_top, ranks, timeout_s
        self.client = httpx.Client(limits=httpx.Limits(max_connections=max_concurrent))
        self.threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="teacher")
        has_dialect = urlsplit(url).path.rstrip("/").endswith("/v1")
        try:
            self.dialect = (OpenAIDialect if has_dialect else SGLangDialect)(url, self.client)
        except (httpx.HTTPError, LookupError, ValueError, TypeError) as error:
            raise ValueError(
                f"--algo.teacher={url} does not list its models ({shorten(repr(error), 200)}); "
                "start it, or name the model: http://host:port/v1#NAME"
            ) from None

    def packed(self, batch: PackedBatch, samples: list) -> None:
        """It reads the batch itself."""

    def read_all(self, batches: list[PackedBatch], is_exact: bool) -> list[TeacherOutput]:
        """Raises RunError on all ranks alike if any could not be read."""
        deadline = time.monotonic() + self.timeout_s
        asked = [requests_of(batch) for batch in batches]
        jobs = []
        for requests in asked:
            jobs.append([self.threads.submit(self.ask, request, deadline) for request in requests])
        problem, found = "", []
        try:
            found = [[job.result() for job in of_batch] for of_batch in jobs]
        except RunError as error:
            problem = str(error)
            cancel(jobs)
        for text in all_gather_json(problem, self.ranks):
            if text:
                raise RunError(text)
        of_batches = zip(batches, asked, found, strict=True)
        return [self.reading(*of_batch, is_exact) for of_batch in of_batches]

    def reading(
        self, batch: PackedBatch, requests: list[Request], scores: list[Scores], is_exact: bool
    ) -> TeacherOutput:
        device = batch.labels.device
        where = []  # (sequence, index of its scores) of each trained token
        for number, place in zip(batch.sequences.tolist(), trained_places(batch), strict=True):
            where.append((number, place - requests[number].first))
        logprobs = torch.tensor([scores[n].logprobs[i] for n, i in where], dtype=torch.float32)
        if not is_exact:
            return TeacherOutput(logprobs=logprobs.to(device))
        if batch.shard is not None:
            where = [where[i] for i in batch.shard.trained.tolist()]
        rows = [scores[n].top[i] for n, i in where]
        shape = len(rows), self.num_top
        top = torch.tensor([[item[0] for item in row] for row in rows]).view(shape)
        ids = torch.tensor([[item[1] for item in row] for row in rows], dtype=torch.long)
        likeliest = ids.view(shape).to(device), top.float().to(device)
        return TeacherOutput(logprobs=logprobs.to(device), top=likeliest)

    def ask(self, request: Request, deadline: float) -> Scores:
        """Raises RunError for what the server refuses, for what is no logprob, and if there is no
        answer before the deadline."""
        pause_s, body = FIRST_PAUSE_S, self.dialect.body(request, self.num_top)
        while True:
            try:
                left = max(0.01, deadline - time.monotonic())
                response = self.client.post(self.dialect.path, json=body, timeout=left)
                told = f"{response.status_code}: {response.text}"
                if response.status_code == 200:
                    return self.checked(response, request)
                if response.status_code < 500 and response.status_code not in (408, 409, 429):
                    break
            except httpx.TransportError as error:
                told = f"no answer ({error!r})"
            if time.monotonic() + pause_s >= deadline:
                told = f"nothing within {self.timeout_s:g} s; last: {told}"
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise self.problem(told)

    def checked(self, response: httpx.Response, request: Request) -> Scores:
        try:
            scores = self.dialect.scores(response.json(), request, self.num_top)
            self.check(scores)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            told = f"logprobs that cannot be read ({error}): {response.text}"
            raise self.problem(told) from None
        return scores

    def check(self, scores: Scores) -> None:
        values = list(scores.logprobs)
        for row in scores.top:
            if len(row) != self.num_top:
                raise ValueError(f"{len(row)} likeliest tokens instead of {self.num_top}")
            values += [logprob for logprob, _ in row]
        for value in values:
            if not math.isfinite(value) or value > ROUNDING_NATS:
                raise ValueError(f"{value} is no logprob")

    def problem(self, told: str) -> RunError:
        return RunError(f"--algo.teacher: {self.url} gave {' '.join(told.split())[:MAX_TOLD]}")

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        self.client.close()


def trained_places(batch: PackedBatch) -> list[int]:
    """[M] where each trained token stands in its sequence."""
    return (batch.position_ids[batch.logit_indices] + 1).tolist()


def requests_of(batch: PackedBatch) -> list[Request]:
    """The tokens of each sample up to the last that is trained."""
    numbers, places, labels = batch.sequences.tolist(), trained_places(batch), batch.labels.tolist()
    first: dict[int, int] = {}
    last: dict[int, tuple[int, int]] = {}
    for number, place, label in zip(numbers, places, labels, strict=True):
        first.setdefault(number, place)
        last[number] = place, label
    found = []
    for number, path in enumerate(batch.paths):
        # The batch has a sample's last token as a label alone.
        end, label = last[number]
        ids = batch.input_ids[torch.from_numpy(path[:end])].tolist()
        found.append(Request([*ids, label], first[number]))
    return found


def cancel(jobs: list[list[Future]]) -> None:
    for of_batch in jobs:
        for job in of_batch:
            job.cancel()


def check_same_texts(url: str, tokenizer: Any, own_path: str) -> None:
    """Raises ValueError if nobody answers at the URL, or if the teacher reads other text from the
    student's token ids, as far as it tells texts."""
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"))
    teacher = ServerTeacher(url, 0, ranks, max_concurrent=1, timeout_s=PING_TIMEOUT_S)
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    try:
        texts = teacher.ask(Request(ids, 1), time.monotonic() + PING_TIMEOUT_S).texts
    except RunError as error:
        raise ValueError(f"{error}; start it, or correct --algo.teacher") from None
    finally:
        teacher.close()
    for token_id, text in zip(ids[1:], texts, strict=True):
        own = tokenizer.decode([token_id])
        # A part of a character has no text of its own.
        if text is not None and "\ufffd" not in text + own and text.strip() != own.strip():
            raise ValueError(
                f"--algo.teacher={url} has another tokenizer than {own_path}: token {token_id} is "
                f"{text!r} there instead of {own!r}; take a model of the same family"
            )
