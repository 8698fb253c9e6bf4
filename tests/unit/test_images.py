"""Decoding encoded images, and the number of their tokens: formats, limits, damage, and hostile bytes."""

from __future__ import annotations

import io
import random
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from teacher_server.vision.images import EncodedImage, ImageError, check_image, decode, image_size
from teacher_server.vision.processor import ImageProcessor
from tests.vision_models import picture, save_vision_model

FORMATS = ("PNG", "JPEG", "WEBP")
PLAIN = Image.open(io.BytesIO(picture(20, 30)))


def encoded(image: Image.Image, form: str, orientation: int = 0, **options: Any) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(file, form, **({"exif": exif.tobytes()} if orientation else {}) | options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, bits: int, color: int, raw: bytes, more: bytes = b"", behind: bytes = b"") -> bytes:
    """Return a PNG with any header: `raw` are the lines, `more` and `behind` chunks before and behind them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    parts = header, more, chunk(b"IDAT", zlib.compress(raw, 9)), behind, chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


COLORS = [("CMYK", "JPEG"), ("L", "JPEG"), ("YCbCr", "JPEG"), ("L", "PNG"), ("1", "PNG"), ("P", "PNG")]


@pytest.mark.parametrize("mode, form", [*(("RGB", form) for form in FORMATS), *COLORS])
def test_colors_and_orientations_are_those_of_pil(mode: str, form: str) -> None:
    """Fails if a print, a scan or a turned photograph is refused, or has other pixels or sides than PIL's."""
    for orientation in range(10):
        data = encoded(PLAIN.convert(mode), form, orientation)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        np.testing.assert_array_equal(np.asarray(decode(data)), expected)
        assert image_size(data) == expected.shape[:2]


def test_transparency_is_put_on_white() -> None:
    """Fails if a clear pixel shows the color below it, which some readers take for black, in any form of a file."""
    red, gray, clear = (255, 0, 0), (7, 7, 7), (255, 255, 255)
    both = Image.new("RGBA", (2, 1), (*red, 255))
    both.putpixel((1, 0), (0, 0, 0, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, *red])
    levels = Image.new("L", (2, 1))
    for image, value in ((palette, 1), (levels, 7)):
        image.putpixel((0, 0), value)
    exact = encoded(both, "WEBP", lossless=True, exact=True)
    files = [(encoded(both, "PNG"), red), (exact, red), (encoded(palette, "PNG", transparency=0), red)]
    for data, first in [*files, (encoded(levels, "PNG", transparency=0), gray)]:
        found = decode(data)
        assert (found.getpixel((0, 0)), found.getpixel((1, 0))) == (first, clear)
    assert decode(encoded(Image.new("LA", (1, 1), (9, 0)), "PNG")).getpixel((0, 0)) == clear
    assert decode(encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 128)), "PNG")).getpixel((0, 0)) == (127,) * 3


GARBAGE = random.Random(0).randbytes(2000)
ZIPPED = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100_000_000)))
TWO: dict[str, Any] = {"save_all": True, "append_images": [PLAIN.rotate(90)]}
REFUSED = {
    "empty": (b"", "0 bytes"),
    "random": (GARBAGE, "is not a"),
    "long": (picture(9, 9) + bytes(17 << 20), "are allowed"),
    **{form: (encoded(PLAIN, form), "is not a") for form in ("GIF", "TIFF", "BMP")},
    "moving png": (encoded(PLAIN, "PNG", **TWO), "2 frames"),
    "moving webp": (encoded(PLAIN, "WEBP", **TWO), "2 frames"),
    "16 bits gray": (png(4, 4, 16, 0, bytes(36)), "8 bits"),
    "16 bits color": (png(4, 4, 16, 2, bytes(100)), "8 bits"),
    "60,000 a side": (png(60_000, 60_000, 8, 2, b""), "is not a"),
    "100 megapixels": (png(10_000, 10_000, 1, 0, b""), "10000 x 10000"),
    "thin": (png(1, 10_000, 8, 0, bytes(20_000)), "200 times"),
    "flat": (png(10_000, 1, 8, 0, bytes(10_001)), "200 times"),
    "text of 100 MB": (png(4, 4, 8, 0, bytes(20), ZIPPED), "is not a"),
    "profile of 100 MB": (png(4, 4, 8, 0, bytes(20), chunk(b"iCCP", ZIPPED[8:-4])), "is not a"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_is_refused_from_its_header(name: str) -> None:
    """Fails if a file that no process could use starts a run, or one of some bytes takes gigabytes."""
    data, why = REFUSED[name]
    for read in (image_size, check_image, decode):
        with pytest.raises(ImageError, match=why):
            read(data)


def test_damage_behind_the_header() -> None:
    """Fails if an image that is cut anywhere passes the check of the rows, or damage ends in another error."""
    for form in FORMATS:
        data = picture(40, 50, form=form)
        tail = 24 if form == "PNG" else 1  # The pixels of a PNG are whole before its last bytes.
        for end in range(1, len(data) - tail, 7):
            with pytest.raises(ImageError):
                check_image(data[:end])
    for data in (png(8192, 8192, 8, 2, bytes(100)), png(4, 4, 8, 0, bytes(20), behind=ZIPPED)):
        image_size(data)
        with pytest.raises(ImageError, match="cannot be decoded"):
            decode(data)


def test_harmless_damage_is_accepted() -> None:
    """Fails if trailing bytes, as cameras write them, more pixels than declared, or damaged EXIF end a run."""
    behind = (b"x" * 1000, picture(9, 9, form="JPEG")[:-2])
    exif = (b"MM\0*\0\0\0\x08\0\x01\x01\x12", b"Exif\0\0II*\0\xff\xff\xff\xff", GARBAGE[:50])
    for data in [
        *(picture(20, 30, form=form) + more for form in FORMATS for more in behind),
        *(encoded(PLAIN, form, exif=cut) for form in FORMATS for cut in exif),
        png(30, 20, 8, 2, bytes(50_000_000)),
    ]:
        check_image(data)
        assert decode(data).size == (30, 20) and image_size(data) == (20, 30)


def test_mutated_files_end_in_an_image_or_its_error() -> None:
    """Fails if bytes of a client crash a process, take its memory or time, or decode to another size than counted."""
    run = [sys.executable, "-W", "ignore", "-c", "from tests.unit.test_images import fuzz; fuzz(3000)"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    n_images, n_errors = map(int, done.stdout.split())
    assert n_images > 300 and n_errors > 1000


def fuzz(n: int) -> None:
    """Decode mutated files within 2 GiB, and print how many are images and how many are refused."""
    rng, sizes = random.Random(0), list[Any]()
    seeds = [encoded(PLAIN, form, 6) for form in FORMATS] + [encoded(PLAIN.convert("RGBA"), "WEBP", lossless=True)]
    seeds += [encoded(PLAIN.convert(mode), "PNG", transparency=3) for mode in ("P", "L")]
    seeds += [encoded(PLAIN.convert("CMYK"), "JPEG", 3, progressive=True)]
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    for _ in range(n):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 2, 8))):
            at, size = rng.randrange(rng.choice((len(data), 100))), rng.choice((0, 1, 4, 12))
            data[at : at + size] = rng.choice((b"", b"\0" * size, b"\xff" * size, rng.randbytes(size or 1)))
        found = [result(read, bytes(data)) for read in (image_size, decode, check_image)]
        assert found[1] is None or found[1] == found[0]
        sizes.append(found[1])
    print(n - sizes.count(None), sizes.count(None))


