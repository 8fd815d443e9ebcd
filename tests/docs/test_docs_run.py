"""Every fenced block of the pages: it runs here or in another test, or a mark above it says why
not, or it is plain text.

Shell blocks run in bash, page by page in one folder, with the files that the page shows and tiny
models under the names of real ones. `python`, `rl-core` and `torchrun` are passed on to forked
processes that have imported everything, with smaller sizes (see SMALLER). A server runs until
its block ends.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import kit
import pytest
from kit import LABELLED, LETTERS, PAIRS, ROOT, TALK, RanksProcess, wait_until
from PIL import Image
from test_docs import PAGES, check_command, commands_in

from rl_core.algorithms import PRESETS
from rl_core.tools.api import train

# A fenced block, and the mark in the line above it.
BLOCK = re.compile(
    r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
BLOCKS = {page: [m.groups() for m in BLOCK.finditer(text)] for page, text in PAGES.items()}
# Why a block may be marked, and how many are.
REASONS = {
    "a GPU": 3,
    "several machines": 1,
    "a container engine": 1,
    "another system's server": 2,
    "minutes long": 3,
    "the whole suite": 1,
    "placeholders": 3,
}
# Pages and languages that another test runs.
RUN_BY = {
    ("docs/python.md", "python"): "test_train_api.py",
}
RUN = [
    page
    for page, blocks in BLOCKS.items()
    if any(not why and lang != "text" and (page, lang) not in RUN_BY for why, lang, _ in blocks)
]
MODELS = (
    "M",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "runs/quickstart/sft/hf/policy",
)
SERVERS = ("view", "serve", "--online", "rl_core.rewards.reward_model")
ROWS = [
    {"prompt": f"{n} and {n}?", "answer": str(2 * n), "response": f"it is {2 * n}"}
    for n in range(8)
]
# Files that pages assume, and runs by the command that makes them.
FILES = {
    "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "held_out.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS[:2]),
    "pairs.jsonl": "".join(json.dumps(row) + "\n" for row in PAIRS),
    "labelled.jsonl": "".join(json.dumps(row) + "\n" for row in LABELLED),
    "e.py": LETTERS.replace("1000", "100"),
    "my_env.py": next(code for _, _, code in BLOCKS["README.md"] if code.startswith("# my_env.py")),
    "talk.py": TALK.replace('"bob -> alice -> bob"', '"bob -> alice -> judge"'),
}
RUNS = {
    "runs/quickstart/grpo": "rl-core train --model M --env_path envs/sort_digits.py --eval_every 1 --out runs/quickstart/grpo",
    "runs/quickstart_2/grpo": "mkdir runs/quickstart_2 && cp -r runs/quickstart/grpo runs/quickstart_2/grpo",
    "runs/x/rollouts": "rl-core train --model M --env_path e.py --out runs/x",
    "runs/rm/": "rl-core train --algorithm rm --model M --data.train pairs.jsonl --out runs/rm",
}
SHIM = """import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as to:
    to.connect(os.environ["RUNNER"])
    asks = {"words": [os.path.basename(sys.argv[1]), *sys.argv[2:]], "cwd": os.getcwd(), "env": {**os.environ}}
    to.sendall(json.dumps(asks).encode() + b"\\n")
    done = json.loads(to.makefile().readline())
