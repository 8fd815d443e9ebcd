"""The hash of an environment file with the files that it imports."""

from __future__ import annotations

import ast
import hashlib
from contextlib import suppress
from pathlib import Path
from types import ModuleType


def hash_of(module: ModuleType) -> str:
    """The first 12 hex digits of the SHA-256 of the file and of all files in its folder that it
    imports, also in functions; "" for a module without a file."""
    file = Path(getattr(module, "__file__", None) or "")
    if not file.is_file():
        return ""
    contents, pending = {}, [file]
    while pending:
        if (each := pending.pop()) not in contents:
            contents[each] = each.read_bytes()
            pending += imported_files(each, contents[each], file.parent)
    texts = [contents.pop(file), *(text for _, text in sorted(contents.items()))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def imported_files(file: Path, text: bytes, folder: Path) -> list[Path]:
    """Files in `folder` that a file imports."""
    files = []
    with suppress(SyntaxError, ValueError, IndexError):  # A lazily imported file may be broken.
        for node in ast.walk(ast.parse(text)):
            start, names = folder, []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = file.parents[node.level - 1] if node.level else folder
                names = [f"{node.module or ''}.{each.name}".lstrip(".") for each in node.names]
            for name in names:
                path = start
                for module in name.split("."):
                    path /= module
                    files += [path.with_suffix(".py"), path / "__init__.py"]
    return [each for each in files if each.is_file()]
