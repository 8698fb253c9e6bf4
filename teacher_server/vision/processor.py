"""Prepare images for a model: the number of their tokens, and the inputs of its vision tower.

A prompt has one placeholder for each image, which stands for as many tokens as the model computes features. Token ids
are *expanded* everywhere but in the text: lengths, budgets and positions of rows are then those of the model.

Four kinds of models are known. Qwen's read an image of any size as patches on a grid, and merge neighbors. LLaVA's cut
each image to one size. InternVL cuts it to tiles of one size, and its tokens stand between two more. Gemma 3 cuts it to
one size, too; its templates write a mark that stands for a text with line feeds and one placeholder.
"""

from __future__ import annotations

import io
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from teacher_server.vision.images import EncodedImage, ImageError, decode, image_size

if TYPE_CHECKING:
    from torch import Tensor

_CACHE_BYTES = 256 << 20
_ON_GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
# Model types whose logprobs in vLLM and in transformers were compared: docs/vision.md.
COMPARED = (*_ON_GRIDS, "llava", "internvl", "gemma3")
ATTENDING_BOTH_WAYS = ("gemma3",)  # a token of an image attends to all others of it
# Why others are refused, where something is known.
_DIFFERENCES = {
    "mistral3": "it reads an image in rows with a token behind each, and prompts are expanded without those",
    "pixtral": "it reads an image in rows with a token behind each, and prompts are expanded without those",
}


@dataclass(frozen=True, slots=True)
class Pixels:
    """Inputs of a vision tower for one image."""

    values: Tensor  # float32: [patches, D] on a grid, else [tiles, 3, height, width]
    grid: Tensor | None  # [1, 3] int64: frames, rows and columns of patches; None: all tiles have one size


