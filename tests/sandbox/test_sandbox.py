"""The sandbox: what programs and tests give, and that nothing a program does decides its tests."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stage
from hostile import ALL, attack_all, started
from kit import ROOT, kill_session, start_process, wait_until

from rl_core.environments.env_file import load_env
from rl_core.sandbox import Sandbox, isolation
from rl_core.sandbox.rows import function_tests

COMMAND = [sys.executable, "-m", "rl_core.tools.cli", "sandbox"]
NAP = 7_000_000 + os.getpid() * 2  # seconds that no other process sleeps
DOUBLE = "def f(x):\n    return x * 2\n"


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox()
    yield made
    made.close()


def processes(*words: object) -> list[str]:
    """Command lines with all these words."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [
        line
        for line in lines
        if all(str(word) in line for word in words) and "python" not in line[:60]
    ]


def run(sandbox: Sandbox, code: str, **options):
    return asyncio.run(sandbox.run(code, **{"timeout_s": 10} | options))


def test_a_program_gets_its_stdin_and_its_output_comes_back(sandbox):
    observed = run(
        sandbox, "import sys\nprint(input()[::-1])\nprint('e', file=sys.stderr)", stdin="abc"
    )
    assert (observed.status, observed.stdout, observed.stderr, observed.passed, observed.share) == (
        "ok",
        "cba\n",
        "e\n",
        [],
        1.0,
    )
    assert [run(sandbox, f"print('x' * {n})").status for n in ((256 << 10) - 1, 256 << 10)] == [
        "ok",
        "output",
    ]
    assert run(sandbox, "print(1)\nraise ValueError('no')").stderr.endswith("ValueError: no\n")


def test_tests_of_functions_pass_by_type_and_value_and_say_what_was_given(sandbox):
    tests = [
        "assert f(2) == 4",
        "assert f(3) == 7",
        {"call": "f(2)", "expected": 4},
        {"call": "f(2)", "expected": 4.0},
    ]
    observed = run(sandbox, DOUBLE, tests=[*tests, "assert g(1)"])
    assert (observed.status, observed.passed, observed.share) == (
        "wrong",
        [True, False, True, False, False],
        0.4,
    )
    assert observed.failures == [
        "",
        "assert f(3) == 7: f(3) gave 6",
        "",
        "f(2): expected 4.0, f(2) gave 4",
        "assert g(1): NameError: name 'g' is not defined",
    ]


def test_pairs_run_a_program_for_each(sandbox):
    observed = run(
        sandbox, "print(int(input()) * 2)", tests=[("2", "4"), ("3\n", "7\n"), ("x", "1")]
    )
    assert (observed.status, observed.passed, observed.stdout) == (
        "wrong",
        [True, False, False],
        "4\n",
    )
    assert (
        "printed '6\\n'" in observed.failures[1]
        and "ValueError: invalid literal" in observed.failures[2]
    )


@pytest.mark.parametrize(
    "language, code",
    [
        ("bash", "read x; echo $((x * 2))"),
        (
            "cpp",
            "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x * 2 << '\\n'; "
            "}",
        ),
    ],
)
def test_other_languages(sandbox, language, code):
    observed = run(sandbox, code, tests=[("2", "4"), ("3", "7")], language=language)
    assert observed.passed == [True, False], observed
    broken = run(sandbox, "if (((", tests=[("2", "4")], language=language)
    assert broken.passed == [False] and broken.status in ("syntax", "error")


# Results


@pytest.mark.parametrize(
    "code, status",
    [
        ("def f(x): retur x", "syntax"),
        ("import sys\ndef f(x): sys.exit(0)", "exit"),
        ("def f(x):\n    while True: pass", "timeout"),
        ("def f(x): return bytearray(10 ** 10)", "memory"),
        ("while True: print('x' * 9999)", "output"),
        ("def f(x): raise KeyError(x)", "error"),
        ("import os; os._exit(0)", "ended"),
        ("def f(x): return None", "wrong"),
    ],
)
def test_why_a_program_fails(sandbox, code, status):
    limit = 0.5 if status == "timeout" else 20
    observed = run(
        sandbox, code, tests=["assert f(1) > 0", {"call": "f(2)", "expected": 3}], timeout_s=limit
    )
    assert (observed.status, observed.passed) == (status, [False, False]), observed
    assert all(observed.failures) and max(map(len, observed.failures)) < 900


