"""An agent's command in a box: its view, its reach, and its traces afterwards: none."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit import ROOT, wait_until
from PIL import Image
from stage import cast, run

from rl_core.data.images import decoded_image, image_of
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.agents import forward
from rl_core.environments.agents.harbor_tasks import task_rows
from rl_core.environments.agents.rollout import Endpoints
from rl_core.environments.env_file import load_env

# A client of the standard library: the whole program must fit into an image's Python.
ASK = """
import json, os, sys, urllib.request

def ask(*messages, key=os.environ["OPENAI_API_KEY"]):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": m} for m in messages]}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
ROW = {"prompt": "2+2", "answer": "4"}


def can_box() -> bool:
    """True if bubblewrap makes namespaces here."""
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return bool(shutil.which("bwrap")) and subprocess.run(command, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_box(), reason="needs bubblewrap and user namespaces")


def boxed_env(folder: Path, program: str, reward: str, box: str = "True") -> object:
    (folder / "program.py").write_text(ASK + program)
    file = folder / "env.py"
    file.write_text(f'agent = ["python", "program.py", "{{answer}}"]\nbox = {box}\n{reward}')
    return load_env(str(file))


def play(folder: Path, program: str, reward: str, box: str = "True", **options):
    (trajectory,) = run(
        boxed_env(folder, program, reward, box), cast(policy="x"), rows=[ROW], **options
    )
    return trajectory


def said_by(folder: Path, program: str, box: str = "True") -> str:
    """Output of a program that asks once."""
    reward = f"""
async def reward_fn(result):
    open({str(folder / "said")!r}, "w").write(result.stdout + result.stderr)
    return float(result.exit_code == 0)
"""
    trajectory = play(folder, f"ask('hi')\n{program}", reward, box)
    assert trajectory.error == "", trajectory.error
    return (folder / "said").read_text()


def test_a_boxed_command_plays_and_its_rewards_look_into_the_box(tmp_path):
    program = """
said = ask('hi')
open("made.txt", "w").write(said + sys.argv[1])
print(said, json.load(open(os.environ["RL_CORE_TASK"]))["prompt"], os.getcwd())
sys.stderr.write("no")
sys.exit(3)
"""
    reward = """
async def reward_fn(result, box):
    assert (result.exit_code, result.text, result.stderr) == (3, "x 2+2 /app", "no"), result
    assert await box.get("/app/made.txt") == b"x4"
    done = await box.exec("cat made.txt task.json", cwd=result.workspace)
    return {"code": done.code, "made": done.stdout.startswith('x4{"prompt": "2+2", "answer": "4"')}
"""
    trajectory = play(tmp_path, program, reward)
    assert (trajectory.error, trajectory.reward_parts) == ("", {"code": 0.0, "made": 1.0})
    assert [turn.completion.text for turn in trajectory.turns] == ["x"]


def test_the_command_sees_the_files_that_it_was_given_alone(tmp_path):
    (tmp_path / "answers.jsonl").write_text("secret")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "one.txt").write_text("one")
    program = """
print(sorted(os.listdir("/agent")), open("/agent/prompts/one.txt").read())
print(json.load(open("task.json")))
for path in sys.argv[1:]:
    try:
        open("/agent/program.py", "a")
    except OSError as error:
        print("read-only")
"""
    assert said_by(tmp_path, program, '{"files": ["prompts"], "hides": ["answer"]}') == (
        "['program.py', 'prompts'] one\n{'prompt': '2+2'}\nread-only\n"
    )


def test_a_box_hides_the_columns_that_rewards_name_unless_told(tmp_path):
    path = tmp_path / "env.py"
    for box, hidden in (("True", ["answer"]), ("{'hides': []}", [])):
        path.write_text(
            f"agent = ['python3', '-c', '{{seed}}']\nbox = {box}\n"
            "def reward_fn(result, answer, seed, question): return 1.0\n"
        )
        env = load_env(str(path))
        [played] = [
            cell.cell_contents
            for cell in env.hooks["rollout"].function.__closure__
            if hasattr(cell.cell_contents, "box")
        ]
        assert list(played.box.hides) == hidden


