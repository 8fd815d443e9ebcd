"""The house: which file may import which. Lazy imports count, and imports for type checkers, except
those that TYPES_FROM_ABOVE lists."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tokenize
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import huggingface_hub
import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]

# Rooms from the lowest floor to the highest. A file imports from its own room and from lower rooms.
# Within a room imports have no cycles.
FLOORS = """
types flags algorithms errors json_limits scratch http_guard distributed metrics config sandbox
data models sampling environments rewards data.tasks data.warnings plugin models.parallel learning engines run
environments.service run.plan learners actors engines.engine_ranks trainer tinker tools.viewer
tools.api train tools
""".split()
# Room -> higher rooms whose classes its annotations may name, imported under `if TYPE_CHECKING`.
TYPES_FROM_ABOVE = {
    "distributed": ("run",),
    "plugin": ("trainer",),
    "engines": ("run", "run.plan", "actors"),
    "run": ("run.plan", "actors", "engines.engine_ranks"),
}
# Separate libraries, which could be published alone.
ALONE = {"sandbox": (), "environments.service": ("sandbox", "data", "sampling", "environments")}
ONLY_IN = {
    "sglang": {
        "rl_core.engines.sglang_server_main",
        "rl_core.engines.sglang_images.reader",
        "rl_core.engines.sglang_images.qwen",
        "rl_core.engines.sglang_images.glm",
    },
    "vllm": {"rl_core.engines.vllm_server_main", "rl_core.engines.vllm_worker"},
}
PURE = "types flags algorithms errors config json_limits scratch http_guard data".split()
NEEDS_RANKS = {"torch.distributed"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted((ROOT / "rl_core").rglob("*.py"))}


@cache
def imports_of(module: str) -> frozenset[str]:
    """Dotted names that the module's file imports: `from a import b` gives a.b if that is a module
    of ours, else a."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    above = TYPES_FROM_ABOVE.get(room_of(module) or "", ())
    result, for_types = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types.update(node.body)
        is_for_types = node in for_types and isinstance(node, ast.ImportFrom)
        source = (node.module or "") if is_for_types else ""
        if source.startswith("rl_core.") and room_of(source) in above:
            continue
        if isinstance(node, ast.Import):
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*base, *filter(None, [source])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                result.add(full if full in modules() or full in NEEDS_RANKS else source)
    return frozenset(result)


def room_of(module: str) -> str | None:
    """The longest name of FLOORS that the module's begins with; None for rl_core itself."""
    name = module.removeprefix("rl_core").removeprefix(".")
    is_package = not name
    while name and name not in FLOORS:
        name = name.rpartition(".")[0]
    assert name or is_package, f"{module}: on which floor? Add it to FLOORS"
    return name or None


@pytest.mark.parametrize("module", modules())
def test_a_file_imports_only_from_its_room_and_the_floors_below(module):
    room = room_of(module)
    for imported in imports_of(module):
        if imported.split(".")[0] != "rl_core" or imported == "rl_core":
            continue
        if room is None:
            allowed = ("config", "tools.api.environment", "tools.viewer.notebook")
            assert imported.removeprefix("rl_core.") in allowed, (
                f"rl_core/__init__.py imports {imported}"
            )
            continue
        target = room_of(imported)
        # The command and the tools start each other.
        is_below = FLOORS.index(target) <= FLOORS.index(room) or (room, target) == (
            "train",
            "tools",
        )
        assert is_below, f"{module} imports {imported}, which is on a higher floor"
        allowed = (
            *ALONE.get(room, FLOORS),
            room,
            "errors",
            "types",
            "json_limits",
            "scratch",
            "http_guard",
        )
        assert target in allowed, f"{module} imports {imported}; {room} is a separate library"


