"""Families of models that see: the tokens of an image, and the tensors that the model reads.

A family is a subclass of ImageFamily and a row of FAMILIES. The chat asks it for an image's tokens,
engines and learners (models/vision.py) for the tensors. transformers' AutoProcessor would need
torchvision; a family reads the image processor alone, in its form for Pillow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from rl_core.data.images import decoded_image, image_in_bytes, png_of
from rl_core.data.pretrained import load_pretrained
from rl_core.types import InputImage

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

PIXEL_CACHE_BYTES = 1 << 30


class ImageFamily:
    """Images of models with one kind of configuration. The defaults are those of Qwen-VL: the
    template writes one placeholder for an image, which becomes `num_tokens` placeholders, and the
    tensors of several images are joined along the first axis."""

    def __init__(self, config: PretrainedConfig, processor: Any):
        """`processor`: transformers' image processor of the model."""
        self.config, self.processor = config, processor
        self.token_id: int = config.image_token_id
        # Forwards read it where the model itself sampled token_id; see models/vision.py.
        self.stand_in = int(self.token_id == 0)
        self.cache = PixelCache(self)

    def limit_pixels(self, most: int) -> None:
        """Makes the processor resize images to at most this number of pixels."""
        raise NotImplementedError

    def num_tokens(self, image: InputImage) -> int:
        """Number of the image's tokens that take a feature of the vision tower."""
        raise NotImplementedError

    def expand(self, image: InputImage) -> list[int]:
        """The ids that replace the template's placeholder: -key for each token that takes a
        feature, and other tokens of the image's frame and rows."""
        return [-image.key] * self.num_tokens(image)

    def tensors(self, image: InputImage) -> dict[str, Tensor]:
        """Arguments of the model's forward for one image."""
        return dict(self.processor(images=[decoded_image(image)], return_tensors="pt"))

    def joined(self, of_images: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Arguments of the model's forward for several images."""
        import torch

        return {name: torch.cat([of[name] for of in of_images]) for name in of_images[0]}

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
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: one token for each merged block of patches."""

    def limit_pixels(self, most: int) -> None:
        size = dict(self.processor.size)
        size["longest_edge"] = min(most, size["longest_edge"])
        size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
        self.processor.size = type(self.processor.size)(**size)

    def num_tokens(self, image: InputImage) -> int:
        num_patches = self.processor.get_number_of_image_patches(image.height, image.width)
        return num_patches // self.processor.merge_size**2


# Value of model_type in config.json -> family.
FAMILIES: dict[str, type[ImageFamily]] = dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QwenVL
)


class PixelCache:
    """Tensors of images by key, computed in another thread. The least recently used are dropped
    beyond PIXEL_CACHE_BYTES."""

    def __init__(self, family: ImageFamily, max_bytes: int = PIXEL_CACHE_BYTES):
        self.family, self.max_bytes = family, max_bytes
        self.made: dict[int, Future[dict[str, Tensor]]] = {}
        # Bytes of the tensors that were used, the least recently used first, and their sum.
        self.sizes: OrderedDict[int, int] = OrderedDict()
        self.total = 0
        self.lock = Lock()  # A learner and an engine share the cache.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="pixels")

    def start(self, images: Iterable[InputImage]) -> list[Future[dict[str, Tensor]]]:
        """Begins to compute the tensors of images that are not in the cache."""
        with self.lock:
            images = [*images]
            for image in images:
                if image.key not in self.made:
                    self.made[image.key] = self.thread.submit(self.family.tensors, image)
            return [self.made[image.key] for image in images]

    def each(self, images: Sequence[InputImage]) -> list[dict[str, Tensor]]:
        """Arguments of the model's forward for each of these images."""
        futures = self.start(images)
        of_images = [future.result() for future in futures]
        with self.lock:
            for image, future, tensors in zip(images, futures, of_images, strict=True):
                if image.key not in self.sizes:
                    self.made[image.key] = future  # Another thread may have dropped it.
                    self.sizes[image.key] = num_bytes(tensors)
                    self.total += self.sizes[image.key]
                self.sizes.move_to_end(image.key)
            while self.total > self.max_bytes:
                key, size = self.sizes.popitem(last=False)
                self.total -= size
                del self.made[key]
        return of_images

    def joined(self, images: Sequence[InputImage]) -> dict[str, Tensor]:
        """Arguments of the model's forward for all of these images, in their order."""
        return self.family.joined(self.each(images))


def num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@lru_cache(8)
def load_family(path: str, max_pixels: int | None = None) -> ImageFamily | str:
    """The family of the model at `path`, shared by all that read its images; for a model that does
    not see, the reason. `max_pixels`: larger images are resized."""
    from transformers import AutoConfig, AutoImageProcessor

    config = load_pretrained(AutoConfig, path)
    if not hasattr(config, "vision_config"):
        return f"model {path} ({config.model_type}) reads text alone"
    kind = FAMILIES.get(config.model_type)
    if kind is None:
        return (
            f"images of the family {config.model_type} (model {path}) are not supported; take one "
            f"of {', '.join(FAMILIES)}"
        )
    try:
        processor = load_pretrained(AutoImageProcessor, path, backend="pil")
    except (OSError, ValueError) as error:
        return (
            f"model {path} has no image processor ({str(error).splitlines()[0]}); copy "
            "preprocessor_config.json of the model that it was made from into the folder"
        )
    family = kind(config, processor)
    if max_pixels:
        family.limit_pixels(max_pixels)
    return family
