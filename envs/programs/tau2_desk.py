"""The records and tools of a domain in tau2-bench's format, for envs/tau2_env.py."""

import copy
import importlib
import importlib.util
import inspect
import json
import os
from functools import cache
from pathlib import Path

JSON_TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}


def folder():
    path = Path(os.environ.get("TAU2_DOMAIN", ""))
    if not (path / "tasks.json").is_file():
        raise ValueError(
            f"TAU2_DOMAIN={os.environ.get('TAU2_DOMAIN')!r} must be a folder with tasks.json, "
            "policy.md and db.json, such as tau2-bench/data/tau2/domains/retail"
        )
    return path


def read(name):
    path = folder() / name
    return parsed(path, path.stat().st_mtime_ns)


@cache
def parsed(path, changed):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch it whole (git lfs pull)") from None


@cache
def kit_class(name):
    """The class whose methods are the tools."""
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("tau2_tools", name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif name:
        module = importlib.import_module(name)
    else:
        raise ValueError("TAU2_TOOLS must name the tools: a module, or a .py file")
    result = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and "db" in inspect.signature(value).parameters
    ]
    if len(result) != 1:
        raise ValueError(
            f"TAU2_TOOLS={name} has {len(result)} classes that take db; it must have 1"
        )
    return result[0]


class Desk:
    """The records of an episode, and the tools that read and change them."""

    def __init__(self):
        records, made = copy.deepcopy(read("db.json")), kit_class(os.environ.get("TAU2_TOOLS", ""))
        model = inspect.get_annotations(made, eval_str=True).get("db")
        self.records = getattr(model, "model_validate", lambda value: value)(records)
        self.kit = made(db=self.records)
        self.calls, self.num_errors = [], 0

    @property
    def tools(self):
        if isinstance(getattr(self.kit, "tools", None), dict):
            return self.kit.tools
        public = [name for name in dir(self.kit) if not name.startswith(("_", "assert_"))]
        named = {name: getattr(self.kit, name) for name in public}
        return {name: value for name, value in named.items() if callable(value)}

    def call(self, name, arguments):
        """Result of a tool as text."""
        self.calls.append((name, arguments))
        try:
            if name not in self.tools:
                raise ValueError(f"there is no tool {name!r}; there are {', '.join(self.tools)}")
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            result = self.tools[name](**arguments)
        except Exception as error:  # Tools of others raise anything; tau2 answers with the error.
            self.num_errors += 1
            return f"Error: {error}"
        if isinstance(result, str):
            return result
        return json.dumps(result, default=plain, ensure_ascii=False)

    def state(self):
        return json.dumps(plain(self.records), sort_keys=True, default=str)


def plain(value):
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def schema(name, function):
    properties, required = {}, []
    for argument, parameter in inspect.signature(function).parameters.items():
        kind = str(getattr(parameter.annotation, "__name__", parameter.annotation)).lower()
        json_type = next((to for of, to in JSON_TYPES.items() if kind.startswith(of)), "string")
        properties[argument] = {"type": json_type}
        if parameter.default is parameter.empty:
            required.append(argument)
    parameters = {"type": "object", "properties": properties, "required": required}
    about = {"name": name, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": about}
