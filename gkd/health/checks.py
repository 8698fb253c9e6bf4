"""List the health checks: threshold and its reason, likely cause, and the keys to change.

`python -m gkd.tools.pages` writes docs/health.md from this table.
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
        alarm: the condition in words; {limit} is the limit.
        reason: why the threshold is where it is.
        cause: likely causes, one sentence without a stop.
        change: what to change, one sentence without a stop.
        is_of_evaluation: it has a verdict only at evaluations.
    """

    name: str
    limit: float
    judge: Judge
    alarm: str
    reason: str
    cause: str
    change: str
    is_of_evaluation: bool = False


CHECKS = (
    Check(
        "truncated", 0.5, judges.truncated,
        "`rollout/truncated_share` above {limit}, mean of 3 steps; if the first step is above it, above the middle "
        "between that and 1",
        "The teacher's scores of a truncated response are valid, so some truncation is harmless. Above one half most "
        "responses teach nothing about how to end. If most are cut in the first step, `data.max_response_length` is "
        "small: the log has one remark about it.",
        "the student no longer generates its end token, repeats itself, or has too few tokens",
        "read `samples/`; check `rollout.stop_token_ids` and `data.chat_template`; raise `data.max_response_length`",
    ),
    Check(
        "repetition", 0.4, judges.above("rollout/repeated_4gram_share", 3),
        "`rollout/repeated_4gram_share` above {limit}, mean of 3 steps",
        "Text of people hardly repeats 4-grams, text of a degenerate language model mostly does "
        "([Welleck et al.](https://arxiv.org/abs/1908.04319)); long derivations repeat formulas, and lie between.",
        "the student is stuck in loops, which its own samples then reinforce",
        "lower `actor.optim.lr`; lower `data.max_response_length` until it ends its responses; check "
        "`data.chat_template`",
    ),
    Check(
        "end_of_sequence", 0.1, judges.below("loss/teacher_end_probability", 3),
        "`loss/teacher_end_probability` below {limit}, mean of 3 steps",
        "Two models with the same end token agree on most ends, even if their styles differ; another end token has a "
        "probability near 0.",
        "student and teacher end their responses with different tokens, or have different chat templates",
        "compare `eos_token_id` in the `generation_config.json` of both models; set `rollout.stop_token_ids` to the "
        "teacher's end tokens; check `data.chat_template`",
    ),
    Check(
        "teacher_mismatch", 0.3, judges.teacher_mismatch,
        "`loss/overlap` below {limit}, mean of 3 steps; without a distribution `loss/sampled_reverse_kl` above "
        f"{judges.FAR_KL:g} nats",
        "On text that one of them has written, two language models with the same tokens share more than half of the "
        f"probability. {judges.FAR_KL:g} nats mean that the teacher gives the student's tokens a probability of 2%.",
        "the teacher has other token ids or other weights than intended, or the student has collapsed",
        "check that `teacher.name` is the intended teacher and shares the student's tokenizer; if the overlap was "
        "high before, lower `actor.optim.lr`",
    ),
    Check(
        "overlap_falls", 0.1, judges.overlap_falls,
        "`loss/overlap` more than {limit} below its best mean of 5 steps in the last 100 steps",
        "The overlap rises as long as the student learns; between batches it varies by about 0.01.",
        "updates are too large, or the responses have moved to text on which the teacher is not reliable",
        "lower `actor.optim.lr`; with `reverse_kl` or k1-k3 add `forward_kl` in `distill.losses`",
    ),
    Check(
        "entropy_collapse", 0.2, judges.entropy_collapse,
        "`loss/student_entropy` below {limit} of its first value (means of 5 steps), while the KL is above "
        f"{judges.SAME_KL_SHARE:g} of its first value",
        "The entropy also falls when the student becomes as certain as its teacher; then the KL falls, too.",
        "the loss rewards few modes: the student leaves out what the teacher finds probable",
        "set `distill.loss` to `jsd`, `skew_reverse_kl` or `forward_kl`, or lower `actor.optim.lr`",
    ),
    Check(
        "importance_clipped", 0.05, judges.above("loss/importance_clipped", 3),
        "`loss/importance_clipped` above {limit}, mean of 3 steps",
        "Each clipped token biases the gradient; `distill.importance_clip` is meant for rare ones.",
        "the rollouts are stale, or the engines sample at another temperature than the loss uses",
        "lower `trainer.max_staleness` or choose a `trainer.scheduler` with less prefetching; set "
        "`rollout.temperature` to `teacher.temperature`",
    ),
    Check(
        "gradient_spikes", 10.0, judges.gradient_spikes,
        f"`optim/grad_norm` above {{limit}} times its median of the last 100 steps, in {judges.N_SPIKES} of "
        f"{judges.SPIKE_STEPS} steps; from step {2 * judges.SPIKE_STEPS} on",
        "A single peak is common and `actor.optim.clip_grad` absorbs it.",
        "single responses have extreme losses, or the learning rate is at the edge of stability",
        "lower `actor.optim.lr`, or lengthen `actor.optim.warmup_steps`; lower `actor.optim.clip_grad`",
    ),
    Check(
        "no_gap", 0.005, judges.no_gap,
        "`loss/token_kl` (else `loss/sampled_reverse_kl`) below {limit} nats, mean of the first 5 steps of a run",
        "Two engines with the same bfloat16 weights differ by about 0.001 nats per token; a gap worth training is "
        "10 to 100 times larger.",
        "student and teacher are the same model, or the student is already distilled",
        "compare `model.path` with the teacher's folder",
    ),
    Check(
        "kl_rises", 1.5, judges.kl_rises,
        "`loss/token_kl` (else `loss/sampled_reverse_kl`) above {limit} times the smaller of its first value and its "
        f"lowest mean of 5 steps in the last 100 steps, plus {judges.KL_MARGIN:g} nats; mean of 5 steps",
        "Batches differ by 10% to 40%. Under `reverse_kl` the forward KL may rise, but rarely by half.",
        "the learning rate is too high or the warm-up too short",
        "lower `actor.optim.lr`, or lengthen `actor.optim.warmup_steps`",
    ),
    Check(
        "accuracy_falls", 0.1, judges.accuracy_falls,
        f"`eval/accuracy` more than {{limit}} below the first evaluation, while `eval/kl` is below {judges.KL_FELL:g} "
        "of the first",
        "With 200 prompts the standard error of the difference is at most 0.05, and half of that if most answers stay "
        "the same.",
        "the student imitates the teacher's text but not its results: answers are cut off, end in another format, or "
        "the teacher is worse than the student",
        "read `samples/`; check `data.max_response_length` and `eval.answer_marker`; measure the teacher's own "
        "accuracy",
        is_of_evaluation=True,
    ),
    Check(
        "worse_than_start", 1.2, judges.worse_than_start,
        f"`eval/kl` (else `eval/reverse_kl`) above {{limit}} times the first evaluation plus {judges.EVAL_MARGIN:g} "
        f"nats, or `eval/accuracy` more than {judges.ACCURACY_LOSS:g} below it while the KL has not fallen",
        "Evaluations use the same prompts and seeds, so they vary less than training batches.",
        "the learning rate is too high, or the student has collapsed",
        "resume from an earlier checkpoint (`trainer.resume`) with a lower `actor.optim.lr`",
        is_of_evaluation=True,
    ),
    Check(
        "engine_logprobs", 0.02, judges.above(judges.FRESH_KL, 3),
        "`loss/engine_kl` above {limit}, mean of the last 3 steps with staleness 0",
        "Rounding gives up to 1e-6 in float32 and about 0.001 in bfloat16, more with mixtures of experts.",
        "the engines do not have the weights that train, or compute another model",
        "set `weight_sync.verify` to `always`; if the digests agree, set `model.dtype` to `float32` to compare",
    ),
    Check(
        "stale_rollouts", 0.9, judges.stale_rollouts,
        "`loss/engine_kl` of stale rollouts above {limit} times `loss/token_kl` (else `loss/sampled_reverse_kl`) and "
        f"above {judges.KL_MARGIN:g} nats; means of 3 steps",
        "The rollouts are then almost as far from the student as the student is from the teacher: it trains on the "
        "mistakes of another model.",
        "the weights change too much between generation and training",
        "lower `trainer.max_staleness` or choose a `trainer.scheduler` with less prefetching; lower `actor.optim.lr`",
    ),
    Check(
        "environment_errors", 0.05, judges.above("rollout/environment_errors", 3),
        "`rollout/environment_errors` above {limit}, mean of 3 steps",
        "A failed environment ends its trajectory early, so errors change which trajectories the student learns from.",
        "the environment raises, exceeds its time limit, or returns messages that cannot be rendered",
        "read the first errors in the log; raise `rollout.environment_timeout_s` or `rollout.environment_workers`",
    ),
    Check(
        "ends_disagree", 0.3, judges.ends_disagree,
        f"`eval/end_kl_share` above {{limit}}, while `eval/kl` is above {judges.KL_MARGIN:g} nats",
        "A response has one end among many tokens; models that end with the same token disagree most inside the text.",
        "student and teacher end with different tokens, or the teacher's template expects text after the end",
        "compare `eos_token_id` in the `generation_config.json` of both models; set `rollout.stop_token_ids` to the "
        "teacher's end tokens; check `data.chat_template`",
        is_of_evaluation=True,
    ),
    Check(
        "sure_and_wrong", 3.0, judges.sure_and_wrong,
        f"`eval/sure_and_wrong_share` above {{limit}} times its first value, or times {judges.MIN_WRONG:g} if that is "
        "larger",
        "A student that learns loses such tokens first; it gains them when it collapses, before the mean entropy shows "
        "it. A few tokens more are noise.",
        "the learning rate is too high, or the loss rewards few modes",
        "lower `actor.optim.lr`; set `distill.loss` to `forward_kl` or `jsd`; `gkd where` names the tokens",
        is_of_evaluation=True,
    ),
    Check(
        "paired", 0.9, judges.below("loss/paired", 3),
        "`loss/paired` below {limit}, mean of 3 steps",
        "A teacher with another tokenizer reads all text; what it cannot read are special tokens and broken bytes.",
        "responses hold special tokens without a pair, or bytes that are not UTF-8",
        "read `samples/`; name the pairs in `teacher.special_tokens`",
    ),
    Check(
        "canonical", 0.5, judges.below("loss/canonical", 3),
        "`loss/canonical` below {limit}, mean of 3 steps",
        "A student that has learned from texts writes the tokens of its own tokenizer: all but a few percent of them.",
        "the student learns to write the teacher's tokens, because the two segment the text differently",
        "set `distill.units` to `text`",
    ),
)  # fmt: skip
# These compare the engine's distribution with the student's at the temperature of the loss.
NEED_EQUAL_SAMPLING = ("engine_logprobs", "stale_rollouts")
