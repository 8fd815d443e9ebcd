"""Samples with a common beginning are packed as trees of balanced work (their loss and gradient:
test_equivalence.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from kit import make_learner, part_of, sample
from models_table import make_family

from rl_core.data import prefix_tree
from rl_core.data.packing import (
    MinibatchPlan,
    PackBudget,
    PackItem,
    fill_bins,
    group_totals,
    make_items,
    needs_forward,
    pack_samples,
    split_groups,
)
from rl_core.data.samples import samples_from_turns
from rl_core.learning.padded_forward import padded_rows
from rl_core.learning.router_replay import OWN
from rl_core.types import Completion, TrainingSample, Turn

SGD = "--optim.name sgd --optim.lr 1 --optim.betas 0,0 --optim.eps 0 --optim.max_grad_norm 0"


def turn(draw: random.Random, name: str, is_fresh: bool = False, length: int = 5) -> Turn:
    sampled = [draw.randrange(8, 104) for _ in range(length)]
    logprobs = [-4 - draw.random() for _ in sampled]
    new_ids = [draw.randrange(8, 104) for _ in range(draw.randint(2, 4))]
    completion = Completion(token_ids=sampled, logprobs=logprobs, policy_version=0)
    return Turn(new_ids=new_ids, is_fresh=is_fresh, completion=completion, name=name)


def episode(
    name: str, depth: int, advantage: float, group: str, like: Sequence[Turn] = ()
) -> tuple[list[TrainingSample], list[Turn]]:
    """(samples, turns of the trunk): a branch after each turn of a trunk of `depth` turns. The
    trunk begins with the tokens of other turns, sampled anew."""
    draw, trunk = random.Random(name), []
    for number in range(depth):
        of_trunk = turn(draw, f"{name} {number}", is_fresh=not number)
        if number < len(like):
            of_trunk.new_ids = like[number].new_ids
            of_trunk.completion.token_ids = like[number].completion.token_ids
        trunk.append(of_trunk)
    samples, trained = [], set()
    for number in range(1, depth + 1):
        for branch in range(2):
            last = turn(draw, f"{name} {number} {branch}", length=draw.randint(1, 8))
            samples += samples_from_turns([*trunk[:number], last], advantage, group, trained)
    return samples, trunk


def forest(depth: int) -> list[TrainingSample]:
    """Two groups. In the second two episodes sampled the same first turns."""
    samples, _ = episode("a", depth, 0.7, "0")
    second, trunk = episode("b", depth, -1.1, "1")
    third, _ = episode("c", depth, 0.4, "1", like=trunk[:-1] or trunk)
    return samples + second + third


def test_a_small_tree_as_it_stands_in_a_batch(monkeypatch):
    monkeypatch.setattr(prefix_tree, "SHARE_TOKENS", 1)
    # All begin with 1 2 3, two go 4 5 next; the third and the fourth sample are equal.
    samples = [
        sample([1, 2, 3, 4, 5, 6, 7], [0, 1, 1, 0, 1, 1, 1], 1.0),
        sample([1, 2, 3, 4, 5, 8, 9], [0, 0, 0, 0, 0, 1, 1], 2.0),
        sample([1, 2, 3, 10, 11], [0, 0, 0, 1, 1], 3.0),
        sample([1, 2, 3, 10, 11], [0, 1, 0, 0, 1], 4.0),
    ]
    batch = pack_samples(samples)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 10, 6, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 5, 5]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 8, 8, 8]
    assert batch.parents == [-1, 0, 0, 1, 1, 2, 2]
    assert [path.tolist() for path in batch.paths] == [
        [0, 1, 2, 3, 4, 6],
        [0, 1, 2, 3, 4, 7],
        [0, 1, 2, 5],
        [0, 1, 2, 5],
    ]
    assert batch.labels.tolist() == [2, 3, 5, 6, 7, 8, 9, 10, 11, 2, 11]
    assert batch.logit_indices.tolist() == [0, 1, 3, 4, 6, 4, 7, 2, 5, 0, 5]
    assert batch.sequences.tolist() == [0] * 5 + [1] * 2 + [2] * 2 + [3] * 2
    assert batch.advantages.tolist() == [1] * 5 + [2] * 2 + [3] * 2 + [4] * 2


def test_a_piece_that_saves_fewer_than_four_tokens_stands_in_each_sample():
    samples = [sample([1, 2, 3, n, n], [0, 0, 0, 1, 1], 1.0) for n in (4, 5, 6)]
    assert pack_samples(samples[:2]).parents == [-1, -1]
    assert pack_samples(samples).parents == [-1, 0, 0, 0]


def levels_above(parents: list[int], number: int) -> list[int]:
    """The pieces before this one in its sequences."""
    above = []
    while parents[number] >= 0:
        number = parents[number]
        above.append(number)
    return above


def test_padded_rows_of_a_tree_are_its_samples():
    samples = forest(3)
    batch = pack_samples(samples)
    rows, _ = padded_rows(batch)
    for row, each in zip(rows, samples, strict=True):
        assert batch.input_ids[row[row >= 0]].tolist() == each.token_ids[:-1].tolist()


def test_shared_tokens_go_to_the_first_samples_experts(made_once):
    folder = made_once("family_qwen3_moe", lambda folder: make_family(folder, "qwen3_moe"))
    learner = make_learner(folder, "--algorithm grpo --actors.policy.router_replay true")
    samples, shape = forest(3), (2, 2)
    for number, each in enumerate(samples):
        each.experts = np.full((len(each.token_ids) - 1, *shape), number % 4, np.int16)
    samples[0].experts = None
    batch = pack_samples(samples)
    placed = part_of(learner, "RouterReplay").packed(batch, samples).experts
    for token in range(len(batch.input_ids)):
        readers = [n for n, path in enumerate(batch.paths) if token in path]
        known = [n % 4 for n in readers if n > 0]
        assert set(placed[token].flatten().tolist()) == {known[0] if known else OWN}


def random_family(seed: int) -> list[TrainingSample]:
    """Samples that continue one another, equal ones and single tokens among them."""
    draw = random.Random(seed)
    streams = [[draw.randrange(3)]]
    for _ in range(draw.randint(1, 30)):
        known = draw.choice(streams)
        kept = known[: draw.randint(1, len(known))]
        streams.append(kept + [draw.randrange(3) for _ in range(draw.choice([0, 1, 4, 40]))])
    samples = []
    for stream in streams:
        mask = [0] + [draw.randrange(2) for _ in stream[1:]]
        samples.append(sample(stream, mask, 1.0, "g"))
    return sorted(samples, key=lambda s: s.token_ids.tobytes())


def num_tokens_of_trie(samples: list[TrainingSample]) -> int:
    """Beginnings that differ: the least that can be computed."""
    beginnings = set()
    for each in samples:
        ids = each.token_ids.tolist()[:-1]
        beginnings |= {tuple(ids[: n + 1]) for n in range(len(ids))}
    return len(beginnings)


@pytest.mark.parametrize("seed", range(40))
def test_every_path_of_a_random_tree_is_its_sample(seed):
    samples = random_family(seed)
    batch = pack_samples(samples)
    for path, each in zip(batch.paths, samples, strict=True):
        assert batch.input_ids[path].tolist() == each.token_ids[:-1].tolist()
        assert batch.position_ids[path].tolist() == list(range(len(path)))
    levels = [len(levels_above(batch.parents, n)) for n in range(len(batch.parents))]
    assert levels == sorted(levels)
    num_tokens = sum(len(each.token_ids) for each in samples)
    least = num_tokens_of_trie(samples)
    assert least <= len(batch.input_ids) <= least + 0.1 * num_tokens
    assert len(batch.input_ids) <= num_tokens - len(samples)


def plan_of(
    of_ranks: list[list[TrainingSample]], budget: PackBudget, skips: bool = False
) -> tuple[MinibatchPlan, list[list[PackItem]]]:
    """The plan of one minibatch of these ranks' samples, and the units of each."""
    [plan] = split_groups([group_totals(samples, skips) for samples in of_ranks], 1)
    units = []
    for rank, samples in enumerate(of_ranks):
        used = [each for each in samples if needs_forward(each, skips)]
        units.append(make_items(used, plan, rank, budget))
    fill_bins(plan, units, budget)
    return plan, units


