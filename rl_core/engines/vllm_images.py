"""Images on their way to vLLM, whose route of tokens takes the tensors of each image in vLLM's
serialization, computed as the learner computes them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby

import torch
from torch import Tensor

from rl_core.data.image_families import ImageFamily
from rl_core.types import InputImage, JSONObject

# Values of model_type whose logprobs in vLLM were compared. The images of some others have text
# tokens between their features, for which vLLM's route takes no mask.
FAMILIES = frozenset(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "internvl"))
RAW_BYTES = 3  # vLLM's extension of msgpack for the bytes of a tensor.


def image_features(
    images: Sequence[InputImage], ids: Sequence[int], family: ImageFamily, dtype: torch.dtype
) -> JSONObject:
    """The field `features` of a request with these ids, where an image's tokens are -key, which
    is the images' identity in vLLM's caches. `dtype`: of the vision tower."""
    by_key = {image.key: image for image in images}
    spans = [*image_spans(ids, by_key, family)]
    sent = {}
    for image, tensors in zip(images, family.cache.each(images, dtype), strict=True):
        if image.key not in sent:
            item = model_inputs(tensors, family)
            sent[image.key] = base64.b64encode(packed(item)).decode()
    ranges = [{"offset": offset, "length": length} for _, offset, length in spans]
    return {
        "mm_hashes": {"image": [str(key) for key, _, _ in spans]},
        "mm_placeholders": {"image": ranges},
        "kwargs_data": {"image": [sent[key] for key, _, _ in spans]},
    }


def image_spans(
    ids: Sequence[int], by_key: Mapping[int, InputImage], family: ImageFamily
) -> Iterator[tuple[int, int, int]]:
    """(key, index of the first token, number of tokens) of each image in the ids."""
    offset = 0
    for token_id, run in groupby(ids):
        end = offset + sum(1 for _ in run)
        if token_id < 0:
            length = family.num_tokens(by_key[-token_id])
            # Two equal images may follow each other.
            for first in range(offset, end, length):
                yield -token_id, first, length
        offset = end


def model_inputs(tensors: Mapping[str, Tensor], family: ImageFamily) -> JSONObject:
    """One image's arguments of the model in vLLM: each with its data, and with the way in which
    vLLM joins the images of a batch."""
    on_host, pixels = {"keep_on_cpu": True}, tensors["pixel_values"]
    joined = {"slices": [[0, len(pixels), None]]}
    item = {"pixel_values": element(pixels, "flat", joined)}
    if "image_grid_thw" in tensors:
        item["image_grid_thw"] = element(tensors["image_grid_thw"][0], "batched", on_host)
    else:  # InternVL
        num_tiles, token_id = torch.tensor(len(pixels)), torch.tensor(family.token_id)
        item["image_num_patches"] = element(num_tiles, "batched", on_host)
        item["image_token_id"] = element(token_id, "shared", on_host | {"batch_size": 1})
    return item


def element(value: Tensor, kind: str, settings: JSONObject) -> JSONObject:
    data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    name = str(value.dtype).removeprefix("torch.")
    return {"data": [name, [*value.shape], data], "field": [kind, settings]}


def packed(value: object) -> bytes:
    """A value in msgpack, bytes as vLLM's extension."""
    match value:
        case None | bool():
            return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case int():
            return struct.pack(">Bq", 0xD3, value)
        case bytes():
            return struct.pack(">BIb", 0xC9, len(value), RAW_BYTES) + value
        case str():
            data = value.encode()
            return struct.pack(">BI", 0xDB, len(data)) + data
        case list():
            return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(packed, value))
        case dict():
            items = chain.from_iterable(value.items())
            return struct.pack(">BI", 0xDF, len(value)) + b"".join(map(packed, items))
    raise TypeError(type(value))
