"""rl-core view --tui, by textual's own pilot: curves, a table with filters, conversations, coloured
tokens."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from pathlib import Path

import pytest
from kit import STOP, metrics, run, steps, trajectories, words
from textual.widgets import DataTable, Input, Label, Sparkline, Static, TabbedContent

from rl_core.cli import main
from rl_core.tools.view.data import RunFolder
from rl_core.tools.view.tui import Conversation, Viewer

ENV = """
def load_tasks(split):
    return [{"prompt": f"{n} [red]say \\x1b[2J<script>"} for n in range(8)]

async def reward_fn(completion):
    return {"sum": sum(map(ord, completion)) / 1000, "form": 0.5}
"""


@pytest.fixture(scope="module")
def made(places, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tui")
    (folder / "env.py").write_text(ENV)
    sizes = "--num_steps 3 --tasks_per_step 2 --group_size 4 --max_tokens 8 --optim.lr 1e-2"
    return run(
        folder / "run",
        words("--model", places["model"], "--env_path", folder / "env.py", sizes, STOP),
    )


def seen(out: Path, look, *more: Path) -> None:
    """Runs look(app, pilot) on the terminal's page of a run, or of several."""

    async def inside() -> None:
        app = Viewer([RunFolder(run) for run in (out, *more)])
        async with app.run_test(size=(120, 40)) as pilot:
            await done(app, pilot)
            await look(app, pilot)

    asyncio.run(asyncio.wait_for(inside(), 120))


async def done(app, pilot) -> None:
    """Waits until its workers are."""
    await pilot.pause()
    while app.is_busy("look") or app.is_busy("find"):
        await pilot.pause(0.02)


async def filtered(app, pilot, text: str) -> None:
    await pilot.press("slash")
    app.query_one(Input).value = text
    await pilot.press("enter")
    await done(app, pilot)


def table_of(app) -> list[list[str]]:
    table = app.query_one(DataTable)
    return [[cell.plain for cell in table.get_row_at(n)] for n in range(table.row_count)]


def test_curves_are_those_of_the_metrics_and_grow_with_the_run(made, tmp_path):
    out = tmp_path / "live"
    out.mkdir()
    lines = (made / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:2]))
    (out / "warnings.jsonl").write_text(
        json.dumps({"step": 2, "text": "[b]rewards are constant"}) + "\n"
    )

    async def look(app, pilot) -> None:
        def curve() -> list[float]:
            [found] = [
                line for line in app.query(Sparkline) if line.name == "rollout/policy/reward_mean"
            ]
            return list(found.data)

        rewards = [row["rollout/policy/reward_mean"] for row in steps(made)]
        assert curve() == rewards[:2]
        said = [str(label.render()) for label in app.query(Label)]
        assert any("step 2: [b]rewards are constant" in text for text in said)
        (out / "metrics.jsonl").write_text("".join(lines))
        app.look()
        await done(app, pilot)
        assert curve() == rewards

    seen(out, look)


