"""Hooks of plugins have the names that the trainer calls."""

from __future__ import annotations

import ast
import importlib
import inspect

from kit import ROOT

from rl_core.plugin import Plugin

OWNERS = ("self", "trainer")
PLUGIN_FILES = [f for f in (ROOT / "rl_core/run").rglob("*.py") if "(Plugin)" in f.read_text()]
HOOKS = {name for name, _ in inspect.getmembers(Plugin, inspect.isfunction)}


def called_hooks() -> set[str]:
    """Names that are given to Trainer.call()."""
    names = set()
    files = {*(ROOT / "rl_core").rglob("*.py")} - {*(ROOT / "rl_core/tinker").iterdir()}
    for file in files:  # Methods of the tinker server are called by name too.
        for node in ast.walk(ast.parse(file.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            owner = ast.unparse(node.func.value) if is_call else ""
            is_hook = (
                is_call and node.func.attr == "call" and isinstance(node.args[0], ast.Constant)
            )
            if is_hook and owner.rpartition(".")[2] in OWNERS:
                names.add(node.args[0].value)
    return names


def test_every_called_hook_is_a_plugins_with_its_arguments():
    called = called_hooks()
    assert {"before_learn", "after_step", "on_episodes"} <= called <= HOOKS
    for file in PLUGIN_FILES:
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    plugins = [p for p in Plugin.__subclasses__() if p.__module__.startswith("rl_core.run.")]
    assert len(plugins) > 10
    for of_one in plugins:
        for name in HOOKS & vars(of_one).keys():
            arguments = list(inspect.signature(getattr(of_one, name)).parameters)
            assert arguments == list(inspect.signature(getattr(Plugin, name)).parameters), (
                of_one,
                name,
            )


def test_no_plugin_assigns_to_what_is_not_its_own():
    """Not `self.trainer.x = 1`, and no attribute of an object that the trainer holds."""
    result = []
    for file in PLUGIN_FILES:
        tree = ast.parse(file.read_text())
        plugins = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        plugins = [node for node in plugins if any(ast.unparse(b) == "Plugin" for b in node.bases)]
        for plugin in plugins:
            for node in ast.walk(plugin):
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                    continue
                for target in targets:
                    text = ast.unparse(target)
                    if text.startswith(("trainer.", "self.trainer.", "learner.", "actor.")):
                        result.append(f"{file.name}: {text}")
    assert not result
