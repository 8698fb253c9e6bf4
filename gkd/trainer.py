"""The loop. One batch's road, top to bottom:

    prompts -> rollout -> teacher score -> train step -> weight sync -> metrics -> checkpoint

Everything heavy is behind the Protocols of `gkd.roles`; this process moves handles and numbers. The road under
`trainer.scheduler: sync`: every rollout is written by the newest weights, so staleness is 0, and the loop
checks that it is. Below `distill.on_policy_share: 1` some prompts of a batch take the dataset's response instead of a
rollout (`gkd.mixing`); from there on both kinds go the same road.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gkd.checkpoints import TrainerState
from gkd.config import Config
from gkd.errors import CheckpointError, ClusterError, NumericsError, TeacherUnavailable
from gkd.log import get_logger
from gkd.metrics import MetricsWriter, StageTimers, read_metrics
from gkd.mixing import on_policy_places
from gkd.roles import (
    ActorRole,
    RolloutChunk,
    RolloutRole,
    ScoredChunk,
    ScoringRole,
    SyncReport,
    TrainStats,
    WeightSyncRole,
)
from gkd.run_folder import RunFolder
from gkd.sampler import PromptSampler
from gkd.saver import Saver
from gkd.types import Prompt

log = get_logger("trainer")

# Greedy answers of each evaluation that are written to the run folder.
KEPT_SAMPLES = 50
LAST_WAIT_S = 60.0  # for a save under way, where a rank has died or hangs
EVAL_SEED = 2**31  # far from data.seed + step, so no evaluation repeats a training rollout's draws


@dataclass(frozen=True, slots=True)
class Roles:
    """The four groups of processes, as the loop sees them."""

    actor: ActorRole
    rollout: RolloutRole
    scoring: ScoringRole
    weight_sync: WeightSyncRole


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
        self.sampler = PromptSampler(
            train_prompts, config.trainer.global_batch_size, shuffle=config.data.shuffle, seed=config.data.seed
        )
        self.total_steps = total_steps
        self.step = 0
        self.saver = Saver(folder, roles.actor, in_background=config.trainer.async_save)

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
        self.folder.forget_after(keep_through)
        metrics = MetricsWriter(self.folder.metrics_file, keep_through)
        try:
            self._begin(metrics)
            while self.step < self.total_steps:
                timers = self.new_timers()
                saved = self._checkpoint(metrics, timers)
                numbers = self._one_step(timers) | saved
                try:
                    if self._evaluation_is_due():
                        numbers |= self._evaluate(timers)
                finally:  # the step has been made, also if the teacher is lost in its evaluation
                    numbers |= with_rate(numbers, timers)
                    metrics.write(self.step, numbers)
                log.info(step_line(self.step, self.total_steps, numbers))
            self._end(metrics)
        except Exception as error:
            self._keep_what_can_be_kept(error, metrics)
            raise
        finally:
            metrics.close()

    def _one_step(self, timers: StageTimers) -> dict[str, float]:
        """One batch down the whole road; its numbers but the times."""
        with timers("data"):
            prompts = self.sampler.peek()
            share, seed = self.config.distill.on_policy_share, self.config.data.seed
            on_policy = on_policy_places(self.step, len(prompts), share, seed)
        answers = self._answers(prompts, on_policy, n=self.config.rollout.n, seed=seed + self.step)
        batch = self._score(answers, timers)
        staleness = self.step - min(chunk.rollouts.policy_version for chunk in batch)
        if staleness != 0:
            raise NumericsError(f"scheduler sync promises staleness 0; a rollout of step {self.step} has {staleness}")
        with timers("train"):
            stats = self.roles.actor.train_step(batch)
        self.sampler.commit()
        self.step += 1
        with timers("weight_sync"):
            report = self.roles.weight_sync.push(self.step)
        return step_metrics(batch, stats, report, staleness)

    def _answers(
        self, prompts: Sequence[Prompt], on_policy: Sequence[int], *, n: int, seed: int
    ) -> Iterator[RolloutChunk]:
        """Answers to a batch: the dataset's, which are there already, then the student's as they finish.

        Args:
            on_policy: places in `prompts` of those that the student answers, ascending.
        """
        rollout = self.roles.rollout
        from_dataset = sorted(set(range(len(prompts))) - set(on_policy))
        if from_dataset:
            asked = [prompts[i] for i in from_dataset]
            yield from rollout.dataset(asked, places=from_dataset, policy_version=self.step)
        if on_policy:
            asked = [prompts[i] for i in on_policy]
            temperature = self.config.rollout.temperature
            yield from rollout.generate(asked, places=on_policy, n=n, temperature=temperature, seed=seed)

    def _score(self, answers: Iterator[RolloutChunk], timers: StageTimers) -> list[ScoredChunk]:
        """All answers and, while some are still being written, the teacher's scores of those that are finished."""
        scoring = self.roles.scoring
        with timers("rollout"):
            if self.config.teacher.overlap_rollout:
                for chunk in answers:
                    scoring.submit(chunk)
                held = []
            else:
                held = list(answers)
        with timers("teacher"):
            for chunk in held:
                scoring.submit(chunk)
            return scoring.collect()

    def _evaluate(self, timers: StageTimers) -> dict[str, float]:
        """Held-out prompts: KL on the student's own samples, whatever the mixture in training, and greedy accuracy.

        Where the teacher gives no distribution there is an estimate of KL(student || teacher) from the samples instead.
        """
        with timers("eval"):
            # The same seed every time, so that two evaluations differ by the student alone.
            answers = self._answers(self.val_prompts, range(len(self.val_prompts)), n=1, seed=EVAL_SEED)
            scored = self._score(answers, self.new_timers())
            stats = self.roles.actor.evaluate(scored, keep_tokens=self.config.eval.keep_token_losses)
            if stats.tokens:
                self.folder.write_token_losses(self.step, stats.tokens)
            kl = stats.extra.get("loss/token_kl")
            numbers = {"eval/reverse_kl": stats.extra["loss/sampled_reverse_kl"]} if kl is None else {"eval/kl": kl}
            numbers["eval/response_tokens"] = float(stats.n_loss_tokens)
            if self.config.eval.metric == "exact_match":
                report = self.roles.rollout.greedy(self.val_prompts, n_samples=KEPT_SAMPLES)
                numbers["eval/accuracy"] = report.accuracy
                self.folder.write_samples(self.step, report.samples)
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
            numbers = self._evaluate(timers)
            metrics.write(self.step, numbers | timers.report())

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

    def _save(self, metrics: MetricsWriter) -> dict[str, float]:
        """Begin to save the last finished step. Its line is on the disk first: whoever resumes from this has it."""
        metrics.sync()
        return self.saver.save(TrainerState(step=self.step, sampler_position=self.sampler.position))

    def _save_now(self, metrics: MetricsWriter) -> None:
        self._save(metrics)
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

    def _export(self) -> None:
        self.roles.actor.export_hf(self.folder.new_export)
        log.info("exported the student to %s", self.folder.publish_export())

    def _keep_what_can_be_kept(self, error: Exception, metrics: MetricsWriter) -> None:
        """The run ends with this error: finish the save under way and, if only the teacher is gone, save this step.

        What fails now is logged, so that `error` is what the user is told.
        """
        log.error("the run ends: %s: %s", type(error).__name__, str(error))  # a record would keep the run's frames
        wait_s = LAST_WAIT_S if isinstance(error, ClusterError) else None
        self._tried("the save under way", lambda: self.saver.finish(wait_s))
        if isinstance(error, TeacherUnavailable) and self._tried("the last save", lambda: self._save_now(metrics)):
            log.error(
                "stopped after step %d; trainer.resume=auto goes on from there once the teacher is back", self.step
            )

    def _resume(self) -> bool:
        """Go on from a checkpoint; False if the run begins at step 0."""
        state = self.saver.resume()
        if state is None:
            return False
        self.step, self.sampler.position = state.step, state.sampler_position
        log.info("resumed from %s: step %d", self.folder.start, self.step)
        return True

    def _tried(self, what: str, work: Callable[[], object]) -> bool:
        """Do it, but an error in it is logged alone: another one is already on its way to the user."""
        try:
            work()
        except Exception as error:
            log.error("%s failed, too: %s: %s", what, type(error).__name__, str(error))
            return False
        return True


