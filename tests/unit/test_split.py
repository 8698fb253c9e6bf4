"""`gkd split` on run folders that the run's own writers made: rates, estimates, recommended splits and exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from gkd.cluster.gpu_table import TEACHER, GpuInfo, GpuMap, RankPlacement
from gkd.config.load import config_yaml, load_config
from gkd.console.summary import WARM_UP
from gkd.metrics.span_file import SpanFile
from gkd.metrics.step import shares, step_numbers
from gkd.metrics.writer import MetricsWriter
from gkd.spans import ProcessSpans, Span, SpanRecorder
from gkd.tools.split import main
from gkd.types import ScoredChunk, SyncReport, TrainStats
from tests.rollout_chunks import chunk_of

# A step of 2 engines, 2 teacher workers and 1 rank: 24 responses of 10 tokens to prompts of 5.
BATCH, RESPONSE, PROMPT = 24, 10, 5
SYNC = {"rollout": 6.0, "teacher": 0.5, "train": 3.0, "weight_sync": 0.5}
ASYNC = {"rollout": 2.5, "teacher": 0.0, "train": 3.0, "weight_sync": 0.5}
# Seconds in a step that each process computes.
BUSY = {"engine 0": 4.0, "engine 1": 5.0, "teacher a": 1.5, "teacher b": 2.5, "actor 0": 2.9}
NAMES = {"engine": "generate", "teacher": "compute", "actor": "train"}
BEGAN_S = 1_700_000_000.0


def write_run(
    folder: Path,
    *overrides: str,
    waited_s: Mapping[str, float] = SYNC,
    busy_s: Mapping[str, float] = BUSY,
    n_steps: int = 10,
    workers: int = 2,
    gpus_per_worker: int = 1,
    evaluated: tuple[int, ...] = (),
) -> Path:
    """Write a run whose steps took exactly these times; those that are left out or evaluated took ten times as long."""
    folder.mkdir(parents=True, exist_ok=True)
    usual = [f"trainer.global_batch_size={BATCH}", "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=1"]
    usual += ["data.train_files=[a]", "model.path=m", "rollout.max_num_seqs=4", f"trainer.run_dir={folder}"]
    config = load_config(None, [*usual, *overrides])
    (folder / "config.yaml").write_text(config_yaml(config))
    gpus = tuple(GpuInfo(id=f"{i}") for i in range(gpus_per_worker))
    row = {"host": "h", "pid": 1, "cuda_visible_devices": None, "gpus": gpus}
    rows = tuple(RankPlacement(pool=TEACHER, rank=i, **row) for i in range(workers))
    (folder / "gpus.json").write_bytes(GpuMap(device="cpu", rows=rows, findings=()).to_json())
    now_s = [0.0]
    metrics = MetricsWriter(folder / "metrics.jsonl", -1)
    own = SpanRecorder("driver", clock=lambda: now_s[0], wall=lambda: BEGAN_S + now_s[0])
    spans = SpanFile(MetricsWriter(folder / "spans.jsonl", -1), "t", own)
    batch = [ScoredChunk(chunk_of(range(BATCH), RESPONSE, n_prompt=PROMPT), None, None, 8)]
    for step in range(1, n_steps + 1):
        is_measured = WARM_UP < step <= n_steps - config.trainer.staleness_bound and step not in evaluated
        slower = 1.0 if is_measured else 10.0
        spans.begin(step)
        begin_s = BEGAN_S + now_s[0]
        spans.add(
            ProcessSpans(process, "h", [Span(NAMES[process.split()[0]], begin_s, slower * seconds)])
            for process, seconds in busy_s.items()
        )
        spans.end()
        times = {f"time/{stage}_s": slower * seconds for stage, seconds in waited_s.items()}
        times |= {"time/eval_s": 7.0} if step in evaluated else {}
        times["time/step_s"] = sum(times.values())
        now_s[0] += times["time/step_s"]
        numbers = step_numbers(batch, TrainStats(1.0, 1), SyncReport(8, 0), version=0) | times
        metrics.write(step, {"time/unix_s": BEGAN_S + now_s[0]} | numbers | shares(numbers, config.trainer.scheduler))
    metrics.close()
    return folder


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, list[str]]:
    """Run the command, and return the words of each line by the first one; splits by their place."""
    assert main(list(args)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    return {line[0]: line[1:] for line in lines}


def test_rates_are_tokens_by_busy_seconds_and_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if first or evaluated steps count, a wait is taken for a worker's time, or a rate is not that of a GPU."""
    told = printed(capsys, str(write_run(tmp_path / "run", evaluated=(5,))))
    assert told["7"][:5] == ["steps", "of", "sync,", "10", "s"]
    all_tokens = BATCH * (PROMPT + RESPONSE)
    rollout, teacher, student = BATCH * RESPONSE / 6.0 / 2, all_tokens / 2.0 / 2, all_tokens / 3.0
    assert told["rollout"] == ["2", "6", f"{rollout:.4g}", "60%", "100%"]
    assert told["teacher"] == ["2", "2", f"{teacher:.4g}", "5%", "0%"]
    assert told["student"] == ["1", "3", f"{student:.4g}", "30%", "0%"]