def test_what_a_unit_saves_is_what_neighbours_have_in_common():
    """Worked by hand: a trunk of 40, two branches of 10 and one of 10 that leaves it after 20. The other
    group is so large that the first is not split: a unit has half of a rank's at most."""
    trunk = list(range(40))
    streams = [trunk + [50] * 10, trunk + [60] * 10, trunk[:20] + [70] * 10]
    samples = [sample(s, [0] + [1] * (len(s) - 1), 1.0, "g") for s in streams]
    other = sample([90] * 200, [0] + [1] * 199, 1.0, "h")
    plan, [units] = plan_of([[*samples, other]], PackBudget(max_tokens=1000, pair_work=1.0))
    tokens = len(pack_samples(samples).input_ids)
    assert tokens == 49 + 49 + 29 - 40 - 20
    assert units[0] == PackItem(0, 0, 0, 3, tokens, 49**2 + 49**2 + 29**2 - 40**2 - 20**2)
    assert plan.bin_work == [sum(u.num_tokens + u.num_scores / 2 for u in units)]
    _, [units] = plan_of([[*samples, other]], PackBudget(max_tokens=1000, cp=2))
    assert [unit.num_tokens for unit in units] == [52, 52, 32, 200]


def test_a_unit_that_saves_too_little_is_halved():
    """Four samples of 100 tokens that are read begin with 12 equal ones. To share these saves less
    than a tenth. The last two begin with 60 equal ones."""
    trunk = list(range(12))
    middles = [[20] * 48, [21] * 48, [22] * 48, [22] * 48]
    streams = [trunk + middle + [30 + i] * 41 for i, middle in enumerate(middles)]
    streams.append([90] * 1001)
    samples = []
    for number, stream in enumerate(streams):
        mask = [0] + [1] * (len(stream) - 1)
        samples.append(sample(stream, mask, 1.0, "h" if number == 4 else "g"))
    _, [units] = plan_of([samples], PackBudget(max_tokens=330))
    bounds = [(unit.first, unit.num_samples, unit.num_tokens) for unit in units]
    assert bounds == [(0, 2, 200), (2, 2, 140), (4, 1, 1000)]
    for first, num_samples, num_tokens in bounds:
        batch = pack_samples(samples[first : first + num_samples])
        assert len(batch.input_ids) == num_tokens


