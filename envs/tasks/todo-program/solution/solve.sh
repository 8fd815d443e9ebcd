#!/bin/sh
cat > todo.py <<'END'
import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("todo.json")


def main(word, *given):
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"next": 1, "entries": {}}
    entries = kept["entries"]
    if word == "list":
        for number, (text, is_done) in entries.items():
            print(f"{number} [{'x' if is_done else ' '}] {text}")
        return
    if word == "add":
        print(kept["next"])
        entries[str(kept["next"])] = [given[0], False]
        kept["next"] += 1
    elif given[0] not in entries:
        sys.exit(1)
    elif word == "done":
        entries[given[0]][1] = True
    else:
        del entries[given[0]]
    FILE.write_text(json.dumps(kept))


main(*sys.argv[1:])
END
