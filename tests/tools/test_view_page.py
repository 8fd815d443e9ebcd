"""rl-core view in a real browser: Debian's Chromium, headless, driven by Playwright. Screenshots lie in each test's tmp_path."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest
import yaml
from kit import LETTERS, run_ranks, wait_until, words
from PIL import Image
from view_parts import (
    CHROMIUM,
    HOSTILE,
    SCREENS,
    TIMEOUT_MS,
    disk_that_does_not_answer,
    said,
    trajectory,
    write_metrics,
    write_step,
)

from rl_core.environments.agents.session_files import append
from rl_core.run.saving.run_files import write_trajectories
from rl_core.tools.view import main
from rl_core.tools.viewer import report as report_module
from rl_core.tools.viewer import server, tokens
from rl_core.tools.viewer.data import axis_range

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]
AXE = Path(__file__).parents[1] / "axe/axe.min.js"


@pytest.fixture
def game(tmp_path, tiny_model):
    """Folder of a run: two steps of two groups of four episodes of two actors; the last of them
    failed."""
    folder = tmp_path / "game"
    (folder / "rollouts").mkdir(parents=True)
    model = {"model": str(tiny_model)}
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"seed": 0, "actors": {"ann": model, "ben": model}})
    )
    rows = [
        {
            "step": step,
            "rollout/ann/reward_mean": step / 4,
            "learn/ann/grad_norm": step / 4,
            "learn/ann/updates": 1.0,
        }
        for step in (1, 2)
    ]
    write_metrics(folder, [*rows, {"step": 2, "eval/letters/greedy_score": 0.875}])
    for step in (1, 2):
        write_trajectories(folder / f"rollouts/step_{step:06d}.jsonl.zst", episodes(step))
    return folder


def episodes(step: int) -> list:
    result = []
    for group in range(2):
        for n in range(4):
            asked = {"role": "user", "content": f"guess {group}"}
            ann = [
                asked,
                {"role": "assistant", "content": f"high {n}"},
                {"role": "user", "content": f"low {n}"},
            ]
            ben = [
                {"role": "user", "content": f"guess {group}\n\nhigh {n}"},
                {"role": "assistant", "content": f"low {n}"},
            ]
            fields = {"group_id": f"train/{step}/{group}", "reward": n / 4 + group}
            result.append(
                trajectory(n, **fields, actor="ben", messages=ben, turns=[said(2, f"low {n}")])
            )
            result.append(
                trajectory(n, **fields, actor="ann", messages=ann, turns=[said(3, f"high {n}")])
            )
    result[-2].status, result[-2].error, result[-2].reward = (
        "failed",
        "the hook took too long",
        None,
    )
    return result


def shown(page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def open_filters(page) -> None:
    page.locator(".more summary").click()


def count(page, text: str) -> None:
    has(page, "#count", re.compile(f"^{text}"))


def has(page, selector: str, name: Any) -> None:
    """Waits until its text is `name`, or until there are `name` elements."""
    from playwright.sync_api import expect

    result = expect(page.locator(selector))
    (result.to_have_count if isinstance(name, int) else result.to_have_text)(
        name, timeout=TIMEOUT_MS
    )


def picture(page, folder: Path, name: str) -> None:
    page.screenshot(path=folder / f"{name}.png")


def test_a_finished_run_loads_and_opens_its_conversations(game, serve, page_of, tmp_path):
    page = page_of(serve(game))
    page.wait_for_selector("[data-title=evaluation] .u-legend")
    assert shown(page, "[data-title=reward] .u-series .u-value") == ["2", "0.5"]
    page.hover("[data-title=reward] .u-over", position={"x": 3, "y": 40})
    assert shown(page, "[data-title=reward] .u-series .u-value") == ["1", "0.25"]
    page.locator("[data-title=reward] [role=img]").press("ArrowRight")
    assert shown(page, "[data-title=reward] .u-series .u-value") == ["2", "0.5"]
    page.locator("[data-title='gradient norm'] summary").click()
    assert "norm" in shown(page, "[data-title='gradient norm'] dd")[0]
    picture(page, tmp_path, "curves")
    page.get_by_role("link", name="Conversations").click()
    count(page, "32 of 32 trajectories")
    open_filters(page)
    page.locator("#talks [name=step]").fill("2")
    page.locator("#talks [name=actor]").select_option("ben")
    count(page, "8 of 32 trajectories, mean reward 0.75")
    page.get_by_label("Reward from").fill("1.5")
    count(page, "1 of 32")
    page.locator("#list tbody th button").press("Enter")
    page.get_by_role("button", name="This actor").click()
    has(page, "#reader .says p", ["guess 1", "high 2", "low 2"])
    page.get_by_label("Reward from").fill("")
    page.get_by_label("Failure reason").fill("too LONG")
    count(page, "1 of 32")
    page.locator("#list tbody th button").click()
    page.get_by_text("Failed: the hook took too long").wait_for()
    page.get_by_label("Failure reason").fill("")
    page.get_by_label("Search in texts").fill("HIGH 1")
    count(page, "2 of 32")


def test_a_table_says_why_episodes_failed_and_lists_them(game, serve, page_of):
    result = episodes(3)
    for t in result[:4]:
        t.status, t.error, t.reward = (
            "failed",
            f"reward_fn() failed for task {t.task_id}: <b>no</b>",
            None,
        )
    write_trajectories(game / "rollouts/step_000003.jsonl.zst", result)
    page = page_of(serve(game) + "#talks")
    has(page, "#why summary", "Why 5 of 24 episodes failed")
    page.locator("#why summary").click()
    assert shown(page, "#why tbody tr") == [
        "3\t1 to 3\tthe hook took too long",
        "2\t3\treward_fn() failed: <b>no</b>",
    ]
    page.get_by_role("button", name="reward_fn() failed: <b>no</b>").click()
    count(page, "4 of 48")


def test_each_filter_and_order_does_what_it_says(tmp_path, serve, page_of, monkeypatch):
    # One file, or 64 trajectories of a search, at a time.
    monkeypatch.setattr(server, "SLICE_S", -1.0)
    for name, num in (("a", 2), ("b", 70)):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        rows = [
            trajectory(n, group_id=f"train/0/{n if num > 2 else 0}", turns=[said(n + 1)])
            for n in range(num)
        ]
        write_trajectories(tmp_path / name / "rollouts/step_000001.jsonl.zst", rows)
    for name, env in (("step_000002", "letters"), ("eval_000002_greedy", "digits")):
        odd = trajectory(5, group_id="train/0/0", reward=-1.0)
        odd.env = env
        write_trajectories(tmp_path / f"a/rollouts/{name}.jsonl.zst", [odd])
    page = page_of(serve(tmp_path / "a", tmp_path / "b") + "#talks")
    count(page, "73 of 74 ")  # Training's.
    page.locator("#talks [name=kind]").select_option("greedy")
    count(page, "1 of 74 ")
    page.locator("#talks [name=kind]").select_option("all")
    count(page, "74 of 74 ")
    open_filters(page)
    page.get_by_label("Search in texts").fill("reply 6")  # 6, and 60 to 69
    count(page, "11 of 74 ")
    page.get_by_label("Search in texts").fill("")
    chosen = {"run": ("a", 4), "env": ("digits", 1), "status": ("ok", 74)}
    typed = {
        "step": ("2", 2),
        "task": ("n/69", 1),
        "group": ("0/0", 5),
        "low": ("17", 2),
        "high": ("-0.5", 2),
    }
    for name, (value, num) in (chosen | typed).items():
        field = page.locator(f"#talks form [name={name}]")
        field.select_option(label=value) if name in chosen else field.fill(value)
        count(page, f"{num} of 74 ")
        field.select_option(index=0) if name in chosen else field.fill("")
    for name, rewards in (("reward", ("-1", "17.25")), ("step", ("0", "-1"))):
        for direction, reward in zip(("ascending", "descending"), rewards, strict=True):
            head = page.locator("#list thead th", has_text=name)
            while head.get_attribute("aria-sort") != direction:
                head.get_by_role("button").click()
            assert shown(page, "#list .reward")[0] == reward, (name, direction)
    page.locator("#list thead th", has_text="step").get_by_role("button").click()
    page.locator("#list tbody th button").first.click()
    # And not that of step 2, of the same name.
    page.get_by_role("button", name="Group of 2").wait_for()
    # It was resumed.
    write_trajectories(tmp_path / "b/rollouts/step_000001.jsonl.zst", [trajectory(0)])
    count(page, "5 of 5 ")


def test_each_conversation_has_an_address_and_stays_open(tmp_path, serve, page_of):
    (tmp_path / "r/rollouts").mkdir(parents=True)
    conversations = [trajectory(0, reward=reward) for reward in (0.25, 0.5, 0.75)]
    write_trajectories(tmp_path / "r/rollouts/step_000005.jsonl.zst", conversations)
    page = page_of(serve(tmp_path / "r") + "#talks")
    page.locator("#list tbody tr", has_text="0.5").click()
    page.locator("#reader .facts", has_text="reward 0.5").wait_for()
    address = re.search("#.*", page.url)[0]
    page.evaluate("show()")  # As when new steps come.
    assert re.search("#.*", page.url)[0] == address
    other = page_of(serve(tmp_path / "r") + address)
    other.locator("#reader .facts", has_text="reward 0.5").wait_for()


def test_an_address_opens_its_conversation_in_another_viewer(game, serve, page_of):
    page = page_of(serve(game) + "#talks")
    open_filters(page)
    page.locator("#talks form [name=step]").fill("1")
    page.locator("#list tbody tr", has_text="high 2").last.click()
    page.get_by_role("heading", name="train/2 #2, step 1").wait_for()
    address = re.search("#.*", page.url)[0]
    wanted = {"run": str(game), "step": "1", "kind": "train", "index": "2", "actor": "ann"}
    assert wanted.items() <= dict(parse_qsl(address.partition("?")[2])).items()
    headline, fields = shown(page, "#reader h2"), "#reader .facts"
    facts = page.locator(fields).inner_text()
    write_trajectories(game / "rollouts/step_000003.jsonl.zst", episodes(3))
    other = page_of(serve(game) + address)
    other.locator("#reader h2").wait_for()
    assert shown(other, "#reader h2") == headline and other.locator(fields).inner_text() == facts
    assert re.search("#.*", other.url)[0] == address
    # A resumed run writes the step anew, with one episode less.
    write_trajectories(game / "rollouts/step_000001.jsonl.zst", episodes(1)[2:])
    count(other, "14 of 46")  # The filter is in the address too.
    assert re.search("#.*", other.url)[0] == address and shown(other, "#reader h2") == headline


def test_an_address_of_what_is_not_there_is_told(game, serve, page_of):
    page = page_of(serve(game) + "#talks?step=7&actor=ann")
    page.get_by_text("The conversation of this address is not here.").wait_for()
    assert page.locator("#reader h2").count() == 0


def test_several_actors_are_one_chat_and_a_group_stands_side_by_side(
    game, serve, page_of, tmp_path
):
    page = page_of(serve(game) + "#talks")
    page.locator("#list tbody th button").first.click()
    page.get_by_role("button", name="All actors").click()
    has(page, "#reader .who", 3)
    assert shown(page, "#reader .who") == ["user to ann", "ann", "ben"]
    assert shown(page, "#reader .says p") == ["guess 0", "high 0", "low 0"]
    said_by = page.locator("#reader .who")
    hues = {said_by.nth(n).evaluate("node => getComputedStyle(node).color") for n in range(3)}
    assert len(hues) == 3
    page.get_by_role("button", name="Group of 4").click()
    has(page, "#reader h3", 4)
    assert shown(page, "#reader h3") == [f"#{n} reward {n / 4 or 0:g}" for n in range(4)]
    picture(page, tmp_path, "group")
    alone = [
        trajectory(n, group_id="z", index=0, actor=name) for n, name in enumerate(("ann", "ben"))
    ]
    write_trajectories(game / "rollouts/step_000003.jsonl.zst", alone)
    open_filters(page)
    page.locator("#talks [name=step]").fill("3")
    count(page, "2 of")
    page.locator("#list tbody th button").first.click()
    page.get_by_role("button", name="All actors").click()  # who do not hear each other
    has(page, "#reader h3", ["ann  reward 0", "ben  reward 0.25"])
    asked = {"role": "user", "content": "guess"}
    ann = [
        asked,
        {
            "role": "assistant",
            "content": "<think>hm</think>\nhigh",
            "tool_calls": [{"name": "dice"}],
        },
    ]
    ben = [asked | {"content": "guess\n\nhigh"}, {"role": "assistant", "content": "low"}]
    alone[0].messages, alone[1].messages = ann, ben  # who hears no thoughts
    write_trajectories(game / "rollouts/step_000004.jsonl.zst", alone)
    page.locator("#talks [name=step]").fill("4")
    has(page, "#list tbody td:nth-child(2)", ["4", "4"])
    page.locator("#list tbody th button").first.click()
    has(page, "#reader .who", ["user to ann", "ann", "ben"])
    assert shown(page, "#reader .call summary") == ["dice()"]
    assert shown(page, "#reader .thought summary") == ["Thoughts, 1 words"]
    assert shown(page, "#reader .says p:visible") == ["guess", "high", "low"]


def test_speakers_stand_in_the_order_that_was_recorded(tmp_path, serve, page_of):
    def view(name, *output, places):
        messages = [
            {"role": role, "content": text}
            for role, text in (piece.split(": ") for piece in output)
        ]
        return trajectory(0, actor=name, messages=messages, message_indices=places)

    task = ["user: play", "assistant: 9"]
    ann = view("ann", *task, "user: go", "assistant: 1", "user: 1", "assistant: 1", places=[4, 7])
    ben = view(
        "ben", *task, "user: go", "assistant: 1", "user: Continue.", "assistant: 1", places=[5, 6]
    )
    write_step(tmp_path, 1, [ben, ann])
    page = page_of(serve(tmp_path) + "#talks")
    page.locator("#list tbody th button").first.click()
    page.get_by_role("button", name="All actors").click()
    page.locator("#reader .who").last.wait_for()
    spoke = [who for who in shown(page, "#reader .who") if who in ("ann", "ben")]
    assert spoke == ["ann", "ann", "ben", "ben", "ben", "ann"]  # the first of each in the task


def test_tokens_are_coloured_and_tell_their_values(game, serve, page_of, tmp_path):
    (game / "tokens").mkdir()
    values = {
        "logprobs": [-0.25] * 3,
        "ratios": [1, 1.5, 0.5],
        "advantages": [2.0] * 3,
        "entropy_nats": [0.1, None, 2],
    }
    lines = [{"turns": [values | {"ratios": [n, 1.5, 0.5]}]} for n in range(16)]
    write_trajectories(game / "tokens/step_000002.jsonl.zst", lines)
    page = page_of(serve(game) + "#talks")
    open_filters(page)
    page.locator("#talks [name=actor]").select_option("ann")
    page.locator("#list tbody th button").nth(1).click()  # the fourth line of the file
    page.get_by_role("button", name="This actor").click()
    by, colours = page.get_by_label("Colour tokens by"), {}
    for name in ("mask", "advantage", "logprob", "ratio", "gap", "entropy", "version"):
        by.select_option(name)
        page.wait_for_selector("#reader .scale")
        hues = [
            span.evaluate("node => node.style.background")
            for span in page.locator(".tokens span").all()
        ]
        assert (
            len(hues) == 5 and not any(map(is_painted, hues[:2])) and any(map(is_painted, hues[2:]))
        ), (name, hues)
        if name in ("ratio", "entropy"):
            colours[name] = hues[2:]
    (more, some, less), (low, unknown, high) = (colours[name] for name in ("ratio", "entropy"))
    strengths = [float(hue.split(",")[3][:-1]) for hue in (more, some, less, low, high)]
    # Ratios 3, 1.5 and 0.5 on a scale from 0.5 to 1.5, entropies 0.1 and 2 on one from 0 to 3.
    entropies = [0.04 + 0.46 * (value / 3) ** 0.7 for value in (0.1, 2)]
    assert strengths == pytest.approx([0.5, 0.5, 0.5, *entropies], abs=0.005)
    assert more.startswith("rgba(214, 60, 40,")  # warm
    assert more.split(",")[:3] == some.split(",")[:3] != less.split(",")[:3] and not is_painted(
        unknown
    )
    by.select_option("ratio")
    page.locator(".tokens span").nth(2).hover()
    hint = page.locator("#tip").inner_text().split("\n")
    assert hint == [
        '"<|pad|>"  id 0',
        "sampled",
        "logprob (nats)  -0.5",
        "policy version  0",
        "advantage  2",
        "ratio new / old  3",
        "entropy (nats)  0.1",
        "engine-learner gap (nats)  0.25",
    ]
    page.locator(".tokens").press("ArrowRight")
    assert "ratio new / old  1.5" in page.locator("#tip").inner_text()
    picture(page, tmp_path, "tokens")
    page.get_by_role("button", name="Next").click()
    page.get_by_role("heading", name="train/2").wait_for()
    assert page.locator("#tip").is_hidden()


def is_painted(background: str) -> bool:
    return background not in ("", "transparent")


def test_without_recorded_values_the_page_says_how_to_record_them(game, serve, page_of):
    page = page_of(serve(game) + "#talks")
    page.locator("#list tbody th button").first.click()
    page.get_by_label("Colour tokens by").select_option("advantage")
    page.get_by_text(f"rl-core replay {game} --step 2 --tokens").wait_for()
    assert page.locator("option[value=ratio]").is_disabled()
    assert shown(page, "option[value=entropy]") == ["entropy (nats): not recorded"]


def test_text_of_a_model_is_never_part_of_the_page(tmp_path, serve, page_of):
    evil = f"<script>window.evil = 1</script><img src=x onerror='window.evil = 2'>{HOSTILE}"
    folder = tmp_path / "<img src=x onerror='window.evil = 3'>"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": evil}))
    write_metrics(folder, [{"step": 1, f"rollout/{evil.replace('/', '')}/reward_mean": 0.5}])
    messages = [
        {"role": evil, "content": evil},
        {"role": "assistant", "content": evil, "name": evil},
    ]
    row = trajectory(
        0,
        messages=messages,
        actor=evil,
        error=evil,
        turns=[said(2, evil)],
        reward_parts={evil: 1.0},
        log=f"E: no pytest {evil}",
        columns={evil: evil},
    )
    row.env = row.task_id = row.player = evil
    write_trajectories(folder / "rollouts/step_000001.jsonl.zst", [row])
    (folder / "warnings.jsonl").write_text(json.dumps({"step": 1, "text": evil}) + "\n")
    assert main([str(folder), "--report", str(tmp_path / "report.html")]) == 0
    for address in (serve(folder), f"file://{tmp_path}/report.html"):
        page = page_of(address)
        page.wait_for_selector(".u-legend")
        assert shown(page, "#warnings li")[0].startswith(
            "step 1: <script>window.evil = 1</script><img src=x"
        )
        page.get_by_role("link", name="Configuration").click()
        page.get_by_role("link", name="Conversations").click()
        page.locator("#list tbody th button").click()
        page.wait_for_selector("#reader .says")
        assert "<script>window.evil = 1</script><img src=x" in shown(page, "#reader .says p")[0]
        assert shown(page, "#reader pre")[-1].startswith("E: no pytest <script>window.evil")
        assert shown(page, "#reader dl")[0].count("<script>window.evil = 1</script>") == 2
        page.get_by_label("Colour tokens by").select_option("logprob")
        page.locator(".tokens span").first.hover()
        assert page.evaluate(
            "[window.evil === undefined, document.images.length, document.scripts.length]"
        ) == [
            True,
            0,
            3,
        ]


def png_of(picture) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_images_of_a_run_are_thumbnails_and_nothing_else_is_an_image(
    tmp_path, serve, page_of, monkeypatch
):
    """Images in a message and in a result of a tool; an SVG, a path and an address stay text."""
    noise = np.random.RandomState(0).randint(0, 256, (600, 900, 3), dtype=np.uint8)
    shown_urls = [png_of(noise), png_of(np.zeros((16, 24, 3), np.uint8))]
    svg = "<svg xmlns='http://www.w3.org/2000/svg' onload='window.evil = 1'/>"
    others = ["images/../../config.yaml", f"data:image/svg+xml,{svg}", "http://127.0.0.1:9/a.png"]
    others += ["images/0123456789abcdef.png"]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
    images = [{"type": "image", "image": url} for url in (*shown_urls, *others)]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "before"}, images[0], *images[2:]]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [images[1]]},
        {"role": "assistant", "content": "seen"},
    ]
    folder = tmp_path / "run"
    write_step(folder, 2, [trajectory(n, messages=messages) for n in range(3)])
    asked = {"role": "user", "content": [images[1], {"type": "text", "text": "colour?"}]}
    reply = {"role": "assistant", "content": "black"}
    heard = [{"type": "text", "text": "colour?\n\nblack\n\nand"}, images[0]]
    heard = {"role": "user", "content": [images[1], *heard, {"type": "text", "text": "here?"}]}
    views = {"ann": [asked, reply], "ben": [heard, {"role": "assistant", "content": "grey"}]}
    write_step(folder, 1, [trajectory(0, messages=m, actor=a, turns=[said(3)])
                           for a, m in views.items()])  # fmt: skip
    write_metrics(folder, [{"step": 1, "rollout/policy/reward_mean": 0.5}])
    assert main([str(folder), "--report", str(tmp_path / "report.html")]) == 0
    report = (tmp_path / "report.html").read_text()
    assert report.count("data:image/jpeg;base64,") == report.count("data:image/png;base64,iV") == 1
    sizes = "[...document.images].map((image) => [image.naturalWidth, image.naturalHeight])"
    for address in (serve(folder), f"file://{tmp_path}/report.html"):
        page = page_of(address)
        page.get_by_role("link", name="Conversations").click()
        page.locator("#list tbody th button").first.click()
        page.wait_for_selector("#reader .says img")
        page.locator("#reader details.call").evaluate("node => { node.open = true; }")
        wait_until(lambda page=page: page.evaluate(sizes) == [[256, 171], [24, 16]], "images")
        names = [
            link.get_attribute("download") for link in page.locator("#reader a:has(img)").all()
        ]
        stems = [Path(name).stem for name in names]
        assert [(folder / f"rollouts/images/{stem}.png").exists() for stem in stems] == [True] * 2
        assert [Path(name).suffix for name in names] == [".jpeg", ".png"]  # Of thumbnails.
        texts = shown(page, "#reader .says p.soft")
        assert texts == [f"[image {name[:80]}]" for name in others]
        assert page.evaluate("window.evil === undefined")
        # The chat of two actors, of which the second one sees one more image.
        page.locator("#list tbody th button").last.click()
        page.get_by_role("button", name="All actors").click()
        has(page, "#reader .who", ["user to ann", "ann", "user to ben", "ben"])
        wait_until(
            lambda page=page: page.evaluate(sizes) == [[24, 16], [24, 16], [256, 171]], "images"
        )
        assert shown(page, "#reader .says p") == [
            "colour?",
            "black",
            *"colour? and here? grey".split(),
        ]
    monkeypatch.setattr(tokens, "MAX_THUMBNAILS", 1)
    stored = [{"type": "image", "image": f"images/{image.name}"} for image in
              (folder / "rollouts/images").iterdir()]  # fmt: skip
    shown_images = tokens.thumbnails(folder / "rollouts", [{"content": stored}])
    assert list(shown_images) == [stored[0]["image"]] and len(stored) > 1
    monkeypatch.setattr(report_module, "MAX_IMAGE_BYTES", 1000)
    assert main([str(folder), "--report", str(tmp_path / "report.html")]) == 0
    assert "data:image/jpeg;base64," not in (tmp_path / "report.html").read_text()


def write_session(folder: Path, number: int, *states: str) -> None:
    """Appends the events of a session of a run with --online up to the last state."""
    done = {
        "token_ids": [1],
        "logprobs": [-0.5],
        "text": f"{number} {HOSTILE}",
        "finish_reason": "stop",
    }
    events = {
        "open": {"event": "start", "number": number, "task_id": "sum"},
        "replied": {"event": "reply", "completions": [done | {"policy_version": 2}]},
        "waiting": {"event": "end"},
        "rated": {"event": "rated", "reward": 0.75},
        "left out": {"event": "left_out", "reason": "no reward came"},
    }
    file = folder / f"rollouts/sessions/{number:06d}.jsonl"
    file.parent.mkdir(exist_ok=True)
    for state in states:
        append(file, {"time": 1e9 + 60 * number} | events[state])


def test_a_live_run_updates_by_itself(game, serve, page_of):
    import fcntl

    with open(game / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = page_of(serve(game))
        page.locator(".live").wait_for()
        write_metrics(game, [{"step": 3, "rollout/ann/reward_mean": 0.75}], "a")
        write_trajectories(game / "rollouts/step_000003.jsonl.zst", episodes(3))
        page.locator("#chips", has_text="step 3").wait_for()
        assert shown(page, "[data-title=reward] .u-series .u-value") == ["3", "0.75"]
        (game / "warnings.jsonl").write_text(
            json.dumps({"step": 3, "text": "rewards are constant"}) + "\n"
        )
        page.get_by_text("step 3: rewards are constant").wait_for()
        page.get_by_role("link", name="Conversations").click()
        count(page, "48 of 48")
        page.get_by_label("Search in texts").fill("high 0")
        count(page, "12 of 48")
        write_session(game, 0, "open", "replied", "left out")
        write_session(game, 1, "open")
        page.get_by_role("link", name="Sessions").click()
        has(page, "#sessions tbody tr:first-child td", ["open", "-", "0", "", "sum", "", ""])
        write_session(game, 1, "replied", "waiting", "rated")
        row = ["rated", "0.75", "1", "2", "sum", re.compile("^1 x"), ""]
        has(page, "#sessions tbody tr:first-child td", row)
        has(page, "#sessions p", "1 rated, 1 left out")
        has(page, "#sessions svg", 0)
        write_session(game, 2, "open", "replied", "waiting", "rated")
        has(page, "#sessions svg circle", 2)
        has(page, "#sessions svg polyline", 1)
        page.get_by_role("link", name="Conversations").click()
        # By a run that was resumed.
        write_trajectories(game / "rollouts/step_000003.jsonl.zst", episodes(3)[:2] * 8)
        count(page, "24 of 48")
    has(page, ".live", 0)


def test_missing_parts_are_told_and_the_rest_is_shown(game, tmp_path, serve, page_of):
    other = tmp_path / "other"
    shutil.copytree(game, other)
    (other / "metrics.jsonl").unlink()
    file = other / "rollouts/step_000002.jsonl.zst"
    complete, noise = file.read_bytes(), b"\xff" * 100
    file.write_bytes(complete[: len(complete) // 2] + noise)
    page = page_of(serve(other))
    page.get_by_text("No metrics yet").wait_for()
    (other / "config.yaml").write_text("algorithm: grpo\nnum_steps: 9\n")
    killed = serve(other)
    for failure, says in (
        ("", "of 9 and recorded no error"),
        ("OSError: full\n\nx", "OSError: full"),
    ):
        if failure:
            (other / "failure.txt").write_text(failure)
        for view in ("curves", "talks", "tasks", "config"):
            ended = page_of(f"{killed}#{view}")
            has(ended, "#ended", re.compile(says))
            has(ended, "#nothing:visible", 0)
            ended.close()
    (other / "failure.txt").unlink()
    (other / "end.json").write_text('{"num_steps": 7, "step": 0, "signal": "SIGTERM"}')
    ended = page_of(killed)
    has(ended, "#ended", re.compile("^Stopped by SIGTERM after step 0 of 7, saved"))
    has(ended, ".failed:visible", 0)
    ended.close()
    (other / "end.json").unlink()
    page.get_by_role("link", name="Conversations").click()
    has(page, "#count", re.compile("(16|17|2[0-9]|30) of "))  # The readable beginning.
    file.write_bytes(complete)
    count(page, "32 of 32")
    file.unlink()  # By a run that is resumed.
    count(page, "16 of 16")
    page = page_of(serve(other, game))
    has(page, "[data-title=reward] .u-value", ["2", "0.5"])
    page.get_by_role("link", name="Conversations").click()
    count(page, "48 of 48")
    shutil.rmtree(other)
    page.get_by_text(f"{other}: the folder is gone").wait_for()
    write_trajectories(game / "rollouts/step_000003.jsonl.zst", episodes(3))
    count(page, "64 of 64")


def test_a_run_on_a_slow_disk_holds_up_neither_its_curves_nor_other_runs(
    game, tmp_path, serve, page_of, monkeypatch
):
    slow = tmp_path / "slow"
    shutil.copytree(game, slow)
    with disk_that_does_not_answer(monkeypatch, slow / "rollouts"):
        page = page_of(serve(slow, game))
        has(page, "[data-title=reward] .u-value", ["2", "0.5", "0.5"])
        page.get_by_role("link", name="Conversations").click()
        count(page, "32 of 32")  # Those of the other run.
    count(page, "64 of 64")


def test_different_runs_show_their_own_last_values(game, tmp_path, serve, page_of):
    tuned = tmp_path / "deep/tuned"
    tuned.mkdir(parents=True)
    write_metrics(
        tuned, [{"step": step, "learn/policy/grad_norm": 1 / step} for step in range(1, 6)]
    )
    page = page_of(serve(tuned, game))
    has(page, "#chips li", ["tuned step 5", "game step 2"])
    titles = ["reward", "evaluation", "gradient norm"]  # Not in the order of the first run.
    has(page, "#curves > .charts .chart:visible h2", titles)
    has(page, "[data-title='gradient norm'] .u-value", ["5", "0.2", "0.5"])
    page.get_by_role("link", name="Runs").click()
    page.get_by_label("Show game").uncheck()
    page.get_by_role("link", name="Curves").click()
    has(page, "#curves > .charts .chart:visible h2", ["gradient norm"])
    has(page, "[data-title='gradient norm'] .u-value", ["5", "0.2"])
    page.reload()
    has(page, "#curves > .charts .chart:visible h2", ["gradient norm"])
    page.go_back()
    page.get_by_role("link", name="Runs").click()
    page.get_by_label("Show game").check()
    page.get_by_role("link", name="Curves").click()
    has(page, "#curves > .charts .chart:visible h2", titles)
    page = page_of(serve(tmp_path))  # A folder of runs opens on their table.
    page.get_by_role("link", name="game", exact=True).click()
    has(page, "#chips li", ["game step 2"])
    has(page, "#curves > .charts .chart:visible h2", titles)


def test_new_points_leave_the_zoom_and_the_curves_that_are_hidden(game, serve, page_of):
    rows = [
        {"step": step, "rollout/ann/reward_mean": step / 4, "rollout/ben/reward_mean": 0.5}
        for step in range(3, 13)
    ]
    write_metrics(game, rows, "a")
    page = page_of(serve(game))
    over = page.locator("[data-title=reward] .u-over")
    over.wait_for()
    plot = "document.querySelector('[data-title=reward] [role=img]').uplot"

    def range_of() -> list[float]:
        return page.evaluate(f"(({{min, max}}) => [min, max])({plot}.scales.x)")

    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    page.mouse.up()
    wait_until(lambda: range_of()[0] > 2, "the zoom")
    chosen = range_of()
    assert chosen == pytest.approx([1 + 11 * 0.3, 1 + 11 * 0.6], abs=0.2)
    page.locator("[data-title=reward] .u-series th", has_text="ben").click()
    write_metrics(game, [{"step": step, "rollout/ann/reward_mean": 1.0} for step in (13, 14)], "a")
    wait_until(lambda: page.evaluate(f"{plot}.data[0].at(-1)") == 14, "new points")
    assert range_of() == chosen
    page.get_by_label("Smoothing").fill("0.5")  # Draws the chart anew.
    assert range_of() == chosen and page.evaluate(f"{plot}.series.length") == 5
    shows = page.evaluate(f"{plot}.series.map(({{label, show}}) => `${{label}} ${{show}}`)")
    assert set(shows) == {"step true", "ann true", "ben false"}
    over.dblclick()
    wait_until(lambda: range_of() == [1, 14], "all steps")
    write_metrics(game, [{"step": 15, "rollout/ann/reward_mean": 1.0}], "a")
    wait_until(lambda: range_of() == [1, 15], "the new step")


def test_a_curve_that_hardly_changes_is_a_flat_line(tmp_path, serve, page_of):
    curves = {
        "reward": ("rollout/ann/reward_mean", [100.0, 100.25, 100.5]),
        "learning rate": ("learn/ann/lr", [1e-6, 1e-6, 1e-6]),
        "loss": ("learn/ann/loss", [1e-10, -1e-10, 0.0]),
        "clip fraction": ("learn/ann/clip_frac", [0.0, 0.0, 0.0]),
    }
    write_metrics(
        tmp_path, [{"step": n, **{name: v[n] for name, v in curves.values()}} for n in range(3)]
    )
    page = page_of(serve(tmp_path))
    page.get_by_text("Constant: clip fraction, learning rate").click()
    for title, (_, values) in curves.items():
        area = f'[data-title="{title}"] [role=img]'
        page.locator(area).wait_for()
        low, high = page.evaluate(
            f"(({{min, max}}) => [min, max])(document.querySelector('{area}').uplot.scales.y)"
        )
        assert (low, high) == pytest.approx(axis_range(values), rel=1e-9), title


def test_runs_are_overlaid_smoothed_and_compared(game, tmp_path, serve, page_of):
    odd = {"learn/ann/clip_frac": 0.0, "learn/ann/lr": 1e300}
    rows = [
        {"step": step, "rollout/ann/reward_mean": float(step == 24)} | odd for step in range(3, 25)
    ]
    write_metrics(
        game, [*rows, *({"step": step, "eval/letters/greedy_score": 1.0} for step in (0, 24))], "a"
    )
    other = tmp_path / "other"
    shutil.copytree(game, other)
    (other / "config.yaml").write_text(
        (other / "config.yaml").read_text().replace("seed: 0", "seed: 1\nlr: 0.5")
    )
    page = page_of(serve(game, other))
    has(page, "[data-title=reward] .u-label", ["step", "ann, game", "ann, other"])
    page.get_by_text("Constant: clip fraction, learning rate").click()
    hues = (
        "document.querySelector('[data-title=reward] [role=img]').uplot.series.slice(1).map(s => "
        "s.stroke())"
    )
    assert len(set(page.evaluate(hues))) == 2
    page.get_by_label("Smoothing").fill("0.5")
    # Half of the last value.
    has(page, "[data-title=reward] .u-series:not(.raw) .u-value", ["24", "0.5", "0.5"])
    has(page, "[data-title=evaluation] .u-series:not(.raw) .u-value", ["24", "1", "1"])
    page.hover("[data-title=reward] .u-over", position={"x": 3, "y": 40})
    has(page, "[data-title=reward] .u-series:not(.raw) .u-value", ["1", "0.25", "0.25"])
    steps = "document.querySelector('[data-title=%s] [role=img]').uplot.data[0]"
    assert (
        page.evaluate(steps % "evaluation") == [0, 2, 24]
        and len(page.evaluate(steps % "reward")) == 24
    )
    page.get_by_label("log y").check()
    page.get_by_label("log x").check()
    assert page.evaluate(steps % "evaluation") == [2, 24] and page.evaluate(steps % "reward") == [
        1,
        2,
        24,
    ]
    has(page, "[data-title='clip fraction'] .soft", "No value has a place on this axis.")
    has(
        page,
        "[data-title='learning rate'] .u-series:not(.raw) .u-value",
        ["24", "1e+300", "1e+300"],
    )
    page.get_by_label("Find").first.fill("grad_norm")
    assert page.locator("#curves > .charts .chart:visible h2").all_inner_texts() == [
        "gradient norm"
    ]
    page.get_by_role("link", name="Configuration").click()
    page.locator("#config tbody tr").first.wait_for()
    assert sorted(shown(page, "#config tbody tr")) == ["lr\t\t0.5", "seed\t0\t1"]
    page.get_by_label("only differences").uncheck()
    assert len(shown(page, "#config tbody tr")) == 4


@pytest.mark.parametrize("screen", SCREENS)
def test_axe_finds_no_fault(screen, game, serve, page_of, tmp_path):
    hint = [
        json.dumps({"step": step, "text": "rewards are constant, " * 9}) + "\n" for step in range(9)
    ]
    (game / "warnings.jsonl").write_text("".join(hint))  # more than fit
    for number in range(2):
        write_session(game, number, "open", "replied", "waiting", "rated")
    other = tmp_path / "other"
    shutil.copytree(game, other)
    page = page_of(serve(game, other), screen, bypass_csp=True)  # axe is put into the page
    page.wait_for_selector(".u-legend")
    page.evaluate(AXE.read_text())
    picture(page, tmp_path, f"curves_{screen}")
    assert page.locator("#warnings li").first.is_hidden()
    page.get_by_text("18 warnings, the last: other step 8: rewards are").click()
    assert not faults_of(page)
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keys").wait_for()
    assert not faults_of(page)
    page.keyboard.press("Escape")
    has(page, "#keys:visible", 0)
    page.get_by_role("link", name="Conversations").click()
    page.locator("#list tbody th button").first.wait_for()
    assert not faults_of(page)
    page.locator("#list tbody th button").first.click()
    page.get_by_role("button", name="Group of 4").click()
    page.get_by_label("Colour tokens by").select_option("logprob")
    page.locator(".tokens").first.press("End")
    page.wait_for_selector("#tip:visible")
    picture(page, tmp_path, f"talks_{screen}")
    assert not faults_of(page)
    for name in ("Conversations", "Tasks", "Sessions", "Configuration", "Runs", "Curves"):
        page.get_by_role("link", name=name, exact=True).click()
        picture(page, tmp_path, f"{name}_{screen}")
        assert name == "Conversations" or not faults_of(page), name
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= SCREENS[screen][1], f"{name} scrolls sideways"


def faults_of(page) -> list[str]:
    result = page.evaluate("async () => (await axe.run(document)).violations")
    return [json.dumps([f["id"], f["help"], [n["target"] for n in f["nodes"]]]) for f in result]


def test_a_run_that_is_done_has_a_report_that_needs_nothing_else(tmp_path, tiny_model, page_of):
    (tmp_path / "letters.py").write_text(LETTERS)
    sizes = "--group_size 2 --tasks_per_step 2 --num_steps 2 --max_tokens 6 --max_prompt_tokens 16"
    out = tmp_path / "out"
    where = words("--model", tiny_model, "--env_path", tmp_path / "letters.py", "--out", out)
    run_ranks(1, "-m", "rl_core.train", *where, *words(sizes), env={"KIT_REPORT": "1"})
    moved = shutil.copy(out / "report.html", tmp_path / "elsewhere.html")
    shutil.rmtree(out)
    page = page_of(f"file://{moved}", offline=True)
    page.wait_for_selector("[data-title=reward] .u-legend")
    page.get_by_role("link", name="Conversations").click()
    count(page, "4 of 4")  # a group of each step
    page.get_by_label("Search in texts").fill("no such text")
    count(page, "0 of 4")
    page.get_by_label("Search in texts").fill("and")
    count(page, "4 of 4")
    page.locator("#list tbody th button").first.click()
    page.get_by_label("Colour tokens by").select_option("version")
    assert shown(page, "#reader .scale") == ["1"]
