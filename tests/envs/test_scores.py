"""A reward model scores as in training, in the process and served; an error of the server
is raised, never scored."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from aiohttp import web
from kit import ROOT, ForkedProcess, kill_session, metrics, trajectories, words
from safetensors.torch import load_file
from test_preference import flags_of, says, user
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_core.data.chat_loading import load_chat
from rl_core.data.packing import pack_samples
from rl_core.data.preference_pairs import scored_pair
from rl_core.learning.policies import make_policy
from rl_core.rewards.reward_model import RewardModel, ScoreServer, remote_scores
from rl_core.run.process.joining import init_ranks
from rl_core.train import main

DOCS = [ROOT / "docs/rewards.md", ROOT / "docs/preferences.md"]
TALKS = [
    [user("52341"), says("12345")],
    [
        user("a question that is longer than the others by far"),
        says("an answer"),
        user("more?"),
        says("no"),
    ],
    [user("9"), says("9")],
    [{"role": "system", "content": "Be brief."}, user("<|end|>"), says("ok")],
    [user("52341"), says("54321")],
]


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory):
    """hf/policy of a run that learnt to prefer digits in order."""
    folder, draw = tmp_path_factory.mktemp("rm"), random.Random(0)
    digits = ["".join(c) for c in itertools.combinations("0123456789", 5)]
    rows = [
        {"prompt": "".join(draw.sample(d, 5)), "chosen": d, "rejected": d[::-1]} for d in digits
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(flags_of("rm", tiny_model, folder, folder / "run", "--num_steps", 12)) == 0
    return folder / "run/hf/policy"


def serve(model, port, *flags) -> ForkedProcess:
    command = words("-m rl_core.rewards.reward_model --model", model, "--port", port, *flags)
    return ForkedProcess(*command)


@contextmanager
def serving(model, *flags):
    """(URL, process) of a server in a separate process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    process = serve(model, port, *flags)
    try:
        line = process.stdout.readline()
        assert line.startswith(f"scores of {model} at http://127.0.0.1:"), (
            line + process.stderr.read()
        )
        yield line.split()[-1], process
    finally:
        kill_session(process)


@pytest.fixture(scope="module")
def server(reward_model):
    with serving(reward_model, "--max_request_mib", 0.1) as (url, _):
        yield url


