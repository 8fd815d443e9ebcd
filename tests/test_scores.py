"""A reward model scores as in training, in the process and served; what goes wrong with the server is told, never scored."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import zstandard
from test_preference import ROOT, flags_of, says, user
from test_train import metrics
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl_core.data.chat import load_chat
from rl_core.data.packing import pack_samples
from rl_core.data.samples import scored_pair
from rl_core.distributed import init_ranks
from rl_core.learning.model import make_policy
from rl_core.serving.score_server import Batcher, Job, ScoreServer
from rl_core.serving.scores import RewardModel, padded_batches, remote_scores
from rl_core.train import main

DOCS = ROOT / "docs/rewards.md"
TALKS = [
    [user("52341"), says("12345")],
    [user("a question that is longer than the others by far"), says("an answer"), user("more?"), says("no")],
    [user("9"), says("9")],
    [{"role": "system", "content": "Be brief."}, user("<|end|>"), says("ok")],
    [user("52341"), says("54321")],
]


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory):
    """hf/policy of a run that learnt to prefer digits in order."""
    folder, draw = tmp_path_factory.mktemp("rm"), random.Random(0)
    digits = ["".join(c) for c in itertools.combinations("0123456789", 5)]
    rows = [{"prompt": "".join(draw.sample(d, 5)), "chosen": d, "rejected": d[::-1]} for d in digits]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(flags_of("rm", tiny_model, folder, folder / "run", "--num_steps", 12)) == 0
    return folder / "run/hf/policy"


@contextmanager
def serving(model, *flags):
    """(URL, process) of a server in a process of its own."""
    command = [sys.executable, "-m", "rl_core.serving.scores", "--model", str(model), "--port", "0", *map(str, flags)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        line = process.stdout.readline()
        assert line.startswith(f"scores of {model} at http://127.0.0.1:"), line + process.stderr.read()
        yield line.split()[-1], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(reward_model):
    with serving(reward_model, "--max_request_mib", 0.1) as (url, _):
        yield url


def ask(url, body, method="POST", path="/classify", **headers):
    """(status, JSON)."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.mark.parametrize("batch_tokens", [1, 60, 16384])
def test_scores_are_the_learner_s_and_those_of_transformers(reward_model, batch_tokens):
    scores = RewardModel(str(reward_model), batch_tokens=batch_tokens).score(TALKS)
    chat, learner = load_chat(str(reward_model)), make_policy(
        str(reward_model), torch.float32, init_ranks(60), False, is_scoring=True
    )  # fmt: skip
    tokenizer, model = (c.from_pretrained(reward_model) for c in (AutoTokenizer, AutoModelForSequenceClassification))
    assert torch.tensor(scores).std() > 0.1
    for talk, score in zip(TALKS, scores, strict=True):
        sample, _ = scored_pair(chat, {"chosen": talk, "rejected": [*talk[:-1], says("another")]})
        with torch.no_grad():
            assert learner(pack_samples([sample]), 1.0)[0][-1].item() == pytest.approx(score, abs=1e-5)
            assert model(torch.tensor([sample.token_ids[:-1]])).logits.item() == pytest.approx(score, abs=1e-5)
        if "<|end|>" not in str(talk):  # which transformers would make a special token
            ids = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
            assert ids == sample.token_ids[:-1]


def test_a_conversation_may_end_in_the_padding_token(reward_model):
    model = RewardModel(str(reward_model))
    expected = model.score(TALKS)
    model.model.config.pad_token_id = model.token_ids(TALKS[0])[-1]
    assert model.score(TALKS) == expected


def test_padded_batches_hold_every_conversation_once_and_no_more_tokens_than_allowed():
    lengths = [random.Random(i).randint(1, 50) for i in range(40)]
    parts = padded_batches(lengths, 100)
    assert sorted(i for part in parts for i in part) == list(range(40))
    assert all(len(part) * max(lengths[i] for i in part) <= 100 for part in parts)
    assert len(parts) < 20 and len(padded_batches(lengths, 1)) == 40


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
        ([{"content": "x"}], "message 1 has no role"),
        ([{"role": "user", "content": ["x"]}], "cannot be rendered"),
        ([user("x" * 5000)], r"of 50\d\d tokens; the model reads 1 to"),
    ],
)
def test_what_is_no_conversation_is_refused_in_the_process_and_by_the_server(messages, error, reward_model, server):
    with pytest.raises(ValueError, match=error):
        RewardModel(str(reward_model)).score([messages])
    status, answer = ask(server, {"messages": [TALKS[0], messages]})
    assert status == 400 and answer["error"].startswith("messages[1]: ") and re.search(error, answer["error"])