sys.stdout.write(done["out"])
sys.stderr.write(done["err"])
sys.exit(done["code"])
"""


def test_every_block_runs_or_says_why_not():
    result = dict.fromkeys(REASONS, 0)
    for page, text in PAGES.items():
        assert text.count("```") == 2 * len(BLOCKS[page]), (
            f"{page}: a fence that does not begin a line"
        )
        for why, language, code in BLOCKS[page]:
            assert language in ("bash", "console", "python", "text"), (
                f"{page}: name its language: ```{language}\n{code[:80]}"
            )
            if why:
                assert language == "bash" and why in result, (
                    f"{page}: {why!r}: reasons are {', '.join(REASONS)}"
                )
                result[why] += 1
                for words in commands_in(code):
                    check_command(words)
                    named = [
                        word for word in words if re.match(r"(envs|scripts|docs|tests|\.ci)/", word)
                    ]
                    assert all((ROOT / word).exists() for word in named), f"{page}: {named}"
                    assert words[0] != "curl" or json.loads(words[words.index("-d") + 1])
    assert result == REASONS, (
        "raise a number only for a block that no machine of a developer could run"
    )
    for (page, language), file in RUN_BY.items():
        assert page in next((ROOT / "tests").rglob(file)).read_text() and language in [
            lang for _, lang, _ in BLOCKS[page]
        ]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page, tiny_model, make_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = set(sys.modules)
    monkeypatch.setattr(train, "train", small(train.train))
    prepare(tmp_path, tiny_model)
    if page == "docs/images.md":
        show_pictures(tmp_path, make_model("qwen2_5_vl"))
    with judge() as address, Runner(tmp_path, page) as runner:
        make_runs(runner, "".join(code for _, _, code in BLOCKS[page]))
        texts = {"https://host/v1": address, "controller:50051": "127.0.0.1:50051"}
        texts |= {port: str(free_port()) for port in ("50051", "8001")}
        namespace = {"code": "def f(x):\n    return x + 2", "rows": ROWS}
        for why, language, code in BLOCKS[page]:
            if why or language == "text" or (page, language) in RUN_BY:
                continue
            for theirs, ours in texts.items():
                code = code.replace(theirs, ours)
            if language == "python":
                run_python(code, namespace, runner)
            elif language == "bash":
                runner.bash(code)
            else:
                runner.console(code)
    if page == "docs/sandbox.md":
        result = namespace["result"]
        assert (result.status, result.stdout, result.passed) == ("ok", "", [True]), (
            "as its comment says"
        )
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def prepare(folder: Path, model: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    for name in ("envs", "scripts", "rl_core"):  # As in a clone.
        (folder / name).symlink_to(ROOT / name)


def show_pictures(folder: Path, model: Path) -> None:
    (folder / "pictures").mkdir()
    for number in range(8):
        colour = ("red", "green", "blue")[number % 3]
        Image.new("RGB", (16, 16), colour).save(folder / f"pictures/{colour}_{number}.png")
    (folder / "Qwen/Qwen2.5-VL-3B-Instruct").symlink_to(model)


def make_runs(runner: Runner, code: str) -> None:
    """Makes the runs that code takes for granted."""
    for name, command in RUNS.items():
        if name in code:
            runner.bash(command)


def small(train):
    """train() of a notebook with fewer and smaller steps, in a folder that a block before may
    have."""

    def with_smaller(config, **more):
        shutil.rmtree(config.out, ignore_errors=True)
        return train(
            replace(config, num_steps=1, tasks_per_step=2, group_size=2, max_tokens=8), **more
        )

    return with_smaller


def run_python(code: str, namespace: dict, runner: Runner) -> None:
    """A file of an environment is written and checked; other code runs after what stood before
    it."""
    if name := re.match(r"# (\w+\.py)\b", code):
        Path(name[1]).write_text(code)
        actors = ",".join(dict.fromkeys(re.findall(r"""actors\["(\w+)"\]""", code)))
        flags = f" --actors {actors} --reply 1" if actors else ""
        flags += (
            ""
            if re.search("def load_tasks|import load_tasks", code)
            else " --data.train rows.jsonl"
        )
        runner.bash(f"rl-core check {name[1]}{flags}")
    made = eval(compile(code, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)
    if inspect.iscoroutine(made):
        asyncio.run(made)


class Runner:
    """Runs shell blocks. Commands of this project come back here from bash, through a socket."""

    def __init__(self, folder: Path, page: str):
        self.folder, self.page, self.servers = folder, page, []
        self.listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Runner:
        tools = self.folder / ".tools"
        tools.mkdir()
        (tools / "shim.py").write_text(SHIM)
        # A client without this library has a separate process.
        alone = f'[ "$1" = scripts/grpc_client.py ] && exec {sys.executable} "$@"\n'
        for name in ("python", "rl-core", "torchrun"):
            (tools / name).write_text(
                f'#!/bin/sh\n{alone}exec {sys.executable} -S -E {tools}/shim.py "$0" "$@"\n'
            )
        for name in ("pip", "accelerate"):  # Packages are installed; accelerate is TRL's.
            (tools / name).write_text("#!/bin/sh\n")
        for file in tools.iterdir():
            file.chmod(0o755)
        # Short: its name may have 107 bytes.
        address = tempfile.mkdtemp(dir=kit.server.folder) + "/socket"
        self.listener.bind(address)
        self.listener.listen()
        self.env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "RUNNER": address}
        threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def end_servers(self) -> None:
        """Ends them by Ctrl-C, as a reader does."""
        for server in self.servers[::-1]:
            server.signal(signal.SIGINT)
        for server in self.servers:
            wait_until(
                lambda server=server: not is_there(server),
                f"{self.page}: the end of {server.args}",
                120,
            )
        self.servers.clear()

    def bash(self, code: str) -> str:
        """Returns its output. Servers that it starts end with it."""
        try:
            options = {"env": self.env, "capture_output": True, "text": True, "timeout": 300}
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], **options)
        finally:
            self.end_servers()
        assert done.returncode == 0, f"{self.page}:\n{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def console(self, code: str) -> None:
        """Runs each command after a `$`. The output of `check` and `init`, which holds no measurement,
        must be that of the page."""
        for piece in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
            command, shown = re.fullmatch(
                r"((?:[^\n]*\\\n)*[^\n]*\n)(.*)", piece, re.DOTALL
            ).groups()
            printed = self.bash(command)
            if command.startswith(("rl-core check", "rl-core init")):
                assert printed.strip() == shown.strip(), command
            # The next command, as `init` names it.
            if train := re.search(r"^  (rl-core train .*?)  ", printed, re.MULTILINE):
                self.bash(train[1])

    def listen(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                one, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(one,), daemon=True).start()

    def answer(self, one: socket.socket) -> None:
        with one, one.makefile("rw") as both:
            asked = json.loads(both.readline())
            try:
                new = {name: value for name, value in asked["env"].items() if name not in self.env}
                process = self.start(asked["words"], Path(asked["cwd"]), new)
                done = {
                    "code": process.poll() or 0,
                    "out": process.text("stdout"),
                    "err": process.text("stderr"),
                }
            except Exception as error:
                done = {"code": 99, "out": "", "err": f"{type(error).__name__}: {error}"}
            both.write(json.dumps(done) + "\n")

    def start(self, words: list[str], cwd: Path, env: dict[str, str]) -> RanksProcess:
        """The process of a command that has ended, or that serves."""
        ranks, args = as_module(words)
        out = args[args.index("--out") + 1] if "--out" in args else None
        if is_run(args) and out and "--resume" not in args:
            # A folder of an earlier block, which shows another way.
            shutil.rmtree(cwd / out, ignore_errors=True)
        process = RanksProcess(ranks, *args, cwd=cwd, env=env)
        if not set(SERVERS) & set(args):
            process.wait(240)
            return process
        self.servers.append(process)
        wait_until(
            lambda: process.poll() is not None or "http://" in process.text("stdout"),
            f"{words}: an address",
            180,
        )
        if result := re.match(r"(http://127.0.0.1:\d+/) ", process.text("stdout")):
            with urllib.request.urlopen(result[1]) as page:
                assert page.status == 200
        return process


def is_there(process: RanksProcess) -> bool:
    try:
        os.killpg(process.pid, 0)
        return True
    except ProcessLookupError:
        return False


def is_run(args: list[str]) -> bool:
    return args[:2] == ["-m", "rl_core.train"] or args[:3] == ["-m", "rl_core.tools.cli", "train"]


def as_module(words: list[str]) -> tuple[int, list[str]]:
    """Number of ranks, and what Python would get, with smaller sizes."""
    first, *args = words
    ranks = 1
    if first == "torchrun":
        at = args.index("-m")
        if "--nproc_per_node" in args[:at]:
            ranks = int(args[args.index("--nproc_per_node") + 1])
            if not any(arg.endswith(".ranks") for arg in args):
                ranks = min(2, ranks)
        args = args[at:]
    elif first == "rl-core":
        args = ["-m", "rl_core.tools.cli", *args]
    if "--rollout_ranks" in args:
        ranks = 1 + int(args[args.index("--rollout_ranks") + 1])
    if args[:1] == ["-m"]:
        args = [*args[: 3 if args[1] == "rl_core.tools.cli" else 2], *smaller(args)]
    elif args[0] == "scripts/demo_data.py":
        args += ["--num_sft", "128", "--num_train", "16"]
    return ranks, args


# Flags by which a run on a CPU ends in a second.
SMALLER = ["--num_steps", "1", "--tasks_per_step", "2", "--eval.num_tasks", "2"]


def smaller(args: list[str]) -> list[str]:
    flags = args[3:] if args[1] == "rl_core.tools.cli" else args[2:]
    verb = args[2] if args[1] == "rl_core.tools.cli" else args[1].rpartition(".")[2]
    if "..." in flags:
        flags.remove("...")
        arguments = {"--model": "M", "--out": "runs/other"} | (
            {} if is_learned_from_rows(flags) else {"--env_path": "e.py"}
        )
        flags += [
            word for name, value in arguments.items() if name not in flags for word in (name, value)
        ]
    if "scripts/recipes/gsm8k_qwen3_0.6b.yaml" in flags:
        # Instead of those of the hub.
        flags += ["--data.train", "rows.jsonl", "--data.eval", "rows.jsonl"]
    if verb == "train" and "--online" in flags:
        flags += ["--max_tokens", "8"]
    elif verb == "train":
        flags += SMALLER + (
            [] if is_learned_from_rows(flags) else ["--group_size", "2", "--max_tokens", "8"]
        )
    elif verb == "serve":
        flags += ["--workers", "1"] if "--controller" not in flags else []
    elif verb == "replay":
        flags[flags.index("--step") + 1] = "1"
    elif verb == "view":
        flags += ["--port", "0"]
    elif verb == "eval":
        flags += ["--eval.num_tasks", "2"]
    elif verb == "collect":
        flags += ["--min_reward", "0"]  # the model has learned nothing
    return flags


def is_learned_from_rows(flags: list[str]) -> bool:
    return "--algorithm" in flags and not PRESETS[flags[flags.index("--algorithm") + 1]].is_rl


def free_port() -> int:
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", 0))
        return ours.getsockname()[1]


@contextmanager
def judge():
    """The address of an API whose model says 1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            output = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "1"},
            }
            body = json.dumps(
                {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [output],
                }
            )
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
