"""Images of GLM-V in SGLang's server."""

from __future__ import annotations

from sglang.srt.multimodal.processors.glm4v import Glm4vImageProcessor

from rl_core.engines.sglang_images.reader import ImageReader


class GlmVReader(ImageReader, Glm4vImageProcessor):
    """See ImageReader."""