def result(read: Any, data: bytes) -> Any:
    """Return the size that a function finds; None: it refuses the file."""
    try:
        found = read(data)
    except ImageError:
        return None
    return (found.height, found.width) if isinstance(found, Image.Image) else found


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_the_expansion_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """Fails if the student, the engine or the teacher would get another number of tokens than the model's processor."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    folder = save_vision_model(tmp_path, kind)
    ours, tokenizer = ImageProcessor(str(folder)), AutoTokenizer.from_pretrained(folder)
    pixels = AutoImageProcessor.from_pretrained(folder)
    whole = AutoProcessor.from_pretrained(folder) if kind == "llava" else None  # the others' needs torchvision
    mark, rng = tokenizer.convert_ids_to_tokens(ours.token_id), random.Random(1)
    images = [EncodedImage(picture(rng.randrange(4, 400), rng.randrange(4, 400), i)) for i in range(50)]
    for own in [*([image] for image in images), *(images[at : at + 3] for at in range(0, 48, 3))]:
        text = f" b{mark}" * len(own) + " c"
        decoded = [decode(image.data) for image in own]
        if whole is not None:
            expected = whole(text=text, images=decoded)["input_ids"][0]
        else:  # the rule of its processor
            grids = pixels(images=decoded, return_tensors="pt")["image_grid_thw"]
            marks = [mark * n for n in (grids.prod(-1) // pixels.merge_size**2).tolist()]
            expected = tokenizer("".join(f" b{each}" for each in marks) + " c")["input_ids"]
        ids = ours.expand(tokenizer(text)["input_ids"], own)
        assert ids == list(expected)
        ours.check(np.array(ids), own)


def test_ids_of_other_images_are_refused(tmp_path: Path) -> None:
    """Fails if a token too much or too little, or images in another order, would give scores of other images."""
    ours = ImageProcessor(str(save_vision_model(tmp_path, "qwen3_vl")))
    small, large, wide = (EncodedImage(picture(*size)) for size in ((56, 56), (112, 112), (56, 112)))
    token = ours.token_id
    assert [ours.n_tokens(image) for image in (small, large, wide)] == [4, 16, 8]
    for between in ([], [1]):
        ids = np.array([1, *[token] * 4, *between, *[token] * 16, 2])
        ours.check(ids, [small, large])
        wrong = [(other, [small, large]) for other in (np.delete(ids, 2), np.insert(ids, 2, token), ids[ids != token])]
        wrong += [(ids, images) for images in ([small], [large], [small, large, wide], [wide, large], [])]
        wrong += [(ids, [large, small])] if between else []  # The sum is the same.
        for other, images in wrong:
            with pytest.raises(ImageError, match="tokens"):
                ours.check(other, images)
    ours.check(np.delete(ids, 5), [small, wide, wide])  # one run of three images
    with pytest.raises(ImageError, match="1 placeholders for 2 images"):
        ours.expand([1, token, 2], [small, large])