def test_values_keep_their_types_and_objects_stay_where_they_are(sandbox):
    code = """
import collections, enum
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def top(self): return self.items[-1]
def same(x): return x
def counts(text): return collections.Counter(text)
def up(n):
    for k in range(n): yield k
def sort(items): items.sort()
def fail(x): raise ValueError(f"no {x}")
"""
    values = [
        None,
        True,
        1,
        1.0,
        2**70,
        -0.5,
        1j,
        "é\ud800",
        b"\0",
        [1, (2, {3})],
        {(1, "a"): frozenset([b"x"])},
    ]
    tests = [
        {"call": f"same({value!r})", "expected": value}
        for value in [*values, float("inf")]
        if value != float("inf")
    ]
    more = [
        "assert counts('aab') == {'a': 2, 'b': 1}",
        "s = Stack(); s.push(3).push(4); assert s.top() == 4 and s.items == [3, 4]",
        "assert list(up(3)) == [0, 1, 2] and 2 in up(4)",
        "x = [3, 1, 2]; sort(x); assert x == [1, 2, 3]",
        "try: fail(7)\nexcept ValueError as e: assert 'no 7' in str(e)\nelse: assert False",
        "assert math.isclose(same(0.1) + same(0.2), 0.3)",
        "assert helper(same(4)) == 5",
        "assert same(10**5000) == 10**5000",
    ]
    observed = run(sandbox, code, tests=tests + more, setup="def helper(x): return x + 1")
    assert observed.status == "ok", observed.failures
    assert run(sandbox, code, tests=[{"call": "same(10**5000)", "expected": 10**5000}]).passed == [
        True
    ]
    for call, other in (
        ("same(1)", True),
        ("same(1)", 1.0),
        ("same([1])", (1,)),
        ("same({1: 2})", {True: 2}),
        ("same({(1,)})", {(True,)}),
    ):
        assert run(sandbox, code, tests=[{"call": call, "expected": other}]).passed == [False]


@pytest.mark.parametrize(
    "options",
    [{"tests": ["assert f("]}, {"tests": ["assert f(1)"], "setup": "import no_such_module"}],
)
def test_broken_tests_are_no_fault_of_the_program(sandbox, options):
    with pytest.raises(
        ValueError, match=r"the tests are broken: (SyntaxError|ModuleNotFoundError)"
    ):
        run(sandbox, DOUBLE, **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"language": "cobol"}, "'cobol' is not one of python, bash, cpp"),
        ({"tests": ["assert f(1)"], "language": "bash"}, "tests are all pairs"),
        ({"tests": ["assert f(1)", ("1", "2")]}, "tests are all pairs"),
        ({"timeout_s": 0}, "timeout_s=0 must be above 0"),
    ],
)
def test_wrong_arguments_are_named(sandbox, options, words):
    with pytest.raises(ValueError, match=words):
        run(sandbox, DOUBLE, **options)


def test_a_program_finds_nothing_of_another(sandbox):
    leave = "open('left', 'w').write('x')\nimport math, os; math.left = os.environ['LEFT'] = '1'"
    look = (
        "import os, math; print(os.path.exists('left'), os.environ.get('LEFT'), hasattr(math, "
        "'left'))"
    )
    run(sandbox, leave)
    assert run(sandbox, look).stdout == "False None False\n"


# The pool


def test_many_programs_at_once_lose_no_result(sandbox):
    async def all_of_them():
        runs = [
            sandbox.run(
                f"def f(x): return x + {n}", tests=[f"assert f(1) == {n + 1}"], timeout_s=20
            )
            for n in range(100)
        ]
        return await asyncio.gather(*runs)

    assert [observed.status for observed in asyncio.run(all_of_them())] == ["ok"] * 100


def test_time_in_which_no_core_is_free_does_not_count():
    made = Sandbox(workers=4 * (os.cpu_count() or 1))
    code = "import time\nwhile time.process_time() < .4: pass"

    async def crowd():
        return await asyncio.gather(*(made.run(code, timeout_s=2) for _ in range(made.workers)))

    assert {observed.status for observed in asyncio.run(crowd())} == {"ok"}
    made.close()


def test_a_killed_warm_process_is_replaced():
    made = Sandbox()

    async def kill_while_busy():
        runs = [
            asyncio.ensure_future(made.run("import time; time.sleep(.2); print(1)", timeout_s=20))
            for _ in range(6)
        ]
        await asyncio.sleep(0.15)
        first = made._pool.process
        os.killpg(first.pid, signal.SIGKILL)
        observed = await asyncio.gather(*runs)
        return first.pid, observed

    made.start()
    pid, observed = asyncio.run(kill_while_busy())
    assert [one.stdout for one in observed] == ["1\n"] * 6 and made._pool.process.pid != pid
    made.close()


