"""Failures end a run soon, are explained once, and leave no process behind: ranks on one machine and
on two nodes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from kit import (
    ROOT,
    ForkedProcess,
    RanksProcess,
    kill_session,
    run,
    run_ranks,
    wait_until,
    weights,
    words,
)

ENV = """
import os, time
def load_tasks(split): return [{"prompt": str(n)} for n in range(64)]
def reward_fn(completion):
    open(f"{folder}/seen_" + os.environ["RANK"], "w").close()
    {what}
    return float(len(completion))
"""


def fork_torchrun(num_ranks: int, *args, flags=("--standalone",), before="") -> ForkedProcess:
    """torchrun whose imports are done. before: code that runs in its process first."""
    return fork_agent(*flags, f"--nproc_per_node={num_ranks}", *args, before=before)


def fork_agent(*args, before: str) -> ForkedProcess:
    program = f"{before}\nimport sys\nfrom kit import run_program\nrun_program(*sys.argv[1:])"
    return ForkedProcess("-c", program, "-m", "torch.distributed.run", *args)


@pytest.fixture
def start(tiny_model, tmp_path):
    """start(code of the reward function, *flags, by=fork_torchrun) -> a run on two ranks, once
    both have scored an episode."""
    started = []

    def begin(label: str, *flags, by=RanksProcess):
        (tmp_path / "env.py").write_text(
            ENV.replace("{folder}", str(tmp_path)).replace("{what}", label)
        )
        arguments = words(
            "--model", tiny_model, "--env_path", tmp_path / "env.py", "--out", tmp_path / "run"
        )
        sizes = words(
            "--max_tokens 8 --tasks_per_step 8 --num_steps 100000 --rollout.save false", *flags
        )
        started.append(by(2, "-m", "rl_core.train", *arguments, *sizes))
        wait_until(
            lambda: all((tmp_path / f"seen_{rank}").exists() for rank in (0, 1)), "both ranks score"
        )
        return started[-1]

    yield begin
    for process in started:
        kill_session(process)


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [*map(int, children.split())]


def errors_of(process: RanksProcess | subprocess.Popen, within_s: float = 60) -> str:
    """Output of the run, after all its processes ended."""
    _, errors = process.communicate(timeout=within_s)
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return errors


def the_error(errors: str) -> str:
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    return line


def test_a_rank_that_fails_alone_before_ranks_meet_says_why(tiny_model, tmp_path):
    fails = "import os\nassert os.environ['RANK'] == '0', 'not on this one'\n"
    (tmp_path / "env.py").write_text(fails + ENV.replace("{what}", "pass"))
    flags = words(
        "--model", tiny_model, "--env_path", tmp_path / "env.py", "--out", tmp_path / "run"
    )
    assert "not on this one" in the_error(
        run_ranks(2, "-m", "rl_core.train", *flags, check=False).stderr
    )


def test_a_killed_rank_ends_another_that_waits_for_its_episodes(start):
    process = start(
        "time.sleep(1000 if os.environ['RANK'] == '0' else 0)",
        "--rollout.hook_timeout_s 900",
        by=fork_torchrun,
    )
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    errors = errors_of(process)
    # Torchrun would, after 30 s.
    assert re.search("SIGKILL|Signal 9", errors) and "Unable to shutdown" not in errors


def test_a_rank_that_stands_still_is_named_by_what_the_others_wait_for(start):
    process = start("pass", "--timeout_s 5")
    first, stopped = ranks_of(process.pid)
    os.kill(stopped, signal.SIGSTOP)
    wait_until(
        lambda: not Path(f"/proc/{first}/environ").exists() or not ranks_of(process.pid)[1:],
        "the first ends",
    )
    # The launcher would wait before it kills a rank that stands still.
    os.kill(stopped, signal.SIGCONT)
    assert re.search(
        r"rank 0 waited in the phase '[a-z, ]+' for .* --timeout_s=5", the_error(errors_of(process))
    )


# Ranks that wait for another one over HTTP, not in a collective operation.
APART = {
    "an engine's rank": "--rollout_ranks 1",
    "an actor's rank": "--actors.policy.ranks 1",
}
FROZEN = """
import os, signal
def load_tasks(split): return [{"prompt": str(n)} for n in range(64)]
async def reward_fn(completion): return float(len(completion))
if os.environ["RANK"] == "{rank}":
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize(
    "kind, frozen, before",
    [
        ("an engine's rank", 0, False),
        ("an engine's rank", 1, False),
        ("an actor's rank", 0, False),
        ("an actor's rank", 0, True),
    ],
)
def test_a_frozen_rank_holds_no_rank_for_ever(kind, frozen, before, tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(FROZEN.replace("{rank}", str(frozen) if before else ""))
    sizes = "--max_tokens 8 --tasks_per_step 8 --num_steps 100000 --timeout_s 5"
    flags = words("--model", tiny_model, "--env_path", tmp_path / "env.py", sizes, APART[kind])
    process = RanksProcess(2, "-m", "rl_core.train", *flags, "--out", tmp_path / "run")
    try:
        if before:
            wait_until(lambda: len(ranks_of(process.pid)) == 2, "both ranks begin")
        else:
            wait_until((tmp_path / "run/metrics.jsonl").exists, "the first step")
        stopped = ranks_of(process.pid)[frozen]
        if not before:
            os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: len(ranks_of(process.pid)) == 1, "the other rank ends", 40)
        # The launcher would wait before it kills a rank that stands still.
        os.kill(stopped, signal.SIGCONT)
        error = the_error(errors := errors_of(process))
    finally:
        kill_session(process)
    assert "Traceback" not in errors.partition("error: ")[0], errors
    if before:
        assert f"for the other ranks; {frozen} of 2 did not come within --timeout_s=5" in error
    else:
        assert f"rank {frozen} has stood still for --timeout_s=5" in error


