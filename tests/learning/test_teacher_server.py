"""A teacher behind a URL: gradients equal those of the same teacher's folder, and any answer of a
server without logprobs ends the run with a clear error."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from contextlib import contextmanager

import huggingface_hub
import pytest
import torch
from aiohttp import web
from kit import answer, gradient, of_ranks, run, run_afresh, sample, steps, words
from test_teacher import ASK
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.config import parse_config
from rl_core.learning.teachers.build_teacher import check_teachers
from rl_core.types import RunError

PLAIN = "--algorithm opd --algo.normalize none"
SAMPLES = [
    sample([5, 6, 7, 8, 9, 10, 11], [0, 0, 1, 1, 0, 1, 0], 0.0, "a"),
    sample([5, 6, 20, 21], [0, 0, 1, 1], 0.0, "a"),
    sample([30, 31, 32, 33, 34], [0, 1, 1, 0, 1], 0.0, "b"),
]


class ModelServer:
    """SGLang's /generate and vLLM's /v1/completions, as far as they give logprobs of a prompt, by a
    model of transformers. `changes`: what becomes of an answer, first come first served."""

    def __init__(self, path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.changes, self.num_asked, self.at_once, self.most_at_once = [], 0, 0, 0

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[L - 1, V] of what follows each token but the last."""
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    def item(self, logprob, token_id) -> list:
        return [logprob, token_id, self.tokenizer.decode([token_id])]

    def generate(self, asked: dict) -> dict:
        assert asked["return_logprob"] and asked["sampling_params"]["max_new_tokens"] == 1
        ids, start, k = asked["input_ids"], asked["logprob_start_len"], asked["top_logprobs_num"]
        rows = self.logprobs(ids)[start:]
        chosen, top = [self.item(None, ids[start])], [None]
        for row, token_id in zip(rows, ids[start + 1 :], strict=True):
            chosen.append(self.item(row[token_id].item(), token_id))
            best = row.topk(k)
            top.append(
                [self.item(*pair) for pair in zip(*map(torch.Tensor.tolist, best), strict=True)]
            )
        return {"meta_info": {"input_token_logprobs": chosen, "input_top_logprobs": top}}

    def completions(self, asked: dict) -> dict:
        assert asked["model"] == "judge" and asked["max_tokens"] == 1
        ids, k, rows_of_prompt = asked["prompt"], asked["prompt_logprobs"], [None]
        for row, token_id in zip(self.logprobs(ids), ids[1:], strict=True):
            named = {*row.topk(k).indices.tolist(), token_id}
            rows_of_prompt.append(
                {
                    str(n): {"logprob": row[n].item(), "decoded_token": self.tokenizer.decode([n])}
                    for n in named
                }
            )
        return {"choices": [{"prompt_logprobs": rows_of_prompt}]}

    async def answer(self, request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "judge"}]})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.num_asked += 1
        compute = self.generate if request.path == "/generate" else self.completions
        asked = await request.json()
        change = self.changes.pop(0) if self.changes else None
        await asyncio.sleep(0.05)
        self.at_once -= 1
        if isinstance(change, int):
            return web.Response(status=change, text="busy")
        text = json.dumps(compute(asked))
        return web.Response(text=change(text) if change else text, content_type="application/json")


@contextmanager
def serving(path):
    """(the server, its address) while it answers."""
    server, loop, ready, port = ModelServer(path), asyncio.new_event_loop(), threading.Event(), []

    runners = []

    async def start():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.append(runner.addresses[0][1])
        ready.set()

    def serve():
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(30)
    yield server, f"http://127.0.0.1:{port[0]}"
    asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


@pytest.fixture(scope="module")
def teacher(make_model):
    return make_model(seed=7, hidden=48)


@pytest.fixture
def served(teacher):
    with serving(teacher) as server_and_url:
        yield server_and_url


@pytest.mark.parametrize("path", ["", "/v1", "/v1#judge"])
def test_the_sampled_form_is_that_of_the_teachers_folder(tiny_model, teacher, served, path):
    server, url = served
    _, grads = gradient(tiny_model, SAMPLES, PLAIN, "--algo.teacher", url + path)
    _, wanted = gradient(tiny_model, SAMPLES, PLAIN, "--algo.teacher", teacher)
    for name, value in wanted.items():
        torch.testing.assert_close(grads[name], value, atol=1e-6, rtol=1e-4)
    assert server.num_asked == len(SAMPLES) and server.most_at_once > 1
    assert max(value.abs().max() for value in wanted.values()) > 1e-3


@pytest.mark.parametrize("form", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("path", ["", "/v1"])
def test_the_likeliest_tokens_and_the_rest_by_transformers(tiny_model, teacher, served, path, form):
    _, url = served
    flags = f"--algo.teacher_loss {form} --algo.teacher_top_k 6 --algo.teacher {url}{path}"
    _, grads = gradient(tiny_model, SAMPLES, PLAIN, flags)
    student = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    terms = []
    for s in SAMPLES:
        ids, mask = torch.tensor(s.token_ids)[None], torch.tensor(s.loss_mask[1:])
        with torch.no_grad():
            q = other(ids).logits[0, :-1][mask].softmax(-1)
        p = student(ids).logits[0, :-1][mask].softmax(-1)
        top = q.topk(6).indices
        p, q = (torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(1, True)], 1) for x in (p, q))
        terms.append((p * (p / q).log() if form == "reverse_kl" else q * (q / p).log()).sum(-1))
    torch.cat(terms).mean().backward()
    for name, weight in student.named_parameters():
        if name in grads:
            torch.testing.assert_close(grads[name], weight.grad, atol=5e-6, rtol=1e-3)


