"""The tokens of one trajectory, with the values that a reader can colour them by."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rl_core.data.image_parts import has_image
from rl_core.data.images import bytes_of, small_copy
from rl_core.tools.viewer.data import Entry, RunFolder, matching, unpacked

# with_stored_images() gives these names.
IMAGE_NAME = re.compile(r"images/[0-9a-f]{16}\.(png|jpeg|webp)")
THUMBNAIL_PIXELS = 256  # Longest side.
MAX_THUMBNAILS = 64  # Images of an episode; the page shows the names of further ones.
LEARNED = {
    "advantages": "advantage",
    "ratios": "ratio",
    "entropy_nats": "entropy",
    "logprobs": "gap",
}

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rl_core.types import JSONObject, Message


def shown_episode(run: RunFolder, entry: Entry) -> JSONObject:
    """A trajectory as the page shows it. Each turn has the text of its tokens, of which the first
    `num_new` are context, and `values`: name -> one for each sampled token. `images`: name of an
    image in the messages -> its thumbnail."""
    row = run.episode(entry)
    tokenizer, advantage = tokenizer_of(run, entry.actor), advantage_of(run, entry)
    turns = []
    for turn, learned in zip(
        row["turns"], learned_values(run, entry, len(row["turns"])), strict=True
    ):
        done = turn["completion"]
        num = len(done["token_ids"])
        versions = [done["policy_version"]] * num
        for index, version in done["newer_versions"]:
            versions[index:] = [version] * (num - index)
        values = {"logprob": [round(value, 4) for value in done["logprobs"]], "version": versions}
        if advantage is not None:
            values["advantage"] = [round(advantage, 4)] * num
        # Columns of another length are of another run.
        values |= {name: column for name, column in learned.items() if len(column) == num}
        if "gap" in values:
            values["gap"] = [
                None if v is None else round(v - logprob, 6)
                for v, logprob in zip(values["gap"], done["logprobs"], strict=True)
            ]
        ids = [*turn["new_ids"], *done["token_ids"]]
        turns.append(
            {
                "ids": ids,
                "texts": texts(tokenizer, ids),
                "num_new": len(turn["new_ids"]),
                "values": values,
            }
        )
    return row | {"turns": turns, "images": thumbnails(run.path / "rollouts", row["messages"])}


def thumbnails(folder: Path, messages: list[Message]) -> dict[str, str]:
    """Name -> data: URL of a small copy, for the first images of the messages that can be read."""
    names = {}
    for message in filter(has_image, messages):
        for item in message["content"]:
            name = item.get("image")
            is_stored = isinstance(name, str) and IMAGE_NAME.fullmatch(name)
            if is_stored and len(names) < MAX_THUMBNAILS:
                names[name] = thumbnail(folder / name)
    return {name: url for name, url in names.items() if url}


@lru_cache(512)
def thumbnail(file: Path) -> str:
    """A data: URL of a PNG or JPEG; "" if the file is not an image."""
    try:
        return small_copy(bytes_of(file), THUMBNAIL_PIXELS)
    except ValueError:
        return ""


def learned_values(
    run: RunFolder, entry: Entry, num_turns: int
) -> list[dict[str, list[float | None]]]:
    """The record of `rl-core replay --tokens` for each turn: tokens/ has the files of rollouts/,
    line by line."""
    file, number = (
        run.path / "tokens" / entry.file,
        run.text(entry.file).count(b"\n", 0, entry.start),
    )
    lines = (
        unpacked(file, file.stat().st_mtime_ns).split(b"\n", number + 1) if file.is_file() else []
    )
    turns = json.loads(lines[number])["turns"] if len(lines) > number + 1 else []
    # Records of a run that was made again since do not fit.
    turns = turns if len(turns) == num_turns else [{}] * num_turns
    return [{ours: turn[name] for name, ours in LEARNED.items() if name in turn} for turn in turns]


def advantage_of(run: RunFolder, entry: Entry) -> float | None:
    """The reward less the mean of its group: the advantage before any division. None for
    evaluations."""
    if entry.reward is None or entry.kind != "train":
        return None
    same = {
        name: getattr(entry, name) for name in ("kind", "step", "env", "group", "actor", "player")
    }
    group = [e for e in matching(run.entries, **same) if e.reward is not None]
    if len(group) == 1:
        return None
    episodes: dict[int, list[float]] = {}
    for e in group:
        episodes.setdefault(e.index, []).append(e.reward or 0.0)
    return entry.reward - fmean(fmean(rewards) for rewards in episodes.values())


def texts(tokenizer: Tokenizer | None, ids: list[int]) -> list[str] | None:
    """Text of each token: empty where a character is not complete. None without a tokenizer."""
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    stream, pieces = DecodeStream(skip_special_tokens=False), []
    for before, number in zip([0, *ids], ids, strict=False):
        if number < 0:  # Of an image, whose tokens have one id.
            pieces.append("" if number == before else "[image]")
            continue
        try:
            text = stream.step(tokenizer, number)
        except (
            Exception
        ):  # SentencePiece's decoders know no way on from bytes that are no character
            stream = DecodeStream(skip_special_tokens=False)
            text = stream.step(tokenizer, number)
        pieces.append(text or "")
    return pieces


def tokenizer_of(run: RunFolder, actor: str) -> Tokenizer | None:
    """Tokenizer of the actor's model: in the run's folder, in the model's folder, or in the hub's
    cache."""
    from huggingface_hub import try_to_load_from_cache

    owner = run.config.get(f"actors.{actor}.lora_base") or actor
    model = run.config.get(f"actors.{owner}.model") or run.config.get("model") or ""
    folders = [run.path / "hf" / actor, run.path / "best" / actor, Path(model)]
    file = next(
        (
            directory / "tokenizer.json"
            for directory in folders
            if (directory / "tokenizer.json").is_file()
        ),
        None,
    )
    if file is None and model.count("/") == 1 and not Path(model).exists():
        cached = try_to_load_from_cache(model, "tokenizer.json")
        file = Path(cached) if isinstance(cached, str) else None
    return loaded(file) if file else None


@lru_cache(maxsize=4)
def loaded(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
