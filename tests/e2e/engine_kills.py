"""Kill and stop rollout engines at random times of runs that go on, and compare the runs with uninterrupted ones.

    python -m tests.e2e.engine_kills [--json FILE] [--actor] [--kills 15] [--schedulers sync,stream]

Not run in CI: 15 kills under each of the four schedulers take about 20 minutes on two cores. With --schedulers they can
be run one by one: the figures of the others stay in the file. Each run has two engines and is hit many times: any
engine process, also one that is just starting again, at a random time after a given step. One kill of ten is a SIGSTOP,
which only the watch of hung engines finds. The run must end with exit code 0, and every sequence must have been trained
on once, within the staleness bound. Under the schedulers of whole batches all metrics but loss/engine_kl, and the
exported weights, must equal those of an uninterrupted run bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from gkd import main_gkd
from gkd.config.schema_sections import AHEAD, STREAM
from gkd.metrics.run_metrics import StepMetrics
from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import ALONE, N_TRAIN, Lab, make_lab
from tests.e2e.exactness import check_stream, check_taken, differences, last_step
from tests.e2e.killed_main import family_until_end
from tests.processes import wait_until
from tests.results import write_results
from tests.service.harness import ServerProcess

MAX_STALENESS = 2  # of the stream
STEPS_A_KILL = 2
HANG_S = 30.0
VICTIM = "RolloutWorker"  # Ray titles its actors by their class
SETTINGS = (
    "trainer.total_epochs=99",
    "trainer.record_batches=true",
    "trainer.init_timeout_s=300",
    "trainer.stage_timeout_s=280",
    "rollout.n_gpus_per_node=2",
    "rollout.max_num_seqs=4",  # so that weight syncs occur in the middle of responses
    "rollout.max_restarts=999",
    f"rollout.hang_timeout_s={HANG_S:g}",
    "eval.every=5",
    "eval.max_prompts=8",
)
RUN_S = 900.0
_UP_AGAIN = re.compile(r"rollout engine (\d+) .* is up again after ([\d.]+) s")


@dataclass(frozen=True)
class Hit:
    """One kill that was carried out."""

    step: int
    stage: str  # of the training loop
    kind: str  # "SIGKILL" | "SIGSTOP"
    n_engines: int  # processes that were alive
    at_s: float  # after the start of the run


class Killer:
    """Hits engines of this process at random times. `visit` is called at the beginning of each stage.

    A step waits for the hits of earlier ones, so that none is left when the run ends.

    Args:
        steps: the step of each hit, ascending.
    """

    def __init__(self, steps: Sequence[int], seed: int, file: Path) -> None:
        self._steps, self._rng, self._file = list(steps), random.Random(seed), file
        self._began_s, self._step, self._stage, self._step_s = time.monotonic(), 0, "start", 1.0
        self._step_began_s = self._began_s
        self._hits: list[Hit] = []
        threading.Thread(target=self._run, name="killer", daemon=True).start()

    def visit(self, stage: str) -> None:
        if stage == "data":  # the first stage of a step
            now = time.monotonic()
            self._step += 1
            self._step_s, self._step_began_s = min(5.0, now - self._step_began_s), now
            due = sum(step <= self._step - STEPS_A_KILL for step in self._steps)
            wait_until(lambda: len(self._hits) >= due, RUN_S, "the kills that are due")
        self._stage = stage

    def _run(self) -> None:
        for step in self._steps:
            wait_until(lambda step=step: self._step >= step, RUN_S, f"step {step}")
            time.sleep(self._rng.uniform(0.0, STEPS_A_KILL * self._step_s))
            wait_until(self._hit, RUN_S, "an engine")  # the only one may just have been hit
            self._file.write_text(json.dumps([asdict(hit) for hit in self._hits]))

    def _hit(self) -> bool:
        engines = [p for p in psutil.Process().children(recursive=True) if is_engine(p)]
        if not engines:
            return False
        kind = signal.SIGSTOP if len(self._hits) % 10 == 5 else signal.SIGKILL
        self._rng.choice(engines).send_signal(kind)
        at_s = round(time.monotonic() - self._began_s, 2)
        self._hits.append(Hit(self._step, self._stage, kind.name, len(engines), at_s))
        return True


def is_engine(process: psutil.Process) -> bool:
    try:
        return VICTIM in " ".join(process.cmdline()) and process.status() not in ("zombie", "stopped")
    except psutil.NoSuchProcess:
        return False


def killed_main(steps: str, seed: str, file: str, arguments: Sequence[str]) -> int:
    """Run gkd.main_gkd in this process, and hit its engines."""
    killer = Killer([int(step) for step in steps.split(",")], int(seed), Path(file))
    enter_stage = StepMetrics.stage

    def stage(self: StepMetrics, name: str) -> Any:
        killer.visit(name)
        return enter_stage(self, name)

    StepMetrics.stage = stage  # type: ignore[method-assign]
    return main_gkd.main(list(arguments))


def launch(command: Sequence[str], log: Path) -> None:
    """Run to the end. Raises RuntimeError: the run failed, or left a process behind."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    family = family_until_end(process, RUN_S)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(120)
        raise RuntimeError(f"the run did not end within {RUN_S:g} s:\n{log.read_text()[-6000:]}")
    _, alive = psutil.wait_procs(family.values(), timeout=30)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    if process.returncode or alive:
        raise RuntimeError(f"exit code {process.returncode}, left {alive}:\n{log.read_text()[-6000:]}")


