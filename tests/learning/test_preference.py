"""Preference pairs: rows, losses, learning, and a reward model that scores."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil

import kit
import pytest
import torch
from kit import ROOT, assert_same, metrics, words
from test_chat import CHATML, make_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl_core.config import PreferenceConfig
from rl_core.data.chat import Chat
from rl_core.data.chat_loading import load_chat
from rl_core.data.packing import pack_samples
from rl_core.data.preference_pairs import (
    PAIR,
    labelled_reply,
    mismatched,
    pair_rows,
    reply_pair,
    scored_pair,
)
from rl_core.data.task_rows import make_task, read_row
from rl_core.data.tasks.sft_dataset import SFTDataset
from rl_core.learning.learner import Learner
from rl_core.learning.policies import make_policy
from rl_core.learning.preference import (
    dpo_losses,
    orpo_losses,
    rm_losses,
    simpo_losses,
)
from rl_core.run.process.joining import init_ranks
from rl_core.train import main
from rl_core.types import TrainingSample


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def trained(sample: TrainingSample) -> list[int]:
    return [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]


FORMS = [
    {"prompt": "hello", "chosen": "the fox", "rejected": "42"},
    {"prompt": [user("hello")], "chosen": [says("the fox")], "rejected": [says("42")]},
    {"messages": [user("hello")], "chosen": "the fox", "rejected": [says("42")]},
    {
        "chosen": [user("hello"), says("the fox")],
        "rejected": [user("hello"), says("42")],
        "prompt": "not used",
    },
    {"instruction": "hello", "chosen": "the fox", "rejected": "42"},
    {
        "conversations": [{"from": "human", "value": "hello"}],
        "chosen": {"from": "gpt", "value": "the fox"},
        "rejected": {"from": "gpt", "value": "42"},
    },
    # hh-rlhf, its copies with a prompt, HelpSteer 2 and 3, orca_dpo_pairs.
    {
        "chosen": "\n\nHuman: hello\n\nAssistant: the fox",
        "rejected": "\n\nHuman: hello\n\nAssistant: 42",
    },
    {"prompt": "\n\nHuman: hello\n\nAssistant:", "chosen": " the fox", "rejected": " 42"},
    {
        "prompt": "hello",
        "response_1": "42",
        "response_2": "the fox",
        "preference_strength": 2,
        "split": "train",
    },
    {
        "domain": "general",
        "context": [user("hello")],
        "response1": "the fox",
        "response2": "42",
        "overall_preference": -1,
    },
    {"system": "", "question": "hello", "chosen": "the fox", "rejected": "42"},
]


@pytest.mark.parametrize("row", FORMS)
def test_every_form_of_a_pair_trains_the_two_replies_behind_one_prompt(row):
    chat = Chat(make_tokenizer(), CHATML)
    chosen, rejected = reply_pair(chat, read_row(row))
    prompt = chat.prompt_ids([user("hello")])
    end = chat.encode("<|im_end|>")
    assert chosen.token_ids.tolist() == prompt + trained(
        chosen
    ) and rejected.token_ids.tolist() == prompt + trained(rejected)
    assert trained(chosen) == chat.encode("the fox", continues=True) + end
    assert trained(rejected) == chat.encode("42", continues=True) + end


@pytest.mark.parametrize("row", FORMS)
def test_a_scored_pair_is_the_template_s_text_and_one_token_for_the_score(row):
    chat = Chat(make_tokenizer(), CHATML)
    chosen, rejected = scored_pair(chat, read_row(row))
    for sample, text in ((chosen, "the fox"), (rejected, "42")):
        rendered = chat.tokenizer.apply_chat_template([user("hello"), says(text)], tokenize=False)
        assert sample.token_ids[:-1].tolist() == chat.tokenizer.encode(
            rendered, add_special_tokens=False
        )
        assert sample.loss_mask[-1] == 1
    shared = chosen.loss_mask.argmax()
    assert (
        rejected.loss_mask.argmax() == shared
        and (chosen.token_ids[:shared] == rejected.token_ids[:shared]).all()
    )
    assert chosen.token_ids[shared] != rejected.token_ids[shared]


def test_earlier_turns_of_a_conversation_are_context_only():
    chat = Chat(make_tokenizer(), CHATML)
    talk = [user("hello"), says("world"), user("think")]
    chosen, rejected = reply_pair(
        chat, {"chosen": [*talk, says("yes")], "rejected": [*talk, says("no")]}
    )
    assert chat.decode(trained(chosen)) == "yes" and chat.decode(trained(rejected)) == "no"
    prompt = chat.prompt_ids(talk)
    for side in (chosen, rejected):
        assert side.token_ids[: len(prompt)].tolist() == prompt


LABELLED = [
    {"prompt": "hello", "completion": "the fox", "label": True},
    {"prompt": [user("hello")], "completion": [says("the fox")], "kto_tag": 1},
    {"messages": [user("hello"), says("the fox")], "label": True},
    {"conversations": [user("x"), says("y"), user("hello"), says("the fox")], "label": True},
]


@pytest.mark.parametrize("row", LABELLED)
def test_every_form_of_a_labelled_row_trains_its_last_reply(row):
    chat = Chat(make_tokenizer(), CHATML)
    bad = {name: 0 if value in (True, 1) else value for name, value in row.items()}
    for labelled, sign in ((row, 1.0), (bad, -1.0)):
        [sample] = labelled_reply(chat, read_row(labelled))
        assert chat.decode(trained(sample)) == "the fox"
        assert set(sample.advantages[sample.loss_mask]) == {sign}
    [other] = labelled_reply(chat, {"prompt": "52341", "completion": "a" * 9, "label": False})
    mixed = mismatched(sample, other, limit=len(sample.token_ids) + 2)
    prompt = sample.token_ids[: sample.loss_mask.argmax()].tolist()
    assert mixed.token_ids.tolist() == (prompt + trained(other))[: len(sample.token_ids) + 2]
    assert not mixed.advantages.any() and trained(mixed) == mixed.token_ids[len(prompt) :].tolist()


def test_a_margin_is_carried_by_the_chosen_side():
    chat = Chat(make_tokenizer(), CHATML)
    for pair in (reply_pair, scored_pair):
        chosen, rejected = pair(chat, FORMS[0] | {"margin": 2})
        assert [a for a in chosen.advantages if a] == [2.0] * sum(chosen.loss_mask)
        assert not any(rejected.advantages)


@pytest.mark.parametrize(
    "row, error",
    [
        (
            {"prompt": "x", "choosen": "a", "rejected": "b"},
            "needs a column 'chosen'; did you mean 'choosen'",
        ),
        (
            {"promt": "x", "chosen": "a", "rejected": "b"},
            "needs one of the columns messages, prompt, .*; has promt, chosen",
        ),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "equal replies"),
        ({"prompt": "x", "chosen": "a", "rejected": " a "}, "equal replies"),
        (
            {
                "chosen": [user("x"), says("a")],
                "rejected": [user("x"), says("a")],
                "chosen_images": None,
            },
            "equal replies",
        ),
        ({"prompt": "x", "chosen": "a", "rejected": " "}, "an empty 'rejected'"),
        (
            {"chosen": [user("x"), says("a")], "rejected": [user("x")]},
            "column .rejected. must be a reply",
        ),
        (
            {"chosen": [user("x"), says("a")], "rejected": [user("y"), says("b")]},
            "begins as the other one does",
        ),
        (
            {
                "chosen": [says("a")],
                "rejected": [user("y"), says("b")],
                "continue_final_message": True,
            },
            "'continue_final_message' is True: it must be true, behind a prompt",
        ),
        ({"chosen": [user("x"), says("a")], "rejected": "b"}, "begins as the other one does"),
        (
            {"prompt": "x", "chosen": [{"content": "a"}], "rejected": "b"},
            "column 'chosen': must be a list",
        ),
        ({"prompt": "x", "chosen": [], "rejected": "b"}, "an empty 'chosen'"),
        (
            {"prompt": "x", "chosen": "a", "rejected": "b", "margin": "big"},
            "'margin' holds 'big': it must be a number",
        ),
    ],
)
def test_a_pair_that_is_none_is_refused(row, error, tiny_model):
    # This template trims, so that replies may differ in spaces alone.
    chat = Chat(make_tokenizer(), CHATML.replace("m.content", "m.content | trim"))
    for pair in (reply_pair, scored_pair):
        with pytest.raises(ValueError, match=error):
            pair(chat, row)


def test_ties_and_empty_replies_are_left_out_and_counted(tiny_model, tmp_path, capsys):
    pair = {"prompt": "2?", "response_1": "two", "response_2": "deux", "preference_strength": 1}
    more = [
        pair | {"preference_strength": 0},
        pair | {"response_1": " "},
        pair | {"response_2": ""},
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in [pair, *more]))
    flags = f"--algorithm dpo --model {tiny_model} --data.train {rows} --num_steps 1"
    assert main(f"{flags} --tasks_per_step 1 --out {tmp_path}/run".split()) == 0
    counted = "(3 of 4 were left out: a tie 1, an empty 'rejected' 1, an empty 'chosen' 1)"
    printed = capsys.readouterr().out
    assert f"dpo: 1 pair {counted}" in printed and "1 step of 1 pair\n" in printed
    assert "learn " in printed and "generate" not in printed
    [row] = metrics(tmp_path / "run")
    assert row["time/rows_s"] > 0 and "time/generate_s" not in row


def test_pairs_without_any_preference_are_refused(tiny_model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2?", "chosen": "two", "rejected": ""}\n')
    flags = f"--algorithm rm --model {tiny_model} --data.train {rows} --num_steps 1"
    assert main(f"{flags} --out {tmp_path}/run".split()) == 1
    assert "has no pair with a preference: all have an empty 'rejected'" in capsys.readouterr().err


def test_rated_replies_without_a_partner_are_refused(tmp_path):
    rows = [{"prompt": prompt, "response": "b", "helpfulness": 1} for prompt in "aab"]
    with pytest.raises(ValueError, match=r"f: two consecutive rows .* and there are 3 rows"):
        pair_rows(rows, [("f", 3)])
    pairs, files = pair_rows(rows[1:], [("f", 2)])
    assert files == [("f, two rows a pair", 1)]
    with pytest.raises(ValueError, match="rows 1 and 2 of f have different prompts"):
        list(pairs)
    pairs, _ = pair_rows([rows[0] | {"helpfulness": "1"}] * 2, [("f", 2)])
    with pytest.raises(ValueError, match="rows 1 and 2 of f: helpfulness must be a number"):
        list(pairs)


def test_a_template_that_rewrites_a_long_reply_is_refused():
    forgetful = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ 'old ' if loop.revindex > 2 else '' }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = Chat(make_tokenizer(), forgetful)
    reply = [says("a"), user("b"), says("c")]
    with pytest.raises(ValueError, match="rewrites earlier turns of column 'chosen'"):
        reply_pair(chat, {"prompt": "x", "chosen": reply, "rejected": "d"})


def test_a_conversation_that_ends_in_the_padding_token_is_refused(tiny_model):
    chat = load_chat(str(tiny_model))
    scored_pair(chat, FORMS[0])
    chat.tokenizer.pad_token = chat.tokenizer.eos_token
    with pytest.raises(ValueError, match="ends in the padding token '<|end|>'".replace("|", r"\|")):
        scored_pair(chat, FORMS[0])


def test_label_smoothing_takes_a_share_of_the_exchanged_pair():
    ratios = torch.randn(9, generator=torch.Generator().manual_seed(0))
    replies = torch.tensor([3, 0, 0, 2, 1, 5, 4, 2, 3])
    plain, smooth = PreferenceConfig(), PreferenceConfig(label_smoothing=0.2)
    kept, exchanged = (dpo_losses(ratios, of, 3, plain)[0] for of in (replies, replies ^ 1))
    losses, _ = dpo_losses(ratios, replies, 3, smooth)
    torch.testing.assert_close(losses, 0.8 * kept + 0.2 * exchanged)


def test_ipo_squares_the_distance_of_summed_ratios_to_a_margin():
    """(h - 1 / (2 beta))^2 (arXiv:2310.12036, eq. 17). TRL's `ipo` is the mean over tokens."""
    ratios, replies = torch.tensor([0.25, 0.5, -1.0]), torch.tensor([0, 0, 1])
    losses, _ = dpo_losses(ratios, replies, 1, PreferenceConfig(loss="ipo", beta=0.5))
    assert losses.tolist() == [(0.75 + 1.0 - 1.0) ** 2]


