"""rl-core envs: the environments of envs/, with a description and the missing requirements of each.
rl-core envs NAME: its variables, packages and solutions, and the command that trains on it.

All is read from the files: no environment is imported. A sandbox is started where one needs it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from rl_core.data.env_names import env_files
from rl_core.errors import nearest
from rl_core.sandbox.boxes import check_machine
from rl_core.tools.info import environments, sandbox
from rl_core.tools.parser import Parser

BOX = "bubblewrap, docker or podman"
SANDBOX = "a sandbox (rl-core sandbox level)"
# Imported name -> requirement of the machine.
OF_MACHINE = {"boxes": BOX, "harbor": BOX, "Sandbox": SANDBOX}
# Imported name -> the different name for pip.
PIP_NAMES = {"reasoning_gym": "reasoning-gym"}
REWARDS = Path(__file__).parents[1] / "rewards/__init__.py"
WIDTH = 110  # Characters of an environment's line after its name.
OPTIONAL = r"""find_spec\(["'](\w+)["']"""
# The beginning of a command: a program, or the value of a variable.
COMMAND = re.compile(r"(?:rl-core|torchrun|python|pip|export) |[A-Z][A-Z0-9_]*=")
VARIABLE = r"""environ(?:\.get\(|\[)\s*["'](\w+)["']"""


@dataclass(kw_only=True, slots=True)
class Listing:
    """The description of an environment, read from its file."""

    path: str
    about: str  # its docstring's first sentence
    packages: dict[str, bool] = field(default_factory=dict)  # pip's name -> whether it is installed
    optional: dict[str, bool] = field(
        default_factory=dict
    )  # Packages that the environment can do without.
    machine: dict[str, bool] = field(
        default_factory=dict
    )  # Requirement -> whether the machine meets it.
    variables: list[str] = field(default_factory=list)
    has_rows: bool = False  # True if the file brings rows.
    has_oracle: bool = False
    command: str = ""

    @property
    def missing(self) -> list[str]:
        """Requirements that this machine does not meet."""
        lines = [f"pip install {name}" for name, is_here in self.packages.items() if not is_here]
        lines += [name for name, is_here in self.machine.items() if not is_here]
        if not self.has_rows:
            lines.append("rows (--data.train)")
        return lines


def main(argv: list[str]) -> int:
    parser = Parser(prog="rl-core envs", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("name", nargs="?", help="an environment, such as sort_digits: only this")
    args = parser.parse_args(argv)
    paths = {Path(path).stem: Path(path) for path in environments()}
    if not paths:
        raise ValueError("this folder has no envs/, and rl_core was installed without one")
    known = env_files() | paths
    if args.name and args.name not in known:
        raise ValueError(f"envs/ has no environment {args.name!r}; {nearest(args.name, known)}")
    chosen = [known[args.name]] if args.name else paths.values()
    listings = [listing_of(path) for path in chosen]
    if args.json:
        print(json.dumps([asdict(listing) for listing in listings], indent=2))
    elif args.name:
        print(described(listings[0]))
    else:
        print(as_table(listings))
    return 0


def listing_of(path: Path) -> Listing:
    """Raises ValueError for a file that is no Python."""
    source = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{path}: line {error.lineno}: {error.msg}") from None
    text = ast.get_docstring(tree) or ""
    listing = Listing(path=str(path), about=first_sentence(text), command=first_block(text))
    listing.variables = sorted(set(re.findall(VARIABLE, source)))
    names = {getattr(node, "name", "") for node in tree.body}
    needed: set[str] = set()
    libraries: set[str] = set()
    for module, imported in imports_of(tree):
        names |= imported
        root = module.partition(".")[0]
        module_file = (path.parent / root).with_suffix(".py")
        if root == "rl_core" and module.endswith(".rewards"):
            libraries |= libraries_of_rewards(imported)
        elif root == "rl_core":
            needed |= {OF_MACHINE[name] for name in imported & OF_MACHINE.keys()}
        elif module_file.exists():
            needed |= {*listing_of(module_file).machine}
        elif root != "programs":
            libraries.add(root)
    for name in sorted(libraries - sys.stdlib_module_names):
        listing.packages[PIP_NAMES.get(name, name)] = find_spec(name) is not None
    for name in re.findall(OPTIONAL, source):
        listing.optional[name] = find_spec(name) is not None
    listing.machine = {name: is_on_machine(name) for name in sorted(needed)}
    listing.has_rows = "load_tasks" in names
    listing.has_oracle = "oracle" in names
    if "rl-core" not in listing.command:
        rows = "" if listing.has_rows else " --data.train rows.jsonl"
        listing.command = f"rl-core train --env_path {path} --model M{rows} --out runs/{path.stem}"
    if not Path("envs", path.name).exists():  # rl_core brings it, by name
        for name in (str(path), f"envs/{path.name}"):
            listing.command = listing.command.replace(name, path.stem)
    return listing


def libraries_of_rewards(names: set[str]) -> set[str]:
    """Libraries that these functions of rl_core.rewards import."""
    libraries = set()
    for node in ast.parse(REWARDS.read_text(encoding="utf-8")).body:
        if getattr(node, "name", "") in names:
            libraries |= {module.partition(".")[0] for module, _ in imports_of(node)}
    return libraries - {"rl_core"}


@cache
def is_on_machine(name: str) -> bool:
    """True if boxes or sandboxes can be made here. A command of docker alone makes none."""
    if name == BOX:
        try:
            check_machine()
        except (RuntimeError, OSError):
            return False
        return True
    return "none" not in sandbox()


def imports_of(tree: ast.AST) -> list[tuple[str, set[str]]]:
    """(module, the names that are taken from it), those inside of functions too."""
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            last = node.module.rpartition(".")[2]
            imports.append((node.module, {alias.name for alias in node.names} | {last}))
    return imports


def first_sentence(text: str) -> str:
    paragraph = text.partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.) |: https?:", paragraph)[0].rstrip(".")


def first_block(text: str) -> str:
    """The commands of the first indented lines of a docstring, one a line."""
    commands: list[str] = []
    for line in text.splitlines():
        words = " ".join(line.removesuffix("\\").split())
        if not words or not (commands or line.startswith("    ")):
            if commands:
                break
        elif not commands or COMMAND.match(words):
            commands.append(words)
        else:
            commands[-1] += f" {words}"
    return "\n".join(commands)


def as_table(listings: list[Listing]) -> str:
    width = max(len(Path(listing.path).stem) for listing in listings)
    lines = []
    for listing in listings:
        about = shorten(listing.about, WIDTH, placeholder=" ...")
        lines.append(f"{Path(listing.path).stem:<{width}}  {about}")
        if listing.missing:
            lines.append(f"{'':<{width}}  needs {'; '.join(listing.missing)}")
    ends = [
        "",
        "rl-core envs NAME: one of them, with its command; rl-core check NAME: try it",
    ]
    return "\n".join(lines + ends)


def installed(packages: dict[str, bool], missing: str = "missing: pip install {name}") -> str:
    names = []
    for name, is_here in packages.items():
        names.append(name if is_here else f"{name} ({missing.format(name=name)})")
    return ", ".join(names)


def described(listing: Listing) -> str:
    facts = {
        "packages": installed(listing.packages),
        "optional": installed(listing.optional),
        "machine": installed(listing.machine, "is not here"),
        "variables": ", ".join(listing.variables),
        "rows": "its own, or --data.train" if listing.has_rows else "--data.train",
        "solutions": f"rl-core check {listing.path} --oracle" if listing.has_oracle else "",
    }
    lines = [f"== {listing.path}", f"  {listing.about}", ""]
    lines += [f"  {name:<10} {fact}" for name, fact in facts.items() if fact]
    return "\n".join([*lines, "", *(f"  {line}" for line in listing.command.splitlines())])