def broken_model(kind, folder, tiny_model, reward_model):
    if kind == "causal":
        return tiny_model
    if kind == "pickle":
        shutil.copytree(reward_model, folder)
        (folder / "model.safetensors").unlink()
        model = AutoModelForSequenceClassification.from_pretrained(reward_model)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    elif kind == "labels":
        AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind, error",
    [
        ("causal", "no trained reward model, it lacks score.weight"),
        ("labels", "no trained reward model, it has 2 labels"),
        ("pickle", "cannot score"),
        ("missing", "cannot score"),
    ],
)
def test_a_folder_without_a_reward_model_is_refused(kind, error, tiny_model, reward_model, tmp_path):
    with pytest.raises(ValueError, match=error):
        RewardModel(str(broken_model(kind, tmp_path / "model", tiny_model, reward_model)))


def test_served_scores_are_the_same_also_when_many_ask_at_once(reward_model, server):
    expected = RewardModel(str(reward_model)).score(TALKS)

    async def ask_all():
        return await asyncio.gather(*(remote_scores(server, [TALKS[i % 5], TALKS[0]]) for i in range(60)))

    for i, scores in enumerate(asyncio.run(ask_all())):
        assert scores == pytest.approx([expected[i % 5], expected[0]], abs=1e-5)
    status, answer = ask(server, {"messages": TALKS[2]}, path="/v1/classify")
    assert status == 200 and answer["data"] == [{"index": 0, "score": pytest.approx(expected[2], abs=1e-5)}]
    assert answer["usage"]["prompt_tokens"] == len(RewardModel(str(reward_model)).token_ids(TALKS[2]))
    assert ask(server, b"", "GET", "/health") == (200, {"status": "ok", "model": str(reward_model)})


