from __future__ import annotations

import datetime
import gzip
import json
import re
import sys
import tracemalloc

import numpy as np
import pytest
from kit import load_rows
from torch.utils.data import ConcatDataset

from rl_core.data import row_files as rows_of
from rl_core.data.column_names import RenamedColumns, check_columns_exist
from rl_core.data.context_columns import CONTEXT_COLUMNS
from rl_core.data.rows import row_place
from rl_core.data.tables import JsonLines, load_other
from rl_core.data.task_rows import RowOrder, TaskSource, make_task, shown_columns
from rl_core.data.tasks.task_mix import TaskMix
from rl_core.data.warnings.set_warnings import epoch_warnings

ROWS = [{"prompt": f"say {i}", "answer": f"x{i}"} for i in range(5)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    # Tables are cached under the home folder by default; tests leave nothing there.
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def parquet(path):
    import datasets

    datasets.Dataset.from_list(ROWS).to_parquet(str(path))


def arrow(path, make="new_stream"):
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        getattr(pyarrow.ipc, make)(sink, table.schema) as writer,
    ):
        writer.write_table(table)


WRITERS = {
    "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "a.jsonl": lambda path: path.write_bytes(JSONL),
    "A.JSONL": lambda path: path.write_bytes(JSONL),
    "a.csv": lambda path: path.write_text(CSV),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSONL)),
    "a.csv.gz": lambda path: path.write_bytes(gzip.compress(CSV.encode())),
    "a.tsv": lambda path: path.write_text(CSV.replace(",", "\t")),
    "a.tsv.gz": lambda path: path.write_bytes(gzip.compress(CSV.replace(",", "\t").encode())),
    "a.parquet": parquet,
    "a.arrow": arrow,
    "feather.arrow": lambda path: arrow(path, "new_file"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    rows = load_rows(str(tmp_path / name))
    assert len(rows) == 5
    assert [rows[i] for i in range(5)] == ROWS


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_cells_of_csv_and_tsv_stay_text(name, tmp_path):
    lines = ["\ufeffid,answer,is", "007,NA,true", "1.50,,false"]
    (tmp_path / name).write_text("\n".join(lines).replace(",", "," if name == "x.csv" else "\t"))
    first, second = load_rows(str(tmp_path / name))
    assert first == {"id": "007", "answer": "NA", "is": "true"}
    assert second == {"id": "1.50", "answer": "", "is": "false"}


# Source -> answers of the rows for --data.train and for --data.eval; None: refused.
SOURCES = {
    "plain": ("ab", "ab"),  # its files, one split
    "split": ("c", "d"),
    "split@val": ("e", "e"),
    "split/*.jsonl": ("dce", "dce"),
    "split/t*.jsonl": ("c", "c"),
    "**/b.csv": ("b", "b"),
    "p*/**/a*": ("a", "a"),  # a folder that matches holds no rows itself
    "plain/b.csv,plain/a.jsonl, split": ("bac", "bad"),
    "one": ("b", "b"),  # Saved without splits.
    "saved": ("b", None),
    "saved@valid": ("a", "a"),
    "split@dev": (None, None),
    "split/x*.jsonl": (None, None),
    "me@home/x*.jsonl": ("e", "e"),
    "me@home@val": ("e", "e"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_is_files_folders_globs_and_lists_of_them(source, tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    for file, answer in {
        "plain/a": "a",
        "split/train-0": "c",
        "split/gsm_test": "d",
        "split/val": "e",
        "me@home/x": "e",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / f"{file}.jsonl").write_text(
            json.dumps({"prompt": "x", "answer": answer}) + "\n"
        )
    (tmp_path / "plain/b.csv").write_text("prompt,answer\nx,b\n")
    (tmp_path / "plain/README.md").write_text("no rows")
    (tmp_path / "plain/also").mkdir()
    tables = {
        name: datasets.Dataset.from_list([{"answer": answer}])
        for name, answer in (("train", "b"), ("valid", "a"))
    }
    tables["train"].save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "saved"))
    for split, answers in zip(("train", "test"), SOURCES[source], strict=True):
        if answers is None:
            with pytest.raises(
                ValueError,
                match=r"no file of the split 'dev'; .*train-0|no such file|no split 'test'",
            ):
                load_rows(source, split)
        else:
            rows = load_rows(source, split)
            assert "".join(row["answer"] for row in rows) == answers and len(rows) == len(answers)


def test_a_hub_name_has_a_config_and_a_split(monkeypatch):
    import datasets

    asked, table = [], datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *args, **options: asked.append((*args, options["split"])) or table,
    )
    for source in (
        "org/name",
        "org/name:main",
        "org/v1.2:main@train[:10%]",
        "org/name@validation,org/other",
    ):
        load_rows(source, "test")
    assert asked == [
        ("org/name", None, "test"),
        ("org/name", "main", "test"),
        ("org/v1.2", "main", "train[:10%]"),
        ("org/name", None, "validation"),
        ("org/other", None, "test"),
    ]


def test_a_wrong_split_or_folder_of_save_to_disk_is_refused(tmp_path):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ValueError, match=r"no split 'tset'; did you mean 'test'\?"):
        load_rows(str(tmp_path / "two"), "tset")
    with pytest.raises(ValueError, match=r"Directory .* is neither a .Dataset. directory nor a"):
        load_rows(str(tmp_path))


