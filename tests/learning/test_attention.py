"""Packed attention: outputs, gradients, memory and messages, against torch's own attention over
each whole document.

Four ranks are started once; they measure everything for groups of 1, 2 and 4, and the tests read
their results.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit import words
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rl_core.models.attention import AttentionPlan, attention_forward
from rl_core.models.kernels import cpu_attention, gpu_attention
from rl_core.models.kernels.gpu_attention import TORCH, find_kernel, import_error
from rl_core.models.kernels.segments import Kernel
from rl_core.models.parallel.context_parallel import RingPlan

SIZES = (1, 2, 4)
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (3, 1)}
LENGTHS = [3, 21, 1, 16, 7, 21, 0, 5]  # four ranks pad each to a multiple of 8
WINDOWS = (1, 3, 6, 20, 1000)
SCALE = 0.3
# Lengths of pieces, and which of them each follows: two trees of one level, two of three, and what
# follows nothing.
FAMILIES = (
    [5, 17, 2, 9, 12, 3, 0, 30, 1, 4, 2, 6, 3, 1, 8, 5],
    [-1, -1, -1, -1, -1, 2, 3, 3, 4, 4, 5, 7, 7, 9, 11, 11],
)


@dataclass
class Shard:
    """One rank's shard of documents of these lengths: local starts, each local token's position,
    and which token it is."""

    cu_seqlens: Tensor
    positions: Tensor  # [T] in its document
    tokens: Tensor  # [T] of all documents one after the other; -1 is padding

    @property
    def is_real(self) -> Tensor:
        return self.tokens >= 0

    def of(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """This rank's part; `padding` is what stands in padded places."""
        values = x[self.tokens.clamp(min=0)].clone()
        values[~self.is_real] = padding
        return values

    def plan(self, group) -> AttentionPlan:
        device = torch.device("cpu")
        if group.size() > 1:
            return RingPlan(self.cu_seqlens, TORCH, device, group)
        return AttentionPlan(self.cu_seqlens, [-1] * (len(self.cu_seqlens) - 1), TORCH, device)


def shard(lengths: list[int], rank: int, size: int) -> Shard:
    positions, tokens, starts, begin = [], [], [0], 0
    for length in lengths:
        chunk = -(-length // (2 * size))
        for i in (rank, 2 * size - 1 - rank):
            positions_of_chunk = torch.arange(i * chunk, (i + 1) * chunk)
            positions.append(positions_of_chunk)
            tokens.append(torch.where(positions_of_chunk < length, begin + positions_of_chunk, -1))
        starts.append(starts[-1] + 2 * chunk)
        begin += length
    return Shard(torch.tensor(starts, dtype=torch.int32), torch.cat(positions), torch.cat(tokens))


def whole_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[T, H, D]: torch's attention with a mask of [T, T]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, seen, scale=SCALE, enable_gqa=True)[0].transpose(
        0, 1
    )


def seen_tokens(
    lengths: list[int], parents: list[int] | None = None, window: int | None = None
) -> Tensor:
    """[T, T] bool: which tokens each token of these pieces sees."""
    parents = parents or [-1] * len(lengths)
    related, before = torch.eye(len(lengths), dtype=torch.bool), []
    for number, parent in enumerate(parents):
        if parent >= 0:
            related[number] |= related[parent]
        before.append(sum(lengths[n] for n in range(number) if related[number, n]))
    piece = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(p, p + n) for p, n in zip(before, lengths, strict=True)])
    is_related = related[piece][:, piece]
    distance = position[:, None] - position
    return is_related & (distance >= 0) & (distance < (window or len(position) + 1))


