"""Draws docs/pictures/house.svg from the files of rl_core/, and step.svg from the table STEP.

    python scripts/house_pictures.py

tests/docs/test_scripts.py draws both again: a file that moved is seen there.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FONT = "font-family='system-ui, sans-serif'"
MONO = "font-family='ui-monospace, monospace'"
INK, LINE = "#1f2933", "#7b8794"
SPINE, OPTION, TOOL = "#e3f0fb", "#fdf0dc", "#eee9f7"

GROUND = "types flags rules config algorithms plugin metrics distributed host_copies run_folder"
NOTE = (
    "Dashed: an import inside a function, if a run asks for it. Options import the spine, never "
    "the roof."
)
# What a run takes only if it asks for it.
OPTIONS = [
    ("engines", "engines/"),
    ("plugins", "plugins/"),
    ("agents", "agents/"),
    ("service", "service/"),
    ("sandbox", "sandbox/"),
]


def names_of(what: str) -> list[str]:
    """File names of a folder of rl_core/, or those of a list that exist."""
    package = ROOT / "rl_core"
    if not what.endswith("/"):
        return [name for name in what.split() if (package / f"{name}.py").exists()]
    stems = sorted(path.stem for path in (package / what).glob("*.py"))
    return [stem for stem in stems if stem != "__init__" and not stem.endswith("_pb2")]


def wrapped(names: list[str], width: int) -> list[str]:
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 2 > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + name
    return lines


def text(
    x: float, y: float, content: str, size: int = 13, style: str = FONT, more: str = ""
) -> str:
    place = f"x='{x:g}' y='{y:g}' font-size='{size}' fill='{INK}'"
    return f"<text {place} {style} {more}>{escape(content)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    place = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}'"
    return f"<rect {place} rx='6' fill='{fill}' stroke='{LINE}'/>"


def arrow(x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    place = f"x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}'"
    return f"<line {place} stroke='{LINE}' stroke-width='1.5' marker-end='url(#head)' {more}/>"


def svg(width: float, height: float, parts: list[str], title: str) -> str:
    head = "<marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8'"
    head += f" orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{LINE}'/></marker>"
    size = f"viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}'"
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>",
        f"<title>{escape(title)}</title><defs>{head}</defs>",
        f"<rect width='{width:g}' height='{height:g}' fill='white'/>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def room(
    x: float, y: float, width: float, title: str, says: str, what: str, fill: str
) -> tuple[str, float]:
    """The picture of a room, and its height."""
    lines = wrapped(names_of(what), int((width - 24) / 7.3))
    height = 34 + 17 * len(lines)
    parts = [
        box(x, y, width, height, fill),
        text(x + 12, y + 20, title, 14, FONT, "font-weight='600'"),
    ]
    parts.append(text(x + 22 + 8.5 * len(title), y + 20, says, 12, FONT, "opacity='0.75'"))
    for number, line in enumerate(lines):
        parts.append(text(x + 12, y + 40 + 17 * number, line, 12, MONO))
    return "\n".join(parts), height


def house() -> str:
    """Floors of the spine on the left, what a run may ask for on the right."""
    left, width, right, option_width, gap = 20, 560, 640, 340, 30
    parts: list[str] = []
    y = 20.0

    def floor(rooms: list[tuple[str, str, str]], fill: str = SPINE, whole: float = width) -> float:
        """Draws rooms side by side below what is there, and gives the y of their middle."""
        nonlocal y
        own = (whole - gap * (len(rooms) - 1)) / len(rooms)
        heights = []
        for number, (title, says, what) in enumerate(rooms):
            x = left + number * (own + gap)
            if parts:
                parts.append(arrow(x + own / 2, y - gap, x + own / 2, y - 2))
            part, height = room(x, y, own, title, says, what, fill)
            parts.append(part)
            heights.append(height)
        middle = y + max(heights) / 2
        y += max(heights) + gap
        return middle

    floor([("tools", "use the library as a user would", "tools/")], TOOL, 960)
    top = y
    floor([("roof", "a run: the loop, its plan, its actors", "train trainer plan actors models")])
    door = floor([("registry", "the only file that names options", "registry")])
    floor(
        [
            ("sampling", "tasks become trajectories", "sampling/"),
            ("learning", "samples become weights", "learning/"),
        ]
    )
    floor([("data", "rows, chats, packed batches", "data/")])
    floor([("ground", "what flows, flags, ranks", GROUND)])
    bottom = y
    y = top
    for title, what in OPTIONS:
        part, height = room(right, y, option_width, title, "", what, OPTION)
        parts.append(part)
        way = arrow(left + width, door, right - 2, y + height / 2, "stroke-dasharray='5 4'")
        parts.append(way)
        y += height + 20
    end = max(bottom, y)
    parts.append(text(left, end, NOTE, 12))
    return svg(1000, end + 16, parts, "The house: what may import what")


# A step from top to bottom: who has the device, what happens, where, and what flows on. Rows of
# "plugins" are hooks.
STEP = [
    ("plugins", "before_rollout", "plugin.py", "Plugin.before_rollout", ""),
    ("engines", "draw the next tasks", "trainer.py", "Trainer.draw_groups", "Group"),
    ("engines", "play groups side by side", "sampling/rollout.py", "RolloutWorker.submit", ""),
    ("engines", "an actor's turn", "sampling/actor.py", "Actor.generate", "Completion"),
    ("engines", "one step's worth is there", "sampling/rollout.py", "RolloutWorker.collect", ""),
    ("both", "engines sleep", "actors.py", "Device.sleep", "Trajectory*"),
    ("plugins", "after_rollout", "plugin.py", "Plugin.after_rollout", ""),
    ("learners", "compare, reward", "learning/advantages.py", "samples_of", "TrainingSample"),
    ("both", "learner on the device", "actors.py", "ActorRuntime.learning", ""),
    ("plugins", "before_learn", "plugin.py", "Plugin.before_learn", ""),
    (
        "learners",
        "pack, balance",
        "learning/learner.py",
        "Learner.shard",
        "PackedBatch",
    ),
    ("learners", "old logprobs, reference", "learning/learner.py", "Learner.annotate", ""),
    ("learners", "loss, optimizer step", "learning/learner.py", "Learner.step", "new weights"),
    ("both", "weights to the engine", "actors.py", "ActorRuntime.sync", ""),
    ("plugins", "after_sync", "plugin.py", "Plugin.after_sync", ""),
    ("plugins", "before_log", "plugin.py", "Plugin.before_log", ""),
    ("both", "metrics of all ranks", "trainer.py", "Trainer.log_metrics", "metrics.jsonl"),
    ("plugins", "after_step", "plugin.py", "Plugin.after_step", ""),
]
FILLS = {"engines": OPTION, "learners": SPINE, "both": "#ffffff", "plugins": TOOL}
LANES = [("engines have the device", "engines"), ("learners have it", "learners")]


def step() -> str:
    """The rows of STEP below each other, hooks of plugins beside them."""
    left, width, height, gap = 60, 620, 34, 14
    parts = []
    for number, (title, who) in enumerate(LANES):
        parts.append(box(left + 230 * number, 16, 16, 16, FILLS[who]))
        parts.append(text(left + 24 + 230 * number, 29, title))
    parts.append(box(left + 460, 16, 16, 16, TOOL))
    parts.append(text(left + 484, 29, "plugins are called"))
    y = 50.0
    for who, says, file, name, gives in STEP:
        if who == "plugins":
            parts.append(box(left + width + 30, y, 230, 24, TOOL))
            parts.append(text(left + width + 42, y + 16, says, 12, MONO))
            parts.append(arrow(left, y + 12, left + width + 28, y + 12))
            y += 24 + gap
            continue
        parts.append(box(left, y, width, height, FILLS[who]))
        parts.append(text(left + 12, y + 22, says))
        parts.append(text(left + 230, y + 22, f"{file}  {name}", 12, MONO))
        if gives:
            parts.append(text(left + 14, y + height + 12, f"↓ {gives}", 11, MONO))
            y += 8
        y += height + gap
    way = f"M{left},{y - gap - 12:g} L24,{y - gap - 12:g} L24,60 L{left - 2},60"
    parts.append(f"<path d='{way}' fill='none' stroke='{LINE}' marker-end='url(#head)'/>")
    return svg(960, y + 10, parts, "One step of a run")


if __name__ == "__main__":
    folder = ROOT / "docs/pictures"
    (folder / "house.svg").write_text(house(), encoding="utf-8")
    (folder / "step.svg").write_text(step(), encoding="utf-8")
