"""Kill runs with SIGKILL at many points, resume them, and compare them bit-exactly with an uninterrupted run.

    python -m tests.e2e.kill_matrix [--json FILE]

Not run in CI: it takes about an hour, or half an hour with the layouts in two commands. In each layout one run is not
interrupted. The others are killed repeatedly: at every point of a step (`tests.e2e.killed_main`), every kind of victim,
and at random times. Each is resumed with trainer.resume=auto from its newest committed checkpoint. In the end its
metrics and exported weights must equal those of the uninterrupted run bit for bit, without a missing or repeated step.
The batches of a `stream` depend on timing. There, each prompt must be trained on once and within the staleness bound,
and an uninterrupted replay of the recorded batches must equal the killed run bit for bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from gkd.metrics.health_checks import NEED_EQUAL_SAMPLING
from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import Lab, make_lab
from tests.e2e.exactness import check_stream, differences, last_step
from tests.e2e.killed_main import DONE, POINTS, VICTIMS, family_until_end, generation_of, with_faults
from tests.e2e.turn_models import small_models
from tests.results import write_results
from tests.service.harness import ServerProcess

N_STEPS = 16
MAX_STALENESS = 2  # of the stream
KILLS_OF_A_RUN = 8  # then the run may finish
SETTINGS = (
    f"trainer.total_steps={N_STEPS}",
    "trainer.save_every=1",
    "trainer.keep_last=2",
    "trainer.resume=auto",
    "eval.every=3",
    "trainer.init_timeout_s=600",  # busy cores shall not end a run
    "trainer.stage_timeout_s=600",
    "rollout.max_restarts=0",  # a killed engine ends the run; tests/e2e/engine_kills.py has the restarts
)
LAYOUTS = {
    "one_rank": (),
    "dp2": ("trainer.n_gpus_per_node=2",),
    "fsdp2": ("trainer.n_gpus_per_node=2", "actor.strategy=fsdp2"),
    "cp2": ("trainer.n_gpus_per_node=2", "actor.cp=2"),
    "one_step_off": ("trainer.scheduler=one_step_off",),
    "two_step_off": ("trainer.scheduler=two_step_off", "trainer.n_gpus_per_node=2"),
    "stream": (
        "trainer.scheduler=stream",
        f"trainer.max_staleness={MAX_STALENESS}",
        "trainer.n_gpus_per_node=2",
        "rollout.n_gpus_per_node=2",
        "rollout.max_num_seqs=4",  # so that weight syncs occur in the middle of responses
        "trainer.record_batches=true",
    ),
}
# Kills in the middle of trajectories: the environment takes up to 0.1 s for a turn. When it replies decides which turns
# share a pass of the engine, whose logprobs then differ by rounding. Tokens, losses and weights do not.
ROUNDED = ("loss/engine_kl",)
TURNS = (
    "rollout.environment=tests.e2e.turn_environments:Slow",
    "data.max_prompt_length=24",
    "data.max_response_length=96",
    "rollout.max_turns=3",
    "eval.answer_marker=is",
    "eval.max_prompts=8",
)
LAYOUTS |= {
    f"turns_{name}": (*settings, *TURNS)
    for name, settings in {
        "sync": (),
        "one_step_off": LAYOUTS["one_step_off"],
        "two_step_off": LAYOUTS["two_step_off"],
        "stream": LAYOUTS["stream"],
    }.items()
}
LAUNCH_S = 240.0
ORPHANS_S = 90.0  # Ray's daemons end on their own after the driver died


@dataclass(frozen=True)
class Kill:
    point: str
    nth: int  # visit of the point, counted from the start of the process
    after_s: float
    victim: str

    @property
    def exit_code(self) -> int:
        """Exit code of the driver: -9 if it is killed, 1 if it stops because another process died."""
        return 1 if self.victim in VICTIMS else -9


@dataclass
class Outcome:
    kill: Kill
    exit_code: int
    resumed_from: int | None  # see `_resumed_from`
    reached: int  # last step in the metrics

    @property
    def killed(self) -> bool:
        """False if the run finished before the kill."""
        return self.exit_code != 0


# While trajectories are open. The schedulers that generate ahead begin before the first stage `rollout` of a step; a
# stream generates always.
ENGINE_KILLS = {
    "turns_sync": (Kill("rollout", generation_of(2), 0.1, "engine"),),
    "turns_one_step_off": (Kill("rollout", generation_of(3) - 1, 0.1, "engine"),),
    "turns_two_step_off": (Kill("rollout", generation_of(3) - 1, 0.1, "engine"),),
    "turns_stream": (Kill("train", 3, 0.05, "engine"),),
}
# Kills in the first second of a run, before it has results. Each needs a new run folder.
FIRST_KILLS = tuple(Kill(f"{edge}_replace", nth, 0.0, "all") for nth in (1, 2) for edge in ("before", "after"))


def kills_at_points() -> Iterator[Kill]:
    """Yield kills of all processes at every point, and of single processes in the stages that use them."""
    for point in POINTS:
        # The first renames belong to the start of the run, the later ones to checkpoints. There is one export.
        usual = generation_of(2) if point == "rollout" else 3
        for nth in (2, 9) if "rename" in point or "replace" in point else (1,) if "export" in point else (usual,):
            yield Kill(point, nth, 0.0, "all")
    for stage in ("rollout", "teacher", "train", "weight_sync", "checkpoint"):
        nth = generation_of(2) if stage == "rollout" else 3
        yield Kill(stage, nth, 0.05, "all")
        yield Kill(stage, nth, 0.0, "driver")
    yield from (
        Kill("train", 2, 0.02, "actor"),
        Kill("weight_sync", 2, 0.0, "actor"),
        Kill("checkpoint", 3, 0.0, "actor"),
    )
    yield from (Kill("rollout", 2, 0.05, "engine"), Kill("weight_sync", 2, 0.0, "engine"))


def random_kills(count: int, step_s: float, seed: int) -> list[Kill]:
    """Return kills at random times in the first three steps after a start. Two thirds of them kill all processes."""
    rng = random.Random(seed)
    victims = ("all",) * 8 + ("driver", "driver", *VICTIMS)
    return [Kill("data", 1, round(rng.uniform(0.0, 3 * step_s), 3) + 1e-3, rng.choice(victims)) for _ in range(count)]


class Runs:
    """Launches of the real command, killed or not; each may take `launch_s`."""

    def __init__(self, lab: Lab, port: int, folder: Path, settings: Sequence[str], launch_s: float = LAUNCH_S) -> None:
        self._lab, self._port, self._folder, self._settings = lab, port, folder, settings
        self._launch_s = launch_s
        self._orphans: dict[int, psutil.Process] = {}
        self._n_launches = 0
        folder.mkdir(exist_ok=True)

    def launch(self, run_dir: Path, kill: Kill | None, *more: str) -> tuple[int, str]:
        """Run until the end or the kill, and return the exit code and the output.

        Wait until no process of the run is left, except after a kill of the driver alone: then the next launch has to
        cope with the leftover processes.
        """
        faults = [] if kill is None else [(kill.point, kill.nth, kill.after_s, kill.victim)]
        command = with_faults(self._lab.command(run_dir, self._port, *self._settings, *more), faults)
        self._n_launches += 1
        log = self._folder / f"{run_dir.name}_{self._n_launches}.log"
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        family = family_until_end(process, self._launch_s)
        if process.poll() is None:
            text = log.read_text()[-4000:]
            raise TimeoutError(f"{kill}: the run neither ended nor died within {self._launch_s:g} s:\n{text}")
        self._orphans |= family
        if kill is None or kill.victim != "driver":
            self.wait_for_orphans(f"after {kill}")
        return process.returncode, log.read_text()

    def wait_for_orphans(self, when: str) -> None:
        """Raise RuntimeError if a process of any launch is alive after ORPHANS_S seconds."""
        _, alive = psutil.wait_procs(self._orphans.values(), timeout=ORPHANS_S)
        self._orphans.clear()
        if alive:
            raise RuntimeError(f"{when}: left behind: {[p.cmdline()[:3] for p in alive]}")


def torture(
    runs: Runs, base: Path | None, run_dir: Path, kills: Sequence[Kill], but: tuple[str, ...] = ()
) -> list[Outcome]:
    """Interrupt one run with all these kills, resume it to its end, and assert that it equals the base run.

    Args:
        but: beginnings of metrics that are not compared.
        base: None: not compared, because no two runs of a `stream` are equal.
    """
    outcomes: list[Outcome] = []
    for kill in (*kills, None):
        committed = _committed(run_dir)
        code, log = runs.launch(run_dir, kill)
        resumed = _resumed_from(log)
        assert resumed in (committed, None), (
            f"{kill}: resumed from step {resumed}, but step {committed} was committed:\n{log[-3000:]}"
        )
        if kill is None:
            assert code == 0, f"the run could not be finished after {kills}: exit code {code}\n{log[-3000:]}"
            break
        assert code in (0, kill.exit_code), f"{kill}: exit code {code}\n{log[-3000:]}"
        assert code != 1 or DONE in log, f"{kill}: the run ended for another reason\n{log[-3000:]}"
        if base is not None and (run_dir / "metrics.jsonl").exists():
            found = differences(base, run_dir, export=False, through=_committed(run_dir) or -1, but=but)
            assert not found, f"after {kill}: {found}"
        outcomes.append(Outcome(kill, code, resumed, last_step(run_dir)))
        when = f"{kill.point:16} {kill.nth} {kill.after_s:6.3f} s"
        print(f"  {when}  {kill.victim:7} exit {code:4}  from {resumed} to {outcomes[-1].reached}", flush=True)
        if code == 0:
            break
    runs.wait_for_orphans(f"after {kills}")
    if base is not None:
        found = differences(base, run_dir, but=but)
        assert not found, f"after {kills}: {found}"
    return outcomes


def check_replay(runs: Runs, run_dir: Path) -> None:
    """Replay the batches of a finished run and assert that metrics and weights are bit-exact."""
    again = run_dir.with_name(f"{run_dir.name}_again")
    code, log = runs.launch(again, None, f"trainer.replay={run_dir / 'batches'}", "trainer.record_batches=false")
    assert code == 0, log[-3000:]
    # An evaluation during a stream shares engine batches with other sequences, so its responses may differ by rounding.
    # A replay leaves out the checks that compare with the engines' weights.
    skipped = (": eval/", *(f": health/{check}" for check in NEED_EQUAL_SAMPLING))
    found = [text for text in differences(run_dir, again) if not any(name in text for name in skipped)]
    assert not found, f"{run_dir}, trained again: {found}"


def _committed(run_dir: Path) -> int:
    latest = run_dir / "checkpoints" / "latest"
    return int(latest.read_text().removeprefix("step_")) if latest.exists() else 0


def _resumed_from(log: str) -> int | None:
    """Return the step from which a launch resumed; 0: it started at step 0; None: it died before that."""
    for line in log.splitlines():
        if "resumed from " in line:
            return int(line.rsplit("step ", 1)[1])
    return 0 if "weights synced" in log else None


def in_layout(
    layout: str,
    lab: Lab,
    port: int,
    root: Path,
    kills: Sequence[Kill],
    n_random: int,
    launch_s: float,
    file: Path | None,
) -> None:
    """Apply all kills of a layout in several runs, and update `file` after each run."""
    runs = Runs(lab, port, root, (*SETTINGS, *LAYOUTS[layout]), launch_s)
    base = root / "base"
    code, log = runs.launch(base, None)
    assert code == 0, f"the uninterrupted run failed:\n{log[-4000:]}"
    is_stream, n_prompts = "trainer.scheduler=stream" in LAYOUTS[layout], len(lab.train.read_text().splitlines())
    times = sorted(line["time/step_s"] for line in read_metrics(base / "metrics.jsonl")[1:])
    pending = [*kills, *random_kills(n_random, times[len(times) // 2], seed=len(layout))]
    first = [kill for kill in pending if kill in FIRST_KILLS]
    pending = [kill for kill in pending if kill not in FIRST_KILLS]
    outcomes: list[Outcome] = []
    n_runs = 0
    while pending or first:
        chain = [*first[:1], *pending[:KILLS_OF_A_RUN]]
        run_dir = root / f"run_{n_runs}"
        but = ROUNDED if layout.startswith("turns_") else ()
        done = torture(runs, None if is_stream else base, run_dir, chain, but)
        if is_stream:
            check_stream(run_dir, n_steps=N_STEPS, n_prompts=n_prompts, max_staleness=MAX_STALENESS)
            check_replay(runs, run_dir)
        assert done[0].killed, f"the run never reached {done[0].kill}"
        # Kills that this run did not reach are applied at the start of the next.
        n_killed = sum(o.killed for o in done)
        pending = [*chain[max(n_killed, len(first[:1])) :], *pending[KILLS_OF_A_RUN:]]
        first = first[1:]
        outcomes += [o for o in done if o.killed]
        if file is not None:
            _write(file, layout, outcomes)
        n_runs += 1
        print(f"{layout}: run {n_runs} bit-exact after {n_killed} kills; {len(pending)} kills left", flush=True)


def turns_lab(root: Path) -> Lab:
    """Return the folders of models that act in an environment."""
    models = small_models(root / "turns")
    return Lab(root, models / "teacher", models / "student", models / "train.jsonl", models / "heldout.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="default: %(default)s")
    parser.add_argument("--random", type=int, default=17, help="kills at random times, in each layout")
    parser.add_argument("--no-points", action="store_true", help="leave out the kills at every point of a step")
    parser.add_argument("--open", action="store_true", help="only kills of an engine while trajectories are open")
    parser.add_argument("--launch-s", type=float, default=LAUNCH_S, help="limit of one launch; raise it on busy cores")
    parser.add_argument("--json", type=Path, help="put the layouts that ran into this file")
    args = parser.parse_args()
    names = args.layouts.split(",")
    if unknown := [name for name in names if name not in LAYOUTS]:
        parser.error(f"--layouts {args.layouts}: there is no {unknown[0]!r}, but {', '.join(LAYOUTS)}")
    with tempfile.TemporaryDirectory(prefix="gkd_kill_") as folder:
        root = Path(folder)
        for name in names:
            lab = turns_lab(root) if name.startswith("turns_") else make_lab(root / "words")
            with ServerProcess(lab.teacher, root, options=("--max-batch-tokens", "2")) as server:
                # One layout is killed at every point, all layouts at random times and during a save.
                everywhere = name == "one_rank" and not args.no_points
                kills = [*FIRST_KILLS, *kills_at_points()] if everywhere else [Kill("checkpoint", 3, 0.03, "actor")]
                n_random = args.random
                if args.open:
                    kills, n_random = [], 0
                kills += ENGINE_KILLS.get(name, ())
                in_layout(name, lab, server.port, root / name, kills, n_random, args.launch_s, args.json)
    return 0


def _write(file: Path, layout: str, outcomes: Sequence[Outcome]) -> None:
    n_random = sum(o.kill.point == "data" and o.kill.after_s > 0 for o in outcomes)
    report = json.loads(file.read_text()) if file.exists() else {}
    only_open = bool(outcomes) and all(o.kill in ENGINE_KILLS.get(layout, ()) for o in outcomes)
    report[f"{layout}, open trajectories" if only_open else layout] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()},
        "settings": [*SETTINGS, *LAYOUTS[layout]],
        "kills": len(outcomes),
        "kills_at_random_times": n_random,
        "bit_equal": len(outcomes),  # a difference raises an error
        "kills_by_point": Counter(o.kill.point for o in outcomes),
        "kills_by_victim": Counter(o.kill.victim for o in outcomes),
    }
    write_results(file, report)


if __name__ == "__main__":
    sys.exit(main())
