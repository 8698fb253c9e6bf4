"""`python -m tests.e2e.kill_matrix [--random 50] [--json FILE]`: kill -9 everywhere, resume, compare to the bit.

By hand; half an hour or more. One run is left alone. Others are killed again and again: at every point of a step
(`tests.e2e.killed_main`), every victim, and at random times; each time they are resumed with trainer.resume=auto. In
the end their metrics and exported weights must be those of the first, bit for bit, no step twice and none left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from gkd.metrics import read_metrics
from tests.e2e.conftest import Lab, make_lab
from tests.e2e.exactness import differences
from tests.e2e.killed_main import POINTS, VICTIMS
from tests.service.harness import ServerProcess

N_STEPS = 16
KILLS_OF_A_RUN = 8  # then it may end
SETTINGS = (
    f"trainer.total_steps={N_STEPS}",
    "trainer.save_every=1",
    "trainer.keep_last=2",
    "trainer.keep_every=4",
    "trainer.resume=auto",
    "eval.every=3",
)
LAUNCH_S = 240.0
ORPHANS_S = 90.0  # Ray's daemons notice a lost driver by themselves


@dataclass(frozen=True)
class Kill:
    point: str
    nth: int  # visit of the point, counted from the start of the process
    after_s: float
    victim: str


@dataclass
class Outcome:
    kill: Kill
    killed: bool  # False: the run was over before
    exit_code: int
    reached: int  # last step in the metrics


def kills_at_points() -> Iterator[Kill]:
    """Every point with every process, early and late in it; the other victims in the stages that use them."""
    for point in POINTS:
        # Renames come thick and fast at the start: the later ones are those of checkpoints. There is one export.
        for nth in (2, 9) if "rename" in point or "replace" in point else (1,) if "export" in point else (3,):
            yield Kill(point, nth, 0.0, "all")
    for stage in ("rollout", "teacher", "train", "weight_sync", "checkpoint"):
        yield Kill(stage, 3, 0.05, "all")
        yield Kill(stage, 3, 0.0, "driver")
    yield from (
        Kill("train", 2, 0.02, "actor"),
        Kill("weight_sync", 2, 0.0, "actor"),
        Kill("checkpoint", 3, 0.0, "actor"),
    )
    yield from (Kill("rollout", 2, 0.05, "engine"), Kill("weight_sync", 2, 0.0, "engine"))


def random_kills(count: int, step_s: float, seed: int) -> Iterator[Kill]:
    """At any time of the first three steps after a start, anybody; two thirds of them everybody at once."""
    rng = random.Random(seed)
    for _ in range(count):
        victim = rng.choice(("all",) * 8 + ("driver", "driver", *VICTIMS))
        yield Kill("data", 1, round(rng.uniform(0.0, 3 * step_s), 3) + 1e-3, victim)


class Runs:
    """Launches of the real command, killed or not."""

    def __init__(self, lab: Lab, port: int, log: Path, settings: Sequence[str]) -> None:
        self._lab, self._port, self._log, self._settings = lab, port, log, settings

    def launch(self, run_dir: Path, kill: Kill | None) -> int:
        """Runs until its end or the kill; returns when no process of it is left. The exit code."""
        command = self._lab.command(run_dir, self._port, *self._settings)
        if kill is not None:
            words = (kill.point, str(kill.nth), str(kill.after_s), kill.victim, "--")
            command = [sys.executable, "-m", "tests.e2e.killed_main", *words, *command[3:]]
        with self._log.open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        family: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + LAUNCH_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{kill}: the run neither ended nor died within {LAUNCH_S:g} s")
            try:
                family |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
            except psutil.NoSuchProcess:
                break
            time.sleep(0.05)
        code = process.wait()
        _, alive = psutil.wait_procs(family.values(), timeout=ORPHANS_S)
        if alive:
            raise RuntimeError(f"{kill}: left behind: {[p.cmdline()[:3] for p in alive]}")
        return code


def torture(runs: Runs, base: Path, run_dir: Path, kills: Sequence[Kill]) -> list[Outcome]:
    """One run with all these kills, resumed to its end. Raises AssertionError where it is not the base run."""
    outcomes: list[Outcome] = []
    for kill in kills:
        code = runs.launch(run_dir, kill)
        found = [text for text in differences(base, run_dir, export=False) if not text.startswith("steps")]
        assert not found, f"after {kill}: {found}"
        lines = read_metrics(run_dir / "metrics.jsonl")
        outcomes.append(Outcome(kill, code != 0, code, int(lines[-1]["step"]) if lines else -1))
        when = f"{kill.point:16} {kill.nth} {kill.after_s:6.3f} s"
        print(f"  {when}  {kill.victim:7} exit {code:4}  step {outcomes[-1].reached}", flush=True)
        if code == 0:
            break
    if outcomes[-1].exit_code != 0:
        code = runs.launch(run_dir, None)
        assert code == 0, f"the run could not be finished after {kills}: exit code {code}"
    found = differences(base, run_dir)
    assert not found, f"after {kills}: {found}"
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--random", type=int, default=50, help="kills at random times")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    n_exact = 0
    with tempfile.TemporaryDirectory(prefix="gkd_kill_") as folder:
        root = Path(folder)
        lab = make_lab(root)
        with ServerProcess(lab.teacher, root, options=("--max-batch-tokens", "2")) as server:
            log = root / "runs.log"
            log.touch()
            runs = Runs(lab, server.port, log, SETTINGS)
            base = root / "base"
            try:
                assert runs.launch(base, None) == 0, "the run that is left alone failed"
                times = [line["time/step_s"] for line in read_metrics(base / "metrics.jsonl")[1:]]
                pending = [*kills_at_points(), *random_kills(args.random, sorted(times)[len(times) // 2], args.seed)]
                while pending:
                    chain = pending[:KILLS_OF_A_RUN]
                    done = torture(runs, base, root / f"run_{n_exact}", chain)
                    assert done[0].killed, f"a whole run never came to {done[0].kill}"
                    # What came after the end of this run is tried at the start of the next.
                    pending = chain[sum(o.killed for o in done) :] + pending[len(chain) :]
                    outcomes += [o for o in done if o.killed]
                    n_exact += 1
                    n_killed = sum(o.killed for o in done)
                    print(f"run {n_exact}: equal to the bit after {n_killed} kills; {len(pending)} to go", flush=True)
            except BaseException:
                print("\n".join(log.read_text().splitlines()[-60:]), file=sys.stderr)
                raise
    n_kills = len(outcomes)
    print(f"{n_kills} kills, {n_exact} runs, all equal to the bit to the one that was left alone")
    if args.json:
        report = {
            "machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()},
            "steps": N_STEPS,
            "kills": n_kills,
            "kills_at_random_times": sum(o.kill.point == "data" and o.kill.after_s > 0 for o in outcomes),
            "runs": n_exact,
            "bit_equal": n_exact,
            "outcomes": [asdict(o) for o in outcomes],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