def under(
    scheduler: str, lab: Lab, port: int, root: Path, n_kills: int, seed: int, more: Sequence[str]
) -> dict[str, Any]:
    """Make the uninterrupted and the killed run of a scheduler, compare them, and return the figures."""
    root.mkdir()
    steps = [STEPS_A_KILL * (i + 1) for i in range(n_kills)]
    n_steps = steps[-1] + 2 * STEPS_A_KILL
    settings = (*SETTINGS, f"trainer.scheduler={scheduler}", f"trainer.total_steps={n_steps}", *more)
    if scheduler == STREAM:
        settings = (*settings, f"trainer.max_staleness={MAX_STALENESS}")
    base, run = root / "base", root / "killed"
    if scheduler != STREAM:
        launch(lab.command(base, port, *settings), root / "base.log")
        print(f"{scheduler}: uninterrupted run of {n_steps} steps done", flush=True)
    command = lab.command(run, port, *settings)
    hits_file, log = root / "hits.json", root / "killed.log"
    words = ["--in-run", ",".join(map(str, steps)), str(seed), str(hits_file)]
    began_s = time.monotonic()
    launch([sys.executable, "-m", "tests.e2e.engine_kills", *words, *command[3:]], log)
    took_s = time.monotonic() - began_s
    hits = json.loads(hits_file.read_text())
    assert len(hits) == n_kills, f"{len(hits)} of {n_kills} kills:\n{log.read_text()[-3000:]}"
    if scheduler == STREAM:
        check_stream(run, n_steps=n_steps, n_prompts=N_TRAIN, max_staleness=MAX_STALENESS)
    else:
        check_taken(run, n_steps=n_steps, n_prompts=N_TRAIN)
        # It compares the engines' logprobs, whose rounding depends on the sequences that shared a pass.
        found = [text for text in differences(base, run) if "loss/engine_kl" not in text]
        assert not found, found[:10]
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "perf/engine_restarts" in line]
    seconds = [float(match[2]) for match in _UP_AGAIN.finditer(log.read_text())]
    assert len(seconds) >= sum(line["perf/engine_restarts"] for line in lines) > 0
    return {
        "steps": n_steps,
        "kills": hits,
        "kills_by_stage": dict(Counter(hit["stage"] for hit in hits)),
        "restarts": len(seconds),
        "prompts_regenerated": sum(line["perf/prompts_regenerated"] for line in lines),
        "recovery_s": seconds,
        "bit_equal": scheduler != STREAM,  # a difference raises an error
        "staleness_max": max(line["staleness/max"] for line in lines),
        "run_s": round(took_s, 1),
    }