def ask(url, body, method="POST", path="/classify"):
    """(status, JSON, or text where it is none)."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
    response = connection.getresponse()
    text = response.read().decode()
    return response.status, json.loads(text) if text.startswith("{") else {"error": text}


@pytest.mark.parametrize("batch_tokens", [60, 16384])
def test_scores_are_the_learner_s_and_those_of_transformers(reward_model, batch_tokens):
    scores = RewardModel(str(reward_model), batch_tokens=batch_tokens).score(TALKS)
    chat = load_chat(str(reward_model))
    learner = make_policy(str(reward_model), torch.float32, init_ranks(60), is_scoring=True)
    tokenizer, model = (
        c.from_pretrained(reward_model) for c in (AutoTokenizer, AutoModelForSequenceClassification)
    )
    assert torch.tensor(scores).std() > 0.1
    for talk, score in zip(TALKS, scores, strict=True):
        sample, _ = scored_pair(chat, {"chosen": talk, "rejected": [*talk[:-1], says("another")]})
        with torch.no_grad():
            assert learner(pack_samples([sample]), 1.0)[0][-1].item() == pytest.approx(
                score, abs=1e-5
            )
            assert model(torch.tensor(sample.token_ids[None, :-1])).logits.item() == pytest.approx(
                score, abs=1e-5
            )
        if "<|end|>" not in str(talk):  # transformers would make it a special token.
            ids = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
            assert ids == sample.token_ids[:-1].tolist()


def test_a_conversation_may_end_in_the_padding_token(reward_model):
    model = RewardModel(str(reward_model))
    expected = model.score(TALKS)
    model.model.config.pad_token_id = model.token_ids(TALKS[0])[-1]
    assert model.score(TALKS) == expected


def test_threads_share_a_model(reward_model):
    model = RewardModel(str(reward_model))
    expected = [model.score([talk]) for talk in TALKS]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda i: model.score([TALKS[i % 5]]), range(40))) == expected * 8


@pytest.mark.parametrize(
    "messages, error",
    [
        ([], "must be a list"),
        ("hello", "must be a list"),
        ([{"content": "x"}], "message 1 is {.content.: .x.}"),
        ([user("x" * 5000)], r"of 50\d\d tokens; the model reads 1 to"),
    ],
)
def test_process_and_server_refuse_what_is_no_conversation(messages, error, reward_model, server):
    with pytest.raises(ValueError, match=error):
        RewardModel(str(reward_model)).score([messages])
    status, answer = ask(server, {"messages": [TALKS[0], messages]})
    assert status == 400 and re.search(error, answer["error"])


@pytest.mark.parametrize(
    "kind, error",
    [
        ("causal", "not a trained reward model, it lacks score.weight"),
        ("labels", "not a trained reward model, it has 2 labels"),
        ("pickle", "cannot score"),
        ("missing", "cannot score"),
    ],
)
def test_a_folder_without_a_reward_model_is_refused(
    kind, error, tiny_model, reward_model, tmp_path
):
    folder = tiny_model if kind == "causal" else tmp_path / "model"
    if kind == "labels":
        AutoModelForSequenceClassification.from_pretrained(
            tiny_model, num_labels=2
        ).save_pretrained(folder)
    elif kind == "pickle":
        shutil.copytree(reward_model, folder)
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=error):
        RewardModel(str(folder))


def test_served_scores_are_the_same_also_when_many_ask_at_once(reward_model, server):
    expected = RewardModel(str(reward_model)).score(TALKS)

    async def ask_all():
        return await asyncio.gather(
            *(remote_scores(server, [TALKS[i % 5], TALKS[0]]) for i in range(60))
        )

    for i, scores in enumerate(asyncio.run(ask_all())):
        assert scores == pytest.approx([expected[i % 5], expected[0]], abs=1e-5)
    status, answer = ask(server, {"messages": TALKS[2]})
    assert status == 200 and answer["data"] == [
        {"index": 0, "score": pytest.approx(expected[2], abs=1e-5)}
    ]
    assert ask(server, b"", "GET", "/health") == (200, {"status": "ok", "model": str(reward_model)})


@pytest.mark.parametrize(
    "body, status, error",
    [
        (b"{", 400, "the body is not JSON: Expecting property name"),
        (b"\xff\xfe{}", 400, "the body is not JSON: 'utf-8' codec"),
        (b"[" * 50_000, 400, "nested deeper than 128 levels"),
        (b"[]", 400, "list indices"),
        ({"message": []}, 400, "KeyError: 'messages'"),
        ({"messages": [[]]}, 400, "must be a list"),
        ({"messages": [7]}, 400, "must be a list"),
        (b"x" * 300_000, 413, "104857"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_does_not_harm_the_server(
    body, status, error, server
):
    got, answer = ask(server, body)
    assert got == status and re.search(error, answer["error"]), answer
    assert ask(server, {"messages": TALKS[0]})[0] == 200


@pytest.mark.parametrize("value", ["https://a.page", "null"])
def test_pages_in_a_browser_get_no_scores(value, server):
    # A page may send this type without a preflight request.
    headers = {"Origin": value, "Content-Type": "text/plain"}
    connection = http.client.HTTPConnection(server.removeprefix("http://"), timeout=30)
    for method, path in (("POST", "/classify"), ("GET", "/health")):
        connection.request(method, path, json.dumps({"messages": TALKS}), headers)
        response = connection.getresponse()
        assert (response.status, list(json.loads(response.read()))) == (403, ["error"])


def test_ctrl_c_ends_the_server_and_a_second_one_on_its_port_says_so(reward_model):
    with serving(reward_model) as (url, process):
        port = url.rpartition(":")[2]
        second = serve(reward_model, port)
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 1 and re.search(rf"^error: .*{port}.*in use", errors, re.M)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in errors


def test_requests_that_wait_share_a_forward_and_its_failure(reward_model):
    """The second to fourth arrive while the first is computed."""
    model, calls, started, may_go = (
        RewardModel(str(reward_model)),
        [],
        threading.Event(),
        threading.Event(),
    )

    def score_ids(conversations, images):
        calls.append(conversations)
        started.set()
        assert may_go.wait(30)
        if [13] in conversations:
            raise ValueError("unlucky")
        return [float(sum(ids)) for ids in conversations]

    model.score_ids = score_ids

    async def ask_all():
        server = ScoreServer(model)
        first = asyncio.create_task(server.scores([[1]]))
        await asyncio.to_thread(started.wait, 30)
        others = [
            asyncio.create_task(server.scores(asked)) for asked in ([[2], [3, 4]], [[13]], [[5]])
        ]
        await asyncio.sleep(0)
        may_go.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    first, *others = asyncio.run(ask_all())
    assert first == [1.0] and [str(error) for error in others] == ["unlucky"] * 3
    assert calls == [[[1]], [[2], [3, 4], [13], [5]]]


def test_a_late_server_is_waited_for_and_a_missing_one_fails(reward_model):
    async def ask_late():
        async def answer(request):
            return web.json_response({"data": [{"index": 0, "score": 1.5}]})

        silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionError, match="no answer"):
            await remote_scores(url, TALKS[:1], timeout_s=0.3)
        silent.close()
        await silent.wait_closed()
        with pytest.raises(
            ConnectionError, match=rf"no scores from {url} within 0.3 s .*; is the server up"
        ):
            await remote_scores(url, TALKS[:1], timeout_s=0.3)
        with pytest.raises(ValueError, match="must begin with http"):
            await remote_scores(f"127.0.0.1:{port}", TALKS)
        asked = asyncio.create_task(remote_scores(url, TALKS[:1]))
        await asyncio.sleep(0.3)
        assert not asked.done()
        app = web.Application()
        app.add_routes([web.post("/classify", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            return await asked
        finally:
            await runner.cleanup()

    assert asyncio.run(ask_late()) == [1.5]


def train(env_text, tiny_model, folder, *more):
    """The exit status of a GRPO run with this environment."""
    folder.mkdir(exist_ok=True)
    (folder / "env.py").write_text(env_text)
    (folder / "rows.jsonl").write_text('{"prompt": "52341"}\n{"prompt": "90817"}\n')
    flags = [
        "--model",
        tiny_model,
        "--env_path",
        folder / "env.py",
        "--data.train",
        folder / "rows.jsonl",
    ]
    flags += [
        "--max_tokens",
        8,
        "--max_prompt_tokens",
        20,
        "--tasks_per_step",
        2,
        "--optim.lr",
        "1e-3",
    ]
    return main([str(f) for f in [*flags, "--out", folder / "run", *more]])


def example(attribute):
    """A Python block of the docs."""
    text = "".join(page.read_text() for page in DOCS)
    return next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if attribute in b)


def test_both_examples_of_the_docs_reward_episodes_alike(
    tiny_model, reward_model, server, tmp_path
):
    in_process = example("RewardModel").replace("runs/rm/hf/policy", str(reward_model))
    served = example("remote_scores").replace("http://127.0.0.1:8001", server)
    rewards = []
    for name, text in {"in_process": in_process, "served": served}.items():
        assert train(text, tiny_model, tmp_path / name, "--num_steps", 3) == 0
        rows = metrics(tmp_path / name / "run")
        assert [row["rollout/policy/failed"] for row in rows] == [0, 0, 0]
        assert rows[0]["learn/policy/grad_norm"] > 0
        rewards.append([row["rollout/policy/reward_mean"] for row in rows])
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-4)


def test_a_server_that_dies_fails_the_episodes_with_the_cause(tiny_model, reward_model, tmp_path):
    """No episode is scored 0 for it, nothing is learnt from it, and nothing hangs."""
    with serving(reward_model) as (url, process):
        text = example("remote_scores").replace("http://127.0.0.1:8001", url)
        text = text.replace("[messages])", "[messages], timeout_s=1)")

        def kill_after_two_steps():
            file = tmp_path / "run/metrics.jsonl"
            while not file.exists() or file.read_text().count("\n") < 2:
                time.sleep(0.01)
            process.kill()

        killer = threading.Thread(target=kill_after_two_steps)
        killer.start()
        assert (
            train(
                text, tiny_model, tmp_path, "--num_steps", 1000, "--rollout.max_failed_fraction", 1
            )
            == 1
        )
        killer.join()
        assert train(text, tiny_model, tmp_path / "strict", "--num_steps", 2) != 0
    rows = metrics(tmp_path / "run")
    assert [row["rollout/policy/failed"] for row in rows[:2]] == [0, 0]
    assert len(rows) < 1000
    episodes = trajectories(max((tmp_path / "run/rollouts").glob("step_*")))
    assert len(episodes) == 16
    assert {
        (e["status"], e["reward"], f"no scores from {url}" in e["error"]) for e in episodes
    } == {("failed", None, True)}
