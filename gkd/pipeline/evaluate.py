"""Evaluation on validation prompts: KL on the student's own samples, and greedy accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import comb, isnan

import numpy as np

from gkd.config.schema import Config
from gkd.config.schema_sections import NO_METRIC
from gkd.config.schema_teacher import NONE
from gkd.console.state import SCORES
from gkd.log import get_logger
from gkd.metrics.run_metrics import RunMetrics, StepMetrics
from gkd.metrics.token_groups import evaluation_numbers
from gkd.metrics.writer import read_metrics
from gkd.pipeline.batches import generate_and_score
from gkd.pipeline.colocation import GpuSharing
from gkd.roles import Roles
from gkd.run.folder import RunFolder
from gkd.types import GreedyReport, Prompt, Sample, ScoredChunk

log = get_logger("evaluate")

KEPT_TOKEN_LOSSES = 8  # sequences of each evaluation whose losses are written token by token, 0.3 kB for each token
KEPT_SAMPLES = 50  # responses of each evaluation that are written to the run folder as text
CORRECT = 0.5  # smallest value of a response that counts as correct
SEED = 2**31  # far from data.seed + step, so that no evaluation repeats the random numbers of a training rollout


class Evaluator:
    """Runs evaluations, and decides when one is due."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        prompts: Sequence[Prompt],
        folder: RunFolder,
        gpus: GpuSharing,
        metrics: RunMetrics,
        evaluated: Callable[[int, Mapping[str, float]], None],
        training_prompts: Sequence[Prompt],
    ) -> None:
        """
        Args:
            evaluated: called with the step and the numbers of each evaluation.
            training_prompts: those of the samples if there are no validation prompts.
        """
        self._config = config.eval
        self._roles = roles
        self._folder = folder
        self._scoring = roles.judge or roles.evaluation or roles.scoring
        self._routes = config.derived.routes
        self._n_training = config.rollout.n
        self._temperature = config.rollout.temperature
        self._gpus = gpus
        self._metrics = metrics
        self._evaluated = evaluated
        self._prompts = list(prompts)[: config.eval.max_prompts or None]
        self._has_teacher = config.derived.teacher_pool != NONE
        self._images = {entry.prompt_id: entry.images for entry in self._prompts or training_prompts if entry.images}

    def is_due(self, step: int, total_steps: int) -> bool:
        """Return whether to evaluate after this step: every `eval.every` steps, and after the last one."""
        return bool(self._prompts) and self._is_time(step, total_steps)

    def keep_texts(self, step: int, total_steps: int, chunks: Sequence[ScoredChunk]) -> None:
        """Write some training responses of a step as text where a run with validation prompts would be evaluated."""
        if not self._prompts and self._is_time(step, total_steps):
            self._write_texts(step, [chunk for chunk in chunks if chunk.rollouts.on_policy], self._n_training)

    def _is_time(self, step: int, total_steps: int) -> bool:
        return step == total_steps or (self._config.every > 0 and step % self._config.every == 0)

    def _write_texts(self, step: int, chunks: Sequence[ScoredChunk], n: int) -> None:
        """Write sampled responses, n to each prompt in the chunks, with the reference answers of validation prompts."""
        if not chunks:
            return
        samples = self._roles.rollout.texts([chunk.rollouts for chunk in chunks], n=n, n_samples=KEPT_SAMPLES)
        answers = {prompt.prompt_id: prompt.answer for prompt in self._prompts}
        written = [replace(sample, answer=answers.get(sample.prompt_id) or "") for sample in samples]
        self._folder.write_samples(step, written, self._images)

    def is_due_at_start(self, step: int, total_steps: int) -> bool:
        """Return whether to evaluate before training: at step 0, or if a run stopped in the evaluation of its step."""
        if step == 0 or not self.is_due(step, total_steps):
            return step == 0 and bool(self._prompts)
        lines = [line for line in read_metrics(self._folder.metrics_file) if line["step"] == step]
        if not lines and step != total_steps:  # a branch: the run that it left has evaluated this step
            return False
        return not any("eval/response_tokens" in line for line in lines)

    def run(self, step: int, m: StepMetrics, *, overlapped: bool = False) -> None:
        """Evaluate the weights of `step` and add `eval/*` to its metrics.

        KL is measured on the student's own samples, whatever the mixture in training. If the teacher returns no
        distribution, `eval/reverse_kl` estimates KL(student || teacher) from the samples.

        Args:
            overlapped: a stream keeps generating during the evaluation.
        """
        with m.stage("eval"):
            with self._gpus.for_rollout():
                sampled = self._prompts if self._has_teacher or self._config.n > 1 else []
                pending = generate_and_score(
                    self._roles.rollout,
                    self._scoring,
                    sampled,
                    range(len(sampled)),
                    n=self._config.n,
                    temperature=self._temperature,
                    seed=SEED,
                    policy_version=step,
                )
                greedy = self._greedy()  # the engines decode while the teacher scores
            with self._gpus.for_training():
                scored = self._scoring.collect(pending)
                self._metrics.add_scored(scored)
                numbers = self._distances(step, scored) if self._has_teacher else {}
            if greedy is not None:
                numbers["eval/accuracy"] = greedy.accuracy
                numbers |= {
                    f"domain/{self._routes[route].name}/accuracy": accuracy
                    for route, accuracy in greedy.by_route.items()
                    if self._routes[route].name
                }
                self._folder.write_samples(step, greedy.samples[:KEPT_SAMPLES], self._images)
            else:
                self._write_texts(step, scored, self._config.n)
            if self._config.n > 1:
                numbers |= pass_at_numbers(scored, self._config.n)
            self._metrics.exclude_evaluation(overlapped=overlapped)
        m.add(numbers)
        self._evaluated(step, numbers)
        names = {key: SCORES.get(key) or key.removeprefix("eval/").replace("_", " ") for key in numbers}
        shown = "  ".join(f"{names[key]} {value:.4g}" for key, value in numbers.items() if not isnan(value))
        log.info("step %d: validation: %s", step, shown)

    def _distances(self, step: int, scored: Sequence[ScoredChunk]) -> dict[str, float]:
        """Return the numbers that compare the student with the teacher; write those of some tokens."""
        stats = self._roles.actor.evaluate(scored, keep_tokens=KEPT_TOKEN_LOSSES)
        if stats.tokens:
            self._folder.write_token_losses(step, stats.tokens, self._images)
        kl = stats.extra.get("loss/token_kl")
        numbers = {"eval/reverse_kl": stats.extra["loss/sampled_reverse_kl"]} if kl is None else {"eval/kl": kl}
        if (canonical := stats.extra.get("loss/canonical")) is not None:
            numbers["eval/canonical"] = canonical
        numbers |= evaluation_numbers(stats.tokens)
        numbers["eval/response_tokens"] = float(stats.n_loss_tokens)
        return numbers

    def _greedy(self) -> GreedyReport | None:
        """Generate greedily and judge with eval.metric. Return None if there is no metric."""
        if self._config.metric == NO_METRIC:
            return None
        judge = self._roles.judge
        rollout = self._roles.rollout
        if judge is None:
            return rollout.greedy(self._prompts, n_samples=KEPT_SAMPLES)
        samples = rollout.greedy(self._prompts, n_samples=len(self._prompts)).samples
        return judged(samples, judge.judge(samples), {prompt.prompt_id: prompt.route for prompt in self._prompts})