def with_actor_kills(lab: Lab, port: int, root: Path) -> dict[str, Any]:
    """Kill an actor rank of a run that starts again by itself (trainer.max_restarts), twice; compare it."""
    root.mkdir()
    n_steps, kills = 12, (4, 8)
    settings = (f"trainer.total_steps={n_steps}", "trainer.save_every=3", "eval.max_prompts=0")
    launch(lab.command(root / "base", port, *settings), root / "base.log")
    run = root / "killed"
    with (root / "killed.log").open("w") as output:
        command = lab.command(run, port, *settings, f"trainer.max_restarts={len(kills)}")
        process = subprocess.Popen(command, stdout=output, stderr=output)
    for step in kills:
        wait_until(lambda n=step: last_step(run) >= n or process.poll() is not None, RUN_S, f"step {step}")  # type: ignore[misc]
        assert process.poll() is None, (root / "killed.log").read_text()[-3000:]
        for child in psutil.Process(process.pid).children(recursive=True):
            if "ActorWorker" in " ".join(child.cmdline()):
                child.kill()
    assert process.wait(RUN_S) == 0, (root / "killed.log").read_text()[-3000:]
    found = differences(root / "base", run)
    assert not found, found[:10]
    starts = (run / "environment.jsonl").read_text().count("\n")
    assert starts == 1 + len(kills)
    return {"kills": len(kills), "starts": starts, "bit_equal": True}


def main() -> int:
    if sys.argv[1:2] == ["--in-run"]:
        return killed_main(*sys.argv[2:5], arguments=sys.argv[5:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--schedulers", default=",".join((*AHEAD, STREAM)), help="default: %(default)s")
    parser.add_argument("--kills", type=int, default=15, help="under each scheduler")
    parser.add_argument(
        "--actor", action="store_true", help="first kill the actor of a run that starts again by itself"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--more", nargs="*", default=[], metavar="key=value", help="settings of all runs")
    parser.add_argument("--keep", type=Path, help="folder for runs and logs; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    names = args.schedulers.split(",")
    if unknown := set(names) - {*AHEAD, STREAM}:
        parser.error(f"--schedulers {args.schedulers}: there is no {sorted(unknown)[0]!r}")
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    report: dict[str, Any] = {
        "command": "python -m tests.e2e.engine_kills",
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "settings": [*SETTINGS, *args.more],
        **{name: before[name] for name in (*AHEAD, STREAM, "actor") if name in before},
    }
    with tempfile.TemporaryDirectory(prefix="gkd_engine_kills_") as folder:
        root = args.keep or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        lab = make_lab(root)
        with ServerProcess(lab.teacher, root, options=ALONE) as server:
            if args.actor:
                report["actor"] = with_actor_kills(lab, server.port, root / "actor")
                print(f"actor: {report['actor']}", flush=True)
            for place, name in enumerate(names):
                load = os.getloadavg()[0]
                report[name] = under(name, lab, server.port, root / name, args.kills, args.seed + place, args.more)
                report[name]["load_before"] = round(load, 1)
                done, seconds = report[name], report[name]["recovery_s"]
                print(
                    f"{name}: {len(done['kills'])} kills {done['kills_by_stage']}, {done['restarts']} restarts, "
                    f"median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s; run {done['run_s']:.0f} s",
                    flush=True,
                )
                report |= totals(report)
                if args.json:
                    write_results(args.json, report)
    print(f"{report['kills']} kills; recovery median {report['recovery_s']['median']:.1f} s, worst "
          f"{report['recovery_s']['worst']:.1f} s")  # fmt: skip
    return 0


def totals(report: dict[str, Any]) -> dict[str, Any]:
    """Return the number of kills and the recovery times over all schedulers of a report."""
    done = [report[name] for name in (*AHEAD, STREAM) if name in report]
    times = [seconds for each in done for seconds in each["recovery_s"]]
    return {
        "kills": sum(len(each["kills"]) for each in done),
        "recovery_s": {"median": statistics.median(times), "worst": max(times)},
    }


if __name__ == "__main__":
    sys.exit(main())
