"""The reward is 1 if the script copies these folders right."""

from pathlib import Path

from programs import output, write_reward

PLACE = Path("/logs/backup")


def copied(files, source, target):
    """(what the script prints, name -> text of what it copied)."""
    for name, text in files.items():
        file = PLACE / source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (PLACE / source).mkdir(parents=True, exist_ok=True)
    printed = output("/bin/sh", "/app/backup.sh", source, target, cwd=str(PLACE))
    found = {path.name: path.read_text() for path in (PLACE / target).glob("*") if path.is_file()}
    return printed and printed.strip(), found


def is_right():
    notes = {"a b  c.txt": "1", "-n.txt": "2", "*.txt": "3"}
    more = {"x.text": "4", "inner/y.txt": "5", "z.txt.old": "6"}
    if copied(notes | more, "from here", "to/there now") != ("3", notes):
        return False
    if copied({"only.md": "7"}, "empty", "nothing") != ("0", {}):
        return False
    return copied({"q.txt": "8"}, str(PLACE / "whole"), str(PLACE / "path")) == (
        "1",
        {"q.txt": "8"},
    )


PLACE.mkdir()
try:
    write_reward(is_right())
except (OSError, ValueError):
    write_reward(False)
