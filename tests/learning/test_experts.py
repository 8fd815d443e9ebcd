"""Mixtures of experts: the routers' auxiliary loss and the load of experts, however a batch is
split.

As a program it is one rank of a comparison.
"""

from __future__ import annotations

import math
import random
import re
from contextlib import nullcontext, suppress
from pathlib import Path

import kit
import peft
import pytest
import torch
import transformers
from kit import answer, assert_same, make_learner, of_ranks, sample
from models_table import ENV, FAMILIES, family_config, load_plain, make_family
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.config import parse_config
from rl_core.distributed import Mesh, Ranks, local, on_mesh, unsharded
from rl_core.learning.lora import adapter_parameters, adapter_weights
from rl_core.learning.minibatches import active_parameters, pair_work
from rl_core.learning.padded_forward import choose_forward
from rl_core.models.loading import model_class
from rl_core.models.parallel.expert_parallel import ep_plan, split_experts
from rl_core.models.parallel.fsdp import local_slices
from rl_core.models.parallel.tensor_parallel import check_tensor_parallel, has_experts
from rl_core.models.policy import without_dropout
from rl_core.models.routers import find_routers
from rl_core.run.display.mfu import mfu, peak_flops
from rl_core.run.plan.model_checks import make_chats
from rl_core.run.plan.option_rules import check_options
from rl_core.run.saving.checkpoint import export_policy
from rl_core.tools.memory_estimate import model_size
from rl_core.tools.tiny_model import character_tokenizer

COEF = "--actors.policy.router_aux_loss_coef"
SFT = "--algorithm sft"
SGD = "--optim.name sgd --optim.lr 1 --optim.betas 0,0 --optim.eps 0 --optim.max_grad_norm 0"


@pytest.fixture(scope="session")
def family(made_once):
    """family(name) -> folder of a tiny random model of such a family."""
    return lambda name: made_once(f"family_{name}", lambda folder: make_family(folder, name))