@pytest.mark.parametrize(
    "body, status, error",
    [
        (b"{", 400, "not JSON"),
        (b"\xff\xfe{}", 400, "not JSON"),
        (b"[" * 50_000, 400, "not JSON"),
        (b"[]", 400, "must be a JSON object"),
        ({}, 400, "'messages' must be"),
        ({"messages": []}, 400, "'messages' must be"),
        ({"message": []}, 400, "unknown key 'message'; did you mean 'messages'"),
        ({"messages": [[]]}, 400, r"messages\[0\]: must be a list"),
        ({"messages": [7]}, 400, r"messages\[0\]: must be a list"),
        ({"messages": TALKS[0], "tools": "x"}, 400, "'tools' must be a list"),
        (b"x" * 300_000, 413, "at most 104857 are read"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_does_not_harm_the_server(body, status, error, server):
    got, answer = ask(server, body)
    assert got == status and re.search(error, answer["error"]), answer
    assert ask(server, {"messages": TALKS[0]})[0] == 200


def test_other_places_and_requests_without_a_length_are_refused(server):
    assert ask(server, {}, path="/score")[0] == 404 and ask(server, b"", "GET", "/")[0] == 404
    assert ask(server, iter([b"{}"]).__next__(), **{"Content-Length": "-1"})[0] == 411


def test_ctrl_c_ends_the_server_and_a_second_one_on_its_port_says_so(reward_model):
    with serving(reward_model) as (url, process):
        port = url.rpartition(":")[2]
        command = [sys.executable, "-m", "rl_core.serving.scores", "--model", str(reward_model), "--port", port]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1 and f"error: cannot listen at 127.0.0.1:{port}" in second.stderr
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in errors and "stopped" in errors


def test_what_waits_at_the_same_time_is_one_batch_and_only_who_asked_for_it_gets_an_error():
    calls, may_go = [], threading.Event()

    def score_ids(conversations):
        calls.append(conversations)
        may_go.wait(30)
        if [13] in conversations:
            raise ValueError("unlucky")
        return [float(sum(ids)) for ids in conversations]

    batcher = Batcher(score_ids)
    jobs = [Job(conversations=c) for c in ([[1]], [[2], [3, 4]], [[13]], [[5]])]
    for job in jobs:
        batcher.jobs.put(job)
        while not calls:
            time.sleep(0.01)
    may_go.set()
    assert [jobs[i].scores.result(30) for i in (0, 1, 3)] == [[1.0], [2.0, 7.0], [5.0]]
    with pytest.raises(ValueError, match="unlucky"):
        jobs[2].scores.result(30)
    assert calls == [[[1]], [[2], [3, 4], [13], [5]], [[2], [3, 4]], [[13]], [[5]]]


def test_a_server_that_comes_late_is_waited_for_and_one_that_never_comes_is_an_error(reward_model):
    model = RewardModel(str(reward_model))
    server = ScoreServer(model.token_ids, model.score_ids, "rm", ("127.0.0.1", 0), 1 << 20)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    server.server_close()
    with pytest.raises(
        ConnectionError, match=rf"no scores from {url} within 0.3 s \(ConnectionRefusedError: .*\); is the server up"
    ):
        asyncio.run(remote_scores(url, TALKS, timeout_s=0.3))

    async def ask_early():
        asked = asyncio.create_task(remote_scores(url, TALKS))
        await asyncio.sleep(0.3)
        assert not asked.done()
        late = ScoreServer(model.token_ids, model.score_ids, "rm", server.server_address, 1 << 20)
        threading.Thread(target=late.serve_forever, daemon=True).start()
        scores = await asked
        late.shutdown()
        late.server_close()
        return scores

    assert asyncio.run(ask_early()) == model.score(TALKS)


def test_what_the_server_refuses_and_a_silent_server_are_errors(server):
    with pytest.raises(ValueError, match=r"400: messages\[0\]: message 1 has no role|message 1 has no role"):
        asyncio.run(remote_scores(server, [[{"content": "x"}]]))
    with pytest.raises(ValueError, match="must begin with http"):
        asyncio.run(remote_scores("127.0.0.1:8001", TALKS))

    async def ask_silent():
        silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectionError, match="no answer"):
            await remote_scores(url, TALKS, timeout_s=0.3)

    asyncio.run(ask_silent())


def train(env_text, tiny_model, folder, *more):
    """The exit status of a GRPO run with this environment."""
    folder.mkdir(exist_ok=True)
    (folder / "env.py").write_text(env_text)
    (folder / "rows.jsonl").write_text('{"prompt": "52341"}\n{"prompt": "90817"}\n')
    flags = ["--model", tiny_model, "--env_path", folder / "env.py", "--data.train", folder / "rows.jsonl"]
    flags += ["--max_tokens", 8, "--max_prompt_tokens", 20, "--tasks_per_step", 2, "--optim.lr", "1e-3"]
    return main([str(f) for f in [*flags, "--out", folder / "run", *more]])


def example(what):
    """A Python block of the docs."""
    return next(b for b in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if what in b)


def test_both_examples_of_the_docs_reward_episodes_alike(tiny_model, reward_model, server, tmp_path):
    in_process = example("RewardModel").replace("runs/rm/hf/policy", str(reward_model))
    served = example("remote_scores").replace("http://127.0.0.1:8001", server)
    found = []
    for name, text in {"in_process": in_process, "served": served}.items():
        assert train(text, tiny_model, tmp_path / name, "--num_steps", 3) == 0
        rows = metrics(tmp_path / name / "run")
        assert [row["rollout/policy/failed"] for row in rows] == [0, 0, 0]
        assert rows[0]["learn/policy/grad_norm"] > 0
        found.append([row["rollout/policy/reward_mean"] for row in rows])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_server_that_dies_fails_the_episodes_with_the_cause(tiny_model, reward_model, tmp_path):
    """No episode is scored 0 for it, nothing is learnt from it, and nothing hangs."""
    with serving(reward_model) as (url, process):
        text = (
            example("remote_scores")
            .replace("http://127.0.0.1:8001", url)
            .replace("[messages])", "[messages], timeout_s=1)")
        )

        def kill_after_two_steps():
            file = tmp_path / "run/metrics.jsonl"
            while not file.exists() or file.read_text().count("\n") < 2:
                time.sleep(0.01)
            process.kill()

        killer = threading.Thread(target=kill_after_two_steps)
        killer.start()
        assert train(text, tiny_model, tmp_path, "--num_steps", 8, "--rollout.max_failed_fraction", 1) == 0
        killer.join()
        assert train(text, tiny_model, tmp_path / "strict", "--num_steps", 2) != 0
    rows = metrics(tmp_path / "run")
    assert [row["rollout/policy/failed"] for row in rows[:2]] == [0, 0]
    assert rows[-1]["rollout/policy/failed"] == 16 and rows[-1]["rollout/policy/reward_mean"] is None
    assert rows[-1]["learn/policy/skipped_updates"] == 1
    written = zstandard.decompress((tmp_path / "run/rollouts/step_000008.jsonl.zst").read_bytes())
    episodes = [json.loads(line) for line in written.decode().splitlines()]
    assert len(episodes) == 16
    assert all(
        e["status"] == "failed" and e["reward"] is None and f"no scores from {url}" in e["error"] for e in episodes
    )
