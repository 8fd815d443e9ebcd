"""rl-core eval --folder: which episodes are taken up, and which are played again."""

from __future__ import annotations

import re

import pytest
from kit import words

from rl_core.config import known_flags, parse_config
from rl_core.environments.env_file import load_env
from rl_core.run.evaluation.eval_folder import COMPARED, EvalFolder, cell_of
from rl_core.sampling.groups import make_group
from rl_core.types import Task, Trajectory

FLAGS = "--model m --env_path e.py --out x --eval.samples 2"
DRAWN = {"temperature": 0.0}


def played(label: str, task: int, reward: float, status: str = "ok"):
    messages = [{"role": "user", "content": "?"}]
    group = make_group(
        parse_config(words(FLAGS)),
        Task(id=f"eval/{task}", env="e", row={}, messages=messages),
        DRAWN,
        batch="eval/e",
        number=task,
        position=task,
        label=label,
        size=1,
    )
    group.trajectories = [
        Trajectory(task_id=group.task.id, env="e", group_id="g", reward=reward, status=status)
    ]
    return group


def rewards(cell, group) -> list[float] | None:
    result = cell.find(group)
    return result and [t.reward for t in result]


def test_episodes_are_those_of_their_task_and_their_way_of_drawing(tmp_path):
    folder = EvalFolder(tmp_path, parse_config(words(FLAGS)))
    for label, task, reward in (("greedy/e", 0, 1.0), ("sampled/e", 0, 2.0), ("greedy/e", 1, 3.0)):
        folder.cell("m", "e", {}, {}).add(played(label, task, reward))
    cell = folder.cell("m", "e", {}, {})
    assert rewards(cell, played("greedy/e", 0, 0.0)) == [1.0]
    assert rewards(cell, played("sampled/e", 0, 0.0)) == [2.0]
    assert rewards(cell, played("greedy/e", 1, 0.0)) == [3.0]
    assert rewards(cell, played("sampled/e", 1, 0.0)) is None


def test_a_failed_group_is_played_again_and_counts_last(tmp_path):
    group = played("greedy/e", 0, 0.0, status="failed")
    cell_of_folder = EvalFolder(tmp_path, parse_config(words(FLAGS))).cell
    cell_of_folder("m", "e", {}, {}).add(group)
    assert rewards(cell_of_folder("m", "e", {}, {}), group) is None
    cell_of_folder("m", "e", {}, {}).add(played("greedy/e", 0, 4.0))
    assert rewards(cell_of_folder("m", "e", {}, {}), group) == [4.0]


def test_models_of_one_name_in_different_folders_are_apart(tmp_path):
    (tmp_path / "episodes").mkdir()
    cell_of(tmp_path, "/first/run/hf/policy", "e").add(played("greedy/e", 0, 1.0))
    other = cell_of(tmp_path, "/second/run/hf/policy", "e")
    assert rewards(other, played("greedy/e", 0, 0.0)) is None


@pytest.mark.parametrize(
    "flags, says",
    [
        (
            "--eval.sampling.temperature 0.5",
            "--eval.sampling.temperature None, and this is 0.5",
        ),
        (
            "--actors.m.model m --actors.m.sampling.stop [x]",
            r"--actors.m.sampling.stop None, and this is \['x'\]",
        ),
        (
            "--chat_template_kwargs think=false",
            "--chat_template_kwargs.think None, and this is False",
        ),
        ("--data.columns answer=a", "--data.columns.answer None, and this is a"),
        ("--seed 3", "--seed 0, and this is 3"),
        ("--data.eval a", "--data.eval None, and this is a"),
    ],
)
def test_episodes_that_other_flags_gave_are_refused(tmp_path, flags, says):
    plain, other = parse_config(words(FLAGS)), parse_config(words(FLAGS, flags))
    EvalFolder(tmp_path / "plain", plain)
    with pytest.raises(ValueError, match=f"played with {says}; name another folder"):
        EvalFolder(tmp_path / "plain", other)
    EvalFolder(tmp_path / "other", other)
    EvalFolder(tmp_path / "other", other)
    with pytest.raises(ValueError, match="name another folder"):
        EvalFolder(tmp_path / "other", plain)


