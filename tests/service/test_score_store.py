"""Scores of dataset responses that are kept in files: exactness, damage, several processes, size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_teacher import TeacherConfig
from gkd.errors import CheckpointError, TeacherUnavailable
from gkd.preflight.teacher import record_teachers, recorded_teachers
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.group_endpoint import ScoreSummary
from gkd.scoring.teacher.store import SUFFIX, ScoreStore, open_store, packed, score_key, unpacked
from gkd.scoring.teacher.window import Window
from gkd.text.comparison import Comparison
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.protocol import Wire
from teacher_server.wire.table import TopKTable
from tests.processes import wait_until
from tests.refusals import refuses
from tests.service.harness import TRIVIAL, ServerProcess, connect, own_turns, random_rollouts, trivial_model

pytestmark = pytest.mark.service
N_VOCAB = 250


def from_dataset(n: int, seed: int = 5) -> list[Rollout]:
    return [replace(rollout, on_policy=False, version_spans=()) for rollout in random_rollouts(n, N_VOCAB, seed)]


def scores_of(rollout: Rollout) -> TeacherScores:
    """Return scores that follow from the tokens, so that a reader can tell them from any others."""
    rng = np.random.default_rng(rollout.response_ids)
    n = len(rollout.response_ids)
    ids = rng.integers(0, N_VOCAB, (n, 8)).astype(np.int32)
    topk = TopKTable(ids, rng.normal(size=(n, 8)).astype(np.float32), rng.random(n, np.float32))
    return TeacherScores(topk, rng.normal(size=n).astype(np.float32))


def key_of(rollout: Rollout) -> bytes:
    return rollout.prompt_id.to_bytes(16, "little")


def assert_equal(found: TeacherScores, expected: TeacherScores) -> None:
    for name in ("ids", "logprobs", "tail"):
        np.testing.assert_array_equal(getattr(found.topk, name), getattr(expected.topk, name))
    np.testing.assert_array_equal(found.sampled_logprobs, expected.sampled_logprobs)


def filled(folder: Path, rollouts: Sequence[Rollout]) -> ScoreStore:
    store = ScoreStore(folder)
    for rollout in rollouts:
        store.put(key_of(rollout), rollout, scores_of(rollout))
    return store


def test_a_store_that_cannot_be_a_folder_names_the_key(tmp_path: Path) -> None:
    """Fails if a file in the place of teacher.store ends a run or `gkd score` with an error that does not name it."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with refuses("teacher.store"):
            open_store(TeacherConfig(store=str(path)))


def test_what_one_process_writes_another_reads(tmp_path: Path) -> None:
    """Fails if a score changes by a bit, or groups of ranks do not see each other's scores."""
    rollouts = from_dataset(30)
    reader, writer = ScoreStore(tmp_path), filled(tmp_path, rollouts[:20])
    assert reader.get(key_of(rollouts[0]), rollouts[0]) is None
    reader.refresh()
    for rollout in rollouts[:20]:
        for store in (reader, writer, ScoreStore(tmp_path)):
            found = store.get(key_of(rollout), rollout)
            assert_equal(found, scores_of(rollout))
    assert reader.get(key_of(rollouts[25]), rollouts[25]) is None
    assert reader.get(key_of(rollouts[3]), rollouts[4]) is None, "a record of another sequence"