def step_metrics(
    batch: Sequence[ScoredChunk], stats: TrainStats, report: SyncReport, staleness: int
) -> dict[str, float]:
    """Everything of a step but its times; `rollout/` counts the dataset's responses, too."""
    n_sequences = sum(c.rollouts.n_sequences for c in batch)
    n_tokens = sum(c.rollouts.n_response_tokens for c in batch)
    masses = [c.teacher_mass * c.rollouts.n_response_tokens for c in batch if c.teacher_mass is not None]
    return {
        "loss/total": stats.loss,
        "loss/tokens": float(stats.n_loss_tokens),
        "optim/grad_norm": stats.grad_norm,
        "optim/lr": stats.lr,
        "rollout/sequences": float(n_sequences),
        "rollout/on_policy_sequences": float(sum(c.rollouts.n_sequences for c in batch if c.rollouts.on_policy)),
        "rollout/prompt_tokens": float(sum(c.rollouts.n_prompt_tokens for c in batch)),
        "rollout/response_tokens": float(n_tokens),
        "rollout/response_length_mean": n_tokens / n_sequences,
        "rollout/cut_share": sum(c.rollouts.n_cut for c in batch) / n_sequences,
        **({"teacher/topk_mass": sum(masses) / n_tokens} if masses else {}),
        "teacher/score_bytes": float(sum(c.n_teacher_bytes for c in batch)),
        "staleness/max": float(staleness),
        "weight_sync/bytes": float(report.n_bytes),
        "weight_sync/verified_tensors": float(report.verified_tensors),
        **stats.extra,
    }


def with_rate(numbers: dict[str, float], timers: StageTimers) -> dict[str, float]:
    """The step's times so far, and its response tokens a second."""
    times = timers.report()
    return times | {"perf/response_tokens_per_s": numbers["rollout/response_tokens"] / times["time/step_s"]}


def step_line(step: int, total: int, m: dict[str, float]) -> str:
    """One line a step for people."""
    stages = " ".join(f"{name} {m[f'time/{name}_s']:.2f}" for name in ("rollout", "teacher", "train", "weight_sync"))
    return (
        f"step {step}/{total}  loss {m['loss/total']:.4f}  grad {m['optim/grad_norm']:.3f}  "
        f"tokens {m['rollout/response_tokens']:.0f}  {m['time/step_s']:.2f} s ({stages})"
    )
