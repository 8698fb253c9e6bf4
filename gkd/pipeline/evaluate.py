"""Evaluation on validation prompts: KL on the student's own samples, and greedy accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.config.routes import routes_of
from gkd.config.schema import Config
from gkd.log import get_logger
from gkd.metrics.run_metrics import RunMetrics, StepMetrics
from gkd.metrics.writer import read_metrics
from gkd.pipeline.colocation import GpuSharing
from gkd.pipeline.generate import Generation
from gkd.roles import Roles
from gkd.run.folder import RunFolder
from gkd.types import Prompt

log = get_logger("evaluate")

KEPT_SAMPLES = 50  # greedy responses of each evaluation that are written to the run folder
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
    ) -> None:
        self._config, self._roles, self._folder = config.eval, roles, folder
        self._routes = routes_of(config)
        self._gpus, self._metrics = gpus, metrics
        self._prompts = list(prompts)[: config.eval.max_prompts or None]
        self._generation = Generation(config, roles.rollout, roles.scoring)

    def is_due(self, step: int, total_steps: int) -> bool:
        """Return whether to evaluate after this step: every `eval.every` steps, and after the last one."""
        is_periodic = self._config.every > 0 and step % self._config.every == 0
        return bool(self._prompts) and (is_periodic or step == total_steps)

    def is_due_at_start(self, step: int, total_steps: int) -> bool:
        """Return whether to evaluate before training: at step 0, or if a run stopped in its last evaluation."""
        if not self._prompts or step not in (0, total_steps):
            return False
        lines = read_metrics(self._folder.metrics_file)
        return step == 0 or not any(line["step"] == step and "eval/response_tokens" in line for line in lines)

    def run(self, step: int, m: StepMetrics, *, overlapped: bool = False) -> None:
        """Evaluate the weights of `step` and add `eval/*` to its metrics.

        KL is measured on the student's own samples, whatever the mixture in training. If the teacher returns no
        distribution, `eval/reverse_kl` estimates KL(student || teacher) from the samples.

        Args:
            overlapped: a stream keeps generating during the evaluation.
        """
        with m.stage("eval"):
            with self._gpus.for_rollout():
                pending = self._generation.generate_and_score(
                    self._prompts, range(len(self._prompts)), n=1, seed=SEED, policy_version=step
                )
                # The engines decode while the teacher scores.
                decodes = self._config.metric == "exact_match"
                greedy = self._roles.rollout.greedy(self._prompts, n_samples=KEPT_SAMPLES) if decodes else None
            with self._gpus.for_training():
                scored = self._roles.scoring.collect(pending)
                self._metrics.add_scored(scored)
                stats = self._roles.actor.evaluate(scored, keep_tokens=self._config.keep_token_losses)
            if stats.tokens:
                self._folder.write_token_losses(step, stats.tokens)
            kl = stats.extra.get("loss/token_kl")
            numbers = {"eval/reverse_kl": stats.extra["loss/sampled_reverse_kl"]} if kl is None else {"eval/kl": kl}
            numbers["eval/response_tokens"] = float(stats.n_loss_tokens)
            if greedy is not None:
                numbers["eval/accuracy"] = greedy.accuracy
                numbers |= {
                    f"domain/{self._routes[route].name}/accuracy": accuracy
                    for route, accuracy in greedy.by_route.items()
                    if self._routes[route].name
                }
                self._folder.write_samples(step, greedy.samples)
            self._metrics.exclude_evaluation(overlapped=overlapped)
        m.add(numbers)
        log.info("step %d: validation: %s", step, "  ".join(f"{k} {v:.4g}" for k, v in numbers.items()))
