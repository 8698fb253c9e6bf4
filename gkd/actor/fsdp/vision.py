"""Images of a micro-batch."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from gkd.errors import DataError
from gkd.types import MicroBatch
from teacher_server.vision.images import ImageError
from teacher_server.vision.processor import ImageProcessor
from teacher_server.vision.rows import ImageRows, Span, image_rows


def read_images(
    hf: PreTrainedModel, processor: ImageProcessor, batch: MicroBatch, device: torch.device
) -> ImageRows | None:
    """Return the images of a micro-batch; None if it has none. Raises DataError: tokens and images do not match."""
    if not batch.images:
        return None
    try:
        return image_rows(hf, processor, batch.tokens, _spans(batch), batch.images, device)
    except ImageError as error:
        raise DataError(f"a sequence cannot be trained on: {error}") from error


def _spans(batch: MicroBatch) -> list[Span]:
    if batch.cu_seqlens is None:
        return [(row, slice(None)) for row in range(len(batch.tokens))]
    borders = batch.cu_seqlens.tolist()
    return [(0, slice(start, stop)) for start, stop in zip(borders[:-1], borders[1:], strict=True)]