STORE = """
import os, signal, sys, time
import torch.distributed as dist
from rl_core.run.process.heartbeat import Heartbeat
receive, send = os.pipe()
host = os.fork()
if not host:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(send, b"%08d" % store.port)
    time.sleep(60)
store = dist.TCPStore("127.0.0.1", int(os.read(receive, 8)), is_master=False)
heartbeat = Heartbeat(store, 1, 2, 1.0)
store.add("beats/0", 1)
os.kill(host, signal.SIGSTOP)
time.sleep(4)
os.kill(host, signal.SIGKILL)
print("waited", flush=True)
os._exit(0)  # The heartbeat's thread may be in C++.
"""
CONNECTING = """
import time
from rl_core.run.process.meeting import connecting
with connecting(0, None, 0.5):
    time.sleep(30)
"""


@pytest.mark.parametrize("host", ["the launcher (torchrun or rl-core train)", "rank 0"])
def test_a_store_that_stands_still_is_named(host, monkeypatch):
    is_launchers = host != "rank 0"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_launchers))
    process = ForkedProcess("-c", STORE)
    try:
        process.wait(60)
    finally:
        kill_session(process)  # The host may be stopped still, and holds the pipes.
    output, errors = process.communicate(60)
    kind = "warning" if is_launchers else "error"
    line = f"{kind}: rank 1 waits for {host}, which has stood still for --timeout_s=1: "
    assert errors.count(line) == 1, errors
    assert (process.returncode, output) == ((0, "waited\n") if is_launchers else (1, ""))


def test_ranks_that_do_not_connect_end_within_the_deadline():
    process = ForkedProcess("-c", CONNECTING)
    _, errors = process.communicate(20)
    assert process.returncode == 1
    assert "rank 0 waited at the start for connections" in the_error(errors)
    assert "--timeout_s=0.5: Every node must reach every other at any port" in errors


def test_ctrl_c_ends_every_rank(start):
    process = start("pass", by=fork_torchrun)
    os.kill(process.pid, signal.SIGINT)
    errors_of(process)


def test_a_hanging_hook_fails_the_run_on_both_ranks(
    start,
):
    process = start(
        "time.sleep(1000 if os.environ['RANK'] == '1' else 0)",
        "--rollout.hook_timeout_s 2",
        by=fork_torchrun,
    )
    errors = errors_of(process)
    assert "reward_fn() ran longer than 2 s" in the_error(errors)
    assert errors.splitlines()[-2].endswith(the_error(errors))


def test_what_was_saved_survives_a_kill_and_is_gone_on_from(start, tmp_path, monkeypatch):
    process, saved = start("pass", "--save_every 1"), tmp_path / "run/checkpoints"
    wait_until(lambda: len(list(saved.glob("step_*"))) >= 2, "two checkpoints")
    kill_session(process)
    process.communicate(timeout=60)
    newest = max(int(p.name[5:]) for p in saved.glob("step_*"))
    monkeypatch.setenv("RANK", "0")  # The environment's file reads RANK.
    run(
        tmp_path / "run",
        "--config",
        tmp_path / "run/config.yaml",
        "--resume --num_steps",
        newest + 1,
    )
    assert (saved / f"step_{newest + 1:06d}/manifest.json").is_file()


# Two nodes are two of torchrun's agents: here both on this machine.

