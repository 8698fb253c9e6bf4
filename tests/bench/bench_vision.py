"""Measure students and teachers that read images: python -m tests.bench.bench_vision [--only PART,..] [--json FILE]

runs: whole runs, computed again by plain transformers (those of Qwen need torchvision, see tests/e2e/test_vision.py).
wire: bytes of a request to the teacher for an image. memory: the driver's, by rows and by bytes of images. pixels:
steps of a student with images and with text of as many tokens, and the share of the step that waits for pixels.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from teacher_server.wire.table import TopKTable
from tests.bench.command import parsed, parser
from tests.bench.teacher_report import machine
from tests.results import as_rows, write_results
from tests.vision_models import missing, picture, save_vision_model

PARTS = ("runs", "wire", "memory", "pixels")
# A photograph of one megapixel: a smooth picture with some noise, as JPEG.
SIDE, QUALITY = 1024, 90
ROWS = (1_000, 10_000, 100_000)
LARGER = 20  # times the bytes of an image
STEPS, N_IMAGES = 5, 8


def photograph(seed: int) -> bytes:
    """Return a JPEG of one megapixel."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(smooth) + rng.normal(0, 4, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def runs() -> list[dict[str, Any]]:
    """Return the errors of each run of the tests."""
    from tests.e2e.test_vision import CI, SLOW, compare

    found = []
    for kind, engine, options in [*CI, *SLOW]:
        if not missing(kind):
            with tempfile.TemporaryDirectory() as root:
                errors = compare(Path(root), kind, engine, options)
            row = {"model": kind, "server": engine or "local", "options": " ".join(options)}
            found.append(row | {name: float(f"{error:.1e}") for name, error in errors.items()})
            print(found[-1], flush=True)
    return found


def wire() -> dict[str, Any]:
    """Return the bytes of a request with and without an image, and of the image and its pixels."""
    from gkd.scoring.teacher.client import sequence_of
    from gkd.types import Rollout
    from teacher_server.client.requests import RequestSettings
    from teacher_server.vision.images import EncodedImage
    from teacher_server.wire.protocol import requests

    image = EncodedImage(photograph(0))
    settings = RequestSettings("", 64, 1.0, 0, "fp16", 60.0)
    ids = np.arange(1, 1001, dtype=np.int32)
    common: dict[str, Any] = {"version_spans": (), "on_policy": False, "finish_reason": "length"}
    sizes = []
    for images in ((), (image,)):
        samples = [Rollout(0, i, ids, ids[:100], np.zeros(100, np.float32), images=images, **common) for i in range(4)]
        message = settings.score([sequence_of(sample) for sample in samples], "topk", k=64)
        sizes.append(len(requests.encode(message.header)) + sum(memoryview(frame).nbytes for frame in message.frames))
    return {"request": sizes[0], "with_image": sizes[1], "image": image.n_bytes, "pixels": 3 * 4 * SIDE * SIDE}


