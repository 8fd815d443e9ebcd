"""Families of models that see: the tokens of an image, and the tensors that the model reads.

A family is a subclass of ImageFamily and a row of FAMILIES. The chat asks it for an image's tokens,
engines and learners (models/vision.py) for the tensors. transformers' AutoProcessor would need
torchvision; a family reads the image processor alone, in its form for Pillow.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_core.data.images import decoded_image, image_in_bytes, png_of
from rl_core.data.pretrained import Tokenizer, load_pretrained
from rl_core.types import InputImage

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, device, dtype
    from transformers import PretrainedConfig

PIXEL_CACHE_BYTES = 1 << 30
# An image's key and the dtype of its tensors; None: that of the processor.
Key: TypeAlias = "tuple[int, dtype | None]"
# A processor of transformers, whose attributes depend on the family.
Processor: TypeAlias = Any


class ImageFamily:
    """Images of models with one kind of configuration. The defaults are those of Qwen-VL: the
    template writes one placeholder for an image, which becomes `num_tokens` placeholders, and the
    tensors of several images are joined along the first axis."""

    arguments: tuple[str, ...] = ("pixel_values", "image_grid_thw")  # Of the model's forward.
    axis = 0  # Along which the tensors of several images are joined.
    # Layers in which an image's tokens see its later ones: "", "windows" or "everywhere".
    sees_ahead: str = ""
    # Argument of the model's forward that marks these tokens.
    types_argument: str = ""
    # Text that the family's processor writes before and behind the template's placeholder.
    around: str = ""
    max_images: int | None = None  # Of a conversation.
    max_pixels: int | None = None  # Larger images are resized.

    def __init__(self, config: PretrainedConfig, processor: Processor, path: str):
        """`processor`: transformers' image processor of the model at `path`."""
        self.config, self.processor, self.path = config, processor, path
        self.token_id: int = config.image_token_id
        self.placeholder_id = self.token_id  # Written by the template.
        # Tokens that the model's forward takes for images, or the like, wherever they stand.
        self.media_ids: tuple[int, ...] = (self.token_id,)
        # Forwards read it where the model itself sampled one of these; see models/vision.py.
        self.stand_in = int(self.token_id == 0)
        self.cache = PixelCache(self)

    def limit_pixels(self, most: int) -> None:
        """Makes the processor resize images to at most this number of pixels. Raises ValueError if
        that is impossible."""
        raise NotImplementedError

    def num_tokens(self, image: InputImage) -> int:
        """Number of the image's tokens that take a feature of the vision tower."""
        raise NotImplementedError

    def expand(self, image: InputImage) -> list[int]:
        """The ids that replace the template's placeholder: -key for each token that takes a
        feature, and other tokens of the image's frame and rows."""
        return [-image.key] * self.num_tokens(image)

    def check_tokens(self, ids: list[int], images: Sequence[InputImage]) -> None:
        """Raises ValueError unless each image in `ids` has its tokens, in the order of expand().
        `images`: of all keys in `ids`."""
        by_key = {-image.key: image for image in images}
        end = 0  # Of the last image.
        for start, token_id in enumerate(ids):
            if token_id >= 0 or start < end:
                continue
            image = by_key[token_id]
            expanded = self.expand(image)
            first = expanded.index(token_id)
            last = len(expanded) - expanded[::-1].index(token_id)
            end = start + last - first
            if ids[start:end] != expanded[first:last]:
                raise ValueError(
                    f"an image of {image.width} x {image.height} pixels has other tokens in a turn "
                    f"than those that the model reads, {self.num_tokens(image)}; take the turns "
                    "that the actor returned"
                )

    def framed(self, rendered: str) -> str:
        """The template's text with `around` at each placeholder. A tokenizer may join it with the
        text next to it."""
        if not self.around:
            return rendered
        placeholder = self.tokenizer.convert_ids_to_tokens(self.placeholder_id)
        return rendered.replace(placeholder, f"{self.around}{placeholder}{self.around}")

    def model_ids(self, ids: Iterable[int]) -> list[int]:
        """The model's ids of these tokens; see Vision.model_ids()."""
        instead = dict.fromkeys(self.media_ids, self.stand_in)
        return [self.token_id if token_id < 0 else instead.get(token_id, token_id)
                for token_id in ids]  # fmt: skip

    def num_patches(self, image: InputImage) -> int:
        """Number of patches or tiles of the image in the size that the processor gives it."""
        # The default of the last argument fails in transformers 5.12, and {} means other sizes.
        size = {"size": self.processor.size}
        return self.processor.get_number_of_image_patches(image.height, image.width, size)

    def read(self, text: str, image: InputImage) -> list[int]:
        """The ids of the text that replaces the placeholder, with -key for placeholders in it."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [-image.key if token_id == self.token_id else token_id for token_id in ids]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from transformers import AutoTokenizer

        return load_pretrained(AutoTokenizer, self.path)

    @cached_property
    def token(self) -> str:
        return self.tokenizer.convert_ids_to_tokens(self.token_id)

    def tensors(self, image: InputImage) -> dict[str, Tensor]:
        """Arguments of the model's forward for one image."""
        made = self.processor(images=[self.read_pixels(image)], return_tensors="pt")
        return {name: made[name] for name in self.arguments}

    def read_pixels(self, image: InputImage) -> Image:
        return decoded_image(image)

    def joined(self, of_images: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Arguments of the model's forward for several images. A family overrides it if its
        tensors are more than joined along an axis."""
        import torch

        names = of_images[0]
        return {name: torch.cat([of[name] for of in of_images], self.axis) for name in names}

    @cached_property
    def bytes_per_token(self) -> float:
        """Bytes of an image's tensors in fp32 for each of its tokens."""
        num_bytes = sum(tensor.nbytes for tensor in self.tensors(self.blank).values())
        return num_bytes / self.num_tokens(self.blank)

    def rope_arguments(self, of_images: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Arguments of the model's get_rope_index(), if it has positions of three axes."""
        import torch

        return {"image_grid_thw": torch.cat([of["image_grid_thw"] for of in of_images])}

    @cached_property
    def blank(self) -> InputImage:
        """A small image, for ranks that must run the vision tower without one."""
        import numpy as np

        return image_in_bytes(png_of(np.zeros((32, 32, 3), np.uint8)))


class QwenVL(ImageFamily):
    """One token for each merged block of patches."""

    counts_frames = False  # True if the processor's limits count a pixel once a frame.

    def limit_pixels(self, most: int) -> None:
        size = dict(self.processor.size)
        most *= self.processor.temporal_patch_size if self.counts_frames else 1
        size["longest_edge"] = min(most, size["longest_edge"])
        size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
        self.processor.size = type(self.processor.size)(**size)

    def num_tokens(self, image: InputImage) -> int:
        return self.num_patches(image) // self.processor.merge_size**2


class GlmV(QwenVL):
    counts_frames = True


class Mistral3(ImageFamily):
    """Rows of merged patches, each with a token at its end."""

    arguments = ("pixel_values", "image_sizes")

    def __init__(self, config: PretrainedConfig, processor: Processor, path: str):
        super().__init__(config, processor, path)
        self.edge = config.vision_config.patch_size * config.spatial_merge_size
        processor.patch_size = {"height": self.edge, "width": self.edge}

    def limit_pixels(self, most: int) -> None:
        size = dict(self.processor.size)
        size["longest_edge"] = max(self.edge, min(math.isqrt(most), size["longest_edge"]))
        self.processor.size = type(self.processor.size)(**size)

    def grid(self, image: InputImage) -> tuple[int, int]:
        """Rows and columns of the image's tokens."""
        height, width, longest = image.height, image.width, self.processor.size["longest_edge"]
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = int(height / ratio), int(width / ratio)
        if not height or not width:
            raise ValueError(
                f"an image of {image.width} x {image.height} pixels has no row or column of pixels "
                f"left where its longer side has {longest}; crop it"
            )
        return (height - 1) // self.edge + 1, (width - 1) // self.edge + 1

    def num_tokens(self, image: InputImage) -> int:
        rows, columns = self.grid(image)
        return rows * columns

    def expand(self, image: InputImage) -> list[int]:
        rows, columns = self.grid(image)
        every = [self.token * columns] * rows
        return self.read("[IMG_BREAK]".join(every) + "[IMG_END]", image)

    def joined(self, of_images: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        import torch

        sizes = torch.cat([of["image_sizes"] for of in of_images])
        height, width = sizes.amax(0).tolist()
        values = of_images[0]["pixel_values"].new_zeros(len(sizes), 3, height, width)
        for row, (of, (height, width)) in enumerate(zip(of_images, sizes.tolist(), strict=True)):
            values[row, :, :height, :width] = of["pixel_values"][0]
        return {"pixel_values": values, "image_sizes": sizes}


class InternVL(ImageFamily):
    """Tiles of one size, each with one number of tokens, and the image in the size of a tile."""

    arguments = ("pixel_values",)

    def __init__(self, config: PretrainedConfig, processor: Processor, path: str):
        super().__init__(config, processor, path)
        processor.crop_to_patches = True  # As transformers' processor of the family does.

    def limit_pixels(self, most: int) -> None:
        size = self.processor.size
        num_tiles = max(1, most // (size["height"] * size["width"]))
        self.processor.max_patches = min(self.processor.max_patches, num_tiles)
        self.processor.min_patches = min(self.processor.min_patches, num_tiles)

    def num_tokens(self, image: InputImage) -> int:
        return self.num_patches(image) * self.config.image_seq_length

    def expand(self, image: InputImage) -> list[int]:
        return self.read(f"<img>{self.token * self.num_tokens(image)}</img>", image)


class Idefics3(ImageFamily):
    """Rows of tiles behind the tokens of their row and column, and the image in one tile."""

    arguments, axis = ("pixel_values", "pixel_attention_mask"), 1

    def limit_pixels(self, most: int) -> None:
        tile = self.processor.max_image_size["longest_edge"]
        size = dict(self.processor.size)
        size["longest_edge"] = min(size["longest_edge"], max(1, math.isqrt(most) // tile) * tile)
        self.processor.size = type(self.processor.size)(**size)

    @cached_property
    def tokens_of_tile(self) -> int:
        tower = self.config.vision_config
        return (tower.image_size // tower.patch_size // self.config.scale_factor) ** 2

    def num_tokens(self, image: InputImage) -> int:
        num_tiles, *_ = self.processor.get_number_of_image_patches(image.height, image.width, {})
        return max(1, num_tiles) * self.tokens_of_tile

    def expand(self, image: InputImage) -> list[int]:
        _, rows, columns = self.processor.get_number_of_image_patches(image.height, image.width, {})
        tokens, text, fake = self.token * self.tokens_of_tile, "", "<fake_token_around_image>"
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{fake}<row_{row}_col_{column}>{tokens}"
            text += "\n"
        text += "\n" if rows else ""
        return self.read(f"{text}{fake}<global-img>{tokens}{fake}", image)


class OneSize(ImageFamily):
    """Images of one size, with one number of tokens."""

    arguments = ("pixel_values",)

    def limit_pixels(self, most: int) -> None:
        edge = self.config.vision_config.image_size
        if edge**2 > most:
            raise ValueError(
                f"--data.max_image_pixels={most}: {self.config.model_type} (model {self.path}) "
                f"resizes every image to {edge} x {edge} pixels; leave it out"
            )


def check_masks(config: PretrainedConfig) -> None:
    """Raises ValueError if transformers' own attention lets image tokens see others than the models
    were trained with."""
    from transformers import __version__

    if tuple(map(int, re.findall(r"\d+", __version__)[:2])) < MASKS_SINCE:
        needed = ".".join(map(str, MASKS_SINCE))
        raise ValueError(
            f"images of {config.model_type} need transformers {needed}, which is {__version__} "
            "here: older versions give image tokens other masks; update it"
        )


class Gemma3(OneSize):
    """Images between two tokens, which see one another."""

    sees_ahead = "everywhere"
    types_argument = "token_type_ids"
    around = "\n\n"

    def __init__(self, config: PretrainedConfig, processor: Processor, path: str):
        super().__init__(config, processor, path)
        check_masks(config)
        self.placeholder_id = config.boi_token_id
        if processor.do_pan_and_scan:
            raise ValueError(
                f"preprocessor_config.json of {path} has do_pan_and_scan, whose crops of an image "
                "are not supported; set it to false"
            )

    def num_tokens(self, image: InputImage) -> int:
        return self.config.mm_tokens_per_image

    def expand(self, image: InputImage) -> list[int]:
        return [self.placeholder_id, *super().expand(image), self.config.eoi_token_id]


class Gemma4(ImageFamily):
    """Images resized to a number of tokens, at most that of the processor, between two tokens. In
    some models they see one another where a layer has a window."""

    arguments = ("pixel_values", "image_position_ids")

    def __init__(self, config: PretrainedConfig, processor: Processor, path: str):
        super().__init__(config, processor, path)
        if config.get_text_config().use_bidirectional_attention == "vision":
            check_masks(config)
            self.sees_ahead, self.types_argument = "windows", "mm_token_type_ids"
        others = config.video_token_id, config.audio_token_id
        self.media_ids += tuple(number for number in others if number is not None)

    @property
    def edge(self) -> int:
        """Pixels of a token's edge."""
        return self.processor.patch_size * self.processor.pooling_kernel_size

    def limit_pixels(self, most: int) -> None:
        fitting = [num for num in GEMMA4_TOKENS if num * self.edge**2 <= most]
        if not fitting:
            raise ValueError(
                f"--data.max_image_pixels={most}: {self.config.model_type} (model {self.path}) "
                f"takes at least {GEMMA4_TOKENS[0] * self.edge**2}; give more, or leave it out"
            )
        self.processor.max_soft_tokens = min(self.processor.max_soft_tokens, fitting[-1])

    def num_tokens(self, image: InputImage) -> int:
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            get_aspect_ratio_preserving_size,
        )

        max_patches = self.processor.max_soft_tokens * self.processor.pooling_kernel_size**2
        height, width = get_aspect_ratio_preserving_size(
            image.height,
            image.width,
            self.processor.patch_size,
            max_patches,
            self.processor.pooling_kernel_size,
        )
        return height * width // self.edge**2

    def expand(self, image: InputImage) -> list[int]:
        return [self.config.boi_token_id, *super().expand(image), self.config.eoi_token_id]

    def joined(self, of_images: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        # Pixels are padded to one shape, whatever the number of tokens; see PixelCache.joined().
        return super().joined(of_images)


class Llava(OneSize):
    """LLaVA 1.5: one token for each patch."""

    def __init__(self, config: PretrainedConfig, processor: Processor, path: str):
        super().__init__(config, processor, path)
        tower = config.vision_config
        if tower.model_type not in CLASS_TOKENS:
            raise ValueError(
                f"model {path} has a vision tower of kind {tower.model_type}; take one of kind "
                f"{' or '.join(CLASS_TOKENS)}"
            )
        self.edge: int = tower.image_size // tower.patch_size  # Patches of an image's edge.
        dropped = int(config.vision_feature_select_strategy == "default")
        self.tokens_of_tile = self.edge**2 + CLASS_TOKENS[tower.model_type] - dropped

    def num_tokens(self, image: InputImage) -> int:
        return self.tokens_of_tile


class LlavaNext(Llava):
    """The image in the size of a tile, and tiles of the image, whose rows end with a learned
    feature."""

    arguments = ("pixel_values", "image_sizes")

    def limit_pixels(self, most: int) -> None:
        """Does nothing: the processor gets smaller images; see limited()."""

    @cached_property
    def rule(self) -> Processor:
        """transformers' processor of the family, for the number of tokens alone: the processor of
        LLaVA-OneVision cannot be made without torchvision."""
        if self.config.model_type == "llava_next":
            from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

            kind: Processor = LlavaNextProcessor
        else:
            from transformers.models.llava_onevision.processing_llava_onevision import (
                LlavaOnevisionProcessor,
            )

            kind = LlavaOnevisionProcessor
        rule = kind.__new__(kind)
        rule.image_processor, rule.num_image_tokens = self.processor, self.edge**2
        rule.patch_size, rule.num_additional_image_tokens = self.config.vision_config.patch_size, 0
        rule.vision_aspect_ratio = getattr(self.config, "vision_aspect_ratio", None)
        return rule

    def limited(self, image: InputImage) -> tuple[int, int]:
        """Height and width of the image that the processor gets."""
        ratio = (self.max_pixels or math.inf) / (image.height * image.width)
        scale = min(1.0, ratio**0.5)
        return max(1, int(image.height * scale)), max(1, int(image.width * scale))

    def num_tokens(self, image: InputImage) -> int:
        tile = self.config.vision_config.image_size
        return self.rule._get_number_of_features(*self.limited(image), tile, tile)

    def read_pixels(self, image: InputImage) -> Image:
        height, width = self.limited(image)
        return super().read_pixels(image).resize((width, height))

    def joined(self, of_images: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        tiles = [of["pixel_values"][0] for of in of_images]
        sizes = torch.cat([of["image_sizes"] for of in of_images])
        return {"pixel_values": pad_sequence(tiles, batch_first=True), "image_sizes": sizes}


class LlavaOnevision(LlavaNext):
    """LlavaNext with a limit of tokens. An image has other tokens if the conversation has a second
    one."""

    max_images = 1


MASKS_SINCE = (5, 19)  # Version of transformers.
# Numbers of tokens of an image that Gemma 4's processor takes.
GEMMA4_TOKENS = (70, 140, 280, 560, 1120)
# Kind of vision tower -> number of its tokens before those of patches.
CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
# Value of model_type in config.json -> family.
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GLM = ("glm4v", "glm4v_moe", "glm46v")
FAMILIES: dict[str, type[ImageFamily]] = {
    **dict.fromkeys(QWEN, QwenVL),
    **dict.fromkeys(GLM, GlmV),
    "mistral3": Mistral3,
    "internvl": InternVL,
    **dict.fromkeys(("idefics3", "smolvlm"), Idefics3),
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "llava": Llava,
    "llava_next": LlavaNext,
    "llava_onevision": LlavaOnevision,
}


# Value of model_type -> reason why its images are refused.
REFUSED = {
    "gemma4_unified": "transformers reads its images with torchvision alone",
    "kimi_k25": "transformers reads its images with torchvision alone",
}


class PixelCache:
    """Tensors of images by key and dtype, computed in another thread. The least recently used are
    dropped beyond `max_bytes`."""

    def __init__(self, family: ImageFamily, max_bytes: int = PIXEL_CACHE_BYTES):
        self.family, self.max_bytes = family, max_bytes
        # Tensors and their expected bytes, the least recently used first.
        self.made: OrderedDict[Key, tuple[Future[dict[str, Tensor]], float]] = OrderedDict()
        self.total = 0.0  # Expected bytes of all tensors in the cache.
        self.lock = Lock()  # A learner and an engine share the cache.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="pixels")

    def start(self, images: Iterable[InputImage], dtype: dtype | None = None) -> None:
        """Begins to compute the tensors of the first images, up to a quarter of the cache."""
        size = 0.0
        for image in images:
            if size > self.max_bytes / 4:
                break
            size += self.future(image, dtype)[1]

    def future(
        self, image: InputImage, dtype: dtype | None
    ) -> tuple[Future[dict[str, Tensor]], float]:
        """The tensors of an image, which are computed if they are not in the cache, and their
        expected bytes."""
        key = image.key, dtype
        with self.lock:
            if key not in self.made:
                size = self.family.num_tokens(image) * self.family.bytes_per_token
                size *= 1 if dtype is None else dtype.itemsize / 4
                self.made[key] = self.thread.submit(self.compute, image, dtype), size
                self.total += size
            self.made.move_to_end(key)
            while self.total > self.max_bytes and len(self.made) > 1:
                _, (_, size) = self.made.popitem(last=False)
                self.total -= size
            return self.made[key]

    def compute(self, image: InputImage, dtype: dtype | None) -> dict[str, Tensor]:
        made = self.family.tensors(image)
        return {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in made.items()
        }

    def each(
        self, images: Sequence[InputImage], dtype: dtype | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Arguments of the model's forward for each of these images, floats in `dtype` or the
        processor's."""
        for number, image in enumerate(images):
            future, _ = self.future(image, dtype)
            self.start(images[number + 1 :], dtype)
            yield future.result()

    def joined(
        self,
        images: Sequence[InputImage],
        dtype: dtype | None = None,
        device: device | str = "cpu",
    ) -> dict[str, Tensor]:
        """Arguments of the model's forward for all of these images, in their order. Each image is
        copied to its place in the result before the next one is computed: a large batch is in
        memory once."""
        family = self.family
        if type(family).joined is not ImageFamily.joined:
            made = family.joined(list(self.each(images, dtype)))
            return {name: tensor.to(device) for name, tensor in made.items()}
        num_tokens = [family.num_tokens(image) for image in images]
        result: dict[str, Tensor] = {}
        ends: dict[str, int] = {}
        for tensors in self.each(images, dtype):
            for name, tensor in tensors.items():
                length = tensor.shape[family.axis]
                if name not in result:
                    # Pixels grow with the tokens, and there is one grid an image.
                    has_pixels = name.startswith("pixel")
                    scale = sum(num_tokens) / num_tokens[0] if has_pixels else len(images)
                    shape = list(tensor.shape)
                    shape[family.axis] = round(length * scale)
                    result[name] = tensor.new_empty(shape, device=device)
                    ends[name] = 0
                result[name].narrow(family.axis, ends[name], length).copy_(tensor)
                ends[name] += length
        for name, tensor in result.items():
            assert tensor.shape[family.axis] == ends[name], (family.path, name)
        return result


def make_family(config: PretrainedConfig, path: str, max_pixels: int | None) -> ImageFamily | str:
    """The family of a model that sees, or the reason why its images are not read."""
    kind = FAMILIES.get(config.model_type)
    if kind is None:
        reason = REFUSED.get(config.model_type, "")
        return (
            f"images of the family {config.model_type} (model {path}) are not supported"
            f"{reason and ': '}{reason}; take one of {', '.join(FAMILIES)}"
        )
    # Takes seconds, which text need not wait for. transformers 5.12 exports the class to those who
    # have torchvision.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        processor = load_pretrained(AutoImageProcessor, path, backend="pil")
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0].partition(". Should have")[0]
        return (
            f"model {path} has no image processor ({reason}); copy preprocessor_config.json of the "
            "model that it was made from into the folder, or update transformers, which before "
            "5.18 reads images of Idefics3 and SmolVLM with torchvision alone"
        )
    try:
        family = kind(config, processor, path)
        if max_pixels:
            family.max_pixels = max_pixels
            family.limit_pixels(max_pixels)
    except ValueError as error:
        return str(error)
    return family
