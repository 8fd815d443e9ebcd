"""A hook of mkdocs.yml: pages of the site from files outside docs/, and links to them.

README.md is the first page. Files in envs/ are pages that show them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}


def on_files(files: Files, config: Any) -> Files:
    for name, page in OUTSIDE.items():
        files.append(
            File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        )
    for file in sorted((ROOT / "envs").glob("*.py")):
        text = f"# envs/{file.name}\n\n````python\n{file.read_text(encoding='utf-8')}````\n"
        files.append(File.generated(config, f"envs/{file.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns the repository's links into links of the site."""
    if page.file.src_uri in OUTSIDE.values():
        markdown = markdown.replace("](docs/", "](").replace("](README.md", "](index.md")
        return re.sub(r"\[docs/(\w+\.md)\]", r"[\1]", markdown)
    markdown = re.sub(r"\]\(\.\./(envs/\w+)\.py\)", r"](\1.md)", markdown)
    outside = "|".join(map(re.escape, OUTSIDE))
    return re.sub(rf"\]\(\.\./({outside})", lambda m: f"]({OUTSIDE[m[1]]}", markdown)