def make_inputs(
    lengths: list[int], heads: tuple[int, int], dtype=torch.float64, dim: int = 8
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(sum(lengths) + sum(heads))
    num, groups = heads
    return [
        torch.randn(sum(lengths), h, dim, generator=generator).to(dtype)
        for h in (num, groups, groups, num)
    ]


def packed_attention(q, k, v, plan, **kwargs) -> Tensor:
    return plan.attend(q, k, v, **kwargs)


def results(attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    qkv = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*qkv)
    assert out.dtype == q.dtype
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def reference(
    inputs: list[Tensor], lengths: list[int], window: int | None = None, parents=None
) -> list[Tensor]:
    seen = seen_tokens(lengths, parents, window)
    return results(partial(whole_attention, seen=seen), *(x.double() for x in inputs))


def error(mine: Tensor, right: Tensor) -> float:
    """The largest difference; not a number is a large one."""
    return (mine.cpu().double() - right).abs().max().nan_to_num(1e9).item()


def ring_errors(
    inputs: list[Tensor], lengths: list[int], group, window=None, attend=packed_attention
) -> dict:
    """Errors of the output and gradients of this rank's tokens, and the gradient of padding."""
    mine = shard(lengths, group.rank(), group.size())
    # Padded positions may hold any finite value; only their output's gradient is
    # none.
    q, k, v, dout = *(mine.of(x, padding=7.0) for x in inputs[:3]), mine.of(inputs[3])
    call = partial(attend, plan=mine.plan(group), scale=SCALE, window=window)
    computed = results(call, q, k, v, dout)
    right, real = reference(inputs, lengths, window), mine.is_real
    worst = {
        name: error(x[real], mine.of(y)[real])
        for name, x, y in zip("oqkv", computed, right, strict=True)
    }
    return worst | {"padding": max(x[~real].abs().sum().item() for x in computed[1:])}


def through_checkpoint(*args, plan, **kwargs):
    plan.kept = {}
    kwargs["plan"] = plan
    # A product after it, so that recomputing may not end with the attention's forward.
    return checkpoint(lambda *x: packed_attention(*x, **kwargs) * 1.0, *args, use_reentrant=False)


def measure_memory(group) -> dict:
    """Bytes that autograd keeps, and the most that live at once in forward and backward."""
    lengths = [256, 240, 64, 64]  # two of them are padded to one length
    mine = shard(lengths, group.rank(), group.size())
    inputs = [mine.of(x) for x in make_inputs(lengths, (4, 2), dim=16)]
    saved = {"ring": 0, "window": 0}
    for name, window in (("ring", None), ("window", 20)):

        def count(x, name=name):
            saved[name] += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            results(
                partial(packed_attention, plan=mine.plan(group), scale=SCALE, window=window),
                *inputs,
            )
    with MemTracker() as tracker:
        results(
            partial(packed_attention, plan=mine.plan(group), scale=SCALE),
            *[x.clone() for x in inputs],
        )
    peak = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    return saved | {"peak": peak}


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


def measure(path: str) -> None:
    """Runs on every rank and writes the largest error of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    errors: dict[str, dict] = {}
    for size in SIZES:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)]
        group = groups[dist.get_rank() // size]
        gqa = HEADS["gqa"]
        for name, heads in HEADS.items():
            for window in (None, *WINDOWS):
                errors[f"exact/{name}/{window}/{size}"] = ring_errors(
                    make_inputs(LENGTHS, heads), LENGTHS, group, window
                )
        errors[f"exact/one document/{size}"] = ring_errors(make_inputs([30], gqa), [30], group)
        for window in (None, 6):
            inputs = make_inputs(LENGTHS, gqa)
            errors[f"exact/recomputed/{window}/{size}"] = ring_errors(
                inputs, LENGTHS, group, window, through_checkpoint
            )
            inputs = make_inputs(LENGTHS, gqa, torch.float32)
            errors[f"float32/{window}/{size}"] = ring_errors(inputs, LENGTHS, group, window)
        low = make_inputs([40, 9, 120], gqa, torch.bfloat16)
        errors[f"bfloat16/{size}"] = ring_errors(low, [40, 9, 120], group)
        errors[f"memory/{size}"] = measure_memory(group)
        errors[f"messages/{size}"] = {"left": marker_is_next(group)}
    everyone = [None] * 4
    dist.all_gather_object(everyone, errors)
    if dist.get_rank() == 0:
        worst = {
            key: {n: max(each[key][n] for each in everyone) for n in errors[key]} for key in errors
        }
        Path(path).write_text(json.dumps(worst))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(torchrun, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("ring") / "errors.json"
    torchrun(4, __file__, path)
    return json.loads(path.read_text())


def worst(measured: dict, start: str) -> dict[str, float]:
    largest = {
        key: max(values.values()) for key, values in measured.items() if key.startswith(start)
    }
    assert largest, start
    return largest


def test_ring_attention_equals_whole_attention_and_its_gradients(
    measured,
):
    assert len(worst(measured, "exact/")) == 3 * (3 * 6 + 3)
    assert {key: x for key, x in worst(measured, "exact/").items() if x >= 1e-13} == {}
    assert {key: x for key, x in worst(measured, "float32/").items() if x >= 2e-6} == {}


def test_bfloat16_is_as_near_as_attention_that_is_not_cut(measured):
    low = make_inputs([40, 9, 120], HEADS["gqa"], torch.bfloat16)
    rounded = [[], [], [], []]
    for parts in zip(*(x.split([40, 9, 120]) for x in low), strict=True):
        one = results(partial(whole_attention, seen=seen_tokens([len(parts[0])])), *parts)
        for total, x in zip(rounded, one, strict=True):
            total.append(x)
    right = reference(low, [40, 9, 120])
    for size in SIZES:
        for name, x, y in zip("oqkv", rounded, right, strict=True):
            assert measured[f"bfloat16/{size}"][name] < 1.5 * error(torch.cat(x), y), (name, size)


def test_what_a_rank_keeps_falls_with_the_number_of_ranks(measured):
    memory = {size: measured[f"memory/{size}"] for size in SIZES}
    for size in SIZES:
        assert memory[size]["ring"] * size == memory[1]["ring"]
        assert memory[size]["window"] * size == memory[1]["window"]
    # A quarter, and one rank's keys and gradients in transit next to the local ones, never
    # those of all. A single rank copies nothing.
    assert memory[4]["peak"] < 0.5 * memory[1]["peak"], memory
    assert memory[2]["peak"] < 0.85 * memory[1]["peak"], memory


def test_no_message_is_left_between_ranks(measured):
    assert max(worst(measured, "messages/").values()) == 0


def family_plan(device: str = "cpu", kernel: str = "auto"):
    starts = torch.tensor([0, *FAMILIES[0]]).cumsum(0)
    device = torch.device(device)
    return AttentionPlan(starts, FAMILIES[1], find_kernel(kernel, device), device)


# Places of images, whose tokens see the image's later ones.
BLOCKS = [np.arange(1, 4), np.arange(6, 20), np.arange(24, 31), np.array([90])]


@pytest.mark.parametrize("window", [None, *WINDOWS])
@pytest.mark.parametrize("in_full_attention", [True, False])
def test_a_block_sees_its_later_tokens_in_the_layers_that_are_named(window, in_full_attention):
    inputs, plan = make_inputs(FAMILIES[0], HEADS["gqa"]), family_plan()
    plan.see_ahead(BLOCKS, in_full_attention)
    seen = seen_tokens(FAMILIES[0], FAMILIES[1], window)
    for block in BLOCKS if in_full_attention or window else ():
        seen[block[0] : block[-1] + 1, block[0] : block[-1] + 1].logical_or_(
            torch.ones(len(block), len(block)).triu().bool()
        )
    computed = results(partial(packed_attention, plan=plan, scale=SCALE, window=window), *inputs)
    wanted = results(partial(whole_attention, seen=seen), *inputs)
    assert max(map(error, computed, wanted)) < 1e-13


def family_errors(heads, window, dtype=torch.float64, device="cpu", dim=8, kernel="auto") -> float:
    inputs = make_inputs(FAMILIES[0], heads, dtype, dim)
    attend = partial(packed_attention, plan=family_plan(device, kernel), scale=SCALE, window=window)
    computed = results(attend, *(x.to(device) for x in inputs))
    return max(map(error, computed, reference(inputs, FAMILIES[0], window, FAMILIES[1])))


@pytest.mark.parametrize("window", [None, *WINDOWS])
@pytest.mark.parametrize("heads", HEADS)
def test_a_shared_piece_is_seen_by_all_that_follows_it_and_by_nothing_else(heads, window):
    assert family_errors(HEADS[heads], window) < 1e-13
    assert family_errors(HEADS[heads], window, torch.float32) < 2e-6


@pytest.mark.parametrize("window", [None, 6])
def test_attention_written_out_for_what_has_no_fused_kernel_gives_the_same(window, monkeypatch):
    monkeypatch.setattr(cpu_attention, "is_fused", lambda q, cap: False)
    for heads in HEADS.values():
        assert family_errors(heads, window) < 1e-13
    assert family_errors(HEADS["gqa"], window, torch.bfloat16) < 0.05


@pytest.mark.parametrize("modules, num_computed", [((1, 2, 3), 3), ((1, 1, 2), 5)])
def test_recomputed_activations_take_attention_from_the_forward(modules, num_computed):
    """Except of a module that the forward calls twice."""
    calls = []

    def forward(*args):
        calls.append(args)
        return TORCH.forward(*args)

    plan = family_plan()
    plan.kernel = Kernel(forward=forward, backward=TORCH.backward)

    def layers(run, *qkv: Tensor) -> Tensor:
        q, k, v = qkv
        for module in modules:
            attend = partial(plan.attend, scale=SCALE, module=module)
            q = run(lambda *x, attend=attend: 2 * attend(x[0].cos(), *x[1:]), q, k, v)
        return q

    inputs = make_inputs(FAMILIES[0], HEADS["gqa"])
    right = results(partial(layers, lambda layer, *x: layer(*x)), *inputs)
    num_segments = len(calls) // len(modules)
    calls.clear()
    plan.kept = {}
    computed = results(partial(layers, partial(checkpoint, use_reentrant=False)), *inputs)
    assert max(map(error, computed, right)) == 0 and not any(plan.kept.values())
    assert len(calls) == num_computed * num_segments


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_sinks_and_caps_are_those_of_transformers_own_attention(name, window):
    eager = import_module(f"transformers.models.{name}.modeling_{name}").eager_attention_forward
    sinks, heads = torch.linspace(-1, 2, 4).requires_grad_(), HEADS["gqa"]
    changes, learned = ({"s_aux": sinks}, [sinks]) if name == "gpt_oss" else ({"softcap": 0.7}, [])
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    *qkv, dout = (x.transpose(0, 1)[None] for x in make_inputs(FAMILIES[0], heads, torch.float32))
    hidden = torch.zeros(1).masked_fill(~seen_tokens(*FAMILIES, window), -torch.inf)[None, None]
    computed = []
    for attend, mask in ((eager, hidden), (attention_forward, None)):
        ours = {"sliding_window": window, "attention_plan": family_plan()} if mask is None else {}
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attend(module, *leaves, mask, scaling=1.3, **changes, **ours)[0]
        computed.append(
            [out.detach(), *torch.autograd.grad(out, leaves + learned, dout.transpose(1, 2))]
        )
    assert len(computed[0]) == 4 + len(learned)
    assert max(map(error, computed[1], (x.double() for x in computed[0]))) < 1e-4


def blocks_of(lengths: list[int]) -> cpu_attention.Layout:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    plan = AttentionPlan(starts, [-1] * len(lengths), TORCH, torch.device("cpu"))
    return cpu_attention.layout_of(plan.causal)


def test_many_short_pieces_share_blocks_in_which_little_is_padding():
    lengths = torch.randint(1, 60, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    layout = blocks_of(lengths)
    assert sum(num for num, _, _ in layout.blocks) == 300 and len(layout.blocks) < 20
    padded = sum(num * queries**2 for num, queries, _ in layout.blocks)
    assert padded < 1.25 * sum(length**2 for length in lengths)


def test_neighbours_of_one_length_stand_together_without_a_copy():
    layout = blocks_of([90, 200, 120, 120, 160])
    assert layout.blocks == [(1, 90, 90), (1, 200, 200), (2, 120, 120), (1, 160, 160)]
    assert layout.tokens is None


def test_queries_below_shared_pieces_are_slices_that_cost_no_copy():
    levels = [segments.q_rows for segments in family_plan().segments]
    total = sum(FAMILIES[0])
    assert levels == [slice(0, total), slice(45, total), slice(83, total), slice(95, total)]


@pytest.mark.parametrize("window", [None, 4])
def test_torch_takes_what_its_flash_kernels_are_given(window):
    # Shapes only: it needs no GPU to see that arguments and the layout of the log-sum-exp are
    # unchanged.
    num = sum(FAMILIES[0])
    q, k = (torch.empty(num, h, 16, dtype=torch.bfloat16, device="meta") for h in (4, 2))
    attend = partial(packed_attention, plan=family_plan("meta"), scale=SCALE, window=window)
    assert [x.shape for x in results(attend, q, k, k, q)] == [q.shape, q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kernel", ["torch", "flash_attn"])
def test_kernels_of_a_gpu_give_what_whole_attention_does(kernel, window):
    if kernel == "flash_attn":
        pytest.importorskip("flash_attn.flash_attn_interface")
    for heads in HEADS.values():
        of_rounding = family_errors(heads, window, torch.bfloat16, "cpu", 64)
        # These kernels round probabilities too; a wrong result is off by far more.
        assert family_errors(heads, window, torch.bfloat16, "cuda", 64, kernel) < 3 * of_rounding
    assert family_errors(HEADS["gqa"], window, torch.float32, "cuda", 64) < 1e-4


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(files) puts a folder flash_attn with these files first on the path; until the end of
    the test."""

    def make(files: dict[str, str]) -> None:
        for name in ("flash_attn", "flash_attn/cute"):
            (tmp_path / "site" / name).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / "site/flash_attn" / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "site")

    before = {name for name in sys.modules if name.partition(".")[0] == "flash_attn"}
    if before:
        pytest.skip("flash_attn is imported already")
    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


