"""The loop. One batch's road, top to bottom:

    prompts -> rollout -> teacher score (-> reference) -> train step -> weight sync -> metrics -> checkpoint

Everything heavy is behind the Protocols of `gkd.roles`; this process moves handles and numbers. Where a batch comes
from, and what goes on beside a training step, is `trainer.scheduler` (`gkd.pipeline.staleness`); each promises a bound
on the staleness, and the loop checks it. Below `distill.on_policy_share: 1` some prompts of a batch take the dataset's
response instead of a rollout (`gkd.data.mixing`); from there on both kinds go the same road.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from gkd.config.derived import derive
from gkd.config.schedulers import STREAM, staleness_bound
from gkd.config.schema import Config
from gkd.data.sampler import PromptSampler
from gkd.errors import CheckpointError, ClusterError, NumericsError, RankTimeout, TeacherUnavailable
from gkd.handles import ScoredChunk
from gkd.log import get_logger
from gkd.metrics.pools import WITH_EVALUATION, layout_numbers, rollout_numbers
from gkd.metrics.step import staleness_numbers, step_line, step_numbers, with_rate
from gkd.metrics.teacher_meter import TeacherMeter
from gkd.metrics.writer import MetricsWriter, StageTimers, read_metrics
from gkd.pipeline.colocation import GpuSharing
from gkd.pipeline.generate import Generation
from gkd.pipeline.prefetch import PrefetchedBatches
from gkd.pipeline.replay import BatchRecorder, ReplayedBatches
from gkd.pipeline.source import BatchSource
from gkd.pipeline.streaming import StreamedBatches
from gkd.roles import ActorRole, ReferenceRole, RolloutRole, ScoringRole, WeightSyncRole
from gkd.run.checkpoints import IN_FLIGHT
from gkd.run.folder import RunFolder
from gkd.run.saver import Saver
from gkd.types import Prompt

log = get_logger("trainer")

# Greedy answers of each evaluation that are written to the run folder.
KEPT_SAMPLES = 50
LAST_WAIT_S = 60.0  # for a save under way, where a rank has died or hangs
EVAL_SEED = 2**31  # far from data.seed + step, so no evaluation repeats a training rollout's draws


@dataclass(frozen=True, slots=True)
class Roles:
    """The groups of processes, as the loop sees them, and who can say of them where one hangs."""

    actor: ActorRole
    rollout: RolloutRole
    scoring: ScoringRole
    weight_sync: WeightSyncRole
    reference: ReferenceRole | None = None  # None: distill.reference_kl_weight is 0
    explained: Callable[[RankTimeout], RankTimeout] = lambda error: error


class Trainer:
    """Runs the loop from `state` to `total_steps`; `fit` blocks until the end and leaves a checkpoint and an export."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        train_prompts: Sequence[Prompt],
        val_prompts: Sequence[Prompt],
        folder: RunFolder,
        total_steps: int,
        new_timers: Callable[[], StageTimers] = StageTimers,
    ) -> None:
        self.config, self.roles, self.folder = config, roles, folder
        self.val_prompts = list(val_prompts)[: config.eval.max_prompts or None]
        self.new_timers = new_timers
        self.total_steps = total_steps
        self.step = self._started_at = 0
        self.lease = GpuSharing(roles.actor, roles.rollout, shared=config.trainer.colocate)
        self.answering = Generation(config, roles.rollout, roles.scoring)
        self.source = self._source(PromptSampler(train_prompts, shuffle=config.data.shuffle, seed=config.data.seed))
        self._stream_is_open = self._evaluated_beside_it = False
        self.saver = Saver(folder, roles.actor, roles.scoring, in_background=config.trainer.async_save)
        self.teacher_meter = TeacherMeter(staleness_bound(config.trainer))
        self.recorder = BatchRecorder(folder, roles.scoring) if config.trainer.record_batches else None

    def fit(self) -> None:
        """Train to the end.

        Raises:
            TeacherUnavailable: after a checkpoint of the last finished step is saved.
            NumericsError, TeacherError: the batch has not moved the weights.
            ClusterError, WeightSyncError: resume goes on from the newest checkpoint.
            CheckpointError: a save failed, which in the background is found out one step later or more; or a file of
                the run folder cannot be written, as on a full disk.
            These and all others but an interrupt after a save under way has come to its end; a ClusterError waits
                LAST_WAIT_S for it and no longer, since the ranks may hang.
        """
        keep_through = self.step if self._resume() else -1
        self._started_at = self.step
        self.folder.forget_after(keep_through)
        metrics = MetricsWriter(self.folder.metrics_file, keep_through)
        try:
            self._begin(metrics)
            self.teacher_meter.end_step()  # what it was asked before is no step's
            while self.step < self.total_steps:
                timers = self.new_timers()
                saved = self._checkpoint(metrics, timers)
                numbers = self._one_step(timers) | saved
                try:
                    if self._evaluation_is_due():
                        numbers |= self._evaluate(timers)
                    numbers |= self._memory(timers)
                finally:  # the step has been made, also if the teacher is lost in its evaluation
                    numbers |= with_rate(numbers, timers, self.config.trainer.scheduler)
                    metrics.write(self.step, numbers)
                log.info(step_line(self.step, self.total_steps, numbers, self.config.trainer.scheduler))
            self._end(metrics)
        except RankTimeout as late:
            error = self.roles.explained(late)  # first of all: they may not hang much longer
            self._keep_what_can_be_kept(error, metrics)
            raise error from None
        except Exception as error:
            self._keep_what_can_be_kept(error, metrics)
            raise
        finally:
            self.source.close(wait=False)  # also on an interrupt: no thread may begin anything more
            metrics.close()

    def _one_step(self, timers: StageTimers) -> dict[str, float]:
        """One batch down the whole road; its numbers but the times."""
        with timers("data"):
            self.source.begin(self.step)
        self._stream_is_open = self.config.trainer.scheduler == STREAM and not self.config.trainer.replay
        # A replay asks the engines for nothing.
        with self.lease.generating(timers) if not self.config.trainer.replay else nullcontext(), timers("rollout"):
            answered = self.source.next(self.step)
        with self.lease.training(timers, sync_follows=True):
            with timers("teacher"):
                batch = self.roles.scoring.collect(answered)
            self.teacher_meter.add(batch)
            staleness = self._staleness(batch)
            if self.recorder is not None:
                self.recorder.begin(self.step + 1, batch)
            if self.roles.reference is not None:
                with timers("reference"):
                    batch = self.roles.reference.compute_logprobs(batch).wait()
            with timers("train"):
                stats = self.roles.actor.train_step(batch)
            self.source.trained()
            self.step += 1
            if self.recorder is not None:
                with timers("record"):
                    self.recorder.finish()
            self.source.settle(timers)
            teacher = self.teacher_meter.end_step()
            with timers("weight_sync"):
                report = self.roles.weight_sync.push(self.step)
        with timers("usage"):
            usage = self.roles.rollout.usage()
        evaluation = {WITH_EVALUATION: 1.0} if self._evaluated_beside_it else {}
        self._evaluated_beside_it = False
        numbers = step_numbers(batch, stats, report, staleness) | rollout_numbers(usage) | evaluation | teacher
        return numbers | layout_numbers(self.config, self.step - self._started_at)

    def _staleness(self, batch: Sequence[ScoredChunk]) -> dict[str, float]:
        """Raises NumericsError: a rollout is older than the scheduler promises. It is not trained on."""
        numbers, bound = staleness_numbers(batch, self.step), self.source.max_staleness
        if bound is not None and numbers["staleness/max"] > bound:
            raise NumericsError(
                f"scheduler {self.config.trainer.scheduler} promises staleness {bound}; a rollout of step {self.step} "
                f"has {numbers['staleness/max']:g}"
            )
        return numbers

    def _evaluate(self, timers: StageTimers) -> dict[str, float]:
        """Held-out prompts: KL on the student's own samples, whatever the mixture in training, and greedy accuracy.

        Where the teacher gives no distribution there is an estimate of KL(student || teacher) from the samples instead.
        """
        with timers("eval"):
            # The same seed every time, so that two evaluations differ by the student alone.
            places = range(len(self.val_prompts))
            with self.lease.generating():
                asked = self.answering.submitted(
                    self.val_prompts, places, n=1, seed=EVAL_SEED, policy_version=self.step
                )
                # While the teacher scores.
                decodes = self.config.eval.metric == "exact_match"
                greedy = self.roles.rollout.greedy(self.val_prompts, n_samples=KEPT_SAMPLES) if decodes else None
            with self.lease.training():
                scored = self.roles.scoring.collect(asked)
                self.teacher_meter.add(scored)  # beside it the teacher may have been asked about the next batches
                stats = self.roles.actor.evaluate(scored, keep_tokens=self.config.eval.keep_token_losses)
            if stats.tokens:
                self.folder.write_token_losses(self.step, stats.tokens)
            kl = stats.extra.get("loss/token_kl")
            numbers = {"eval/reverse_kl": stats.extra["loss/sampled_reverse_kl"]} if kl is None else {"eval/kl": kl}
            numbers["eval/response_tokens"] = float(stats.n_loss_tokens)
            if greedy is not None:
                numbers["eval/accuracy"] = greedy.accuracy
                self.folder.write_samples(self.step, greedy.samples)
            if self._stream_is_open:  # its own work goes on, and cannot be told from the evaluation's
                self._evaluated_beside_it = True
            else:
                self.roles.rollout.usage()  # what the evaluation was for the engines is no part of the next step's
        log.info("step %d: held out: %s", self.step, "  ".join(f"{k} {v:.4g}" for k, v in numbers.items()))
        return numbers

    def _begin(self, metrics: MetricsWriter) -> None:
        """Put the actor's weights into the engines (and prove it), and measure where the student starts."""
        timers = self.new_timers()
        with timers("weight_sync"):
            report = self.roles.weight_sync.push(self.step)
        log.info("weights synced: %d bytes, %d tensors verified", report.n_bytes, report.verified_tensors)
        lines = read_metrics(self.folder.metrics_file)
        evaluated = {line["step"] for line in lines if "eval/response_tokens" in line}
        # Before the first step; or after the last, where a run was resumed that was stopped in that evaluation.
        if self.val_prompts and self.step in {0, self.total_steps} - evaluated:
            numbers = self._evaluate(timers) | self._memory(timers)
            metrics.write(self.step, numbers | timers.report())
        else:
            self._memory(timers)  # it is no step's

    def _memory(self, timers: StageTimers) -> dict[str, float]:
        """What the actor's phases since the last line took, and its moves; nothing where nobody looks and moves."""
        if not (self.config.memory.timeline or derive(self.config).moves_states):
            return {}
        with timers("usage"):
            return self.roles.actor.memory_numbers()

    def _log_memory(self) -> None:
        """Of what came after the last line."""
        if numbers := self._memory(self.new_timers()):
            log.info("after the last step: %s", "  ".join(f"{k} {v:.3g}" for k, v in sorted(numbers.items())))

    def _evaluation_is_due(self) -> bool:
        return bool(self.val_prompts) and (self._due(self.config.eval.every) or self.step == self.total_steps)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _checkpoint(self, metrics: MetricsWriter, timers: StageTimers) -> dict[str, float]:
        """Commit a save that is written; begin one where it is due. The numbers of a save that came to its end."""
        with timers("checkpoint"):
            numbers = self.saver.poll()
            if self._due(self.config.trainer.save_every):
                numbers |= self._save(metrics)
        return numbers

    def _save(self, metrics: MetricsWriter, *, scored: bool = True) -> dict[str, float]:
        """Begin to save the last finished step. Its line is on the disk first: whoever resumes from this has it."""
        metrics.sync()
        with self.lease.training():
            return self.saver.save(self.step, self.source.in_flight(self.step), scored=scored)

    def _save_now(self, metrics: MetricsWriter, *, scored: bool = True) -> None:
        self._save(metrics, scored=scored)
        self.saver.finish()

    def _end(self, metrics: MetricsWriter) -> None:
        """The last checkpoint and the export. If the first fails, the second is what there will be of the student."""
        try:
            self._save_now(metrics)
        except CheckpointError as error:
            log.error("the last checkpoint failed: %s; exporting the student all the same", str(error))
            self._tried("the export", self._export)
            raise
        self._export()
        # Nothing of the run depends on these any more.
        self._tried("asking for the memory of the last save and the export", self._log_memory)
        self._tried("stopping the rollouts", lambda: self.source.close(wait=True))

    def _export(self) -> None:
        with self.lease.training():
            self.roles.actor.export_hf(self.folder.new_export)
        log.info("exported the student to %s", self.folder.publish_export())

    def _keep_what_can_be_kept(self, error: Exception, metrics: MetricsWriter) -> None:
        """The run ends with this error: finish the save under way and, if only the teacher is gone, save this step.

        What fails now is logged, so that `error` is what the user is told.
        """
        log.error("the run ends: %s: %s", type(error).__name__, str(error))  # a record would keep the run's frames
        wait_s = LAST_WAIT_S if isinstance(error, ClusterError) else None
        self._tried("the save under way", lambda: self.saver.finish(wait_s))
        # The teacher that is gone owes scores of what is in flight: a resumed run asks for them again.
        if isinstance(error, TeacherUnavailable) and self._tried(
            "the last save", lambda: self._save_now(metrics, scored=False)
        ):
            log.error(
                "stopped after step %d; trainer.resume=auto goes on from there once the teacher is back", self.step
            )
        if not isinstance(error, ClusterError):  # else the engines hang or are gone, and end with the run
            self._tried("stopping the rollouts", lambda: self.source.close(wait=True))

    def _resume(self) -> bool:
        """Go on from a checkpoint; False if the run begins at step 0."""
        state = self.saver.resume()
        if state is None or self.folder.start is None:
            return False
        self.step = state.step
        self.source.restore(self.folder.start / IN_FLIGHT, state)
        log.info("resumed from %s: step %d", self.folder.start, self.step)
        return True

    def _source(self, sampler: PromptSampler) -> BatchSource:
        config, roles = self.config, self.roles
        if config.trainer.replay:
            return ReplayedBatches(config, roles.scoring)
        if config.trainer.scheduler == STREAM:
            return StreamedBatches(config, roles.rollout, roles.scoring, sampler, self.total_steps)
        return PrefetchedBatches(config, self.answering, roles.scoring, sampler, self.total_steps)

    def _tried(self, what: str, work: Callable[[], object]) -> bool:
        """Do it, but an error in it is logged alone: another one is already on its way to the user."""
        try:
            work()
        except Exception as error:
            log.error("%s failed, too: %s: %s", what, type(error).__name__, str(error))
            return False
        return True