def judged(samples: Sequence[Sample], values: Sequence[float], route_of: Mapping[int, int]) -> GreedyReport:
    """Return the report of greedy responses with these values; the accuracy is their mean.

    Args:
        values: of eval.metric.
        route_of: prompt id -> route.
    """
    routes = np.array([route_of[sample.prompt_id] for sample in samples])
    by_route = {route: float(np.array(values)[routes == route].mean()) for route in sorted(set(routes.tolist()))}
    marked = [replace(sample, correct=bool(value >= CORRECT)) for sample, value in zip(samples, values, strict=True)]
    return GreedyReport(float(np.mean(values)), marked, by_route)


def pass_at_numbers(scored: Sequence[ScoredChunk], n: int) -> dict[str, float]:
    """Return `eval/pass_at_k` for k = 1, 2, 4, ... and n: the mean over the prompts of `pass_at_k`.

    Args:
        scored: judged chunks with n responses to each prompt.
    """
    groups = np.concatenate([chunk.rollouts.sample_index for chunk in scored]) // n
    values = [chunk.rewards[:, 0] for chunk in scored if chunk.rewards is not None]
    n_correct = np.bincount(groups, weights=np.concatenate(values) >= CORRECT).astype(int)
    ks = sorted({n, *(2**i for i in range(n.bit_length()))})
    return {f"eval/pass_at_{k}": float(np.mean([pass_at_k(n, int(c), k) for c in n_correct])) for k in ks if k <= n}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the unbiased estimate that one of k responses is correct, arXiv:2107.03374.

    Args:
        n: responses of the prompt, of which c are correct.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)
