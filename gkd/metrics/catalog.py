"""List every key that a line of metrics.jsonl can have: unit, meaning, healthy values, problems and their fixes.

Here are the keys about learning; `catalog_system` has the others, and all sections. `python -m tests.pages` writes
docs/metrics.md from them. Tests compare them with the keys of real runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from gkd.config.schema_sections import HEALTH_CHECKS
from gkd.config.schema_teacher import LOSS_NAMES
from gkd.spans import Phase, Stage

# Calls on the actor's ranks that may move states, and their other phases with numbers of memory.
_CALLS = (
    *(Phase.TRAIN, Phase.EVALUATE, Phase.LOGPROBS, Phase.REFERENCE, Phase.SEND, Phase.SAVE, Phase.LOAD),
    *(Phase.LOAD_TEACHER, Phase.TEACHER_HEAD),
)
_OTHERS = (Phase.SCORE, Phase.OFFLOAD, Phase.ONLOAD, Phase.LOAD_REFERENCE)

NUMBER, NAME, FUNCTION, DOTTED = r"\d+", r"[\w-]+", r"\w+", r"\w+(?:\.\w+)+"
# Placeholder of a key -> its values. NUMBER: any number; NAME: a name in teacher.routes; FUNCTION: in reward.functions.
PLACEHOLDERS: dict[str, tuple[str, ...] | str] = {
    "loss": (DOTTED, *LOSS_NAMES),
    "stage": get_args(Stage),
    "pool": ("rollout", "teacher", "actor"),
    "call": tuple(phase.span for phase in _CALLS),
    "phase": tuple(phase.metric for phase in (*_CALLS, *_OTHERS)),
    "engine_phase": tuple(phase.metric for phase in (Phase.GENERATE, Phase.RECEIVE, Phase.OFFLOAD)),
    "check": HEALTH_CHECKS,
    "age": NUMBER,
    "k": NUMBER,
    "function": FUNCTION,
    "route": NAME,
    "turn": NUMBER,
}
EVERY_STEP = "every step"


@dataclass(frozen=True, slots=True)
class Row:
    """One key, or a family of keys with a placeholder in angle brackets.

    Args:
        when: the lines that have it: `EVERY_STEP`, or a condition in words.
        problem: what an unhealthy value looks like, its usual cause and what to do; empty if it only informs.
    """

    key: str
    unit: str
    when: str
    meaning: str
    healthy: str = ""
    problem: str = ""

    def matches(self, key: str) -> bool:
        """Return whether a key of a metrics line belongs to this row."""
        return re.fullmatch(re.sub(r"<(\w+)>", lambda found: _pattern(found[1]), self.key), key) is not None


def _pattern(placeholder: str) -> str:
    values = PLACEHOLDERS[placeholder]
    return values if isinstance(values, str) else f"(?:{'|'.join(values)})"


_REWARDS, _TRAINS = "`reward.functions`", "`distill.reward_weight`"
REWARD = (
    Row(
        "reward/mean", "reward", _REWARDS,
        "Weighted sum of the functions, mean over the student's responses of the batch.",
        "Rises, with noise from batch to batch.",
        "Does not rise: see `reward/flat_groups`, then raise `distill.reward_weight`.",
    ),
    Row("reward/std", "reward", _REWARDS, "Standard deviation of the rewards of the batch."),
    Row(
        "reward/flat_groups", "share", _REWARDS,
        "Share of the prompts whose responses all have the same reward. With `distill.advantage: group` their rewards "
        "have no gradient.",
        "Well below 1.",
        "Near 1: the prompts are too easy or too hard for the student; raise `rollout.n`, or change the prompts.",
    ),
    Row(
        "reward/undecided", "responses", _REWARDS,
        "Responses that `math_verify` could not parse or compare in 2 s; they count as 0.",
        "0, or a few of a thousand.",
        "More: read the samples; the student writes expressions that no function should have to evaluate.",
    ),
    Row("reward/<function>/mean", "value", _REWARDS, "Mean of one function over the student's responses, unweighted."),
    Row(
        "loss/reward", "-", _TRAINS,
        "Clipped policy-gradient loss of the rewards, unweighted. Its gradient trains; its value does not inform.",
    ),
    Row(
        "loss/reward_ratio", "ratio", _TRAINS,
        "Probability of the sampled token under the student that trains, divided by that of the engine.",
        "Near 1.",
        "Far from 1: rollouts are stale; choose a scheduler with less prefetching, or lower `trainer.max_staleness`.",
    ),
    Row(
        "loss/reward_clipped", "share", _TRAINS,
        "Share of the student's tokens whose ratio is beyond `distill.reward_clip`, so that their reward has no "
        "gradient.",
        "Below 0.1.",
        "Larger: as `loss/reward_ratio`.",
    ),
)  # fmt: skip


_EVALUATION = "evaluation"
_LIST = "a top-k list"
_SAMPLES = "k1-k3 or a reference"
_OTHER_TOKENS = "`teacher.tokenizer`"

_LOSS = (
    Row(
        "loss/total", "nats per token", EVERY_STEP,
        "The trained loss, mean over the response tokens of the batch. Not comparable between different losses.",
        "Divergences: falls, with noise from batch to batch. k1-k3: noisy; read `eval/kl` instead.",
        "Rises over many steps: lower `actor.optim.lr`, or lengthen `actor.optim.warmup_steps`. A loss that is not "
        "finite ends the run before the optimizer moves.",
    ),
    Row(
        "loss/tokens", "tokens", EVERY_STEP,
        "Response tokens of the batch, by which the loss is divided.",
        "Equal to `rollout/response_tokens`.",
    ),
    Row(
        "loss/<loss>", "nats per token", "each term of the loss",
        "A term of `distill.loss` or `distill.losses`, unweighted, mean over the tokens that it covers.",
        "As `loss/total`.",
        "One term of a mixture falls while the other rises: change their weights in `distill.losses`.",
    ),
    Row(
        "loss/token_kl", "nats per token", "a distribution of the teacher",
        "KL(teacher || student) on the trained tokens, for every loss, with the tail of `distill.tail`.",
        "Falls.",
        "Rises while `loss/total` falls: normal for a while under `reverse_kl`, which need not cover the teacher's "
        "whole distribution. If `eval/kl` rises, too: use `forward_kl` or `jsd`.",
    ),
    Row(
        "loss/overlap", "share", "a distribution of the teacher",
        "Sum of min(p, q) over the teacher's list; with the whole vocabulary 1 - total variation.",
        "Rises towards 1.",
        "Constant although the loss falls: the list has little mass, see `teacher/topk_mass`.",
    ),
    Row(
        "loss/teacher_topk_mass", "share", _LIST,
        "Probability mass of the teacher's list, mean over loss tokens.",
        "Above 0.9.",
        "Low: raise `teacher.topk`, or set `teacher.signal: hidden`.",
    ),
    Row(
        "loss/student_topk_mass", "share", _LIST,
        "Probability of the same tokens under the student.",
        "Rises towards `loss/teacher_topk_mass`.",
        "Falls: the student moves probability out of the list. Set `distill.tail: bucket`; `renorm` does not see it.",
    ),
    Row(
        "loss/student_entropy", "nats", EVERY_STEP,
        "Entropy of the student's distribution, mean over tokens.",
        "Changes slowly, and stays above 0.",
        "Falls towards 0 under `reverse_kl` or k1-k3: the responses lose their variety. Use `jsd`, `skew_reverse_kl` "
        "or a mixture with `forward_kl`.",
    ),
    Row(
        "loss/kept_share", "share", "`distill.token_weight`",
        "Share of the loss, without the factors of the tokens, on the tokens that `distill.token_share` keeps.",
        "Well above `distill.token_share`: the kept tokens are those with much to learn.",
        "Near `distill.token_share`: the weight does not find the tokens that differ from the teacher's. Raise the "
        "share, or choose another `distill.token_weight`.",
    ),
    Row(
        "loss/sampled_reverse_kl", "nats per token", "the teacher's logprob of the sampled token",
        "k1 without importance weight on the student's own tokens: estimates KL(student || teacher).",
        "Falls; single batches may be negative.",
        "As `loss/total`.",
    ),
    Row(
        "loss/reference_kl", "nats per token", "`distill.reference_kl_weight`",
        "k3 estimate of KL(student || reference) on the student's own tokens, unweighted.",
        "0 at the first step, then rises to a plateau.",
        "Keeps rising: raise `distill.reference_kl_weight`, or lower `actor.optim.lr`.",
    ),
    Row(
        "loss/importance_weight", "ratio", _SAMPLES,
        "Probability of the sampled token under the student that trains, divided by that of the engine; mean after the "
        "clip.",
        "Near 1.",
        "Far from 1: `teacher.temperature` and `rollout.temperature` differ, or rollouts are stale: lower "
        "`trainer.max_staleness`, or choose a scheduler with less prefetching.",
    ),
    Row(
        "loss/importance_clipped", "share", _SAMPLES,
        "Share of tokens to which `distill.importance_clip` applies.",
        "Near 0.",
        "Above 0.05: the gradient is biased. As for `loss/importance_weight`.",
    ),
    Row(
        "loss/engine_kl", "nats per token", "rollouts",
        "k3 estimate of KL(engine || student that trains) on the student's own tokens, from the logprobs that the "
        "engine recorded. It also measures a difference of `rollout.temperature` and `teacher.temperature`, and "
        "`rollout.top_p`, `top_k` and `min_p`.",
        "With staleness 0 below 1e-4 in float32, about 0.001 in bfloat16. With stale rollouts more, see "
        "`staleness/mean`.",
        "Large with staleness 0: the engines compute another model than the actor; set `weight_sync.verify: always`. "
        "Large with stale rollouts: lower `trainer.max_staleness`, or choose a scheduler with less prefetching.",
    ),
    Row(
        "loss/teacher_end_probability", "probability", "responses that ended",
        "The teacher's probability of the token with which the student ended its response, mean over the responses "
        "that were not truncated; 0 where the teacher's list lacks it.",
        "Above 0.5, and rises.",
        "Near 0: the teacher ends its responses with another token, or would not end here; compare `eos_token_id` of "
        "the two models, and check `data.chat_template` and `rollout.stop_token_ids`.",
    ),
    Row(
        "loss/paired", "share", _OTHER_TOKENS,
        "Share of the student's tokens whose text the teacher's tokenizer has, too. The others have no loss.",
        "Near 1.",
        "Low: read `samples/` for special tokens inside of responses (`teacher.special_tokens`), and for bytes that "
        "are not UTF-8.",
    ),
    Row(
        "loss/by_nodes", "share", _OTHER_TOKENS,
        "Share of the student's tokens that begin at a safe boundary, where strings are compared; at others it is the "
        "next byte.",
    ),
    Row(
        "loss/canonical", "share", _OTHER_TOKENS,
        "Share of the tokens that the student sampled which its tokenizer makes of their text, too.",
        "Near 1.",
        "Falls: the student learns to write the teacher's tokens, which it never reads in prompts; set "
        "`distill.units: text`.",
    ),
)  # fmt: skip
_OPTIM = (
    Row(
        "optim/grad_norm", "norm", EVERY_STEP,
        "Global gradient norm before clipping.",
        "About constant after the warm-up.",
        "Always far above `actor.optim.clip_grad`: every update is scaled down; lower the learning rate or raise the "
        "limit. Single peaks with a peak of the loss: look at that step's responses.",
    ),
    Row("optim/lr", "1", EVERY_STEP, "Learning rate of this update.", "Follows `actor.optim.schedule`."),
)  # fmt: skip
_ROLLOUT = (
    Row(
        "rollout/sequences", "sequences", EVERY_STEP,
        "Sequences of the batch, with the dataset's responses.",
        "`trainer.global_batch_size` x `rollout.n` without dataset responses.",
    ),
    Row("rollout/on_policy_sequences", "sequences", EVERY_STEP, "Those of them that the student generated."),
    Row(
        "rollout/prompt_tokens", "tokens", EVERY_STEP, "Tokens of the prompts, counted once for each of its responses."
    ),
    Row("rollout/response_tokens", "tokens", EVERY_STEP, "Tokens of all responses, without observations."),
    Row("rollout/dataset_response_tokens", "tokens", EVERY_STEP, "Tokens of the dataset's responses."),
    Row(
        "rollout/response_length_mean", "tokens", EVERY_STEP,
        "Mean length of the responses.",
        "Approaches the length of the teacher's own responses.",
        "Rises up to `data.max_response_length`: see `rollout/truncated_share`. Falls to a few tokens: the student "
        "ends early; read its responses in `samples/`, and check the chat template.",
    ),
    Row(
        "rollout/truncated_share", "share", EVERY_STEP,
        "Share of responses that reached `data.max_response_length`.",
        "Below 0.05.",
        "Near 1: no end token is generated; check `rollout.stop_token_ids` and `data.chat_template`. Otherwise raise "
        "`data.max_response_length`.",
    ),
    Row(
        "rollout/repeated_4gram_share", "share", "rollouts",
        "Share of the student's 4-grams (4 consecutive response tokens) that occur earlier in the same response; 1 - "
        "distinct / all ([arXiv:1908.04319](https://arxiv.org/abs/1908.04319)).",
        "Below 0.2; rises with the length of the responses.",
        "Above 0.4: responses repeat themselves; read them in `samples/`. Lower `data.max_response_length` or "
        "`actor.optim.lr`.",
    ),
)  # fmt: skip
_TURNS = "`rollout.environment`"
_ENVIRONMENT = (
    Row(
        "rollout/turns_mean", "turns", _TURNS,
        "Mean number of the student's turns in a trajectory.",
        "Approaches that of the teacher.",
        "Stays 1: the environment ends each trajectory after one turn, because it finds no call; read `samples/`. Near "
        "`rollout.max_turns`: trajectories do not end.",
    ),
    Row("rollout/observed_tokens", "tokens", _TURNS, "Tokens of the environments, which carry no loss."),
    Row(
        "rollout/environment_errors", "share", _TURNS,
        "Share of trajectories that an error or a time limit of their environment has ended. Their turns are trained "
        "on.",
        "0.",
        "The log has the first errors. See [environments](environments.md).",
    ),
    Row("turn/<turn>/tokens", "tokens", _TURNS, "Tokens of this turn of all trajectories; later ones count as 8."),
    Row(
        "turn/<turn>/kl", "nats per token", f"{_TURNS} and a distribution of the teacher",
        "As `loss/token_kl`, of the tokens of this turn.",
        "Falls for every turn.",
        "Falls for the first turn only: the later ones have few tokens, or the student does not use the observations.",
    ),
    Row("turn/<turn>/share_ended", "share", _TURNS, "Share of the trajectories with this turn that ended with it."),
)  # fmt: skip
_TEACHER = (
    Row(
        "teacher/topk_mass", "share", "a list or the whole distribution",
        "Probability mass of the teacher's list, mean over response tokens, as the teacher sent it.",
        "Above 0.9.",
        "Low: raise `teacher.topk`, or set `teacher.signal: hidden`.",
    ),
    Row(
        "teacher/score_bytes", "bytes", EVERY_STEP,
        "Size of the scores of the batch.",
        "About constant.",
        "Large, and `time/teacher_s` too: lower `teacher.topk`, set `teacher.mass`, or `teacher.wire: fp16`.",
    ),
    Row(
        "teacher/stored_share", "share", "`teacher.store`",
        "Share of the batch's sequences whose scores were in `teacher.store`; the teacher did not compute them.",
        "0 in the first epoch, then 1 - `distill.on_policy_share`.",
        "Stays 0: the teacher's weights, the tokens or a setting of the request differ from run to run.",
    ),
)  # fmt: skip
_STALENESS = (
    Row(
        "staleness/max", "steps", EVERY_STEP,
        "Age of the oldest rollout: steps from the weights that generated its first token to those that train on it.",
        "At most the bound of `trainer.scheduler`; a rollout above it ends the run.",
    ),
    Row(
        "staleness/mean", "steps", EVERY_STEP,
        "Mean age of the student's sequences.",
        "0 under `sync`.",
        "`loss/importance_weight` moves away from 1, or `eval/kl` is worse than under `sync`: choose a scheduler with "
        "less prefetching, or lower `trainer.max_staleness`.",
    ),
    Row("staleness/share_<age>", "share", "rollouts", "Share of the student's sequences of this age."),
)  # fmt: skip
_WEIGHT_SYNC = (
    Row(
        "weight_sync/bytes", "bytes", EVERY_STEP,
        "Size of the weights that were sent to the engines.",
        "Constant: the size of the student in `model.dtype`.",
    ),
    Row(
        "weight_sync/verified_tensors", "tensors", EVERY_STEP,
        "Tensors of the engines whose digests were compared; 0 where `weight_sync.verify` skips the step.",
        "The number of the student's tensors, at the first step at least. A difference ends the run.",
    ),
)  # fmt: skip
_EVAL = (
    Row(
        "eval/kl", "nats per token", f"{_EVALUATION}, a distribution of the teacher",
        "KL(teacher || student) on the student's own responses to validation prompts, whatever the trained loss. "
        "Comparable between runs with the same signal, K, mass and tail.",
        "Falls, at first fast. The number to compare runs by.",
        "Does not fall: raise `actor.optim.lr`, then check `teacher/topk_mass`. Falls and rises again: lower "
        "`actor.optim.lr`, or use the best checkpoint (`trainer.keep_best`).",
    ),
    Row(
        "eval/reverse_kl", "nats per token", f"{_EVALUATION}, no distribution",
        "k1 estimate of KL(student || teacher) on the same responses.",
        "Falls, with noise: use more `eval.max_prompts`.",
        "As `eval/kl`.",
    ),
    Row(
        "eval/accuracy", "share", f"{_EVALUATION}, `eval.metric`",
        "Mean of `eval.metric` over the greedy responses; with `exact_match` the share that is correct.",
        "Rises towards the teacher's accuracy, `eval/teacher_accuracy`.",
        "0 from the start: `eval.answer_marker` does not occur in the responses; see `samples/`. Constant while "
        "`eval/kl` falls: the teacher's own accuracy may be the limit.",
    ),
    Row(
        "eval/teacher_accuracy", "share", "step 0, `eval.teacher_prompts` above 0",
        "Mean of `eval.metric` over the teacher's own greedy responses to the first `eval.teacher_prompts` prompts.",
        "Above `eval/accuracy` at step 0: what the student can gain.",
        "Not above it: this teacher cannot help here, or its prompt needs a template (`teacher.prompt_template`).",
    ),
    Row(
        "eval/pass_at_<k>", "share", f"{_EVALUATION}, `eval.n` above 1; k = 1, 2, 4, ... and `eval.n`",
        "Probability that one of k sampled responses is correct (`eval.metric` of at least 0.5): mean over the prompts "
        "of the unbiased estimate from `eval.n` responses.",
        "pass_at_1 rises.",
        "pass_at_1 rises while the largest k falls: the student loses diversity; see `loss/student_entropy`.",
    ),
    Row(
        "eval/end_kl_share", "share", f"{_EVALUATION}, a distribution of the teacher",
        "Share of the KL at the tokens that end responses, of the kept responses (`token_losses/`).",
        "Near the share of these tokens.",
        "Above 0.3: student and teacher end with different tokens. `gkd where` has all groups.",
    ),
    Row(
        "eval/sure_and_wrong_share", "share", f"{_EVALUATION}, a distribution of the teacher",
        "Share of tokens of the same responses where the student gives more than 0.9 to a token to which the teacher "
        "gives less than 0.1.",
        "Falls, or stays below 0.02.",
        "Rises: the student collapses; lower `actor.optim.lr`.",
    ),
    Row("eval/response_tokens", "tokens", _EVALUATION, "Response tokens of the evaluation."),
)  # fmt: skip
_ROUTES = "`teacher.routes`"
_DOMAINS = (
    Row(
        "domain/<route>/token_kl", "nats per token", f"{_ROUTES} and a distribution of the teacher",
        "As `loss/token_kl`, of the tokens of this route and against its teacher.",
        "Falls for every route.",
        "Stands still for one route while the others fall: see its `loss_share`; set `distill.normalize: domain`, or "
        "raise its weight in `teacher.routes`.",
    ),
    Row(
        "domain/<route>/tokens_share", "share", _ROUTES,
        "Share of the batch's response tokens that belong to this route.",
        "Constant.",
        "Small although it has many prompts: its answers are short. See `data.domain_shares`.",
    ),
    Row(
        "domain/<route>/loss_share", "share", _ROUTES,
        "Share of this route in `loss/total`, after `distill.normalize` and its weight.",
        "Similar for all routes. k1-k3 may be negative; then it informs only.",
        "Near 0: the route has almost no gradient. With `normalize: token` it has as much as its tokens.",
    ),
    Row(
        "domain/<route>/length", "tokens", _ROUTES,
        "Mean length of the responses of this route, without `distill.skip_first_tokens`.",
    ),
    Row(
        "domain/<route>/accuracy", "share", f"{_EVALUATION}, {_ROUTES} and `eval.metric`",
        "As `eval/accuracy`, of the validation prompts of this route.",
        "Rises towards the accuracy of its teacher.",
        "Rises for the other routes only: as for `token_kl`.",
    ),
)  # fmt: skip
_HEALTH = (
    Row(
        "health/<check>", "0 or 1", "lines from the first verdict of the check on",
        "1 while the alarm of a [health check](health.md) lasts. A check has a verdict once the run has the numbers "
        "that it needs.",
        "0.",
        "The log names evidence, likely cause and the key to change; so does the table of [health checks](health.md).",
    ),
)  # fmt: skip
# Heading -> rows, in the order of the page.
LEARNING: dict[str, tuple[Row, ...]] = {
    "Loss": _LOSS,
    "Evaluation": _EVAL,
    "Rewards": REWARD,
    "Several teachers": _DOMAINS,
    "Optimizer": _OPTIM,
    "Rollouts": _ROLLOUT,
    "Environments": _ENVIRONMENT,
    "Teacher": _TEACHER,
    "Staleness": _STALENESS,
    "Weight sync": _WEIGHT_SYNC,
    "Health": _HEALTH,
}
