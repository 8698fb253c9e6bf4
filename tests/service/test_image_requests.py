"""Requests with images at real servers: scores of transformers, hostile messages, and what knows images apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
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
from teacher_server.wire.protocol import MAX_IMAGE_BYTES, ErrorReply, as_frame, checksum, replies, seal
from teacher_server.wire.worker_protocol import prompts_of
from tests.processes import is_alive
from tests.service.harness import ServerProcess, connect, random_rollouts, submit, table_of
from tests.service.messages import make_request
from tests.service.test_given_ids import raw
from tests.vision_models import picture, save_vision_model

pytestmark = [pytest.mark.service, pytest.mark.cpu_only("float32")]
A, B, C = (EncodedImage(picture(40, 50, seed)) for seed in range(3))  # of one size


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module", params=["hf", "vllm"])
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    options = ("--images", "--engine", request.param, "--dtype", "float32")
    with ServerProcess(model, model, options=options, n_workers=1 + (request.param == "hf")) as server:
        yield server


def rollouts(model: Path) -> list[Rollout]:
    """Return sequences with and without images, of which some differ by their images alone."""
    processor = ImageProcessor(str(model))
    token, ask = processor.token_id, [5] * 90
    prompts: list[tuple[list[int], Sequence[EncodedImage]]] = [
        *(([6, token, 7], [image]) for image in (A, B, C)),
        *(([6, token, 7, token], images) for images in ([A, B], [B, A], [A, A])),
        *(([token, token, 7], images) for images in ([A, B], [B, B])),
        *(([token, *ask], [image]) for image in (A, A, B)),
        ([6, 7], []),
    ]
    made = random_rollouts(len(prompts), 200, response=(6, 6))
    first = made[0].response_ids
    return [
        replace(
            rollout, prompt_ids=np.array(processor.expand(ids, own), np.int32), response_ids=first, images=tuple(own)
        )
        for rollout, (ids, own) in zip(made, prompts, strict=True)
    ]


def test_scores_are_those_of_transformers(server: ServerProcess, model: Path) -> None:
    """Fails if a sequence gets scores of another image: of its neighbor, of a shared prompt, or of the one before."""
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    prepare = AutoImageProcessor.from_pretrained(model)
    sequences, expected = rollouts(model), []
    for rollout in sequences:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]))[None].long()
        images = [decode(image.data) for image in rollout.images]
        pixels = prepare(images=images, return_tensors="pt")["pixel_values"] if images else None
        with torch.no_grad():
            expected.append(
                plain(input_ids=ids, pixel_values=pixels).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
            )
    with connect(server.port, k=64) as teacher:
        together = [scores.topk for scores in teacher.submit(sequences, ("topk",)).result(60)]
        alone = [table_of(submit(teacher, rollout).result(60)) for rollout in sequences]
    for tables in (together, alone):
        for table, whole in zip(tables, expected, strict=True):
            found = whole.gather(1, torch.from_numpy(table.topk_ids).long())
            np.testing.assert_allclose(table.topk_logprobs, found, atol=1e-5)
    for i, j in ((0, 1), (3, 4), (6, 7), (8, 10)):
        assert (expected[i] - expected[j]).abs().max() > 1e-3


def message(rollout: Rollout, **changes: Any) -> list[bytes]:
    """Return the frames of a request for one sequence. Changes of the header are not checked."""
    tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    frames = pack_images([image.data for image in rollout.images])
    header = make_request(tokens, prompt_length=len(rollout.prompt_ids), deadline_s=30.0, k=8)
    header.given_checksums = [checksum(frame) for frame in frames]
    header.image_sizes = [image.n_bytes for image in rollout.images]
    header.image_indices = [[*range(len(rollout.images))]]
    for name, value in changes.items():
        setattr(header, name, value)
    return [seal(msgspec.msgpack.encode(header)), bytes(as_frame(tokens)), *map(bytes, frames)]


def error_of(port: int, frames: list[bytes]) -> ErrorReply:
    reply = replies.decode(raw(port, frames)[0])
    assert isinstance(reply, ErrorReply)
    return reply


def test_hostile_messages_are_refused(server: ServerProcess, model: Path, tiny_server: ServerProcess) -> None:
    """Fails if a damaged, missing, exchanged or untrue image is scored, or a message of a client ends a worker."""
    two = replace(rollouts(model)[3], images=(A, EncodedImage(picture(40, 50, 7) + b"x")))
    header, tokens, *frames = message(two)
    sizes = [image.n_bytes for image in two.images]
    flipped = bytes([*frames[0][:-9], frames[0][-9] ^ 1, *frames[0][-8:]])
    for damaged in (
        *([header, tokens, *images] for images in ([flipped, frames[1]], frames[:1], frames[::-1], [*frames, b"x"])),
        *(message(two, image_sizes=lie) for lie in ([sizes[0] + 1, sizes[1]], sizes[:1], [], [0, 1], [1 << 40, 1])),
        *(message(two, image_indices=lie) for lie in ([[0]], [[0, 2]], [[0, -1]], [[0], [1]], [])),
        message(two, image_sizes=[MAX_IMAGE_BYTES] * 5, image_indices=[[*range(5)]]),
        message(two, image_sizes=[1] * 65, image_indices=[[*range(65)]]),
    ):
        assert error_of(server.port, damaged).code == "damaged"
    one = rollouts(model)[0]
    whole, garbage = A.data, EncodedImage(b"\x89PNG" + bytes(99))
    torn = EncodedImage(whole[:150] + bytes(len(whole) - 162) + whole[-12:])
    thin = EncodedImage(picture(8, 2000))
    for rollout, words in (
        (replace(one, images=(garbage,)), "is not a"),
        (replace(one, images=(thin,)), "200 times"),
        (replace(one, images=(A, B)), "tokens"),
        (replace(one, images=()), "tokens"),
        (replace(one, prompt_ids=one.prompt_ids[:-2]), "tokens"),
        (replace(one, images=(torn,)), "cannot be decoded"),
    ):
        refused = error_of(server.port, message(rollout))
        assert refused.code in ("bad_request", "engine") and words in refused.text
    assert all(map(is_alive, server.worker_pids))
    refused = error_of(tiny_server.port, message(one))
    assert (refused.code, "--images" in refused.text) == ("bad_request", True)


def test_a_request_survives_its_worker(server: ServerProcess, model: Path) -> None:
    """Fails if the images are lost when a worker dies with their request."""
    if len(server.worker_pids) == 1:
        pytest.skip("one worker")
    sequences = rollouts(model)
    with connect(server.port, k=64) as teacher:
        before = [table_of(submit(teacher, each).result(60)) for each in sequences]
        os.kill(server.worker_pids[0], signal.SIGSTOP)
        futures = [submit(teacher, each) for each in sequences]
        os.kill(server.worker_pids[0], signal.SIGKILL)
        after = [table_of(future.result(60)) for future in futures]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one.topk_logprobs, other.topk_logprobs, atol=1e-5)


def test_equal_ids_with_other_images_are_told_apart(tmp_path: Path, model: Path) -> None:
    """Fails if stored scores, or the broker's owner of a prompt, are found by the ids alone."""
    one, other = (replace(rollout, on_policy=False, version_spans=()) for rollout in rollouts(model)[:2])
    tokens = np.concatenate([one.prompt_ids, one.response_ids])
    request = make_request(tokens, prompt_length=len(one.prompt_ids), image_sizes=[1], image_indices=[[0]])
    (first,), (second,) = (prompts_of(request, as_frame(tokens), [image.digest]) for image in (A, B))
    assert first.digest != second.digest and first.parent != second.parent
    keys = [score_key(each, TeacherConfig(), "m", ["sampled"], 0) for each in (one, other)]
    assert keys[0] != keys[1]
    store = ScoreStore(tmp_path)
    store.put(keys[0], one, TeacherScores(None, np.zeros(len(one.response_ids), np.float32)))
    assert store.get(keys[0], one) is not None and store.get(keys[0], other) is None
