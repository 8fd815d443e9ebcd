"""Checkpoints: every rank writes its shards, which any number of ranks can read; and each model as
a Hugging Face folder.

checkpoints/step_000010/manifest.json      written last: every file with its size and checksum
                        state.json         step, data position
                        policy/*.safetensors  trained weights and optimizer state, by
                                           torch.distributed.checkpoint
                        policy_reference/*.safetensors  a weight snapshot that is updated
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.futures import Future

from rl_core.data.pretrained import Tokenizer
from rl_core.data.rows import rename_into_place, replaced
from rl_core.distributed import Ranks, all_gather_json, barrier, local
from rl_core.learning.learner import Learner
from rl_core.models.loading import kept_in_fp32, save_as_published
from rl_core.models.policy import Policy
from rl_core.models.weight_gathering import dtype_of
from rl_core.types import JSONObject, RunError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

    from rl_core.learning.lagged_copy import WeightSnapshot

NAME = re.compile(r"step_[0-9]{6,}")
FILE_BYTES = 1 << 28
# Optimizer state that is not saved: a count, and bitsandbytes' tables, equal for all parameters.
NOT_SAVED = ("step", "qmap1", "qmap2")


def trained_learners(learners: dict[str, Learner]) -> dict[str, Learner]:
    """Name -> each learner of the actors, critics included."""
    return {learner.name: learner for owner in learners.values() for learner in owner.trained()}


def renewed_copies(learners: dict[str, Learner]) -> dict[str, WeightSnapshot]:
    """Folder -> each weight snapshot that differs from the weights at the start."""
    copies = {}
    for learner in learners.values():
        for extension in learner.extensions:
            copies |= {kept.name: kept for kept in extension.copies if kept.every}
    return copies


def copied_tensors(kept: WeightSnapshot) -> dict[str, Tensor]:
    """Name -> this rank's shard of the weight, inside kept.in_place()."""
    weights = kept.policy.trained(kept.adapter)
    return {f"param/{name}": weight.detach() for name, weight in weights}


def saved_tensors(learner: Learner, has_optimizer: bool = True) -> dict[str, Tensor]:
    """Name -> this rank's shard of the trained weight or optimizer state."""
    if isinstance(learner.policy, FSDPModule):
        # After a forward without a backward some parameters are still gathered.
        learner.policy.reshard()
    weights = dict(learner.trained_parameters())
    tensors = {f"param/{name}": weight.detach() for name, weight in weights.items()}
    return tensors | optimizer_tensors(learner, weights) if has_optimizer else tensors


