"""The configuration as a command line and YAML give it: defaults, and each flag at another
value."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from rl_core.config import flat, known_flags, parse_config, read_config, to_yaml

DEFAULTS = Path(__file__).parents[1] / "golden/default_config.yaml"
NAMED = "{actors: {bob: }, envs: {letters: }}"  # a section of each kind that has a name


def test_the_defaults_are_those_that_were_chosen(request):
    """A default that is changed on purpose is written anew with --golden-write, and the commit says
    why. Flags that the file does not know yet are added to it then."""
    result = {
        name: [*value] if isinstance(value, tuple) else value
        for name, (value, _) in known_flags().items()
    }
    if request.config.option.golden_write:
        DEFAULTS.write_text(yaml.safe_dump(result, sort_keys=False))
    known = yaml.safe_load(DEFAULTS.read_text())
    assert {name: result.get(name, "no such flag") for name in known} == known


def other_value(default: Any, kind: Any) -> Any:
    """A value that is not the default, as YAML holds it."""
    kind = get_args(kind)[0] if type(None) in get_args(kind) else kind
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Annotated, Union):
        return other_value(default, parts[0])
    if origin is Literal:
        return next(choice for choice in parts if choice != default)
    if origin is tuple:
        return [other_value(None, piece) for piece in parts]
    if origin is list:
        return ["a,b", "c"]
    if origin is dict and get_origin(parts[0]) is Literal:
        return {parts[0].__args__[0]: 0.25}
    if origin is dict:
        return {"one": "1"} if parts[1] is str else {"one": False, "two": 3}
    if kind is bool:
        return not default
    if kind is str:
        return "other"
    return default + 3 if isinstance(default, int) else {int: 3, float: 0.125}[kind]


def as_text(value: Any) -> str:
    """The same on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def nested(name: str, value: Any) -> dict[str, Any]:
    for piece in reversed(name.split(".")):
        value = {piece: value}
    return value


def changes(base: list[str], more: list[str]) -> dict[str, Any]:
    """Flag -> value of all that further arguments change."""
    before = flat(asdict(read_config(base)))
    after = flat(asdict(read_config([*base, *more])))
    assert before.keys() <= after.keys()
    return {
        name: value for name, value in after.items() if name not in before or before[name] != value
    }


@pytest.mark.parametrize("name", known_flags())
def test_a_changed_flag_changes_itself_alone(name, tmp_path):
    default, field = known_flags()[name]
    section, _, _ = name.partition(".")
    name = name.replace("NAME", {"actors": "bob", "envs": "letters"}.get(section, ""))
    value = other_value(default, field.type)
    stored = (
        tuple(value) if isinstance(value, list) and get_origin(field.type) is not list else value
    )
    expected = flat({name: stored})
    if name == "online.on":  # Sessions have no group, and the run no end.
        expected |= {"group_size": 1, "max_staleness": 4, "num_steps": 1_000_000}
        expected |= {"algo.baseline": "running"}
    named, file, again = (tmp_path / f"{piece}.yaml" for piece in ("named", "flags", "again"))
    named.write_text(NAMED)
    base = ["--config", str(named)]
    file.write_text(yaml.safe_dump(nested(name, value)))
    assert changes(base, [f"--{name}", as_text(value)]) == expected
    assert changes(base, ["--config", str(file)]) == expected
    arguments = read_config([*base, "--config", str(file)])
    again.write_text(to_yaml(arguments))
    assert read_config(["--config", str(again)]) == arguments


def test_false_null_and_empty_values_of_a_file_count_as_much_as_others(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "{model: m, env_path: e.py, out: x, eval_every: 5, trackers: wandb, sampling: {stop: [a]}}"
    )
    second.write_text(
        "{data: {shuffle: false}, rollout: {save: false}, eval_every: 0, save_minutes: 0, "
        "trackers: null,"
        "sampling: {stop: []}, actors: {policy: {api_key_env: ''}}}"
    )
    config = parse_config(["--config", str(first), "--config", str(second)])
    assert (config.data.shuffle, config.rollout.save) == (False, False)
    assert (config.eval_every, config.save_minutes, config.trackers) == (0, 0.0, None)
    assert (config.sampling.stop, config.actors["policy"].api_key_env) == ([], "")


def test_a_list_or_table_that_is_given_later_replaces_the_one_before(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "{sampling: {stop: [a, b]}, eval: {sampling: {top_p: 0.5}}, data: {train: [a.jsonl, "
        "b.jsonl]}}"
    )
    second.write_text(
        "{sampling: {stop: [c]}, eval: {sampling: {top_k: 3}}, data: {train: [c.jsonl]}}"
    )
    config = read_config(["--config", str(first), "--config", str(second)])
    assert (config.sampling.stop, config.eval.sampling, config.data.train) == (
        ["c"],
        {"top_k": 3},
        "c.jsonl",
    )
    config = read_config(
        ["--config", str(first), "--sampling.stop", '["d"]', "--eval.sampling", "min_p=0.1"]
    )
    assert (config.sampling.stop, config.eval.sampling) == (["d"], {"min_p": 0.1})
    assert read_config([]).sampling.stop == []


def test_texts_of_tables_and_lists_are_what_was_written():
    made = [
        "--chat_template_kwargs.enable_thinking",
        "false",
        "--sampling.stop",
        "a=b,=,7,no",
        "--data.columns",
        "answer=no",
    ]
    config = parse_config(["--model", "m", "--out", "o", "--env_path", "e.py", *made])
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert config.sampling.stop == ["a=b", "=", "7", "no"] and config.data.columns == {
        "answer": "no"
    }


def test_an_environment_with_a_dot_in_its_name_is_configured_by_yaml(tmp_path):
    (tmp_path / "c.yaml").write_text("envs:\n  math.v2: {weight: 2}\n  plain: {weight: 3}\n")
    config = parse_config(
        [
            "--model",
            "m",
            "--out",
            "o",
            "--env_path",
            "math.v2.py,plain.py",
            "--config",
            str(tmp_path / "c.yaml"),
        ]
    )
    assert config.envs["math.v2"].weight == 2 and config.envs["plain"].weight == 3


def test_a_list_of_yaml_that_is_not_all_text_is_refused_by_its_flag(tmp_path):
    (tmp_path / "c.yaml").write_text("trackers: [wandb, null]\n")
    with pytest.raises(ValueError, match="--trackers"):
        parse_config(
            [
                "--model",
                "m",
                "--out",
                "o",
                "--env_path",
                "e.py",
                "--config",
                str(tmp_path / "c.yaml"),
            ]
        )


def test_a_model_that_is_named_anew_replaces_that_of_a_file(tmp_path):
    base = ["--env_path", "e.py", "--out", "x"]
    (tmp_path / "run.yaml").write_text(to_yaml(parse_config(["--model", "a", *base])))
    for flag in ("--model", "--actors.policy.model"):
        config = parse_config(["--config", str(tmp_path / "run.yaml"), flag, "b"])
        assert config.actors["policy"].model == "b"
