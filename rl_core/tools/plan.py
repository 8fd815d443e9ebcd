"""rl-core plan: data, tokens of a step, parameters and memory of a run."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_core.config import Config, parse_config
from rl_core.run.plan.path_checks import ROWS, check_inputs
from rl_core.scratch import scratch_prefix
from rl_core.tools.help import PLAN, print_help
from rl_core.tools.memory_estimate import GIB, facts
from rl_core.tools.parser import Parser
from rl_core.train import say_loading

if TYPE_CHECKING:
    from rl_core.types import JSONObject


def main(argv: list[str]) -> int:
    """Prints the plan of a run with these flags, or with --json as JSON. Makes no folder, and needs
    no SGLang and no GPU: --gpu_gib is the memory of each GPU that the run will have."""
    if print_help(argv, PLAN):
        return 0
    parser = Parser(add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gpu_gib", type=float)
    options, flags = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory(prefix=scratch_prefix("plan")) as out:
        config = parse_config([*flags, "--out", out])
        if options.gpu_gib is not None:
            config = on_gpu(config)
        check_inputs(config, ROWS if config.eval_every else ROWS[:1])
        say_loading("the tokenizer")  # Weights are not read.
        # Imported after parsing, so that a wrong flag answers at once.
        from rl_core.run.plan.plan import make_plan

        plan = make_plan(config, is_planned=True)
        result = facts(plan)
        if options.gpu_gib is not None:
            from rl_core.tools.gpu_fit import fit_facts

            result["gpu"] = fit_facts(plan, options.gpu_gib)
    print(json.dumps(result, indent=2) if options.json else describe(result))
    return 0


def on_gpu(config: Config) -> Config:
    """The configuration with what `auto` stands for on a GPU."""
    if config.engine == "auto":
        config = replace(config, engine="sglang")
    if config.learner.dtype == "auto":
        config = replace(config, learner=replace(config.learner, dtype="bfloat16"))
    return config


HEAD = """\
data             {train_rows} rows to train on{left_out[train]}, {eval_rows} held out{left_out[eval]}
columns          {column_lines}
steps            {at_most}{num_steps} of {tasks_per_step} rows: {epochs:.3g} epochs
ranks            {all_ranks}: {sizes}
tokens per step  at most {tokens}: {samples_per_step} {samples} of at most \
{max_tokens_of_a_sample} tokens
assumed          {engine}{dtype}, microbatches of {microbatch_tokens} tokens"""


def describe(report: JSONObject) -> str:
    """The facts as text, with sizes in GiB."""
    sizes = [f"{name} {size}" for name, size in report["ranks"].items() if name != "all"]
    lines = [
        HEAD.format(
            **report | {"engine": f"{report['engine']} engine, " if report["engine"] else ""},
            at_most="at most " if report["may_end_early"] else "",
            all_ranks=report["ranks"]["all"],
            sizes=", ".join(sizes),
            column_lines=describe_columns(report["columns"]),
            tokens=report["samples_per_step"] * report["max_tokens_of_a_sample"],
        )
    ]
    for name, actor in report["actors"].items():
        adapters = actor["adapter_parameters"]
        more = f", {adapters / 1e6:.2f} M of them in adapters" if adapters else ""
        size = f"{actor['parameters'] / 1e6:.2f} M parameters{more}"
        if actor["ranks"]:
            size += f", on ranks {actor['ranks']}"
        lines += ["", f"{name}: {actor['model']}, {size}"]
        lines.append(f"{'GiB on one rank':<22} {'sample':>10} {'learn':>10}")
        for title, row in report.get("gpu", actor)["bytes_on_one_rank"].items():
            sample, learn = (f"{size / GIB:.3g}" if size else "-" for size in row.values())
            lines.append(f"{title:<22} {sample:>10} {learn:>10}")
        if actor["sync_bytes"]:
            sync = actor["sync_bytes"] / GIB
            lines.append(f"{'while weights are sent, at most':<33} {sync:>10.3g}")
    if "gpu" in report:
        from rl_core.tools.gpu_fit import describe_fit

        lines += ["", *describe_fit(report["gpu"])]
    return "\n".join(lines)


def describe_columns(columns: dict[str, dict[str, list[str]]]) -> str:
    """A line for each data set: the columns of prompts and of labels, and those that nothing
    reads."""
    lines = []
    for name, use in columns.items():
        line = f"{name}: prompt from {', '.join(use['prompt'])}"
        line += f"; label from {', '.join(use['label'])}" if use["label"] else "; no label"
        line += f"; not read: {', '.join(use['unread'])}" if use["unread"] else ""
        lines.append(line)
    return f"\n{'':<17}".join(lines)
