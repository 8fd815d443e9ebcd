"""Updates that are skipped because loss or gradient is NaN or infinite: what is kept of them, and when the run stops.

OUT/nonfinite/step_000007.update_000.rank_00000.safetensors    this rank's microbatches: 0/input_ids, 0/labels, 1/input_ids ...
OUT/nonfinite/step_000007.update_000.rank_00000.json           what was not finite, denominator, learning rate
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_core.distributed import Ranks, all_gather_json, local
from rl_core.learning.model import Policy
from rl_core.metrics import Metric, Sum
from rl_core.types import PackedBatch, RunError, SequenceShard

SHOWN = 3  # weights that a message names


@dataclass(kw_only=True, slots=True)
class SkippedUpdate:
    """On one rank."""

    name: str  # of its files, such as step_000007.update_000
    batches: list[PackedBatch]
    denominator: int
    loss: float  # this rank's share
    grad_norm: float  # over all ranks
    lr: float


class NonfiniteUpdates:
    def __init__(self, folder: Path, max_in_a_row: int, ranks: Ranks):
        self.folder, self.max_in_a_row, self.ranks = folder, max_in_a_row, ranks
        self.in_a_row = 0
        self.kept: list[Path] = []  # this rank's newest files, as many as can come in a row

    def skip(self, update: SkippedUpdate, model: Policy) -> dict[str, Metric]:
        """The metric of an update that was not made. Every rank must call it; each writes its own batch. Raises RunError on
        all ranks alike if more than max_in_a_row came one after the other."""
        self.in_a_row += 1
        what = what_is_not_finite(update, model)
        file = save_update(update, what, self.folder, self.ranks)
        self.kept.append(file)
        for old in self.kept[: -(self.max_in_a_row + 1)]:
            self.kept.remove(old)
            old.unlink()
            old.with_suffix(".json").unlink()
        found = all_gather_json([str(file), what], self.ranks)
        # The gradient is shared, so that a rank which has more to say than that is where it came from.
        culprit = max(range(len(found)), key=lambda rank: len(found[rank][1]))
        file, what = found[culprit]
        text = f"{update.name.replace('_', ' ').replace('.', ', ')}: not finite on rank {culprit}: {'; '.join(what)}"
        if self.in_a_row > self.max_in_a_row:
            raise RunError(
                f"{text}. It is number {self.in_a_row} in a row, more than --learner.max_nonfinite_updates="
                f"{self.max_in_a_row} allows; weights and optimizer are as before the first. Its batch is in {file}, which "
                "rl_core.learning.nonfinite.load_update reads"
            )
        if self.ranks.rank == 0:
            print(f"{text}; skipped ({self.in_a_row} in a row), its batch is in {file}", flush=True)
        return {"nonfinite_updates": Sum(1 / self.ranks.size)}


def what_is_not_finite(update: SkippedUpdate, model: Policy) -> list[str]:
    """What of loss, gradient, this rank's batch and its part of the weights is NaN or infinite."""
    found = [] if math.isfinite(update.grad_norm) else [f"gradient norm {update.grad_norm}"]
    found += [] if math.isfinite(update.loss) else [f"loss {update.loss}"]
    arrays = {name: value for batch in update.batches for name, value in tensors_of(batch).items() if is_broken(value)}
    found += [f"{name} of the batch" for name in arrays]
    weights = [name for name, value in model.named_parameters() if is_broken(value.detach())]
    more = f" and {len(weights) - SHOWN} more" if len(weights) > SHOWN else ""
    return found + ([f"weights {', '.join(weights[:SHOWN])}{more}"] if weights else [])


def is_broken(value: Tensor) -> bool:
    part = local(value)
    return part.is_floating_point() and not bool(torch.isfinite(part).all())


def tensors_of(batch: PackedBatch) -> dict[str, Tensor]:
    """By name; what belongs to its shard as shard/NAME."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    if batch.shard is not None:
        values |= {f"shard/{f.name}": getattr(batch.shard, f.name) for f in dataclasses.fields(batch.shard)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def save_update(update: SkippedUpdate, what: list[str], folder: Path, ranks: Ranks) -> Path:
    """The file with the batches; what is no tensor stands in a JSON file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{update.name}.rank_{ranks.rank:05d}.safetensors"
    tensors, rest = {}, []
    for i, batch in enumerate(update.batches):
        own = tensors_of(batch)
        tensors |= {f"{i}/{name}": value.detach().cpu().clone().contiguous() for name, value in own.items()}
        rest.append({"parents": batch.parents, "shard_counts": batch.shard and batch.shard.counts})
    save_file(tensors, file)
    facts = {"not_finite": what, "denominator": update.denominator, "lr": update.lr, "rank": ranks.rank}
    # As text: JSON has no NaN.
    facts |= {"ranks": ranks.size, "loss": repr(update.loss), "grad_norm": repr(update.grad_norm), "batches": rest}
    file.with_suffix(".json").write_text(json.dumps(facts, indent=1))
    return file


def load_update(file: str | Path) -> tuple[list[PackedBatch], dict]:
    """(the batches, what else is known of the update), of a file that a skipped update left. `learner.losses(batch)` of
    each, summed and divided by the denominator, is the loss again."""
    facts = json.loads(Path(file).with_suffix(".json").read_text())
    batches = []
    with safe_open(file, framework="pt") as saved:
        for i, rest in enumerate(facts.pop("batches")):
            names = [name for name in saved.keys() if name.startswith(f"{i}/")]  # noqa: SIM118
            own = {name.partition("/")[2]: saved.get_tensor(name) for name in names}
            shard = {name[6:]: own.pop(name) for name in list(own) if name.startswith("shard/")}
            shard = SequenceShard(**shard, counts=rest["shard_counts"]) if shard else None
            batches.append(PackedBatch(**own, parents=rest["parents"], shard=shard))
    return batches, facts
