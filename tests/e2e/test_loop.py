"""The whole loop with every real part: Ray, vLLM, Megatron-core, the ZMQ teacher server, one process each."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest

from examples.quickstart.evaluate import count_equal
from gkd.cluster.gpu_table import gpu_map_from_json
from gkd.console.state import MAX_LINE
from gkd.metrics.catalog import EVERY_STEP, ROWS
from gkd.metrics.span_file import read_spans
from gkd.metrics.writer import read_metrics
from gkd.tools import check_gpus
from teacher_server.config.command import gkd_words
from tests.e2e.conftest import N_TRAIN, Lab, left_behind
from tests.e2e.exactness import check_export, check_taken, last_step, steps_of
from tests.e2e.killed_main import Fault, is_engine_child, with_faults
from tests.processes import wait_until
from tests.unit import judging_functions

pytestmark = pytest.mark.e2e
N_TENSORS = 24  # of the two-layer student in Hugging Face's names


def test_every_part_of_the_loop_did_its_work(base_run: Path) -> None:
    """If it fails, some stage of the road (rollout, scores, training, sync, evaluation, files) is not real."""
    lines = steps_of(base_run)
    assert sorted(lines) == [0, 1, 2, 3, 4]
    assert {"eval/kl", "eval/accuracy"} <= lines[0].keys() & lines[4].keys()
    for step in range(1, 5):
        m = lines[step]
        assert m["rollout/sequences"] == 12
        assert m["loss/tokens"] == m["rollout/response_tokens"] > 12
        assert 0.05 < m["teacher/topk_mass"] < 0.95, "the top-k must be a true truncation for this test to mean much"
        assert m["teacher/topk_mass"] == pytest.approx(m["loss/teacher_topk_mass"], rel=1e-3)
        assert m["loss/total"] > 0 and m["optim/grad_norm"] > 0
        assert m["staleness/max"] == 0
        assert -1e-6 < m["loss/engine_kl"] < 1e-4, "float32 engines and actor compute the same logprobs"
        assert 0 <= m["rollout/repeated_4gram_share"] < 0.5
        assert 0 <= m.get("loss/teacher_end_probability", 0) <= 1
        assert step < 3 or m["health/engine_logprobs"] == m["health/repetition"] == 0
        assert m["memory/training_step/host_rss_gib"] > 0.1
        of_gpu = ("peak", "memory/alloc_retries", "memory/ooms", "memory/device_")
        assert not [name for name in m if name.startswith("memory/") and any(part in name for part in of_gpu)]
        assert m["memory/generating/rollout_kv_cache_gib"] > 0 < m["memory/receiving_weights/rollout_params_gib"]
        assert m["weight_sync/verified_tensors"] == N_TENSORS
        stages = {f"time/{stage}_s" for stage in ("data", "rollout", "teacher", "train", "weight_sync", "checkpoint")}
        assert stages <= m.keys() and 0 < m["time/accounted_share"] <= 1
    assert (base_run / "config.yaml").is_file()
    assert sorted(p.name for p in (base_run / "checkpoints").glob("step_*")) == ["step_00000002", "step_00000004"]


def test_the_terminal_shows_the_run_and_nothing_foreign(base_run: Path, lab: Lab) -> None:
    """Fails if a library prints bars, colors or warnings among the run's lines, a step line is missing or long, or the
    run ends without its table and the commands to go on.
    """
    lines = (lab.root / "base_run.stderr").read_text().splitlines()
    log, _, closing = "\n".join(lines).partition("run finished: ")
    steps = [line for line in log.splitlines() if " step " in line and "  ETA " in line]
    assert [re.findall(r"step (\d)/4", line) for line in steps] == [["1"], ["2"], ["3"], ["4"]]
    assert max(map(len, steps)) <= MAX_LINE and all("  KL " in line for line in steps)
    foreign = ("\x1b", "%|", "it/s]", "WARNING", "Warning", "[W", "Triton")
    assert not [line for line in lines if any(mark in line for mark in foreign)]
    assert all(str(path) in closing for path in (base_run / "export", base_run / "checkpoints" / "step_00000004"))
    assert lines[-1].split() == [*gkd_words(), "report", str(base_run)]


def test_the_run_folder_describes_the_run(base_run: Path, lab: Lab) -> None:
    """If it fails, a finished run has no lines of its ranks, no record of its data, or samples without prompts."""
    log = (base_run / "log.txt").read_text()
    assert "==== " in log and "RolloutWorker" in log and "step 4/4" in log
    (start,) = map(json.loads, (base_run / "environment.jsonl").read_text().splitlines())
    assert [(data["file"], data["rows"]) for data in start["data"]] == [(str(lab.train), 40), (str(lab.heldout), 52)]
    assert start["command"][1:3] == ["-m", "gkd.main_gkd"] and all(start["versions"].values())
    rows = [json.loads(line)["prompt"] for line in lab.heldout.read_text().splitlines()]
    samples = map(json.loads, (base_run / "samples" / "step_00000004.jsonl").read_text().splitlines())
    assert [sample["prompt"] for sample in samples] == rows[:50]


def test_a_run_leaves_no_temporary_file(base_run: Path, lab: Lab) -> None:
    """If it fails, the temporary folder of every host grows with each run."""
    assert (lab.root / "base_run.left").read_text() == ""


def test_a_step_has_the_metrics_that_the_page_promises(base_run: Path) -> None:
    """If it fails, docs/metrics.md lists a key for every step that a step does not have."""
    rows = [row for row in ROWS if row.when == EVERY_STEP]
    assert len(rows) > 20
    for step in range(1, 5):
        keys = steps_of(base_run)[step].keys()
        assert not [row.key for row in rows if not any(map(row.matches, keys))]


def test_what_each_pool_did_is_counted(base_run: Path) -> None:
    """If it fails, `gkd split` reads other work than that of the real engines, teacher workers and ranks."""
    spans = [(line.step, line.process, span) for line in read_spans(base_run / "spans.jsonl") for span in line.spans]
    for step in range(1, 5):
        m = steps_of(base_run)[step]
        busy_s = {
            name: sum(
                span.duration_s for at, who, span in spans if at == step and f"{who.split()[0]} {span.name}" == name
            )
            for name in ("engine generate", "teacher compute", "actor train")
        }
        not_each_s = m.get("time/eval_s", 0.0) + m["time/checkpoint_s"] + m["time/record_s"]
        of_each_step_s = m["time/step_s"] - not_each_s
        assert m["perf/waited_rollout_share"] == pytest.approx(m["time/rollout_s"] / of_each_step_s)
        engine_s = m["perf/rollout_busy_share"] * (m["time/step_s"] - m.get("time/eval_s", 0.0))
        assert 0 < engine_s < m["time/rollout_s"] + 0.1
        assert busy_s["teacher compute"] > 0 and 0 < busy_s["actor train"] < m["time/train_s"]
        if "time/eval_s" not in m:  # spans of an evaluation are in its step, too
            assert engine_s - 0.1 < busy_s["engine generate"] < m["time/rollout_s"] + 0.1


def test_gpu_placement_is_recorded(base_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If it fails, gpus.json does not record which rank had which GPU, or `check_gpus --running` reports the end of a
    run as a problem.
    """
    table = gpu_map_from_json((base_run / "gpus.json").read_bytes(), "gpus.json")
    assert [(row.label, row.cuda_visible_devices) for row in table.rows[:2]] == [("actor 0", "4"), ("rollout 0", "6")]
    assert [row.pool for row in table.rows[2:]] == ["teacher"] and table.findings == ()
    assert check_gpus.main(["--running", str(base_run)]) == 0, "this run has reached its end, so that is no problem"
    assert "has reached its end" in capsys.readouterr().out


