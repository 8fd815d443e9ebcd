"""Weights on their way from the first learner to a rank that only samples."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from test_canary import flags_of

from rl_core import link
from rl_core.link import checksum, in_buckets, make_link
from rl_core.types import RunError


@pytest.fixture
def links():
    """The first learner's, and that of torchrun's rank 1, which samples: two gloo processes in all but their threads."""
    store, made = dist.HashStore(), {}

    def make(rank: int) -> None:
        made[rank] = make_link(store, rank, 2, num_engines=1, device=torch.device("cpu"), timeout_s=60)

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    return made[0], made[1]


def sent(links, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What arrives."""
    learner, engine = links

    def send() -> None:
        with contextlib.suppress(RuntimeError):  # where the other has gone
            learner.send_weights(weights.items(), dtype)

    (sender := threading.Thread(target=send, daemon=True)).start()
    found = {name: value.clone() for name, value in engine.receive_weights()}
    sender.join()
    return found


def some_weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {f"layer.{i}": torch.randn(3 + i, 5, generator=draw) for i in range(7)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_arrives_in_the_dtype_of_compute(links, monkeypatch, dtype):
    monkeypatch.setattr(link, "BUCKET_BYTES", 200)
    weights = some_weights()
    found = sent(links, weights, dtype)
    assert list(found) == list(weights)
    assert all(torch.equal(found[name], value.to(dtype)) for name, value in weights.items())


@pytest.mark.parametrize("how", ["a bit", "places"])
def test_a_bucket_that_changed_on_its_way_is_named(links, monkeypatch, how):
    monkeypatch.setattr(link, "BUCKET_BYTES", 300)
    engine, wait = links[1], type(links[1]).wait

    def receive(self, tensor):
        tensor = wait(self, tensor)
        if self is engine and tensor.is_floating_point() and tensor.numel() == 65:  # layers 3 and 4
            if how == "a bit":
                tensor.view(torch.int32)[17] ^= 1
            else:
                tensor[:2] = tensor[:2].flip(0)
        return tensor

    monkeypatch.setattr(type(engine), "wait", receive)
    named = r"rank 1 received other weights .*: bucket 1, from layer.3 to layer.4, has checksum \w+ instead of \w+;"
    with pytest.raises(RunError, match=named):
        sent(links, some_weights(), torch.float32)


def test_buckets_hold_as_much_as_they_may_and_a_larger_tensor_is_alone(monkeypatch):
    monkeypatch.setattr(link, "BUCKET_BYTES", 100)
    sizes = {"a": 40, "b": 60, "c": 1, "d": 300, "e": 100, "f": 1}
    found = [list(bucket) for bucket in in_buckets((n, torch.zeros(s, dtype=torch.uint8)) for n, s in sizes.items())]
    assert found == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 50])
def test_a_checksum_sees_each_element_and_its_place(monkeypatch, dtype, size):
    monkeypatch.setattr(link, "CHUNK", 8)  # several, the last one not full
    flat = torch.arange(1, size + 1).to(dtype)
    assert checksum(flat) == checksum(flat.clone())
    others = [flat.clone() for _ in range(2 * size)]
    for i in range(size):
        others[i][i] = 0
        others[size + i][[i, (i + 1) % size]] = flat[[(i + 1) % size, i]]
    sums = [checksum(other) for other in others[: size if size == 1 else None]]
    assert checksum(flat) not in sums and len({checksum(flat), checksum(-flat)}) == 2
    assert len(set(sums)) == len(sums) or size == 2  # whose two swaps are one


@pytest.mark.gpu
def test_a_checksum_is_the_same_on_a_gpu():
    for flat in (torch.randn(10_000_003), torch.randn(1_001).bfloat16()):
        assert checksum(flat) == checksum(flat.cuda())


def test_a_bucket_that_changed_ends_both_ranks_of_a_run(tiny_model, torchrun, tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os, sys\n"
        "from rl_core.link import Link\n"
        "from rl_core.train import main\n"
        "wait = Link.wait\n"
        "def receive(self, tensor):\n"
        "    tensor = wait(self, tensor)\n"
        "    if tensor.is_floating_point() and self.is_engine:\n"
        "        tensor[-1] = -tensor[-1]\n"
        "    return tensor\n"
        "Link.wait = receive\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    run = [*flags_of(tiny_model, tmp_path / "run"), "--engine_ranks", "1"]
    done = torchrun(2, tmp_path / "broken.py", *run, check=False, timeout_s=90)
    assert done.returncode and not (tmp_path / "run/metrics.jsonl").exists()
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "rank 1 received other weights than were sent to it: bucket 0, from model." in said[0]