def optimizer_tensors(learner: Learner, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """8-bit state cannot be resharded for another layout of ranks, so its names hold the rank."""
    tensors = {}
    for group in learner.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for kind, value in learner.optimizer.state.get(parameter, {}).items():
                if kind in NOT_SAVED or not isinstance(value, Tensor):
                    continue
                if isinstance(weights[name], DTensor) and not isinstance(value, DTensor):
                    kind = f"{kind}@{learner.ranks.rank}of{learner.ranks.size}"
                tensors[f"{kind}/{name}"] = value
    return tensors


def save_checkpoint(
    folder: Path,
    learners: dict[str, Learner],
    state: dict,
    ranks: Ranks,
    keep: int,
    files: Iterable[Path] = (),
) -> None:
    """Writes checkpoints/step_N atomically: the state of all learners, and further files of rank 0,
    of which folders are moved. `state` may have the learners' facts that engine ranks sent. Then
    deletes all but the newest `keep` checkpoints. Every rank must call it. Raises RunError on all
    ranks, and writes nothing, if a weight is not finite."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    if ranks.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    barrier(ranks)  # Files of a killed run are gone.
    optimizers, copies = save_learners(scratch, learners, ranks, str(folder))
    optimizers |= state.get("optimizers", {})
    copies += state.get("copies", [])
    if ranks.rank == 0:
        for file in files:
            if file.is_dir():
                shutil.move(file, scratch / file.name)
            else:
                shutil.copy(file, scratch)
        state = state | {"optimizers": optimizers, "copies": copies}
        (scratch / "state.json").write_text(json.dumps(state, indent=1))
    barrier(ranks)  # Every rank has written.
    manifest = make_manifest(scratch, ranks)
    if ranks.rank == 0:
        (scratch / "manifest.json").write_text(json.dumps({"files": manifest}, indent=1))
        rename_into_place(scratch, folder)
        # While updates are skipped the weights may be ruined, and an older checkpoint the only way
        # back.
        trained = trained_learners(learners).values()
        if keep and not any(learner.nonfinite_in_a_row for learner in trained):
            delete_old(folder, keep)
    barrier(ranks)  # No rank continues before the checkpoint exists.


def save_learners(
    folder: Path, learners: dict[str, Learner], ranks: Ranks, target: str
) -> tuple[dict[str, JSONObject], list[str]]:
    """(facts of each optimizer by name, for a resumed run; names of the snapshots that are
    updated). Writes the state of all learners and these snapshots into folders of their names.
    Every rank must call it. Raises RunError on all ranks, and writes nothing, if a weight is not
    finite; `target` names the checkpoint in the error."""
    trained, copies = trained_learners(learners), renewed_copies(learners)
    refuse_nonfinite(broken_weights(trained), f"{target} is not written", ranks)
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*trained, *copies):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
    barrier(ranks)  # The folders exist.
    optimizers = {name: save_learner(folder / name, learner) for name, learner in trained.items()}
    for name, weights in copies.items():
        with weights.policy.on_device(), weights.in_place():
            write_shards(folder / name, copied_tensors(weights))
    return optimizers, [*copies]


def broken_weights(trained: dict[str, Learner]) -> list[str]:
    """Names of trained weights with a NaN or infinite number in this rank's shard."""
    names = []
    for actor, learner in trained.items():
        with learner.on_device():  # Elsewhere its memory may be released.
            for name, parameter in learner.trained_parameters():
                if not is_finite(local(parameter)):
                    names.append(f"{actor}: {name}")
    return names


def save_learner(folder: Path, learner: Learner) -> JSONObject:
    """Writes this rank's shard. Returns facts of the optimizer that a resumed run needs."""
    is_saved = learner.config.save_optimizer
    facts: JSONObject = {"name": type(learner.optimizer).__name__, "steps": learner.num_updates}
    with learner.on_device(), learner.state_on_device():
        write_shards(folder, saved_tensors(learner, is_saved))
        if is_saved and (fewer := fewer_steps(learner)):
            facts["fewer_steps"] = fewer
    return facts | {"layout": learner.ranks.layout, "is_saved": is_saved, "state": learner.state()}


def fewer_steps(learner: Learner) -> dict[str, int]:
    """Parameter -> its number of optimizer steps, where some updates gave it no gradient: a vision
    tower learns nothing from minibatches without images."""
    fewer = {}
    for group in learner.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            state = learner.optimizer.state.get(parameter)
            num = int(state.get("step", learner.num_updates)) if state else 0
            if num < learner.num_updates:
                fewer[name] = num
    return fewer


class ShardWriter(dcp.HuggingFaceStorageWriter):
    """Writes a rank's shards into files of about FILE_BYTES each. torch holds a file in memory
    twice while it writes it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files, filled = {}, 0
        for item in plan.items:
            assert item.tensor_data
            data = item.tensor_data
            files[item.index.fqn] = filled // FILE_BYTES + 1
            filled += data.chunk.sizes.numel() * data.properties.dtype.itemsize
        storage = plan.storage_data | {"fqn_to_index_mapping": files}
        return super().write_data(dataclasses.replace(plan, storage_data=storage), planner)


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    writer = ShardWriter(str(folder), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a single process.
        dcp.save(tensors, storage_writer=writer)


def make_manifest(folder: Path, ranks: Ranks) -> dict[str, JSONObject]:
    """File -> its size and checksum. Each rank reads a share of the files. Every rank must call
    it."""
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    names = all_gather_json(names, ranks)[0]  # A shared file system may show other ranks less.
    local_facts = {name: facts_of(folder / name) for name in names[ranks.rank :: ranks.size]}
    manifest = {}
    for facts in all_gather_json(local_facts, ranks):
        manifest |= facts
    return manifest


def facts_of(file: Path) -> JSONObject:
    """Size and checksum of a file. The checksum is as fast as the disk; it detects damage, not
    forgery."""
    checksum = xxhash.xxh3_64()
    with open(file, "rb") as opened:
        while data := opened.read(1 << 20):
            checksum.update(data)
    return {"bytes": file.stat().st_size, "xxh3_64": checksum.hexdigest()}


def delete_old(folder: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints up to `folder`. Later checkpoints were damaged
    when the run resumed."""
    saved = checkpoints_in(folder.parent)
    for old in saved[: saved.index(folder) + 1][:-keep]:
        shutil.rmtree(old)


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first."""
    return [path for path in named_checkpoints(folder) if (path / "manifest.json").exists()]


def named_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, oldest first, and those that lost their manifests: they had one when they were
    renamed into place. Folders with other names belong to the user."""
    named = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


# Files that transformers' AutoProcessor reads, except the tokenizer's. chat_template.json, and the
# key of this name in these files, would replace the template that was trained.
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
)


