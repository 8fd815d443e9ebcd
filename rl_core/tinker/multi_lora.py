"""LoRA adapters of clients over one frozen model, and the methods that requests call.

Every adapter has the largest rank and a product with the head. Rows of A and columns of B that a
client did not ask for are 0, and so are their gradients: they stay 0. Rank 0 calls call(), other
ranks follow().
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import torch as safetensors
from torch import Tensor

from rl_core.algorithms import (
    PRESETS,
    Algorithm,
    dro_loss,
    policy_losses,
    token_losses,
)
from rl_core.data.images import image_in_bytes
from rl_core.data.packing import MinibatchPlan, fill_bins, make_items, pack_samples
from rl_core.distributed import Ranks, all_gather_json
from rl_core.errors import nearest
from rl_core.learning.learner import Learner
from rl_core.learning.learner_context import Metrics
from rl_core.learning.lora import (
    AdapterPolicy,
    adapter_parameters,
    adapter_weights,
    draw_adapter,
    last_name,
    peft_name,
    write_adapter,
)
from rl_core.learning.minibatches import Minibatch, to_device
from rl_core.metrics import Sum, reduce_metrics
from rl_core.models.heads import logit_change
from rl_core.models.parallel.fsdp import local_slices
from rl_core.run.saving.checkpoint import save_checkpoint
from rl_core.run.saving.resume import fill, find_damage, load_checkpoint, read_object, saved_tensors
from rl_core.tinker.wire import (
    AdamParams,
    Chunk,
    Datum,
    ForwardBackward,
    ImageBytes,
    Lora,
    forward_backward_output,
    read_datum,
    read_forward_backward,
)
from rl_core.types import InputImage, JSONObject, PackedBatch, RunError, TrainingSample

if TYPE_CHECKING:
    from rl_core.data.image_families import ImageFamily

SCRATCH = "scratch"  # The learner whose adapter is that of a snapshot, for logprobs.
ADAPTER, FACTS = "adapter", "model"  # Folder of a save for peft; key of its state.json.
ATTENTION = ("attn", "attention")
# Loss -> (inputs next to target_tokens, settings with their defaults).
RATIO_INPUTS = {"logprobs", "advantages"}
BOUNDS = ("clip_low_threshold", "clip_high_threshold")
CLIPPED = RATIO_INPUTS | set(BOUNDS)
LOSSES: dict[str, tuple[set[str], dict[str, float]]] = {
    "cross_entropy": ({"weights"}, {}),
    "importance_sampling": (RATIO_INPUTS, {}),
    "ppo": (CLIPPED, {BOUNDS[0]: 0.8, BOUNDS[1]: 1.2}),
    "cispo": (CLIPPED, {BOUNDS[0]: 0.8, BOUNDS[1]: 1.2}),
    "gspo": (CLIPPED | {"sequence_ratio_mask"}, {BOUNDS[0]: 1 - 3e-4, BOUNDS[1]: 1 + 4e-4}),
    "dro": (RATIO_INPUTS, {"beta": 0.05}),
}
OBJECTIVES = {"importance_sampling": "clip", "ppo": "clip", "cispo": "cispo", "gspo": "gspo"}
HIDDEN = {
    "stable_reinforce": "its formula is not public; give loss_fn=importance_sampling (or ppo, "
    "cispo, gspo)",
    "custom": "losses of the server's side are not built; give a function, not a LossHandle",
}


@dataclass(kw_only=True, slots=True)
class DatumSequence:
    """A datum in token ids, with an array for each input of its loss."""

    ids: np.ndarray  # [n] int64; tokens of images are negative.
    images: tuple[InputImage, ...]
    columns: dict[str, np.ndarray]  # [n] each


@dataclass(kw_only=True, slots=True)
class Members:
    """The sequences of a batch."""

    numbers: list[int]
    indices: Tensor  # [M] index of each token's logprob among those that are computed.


def scaling_of(lora: Lora, alpha: float) -> float:
    return alpha / lora.rank


def is_trained(name: str, lora: Lora, head: str) -> bool:
    """True if the client trains the adapter of the layer in this weight's name."""
    layer = name.partition(".lora_")[0]
    if last_name(layer) == head:
        return lora.train_unembed
    return lora.train_attn if any(word in layer for word in ATTENTION) else lora.train_mlp


