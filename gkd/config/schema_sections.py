"""Declare every setting of a run, one dataclass per section; list the keys, read and replace their values.

`gkd.config.load` reads them from YAML and `key=value` overrides, `gkd.config.check` checks them. Help, limits and the
rule for a resumed run stand at each field; `gkd train --help` and docs/configuration.md print them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

from gkd.config.declare import IF_CONSTANT, IF_NO_REWARD, Key, auto_is, file_key, key
from gkd.config.schedule import with_points
from gkd.config.schema_actor import ActorConfig
from gkd.config.schema_rollout import RolloutConfig, WeightSyncConfig
from gkd.config.schema_teacher import DistillConfig, ReferenceConfig, TeacherConfig
from gkd.errors import ConfigError
from teacher_server.config.declare import Declared, keys_of

EXACT_MATCH = "exact_match"
MATH_VERIFY = "math_verify"
LENGTH = "length"
ENVIRONMENT = "environment"
REWARD_NAMES = (EXACT_MATCH, MATH_VERIFY, LENGTH, ENVIRONMENT)  # functions of `gkd.scoring.reward.worker`
COMPARING = (EXACT_MATCH, MATH_VERIFY)  # functions that need the reference answer
NO_METRIC = "none"  # eval.metric


@dataclass  # not frozen: OmegaConf writes into entries of keys
class RewardFunctionConfig:
    """Entry of `reward.functions`."""

    path: str = key("", choices=REWARD_NAMES, paths=True)
    weight: float = key(1.0)


@dataclass(frozen=True)
class RewardConfig:
    functions: list[RewardFunctionConfig] = key(
        [],
        example="a list, e.g. [{path: exact_match}, {path: my.module:fn, weight: 0.5}]",
        limits="each path once, weights not 0",
    )
    """Functions that judge the student's responses, a list of {path, weight}: exact_match, math_verify, length, or
    module:function of a function (prompt, response, row) -> float. Their weighted sum is the reward. Empty = no
    rewards. docs/losses.md."""
    workers: int = key(2, gt=0, resume=True)
    """Processes that call the functions, over all data-parallel groups; each has at least one."""
    timeout_s: float = key(10.0, gt=0, resume=True)
    """Seconds that one call of a function may take; a longer one ends the run."""


# Names of the checks; `gkd.metrics.health_checks` has their thresholds and reasons.
HEALTH_CHECKS = (
    *("truncated", "repetition", "end_of_sequence", "teacher_mismatch", "overlap_falls", "no_gap"),
    *("kl_rises", "engine_logprobs", "stale_rollouts", "ends_disagree"),
)


@dataclass(frozen=True)
class HealthConfig:
    on_alarm: str = key("warn", choices=("warn", "pause", "stop"), resume=True)
    """What a new alarm of a health check does. warn: one log line. pause: save the step, then wait until
    run_dir/continue exists. stop: save the step, then end with an error. docs/health.md."""
    limits: dict[str, float] = key(
        {},
        example="names with numbers, e.g. {truncated: 0.9}",
        choices=HEALTH_CHECKS,
        ge=0,
        limits="numbers >= 0",
        resume=True,
    )
    """Other limits of some checks, e.g. {truncated: 0.9, no_gap: 0}; 0 leaves a check out. docs/health.md."""


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = file_key([], required="name one or more prompt files, like [data/train.jsonl].")
    """Prompt files, JSONL or parquet by their ending; also hf://datasets/ORG/NAME[@REVISION]/FILE. Required.
    docs/operations.md."""
    val_files: list[str] = file_key([])
    """Held-out prompt files for evaluation; empty = no evaluation."""
    prompt_key: str = key("prompt")
    """Column of the prompt: text, or messages for the chat template: {role, content} or {from, value}, as a list or
    as JSON text. Contents are text or lists of text parts."""
    response_key: str = key("response")
    """Column of the dataset's response, text or one assistant message; needed if distill.on_policy_share is below
    1. Empty = the last message of the prompt, which must then be the assistant's."""
    answer_key: str = key("answer")
    """Column of the reference answer, for exact_match and math_verify (eval.metric, reward.functions)."""
    teacher_prompt_key: str = key("")
    """Column of the prompt that the teacher scores the responses after, a string or messages, instead of the
    student's. Rows without it: the student's prompt. Empty = the same prompt for both. docs/losses.md."""
    tools_key: str = key("")
    """Column of the tools that a prompt offers, for the chat template: a list of {type: function, function: {name,
    ...}}, or such a list as JSON text; null or empty = none. Empty = no tools. docs/data.md."""
    images_key: str = key("")
    """Column of the images of a prompt, in the order of their places in it; empty = no images. docs/data.md."""
    messages_key: str = key("")
    """Column of whole conversations, in place of prompt_key and response_key: the prompt stands before the first
    message of the assistant, and all later ones are dataset responses. Empty = prompts. docs/data.md."""
    max_prompt_length: int = key(1024, gt=0)
    """Longest prompt in tokens."""
    max_teacher_prompt_length: int = key(0, ge=0)
    """Longest prompt of the teacher in tokens, if it has its own; 0 = max_prompt_length. A longer one is an error, or
    the row is omitted with truncation drop."""
    max_response_length: int = key(1024, gt=0)
    """Longest response in tokens; a rollout that reaches it ends with finish_reason "length"."""
    truncation: str = key("error", choices=("error", "drop", "left", "right"))
    """Handling of longer prompts: error, drop (omit the row; the number is logged), left (keep the end, behind the
    token that begins a sequence) or right (keep the start; without chat template only)."""
    chat_template: str = key("auto", choices=("auto", "always", "never"))
    """Whether to apply the tokenizer's chat template; auto = if it has one. A text that begins as the template's
    prompts do is rendered already, and is used as it is."""
    chat_template_kwargs: dict[str, Any] = key({}, limits="variables of the template")
    """Variables of the chat template, for example {enable_thinking: false}."""
    system_prompt: str = key("", limits="a text that the chat template takes")
    """Text of a system message in front of each prompt that has none, also of the teacher's. Empty = no such
    message. docs/data.md."""
    shuffle: bool = key(True)
    """Shuffle the prompts in each epoch, from data.seed and the epoch number."""
    seed: int = key(1, ge=0)
    """Seed of the prompt order and of sampling."""
    teacher_key: str = key("")
    """Column that names a row's teacher, one of teacher.routes; needed with routes."""
    domain_shares: dict[str, float] = key({}, gt=0, limits="each of teacher.routes")
    """Shares of the prompts of a batch by route, exact over time, e.g. {math: 3, code: 1}; each route has an order
    of its own. Empty = as the files have them."""


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
    """On the CPU: cores of each node that actor and engines compute on; 0 = all. With scheduler=sync each of both has
    all of them, otherwise half. Another number changes the last bits of results."""
    scheduler: str = key("sync", choices=(*AHEAD, STREAM))
    """Overlap of rollouts with training: sync (none, staleness 0), one_step_off or two_step_off (prefetch one or
    two batches), or stream (continuous generation, weights updated mid-response). docs/architecture.md."""
    max_staleness: int = key(1, ge=0)
    """stream: largest number of steps between the start of a response and the step that trains on it."""
    record_batches: bool = key(False, resume=True)
    """Keep the rollouts and scores of every step in run_dir/batches, for trainer.replay."""
    replay: str = file_key("", resume=True)
    """Batches folder of a run with record_batches: train on its batches, in its order. With the same settings and
    layout the results are bit-exact. Empty = off."""
    schedules: dict[str, list[list[float]]] = key(
        {}, read=with_points, example="a mapping of keys to [[STEP, VALUE], ...] or {from: A, to: B, steps: N}"
    )
    """Values that change during the run: {KEY: {from: A, to: B, steps: N}} or {KEY: [[STEP, VALUE], ...]}, linear
    between. Keys: data.max_response_length, rollout.max_turns, rollout.temperature, distill.reward_weight,
    distill.losses.NAME. docs/losses.md."""
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
    loggers: list[str] = key([], choices=TRACKER_NAMES, limits="each once", resume=True)
    """Experiment trackers that receive every number of metrics.jsonl, too. Each needs the extra of its name. See
    docs/run-folder.md."""
    project_name: str = key("gkd", required="give a name, e.g. gkd.", limits="not empty", resume=True)
    """Project of wandb and trackio, experiment of mlflow. A run there has the name of its folder."""
    progress: str = key("auto", choices=("auto", "panel", "lines", "off"), resume=True)
    """What the driver shows on stderr: lines (one per step), panel (live), auto (panel on a terminal, otherwise lines)
    or off."""
    profile_steps: list[str] = key([], limits="steps >= 1, or ranges of them like 10-12", resume=True)
    """Steps in which torch's profiler runs on actor rank 0, like [3, 10-12]. Traces go to run_dir/profile; such a
    step is slower."""
    resume: str = file_key("never", limits="never, auto or a folder", resume=True)
    """never: refuse a run_dir with a run in it. auto: resume from its newest undamaged checkpoint. A checkpoint
    folder (.../checkpoints/step_N): rewind to it, or branch into a new run_dir. docs/operations.md."""
    max_restarts: int = key(0, ge=0, resume=True)
    """How often a run whose rank died or hangs in the training loop starts again from its newest checkpoint.
    docs/operations.md."""
    save_every: int | str = key(
        "30min",
        example="steps, e.g. 100, or a time, e.g. 30min",
        limits="steps >= 0, or a time such as 45s, 30min, 2h",
        resume=True,
    )
    """Steps or time between checkpoints; 0 = only at the end. An interrupt and a lost teacher save the last step,
    too. docs/operations.md."""
    keep_last: int = key(2, gt=0, resume=True)
    """Newest checkpoints to keep."""
    keep_best: str = key("", limits="eval/... or domain/.../accuracy, with data.val_files", resume=True)
    """Number of an evaluation, such as eval/accuracy or eval/kl: the best step is saved and never deleted;
    checkpoints/best names it. Best is the smallest KL, end_kl_share or sure_and_wrong_share, else the largest. Empty =
    off."""
    colocate: bool = key(False, resume=True)
    """Let actor and engines take turns on the same GPUs. Needs pools of equal size and scheduler=sync.
    docs/memory.md."""
    init_timeout_s: float = key(600.0, gt=0, resume=True)
    """Seconds to wait for free GPUs, and then for all ranks to start. After that the run stops and reports late
    ranks."""
    stage_timeout_s: float = key(
        1800.0, gt=0, limits="zmq: > teacher.outage_budget_s + teacher.request_timeout_s", resume=True
    )
    """Seconds to wait for a training step, scores, a weight sync or the next rollout before the run stops with a
    report."""

    @property
    def staleness_bound(self) -> int:
        """Return the most steps between the oldest weights that generated a sequence and the step that trains on it."""
        return AHEAD.get(self.scheduler, self.max_staleness)