def test_the_box_has_no_variables_files_processes_or_network_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a secret of the run")
    program = f"""
import glob, socket
print("variables:", sorted(set(os.environ) & {{"WANDB_API_KEY", "HF_TOKEN"}}))
mine = b"a secret" + b" of the run"
found = []
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        found += [path] if mine in open(path, "rb").read() else []
    except OSError:
        pass
print("of processes:", found)
print("home:", os.path.exists({str(tmp_path)!r}), os.path.exists({os.path.expanduser("~/.bashrc")!r}))
for address in (("127.0.0.1", 22), ("192.0.2.1", 80), ("1.1.1.1", 53)):
    with socket.socket() as client:
        client.settimeout(2)
        print("network:", client.connect_ex(address) == 0)
print("interfaces:", [name for _, name in socket.if_nameindex()])
"""
    assert said_by(tmp_path, program) == (
        "variables: []\nof processes: []\nhome: False False\n"
        "network: False\nnetwork: False\nnetwork: False\ninterfaces: ['lo']\n"
    )


def test_a_box_reaches_its_own_conversation_alone(tmp_path):
    """Both episodes talk over the same socket; without the other's key there is no way in."""
    program = """
import urllib.error
for key in ("", "sk-" + "x" * 32, os.environ["OPENAI_API_KEY"][:-1]):
    try:
        print(ask("hi", key=key))
    except urllib.error.HTTPError as error:
        print(error.code)
"""
    assert said_by(tmp_path, program) == "401\n401\n401\n"


def test_more_connections_than_threads_do_not_end_the_forwarding(tmp_path):
    program = """
import socket, time
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
ends = [socket.create_connection((url.hostname, url.port)) for _ in range(90)]
time.sleep(1)
for end in ends:
    end.close()
for _ in range(100):
    try:
        print(ask("hi"))
        break
    except OSError:
        time.sleep(0.1)
"""
    reward = """
async def reward_fn(result):
    return float(result.text == "x")
"""
    trajectories = play(tmp_path, program, reward, '{"processes": 60}', timeout_s=60.0)
    assert (trajectories.reward, trajectories.error) == (1.0, "")


# 127.0.0.2 is this machine too: who listens at all of its addresses answers there.
CONNECT = """
import os, socket
port = int(os.environ["AT"].rpartition(":")[2])
for host in ("127.0.0.1", "127.0.0.2"):
    print(socket.socket().connect_ex((host, port)))
"""


