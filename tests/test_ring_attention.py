"""Ring attention: outputs, gradients, memory and messages, against attention written out for each whole document.

Four ranks are started once; they measure everything for groups of 1, 2 and 4, and the tests read their results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from rl_core.learning.block_kernels import KERNELS, kernel_name, make_pairs
from rl_core.learning.ring_attention import (
    NAME,
    attend,
    block_gradients,
    make_ring,
    ring_attention,
    ring_attention_forward,
    window_pairs,
)

SIZES = (1, 2, 4)
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (3, 1)}
LENGTHS = [3, 21, 1, 16, 7, 21, 0, 5]  # four ranks pad each to a multiple of 8
WINDOWS = (1, 3, 6, 20, 1000)
SCALE = 0.3
ARCHITECTURES = ("qwen3", "qwen2", "llama")


@dataclass
class Shard:
    """What one rank holds of documents of these lengths: local starts, each local token's place, and which token it is."""

    cu_seqlens: Tensor
    positions: Tensor  # [T] in its document
    tokens: Tensor  # [T] of all documents one after the other; -1 is padding

    @property
    def is_real(self) -> Tensor:
        return self.tokens >= 0

    def of(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """This rank's part; `padding` is what stands in padded places."""
        part = x[self.tokens.clamp(min=0)].clone()
        part[~self.is_real] = padding
        return part


def shard(lengths: list[int], rank: int, size: int) -> Shard:
    positions, tokens, starts, begin = [], [], [0], 0
    for length in lengths:
        chunk = -(-length // (2 * size))
        for i in (rank, 2 * size - 1 - rank):
            place = torch.arange(i * chunk, (i + 1) * chunk)
            positions.append(place)
            tokens.append(torch.where(place < length, begin + place, -1))
        starts.append(starts[-1] + 2 * chunk)
        begin += length
    return Shard(torch.tensor(starts, dtype=torch.int32), torch.cat(positions), torch.cat(tokens))


def full_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None = None) -> Tensor:
    """[T, H, D]: softmax over each document, written out."""
    outs = []
    for q_n, k_n, v_n in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        k_n, v_n = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k_n, v_n))
        scores = torch.einsum("qhd,khd->hqk", q_n, k_n) * SCALE
        distance = torch.arange(len(q_n))[:, None] - torch.arange(len(q_n))
        is_hidden = (distance < 0) | (distance >= (window or len(q_n) + 1))
        probs = scores.masked_fill(is_hidden.to(scores.device), -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", probs, v_n))
    return torch.cat(outs)


def make_inputs(lengths: list[int], heads: tuple[int, int], dtype=torch.float64, dim: int = 8) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(sum(lengths) + sum(heads))
    num, groups = heads
    return [torch.randn(sum(lengths), h, dim, generator=generator).to(dtype) for h in (num, groups, groups, num)]


def reference(inputs: list[Tensor], lengths: list[int], window: int | None = None) -> list[Tensor]:
    """The output and the gradients of q, k and v, in float64."""
    *qkv, dout = (x.double() for x in inputs)
    qkv = [x.requires_grad_() for x in qkv]
    out = full_attention(*qkv, lengths, window)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in qkv)]


def error(mine: Tensor, right: Tensor) -> float:
    """The largest difference; not a number is a large one."""
    return (mine.double() - right).abs().max().nan_to_num(1e9).item()


def ring_errors(inputs: list[Tensor], lengths: list[int], group, window=None, call: Callable | None = None) -> dict:
    """How far output and gradients of this rank's tokens are off, and what gradient padding has."""
    mine = shard(lengths, group.rank(), group.size())
    # What stands in padded places may be anything that is finite; only its output's gradient is none.
    q, k, v = (mine.of(x, padding=7.0).requires_grad_() for x in inputs[:3])
    ring = make_ring(mine.cu_seqlens, group, torch.device("cpu"))
    out = (call or ring_attention)(q, k, v, ring, SCALE, window)
    assert out.dtype == q.dtype
    out.backward(mine.of(inputs[3]))
    results = {}
    for name, value, right in zip(
        "oqkv", (out, q.grad, k.grad, v.grad), reference(inputs, lengths, window), strict=True
    ):
        results[name] = error(value[mine.is_real], mine.of(right)[mine.is_real])
    results["padding"] = max(x.grad[~mine.is_real].abs().sum().item() for x in (q, k, v))
    return results