def test_a_busy_server_is_asked_again(tiny_model, served):
    server, url = served
    server.changes = [503, 429, None, 500]
    gradient(tiny_model, SAMPLES, PLAIN, "--algo.teacher", url)
    assert server.num_asked == len(SAMPLES) + 3


NONSENSE = {
    "a NaN": (lambda text: re.sub(r"\[-\d[\d.e-]*,", "[NaN,", text), "nan is not a logprob"),
    "above 0": (lambda text: text.replace("[-", "[1"), "is not a logprob"),
    "a null": (lambda text: re.sub(r"\[-\d[\d.e-]*,", "[null,", text), "cannot be read"),
    "other tokens": (lambda text: re.sub(r", \d+, ", ", 3, ", text), "belong to other tokens"),
    "no JSON": (lambda text: text[:-9], "cannot be read"),
    "nothing": (lambda text: "{}", "cannot be read"),
    "a refusal": (400, "gave 400: busy"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_what_is_no_logprob_ends_the_run(tiny_model, served, kind):
    server, url = served
    change, message = NONSENSE[kind]
    server.changes = [None, change]
    with pytest.raises(RunError, match=re.escape(message)) as caught:
        gradient(tiny_model, SAMPLES, PLAIN, "--algo.teacher", url)
    assert url in str(caught.value) and len(str(caught.value)) < 700


def test_a_server_that_does_not_answer_is_waited_for_until_the_deadline(tiny_model, served):
    server, url = served
    server.changes = [503] * 1000
    began = time.monotonic()
    with pytest.raises(RunError, match="nothing within 1 s; last: 503"):
        gradient(tiny_model, SAMPLES, PLAIN, "--timeout_s 2 --algo.teacher", url)
    assert time.monotonic() - began < 60


def compare(ranks, model: str, url: str, out: str) -> str:
    """The gradient of this rank; or why there is none."""
    mine = [s for number, s in enumerate(SAMPLES) if number % 2 == ranks.rank]
    flags = "--algo.teacher_loss jsd --algo.teacher_top_k 6 --algo.teacher"
    try:
        _, grads = gradient(model, mine, PLAIN, flags, url, ranks=ranks)
    except RunError as error:
        return str(error)
    torch.save(grads, f"{out}.{ranks.rank}")
    return ""


def test_ranks_ask_for_their_own_samples_and_fail_together(tiny_model, served, tmp_path):
    server, url = served
    flags = "--algo.teacher_loss jsd --algo.teacher_top_k 6 --algo.teacher"
    _, wanted = gradient(tiny_model, SAMPLES, PLAIN, flags, url)
    server.num_asked = 0
    assert of_ranks(2, __file__, "compare", tiny_model, url, tmp_path / "taken") == ["", ""]
    assert server.num_asked == len(SAMPLES)
    for rank in range(2):
        for name, value in torch.load(f"{tmp_path / 'taken'}.{rank}").items():
            torch.testing.assert_close(value, wanted[name], atol=2e-6, rtol=1e-4)
    server.changes = [400]
    first, second = of_ranks(2, __file__, "compare", tiny_model, url, tmp_path / "none")
    assert first == second and "gave 400" in first


def test_a_run_learns_from_a_server(tmp_path, tiny_model, served):
    (tmp_path / "ask.py").write_text(ASK)
    flags = (
        f"--algorithm opd --env_path {tmp_path / 'ask.py'} --max_tokens 6 --tasks_per_step 2 "
        f"--group_size 2 --num_steps 2 --model {tiny_model} --algo.teacher {served[1]}/v1"
    )
    kls = [row["learn/policy/teacher_kl_nats"] for row in steps(run(tmp_path / "run", flags))]
    assert len(kls) == 2 and min(kls) > 0


def test_a_missing_or_different_server_is_refused_at_the_start(tiny_model, served, monkeypatch):
    server, url = served

    def check(flag: str) -> None:
        flags = "--env_path e.py --out x --algorithm opd --algo.teacher", flag, "--model"
        check_teachers(parse_config(words(*flags, tiny_model)), "policy")

    check(url)
    check(f"{url}/v1")
    server.changes = [lambda text: text.replace('"m"', '"w"')]
    with pytest.raises(ValueError, match=r"another tokenizer than .*is 'w' there instead of 'm'"):
        check(url)
    monkeypatch.setattr("rl_core.learning.teachers.teacher_server.PING_TIMEOUT_S", 0.5)
    for gone in ("http://127.0.0.1:9", "http://127.0.0.1:9/v1"):
        with pytest.raises(ValueError, match="start it"):
            check(gone)


WITHOUT_HTTPX = """
from rl_core.config import parse_config
from rl_core.learning.teachers.build_teacher import check_teachers

for teacher in sys.argv[1:3]:
    check_teachers(parse_config([*sys.argv[3:], "--algo.teacher", teacher]), "policy")
    print("fits", teacher, flush=True)
"""


def test_only_a_teacher_behind_a_url_needs_httpx(tiny_model, teacher):
    if int(huggingface_hub.__version__.split(".")[0]) < 2:
        pytest.skip("huggingface_hub before 2 imports httpx")
    arguments = words(
        teacher, "http://127.0.0.1:1/v1", PLAIN, "--model", tiny_model, "--env_path e.py --out x"
    )
    output, errors = run_afresh(WITHOUT_HTTPX, *arguments, missing=["httpx"], check=False)
    assert output == f"fits {teacher}\n", errors
    assert "127.0.0.1:1/v1 needs httpx, which is not installed: pip install" in errors


if __name__ == "__main__":
    answer(globals())
