"""A teacher behind a URL: SGLang's /generate, or the /v1/completions of vLLM and of other servers
that return logprobs of a prompt's tokens.

The server reads each sample as token ids, and returns the logprob of each token, or the top K
logprobs at each position. It generates nothing.

Legend: M trained tokens of a batch, K top tokens of the teacher.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from rl_core.data.task_rows import shorten
from rl_core.distributed import Ranks, all_gather_json
from rl_core.learning.teachers.distill import Teacher, TeacherOutput
from rl_core.types import AnyJSON, JSONObject, PackedBatch, RunError

PING_TIMEOUT_S = 10.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # Pauses between attempts.
MAX_SHOWN = 400  # Characters of an answer in an error.
# A value above 0 by more than rounding is not a logprob.
ROUNDING_NATS = 1e-2
# Text whose tokens are compared between teacher and student at the start of a run.
PROBE = "The sum of 12 and 30 is 42.\nWhy? Because 12 + 30 = 42: x = y (all of it)."


class TeacherRequest(NamedTuple):
    ids: list[int]
    first: int  # index of the first token whose logprob is wanted, above 0


class Scores(NamedTuple):
    """Logprobs of a request's tokens from `first` on."""

    logprobs: list[float]
    top: list[list[tuple[float, int]]]  # [K] (logprob, id) of each token; [] with num_top 0
    texts: list[str | None]


class SGLangDialect:
    """POST /generate, which returns input logprobs."""

    def __init__(self, url: str, client: httpx.Client):
        self.path = f"{url.removesuffix('/')}/generate"

    def body(self, request: TeacherRequest, num_top: int) -> JSONObject:
        return {
            "input_ids": request.ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            # The token at logprob_start_len has no logprob.
            "logprob_start_len": request.first - 1,
            "top_logprobs_num": num_top,
            "return_text_in_logprobs": True,
        }

    def scores(self, answer: AnyJSON, request: TeacherRequest, num_top: int) -> Scores:
        """Raises LookupError, TypeError or ValueError for an answer of another form."""
        meta, wanted = answer["meta_info"], request.ids[request.first :]
        rows = meta["input_token_logprobs"][-len(wanted) :]
        if [row[1] for row in rows] != wanted:
            raise ValueError("its input_token_logprobs belong to other tokens")
        top = []
        if num_top:
            tops = meta["input_top_logprobs"][-len(rows) :]
            top = [[(item[0], item[1]) for item in items] for items in tops]
        return Scores([row[0] for row in rows], top, [row[2] for row in rows])


class OpenAIDialect:
    """POST /v1/completions with token ids and `prompt_logprobs`, vLLM's extension of the OpenAI
    API."""

    def __init__(self, url: str, client: httpx.Client):
        """`url` ends with /v1, then optionally #NAME, the model's name on the server; default: the
        first one that the server lists."""
        url, _, self.model = url.partition("#")
        self.path = f"{url.removesuffix('/')}/completions"
        if not self.model:
            self.model = client.get(f"{url}/models", timeout=PING_TIMEOUT_S).json()["data"][0]["id"]

    def body(self, request: TeacherRequest, num_top: int) -> JSONObject:
        return {
            "model": self.model,
            "prompt": request.ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": num_top,
        }

    def scores(self, answer: AnyJSON, request: TeacherRequest, num_top: int) -> Scores:
        ids, first = request
        rows = answer["choices"][0]["prompt_logprobs"]
        if len(rows) != len(ids):
            raise ValueError(f"it has {len(rows)} prompt_logprobs of {len(ids)} tokens")
        logprobs, top, texts = [], [], []
        for token_id, row in zip(ids[first:], rows[first:], strict=True):
            entry = row[str(token_id)]
            logprobs.append(entry["logprob"])
            texts.append(entry.get("decoded_token"))
            ranked = sorted(((v["logprob"], int(k)) for k, v in row.items()), reverse=True)
            # The token itself is in the row even if it is not one of the top K.
            top.append(ranked[:num_top])
        return Scores(logprobs, top if num_top else [], texts)