def test_a_sample_that_is_skipped_hides_nothing_from_its_neighbours():
    trunk = list(range(20))
    streams = {"a": trunk + [50] * 5, "b": trunk[:3] + [55] * 5, "c": trunk + [60] * 5}
    samples = []
    for name, stream in streams.items():
        mask = [0] * 3 + [1] * (len(stream) - 3)
        samples.append(sample(stream, mask, float(name != "b"), "g"))
    samples.append(sample([90] * 100, [0] + [1] * 99, 1.0, "h"))
    plan, [units] = plan_of([samples], PackBudget(max_tokens=400), skips=True)
    assert [(u.first, u.num_samples, u.num_tokens) for u in units] == [(0, 2, 28), (2, 1, 99)]
    assert plan.num_sequences == 4 and plan.num_tokens == 22 + 5 + 22 + 99
    assert plan.num_used == 25 + 25 + 100


def sixteen_episodes() -> list[TrainingSample]:
    """Samples of 16 groups of one episode, sorted as a learner sorts them."""
    samples = []
    for number in range(16):
        samples += episode(f"{number}", 4, 1.0, f"{number:02d}")[0]
    return sorted(samples, key=lambda s: (s.group_id, s.token_ids.tobytes()))


def test_the_branches_of_an_episode_go_to_one_rank_and_loads_are_even():
    samples = sixteen_episodes()
    budget = PackBudget(max_tokens=400, num_ranks=2)
    plan, [units] = plan_of([samples], budget)
    assert [unit.group for unit in units] == list(range(16))
    assert sorted(unit for of_bin in plan.bins for unit in of_bin) == units
    assert sum(plan.bin_work) > 0.9 * max(plan.bin_work) * len(plan.bin_work)


def test_bins_do_not_depend_on_which_rank_has_a_group():
    samples = sixteen_episodes()
    budget = PackBudget(max_tokens=400, num_ranks=2)
    even = [each for each in samples if int(each.group_id) % 2 == 0]
    odd = [each for each in samples if int(each.group_id) % 2]
    plan, _ = plan_of([even, odd], budget)
    alone, _ = plan_of([samples], budget)
    assert plan.bin_work == alone.bin_work
    for of_bin, of_one in zip(plan.bins, alone.bins, strict=True):
        assert [unit.group for unit in of_bin] == [unit.group for unit in of_one]
        assert [unit.rank for unit in of_bin] == [unit.group % 2 for unit in of_bin]
