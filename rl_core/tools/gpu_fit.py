"""Flags with which a run fits the memory of its GPUs, by the counts of memory_estimate.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl_core.config import Config
from rl_core.config.rules import check
from rl_core.tools.memory_estimate import (
    GIB,
    Size,
    Table,
    episode_bytes,
    model_size,
    num_episodes,
    rank_table,
    rounded,
)

if TYPE_CHECKING:
    from rl_core.distributed import Mesh
    from rl_core.run.plan.plan import Plan
    from rl_core.types import AnyJSON, JSONObject

Flags = dict[str, str | int | float]
LEARN_FRAC = 0.9  # Fraction of a GPU for a learner. The rest: NCCL's buffers and fragmentation.
RECOMPUTE: Flags = {"learner.activations": "recompute"}
PHASE: Flags = {"learner.offload": "phase"}
ALWAYS: Flags = {"learner.offload": "always"}
LORA: Flags = {"actors.NAME.lora.rank": 16}
NF4: Flags = {"actors.NAME.lora.quantize": "nf4"}
# In the order in which they are tried, the fastest first: for full weights, for adapters.
FULL = ({}, RECOMPUTE, PHASE, PHASE | RECOMPUTE, ALWAYS | RECOMPUTE)
ADAPTERS = (LORA, LORA | RECOMPUTE, LORA | PHASE | RECOMPUTE, LORA | NF4 | PHASE | RECOMPUTE)
TPS: list[Flags] = [{"engine_tp": tp} for tp in (2, 4, 8)]
ENGINES: tuple[Flags, ...] = ({}, *TPS, {"engine_memory_frac": 0.85})


@dataclass(kw_only=True, slots=True)
class Fit:
    """Memory of a run on a GPU."""

    table: Table
    problems: list[str]  # Empty if the run fits.
    num_episodes: int = 0  # Longest episodes that an engine's KV cache holds at once.


def gpu_fit(plan: Plan, name: str, size: Size, mesh: Mesh, gpu_gib: float) -> Fit:
    from rl_core.models.loading import compute_dtype

    fit = Fit(table={}, problems=[])
    try:
        fit.table = rank_table(plan, name, size, mesh, gpu_gib * GIB)
        if (sampling := fit.table["sum"][0] / GIB) > gpu_gib:
            fit.problems.append(f"sampling takes {sampling:.1f} GiB, and the GPU has {gpu_gib:g}")
    except ValueError as error:
        fit.table = rank_table(plan, name, size, mesh)
        fit.problems.append(str(error).partition("; set")[0])
    if (learning := fit.table["sum"][1] / GIB) > LEARN_FRAC * gpu_gib:
        fit.problems.append(
            f"learning takes {learning:.1f} GiB, more than {LEARN_FRAC:g} of {gpu_gib:g}"
        )
    if fit.problems:
        return fit
    config = plan.config.of(name)
    of_episode = episode_bytes(config, size, compute_dtype(config).itemsize)
    if "KV cache" in fit.table and of_episode:  # Some models have no KV cache.
        fit.num_episodes = int(fit.table["KV cache"][0] / of_episode)
        if fit.num_episodes < min(config.group_size, num_episodes(config, mesh)):
            fit.problems.append(
                f"the KV cache holds {fit.num_episodes} episodes of {config.max_context_tokens:,} "
                f"tokens, less than a group of {config.group_size}"
            )
    return fit


def fit_facts(plan: Plan, gpu_gib: float) -> JSONObject:
    """Memory of one rank on a GPU of this size, and flags with which the run fits. Raises
    ValueError unless one actor learns, on the ranks that sample."""
    config, (name, *others) = plan.config, plan.config.trained
    if others or config.rollout_ranks or plan.rank_groups:
        raise ValueError(
            "--gpu_gib counts one actor that learns, on the ranks that sample. Leave out --gpu_gib "
            "and add the tables of the actors on a GPU"
        )
    size = model_size(config.actors[name], config.of(name).learner.train)
    fit = gpu_fit(plan, name, size, plan.mesh, gpu_gib)
    fixes = []
    for learners in (FULL, ADAPTERS) if fit.problems else ():
        fitting = fitting_flags(plan, name, size, plan.mesh, gpu_gib, learners)
        fixes += [as_text(fitting[0])] if fitting else []
    return {
        "gib": gpu_gib,
        "problems": fit.problems,
        "fixes": fixes,
        "episodes_in_cache": fit.num_episodes,
        "episodes_at_once": num_episodes(config.of(name), plan.mesh) if config.is_rl else 0,
        "bytes_on_one_rank": rounded(fit.table),
    }


def describe_fit(gpu: JSONObject) -> list[str]:
    """Lines of text about the result of fit_facts()."""
    lines = []
    if gpu["episodes_in_cache"]:
        lines.append(
            f"KV cache: {gpu['episodes_in_cache']:,} episodes of full length; an engine samples at "
            f"most {gpu['episodes_at_once']:,} at once"
        )
    lines += [f"does not fit: {problem}" for problem in gpu["problems"]]
    if not gpu["problems"]:
        lines.append(f"fits a GPU of {gpu['gib']:g} GiB")
    elif not gpu["fixes"]:
        lines.append("take more GPUs, or larger ones")
    lines += [f"fits with {flags}" for flags in gpu["fixes"]]
    return lines


def fitting_flags(
    plan: Plan, name: str, size: Size, mesh: Mesh, gpu_gib: float, learners: Iterable[Flags]
) -> tuple[Flags, Fit] | None:
    """The first flags of `learners` and ENGINES with which the run fits, and its memory with them;
    None if it fits with none of them."""
    from rl_core.engines.checks import check_engines
    from rl_core.engines.options import engine_classes

    for of_learner, of_engine in itertools.product(learners, ENGINES):
        flags = {key.replace("NAME", name): v for key, v in (of_learner | of_engine).items()}
        if (mesh.tp > 1 or mesh.ep > 1) and of_learner.keys() & NF4:
            continue
        config: Config = plan.config
        for path, value in flags.items():
            config = changed(config, path, value)
        rank = config.actors[name].lora.rank
        try:
            check(config)
            if config.is_rl:
                check_engines(config, engine_classes(config), mesh.size, is_planned=True)
        except ValueError:
            continue
        changed_size = replace(size, adapters=rank * size.adapted)
        fit = gpu_fit(replace(plan, config=config), name, changed_size, mesh, gpu_gib)
        if not fit.problems:
            return flags, fit
    return None


def changed(settings: AnyJSON, path: str, value: AnyJSON) -> AnyJSON:
    """A copy of a dataclass or dict with another value at the path."""
    name, _, rest = path.partition(".")
    if isinstance(settings, dict):
        return settings | {name: changed(settings[name], rest, value)}
    if rest:
        value = changed(getattr(settings, name), rest, value)
    return replace(settings, **{name: value})


def as_text(flags: Flags) -> str:
    return " ".join(f"--{name} {value}" for name, value in flags.items())
