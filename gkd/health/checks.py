"""List the health checks: threshold, likely cause, and the keys to change.

docs/health.md has a row for each: also the condition in words, and why the threshold is where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.health import judges
from gkd.health.judges import Judge


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: of `gkd.config.schema.HEALTH_CHECKS`.
        limit: `health.limits` replaces it.
        cause: likely causes, one sentence without a stop.
        change: what to change, one sentence without a stop.
        is_of_evaluation: it has a verdict only at evaluations.
    """

    name: str
    limit: float
    judge: Judge
    cause: str
    change: str
    is_of_evaluation: bool = False


CHECKS = (
    Check(
        "truncated", 0.5, judges.truncated,
        "the student no longer generates its end token, repeats itself, or has too few tokens",
        "read `samples/`; check `rollout.stop_token_ids` and `data.chat_template`; raise `data.max_response_length`",
    ),
    Check(
        "repetition", 0.4, judges.above("rollout/repeated_4gram_share", 3),
        "the student is stuck in loops, which its own samples then reinforce",
        "lower `actor.optim.lr`; lower `data.max_response_length` until it ends its responses; check "
        "`data.chat_template`",
    ),
    Check(
        "end_of_sequence", 0.1, judges.below("loss/teacher_end_probability", 3),
        "student and teacher end their responses with different tokens, or have different chat templates",
        "compare `eos_token_id` in the `generation_config.json` of both models; set `rollout.stop_token_ids` to the "
        "teacher's end tokens; check `data.chat_template`",
    ),
    Check(
        "teacher_mismatch", 0.3, judges.teacher_mismatch,
        "the teacher has other token ids or other weights than intended, or the student has collapsed",
        "check that `teacher.name` is the intended teacher and shares the student's tokenizer; if the overlap was "
        "high before, lower `actor.optim.lr`",
    ),
    Check(
        "overlap_falls", 0.1, judges.overlap_falls,
        "updates are too large, or the responses have moved to text on which the teacher is not reliable",
        "lower `actor.optim.lr`; with `reverse_kl` or k1-k3 add `forward_kl` in `distill.losses`",
    ),
    Check(
        "entropy_collapse", 0.2, judges.entropy_collapse,
        "the loss rewards few modes: the student leaves out what the teacher finds probable",
        "set `distill.loss` to `jsd`, `skew_reverse_kl` or `forward_kl`, or lower `actor.optim.lr`",
    ),
    Check(
        "importance_clipped", 0.05, judges.above("loss/importance_clipped", 3),
        "the rollouts are stale, or the engines sample at another temperature than the loss uses",
        "lower `trainer.max_staleness` or choose a `trainer.scheduler` with less prefetching; set "
        "`rollout.temperature` to `teacher.temperature`",
    ),
    Check(
        "gradient_spikes", 10.0, judges.gradient_spikes,
        "single responses have extreme losses, or the learning rate is at the edge of stability",
        "lower `actor.optim.lr`, or lengthen `actor.optim.warmup_steps`; lower `actor.optim.clip_grad`",
    ),
    Check(
        "no_gap", 0.005, judges.no_gap,
        "student and teacher are the same model, or the student is already distilled",
        "compare `model.path` with the teacher's folder",
    ),
    Check(
        "kl_rises", 1.5, judges.kl_rises,
        "the learning rate is too high or the warm-up too short",
        "lower `actor.optim.lr`, or lengthen `actor.optim.warmup_steps`",
    ),
    Check(
        "accuracy_falls", 0.1, judges.accuracy_falls,
        "the student imitates the teacher's text but not its results: answers are cut off, end in another format, or "
        "the teacher is worse than the student",
        "read `samples/`; check `data.max_response_length` and `eval.answer_marker`; measure the teacher's own "
        "accuracy",
        is_of_evaluation=True,
    ),
    Check(
        "worse_than_start", 1.2, judges.worse_than_start,
        "the learning rate is too high, or the student has collapsed",
        "resume from an earlier checkpoint (`trainer.resume`) with a lower `actor.optim.lr`",
        is_of_evaluation=True,
    ),
    Check(
        "engine_logprobs", 0.02, judges.above(judges.FRESH_KL, 3),
        "the engines do not have the weights that train, or compute another model",
        "set `weight_sync.verify` to `always`; if the digests agree, set `model.dtype` to `float32` to compare",
    ),
    Check(
        "stale_rollouts", 0.9, judges.stale_rollouts,
        "the weights change too much between generation and training",
        "lower `trainer.max_staleness` or choose a `trainer.scheduler` with less prefetching; lower `actor.optim.lr`",
    ),
    Check(
        "environment_errors", 0.05, judges.above("rollout/environment_errors", 3),
        "the environment raises, exceeds its time limit, or returns messages that cannot be rendered",
        "read the first errors in the log; raise `rollout.environment_timeout_s` or `rollout.environment_workers`",
    ),
    Check(
        "ends_disagree", 0.3, judges.ends_disagree,
        "student and teacher end with different tokens, or the teacher's template expects text after the end",
        "compare `eos_token_id` in the `generation_config.json` of both models; set `rollout.stop_token_ids` to the "
        "teacher's end tokens; check `data.chat_template`",
        is_of_evaluation=True,
    ),
    Check(
        "sure_and_wrong", 3.0, judges.sure_and_wrong,
        "the learning rate is too high, or the loss rewards few modes",
        "lower `actor.optim.lr`; set `distill.loss` to `forward_kl` or `jsd`; `gkd where` names the tokens",
        is_of_evaluation=True,
    ),
    Check(
        "paired", 0.9, judges.below("loss/paired", 3),
        "responses hold special tokens without a pair, or bytes that are not UTF-8",
        "read `samples/`; name the pairs in `teacher.special_tokens`",
    ),
    Check(
        "canonical", 0.5, judges.below("loss/canonical", 3),
        "the student learns to write the teacher's tokens, because the two segment the text differently",
        "set `distill.units` to `text`",
    ),
)  # fmt: skip
# These compare the engine's distribution with the student's at the temperature of the loss.
NEED_EQUAL_SAMPLING = ("engine_logprobs", "stale_rollouts")
