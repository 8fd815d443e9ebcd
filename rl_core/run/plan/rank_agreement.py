"""Ranks compare code, flags, environments, models and rows with the first rank before a model
loads: nodes with different files would learn from a mixture, without an error."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
import xxhash

import rl_core
from rl_core.config import Config, flat
from rl_core.data.messages import shorten
from rl_core.data.tasks.prompt_hook import MadePrompts
from rl_core.distributed import Ranks
from rl_core.run.plan.engine import num_ranks
from rl_core.run.plan.plan import Plan
from rl_core.run.run_folder import make_folder
from rl_core.types import JSON, RunError

NUM_PIECES, PIECE_BYTES = 16, 1 << 16  # Pieces of a file of a model that are compared.
NUM_ROWS = 64  # Rows of a data set that are compared.
MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")
VERSION = "the version of"
SEEN_WITHIN_S = 90.0  # NFS may take a minute to show another machine's new file.


def check_ranks_agree(plan: Plan, ranks: Ranks) -> None:
    """Raises RunError on every rank if a rank has other code, flags, environments, models or rows
    than the first, or does not see the first rank's --out. Every rank must call it."""
    store, out = ranks.store, plan.config.folder
    here = f"rank {os.environ['RANK']} ({socket.gethostname()})"
    facts = run_facts(plan)
    is_new = not out.exists()
    with file_in(out) if ranks.is_writer else nullcontext("") as name:
        if ranks.is_writer:
            store.set("first", json.dumps([here, facts, name]))
        first, first_facts, name = json.loads(store.get("first"))
        problem = ""
        if differs := difference(facts, first_facts):
            problem = f"{differs} on {here}, compared with {first}; start every rank with the "
            problem += "same command, code and files"
        elif not is_seen(out / name, min(SEEN_WITHIN_S, plan.config.timeout_s / 2)):
            problem = f"--out {out} of {first} is not seen on {here}, or may not be written there; "
            problem += "name a folder on a file system that all nodes share"
        keys = [f"problem/{rank}" for rank in range(num_ranks())]
        store.set(f"problem/{os.environ['RANK']}", problem or "none")
        store.wait(keys)
        problems = [text for text in map(bytes.decode, store.multi_get(keys)) if text != "none"]
    if problems:
        if ranks.is_writer and is_new:
            with suppress(OSError):  # Another process may have written there.
                out.rmdir()
        raise RunError(problems[0])


@contextmanager
def file_in(out: Path) -> Iterator[str]:
    """The name of a new file in the folder of a run."""
    make_folder(out)
    with tempfile.NamedTemporaryFile(prefix=".seen_by_all_ranks_", dir=out) as file:
        yield Path(file.name).name


def is_seen(path: Path, timeout_s: float) -> bool:
    """True once the file of another rank exists here, in a folder where this rank may write."""
    deadline = time.monotonic() + timeout_s
    # Path.exists() would raise PermissionError for a folder of another user.
    while not (os.path.exists(path) and os.access(path.parent, os.W_OK)):
        if time.monotonic() > deadline:
            return False
        for parent in (path.parent.parent, path.parent):
            with suppress(OSError):
                os.listdir(parent)  # NFS then asks its server again.
        time.sleep(0.1)
    return True


def difference(facts: dict[str, JSON], first: dict[str, JSON]) -> str:
    """The first fact that differs, "" if none does."""
    for name in first | facts:
        value, other = facts.get(name), first.get(name)
        if value == other:
            continue
        if name.startswith(("--", VERSION)):
            return f"{name} is {shorten(value)} instead of {shorten(other)}"
        return f"{name} differs"
    return ""


def run_facts(plan: Plan) -> dict[str, JSON]:
    """Name -> value or hash of all that must be the same on every rank of a run."""
    code = sorted(Path(rl_core.__file__).parent.rglob("*.py"))
    facts: dict[str, JSON] = {"the code of rl_core": digest(map(Path.read_bytes, code))}
    for library in (torch, transformers):
        facts[f"{VERSION} {library.__name__}"] = library.__version__
    flags = json.loads(json.dumps(asdict(plan.config), default=str))
    facts |= {f"--{name}": value for name, value in flat(flags).items()}
    for env in plan.envs.values():
        if "://" not in env.path:  # A service may read a new file at any time.
            facts[f"the environment {env.path}"] = env.code()
    for name, chat in plan.chats.items():
        facts[f"the chat template of actor {name}"] = digest([str(chat.chat_template).encode()])
    for path in model_paths(plan.config):
        facts |= model_facts(path)
    for source in (*plan.train.sources, *plan.eval.values()):
        name = f"load_tasks({source.split!r}) of {source.env} (draw its rows with a fixed seed)"
        if source.files:
            names = [file for file, _ in source.files]
            name = f"the data set {names[0] if len(names) == 1 else shorten(names)}"
        facts[name] = rows_digest(source.rows)
    return facts


def model_paths(config: Config) -> list[str]:
    """Folders and hub names of all models that a run loads."""
    paths = {}
    for name, actor in config.actors.items():
        if actor.api:
            continue
        settings = config.of(name)
        paths |= dict.fromkeys([actor.model, settings.critic.model])
        if actor.is_trained:
            paths |= dict.fromkeys(settings.frozen_models.values())
    return [path for path in paths if path]


def model_facts(path: str) -> dict[str, JSON]:
    """Name -> hash of the size and of NUM_PIECES pieces of each file of a model; for a model in the
    hub's cache its commit."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(path, "config.json")
        return {f"{VERSION} {path}": Path(file).parent.name if isinstance(file, str) else ""}
    files = [file for file in folder.iterdir() if file.suffix in MODEL_FILES and file.is_file()]
    return {f"the model's file {file}": digest(file_pieces(file)) for file in sorted(files)}


def file_pieces(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as opened:
        for i in range(NUM_PIECES):
            opened.seek(max(0, size - PIECE_BYTES) * i // (NUM_PIECES - 1))
            yield opened.read(PIECE_BYTES)


def rows_digest(rows) -> str:
    """A hash of the number of rows and of NUM_ROWS rows, as they are in their files."""
    while isinstance(rows, MadePrompts):
        rows = rows.rows
    step = max(1, len(rows) // NUM_ROWS)
    texts = [str(len(rows))]
    for i in range(0, len(rows), step):
        # load_tasks() may return any objects, also as keys.
        row = json.dumps(rows[i], skipkeys=True, default=lambda value: type(value).__name__)
        texts.append(row)
    return digest(text.encode() for text in texts)


def digest(pieces: Iterable[bytes]) -> str:
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    return checksum.hexdigest()