@pytest.mark.parametrize("wire", ["fp16", "fp32"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_record_returns_every_signal_bit_by_bit(wire: Wire, is_masked: bool) -> None:
    """Fails if a stored epoch trains otherwise than the first one, with any signal, precision or mass target."""
    (rollout,) = from_dataset(1)
    rollout = replace(rollout, teacher_ids=np.arange(7, dtype=np.int32))
    rollout = own_turns(rollout) if is_masked else rollout
    assert (rollout.n_own < len(rollout.response_ids)) == is_masked
    rng, n = np.random.default_rng(1), rollout.n_own
    exact = np.float16 if wire == "fp16" else np.float32
    counts = rng.integers(1, 9, n).astype(np.int32)
    ids, logprobs = rng.integers(0, 1 << 24, (n, 8)).astype(np.int32), -rng.random((n, 8)).astype(exact)
    left_out, tail = np.arange(8) >= counts[:, None], rng.random(n).astype(exact).astype(np.float32)
    short = np.where(left_out, -1, ids), np.where(left_out, -np.inf, logprobs.astype(np.float32))
    sampled, matrix = -rng.random(n, np.float32), rng.normal(size=(n, 300)).astype(exact)
    for scores in (
        TeacherScores(TopKTable(ids, logprobs.astype(np.float32), rng.random(n, np.float32)), sampled),
        TeacherScores(TopKTable(*short, tail, counts)),
        TeacherScores(sampled_logprobs=sampled),
        TeacherScores(logits=matrix),
        TeacherScores(hidden=matrix.astype(np.float32)),
    ):
        found = unpacked(packed(rollout, scores, wire), rollout)
        for before, after in ((scores, found), (scores.topk, found.topk)):
            for field in fields(before) if before is not None else ():
                one, other = getattr(before, field.name), getattr(after, field.name)
                if isinstance(one, np.ndarray):
                    assert one.dtype == other.dtype and np.array_equal(one, other), field.name
                elif field.name != "topk":
                    assert one is other is None
        others = [replace(rollout, response_ids=rollout.response_ids[::-1])]
        if rollout.own is not None:
            others += [replace(rollout, own=None), replace(rollout, own=np.roll(rollout.own, 1))]
        for other in others:
            with pytest.raises(CheckpointError):
                unpacked(packed(rollout, scores, wire), other)


def test_the_key_has_the_mask() -> None:
    """Fails if a trajectory gets the rows of another one with the same tokens, or scores that were stored by an earlier
    version are not found.
    """
    ids, more = np.arange(1, 5, dtype=np.int32), np.arange(5, 12, dtype=np.int32)
    whole = Rollout(1, 2, ids, more, np.zeros(7, np.float32), (), "stop", on_policy=False)
    teacher = TeacherConfig(topk=8, mass=0.0, temperature=1.0, wire="fp16")
    masks = [np.arange(7) < 3, np.arange(7) > 3, np.arange(7) % 2 == 0]
    masked = [replace(whole, own=mask) for mask in masks]
    keys = [score_key(rollout, teacher, "f", ("topk",), N_VOCAB) for rollout in (whole, *masked)]
    assert len(set(keys)) == 4
    assert keys[0].hex() == "b302620ff18f6b630b52464c7c1c2ded", "as before there were masks"
    assert score_key(replace(whole, own=np.ones(7, bool)), teacher, "f", ("topk",), N_VOCAB) == keys[0]


def test_damage_is_never_returned(tmp_path: Path) -> None:
    """Fails if scores with a flipped bit, or of a file that ends early, reach the training."""
    rollouts = from_dataset(6)
    filled(tmp_path, rollouts)
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    whole, rng, n_missing = file.read_bytes(), np.random.default_rng(0), 0
    for case in range(300):
        data = bytearray(whole)
        if case % 3:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        else:
            del data[rng.integers(len(data)) :]
        file.write_bytes(data)
        store = ScoreStore(tmp_path)
        for rollout in rollouts:
            found = store.get(key_of(rollout), rollout)
            n_missing += found is None
            if found is not None:
                assert_equal(found, scores_of(rollout))
    assert n_missing > 300


WRITER = """
import sys
from pathlib import Path
from tests.service.test_score_store import from_dataset, key_of, scores_of
from gkd.scoring.teacher.store import ScoreStore
store = ScoreStore(Path(sys.argv[1]))
for rollout in from_dataset(20_000):
    store.put(key_of(rollout), rollout, scores_of(rollout))
"""


def test_a_killed_writer_leaves_nothing_wrong(tmp_path: Path) -> None:
    """Fails if what a process was writing when it was killed is read, or spoils what it had written before."""
    for delay_s in (0.05, 0.11, 0.17):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
        n_before = len(list(tmp_path.glob(f"*{SUFFIX}")))
        wait_until(lambda n=n_before: len(list(tmp_path.glob(f"*{SUFFIX}"))) > n, 60.0, "the first record")  # type: ignore[misc]
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
    rollouts, store = from_dataset(20_000), ScoreStore(tmp_path)
    found = [(rollout, store.get(key_of(rollout), rollout)) for rollout in rollouts[:2000]]
    assert sum(scores is not None for _, scores in found) > 20
    for rollout, scores in found:
        if scores is not None:
            assert_equal(scores, scores_of(rollout))


def test_a_full_disk_ends_the_writing_alone(tmp_path: Path) -> None:
    """Fails if a run ends because its store cannot grow."""
    rollouts = from_dataset(3)
    store = filled(tmp_path, rollouts[:1])
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    file.unlink()
    file.mkdir()  # it cannot be opened for writing, also by root
    store.put(key_of(rollouts[1]), rollouts[1], scores_of(rollouts[1]))
    assert store.get(key_of(rollouts[1]), rollouts[1]) is None
    os.rmdir(file)


def test_an_endpoint_asks_the_teacher_once(tiny_server: ServerProcess, tmp_path: Path) -> None:
    """Fails if a dataset response is scored twice, if stored scores differ by a bit, or if those of another
    temperature, dtype or engine, or of a response of the student come from the store.
    """
    with connect(tiny_server.port) as client:
        fingerprint = client.info().fingerprint
    rollouts = [*from_dataset(5), *map(own_turns, from_dataset(5, seed=6)), *random_rollouts(4, N_VOCAB, seed=8)]

    def scored(temperature: float, numerics: str = "hf float32") -> tuple[list[TeacherScores], int]:
        settings = (f"teacher.server_port={tiny_server.port}", "teacher.topk=8", "teacher.wire=fp32")
        more = (f"teacher.store={tmp_path}", f"teacher.temperature={temperature}", "distill.on_policy_share=0.5")
        opened = ScoringEndpoint(
            load_config(None, [*settings, *more]),
            Comparison(N_VOCAB),
            [fingerprint],
            [Window(6, 3)],
            numerics=[numerics],
        )
        with opened.clients()[0]:  # type: ignore[attr-defined]
            scores, summary = opened.score(rollouts)
        times = ScoreSummary.decode(summary).times
        return list(scores), int((times.completed_s == times.submitted_s).sum())

    first, n_first = scored(0.7)
    again, n_again = scored(0.7)
    n_others = [scored(1.0)[1], scored(0.7, "hf bfloat16")[1], scored(0.7, "vllm float32")[1]]
    assert (n_first, n_again, n_others) == (0, 10, [0, 0, 0])
    for one, other in zip(first[:10], again[:10], strict=True):
        np.testing.assert_array_equal(one.topk.logprobs, other.topk.logprobs)
        np.testing.assert_array_equal(one.topk.ids, other.topk.ids)


def test_the_recorded_teacher_is_the_one_that_the_run_names(tmp_path: Path) -> None:
    """Fails if a run without a server trains on what another teacher of it has scored into the same folder."""
    settings = [f"teacher.store={tmp_path}", "distill.on_policy_share=0", "data.val_files=[]"]
    away = TeacherUnavailable("the server is away")

    def configured(name: str) -> Config:
        return load_config(None, [*settings, f"teacher.name={name}"])

    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=TRIVIAL) as server, connect(server.port) as one:
        math = replace(one.info(), teacher="math")
    record_teachers(configured("math"), [math])
    for name in ("math", ""):
        assert recorded_teachers(configured(name), away) == (math,)
    settings.append("teacher.server_port=15999")
    assert recorded_teachers(configured("math"), away) == (math,)
    for name in ("code", ""):
        with pytest.raises(TeacherUnavailable):
            recorded_teachers(configured(name), away)


def test_a_store_without_dataset_responses_is_refused(tmp_path: Path) -> None:
    """Fails if a setting without an effect is accepted."""
    run = ["data.train_files=[a.jsonl]", "model.path=m", "trainer.run_dir=r", f"teacher.store={tmp_path}"]
    local = ["distill.on_policy_share=0", "teacher.backend=local", "teacher.path=x"]
    for settings in (["distill.on_policy_share=1"], local):
        with refuses("teacher.store"):
            check_config(load_config(None, [*run, *settings]))