def memory() -> list[dict[str, Any]]:
    """Return the peak memory of loading prompts, each time in a process of its own."""
    found = []
    for n_rows in ROWS:
        for copies in (1, LARGER):
            command = [sys.executable, "-m", "tests.bench.bench_vision", "--load", f"{n_rows},{copies}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(found[-1], flush=True)
    return found


def load(n_rows: int, copies: int) -> dict[str, Any]:
    """Load rows with an image each, in a parquet file that is written row group by row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gkd.config.schema_sections import DataConfig
    from gkd.data.images import ImageReader
    from gkd.data.prompts import RowReader, load_prompts, load_tokenizer
    from teacher_server.vision.processor import ImageProcessor

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        save_vision_model(folder, "llava")
        file = folder / "rows.parquet"
        base = picture(64, 64)
        with pq.ParquetWriter(file, pa.schema([("prompt", pa.string()), ("images", pa.list_(pa.binary()))])) as writer:
            for start in range(0, n_rows, 500):
                # Bytes behind the end of a PNG make it larger, and another one.
                images = [[base + i.to_bytes(8, "big") * 60 * copies] for i in range(start, min(n_rows, start + 500))]
                prompts = ["<image>What is it?"] * len(images)
                writer.write_table(pa.table({"prompt": prompts, "images": images}, schema=writer.schema))
        config = DataConfig(train_files=[str(file)], images_key="images", max_prompt_length=64)
        reader = ImageReader(ImageProcessor(root), "images", folder)
        rows = RowReader(config, load_tokenizer(root, "model.path"), images=reader)
        started = time.perf_counter()
        read, _ = load_prompts([str(file)], "data.train_files", rows)
        n_bytes = sum(image.n_bytes for prompt in read for image in prompt.images)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        return {
            "rows": n_rows,
            "image_mib": round(n_bytes / (1 << 20), 1),
            "rss_mib": round(now),
            "peak_mib": round(peak),
            "rows_per_s": round(n_rows / (time.perf_counter() - started)),
        }


def pixels() -> dict[str, Any]:
    """Return seconds of a step with images and with text alone, and what the thread of the images did meanwhile."""
    import torch

    from gkd.data.collate import MicroBatches
    from gkd.types import Rollout, TeacherScores
    from teacher_server.vision.images import EncodedImage
    from tests.dist.helpers import group_of_one
    from tests.dist.student_cases import build_student

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root, group_of_one():
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
        folder = save_vision_model(Path(root), image_size=336, head_dim=64, num_key_value_heads=8, **sizes)
        student = build_student("fsdp2", folder, 0, 1, vision="frozen")
        processor = student.model.image_processor
        seconds: dict[str, list[float]] = {"images": [], "text": []}
        waited: list[float] = []
        busy: list[float] = []
        for step in range(STEPS):
            images = [EncodedImage(photograph(step * N_IMAGES + i)) for i in range(N_IMAGES)]
            n_tokens = processor.n_tokens(images[0])
            for name, times in seconds.items():
                rollouts = []
                scores = []
                for i, image in enumerate(images):
                    shown = [processor.token_id if name == "images" else 65] * n_tokens
                    ids = np.array([*rng.integers(1, 200, 8), *shown, *rng.integers(1, 200, 8)], np.int32)
                    response = rng.integers(1, 200, 32).astype(np.int32)
                    table = np.log(rng.dirichlet(np.ones(9), 32)[:, :8]).astype(np.float32)
                    listed = np.stack([rng.permutation(200)[:8] for _ in response]).astype(np.int32)
                    own = (image,) if name == "images" else ()
                    common: dict[str, Any] = {"version_spans": (), "on_policy": False, "finish_reason": "length"}
                    rollouts.append(Rollout(i, i, ids, response, np.zeros(32, np.float32), images=own, **common))
                    scores.append(TeacherScores(TopKTable.without_tail(listed, table)))
                groups = [list(range(at, at + 2)) for at in range(0, N_IMAGES, 2)]
                before = processor.waited_s, processor.busy_s
                started = time.perf_counter()
                student.train_step(MicroBatches(rollouts, scores, groups, packed=True, pad_id=0))
                times.append(time.perf_counter() - started)
                if name == "images":
                    waited.append(processor.waited_s - before[0])
                    busy.append(processor.busy_s - before[1])
        step_s, text_s = (float(np.median(times)) for times in seconds.values())
        return {
            "tokens": N_IMAGES * (n_tokens + 48),
            "images": N_IMAGES,
            "step_with_images_s": round(step_s, 2),
            "step_with_text_s": round(text_s, 2),
            "ratio": round(step_s / text_s, 3),
            "prepared_s": round(float(np.median(busy)), 2),
            "share_waiting": round(float(np.median(waited)) / step_s, 4),
        }


def main() -> None:
    commands = parser("tests.bench.bench_vision", __doc__ or "", PARTS)
    commands.add_argument("--load", help=argparse.SUPPRESS)
    args = parsed(commands, PARTS, None)
    if args.load:
        print(json.dumps(load(*map(int, args.load.split(",")))))
        return
    calls = {"runs": runs, "wire": wire, "memory": memory, "pixels": pixels}
    found = {name: calls[name]() for name in args.only.split(",")}
    print(as_rows(found, 3))
    if args.json is not None:
        before = json.loads(args.json.read_text()) if args.json.is_file() else {}
        write_results(args.json, {**before, "machine": machine(), **found})


if __name__ == "__main__":
    main()
