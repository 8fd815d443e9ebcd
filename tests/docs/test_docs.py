"""The documentation: blocks load and parse, flags and quoted errors exist, links lead somewhere,
the site needs no network.

test_docs_run.py runs the blocks.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from kit import ROOT, metrics
from view_parts import CHROMIUM, QUIET

from rl_core.algorithms import PRESETS, clipped_loss
from rl_core.config import from_sections, known_flags, parse_config
from rl_core.config.flag_errors import PEERS
from rl_core.tools.cli import COMMANDS
from rl_core.train import main as train

PAGES = {file.relative_to(ROOT).as_posix(): file.read_text() for file in [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))
]}  # fmt: skip
BLOCKS = [
    pytest.param(page, language, code, id=f"{page}-{number}")
    for page, text in PAGES.items()
    for number, (language, code) in enumerate(
        re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    )
]
# Shell commands of others, and flags of others that pages name.
SHELL = (
    "pip git cd export cat source for while do done accelerate .ci/run wandb ruff docker "
    "podman kubectl vllm curl sleep echo"
    " pre-commit kill cp mkdir openssl helm"
)
OTHERS = {
    "torchrun": "nnodes node_rank nproc_per_node rdzv_backend rdzv_endpoint rdzv_id standalone",
    "sglang": "api-key enable-deterministic-inference enable-lora enable-memory-saver enable-return-routed-experts"
    " kv-cache-dtype max-loras-per-batch model-path quantization port host",
    "vllm": "no-mm-device-do-normalize",
    "of schedulers, containers and "
    "viewers": "requeue signal runtime security-opt logdir from-literal from-file",
}
PLAYING = ROOT / "rl_core/tools/model_player.py"
KNOWN = {name.replace("NAME", "x") for name in known_flags()}


def flag_name(word: str) -> str:
    """A flag with x for the name of an actor or an environment."""
    return re.sub(r"^(actors|envs)\.[\w-]+\.", r"\1.x.", word.removeprefix("--").partition("=")[0])


def is_ours(word: str) -> bool:
    name = flag_name(word)
    return name in KNOWN or any(known.startswith(f"{name}.") for known in KNOWN)


@cache
def own_flags(*files: Path) -> frozenset[str]:
    """Flags of argparse and getopts in these files."""
    return frozenset(
        name
        for file in files
        for name in re.findall(r"""["' |]--([a-z][\w.-]*)""", file.read_text())
    )


def parse_train(words: list[str]) -> None:
    """Raises ValueError as a run would. `...` in the text stands for other flags, and M for a
    model."""
    words = [w for w in words if w not in ("...", "--config") and not w.endswith("/config.yaml")]
    filled = itertools.chain.from_iterable(
        pair
        for pair in (("--out", "runs/x"), ("--model", "M"), ("--env_path", "e.py"))
        if pair[0] not in words
        and not (pair[0] == "--model" and any(w.startswith("--actors.") for w in words))
    )
    if any(word.endswith(".yaml") for word in words):
        words, filled = ["--config", *words], ("--out", "runs/x")
    if "--algorithm" in words and not is_rl(words):
        filled = [w for w in filled if w not in ("--env_path", "e.py")]
    parse_config([*words, *filled])


def is_rl(words: list[str]) -> bool:
    return PRESETS[words[words.index("--algorithm") + 1]].is_rl