class ImageProcessor:
    """The image processor of a model's folder. Pixels are computed in a thread of its own.

    Raises:
        ImageError: the model reads no images, or not in a known way, or its processor cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

        config = AutoConfig.from_pretrained(path, local_files_only=True)
        vision = getattr(config, "vision_config", None)
        if vision is None or getattr(config, "image_token_id", None) is None:
            raise ImageError(f"a {config.model_type} model reads no images")
        kind = config.model_type
        if kind == "llava" and vision.model_type != "clip_vision_model":
            kind = vision.model_type
        if kind not in COMPARED:
            why = _DIFFERENCES.get(kind, "what vLLM computes of them was not compared with transformers")
            supported = f"supported are {', '.join(COMPARED)}"
            raise ImageError(f"images of a {config.model_type} model are not supported: {why}; {supported}")
        if kind in _ON_GRIDS and (missing := _unnamed_positions(config)):
            fix = "vLLM computes other positions without it than transformers"
            raise ImageError(f"its config.json has no {missing} in the rope_parameters of text_config: {fix}")
        try:
            self._processor = AutoImageProcessor.from_pretrained(path, local_files_only=True)
            self._around = list[int](), list[int]()  # the tokens in front of those of an image, and behind them
            self.written = "", ""  # what templates write for an image, and what the model's processor puts there
            self._lost: re.Pattern[str] | None = None  # texts in which vLLM does not find an image
            if kind in ("internvl", "gemma3"):
                tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            if kind == "internvl":
                self._around = [tokenizer.start_image_token_id], [tokenizer.end_image_token_id]
            if kind == "gemma3":  # line feeds merge with those of the text
                begin = tokenizer.boi_token
                end = tokenizer.eoi_token
                self.written = begin, f"\n\n{begin}{tokenizer.image_token}{end}\n\n"
                # vLLM 0.32 splits tokens of three line feeds in front of an image, and of four on both sides.
                self._lost = re.compile(rf"{re.escape(end)}\n{{3}}(?!\n(?!\n))|\n{{5}}{re.escape(begin)}")
        except (OSError, ValueError, ImportError, AttributeError) as error:
            raise ImageError(f"its image processor cannot be loaded ({error})") from error
        self.model_type = config.model_type
        self.token_id = int(config.image_token_id)
        self.both_ways = kind in ATTENDING_BOTH_WAYS
        self._merged = 1
        self._size = 0
        self._fixed = 0
        self._tile = 1
        if kind in _ON_GRIDS:
            self._merged = int(vision.spatial_merge_size) ** 2  # patches of a token
        elif kind == "internvl":
            if (config.vision_feature_layer, config.vision_feature_select_strategy) != (-1, "default"):
                raise ImageError('vLLM reads it as if it had vision_feature_layer -1 and the strategy "default"')
            self._processor.crop_to_patches = True  # InternVLProcessor ignores the folder's setting
            self._size = int(vision.image_size[0])
            n_patches = (self._size // int(vision.patch_size[0])) ** 2
            self._tile = int(n_patches * config.downsample_ratio**2)  # tokens of a tile
        elif kind == "gemma3":
            self._size = int(vision.image_size)
            self._fixed = int(config.mm_tokens_per_image)
            if (window := config.text_config.sliding_window) < self._fixed:
                raise ImageError(f"an image has {self._fixed} tokens, and beyond its window of {window} vLLM is causal")
        else:
            self._size = int(vision.image_size)
            # The first feature of CLIP is of the whole image.
            left_out = config.vision_feature_select_strategy == "default"
            self._fixed = (self._size // int(vision.patch_size)) ** 2 + 1 - left_out
        self._thread = ThreadPoolExecutor(1, "pixels")
        self._n_tokens: dict[bytes, int] = {}  # digest -> tokens
        self._cache: OrderedDict[bytes, Future[Pixels]] = OrderedDict()
        self._uncounted: list[bytes] = []  # images whose bytes are not in `_n_bytes` yet
        self._n_bytes = 0
        self.waited_s = 0.0  # time that `pixels` has waited for the thread
        self.busy_s = 0.0  # time that the thread has computed

    def n_tokens(self, image: EncodedImage) -> int:
        """Return the number of tokens of an image. Reads its header only. Raises ImageError."""
        if image.digest not in self._n_tokens:
            height, width = image_size(image.data)
            try:
                n = self._fixed or int(self._processor.get_number_of_image_patches(height, width, {}))
            except ValueError as error:  # Qwen's refuses sides of a ratio of more than 200
                raise ImageError(f"the model's processor refuses it: {error}") from error
            self._n_tokens[image.digest] = n * self._tile // self._merged
        return self._n_tokens[image.digest]

    def prepare(self, images: Iterable[EncodedImage]) -> list[Future[Pixels]]:
        """Start to compute the inputs of the tower for each image, unless they are cached. Does not wait."""
        self._trim()
        futures = []
        for image in images:
            if image.digest not in self._cache:
                self._cache[image.digest] = self._thread.submit(self._computed, image.data)
                self._uncounted.append(image.digest)
            self._cache.move_to_end(image.digest)
            futures.append(self._cache[image.digest])
        return futures

    def pixels(self, images: Iterable[EncodedImage]) -> list[Pixels]:
        """Return the inputs of the tower for each image. Raises ImageError."""
        futures = self.prepare(images)
        start = time.perf_counter()
        try:
            return [future.result() for future in futures]
        finally:
            self.waited_s += time.perf_counter() - start

    def spelled(self, text: str) -> str:
        """Return a rendered text with what the processor writes for images. Raises ImageError: vLLM misses one."""
        text = text.replace(*self.written)
        if self._lost is not None and self._lost.search(text):
            raise ImageError("an odd number of line feeds stands behind an image, or three or more next to one")
        return text

    def expand(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> list[int]:
        """Return token ids with as many placeholders for each image as it has tokens.

        Raises:
            ImageError: `ids` has another number of placeholders, or two without a token between them.
        """
        places = [i for i, token in enumerate(ids) if token == self.token_id]
        if len(places) != len(images):
            raise ImageError(f"the prompt has {len(places)} placeholders for {len(images)} images")
        pieces = list[int]()
        start = 0
        for place, image in zip(places, images, strict=True):
            begin, end = self._around
            pieces += [*ids[start:place], *begin, *[self.token_id] * self.n_tokens(image), *end]
            start = place + 1
        expanded = [*pieces, *ids[start:]]
        self.check(np.array(expanded), images)
        return expanded

    def check(self, ids: np.ndarray, images: Sequence[EncodedImage]) -> None:
        """Raise ImageError unless expanded ids have the tokens of these images, in order: another processor made them.

        Images that follow each other without a token between them are one run, and have no positions on grids then.
        """
        is_image = ids == self.token_id
        sizes = np.diff(np.flatnonzero(np.diff(is_image, prepend=False, append=False)))[::2].tolist()
        needed = [self.n_tokens(image) for image in images]
        runs = [size % self._fixed for size in sizes] if self._fixed else [1]  # images of one size fill whole runs
        if sizes != needed and (any(runs) or sum(sizes) != sum(needed)):
            raise ImageError(f"its images have {sizes} tokens, and this model's processor makes {needed} of them")

    def probe(self) -> list[float]:
        """Return numbers that tell processors apart: sizes, filters and normalization, of three made-up images."""
        numbers: list[float] = []
        for pixels in self.pixels(_made_up()):
            flat = pixels.values.double().flatten().numpy()
            indices = np.linspace(0, len(flat) - 1, 16).astype(np.int64)
            shape = pixels.values.shape if pixels.grid is None else pixels.grid.flatten().tolist()
            numbers += [*map(float, shape), float(flat.mean()), float(flat.std()), *flat[indices].tolist()]
        return [round(number, 4) for number in numbers]

    def _computed(self, data: bytes) -> Pixels:
        start = time.perf_counter()
        try:
            output = self._processor(images=[decode(data)], return_tensors="pt")
        except ValueError as error:
            raise error if isinstance(error, ImageError) else ImageError(str(error)) from error
        finally:
            self.busy_s += time.perf_counter() - start
        values = output["pixel_values"]
        if self._size and (values.shape[1:] != (3, self._size, self._size) or (self._fixed and len(values) != 1)):
            raise ImageError(f"its processor makes {[*values.shape]} pixels, and the tower reads {self._size}")
        return Pixels(values, output.get("image_grid_thw"))

    def _trim(self) -> None:
        """Leave out the images that were used the longest time ago, and the errors of those that failed."""
        new = self._uncounted
        self._uncounted = []
        for key in new:
            if not self._cache[key].done():
                self._uncounted.append(key)
            elif self._cache[key].exception():
                del self._cache[key]
            else:
                self._n_bytes += self._cache[key].result().values.nbytes
        while self._n_bytes > _CACHE_BYTES and (oldest := next(iter(self._cache))) not in self._uncounted:
            self._n_bytes -= self._cache.pop(oldest).result().values.nbytes


def _unnamed_positions(config: Any) -> str:
    """Return what config.json does not say of the positions of images; empty: all is there."""
    rope = config.text_config.rope_parameters or {}
    needed = ["mrope_section", *(["mrope_interleaved"] if config.model_type != "qwen2_5_vl" else [])]
    return ", ".join(name for name in needed if not rope.get(name))


def _made_up() -> list[EncodedImage]:
    from PIL import Image

    images = []
    for height, width in ((60, 90), (300, 200), (480, 640)):
        y, x = np.mgrid[0:height, 0:width]
        red = 255 * x // width
        green = 255 * y // height
        blue = ((x // 7 + y // 5) % 2 * 160 + (x * y) % 64).astype(np.int64)
        file = io.BytesIO()
        Image.fromarray(np.stack([red, green, blue], -1).astype(np.uint8)).save(file, "PNG", compress_level=1)
        images.append(EncodedImage(file.getvalue()))
    return images
