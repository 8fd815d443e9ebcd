"""Files of a run's folder: config.yaml and env_code.yaml, written at the start, end.json, and
rollouts/*.jsonl.zst."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
import zstandard

from rl_core.config import (
    MAX_TOP_K,
    Config,
    to_yaml,
)
from rl_core.data.chat import Chat
from rl_core.data.chat_loading import fingerprint
from rl_core.data.image_parts import with_stored_images
from rl_core.data.rows import END, TOKENIZERS, write_whole
from rl_core.plugin import Plugin, RunState
from rl_core.run.display.report_file import write_report
from rl_core.run.display.summary import print_summary
from rl_core.run.run_folder import naming
from rl_core.types import JSON, JSONObject, Trajectory

MAY_DIFFER = ("resume", "out", "num_steps", "num_epochs")


class RunFiles(Plugin):
    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.writing: asyncio.Future | None = None  # The file of rollouts that is being written.
        self.end: JSONObject = {}  # content of end.json
        if trainer.ranks.is_writer:
            self.begin()

    def begin(self) -> None:
        plan, out = self.trainer.plan, self.trainer.out
        for folder in ("rollouts", "checkpoints", "hf"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        is_new = not (out / "config.yaml").exists()
        changes = keep_config(out, plan.config)
        for line in changes:
            print(f"differs from {out / 'config.yaml'}: {line}", flush=True)
        codes = {env.path.partition("?")[0]: env.code() for env in plan.envs.values()}
        # A run without an environment has no such file.
        for name in keep_first(out / "env_code.yaml", yaml.safe_dump(codes)) if codes else ():
            print(f"differs from {out / 'env_code.yaml'}: {name} has changed since", flush=True)
        if is_new or changes:
            from rl_core.data.warnings.data_warnings import data_warnings

            spelled = plan.sft_dataset and plan.sft_dataset.spelled
            rows = plan.train, plan.eval, spelled, plan.envs, plan.chats
            for line in data_warnings(plan.config, *rows):
                print(f"warning: {line}", flush=True)
        if plan.algorithm.is_rl:
            write_tokenizers(out / "rollouts", plan.chats)

    def load(self, state: JSONObject) -> None:
        config = self.trainer.config
        if config.resume and self.trainer.ranks.is_writer:
            from rl_core.run.saving.lost_steps import drop_lost_steps

            is_evaluated_again = bool(state["to_evaluate"] and config.eval_every)
            drop_lost_steps(self.trainer.out, state["step"] or -1, is_evaluated_again)

    async def start(self) -> None:
        self.write_end({})

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        await self.give_up()

    async def give_up(self) -> None:
        step, number = self.trainer.step, self.trainer.signal
        self.write_end({"step": step, "signal": signal.Signals(number).name} if number else {})

    def write_end(self, end: JSONObject) -> None:
        """Writes end.json if it changes. num_steps may be lower than --num_steps in config.yaml:
        dynamic sampling uses up the rows of --num_epochs in fewer steps."""
        end = {"num_steps": self.trainer.config.num_steps, **end}
        if self.trainer.ranks.is_writer and end != self.end:
            self.end = end
            write_whole(self.trainer.out / END, json.dumps(end) + "\n")

    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        """Writes in a thread. The file is complete before the next one is written, and when the run
        ends."""
        await self.close()
        if self.trainer.config.rollout.save:
            ranks = self.trainer.ranks
            suffix = f".rank_{ranks.rank:05d}" if ranks.size > 1 else ""
            stem = name.replace("/", "_") if name.startswith("eval/") else f"step_{step:06d}"
            file = self.trainer.out / "rollouts" / f"{stem}{suffix}.jsonl.zst"
            loop = asyncio.get_running_loop()
            write = naming(file)(write_trajectories)
            self.writing = loop.run_in_executor(None, write, file, trajectories)

    async def finish(self) -> None:
        await self.close()
        self.write_end({"step": self.trainer.step})

    def after_run(self) -> None:
        if not self.trainer.signal:
            write_report(self.trainer.out)
        print_summary(self.trainer)

    async def close(self) -> None:
        if self.writing is not None:
            await self.writing


def write_tokenizers(folder: Path, chats: Mapping[str, Chat]) -> None:
    """Writes the name of each actor's tokenizer next to the rollouts."""
    (folder / TOKENIZERS).write_text(
        json.dumps({name: fingerprint(chat) for name, chat in chats.items()})
    )


def write_trajectories(
    file: Path, trajectories: Sequence[Trajectory | JSONObject], images: Path | None = None
) -> None:
    """Writes a trajectory a line. `images`: folder of images/, by default the file's."""
    scratch = file.with_name(f".{file.name}.tmp")
    compressor = zstandard.ZstdCompressor(level=3)
    with open(scratch, "wb") as raw, compressor.stream_writer(raw) as writer:
        for trajectory in trajectories:
            line = json.dumps(trajectory, default=jsonable)
            writer.write((with_stored_images(line, images or file.parent) + "\n").encode())
    os.replace(scratch, file)


def jsonable(value: object) -> JSONObject | str:
    """A dataclass as a dictionary, without fields with repr=False; other objects that JSON does not
    support as text."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
    return str(value)


def keep_config(out: Path, config: Config) -> list[str]:
    """Writes config.yaml, or leaves the file of the first run. Returns the settings that differ, as
    `name was -> is`."""
    text = to_yaml(without_largest_top_k(config))
    changes = keep_first(out / "config.yaml", text)
    return [
        f"--{name} {was} -> {value}"
        for name, (was, value) in changes.items()
        if name not in MAY_DIFFER
    ]


def without_largest_top_k(config: Config) -> Config:
    """The configuration without the top_k that other limits imply: a resumed run may have other
    limits, and derives top_k from them."""
    actors = {}
    for name, actor in config.actors.items():
        if actor.sampling.get("top_k") == MAX_TOP_K and config.limits_ids(name):
            kept = {key: value for key, value in actor.sampling.items() if key != "top_k"}
            actors[name] = dataclasses.replace(actor, sampling=kept)
    return dataclasses.replace(config, actors=config.actors | actors)


def keep_first(path: Path, text: str) -> dict[str, tuple[JSON, JSON]]:
    """Writes a YAML file, or leaves the file of the first run. Returns name -> (was, is) of
    settings that differ."""
    if path.exists():
        from rl_core.run.saving.resumed_config import changes_of

        return changes_of(path, text)
    write_whole(path, text)
    return {}
