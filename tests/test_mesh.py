"""However ranks are divided into replicas, shards, parts of sequences and slices of matrices, the update is the same.

Run as a file under torchrun it is one rank of the comparison: python -m torch.distributed.run ... test_mesh.py MODEL OUT
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch

from rl_core.config import parse_config
from rl_core.distributed import Mesh, Ranks, close_ranks, init_ranks, make_mesh, on_mesh
from rl_core.learning.algorithms import make_algorithm
from rl_core.learning.learner import Learner
from rl_core.learning.model import make_policy, make_reference, named_weights
from rl_core.models import make_critic
from rl_core.types import TrainingSample

FLAGS = ["--env_path", "x.py", "--out", "x", "--max_prompt_tokens", "40", "--max_tokens", "60"]
# Not AdamW, which makes a step of full size out of a gradient that is nothing but rounding.
OPTIM = ["--optim.name", "sgd", "--optim.lr", "0.05"]
MESHES = {
    "dp 4": Mesh(dp_shard=4),
    "dp 2 x cp 2": Mesh(dp_shard=2, cp=2),
    "cp 4": Mesh(cp=4),
    "hsdp 2 x 2": Mesh(dp_replicate=2, dp_shard=2),
    "hsdp 2 x cp 2": Mesh(dp_replicate=2, cp=2),
    "tp 2 x dp 2": Mesh(dp_shard=2, tp=2),
}
CASES = {
    "sft": ["--algorithm", "sft"],
    "grpo": ["--algorithm", "grpo", "--learner.minibatches", "2", "--learner.epochs", "2", "--algo.kl_coef", "0.1"],
    "gspo": ["--algorithm", "gspo", "--learner.epochs", "2"],
    "reinforce_pp": ["--algorithm", "reinforce_pp", "--algo.kl_coef", "0.1"],
    "ppo": ["--algorithm", "ppo", "--learner.epochs", "2"],
    "dpo": ["--algorithm", "dpo", "--learner.microbatch_tokens", "400"],
    "rm": ["--algorithm", "rm", "--learner.microbatch_tokens", "400"],
}


# Two are fewer than the ranks that train on different samples.
NUM_SAMPLES = {"sft": [14], "grpo": [14, 2], "gspo": [14], "reinforce_pp": [14], "ppo": [14], "dpo": [14, 2], "rm": [2]}


def ragged(num: int, seed: int, is_pairs: bool) -> list[TrainingSample]:
    """Some shorter than 2 x cp tokens. Two turns each; pairs begin alike."""
    draw, samples = random.Random(seed), []
    for i in range(num):
        group = i // 2
        prompt = random.Random(f"{seed} {group}")
        spans = [
            (0, prompt.randint(1, 9)),
            (1, draw.choice([1, 2, 30])),
            (0, draw.randint(1, 5)),
            (1, draw.randint(1, 9)),
        ]
        if i % 5 == 3:
            spans = spans[:2]
        mask = [m for m, n in spans for _ in range(n)]
        token_ids = [prompt.randrange(8, 104) for _ in range(spans[0][1])]
        token_ids += [draw.randrange(8, 104) for _ in mask[len(token_ids) :]]
        advantage = (0.3 if i % 2 == 0 else 0.0) if is_pairs else draw.gauss(0, 1)
        samples.append(
            TrainingSample(
                token_ids=token_ids,
                loss_mask=mask,
                group_id=f"{group:04d}",
                rollout_logprobs=[-4.6 * m for m in mask],
                policy_versions=[m - 1 for m in mask],
                advantages=[advantage * m for m in mask],
            )
        )
    return samples


def updated(model: str, case: str, ranks: Ranks, num_samples: int = 14) -> dict:
    """What two steps leave: the metrics of both and the weights."""
    config = parse_config(["--model", model, *FLAGS, *OPTIM, *CASES[case]])
    algorithm = make_algorithm(config.algorithm, config.algo)
    policy = make_policy(model, torch.float32, ranks, False, is_scoring=case == "rm")
    reference = make_reference(model, torch.float32, ranks) if case == "dpo" or algorithm.kl_coef else None
    critic = make_critic(config, model, ranks) if algorithm.has_critic else None
    learner = Learner(config, algorithm, policy, ranks, reference, critic)
    facts: dict = {}
    for step in range(2):
        samples = ragged(num_samples, step, algorithm.is_pairs)
        mine = [s for i, s in enumerate(samples) if (i // 2) % ranks.size == ranks.rank]
        minibatches, _ = learner.shard(mine)
        learner.annotate(minibatches)
        found = learner.step(minibatches, step)
        facts |= {f"{step} {name}": metric_facts(metric, ranks) for name, metric in found.items()}
    return {"facts": facts, "weights": {n: w.clone() for n, w in named_weights(policy)}}


def metric_facts(metric, ranks: Ranks) -> float:
    from rl_core.metrics import reduce_metrics

    return reduce_metrics({"x": metric}, ranks)["x"]


def compare(model: str, out: Path) -> None:
    """Every rank: the updates on each mesh. Rank 0 writes how far they are from those of one rank, worked out here too."""
    ranks, results = init_ranks(60), {}
    alone = Ranks(rank=0, size=1, device=ranks.device)
    for case in CASES:
        for num_samples in NUM_SAMPLES[case]:
            expected = updated(model, case, alone, num_samples)
            start = dict(named_weights(make_policy(model, torch.float32, alone, False, is_scoring=case == "rm")))
            moved = max((expected["weights"][n] - w).abs().max().item() for n, w in start.items())
            for name, mesh in MESHES.items():
                got = updated(model, case, on_mesh(ranks, mesh), num_samples)
                assert got["facts"].keys() == expected["facts"].keys()
                results[f"{case}, {num_samples} samples, {name}"] = {
                    "weights": max((w - got["weights"][n]).abs().max().item() for n, w in expected["weights"].items()),
                    "facts": {k: [v, got["facts"][k]] for k, v in expected["facts"].items()},
                    "moved": moved,
                }
    if ranks.rank == 0:
        out.write_text(json.dumps(results))
    close_ranks(ranks)


@pytest.fixture(scope="module")
def results(tiny_model, torchrun, tmp_path_factory):
    out = tmp_path_factory.mktemp("mesh") / "results.json"
    torchrun(4, __file__, tiny_model, out, timeout_s=300)
    return json.loads(out.read_text())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case, num_samples", [(c, n) for c in CASES for n in NUM_SAMPLES[c]])
def test_an_update_is_the_same_on_every_mesh(results, case, num_samples, mesh):
    found = results[f"{case}, {num_samples} samples, {mesh}"]
    assert found["moved"] > 1e-4
    for name, (expected, got) in found["facts"].items():
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5), name
    assert found["weights"] < 1e-5


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    assert make_mesh(8, dp_replicate=2, cp=2, tp=2) == Mesh(dp_replicate=2, dp_shard=1, cp=2, tp=2)
    with pytest.raises(ValueError, match=r"--dp_replicate 1 \* --cp 3 \* --tp 1 must divide the 8 ranks"):
        make_mesh(8, cp=3)


@pytest.mark.parametrize("kind, why", [("qwen3_next", "linear_attention"), ("bloom", "its own attention")])
def test_a_model_that_would_mix_packed_sequences_is_refused(kind, why, tmp_path):
    from rl_core.learning.loading import load_model_config

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match=f"{why}, in which packed sequences would mix; take one"):
        load_model_config(str(tmp_path))


if __name__ == "__main__":
    compare(sys.argv[1], Path(sys.argv[2]))
