"""Meaning, unit and healthy range of each metric, from metric_table.yaml: for docs/metrics.md
(`python -m rl_core.run.display.metric_table` prints it), `rl-core info metrics`, the viewer and
warnings.

In a name ACTOR, ENV, SET, PART and METRIC stand for a user's names, and K for a number; [...] is
optional; {a,b} is either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""
    above: float | None = None
    below: float | None = None

    @property
    def pattern(self) -> re.Pattern[str]:
        text = re.escape(self.name).replace(r"\[", "(?:").replace(r"\]", ")?")
        text = re.sub(r"\\\{(.+?)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", text)
        text = re.sub(r"\b(ACTOR|ENV)\b", "[^/]+", text)
        text = re.sub(r"\bSET\b", "[^/]+(?:/[^/]+)?", text)  # NAME or ENV/NAME.
        return re.compile(re.sub(r"(PART|METRIC)\b", ".+", text.replace("@K", r"@\d+")))

    @property
    def short_names(self) -> list[str]:
        """The name after its last slash, once for each of {a,b}; [] if the user chooses it."""
        match = re.fullmatch(r"(?:[^{]*[]/])?([^{]*)(?:\{(.+)\})?(.*)", self.name)
        assert match, self.name
        start, choices, end = match.groups()
        names = [start + choice + end for choice in (choices or "").split(",")]
        return [name for name in names if not re.search("PART|METRIC", name)]

    @property
    def is_of_user(self) -> bool:
        """True if the environment names the metric."""
        return self.name.endswith("METRIC")


@cache
def sections() -> dict[str, list[Row]]:
    """Title -> rows."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {
        title: [Row(**values) for values in section]
        for title, section in yaml.safe_load(text).items()
    }


def rows() -> list[Row]:
    return list(chain(*sections().values()))


@cache
def describe(name: str) -> Row | None:
    """The row of a metric by its name in metrics.jsonl; None for an unknown metric. A metric that
    an environment may define has METRIC's row."""
    return next((row for row in rows() if row.pattern.fullmatch(name)), None)


def page() -> str:
    """The text of docs/metrics.md."""
    lines = ["# Metrics", "", *INTRO.strip().splitlines()]
    for title, section in sections().items():
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | meaning | unit | healthy |",
            "|---|---|---|---|",
        ]
        for row in section:
            cells = [f"`{row.name}`", row.meaning, row.unit, row.healthy]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


INTRO = """
Every metric that a run writes to `metrics.jsonl` ([runs.md](runs.md)). One of them:

```bash
rl-core info metrics clip_frac
```

ACTOR is an actor's name (`policy`, if there is one), ENV an environment's (where a run has several), SET that of held-out data (with several
environments ENV/SET). Names in [brackets] may be missing. Values are over all ranks. One outside "healthy" is worth a look,
and no proof of a fault.
"""

if __name__ == "__main__":
    print(page(), end="")
