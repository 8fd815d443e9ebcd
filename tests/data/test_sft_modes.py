"""Modes of SFT: actions, observations and both; episodes that a run wrote; SFT before RL in one
run."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
import zstandard
from kit import SORT, gradient, load_rows, make_learner, trajectories
from test_chat import CHATML, chat_of, every_template, make_tokenizer, user, words
from transformers import AutoModelForCausalLM

from rl_core.data.chat import Chat
from rl_core.data.chat_loading import fingerprint, load_chat
from rl_core.data.samples import samples_from_turns
from rl_core.data.sft_samples import sft_samples, sft_turns
from rl_core.learning.learner import Learner
from rl_core.train import main
from rl_core.types import PER_TOKEN


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def spans(chat, sample):
    """[(weight, text)] of a sample's runs of tokens of one weight."""
    spans = []
    for token, weight, mask in zip(
        sample.token_ids, sample.advantages, sample.loss_mask, strict=True
    ):
        assert bool(weight) == bool(mask)
        if not spans or spans[-1][0] != weight:
            spans.append((weight, []))
        spans[-1][1].append(token)
    return [(weight, chat.tokenizer.decode(ids)) for weight, ids in spans]


def random_talk(rng, num_turns):
    talk = [user(words(rng))]
    for number in range(num_turns):
        talk += [assistant(f"said {number} {words(rng)}"), user(f"heard {number} {words(rng)}")]
    return talk if rng.random() < 0.5 else talk[:-1]


def answer_text(chat, messages, index):
    """The answer messages[place] as the library renders it alone: from the end token before it to
    the generation prompt."""

    def text(**kwargs):
        wrapped = [chat.template.in_form(m) for m in messages[: index + 1]]
        return chat.tokenizer.apply_chat_template(
            wrapped, chat_template=chat.chat_template, tokenize=False, **kwargs
        )

    full, bare = (chat.encode(text(add_generation_prompt=prompted)) for prompted in (True, False))
    end = next(
        (i for i, (a, b) in enumerate(zip(full, bare, strict=False)) if a != b),
        min(len(full), len(bare)),
    )
    answered = chat.tokenizer.decode(full[:end])
    return answered[
        answered.index(messages[index - 1]["content"]) + len(messages[index - 1]["content"]) :
    ]


@every_template
def test_observations_stand_between_a_turn_and_the_next_prompt(path):
    chat, rng = chat_of(path), random.Random(path.stem)
    if path.stem.startswith("deepseek"):  # Replies without thoughts are refused.
        return
    for num_turns in (1, 2, 3):
        talk = random_talk(rng, num_turns)
        texts = [
            span for s in sft_samples(chat, {"messages": talk}, 1.0, 0.5) for span in spans(chat, s)
        ]
        heard = [text for weight, text in texts if weight == 0.5]
        places = range(2, len(talk), 2)
        assert len(heard) == len(places)
        for text, index in zip(heard, places, strict=True):
            # An assistant's end token belongs to its turn, or where two end it, to both.
            expected = answer_text(chat, talk, index)
            assert text.strip() and expected.strip().endswith(text.strip()), (text, expected)
            missing = expected.strip()[: -len(text.strip())]
            assert talk[index]["content"] in text and "said" not in missing
            assert not missing.strip() or missing.strip() in chat.tokenizer.get_vocab(), (
                missing,
                text,
            )
        only = [
            span for s in sft_samples(chat, {"messages": talk}, 0.0, 0.5) for span in spans(chat, s)
        ]
        assert [text for weight, text in only if weight] == heard


CHATML_TALK = [
    {"role": "system", "content": "rules"},
    user("task"),
    assistant("look"),
    {"role": "tool", "content": "a door"},
    {"role": "tool", "content": "a key"},
    assistant("open"),
    user("done"),
]
LLAMA = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + "
    "m.content | trim + "
    "'<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>' }}"
    "{% endif %}"
)


@pytest.mark.parametrize(
    "template, header",
    [(CHATML, "<|im_start|>assistant\n"), (LLAMA, "<|start_header_id|>assistant<|end_header_id|>")],
)
def test_all_after_the_first_turn_is_action_or_observation(template, header):
    """Complement: encode the whole conversation at once; behind the first generation prompt each
    token is an action, an observation, or a generation prompt's."""
    chat = Chat(make_tokenizer(), template)
    ids = chat.tokenizer.apply_chat_template(CHATML_TALK, chat_template=template, return_dict=False)
    (both,) = sft_samples(chat, {"messages": CHATML_TALK}, 1.0, 0.5)
    (action,) = sft_samples(chat, {"messages": CHATML_TALK})
    assert both.token_ids.tolist() == ids
    prompt = chat.tokenizer.encode(header, add_special_tokens=False)
    starts = [i for i in range(len(ids)) if ids[i : i + len(prompt)] == prompt]
    first = starts[0] + len(prompt)
    for i in range(len(ids)):
        is_action = i < len(action.loss_mask) and action.loss_mask[i]
        is_header = any(start <= i < start + len(prompt) for start in starts)
        expected = 0.0 if i < first or is_header else 1.0 if is_action else 0.5
        assert both.advantages[i] == expected, (i, chat.tokenizer.decode(ids[i]))
    assert both.policy_versions.tolist() == [0 if m else -1 for m in both.loss_mask]


