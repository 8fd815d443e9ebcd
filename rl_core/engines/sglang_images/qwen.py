"""Images of Qwen-VL in SGLang's server."""

from __future__ import annotations

from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from rl_core.engines.sglang_images.reader import ImageReader


class QwenVLReader(ImageReader, QwenVLImageProcessor):
    """See ImageReader."""
