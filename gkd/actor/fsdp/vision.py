"""Images of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from gkd.errors import DataError
from gkd.types import MicroBatch
from teacher_server.vision.images import ImageError
from teacher_server.vision.processor import ImageProcessor
from teacher_server.vision.rows import ImageRows, Span, image_rows


def check_images(processor: ImageProcessor | None, batch: MicroBatch) -> None:
    """Check that the tokens of each sequence are those of its images. Raises DataError."""
    if batch.images and processor is None:
        raise DataError("the student was built without a vision tower and got sequences with images")
    if processor is not None and batch.images:
        with _as_data_error():
            for (row, columns), images in zip(_spans(batch), batch.images, strict=True):
                processor.check(batch.tokens[row, columns].numpy(), images)


def read_images(
    hf: PreTrainedModel, processor: ImageProcessor, batch: MicroBatch, device: torch.device
) -> ImageRows | None:
    """Return the images of a micro-batch; None if it has none. Raises DataError: an image cannot be used."""
    if not batch.images:
        return None
    with _as_data_error():
        return image_rows(hf, processor, batch.tokens, _spans(batch), batch.images, device)


@contextmanager
def _as_data_error() -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise DataError(f"a sequence cannot be trained on: {error}") from error


def _spans(batch: MicroBatch) -> list[Span]:
    if batch.cu_seqlens is None:
        return [(row, slice(None)) for row in range(len(batch.tokens))]
    borders = batch.cu_seqlens.tolist()
    return [(0, slice(start, stop)) for start, stop in zip(borders[:-1], borders[1:], strict=True)]
