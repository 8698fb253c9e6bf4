"""Requests with images at real servers: scores of transformers, hostile messages, and equal ids with other images."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from gkd.config.schema_teacher import TeacherConfig
from gkd.scoring.teacher.store import ScoreStore, score_key
from gkd.types import Rollout, TeacherScores
from teacher_server.vision.images import EncodedImage, decode
from teacher_server.vision.processor import ImageProcessor
from teacher_server.wire.payload import pack_images
from teacher_server.wire.protocol import MAX_IMAGE_BYTES, as_frame, checksum, replies, seal
from teacher_server.wire.worker_protocol import prompts_of
from tests.service.harness import ServerProcess, connect, random_rollouts, submit, table_of
from tests.service.messages import make_request
from tests.service.test_given_ids import raw
from tests.vision_models import picture, save_vision_model

pytestmark = [pytest.mark.service, pytest.mark.cpu_only("float32")]
A, B, C = (EncodedImage(picture(40, 50, seed)) for seed in range(3))  # of one size
PROMPTS = ["A.", "B.", "C.", "A.B", "B.A", "A.A", "AB.", "BB.", "A" + 90 * ".", "A" + 90 * ".", "B" + 90 * ".", "."]


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    model = save_vision_model(tmp_path_factory.mktemp("llava"))
    options = ("--images", "--engine", request.param, "--dtype", "float32")
    with ServerProcess(model, model, options=options, n_workers=1 + (request.param == "hf")) as server:
        yield server


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    """Return sequences of `PROMPTS`: some differ by their images alone, some have a prompt that engines share."""
    processor, made = ImageProcessor(str(save_vision_model(tmp_path_factory.mktemp("model")))), list[Rollout]()
    for rollout, form in zip(random_rollouts(len(PROMPTS), 200, response=(6, 6)), PROMPTS, strict=True):
        images = tuple({"A": A, "B": B, "C": C}[letter] for letter in form if letter != ".")
        ids = processor.expand([5 if letter == "." else processor.token_id for letter in form], images)
        made.append(replace(rollout, prompt_ids=np.array(ids, np.int32), images=images))
    return [replace(rollout, response_ids=made[0].response_ids) for rollout in made]


def test_scores_are_those_of_transformers(server: ServerProcess, tmp_path: Path, sequences: list[Rollout]) -> None:
    """Fails if a sequence gets scores of another image: of its neighbor, a shared prompt, or after a worker's death."""
    model = save_vision_model(tmp_path)  # Its weights follow from the seed.
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    prepare, wholes = AutoImageProcessor.from_pretrained(model), list[torch.Tensor]()
    for each in sequences:
        ids = torch.from_numpy(np.concatenate([each.prompt_ids, each.response_ids]))[None].long()
        images = [decode(image.data) for image in each.images]
        pixels = prepare(images=images, return_tensors="pt")["pixel_values"] if images else None
        with torch.no_grad():
            logits = plain(input_ids=ids, pixel_values=pixels).logits[0, len(each.prompt_ids) - 1 : -1]
        wholes.append(logits.log_softmax(-1))
    with connect(server.port, k=64) as teacher:
        found = [[scores.topk for scores in teacher.submit(sequences, ("topk",)).result(60)]]
        found += [[table_of(submit(teacher, each).result(60)) for each in sequences]]
        if len(server.worker_pids) > 1:
            os.kill(server.worker_pids[0], signal.SIGSTOP)
            futures = [submit(teacher, each) for each in sequences]
            os.kill(server.worker_pids[0], signal.SIGKILL)
            found += [[table_of(future.result(60)) for future in futures]]
    for tables in found:
        for table, whole in zip(tables, wholes, strict=True):
            expected = whole.gather(1, torch.from_numpy(table.ids).long())
            np.testing.assert_allclose(table.logprobs, expected, atol=1e-5)
    for i, j in ((0, 1), (3, 4), (6, 7), (8, 10)):
        assert (wholes[i] - wholes[j]).abs().max() > 1e-3