class MultiLora:
    def __init__(self, learners: dict[str, Learner], ranks: Ranks, max_tokens: int, alpha: float):
        """`learners`: one for each model of clients, and SCRATCH; all with the same policy."""
        self.learners, self.ranks = learners, ranks
        self.max_tokens, self.alpha = max_tokens, alpha
        policy = learners[SCRATCH].policy
        assert isinstance(policy, AdapterPolicy)
        self.policy = policy
        text = policy.hf.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        [self.max_rank] = {policy.adapters[learner.adapter].r for learner in learners.values()}
        head = policy.hf.get_output_embeddings()
        names = [last_name(name) for name, m in policy.hf.named_modules() if m is head]
        is_plain = logit_change(policy.hf.config) == (1.0, None) and hasattr(head, "lora_A")
        self.head, self.has_head = names[0], is_plain
        self.loras = dict.fromkeys(learners, Lora(rank=self.max_rank))
        self.in_scratch = ""  # Name of the snapshot.

    @property
    def family(self) -> ImageFamily | None:
        return self.policy.vision and self.policy.vision.family

    def call(self, method: str, body: bytes = b"", **arguments: Any) -> Any:
        """Runs a method on all ranks; its result on this one."""
        if self.ranks.size > 1:
            send(json.dumps([method, arguments]).encode(), self.ranks)
            send(body, self.ranks)
        try:
            return self.run(method, arguments, body)
        except ValueError:  # All ranks raise one.
            raise
        except Exception as error:
            if self.ranks.size == 1:
                raise
            text = f"{method}: {type(error).__name__}: {error}; other ranks may wait for rank 0"
            raise RunError(f"{text}: restart the server") from error

    def follow(self) -> None:
        """Does what rank 0 does, until rank 0 ends."""
        method = ""
        while method != "end":
            method, arguments = json.loads(send(b"", self.ranks))
            body = send(b"", self.ranks)
            with suppress(ValueError):  # Rank 0 raises one too, and answers with it.
                self.run(method, arguments, body)

    def run(self, method: str, arguments: JSONObject, body: bytes) -> Any:
        """The method's result. Raises ValueError if the method does on every rank, and RunError if
        only some ranks refuse the request: their weights differ from then on."""
        result, refusal = None, None
        try:
            result = getattr(self, method)(**arguments, **({"body": body} if body else {}))
        except ValueError as error:
            refusal = error
        refusals = all_gather_json(str(refusal or ""), self.ranks)
        if any(refusals) and not all(refusals):
            raise RunError(f"some ranks alone refused the request: {max(refusals)}")
        if refusal is not None:
            raise refusal
        return result

    def keep_alive(self) -> None:
        """Lets the other ranks wait on: their next message comes in time."""

    def end(self) -> None:
        """Ends follow() of the other ranks."""

    def create(self, name: str, lora: JSONObject, seed: int) -> None:
        """A new adapter. Raises ValueError for one that this server cannot train."""
        asked, learner = Lora(**lora), self.learners[name]
        self.check(asked)
        if not (asked.train_mlp or asked.train_attn or asked.train_unembed):
            raise ValueError("train_mlp, train_attn and train_unembed are all False; set one")
        draw_adapter(self.policy.hf, seed, learner.adapter)
        with torch.no_grad():
            for weight_name, parameter in learner.trained_parameters():
                local, slices = local_slices(parameter)
                if not is_trained(weight_name, asked, self.head):
                    local.zero_()
                elif ".lora_A." in weight_name:
                    local[max(0, asked.rank - (slices[0].start or 0)) :] = 0
        self.adopt(name, asked)

    def check(self, lora: Lora) -> None:
        if lora.rank > self.max_rank:
            raise ValueError(
                f"rank={lora.rank} is above the server's --max_rank {self.max_rank}; lower it, or "
                "restart the server with a higher one"
            )
        if lora.train_unembed and not self.has_head:
            raise ValueError(
                "train_unembed=True is not supported: the base model's logits are more than a "
                "product with the head, or the server's --engine has no adapters of the head; give "
                "train_unembed=False"
            )

    def check_saved(self, facts: JSONObject) -> None:
        """Raises ValueError for saved weights that this server cannot use."""
        self.check(Lora(**facts["lora"]))
        if facts["alpha"] != self.alpha:
            raise ValueError(
                f"the weights were saved with --lora_alpha {facts['alpha']}; restart the server "
                "with it"
            )

    def adopt(self, name: str, lora: Lora) -> None:
        """Begins anew with the adapter's weights: no gradients, no optimizer state."""
        learner = self.learners[name]
        self.loras[name] = lora
        learner.optimizer.state.clear()
        learner.num_updates = 0
        learner.zero_gradients()
        self.policy.set_scaling(learner.adapter, scaling_of(lora, self.alpha))
        self.policy.of_head.discard(learner.adapter)
        if lora.train_unembed:
            self.policy.of_head.add(learner.adapter)

    def drop_gradients(self, name: str) -> None:
        self.learners[name].zero_gradients()

    def forward_backward(self, name: str, body: bytes) -> bytes:
        """Accumulates gradients, unless the request is forward_only. Raises ValueError, without an
        effect on any weight, for data that cannot be learned from."""
        request, learner = read_forward_backward(body), self.learners[name]
        sequences = []
        settings = loss_settings(request)
        for number, datum in enumerate(map(read_datum, request.data)):
            try:
                sequences.append(self.sequence(datum, request, settings))
            except ValueError as error:
                raise ValueError(f"datum {number}: {error}") from None
        if not sequences:
            raise ValueError("the request has no data")
        batches, members = self.packed(learner, sequences)
        losses = RequestLosses(request.loss_fn, settings, sequences, members)
        minibatch = Minibatch(denominator=1, num_tokens=0, batches=batches)
        if request.forward_only:
            with torch.no_grad():
                for batch in batches:
                    losses(batch, learner.forward(batch))
        else:
            learner.backward(minibatch, losses)
        logprobs, metrics = losses.results(self.ranks)
        if not np.isfinite(metrics["loss:sum"]):
            raise ValueError("the loss is not finite; are logprobs or advantages extreme?")
        return forward_backward_output(logprobs, metrics)

    def sequence(
        self, datum: Datum, request: ForwardBackward, settings: dict[str, float]
    ) -> DatumSequence:
        ids, images = self.token_ids(datum.chunks)
        inputs, _ = LOSSES[request.loss_fn]
        if unknown := sorted(datum.inputs.keys() - inputs - {"target_tokens"}):
            raise ValueError(f"{request.loss_fn} does not read {unknown[0]}; leave it out")
        columns: dict[str, np.ndarray] = {}
        for key in ("target_tokens", *sorted(inputs)):
            values = datum.inputs.get(key)
            if values is None and key in settings:
                values = np.full(len(ids), settings[key], np.float32)
            elif values is None and key in ("weights", "sequence_ratio_mask"):
                values = np.ones(len(ids), np.float32)
            elif values is None:
                raise ValueError(f"{request.loss_fn} needs {key}")
            if key in BOUNDS and len(values) == 1:
                values = np.full(len(ids), values[0])
            if len(values) != len(ids):
                raise ValueError(f"{key} has {len(values)} values for {len(ids)} tokens")
            if not np.isfinite(values).all():
                raise ValueError(f"{key} has a value that is not finite")
            columns[key] = values
        if columns["target_tokens"].dtype != np.int64:
            raise ValueError("target_tokens are float32; give int64")
        self.check_ids(columns["target_tokens"], "target_tokens")
        return DatumSequence(ids=ids, images=images, columns=columns)

    def token_ids(self, chunks: list[Chunk]) -> tuple[np.ndarray, tuple[InputImage, ...]]:
        """Token ids of a model input, and its images."""
        parts, images = [np.zeros(0, np.int64)], []
        for chunk in chunks:
            if isinstance(chunk, ImageBytes):
                if self.family is None:
                    raise ValueError("the base model reads text alone; leave images out")
                images.append(image_in_bytes(chunk.data))
                tokens, num = self.family.expand(images[-1]), chunk.expected_tokens
                if num is not None and num != len(tokens):
                    raise ValueError(
                        f"the model reads an image of {images[-1].width} x {images[-1].height} "
                        f"pixels as {len(tokens)} tokens; expected_tokens is {num}"
                    )
                parts.append(np.asarray(tokens, np.int64))
            else:
                self.check_ids(chunk, "the model input")
                parts.append(chunk.astype(np.int64))
        ids = np.concatenate(parts)
        if not 0 < len(ids) <= self.max_tokens:
            raise ValueError(f"{len(ids)} tokens; the server reads 1 to {self.max_tokens}")
        if self.family is not None:
            self.family.check_tokens(ids.tolist(), images)
        return ids, tuple(images)

    def check_ids(self, ids: np.ndarray, source: str) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"{source} has ids outside of the vocabulary of {self.vocab_size}")

    def packed(
        self, learner: Learner, sequences: list[DatumSequence]
    ) -> tuple[list[PackedBatch], list[Members]]:
        """This rank's batches, and the sequences in each. Sequences that begin alike stand
        together."""
        samples = []
        for sequence in sequences:
            ids = np.append(sequence.ids, sequence.columns["target_tokens"][-1])
            zeros = np.zeros(len(ids))
            sample = TrainingSample(
                token_ids=ids,
                loss_mask=np.arange(len(ids)) > 0,
                rollout_logprobs=zeros,
                policy_versions=zeros,
                advantages=zeros,
                images=sequence.images,
            )
            samples.append(sample)
        order = sorted(range(len(samples)), key=lambda i: samples[i].token_ids.tobytes())
        samples = [samples[i] for i in order]
        plan = MinibatchPlan(groups={"": 0}, num_used=sum(len(s.token_ids) for s in samples))
        items = [list(item) for item in make_items(samples, plan, 0, learner.budget)]
        fill_bins(plan, [items], learner.budget)
        batches, members = [], []
        for items in plan.bins[self.ranks.dp_rank :: learner.budget.num_ranks]:
            numbers = []
            for item in items:
                numbers += range(item.first, item.first + item.num_samples)
            of_batch = [samples[i] for i in numbers]
            batch = pack_samples(of_batch, learner.budget.cp)
            numbers = [order[i] for i in numbers]
            targets = [sequences[i].columns["target_tokens"] for i in numbers]
            labels = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *targets]))
            # Sequences of a group have their prompt's logprobs in common.
            keys = batch.logit_indices * self.vocab_size + labels
            indices = torch.arange(len(labels))
            if learner.budget.cp == 1:
                keys, indices = keys.unique(return_inverse=True)
            batch.logit_indices, batch.labels = keys // self.vocab_size, keys % self.vocab_size
            members.append(Members(numbers=numbers, indices=indices.to(self.ranks.device)))
            if self.family is not None and batch.images is None:
                batch.images = {}
            for extension in learner.extensions:
                batch = extension.packed(batch, of_batch)
            batches.append(to_device(batch, self.ranks.device))
        return batches, members

    def optim_step(self, name: str, params: JSONObject) -> JSONObject:
        """One step of AdamW with the accumulated gradients; none if there are none."""
        asked, learner = AdamParams(**params), self.learners[name]
        if all(parameter.grad is None for _, parameter in learner.trained_parameters()):
            raise ValueError("optim_step has no gradients; call forward_backward first")
        for group in learner.optimizer.param_groups:
            group["betas"], group["eps"] = (asked.beta1, asked.beta2), asked.eps
            group["weight_decay"] = asked.weight_decay
        norm = float(learner.clip_gradients(max(0.0, asked.grad_clip_norm)))
        if not np.isfinite(norm):
            raise ValueError(f"the gradient's norm is {norm}: the step is left out")
        learner.apply(asked.learning_rate)
        learner.zero_gradients()
        return {"type": "optim_step", "metrics": {"grad_norm:mean": norm}}

    def weights(self, name: str) -> dict[str, Tensor]:
        """peft's name -> a copy of each matrix that the client trains, of the client's rank."""
        learner, lora = self.learners[name], self.loras[name]
        result = {}
        for key, value in adapter_weights(self.policy.hf, learner.adapter):
            if is_trained(key, lora, self.head):
                is_a = ".lora_A." in key
                value = value[: lora.rank] if is_a else value[:, : lora.rank]
                result[key] = value.to("cpu", copy=True).contiguous()
        return result

    def padded(
        self, weights: dict[str, Tensor], b_factor: float = 1.0
    ) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, matrix of the largest rank) of all layers."""
        adapter = self.learners[SCRATCH].adapter
        for name, parameter in adapter_parameters(self.policy.hf, adapter):
            key = peft_name(name)
            full = torch.zeros(parameter.shape)
            if (value := weights.get(key)) is not None:
                is_a = ".lora_A." in key
                block = full[: len(value)] if is_a else full[:, : value.shape[1]]
                block.copy_(value if is_a else value * b_factor)
            yield key, full

    def logprobs(self, ids: list[int], snapshot: str, body: bytes = b"", **lora: Any) -> np.ndarray:
        """[n - 1] Logprobs of tokens after the first by a snapshot; "": by the base model. `body`:
        the snapshot's weights."""
        learner = self.learners[SCRATCH]
        if snapshot and snapshot != self.in_scratch:
            self.in_scratch = ""
            matrices = self.padded(safetensors.load(body))
            with torch.no_grad():
                for (_, parameter), (_, full) in zip(
                    learner.trained_parameters(), matrices, strict=True
                ):
                    local, slices = local_slices(parameter)
                    local.copy_(full[slices])
            self.adopt(SCRATCH, Lora(**lora))
            self.in_scratch = snapshot
        tokens = np.asarray(ids, np.int64)
        columns = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
        sequence = DatumSequence(ids=tokens[:-1], images=(), columns=columns)
        batches, members = self.packed(learner, [sequence])
        losses = RequestLosses("cross_entropy", {}, [sequence], members)
        adapter = learner.adapter if snapshot else ""
        with torch.no_grad():
            for batch in batches:
                losses(batch, self.policy(batch, 1.0, adapter))
        [logprobs], _ = losses.results(self.ranks)
        return logprobs

    def save(self, name: str, folder: str, facts: JSONObject, has_state: bool) -> None:
        """Writes a folder with the adapter for peft and, if has_state, all that training needs."""
        learner, lora, target = self.learners[name], self.loras[name], Path(folder)
        facts = facts | {"lora": lora.model_dump(), "max_rank": self.max_rank, "alpha": self.alpha}
        weights = self.weights(name)
        with_adapter = target.with_name(f".{target.name}.adapter") / ADAPTER
        if self.ranks.rank == 0:
            with_adapter.mkdir(parents=True, exist_ok=True)
            config = replace(
                self.policy.adapters[learner.adapter],
                r=lora.rank,
                lora_alpha=self.alpha,
                target_modules={last_name(key.partition(".lora_")[0]) for key in weights},
            )
            write_adapter(with_adapter, config, weights)
        learners, state = {name: learner} if has_state else {}, {FACTS: facts}
        try:
            save_checkpoint(target, learners, state, self.ranks, keep=0, files=[with_adapter])
        except RunError:  # On all ranks.
            raise ValueError("weights are not finite and are not saved") from None
        if self.ranks.rank == 0:
            with_adapter.parent.rmdir()

    def load(self, name: str, folder: str, has_optimizer: bool) -> None:
        """Restores an adapter from save(). Raises ValueError for a damaged folder."""
        learner, source = self.learners[name], Path(folder)
        facts = read_facts(source, self.ranks)
        lora = Lora(**facts["lora"])
        if facts["max_rank"] != self.max_rank:
            raise ValueError(
                f"the state was saved with --max_rank {facts['max_rank']}; restart the server "
                "with it"
            )
        self.adopt(name, lora)
        if has_optimizer:
            load_checkpoint(source, {name: learner}, is_verified=True)
        else:
            fill(source / learner.name, saved_tensors(learner, has_optimizer=False))