def through_checkpoint(*args):
    # A product after it, so that recomputing may not end with the attention's forward.
    return checkpoint(lambda *x: ring_attention(*x) * 1.0, *args, use_reentrant=False)


def measure_memory(group) -> dict:
    """Bytes that autograd keeps, and the most that live at once in forward and backward."""
    lengths = [256, 64, 64, 128]
    mine = shard(lengths, group.rank(), group.size())
    q, k, v, dout = (mine.of(x) for x in make_inputs(lengths, (4, 2), dim=16))
    saved = {"ring": 0, "window": 0}
    for name, window in (("ring", None), ("window", 20)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        ring = make_ring(mine.cu_seqlens, group, torch.device("cpu"))

        def count(x, name=name):
            saved[name] += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            ring_attention(*inputs, ring, SCALE, window).backward(dout)
    tracker = MemTracker()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with tracker:
        ring_attention(*inputs, make_ring(mine.cu_seqlens, group, torch.device("cpu")), SCALE).backward(dout)
    peak = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    return {"ring": saved["ring"], "window": saved["window"], "peak": peak}


def marker_is_next(group) -> float:
    """0 if nothing was left between the ranks: a message sent now is the next that arrives."""
    if group.size() == 1:
        return 0.0
    marker, got = torch.full((5,), float(group.rank())), torch.full((5,), -1.0)
    to, source = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    works = [dist.P2POp(dist.isend, marker, group=group, group_peer=to)]
    works.append(dist.P2POp(dist.irecv, got, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(works):
        work.wait(timedelta(seconds=20))
    return (got - source).abs().max().item()


def tiny_model(arch: str, implementation: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    if arch == "qwen2":
        layers = ["sliding_attention", "full_attention"]
        more |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "layer_types": layers}
    torch.manual_seed(0)
    config = AutoConfig.for_model(arch, **sizes, **more, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()


def model_errors(arch: str, group, is_checkpointed: bool) -> dict:
    """Logits of this rank's tokens, and gradients summed over the group, against one document at a time."""
    lengths = [n for n in LENGTHS if n]
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(40, (sum(lengths),), generator=generator)
    weights = torch.randn(sum(lengths), 40, generator=generator, dtype=torch.float64)
    whole, model = tiny_model(arch, "sdpa"), tiny_model(arch, NAME)
    logits = torch.cat([whole(input_ids=x[None], use_cache=False).logits[0] for x in input_ids.split(lengths)])
    (logits * weights).sum().backward()

    if is_checkpointed:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mine = shard(lengths, group.rank(), group.size())
    ring = make_ring(mine.cu_seqlens, group, torch.device("cpu"))
    local = model(
        input_ids=mine.of(input_ids)[None], position_ids=mine.positions[None], use_cache=False, ring=ring
    ).logits[0]
    (local * mine.of(weights)).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(grads, group=group)
    right = torch.cat([p.grad.flatten() for p in whole.parameters()])
    is_real = mine.is_real
    return {
        "logits": error(local[is_real], logits.detach()[mine.tokens[is_real]]),
        "grads": error(grads, right) / right.abs().max().item(),
    }


def bf16_error_of_one(inputs: list[Tensor], lengths: list[int]) -> dict:
    """The same of torch's own attention in bfloat16 on whole documents."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    outs = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        if len(parts[0]):
            dense = [x.transpose(0, 1)[None] for x in parts]
            out = torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, scale=SCALE, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
    torch.cat(outs).backward(inputs[3])
    values = torch.cat(outs), q.grad, k.grad, v.grad
    return {n: error(x, y) for n, x, y in zip("oqkv", values, reference(inputs, lengths), strict=True)}


def measure(path: str) -> None:
    """What every rank runs; the worst of all ranks is written."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = {}
    for size in SIZES:
        for first in range(0, 4, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= dist.get_rank() < first + size:
                groups[size] = group
    found: dict[str, dict] = {}
    for size, group in groups.items():
        for name, heads in HEADS.items():
            found[f"full/{name}/{size}"] = ring_errors(make_inputs(LENGTHS, heads), LENGTHS, group)
            for window in WINDOWS:
                found[f"window{window}/{name}/{size}"] = ring_errors(
                    make_inputs(LENGTHS, heads), LENGTHS, group, window
                )
        gqa = HEADS["gqa"]
        found[f"one_document/gqa/{size}"] = ring_errors(make_inputs([30], gqa), [30], group)
        found[f"float32/gqa/{size}"] = ring_errors(make_inputs(LENGTHS, gqa, torch.float32), LENGTHS, group)
        found[f"float32_window/gqa/{size}"] = ring_errors(make_inputs(LENGTHS, gqa, torch.float32), LENGTHS, group, 6)
        low = make_inputs([40, 9, 120], gqa, torch.bfloat16)
        found[f"bfloat16/gqa/{size}"] = ring_errors(low, [40, 9, 120], group)
        found[f"bfloat16_of_one/gqa/{size}"] = bf16_error_of_one(low, [40, 9, 120])
        for window in (None, 6):
            found[f"checkpoint{window}/gqa/{size}"] = ring_errors(
                make_inputs(LENGTHS, gqa), LENGTHS, group, window, through_checkpoint
            )
        for arch in ARCHITECTURES:
            for is_checkpointed in (False, True):
                found[f"model/{arch}/{is_checkpointed}/{size}"] = model_errors(arch, group, is_checkpointed)
        found[f"memory/{size}"] = measure_memory(group)
        found[f"messages/{size}"] = {"left": marker_is_next(group)}
    everyone = [None] * 4
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        worst = {key: {n: max(each[key][n] for each in everyone) for n in found[key]} for key in found}
        Path(path).write_text(json.dumps(worst))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(torchrun, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("ring") / "errors.json"
    torchrun(4, __file__, path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", ["full", *(f"window{w}" for w in WINDOWS)])
def test_outputs_and_gradients_are_those_of_full_attention(measured, case, heads, size):
    assert max(measured[f"{case}/{heads}/{size}"].values()) < 1e-13


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["one_document", "checkpointNone", "checkpoint6"])
def test_a_single_document_and_recomputed_attention_are_exact_too(measured, case, size):
    assert max(measured[f"{case}/gqa/{size}"].values()) < 1e-13


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["float32", "float32_window"])
def test_float32_is_exact_to_rounding(measured, case, size):
    assert max(measured[f"{case}/gqa/{size}"].values()) < 2e-6


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_is_as_near_as_attention_that_is_not_cut(measured, size):
    ring, one = measured[f"bfloat16/gqa/{size}"], measured[f"bfloat16_of_one/gqa/{size}"]
    for name, value in one.items():
        assert ring[name] < 1.5 * value, (name, ring, one)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_cut_over_ranks_has_the_logits_and_gradients_of_a_whole_one(measured, arch, is_checkpointed, size):
    assert max(measured[f"model/{arch}/{is_checkpointed}/{size}"].values()) < 1e-6


def test_what_a_rank_keeps_falls_with_the_number_of_ranks(measured):
    memory = {size: measured[f"memory/{size}"] for size in SIZES}
    for size in SIZES:
        assert memory[size]["ring"] * size == memory[1]["ring"]
        assert memory[size]["window"] * size == memory[1]["window"]
    # A quarter, and what is in transit: beside its own, one rank's keys and their gradient, never those of all.
    assert memory[4]["peak"] < 0.38 * memory[1]["peak"], memory
    assert memory[2]["peak"] < 0.68 * memory[1]["peak"], memory


@pytest.mark.parametrize("size", SIZES)
def test_no_message_is_left_between_ranks(measured, size):
    assert measured[f"messages/{size}"]["left"] == 0


def simulated_errors(
    size: int, heads: tuple[int, int], dtype, backend: str | None = None, device="cpu", dim=8, window=None
) -> dict:
    """Errors when one process computes the blocks of all ranks: what the ring does, without its messages."""
    lengths = [3, 21, 1, 130, 21, 64]
    inputs, shards = make_inputs(lengths, heads, dtype, dim), [shard(lengths, rank, size) for rank in range(size)]
    local = [[s.of(x).to(device) for x in inputs] for s in shards]
    kvs = torch.stack([torch.stack((k, v), 1) for _, k, v, _ in local])
    dkvs = torch.zeros_like(kvs, dtype=torch.float64)
    kernel = KERNELS[kernel_name(kvs, backend)]
    found = dict.fromkeys("oqkv", 0.0)

    def compare(name, mine, value, right):
        found[name] = max(found[name], error(value.cpu()[mine.is_real], mine.of(right)[mine.is_real]))

    right = reference(inputs, lengths, window)
    for rank, (q, _, _, dout) in enumerate(local):
        ring = replace(make_ring(shards[rank].cu_seqlens, None, torch.device(device)), rank=rank, size=size)
        dq = torch.zeros_like(q, dtype=torch.float64)
        if window is None:
            sources = [((rank - step) % size, kvs[(rank - step) % size]) for step in range(size)]
            out, lse = attend(q, sources, ring, kernel, SCALE)
            for source, kv in sources:
                dq_part, dkv_part = block_gradients(dout, q, kv, out, lse, source, ring, kernel, SCALE)
                _, q_rows, k_rows = ring.block(source)
                dq[q_rows] += dq_part
                dkvs[source][k_rows] += dkv_part
        else:
            pairs, rows = window_pairs(ring, window)
            near = kvs.flatten(0, 1)[rows].unbind(1)
            out, lse = kernel.forward(q, *near, pairs, SCALE)
            dq_part, *dkv_part = kernel.backward(dout, q, *near, out, lse, pairs, SCALE)
            dq += dq_part
            dkvs.flatten(0, 1).index_add_(0, rows, torch.stack(dkv_part, 1).double())
        compare("o", shards[rank], out, right[0])
        compare("q", shards[rank], dq, right[1])
    for mine, dkv in zip(shards, dkvs, strict=True):
        compare("k", mine, dkv[:, 0], right[2])
        compare("v", mine, dkv[:, 1], right[3])
    return found


@pytest.mark.parametrize("window", [None, 6, 100])
@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_each_kernel_gives_what_full_attention_does(backend, window):
    for heads in HEADS.values():
        assert max(simulated_errors(4, heads, torch.float64, backend, window=window).values()) < 1e-12
    errors = simulated_errors(4, HEADS["gqa"], torch.bfloat16, backend, window=window)
    assert max(errors.values()) < 0.05, errors


@pytest.mark.parametrize("window", [None, 4])
def test_torch_takes_what_its_flash_kernels_are_given(window):
    # Shapes only: it needs no GPU to see that arguments and the layout of the log-sum-exp still are what they were.
    q, k = (torch.empty(n, h, 16, dtype=torch.bfloat16, device="meta") for n, h in ((8, 4), (11, 2)))
    pairs = make_pairs([3, 5], [6, 5], "meta", is_causal=window is not None, window=window)
    kernel = KERNELS["torch"]
    out, lse = kernel.forward(q, k, k, pairs, SCALE)
    grads = kernel.backward(out, q, k, k, out, lse, pairs, SCALE)
    assert [x.shape for x in (out, lse, *grads)] == [q.shape, (4, 8), q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6, 100])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["torch", "flash_attn", "math"])
def test_kernels_of_a_gpu_give_what_full_attention_does(backend, size, window):
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
    for heads in HEADS.values():
        errors = simulated_errors(size, heads, torch.bfloat16, backend, "cuda", 64, window)
        of_rounding = simulated_errors(1, heads, torch.bfloat16, "math", "cpu", 64, window)
        # These kernels round probabilities too; what is wrong is wrong by far more.
        assert max(errors.values()) < 3 * max(of_rounding.values()), (errors, of_rounding)
    if backend == "math":
        assert max(simulated_errors(size, HEADS["gqa"], torch.float64, None, "cuda", 64, window).values()) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_ring_of_one_gpu_gives_what_full_attention_does(dtype, window):
    inputs, lengths = make_inputs([40, 9, 120], HEADS["gqa"], dtype, 64), [40, 9, 120]
    mine = shard(lengths, 0, 1)
    q, k, v = (mine.of(x).cuda().requires_grad_() for x in inputs[:3])
    ring_attention(q, k, v, make_ring(mine.cu_seqlens, None, q.device), SCALE, window).backward(
        mine.of(inputs[3]).cuda()
    )
    for x, right in zip((q, k, v), reference(inputs, lengths, window)[1:], strict=True):
        assert error(x.grad.cpu()[mine.is_real], right) < (0.2 if dtype == torch.bfloat16 else 1e-4)


def test_what_it_cannot_do_is_refused():
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="backend='flash' is unknown"):
        make_ring(cu_seqlens, None, torch.device("cpu"), backend="flash")
    ring, x = make_ring(cu_seqlens, None, torch.device("cpu")), torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="softcap"):
        ring_attention_forward(None, x, x, x, None, ring=ring, softcap=50.0)
    with pytest.raises(ValueError, match="dropout"):
        ring_attention_forward(None, x, x, x, None, dropout=0.1, ring=ring)


if __name__ == "__main__":
    measure(sys.argv[1])