def message(rollout: Rollout, **changes: Any) -> list[bytes]:
    """Return the frames of a request for one sequence. Changes of the header are not checked."""
    tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    frames = pack_images([image.data for image in rollout.images])
    header = make_request(tokens, prompt_length=len(rollout.prompt_ids), deadline_s=30.0, k=8)
    own = {"image_sizes": [*map(len, frames)], "image_indices": [[*range(len(frames))]]}
    for name, value in (own | {"given_checksums": [*map(checksum, frames)]} | changes).items():
        setattr(header, name, value)
    return [seal(msgspec.msgpack.encode(header)), bytes(as_frame(tokens)), *map(bytes, frames)]


def test_hostile_messages(server: ServerProcess, sequences: list[Rollout], tiny_server: ServerProcess) -> None:
    """Fails if a damaged, missing, exchanged or untrue image is scored, or a message of a client ends a worker."""
    one, two = sequences[0], replace(sequences[3], images=(A, EncodedImage(picture(40, 50, 7) + b"x")))
    header, tokens, *frames = message(two)
    sizes = [image.n_bytes for image in two.images]
    flipped = bytes([*frames[0][:-9], frames[0][-9] ^ 1, *frames[0][-8:]])
    damaged = [[header, tokens, *own] for own in ([flipped, frames[1]], frames[:1], frames[::-1], [*frames, b"x"])]
    lies = ([sizes[0] + 1, sizes[1]], sizes[::-1], sizes[:1], [], [0, 1], [1 << 40, 1], [1] * 65, [MAX_IMAGE_BYTES] * 5)
    damaged += [message(two, image_sizes=lie, image_indices=[[*range(len(lie))]]) for lie in lies]
    damaged += [message(two, image_indices=lie) for lie in ([[0]], [[0, 2]], [[0, -1]], [[0], [1]], [])]
    torn = A.data[:150] + bytes(len(A.data) - 162) + A.data[-12:]  # its header and its end are whole
    other = {"images": (A, B)}, {"images": ()}, {"prompt_ids": one.prompt_ids[:-2]}
    bad = [(replace(one, **change), "tokens") for change in other]
    hostile = ((b"\x89PNG" + bytes(99), "is not a"), (picture(8, 2000), "200 times"), (torn, "cannot be decoded"))
    bad += [(replace(one, images=(EncodedImage(data),)), words) for data, words in hostile]
    cases = [(server, each, ("damaged",), "") for each in damaged]
    cases += [(server, message(each), ("bad_request", "engine"), words) for each, words in bad]
    for to, frames, codes, words in [*cases, (tiny_server, message(one), ("bad_request",), "--images")]:
        refused = replies.decode(raw(to.port, frames)[0])
        assert refused.code in codes and words in refused.text
    with connect(server.port) as teacher:
        assert len(table_of(submit(teacher, one).result(60)).ids) == 6


def test_equal_ids_with_other_images_are_told_apart(tmp_path: Path, sequences: list[Rollout]) -> None:
    """Fails if stored scores, or the broker's owner of a prompt, are found by the ids alone."""
    one, other = (replace(each, on_policy=False, version_spans=()) for each in sequences[:2])
    tokens = np.concatenate([one.prompt_ids, one.response_ids])
    request = make_request(tokens, prompt_length=len(one.prompt_ids), image_sizes=[1], image_indices=[[0]])
    (first,), (second,) = (prompts_of(request, as_frame(tokens), [image.digest]) for image in (A, B))
    assert first.digest != second.digest and first.parent != second.parent
    keys = [score_key(each, TeacherConfig(), "m", ["sampled"], 0) for each in (one, other)]
    store = ScoreStore(tmp_path)
    store.put(keys[0], one, TeacherScores(None, np.zeros(6, np.float32)))
    assert keys[0] != keys[1] and store.get(keys[0], one) is not None and store.get(keys[0], other) is None