def send(data: bytes, ranks: Ranks) -> bytes:
    """Rank 0's bytes, on every rank."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    values = torch.zeros(int(size), dtype=torch.uint8)
    if ranks.rank == 0 and data:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(values, 0)
    return values.numpy().tobytes()


def read_facts(folder: Path, ranks: Ranks) -> JSONObject:
    """The facts of a saved model. Raises ValueError if there is none, or if a file is damaged."""
    if not (folder / "manifest.json").is_file():
        raise ValueError("there are no such weights; were they saved, or deleted since?")
    if damage := find_damage(folder, ranks):
        raise ValueError(damage)
    return read_object(folder / "state.json")[FACTS]


def loss_settings(request: ForwardBackward) -> dict[str, float]:
    """The settings of a request's loss. Raises ValueError for an unknown loss or setting."""
    if request.loss_fn in HIDDEN:
        raise ValueError(f"loss_fn={request.loss_fn}: {HIDDEN[request.loss_fn]}")
    if request.loss_fn not in LOSSES:
        raise ValueError(f"loss_fn={request.loss_fn}: {nearest(request.loss_fn, LOSSES)}")
    _, defaults = LOSSES[request.loss_fn]
    settings = dict(defaults)
    for name, value in request.config.items():
        if name not in defaults:
            raise ValueError(f"{request.loss_fn} has no setting {name}; leave it out")
        if isinstance(value, str) or not np.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number")
        settings[name] = value
    return settings


