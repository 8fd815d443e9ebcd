"""Samples that move between ranks."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import torch
import torch.distributed as dist
from safetensors import numpy as safetensors

from rl_core.data.packing import images_of_samples
from rl_core.types import PER_TOKEN, InputImage, TrainingSample

# Fields of a sample that are sent to other ranks.
COLUMNS = (*PER_TOKEN, "experts", "kept_ids", "teacher_ids")
TEXTS = ("group_id", "env")


def exchange(outgoing: list[bytes]) -> list[bytes]:
    """Returns the messages of all ranks to this one; outgoing[r] is sent to rank r."""
    sizes = torch.tensor([len(data) for data in outgoing])
    incoming_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(incoming_sizes, sizes)
    sent = torch.frombuffer(bytearray().join(outgoing), dtype=torch.uint8)
    split = incoming_sizes.tolist()
    incoming = sent.new_empty(sum(split))
    dist.all_to_all_single(incoming, sent, split, sizes.tolist())
    return [message.numpy().tobytes() for message in incoming.split(split)]


def to_bytes(samples: list[TrainingSample]) -> bytes:
    """Serialises samples for from_bytes(): each column of all samples, concatenated."""
    facts = {name: [getattr(sample, name) for sample in samples] for name in TEXTS}
    arrays = {}
    for name in COLUMNS:
        values = [getattr(sample, name) for sample in samples]
        facts[name] = [None if value is None else len(value) for value in values]
        if present := [value for value in values if value is not None]:
            arrays[name] = np.concatenate(present)
    if any(sample.images for sample in samples):
        facts |= packed_images(samples)
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    return safetensors.save(arrays)


def packed_images(samples: list[TrainingSample]) -> dict[str, list]:
    """The images of samples for from_bytes(), each once."""
    keys = [[image.key for image in sample.images] for sample in samples]
    images = (images_of_samples(samples) or {}).values()
    return {"images": keys, "pictures": [dataclasses.asdict(image) for image in images]}


def from_bytes(data: bytes) -> list[TrainingSample]:
    arrays = safetensors.load(data)
    facts = json.loads(arrays["facts"].tobytes())
    for name in COLUMNS:
        facts[name] = split_column(arrays.get(name), facts[name])
    if "images" in facts:
        pictures = {values["key"]: InputImage(**values) for values in facts.pop("pictures")}
        facts["images"] = [tuple(map(pictures.__getitem__, keys)) for keys in facts["images"]]
    rows = zip(*facts.values(), strict=True)
    return [TrainingSample(**dict(zip(facts, row, strict=True))) for row in rows]


def split_column(column: np.ndarray | None, sizes: list[int | None]) -> list[np.ndarray | None]:
    arrays = []
    end = 0
    for size in sizes:
        first, end = end, end + (size or 0)
        arrays.append(None if column is None or size is None else column[first:end])
    return arrays
