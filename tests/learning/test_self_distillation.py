"""Self-distillation: the teacher's prompt, its tokens, the gradient, and errors."""

import asyncio
import dataclasses
import re

import pytest
import torch
from kit import (
    learn,
    make_learner,
    metrics,
    run,
    sample,
    trajectories,
    words,
)
from oracle import logprobs
from transformers import AutoModelForCausalLM

from rl_core.config import parse_config
from rl_core.data.chat_loading import load_chat
from rl_core.data.samples import samples_from_turns
from rl_core.learning.teachers.self_distill import as_teacher_reads, taught_samples
from rl_core.run.plan.environments import load_envs
from rl_core.sampling.teacher_prompts import ask, prompt_ids
from rl_core.types import Completion, Task, Trajectory, Turn

PLAIN = "--algorithm opd --algo.normalize none --algo.teacher self --algo.teacher_update"
SIZES = "--max_tokens 6 --tasks_per_step 3 --group_size 3 --optim.lr 1e-2"
ENV = """
def load_tasks(split):
    rows = [{"prompt": text, "solution": text * 2} for text in ("ab", "cd", "ef")]
    return rows


async def reward_fn(completion):
    return sum(map(ord, completion)) / 1000


async def teacher_prompt(task, solution):
    return f"{task.messages[-1]['content']} is {solution}"
"""


def taught(ids: list[int], mask: list[int], before: list[int] | None, group: str = "a"):
    made = sample(ids, mask, 0.0, group)
    if before is None:
        return made
    return dataclasses.replace(made, teacher_ids=torch.tensor(before).numpy())


# Their lengths differ; the second has two turns, with a token between them.
SAMPLES = [
    taught([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 1, 1], [30, 31, 32, 33]),
    taught([5, 6, 20, 21, 22, 23], [0, 0, 1, 0, 1, 1], [40]),
]


def advantages(learner, samples) -> dict[int, list[float]]:
    """Length of a sample -> advantages of its trained tokens."""
    (minibatch,), _ = learner.shard(samples)
    learner.annotate([minibatch])
    by_length = {}
    for batch in minibatch.batches:
        for number in range(len(batch.paths)):
            of_sequence = batch.advantages[batch.sequences == number]
            by_length[len(of_sequence)] = of_sequence.tolist()
    return by_length


@pytest.mark.parametrize("update", ["start", "latest", "ema"])
@pytest.mark.parametrize("lora", ["", "--actors.policy.lora.rank 4"])
def test_the_teacher_has_the_weights_that_were_asked_for(update, lora, tiny_model, tmp_path):
    more = "--algo.teacher_decay 0.8" if update == "ema" else ""
    flags = "--optim.name sgd --optim.lr 3 --optim.betas 0,0", lora, PLAIN, update, more
    learner = make_learner(tiny_model, *flags)
    states = [{name: value.clone() for name, value in learner.named_weights()}]
    kept = [weight.detach().clone() for _, weight in learner.trained_parameters()]
    mean = [w.clone() for w in kept]
    for step in range(2):
        learn(learner, SAMPLES, first=step)
        now = [weight.detach().clone() for _, weight in learner.trained_parameters()]
        mean = [0.8 * m + 0.2 * w for m, w in zip(mean, now, strict=True)]
    states.append({name: value.clone() for name, value in learner.named_weights()})
    by_length = advantages(learner, SAMPLES)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    if update == "latest":
        model.load_state_dict(states[1], strict=False)
    elif update == "ema":
        with torch.no_grad():
            for (_, weight), value in zip(learner.trained_parameters(), mean, strict=True):
                weight.copy_(value)
        model.load_state_dict(dict(learner.named_weights()), strict=False)
    for s in SAMPLES:
        with torch.no_grad():
            expected = logprobs(model, as_teacher_reads(s)) + 4.6
        weight = torch.tensor(by_length[int(s.loss_mask.sum())])
        torch.testing.assert_close(weight, expected, atol=2e-4, rtol=1e-4)
    moved = max((a - b).abs().max() for a, b in zip(*(s.values() for s in states), strict=True))
    assert moved > 1e-3


# The teacher's prompt.


@pytest.fixture
def chat(tiny_model):
    return load_chat(str(tiny_model))


def played(chat, *texts: str) -> Trajectory:
    """A dialogue: a user's text and a reply in turn."""
    ids, turns, messages = [], [], []
    for number, text in enumerate(texts):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
        if number % 2:
            reply = [*chat.encode(text), chat.end_token_id]
            new = chat.prompt_ids(messages[:-1])[len(ids) :]
            done = Completion(token_ids=reply, logprobs=[-1.0] * len(reply), text=text)
            turns.append(Turn(new_ids=new, is_fresh=not ids, completion=done, name=f"t{number}"))
            ids += [*new, *reply]
    return Trajectory(
        task_id="x", env="x", group_id="g", messages=messages, turns=turns, reward=0.0
    )


