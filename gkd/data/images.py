"""Read the images of a row, and put them into its prompt.

A place of an image in a text is one mark, which the renderer replaces by what the template writes for an image.
"""

from __future__ import annotations

import base64
import binascii
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gkd.data.conversation import IMAGE, Conversation, Setting, quoted
from gkd.errors import ConfigError
from teacher_server.vision.images import EncodedImage, ImageError, check_image
from teacher_server.wire.protocol import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_IMAGES_BYTES

if TYPE_CHECKING:
    from teacher_server.vision.processor import ImageProcessor

PLACEHOLDER = "<image>"  # in the texts of verl's, ms-swift's and LLaVA's datasets
_SOURCES = ("bytes", "image", "image_url", "url", "path")  # keys of an object that is an image


class ImageReader:
    """Read the images of rows. Memory does not grow with their bytes: images in rows are kept in a file without a name.

    The processor is the student's, the key data.images_key, and the folder is for the file.
    """

    def __init__(self, processor: ImageProcessor, key: str, folder: Path) -> None:
        self.key = key
        self.processor = processor
        self.n_read = 0
        self._setting = "data.images_key", key
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, prompts read it as long as the run lasts
        self._end = 0
        self._kept: dict[bytes, EncodedImage] = {}  # digest -> image

    def place(
        self, prompt: Conversation, row: Mapping[str, Any], setting: Setting, where: str, *, is_rendered: bool
    ) -> tuple[Conversation, tuple[EncodedImage, ...]]:
        """Return the prompt with a mark for each image, and the images in the order of the marks.

        An image stands in a part of a message, or in the column. Those of the column belong to parts without a value,
        or to `<image>` in the texts; without any of both they stand in front of the first text of the user, as in TRL.

        Args:
            where: file and line of the row; paths of images are relative to the file's folder.
            is_rendered: the text has the places already, as special tokens: `expand` counts those.

        Raises:
            ConfigError: an image cannot be read, or there are more or fewer places than images.
        """
        column = row.get(self.key)
        values = [] if column in (None, "") else list(column) if isinstance(column, list | tuple) else [column]
        values_of_marks = list(prompt.images)
        texts = [message["content"] for message in prompt.messages] if prompt.messages else [prompt.text]
        whole = "".join(texts)
        if whole.count(IMAGE) != len(values_of_marks):
            problem = f"the prompt of {where} has an image in the response, or the character U+E002, a mark of images."
            raise ConfigError(*setting, problem, "correct or remove the row.")
        if is_rendered:
            values_of_marks = [None] * len(values)
        elif values and IMAGE not in whole and PLACEHOLDER in whole:
            texts = [text.replace(PLACEHOLDER, IMAGE) for text in texts]
            values_of_marks = [None] * whole.count(PLACEHOLDER)
        elif values and not values_of_marks:
            first = next((i for i, m in enumerate(prompt.messages) if m["role"] == "user"), 0)
            texts[first] = IMAGE * len(values) + texts[first]
            values_of_marks = [None] * len(values)
        elif PLACEHOLDER in whole:
            problem = f"the prompt of {where} has the text {PLACEHOLDER} and no image for it."
            raise ConfigError(*setting, problem, "give the row its image, or remove the text.")
        if (missing := sum(value is None for value in values_of_marks)) != len(values):
            problem = f"the prompt of {where} has {missing} places for {len(values)} images of {self.key}."
            raise ConfigError(*setting, problem, "write one part, or <image>, for each of them.")
        rest = iter(values)
        images = tuple(self._image(next(rest) if value is None else value, where) for value in values_of_marks)
        self.n_read += len(images)
        n_bytes = sum(image.n_bytes for image in {*images})
        if len({*images}) > MAX_IMAGES or n_bytes > MAX_IMAGES_BYTES:
            problem = f"the prompt of {where} has {len(images)} images of {n_bytes} bytes."
            limit = f"{MAX_IMAGES} images of {MAX_IMAGES_BYTES >> 20} MiB"
            raise ConfigError(*setting, problem, f"a request to the teacher holds {limit}: use fewer, or smaller ones.")
        if not prompt.messages:
            return replace(prompt, text=texts[0]), images
        pairs = zip(prompt.messages, texts, strict=True)
        return replace(prompt, messages=tuple({**message, "content": text} for message, text in pairs)), images

    def expand(self, ids: Sequence[int], images: Sequence[EncodedImage], where: str) -> list[int]:
        """Return the tokens of a prompt with those of its images. Raises ConfigError: see `ImageProcessor.expand`."""
        try:
            return self.processor.expand(ids, images)
        except ImageError as error:
            raise ConfigError(*self._setting, f"{where}: {error}.", "correct or remove the row.") from error

    def _image(self, value: Any, where: str) -> EncodedImage:
        source = value
        try:
            while isinstance(source, dict):
                filled = {key: inner for key, inner in source.items() if inner is not None and key != "detail"}
                keys = [key for key in _SOURCES if key in filled]
                if len(filled) > len(keys) or (len(keys) > 1 and keys != ["bytes", "path"]):
                    raise ImageError(f"it has {sorted(filled)}, and one of {', '.join(_SOURCES)} is read")
                source = filled[keys[0]] if keys else None
            if isinstance(source, bytes):
                return self._stored(source)
            if not isinstance(source, str):
                raise ImageError("it is neither bytes nor the path of a file")
            if source.startswith("data:"):
                head, _, text = source.partition(",")
                if not head.endswith(";base64"):
                    raise ImageError(f"its head is {quoted(head)}, and base64 is needed")
                return self._stored(base64.b64decode(text, validate=True))
            if "://" in source and not source.startswith("file://"):
                raise ImageError("it is an address, and a run reads local files")
            file = Path(where.rpartition(":")[0]).parent / source.removeprefix("file://")
            if file.stat().st_size > MAX_IMAGE_BYTES:
                raise ImageError(f"it has more than {MAX_IMAGE_BYTES} bytes")
            data = file.read_bytes()
            check_image(data)
            return EncodedImage(data, str(file))
        except (OSError, ImageError, binascii.Error) as error:
            problem = f"the prompt of {where} has the image {quoted(value)}: {error}."
            fix = "an image is a path, a data: URL with base64, bytes, or an object with `bytes` or `path`."
            raise ConfigError(*self._setting, problem, fix) from error

    def _stored(self, data: bytes) -> EncodedImage:
        check_image(data)
        image = EncodedImage(data, self._file, self._end)
        if image.digest in self._kept:
            return self._kept[image.digest]
        self._file.write(data)
        self._file.flush()
        self._end += len(data)
        self._kept[image.digest] = image
        return image


def without_images(value: Any) -> Any:
    """Return a row, or a value of it, with None in place of the bytes of images: they would stay in memory."""
    if isinstance(value, dict):
        return {key: without_images(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_images(entry) for entry in value]
    return None if isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:image")) else value