OF_REPLIES = dpo_losses, simpo_losses, orpo_losses


def test_odds_of_replies_that_are_certain_are_finite():
    logprobs = torch.zeros(2, requires_grad=True)
    losses, _ = orpo_losses(logprobs, torch.arange(2), 1, PreferenceConfig(beta=0.3))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([0.3 * math.log(2)])
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def test_a_batch_without_pairs_has_a_loss_of_nothing():
    nothing, no_replies = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for losses, rewards in (
        *(of(nothing, no_replies, 0, PreferenceConfig()) for of in OF_REPLIES),
        rm_losses(nothing, nothing, no_replies, 0),
    ):
        assert losses.shape == (0,) and rewards.shape == (0, 2)


ROWS = [
    {"prompt": "52341", "chosen": "12345", "rejected": "5234", "margin": 0.5},
    {"prompt": "9", "chosen": "9", "rejected": "a much longer reply", "margin": 0.0},
    {
        "prompt": "a prompt that is longer than most",
        "chosen": "yes, and no",
        "rejected": "no",
        "margin": 1.0,
    },
    {"prompt": "52341", "chosen": "123", "rejected": "321", "margin": 0.0},
    {"prompt": "x", "chosen": "ab", "rejected": "ac", "margin": 2.0},
]


def make_learner(model, *flags, algorithm="dpo") -> Learner:
    """Its policy is a little away from the reference, which is the model; a reward model's head is
    not 0."""
    learner = kit.make_learner(model, "--algorithm", algorithm, *flags)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return learner


