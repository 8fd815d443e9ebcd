"""Reading rollouts in a real browser: messages, tasks, runs, notes, keys and addresses."""

from __future__ import annotations

import json
import random
import re
import xml.dom.minidom
from io import BytesIO
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from PIL import Image
from test_view_page import AXE, count, faults_of, has, open_filters, shown
from view_parts import CHROMIUM, said, trajectory, write_metrics, write_step

from rl_core.tools.view import main

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]
PYTHON = "```python\ndef f(x):\n    return 'a'  # why\n```"
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "weight", "arguments": '{"name": "cat"}'},
}
# Text of a message -> [(selector, texts of the elements that show it)].
TEXTS = [
    ("**bold** and `code`", [("strong", ["bold"]), ("code", ["code"])]),
    ("# Head\n\n1. one\n2. two", [(".h", ["Head"]), ("ol li", ["one", "two"])]),
    ("| a | b |\n|---|---|\n| 1 | 2 |", [("th", ["a", "b"]), ("td", ["1", "2"])]),
    (PYTHON, [(".t-keyword", ["def", "return"]), (".t-string", ["'a'"]), (".t-comment", ["# why"])]),
    ("so $\\frac{1}{2}$ is", [("math mfrac", ["12"])]),
    ("\\[x^2\\] and \\(y\\)", [("math msup", ["x2"]), (".formula", 2)]),
    ("costs $5 and $6", [("math", 0), ("p", ["costs $5 and $6"])]),
    ("$\\nosuch{$", [("math", 0), ("p", ["$\\nosuch{$"])]),
    ("[a](javascript:alert(1)) ![b](http://x.org/y.png)", [("a, img", 0)]),
    ("<answer>\n4\n</answer>", [("p", ["<answer>\n4\n</answer>"])]),
    ("a\nb  c", [("p", ["a\nb  c"])]),
    ("x\n" * 100, [(".short", 1), (".more", ["more (101 lines)"])]),
    ("<think>why not</think>\n42", [(".thought summary", ["Thoughts, 2 words"]), ("p:visible", ["42"])]),
    ("why not</think>42", [(".thought summary", ["Thoughts, 2 words"]), ("p:visible", ["42"])]),
    ("<think>cut off", [(".thought summary", ["Thoughts, 2 words"]), ("p:visible", 0)]),
]  # fmt: skip


@pytest.fixture
def open_run(tmp_path, serve, page_of):
    """open_run(trajectories, address) -> the page of a run with one step."""

    def make(rows, address: str = "#talks", **more):
        write_step(tmp_path, 1, rows)
        return page_of(serve(tmp_path) + address, **more)

    return make


def texts_of(nodes) -> list[str]:
    return [node.text_content() for node in nodes.all()]


def test_messages_are_read_and_not_dumped(open_run):
    replies = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        for text, _ in TEXTS
    ]
    page = open_run([trajectory(n, messages=messages) for n, messages in enumerate(replies)])
    for n, (text, wanted) in enumerate(TEXTS):
        page.get_by_role("button", name=f"train/{n} #{n}", exact=True).click()
        page.get_by_role("heading", name=f"train/{n} #{n}, step 1").wait_for()
        for selector, value in wanted:
            where = page.locator("#reader .says").last.locator(selector)
            assert (where.count() if isinstance(value, int) else texts_of(where)) == value, text
    page.get_by_role("button", name="Raw").click()
    assert json.loads(shown(page, "#reader pre")[0]) == replies[-1]


