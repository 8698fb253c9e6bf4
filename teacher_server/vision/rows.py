"""Images in a forward pass of transformers: features of the vision tower in the rows, and positions on the grids.

An image that several sequences of a pass have is computed once. Positions are those of each sequence alone, so they
restart in a packed row.

Letters: B sequences, S columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from teacher_server.vision.images import EncodedImage
from teacher_server.vision.processor import ImageProcessor

Span = tuple[int, slice]  # row and columns of a sequence; the columns may end with padding


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The images of a forward pass."""

    values: Tensor  # Those of all distinct images are joined, see `Pixels`.
    grids: Tensor | None  # [distinct, 3] int64
    order: tuple[int, ...]  # the distinct images, or their tiles, in the order of the flattened rows
    position_ids: Tensor | None  # [3, B, S] int64; None: those of text
    token_types: Tensor | None  # [B, S] int64, 1 for tokens of images; None: attention is causal


def image_rows(
    model: Any,
    processor: ImageProcessor,
    tokens: Tensor,
    spans: Sequence[Span],
    images: Sequence[Sequence[EncodedImage]],
    device: torch.device,
) -> ImageRows | None:
    """Return the images of some sequences; None if they have none. Raises ImageError: one cannot be used.

    Args:
        tokens: [B, S] int64, on the host.
        images: of each sequence, whose tokens match them (`ImageProcessor.check`).
    """
    places: dict[EncodedImage, int] = {}
    order = tuple(places.setdefault(image, len(places)) for sequence_images in images for image in sequence_images)
    if not places:
        return None
    pixels = processor.pixels(places)
    grids = [image_pixels.grid for image_pixels in pixels if image_pixels.grid is not None]
    positions = None
    if grids:
        positions = torch.zeros(3, *tokens.shape, dtype=torch.int64)
        for (row, columns), sequence_images in zip(spans, images, strict=True):
            ids = tokens[row, columns]
            of_own = torch.cat([grids[places[image]] for image in sequence_images]) if sequence_images else None
            positions[:, row, columns] = sequence_positions(model, ids, of_own, processor.token_id)
    else:
        starts = [0, *accumulate(len(image_pixels.values) for image_pixels in pixels)]
        order = tuple(tile for i in order for tile in range(starts[i], starts[i + 1]))
    return ImageRows(
        torch.cat([image_pixels.values for image_pixels in pixels]).to(device),
        torch.cat(grids).to(device) if grids else None,
        order,
        None if positions is None else positions.to(device),
        (tokens == processor.token_id).long().to(device) if processor.both_ways else None,
    )


def sequence_positions(model: Any, ids: Tensor, grids: Tensor | None, token_id: int) -> Tensor:
    """Return [3, S] int64, the positions of one sequence: those of the model's own code."""
    if grids is None:
        return torch.arange(len(ids)).expand(3, -1)
    kinds = (ids == token_id).int()[None]
    positions: Tensor = model.base_model.get_rope_index(ids[None], mm_token_type_ids=kinds, image_grid_thw=grids)[0]
    return positions[:, 0]


def forward_arguments(model: Any, rows: ImageRows) -> dict[str, Any]:
    """Run the vision tower, and return the arguments of the backbone's forward pass."""
    base = model.base_model
    if rows.grids is None:
        out = base.get_image_features(rows.values, return_dict=True)
        features = [out.pooler_output[i] for i in rows.order]
        out.pooler_output = torch.stack(features) if isinstance(out.pooler_output, Tensor) else features
        types = {} if rows.token_types is None else {"token_type_ids": rows.token_types}
        return types | {"mm_encoder_outputs": {"image": out}}
    out = base.get_image_features(rows.values, rows.grids, return_dict=True)
    out.pooler_output = tuple(out.pooler_output[i] for i in rows.order)
    if getattr(out, "deepstack_features", None) is not None:
        out.deepstack_features = [tuple(features[i] for i in rows.order) for features in out.deepstack_features]
    return {"position_ids": rows.position_ids, "image_grid_thw": rows.grids, "mm_encoder_outputs": {"image": out}}