@pytest.mark.parametrize(
    ("scheduler", "waited_s", "step_s"),
    [
        ("sync", SYNC, {(2, 2, 1): 10.0, (2, 1, 2): 6.0 + 1.0 + 1.5 + 0.5, (3, 1, 1): 4.0 + 1.0 + 3.0 + 0.5}),
        # The loop waits for the engines, so they take the step without the weight sync.
        ("one_step_off", ASYNC, {(2, 2, 1): 6.0, (3, 1, 1): 4.0 + 0.5, (2, 1, 2): 5.5 + 0.5}),
    ],
)
def test_a_step_is_the_slowest_stage_or_with_sync_the_sum(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scheduler: str,
    waited_s: Mapping[str, float],
    step_s: dict[tuple[int, int, int], float],
) -> None:
    """Fails if the recommended split is not the fastest one by the closed form, or its keys are not those to set."""
    told = printed(capsys, str(write_run(tmp_path / "run", f"trainer.scheduler={scheduler}", waited_s=waited_s)))
    rows = {tuple(map(int, words[:3])): words[3:] for place, words in told.items() if place in ("1", "2", "3")}
    own = told["this"][1:]
    assert [int(n) for n in own[:3]] == [2, 2, 1] and float(own[3]) == pytest.approx(step_s[2, 2, 1])
    assert own[4] == "1.00x"
    for split, expected in step_s.items():
        assert float(rows[split][0]) == pytest.approx(expected, rel=0.01)
    fastest = min(step_s, key=lambda split: step_s[split])
    assert tuple(map(int, told["1"][:3])) == fastest
    rollout, teacher, student = fastest
    assert told["set"] == [
        *("trainer.nnodes=1", f"trainer.n_gpus_per_node={student}"),
        *("rollout.nnodes=1", f"rollout.n_gpus_per_node={rollout}"),
    ]
    assert told["give"][3] == str(teacher)


def test_a_teacher_may_limit_a_sync_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the teacher's work is only what the loop waited for it, although it lasts longer than the rollouts."""
    busy_s = BUSY | {"teacher a": 12.0, "teacher b": 12.0}
    waited_s = SYNC | {"rollout": 6.0, "teacher": 6.0}
    folder = str(write_run(tmp_path / "run", waited_s=waited_s, busy_s=busy_s))
    assert printed(capsys, folder)["teacher"][1] == "12"
    told = printed(capsys, folder, "--gpus", "4")
    assert [told[place][:4] for place in ("1", "2", "3")] == [
        ["1", "2", "1", "21.5"],
        ["1", "1", "2", "26"],
        ["2", "1", "1", "27.5"],  # the teacher takes 24 s, rollouts and the last scores 18 s
    ]