def test_the_student_learned_from_the_teacher(base_run: Path) -> None:
    """If it fails, the optimizer moves the student away from the teacher, or the engine keeps the old weights."""
    lines = steps_of(base_run)
    assert lines[4]["eval/kl"] < 0.98 * lines[0]["eval/kl"]


def test_the_export_answers_like_the_engine(base_run: Path) -> None:
    """If it fails, the model that users take away is not the one that was trained and evaluated, or does not load."""
    assert count_equal(base_run / "export", base_run / "samples" / "step_00000004.jsonl") == (50, 50)


def test_a_checkpoint_is_evaluated_and_exported_as_by_its_run(
    base_run: Path, lab: Lab, teacher_port: int, tmp_path: Path
) -> None:
    """Fails if `gkd eval` or `gkd export` takes other weights, prompts or responses than the run, needs a teacher for
    the accuracy, leaves a folder behind, or prints more than JSON.
    """

    def evaluated(*words: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "gkd.cli", "eval", str(base_run), "--json", "cluster.gpus=[]", *words]
        env = os.environ | {"TMPDIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        assert not [name for name in left_behind(str(tmp_path)) if name.startswith("gkd_")]
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    check_export(base_run, tmp_path / "newest")
    before = {file.name: file.stat().st_mtime_ns for file in base_run.iterdir()}
    own, found = steps_of(base_run)[2], evaluated("--step", "2", f"teacher.server_port={teacher_port}")
    assert (found["step"], found["prompts"], found["metric"]) == (2, 52, "exact_match")
    assert {key: found[key] for key in own if key.startswith("eval/")} == {
        key: value for key, value in own.items() if key.startswith("eval/")
    }
    checksum = ("eval.metric=tests.unit.judging_functions:checksum", "eval.n=4", "eval.max_prompts=50")
    found = evaluated("teacher.backend=none", *checksum)
    samples = (base_run / "samples" / "step_00000004.jsonl").read_text().splitlines()
    values = [judging_functions.checksum("", json.loads(line)["text"], {}) for line in samples]
    assert (found["step"], found["prompts"], found["eval/accuracy"]) == (4, 50, pytest.approx(fmean(values)))
    assert 0 < found["eval/pass_at_1"] < found["eval/pass_at_2"] < found["eval/pass_at_4"] <= 1
    assert before == {file.name: file.stat().st_mtime_ns for file in base_run.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        # In CI: TP 2 (test_other_tokenizer.py), DP 2 (test_own_pipeline.py), PP 2 with two engines (test_lora.py), and
        # two ranks of fsdp2 (test_losses.py).
        pytest.param(("trainer.n_gpus_per_node=2", "actor.tp=2", "rollout.n_gpus_per_node=2"), id="tp2-two-engines"),
        pytest.param(("trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2", "rollout.tp=2"), id="dp2-engine-tp2"),
        pytest.param(
            ("trainer.n_gpus_per_node=4", "actor.tp=2", "actor.pp=2", "actor.max_tokens_per_micro_batch=64"),
            id="tp2-pp2-token-budget",
        ),
    ],
)
def test_other_layouts_train_the_same(base_run: Path, lab: Lab, teacher_port: int, layout: tuple[str, ...]) -> None:
    """If it fails, the split of the model or of the rollouts changes what is learned, or a sync loses a shard."""
    run_dir = lab.root / f"run_{abs(hash(layout))}"
    lab.finished_run(run_dir, teacher_port, *layout, "trainer.total_steps=3", "weight_sync.verify=always")
    one, other = steps_of(base_run), steps_of(run_dir)
    for step in (1, 2, 3):
        assert other[step]["weight_sync/verified_tensors"] == N_TENSORS
        assert other[step]["rollout/response_tokens"] == one[step]["rollout/response_tokens"]
        assert other[step]["loss/total"] == pytest.approx(one[step]["loss/total"], rel=1e-3)
    assert other[1]["loss/total"] == pytest.approx(one[1]["loss/total"], rel=1e-5)
    first = "samples/step_00000000.jsonl"
    assert (run_dir / first).read_text() == (base_run / first).read_text(), "the same student answers alike anywhere"
    assert other[1]["optim/grad_norm"] == pytest.approx(one[1]["optim/grad_norm"], rel=1e-4)


