"""Images and positions of a forward over the embedded engine's slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_core.engines.kv_slots import ForwardImages
from rl_core.models.vision import Vision
from rl_core.types import InputImage


def images_of(
    vision: Vision,
    requests: Sequence[tuple[dict[int, InputImage], Tensor | None]],
    starts: Sequence[int],
    padded: list[list[int]],
) -> ForwardImages:
    """Images and positions of the padded pieces of requests that begin at `starts`. `requests`:
    images by key, and positions [axes, ids] if a request has images."""
    ids, images, rows = torch.tensor(padded), {}, []
    num_axes = max(len(positions) for _, positions in requests if positions is not None)
    for (of_request, positions), start in zip(requests, starts, strict=True):
        images |= of_request
        row = torch.arange(start, start + ids.shape[1]).repeat(num_axes, 1)
        if positions is not None:
            known = positions[:, start : start + ids.shape[1]]
            row[:, : known.shape[1]] = known
        rows.append(row)
    positions = torch.stack(rows, 1)  # [axes, n, S]
    seen = vision.images_in(ids, images)
    family, blocks, device = vision.family, None, vision.model.device
    if family.sees_ahead and seen:
        is_image = (ids < 0).int()
        starts_block = is_image.diff(dim=1, prepend=is_image.new_zeros(len(ids), 1)) > 0
        blocks = (starts_block.cumsum(1) * is_image).to(device)
    return ForwardImages(
        position_ids=(positions if num_axes > 1 else positions[0]).to(device),
        model=vision.model if seen else None,
        tensors=vision.tensors(seen) | vision.token_types(ids),
        blocks=blocks,
        in_full_attention=family.sees_ahead == "everywhere",
    )