def test_nothing_lives_on_when_the_owner_is_killed(tmp_path):
    start = f"import subprocess, time\nsubprocess.Popen(['sleep', '{NAP}'], start_new_session=True)"
    code = (
        f"{start}\ntime.sleep({NAP})"
        if Sandbox().start() != "landlock"
        else f"import os\nos.system('sleep {NAP}')"
    )
    (tmp_path / "owner.py").write_text(
        "import asyncio, sys\nfrom rl_core.sandbox import Sandbox\nprint('ready', flush=True)\n"
        f"asyncio.run(Sandbox(level=sys.argv[1]).run({code!r}, timeout_s=600))\n"
    )
    level = Sandbox().start()
    process = start_process(tmp_path / "owner.py", level)
    try:
        process.stdout.readline()
        wait_until(lambda: processes(str(NAP)), "the program's child runs")
        process.kill()
        wait_until(lambda: not processes(str(NAP)), "its end")
        wait_until(lambda: not processes(f"serve('{level}'", process.pid), "the warm process ends")
    finally:
        kill_session(process)
        process.communicate()


def test_a_cancelled_program_ends(sandbox):
    async def cancel():
        task = asyncio.ensure_future(
            sandbox.run(f"import subprocess\nsubprocess.run(['sleep', '{NAP + 1}'])", timeout_s=600)
        )
        await asyncio.to_thread(wait_until, lambda: processes(str(NAP + 1)), "the child runs")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    wait_until(lambda: not processes(str(NAP + 1)), "its end")


def test_a_machine_without_a_level_is_refused(monkeypatch):
    monkeypatch.setattr("rl_core.sandbox.sandbox.LEVELS", {})
    with pytest.raises(RuntimeError, match="cannot close off network and files"):
        Sandbox().start()