def test_a_call_and_its_result_are_one_line_and_a_system_prompt_is_folded(open_run):
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "how heavy?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, {"name": "now", "arguments": {}}]},
        {"role": "tool", "tool_call_id": "c", "content": "8\nkg"},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "8 kg", "reasoning_content": "it said so"},
    ]  # fmt: skip
    row = trajectory(0, messages=messages, turns=[said(2), said(3)], turn_rewards=[0.0, 0.5])
    page = open_run([row])
    lines = ['weight(name="cat") -> 8 ...', "now() -> noon"]
    has(page, "#reader .call summary", lines)
    page.locator("#reader .call summary").first.click()
    assert json.loads(shown(page, "#reader .call pre:visible")[0]) == CALL
    assert shown(page, "#reader .call pre:visible")[1] == "8\nkg"
    assert shown(page, "#reader .who") == ["system", "user", "policy", "policy +0.5"]
    assert shown(page, "#reader .says > details > summary") == [
        "System prompt, 2 words",
        *lines,
        "Thoughts, 3 words",
    ]


def test_no_hostile_text_becomes_more_than_text(open_run):
    pieces = [
        "<script>evil=1</script>", "<img src=x onerror=evil=2>", "<svg onload=evil=3>", "](javascript:evil=4)", "[a", "![a", "$\\href{javascript:evil=5}{a}$",
        "$\\includegraphics{http://x.org/a.png}$", "\\(\\style{background:url(http://x.org)}{a}\\)", "<a href=javascript:evil=6>", "```html\n", "```", "`", "$$", "\\[", "|a|\n|-|\n", "> ",
        "- ", "\u2028", "\u202e", "</think>", "<think>", "&lt;script&gt;", "<iframe srcdoc='<script>top.evil=7</script>'>", "\x00", "\ud83d", "$\\def\\a{\\a\\a}\\a$", "__proto__", "*", "_", "\n\n", "<!--", "http://x.org",
    ]  # fmt: skip
    rng = random.Random(0)
    texts = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(10_000)]
    page = open_run([trajectory(0)])
    has(page, "#reader h2", 1)
    # Tags and attributes that elements of messages have, and the number of texts that were shown whole.
    tags, names, num = page.evaluate(
        """texts => {
            const tags = new Set(), names = new Set();
            let num = 0;
            for (const text of texts) {
                const box = el("div", {}, shownMessage({ role: "assistant", content: text, tool_calls: [{ function: { name: text, arguments: text } }] }, [{ content: text }]));
                document.body.append(box);
                for (const node of box.querySelectorAll("*")) tags.add(node.localName), [...node.attributes].forEach((a) => names.add(a.name));
                num += box.querySelectorAll(".call").length;
                box.remove();
            }
            return [[...tags], [...names], num];
        }""",
        texts,
    )
    assert num == len(texts)
    assert not {"script", "img", "a", "iframe", "svg", "object", "link", "form"} & set(tags)
    assert not [name for name in names if name.startswith("on") or name in ("href", "src")]
    assert page.evaluate("window.evil === undefined")