def export_policy(
    policy: Policy,
    tokenizer: Tokenizer,
    folder: Path,
    ranks: Ranks,
    adapter: str = "",
    *,
    base: str = "",
    end_token_ids: Sequence[int | None] = (),
) -> None:
    """Writes a Hugging Face folder that from_pretrained loads, in the dtypes of the original model,
    the adapter merged; the adapter alone goes into FOLDER_adapter. An old export stays until the
    new one is complete. Raises RunError on all ranks, and leaves the old export, if a weight is not
    finite in its dtype. `base`: the model whose processor files are copied. `end_token_ids`: ends
    of turns, written to generation_config.json before the ends that it has."""
    plain = plain_model(policy)
    dtypes = export_dtypes(plain, policy.checkpoint_dtype)
    weights = {}
    broken = []
    buffers = dict(policy.hf.named_buffers())  # A mask may be infinite.
    for name, value in policy.named_weights(adapter, dtypes):
        if ranks.rank == 0:
            if name not in buffers and not is_finite(value):
                broken.append(name)
            weights[name] = value.to("cpu", dtype_of(name, value, dtypes))
    refuse_nonfinite(broken, f"{folder} stays as it was", ranks)
    policy.export_adapter(adapter, folder.with_name(folder.name + "_adapter"), ranks)
    if ranks.rank != 0:
        return
    if policy.is_scoring:  # The classifier's forward finds the end of a sequence by this id.
        plain.config.pad_token_id = tokenizer.pad_token_id
    else:
        plain.generation_config = with_ends(policy.hf.generation_config, end_token_ids)
    save_as_published(plain)
    with replaced(folder) as scratch:
        # save_pretrained() restores the names of the original checkpoint.
        plain.save_pretrained(scratch, state_dict=weights)
        tokenizer.save_pretrained(scratch)
        if base:
            copy_processor_files(base, scratch)


def plain_model(policy: Policy) -> PreTrainedModel:
    """The policy's model on the meta device: not sharded, quantized or adapted."""
    config = copy.deepcopy(policy.hf.config)
    set_dtype(config, policy.checkpoint_dtype)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    with torch.device("meta"):
        return type(policy.hf)._from_config(config)


def export_dtypes(plain: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtypes of tensors by name, as from_pretrained(dtype=dtype) has them: some families keep
    routers or other modules in fp32."""
    dtypes = {name: value.dtype for name, value in plain.state_dict().items()}
    return dtypes | dict.fromkeys(kept_in_fp32(plain, dtype), torch.float32)


def set_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Sets the dtype of a configuration and of all that it holds, such as text_config."""
    config.dtype = dtype
    for name in config.sub_configs:
        if (held := getattr(config, name, None)) is not None:
            set_dtype(held, dtype)


def with_ends(
    generation: GenerationConfig, end_token_ids: Sequence[int | None]
) -> GenerationConfig:
    """A copy of a GenerationConfig that ends at these tokens and at its previous ones."""
    generation, has = copy.deepcopy(generation), generation.eos_token_id
    has = has if isinstance(has, list) else [has]
    ends = list(dict.fromkeys(i for i in [*end_token_ids, *has] if i is not None))
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    return generation


def copy_processor_files(base: str, folder: Path) -> None:
    """Copies PROCESSOR_FILES of the model `base`, without chat templates."""
    from transformers.utils import cached_file

    for name in PROCESSOR_FILES:
        with suppress(OSError):  # The model has no such file.
            if file := cached_file(base, name, _raise_exceptions_for_missing_entries=False):
                settings = json.loads(Path(file).read_text(encoding="utf-8"))
                settings.pop("chat_template", None)
                (folder / name).write_text(json.dumps(settings, indent=2))


def is_finite(value: Tensor) -> bool:
    """True if all numbers are finite. One pass over the data; isfinite() makes several copies."""
    return not value.numel() or bool(torch.stack(value.aminmax()).isfinite().all())


def refuse_nonfinite(names: list[str], what_stays: str, ranks: Ranks) -> None:
    """Raises RunError on all ranks if `names` is not empty on one of them."""
    for broken in all_gather_json(names, ranks):
        if broken:
            raise RunError(
                f"weights are NaN or infinite ({broken[0]}): {what_stays}; resume from the newest "
                "checkpoint by --resume, with a lower --optim.lr"
            )


def read_object(file: Path) -> JSONObject:
    """The JSON object of a file that a run has written. Raises ValueError with the file's name if
    it holds none."""
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: it is empty or not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} is damaged: it must hold a JSON object")
    return value
