"""Images in the forward of a model: transformers' own multimodal model computes features of the
images, puts them into the text and adds what its layers need.

T tokens of a packed batch, N rows of L tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from rl_core.types import InputImage, PackedBatch

if TYPE_CHECKING:
    from rl_core.data.image_families import ImageFamily

# Arguments of a forward of the language model alone.
TEXT_ARGUMENTS = {"input_ids", "position_ids", "attention_plan"}
Images = Mapping[int, InputImage]  # By key.
MAX_LAYOUTS = 256  # Layouts of images in a sequence whose positions are kept.


@dataclass(kw_only=True, slots=True)
class VisionInputs:
    """Tokens of a forward, with the tensors of their images."""

    input_ids: Tensor  # As the model reads them.
    position_ids: Tensor  # [3, ...] for a family with three axes.
    cu_seqlens: Tensor
    parents: list[int]
    # Further arguments of the multimodal model; empty: the language model alone computes.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # Arguments of AttentionPlan.see_ahead().
    blocks: list[np.ndarray] = field(default_factory=list)
    in_full_attention: bool = False


class Vision:
    """Makes the arguments of a model's forwards from token ids, where an image's tokens are -key.

    A model may sample its placeholder of an image. transformers would look for an image there, so
    that all forwards read `family.stand_in` in its place."""

    def __init__(self, family: ImageFamily, hf: PreTrainedModel, dtype: torch.dtype | None = None):
        """`dtype`: that the tower computes in, by default that of its weights."""
        self.family, self.dtype = family, dtype or hf.dtype
        # Not a submodule of what holds this: the model is one already.
        self.models = (hf,)
        # Results of rope_index() by layout, the latest last, and of grid() by size.
        self.layouts: OrderedDict[tuple, Tensor] = OrderedDict()
        self.grids: dict[tuple[int, int], dict[str, Tensor]] = {}

    @property
    def model(self) -> PreTrainedModel:
        """The multimodal model without a head."""
        return cast(PreTrainedModel, self.models[0].base_model)

    @property
    def has_axes(self) -> bool:
        """True if positions have three axes: time, height and width."""
        return hasattr(self.model, "get_rope_index")

    @staticmethod
    def is_seen(arguments: Mapping[str, object]) -> bool:
        """True if the arguments of a forward have tensors of images."""
        return not arguments.keys() <= TEXT_ARGUMENTS

    def model_ids(self, ids: Tensor) -> Tensor:
        """The model's ids of these tokens."""
        for token_id in self.family.media_ids:
            ids = torch.where(ids == token_id, self.family.stand_in, ids)
        return torch.where(ids < 0, self.family.token_id, ids)

    def images_in(self, ids: Tensor, images: Images) -> list[InputImage]:
        """The images of tokens [..., L], in their order. An image that comes twice is twice in it.
        Raises ValueError for an image of another number of tokens, and KeyError for one that
        `images` lacks."""
        ordered = []
        runs = torch.unique_consecutive(-ids[ids < 0], return_counts=True)
        for key, num_tokens in zip(*map(Tensor.tolist, runs), strict=True):
            count, rest = divmod(num_tokens, self.family.num_tokens(images[key]))
            if rest:
                raise ValueError(self.differs(images[key]))
            ordered += [images[key]] * count
        return ordered

    def differs(self, image: InputImage) -> str:
        return (
            f"an image of {image.width} x {image.height} pixels has fewer tokens in a sample than "
            f"the model reads, {self.family.num_tokens(image)}: it was sampled with another image "
            "processor or --data.max_image_pixels; take that one"
        )

    def tensors(self, images: Sequence[InputImage]) -> dict[str, Tensor]:
        """Arguments of the multimodal model for these images, on its device."""
        if not images:
            return {}
        return self.family.cache.joined(images, self.dtype, self.models[0].device)

    def token_types(self, ids: Tensor) -> dict[str, Tensor]:
        """The argument that marks tokens of images for transformers' own attention, for families in
        which they see later ones."""
        name = self.family.types_argument
        return {name: (ids < 0).int().to(self.models[0].device)} if name else {}

    def prefetch(self, batch: PackedBatch) -> None:
        """Begins to compute the pixels of a batch in another thread."""
        self.family.cache.start((batch.images or {}).values(), self.dtype)

    def positions(self, ids: Tensor, images: Images) -> Tensor:
        """[3, L] positions of one sequence [L] on the CPU; [1, L] for a family with one axis."""
        if not self.has_axes or bool((ids >= 0).all()):
            return torch.arange(len(ids)).expand(3 if self.has_axes else 1, -1)
        is_image = (ids < 0).int()
        num_before = int(is_image.nonzero()[-1]) + 1  # Tokens up to the last of an image.
        seen = self.images_in(ids, images)
        sizes = tuple((image.height, image.width) for image in seen)
        layout = is_image[:num_before].numpy().tobytes(), sizes
        begin = self.layouts.get(layout)
        if begin is None:
            begin = self.layouts[layout] = self.rope_index(is_image[:num_before], seen)
            if len(self.layouts) > MAX_LAYOUTS:
                self.layouts.popitem(last=False)
        text = begin[:, -1:] + torch.arange(1, max(len(ids) - num_before, 1))
        return torch.cat([begin, text], 1)[:, : len(ids)]

    def rope_index(self, is_image: Tensor, images: Sequence[InputImage]) -> Tensor:
        """[3, L + 1] positions of L tokens and of one of text behind them. They depend only on
        which of the tokens are of images, and on the images' sizes."""
        of_images = [self.grid(image) for image in images]
        grids = {name: torch.cat([grid[name] for grid in of_images]) for name in of_images[0]}
        is_image = pad(is_image, (0, 1))
        ids = torch.where(is_image > 0, self.family.token_id, self.family.stand_in)
        rope_index = cast(Callable[..., tuple[Tensor, Tensor]], self.model.get_rope_index)
        positions, _ = rope_index(ids[None], mm_token_type_ids=is_image[None], **grids)
        return positions[:, 0]

    def grid(self, image: InputImage) -> dict[str, Tensor]:
        """The image's arguments of get_rope_index(), which images of one size share."""
        size = image.height, image.width
        if size not in self.grids:
            tensors = self.family.cache.each([image], self.dtype)
            self.grids[size] = self.family.rope_arguments(list(tensors))
        return self.grids[size]

    def packed(self, batch: PackedBatch, runs_tower: bool) -> VisionInputs:
        """The arguments of a forward over a packed batch. `runs_tower`: where another rank has
        images and this one none, a blank image follows the batch, as the shards of the vision tower
        are gathered and reduced by all ranks together."""
        inputs = VisionInputs(
            input_ids=self.model_ids(batch.input_ids),
            position_ids=batch.position_ids,
            cu_seqlens=batch.cu_seqlens,
            parents=batch.parents,
        )
        if batch.images is None:
            return inputs
        ids = batch.input_ids.cpu()
        images = self.images_in(ids, batch.images)
        if not images and not runs_tower:
            return inputs
        positions = batch.position_ids.cpu().expand(3 if self.has_axes else 1, -1).clone()
        for path in map(torch.from_numpy, batch.paths):
            positions[:, path] = self.positions(ids[path], batch.images)
        if not images:
            images = [self.family.blank]
            blank = torch.tensor(self.family.expand(images[0]))
            of_blank = self.positions(blank, {images[0].key: images[0]})
            ids, positions = torch.cat([ids, blank]), torch.cat([positions, of_blank], 1)
            inputs.cu_seqlens = torch.cat(
                [batch.cu_seqlens, batch.cu_seqlens.new_tensor([len(ids)])]
            )
            inputs.parents = [*batch.parents, -1]
        device = batch.input_ids.device
        inputs.input_ids = self.model_ids(ids).to(device)
        inputs.position_ids = (positions if self.has_axes else positions[0]).to(device)
        inputs.tensors = self.tensors(images)
        if self.family.sees_ahead:
            inputs.blocks = blocks_of(ids)
            inputs.in_full_attention = self.family.sees_ahead == "everywhere"
        return inputs

    def padded(
        self, ids_NL: Tensor, images: Images | None, runs_tower: bool = False
    ) -> dict[str, Tensor]:
        """Arguments of the multimodal model over rows of one sequence each, padded on the right.
        `runs_tower`: as of packed(); the blank image is one more row."""
        is_seen = images is not None and bool((ids_NL < 0).any())
        if images is None or not (is_seen or runs_tower):
            return {"input_ids": self.model_ids(ids_NL)}
        ids = ids_NL.cpu()
        if not is_seen:
            blank = self.family.blank
            row = torch.tensor(self.family.expand(blank))
            width = max(ids.shape[1], len(row))
            ids = pad(ids, (0, width - ids.shape[1]))
            ids = torch.cat([ids, pad(row, (0, width - len(row)))[None]])
            images = {blank.key: blank}
        arguments = self.tensors(self.images_in(ids, images))
        arguments |= self.token_types(ids)
        arguments["input_ids"] = self.model_ids(ids).to(ids_NL.device)
        if self.has_axes:
            rows = [self.positions(row, images) for row in ids]
            arguments["position_ids"] = torch.stack(rows, 1).to(ids_NL.device)
        return arguments


def blocks_of(ids: Tensor) -> list[np.ndarray]:
    """The indices of neighbouring tokens of images in ids [T] on the CPU."""
    indices = np.flatnonzero(ids.numpy() < 0)
    return np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
