"""`gkd score`: the scores of dataset responses, made once, and a run that needs no teacher server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.errors import TeacherUnavailable
from gkd.preflight.dataset import check_scoring
from gkd.preflight.run import preflight
from gkd.scoring.teacher.store import SUFFIX
from gkd.tools import score
from tests.dist.helpers import free_port
from tests.e2e.conftest import Lab, _words
from tests.e2e.exactness import steps_of
from tests.processes import wait_until
from tests.refusals import refuses

pytestmark = pytest.mark.e2e
LOSSES = "distill.losses=[{name: forward_kl}, {name: sft, weight: 0.1}]"
DATASET = (LOSSES, "distill.on_policy_share=0", "data.val_files=[]", "eval.metric=none", "trainer.total_steps=3")
SCORE = (sys.executable, "-m", "gkd.cli", "score")


def words(lab: Lab, port: int, *overrides: str) -> list[str]:
    """Return the words after `gkd score`: those of a run."""
    return lab.command(lab.root / "unused", port, *DATASET, *overrides)[3:]


@pytest.mark.slow
def test_a_scored_dataset_trains_without_a_teacher(
    lab: Lab, teacher_port: int, tmp_path: Path, shared_ray: str
) -> None:
    """Fails if a run over scored responses needs the server, or trains on other scores than those of a run that asks
    it; or if a step without rollouts breaks the loop.
    """
    store, online, offline = f"teacher.store={tmp_path / 'store'}", tmp_path / "online", tmp_path / "offline"
    lab.finished_run(online, teacher_port, shared_ray, *DATASET)
    scored = subprocess.run([*SCORE, *words(lab, teacher_port, store)], capture_output=True, text=True, timeout=800)
    assert scored.returncode == 0 and "scored 40/40" in scored.stderr, scored.stderr[-4000:]
    assert not (lab.root / "unused").exists()
    closed = free_port()
    name = json.loads((tmp_path / "store" / "teachers.json").read_text())[0][1]["teacher"]
    lab.finished_run(offline, closed, shared_ray, *DATASET, store, f"teacher.name={name}")
    lines, stored = steps_of(online), steps_of(offline)
    for step in (1, 2, 3):
        assert stored[step]["teacher/stored_share"] == 1
        for key in ("loss/total", "loss/forward_kl", "loss/sft", "optim/grad_norm"):
            assert lines[step][key] == stored[step][key], "the scores differ"
        assert lines[step]["rollout/on_policy_sequences"] == 0 and lines[step]["rollout/sequences"] == 6
        assert lines[step]["loss/sft"] > 0
    assert lines[3]["loss/forward_kl"] < lines[1]["loss/forward_kl"]
    one, other = (json.loads((run / "teacher.json").read_text()) for run in (online, offline))
    assert one == other


def test_an_interrupted_scoring_goes_on(
    lab: Lab,
    teacher_port: int,
    tmp_path: Path,
    gkd_log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if Ctrl-C loses what is scored, ends with a traceback, or the next start asks for it again; if a damaged
    record is not replaced; or if a run begins without a teacher although it needs one, or does not although it has all
    scores.
    """
    rng, data, store = np.random.default_rng(3), tmp_path / "train.jsonl", tmp_path / "store"
    rows = [{"prompt": _words(rng), "answer": "w2", "response": _words(rng)} for _ in range(1200)]
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    command = [*SCORE, *words(lab, teacher_port, f"data.train_files=[{data}]", f"teacher.store={store}")]

    def n_bytes() -> int:
        return sum(file.stat().st_size for file in store.glob(f"*{SUFFIX}"))

    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: n_bytes() > 100_000 or started.poll() is not None, 90.0, "the first scores")
    started.send_signal(signal.SIGINT)
    _, text = started.communicate(timeout=60)
    assert started.returncode == 130 and "Traceback" not in text, text[-3000:]
    (file,) = store.glob(f"*{SUFFIX}")
    with file.open("r+b") as opened:
        opened.seek(500)
        opened.write(b"\0" * 8)
    monkeypatch.setattr(score.interrupts, "install", lambda: None)
    for expected in (range(2, 1200), range(1)):
        gkd_log.clear()
        assert score.main(command[len(SCORE) :]) == 0
        n_left = int(gkd_log.text.partition(" of 1201 responses are to score")[0].split()[-1])
        assert n_left in expected, gkd_log.text[-3000:]

    run = [*command[len(SCORE) + 2 :], f"teacher.server_port={free_port()}", f"trainer.run_dir={tmp_path / 'run'}"]
    with pytest.raises(TeacherUnavailable):  # another address may have another teacher
        preflight(load_config(None, run))
    run.append(f"teacher.name={json.loads((store / 'teachers.json').read_text())[0][1]['teacher']}")
    for more in ("teacher.topk=32", "distill.on_policy_share=0.5", f"data.val_files=[{lab.heldout}]"):
        with pytest.raises(TeacherUnavailable):
            preflight(load_config(None, [*run, more]))
    assert not (tmp_path / "run").exists()
    plan = preflight(load_config(None, run))
    assert plan.teachers[0].fingerprint == json.loads((tmp_path / "run/teacher.json").read_text())["fingerprint"]


def test_what_cannot_be_stored_is_refused(lab: Lab, teacher_port: int, tmp_path: Path) -> None:
    """Fails if `gkd score` runs for hours and keeps nothing, or what no run reads."""
    store = f"teacher.store={tmp_path}"
    mixed = "teacher.routes={a: {}, b: {backend: http, url: 'http://127.0.0.1:9'}}"
    silent = tmp_path / "silent.jsonl"
    silent.write_text('{"prompt": "w5 w6"}\n')
    cases: list[tuple[str, tuple[str, ...]]] = [
        ("teacher.store", ()),
        ("teacher.routes.b.backend", (store, "data.teacher_key=domain", mixed)),
        ("data.response_key", (store, f"data.train_files=[{silent}]")),
    ]
    for key, more in cases:
        with refuses(key):
            check_scoring(load_config(None, [*words(lab, teacher_port)[2:], *more]))