# Flags that cannot change an evaluation, but by files and rows whose content is compared.
FREE = (
    r"model|env_path|out|.*resume|run_name|trackers|device|deterministic|timeout_s|attention"
    r"|algorithm|(.+\.)?(algo|critic|optim|preference|sft|rollout|sandbox|lora)\..+|cp|ep|tp|dp_replicate"
    r"|tasks_per_step|group_size|num_(steps|epochs)|save_.+|keep_.+|push_to_hub|eval_every"
    r"|engine.*|weight_sync|rollout_ranks|max_staleness|print_samples|profile_step"
    r"|canary_tolerance|.*learner\.(?!dtype).+|.*sampling\.(temperature|top_[kp]|min_p)"
    r"|data\.(train|shuffle|shuffle_buffer|streaming|min_reward)|agents\.(public_)?host"
    r"|online\..+|envs\.NAME\.(weight|train|teacher)|actors\.NAME\.(model|api|api_key_env|chat_template)"
    r"|actors\.NAME\.(lr|router_.+|lora_base|algorithm|update_every|ranks|engine_.+)"
)


def test_each_flag_is_compared_or_cannot_change_an_evaluation():
    free = {name for name in known_flags() if re.fullmatch(FREE, name)}
    assert {"algo.clip_high", "eval_every", "optim.lr", "learner.epochs"} <= free
    compared = {name for name in known_flags() if COMPARED.fullmatch(name)}
    assert {"seed", "eval.samples", "data.eval", "max_tokens", "sampling.stop"} <= compared
    assert known_flags().keys() == free ^ compared


def test_added_models_leave_an_evaluation_as_it_is(tmp_path):
    EvalFolder(tmp_path, parse_config(words(FLAGS)))
    for flags in (
        "--algo.clip_high 0.3 --eval_every 5 --optim.lr 1 --learner.epochs 2 --critic.lr 1",
        "--algorithm ppo --sampling.top_p 0.9 --data.train b --group_size 4 --engine embedded",
    ):
        EvalFolder(tmp_path, parse_config(words(FLAGS, flags)))


def test_models_of_a_folder_share_rows_and_environment(tmp_path):
    folder = EvalFolder(tmp_path, parse_config(words(FLAGS)))
    first = folder.cell("m", "e", {"weights": "1"}, {"rows": "1"})
    folder.cell("other", "e", {"weights": "2"}, {"rows": "2"})  # No episode is held yet.
    folder.cell("m", "e", {"weights": "1"}, {"rows": "1"})
    first.add(played("greedy/e", 0, 1.0))
    folder.cell("other", "e", {"weights": "2"}, {"rows": "1"})
    folder.cell("other", "f", {"weights": "2"}, {"rows": "2"})
    with pytest.raises(ValueError, match="played with rows 1, and this is 2; name another"):
        folder.cell("other", "e", {"weights": "2"}, {"rows": "2"})


@pytest.mark.parametrize(
    "changed", ["env.py", "helper.py", "lazy.py", "pack/inner.py", "bare/a.py"]
)
def test_a_change_of_a_file_that_the_environment_imports_is_another_code(changed, tmp_path):
    files = {
        "env.py": "import json\nimport helper\ndef reward_fn(completion):\n import lazy\n return 1.0",
        "helper.py": "from pack import inner",
        "bare/a.py": "",
        "lazy.py": "",
        "pack/__init__.py": "",
        "pack/inner.py": "from . import inner\nfrom bare.a import *",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def code() -> str:
        return load_env(str(tmp_path / "env.py")).code()

    first = code()
    (tmp_path / "other.py").write_text("# Nothing imports this file.")
    assert code() == first
    (tmp_path / changed).write_text(f"{files[changed]}\n# changed")
    assert code() != first