def test_the_forwarder_listens_at_one_address_alone(tmp_path):
    """A box with a network has that of the machine."""
    command = [sys.executable, forward.__file__, str(tmp_path / "none.sock")]
    done = subprocess.run(
        [*command, sys.executable, "-c", CONNECT],
        env=os.environ | {"AT": forward.ADDRESS},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", str(errno.ECONNREFUSED)]


def test_each_episode_has_a_box_of_its_own(tmp_path):
    program = """
import time
before = sorted(os.listdir("/app") + os.listdir("/tmp"))
open("/app/mine", "w"); open("/tmp/mine", "w")
print(before, ask('hi'))
"""
    reward = """
async def reward_fn(result):
    return float(result.stdout == "['task.json'] x\\\\n")
"""
    env = boxed_env(tmp_path, program, reward.replace("\\\\", "\\"))
    trajectories = run(env, cast(policy="x"), rows=[ROW] * 3, group_size=3)
    assert [(t.reward, t.error) for t in trajectories] == [(1.0, "")] * 9


def processes_with(mark: str) -> list[str]:
    folders = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            folders += [file.parent.name] if mark.encode() in file.read_bytes() else []
        except OSError:
            continue
    return folders


FORKS_AWAY = """
import subprocess
ask('hi')
how = dict(start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
subprocess.Popen(["setsid", "sleep", "{mark}"], **how)
open("/app/begun", "w")
"""


def test_what_forks_away_is_ended_before_the_rewards(tmp_path):
    program = FORKS_AWAY.replace("{mark}", "98713")
    reward = """
async def reward_fn(box):
    await box.get("/app/begun")
    running = (await box.exec("cat /proc/[0-9]*/cmdline")).stdout
    assert "cat" in running
    return float("98713" in running)
"""
    trajectory = play(tmp_path, program, reward)
    assert (trajectory.reward, trajectory.error) == (0.0, "")
    assert processes_with("98713") == []


def test_an_episodes_deadline_ends_all_that_runs_in_its_box(tmp_path):
    program = FORKS_AWAY.replace("{mark}", "98714") + "import time; time.sleep(98714)"
    trajectory = play(tmp_path, program, "def reward_fn(result): return 1.0", timeout_s=5.0)
    assert trajectory.status == "failed" and "episode_timeout_s" in trajectory.error
    wait_until(lambda: not processes_with("98714"), "the end of all in the box")


def test_output_without_end_is_bounded(tmp_path):
    program = "ask('hi')\nfor _ in range(200): sys.stdout.write('x' * 1_000_000)\nprint('end')"
    reward = """
async def reward_fn(result):
    assert result.stdout.startswith("xxx") and result.stdout.endswith("xend\\n")
    return float(len(result.stdout) < 20_000_000)
"""
    trajectory = play(tmp_path, program, reward)
    assert (trajectory.reward, trajectory.error) == (1.0, "")


def test_a_program_that_is_missing_or_fails_says_so(tmp_path):
    file = tmp_path / "env.py"
    reward = "def reward_fn(result): return 1.0"
    file.write_text(f'agent = ["no-such-program"]\nbox = True\n{reward}')
    (trajectory,) = run(load_env(str(file)), cast(policy="x"), rows=[ROW])
    assert trajectory.status == "failed" and "no-such-program" in trajectory.error
    trajectory = play(tmp_path, "import signal; os.kill(os.getpid(), signal.SIGKILL)", reward)
    assert trajectory.status == "failed" and "exit code 137" in trajectory.error


REFUSED = {
    "an unknown setting": ('agent = ["x"]\nbox = {"memory": 3}', "box: 'memory' is unknown"),
    "a file that is not there": ('agent = ["x"]\nbox = {"files": ["y"]}', "there is no .*/y"),
    "a file above": ('agent = ["x"]\nbox = {"files": ["../y"]}', "'../y' must lie next to"),
    "a file elsewhere": ('agent = ["x"]\nbox = {"files": ["/etc/hosts"]}', "must lie next to"),
    "a wrong kind": ('agent = ["x"]\nbox = "docker"', "box = 'docker' must be True, or a dict"),
    "no command": ("box = True\nasync def agent(task, llm): pass", "write agent = "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_box_that_cannot_be_is_refused(tmp_path, name):
    text, error = REFUSED[name]
    file = tmp_path / "env.py"
    file.write_text(f"{text}\ndef reward_fn(result): return 1.0\n")
    with pytest.raises(ValueError, match=error):
        load_env(str(file))


IN_A_ROLLOUT = """
from rl_core.environments.agents.boxed import run_boxed
from rl_core.sandbox import boxes

async def rollout(task, actors):
    async with actors["policy"].endpoint() as llm:
        async with await boxes.open(task.row, binds=await llm.binds()) as box:
            await box.put("/app/program.py", task.row["program"])
            result = await run_boxed(box, ["python3", "program.py"], llm, workspace="/app")
            assert result.text == "x", result
            return llm.trajectories(float((await box.exec("cat made.txt")).stdout))
"""


def test_a_rollout_of_its_own_runs_a_command_at_its_endpoint_in_its_box(tmp_path):
    file = tmp_path / "env.py"
    file.write_text(IN_A_ROLLOUT)
    program = ASK + "print(ask('hi')); open('made.txt', 'w').write('0.25')"
    actors = cast(policy="x")
    actors["policy"].open_endpoint = Endpoints()
    trajectories = run(load_env(str(file)), actors, rows=[{"prompt": "a", "program": program}] * 2)
    assert [(t.reward, t.error) for t in trajectories] == [(0.25, "")] * 2


def test_a_command_plays_tasks_in_harbors_format(monkeypatch):
    program = ASK + "open('/app/answer.txt', 'w').write(ask(sys.argv[1]))"
    monkeypatch.setenv("HARBOR_AGENT", shlex.join(["python3", "-c", braced(program), "{prompt}"]))
    task = ROOT / "envs/tasks/count-errors"
    (log,) = task.glob("environment/**/*.log")
    right = sum(line.split()[2] == "ERROR" for line in log.read_text().splitlines())
    rewards = []
    for answer in (right, right + 1):
        actors = cast(policy=str(answer))
        actors["policy"].open_endpoint = Endpoints()
        (trajectory,) = run(load_env(str(ROOT / "envs/harbor.py")), actors, rows=task_rows(task))
        assert trajectory.error == ""
        rewards.append(trajectory.reward)
    assert rewards == [1.0, 0.0]


STEPS = 'version = "1.0"\n[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'
ASKS_AGAIN = "open('said', 'a').write(sys.argv[1] + ask(sys.argv[1]))"


def test_a_command_plays_each_step_of_a_task(monkeypatch, tmp_path):
    files = {"task.toml": STEPS, "environment/Dockerfile": "FROM debian\nWORKDIR /app\n"}
    files["tests/test.sh"] = "#!/bin/sh\nwc -c < said > /logs/verifier/reward.txt\n"
    files |= {f"steps/{name}/instruction.md": f"{name}?" for name in "ab"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = ["python3", "-c", braced(ASK + ASKS_AGAIN), "{prompt}"]
    monkeypatch.setenv("HARBOR_AGENT", shlex.join(command))
    actors = cast(policy="4")
    actors["policy"].open_endpoint = Endpoints()
    rows = task_rows(tmp_path)
    played = run(load_env(str(ROOT / "envs/harbor.py")), actors, rows=rows)
    asked = [t.messages[0]["content"] for t in played]
    assert (asked, [t.error for t in played]) == (["a?", "b?"], ["", ""])
    # `said` is "a?4", then "a?4b?4".
    assert [t.reward for t in played] == [(3 + 6) / 2] * 2


def test_a_command_that_asks_nothing_fails_its_task_with_what_it_wrote(monkeypatch):
    monkeypatch.setenv("HARBOR_AGENT", "python3 nowhere.py {prompt}")
    actors = cast(policy="4")
    actors["policy"].open_endpoint = Endpoints()
    rows = task_rows(ROOT / "envs/tasks/count-errors")
    (trajectory,) = run(load_env(str(ROOT / "envs/harbor.py")), actors, rows=rows)
    assert trajectory.status == "failed" and trajectory.reward is None
    assert "asked no model" in trajectory.error and "file 'nowhere.py'" in trajectory.error


def braced(text: str) -> str:
    """Text escaped for a command, in which single braces name columns."""
    return text.replace("{", "{{").replace("}", "}}")


SCREEN = """
from rl_core.sandbox import boxes

DRAW = r'''
import struct, zlib
def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
head = struct.pack(">IIBBBBB", 5, 2, 8, 2, 0, 0, 0)
rows = (b"\\0" + b"\\xff\\0\\0" * 5) * 2
png = bytes([137]) + b"PNG\\r\\n" + bytes([26, 10])
png += chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
open("screen.png", "wb").write(png)
'''

async def rollout(task, actors):
    async with await boxes.open(task.row) as box:
        await box.put("draw.py", DRAW)
        await box.exec("python3 draw.py")
        screen = await box.get("screen.png")
    reply = await actors["policy"].respond(task.messages)
    await reply.respond([{"role": "user", "content": ["Click.", screen]}])
    return [reply.trajectory(1.0)]
"""


def test_a_box_gives_a_screen_as_an_image(env_of):
    actor = ScriptedActor(name="policy", chat=plain_chat(), replies=["x"])
    # A row's image is of its prompt, unless it names a container's.
    row = ROW | {"image": Image.new("RGB", (3, 3))}
    [trajectory] = run(env_of(SCREEN), {"policy": actor}, rows=[row])
    assert trajectory.error == ""
    text, screen = trajectory.messages[2]["content"]
    assert text == {"type": "text", "text": "Click."}
    picture = decoded_image(image_of(screen["image"]))
    assert (picture.size, picture.getcolors()) == ((5, 2), [(10, (255, 0, 0))])
