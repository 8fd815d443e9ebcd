"""train(nproc=2): a run on several ranks of this machine, from Python."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from rl_core.config import Config, EnvConfig, to_yaml
from rl_core.data.image_columns import with_images
from rl_core.data.images import read_image
from rl_core.errors import split
from rl_core.tools.api.environment import Environment, Rows
from rl_core.types import RunError


def run_ranks(config: Config, environments: list[Environment], nproc: int) -> None:
    """Runs `rl-core train` with this configuration. Rows lie in OUT.rows, which a resumed run reads
    again. Ctrl-C saves when the step is done. Raises ValueError for an environment that is not a
    file, and RunError if the run fails."""
    folder = Path(f"{config.out}.rows")
    for env in environments:
        if config.is_rl and not (env.flag == env.path and is_path(env.path)):
            raise ValueError(
                f"nproc={nproc}: {env.name} must be a file, for other processes read it: write the "
                "function into a file, and give its path, without another name"
            )
        section = config.data
        if len(environments) > 1:
            section = config.envs.setdefault(env.name, EnvConfig())
        for split_name, rows in env.rows.items():
            setattr(
                section,
                split_name,
                str(write_rows(folder / f"{env.name}.{split_name}.jsonl", rows)),
            )
    if not config.is_rl:
        config.env_path = None  # A script's rows have no file.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "rl_core.tools.cli", "train", "--nproc_per_node", str(nproc)]
    run = subprocess.Popen(
        [*command, "--config", str(folder / "config.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process alone.
    )
    assert run.stdout is not None
    last = ""
    try:
        for line in run.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        status = run.wait()
    except KeyboardInterrupt:
        run.send_signal(signal.SIGTERM)
        for line in run.stdout:
            print(line, end="", flush=True)
        run.wait()
        raise
    if status:
        raise RunError(last.removeprefix("error: "))


def is_path(text: str) -> bool:
    return "://" in text or all(Path(file).is_file() for file in split(text))


def write_rows(file: Path, rows: Rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(json.dumps(with_images(dict(row), None), default=image_url) + "\n")
        except ValueError as error:
            raise ValueError(f"row {number} of {file.stem}: {error}") from None
    file.write_text("".join(lines))
    return file


def image_url(value: object) -> str:
    """An image in a column that --data.columns renames. Raises ValueError for other objects."""
    if isinstance(value, bytes) or type(value).__module__.startswith("PIL."):
        return read_image(value).url
    raise ValueError(
        f"a value of type {type(value).__name__}; rows for several ranks are written as JSON: "
        "convert it to text or a number"
    )