def row_samples(config, model, rows):
    tasks = [make_task(row, i, "data", "train", is_pair=True) for i, row in enumerate(rows)]
    dataset = SFTDataset(config, load_chat(str(model)))
    return dataset.samples_at(tasks.__getitem__, range(len(rows)), init_ranks(60))


def gradients(learner, samples) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient that update() would use, and the loss."""
    ((minibatch,), _), total = learner.shard(samples), 0.0
    learner.annotate([minibatch])
    for batch in minibatch.batches:
        loss = learner.losses(batch, learner.forward(batch))[0].sum() / minibatch.denominator
        loss.backward()
        total += loss.item()
    grads = {n: p.grad.clone() for n, p in learner.policy.hf.named_parameters()}
    learner.policy.zero_grad()
    return grads, total


TRL_NAMES = {"chosen_reward_mean": "chosen", "rejected_reward_mean": "rejected"}
TRL_NAMES |= {"margin_mean": "margins", "accuracy": "accuracies"}
SIMPO = {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0}


def trl_gradients(trainer) -> tuple[dict[str, torch.Tensor], float]:
    (batch,) = trainer.get_train_dataloader()
    if type(trainer).__name__ == "ORPOTrainer":
        # TRL's own loss has the prompt's tokens in its SFT term; the paper's has the reply's alone.
        chosen, rejected, *_ = trainer.concatenated_forward(trainer.model, batch)
        loss = (-chosen - trainer.odds_ratio_loss(chosen, rejected)[0]).mean()
    else:
        loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return {n: p.grad for n, p in trainer.model.named_parameters()}, loss.item()


@pytest.mark.parametrize(
    "algorithm, flags, options",
    [
        ("dpo", "--preference.beta 0.3", {"beta": 0.3, "loss_type": "sigmoid"}),
        ("dpo", "--preference.loss ipo_norm", {"loss_type": "ipo"}),
        (
            "dpo",
            "--preference.loss hinge --preference.beta 3",
            {"beta": 3, "loss_type": "hinge"},
        ),
        ("dpo", "--preference.loss sigmoid_norm", {"loss_type": "sigmoid_norm"}),
        (
            "simpo",
            "--preference.simpo_gamma 0.7",
            SIMPO | {"simpo_gamma": 0.7},
        ),
        ("orpo", "", {"beta": 0.1}),
        (
            "kto",
            "--preference.beta 0.3 --preference.desirable_weight 0.7 --preference.undesirable_weight 1.3",
            {"beta": 0.3, "desirable_weight": 0.7, "undesirable_weight": 1.3},
        ),
        ("kto reversed", "", {}),  # The mean of the mismatched log-ratios is below 0.
        ("rm with margins", "", {}),
    ],
)
def test_loss_and_gradient_are_those_of_trl(algorithm, flags, options, tiny_model, tmp_path):
    import trl
    import trl.experimental.cpo
    import trl.experimental.orpo
    from datasets import Dataset

    algorithm, _, variant = algorithm.partition(" ")
    package, name = {
        "dpo": (trl, "DPO"),
        "kto": (trl, "KTO"),
        "simpo": (trl.experimental.cpo, "CPO"),
        "orpo": (trl.experimental.orpo, "ORPO"),
        "rm": (trl, "Reward"),
    }[algorithm]
    family = AutoModelForSequenceClassification if algorithm == "rm" else AutoModelForCausalLM
    rows = [{k: v for k, v in row.items() if variant or k != "margin"} for row in ROWS]
    rows = rows[::-1] if variant == "reversed" else rows
    theirs = [
        {k: [says(v)] if k in PAIR else v for k, v in row.items()}
        | {"prompt": [user(row["prompt"])]}
        for row in rows
    ]
    if algorithm == "kto":
        theirs = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in theirs]
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
        for number, row in enumerate([*theirs, *rows]):
            row["label"] = number % len(ROWS) % 2 == 0
    learner, model = (
        make_learner(tiny_model, flags, algorithm=algorithm),
        family.from_pretrained(tiny_model, num_labels=1),
    )
    model.load_state_dict(learner.policy.hf.state_dict())
    options |= {
        "per_device_train_batch_size": len(ROWS),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
    }
    trainer = getattr(package, name + "Trainer")(
        model,
        args=getattr(package, name + "Config")(
            str(tmp_path), gradient_checkpointing=False, disable_tqdm=True, **options
        ),
        train_dataset=Dataset.from_list(theirs),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
        **(
            {"ref_model": AutoModelForCausalLM.from_pretrained(tiny_model)}
            if algorithm in ("dpo", "kto")
            else {}
        ),
    )
    samples = row_samples(learner.config, tiny_model, rows)
    (ours, loss), (expected, trl_loss) = gradients(learner, samples), trl_gradients(trainer)
    assert loss == pytest.approx(trl_loss, rel=1e-5)
    assert_same(ours, expected, 1e-5)
    if algorithm == "kto" or options.get("loss_type") in ("sigmoid", "hinge"):
        ((minibatch,), _) = learner.shard(samples)
        learner.annotate([minibatch])
        [batch], logged = minibatch.batches, trainer._metrics["eval"]
        ours = learner.losses(batch, learner.forward(batch))[1]
        assert len(ours) == (2 if algorithm == "kto" else 4)
        for name, metric in ours.items():
            [value] = logged[f"rewards/{TRL_NAMES[name]}"]
            assert metric.value == pytest.approx(value, rel=1e-5)


def test_kto_reads_mismatched_replies_once_and_without_a_gradient(tiny_model):
    learner, read = make_learner(tiny_model, algorithm="kto"), {True: 0, False: 0}

    def count(module, args):
        read[torch.is_grad_enabled()] += args[0].numel()

    learner.policy.hf.get_input_embeddings().register_forward_pre_hook(count)
    rows = [{"prompt": p, "completion": p * 3, "label": p != "2"} for p in ("1", "2", "333")]
    samples = row_samples(learner.config, tiny_model, rows)
    gradients(learner, samples)
    trained, others = (sum(len(s.token_ids) - 1 for s in samples[i::2]) for i in (0, 1))
    assert read == {True: trained, False: others}


def test_a_pair_computes_its_prompt_once(tiny_model):
    learner = make_learner(tiny_model)
    rows = [
        {"prompt": "a prompt that is much longer than replies", "chosen": "yes", "rejected": "no"}
    ] * 2
    _, metrics = learner.shard(row_samples(learner.config, tiny_model, rows))
    assert metrics["pack/computed_tokens"].value < 0.65 * metrics["pack/tokens"].value


@pytest.fixture(scope="session")
def pair_data(tmp_path_factory):
    """Five digits in ascending order are preferred over another order. Which digits they are is
    held out."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("pairs")
    digits = ["".join(c) for c in itertools.combinations("0123456789", 5)]
    draw.shuffle(digits)
    for name, chosen in {"train": digits[40:] * 10, "eval": digits[:40] * 2}.items():
        rows = []
        for i, right in enumerate(chosen):
            prompt, wrong = (
                "".join(draw.choice(orders))
                for orders in [list(itertools.permutations(right))[1:]] * 2
            )
            side = [says(right), says(wrong)]
            # An uneven length, so that pairs are not all alike.
            rows.append(
                {"prompt": prompt + " " * (i % 7), "chosen": side[:1], "rejected": side[1:]}
            )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags_of(algorithm, model, data, out, *more):
    flags = words(
        f"--algorithm {algorithm} --model {model} --data.train {data / 'train.jsonl'}",
        f"--out {out}",
    )
    flags += words(
        "--max_prompt_tokens 20 --max_tokens 8 --optim.lr 1e-3 --tasks_per_step 16", more
    )
    return [str(flag) for flag in flags]