def test_imports_never_go_round():
    graph = {module: imports_of(module) & modules().keys() - {module} for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", modules())
def test_a_guarded_library_is_imported_in_its_one_file(module):
    for imported in imports_of(module):
        allowed = ONLY_IN.get(imported.split(".")[0])
        assert allowed is None or module in allowed, (
            f"{module} imports {imported}; only {allowed} may"
        )


@pytest.mark.parametrize("module", [m for m in modules() if m.count(".") and room_of(m) in PURE])
def test_pure_floors_know_no_ranks(module):
    for imported in imports_of(module):
        assert not any((imported + ".").startswith(name + ".") for name in NEEDS_RANKS), (
            f"{module} imports {imported}"
        )


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Lines that hold more than comment and docstring."""
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in LAYOUT and token.type != tokenize.ENCODING:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        if has_docstring and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def string_edges() -> list[str]:
    """Strings that name a module of ours, which no editor follows. Not those of a command, as in
    `python -m MODULE`, and not what protoc writes."""
    result = []
    for name, path in modules().items():
        if path.stem.endswith("_pb2"):
            continue
        before = None
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            module = node.value.partition(":")[0]
            is_of_command = before == "-m"
            before = node.value
            if module.startswith("rl_core.") and module in modules() and not is_of_command:
                result.append(f"{name}: {node.value}")
    return result


def test_no_string_names_a_module():
    assert not string_edges()


# Libraries that take tenths of a second to import, and that a default run does not need.
HEAVY = "aiohttp bitsandbytes datasets grpc httpx jsonschema matplotlib openai pandas peft pyarrow "
HEAVY += "rich scipy sklearn torchvision torch._inductor.compile_fx wandb"
# Rooms and modules of options that a plain reward does not use.
IDLE = "sandbox environments.service environments.agents tools.viewer learning.teachers "
IDLE += "learning.lora learning.moe data.image_families data.tool_calls models.vision "
IDLE += "models.parallel.fsdp engines.rank_groups run.curriculum run.saving.resume data.tables "
IDLE += "learning.muon learning.adamw8bit data.tokenizer_facts data.tasks.prompt_hook "
IDLE += "sampling.group_rewards sampling.turn_views sampling.own_rollout data.row_files "
IDLE += "learning.sample_exchange run.saving.best_keeper run.plan.model_errors "
IDLE += "models.kernels.math_attention data.row_openings environments.hook_refusals "
IDLE += "data.warnings.tool_warnings learning.no_grad_batches learning.learner_extension "
IDLE += "data.sft_samples data.preference_pairs data.tool_schemas data.column_names"


def test_a_default_run_loads_only_what_it_uses(places, tmp_path):
    """In a separate process, because tests import more than a run does."""
    code = """
import json, sys
from rl_core import Config, train
model, env, out = sys.argv[1:]
loaded = []
train(
    Config(model=model, out=out, env_path=env, num_steps=2, tasks_per_step=2, group_size=2,
           max_tokens=8, max_prompt_tokens=24),
    on_step=lambda step, metrics: loaded.extend(sys.modules),
)
print(json.dumps(loaded))
"""
    args = [places["model"], f"{places['dir']}/letters.py", str(tmp_path / "run")]
    command = [sys.executable, "-c", code, *args]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "torch" in loaded
    # Before its version 2, huggingface_hub imports these.
    is_old = Version(huggingface_hub.__version__) < Version("2")
    assert not set(HEAVY.split()) & set(loaded) - ({"httpx", "rich"} if is_old else set())
    idle = tuple(f"rl_core.{name}" for name in IDLE.split())
    used = {name for name in loaded if name.startswith(idle)}
    assert used == {"rl_core.sandbox", "rl_core.sandbox.run_flags"}


def test_an_environment_is_short():
    for path in (ROOT / "envs").glob("*.py"):
        assert 5 <= code_lines(path) <= 150, path


def test_no_two_classes_share_a_name():
    files: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not module.endswith("_pb2"):
                files.setdefault(node.name, []).append(module)
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_no_file_is_called_utils():
    bad = [
        str(path)
        for path in modules().values()
        if re.search(r"utils?|helpers?|misc|common", path.stem)
    ]
    assert not bad, f"name these after their content: {bad}"


def test_configuration_is_read_without_torch_or_transformers():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        "import rl_core.types; import rl_core.config; "
        "import rl_core.sampling.rollout; import rl_core.sampling.teacher_prompts; "
        # rl-core check plays episodes, by a tokenizer of transformers.
        "del sys.modules['transformers']; from rl_core.tools.cli import main; "
        "sys.exit(main(['check', 'envs/sort_digits.py']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_library_that_is_imported_is_required_in_setup_py():
    declared = set(re.findall(r'"([\w-]+)[<>=]=', (ROOT / "setup.py").read_text()))
    names = {
        "yaml": "pyyaml",
        "annotated_types": "annotated-types",
        "py_landlock": "py-landlock",
        "docstring_parser": "docstring-parser",
        "flash_attn": "flash-attn",
        "liger_kernel": "liger-kernel",
        "google": "protobuf",
        "grpc": "grpcio",
        "kubernetes_asyncio": "kubernetes-asyncio",
        "grpc_health": "grpcio-health-checking",
        "grpc_reflection": "grpcio-reflection",
        "prometheus_client": "prometheus-client",
        "PIL": "pillow",
    }
    ours = {"rl_core", *sys.stdlib_module_names}
    used = {
        imported.split(".")[0] for module in modules() for imported in imports_of(module)
    } - ours
    missing = {name for name in used if names.get(name, name) not in declared}
    assert not missing, f"{missing} imported in rl_core/ but not in setup.py"


def test_one_place_loads_from_transformers_so_that_no_code_of_a_model_runs():
    """Without trust_remote_code=False transformers asks on the terminal whether to run it."""
    files = [*(ROOT / "rl_core").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    result = {}
    for file in files:
        calls = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
        ]
        names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
        if file.is_relative_to(ROOT / "scripts"):
            names -= {"from_config"}  # These files write the configurations themselves.
        if names & {"from_pretrained", "from_config"} or "trust_remote_code" in file.read_text():
            result[str(file.relative_to(ROOT))] = names
    assert list(result) == ["rl_core/data/pretrained.py"]


def test_few_tests_are_tried_twice_and_each_exists():
    lines = (ROOT / "tests/unsteady.txt").read_text().splitlines()
    named = [line for line in lines if not line.startswith("#")]
    assert len(named) == len(set(named)) <= 5
    for file, name in (line.split("::") for line in named):
        assert f"def {name}(" in (ROOT / file).read_text()
    retries = re.findall(r"--last-failed(?!-)", (ROOT / ".ci/run").read_text())
    assert len(retries) == 1


def test_the_longest_test_files_exist():
    text = (ROOT / "tests/conftest.py").read_text()
    names = re.search(r'LONGEST = """(.*?)"""', text, re.DOTALL)[1].split()
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert names and {f"test_{name}.py" for name in names} <= files
