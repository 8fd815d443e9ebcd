"""Saved files outlive damage of files, of weights and of the machine; and a user's files are left
alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from kit import answer, make_learner, metrics, of_ranks, run, weights, words
from safetensors.torch import load_file
from test_nonfinite import rm_flags, step_with
from test_runs import RL, assert_same_weights, lasting
from test_saving import flags_of  # noqa: F401
from tiny_vision_model import VISION_MODELS
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from rl_core.run.saving.checkpoint import checkpoints_in, export_policy, save_checkpoint, set_dtype
from rl_core.run.saving.lost_steps import drop_lost_steps
from rl_core.run.saving.resume import load_checkpoint, newest_intact
from rl_core.train import main
from rl_core.types import RunError


@pytest.fixture
def flags(places):
    return words("--optim.lr 1e-2", RL.format(**places))


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """A folder with checkpoints after steps 1 and 2, and their learner."""
    folder, learner = tmp_path_factory.mktemp("saved"), make_learner(tiny_model, "--optim.lr 1e-3")
    for step in (1, 2):
        step_with(learner, None, step)
        save_checkpoint(
            folder / f"step_{step:06d}", {"policy": learner}, {"step": step}, learner.ranks, keep=0
        )
    return folder, learner


@pytest.fixture
def checkpoints(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


def shard_of(checkpoint: Path) -> Path:
    return max((checkpoint / "policy").iterdir(), key=lambda file: file.stat().st_size)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


DAMAGES = {
    "a bit of a shard": ("policy/*", flip_a_bit),
    "a bit of the state": ("state.json", flip_a_bit),
    "a shard cut short": ("policy/*", lambda file: os.truncate(file, 100)),
    "a shard that is gone": ("policy/*", Path.unlink),
    "an empty state": ("state.json", lambda file: file.write_text("")),
    "no state": ("state.json", Path.unlink),
    "no manifest": ("manifest.json", Path.unlink),
    "an empty manifest": ("manifest.json", lambda file: file.write_text("")),
    "a garbled manifest": ("manifest.json", lambda file: file.write_bytes(b"\xff\x00{")),
    "a manifest that is a list": ("manifest.json", lambda file: file.write_text("[1]")),
    "a manifest without files": (
        "manifest.json",
        lambda file: file.write_text('{"files": {"state.json": 7}}'),
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over_and_never_loaded(
    case, saved, checkpoints, capsys
):
    learner = saved[1]
    pattern, damage = DAMAGES[case]
    for step, before in ((2, "step_000001"), (1, None)):
        [file] = (checkpoints / f"step_{step:06d}").glob(pattern)
        damage(file)
        with pytest.raises((ValueError, OSError)) as error:
            load_checkpoint(file.parents[pattern.count("/")], {"policy": learner})
        assert str(file) in str(error.value)
        if before:
            assert newest_intact(checkpoints, learner.ranks) == checkpoints / before
            [line] = capsys.readouterr().out.splitlines()
            assert (
                line.startswith("warning: ")
                and str(file) in line
                and f"resumes from {before}" in line
            )
    with pytest.raises(
        ValueError, match="no earlier checkpoint is intact: remove them, to begin at step 0"
    ):
        newest_intact(checkpoints, learner.ranks)


def test_every_file_of_a_checkpoint_has_a_checksum(saved):
    for checkpoint in checkpoints_in(saved[0]):
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        result = {
            str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()
        }
        assert result == {"manifest.json", *files} and all(
            facts["xxh3_64"] for facts in files.values()
        )


def find_newest(ranks, folder: str) -> str:
    return newest_intact(Path(folder), ranks).name


@pytest.mark.parametrize("pattern", ["policy/*", "state.json"])
def test_ranks_of_which_one_finds_the_damage_agree(pattern, checkpoints):
    [file] = (checkpoints / "step_000002").glob(pattern)
    assert of_ranks(2, __file__, "find_newest", checkpoints) == ["step_000002"] * 2
    flip_a_bit(file)
    assert of_ranks(2, __file__, "find_newest", checkpoints) == ["step_000001"] * 2


def test_a_run_resumes_before_a_damaged_checkpoint(flags, tmp_path, capsys):
    parts, full = tmp_path / "parts", tmp_path / "whole"
    run(parts, flags, "--num_steps 2 --save_every 1")
    shutil.copytree(parts, full)
    flip_a_bit(shard_of(parts / "checkpoints/step_000002"))
    for name in ("step_000001", "step_000002", "eval_000002_greedy"):  # As of a run of two ranks.
        (parts / f"rollouts/{name}.rank_00001.jsonl.zst").touch()
    capsys.readouterr()
    for out in (parts, full):
        run(out, flags, "--num_steps 3 --resume")
    printed = capsys.readouterr().out
    assert (
        "resumes from step_000001, the one before it" in printed
        and "--resume: continues from step 1" in printed
    )
    assert lasting(metrics(parts)) == lasting(metrics(full))
    assert_same_weights(parts, full)
    of_two_ranks = set(names_in(parts / "rollouts")) - set(names_in(full / "rollouts"))
    assert of_two_ranks == {"step_000001.rank_00001.jsonl.zst"}


def test_a_damaged_checkpoint_takes_the_place_of_no_good_one(saved, checkpoints):
    learner = saved[1]
    os.rename(checkpoints / "step_000002", checkpoints / "step_000009")
    flip_a_bit(shard_of(checkpoints / "step_000009"))
    save_checkpoint(
        checkpoints / "step_000003", {"policy": learner}, {"step": 3}, learner.ranks, keep=1
    )
    assert names_in(checkpoints) == ["step_000003", "step_000009"]
    assert newest_intact(checkpoints, learner.ranks).name == "step_000003"


def test_nothing_is_deleted_while_updates_are_skipped(tiny_model, tmp_path):
    last_two_are_infinite = [0, 0.5, 0, 0.5, 0, 1e300, 1e300, 0]
    flags = rm_flags(tiny_model, tmp_path, last_two_are_infinite)
    out = run(tmp_path / "run", flags, "--keep_checkpoints 1")
    assert [row.get("learn/policy/updates") for row in metrics(out)] == [1, 1, None, None]
    assert names_in(out / "checkpoints") == ["step_000002", "step_000003", "step_000004"]
    flags = rm_flags(tiny_model, tmp_path, [*last_two_are_infinite, 0, 0])
    run(out, flags, "--keep_checkpoints 1 --resume")
    assert names_in(out / "checkpoints") == ["step_000005"]


# Weights


@pytest.mark.parametrize("more", ["", "--actors.policy.lora.rank 4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_neither_saved_nor_exported(
    value, more, tiny_model, tmp_path
):
    learner = make_learner(tiny_model, "--optim.lr 1e-3", more)
    out, tokenizer = tmp_path / "hf/policy", AutoTokenizer.from_pretrained(tiny_model)

    def save(step: int) -> None:
        folder = tmp_path / f"checkpoints/step_{step:06d}"
        save_checkpoint(folder, {"policy": learner}, {"step": step}, learner.ranks, keep=1)

    def export() -> None:
        export_policy(learner.policy, tokenizer, out, learner.ranks, learner.adapter)

    save(1)
    export()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    name, weight = next(learner.trained_parameters())
    with torch.no_grad():
        weight.view(-1)[5] = value
    with pytest.raises(
        RunError,
        match=r"weights are NaN or infinite .* stays as it was; resume from the newest checkpoint",
    ):
        export()
    with pytest.raises(RunError, match=rf"policy: {name}\): .*step_000002 is not written"):
        save(2)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def dtypes_in(tree: dict) -> set[str]:
    dtypes = {tree["dtype"]} if "dtype" in tree else set()
    return dtypes.union(*(dtypes_in(each) for each in tree.values() if isinstance(each, dict)))


@pytest.mark.parametrize("arch", VISION_MODELS)
def test_every_configuration_in_an_export_has_its_dtype(arch, make_model, tmp_path):
    config = AutoConfig.from_pretrained(make_model(arch))
    set_dtype(config, torch.bfloat16)
    config.save_pretrained(tmp_path)
    assert dtypes_in(json.loads((tmp_path / "config.json").read_text())) == {"bfloat16"}


def test_an_export_of_a_model_that_sees_keeps_its_dtype(make_model, tmp_path):
    path, copied = make_model("qwen3_vl"), tmp_path / "bf16"
    shutil.copytree(path, copied)
    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    hf.save_pretrained(copied)
    held = json.loads((copied / "config.json").read_text())
    del held["dtype"]  # Some published models name it in text_config alone.
    (copied / "config.json").write_text(json.dumps(held))
    learner = make_learner(copied)
    tokenizer = AutoTokenizer.from_pretrained(path)
    export_policy(learner.policy, tokenizer, tmp_path / "hf", learner.ranks)
    exported = json.loads((tmp_path / "hf/config.json").read_text())
    assert dtypes_in(exported) == {"bfloat16"}
    weights = load_file(tmp_path / "hf/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_a_weight_that_the_exports_type_cannot_hold_is_not_exported(tiny_model, tmp_path):
    learner = make_learner(tiny_model)
    learner.policy.checkpoint_dtype = torch.float16
    with torch.no_grad():
        next(learner.policy.parameters()).view(-1)[0] = 1e5
    with pytest.raises(RunError, match="weights are NaN or infinite"):
        export_policy(learner.policy, None, tmp_path / "policy", learner.ranks)


def test_a_run_whose_weights_overflow_keeps_its_good_checkpoint_and_model(flags, tmp_path, capsys):
    out = run(tmp_path / "run", flags, "--num_steps 1")
    before = weights(out)
    assert (
        main(words(flags, "--num_steps 2 --optim.lr 1e39 --keep_checkpoints 1 --resume --out", out))
        == 1
    )
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "weights are NaN or infinite (policy: " in line and "step_000002 is not written" in line
    assert names_in(out / "checkpoints") == ["step_000001"]
    assert all(before[name].equal(weight) for name, weight in weights(out).items())


NOTHING = (
    'def load_tasks(split): return [{{"prompt": str(n), "n": n}} for n in range(8)]\ndef '
    "reward_fn(completion, n): return {}\n"
)


@pytest.mark.parametrize(
    "reward, num_steps, says",
    [
        ("1.0", 9, "warning: none of 9 steps made an update"),
        ("1.0", 10, "error: none of 10 steps made an update"),
        (
            "1 / (n - 7)",
            9,
            " episodes failed and gave no samples, ",
        ),
        ("1e300 * len(completion)", 2, "error: every update of policy was skipped"),
    ],
)
def test_a_run_without_an_update_warns_and_from_ten_steps_on_is_an_error(
    reward, num_steps, says, tiny_model, tmp_path, capsys
):
    (tmp_path / "env.py").write_text(NOTHING.format(reward))
    flags = words(
        "--model", tiny_model, "--env_path", tmp_path / "env.py", "--algo.advantage group_mean"
    )
    flags += words("--max_tokens 8 --tasks_per_step 2 --num_steps", num_steps)
    flags += words("--rollout.max_failed_fraction 1")
    assert main([*flags, "--out", str(tmp_path / "run")]) == int(says.startswith("error"))
    printed = capsys.readouterr()
    is_saved = "every update" not in says
    assert says in printed.out + printed.err and ("saved" in printed.out) == is_saved
    result = names_in(tmp_path / "run/checkpoints") + names_in(tmp_path / "run/hf")
    assert result == ([f"step_{num_steps:06d}", "policy"] if is_saved else [])


ONE_LEARNS = """
def load_tasks(split): return [{"prompt": str(n), "who": "ab"[n % 2]} for n in range(8)]
def turns(task): yield task.row["who"]
def reward_fn(completion, who): return len(completion) + sum(map(ord, completion)) if who == "a" else 1.0
"""


def test_a_run_in_which_one_of_two_actors_learned_is_no_failure(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(ONE_LEARNS)
    flags = words(
        "--actors.a.model",
        tiny_model,
        "--actors.b.model",
        tiny_model,
        "--env_path",
        tmp_path / "env.py",
    )
    out = run(
        tmp_path / "run",
        flags,
        "--algo.advantage group_mean --max_tokens 8 --tasks_per_step 4 --num_steps 1",
    )
    updates = [name for row in metrics(out) for name in row if name.endswith("/updates")]
    assert updates == ["learn/a/updates"]


def test_updates_that_are_all_skipped_after_a_resume_leave_the_good_export(flags, tmp_path, capsys):
    out = run(tmp_path / "run", flags, "--num_steps 1")
    before = (out / "hf/policy/model.safetensors").stat().st_mtime_ns
    (tmp_path / "letters.py").write_text(NOTHING.format("1e300 * len(completion)"))
    ruined = words(
        flags,
        "--env_path",
        tmp_path / "letters.py",
        "--algo.advantage group_mean --num_steps 3 --resume",
    )
    assert main([*ruined, "--out", str(out)]) == 1
    assert "every update of policy was skipped" in capsys.readouterr().err
    assert (out / "hf/policy/model.safetensors").stat().st_mtime_ns == before
    # Steps that merely have no signal do not damage the learned weights.
    (tmp_path / "letters.py").write_text(NOTHING.format("1.0"))
    assert main([*ruined, "--out", str(out)]) == 0


# Names


def test_names_that_are_no_checkpoints_are_left_alone(flags, tmp_path):
    out = run(tmp_path / "run", flags, "--num_steps 1")
    folder = out / "checkpoints"
    for name in (
        "step_000001.bak",
        "step_000001 (copy)",
        "step_old",
        "step_7",
        "before step_000001",
    ):
        shutil.copytree(folder / "step_000001", folder / name)
    (folder / "step_000009").write_text("a file")
    foreign = {*names_in(folder)} - {"step_000001"}
    run(out, flags, "--num_steps 3 --save_every 1 --keep_checkpoints 1 --resume")
    assert {*names_in(folder)} == {*foreign, "step_000003"}


@pytest.mark.parametrize("content", [b"", b"\x00\xff\x17", b"words", b"[1, 2]"])
@pytest.mark.parametrize("name", ["config.yaml", "best/best.json"])
def test_a_file_of_a_run_that_is_empty_or_garbage_is_named_in_one_line(
    name, content, flags, tmp_path, capsys
):
    out, arguments = (
        tmp_path / "run",
        words(flags, "--num_steps 1 --eval_every 1 --keep_best greedy_score --resume --out"),
    )
    (out / name).parent.mkdir(parents=True)
    (out / name).write_bytes(content)
    assert main([*arguments, str(out)]) == 1
    printed = capsys.readouterr().err
    assert (
        printed.startswith(f"error: {out / name} is damaged: ") and len(printed.splitlines()) == 1
    )
    assert (out / name).read_bytes() == content
    assert (
        name == "config.yaml" or not (out / "failure.txt").exists()
    )  # Raised before the run begins.


# Crashes of the machine


def test_files_and_folders_are_on_the_disk_before_they_get_their_names(
    flags, tmp_path, monkeypatch
):
    """The rule for all that a run puts into its folder, but rollouts, of which a resumed run writes
    the last ones again."""
    flushed, named, unsafe, to_flush = set(), [], [], set()
    true_fsync, out = os.fsync, tmp_path / "run"

    def identity(path) -> tuple:
        result = os.stat(path)
        return result.st_dev, result.st_ino, result.st_mtime_ns

    def fsync(number: int) -> None:
        true_fsync(number)
        flushed.add(identity(number))
        to_flush.discard(os.stat(number).st_ino)

    def seen(true):
        def rename(source, target, **more):
            if out in Path(target).parents and not str(target).endswith((".zst", ".old")):
                paths = [Path(source), *Path(source).rglob("*")]
                unsafe.extend(path for path in paths if identity(path) not in flushed)
                named.append(str(Path(target).relative_to(out)))
                if Path(source).is_dir():
                    to_flush.add(os.stat(Path(target).parent).st_ino)
            return true(source, target, **more)

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", seen(os.rename))
    monkeypatch.setattr(os, "replace", seen(os.replace))
    more = (
        "--num_steps 2 --eval_every 1 --eval.samples 0 --keep_best greedy_score "
        "--actors.policy.lora.rank 2"
    )
    run(out, flags, more)
    run(out, flags, more, "--num_steps 3 --resume")
    result = {
        "checkpoints/step_000002",
        "hf/policy",
        "hf/policy_adapter",
        "best/policy",
        "config.yaml",
        "metrics.jsonl",
    }
    assert result <= {*named} and not unsafe and not to_flush


# Metrics


def test_an_evaluation_that_is_made_again_has_one_line(flags_of, tmp_path):  # noqa: F811
    """A signal leaves the evaluation to the resumed run, which dies after it, and before a
    checkpoint."""
    parts, full, more = (
        tmp_path / "parts",
        tmp_path / "whole",
        "--eval_every 1 --eval.samples 0 --resume --out",
    )
    ends = words(flags_of("mark.touch(); os.kill(os.getpid(), 15)"), more, parts)
    assert main(ends) == 143
    evaluated = [row for row in metrics(parts) if "eval/env/greedy_score" in row]
    (tmp_path / "env.mark").unlink()
    dies = words(flags_of("raise KeyError"), "--rollout.max_failed_fraction 0", more, parts)
    for _ in range(2):
        assert main(dies) == 1
        again = [row for row in metrics(parts) if "eval/env/greedy_score" in row]
        assert len(again) == len(evaluated) + 1
    for out in (parts, full):
        run(out, flags_of("pass"), "--eval_every 1 --eval.samples 0 --resume --num_steps 3")
    assert lasting(metrics(parts)) == lasting(metrics(full))


def test_an_evaluation_that_is_not_made_again_keeps_its_line(flags_of, tmp_path):  # noqa: F811
    """A signal leaves the evaluation to the resumed run, which makes it and dies; the next one shall make
    none."""
    out, more = tmp_path / "run", "--eval_every 1 --eval.samples 0 --resume --out"
    assert main(words(flags_of("mark.touch(); os.kill(os.getpid(), 15)"), more, out)) == 143
    (tmp_path / "env.mark").unlink()
    dies = words(flags_of("raise KeyError"), "--rollout.max_failed_fraction 0", more, out)
    assert main(dies) == 1
    made = [row for row in metrics(out) if "eval/env/greedy_score" in row]
    assert made[-1]["step"] == max(row["step"] for row in metrics(out))
    run(out, flags_of("pass"), "--eval_every 0 --resume --num_steps 3")
    assert [row for row in metrics(out) if "eval/env/greedy_score" in row] == made


def test_lines_of_metrics_that_are_none_are_dropped(saved, tmp_path):
    kept = [
        '{"step": 1, "time/step_s": 1}',
        '{"step": 1, "eval/x": 1}',
        '{"step": 2, "time/step_s": 1}',
    ]
    dropped = [
        '{"step": 2, "eval/x": 1}',
        '{"step": 3, "time/step_s": 1}',
        '{"step": 3, "eval/x": 1}',
        "[1]",
        "7",
        '{"st',
        '{"step": "2"}',
        "\x00",
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join([*kept, *dropped]))
    drop_lost_steps(tmp_path, 2, True)
    assert file.read_text().splitlines() == kept
    # An evaluation of the checkpoint's own step is kept if it is not made again.
    file.write_text("\n".join([*kept, *dropped]))
    drop_lost_steps(tmp_path, 2, False)
    assert file.read_text().splitlines() == [*kept, dropped[0]]


def test_files_of_steps_after_the_checkpoint_are_dropped(saved, tmp_path):
    kept = [
        "rollouts/step_000002.jsonl.zst",
        "rollouts/step_000002.rank_00001.jsonl.zst",
        "rollouts/eval_000001_greedy.jsonl.zst",
        "rollouts/step_000003.jsonl.zst.bak",
        "rollouts/tokenizers.json",
        "tokens/step_000002.jsonl.zst",
        "trace_step_000002_rank_0.json",
        "checkpoints/step_000003",
    ]
    evaluated = "rollouts/eval_000002_sampled_aime.jsonl.zst"
    dropped = [
        "rollouts/step_000003.jsonl.zst",
        "rollouts/step_1000000.rank_00001.jsonl.zst",
        "rollouts/.step_000003.jsonl.zst.tmp",
        "rollouts/eval_000004_greedy.rank_00001.jsonl.zst",
        "tokens/step_000003.jsonl.zst",
        "trace_step_000003_rank_1.json",
    ]
    for name in (*kept, evaluated, *dropped):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def left() -> set[str]:
        return {str(file.relative_to(tmp_path)) for file in tmp_path.glob("*/*")} | {
            file.name for file in tmp_path.glob("trace*")
        }

    drop_lost_steps(tmp_path, 2, False)
    assert left() == {*kept, evaluated}
    drop_lost_steps(tmp_path, 2, True)
    assert left() == {*kept}


if __name__ == "__main__":
    answer({"find_newest": find_newest})
