"""Check that everything that reads the images of prompts prepares them in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from gkd.config.schema import Config
from gkd.data.images import ImageReader
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.vision.images import ImageError
from teacher_server.vision.processor import ImageProcessor

image_processor = lru_cache(maxsize=4)(ImageProcessor)
_SAME_PIXELS = 0.02  # One step of 8 bits in normalized pixels is 0.008 to 0.015.


def image_reader(config: Config) -> ImageReader | None:
    """Return the reader of the images of rows; None if prompts have none. Raises ConfigError: see `ImageProcessor`."""
    if not config.data.images_key:
        return None
    try:
        processor = image_processor(config.model.path)
    except ImageError as error:
        fix = "use a vision-language model, or remove data.images_key."
        raise config.error("model.path", f"{error}.", fix) from error
    # The run folder is made last, and it is on a disk, which a folder for temporary files need not be.
    folder = next(parent for parent in Path(config.trainer.run_dir).absolute().parents if parent.is_dir())
    return ImageReader(processor, config.data.images_key, folder)


def check_image_processors(config: Config, teachers: Sequence[TeacherInfo]) -> None:
    """Raise ConfigError unless each teacher prepares images as the student does: it scores the same pixels."""
    if not config.data.images_key:
        return
    own = image_processor(config.model.path).probe()
    for route, teacher in zip(config.derived.routes, teachers, strict=True):
        if not teacher.image_probe:
            fix = "start its server with --images, or remove data.images_key."
            raise route.error("name", f"teacher {teacher.model_name} takes no images.", fix)
        if len(own) != len(teacher.image_probe) or not np.allclose(own, teacher.image_probe, rtol=0, atol=_SAME_PIXELS):
            problem = f"teacher {teacher.model_name} prepares images in another way: other sizes, filters or means."
            raise route.error("name", problem, "copy the settings of one of the two processors.")