def test_what_is_not_to_be_trained_is_no_observation():
    chat, context = Chat(make_tokenizer(), CHATML), {"train": False}
    talk = [
        user("a"),
        assistant("b"),
        user("c") | context,
        assistant("d"),
        user("e"),
        assistant("f", **context),
        user("g"),
        assistant("h"),
    ]
    talk += [user("i")]
    (sample,) = sft_samples(chat, {"messages": talk}, 0.0, 1.0)
    assert [text for weight, text in spans(chat, sample) if weight] == [
        "\n<|im_start|>user\ni<|im_end|>\n"
    ]
    assert sft_samples(chat, {"prompt": talk[:5], "response": "x"}, 0.0, 1.0) == []


PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_without_special_tokens():
    chat = Chat(make_tokenizer(), PLAIN)
    (sample,) = sft_samples(
        chat,
        {"messages": [user("a"), assistant("b"), user("c:"), assistant("d"), user("e")]},
        0.0,
        1.0,
    )
    assert [text for weight, text in spans(chat, sample) if weight] == ["user: c:\n", "user: e\n"]


def talks(num=12, seed=0):
    rng = random.Random(seed)
    return [{"messages": [*random_talk(rng, rng.randint(1, 3))]} for _ in range(num)]


def samples_with(chat, rows, action_weight, observation_weight):
    return [s for row in rows for s in sft_samples(chat, row, action_weight, observation_weight)]


def test_weights_of_1_are_a_causal_language_model_loss(any_model):
    samples = samples_with(load_chat(str(any_model)), talks(), 1.0, 1.0)
    loss, gradients = gradient(
        any_model, samples, "--algorithm sft --learner.microbatch_tokens 600"
    )
    model, total = AutoModelForCausalLM.from_pretrained(any_model, attn_implementation="sdpa"), 0.0
    for s in samples:
        labels = torch.tensor(np.where(s.loss_mask, s.token_ids, -100))[None]
        total += (
            model(input_ids=torch.tensor(s.token_ids)[None], labels=labels).loss * s.loss_mask.sum()
        )
    expected = total / sum(s.loss_mask.sum() for s in samples)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_weights_are_linear_and_the_denominator_counts_trained_tokens(tiny_model):
    def loss_and_gradient(microbatch_tokens, *weights):
        samples, flags = (
            samples_with(chat, talks(), *weights),
            f"--learner.microbatch_tokens {microbatch_tokens}",
        )
        return *gradient(tiny_model, samples, "--algorithm sft", flags), sum(
            int(s.loss_mask.sum()) for s in samples
        )

    chat = load_chat(str(tiny_model))
    results = [loss_and_gradient(900, *weights) for weights in [(1, 0), (0, 1), (0.5, 2.0), (1, 1)]]
    (a, da, na), (o, do, no), (both, dboth, n), (plain, _, n1) = results
    assert n == n1 == na + no
    assert both * n == pytest.approx(0.5 * a * na + 2.0 * o * no, rel=1e-5)
    assert plain * n == pytest.approx(a * na + o * no, rel=1e-5)
    one, d_one, _ = loss_and_gradient(100_000, 0.5, 2.0)  # another split into microbatches
    assert one == pytest.approx(both, rel=1e-6)
    for name in da:
        torch.testing.assert_close(
            dboth[name] * n, 0.5 * da[name] * na + 2.0 * do[name] * no, atol=2e-3, rtol=1e-3
        )
        torch.testing.assert_close(d_one[name], dboth[name], atol=1e-6, rtol=1e-4)


def test_a_weight_of_actions_alone_is_behavioural_cloning_bit_for_bit(tiny_model):
    chat, learner = load_chat(str(tiny_model)), make_learner(tiny_model, "--algorithm sft")
    rows = talks()
    turns = [sft_turns(chat, row["messages"]) for row in rows]
    plain = [s for t in turns for s in samples_from_turns(t, 1.0)]
    for a, b in zip(samples_with(chat, rows, 1.0, 0.0), plain, strict=True):
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in PER_TOKEN)
    (minibatch,), _ = learner.shard(plain)
    for batch in minibatch.batches:
        logprobs, _ = learner.policy(batch, 1.0)
        assert torch.equal(learner.losses(batch, learner.forward(batch))[0], -logprobs)


