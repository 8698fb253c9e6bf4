"""Reload the actor while the teacher scores, or before the training step: both in turns, in one colocated run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from gkd.config.load import load_config
from gkd.launcher import started_roles
from gkd.metrics.run_metrics import StepMetrics
from gkd.pipeline.colocation import GpuSharing
from gkd.preflight.run import preflight
from gkd.trainer import Trainer
from tests.bench.teacher_report import Figure, Part, Table
from tests.e2e.conftest import make_lab
from tests.service.harness import ServerProcess

_WIDER = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "layers": 8,
}  # student: 42M parameters, 670 MB of states


def overlap(rounds: int) -> Part:
    """Measure the wait for scores and the training step, with and without the early reload."""
    waits: dict[bool, list[float]] = {True: [], False: []}
    onloads: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name:
        lab = make_lab(Path(name), student=_WIDER)
        with ServerProcess(lab.teacher, lab.root) as server:
            command = lab.command(
                Path(name) / "run", server.port, "trainer.colocate=true", "teacher.overlap_rollout=false"
            )
            settings = [word for word in command if "=" in word]
            config = load_config(None, [*settings, f"trainer.total_steps={2 * rounds + 2}"])
            plan = preflight(config)
            with started_roles(config, plan) as roles:
                trainer = Trainer(config, roles, plan.train_prompts, [], plan.folder, plan.total_steps)
                trainer.resume()
                roles.weight_sync.push(0)
                for step in range(1, plan.total_steps + 1):
                    early = bool(step % 2)
                    trainer.gpus = GpuSharing(roles.actor, roles.rollout, shared=True, reload_early=early)
                    m = StepMetrics(step)
                    trainer.train_one_batch(m)
                    times = m.stage.report()
                    memory = roles.actor.memory_numbers()
                    if step > 2:
                        waits[early].append(times["time/teacher_s"] + times["time/train_s"])
                        onloads[early].append(memory["time/train/onload"])
                trainer.source.close(wait=True)
                trainer.metrics.close()
    after, before = median(waits[True]), median(waits[False])
    figures = [
        Figure("wait for scores and training step, early reload / reload in the step", after / before, at_most=1.0),
        Figure("reload left in the training step, early / in the step", median(onloads[True]) / median(onloads[False])),
    ]
    rows = [
        [name, f"{median(waits[early]):.3f}", f"{median(onloads[early]):.3f}"]
        for name, early in (("in the training step", False), ("early", True))
    ]
    table = Table("seconds, median", ["reload", "scores and training step", "of it reload in the step"], rows)
    what = (
        "A colocated run with a teacher server; every second step reloads the actor's states while the teacher scores. "
        "Both sides of a reload are host memory, so it takes a smaller part of a step than over a GPU's bus."
    )
    return Part("overlap", what, figures, [table], {"rounds": rounds})