def test_the_teachers_prompt_stands_before_the_first_reply(chat):
    t = played(chat, "ab", "cd", "ef", "gh")
    t.teacher_ids = prompt_ids(chat, t, [{"role": "user", "content": "ab? it is cd"}], None)
    [each] = taught_samples(t, [1.0, 1.0], set(), ["x"], True)
    read = as_teacher_reads(each)
    first = len(t.turns[0].new_ids)
    assert each.token_ids.tolist() == samples_from_turns(t.turns, 1.0)[0].token_ids.tolist()
    assert read.token_ids.tolist() == [*t.teacher_ids[0], *each.token_ids[first:].tolist()]
    assert read.token_ids[read.loss_mask].tolist() == each.token_ids[each.loss_mask].tolist()
    text = chat.tokenizer.decode(read.token_ids)
    assert text.startswith("<|user|>ab? it is cd<|end|>") and text.endswith("gh<|end|>")
    assert "ef" in text


def test_the_same_prompt_gives_the_same_tokens(chat):
    t = played(chat, "ab", "cd", "ef", "gh")
    assert prompt_ids(chat, t, t.messages[:1], None) == [t.turns[0].new_ids]


def test_a_stream_that_begins_anew_has_the_turns_before_it(chat):
    t = played(chat, "ab", "cd", "ef", "gh")
    t.turns[1] = dataclasses.replace(t.turns[1], is_fresh=True)
    shown = [{"role": "user", "content": "zz"}]
    first, second = prompt_ids(chat, t, shown, None)
    assert first == chat.prompt_ids(shown)
    assert second == chat.prompt_ids([*shown, *t.messages[1:3]])
    t.teacher_ids = [first, second]
    samples = taught_samples(t, [1.0, 1.0], set(), ["x"], True)
    assert [s.teacher_ids.tolist() for s in samples] == [first, second]


def test_a_branch_that_shares_a_turn_keeps_it_as_context(chat):
    t = played(chat, "ab", "cd", "ef", "gh")
    t.teacher_ids = [chat.prompt_ids([{"role": "user", "content": "zz"}])]
    [each] = taught_samples(t, [1.0, 1.0], {"t1"}, ["x"], True)
    shared = t.turns[0].completion.token_ids
    assert each.teacher_ids.tolist() == [*t.teacher_ids[0], *shared, *t.turns[1].new_ids]
    assert each.token_ids[each.loss_mask].tolist() == t.turns[1].completion.token_ids


def test_an_episode_without_a_teacher_is_left_out(chat):
    t = played(chat, "ab", "cd")
    assert taught_samples(t, [1.0], set(), ["x"], True) == []
    for envs, is_alone in ((["x"], False), (["other"], True)):
        [each] = taught_samples(t, [1.0], set(), envs, is_alone)
        assert each.teacher_ids is None


def asked(env_of, returned: str) -> list[dict]:
    env = env_of(
        f"""
        def reward_fn(completion): return 0.0
        def teacher_prompt(task, trajectory, trajectories, completion): return {returned}
        """
    )
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    task = Task(id="t/0", env="x", row={}, messages=messages[:1])
    t = Trajectory(task_id="t/0", messages=messages, reward=0.5)
    return asyncio.run(ask(env, task, t, [t]))


def test_the_hook_gives_a_text_messages_or_nothing(env_of):
    assert asked(env_of, "None") == []
    text = "f'{completion} {trajectory.reward} {len(trajectories)}'"
    assert asked(env_of, text) == [{"role": "user", "content": "a 0.5 1"}]
    shown = "[{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}]"
    assert [m["role"] for m in asked(env_of, shown)] == ["system", "user"]


@pytest.mark.parametrize(
    "returned, message",
    [
        ("7", "the value of teacher_prompt() is 7; it must be a text, a list of messages, or None"),
        ("''", "the value of teacher_prompt() is ''"),
        ("[]", "the value of teacher_prompt() is []"),
        ("float('nan')", "the value of teacher_prompt() is nan"),
        ("[{'role': 'user'}]", "message 1 is"),
        ("[{'role': 'assistant', 'content': 'x'}]", "ends with an assistant's message"),
        ("1 / 0", "teacher_prompt() failed for task t/0: x.py:3: ZeroDivisionError"),
    ],
)
def test_what_is_no_prompt_is_an_error_that_says_so(env_of, returned, message):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
        asked(env_of, returned)


# Runs


def flags_of(model, tmp_path, code: str = ENV, update: str = "ema") -> list[str]:
    (tmp_path / "ask.py").write_text(code)
    flags = words("--algorithm opd --algo.teacher self --algo.teacher_update", update, SIZES)
    return flags + words("--model", model, "--env_path", tmp_path / "ask.py")


