"""Declare every setting of a run, one dataclass per section.

`gkd.config.load` reads them from YAML and `key=value` overrides, `gkd.config.check` checks them. Help, limits and the
rule for a resumed run stand at each field; `python -m gkd.main_gkd --help` and docs/configuration.md print them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gkd.config.declare import key
from gkd.config.schema_actor import ActorConfig, LoraConfig, OptimConfig
from gkd.config.schema_health import HealthConfig
from gkd.config.schema_reward import RewardConfig, RewardFunctionConfig
from gkd.config.schema_teacher import DistillConfig, LossTermConfig, ReferenceConfig, RouteConfig, TeacherConfig
from gkd.config.schema_trainer import TRACKER_NAMES, TrainerConfig

__all__ = [
    "TRACKER_NAMES",
    "ActorConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DistillConfig",
    "EvalConfig",
    "HealthConfig",
    "LoraConfig",
    "LossTermConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RouteConfig",
    "TeacherConfig",
    "TrainerConfig",
    "WeightSyncConfig",
]


@dataclass
class DataConfig:
    train_files: list[str] = key(
        [],
        "Prompt files, JSONL or parquet by their ending. Required.",
        required="name one or more prompt files, like [data/train.jsonl].",
    )
    val_files: list[str] = key([], "Held-out prompt files for evaluation; empty = no evaluation.")
    prompt_key: str = key(
        "prompt", "Column of the prompt: a string, or a list of {role, content} messages for the chat template."
    )
    response_key: str = key(
        "response", "Column of the dataset's response, a string; needed if distill.on_policy_share is below 1."
    )
    answer_key: str = key(
        "answer", "Column of the reference answer, for exact_match and math_verify (eval.metric, reward.functions)."
    )
    teacher_prompt_key: str = key(
        "",
        "Column of the prompt that the teacher scores the responses after, a string or messages, instead of the "
        "student's. Rows without it: the student's prompt. Empty = the same prompt for both. docs/losses.md.",
    )
    max_prompt_length: int = key(1024, "Longest prompt in tokens.", gt=0)
    max_teacher_prompt_length: int = key(
        0,
        "Longest prompt of the teacher in tokens, if it has its own; 0 = max_prompt_length. A longer one is never "
        "truncated: it is an error, or the row is omitted with truncation drop.",
        ge=0,
    )
    max_response_length: int = key(
        1024, 'Longest response in tokens; a rollout that reaches it ends with finish_reason "length".', gt=0
    )
    truncation: str = key(
        "error",
        "Handling of longer prompts: error, drop (omit the row; the number is logged), left (keep the end) or right "
        "(keep the start).",
        choices=("error", "drop", "left", "right"),
    )
    chat_template: str = key(
        "auto",
        "Whether to apply the tokenizer's chat template; auto = if it has one.",
        choices=("auto", "always", "never"),
    )
    shuffle: bool = key(True, "Shuffle the prompts in each epoch, from data.seed and the epoch number.")
    seed: int = key(1, "Seed of the prompt order and of sampling.", ge=0)
    teacher_key: str = key("", "Column that names a row's teacher, one of teacher.routes; needed with routes.")
    domain_shares: dict[str, float] = key(
        {},
        "Shares of the prompts of a batch by route, exact over time, e.g. {math: 3, code: 1}; each route has an order "
        "of its own. Empty = as the files have them.",
        limits="each of teacher.routes, > 0",
    )


@dataclass
class ModelConfig:
    path: str = key(
        "",
        "The student: a local folder in Hugging Face format (config.json, safetensors, tokenizer). Required.",
        required="give a folder in Hugging Face format.",
    )
    dtype: str = key("bfloat16", "dtype of the weights, also in the rollout engine.", choices=("bfloat16", "float32"))
    trust_remote_code: bool = key(False, "Let transformers run Python code from the model folder.")


@dataclass
class RolloutConfig:
    n_gpus_per_node: int = key(
        1, "GPUs per node of the rollout pool. Times rollout.nnodes: engines x rollout.tp.", gt=0, resume=True
    )
    nnodes: int = key(1, "Nodes of the rollout pool.", gt=0, resume=True)
    tp: int = key(1, "Tensor parallel size of one vLLM engine.", gt=0, resume=True)
    n: int = key(1, "Responses sampled per prompt.", gt=0)
    temperature: float = key(1.0, "Sampling temperature of training rollouts.", gt=0)
    top_p: float = key(
        1.0, "Sample from the most probable tokens that hold this probability mass; 1 = all.", gt=0, le=1
    )
    stop_token_ids: list[int] = key(
        [], "Token ids that end a response, in addition to the student's end-of-sequence tokens."
    )
    max_num_seqs: int = key(128, "Sequences that an engine decodes at a time.", gt=0, resume=True)
    gpu_memory_utilization: float = key(
        0.85, "Fraction of GPU memory for vLLM (weights and KV cache); ignored on cpu.", gt=0, le=1, resume=True
    )
    enable_sleep_mode: bool = key(
        False, "Let calls release the engines' memory without trainer.colocate; docs/own_pipeline.md.", resume=True
    )
    cpu_kv_cache_mib: int = key(256, "Size of the KV cache on cpu in MiB.", gt=0, resume=True)
    enforce_eager: bool = key(
        False, "Skip CUDA graphs and torch.compile: slower steps, faster start. Always on for cpu.", resume=True
    )
    max_restarts: int = key(
        1,
        "How often each engine that died or hangs is started again; one failure more saves a checkpoint and ends the "
        "run. 0 = the first failure ends it. See docs/operations.md.",
        ge=0,
        resume=True,
    )
    hang_timeout_s: float = key(
        300.0,
        "Seconds without a finished pass, or without any reply, after which an engine with unfinished sequences hangs "
        "and is killed. Longer than its longest pass, shorter than trainer.stage_timeout_s.",
        gt=0,
        resume=True,
    )


@dataclass
class WeightSyncConfig:
    transport: str = key(
        "auto",
        "How weights travel; auto = nccl on GPUs of their own, shared_memory if all members are on one host with "
        "trainer.device cpu, else gloo. vllm = as auto, but loaded in a session of vLLM's weight transfer.",
        choices=("auto", "nccl", "gloo", "shared_memory", "vllm"),
        resume=True,
    )
    bucket_mib: int = key(256, "Size of the buckets in which tensors are sent, in MiB.", gt=0, resume=True)
    lora: str = key(
        "merged",
        "What is sent after a step with actor.lora: merged = all weights; adapters = only the adapters, with which the "
        "engines compute (vLLM's LoRA). See docs/student.md.",
        choices=("merged", "adapters"),
        resume=True,
    )
    verify: str = key(
        "first",
        "Compare digests of the engines' tensors with the exported ones: always, first (at the start and after the "
        "first training step) or never.",
        choices=("always", "first", "never"),
        resume=True,
    )
    timeout_s: float = key(600.0, "Seconds one weight sync may take.", gt=0, resume=True)


@dataclass
class EvalConfig:
    every: int = key(
        0, "Steps between evaluations; 0 = only before the first and after the last step.", ge=0, resume=True
    )
    max_prompts: int = key(200, "Held-out prompts to use, the first ones of val_files; 0 = all.", ge=0, resume=True)
    keep_token_losses: int = key(
        8,
        "Sequences of an evaluation whose per-token losses, KL, masses, entropy and five most probable tokens of the "
        "teacher are written to run_dir/token_losses/step_N.jsonl for the report, 0.3 kB per token; 0 = none.",
        ge=0,
        resume=True,
    )
    metric: str = key(
        "exact_match",
        "Function that judges greedy responses, as in reward.functions. exact_match: the text after the last "
        "eval.answer_marker equals the answer column. none: KL only.",
        limits="none, or as reward.functions",
        resume=True,
    )
    n: int = key(
        1,
        "Sampled responses per held-out prompt, for the KL and, above 1, for eval/pass_at_k of eval.metric.",
        gt=0,
        resume=True,
    )
    answer_marker: str = key(
        "=",
        "Text before the answer in responses, and in reference answers that contain it.",
        limits="not empty for exact_match",
        resume=True,
    )


@dataclass
class MemoryConfig:
    strategy: str = key(
        "auto",
        "Where the student's states are while a local teacher or reference with fsdp_cpu_offload=false computes: "
        "resident (on the GPU; nothing moves), offload (in host memory) or auto (resident if the prediction fits the "
        "GPU with a margin of 10%, else offload).",
        choices=("auto", "resident", "offload"),
        resume=True,
    )
    fragmentation_warn: float = key(
        0.2,
        "GPUs: warn if both fragmentation measures of the CUDA allocator exceed this; checked every tenth step. 1 = "
        "off. See docs/memory.md.",
        ge=0,
        le=1,
        resume=True,
    )
    timeline: bool = key(
        True,
        "Write the peak memory of each actor phase (largest rank) to the metrics; one more call of the ranks per step.",
        resume=True,
    )
    timeline_of_ranks: bool = key(False, "With timeline: also write the peak of every rank.", resume=True)


@dataclass
class ClusterConfig:
    ray_address: str = key(
        "",
        "HOST:PORT of a running Ray cluster; empty = start one on this machine. Pools of several nodes need it.",
        resume=True,
    )
    gpus: list[int] = key(
        [],
        "GPU numbers of a node, as in nvidia-smi, that the pools may use, in ascending order. auto or empty = all that "
        "are visible, without those of a teacher server on this host. See docs/operations.md for CUDA_VISIBLE_DEVICES "
        "and running clusters.",
        limits="auto, or each >= 0 and once",
        resume=True,
    )
    order: list[str] = key(
        ["actor", "rollout"],
        "Order of the pools: the first one gets the lowest GPU ids and the first nodes.",
        limits="actor and rollout, each once",
        resume=True,
    )


@dataclass
class Config:
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
