"""Images on their way to SGLang, whose server reads the processors of this package:
SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE=rl_core.engines.sglang_images. A processor computes pixels as
the learner does and takes the prompt's ids as they are. SGLang's own processors decode the ids,
read the text again and resize images with torchvision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.data.image_families import ImageFamily
from rl_core.data.images import read_image
from rl_core.data.vision_models import load_family
from rl_core.types import InputImage, JSONObject

if TYPE_CHECKING:
    from torch import Tensor

# Values of model_type whose logprobs in SGLang were compared, on a CPU.
FAMILIES = frozenset(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"))
VARIABLE = "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"
# Beginning of a request's data of images. SGLang's own processors find no image there.
PREFIX = "rl_core:"


def image_data(images: Sequence[InputImage], family: ImageFamily, label: str) -> str:
    """The field image_data of a request. `label`: of the weights."""
    urls = [image.url for image in images]
    data = {"urls": urls, "max_pixels": family.max_pixels, "label": label}
    return PREFIX + json.dumps(data)


def read_image_data(text: str) -> JSONObject:
    """The content of image_data(). Raises ValueError for anything else."""
    if not isinstance(text, str) or not text.startswith(PREFIX):
        raise ValueError(f"this server takes images of rl_core alone ({VARIABLE})")
    return json.loads(text.removeprefix(PREFIX))


def tensors_of(data: JSONObject, ids: Sequence[int], path: str) -> dict[str, Tensor]:
    """Arguments of the forward of the model at `path` for the images of a request. Raises
    ValueError if they have another number of tokens than `ids`."""
    family = load_family(path, data["max_pixels"])
    if isinstance(family, str):
        raise ValueError(family)
    images = [read_image(url) for url in data["urls"]]
    num_tokens, expected = ids.count(family.token_id), sum(map(family.num_tokens, images))
    if num_tokens != expected:
        raise ValueError(
            f"the prompt has {num_tokens} tokens of images; by the server's image processor they "
            f"have {expected}"
        )
    return family.cache.joined(images)


def hash_of(number: int, label: str) -> int:
    """The hash of an image's features by weights with this label. SGLang keeps features by their
    hash, through updates of the weights."""
    digest = hashlib.sha256(f"{number} {label}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
