"""rl-core eval --bench gsm8k,humaneval: benchmarks by name -> flags of environments and rows."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import yaml

from rl_core.data.env_names import env_path
from rl_core.errors import nearest, split

VARIABLE = "RL_CORE_BENCH_DATA"
CONNECT_S = 5.0


def bench_flags(names: str, folder: str | None) -> list[str]:
    """--env_path and the held-out rows of these benchmarks. Rows are files in the folder, or of the
    hub if none is named. Raises ValueError for an unknown name, and for rows that are not there."""
    table = yaml.safe_load(Path(__file__).with_name("eval_suites.yaml").read_text())
    folder = folder or os.environ.get(VARIABLE)
    if folder is None and not is_hub_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"  # Without it, the hub's library tries for a minute.
    sets: dict[str, list[str]] = {}  # environment -> "name=source" of each benchmark
    for name in split(names):
        if name not in table:
            raise ValueError(f"--bench {name} is unknown; {nearest(name, table)}")
        bench = table[name]
        sets.setdefault(bench["env"], []).append(f"{name}={source_of(name, bench, folder)}")
    flags = ["--env_path", ",".join(map(env_path, sets))]
    # A run's own rows are not those of the benchmark.
    flags += ["--data.train", "null", "--data.eval", "null"]
    for env, sources in sets.items():
        flags += [f"--envs.{env}.eval", ",".join(sources)]
    return flags


def is_hub_reachable() -> bool:
    """True if the hub takes connections, or a proxy is set, by which it may."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if getproxies():
        return True
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def source_of(name: str, bench: dict[str, Any], folder: str | None) -> str:
    if folder is None:
        return bench["hub"]
    for file in bench["files"]:
        path = Path(folder) / file
        if path.is_file():
            return str(path)
    raise ValueError(
        f"--bench {name}: {folder} has none of {', '.join(bench['files'])}; get the rows from "
        f"{bench['home']}, or leave out --bench_data and ${VARIABLE} for {bench['hub']} of the hub"
    )
