"""Decode an encoded image, within limits, to the RGB pixels that every process computes with.

Encoded bytes travel, and each process decodes them with this code. What readers of images do differently is decided
here: the orientation in the metadata is applied, transparency is put on white, and formats of 16 bits are refused.
"""

from __future__ import annotations

import io
import os
from contextlib import nullcontext
from typing import IO, Any

from teacher_server.wire.protocol import MAX_IMAGE_BYTES, image_digest

FORMATS = ("JPEG", "PNG", "WEBP")  # each decoder is code that reads bytes of a client
MAX_PIXELS = 1 << 26  # 64 megapixels: 192 MiB decoded
MAX_SIDE = 1 << 15
# Limit of Qwen's processor, too. LLaVA's enlarges the short side, and a thin image to gigabytes.
MAX_RATIO = 200
_MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "LA", "PA", "RGBA")
_ORIENTATION = 0x0112  # tag of EXIF
_N_ORIENTATIONS = 8  # the last four exchange width and height
_PNG_BITS = 24  # place of the bits of a channel in a PNG file


class ImageError(ValueError):
    """An image cannot be used: not an image of the known formats, damaged, or larger than the limits."""


class EncodedImage:
    """An encoded image: its bytes, or the place in a file from which they are read whenever they are needed.

    Pickled it has the bytes. Two images are equal if their digests are.

    Args:
        data: encoded bytes.
        file: path, or an open file; None: keep `data`.
        offset: place of `data` in the file.
    """

    __slots__ = ("_data", "_file", "_offset", "digest", "n_bytes")

    def __init__(self, data: bytes, file: str | IO[bytes] | None = None, offset: int = 0) -> None:
        self.digest = image_digest(data)
        self.n_bytes = len(data)
        self._data = data if file is None else b""
        self._file = file
        self._offset = offset

    @property
    def data(self) -> bytes:
        """Return the bytes. Raises ImageError: the file has changed."""
        if self._file is None:
            return self._data
        try:
            with open(self._file, "rb") if isinstance(self._file, str) else nullcontext(self._file) as file:
                data = os.pread(file.fileno(), self.n_bytes, self._offset)
        except OSError as error:
            raise ImageError(f"it cannot be read any more ({error})") from error
        if image_digest(data) != self.digest:
            raise ImageError(f"the file {self._file} has changed since it was read first")
        return data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncodedImage) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedImage, (self.data,)


def image_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) of the decoded image. Reads its header only. Raises ImageError."""
    image = _opened(data)
    width, height = image.size
    return (width, height) if _orientation(image) > _N_ORIENTATIONS // 2 else (height, width)


def check_image(data: bytes) -> None:
    """Raise ImageError unless an image can be decoded. Decodes it only if its end is missing."""
    image_size(data)
    if data.startswith(b"\x89PNG"):
        has_end = b"IEND" in data[-64:]
    elif data.startswith(b"RIFF"):
        has_end = len(data) >= int.from_bytes(data[4:8], "little") + 8
    else:
        has_end = data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda")  # the end of a JPEG, behind its last scan
    if not has_end:
        decode(data)


def decode(data: bytes) -> Any:
    """Return a `PIL.Image` in RGB. Raises ImageError."""
    from PIL import Image

    image = _opened(data)
    turns = Image.Transpose
    method = (
        *(None, turns.FLIP_LEFT_RIGHT, turns.ROTATE_180, turns.FLIP_TOP_BOTTOM),
        *(turns.TRANSPOSE, turns.ROTATE_270, turns.TRANSVERSE, turns.ROTATE_90),
    )[_orientation(image) - 1]
    try:
        image.load()
        if method is not None:
            image = image.transpose(method)
        if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
            above = image.convert("RGBA")
            image = Image.new("RGBA", above.size, (255, 255, 255, 255))
            image.alpha_composite(above)
        return image.convert("RGB")
    except Exception as error:  # decoders raise many types
        raise ImageError(f"it cannot be decoded ({type(error).__name__}: {error})") from error


def _opened(data: bytes) -> Any:
    from PIL import Image

    if not data or len(data) > MAX_IMAGE_BYTES:
        raise ImageError(f"it has {len(data)} bytes, and 1 to {MAX_IMAGE_BYTES} are allowed")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # PIL's own limit raises DecompressionBombError
        raise ImageError(f"it is not a {', '.join(FORMATS)} image ({type(error).__name__})") from error
    width, height = image.size
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
        raise ImageError(f"it has {width} x {height} pixels, more than {MAX_PIXELS}, or a side of more than {MAX_SIDE}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(f"it has {width} x {height} pixels, and one side is more than {MAX_RATIO} times the other")
    if image.mode not in _MODES or (image.format == "PNG" and data[_PNG_BITS] > 8):
        raise ImageError(f"its pixels have the mode {image.mode}, and 8 bits a channel are needed")
    if (n_frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # A phone's second one is a preview.
        raise ImageError(f"it has {n_frames} frames")
    return image


def _orientation(image: Any) -> int:
    """Return the orientation of EXIF, 1 to 8. Of damaged metadata it is 1; so it is of those behind a PNG's pixels."""
    from PIL import Image

    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif"))
        value = exif.get(_ORIENTATION)
    except Exception:  # its parser raises many types
        return 1
    return value if isinstance(value, int) and 1 <= value <= _N_ORIENTATIONS else 1
