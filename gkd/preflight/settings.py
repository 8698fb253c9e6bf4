"""Check what is installed for the settings, and the length of a run; warn about settings that may be unintended."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from gkd.actor.common.optim_spec import OptimSpec
from gkd.config.schema import Config
from gkd.config.schema_sections import STREAM
from gkd.errors import ClusterError, ConfigError
from gkd.log import get_logger
from gkd.types import Prompt

log = get_logger("preflight")

# A warning is logged if scores take more host memory than this.
LARGE_SCORES_GIB = 4.0


def check_shares(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if data.domain_shares has a route that no row names."""
    routes = {prompt.route for prompt in prompts}
    missing = [route.name for i, route in enumerate(config.derived.routes) if i not in routes]
    if config.data.domain_shares and missing:
        problem = f"no row of data.train_files names the route {missing[0]}."
        raise config.error("data.domain_shares", problem, "add rows, or remove the route.")


def check_schedule(config: Config, total_steps: int) -> None:
    """Raise ConfigError if the decay is longer than the run. Log a warning if the run ends with its warm-up."""
    spec = OptimSpec(**vars(config.actor.optim), total_steps=total_steps)
    if spec.warmup_steps >= total_steps:
        text = "actor.optim.warmup_steps %d: the run has %d steps, so it ends at %.3g of actor.optim.lr or less"
        log.warning(text, spec.warmup_steps, total_steps, spec.lr_at(total_steps - 1) / spec.lr)


def check_stream_fits(config: Config, total_steps: int) -> None:
    """Raise ConfigError if a stream would have more sequences than int32 can number."""
    most = 2**31 // (config.trainer.global_batch_size * config.rollout.n)
    if config.trainer.scheduler == STREAM and total_steps > most:
        problem = f"with trainer.scheduler=stream and this batch size a run has at most {most} steps."
        fix = "lower it, and continue in a new run with the export of this one as model.path."
        raise ConfigError("trainer.total_steps", total_steps, problem, fix)


def early_end_warning(config: Config, n_prompts: int) -> str:
    """Return a sentence if the epochs end the run before total_steps, else "": in TRL, steps override epochs."""
    t = config.trainer
    steps = config.planned_steps(n_prompts)
    if steps >= t.total_steps:
        return ""
    return (
        f"trainer.total_steps = {t.total_steps} is not reached: trainer.total_epochs = {t.total_epochs} of {n_prompts} "
        f"prompts in batches of {t.global_batch_size} ends the run after step {steps}. Fix: increase total_epochs"
    )


def check_ray_installed() -> None:
    """Raise ClusterError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("Ray is not installed in this environment. Fix: create one with launch/setup.sh.")


def check_trackers_installed(config: Config) -> None:
    """Import nothing, and raise ConfigError if a tracker's library, which has its name, is not installed."""
    for name in config.trainer.loggers:
        if importlib.util.find_spec(name) is None:
            fix = f'python -m pip install -e ".[{name}]" in the checkout, or remove it from the list.'
            raise ConfigError("trainer.loggers", name, "the library is not installed.", fix)


def stale_losses(config: Config) -> list[str]:
    """Return the losses of a run with stale rollouts that are sensitive to them; see docs/losses.md."""
    if not config.trainer.staleness_bound or not config.distill.on_policy_share:
        return []
    spec = config.derived.loss
    return [term.name for term in spec.terms if term.name == "reverse_kl" or term in spec.policy_gradients]


def warn_about_settings(config: Config, gib: float) -> None:
    """Log warnings about valid settings that may be unintended; `gib` is the result of `scores_gib`."""
    if config.trainer.global_batch_size < config.derived.n_engines:
        log.warning(
            "trainer.global_batch_size %d is less than the number of engines (%d): some engines will be idle",
            config.trainer.global_batch_size,
            config.derived.n_engines,
        )
    actor = config.actor
    per_node = config.trainer.n_gpus_per_node
    if actor.cp > 1 and per_node % (actor.tp * actor.cp):
        log.warning(
            "actor.cp %d: trainer.n_gpus_per_node %d is not a multiple of actor.tp x actor.cp = %d, so some groups of "
            "ranks that exchange queries, keys and values have members on two nodes",
            actor.cp,
            per_node,
            actor.tp * actor.cp,
        )
    if config.actor.offload_train and config.actor.fsdp_cpu_offload:
        log.warning("actor.offload_train is ignored: actor.fsdp_cpu_offload keeps the states in host memory already")
    if gib > LARGE_SCORES_GIB:
        log.warning(
            "teacher.signal=%s: scores may take %.1f GiB of host memory over all data-parallel groups, and twice that "
            "while they are written to disk. Smaller: hidden instead of logits, topk instead of hidden, a smaller "
            "teacher.topk or eval.max_prompts",
            config.teacher.signal,
            gib,
        )
    spec = config.derived.loss
    if (spec.uses_samples or spec.has_rewards) and config.rollout.truncation:
        names = [term.name for term in spec.policy_gradients] + ["rewards"] * spec.has_rewards
        names += ["distill.tail=residual"] * spec.has_residual
        log.warning(
            "%s: tokens outside are never sampled, so %s cannot learn from them",
            config.rollout.truncation,
            ", ".join([*names, "the reference's KL"] if spec.reference_weight else names),
        )
    if sensitive := stale_losses(config):
        log.warning(
            "%s with rollouts up to %d steps old (trainer.scheduler=%s): older weights than those that train generated "
            "them, which may cost quality (quickstart with reverse_kl: accuracy 97.3%% under sync, 98.6%% one step off "
            "and 95.7%% two). Compare with trainer.scheduler=sync; see docs/losses.md",
            ", ".join(sensitive),
            config.trainer.staleness_bound,
            config.trainer.scheduler,
        )
    share = config.distill.on_policy_share
    unused = "student" if spec.sft and len(spec.terms) == 1 and share else None
    if len(spec.policy_gradients) == len(spec.terms) and share < 1.0:
        unused = "dataset"
    if unused:
        log.warning(
            "distill.on_policy_share=%g: no loss learns from %s responses, but their tokens count in the mean",
            share,
            unused,
        )