DEEP = b'{"a": %s1%s}'
NESTED = "objects and lists are nested deeper than 200 levels"
NO_TABLE = b"a,b\n1,2,3,4\n" * 3 + b'"'


ICONV = "not UTF-8 but probably {0} .*; convert the file by iconv -f {0} -t UTF-8".format


@pytest.mark.parametrize(
    "name, content, match",
    [
        (
            "x.jsonl",
            JSONL + b'{"prompt": "say',
            r"row 6 of .*x.jsonl: not JSON in UTF-8: Unterminated string.* may be cut short",
        ),
        (
            "x.jsonl",
            b'{"a": 1}\n\n[1]\n',
            r"row 3 of .*x.jsonl: a row must be a JSON object, this is \[1\]",
        ),
        ("x.jsonl", b'{"a": 1}\nnull\n', r"row 2 of .*: a row must be a JSON object, this is null"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "row 2 of .*: " + ICONV("WINDOWS-1252")),
        ("x.json", '[{"a": "é"}]'.encode("utf-16"), "x.json: " + ICONV("UTF-16")),
        ("x.jsonl", '{"a": 1}'.encode("utf-16-le"), "row 1 of .*: " + ICONV("UTF-16")),
        ("x.csv", "prompt,answer\né,1\n".encode("utf-16"), "x.csv: " + ICONV("UTF-16")),
        ("x.csv", "prompt,answer\né,1\n".encode("latin-1"), "x.csv: " + ICONV("WINDOWS-1252")),
        (
            "x.jsonl",
            rb'{"a": "\ud83d\ude00"}' + b"\n" + rb'{"b": 1, "a": ["half \ud83d emoji"]}',
            r"row 2 of .*: column 'a' has a lone surrogate, '.ud83d', .*: remove it",
        ),
        (
            "x.json",
            rb'[{"a": "x"}, {"a": "\udc00"}]',
            r"row 2 of .*x.json: column 'a' has a lone surrogate",
        ),
        ("x.jsonl", b'{"a": 1}\n' + DEEP % (b"[" * 5000, b"]" * 5000), "row 2 of .*: " + NESTED),
        ("x.jsonl", DEEP % (b"[" * 201, b"]" * 201), "row 1 of .*: " + NESTED),
        ("x.json", DEEP % (b'{"b":' * 5000, b"}" * 5000), "x.json: " + NESTED),
        (
            "x.jsonl",
            b'{"a": 1}\n{"a": 1,}\n',
            r"row 2 of .*: not JSON in UTF-8: .* line 1 column 9",
        ),
        ("x.jsonl", b"", r": the data set is empty"),
        ("x.jsonl", b"\n\n", r": the data set is empty"),
        (
            "x.json",
            b'[{"a": 1},\n {"a": ',
            r": not JSON in UTF-8: .* line 2 column \d+.* may be cut short",
        ),
        ("x.json", b'[{"a": 1}, 7]', r": a row must be a JSON object, this is 7"),
        ("x.json", b"7", r": a row must be a JSON object, this is 7"),
        ("x.json", b'{"a": 1}\n{"a": 2}\n', r"a file with one object per line must end in \.jsonl"),
        ("x.json", b"[]", r": the data set is empty"),
        ("x.csv", b"prompt,response\n", r"x.csv: the data set is empty; it must have at least one"),
        ("x.csv", b"", r"x.csv: the data set is empty"),
        ("x.jsonl.gz", gzip.compress(JSONL, mtime=0)[:-12], ": it is damaged or cut short"),
        ("x.txt", b"x", r": format '\.txt' is not known; use \.json, \.jsonl, \.csv"),
        *((name, NO_TABLE, r": [^\n]*$") for name in ("x.parquet", "x.arrow", "x.csv")),
    ],
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_file_that_holds_no_rows_is_refused_in_one_line_with_its_name(
    tmp_path, name, content, match, in_memory, monkeypatch
):
    if not in_memory:
        monkeypatch.setattr("rl_core.data.row_files.IN_MEMORY_BYTES", -1)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^[^\n]*{match}") as error:
        load_rows(str(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)


# Files in the order in which they are given -> number of their rows.
FILES = {
    "blank.jsonl": ('{"prompt": "1"}\n\n{"prompt": "2"}\n', 2),
    "array.json": ('[{"prompt": "1"},\n{"prompt":\n"2"}]', 2),
    "names.csv": ('prompt,answer\n"one\ntwo",1\nthree,2\n', 2),
    "more.jsonl.gz": ('\n{"prompt": "1"}\n', 1),
}


def test_errors_name_the_number_of_a_row_and_its_file(tmp_path):
    made_rows, want = [], []
    for name, (text, num_rows) in FILES.items():
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        made_rows.append(str(tmp_path / name))
        want += [f"row {number + 1} of {tmp_path / name}" for number in range(num_rows)]
    rows, files = rows_of.load_rows(",".join(made_rows), "train", load_other)
    assert [row_place(n, files, "train") for n in range(len(rows))] == want
    source = TaskSource(rows, env="e", split="train", seed=0, shuffle=False, files=files)
    assert [task.place for task in source] == want
    rows = [{"prompt": "1"}, {}]
    source = TaskSource(rows, env="e", split="train", seed=0, shuffle=False, files=[("x", 2)])
    with pytest.raises(ValueError, match=r"^row 2 of x: needs one of the columns"):
        list(source)
    assert row_place(6, (), "eval/gsm8k") == "row 7 of the split 'eval/gsm8k'"


@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_unicode_line_separators_and_a_byte_order_mark_do_not_split_rows(
    limit, tmp_path, monkeypatch
):
    monkeypatch.setattr("rl_core.data.row_files.IN_MEMORY_BYTES", limit)
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        "\ufeff".encode()
        + json.dumps({"a": "x\u2028y\x85z"}, ensure_ascii=False).encode()
        + b"\r\n"
    )
    assert list(load_rows(str(path))) == [{"a": "x\u2028y\x85z"}]


def test_rows_of_a_large_file_stay_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_core.data.row_files.IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("rl_core.data.tables.CHECKED_ROWS", 2)
    lines = [json.dumps({"prompt": f"say {n}", "text": "x" * 1000}) for n in range(1000)]
    lines[500:501] = ["", '{"prompt": 5', "  "]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    tracemalloc.start()
    rows = load_rows(str(tmp_path / "x.jsonl"))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000 and len(rows) == 1000  # Rows take 1 MB.
    assert [rows[n]["prompt"] for n in (0, 499, 501, 999, -1)] == [
        "say 0",
        "say 499",
        "say 501",
        "say 999",
        "say 999",
    ]
    with pytest.raises(ValueError, match=r"row 502 of .*x\.jsonl: not JSON in UTF-8"):
        rows[500]
    (tmp_path / "x.jsonl").write_text("\n".join(lines)[:-9])
    with pytest.raises(
        ValueError, match=r"row 1002 of .*x\.jsonl: not JSON in UTF-8: .* The file may be cut short"
    ):
        load_rows(str(tmp_path / "x.jsonl"))


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(JSONL)
    with pytest.raises(
        ValueError, match=r"trian\.jsonl: no such file; did you mean 'train\.jsonl'\?"
    ):
        load_rows(str(tmp_path / "trian.jsonl"))
    with pytest.raises(ValueError, match=r"train.jsonl: no such file in .*nowhere"):
        load_rows(str(tmp_path / "nowhere" / "train.jsonl"))


@pytest.mark.parametrize(
    "source", ["rows.jsonl", "data/rows.josnl", "./rows", "a/b/c", "~/rows", "x.csv.gz"]
)
def test_what_looks_like_a_path_is_never_sent_to_the_hub(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="no such file"):
        load_rows(source)


def test_a_hub_name_that_cannot_be_reached_is_one_line():
    with pytest.raises(
        ValueError,
        match=r"^nobody/nothing-v1\.2:main is not a file here, and the hub: [^\n]*$",
    ):
        load_rows("nobody/nothing-v1.2:main")


def test_a_task_takes_its_messages_from_any_of_the_usual_columns():
    user = [{"role": "user", "content": "hi"}]
    system = {"role": "system", "content": "be kind"}
    forms = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    share = [{"from": "system", "value": "be kind"}, *forms, *forms]
    talk = make_task({"conversations": share, "system": "be kind"}, 0, "e", "train").messages
    assert talk == [system, *user, {"role": "assistant", "content": "hello"}, *user]
    task_of_user = make_task(
        {"instruction": "Add.", "input": "1 + 1", "output": "2"}, 0, "e", "train"
    ).messages
    assert task_of_user == [{"role": "user", "content": "Add.\n\n1 + 1"}]
    usual = (
        {"messages": user},
        {"prompt": "hi"},
        {"prompt": user},
        {"question": "hi"},
        {"problem": "hi"},
    )
    for row in (
        *usual,
        {"instruction": "hi", "input": ""},
        {"conversations": forms},
        {"prompt": "hi", "instruction": "no"},
        {"prompt": '[{"role": "user", "content": "hi"}]'},
        {"question": "[{'from': 'human', 'value': 'hi'}]"},
    ):
        task = make_task(row, 17, "sort", "train")
        assert (task.messages, task.id, task.env, task.row) == (user, "train/17", "sort", row)
    first = make_task({"question": "no", "messages": user, "prompt": "no"}, 0, "e", "train")
    assert first.messages == user


class Mute:
    def __str__(self):
        raise ValueError("no text")


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize("row, columns", [
    ({"prompt": "2+2?", "answer": "4"}, {"answer": "4"}),
    ({"prompt": "2+2?", "copy": "2+2?", "none": None}, {}),
    ({"messages": [{"role": "user", "content": "hi"}], "tests": ["a"], "n": 3}, {"tests": '["a"]', "n": "3"}),
    ({"prompt": "p", "when": datetime.date(2026, 1, 2), "b": b"123"}, {"when": "2026-01-02", "b": "3 bytes"}),
    ({"prompt": "p", "long": "x" * 2001, "deep": [9] * 10**6},
     {"long": "x" * 2000 + " ...", "deep": "[" + "9, " * 666 + "9 ..."}),
    ({"prompt": "p", "x": np.float32(1.5), "y": np.arange(3), "z": [np.arange(2)]},
     {"x": "1.5", "y": "[0 1 2]", "z": '["[0 1]"]'}),
    ({"prompt": "p", "keys": {(1, 2): 3, "a": 4}, "mute": Mute(), "mutes": [Mute()], "loop": LOOP},
     {"keys": '{"a": 4}', "mute": "Mute", "mutes": "list", "loop": "list"}),
    ({"prompt": "p"} | {f"c{n}": n for n in range(60)}, {f"c{n}": str(n) for n in range(50)}),
])  # fmt: skip
def test_readers_get_short_columns_without_the_prompt(row, columns):
    assert shown_columns(make_task(row, 0, "e", "train")) == columns


def test_a_tasks_messages_are_a_copy_without_the_empty_keys_of_tables():
    row = {"messages": [{"role": "user", "content": "hi", "tool_calls": None}]}
    task = make_task(row, 0, "e", "train")
    assert task.messages == [{"role": "user", "content": "hi"}]
    task.messages[0]["content"] = "spoilt"
    assert row["messages"][0]["content"] == "hi"


@pytest.mark.parametrize(
    "row, match",
    [
        (
            {"answer": "1"},
            r"row 4 of the split 'train': needs one of the columns messages, prompt.*; has "
            r"answer",
        ),
        ({}, r"row 4 of .*has no columns"),
        ({"messages": "hi"}, r"row 4 of .*: column 'messages': must be a list of .* is 'hi'"),
        ({"messages": []}, r"must be a list of"),
        ({"messages": ["hi"]}, r"message 1 is 'hi'"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"content": "a"}]},
            r"message 2 is {.content.: .a.}",
        ),
        ({"messages": [{"role": "user"}]}, r"message 1 is {.role.: .user.}"),
        (
            {"prompt": [{"role": "system", "content": "a"}], "system_prompt": "b"},
            r"row 4 of .*: column 'system_prompt' and the messages have system messages that differ",
        ),
        (
            {"prompt": "<video>a", "videos": ["b"]},
            r"column 'videos', to which .*, is not supported: mod",
        ),
        ({"prompt": "a", "system": 3}, r"column 'system' must be a text, is 3"),
        ({"prompt": "a", "history": "b"}, r"column 'history' must be a list of messages, or of pa"),
        ({"prompt": "a", "history": [["b", 1]]}, r"column 'history' must be .* is \[\['b', 1\]\]"),
        ({"prompt": "a", "tools": ["add"]}, r"column 'tools' must be .*; tool 1 is not a function"),
        ({"prompt": "a", "chat_template_kwargs": "b"}, r"'chat_template_kwargs' must be an object"),
        ({"prompt": "a", "continue_final_message": True}, r"is True: it must be true, behind a pr"),
        (
            {"prompt": [{"role": "assistant", "content": "a"}], "continue_final_message": "b"},
            r"'continue_final_message' is 'b': it must be true",
        ),
        (
            {"prompt": [{"role": "user", "content": None}]},
            r"column .prompt.: .*message 1 is {.*None}",
        ),
    ],
)
def test_a_row_without_well_formed_messages_is_refused_with_its_number(row, match):
    with pytest.raises(ValueError, match=match) as error:
        make_task(row, 3, "e", "train")
    fix = re.search(r"by --data\.columns (my_\w+)=(\w+)$", str(error.value))
    assert bool(fix) == (not row.keys().isdisjoint(CONTEXT_COLUMNS))
    if fix:
        (renamed,) = RenamedColumns([row], {fix[1]: fix[2]})
        assert renamed[fix[1]] == row[fix[2]]
        make_task(renamed, 3, "e", "train")