FLASH_ATTN_2 = {
    "__init__.py": "",
    "flash_attn_interface.py": "_flash_attn_varlen_forward = _flash_attn_varlen_backward = print",
}


@pytest.mark.parametrize(
    "files, kernel",
    [
        ({}, "TORCH"),  # A removed library leaves an empty folder.
        ({"cute/__init__.py": ""}, "TORCH"),  # flash-attn-4, which SGLang requires
        ({"__init__.py": "import flash_attn_2_cuda"}, "TORCH"),  # built for another torch
        # Without the functions that are used.
        ({"__init__.py": "", "flash_attn_interface.py": ""}, "TORCH"),
        (FLASH_ATTN_2, "FLASH_ATTN"),
    ],
)
def test_auto_takes_flash_attn_only_if_what_is_used_of_it_imports(files, kernel, install):
    install(files)
    assert find_kernel("auto", torch.device("cuda")) is getattr(gpu_attention, kernel)
    assert find_kernel("auto", torch.device("cpu")) is gpu_attention.TORCH
    if kernel == "TORCH":
        with pytest.raises(
            ValueError, match="--attention=flash_attn needs flash_attn, which does not import here"
        ):
            find_kernel("flash_attn", torch.device("cuda"))


@pytest.mark.skipif(not import_error(), reason="flash_attn imports here")
def test_a_kernel_whose_library_does_not_import_is_refused(tiny_model, tmp_path, capfd):
    from rl_core.train import main

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1", "response": "2"}))
    flags = words(
        "--algorithm sft --data.train", rows, "--out", tmp_path / "run", "--attention flash_attn"
    )
    assert main(["--model", str(tiny_model), *flags]) != 0
    printed = capfd.readouterr().err
    assert (
        "--attention=flash_attn needs flash_attn, which does not import here (ModuleNotFoundError"
        in printed
    )


if __name__ == "__main__":
    measure(sys.argv[1])