Vision: TypeAlias = Literal["none", "frozen", "trained"]  # what becomes of a student's vision tower; none: not built


@dataclass(frozen=True)
class ModelConfig:
    path: str = file_key("", required="give a folder in Hugging Face format, or ORG/NAME of the hub.")
    """The student: a folder in Hugging Face format (config.json, safetensors, tokenizer), or a model on the hub:
    ORG/NAME[@REVISION]. Required. docs/operations.md."""
    dtype: str = key("bfloat16", choices=("bfloat16", "float32"))
    """dtype of the weights, also in the rollout engine."""
    trust_remote_code: bool = key(False)
    """Let transformers run Python code from the model folder."""
    freeze_vision: bool = key(True)
    """Do not train the vision tower and its projection. Only with data.images_key."""
    n_vocab: int = key(0, ge=0)
    """Token ids that the student generates and is trained on: 0 to n_vocab - 1. The other rows of its embedding are
    masked. 0 = the ids that it shares with its teachers."""


@dataclass(frozen=True)
class EvalConfig:
    every: int = key(0, ge=0, resume=True)
    """Steps between evaluations; 0 = only before the first and after the last step."""
    max_prompts: int = key(200, ge=0, resume=True)
    """Held-out prompts to use, the first ones of val_files; 0 = all."""
    metric: str = key(NO_METRIC, choices=(NO_METRIC, *REWARD_NAMES), paths=True, resume=True)
    """Function that judges greedy responses, as in reward.functions. exact_match: the text after the last
    eval.answer_marker equals the answer column. none: KL, and responses to read in samples/."""
    n: int = key(1, gt=0, resume=True)
    """Sampled responses per held-out prompt, for the KL and, above 1, for eval/pass_at_k of eval.metric."""
    answer_marker: str = key("=", limits="not empty for exact_match", resume=IF_NO_REWARD)
    """Text before the answer in responses, and in reference answers that contain it."""