def test_columns_that_are_empty_or_agree_change_no_prompt():
    parts = [{"type": "text", "text": "a"}]
    row = {"prompt": [{"role": "system", "content": parts}, {"role": "user", "content": "<video>"}]}
    empty = {"videos": [], "images": None, "history": "", "tools": "", "system": "a\n"}
    assert (
        make_task(row | empty, 0, "e", "train").messages == make_task(row, 0, "e", "train").messages
    )


# --data.columns, the column that is read -> the messages' text, and what hooks find under "answer".
@pytest.mark.parametrize(
    "columns, prompt, answer",
    [
        ({"answer": "solution"}, "m", "s"),
        ({"prompt": "problem"}, "p", "a"),  # `prompt` comes before `messages`.
        ({"question": "prompt", "prompt": "question"}, "q", "a"),
        ({"prompt": "solution", "answer": "problem"}, "s", "p"),
    ],
)
def test_columns_have_other_names(columns, prompt, answer):
    row = {
        "messages": [{"role": "user", "content": "m"}],
        "problem": "p",
        "solution": "s",
        "answer": "a",
    }
    row |= {"question": "q", "prompt": "r"}
    rows = RenamedColumns([row, {"other": 1}], columns)
    task = make_task(rows[0], 0, "e", "train")
    assert (task.messages[-1]["content"], task.row["answer"], task.row["solution"]) == (
        prompt,
        answer,
        "s",
    )
    assert len(rows) == 2 and rows[1] == {"other": 1}


