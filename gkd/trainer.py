"""The training loop. One step, top to bottom:

    prompts -> rollout -> teacher scores (-> reference) -> train step -> weight sync -> metrics

This process handles object references and numbers; tokens, scores and weights stay in the roles' processes
(`gkd.roles`). `trainer.scheduler` decides where a batch comes from and what overlaps with training
(`gkd.pipeline.batches`). How a run ends, also by an error, is in `gkd.run.failure_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from gkd.config.schema import Config
from gkd.config.schema_sections import STREAM
from gkd.console.summary import write_card
from gkd.data.sampler import make_sampler
from gkd.log import get_logger
from gkd.metrics.run_metrics import RunMetrics, StepMetrics
from gkd.pipeline.batches import BatchSource, PrefetchedBatches
from gkd.pipeline.colocation import GpuSharing
from gkd.pipeline.evaluate import Evaluator
from gkd.pipeline.replay import BatchRecorder, ReplayedBatches
from gkd.pipeline.staleness import check_staleness
from gkd.pipeline.streaming import StreamedBatches
from gkd.roles import Roles
from gkd.run.checkpoints import ACTOR, IN_FLIGHT
from gkd.run.failure_policy import attempt, run_ending, save_and_export
from gkd.run.folder import RunFolder
from gkd.run.interrupts import interruptible
from gkd.run.saver import Saver
from gkd.types import PendingScores, Prompt, ScoredChunk

log = get_logger("trainer")


class Trainer:
    """Train from the resumed step to `total_steps`."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        train_prompts: Sequence[Prompt],
        val_prompts: Sequence[Prompt],
        folder: RunFolder,
        total_steps: int,
    ) -> None:
        self.config = config
        self.roles = roles
        self.folder = folder
        self.total_steps = total_steps
        self.step = 0  # optimizer steps made; also the version of the student's weights
        self.gpus = GpuSharing(config, roles)
        self.source = make_source(config, roles, train_prompts, total_steps)
        self.recorder = BatchRecorder(folder, roles.scoring, enabled=config.trainer.record_batches)
        self.metrics = RunMetrics(config, roles, folder, total_steps)
        self.saver = Saver(config.trainer, folder, roles.actor, roles.scoring)
        self.evaluator = Evaluator(
            config, roles, val_prompts, folder, self.gpus, self.metrics, self.saver.evaluated, train_prompts
        )

    def fit(self) -> None:
        """Train to the end; blocks. Leaves a checkpoint of the last step and an export in the run folder.

        Raises:
            TeacherUnavailable, HealthAlarm, KeyboardInterrupt: after a checkpoint of the last finished step is saved.
            NumericsError, TeacherError: the batch has not changed the weights.
            ClusterError, WeightSyncError: a resume starts from the newest checkpoint.
            CheckpointError: a save failed (an asynchronous one: at a later step), or a file cannot be written.
        """
        self.resume()
        with closing(self.metrics), run_ending(self.saver, self.save_now, self.source.close, self.roles.diagnose_hang):
            with self.metrics.before_first_step(self.step) as m, interruptible():
                with m.stage("weight_sync"):
                    sync = self.roles.weight_sync.push(self.step)
                log.info("weights synced: %d bytes, %d tensors verified", sync.n_bytes, sync.verified_tensors)
                if self.evaluator.is_due_at_start(self.step, self.total_steps):
                    self.evaluator.run(self.step, m)
            while self.step < self.total_steps:
                with self.metrics.of_step(self.step + 1, self.save_now) as m:
                    with m.stage("checkpoint"):
                        m.add(self.saver.poll())  # numbers of an asynchronous save that has finished
                        if self.saver.is_due(self.step):
                            m.add(self.save())
                    self.train_one_batch(m)
                    with interruptible():  # raises here if a signal came during the step
                        if self.evaluator.is_due(self.step, self.total_steps):
                            self.evaluator.run(self.step, m, overlapped=self.source.is_streaming)
            save_and_export(self.save_now, self.export)
            attempt("reading the memory use of the last save and the export", self.metrics.log_memory)
            attempt("stopping the rollouts", lambda: self.source.close(wait=True))

    def evaluate(self, checkpoint: Path | None, step: int) -> None:
        """Evaluate a checkpoint of any run of this student, or model.path, without training. Raises as `fit`."""
        if checkpoint is not None:
            self.roles.actor.load(checkpoint / ACTOR)
        self.metrics.open(None)
        with closing(self.metrics), self.metrics.before_first_step(step) as m:
            self.roles.weight_sync.push(step)
            self.evaluator.run(step, m)

    def train_one_batch(self, m: StepMetrics) -> None:
        """Make one optimizer step; afterwards the engines hold the new weights.

        Raises:
            NumericsError: a rollout is too stale, or the loss or gradient is not finite. The optimizer has not moved.
        """
        with m.stage("data"):
            self.source.prefetch(self.step)  # start rollouts for this step and, if the scheduler allows, later ones
        scored_parts = self.train_on_early_parts(m)
        with self.gpus.for_rollout(m, needed=self.source.generates), m.stage("rollout"), interruptible():
            pending = self.source.next_batch(self.step)  # the teacher is already scoring it
        with self.gpus.for_training(m, new_weights_follow=True):
            scored_parts.append(self.scored(pending, m))
            with self.recorder.recording(self.step + 1, scored_parts, m):
                with m.stage("train"):
                    stats = self.roles.actor.train_step(scored_parts[-1])
                self.source.commit()  # the position in the data moves only now: no prompt is lost or used twice
                self.step += 1
            with m.stage("rollout"):
                self.source.wait_until_idle()
            with m.stage("weight_sync"):
                sync = self.roles.weight_sync.push(self.step)
        chunks = [chunk for part in scored_parts for chunk in part]
        self.metrics.add_step(m, chunks, stats, sync)
        self.evaluator.keep_texts(self.step, self.total_steps, chunks)

    def train_on_early_parts(self, m: StepMetrics) -> list[list[ScoredChunk]]:
        """Add the gradients of what has finished while the rest of the batch is generated (`stream`); return the parts.

        Raises NumericsError: as `train_one_batch`.
        """
        scored_parts: list[list[ScoredChunk]] = []
        while True:
            with m.stage("rollout"), interruptible():
                pending = self.source.early_part(self.step)
            if not pending:
                return scored_parts
            scored_parts.append(self.scored(pending, m))
            with m.stage("train"):
                self.roles.actor.accumulate(scored_parts[-1])

    def scored(self, pending: Sequence[PendingScores], m: StepMetrics) -> list[ScoredChunk]:
        """Wait for the scores, and for the reference's logprobs if there is one."""
        with m.stage("teacher"), interruptible():
            reference = self.roles.reference.compute_logprobs(pending, blocking=False)  # while the teacher scores
            part = self.roles.scoring.collect(pending)
        self.metrics.add_scored(part)
        check_staleness(part, self.step, self.source.max_staleness, self.config.trainer.scheduler)
        with m.stage("reference"):
            return reference.wait(part)

    def resume(self) -> None:
        """Load the checkpoint that the run resumes from, if any, and truncate the metrics to its step."""
        state = self.saver.resume()
        if state is not None and self.folder.start is not None:
            self.step = state.step
            self.source.restore(self.folder.start / IN_FLIGHT, state)
            log.info("resumed from %s: step %d", self.folder.start, self.step)
        self.metrics.open(None if state is None else state.step)

    def save(self, *, scored: bool = True, blocking: bool = False) -> dict[str, float]:
        """Start saving the last finished step. Its metrics are on disk first, so that a resumed run has them.

        Args:
            scored: wait for the teacher's scores of rollouts in flight. False: a resumed run requests them again.
            blocking: see `Saver.save`.

        Returns:
            Numbers of a save that finished in this call.
        """
        self.metrics.sync()
        if self.saver.has(self.step):
            return {}  # engines that share the actor's GPUs need not stop
        with self.gpus.for_training():
            return self.saver.save(self.step, self.source.in_flight(self.step), scored=scored, blocking=blocking)

    def save_now(self, *, scored: bool = True) -> None:
        """Save the last finished step and wait for it."""
        self.save(scored=scored, blocking=True)
        self.saver.finish()

    def export(self) -> None:
        """Export the student in Hugging Face format; it replaces an earlier export once it is complete."""
        with self.gpus.for_training():
            self.roles.actor.export_hf(self.folder.new_export)
        write_card(self.folder.new_export, self.folder.root, self.config, self.metrics.state, self.step)
        log.info("exported the student to %s", self.folder.publish_export())


def make_source(config: Config, roles: Roles, prompts: Sequence[Prompt], total_steps: int) -> BatchSource:
    """Return the source that `trainer.replay` or else `trainer.scheduler` selects."""
    if config.trainer.replay:
        return ReplayedBatches(config, roles.scoring)
    sampler = make_sampler(config, prompts)
    if config.trainer.scheduler == STREAM:
        return StreamedBatches(config, roles.rollout, roles.scoring, sampler, total_steps)
    return PrefetchedBatches(config, roles.rollout, roles.scoring, sampler, total_steps)
