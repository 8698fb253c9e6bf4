"""Make vLLM's input of expanded token ids and encoded images.

vLLM's own way takes ids with one placeholder an image, expands them, and never tells if its expansion is another one.
Here its processor only prepares the pixels, and its placeholders must all be in the ids that the caller has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from teacher_server.vision.images import EncodedImage, ImageError, decode

_decoded = lru_cache(maxsize=8)(lambda image: decode(image.data))  # the samples of a prompt follow each other


def image_input(renderer: Any, ids: list[int], images: Sequence[EncodedImage]) -> Any:
    """Return the input for `LLMEngine.add_request`, not for `LLM.generate`, which would drop the images silently.

    Args:
        renderer: of vLLM's LLMEngine.
        ids: of the whole sequence, expanded.

    Raises:
        ImageError: an image cannot be used, or the ids do not have the placeholders that vLLM's model needs.
    """
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.parse import parse_mm_uuids
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    processor = renderer.get_mm_processor()
    items = processor.info.parse_mm_data({"image": [_decoded(image) for image in images]})
    names = parse_mm_uuids({"image": [image.digest.hex() for image in images]})
    inputs = ProcessorInputs(ids, items, names, cache=renderer._mm_processor_cache)
    try:
        output = processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
        places = processor._find_mm_placeholders(ids, output.prompt_updates)
        processor._validate_mm_placeholders(places, items.get_all_counts())
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ImageError(f"vLLM's processor does not find its images in the prompt: {error}") from error
    ranges = {kind: [place.to_range() for place in of_kind] for kind, of_kind in places.items()}
    n = ids.count(processor.info.get_hf_config().image_token_id)
    # A run that is longer than an image needs has the image's placeholder as its beginning.
    if (n_made := sum(span.get_num_embeds() for span in ranges["image"])) != n:
        raise ImageError(f"the prompt has {n} tokens of images, and vLLM's processor makes {n_made} of them")
    return mm_input(prompt_token_ids=ids, mm_kwargs=output.kwargs, mm_hashes=output.hashes, mm_placeholders=ranges)