@pytest.fixture(scope="session")
def preference_runs(tiny_model, pair_data, tmp_path_factory):
    """Algorithm -> folder of a run of 40 steps that was evaluated before and after."""
    folders, model = {}, tmp_path_factory.mktemp("models") / "no_pad"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    # As in many models: only the tokenizer says which token pads.
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    for algorithm in ("dpo", "rm"):
        folders[algorithm] = tmp_path_factory.mktemp("runs") / algorithm
        more = ["--num_steps", 40, "--data.eval", pair_data / "eval.jsonl", "--eval_every", 40]
        assert main(flags_of(algorithm, model, pair_data, folders[algorithm], *more)) == 0
    return folders


@pytest.mark.parametrize("algorithm", ["dpo", "rm"])
def test_the_accuracy_of_held_out_pairs_rises(algorithm, preference_runs):
    rows = metrics(preference_runs[algorithm])
    before, after = (row for row in rows if "eval/accuracy" in row)
    assert before["eval/accuracy"] == 0.5 and before["eval/loss"] == pytest.approx(math.log(2))
    assert (
        after["eval/accuracy"] > 0.95 and after["eval/loss"] < 0.3 and after["eval/margin_mean"] > 1
    )
    learnt = [row["learn/policy/accuracy"] for row in rows if "learn/policy/accuracy" in row]
    assert len(learnt) == 40 and learnt[-1] > 0.9


