"""rl-core info: versions, devices, extras with the line that installs each, the sandbox,
algorithms, environments. rl-core info metrics [NAME]: the meaning of a metric of metrics.jsonl,
its unit and its healthy values. rl-core info RUN: flags of a run, and differences of its actors."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rl_core import __version__
from rl_core.config import ActorConfig, Config, flat, known_flags, read_config
from rl_core.data.env_names import env_files, env_folders
from rl_core.errors import nearest
from rl_core.run.display.metric_table import rows
from rl_core.sandbox import Sandbox
from rl_core.sandbox.isolation import LEVELS
from rl_core.tools.parser import Parser

if TYPE_CHECKING:
    from rl_core.types import JSONObject


LIBRARIES = ("torch", "transformers", "peft", "datasets", "sglang")


def main(argv: list[str]) -> int:
    parser = Parser(prog="rl-core info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("what", nargs="?", help="'metrics', or the folder of a run: only this")
    parser.add_argument(
        "name", nargs="?", help="a metric, such as learn/policy/clip_frac or clip_frac"
    )
    args = parser.parse_args(argv)
    if args.what == "metrics":
        print(metrics(args.name, args.json))
        return 0
    if args.what:
        print(run_settings(Path(args.what)))
        return 0
    report = {
        "versions": {"rl_core": __version__, "python": platform.python_version(), **versions()},
        "devices": devices(),
        "extras": extras(metadata.requires("rl_core") or []),
        "sandbox": sandbox(),
        "algorithms": list(get_args(known_flags()["algorithm"][1].type)),
        "environments": environments(),
    }
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def metrics(name: str | None, as_json: bool) -> str:
    """The rows of metric_table, or those that a name or the end of one means. Raises ValueError for
    an unknown one."""
    short = re.sub(r"@\d+$", "@K", name or "")
    lines = [
        r
        for r in rows()
        if not name or short in r.short_names or (r.pattern.fullmatch(name) and not r.is_of_user)
    ]
    if not lines:
        known = nearest(short.rpartition("/")[2], [end for r in rows() for end in r.short_names])
        raise ValueError(
            f"{name!r} is no metric of rl_core, but may be one that an environment gives; {known}"
        )
    if as_json:
        return json.dumps([dataclasses.asdict(row) for row in lines], indent=2)
    texts = []
    for row in lines:
        texts += [f"{row.name}  ({row.unit})" if row.unit else row.name, f"  {row.meaning}"]
        texts += [f"  healthy: {row.healthy}"] if row.healthy else []
    return "\n".join(texts)


def run_settings(run: Path) -> str:
    """The flags of a run that are not the defaults, those of each actor in a paragraph. Raises
    ValueError if the folder holds no run."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ValueError(f"{run} is neither 'metrics' nor a folder of a run: it has no config.yaml")
    config = read_config(["--config", str(file)])
    usual = flat(dataclasses.asdict(Config()))
    of_actor = flat(dataclasses.asdict(ActorConfig()))
    lines = [f"== {run}"]
    for name, value in flat(dataclasses.asdict(dataclasses.replace(config, actors={}))).items():
        if usual.get(name) != value:
            lines.append(f"  {name} {value}")
    for actor, settings in config.actors.items():
        lines += ["", f"== actor {actor}"]
        for name, value in flat(dataclasses.asdict(settings)).items():
            if of_actor.get(name) != value:
                lines.append(f"  {name} {value}")
    return "\n".join(lines)


def as_text(report: JSONObject) -> str:
    lines = []
    for title, content in report.items():
        pairs = content.items() if isinstance(content, dict) else [(item, "") for item in content]
        if title == "algorithms":
            pairs = [(" ".join(content), "")]
        if title == "environments" and not content:
            pairs = [("none in envs/ here", "")]
        width = max((len(name) for name, _ in pairs), default=0)
        lines += [
            f"== {title}",
            *(f"  {name:<{width}}  {text}".rstrip() for name, text in pairs),
            "",
        ]
    return "\n".join(lines)


def version_of(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    return {name: version for name in LIBRARIES if (version := version_of(name))}


def devices() -> list[str]:
    import torch

    if torch.backends.mps.is_available():
        return [f"CPU, {os.cpu_count()} cores; an Apple GPU: --device mps"]
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus] or [
        f"CPU, {os.cpu_count()} cores, no GPU"
    ]


def sandbox() -> dict[str, str]:
    """The level of isolation for code that models write, found by starting a sandbox."""
    made = Sandbox()
    try:
        level = made.start()
        return {level: LEVELS[level]}
    except RuntimeError as error:
        return {"none": str(error)}
    finally:
        made.close()


def extras(requires: list[str]) -> dict[str, str]:
    """Extra -> `installed`, or the line that installs the missing packages, from the metadata of
    a wheel."""
    missing: dict[str, list[str]] = {}
    for requirement in requires:
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if extra and extra[1] != "test":  # The extra test is for developers of rl_core.
            name = re.split(r"[^\w.-]", requirement)[0]
            wanted = requirement.partition(";")[0].strip()
            missing.setdefault(extra[1], []).extend([] if version_of(name) else [f"'{wanted}'"])
    return {
        extra: f"pip install {' '.join(w)}" if w else "installed" for extra, w in missing.items()
    }


def environments() -> dict[str, str]:
    """Path -> first line of the docstring, of envs/ here or, if there is none, of those that
    rl_core brings."""
    return {str(path): about(path) for path in sorted(env_files(env_folders()[:1]).values())}


def about(path: Path) -> str:
    try:
        return (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0]
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