class RequestLosses:
    """The losses of a request's batches, in their order; keeps each sequence's logprobs."""

    def __init__(
        self,
        loss_fn: str,
        settings: dict[str, float],
        sequences: list[DatumSequence],
        members: list[Members],
    ):
        self.loss_fn, self.settings, self.sequences = loss_fn, settings, sequences
        self.members = iter(members)
        self.logprobs: dict[int, list[float]] = {}
        self.loss, self.num_clipped = 0.0, 0.0

    def __call__(self, batch: PackedBatch, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Metrics]:
        of_batch = next(self.members)
        numbers = of_batch.numbers
        logprobs, entropy = outputs[0][of_batch.indices], outputs[1][of_batch.indices]
        columns = self.columns(numbers, logprobs)
        losses, is_clipped = self.losses(batch, logprobs, entropy, columns)
        self.loss += float(losses.detach().double().sum())
        if is_clipped is not None:
            self.num_clipped += float(is_clipped.sum())
        values = logprobs.detach().float().cpu().numpy()
        ends = np.cumsum([0, *(len(self.sequences[i].ids) for i in numbers)])
        for number, start, end in zip(numbers, ends, ends[1:], strict=False):
            self.logprobs[number] = values[start:end].tolist()
        return losses, {}

    def columns(self, numbers: list[int], like: Tensor) -> dict[str, Tensor]:
        result = {}
        for key in self.sequences[0].columns:
            if key != "target_tokens":
                parts = [self.sequences[i].columns[key] for i in numbers]
                values = np.concatenate([np.zeros(0, np.float32), *parts])
                result[key] = torch.from_numpy(values).to(like)
        return result

    def losses(
        self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor, columns: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        if self.loss_fn == "cross_entropy":
            batch.advantages = columns["weights"]
            return token_losses(PRESETS["sft"], batch, logprobs, entropy)
        batch.advantages, batch.old_logprobs = columns["advantages"], columns["logprobs"]
        if self.loss_fn == "dro":
            log_ratio = logprobs - batch.old_logprobs
            beta = self.settings["beta"]
            return dro_loss(beta, logprobs, log_ratio, batch.advantages), None
        algorithm = Algorithm(objective=OBJECTIVES[self.loss_fn], clip_low=np.inf, clip_high=np.inf)
        if BOUNDS[0] in columns:
            # One bound for each token, where a run has one for all.
            low: Any = 1 - columns[BOUNDS[0]]
            high: Any = columns[BOUNDS[1]] - 1
            algorithm.clip_low, algorithm.clip_high = low, high
        return policy_losses(algorithm, batch, logprobs, columns.get("sequence_ratio_mask"))

    def results(self, ranks: Ranks) -> tuple[list[np.ndarray], dict[str, float]]:
        """(each sequence's logprobs, metrics)"""
        for of_rank in all_gather_json(self.logprobs, ranks):
            self.logprobs |= {int(number): values for number, values in of_rank.items()}
        logprobs = [np.asarray(self.logprobs[i], np.float32) for i in range(len(self.sequences))]
        share = ranks.size // ranks.mesh.dp
        sums: Metrics = {"loss:sum": Sum(self.loss / share)}
        if BOUNDS[0] in self.sequences[0].columns:
            sums["clipped_tokens:sum"] = Sum(self.num_clipped / share)
        metrics = reduce_metrics(sums, ranks)
        return logprobs, metrics