def test_a_column_that_no_row_has_is_refused():
    columns = {"answer": "solutoin"}
    for row in ({"solution": "s"}, {"solution": "s", "answer": "a"}):
        with pytest.raises(
            ValueError,
            match=r"columns answer=solutoin: x.jsonl has no column 'solutoin'; did you mean 'sol",
        ):
            check_columns_exist([row], columns, "x.jsonl")
    with pytest.raises(ValueError, match="x has no column 'solutoin'"):
        check_columns_exist([{"other": 1}], columns, "x", is_train=False)
    check_columns_exist([{"answer": "a"}], columns, "x", is_train=False)


def test_one_of_several_files_may_have_the_column():
    rows = ConcatDataset([[{"answer": "a"}], [{"solution": "s"}]])
    check_columns_exist(rows, {"answer": "solution"}, "x,y")
    with pytest.raises(ValueError, match="x,y has no column 'reply'"):
        check_columns_exist(rows, {"answer": "reply"}, "x,y")


def test_order_is_a_permutation_that_differs_by_epoch_and_seed():
    epochs = [
        [RowOrder(50, 0, True).row_index(p) for p in range(50 * e, 50 * e + 50)] for e in range(3)
    ]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    other = [RowOrder(50, 1, True).row_index(p) for p in range(50)]
    assert len({tuple(e) for e in [*epochs, other, range(50)]}) == 5
    assert [RowOrder(50, 0, False).row_index(p) for p in range(60)] == [*range(50), *range(10)]