def check_command(words: list[str]) -> None:
    """Raises if rl_core or a script of this repository would refuse the command line."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]  # environment variables
    first, *rest = words
    if first == "torchrun" or words[:3] == ["python", "-m", "torch.distributed.run"]:
        at = rest.index("-m")
        assert {w[2:] for w in rest[:at] if w.startswith("--")} <= set(
            OTHERS["torchrun"].split()
        ), words
        return check_command(["python", *rest[at:]])
    if words[:2] == ["python", "-m"] and words[2].startswith("rl_core."):
        module, flags = words[2], words[3:]
        if module == "rl_core.train":
            return parse_train(flags)
        if module == "rl_core.tools.cli":
            return check_command(["rl-core", *flags])
        file = ROOT / (module.replace(".", "/") + ".py")
        return refuse_unknown(flags, own_flags(file))
    if first == "rl-core":
        command, *flags = rest
        assert command in COMMANDS, words
        if command in ("train", "plan"):
            arguments = [w for w in flags if w not in ("--json", "--help")]
            if "--nproc_per_node" in arguments:
                del arguments[arguments.index("--nproc_per_node") :][:2]
            return parse_train(arguments)
        files = [
            *(ROOT / "rl_core/tools").glob(f"{command}*/*.py"),
            *(ROOT / "rl_core/tools").glob(f"{command}*.py"),
            PLAYING,
        ]
        return refuse_unknown(
            flags, own_flags(*files), is_run=command in ("eval", "collect", "replay")
        )
    if first in ("python", "bash", "pytest"):
        if first == "pytest" or rest[0] == "-m" or "/" not in rest[0]:  # The page writes it.
            return None
        return refuse_unknown(rest[1:], own_flags(ROOT / rest[0]), is_run="quickstart" in rest[0])
    assert first in SHELL.split() or first.startswith("./"), (
        f"{first!r}: an unknown command; add it to SHELL if it belongs to another project"
    )
    return None


def refuse_unknown(flags: list[str], ours: frozenset[str], is_run: bool = False) -> None:
    for word in flags:
        if re.match(r"--[a-z]", word):
            assert word[2:].partition("=")[0] in ours or (is_run and is_ours(word)), word


def commands_in(text: str) -> list[list[str]]:
    """Simple commands of a shell script, without comments."""
    # A here-document is no command.
    text = re.sub(r" <<'(\w+)'\n.*?\n\1\n", "\n", text, flags=re.DOTALL)
    lines = text.replace("\\\n", " ").splitlines()
    result = []
    for line in lines:
        line = re.sub(r"\$\([^)]*\)", "X", line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.commenters, lexer.whitespace_split = "#", True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in (";", "&&", "|", "||", "&"):
                result += [words] if words else []
                words = []
            elif word != "do":
                words.append(word)
        if any(w in ("<", ">") for w in result[-1:] and result[-1]):
            result[-1] = result[-1][: next(i for i, w in enumerate(result[-1]) if w in "<>")]
    return result


@pytest.mark.parametrize(
    "page, language, code", [b for b in BLOCKS if b.values[1] in ("bash", "console")]
)
def test_commands_of_the_pages_parse(page, language, code):
    if language == "bash":
        commands = commands_in(code)
        assert commands
    else:
        commands = commands_in("\n".join(re.findall(r"^\$ (.*(?:\\\n.*)*)", code, re.MULTILINE)))
    for words in commands:
        check_command(words)


def write_blocks(page: str) -> list[str]:
    """Writes the page's Python blocks that begin with a file's name into the current folder."""
    result = re.findall(r"```python\n(# (\w+\.py).*?)```", PAGES[page], re.DOTALL)
    for code, name in result:
        Path(name).write_text(code)
    return [name for _, name in result]


def test_every_flag_that_a_page_names_exists():
    files = [
        *(ROOT / "rl_core").rglob("*.py"),
        *(ROOT / "scripts").rglob("*.*"),
        ROOT / "tests/conftest.py",
        ROOT / ".ci/run",
    ]
    ours = own_flags(*(file for file in files if file.suffix in (".py", ".sh", "")))
    others = {name for names in OTHERS.values() for name in names.split()} | {"help"}
    for names in yaml.safe_load(PEERS.read_text()).values():  # Names of other trainers.
        others |= {*names.split()}
    for page, text in PAGES.items():
        for name in re.findall(r"(?<![\w-])--([a-zA-Z][\w.-]*\w)", text):
            is_known = is_ours(name) or ("." not in name and name in ours | others)
            assert is_known or re.fullmatch(r"(actors|envs)\.\w+", name), f"{page}: --{name}"


def test_what_other_trainers_flags_become_are_flags_and_values_of_ours():
    """The second column; the first one is of others."""
    for page in ("docs/coming_from.md", "docs/from_trl.md"):
        rows = [
            re.split(r" *\| *", line)[1:-1]
            for line in PAGES[page].splitlines()
            if line.startswith("| `")
        ]
        assert len(rows) > 40
        for theirs, ours, *_ in rows:
            section = ""
            for span in re.findall("`([^`]+)`", ours):
                name, _, value = span.removeprefix("--").partition(" (")[0].partition(" ")
                name = section + name if span.startswith(".") else name
                section = name.rpartition(".")[0]
                if name in OTHERS["torchrun"].split():
                    continue
                assert is_ours(name), f"{page}: {theirs}: {span}"
                if value:
                    from_sections(nested(name, value))


def nested(name, value):
    for piece in reversed(name.split(".")):
        value = {piece: value}
    return value


@cache
def texts_of_the_code() -> str:
    r"""All strings of rl_core/, with what f-strings fill in as \0, one a line."""
    result = []
    for file in (ROOT / "rl_core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                result.append(
                    "".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                result.append(node.value)
    return "\n".join(result)


def test_errors_that_are_quoted_are_those_of_the_code():
    texts, quoted = texts_of_the_code(), []
    for line in PAGES["docs/troubleshooting.md"].splitlines():
        cell = line.partition(" | ")[0] if line.startswith("|") else ""
        quoted += [
            text
            for text in re.findall(r"`([^`]+)`", cell)
            if " " in text and not text.startswith("rl-core")
        ]
    assert len(quoted) > 30
    for text in quoted:
        if text in (
            "CUDA out of memory",
            "No space left on device; make room there, and continue with --resume",
        ):
            text = text.partition("; ")[2]  # The rest is torch's, and the system's.
        for piece in re.split(r"\.\.\.(?:=\.\.\.)?|; did you mean", text):
            piece = piece.strip(" =?():")
            assert len(piece) < 5 or piece in texts, (
                f"{text!r}: no text of the code holds {piece!r}"
            )


def test_the_table_of_presets_is_that_of_the_code():
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (\w+) \| ([\d.]+)(?: \(none\))?, ([\d.]+) \| (\w+) \|",
        PAGES["docs/algorithms.md"],
        re.M,
    )
    shown = {
        name: (advantage, objective, float(low), float(high), mean)
        for name, advantage, objective, low, high, mean in rows
    }
    parts = ("advantage", "objective", "clip_low", "clip_high", "aggregation")
    assert shown == {
        name: tuple(getattr(row, p) for p in parts) for name, row in PRESETS.items() if row.is_rl
    }


@pytest.mark.slow
def test_the_first_environment_is_learned(warm_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_blocks("docs/first_environment.md")
    [block] = re.findall(
        r"```bash\n(rl-core train --model runs/.*?)```",
        PAGES["docs/first_environment.md"],
        re.DOTALL,
    )
    [words] = commands_in(block)
    words[words.index("--model") + 1] = str(warm_model)
    assert train(words[2:]) == 0
    result = [
        row["eval/backwards/greedy_score"]
        for row in metrics(tmp_path / "runs/backwards")
        if "time/eval_s" in row
    ]
    assert result[0] < 0.4 and result[-1] > 0.9


@pytest.mark.slow
def test_the_script_with_cells_runs(tmp_path, monkeypatch, capsys):
    """A few steps; it learns the task in a minute without --short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["first_run.py", "--short"])
    runpy.run_path(str(ROOT / "scripts/first_run.py"))
    out = capsys.readouterr().out
    assert re.search(
        r"step   2  score 0\.\d\d  right 0\.00\nwrote "
        r"runs/first_run_\w+/grpo/curves.png\n(?:constant, .*\n)?== policy  eval/",
        out,
    )


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the built site. Warnings, such as of a link that leads nowhere, are errors."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "scripts/docs_site.py", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = re.compile(
        r"""<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"' >]+)"""
    )
    for page in pages:
        result = loaded.findall(page.read_text())
        assert not result, f"{page}: {result}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import\s*|url\()[\"']?(?:https?:)?//", style.read_text()), style


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_page_of_the_site_fits_a_window_with_both_columns(site):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        for width in (1320, 1440, 1920):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(f"file://{site}/runs.html")
            box = page.locator(".toc-drawer").bounding_box()
            assert box["x"] + box["width"] <= width
        browser.close()


@pytest.mark.slow
def test_lists_and_tables_are_rendered_as_such(site):
    """MyST wants a blank line before them in some places, GitHub does not."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        wrong = re.findall(r"^(?:<p>)?(?:\| |- |\d\. ).*", text, re.MULTILINE)
        assert not wrong, f"{page.name}: {wrong[:2]}"


@pytest.mark.slow
def test_docstrings_are_in_the_api_page(site):
    text = (site / "api.html").read_text()
    first = inspect.getdoc(clipped_loss).split("-min(")[0].strip()
    assert re.sub(r"\s+", " ", first)[:20] in re.sub(r"\s+", " ", re.sub("<.*?>", "", text))
    assert text.count('class="sig sig-object py"') > 40


def test_json_of_the_pages_parses():
    for page, text in PAGES.items():
        for line in re.findall(r'^(\{".*\}) *$', text, re.MULTILINE):
            if "..." not in line:
                json.loads(line), page