def start(
    lab: Lab,
    run_dir: Path,
    port: int,
    *overrides: str,
    env: dict[str, str] | None = None,
    faults: Sequence[Fault] = (),
) -> subprocess.Popen[str]:
    """Start a run; `faults` kill or stop processes of it."""
    command = with_faults(lab.command(run_dir, port, *overrides), faults)
    whole = os.environ | (env or {})
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=whole, start_new_session=True
    )


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    def reached() -> bool:
        assert process.poll() is None, f"the run ended early:\n{process.stderr and process.stderr.read()[-3000:]}"
        return last_step(run_dir) >= step

    wait_until(reached, 400.0, f"step {step}")


def interrupt(process: subprocess.Popen[str], *numbers: signal.Signals) -> str:
    """Interrupt a run that `start` has started with GKD_TEST_RUN in its environment, and return its stderr.

    Assert that it ends as interrupted, and that no process of it is left or begins afterwards.
    """
    family = psutil.Process(process.pid).children(recursive=True)
    mark = environment(psutil.Process(process.pid))["GKD_TEST_RUN"]
    assert any("raylet" in p.name() for p in family)
    began = time.monotonic()
    for number in numbers:  # to all processes of the run, as terminals and batch systems do
        for each in (psutil.Process(process.pid), *family):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        time.sleep(0.05)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), stderr[-3000:]  # a shell shows 130 for both
    assert time.monotonic() - began < 40
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, [p.cmdline()[:3] for p in alive]
    begun = [p for p in psutil.process_iter() if environment(p).get("GKD_TEST_RUN") == mark]
    _, left = psutil.wait_procs(begun, timeout=30)
    assert not left, f"begun after the signal: {[p.cmdline()[:3] for p in left]}\n{stderr[-3000:]}"
    assert "Traceback" not in stderr, stderr[-3000:]
    return stderr


