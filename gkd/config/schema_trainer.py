"""Declare the settings of the training loop: scheduler, length, run folder, checkpoints, trackers."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.declare import IF_CONSTANT, file_key, key

# Values of `trainer.scheduler`: how far rollouts run ahead of training, and what a step trains on.
#
# sync            generate a batch with the newest weights, then train on it
# one_step_off    generate the next batch while training on this one
# two_step_off    prefetch two batches: while one is trained on, one is scored and one is generated
# stream          no batches in the engines: prompts enter one by one, weights are updated in the middle of responses,
#                 and a step trains on prompts that are finished, while the last ones of its batch are generated
#
# AHEAD holds the number of prefetched batches. Each is generated with one version of the weights, so this is also its
# staleness.
AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
STREAM = "stream"

# Numbers of an evaluation whose best is the smallest.
SMALLER_IS_BETTER = ("eval/kl", "eval/reverse_kl", "eval/end_kl_share", "eval/sure_and_wrong_share")
TRACKER_NAMES = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True)
class TrainerConfig:
    device: str = key("auto", choices=("auto", "cuda", "cpu"))
    """auto = cuda if there is a GPU. On cpu a "GPU" of a pool is one process."""
    cpu_cores: int = key(0, ge=0, resume=True)
    """On the CPU: cores of each node that actor and engines compute on; 0 = all that the trainer may use. With
    scheduler=sync each of both has all of them, otherwise half. Another number changes the last bits of results."""
    scheduler: str = key("sync", choices=(*AHEAD, STREAM))
    """Overlap of rollouts with training: sync (none, staleness 0), one_step_off or two_step_off (prefetch one or
    two batches), or stream (continuous generation, weights updated mid-response). See docs/architecture.md."""
    max_staleness: int = key(1, ge=0)
    """stream: largest number of steps between the start of a response and the step that trains on it. 2 is faster
    if a few responses are much longer than the others."""
    record_batches: bool = key(False, resume=True)
    """Keep the rollouts and scores of every step in run_dir/batches, for trainer.replay."""
    replay: str = file_key("", resume=True)
    """Batches folder of a run with record_batches: train on its batches, in its order. With the same settings and
    layout the results are bit-exact. Empty = off."""
    total_epochs: int = key(1, gt=0, resume=IF_CONSTANT)
    """Passes over train_files, unless total_steps ends the run first."""
    total_steps: int = key(0, ge=0, resume=IF_CONSTANT)
    """Optimizer steps; 0 = no limit."""
    n_gpus_per_node: int = key(1, gt=0, resume=True)
    """GPUs per node of the actor pool. Times trainer.nnodes: actor.tp x actor.cp x actor.pp x data parallel."""
    nnodes: int = key(1, gt=0, resume=True)
    """Nodes of the actor pool."""
    global_batch_size: int = key(64, gt=0, limits=">= data-parallel size")
    """Prompts of one optimizer step; each gets rollout.n responses."""
    run_dir: str = file_key("", required="name a folder, e.g. runs/my_run.", resume=True)
    """Folder of the run: resolved config, metrics.jsonl, checkpoints, export. Required."""
    loggers: list[str] = key([], limits=f"of {', '.join(TRACKER_NAMES)}, each once", resume=True)
    """Experiment trackers that receive every number of metrics.jsonl, too. Each needs the extra of its name. See
    docs/run-folder.md."""
    project_name: str = key("gkd", limits="not empty", resume=True)
    """Project of wandb and trackio, experiment of mlflow. A run there has the name of its folder."""
    progress: str = key("auto", choices=("auto", "panel", "lines", "off"), resume=True)
    """What the driver shows on stderr. lines: one line per step, and a line in each long silence. panel: a live
    panel instead. auto: panel on a terminal, otherwise lines. off: neither."""
    profile_steps: list[str] = key([], limits="steps >= 1, or ranges of them like 10-12", resume=True)
    """Steps in which torch's profiler runs on actor rank 0, like [3, 10-12]. Traces go to run_dir/profile; such a
    step is slower."""
    resume: str = file_key("never", limits="never, auto or a folder", resume=True)
    """never: refuse a run_dir with a run in it. auto: resume from its newest undamaged checkpoint. A checkpoint
    folder (.../checkpoints/step_N): rewind to it, or branch into a new run_dir. See docs/operations.md."""
    max_restarts: int = key(0, ge=0, resume=True)
    """How often a run whose rank died, failed or hangs in the training loop starts again by itself, from its newest
    checkpoint. See docs/operations.md."""
    save_every: int | str = key(
        "30min",
        example="steps, e.g. 100, or a time, e.g. 30min",
        limits="steps >= 0, or a time such as 45s, 30min, 2h",
        resume=True,
    )
    """Steps or time between checkpoints; 0 = only at the end. An interrupt and a lost teacher save the last step,
    too. See docs/operations.md."""
    keep_last: int = key(2, gt=0, resume=True)
    """Newest checkpoints to keep."""
    keep_best: str = key("", limits="eval/... or domain/.../accuracy, with data.val_files", resume=True)
    """Number of an evaluation, such as eval/accuracy or eval/kl: the step with the best one is saved and never
    deleted; the file checkpoints/best names it. Best is the smallest KL, end_kl_share or sure_and_wrong_share, else
    the largest. Empty = off."""
    colocate: bool = key(False, resume=True)
    """Let actor and engines share the same GPUs by turns, offloading the idle side to host memory. Needs pools of
    equal size and scheduler=sync. See docs/memory.md."""
    init_timeout_s: float = key(600.0, gt=0, resume=True)
    """Seconds to wait for free GPUs, and then for all ranks to start. After that the run stops and reports late
    ranks; all stacks are in run_dir/stacks.txt."""
    stage_timeout_s: float = key(
        1800.0, gt=0, limits="zmq: > teacher.outage_budget_s + teacher.request_timeout_s", resume=True
    )
    """Seconds to wait for a training step, scores, a weight sync or the next rollout before the run stops and
    reports where ranks hang."""

    @property
    def staleness_bound(self) -> int:
        """Return the most steps between the oldest weights that generated a sequence and the step that trains on it."""
        return AHEAD.get(self.scheduler, self.max_staleness)
