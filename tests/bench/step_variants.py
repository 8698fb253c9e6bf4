"""Compare two ways to run a training step, in turns in one real run: parts `overlap`, `transfers`, `reference`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from gkd.actor.frozen.pools import ReferencePool
from gkd.config.load import load_config
from gkd.metrics.run_metrics import StepMetrics
from gkd.preflight.run import preflight
from gkd.start.launcher import started_roles
from gkd.trainer import Trainer
from tests.bench.teacher_report import Figure, Part, Table
from tests.e2e.conftest import make_lab
from tests.service.harness import ServerProcess

_WIDER = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "layers": 8,
}  # student: 42M parameters, 670 MB of states
_BOTH_HOST = "Both sides of a move are host memory, so it takes a smaller part of a step than over a GPU's bus."
Steps = dict[bool, list[dict[str, float]]]


def overlap(rounds: int) -> Part:
    """Reload the actor while the teacher scores, or before the training step."""

    def choose(trainer: Trainer, early: bool) -> None:
        trainer.gpus.reload_early = early

    steps = _alternate(rounds, choose, "trainer.colocate=true")
    waits, onloads = _medians(steps, "time/teacher_s", "time/train_s"), _medians(steps, "time/train/onload")
    figures = [
        Figure(
            "wait for scores and training step, early reload / reload in the step",
            waits[True] / waits[False],
            at_most=1.0,
        ),
        Figure("reload left in the training step, early / in the step", onloads[True] / onloads[False]),
    ]
    rows = [
        [name, f"{waits[early]:.3f}", f"{onloads[early]:.3f}"]
        for name, early in (("in the training step", False), ("early", True))
    ]
    table = Table("seconds, median", ["reload", "scores and training step", "of it reload in the step"], rows)
    what = (
        "A colocated run with a teacher server; every second step reloads the actor's states while the teacher scores. "
        + _BOTH_HOST
    )
    return Part("overlap", what, figures, [table], {"rounds": rounds})


def transfers(rounds: int) -> Part:
    """Keep the weights on the device between training step and weight sync, or offload them."""

    def choose(trainer: Trainer, keep: bool) -> None:
        pool = trainer.roles.actor
        meta = None if keep else {"is_offload_states": True}
        vars(pool)["train_step"] = lambda batch: type(pool).train_step(pool, batch, meta)

    steps = _alternate(rounds, choose, "actor.offload_train=true")
    moved = _medians(steps, "memory/moved_to_host", "memory/moved_to_device")
    times = _medians(steps, "time/train_s", "time/weight_sync_s")
    figures = [
        Figure("bytes moved in a step, kept / offloaded and reloaded", moved[True] / moved[False]),
        Figure("training step and sync, kept / offloaded and reloaded", times[True] / times[False], at_most=1.0),
    ]
    rows = [
        [name, f"{moved[keep] * 1024:.0f}", f"{times[keep]:.3f}"]
        for name, keep in (("offloaded and reloaded", False), ("kept", True))
    ]
    table = Table("medians", ["weights before the sync", "moved MiB a step", "training step and sync, s"], rows)
    what = "A run with actor.offload_train; every second step keeps the weights for the sync. " + _BOTH_HOST
    return Part("transfers", what, figures, [table], {"rounds": rounds})


def reference(rounds: int) -> Part:
    """Compute the reference's logprobs while the teacher server scores, or after its last score."""

    def choose(trainer: Trainer, beside: bool) -> None:
        pool = trainer.roles.reference
        assert isinstance(pool, ReferencePool)
        pool._starts_in_wait = not beside

    steps = _alternate(rounds, choose, "distill.reference_kl_weight=1")
    waited = _medians(steps, "time/reference_s")
    both = _medians(steps, "time/teacher_s", "time/reference_s")
    figures = [
        Figure("wait for scores and reference, at the same time / one after the other", both[True] / both[False]),
        Figure("wait for the reference after the scores, at the same time / after", waited[True] / waited[False]),
    ]
    rows = [
        [name, f"{both[beside] - waited[beside]:.3f}", f"{waited[beside]:.3f}"]
        for name, beside in (("after the last score", False), ("while the teacher scores", True))
    ]
    table = Table("seconds, median", ["reference", "wait for scores", "wait for the reference"], rows)
    what = "Teacher server and reference pass, on two cores; every second step runs them at the same time."
    return Part("reference", what, figures, [table], {"rounds": rounds})


def _alternate(rounds: int, choose: Callable[[Trainer, bool], None], *overrides: str) -> Steps:
    """Train `rounds` steps of each variant, in turns after two steps of warm-up; return the numbers of the steps."""
    steps: Steps = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name:
        lab = make_lab(Path(name), student=_WIDER, teacher=_WIDER)
        with ServerProcess(lab.teacher, lab.root) as server:
            command = lab.command(Path(name) / "run", server.port, *overrides)
            settings = [word for word in command if "=" in word]
            config = load_config(None, [*settings, f"trainer.total_steps={2 * rounds + 2}"])
            plan = preflight(config)
            with started_roles(plan) as roles:
                trainer = Trainer(config, roles, plan.train_prompts, [], plan.folder, plan.total_steps)
                trainer.resume()
                roles.weight_sync.push(0)
                for step in range(1, plan.total_steps + 1):
                    variant = bool(step % 2)
                    choose(trainer, variant)
                    m = StepMetrics(step)
                    trainer.train_one_batch(m)
                    numbers = m.times() | roles.actor.memory_numbers()
                    if step > 2:
                        steps[variant].append(numbers)
                trainer.source.close(wait=True)
                trainer.metrics.close()
    return steps


def _medians(steps: Steps, *names: str) -> dict[bool, float]:
    """Return by variant the median of the sum of these numbers."""
    return {variant: median(sum(m[name] for name in names) for m in found) for variant, found in steps.items()}