def test_a_curve_that_hardly_changes_is_a_flat_line(tmp_path):
    values = [100.0, 100.25, 100.0]
    lines = [{"step": step, "rollout/bob/reward_mean": value} for step, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def look(app, pilot) -> None:
        [line] = app.query(Sparkline)
        assert list(line.data) == [100.0] * 3
        assert any(
            "100 to 100  (100 .. 100.2)" in str(label.render()) for label in app.query(Label)
        )

    seen(tmp_path, look)


def test_the_table_is_filtered_and_searched(made):
    async def look(app, pilot) -> None:
        assert [row[0] for row in table_of(app)] == ["3"] * 8 + ["2"] * 8 + ["1"] * 8 and len(
            metrics(made)
        ) == 3
        assert app.query_one(TabbedContent).active == "curves"
        rows = trajectories(made / "rollouts/step_000002.jsonl.zst")
        middle = sorted(row["reward"] for row in rows)[4]
        told = {
            "step:2": rows,
            f"step:2 reward:{middle}..": [row for row in rows if row["reward"] >= middle],
            f"step:2 {rows[0]['task_id'].replace('train/', '')} [RED]Say": [
                row
                for row in rows
                if row["messages"][0]["content"].startswith(f"{rows[0]['task_id'][6:]} [red]say")
            ],
            "actor:alice": [],
        }
        for filter, expected in told.items():
            await filtered(app, pilot, filter)
            assert app.query_one(TabbedContent).active == "conversations"
            assert sorted(row[5] for row in table_of(app)) == sorted(
                f"{row['reward']:.4g}" for row in expected
            ), filter
        await filtered(app, pilot, "step:two")
        assert "invalid literal" in str(app.query_one("#count", Label).render())

    seen(made, look)


def test_a_conversation_opens_and_its_tokens_are_coloured(made):
    async def look(app, pilot) -> None:
        await filtered(app, pilot, "step:3")
        await pilot.press("down", "enter")
        await pilot.pause()
        assert isinstance(app.screen, Conversation)
        row = trajectories(made / "rollouts/step_000003.jsonl.zst")[1]
        text = app.screen.query_one("#text", Static)
        plain = str(text.render())
        assert (
            row["messages"][-1]["content"] in plain
            and "[red]say \\x1b[2J<script>" in plain
            and "\x1b" not in plain
        )
        assert f"reward {row['reward']:.4g} (" in app.screen.headline()
        await pilot.press("c")
        logprobs = row["turns"][0]["completion"]["logprobs"]
        assert str(text.render()).startswith(
            f"logprob from {min(logprobs):.4g} to {max(logprobs):.4g}"
        )
        spans = [
            span.style for span in app.screen.tokens("logprob").spans if "rgb" in str(span.style)
        ]
        assert len(spans) == len(logprobs) and all(str(style).endswith(",0,0)") for style in spans)
        reds = [int(str(style).split("rgb(")[1].split(",")[0]) for style in spans]
        # The least likely token is the brightest.
        assert reds.index(max(reds)) == logprobs.index(min(logprobs))
        own = [
            r["reward"]
            for r in trajectories(made / "rollouts/step_000003.jsonl.zst")
            if r["group_id"] == row["group_id"]
        ]
        of_advantage = {
            str(s.style) for s in app.screen.tokens("advantage").spans if "rgb" in str(s.style)
        }
        assert of_advantage == {
            "white on rgb(0,160,0)"
            if row["reward"] > sum(own) / len(own)
            else "white on rgb(160,0,0)"
        }
        await pilot.press("m")
        assert str(text.render()).startswith("[user]")
        app.seen = app.listed = None
        app.look()  # the screen below follows the run
        await done(app, pilot)
        await pilot.press("slash")
        await pilot.pause()
        assert not isinstance(app.screen, Conversation) and app.query_one(Input).has_focus

    seen(made, look)


def test_keys_work_while_a_search_reads(made, monkeypatch):
    goes_on = threading.Event()

    def slow(run, text, entries):
        assert goes_on.wait(60)
        yield from found(run, text, entries)

    found = RunFolder.search
    monkeypatch.setattr(RunFolder, "search", slow)

    async def look(app, pilot) -> None:
        await pilot.press("slash")
        app.query_one(Input).value = "step:2 red"
        await pilot.press("enter")
        assert app.is_busy("find") and str(app.query_one("#count", Label).render()) == "searching"
        await pilot.press("enter")  # opens the first row of the table as it is
        await pilot.pause()
        assert isinstance(app.screen, Conversation) and len(table_of(app)) == 24
        await pilot.press("escape")
        goes_on.set()
        await done(app, pilot)
        assert len(table_of(app)) == 8

    seen(made, look)


def test_a_run_whose_folder_is_removed_stays_on_the_screen(made, tmp_path):
    out = Path(shutil.copytree(made, tmp_path / "out"))

    async def look(app, pilot) -> None:
        shutil.rmtree(out)
        app.look()
        await done(app, pilot)
        assert (
            "the folder is gone" in str(app.query_one("#count", Label).render())
            and len(table_of(app)) == 24
        )
        await filtered(app, pilot, "step:2 red")
        told = str(app.query_one("#count", Label).render())
        assert ("No such file" in told or "the folder is gone" in told) and len(table_of(app)) == 24
        await pilot.press("enter")
        await pilot.pause()
        assert not isinstance(app.screen, Conversation)

    seen(out, look)


def test_a_run_beside_one_whose_folder_is_gone_grows_on(made, tmp_path):
    gone, live = (Path(shutil.copytree(made, tmp_path / name)) for name in ("gone", "live"))

    async def look(app, pilot) -> None:
        shutil.rmtree(gone)
        metrics = (live / "metrics.jsonl").read_text()
        (live / "metrics.jsonl").write_text(
            metrics + json.dumps({"step": 9, "rollout/policy/reward": 1.0}) + "\n"
        )
        app.look()
        await done(app, pilot)
        assert app.runs[1].rows[-1]["step"] == 9

    seen(gone, look, live)


def test_without_textual_the_extra_is_named(made, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "textual", None)  # as if it were not installed
    assert main(["view", str(made), "--tui"]) == 1
    assert "pip install 'rl_core[view]'" in capsys.readouterr().err