class ServerTeacher(Teacher):
    """A teacher on a server. Each rank sends its batches, all at once."""

    def __init__(self, url: str, num_top: int, ranks: Ranks, max_concurrent: int, timeout_s: float):
        """`num_top`: K; 0 without whole distributions. `timeout_s`: limit for all batches of a
        step. Raises ValueError if nobody answers at the URL."""
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

    def read_all(self, batches: list[PackedBatch], is_exact: bool) -> list[TeacherOutput]:
        """Raises RunError on all ranks if a batch could not be read on one."""
        deadline = time.monotonic() + self.timeout_s
        requests_of_batches = [requests_of(batch) for batch in batches]
        jobs = []
        for requests in requests_of_batches:
            jobs.append([self.threads.submit(self.ask, request, deadline) for request in requests])
        problem, scores = "", []
        try:
            scores = [[job.result() for job in of_batch] for of_batch in jobs]
        except RunError as error:
            problem = str(error)
            cancel(jobs)
        for text in all_gather_json(problem, self.ranks):
            if text:
                raise RunError(text)
        of_batches = zip(batches, requests_of_batches, scores, strict=True)
        return [self.output(*of_batch, is_exact) for of_batch in of_batches]

    def output(
        self,
        batch: PackedBatch,
        requests: list[TeacherRequest],
        scores: list[Scores],
        is_exact: bool,
    ) -> TeacherOutput:
        device = batch.labels.device
        where = []  # (sequence, index into its scores) of each trained token
        positions = trained_positions(batch)
        for number, position in zip(batch.sequences.tolist(), positions, strict=True):
            where.append((number, position - requests[number].first))
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

    def ask(self, request: TeacherRequest, deadline: float) -> Scores:
        """Raises RunError if the server refuses the request, returns values that are not logprobs,
        or does not answer before the deadline."""
        pause_s, body = FIRST_PAUSE_S, self.dialect.body(request, self.num_top)
        while True:
            try:
                left = max(0.01, deadline - time.monotonic())
                response = self.client.post(self.dialect.path, json=body, timeout=left)
                reply = f"{response.status_code}: {response.text}"
                if response.status_code == 200:
                    return self.checked(response, request)
                if response.status_code < 500 and response.status_code not in (408, 409, 429):
                    break
            except httpx.TransportError as error:
                reply = f"no answer ({error!r})"
            if time.monotonic() + pause_s >= deadline:
                reply = f"nothing within {self.timeout_s:g} s; last: {reply}"
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise self.problem(reply)

    def checked(self, response: httpx.Response, request: TeacherRequest) -> Scores:
        try:
            scores = self.dialect.scores(response.json(), request, self.num_top)
            self.check(scores)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reply = f"logprobs that cannot be read ({error}): {response.text}"
            raise self.problem(reply) from None
        return scores

    def check(self, scores: Scores) -> None:
        values = list(scores.logprobs)
        for row in scores.top:
            if len(row) != self.num_top:
                raise ValueError(f"{len(row)} top tokens instead of {self.num_top}")
            values += [logprob for logprob, _ in row]
        for value in values:
            if not math.isfinite(value) or value > ROUNDING_NATS:
                raise ValueError(f"{value} is not a logprob")

    def problem(self, reply: str) -> RunError:
        return RunError(f"--algo.teacher: {self.url} gave {' '.join(reply.split())[:MAX_SHOWN]}")

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        self.client.close()


def trained_positions(batch: PackedBatch) -> list[int]:
    """[M] position of each trained token in its sequence."""
    return (batch.position_ids[batch.logit_indices] + 1).tolist()


def requests_of(batch: PackedBatch) -> list[TeacherRequest]:
    """The tokens of each sample up to the last trained one."""
    numbers, labels = batch.sequences.tolist(), batch.labels.tolist()
    first: dict[int, int] = {}
    last: dict[int, tuple[int, int]] = {}
    for number, position, label in zip(numbers, trained_positions(batch), labels, strict=True):
        first.setdefault(number, position)
        last[number] = position, label
    requests = []
    for number, path in enumerate(batch.paths):
        # A sample's last token is only a label in the batch.
        end, label = last[number]
        ids = batch.input_ids[torch.from_numpy(path[:end])].tolist()
        requests.append(TeacherRequest([*ids, label], first[number]))
    return requests


def cancel(jobs: list[list[Future]]) -> None:
    for of_batch in jobs:
        for job in of_batch:
            job.cancel()


def check_same_texts(url: str, tokenizer: PreTrainedTokenizerBase, own_path: str) -> None:
    """Raises ValueError if nobody answers at the URL, or if the teacher decodes the student's token
    ids to other text, as far as the server returns texts."""
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"))
    teacher = ServerTeacher(url, 0, ranks, max_concurrent=1, timeout_s=PING_TIMEOUT_S)
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    try:
        texts = teacher.ask(TeacherRequest(ids, 1), time.monotonic() + PING_TIMEOUT_S).texts
    except RunError as error:
        raise ValueError(f"{error}; start it, or correct --algo.teacher") from None
    finally:
        teacher.close()
    for token_id, text in zip(ids[1:], texts, strict=True):
        expected = str(tokenizer.decode([token_id]))
        # A token within a character has no separate text.
        if (
            text is not None
            and "\ufffd" not in text + expected
            and text.strip() != expected.strip()
        ):
            raise ValueError(
                f"--algo.teacher={url} has another tokenizer than {own_path}: token {token_id} is "
                f"{text!r} there instead of {expected!r}; take a model of the same family"
            )