@pytest.mark.parametrize(
    ("number", "scheduler", "step"),
    [
        pytest.param(signal.SIGTERM, "sync", None, id="sigterm"),
        pytest.param(signal.SIGUSR1, "sync", 1, id="sigusr1"),
        *(pytest.param(signal.SIGINT, name, 1, id=name) for name in ("sync", "two_step_off", "stream")),
        *(pytest.param(signal.SIGINT, name, 0, id=f"{name} begins") for name in ("one_step_off", "stream")),
    ],
)
@pytest.mark.slow  # in CI: a signal in training (test_exact_resume.py), signals in each call of the loop (unit)
def test_an_interrupt_leaves_a_checkpoint_and_no_process(
    lab: Lab, teacher_port: int, number: signal.Signals, scheduler: str, step: int | None
) -> None:
    """If it fails, a stopped run keeps GPUs, ports, Ray daemons, files of vLLM or memory in /dev/shm, a thread of it
    starts another Ray, or it loses a finished step, prompts or rollouts.
    """
    run_dir = lab.root / f"interrupted_{number.name}_{scheduler}_{step}"
    # An engine of two workers, so that vLLM's own children have to go as well.
    engine = ("rollout.n_gpus_per_node=2", "rollout.tp=2", "cluster.gpus=[6,4,2]")
    settings = ("trainer.record_batches=true", "eval.max_prompts=2", f"trainer.scheduler={scheduler}")
    more = ("trainer.total_steps=60", *settings)
    temporary = tempfile.mkdtemp()
    env = {"GKD_TEST_RUN": str(run_dir), "TMPDIR": temporary}
    process = start(lab, run_dir, teacher_port, *more, *engine, env=env)
    try:
        if step is not None:
            wait_for_step(run_dir, step, process)  # in the middle of training, or right before it
        else:
            wait_until(lambda: n_children_of_engines(process) >= 2, 100.0, "the start of vLLM's children")
        shared = shared_memory_of(process)
        stderr = interrupt(process, number)
    finally:
        process.kill()
    assert shared and not [path.name for path in shared if path.exists()]
    assert not left_behind(temporary)
    shutil.rmtree(temporary)
    if step is None:
        return
    assert shlex.split(stderr.splitlines()[-1])[-1] == "trainer.resume=auto", "the command to go on"
    reached = int(read_metrics(run_dir / "metrics.jsonl")[-1]["step"])
    latest = run_dir / "checkpoints" / "latest"
    assert (int(latest.read_text().removeprefix("step_")) if latest.exists() else 0) == reached >= step
    table = gpu_map_from_json((run_dir / "gpus.json").read_bytes(), "gpus.json")
    placed = [(row.label, row.cuda_visible_devices) for row in table.rows if row.pool != "teacher"]
    assert placed == [("actor 0", "2"), ("rollout 0", "4,6")] and table.findings == ()
    assert table.stopped == "interrupted", "for the report"
    if reached:
        resume = ("trainer.resume=auto", f"trainer.total_steps={reached + 1}")
        lab.finished_run(run_dir, teacher_port, *settings, *resume)
        assert sorted(steps_of(run_dir)) == list(range(reached + 2))
        check_taken(run_dir, n_steps=reached + 1, n_prompts=N_TRAIN, whole=scheduler != "stream")


def shared_memory_of(process: subprocess.Popen[str]) -> list[Path]:
    """Return the names in /dev/shm of memory that the processes of a run have mapped."""
    mapped = set[int]()
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(OSError):  # it has ended since the list was made
            maps = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in maps if " /dev/shm/" in line}
    found = []
    for path in Path("/dev/shm").iterdir():
        with suppress(OSError):  # another run has removed it
            found += [path] * (path.stat().st_ino in mapped)
    return found


def n_children_of_engines(process: subprocess.Popen[str]) -> int:
    """Return the number of processes that vLLM has spawned."""
    spawned = 0
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended since the list was made
            spawned += is_engine_child(child)
    return spawned


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # the process has ended, or belongs to another user
        return {}
