"""The reward is 1 if the program answers this series of calls right, in a copy without entries."""

import shutil
from pathlib import Path

from programs import output, write_reward

CALLS = [
    (["list"], ""),
    (["add", "buy milk"], "1\n"),
    (["add", 'say "hello" to\tBo'], "2\n"),
    (["done", "2"], ""),
    (["list"], '1 [ ] buy milk\n2 [x] say "hello" to\tBo\n'),
    (["remove", "2"], ""),
    (["done", "2"], None),
    (["remove", "7"], None),
    (["add", "été"], "3\n"),
    (["done", "1"], ""),
    (["list"], "1 [x] buy milk\n3 [ ] été\n"),
    (["remove", "1"], ""),
    (["remove", "3"], ""),
    (["add", "x"], "4\n"),
    (["list"], "4 [ ] x\n"),
]

program = Path("/logs/todo/todo.py")
program.parent.mkdir()
try:
    shutil.copy("/app/todo.py", program)
except OSError:
    write_reward(False)
else:
    found = [output("python3", str(program), *words) for words, _ in CALLS]
    write_reward(found == [expected for _, expected in CALLS])