ENTER = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
NEW_NET, NEW_UTS, NEW_NS, BIND, PRIVATE = 0x40000000, 0x4000000, 0x20000, 0x1000, 0x44000
def call(status):
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
with open("/var/run/netns/{node}") as file:
    call(libc.setns(file.fileno(), NEW_NET))
call(libc.unshare(NEW_UTS | NEW_NS))
socket.sethostname("host{i}")
call(libc.mount(None, b"/", None, PRIVATE, None))
call(libc.mount(b"{hosts}", b"/etc/hosts", None, BIND, None))
"""


# Names of the first of two nodes: a host of Slurm, pods of Kubernetes.
FIRST_NAMES = "host0 rl-core-master-0 rl-core-node-0-0.rl-core rl-core-0.rl-core"


@pytest.fixture
def networks(tmp_path):
    """Code that moves a program to each of two machines: network namespaces with a cable between
    them, whose hostnames are addresses of the loopback interface, as Debian has it. Empty code
    where this process may make none."""
    nodes = [f"rl_core_{os.getpid()}_{node}" for node in (0, 1)]
    cable = f"link add end0 netns {nodes[0]} type veth peer name end1 netns {nodes[1]}"
    steps = [*(f"netns add {node}" for node in nodes), cable]
    programs = []
    for i, node in enumerate(nodes):
        hosts = f"127.0.0.1 localhost\n127.0.1.1 host{i}\n10.77.0.1 {FIRST_NAMES}\n"
        (tmp_path / f"hosts_{i}").write_text(hosts)
        steps += [f"-n {node} address add 10.77.0.{i + 1}/24 dev end{i}"]
        steps += [f"-n {node} link set {interface} up" for interface in ("lo", f"end{i}")]
        programs.append(ENTER.format(node=node, i=i, hosts=tmp_path / f"hosts_{i}"))
    try:
        for step in steps:
            subprocess.run(["ip", *step.split()], check=True, capture_output=True)
        subprocess.run([sys.executable, "-c", programs[0]], check=True, capture_output=True)
        yield programs
    except (OSError, subprocess.CalledProcessError):
        yield ["", ""]
    finally:
        for node in nodes:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "delete", node], capture_output=True)


@pytest.fixture
def start_nodes(networks):
    """start_nodes(*flags) -> torchrun's agents of two nodes with one rank each."""
    started = []

    def begin(*flags) -> list[ForkedProcess]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        first = "host0" if networks[0] else "127.0.0.1"
        meet = words(
            f"--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint={first}:{port} --rdzv_id=test"
        )
        for before in networks:
            agent = fork_torchrun(1, "-m", "rl_core.train", *flags, flags=meet, before=before)
            started.append(agent)
        return started

    yield begin
    for process in started:
        kill_session(process)


def test_two_nodes_of_one_rank_learn_what_two_forked_ranks_do(start_nodes, places, tmp_path):
    flags = (
        "--model {model} --env_path {dir}/letters.py --max_tokens 10 --tasks_per_step 4 "
        "--group_size 4 --num_steps 2 --optim.lr 1e-2 --dp_replicate 1"
    )
    flags = words(flags.format(**places))
    nodes = start_nodes(*flags, "--out", tmp_path / "nodes")
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    forked = weights(run(tmp_path / "forked", *flags, ranks=2))
    of_nodes = weights(tmp_path / "nodes")
    assert of_nodes.keys() == forked.keys()
    assert all(of_nodes[name].equal(forked[name]) for name in forked)


def test_a_lost_node_with_the_store_ends_the_other(start_nodes, tiny_model, sort_data, tmp_path):
    flags = words(
        "--algorithm sft --model",
        tiny_model,
        "--data.train",
        sort_data / "few.jsonl",
        "--max_tokens 8 --max_prompt_tokens 16 --tasks_per_step 8 --num_steps 1000000",
        "--timeout_s 10 --out",
        tmp_path / "run",
    )
    nodes = start_nodes(*flags)
    wait_until((tmp_path / "run/metrics.jsonl").exists, "the first step")
    kill_session(nodes[0])  # its agent; the rank of it must not live on
    errors = nodes[1].communicate(timeout=60)[1]
    assert nodes[1].returncode != 0
    assert "waited in the phase" in the_error(errors)


LAUNCHERS = ROOT / "scripts/launch"
MEETS = """
import os, torch
import torch.distributed as dist
from rl_core.distributed import close_ranks
from rl_core.run.process.joining import init_ranks
ranks, bits = init_ranks(60), torch.tensor([1 << int(os.environ["RANK"])])
dist.all_reduce(bits)
values = os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], ranks.rank, ranks.size, int(bits)
os.write(1, (" ".join(map(str, values)) + "\\n").encode())
close_ranks(ranks)
"""
# Two commands of Slurm as a node has them; torchrun's place is taken by its arguments and variables.
COMMANDS = """
scontrol() { printf 'host0\\nhost1\\n'; }
srun() { shift; "$@"; }
torchrun() { printf '%s\\0' "$@"; printf '\\0'; env -0; }
"""