@dataclass(frozen=True)
class MemoryConfig:
    strategy: str = key("auto", choices=("auto", "resident", "offload"), resume=True)
    """Where the student's states are while a local teacher or reference with fsdp_cpu_offload=false computes: resident
    (on the GPU), offload (in host memory) or auto (resident if a tenth of the GPU stays free)."""


@dataclass(frozen=True)
class ClusterConfig:
    ray_address: str = key("", resume=True)
    """HOST:PORT of a running Ray cluster; empty = start one on this machine. Pools of several nodes need it."""
    gpus: list[int] = key([], read=auto_is([]), ge=0, limits="each once, or auto", resume=True)
    """GPU numbers of a node, as in nvidia-smi, that the pools may use. auto or empty = all that are visible, without
    those of a teacher server on this host. docs/operations.md."""
    teacher_gpu_share: float = key(0.0, ge=0, lt=1, resume=True)
    """Share of each of the pools' GPUs that teacher servers on the same GPUs take: their --gpu-memory-utilization. 0 =
    they have GPUs of their own. docs/memory.md."""


@dataclass(frozen=True)
class Sections:
    """Every setting of a run. `gkd.config.schema.Config` adds the facts that follow from them."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def value(self, name: str) -> Any:
        """Return the value of a dotted key."""
        return functools.reduce(getattr, name.split("."), self)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return a copy with other values of dotted keys; nothing is checked."""
        changed: Any = self
        for name, value in values.items():
            *sections, last = name.split(".")
            owners = list(itertools.accumulate(sections, getattr, initial=changed))
            changed = value
            for owner, item in zip(reversed(owners), (last, *reversed(sections)), strict=True):
                changed = dataclasses.replace(owner, **{item: changed})
        return changed

    def error(self, name: str, problem: str, fix: str) -> ConfigError:
        """Return the error of a dotted key, with its value."""
        return ConfigError(name, self.value(name), problem, fix)

    def check_unused(self, keys: Iterable[str], problem: str, fix: str) -> None:
        """Raise ConfigError if one of these keys, which have no effect here, has another value than its default."""
        for name in keys:
            if self.value(name) != all_keys()[name].default:
                raise self.error(name, problem, fix)


@functools.cache
def all_keys() -> Mapping[str, Declared[Key]]:
    """Return every key by its dotted name, in the schema's order."""
    return keys_of(Sections, Key)


@functools.cache
def sections() -> frozenset[str]:
    """Return the dotted names of all sections, e.g. `actor` and `actor.optim`."""
    return frozenset(name.rpartition(".")[0] for name in all_keys())