def imitated(prompts=(1,), num=9, longest=25) -> list:
    """Ragged samples with prompts of these lengths, in groups of three that begin alike."""
    draw, samples = random.Random(0), []
    for i in range(num):
        group = random.Random(f"group {i // 3}")
        prompt = [group.randrange(8, 104) for _ in range(prompts[i // 3 % len(prompts)])]
        reply = [draw.randrange(8, 104) for _ in range(draw.randint(1, longest))]
        samples.append(
            sample(prompt + reply, [0] * len(prompt) + [1] * len(reply), 1.0, f"{i // 3}")
        )
    return samples


def update(model, samples, *flags, ranks=None) -> tuple[dict, dict]:
    """(metrics, what one step of SGD with rate 1 takes away) by the names of the weights."""
    learner = make_learner(model, SFT, SGD, *flags, ranks=ranks)
    choose_forward(learner.policy, learner.ranks)
    before = {name: weight.clone() for name, weight in learner.named_weights()}
    [row] = kit.learn(learner, samples)
    return row, {name: before[name] - weight for name, weight in learner.named_weights()}


def padded(samples) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels) [N, L] of whole sequences; labels are -100 where nothing is trained."""
    rows = [(torch.from_numpy(s.token_ids), torch.from_numpy(s.loss_mask)) for s in samples]
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
    labels = [ids.masked_fill(~mask, -100) for ids, mask in rows]
    return ids, torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)


def read(samples, ids) -> torch.Tensor:
    """[N, L] which tokens a forward needs: all of a sequence but its last."""
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    return torch.arange(ids.shape[1]) < lengths[:, None] - 1


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_auxiliary_loss_and_its_gradient_are_transformers_own(family, name):
    samples, coef = imitated(prompts=(1, 7, 4)), 0.5
    row, grads = update(family(name), samples, COEF, str(coef))
    model = load_plain(family(name))
    model.router_aux_loss_coef = coef
    ids, labels = padded(samples)
    out = model(
        input_ids=ids,
        attention_mask=read(samples, ids).long(),
        labels=labels,
        output_router_logits=True,
    )
    out.loss.backward()
    assert row["router_aux_loss"] == pytest.approx(out.aux_loss.item(), rel=1e-5)
    assert row["loss"] == pytest.approx((out.loss - coef * out.aux_loss).item(), rel=1e-5)
    assert_same(grads, {n: p.grad for n, p in model.named_parameters()})
    _, without = update(family(name), samples)
    router = next(n for n in grads if n.endswith(("gate.weight", "router.weight")))
    assert (grads[router] - without[router]).abs().max() > 1e-3


def chosen(model, name: str, ids: torch.Tensor) -> list[tuple[torch.Tensor, list[list[int]]]]:
    """For each layer with experts, the router logits of one sequence's tokens, and the experts
    of each, by transformers."""
    choices, kinds = [], ("MixtralTopKRouter", "DeepseekV3TopkRouter")
    keep = lambda module, _, out: choices.append((out[0].detach(), out[2].tolist()))  # noqa: E731
    hooks = [m.register_forward_hook(keep) for m in model.modules() if type(m).__name__ in kinds]
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return choices


def needs_routers(model):
    """Skips the test if transformers has no routers in this model, as 5.12 has none in some."""
    if not find_routers(model)[1]:
        pytest.skip(f"transformers {transformers.__version__} has no routers in {type(model)}")


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_loss_and_load_are_the_formulas_written_out(family, name):
    """Switch Transformer (arXiv:2101.03961) eq. 4-6, with sigmoids by DeepSeek-V3
    (arXiv:2412.19437) eq. 15 and 19; MaxVio (arXiv:2408.15664) eq. 4."""
    samples, model, num_experts = imitated(prompts=(20,)), load_plain(family(name)), 4
    needs_routers(model)
    row, _ = update(family(name), samples, COEF, "1")
    went, mass, by_layer, tokens = [0] * num_experts, [0.0] * num_experts, {}, 0
    for s in samples:
        for layer, (logits, experts) in enumerate(
            chosen(model, name, torch.from_numpy(s.token_ids[:-1]))
        ):
            for scores, to in zip(logits.tolist(), experts, strict=True):
                scores = [
                    math.exp(x) if name == "mixtral" else 1 / (1 + math.exp(-x)) for x in scores
                ]
                tokens += 1
                for i in range(num_experts):
                    mass[i] += scores[i] / sum(scores)
                    went[i] += i in to
                    load = by_layer.setdefault(layer, [0] * num_experts)
                    load[i] += i in to
    wanted = num_experts * sum(f / tokens * p / tokens for f, p in zip(went, mass, strict=True))
    assert row["router_aux_loss"] == pytest.approx(wanted, rel=1e-5)
    violations = [max(load) / (sum(load) / num_experts) - 1 for load in by_layer.values()]
    assert row["expert_load_maxvio"] == pytest.approx(sum(violations) / len(violations), rel=1e-6)


def test_an_update_leaves_no_graph_behind(family):
    learner = make_learner(family("qwen3_moe"), SFT, COEF, "0.5")
    kit.learn(learner, imitated())
    kept = kit.part_of(learner, "Experts")
    assert not kept.aux_loss.requires_grad and not kept.counts.requires_grad
    assert not kept.routers.logits and kept.routers.forced is None


@pytest.mark.parametrize(
    "model, flags, why",
    [
        ("qwen3", "", "needs a mixture of experts; transformers .* has no routers in qwen3: leave"),
        (
            "qwen3_moe",
            "--learner.kernels compile",
            "cannot be combined with --learner.kernels=compile; remove one",
        ),
        (
            "qwen3_moe",
            "--actors.policy.train false --actors.b.model x",
            "needs an actor that learns; leave it out",
        ),
        ("qwen3_moe", "", ""),
    ],
)
def test_an_auxiliary_loss_is_refused_where_it_cannot_be(family, tiny_model, model, flags, why):
    path = tiny_model if model == "qwen3" else family(model)
    sizes = "--env_path x.py --out x --max_prompt_tokens 16 --max_tokens 16"
    config = parse_config(kit.words("--model", path, sizes, COEF, "0.001", flags))
    with (
        pytest.raises(ValueError, match=f"--actors.policy.router_aux_loss_coef=0.001 {why}")
        if why
        else nullcontext()
    ):
        check_options(config)
        make_chats(config)


def test_a_model_without_experts_has_no_metric_of_them(tiny_model):
    [row] = kit.learn(make_learner(tiny_model, SFT), imitated())
    assert "expert_load_maxvio" not in row


LORA = "--actors.policy.lora.rank 2 --actors.policy.lora.targets all-linear,experts"


def drawn(model, *flags, ranks=None):
    """A learner with adapters that are not nothing, on experts too."""
    learner = make_learner(model, SFT, SGD, LORA, *flags, ranks=ranks)
    for number, (_, parameter) in enumerate(adapter_parameters(learner.policy.hf)):
        local_part, slices = local_slices(parameter)
        local_part.copy_(
            torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))[slices]
            / 10
        )
    choose_forward(learner.policy, learner.ranks)
    return learner


def adapter_step(learner, samples) -> dict:
    """The change of the adapters in one step of SGD with rate 1, negated."""
    before = {
        name: weight.clone() for name, weight in adapter_weights(learner.policy.hf, "default")
    }
    kit.learn(learner, samples)
    return {
        name: before[name] - weight
        for name, weight in adapter_weights(learner.policy.hf, "default")
    }


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_experts_have_the_merged_models_gradient(family, tmp_path, name):
    """dL/dA and dL/dB of each expert from dL/dW of the plain model with the merged weights; the
    adapter's folder by peft."""
    samples, learner = imitated(), drawn(family(name))
    assert model_size(learner.config.actors["policy"]).adapters == sum(
        p.numel() for _, p in learner.trained_parameters()
    )
    export_policy(
        learner.policy, character_tokenizer(), tmp_path / "merged", learner.ranks, "default"
    )
    plain, ids = load_plain(tmp_path / "merged"), torch.arange(10)[None] + 5
    adapted = peft.PeftModel.from_pretrained(
        load_plain(family(name)), str(tmp_path / "merged_adapter")
    ).eval()
    torch.testing.assert_close(
        adapted(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-4, rtol=0
    )
    ids, labels = padded(samples)
    plain(input_ids=ids, attention_mask=read(samples, ids).long(), labels=labels).loss.backward()
    pairs = {n: w.detach().clone() for n, w in adapter_weights(learner.policy.hf, "default")}
    grads, scale, num = adapter_step(learner, samples), 32 / 2, 4
    # peft puts the layer of gate_up_proj inside that of down_proj, or the other way.
    for inner in ("", ".base_layer"):
        prefix = f"base_model.model.model.layers.1.mlp.experts{inner}.lora_"
        a, b = (pairs[f"{prefix}{factor}.weight"] for factor in "AB")
        a, b = a.view(num, 2, -1), b.view(len(b), 2, num).permute(2, 0, 1)
        both = [
            p.grad
            for n, p in plain.named_parameters()
            if "layers.1.mlp.experts" in n and p.ndim == 3
        ]
        [dw] = [
            g if name != "gpt_oss" else g.mT
            for g in both
            if {*g.shape[1:]} == {a.shape[2], b.shape[1]}
        ]
        wanted = {"A": scale * b.mT @ dw, "B": scale * dw @ a.mT}
        wanted = {"A": wanted["A"].flatten(0, 1), "B": wanted["B"].permute(1, 2, 0).flatten(1)}
        assert_same(
            {factor: grads[f"{prefix}{factor}.weight"] for factor in "AB"}, wanted, tolerance=1e-5
        )


ON_RANKS = {
    "dp": "",
    "recomputed": "--learner.activations recompute",
    "always": "--learner.offload always",
    "ep": "",
}


def compare_adapters(ranks, folder, out) -> None:
    """Every rank: the negated change of adapters in an update."""
    for name, flags in ON_RANKS.items():
        mesh = Mesh(dp_shard=2, ep=1 + (name == "ep"))
        learner = drawn(folder, flags, ranks=on_mesh(ranks, mesh))
        if name == "ep":
            of_experts = (p for n, p in adapter_parameters(learner.policy.hf) if ".experts." in n)
            assert all(2 * local(p).numel() == p.numel() for p in of_experts)
            export_policy(
                learner.policy,
                character_tokenizer(),
                Path(out).with_name("of_ep"),
                ranks,
                "default",
            )
        torch.save(adapter_step(learner, imitated()[ranks.rank :: 2]), f"{out}.{name}.{ranks.rank}")
        torch.save(dict(learner.named_weights()), f"{out}.{name}.merged.{ranks.rank}")


def test_ranks_train_adapters_on_experts_alike(family, tmp_path):
    """The adapter's folder is read by peft."""
    learner = drawn(family("qwen3_moe"))
    ids = torch.arange(10)[None] + 5
    wanted, merged = adapter_step(learner, imitated()), dict(learner.named_weights())
    of_ranks(2, __file__, "compare_adapters", family("qwen3_moe"), tmp_path / "taken")
    for name in ON_RANKS:
        assert_same(torch.load(tmp_path / f"taken.{name}.1"), wanted)
        assert_same(torch.load(tmp_path / f"taken.{name}.merged.0"), merged)
    plain = load_plain(family("qwen3_moe"))
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "of_ep_adapter")).eval()
    exported = load_plain(tmp_path / "of_ep")
    torch.testing.assert_close(
        adapted(input_ids=ids).logits, exported(input_ids=ids).logits, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "targets, ranks, ep",
    [("all-linear", 1, ""), ("all-linear,experts", 1, ""), ("all-linear,experts", 2, "--ep 2")],
)
def test_a_run_says_whether_adapters_leave_out_experts(family, tmp_path, capfd, targets, ranks, ep):
    (tmp_path / "env.py").write_text(ENV)
    sizes = (
        "--max_prompt_tokens 24 --max_tokens 12 --tasks_per_step 4 --group_size 2 --num_steps 2 "
        "--optim.lr 1e-2"
    )
    lora = ["--actors.policy.lora.rank", "2", "--actors.policy.lora.targets", targets]
    out = kit.run(
        tmp_path / "run",
        "--model",
        family("qwen3_moe"),
        "--env_path",
        tmp_path / "env.py",
        sizes,
        lora,
        ep,
        ranks=ranks,
    )
    is_reported = (
        "k trained; no adapters on experts.down_proj, experts.gate_up_proj)"
        in capfd.readouterr().out
    )
    assert is_reported == (targets == "all-linear")
    assert kit.steps(out)[-1]["learn/policy/mismatch_kl_nats_max"] < 1e-6, (
        "the engine has the merged experts"
    )


def compare_split(ranks, *folders) -> list[float]:
    """Relative differences of logits and gradients of each model when its experts are split: a rank's
    own, and for experts the mean over ranks."""
    mesh, distances = on_mesh(ranks, Mesh(dp_shard=2, ep=2)).experts_mesh["ep"], []
    for folder in folders:
        model, passes = load_plain(Path(folder)).train(), []
        without_dropout(model)
        draw = torch.Generator().manual_seed(ranks.rank)
        ids = torch.randint(8, 104, (1, 9 + 4 * ranks.rank), generator=draw)
        for is_split in (False, True):
            if is_split:
                assert split_experts(model, mesh)
            model.zero_grad()
            logits = model(input_ids=ids, use_cache=False).logits
            logits[..., ::3].square().sum().backward()
            tensors = {"logits": logits.detach()}
            for name, weight in model.named_parameters():
                grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                if ".experts." in name and not is_split:
                    torch.distributed.all_reduce(grad.div_(2))
                tensors[name] = unsharded(grad)
            passes.append(tensors)
        far = [(passes[1][n] - x).norm() / (x.norm() + 1e-3) for n, x in passes[0].items()]
        distances.append(max(map(float, far)))
    return distances


def test_split_experts_of_each_family_compute_what_whole_ones_do(family):
    names = [name for name in FAMILIES if ep_plan(family_config(name))]
    folders = list(map(family, names))
    assert folders
    for distances in of_ranks(2, __file__, "compare_split", *folders):
        assert max(distances) < 1e-4, dict(zip(names, distances, strict=True))


def compare_tp(ranks, *folders) -> list[float]:
    """Relative differences of each model's gradients on two ranks of --tp from those on one."""
    alone = Ranks(rank=0, size=1, device=ranks.device, store=None)
    split, distances = on_mesh(ranks, Mesh(tp=2)), []
    for folder in folders:
        _, expected = update(folder, imitated(), ranks=alone)
        _, grads = update(folder, imitated()[ranks.rank :: 2], ranks=split)
        far = [(grads[n] - x).norm() / (x.norm() + 1e-3) for n, x in expected.items()]
        distances.append(max(map(float, far)))
    return distances


def test_mixtures_that_tp_splits_have_the_gradients_of_one_rank(family):
    names = []
    for name in FAMILIES:
        with suppress(ValueError):  # Refused, as test_mesh.py tests.
            check_tensor_parallel(2, family_config(name))
            names += [name] if has_experts(family_config(name)) else []
    assert {"qwen3_moe", "glm4_moe", "mixtral"} <= {*names}
    for distances in of_ranks(2, __file__, "compare_tp", *map(family, names)):
        assert max(distances) < 1e-4, dict(zip(names, distances, strict=True))


@pytest.mark.slow
def test_a_run_with_split_experts_learns_as_one_rank_does(family, tmp_path):
    (tmp_path / "env.py").write_text(ENV)
    flags = ["--model", family("qwen3_moe"), "--env_path", tmp_path / "env.py", COEF, "0.01"]
    sizes = (
        "--max_prompt_tokens 24 --max_tokens 12 --tasks_per_step 4 --group_size 4 --num_steps 10"
    )
    replay, learned = "--optim.lr 1e-3 --actors.policy.router_replay true", []
    for ranks, split in ((1, ""), (2, "--ep auto"), (2, "--tp 2")):
        out = kit.run(tmp_path / f"run{split}", *flags, sizes, replay, split, ranks=ranks)
        rows = [row for row in kit.steps(out) if "learn/policy/grad_norm" in row]
        # The engine samples with the newest experts.
        assert max(row["learn/policy/mismatch_kl_nats_max"] for row in rows) < 1e-6
        learned.append(kit.weights(out))
    assert_same(learned[1], learned[0])
    assert_same(learned[2], learned[0])


@pytest.mark.parametrize(
    "model, flags, why",
    [
        (
            "qwen3_moe",
            "up_proj",
            "'up_proj' is not a linear layer of a block of this model; take some of all-linear, experts",
        ),
        (
            "qwen3",
            "experts",
            "'experts' is not a linear layer of a block of this model; take some of all-linear, down",
        ),
        (
            "qwen3_moe",
            "experts --actors.b.lora_base policy",
            "no adapters on experts of several actors",
        ),
    ],
)
def test_adapters_on_experts_are_refused_where_they_cannot_be(
    family, tiny_model, model, flags, why
):
    path = tiny_model if model == "qwen3" else family(model)
    sizes = (
        "--env_path x.py --out x --max_prompt_tokens 16 --max_tokens 16 --actors.policy.lora.rank 2"
    )
    with pytest.raises(ValueError, match=why):  # noqa: PT012 any may raise
        config = parse_config(
            kit.words("--model", path, sizes, "--actors.policy.lora.targets", flags)
        )
        check_options(config)
        make_chats(config)[0]["policy"]


@pytest.mark.parametrize(
    "name, billions", [("mixtral", 12.88), ("gpt_oss", 5.13 + 0.58), ("llama", 6.74)]
)
def test_active_parameters_are_those_that_are_published(name, billions):
    """Mixtral-8x7B, gpt-oss-120b (whose 5.13 leave out the embedding) and Llama-2-7B are
    the families' defaults."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name))
    assert active_parameters(model) == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize("name", kit.families(FAMILIES))
def test_experts_count_by_tokens_and_layers_by_attention(name):
    config = family_config(name)
    text = config.get_text_config()
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    of_text = {
        n: p.numel()
        for n, p in model.named_parameters()
        if not re.search("vision|visual|projector", n)
    }
    # Two of four are chosen.
    idle = sum(size for n, size in of_text.items() if ".experts." in n) / 2
    assert (idle > 0) == bool(find_routers(model)[1])
    assert active_parameters(model) == sum(of_text.values()) - idle
    layers = {"mamba": 0, "lfm2": 1, "qwen3_next": 1, "qwen3_5": 1}.get(name, 2)
    width = 4 * (getattr(text, "head_dim", None) or 16)
    assert pair_work(model) == 2 * width * layers / active_parameters(model)


def test_mfu_of_a_mixture_counts_the_work_that_is_done(family):
    learner = make_learner(family("qwen3_moe"), SFT)
    _, packing = learner.shard(imitated())
    work = packing["pack/fill_frac"].total
    utilization = mfu(learner, work, 2.0, peak_flops("NVIDIA H100 80GB HBM3"))["mfu"].value
    assert utilization == pytest.approx(
        6 * active_parameters(learner.policy.hf) * work / (2.0 * 989e12)
    )
    assert active_parameters(learner.policy.hf) < sum(
        p.numel() for p in learner.policy.parameters()
    )


if __name__ == "__main__":
    answer(globals())