def test_the_exported_reward_model_gives_our_scores_to_a_padded_batch(preference_runs, pair_data):
    folder = preference_runs["rm"] / "hf/policy"
    chat, ours = (
        load_chat(str(folder)),
        make_policy(str(folder), torch.float32, init_ranks(60), is_scoring=True),
    )
    rows = [json.loads(line) for line in (pair_data / "eval.jsonl").read_text().splitlines()[:8]]
    samples = [s for row in rows for s in scored_pair(chat, row)]
    with torch.no_grad():
        scores = [ours(pack_samples([s]), 1.0)[0][-1].item() for s in samples]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talks = [[user(r["prompt"]), *r[side]] for r in rows for side in ("chosen", "rejected")]
    inputs = tokenizer.apply_chat_template(
        talks, padding=True, return_dict=True, return_tensors="pt"
    )
    assert (inputs["attention_mask"] == 0).any()
    with torch.no_grad():
        logits = AutoModelForSequenceClassification.from_pretrained(folder)(**inputs).logits
    assert logits.shape == (16, 1) and logits.std() > 0.5
    assert scores == pytest.approx(logits[:, 0].tolist(), abs=1e-5)


def test_the_reward_model_of_the_docs_example_rewards_episodes(
    preference_runs, tiny_model, tmp_path
):
    (example,) = re.findall(
        r"```python\n(# scored.py\n.*?)```", (ROOT / "docs/preferences.md").read_text(), re.S
    )
    env = tmp_path / "env.py"
    env.write_text(example.replace("runs/rm/hf/policy", str(preference_runs["rm"] / "hf/policy")))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "52341"}\n')
    flags = words("--model", tiny_model, "--env_path", env, "--data.train", tmp_path / "rows.jsonl")
    flags += words("--max_tokens 8 --max_prompt_tokens 20 --tasks_per_step 2 --num_steps 1")
    assert main([*flags, "--out", str(tmp_path / "run")]) == 0
    (row,) = metrics(tmp_path / "run")
    assert row["rollout/policy/failed"] == 0 and row["rollout/policy/zero_signal_frac"] < 1