SFT = (
    "--algorithm sft --max_prompt_tokens 200 --max_tokens 200 --max_turns 3 --optim.lr 1e-3 "
    "--num_steps 1"
)


MULTI_TURN = """
max_turns = 3
def load_tasks(split): return [{'messages': [{'role': 'user', 'content': 'x' * n}]} for n in range(1, 9)]
def interact(messages): return [{'role': 'user', 'content': f'{len(messages)} more'}]
def reward_fn(messages):
    length = len(messages[1]['content'])
    if length % 5 == 4: raise RuntimeError('a failure')
    return len(messages) + length / 100
"""


@pytest.fixture(scope="module")
def rollouts(tiny_model, tmp_path_factory):
    """The folder of a real GRPO run's rollouts: two steps of episodes over several turns, some of
    them failed."""
    out = tmp_path_factory.mktemp("sampled")
    (out / "env.py").write_text(MULTI_TURN)
    flags = (
        "--max_tokens 30 --max_prompt_tokens 20 --num_steps 2 --tasks_per_step 4 --group_size 4 "
        "--eval_every 2"
    )
    paths = ["--model", tiny_model, "--env_path", out / "env.py", "--out", out / "run"]
    assert main([*map(str, paths), *flags.split(), "--rollout.max_failed_fraction", "1"]) == 0
    return out / "run/rollouts"


def episodes_in(folder):
    return [t for file in sorted(folder.glob("step_*")) for t in trajectories(file)]