@pytest.mark.parametrize(
    ("args", "overrides", "gpus_per_worker"),
    [
        (["--gpus", "8"], ["actor.tp=2", "trainer.n_gpus_per_node=2", "rollout.tp=2"], 2),
        (["--gpus", "24", "--gpus-per-node", "8"], ["actor.pp=2", "trainer.n_gpus_per_node=2"], 4),
        (["--gpus", "12", "--gpus-per-node", "4"], ["actor.tp=4", "trainer.n_gpus_per_node=4"], 1),
        (["--gpus", "6", "--teacher-elsewhere"], [], 1),
    ],
)
def test_splits_obey_the_parallel_sizes_and_the_nodes(
    tmp_path: Path, args: list[str], overrides: list[str], gpus_per_worker: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a recommended split breaks actor.tp x pp, rollout.tp, a teacher worker or a node, or wastes a GPU."""
    folder = write_run(tmp_path / "run", *overrides, gpus_per_worker=gpus_per_worker)
    told = printed(capsys, str(folder), *args)
    config = load_config(folder / "config.yaml")
    n_gpus = int(args[1])
    for place in ("1", "2", "3"):
        rollout, teacher, student = (0 if n == "-" else int(n) for n in told[place][:3])
        assert student % config.actor.group_size == 0 and rollout % config.rollout.tp == 0
        assert teacher % gpus_per_worker == 0 and (teacher == 0) == ("--teacher-elsewhere" in args)
        assert rollout + teacher + student <= n_gpus
    assert all(float(told["1"][3]) <= float(told[place][3]) for place in ("2", "3"))
    keys = dict(word.split("=") for word in told["set"])
    pools = [int(keys[f"{pool}.nnodes"]) * int(keys[f"{pool}.n_gpus_per_node"]) for pool in ("rollout", "trainer")]
    assert pools == [int(told["1"][0]), int(told["1"][2])]


def test_only_steps_of_the_last_start_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if steps that were made on other pools are measured as if they were of the present ones."""
    folder = write_run(tmp_path / "run", n_steps=16)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    starts = [{"unix_s": BEGAN_S - 1.0}, {"unix_s": lines[7]["time/unix_s"] + 1.0}]
    (folder / "environment.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    assert "steps" in printed(capsys, str(folder))["6"], "16, without 8 of the start before and 2 that warm up"
    starts[-1]["unix_s"] = lines[-3]["time/unix_s"]
    (folder / "environment.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    assert main([str(folder)]) == 2
    assert "6 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["trainer.colocate=true"], "trainer.colocate"),
        (["teacher.backend=local", "teacher.path=t"], "teacher.backend"),
        (["trainer.replay=r"], "trainer.replay"),
    ],
)
def test_runs_without_three_working_pools_are_refused(
    tmp_path: Path, overrides: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a split is recommended from stages that took turns on the same GPUs, or from idle ones."""
    assert main([str(write_run(tmp_path / "run", *overrides))]) == 2
    assert re.search(rf"\b{re.escape(key)} = ", capsys.readouterr().err)


def test_wrong_folders_and_numbers_have_their_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a script cannot tell a wrong argument (2) from a damaged file (1)."""
    folder = write_run(tmp_path / "run")
    assert main([str(tmp_path)]) == 2 and "metrics.jsonl" in capsys.readouterr().err
    assert main([str(folder), "--gpus", "2"]) == 2 and "--gpus = 2" in capsys.readouterr().err
    assert main([str(write_run(tmp_path / "short", n_steps=5))]) == 2
    with pytest.raises(SystemExit) as exit_:
        main([str(folder), "--gpus", "none"])
    assert exit_.value.code == 2
    (folder / "spans.jsonl").write_text("nonsense\n")
    assert main([str(folder)]) == 1 and "line 1 " in capsys.readouterr().err


def test_full_engines_have_no_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the remark on engines that are not full is missing, or is printed for engines with a queue."""
    main([str(write_run(tmp_path / "queue"))])
    assert "at once" not in capsys.readouterr().out
    main([str(write_run(tmp_path / "all", "rollout.max_num_seqs=64"))])
    assert "12 sequences at once" in capsys.readouterr().out
