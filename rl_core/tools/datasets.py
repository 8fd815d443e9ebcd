"""rl-core datasets: data sets of the hub that are used most, with their algorithm and environment.
rl-core datasets NAME: the columns of one, and the command that trains or scores a model on it.

Nothing is downloaded. `M` in a command stands for a model: a folder or a name on the hub.
"""

from __future__ import annotations

import difflib
import json
import re
from textwrap import shorten

from rl_core.data.published_sets import Recipe, recipes, short_name
from rl_core.tools.parser import Parser

WIDTH = 110  # characters of a line of the table


def main(argv: list[str]) -> int:
    parser = Parser(prog="rl-core datasets", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("name", nargs="?", help="a set, such as openai/gsm8k or gsm8k: only this")
    args = parser.parse_args(argv)
    names = [full_name(args.name)] if args.name else list(recipes())
    chosen = {name: recipes()[name] for name in names}
    if args.json:
        print(json.dumps(chosen, indent=2, ensure_ascii=False))
    elif args.name:
        print(described(names[0], chosen[names[0]]))
    else:
        print(as_table(chosen))
    return 0


def full_name(name: str) -> str:
    """The set of this name, with or without its owner, or the only set whose name contains it.
    Raises ValueError, with the nearest names, for an unknown set."""
    shorts = {short_name(known): known for known in recipes()}
    asked = re.split("[:@]", name)[0].lower()
    for known in recipes():
        if asked in (known.lower(), short_name(known)):
            return known
    letters = re.sub("[^a-z0-9]", "", short_name(asked))
    close = []
    if len(letters) > 2:
        close = [short for short in shorts if letters in re.sub("[^a-z0-9]", "", short)]
    if len(close) == 1:
        return shorts[close[0]]
    close = close or difflib.get_close_matches(short_name(asked), shorts, n=3, cutoff=0.5)
    nearest = ", ".join(shorts[short] for short in close)
    hint = f"the nearest are {nearest}" if close else "rl-core datasets lists all"
    raise ValueError(
        f"rl-core datasets has no recipe for {name!r}; {hint}. Other sets can be trained on too: "
        "--data.train NAME, and --data.columns where columns have other names"
    )


def as_table(chosen: dict[str, Recipe]) -> str:
    width = max(map(len, chosen))
    lines = []
    for name, recipe in chosen.items():
        use = " ".join(filter(None, [recipe["algorithm"], recipe.get("env")]))
        about = shorten(recipe["about"], WIDTH - width, placeholder=" ...")
        lines.append(f"{name:<{width}}  {use:<17}  {about}")
    end = "rl-core datasets NAME: the command, columns and notes of one set"
    return "\n".join([*lines, "", end])


def described(name: str, recipe: Recipe) -> str:
    facts = {
        "algorithm": recipe["algorithm"],
        "env": recipe.get("env"),
        "data": recipe["data"],
        "columns": recipe.get("columns", "read by the names that the set gives them"),
        "note": recipe.get("note"),
        "tried": f"{recipe['tried']}, with rows of the same shape",
    }
    lines = [f"== {name}", f"  {recipe['about']}", ""]
    lines += [f"  {key:<10} {fact}" for key, fact in facts.items() if fact]
    return "\n".join([*lines, "", *(f"  {line}" for line in recipe["command"].splitlines())])
