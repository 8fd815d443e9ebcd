"""Completes the parameters of a function to a JSON schema, and drops keys that are null."""

from __future__ import annotations

import ast
import re

from rl_core.data.messages import json_value, shorten
from rl_core.types import AnyJSON, JSONObject

JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "dict": "object",
}
JSON_TYPES |= {name: name for name in JSON_TYPES.values()}
OPTIONAL = re.compile(r",\s*optional\b.*$", flags=re.DOTALL | re.IGNORECASE)
# Keys of a schema whose values are no schemas, and keys whose values have names as their keys.
VALUES = ("default", "const", "enum", "example", "examples")
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def without_null_keys(schema: AnyJSON, has_names: bool = False) -> AnyJSON:
    """A copy of a function or schema without its keys that are null, as tables that were written to
    JSON have them: no schema is null. Values such as a default stay as they are. `has_names`: the
    keys are names, as those of properties."""
    if isinstance(schema, list):
        return [without_null_keys(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: JSONObject = {}
    for key, value in schema.items():
        if key in VALUES and not has_names:
            kept[key] = value
        elif value is not None:
            kept[key] = without_null_keys(value, key in NAMED and not has_names)
    return kept


def with_schema(function: JSONObject) -> JSONObject:
    """The function with parameters of the type "object" and with properties. They may be those of
    xlam, {argument: {"type", "description"}}, with Python's names of types. An argument is required
    unless its type says that it is optional, it has a default, or "required" is False.

    Example: {"n": {"type": "int"}} becomes
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}.
    """
    parameters = function.get("parameters")
    if not isinstance(parameters, dict) or isinstance(parameters.get("type"), (str, list)):
        return function
    if "properties" in parameters:
        return function | {"parameters": {"type": "object", **parameters}}
    if not all(isinstance(value, dict) and "type" in value for value in parameters.values()):
        return function
    schema: JSONObject = {"type": "object", "properties": {}}
    required = []
    for name, value in parameters.items():
        schema["properties"][name], is_required = argument_schema(value)
        required += [name] if is_required else []
    return function | {"parameters": schema | ({"required": required} if required else {})}


def argument_schema(value: JSONObject) -> tuple[JSONObject, bool]:
    """(JSON schema of an argument, True if the argument is required). The name of a type that JSON
    schema cannot express is put into the description."""
    rest = {key: each for key, each in value.items() if key != "type"}
    is_required = "default" not in value
    if isinstance(value.get("required"), bool):
        is_required = rest.pop("required")
    kind = value["type"]
    if not isinstance(kind, str):
        return {"type": kind} | rest, is_required
    name = OPTIONAL.sub("", kind.strip())
    is_optional = name != kind.strip() or name.startswith("Optional[")
    try:
        schema = schema_of_type(ast.parse(name, mode="eval").body)
    except (ValueError, SyntaxError):
        schema = {"description": f"{rest.pop('description', '')} (type: {kind})".strip()}
    return schema | rest, is_required and not is_optional


def schema_of_type(node: ast.expr) -> JSONObject:
    """The JSON schema of a type in Python, such as List[int], or in JSON schema. Raises ValueError
    if JSON schema cannot express the type."""
    outer = node.value if isinstance(node, ast.Subscript) else node
    name = getattr(outer, "attr", None) or getattr(outer, "id", "")
    kind = JSON_TYPES.get(name.lower())
    if not isinstance(node, ast.Subscript):
        if name == "Any":
            return {}
        if kind is None:
            raise ValueError(f"{ast.unparse(node)} is not a type of JSON schema")
        return {"type": kind}
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Optional":
        return schema_of_type(*inner)
    if name not in ("Union", "Dict", "dict") and kind != "array":
        raise ValueError(f"{ast.unparse(node)} is not a type of JSON schema")
    schemas = []
    for each in inner:
        is_rest = isinstance(each, ast.Constant) and each.value is ...
        schema = {} if is_rest else schema_of_type(each)
        schemas += [schema] if schema not in schemas and not is_rest else []
    if kind == "object":
        return {"type": kind, "additionalProperties": schemas[-1]}
    union = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return union if name == "Union" else {"type": kind, "items": union}


def read_tools(tools: AnyJSON, notes: list[str] | None = None) -> list[JSONObject] | None:
    """Tools from a list or its JSON text, each as {"type": "function", "function": {"name", ...}},
    with_schema(); None for an empty list. Raises ValueError for another value."""
    source = tools
    if isinstance(tools, str):
        tools = json_value(tools) if tools.strip() else None
    if tools is None or (isinstance(tools, (list, tuple)) and not tools):
        return None
    if not isinstance(tools, (list, tuple)):
        raise ValueError(
            f"must be a list of JSON schemas, or such a list as JSON text; is {shorten(source)}"
        )
    read = []
    for number, tool in enumerate(tools, 1):
        tool = json_value(tool) if isinstance(tool, str) else tool
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(tool, dict) and function is None and isinstance(tool.get("name"), str):
            rest = {k: v for k, v in tool.items() if k != "type" or v != "function"}
            tool, function = {"type": "function", "function": rest}, rest
            if notes is not None:
                notes.append(f"tool {number}: wrapped as a function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                "must be a list of JSON schemas, or such a list as JSON text; tool "
                f"{number} is not a function with a name: {shorten(tool)}"
            )
        written = without_null_keys(parsed_parameters(function, number))
        if written != function and notes is not None:
            notes.append(f"tool {number}: keys that are null left out")
        completed = tool | {"function": with_schema(written)}
        if completed["function"] != written and notes is not None:
            notes.append(f"tool {number}: parameters completed to a JSON schema")
        read.append(completed)
    return read


def parsed_parameters(function: JSONObject, number: int) -> JSONObject:
    """The function with an object for parameters, and for properties, that are JSON text, as tables
    hold objects of different keys."""
    parameters = function.get("parameters")
    if isinstance(parameters, str):
        parameters = json_value(parameters) if parameters.strip() else None
    if isinstance(parameters, dict) and isinstance(properties := parameters.get("properties"), str):
        parameters = parameters | {"properties": json_value(properties)}
    inner = parameters.get("properties") if isinstance(parameters, dict) else parameters
    if isinstance(inner, str):
        raise ValueError(
            f"tool {number}: parameters must be a JSON schema, or its JSON text; are "
            f"{shorten(function['parameters'])}"
        )
    return function | {"parameters": parameters} if "parameters" in function else function
