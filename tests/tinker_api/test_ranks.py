"""Adapters on two ranks compute what one rank does: rank 0 calls, the other follows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bodies import forward_backward, row
from test_multi_lora import ADAM, LORA, new_lora, read_output, rows

from rl_core.distributed import close_ranks
from rl_core.tinker.multi_lora import MultiLora
from rl_core.types import RunError


def requests(lora: MultiLora) -> list[float]:
    """Losses of three steps, the last of a single row, logprobs of a row, and sums of the adapter's matrices."""
    lora.call("create", name="model0", lora=LORA, seed=3)
    values = []
    for step in range(3):
        for seed in (step, step + 9):
            num = 5 if step < 2 else 1  # The other rank has none.
            body = forward_backward(map(row, rows(num, seed)))
            output = lora.call("forward_backward", name="model0", body=body)
            logprobs, metrics = read_output(output)
            assert [len(x) for x in logprobs] == [len(ids) - 1 for ids in rows(num, seed)]
            values += [metrics["loss:sum"], float(logprobs[-1][-1])]
        lora.call("optim_step", name="model0", params=ADAM)
    values += lora.call("logprobs", ids=rows(1)[0], snapshot="").tolist()
    for value in lora.call("weights", name="model0").values():
        values.append(float(value.double().sum()))
    try:
        lora.call("forward_backward", name="model0", body=forward_backward([row([8, 900])]))
    except ValueError:
        values.append(1.0)
    lora.call("end")
    return values


def test_two_ranks_learn_what_one_does(tiny_model, torchrun, tmp_path):
    torchrun(2, __file__, tiny_model, tmp_path / "two.json")
    for rank in range(2):
        assert "alone refused the request: rank=4 is" in (tmp_path / f"two.json.{rank}").read_text()
    one, two = requests(new_lora(tiny_model)), json.loads((tmp_path / "two.json").read_text())
    assert len(one) == len(two)
    assert all(abs(a - b) <= 1e-4 + 1e-5 * abs(a) for a, b in zip(one, two, strict=True))


def main(model: str, file: str) -> None:
    lora = new_lora(model)
    if lora.ranks.rank == 0:
        with open(file, "w") as out:
            json.dump(requests(lora), out)
    else:
        lora.follow()
        lora.max_rank = 3  # As if it had other flags.
    try:
        if lora.ranks.rank == 0:
            lora.call("create", name="model0", lora=LORA, seed=3)
            lora.call("end")  # Not reached.
        else:
            lora.follow()
    except RunError as error:
        Path(f"{file}.{lora.ranks.rank}").write_text(str(error))
    close_ranks(lora.ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