def manifest(name: str, kind: str) -> dict:
    documents = yaml.safe_load_all((LAUNCHERS / name).read_text())
    [document] = [document for document in documents if document["kind"] == kind]
    assert document["metadata"]["name"] == "rl-core"
    return document["spec"]


def pod_of(pod: dict, trainer: dict | None = None) -> tuple[str, dict[str, str]]:
    """The command of a pod's container and its variables, whose parts fit together. trainer: where
    these are, if not in the container."""
    [container] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    source = trainer or container
    env = {variable["name"]: variable.get("value", "") for variable in source["env"]}
    assert env["PET_SHUTDOWN_TIMEOUT"] == str(pod["terminationGracePeriodSeconds"])
    return shlex.join([*source["command"], *source["args"]]), env


def slurm(node: int) -> tuple[str, dict[str, str]]:
    sizes = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2"}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host[0-1]"}
    return (LAUNCHERS / "slurm.sh").read_text(), sizes | job


def sky(node: int) -> tuple[str, dict[str, str]]:
    task = yaml.safe_load((LAUNCHERS / "sky.yaml").read_text())
    assert (task["num_nodes"], [*task["volumes"]]) == (2, ["/shared"])
    env = {"NODE_IPS": "10.77.0.1\n10.77.0.2", "NUM_NODES": "2", "NUM_GPUS_PER_NODE": "2"}
    env["NODE_RANK"] = str(node)
    return task["run"], task["envs"] | {f"SKYPILOT_{name}": env[name] for name in env}


def torch_plugin(node: int, spec: dict) -> dict[str, str]:
    """Variables of Kubeflow Trainer's torch plugin."""
    address = {"MASTER_ADDR": "rl-core-node-0-0.rl-core", "MASTER_PORT": "29500"}
    sizes = {"NNODES": str(spec["numNodes"]), "NPROC_PER_NODE": str(spec["numProcPerNode"])}
    env = address | sizes | {"NODE_RANK": str(node)}
    return {f"PET_{name}": env[name] for name in env}


