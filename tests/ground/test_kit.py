"""Errors of ranks that fail in tests."""

from __future__ import annotations

import pytest
from kit import answer, of_ranks, run_ranks


def differ(ranks) -> None:
    for n in range(1000):
        print(f"Loading weights: 100%|####| {n}/1000 [00:00<00:00, 9.9it/s]", flush=True)
    result = {"rank": ranks.rank, "sizes": [3, 5]}
    if ranks.rank == 1:
        assert result["sizes"] == [3, 4]
    ranks.add("never", 1)


def differ_in_one(ranks) -> None:
    result = {f"metric {n}": n / 7 for n in range(100)}
    assert result == result | {"metric 77": 12.5}


def test_of_two_dicts_it_says_the_items_that_differ():
    with pytest.raises(AssertionError, match=r"metric 77: 11\.0 == 12\.5"):
        of_ranks(1, __file__, "differ_in_one")


def test_a_failure_on_a_rank_says_the_values_and_little_else():
    with pytest.raises(AssertionError) as failure:
        of_ranks(2, __file__, "differ")
    output = str(failure.value)
    assert (
        "rank 1: " in output
        and "assert [3, 5] == [3, 4]" in output
        and 'result["sizes"] == [3, 4]' in output
    )
    assert len(output.splitlines()) < 40 and "it/s]" not in output


def test_a_command_that_ends_badly_says_its_last_lines(tmp_path):
    (tmp_path / "noisy.py").write_text(
        "for n in range(2000): print(n, 'noise')\nraise SystemExit(3)\n"
    )
    with pytest.raises(AssertionError) as failure:
        run_ranks(1, tmp_path / "noisy.py")
    output = str(failure.value)
    assert (
        output.startswith("exit code 3: ")
        and "1999 noise" in output
        and len(output.splitlines()) < 50
    )


if __name__ == "__main__":
    answer({"differ": differ, "differ_in_one": differ_in_one})
