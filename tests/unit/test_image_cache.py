"""The pixels that `ImageProcessor` keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from teacher_server.vision import processor as module
from teacher_server.vision.images import EncodedImage, ImageError
from tests.vision_models import picture, save_vision_model


def test_the_images_of_the_last_use_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an image that is in use is computed again, more is kept than the limit, or a failed one counts."""
    processor = module.ImageProcessor(str(save_vision_model(tmp_path)))
    images = [EncodedImage(picture(40, 50, seed)) for seed in range(6)]
    size = processor.pixels(images[:1])[0].values.nbytes
    monkeypatch.setattr(module, "_CACHE_BYTES", 3 * size)

    def is_computed(image: EncodedImage) -> bool:
        before = processor.busy_s
        processor.pixels([image])
        return processor.busy_s > before

    with pytest.raises(ImageError):
        processor.pixels([EncodedImage(b"\x89PNG")])
    assert [is_computed(image) for image in images[:3]] == [False, True, True]
    assert not is_computed(images[0])  # used after the second one
    assert is_computed(images[3])
    assert [is_computed(images[i]) for i in (0, 3, 1)] == [False, False, True]