def test_the_hook_sees_the_trajectories_of_its_own_actor(tmp_path, tiny_model):
    env = tmp_path / "two.py"
    env.write_text(
        """
turns = "bob -> alice"

def load_tasks(split):
    return [{"prompt": text} for text in ("ab", "cd")]

async def reward_fn(actor):
    return float(actor == "bob")

async def teacher_prompt(trajectories, actor):
    return f"{actor}: {[t.actor for t in trajectories]}"
"""
    )
    flags = words("--algorithm opd --algo.teacher self --tasks_per_step 2 --group_size 2")
    flags += words("--max_tokens 4 --num_steps 1 --env_path", env, "--actors.bob.model", tiny_model)
    out = run(tmp_path / "out", flags, "--actors.alice.model", tiny_model)
    rows = trajectories(out / "rollouts/step_000001.jsonl.zst")
    read = {row["teacher_messages"][0]["content"] for row in rows}
    # Where bob's turn was cut off, alice has none.
    assert "bob: ['bob', 'bob']" in read and len(read) > 1
    assert read <= {"bob: ['bob', 'bob']", "alice: ['alice', 'alice']", "alice: ['alice']"}


def test_a_hook_that_fails_is_a_failed_episode_and_others_learn(tmp_path, tiny_model):
    code = ENV.replace(
        "    return f",
        "    if solution == 'abab': raise KeyError('lost')\n"
        "    if solution == 'cdcd': return 'x' * 9000\n    return f",
    )
    flags = flags_of(tiny_model, tmp_path, code)
    out = run(tmp_path / "run", flags, "--num_steps 1 --rollout.max_failed_fraction 0.9")
    rows = trajectories(out / "rollouts/step_000001.jsonl.zst")
    reasons = {t["error"] for t in rows if t["status"] == "failed"}
    assert any("KeyError: 'lost'" in reason for reason in reasons)
    assert any(
        "above the model's max_position_embeddings=4096; shorten it" in reason for reason in reasons
    )
    assert sum(t["status"] == "failed" for t in rows) == 6
    assert metrics(out)[0]["learn/policy/teacher_kl_nats"] != 0


def test_a_hook_that_hangs_is_a_failed_episode(tmp_path, tiny_model):
    code = ENV.replace("    return f", "    import asyncio; await asyncio.sleep(100)\n    return f")
    flags = flags_of(tiny_model, tmp_path, code)
    more = "--num_steps 1 --rollout.hook_timeout_s 0.2 --rollout.max_failed_fraction 1"
    out = run(tmp_path / "run", flags, more, status=1)  # nothing was learned
    rows = trajectories(out / "rollouts/step_000001.jsonl.zst")
    assert {t["status"] for t in rows} == {"failed"}
    assert all("teacher_prompt() ran longer than 0.2 s" in t["error"] for t in rows)


def test_an_evaluation_and_a_run_without_self_do_not_call_the_hook(tmp_path, tiny_model):
    code = ENV.replace(
        "    return f", "    if 'ab' in solution: raise KeyError('asked')\n    return f"
    )
    code = code.replace("    return rows", "    return rows[1:] if split == 'train' else rows[:1]")
    flags = flags_of(tiny_model, tmp_path, code)
    out = run(tmp_path / "run", flags, "--num_steps 1 --tasks_per_step 2 --eval_every 1")
    assert not any("failed" in name for row in metrics(out) for name in row if row[name])
    code = ENV.replace("    return f", "    raise KeyError('asked')\n    return f")
    flags = flags_of(tiny_model, tmp_path, code)
    off = "--algorithm grpo --algo.teacher null --algo.teacher_update null"
    out = run(tmp_path / "grpo", flags, off, "--num_steps 1")
    assert not any("failed" in name for row in metrics(out) for name in row if row[name])


def test_a_file_without_the_hook_is_refused(tmp_path):
    (tmp_path / "none.py").write_text("def reward_fn(completion): return 0.0\n")
    flags = words("--model m --out x --algorithm opd --algo.teacher self --env_path")
    with pytest.raises(ValueError, match="self needs def teacher_prompt"):
        load_envs(parse_config([*flags, str(tmp_path / "none.py")]))


def test_a_misspelled_hook_or_argument_names_the_nearest(tmp_path, tiny_model, env_of):
    with pytest.raises(
        ValueError, match="'teacher_prompts' is not a hook; did you mean 'teacher_p"
    ):
        env_of("def reward_fn(completion): return 0.0\ndef teacher_prompts(task): return 'x'")
    flags = flags_of(tiny_model, tmp_path, ENV.replace("task, solution", "task, sulution"))
    from rl_core.train import main

    assert main([*flags, "--out", str(tmp_path / "run")]) == 1


def test_a_check_shows_what_the_teacher_reads(tmp_path, monkeypatch, capsys):
    from rl_core.tools.cli import main

    (tmp_path / "ask.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    assert main(["check", "ask.py"]) == 0
    shown = capsys.readouterr().out
    assert "== teacher, which reads the same reply" in shown and "ab is abab" in shown
    (tmp_path / "ask.py").write_text(ENV.replace("    return f", "    return 7\n    return f"))
    assert main(["check", "ask.py"]) == 1
    assert "the value of teacher_prompt() is 7" in capsys.readouterr().out