def test_order_is_the_same_everywhere_and_for_ever():
    order = RowOrder(10, 7, True)
    assert " ".join(str(order.row_index(p)) for p in range(12)) == "0 6 9 5 8 1 2 7 3 4 0 9"


def test_a_source_resumes_from_its_position(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(JSONL)
    all_tasks = TaskSource(ROWS, env="e", split="train", seed=3, shuffle=True)
    tasks, ids = zip(*((all_tasks.task(p), all_tasks.task(p).id) for p in range(12)), strict=True)
    for rows in (ROWS, JsonLines(tmp_path / "x.jsonl")):
        resumed = TaskSource(rows, env="e", split="train", seed=3, shuffle=True)
        assert [resumed.task(p) for p in range(7, 12)] == list(tasks[7:])
    assert sorted(ids[:5]) == sorted(ids[5:10]) == [f"train/{i}" for i in range(5)]


def test_a_source_without_some_rows_keeps_the_ids_of_the_others():
    source = TaskSource(ROWS, env="e", split="eval", seed=0, shuffle=True)
    source.keep([1, 4])
    assert [t.id for t in source] == ["eval/1", "eval/4"]
    assert len(source) == 2
    assert {source.task(p).id for p in range(2)} == {"eval/1", "eval/4"}
    with pytest.raises(ValueError, match="eval data set has no row that fits; raise --max_prompt"):
        source.keep([])
    for split, kind in (("train", "train"), ("eval/aime", "eval")):
        with pytest.raises(ValueError, match=f"{split} data set has no row; .*--data.{kind} or"):
            TaskSource([], env="e", split=split, seed=0, shuffle=True)


def test_epochs_of_a_mix_draw_each_row_as_often_or_say_how_often():
    def source(name, num_rows):
        rows = [{"prompt": f"{name}{i}"} for i in range(num_rows)]
        return TaskSource(rows, env=name, split="train", seed=0, shuffle=True)

    sources = [source("x", 12), source("y", 4)]
    mix = TaskMix(sources, None)
    for epoch in range(3):
        drawn = [mix.task(position) for position in range(16 * epoch, 16 * epoch + 16)]
        assert len({(t.env, t.id) for t in drawn}) == 16
    assert not [*epoch_warnings(1.0, mix, {})]
    [line] = epoch_warnings(1.0, TaskMix(sources, [1.0, 1.0]), {})
    assert "draws a row of x 0.667 times, of y 2 times; without weights each is drawn 1 t" in line


def test_tasks_of_a_mix_are_the_same_from_any_position_on():
    def source(name):
        rows = [{"prompt": f"{name}{i}"} for i in range(7)]
        return TaskSource(rows, env=name, split="train", seed=0, shuffle=True)

    weights = [3.0, 1.0, 0.5]
    mixes = [TaskMix([source(n) for n in "xyz"], weights) for _ in range(2)]
    orders = zip(mixes, (range(90), range(89, -1, -1)), strict=True)
    forwards, backwards = ([t.id + t.env for t in map(mix.task, places)] for mix, places in orders)
    assert backwards == forwards[::-1]
    for n in (9, 18, 45, 90):
        for name, weight in zip("xyz", weights, strict=True):
            assert abs(sum(t.endswith(name) for t in forwards[:n]) - n * weight / 4.5) <= 1