def test_the_command(tmp_path):
    (tmp_path / "a.py").write_text("print(input() * 2)")
    done = subprocess.run(
        [*COMMAND, "run", tmp_path / "a.py"], input="ab", capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "abab\n") and done.stderr.startswith("ok, ")
    (tmp_path / "b.sh").write_text("exit 3")
    done = subprocess.run(
        [*COMMAND, "run", tmp_path / "b.sh"], input="", capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1 and done.stderr.startswith("error, ")


# Hostile programs


def left_behind() -> dict:
    shm = [name for name in os.listdir("/dev/shm") if "hostile" in name]
    return {
        "sysv": Path("/proc/sysvipc/shm").read_text().count("\n"),
        "shm": shm,
        "files": len(os.listdir("/proc/self/fd")),
    }


MANY_LINKS = """
import os
open("file", "w").close()
for number in range(20_000):
    os.link("file", f"link_{number}")
print(os.path.basename(os.getcwd()))
"""


def test_a_program_is_answered_before_its_files_are_removed():
    """Removing a link costs about 5 us of CPU time."""
    observed = run(started("landlock"), MANY_LINKS, timeout_s=60)
    assert observed.status == "ok" and observed.supervisor_s < 0.05
    folder = Path("/tmp", observed.stdout.strip())
    assert folder.name.startswith("rl_core_sandbox_")
    wait_until(lambda: not folder.exists(), "the folder is removed")


@pytest.mark.parametrize("level", isolation.LEVELS)
def test_hostile_programs_get_nothing_and_leave_nothing(level):
    gc.collect()  # what other tests left open
    before, made = left_behind(), started(level)
    nap, observed = asyncio.run(attack_all(made))
    assert {name: end for name, end in observed.items() if end[0] == "open"} == {}
    wait_until(lambda: not processes(str(nap)), "children of hostile programs end")
    left = f"rl_core_sandbox_*/left_{nap}"
    wait_until(lambda: not list(Path("/tmp").glob(left)), "the programs' folders are removed")
    assert run(made, DOUBLE, tests=["assert f(2) == 4"]).status == "ok"
    copied = (
        "import shutil, tempfile\nopen('a', 'w').write('1')\nprint(open(shutil.copy('a', "
        "tempfile.mkdtemp())).read())"
    )
    assert run(made, copied).stdout == "1\n"
    made.close()
    gc.collect()
    after = left_behind()
    assert after.pop("files") <= before.pop("files") and after == before


def test_the_page_counts_the_hostile_programs():
    page = (ROOT / "docs/sandbox.md").read_text()
    assert f"`tests/hostile.py` has {len({h.name for h in ALL})} programs" in page


# HumanEval


@pytest.fixture(scope="module")
def problems(data_dir) -> list[dict]:
    with gzip.open(data_dir / "humaneval.jsonl.gz") as file:
        return [json.loads(line) for line in file]


def solve(sandbox: Sandbox, rows: list[dict], body, timeout_s: float = 20) -> list:
    """Results of each problem with this body instead of the canonical one; `body` gets the row."""

    async def one(row):
        setup, tests = function_tests(row, row["prompt"])
        return await sandbox.run(
            row["prompt"] + body(row), tests=tests, setup=setup, timeout_s=timeout_s
        )

    async def all_of_them():
        return await asyncio.gather(*map(one, rows))

    return asyncio.run(all_of_them())


def test_all_canonical_solutions_of_humaneval_pass(sandbox, problems):
    observed = solve(sandbox, problems, lambda row: row["canonical_solution"])
    assert len(observed) == 164 and not [
        row["task_id"] for row, one in zip(problems, observed, strict=True) if one.status != "ok"
    ]
    assert sum(len(one.passed) for one in observed) == 1181


@pytest.mark.parametrize(
    "body, status",
    [
        ("    return None\n", "wrong"),
        ("    return 'a wrong constant'\n", "wrong"),
        ("    retrun 1\n", "syntax"),
        ("    import sys; sys.exit(0)\n", "exit"),
        ("    while True: pass\n", "timeout"),
    ],
)
def test_wrong_solutions_of_humaneval_fail_for_the_right_reason(
    sandbox, problems, body, status, request
):
    rows = problems if request.config.option.slow else problems[::16]
    observed = solve(sandbox, rows, lambda row: body, timeout_s=20 if status != "timeout" else 0.3)
    assert {one.status for one in observed} == {status}, {
        r["task_id"]: o for r, o in zip(rows, observed, strict=True) if o.status != status
    }
    assert all(not all(one.passed) for one in observed)


# Documentation


def test_the_environment_of_the_docs_works_and_is_short(tmp_path):
    text = (ROOT / "docs/sandbox.md").read_text()
    code = re.search(r"```python\n(# regex_golf.py.*?)```", text, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    (tmp_path / "regex_golf.py").write_text(code)
    env = load_env(str(tmp_path / "regex_golf.py"))
    rows = env.load_tasks("train")
    replies = [("a$", 1.0), ("b$", 0.75), ("a", 0.75), ("((", 0.0), ("$", 0.25)]
    assert [stage.play(env, reply, row=rows[0]).reward for reply, _ in replies] == [
        earned for _, earned in replies
    ]


@pytest.mark.slow
def test_a_thousand_programs_lose_no_result_and_no_memory(sandbox):
    async def one(n):
        observed = await sandbox.run(
            f"def f(x): return x + {n}",
            tests=[f"assert f(1) == {n + 1}", "assert f(1) == 0"],
            timeout_s=60,
        )
        return observed.passed == [True, False]

    async def at_once(num):
        return all(await asyncio.gather(*map(one, range(num))))

    def resident() -> float:
        pages = sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for pid in (os.getpid(), sandbox._pool.process.pid)
        )
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    assert asyncio.run(at_once(1000))
    before = resident()
    for _ in range(19):
        assert asyncio.run(at_once(1000))
    assert resident() < before + 16


# Containers


def test_a_container_runs_programs_over_a_socket(tmp_path, monkeypatch):
    """A stand-in for docker runs the same command here, with paths of the host for those of the
    container."""
    stub = tmp_path / "docker"
    stub.write_text(f"""#!{sys.executable}
import os, sys
args = sys.argv[1:]
if args[0] == "ps":
    sys.exit()
at = args.index("some:image")
assert {{"run", "--rm", "--read-only", "--runtime=x"}} < set(args[:at])
assert args[args.index("--network") + 1] == "none"
mounts = [a.split(",")[1:3] for a in args[:at] if a.startswith("type=bind")]
volumes = {{target.split("=")[1]: source.split("=")[1] for source, target in mounts}}
code = args[-1].replace("/box/run", volumes["/box/run"]).replace("'/box'", repr(os.path.dirname(volumes["/box/rl_core"])))
os.execv(sys.executable, [sys.executable, *args[at + 1 : -1], code])
""")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    made = Sandbox(level="docker", image="some:image", flags=["--runtime=x"])
    assert made.start() == "docker" and run(made, DOUBLE, tests=["assert f(2) == 4"]).status == "ok"
    made.close()
    with pytest.raises(ValueError, match="they need one"):
        Sandbox(level="podman")
    stub.write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="docker: Cannot connect to the Docker daemon"):
        Sandbox(level="docker", image="some:image").start()