def test_sft_trains_on_exactly_the_sampled_tokens_of_good_episodes(
    rollouts, tiny_model, tmp_path, monkeypatch
):
    episodes = episodes_in(rollouts)
    rewards = sorted(t["reward"] for t in episodes if t["reward"] is not None)
    threshold = rewards[len(rewards) // 2]
    good = [t for t in episodes if t["status"] != "failed" and t["reward"] >= threshold]
    assert 0 < len(good) < len(rewards) < len(episodes) and max(len(t["turns"]) for t in good) > 1
    flags = [
        *SFT.split(),
        "--model",
        tiny_model,
        "--tasks_per_step",
        len(good),
        "--data.train",
        rollouts,
    ]
    flags += ["--data.min_reward", threshold, "--out", tmp_path / "run"]
    samples, shard = [], Learner.shard
    monkeypatch.setattr(
        Learner,
        "shard",
        lambda learner, shard_samples: (
            samples.extend(shard_samples) or shard(learner, shard_samples)
        ),
    )
    assert main([str(flag) for flag in flags]) == 0

    def sampled(sample):
        return [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]

    wanted = sorted(
        [t for turn in e["turns"] for t in turn["completion"]["token_ids"]] for e in good
    )
    assert sorted(map(sampled, samples)) == wanted
    seen = sorted(
        [*e["turns"][-1]["prompt_ids"], *e["turns"][-1]["completion"]["token_ids"]] for e in good
    )
    assert sorted(s.token_ids.tolist() for s in samples) == seen
    assert all(a == m for s in samples for a, m in zip(s.advantages, s.loss_mask, strict=True))


def test_the_worlds_part_of_sampled_episodes(rollouts, tiny_model):
    chat, rows = load_chat(str(tiny_model)), load_rows(str(rollouts))
    assert len(rows) == sum(t["status"] != "failed" for t in episodes_in(rollouts))
    long = [row for row in rows if len(row["turns"]) == 3]
    assert long
    for row in long:
        (sample,) = sft_samples(chat, row, 0.0, 1.0)
        heard = [text for weight, text in spans(chat, sample) if weight]
        assert heard == [f"<|user|>{n} more<|end|>" for n in (2, 4)]


def test_another_tokenizer_or_template_reads_the_messages_anew(rollouts, tiny_model):
    row = next(row for row in load_rows(str(rollouts)) if len(row["turns"]) == 3)
    other = Chat(make_tokenizer(), CHATML)
    assert fingerprint(other) != fingerprint(load_chat(str(tiny_model)))
    chat_of_model = load_chat(str(tiny_model))
    assert fingerprint(load_chat(str(tiny_model), CHATML)) != fingerprint(chat_of_model)
    (sample,) = sft_samples(other, row)
    actions = [text.removesuffix("<|im_end|>") for weight, text in spans(other, sample) if weight]
    assert actions == [m["content"] for m in row["messages"] if m["role"] == "assistant"]
    # The actor saw it, and did not say it.
    longer = {**row, "messages": [user("few"), assistant("shots"), *row["messages"]]}
    (sample,) = sft_samples(other, longer)
    assert [
        text.removesuffix("<|im_end|>") for weight, text in spans(other, sample) if weight
    ] == actions


def test_the_files_that_are_read(rollouts, tiny_model, tmp_path):
    """Training episodes of all ranks; evaluations only if they are named. Without fingerprints,
    which a file alone lacks, the messages are read anew."""
    names = sorted(p.name for p in rollouts.glob("eval_*"))
    counts = {file.name: len(load_rows(str(file))) for file in rollouts.glob("step_*")}
    assert (
        names
        and load_rows(str(rollouts / names[0]))
        and len(load_rows(str(rollouts))) == sum(counts.values())
    )
    for name in counts:
        for rank in range(2):
            copy = tmp_path / name.replace(".jsonl", f".rank_{rank:05d}.jsonl")
            copy.write_bytes((rollouts / name).read_bytes())
    assert len(load_rows(str(tmp_path))) == 2 * sum(counts.values())
    assert {row["tokenizer"] for row in load_rows(str(tmp_path))} == {""}
    assert {row["tokenizer"] for row in load_rows(str(rollouts))} == {
        fingerprint(load_chat(str(tiny_model)))
    }


def test_what_rollouts_cannot_be(rollouts, tiny_model, tmp_path, capsys):
    file = next(rollouts.glob("step_000001*"))
    cut, rows = tmp_path / "cut.jsonl.zst", tmp_path / "rows.jsonl"
    for content, error in (
        (file.read_bytes()[:-20], "zst: it is damaged or cut short: Truncated"),
        (b"no zstd at all", "zst: it is damaged"),
        (
            zstandard.compress(b'{"messages": []}\n'),
            "row 1 of .*zst: no episode of a run; it has messages",
        ),
        (b"", "zst: .*nobody: all failed"),
    ):
        cut.write_bytes(content)
        with pytest.raises(ValueError, match=error):
            load_rows(str(cut))
    with pytest.raises(
        ValueError, match=r"min_reward=1000000000.0; .* of policy with rewards up to \d"
    ):
        load_rows(str(rollouts), min_reward=1e9)
    rows.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(ValueError, match="no such file; did you mean 'step_00"):
        load_rows(str(rollouts / "step_0001.jsonl.zst"))
    flags = ["--model", str(tiny_model), *SORT, "--num_steps", "1", "--out", str(tmp_path / "run")]
    assert main([*flags, "--data.train", str(rollouts)]) == 1
    assert "which are for --algorithm sft" in capsys.readouterr().err
    rows.write_text('{"prompt": "x", "completion": "y"}\n')
    sft = f"--model {tiny_model} --out {tmp_path}/run --algorithm sft --data.train {rows}"
    assert main([*sft.split(), "--data.min_reward", "1"]) == 1
    assert "min_reward=1.0 is for a run's rollouts" in capsys.readouterr().err


def test_tools_of_a_row_may_be_json_text():
    chat = Chat(
        make_tokenizer(),
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHATML,
    )
    schema = {
        "type": "function",
        "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}},
    }
    row = {"messages": [user("1 and 2"), assistant("3")]}
    [plain] = sft_samples(chat, row)
    [listed] = sft_samples(chat, row | {"tools": [schema]})
    [texted] = sft_samples(chat, row | {"tools": json.dumps([schema])})
    assert list(texted.token_ids) == list(listed.token_ids) != list(plain.token_ids)
    for wrong in ("no JSON", json.dumps(schema), [1]):
        with pytest.raises(
            ValueError,
            match=r"^column 'tools' must be a list of JSON schemas, or such a list as JSON text",
        ):
            sft_samples(chat, row | {"tools": wrong})


def test_a_row_is_tokenized_once_however_often_it_is_drawn(tiny_model, tmp_path, monkeypatch):
    rows = [{"messages": [user(f"number {n}"), assistant("yes")]} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rendered, render = [], Chat.render
    monkeypatch.setattr(
        Chat, "render", lambda self, *a, **k: rendered.append(a) or render(self, *a, **k)
    )
    counts = []
    for steps in ("1", "4"):  # half of the rows, and each twice
        sizes = [
            "--tasks_per_step",
            "2",
            "--max_tokens",
            "20",
            "--max_prompt_tokens",
            "20",
            "--num_steps",
            steps,
        ]
        flags = [
            "--model",
            str(tiny_model),
            "--algorithm",
            "sft",
            "--data.train",
            str(tmp_path / "rows.jsonl"),
            *sizes,
        ]
        assert main([*flags, "--out", str(tmp_path / steps)]) == 0
        counts.append(len(rendered) - sum(counts))
    assert counts[0] == counts[1] > 0