def trainjob(node: int) -> tuple[str, dict[str, str]]:
    spec = manifest("trainjob.yaml", "TrainJob")
    [patch] = spec["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    command, env = pod_of(job["template"]["spec"]["template"]["spec"], spec["trainer"])
    for gpus in spec["trainer"]["resourcesPerNode"].values():
        assert gpus == {"nvidia.com/gpu": spec["trainer"]["numProcPerNode"]}
    return command, env | torch_plugin(node, spec["trainer"])


def pytorchjob(node: int) -> tuple[str, dict[str, str]]:
    """The operator's version 1.9 sets addresses and ranks of a job with a Master alone."""
    spec = manifest("pytorchjob.yaml", "PyTorchJob")
    replicas = spec["pytorchReplicaSpecs"]
    command, env = pod_of(replicas[("Master", "Worker")[node]]["template"]["spec"])
    num_nodes = sum(replica["replicas"] for replica in replicas.values())
    env |= {"PET_NNODES": str(num_nodes), "PET_NPROC_PER_NODE": spec["nprocPerNode"]}
    address = {"MASTER_ADDR": "rl-core-master-0", "MASTER_PORT": "23456"}
    env |= address | {f"PET_{name}": address[name] for name in address}
    env |= {"PET_NODE_RANK": str(node), "RANK": str(node), "WORLD_SIZE": "16"}
    return command, env


def indexed_job(node: int) -> tuple[str, dict[str, str]]:
    spec, service = manifest("job.yaml", "Job"), manifest("job.yaml", "Service")
    assert service["selector"] == {"batch.kubernetes.io/job-name": "rl-core"}
    pod = spec["template"]["spec"]
    command, env = pod_of(pod)
    sizes = {spec["completions"], spec["parallelism"], int(env["PET_NNODES"])}
    assert (sizes, spec["completionMode"], pod["subdomain"]) == ({2}, "Indexed", "rl-core")
    [container] = pod["containers"]
    [indexed] = [each["valueFrom"] for each in container["env"] if "valueFrom" in each]
    field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert indexed == {"fieldRef": {"fieldPath": field}}
    return command, env | {"PET_NODE_RANK": str(node)}


@pytest.mark.parametrize("launcher", [slurm, sky, trainjob, pytorchjob, indexed_job])
def test_two_nodes_meet_by_the_variables_of_each_launcher(launcher, networks, tmp_path):
    (tmp_path / "meets.py").write_text(MEETS)
    agents = []
    for node, before in enumerate(networks):
        command, env = launcher(node)
        assert env.get("PET_NPROC_PER_NODE") in (None, "8")
        env |= {"PATH": os.environ["PATH"], "PET_NPROC_PER_NODE": "2"}
        line = ["bash", "-c", COMMANDS + command, "launch"]
        printed = subprocess.run(line, env=env, capture_output=True, text=True, check=True).stdout
        args, _, variables = printed.partition("\0\0")
        args = args.split("\0")
        end = args.index("rl_core.train")
        assert args[end - 1] == "-m" and "--resume" in args[end:]
        env = dict(pair.split("=", 1) for pair in variables.split("\0") if pair)
        if not before:
            pytest.skip("two nodes need network namespaces")
        before += f"os.environ.update({env!r})"
        agents.append(fork_agent(*args[: end - 1], tmp_path / "meets.py", before=before))
    try:
        ends = [agent.communicate(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            kill_session(agent)
    assert [agent.returncode for agent in agents] == [0, 0], ends
    places = [sorted(output.splitlines()) for output, _ in ends]
    if launcher is slurm:  # torchrun numbers the nodes itself.
        places.sort()
    of_ranks = ["0 0 0 4 15", "0 1 1 4 15"], ["1 0 2 4 15", "1 1 3 4 15"]
    assert places == [*of_ranks]


def test_the_trainers_image_has_versions_that_fit_together():
    image = (LAUNCHERS / "Dockerfile").read_text()
    of = dict(re.findall(r"\b([A-Z]+)=([\d.]+)", re.search(r"^ARG SGLANG.*$", image, re.M)[0]))
    table = (ROOT / "docs/engines.md").read_text()
    rows = re.findall(r"^\| (?:[\d.]+ - )?([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.M)
    assert (of["SGLANG"], of["TORCH"], of["TRANSFORMERS"]) in rows


# Rank 1 of two ranks in separate folders has something else than rank 0.
DIFFERENT = """
import os, sys
from pathlib import Path
from rl_core.train import main
rank = os.environ["RANK"]
os.chdir(rank)
sys.exit(main([*sys.argv[1:], *({flags!r}.split() if rank == "1" else [])]))
"""
DIFFERENT_ENV = """
def load_tasks(split): return [{"prompt": open("seed.txt").read(), "grid": {(0, 1): object()}}]
turns = "policy"
def reward_fn(completion): return 0.0
"""
DIFFERENCES = {
    "flag": ("", "--seed 7", "--seed is 7 instead of 0 on rank 1"),
    "model": ("model/model.safetensors", "", "the model's file model/model.safetensors differs"),
    "environment": ("env.py", "", "the environment env.py differs on rank 1"),
    "rows": ("rows.jsonl", "", "the data set rows.jsonl differs on rank 1"),
    "load_tasks": ("seed.txt", "", "load_tasks('eval') of env (draw its rows with a fixed seed)"),
    "template": ("chat.jinja", "", "the chat template of actor policy differs on rank 1"),
    "out": ("", "", "--out run of rank 0"),
}


@pytest.mark.parametrize("file, flags, message", DIFFERENCES.values(), ids=DIFFERENCES)
def test_ranks_with_other_files_or_flags_are_refused(file, flags, message, tiny_model, tmp_path):
    for rank in ("0", "1"):
        folder = tmp_path / rank
        shutil.copytree(tiny_model, folder / "model")
        (folder / "env.py").write_text(DIFFERENT_ENV)
        (folder / "seed.txt").write_text("1234")
        template = (tiny_model / "chat_template.jinja").read_text()
        (folder / "chat.jinja").write_text(template + "{# 1 #}")
        (folder / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    if file:
        path = tmp_path / "1" / file
        data = path.read_bytes()
        path.write_bytes(data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])
    out = "run" if message.startswith("--out") else tmp_path / "run"
    common = "--actors.policy.model model --env_path env.py --data.train rows.jsonl --eval_every 1 "
    common += "--actors.policy.chat_template chat.jinja --timeout_s 6 --actors.judge.model lab/judge:free "
    common += "--actors.judge.api http://a/v1 --actors.judge.api_key_env HOME"
    code = DIFFERENT.replace("{flags!r}", repr(flags))
    failed = run_ranks(2, "-c", code, *words(common, "--out", out), check=False, cwd=tmp_path)
    assert failed.returncode == 1 and message in the_error(failed.stderr), failed.stderr
    assert not (tmp_path / "0" / out).exists()
