"""Every setting of a run: one dataclass a section.

`gkd.config.load` reads them from YAML and `key=value` overrides; the checks between keys are all in
`gkd.config.check`. The comment above a field is its documentation: `python -m gkd.main_gkd --help` and
docs/configuration.md print it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DataConfig:
    # Prompt files, JSONL or parquet, by their ending. Required.
    train_files: list[str] = field(default_factory=list)
    # Held-out prompt files for evaluation; empty = no evaluation.
    val_files: list[str] = field(default_factory=list)
    # Column with the prompt: a string, or a list of {role, content} messages for the tokenizer's chat template.
    prompt_key: str = "prompt"
    # Column with the dataset's response, a string; needed where distill.on_policy_share is below 1.
    response_key: str = "response"
    # Column with the reference answer, needed for eval.metric: exact_match; rows may lack it in train_files.
    answer_key: str = "answer"
    # Longest prompt, tokens.
    max_prompt_length: int = 1024
    # Longest response, tokens; a rollout that reaches it ends with finish_reason "length".
    max_response_length: int = 1024
    # What happens to a longer prompt: error | drop (leave the row out, counted) | left (keep its end) |
    # right (keep its start).
    truncation: str = "error"
    # Apply the tokenizer's chat template: auto (if it has one) | always | never.
    chat_template: str = "auto"
    # A new order each epoch, from data.seed and the epoch number.
    shuffle: bool = True
    # Seed of the prompt order and of sampling.
    seed: int = 1


@dataclass
class ModelConfig:
    # The student: a local folder in Hugging Face format (config.json, safetensors, tokenizer). Required.
    path: str = ""
    # dtype of parameters and of the rollout engine: bfloat16 | float32.
    dtype: str = "bfloat16"
    # Let transformers run Python code that comes with the model folder.
    trust_remote_code: bool = False


@dataclass
class TrainerConfig:
    # auto (cuda where there is one) | cuda | cpu. On cpu a "GPU" of a pool is one process slot.
    device: str = "auto"
    # sync: rollout, scoring, training and weight sync take turns; every rollout has staleness 0 | one_step_off: the
    # next batch is answered and scored beside the training step, staleness 1 | two_step_off: the next two, staleness
    # 2 | stream: the engines answer prompt after prompt and take new weights in the middle of responses; a step takes
    # what has finished first.
    scheduler: str = "sync"
    # stream: no sequence is trained on that was begun more than this many steps before; the step waits for those that
    # would get older. The other schedulers' bound follows from their name.
    max_staleness: int = 1
    # Keep what every step is trained on, rollouts and scores, in run_dir/batches; see trainer.replay.
    record_batches: bool = False
    # The batches folder of a run that had record_batches: train on its batches, in its order, instead of on answers of
    # this run's engines. With that run's settings and layout its numbers come out again, to the bit. Empty = off.
    replay: str = ""
    # Passes over train_files; whichever of total_epochs and total_steps comes first ends the run.
    total_epochs: int = 1
    # Optimizer steps; 0 = no limit.
    total_steps: int = 0
    # GPUs a node of the actor pool; times trainer.nnodes they are actor.tp x actor.pp x data parallel.
    n_gpus_per_node: int = 1
    # Nodes of the actor pool.
    nnodes: int = 1
    # Prompts of one optimizer step; each is answered rollout.n times.
    global_batch_size: int = 64
    # Everything a run writes: resolved config, metrics.jsonl, checkpoints, the HF export. Required.
    run_dir: str = ""
    # auto: go on from the newest undamaged checkpoint in run_dir | never: refuse a run_dir that holds another run | a
    # checkpoint's folder (.../checkpoints/step_N): go on from exactly that one, in its own run_dir or in a new one.
    resume: str = "never"
    # Steps between checkpoints; 0 = only at the end.
    save_every: int = 0
    # Newest checkpoints kept; older ones are deleted after a newer one is complete.
    keep_last: int = 2
    # Checkpoints of every so many steps are kept for good; 0 = none of them.
    keep_every: int = 0
    # Write checkpoints while training goes on; only the next optimizer step waits for the copy to host memory.
    async_save: bool = True
    # Let actor and engines take turns on the same GPUs, each side's states in host memory while the other works. Both
    # pools have the same size; scheduler sync only; cluster.order has no meaning.
    colocate: bool = False
    # Seconds to wait for the pools' GPUs where others hold them; and again the seconds that all ranks together may take
    # to start, from the first process to the last group joined. Then the run gives up, names who is late, where, and
    # who only waits for those, and leaves all stacks in run_dir/stacks.txt.
    init_timeout_s: float = 600.0
    # Seconds the run waits for a training step, for scores, or for the next finished rollout before it gives up, and
    # says who hangs where, as at the start.
    stage_timeout_s: float = 1800.0


@dataclass
class OptimConfig:
    # AdamW. Peak learning rate.
    lr: float = 1e-6
    # Adam's beta1 and beta2.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    # Added to Adam's denominator.
    eps: float = 1e-8
    # Decoupled; not applied to biases and norms.
    weight_decay: float = 0.01
    # Global gradient norm limit; 0 = off.
    clip_grad: float = 1.0
    # constant | linear | cosine | wsd (warm-up, stable, decay). All but the first go down, after the warm-up, to
    # min_lr_ratio x lr at the last step.
    schedule: str = "constant"
    # Steps of linear warm-up, the first at lr / warmup_steps.
    warmup_steps: int = 0
    # wsd: the last so many steps decay, linearly; before them lr is constant.
    decay_steps: int = 0
    # Share of lr that a linear, cosine or wsd schedule ends at.
    min_lr_ratio: float = 0.0


@dataclass
class LoraConfig:
    # Rank of the adapters; 0 = train all weights. actor.strategy fsdp2 only.
    rank: int = 0
    # Their product is scaled by alpha / rank.
    alpha: float = 16.0
    # Endings of the names of the linear layers that get one.
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass
class ActorConfig:
    # megatron: Megatron-core, for the architectures that docs/student.md lists | fsdp2: torch's fully_shard around the
    # Hugging Face model, for any causal language model of transformers with a list of layers and a linear LM head;
    # every rank of the pool is data parallel.
    strategy: str = "megatron"
    # Tensor parallel size.
    tp: int = 1
    # Pipeline parallel size.
    pp: int = 1
    # Model chunks of each pipeline stage (interleaved 1F1B): smaller pipeline bubbles, more messages; 1 = off.
    vpp: int = 1
    # Expert parallel size: experts are spread over so many neighbouring ranks of a pipeline stage, tensor and data
    # parallel ones alike. Mixture-of-experts students only.
    ep: int = 1
    # Split the activations between tensor-parallel regions along the sequence, too; needs tp > 1.
    sequence_parallel: bool = False
    # Recompute in the backward pass instead of keeping activations: none | selective (attention; megatron only) | full
    # (whole layers).
    recompute: str = "none"
    # fsdp2: keep sharded parameters, gradients and optimizer state in host memory, and bring a layer at a time to the
    # GPU for its own forward and backward pass. It makes offload_train needless, which is then ignored.
    fsdp_cpu_offload: bool = False
    # Move weights, gradients and optimizer state to host memory after each call on the actor, and what the next one
    # needs back before it: what else is on the actor's GPUs has them to itself in between. The same numbers, to the
    # bit; a training step takes as much longer as the copies do.
    offload_train: bool = False
    # Put the sequences of a micro-batch one after the other instead of padding each to the longest.
    packing: bool = True
    # Sequences of one forward pass; used where max_tokens_per_micro_batch is 0.
    micro_batch_size: int = 8
    # Tokens of one forward pass, padding included, at least one longest sequence; 0 = use micro_batch_size.
    max_tokens_per_micro_batch: int = 0
    # Spread the sequences of a step over the data-parallel groups so that each has about as many tokens.
    balance: bool = True
    # Compute LM head and loss together, a chunk of rows at a time, so that the logits never exist as a whole. Off: all
    # logits of a micro-batch at once.
    fused_lm_head: bool = True
    # Size of such a chunk's logits, MiB, the teacher's included where there are any (teacher.signal hidden or logits:
    # then there are chunks without fused_lm_head, too).
    logits_chunk_mib: int = 128
    # Softmax kernels of the losses: auto (triton on cuda, torch on cpu) | torch | triton. What else is done to a whole
    # distribution of the teacher (teacher.signal hidden, logits) is torch on either.
    loss_kernel: str = "auto"
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class RolloutConfig:
    # GPUs a node of the rollout pool; times rollout.nnodes they are engines x rollout.tp.
    n_gpus_per_node: int = 1
    # Nodes of the rollout pool.
    nnodes: int = 1
    # Tensor parallel size of one vLLM engine.
    tp: int = 1
    # Responses sampled for each prompt.
    n: int = 1
    # Sampling temperature of training rollouts; must be > 0.
    temperature: float = 1.0
    # Sample from the most probable tokens that hold this much mass; 1 = all.
    top_p: float = 1.0
    # Token ids that end a response besides the student's own end-of-sequence tokens.
    stop_token_ids: list[int] = field(default_factory=list)
    # Sequences an engine decodes together.
    max_num_seqs: int = 128
    # Share of a GPU's memory that vLLM may use (weights and KV cache); no meaning on CPU.
    gpu_memory_utilization: float = 0.85
    # Size of the KV cache on CPU, MiB.
    cpu_kv_cache_mib: int = 256
    # Skip CUDA graphs and torch.compile: slower steps, faster start. Always on for CPU.
    enforce_eager: bool = False


@dataclass
class TeacherConfig:
    # zmq: the server of `python -m teacher_server`, started on its own | local: a Hugging Face model of teacher.path on
    # the actor's own ranks and GPUs, in model.dtype, under torch's fully_shard; it scores a batch when that is whole,
    # so it wants trainer.scheduler sync. With local, the settings of the server (server_ip, server_port, name, keys,
    # n_server_workers, overlap_rollout) have to be left as they are, and request_timeout_s and outage_budget_s have no
    # meaning.
    backend: str = "zmq"
    # local: the teacher's folder; required there, and there only.
    path: str = ""
    # local: keep the ranks' shards of the teacher in host memory; a GPU then holds one layer at a time. Without it they
    # stay on the GPU, and the actor's states leave it while the teacher computes, as with actor.offload_train.
    fsdp_cpu_offload: bool = True
    # local: steps between refreshes of the teacher's weights from the student's (self-distillation); 0 = never. Wants a
    # teacher.path of the student's architecture. A checkpoint then holds the teacher's weights, too.
    update_interval: int = 0
    # local: at a refresh the weights become update_ema x the teacher's + (1 - update_ema) x the student's; 0 = the
    # student's. Above 0 the teacher is kept in float32.
    update_ema: float = 0.0
    # Host that the teacher server listens on.
    server_ip: str = "127.0.0.1"
    # The port it listens on.
    server_port: int = 15555
    # Which of the server's teachers; empty = the only one there.
    name: str = ""
    # Folder with server.key and client.key_secret, made by `python -m teacher_server keygen`; empty = no encryption.
    keys: str = ""
    # Scoring streams, that is, sequences in flight at the server, over all data-parallel groups; 0 = as many as the
    # server's workers announce. It is not a number of GPUs.
    n_server_workers: int = 0
    # Send rollouts to the teacher in small groups as they are finished, not when the whole batch is.
    overlap_rollout: bool = True
    # What the teacher says of each position: topk (its most probable tokens) | sampled (the response token's logprob
    # alone; for k1, k2, k3 and sft) | hidden (hidden states; the actor multiplies them by the teacher's LM head, which
    # it fetches once and keeps, 4 V D bytes on each actor rank, over actor.tp: the whole distribution, D numbers a
    # token) | logits (the whole distribution, V numbers a token). teacher.wire decides how they are rounded.
    signal: str = "topk"
    # Entries of the teacher's distribution kept at each position.
    topk: int = 64
    # Keep only as many of the topk entries as it takes to reach this probability; 0 = all topk.
    mass: float = 0.0
    # Temperature of the teacher's distribution (the student's logits are divided by the same one).
    temperature: float = 1.0
    # Bytes on the wire: fp16 (5 a top-k entry) | fp32 (8, lossless). local: of signal logits alone, as they are kept.
    wire: str = "fp16"
    # A sequence is asked for again after this long without an answer.
    request_timeout_s: float = 60.0
    # The run stops (with a checkpoint) when nothing is heard from the server for this long.
    outage_budget_s: float = 300.0


@dataclass
class LossTermConfig:
    name: str = ""
    weight: float = 1.0
    beta: float | None = None
    alpha: float | None = None


@dataclass
class DistillConfig:
    # forward_kl: KL(teacher || student) | reverse_kl: KL(student || teacher) | jsd: GKD's, with distill.beta |
    # skew_kl, skew_reverse_kl: DistiLLM's, with distill.alpha | k1, k2, k3: the reverse KL's gradient from the sampled
    # token alone; the names differ in the estimator that is reported | sft: cross-entropy on the dataset's responses
    # (distill.on_policy_share below 1).
    loss: str = "forward_kl"
    # A weighted sum instead of distill.loss: a list of {name, weight}, each with its own beta or alpha if it likes.
    losses: list[LossTermConfig] = field(default_factory=list)
    # jsd: share of the teacher in the mixture, between 0 and 1; near 0 the forward KL's shape, near 1 the reverse KL's.
    beta: float = 0.5
    # skew_kl, skew_reverse_kl: how much of the first distribution is mixed into the second, from 0 to below 1.
    alpha: float = 0.1
    # k1, k2, k3: largest importance weight (student now / student at rollout) of a token; 0 = no limit.
    importance_clip: float = 2.0
    # GKD's lambda: share of prompts answered by the student; the others take the dataset's response
    # (data.response_key).
    on_policy_share: float = 1.0
    # What stands for the teacher's mass outside its top-k: bucket (one "everything else" class) | renorm (both sides
    # renormalised on the top-k) | drop (left out of the sum).
    tail: str = "bucket"
    # Weight of KL(student || reference), estimated from the tokens that the student sampled, as k3 is: it holds the
    # student close to the model of reference.path. 0 = off.
    reference_kl_weight: float = 0.0


@dataclass
class ReferenceConfig:
    # The frozen model that distill.reference_kl_weight holds the student to: a folder in Hugging Face format with the
    # student's tokenizer, which need not be of its architecture. Empty = model.path, the initial student; with adapters
    # (actor.lora.rank above 0) that is the actor itself without them, and no second model.
    path: str = ""
    # Keep the ranks' shards of the reference in host memory; a GPU then holds one layer at a time. Without it they stay
    # on the GPU, and the actor's states leave it while the reference computes, as with actor.offload_train.
    fsdp_cpu_offload: bool = True


@dataclass
class WeightSyncConfig:
    # auto (nccl on GPUs, gloo on CPU) | nccl | gloo.
    transport: str = "auto"
    # Tensors are sent in buckets of this size.
    bucket_mib: int = 256
    # Compare a digest of every tensor the engines hold with what the actor exported: always | first (the sync at the
    # start and the first one after a training step) | never.
    verify: str = "first"
    # Seconds one sync may take.
    timeout_s: float = 600.0


@dataclass
class EvalConfig:
    # Steps between evaluations; 0 = only before the first and after the last step.
    every: int = 0
    # Held-out prompts used, the first ones of val_files; 0 = all.
    max_prompts: int = 200
    # Sequences of an evaluation, the first ones, whose numbers of each token (loss terms, KL, masses, entropy) are
    # written to token_losses/step_N.jsonl in the run folder; 0 = none.
    keep_token_losses: int = 0
    # exact_match (the text after the last eval.answer_marker equals the answer column) | none (KL only).
    metric: str = "exact_match"
    # What stands before the answer, in responses and, if it is there, in the reference.
    answer_marker: str = "="


@dataclass
class MemoryConfig:
    # On GPUs, every tenth training step looks at how the allocator's memory is cut, and warns where both shares are
    # above this: 1 - largest free block / all free bytes, and (reserved - allocated) / reserved. 1 = do not look.
    fragmentation_warn: float = 0.2
    # Write the memory of each of the actor's phases (training step, evaluation, sending weights) into the metrics: the
    # largest of all ranks, and the rank of each peak. It takes one more call of the ranks a step.
    timeline: bool = True
    # With timeline, the peak of every rank in each phase as well.
    timeline_of_ranks: bool = False


@dataclass
class ClusterConfig:
    # Address of a running Ray cluster; empty = start one on this machine for this run. Pools of several nodes need it.
    ray_address: str = ""
    # The only GPUs of a node that the pools may use, by number, as nvidia-smi counts; empty = all. They are given out
    # in ascending order. Each has to be in the trainer's CUDA_VISIBLE_DEVICES where that is set. A Ray of ray_address
    # has to be started with these GPUs on every node; a rank that it puts on another one ends the run.
    gpus: list[int] = field(default_factory=list)
    # The pools, the one that gets the low GPU ids and the first nodes first.
    order: list[str] = field(default_factory=lambda: ["actor", "rollout"])


@dataclass
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
