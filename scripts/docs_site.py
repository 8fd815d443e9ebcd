"""The pages as a site that needs no server: Sphinx with MyST and Furo, search included.

    pip install -e '.[docs]'
    python scripts/docs_site.py                 site/index.html

README.md is the first page. Files in envs/ are pages that show them, and api.html has docstrings.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from script_tools import ROOT, make_parser
from sphinx.cmd.build import build_main

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
CAPTIONS = {
    "Begin": "quickstart first_environment python glossary recipes troubleshooting",
    "Coming from": "from_trl coming_from",
    "Tasks": "environments images agents terminal rewards actors sandbox remote_boxes service",
    "Learning": "algorithms preferences distillation sft async models",
    "Machines": "parallelism engines performance reliability gpu",
    "Runs": "runs metrics view reading_rollouts tools",
    "Inside": "house api CONTRIBUTING CHANGELOG",
}
API = {
    "Scripts and notebooks": [
        "rl_core.tools.api.train: train TrainResult",
        "rl_core: reward",
        "rl_core.tools.viewer.notebook: view",
    ],
    "What flows": [
        "rl_core.types: Task SamplingParams Completion Turn Trajectory TrainingSample PackedBatch "
        "RunError"
    ],
    "Actors in rollout(task, actors)": [
        "rl_core.sampling.actor: Actor",
        "rl_core.sampling.conversation: Conversation",
    ],
    "Engines": [
        "rl_core.sampling.engine: Engine WeightOwner EngineSpec EmbeddedSpec ServerSpec EngineDied"
    ],
    "Rewards": [
        "rl_core.rewards",
        "rl_core.rewards.reward_model: RewardModel remote_scores",
    ],
    "Sandbox": ["rl_core.sandbox.sandbox: Sandbox", "rl_core.sandbox.judging: Result"],
    "Advantages and losses": ["rl_core.algorithms"],
    "Metrics": ["rl_core.metrics", "rl_core.run.display.metric_table: describe Row"],
}
# Lines of code have up to 100 columns, tables more. Where Furo shows both of its columns of 15em,
# the text and its 6em of padding have the rest.
STYLE = """
@media (min-width: 82em) {
  .content { width: min(60em, 100vw - 37em); }
  .sidebar-drawer { width: calc(50% - 33em); }
}
pre { font-size: 80%; }
"""
CONF = """
import re

project, html_title, html_theme = "rl_core", "rl_core", "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_heading_anchors = 4
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_sphinx = html_show_copyright = False
html_theme_options = {"light_css_variables": {"font-stack--monospace": "ui-monospace, monospace"}}
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
copybutton_prompt_text = "$ "


def as_text(app, what, name, obj, options, lines):
    # Docstrings are plain sentences: `code` is code, an indented paragraph is shown as it is.
    result = []
    for paragraph in "\\n".join(lines).split("\\n\\n"):
        if paragraph.startswith(" "):
            result += ["::", "", *paragraph.split("\\n"), ""]
        else:
            parts = paragraph.replace("\\\\", "\\\\\\\\").split("`")
            for n in range(0, len(parts), 2):
                parts[n] = re.sub(r"([*_|])", r"\\\\\\1", parts[n])
            result += ["``".join(parts).replace("\\n", " "), ""]
    lines[:] = result


def setup(app):
    app.connect("autodoc-process-docstring", as_text)
"""


def with_links_of_the_site(name: str, text: str) -> str:
    if name in OUTSIDE:
        text = text.replace("](docs/", "](").replace("](README.md", "](index.md")
        return re.sub(r"\[docs/(\w+\.md)\]", r"[\1]", text)
    text = re.sub(r"\]\(\.\./(envs/\w+)\.py\)", r"](\1.md)", text)
    outside = "|".join(map(re.escape, OUTSIDE))
    return re.sub(rf"\]\(\.\./({outside})", lambda m: f"]({OUTSIDE[m[1]]}", text)


def write_pages(folder: Path) -> None:
    """The source of the site."""
    shutil.copytree(ROOT / "docs", folder, dirs_exist_ok=True)
    pages = [ROOT / name for name in OUTSIDE] + sorted((ROOT / "docs").rglob("*.md"))
    for file in pages:
        text = with_links_of_the_site(file.name, file.read_text(encoding="utf-8"))
        if file.name in OUTSIDE:
            target = folder / OUTSIDE[file.name]
        else:
            target = folder / file.relative_to(ROOT / "docs")
        if file.name == "README.md":
            text = "\n".join(
                [text, *map(toctree, CAPTIONS.items()), toctree(("", "envs/* evidence/*"))]
            )
        target.write_text(text, encoding="utf-8")
    (folder / "envs").mkdir()
    for file in sorted((ROOT / "envs").glob("*.py")):
        code = file.read_text(encoding="utf-8")
        page = f"# envs/{file.name}\n\n````python\n{code}````\n"
        (folder / f"envs/{file.stem}.md").write_text(page, encoding="utf-8")
    (folder / "api.rst").write_text(api_page())
    (folder / "_static").mkdir()
    (folder / "_static/site.css").write_text(STYLE)
    (folder / "conf.py").write_text(CONF)


def toctree(entry: tuple[str, str]) -> str:
    caption, pages = entry
    options = f":caption: {caption}" if caption else ":glob:"
    lines = pages.replace(" ", "\n")
    return f"```{{toctree}}\n:hidden:\n{options}\n\n{lines}\n```\n"


def api_page() -> str:
    lines = ["API", "===", ""]
    for title, modules in API.items():
        lines += [title, "-" * len(title), ""]
        for module, _, names in (entry.partition(": ") for entry in modules):
            lines += [f".. automodule:: {module}", ""] if not names else []
            for name in names.split():
                kind = "autoclass" if name[0].isupper() else "autofunction"
                lines += [f".. {kind}:: {module}.{name}", ""]
    return "\n".join(lines)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--out", default="site")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_pages(Path(folder))
        # -W: a warning, such as of a link that leads nowhere, is an error.
        return build_main(["-q", "-W", "--keep-going", "-b", "html", folder, args.out])


if __name__ == "__main__":
    sys.exit(main())