def test_keys_go_through_the_table_and_back_returns(open_run):
    page = open_run([trajectory(n) for n in range(5)])
    heading = page.locator("#reader h2")
    has(page, "#reader h2", "train/0 #0, step 1")  # The first opens by itself.
    for key, n in (("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        has(page, "#reader h2", f"train/{n} #{n}, step 1")
    page.get_by_role("button", name="train/4 #4").focus()
    page.keyboard.press("Enter")
    has(page, "#reader h2", "train/4 #4, step 1")
    page.go_back()
    has(page, "#reader h2", "train/1 #1, step 1")
    head = page.locator("#list thead").get_by_role("button", name="reward")
    head.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "reward"
    page.keyboard.press("/")
    page.keyboard.type("reply 3")
    count(page, "1 of 5")
    page.get_by_role("button", name="Raw").click()
    page.get_by_label("Colour tokens by").select_option("logprob")
    page.reload()
    count(page, "1 of 5")
    assert page.get_by_role("button", name="Raw").get_attribute("aria-pressed") == "true"
    assert page.get_by_label("Colour tokens by").input_value() == "logprob"
    assert heading.count() == 1


def test_stars_and_notes_are_kept_with_the_run(open_run, tmp_path, page_of):
    page = open_run([trajectory(n) for n in range(3)])
    page.get_by_role("button", name="train/1 #1").click()
    has(page, "#reader h2", "train/1 #1, step 1")
    page.get_by_role("button", name="Star").click()
    has(page, "#list .star", 1)
    page.get_by_label("Note", exact=True).fill("cheats <b>")
    page.get_by_role("button", name="Star").click()  # A click on another element ends a note.
    has(page, "#list .star", 0)
    page.get_by_role("button", name="Star").press("Enter")
    page.locator("#list [title='cheats <b>']").wait_for()
    lines = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    text = "cheats <b>"
    notes = [(True, ""), (True, text), (False, text), (True, text)]
    assert [(line["star"], line["text"]) for line in lines] == notes
    page.reload()
    has(page, "#list .star", 1)
    open_filters(page)
    page.locator("#talks [name=noted]").select_option("star")
    count(page, "1 of 3")
    assert main([str(tmp_path), "--report", str(tmp_path / "report.html")]) == 0
    report = page_of(f"file://{tmp_path}/report.html#talks")
    has(report, "#list .star", 1)
    assert report.get_by_role("button", name="Star").count() == 0


def test_a_task_is_followed_over_all_steps(tmp_path, serve, page_of):
    # Rewards of each task's two attempts at three steps.
    rewards = {"solved": (0, 0, 0, 1, 1, 1), "learning": (0, 0, 0, 0, 1, 0), "forgotten": (1, 1, 0, 0, 0, 0), "never": (0, 0, 0.5, 0, 0, 0)}  # fmt: skip
    for step in range(3):
        rows = []
        for name, values in rewards.items():
            for index in range(2):
                reward = float(values[2 * step + index])
                messages = [{"role": "user", "content": name}, {"role": "assistant", "content": f"the sum is {reward:g}"}]  # fmt: skip
                rows.append(trajectory(index, task_id=name, group_id=name, reward=reward, messages=messages))  # fmt: skip
        rows.append(trajectory(0, task_id="bare", env="zeros", reward=0.0))
        rows.append(trajectory(0, task_id="never", actor="rival", reward=1.0))
        write_step(tmp_path, step + 1, rows)
    write_step(tmp_path, 3, [trajectory(0)], "eval_{:06d}_greedy")
    page = page_of(serve(tmp_path) + "#tasks")
    has(page, "#tasklist tbody th", ["train/0"])
    page.locator("#tasks [name=kind]").select_option("train")
    has(page, "#tasklist tbody tr", 5)  # Tasks of the first actor.
    table = {row.split("\t")[0]: row.split("\t")[1:6] for row in shown(page, "#tasklist tbody tr")}
    assert table["learning"] == ["letters", "learning", "6", "0", "0.5"]
    assert table["forgotten"] == ["letters", "forgotten", "6", "1", "0"]
    assert table["solved"] == ["letters", "solved", "6", "0", "1"]
    assert table["never"] == ["letters", "never", "6", "0", "0"]
    assert table["bare"] == ["zeros", "never", "3", "0", "0"]
    assert "1 forgotten, 2 never" in shown(page, "#states")[0]
    page.get_by_role("button", name="forgotten").press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "forgotten"
    page.get_by_role("heading", name="forgotten of letters").wait_for()
    page.get_by_label("Compare step 1 #0").check()
    page.get_by_label("Compare step 3 #1").check()
    has(page, "#differences del", ["1"])
    has(page, "#differences ins", ["0"])
    page.evaluate("show()")  # As when new steps come.
    assert shown(page, "#differences del") == ["1"]
    page.reload()
    page.get_by_role("heading", name="forgotten of letters").wait_for()
    page.locator("#task table").get_by_role("button", name="#1").first.click()
    has(page, "#reader h2", "forgotten #1, step 1")
    page.get_by_role("link", name="this task in all steps").click()
    page.get_by_role("heading", name="forgotten of letters").wait_for()


def test_a_folder_of_runs_is_a_table_that_sorts_and_chooses(tmp_path, serve, page_of):
    for n in range(100):
        folder = tmp_path / "runs" / f"r{n:03d}"
        folder.mkdir(parents=True)
        config = {"seed": n % 2, "num_steps": 4, "algorithm": "grpo", "optim": {"lr": [1e-3, 1e-4][n // 50]}}  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [{"step": s, "rollout/policy/reward_mean": s * n / 100, "rollout/policy/tokens": 10.0, "time/step_s": 36.0} for s in range(1, 4 + n % 2)]  # fmt: skip
        scores = [{"step": s, "eval/e/greedy_score": 0.25 * s} for s in (1, 3, 2)]
        write_metrics(folder, [*rows, *scores])
    page = page_of(serve(tmp_path / "runs"), bypass_csp=True)
    has(page, "#runs tbody tr", 100)
    page.evaluate(AXE.read_text())
    assert not faults_of(page)
    page.get_by_role("button", name="reward", exact=True).click()
    row = shown(page, "#runs tbody tr")[0].split("\t")
    assert row[0].strip() == "r099" and [text.strip() for text in row[1:5]] == ["done", "4 / 4", "0.75 e/greedy_score, step 3", "0.99 → 3.96"]  # fmt: skip
    assert page.get_by_role("img", name="eval/e/greedy_score: 0.25 → 0.75").count() == 100
    heads = shown(page, "#runs thead th")
    assert [head.strip(" ▲▼") for head in heads[-2:]] == ["--optim.lr", "--seed"]
    page.get_by_text("The newest 8 of 100 runs that are ticked").wait_for()
    checked = page.locator("#runs tbody input:checked")
    assert checked.count() == 8
    for label in checked.evaluate_all("boxes => boxes.map((box) => box.ariaLabel)")[:-1]:
        page.get_by_label(label).uncheck()
    page.get_by_label("Find").last.fill("r00")
    has(page, "#runs tbody tr", 10)
    for name in ("r000", "r001", "r002"):
        page.get_by_label(f"Show {name}").check()
    page.get_by_role("link", name="Curves").click()
    page.get_by_label("mean over seeds").check()
    labels = shown(page, "[data-title=reward] .u-label")
    assert [label.split(", ")[-1] for label in labels[1:4]] == ["highest", "lowest", "mean of 3 seeds"] or len(labels) == 4  # fmt: skip
    page.locator("#curves [name=x]").select_option("tokens")
    has(page, "[data-title=reward] .u-label", ["sampled tokens", *labels[1:]])
    xs = "document.querySelector('[data-title=reward] [role=img]').uplot.data[0]"
    assert page.evaluate(xs)[:3] == [10, 20, 30]
    page.locator("#curves [name=x]").select_option("time")
    assert page.evaluate(xs)[:3] == pytest.approx([0.01, 0.02, 0.03])


def test_charts_are_saved_and_a_point_leads_to_its_conversations(tmp_path, serve, page_of):
    write_metrics(tmp_path, [{"step": s, "rollout/policy/reward_mean": s / 4} for s in (1, 2)])
    write_metrics(tmp_path, [{"step": 2, "eval/e/greedy_score": 0.5}], "a")
    for step in (1, 2):
        write_step(tmp_path, step, [trajectory(n) for n in range(step)])
    bad = trajectory(7, status="failed", error="no", reward=None)
    write_step(tmp_path, 2, [bad], "step_{:06d}.rank_00001")
    hint = {"step": 2, "kind": "failed", "text": "1 of 3 episodes failed"}
    (tmp_path / "warnings.jsonl").write_text(json.dumps(hint) + "\n")
    page = page_of(serve(tmp_path))
    page.locator("[data-title=reward] .about summary").click()
    files = {}
    for name in ("PNG", "SVG", "CSV"):
        with page.expect_download() as download:
            page.locator("[data-title=reward]").get_by_role("button", name=name).click()
        files[download.value.suggested_filename] = Path(download.value.path()).read_bytes()
    stem = re.sub(r"\W", "_", f"{tmp_path.parent.name}_{tmp_path.name}_reward")
    assert files[f"{stem}.csv"] == b"step,policy\n1,0.25\n2,0.5\n"
    chart = page.locator("[data-title=reward] canvas").evaluate("node => node.height")
    assert Image.open(BytesIO(files[f"{stem}.png"])).height > chart + 40  # Title and legend.
    svg = xml.dom.minidom.parseString(files[f"{stem}.svg"])
    texts = {node.firstChild.data for node in svg.getElementsByTagName("text")}
    assert {"reward", "step", "policy"} <= texts
    lines = svg.getElementsByTagName("polyline")
    assert len(lines) == 1 and len(lines[0].getAttribute("points").split()) == 2
    page.get_by_role("button", name="1 failed episodes").click()
    count(page, "1 of 4")
    page.go_back()
    page.locator("[data-title=reward] .about summary").click()
    area = page.locator("[data-title=reward] [role=img]")
    area.press("ArrowRight")
    area.press("Enter")
    count(page, "3 of 4")
    assert "only_step=2" in unquote(page.url)


def test_a_common_beginning_stands_once_and_branches_are_a_tree(open_run):
    def talk(*texts):
        roles = ("user", "assistant") * 3
        return [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]

    branches = [talk("task", "plan", "go on", "left"), talk("task", "plan", "go on", "right")]
    branches.append(talk("task", "other"))
    rows = [
        trajectory(0, messages=m, turns=[said(2)] * (len(m) // 2), reward=n / 2)
        for n, m in enumerate(branches)
    ]
    page = open_run(rows)
    has(page, "#reader .says", 6)
    assert shown(page, "#reader .says p") == ["task", "plan", "go on", "left", "right", "other"]
    assert shown(page, "#reader .columns .columns h3") == ["policy reward 0", "policy reward 0.5"]


def test_the_outline_of_a_long_episode_leads_to_a_turn(open_run):
    messages = [
        {"role": role, "content": f"{role} {n}"} for n in range(9) for role in ("user", "assistant")
    ]
    row = trajectory(0, messages=messages, turns=[said(n + 1) for n in range(9)], turn_rewards=[0.0] * 8 + [1.0])  # fmt: skip
    page = open_run([row])
    has(page, "#reader .outline summary", "9 turns")
    assert shown(page, "#reader .outline li")[-1] == "9 tokens, reward 1"
    page.locator("#reader .outline button").last.click()
    assert "turn=9" in page.url
    page.reload()
    has(page, "#reader .asked .who", "policy +1")


def test_ten_thousands_of_episodes_are_listed(tmp_path, serve, page_of):
    write_metrics(tmp_path, [{"step": s, "rollout/policy/reward_mean": 0.5} for s in range(1, 9)])
    for step in range(1, 9):
        write_step(tmp_path, step, [trajectory(n) for n in range(4000)])
    page = page_of(serve(tmp_path))
    page.wait_for_selector(".u-legend, #constant:visible")
    page.get_by_role("link", name="Conversations").click()
    count(page, "32,000 of 32,000")


def test_a_phone_shows_the_list_or_the_conversation_of_the_address(open_run, page_of):
    page, reader = open_run([trajectory(n) for n in range(3)], screen="phone"), "#reader:visible"
    assert page.locator("header").bounding_box()["height"] <= 90
    page.get_by_role("button", name="train/1 #1").click()
    has(page, f"{reader} h2", "train/1 #1, step 1")
    address = page.url
    page.get_by_role("button", name="Next").click()
    has(page, f"{reader} h2", "train/2 #2, step 1")
    page.go_back()
    has(page, reader, 0)
    other = page_of(address, "phone")
    has(other, f"{reader} h2", "train/1 #1, step 1")


def test_groups_have_a_row_and_a_column_of_advantages(tmp_path, serve, page_of):
    """Rewards 0, 0.25, 0.5 and 0.75 of one task: less their mean of 0.375."""
    group = [trajectory(n, task_id="t", metrics={"words": n, "found": 1.0}) for n in range(4)]
    write_step(
        tmp_path, 1, [*group, trajectory(0, task_id="u", group_id="u", metrics={"words": 7})]
    )
    page = page_of(serve(tmp_path) + "#talks")
    has(page, "#list tbody tr", 6)
    assert shown(page, "#list .group") == ["t 4 episodes, reward 0.375 (0 to 0.75)"]
    assert shown(page, "#list tbody th") == ["#0", "#1", "#2", "#3", "u #0"]
    heads = [head.strip(" ▲▼") for head in shown(page, "#list thead th")]
    assert heads == ["task", "step", "reward", "advantage", "reply", "found", "words"]
    assert shown(page, "#same") == ["Equal in all: status ok, turns 2, tokens 5"]
    cells = page.locator("#list tbody tr:not(.group) td:nth-child(4) span")
    assert cells.all_inner_texts() == ["-0.375", "-0.125", "+0.125", "+0.375", "-"]
    hues = [cell.evaluate("node => node.style.background") for cell in cells.all()]
    warm, cool = "rgba(214, 60, 40, 0.15)", "rgba(40, 100, 220, 0.15)"
    assert (hues[0], hues[3], hues[4]) == (warm, cool, "")
    rewards = page.locator("#list tbody tr:not(.group) td:nth-child(3) span")
    assert rewards.last.evaluate("node => node.style.background") == "rgba(214, 60, 40, 0.3)"
    page.get_by_role("button", name="t", exact=True).click()
    has(page, "#reader h3", 4)
    page.set_viewport_size({"width": 1440, "height": 900})
    boxes = [head.bounding_box() for head in page.locator("#reader h3").all()]
    assert all(box["x"] + box["width"] <= 1440 for box in boxes)
    page.get_by_role("button", name="reward", exact=True).click()
    has(page, "#list .group", 0)


def test_environments_have_charts_with_a_colour_for_each_curve(tmp_path, serve, page_of):
    means = [f"rollout/policy/{env}reward_mean" for env in ("", "a/", "b/")]
    names = [*means, *(f"eval/{env}/{name}" for env in "ab" for name in ("avg@4", "pass@4"))]
    for seed in (0, 1):
        (tmp_path / f"r{seed}").mkdir()
        (tmp_path / f"r{seed}/config.yaml").write_text(yaml.safe_dump({"seed": seed}))
        rows = [{"step": step} | dict.fromkeys(names, step / 4) for step in (1, 2)]
        write_metrics(tmp_path / f"r{seed}", rows)
    page, titles = page_of(serve(tmp_path) + "#curves?seeds=1"), "#curves > .charts .chart h2"
    charts = ["reward", "reward: a", "reward: b", "evaluation: a", "evaluation: b"]
    has(page, titles, charts)
    plot = "document.querySelector('[data-title=\"evaluation: a\"] [role=img]').uplot"
    series = f"{plot}.series.slice(1).filter((s) => s.class !== 'raw')"
    curves = page.evaluate(f"{series}.map((s) => [s.label, s.stroke(), s.dash?.join() ?? ''])")
    assert [label for label, *_ in curves] == [f"{name}@4, mean of 2 seeds" for name in ("avg", "pass")]  # fmt: skip
    assert curves[0][1] != curves[1][1] and curves[0][2] == curves[1][2] == ""
    assert page.evaluate(f"{plot}.axes.map((axis) => axis.label)") == ["step", "reward, fraction"]
    page.get_by_label("environments in one chart").check()
    has(page, titles, ["reward", "evaluation"])
