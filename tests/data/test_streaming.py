"""--data.streaming: the same rows in the same order, however a run is cut or split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit import LETTERS, words

from rl_core.config import Config, parse_config
from rl_core.data.tasks.streaming import KEPT_BLOCKS, StreamedTasks, open_stream
from rl_core.environments.env_file import load_env
from rl_core.run.plan.plan import make_plan

FORMATS = ("jsonl", "jsonl.gz", "parquet")


def write_shards(folder: Path, suffix: str, num: int = 23, shards: int = 3) -> str:
    """Rows in several files; what to give as --data.train."""
    import gzip

    import pyarrow
    import pyarrow.parquet

    folder.mkdir(exist_ok=True)
    rows = [{"prompt": str(n), "answer": str(n * n)} for n in range(num)]
    for shard in range(shards):
        rows_of_shard = rows[shard * num // shards : (shard + 1) * num // shards]
        file = folder / f"part{shard}.{suffix}"
        text = "".join(json.dumps(row) + "\n" for row in rows_of_shard).encode()
        if suffix == "parquet":
            pyarrow.parquet.write_table(
                pyarrow.Table.from_pylist(rows_of_shard), file, row_group_size=3
            )
        else:
            file.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    return f"{folder}/*.{suffix}"


def tasks_of(path: str, *flags: str, state: dict | None = None) -> StreamedTasks:
    sizes = "--model m --env_path x.py --out x --data.streaming --data.shuffle_buffer 4"
    config = parse_config(words(sizes, *flags))
    tasks = StreamedTasks(open_stream(path, "train"), path, config, "x", None, False)
    tasks.load(state or {})
    return tasks


def prompts(tasks: StreamedTasks, positions) -> list[int]:
    return [int(tasks.task(position).row["prompt"]) for position in positions]


@pytest.mark.parametrize("suffix", FORMATS)
def test_unshuffled_rows_come_in_the_order_of_the_files_again_and_again(tmp_path, suffix):
    tasks = tasks_of(write_shards(tmp_path, suffix), "--data.shuffle false")
    assert prompts(tasks, range(60)) == [n % 23 for n in range(60)]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("num", [20, 23])
def test_an_epoch_has_every_row_once_shuffled_within_the_buffer(tmp_path, suffix, num):
    tasks = tasks_of(write_shards(tmp_path, suffix, num))
    first = prompts(tasks, range(num))
    second = prompts(tasks, range(num, 2 * num))
    assert sorted(first) == sorted(second) == list(range(num))
    assert first != second and first != sorted(first)
    assert [n // 4 for n in first] == [n // 4 for n in range(num)]
    assert len({tuple(n % 4 for n in first[at : at + 4]) for at in range(0, 20, 4)}) > 2
    assert [tasks.task(at).id for at in range(num)] == [f"train/{n}" for n in first]
    other = tasks_of(f"{tmp_path}/*.{suffix}", "--seed 1")
    assert prompts(other, range(num)) != first


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("begin", [3, 9, 22, 23, 41])
def test_a_resumed_stream_goes_on_at_the_same_row(tmp_path, suffix, begin):
    path = write_shards(tmp_path, suffix)
    expected = prompts(tasks_of(path), range(70))
    until = tasks_of(path)
    assert prompts(until, range(begin)) == expected[:begin]
    state = json.loads(json.dumps(until.state()))
    assert prompts(tasks_of(path, state=state), range(begin, 70)) == expected[begin:]
    # Without the checkpoint's state, earlier rows are read again.
    assert prompts(tasks_of(path), range(begin, 70)) == expected[begin:]
    # An older position, of an episode that was under way.
    assert prompts(tasks_of(path, state=state), [0, begin]) == [expected[0], expected[begin]]


def test_a_run_that_goes_on_with_another_buffer_has_that_buffers_rows(tmp_path):
    path = write_shards(tmp_path, "jsonl")
    until = tasks_of(path)
    prompts(until, range(18))
    for size in (3, 5):
        flags = f"--data.shuffle_buffer {size}"
        expected = prompts(tasks_of(path, flags), range(18, 50))
        assert prompts(tasks_of(path, flags, state=until.state()), range(18, 50)) == expected


def test_prompts_are_made_in_every_block(tmp_path):
    code = "def row_to_prompt(n): return f'say {n}'\ndef reward_fn(completion): return 1.0\n"
    (tmp_path / "env.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(6)))
    env, path = load_env(str(tmp_path / "env.py")), str(tmp_path / "rows.jsonl")
    config = Config(tasks_per_step=1)
    config.data.shuffle, config.data.shuffle_buffer = False, 2
    tasks = StreamedTasks(open_stream(path, "train"), path, config, "x", env, False)
    assert [tasks.task(n).messages[0]["content"] for n in range(6)] == [
        f"say {n}" for n in range(6)
    ]


def test_columns_are_renamed_in_every_block(tmp_path):
    tasks = tasks_of(write_shards(tmp_path, "jsonl"), "--data.columns solution=answer")
    assert {int(tasks.task(at).row["solution"]) for at in range(23)} == {n * n for n in range(23)}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_resumed_stream_does_not_read_what_came_before(tmp_path, suffix, epoch):
    path, first = write_shards(tmp_path, suffix, num=60), epoch * 60
    until = tasks_of(path)
    prompts(until, range(first + 18))
    resumed = tasks_of(path, state=json.loads(json.dumps(until.state())))
    began = resumed.next_block
    resumed.task(first + 18)
    assert (began, resumed.next_block, sorted(resumed.blocks)) == (1, 5, [0, 4])


def test_a_folder_that_datasets_saved_is_streamed_too(tmp_path):
    import datasets

    rows = [{"prompt": str(n)} for n in range(11)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    tasks = tasks_of(str(tmp_path / "saved"), "--data.shuffle false")
    assert prompts(tasks, range(22)) == [n % 11 for n in range(22)]


def test_rows_in_memory_are_bounded_by_the_buffer(tmp_path):
    tasks = tasks_of(write_shards(tmp_path, "jsonl", num=400))
    most = 0
    for position in range(900):
        tasks.task(position)
        most = max(most, sum(map(len, tasks.blocks.values())))
    assert most == KEPT_BLOCKS * 4
    assert len(tasks.states) < 12


def test_two_ranks_take_their_own_positions_of_one_stream(tmp_path):
    path = write_shards(tmp_path, "parquet")
    alone = prompts(tasks_of(path), range(40))
    ranks = [prompts(tasks_of(path), range(rank, 40, 2)) for rank in range(2)]
    assert ranks == [alone[0::2], alone[1::2]]


def test_a_row_that_is_cut_short_is_told_with_its_number(tmp_path):
    path = write_shards(tmp_path, "jsonl")
    last = tmp_path / "part2.jsonl"
    last.write_text(last.read_text()[:-5])
    tasks = tasks_of(path)
    prompts(tasks, range(20))
    with pytest.raises(ValueError, match=r"row 8 of .*part2.jsonl: not JSON"):
        tasks.task(20)


def test_a_damaged_table_is_told_with_the_rows_before(tmp_path):
    path = write_shards(tmp_path, "parquet")
    last = tmp_path / "part2.parquet"
    last.write_bytes(b"PAR1" + b"x" * 40)
    with pytest.raises(ValueError, match=r"after row 1[0-9]"):
        prompts(tasks_of(path), range(23))


def test_a_missing_column_is_told_with_its_row(tmp_path):
    rows = [{"prompt": str(n), "answer": "1"} for n in range(300)]
    del rows[250]["answer"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "env.py").write_text("def reward_fn(completion, answer):\n    return 1.0\n")
    flags = "--data.streaming --data.shuffle_buffer 10 --data.shuffle false --engine embedded"
    model = make_tiny(tmp_path)
    config = parse_config(words("--model", model, flags, *where(tmp_path), "--out", tmp_path / "o"))
    train = make_plan(config).train
    assert train.task(249).row["prompt"] == "249"
    with pytest.raises(ValueError, match=r"row 251 of .*rows.jsonl: no column 'answer'; known"):
        train.task(250)


def make_tiny(folder: Path) -> Path:
    from rl_core.tools.tiny_model import make_tiny_model

    make_tiny_model(folder / "model")
    return folder / "model"


def where(folder: Path) -> list[str]:
    return ["--env_path", str(folder / "env.py"), "--data.train", str(folder / "rows.jsonl")]


@pytest.mark.parametrize(
    "flags, error",
    [
        ("--num_epochs 1", "--num_epochs=1.0 needs the number of rows.*give --num_steps"),
        ("--data.skip_long", "--data.skip_long looks at all rows"),
    ],
)
def test_flags_that_need_all_rows_are_refused(tmp_path, flags, error):
    (tmp_path / "env.py").write_text(LETTERS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    command = words("--model m --engine embedded --data.streaming", flags, *where(tmp_path))
    with pytest.raises(ValueError, match=error):
        make_plan(parse_config([*command, "--out", str(tmp_path / "o")]))


def test_load_tasks_and_a_curriculum_are_refused(tmp_path):
    (tmp_path / "env.py").write_text(LETTERS)
    flags = "--model m --engine embedded --data.streaming"
    command = words(flags, "--env_path", tmp_path / "env.py", "--out", tmp_path / "o")
    with pytest.raises(ValueError, match=r"needs --data\.train"):
        make_plan(parse_config(command))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    weight = "\ndef task_weight(success_rate):\n    return 1.0\n"
    (tmp_path / "env.py").write_text(LETTERS + weight)
    with pytest.raises(ValueError, match="task_weight"):
        make_plan(parse_config([*command, *where(tmp_path)]))


def test_an_array_in_one_json_file_is_no_stream(tmp_path):
    (tmp_path / "rows.json").write_text('[{"prompt": "1"}]')
    with pytest.raises(ValueError, match="one object a line"):
        open_stream(str(tmp_path / "rows.json"), "train")
