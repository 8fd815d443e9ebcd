"""The base of the package's processors."""

from __future__ import annotations

import asyncio

from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from rl_core.engines.sglang_images import hash_of, read_image_data, tensors_of


class Tensors(dict):
    """Named tensors, which SGLang reads as items or, for GLM-V, as attributes."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ImageReader(BaseMultimodalProcessor):
    """Comes before SGLang's class for the same models among the bases of a processor."""

    async def process_mm_data_async(
        self, image_data: list[str], *args: object, input_text: list[int], **kwargs: object
    ) -> MultimodalProcessorOutput:
        """See BaseMultimodalProcessor. Raises ValueError as tensors_of()."""
        [text] = image_data
        data, path = read_image_data(text), self.server_args.model_path
        tensors = await asyncio.to_thread(tensors_of, data, input_text, path)
        made = await super().process_mm_data_async(
            [Tensors(format="processor_output", **tensors)], *args, input_text=input_text, **kwargs
        )
        for image in made.mm_items:
            image.set_pad_value()
            image.set_hash(hash_of(image.hash, data["label"]))
        made.padded_input_ids = None
        return made
