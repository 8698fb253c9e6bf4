"""Settings of slime: its own flags and those of Megatron-LM and SGLang, which its scripts set."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from gkd.config.old_names.row import NotConvertible, OldSettings, Row, Table, mapped, meaningless, same, unsupported
from gkd.config.old_names.values import (
    NO_REWARD,
    as_list,
    fixed,
    nothing,
    ratio_to,
    schedule,
    share_of_steps,
    tensor_parallel_only,
)


def _trackers(value: Any, old: OldSettings) -> list[str]:
    return [name for name in ("tensorboard", "wandb") if old(f"--use-{name}")]


def _samples(old: OldSettings) -> int:
    """Return the responses of one rollout."""
    return int(old("--rollout-batch-size")) * int(old("--n-samples-per-prompt", 1))


def _step_samples(old: OldSettings) -> int:
    """Return the responses of one optimizer step."""
    if size := old("--global-batch-size"):
        return int(size)
    return _samples(old) // int(old("--num-steps-per-rollout", 1))


def _prompts(value: Any, old: OldSettings) -> int:
    samples, n = _step_samples(old), int(old("--n-samples-per-prompt", 1))
    if samples % n:
        raise NotConvertible(f"{samples} responses are not whole prompts of {n} each; set trainer.global_batch_size.")
    return samples // n


def _steps(value: Any, old: OldSettings) -> int:
    """Return rollouts as optimizer steps."""
    if not old("--rollout-batch-size"):
        return int(value)
    return int(value) * _samples(old) // _step_samples(old)


def _opd(value: Any, old: OldSettings) -> dict[str, Any] | None:
    if not value:
        return None
    weight = float(old("--opd-kl-coef", 1.0))
    loss = {"distill.loss": "k1"} if weight == 1.0 else {"distill.losses": [{"name": "k1", "weight": weight}]}
    return loss | {"teacher.signal": "sampled"}


def _opd_type(value: Any, old: OldSettings) -> dict[str, Any] | None:
    return {"teacher.backend": "local"} if value == "megatron" else None


def _rollout_pool(value: Any, old: OldSettings) -> dict[str, Any]:
    gpus, per_node = int(value), int(old("--num-gpus-per-node", 8))
    if gpus <= per_node:
        return {"rollout.n_gpus_per_node": gpus}
    return {"rollout.n_gpus_per_node": per_node, "rollout.nnodes": gpus // per_node}


def _colocate(value: Any, old: OldSettings) -> dict[str, Any] | None:
    if not value:
        return None
    gpus, nodes = int(old("--actor-num-gpus-per-node", 8)), int(old("--actor-num-nodes", 1))
    return {"trainer.colocate": True, "rollout.n_gpus_per_node": gpus, "rollout.nnodes": nodes}


def _teacher_host(value: Any, old: OldSettings) -> str:
    return urlsplit(str(value)).hostname or str(value)


def _token_budget(value: Any, old: OldSettings) -> int | None:
    return int(value) * int(old("--context-parallel-size", 1)) if old("--use-dynamic-batch-size") else None


def _reference(value: Any, old: OldSettings) -> float | None:
    return float(old("--kl-loss-coef", 0.0)) if old("--use-kl-loss") else None


def _betas(value: Any, old: OldSettings) -> list[float]:
    return [float(old("--adam-beta1", 0.9)), float(old("--adam-beta2", 0.999))]


def _warmup(value: Any, old: OldSettings) -> int:
    rollouts = old("--num-rollout")
    return share_of_steps(float(value or 0), rollouts and _steps(rollouts, old), "actor.optim.warmup_steps")


def _eval_files(value: Any, old: OldSettings) -> list[str]:
    words = value if isinstance(value, list) else [value]
    return [str(word) for word in (words[1::2] if len(words) > 1 else words)]


_MODEL = "the model's shape is read from config.json of model.path."
_NUMERICS = "sums and softmax are in float32, and the model has no dropout."
_HOOKS = "there are no hooks for own functions; the interfaces to change are in CONTRIBUTING.md."
_OFFLOAD = "weights, gradients and optimizer state move between calls on the actor"
_JSONL = "JSONL or parquet"

_DISTILL = (
    mapped("--use-opd", "distill.loss teacher.signal",
        "a KL penalty on the sampled token, as k1; without rewards the gradient is the same", _opd),
    mapped("--opd-kl-coef", "distill.losses",
        "weight of k1; only Adam's eps and the clipping see the scale of a single loss", nothing),
    mapped("--opd-type", "teacher.backend", "sglang: zmq, a teacher server; megatron: local, on the actor's ranks",
        _opd_type),
    mapped("--opd-teacher-load", "teacher.path", "a Megatron checkpoint in slime; give the Hugging Face folder",
        lambda value, old: {"teacher.path": value, "teacher.backend": "local"}),
    mapped("--rm-url", "teacher.server_ip",
        "start python -m teacher_server on that host; an SGLang server does not speak its protocol", _teacher_host),
    meaningless("--opd-teacher-ckpt-step", "model folders have one version."),
    mapped("--kl-loss-coef", "distill.reference_kl_weight", "with --use-kl-loss", _reference),
    mapped("--use-kl-loss", "distill.reference_kl_weight", "KL to the initial student; its weight is --kl-loss-coef",
        _reference),
    meaningless("--kl-loss-type --use-unbiased-kl", "the reference's KL is k3 with the gradient of the reverse KL."),
    unsupported("--kl-coef", "the KL to the reference is a term of the loss: distill.reference_kl_weight.", (0, 0.0)),
    mapped("--tis-clip", "distill.importance_clip", "with --use-tis"),
    same("--use-tis --use-rollout-logprobs --get-mismatch-metrics",
        "k1, k2 and k3 are weighted by probability now / probability at rollout, and report it."),
    unsupported("--tis-clip-low", "importance weights have an upper limit only.", (0, 0.0)),
    unsupported("--entropy-coef", "no entropy term.", (0, 0.0)),
    unsupported("--advantage-estimator --eps-clip --eps-clip-high --eps-clip-c --value-clip --gamma --lambd "
        "--normalize-advantages --disable-compute-advantages-and-returns --disable-grpo-std-normalization "
        "--disable-rewards-normalization --use-opsm --opsm-delta", NO_REWARD),
    unsupported("--rm-type --reward-key --eval-reward-key --group-rm --dynamic-sampling-filter-path "
        "--over-sampling-batch-size", NO_REWARD),
    meaningless("--custom-rm-path --custom-reward-post-process-path",
        "the teacher's scores come from the teacher client; " + NO_REWARD),
    unsupported("--loss-type", "distill.loss selects the loss.", ("policy_loss",)),
    mapped("--calculate-per-token-loss", "distill.normalize",
        "mean of all tokens of a step; without the flag slime averages the responses' means: sequence",
        lambda value, old: "token" if value else "sequence", default=False),
)  # fmt: skip

_DATA = (
    mapped("--prompt-data", "data.train_files", _JSONL, as_list),
    mapped("--input-key", "data.prompt_key", "", default="input"),
    mapped("--label-key", "data.answer_key", "of reward.functions and eval.metric"),
    mapped("--apply-chat-template", "data.chat_template", "", lambda value, old: "always" if value else "never"),
    unsupported("--apply-chat-template-kwargs --tool-key --multimodal-keys --metadata-key",
        "text prompts and the plain chat template only."),
    mapped("--rollout-shuffle", "data.shuffle", "", default=False),
    mapped("--rollout-seed", "data.seed", "", default=42),
    mapped("--rollout-max-prompt-len", "data.max_prompt_length data.truncation", "longer prompts are omitted",
        lambda value, old: {"data.max_prompt_length": int(value), "data.truncation": "drop"}),
    mapped("--rollout-max-response-len", "data.max_response_length"),
    meaningless("--rollout-max-context-len", "it is data.max_prompt_length + data.max_response_length."),
    mapped("--rollout-batch-size", "trainer.global_batch_size",
        "prompts of a rollout; here each optimizer step generates its own prompts", _prompts),
    mapped("--global-batch-size", "trainer.global_batch_size",
        "responses in slime, prompts here: / --n-samples-per-prompt", _prompts),
    mapped("--num-steps-per-rollout", "trainer.global_batch_size", "a rollout is divided into this many steps",
        _prompts),
    mapped("--n-samples-per-prompt", "rollout.n"),
    mapped("--num-rollout", "trainer.total_steps", "x optimizer steps of a rollout", _steps),
    mapped("--num-epoch", "trainer.total_epochs", "",
        lambda value, old: None if old.has("--num-rollout") else int(value)),
    mapped("--eval-prompt-data", "data.val_files", "the paths of the name path pairs", _eval_files),
    mapped("--eval-interval", "eval.every", "x optimizer steps of a rollout", _steps),
    mapped("--n-samples-per-eval-prompt", "eval.n", "for the KL and pass@k"),
    meaningless("--eval-input-key --eval-label-key --eval-max-response-len --eval-top-p --eval-top-k "
        "--eval-temperature --eval-max-prompt-len --eval-max-context-len",
        "an evaluation uses the settings of training; eval.metric needs data.answer_key."),
    unsupported("--eval-config --eval-function-path", "one list of held-out files."),
    unsupported("--skip-eval-before-train", "with data.val_files a run evaluates before the first step.", (False,)),
)  # fmt: skip

_STUDENT = (
    mapped("--hf-checkpoint", "model.path", "the Hugging Face folder is the student; nothing is converted"),
    mapped("--ref-update-interval", "reference.weights reference.update_interval", "x optimizer steps of a rollout",
        lambda value, old: {"reference.weights": "live", "reference.update_interval": _steps(value, old)}),
    meaningless("--ref-load --ref-ckpt-step --ckpt-step --finetune --no-load-optim --no-load-rng",
        "the reference is the initial student, or the folder reference.path."),
    mapped("--load", "trainer.resume", "slime resumes if --load has a checkpoint, as auto does with trainer.run_dir",
        lambda value, old: "auto"),
    mapped("--save", "trainer.run_dir", "checkpoints, metrics and export"),
    mapped("--save-interval", "trainer.save_every", "x optimizer steps of a rollout", _steps),
    mapped("--async-save", "trainer.async_save"),
    meaningless("--save-hf --no-save-optim",
        "checkpoints have optimizer states; the export is in Hugging Face format."),
    mapped("--tensor-model-parallel-size", "actor.tp"),
    mapped("--pipeline-model-parallel-size", "actor.pp"),
    mapped("--expert-model-parallel-size", "actor.ep"),
    mapped("--sequence-parallel", "actor.sequence_parallel", "off with a tensor parallel size of 1",
        tensor_parallel_only("--tensor-model-parallel-size")),
    unsupported("--context-parallel-size", "context parallelism is not supported.", (1,)),
    unsupported("--expert-tensor-parallel-size", "experts are split by actor.ep only.", (1,)),
    unsupported("--decoder-last-pipeline-num-layers --decoder-first-pipeline-num-layers",
        "pipeline stages have equal numbers of layers."),
    mapped("--recompute-granularity", "actor.recompute", "full or selective"),
    meaningless("--recompute-method --recompute-num-layers --recompute-loss-function",
        "actor.recompute=full recomputes every layer."),
    mapped("--micro-batch-size", "actor.micro_batch_size", "sequences",
        lambda value, old: None if old("--use-dynamic-batch-size") else int(value), default=1),
    mapped("--use-dynamic-batch-size", "actor.max_tokens_per_micro_batch",
        "the number of tokens is --max-tokens-per-gpu", nothing),
    mapped("--max-tokens-per-gpu", "actor.max_tokens_per_micro_batch",
        "x --context-parallel-size; at least one longest sequence", _token_budget),
    meaningless("--log-probs-max-tokens-per-gpu --log-probs-chunk-size",
        "there is no separate pass for logprobs; actor.logits_chunk_mib limits the logits."),
    mapped("--balance-data --balance-by-flops", "actor.balance", "balances tokens; it never changes the result"),
    mapped("--lr", "actor.optim.lr"),
    mapped("--lr-decay-style", "actor.optim.schedule", "", schedule, default="linear"),
    mapped("--lr-warmup-iters", "actor.optim.warmup_steps", "", lambda value, old: int(value)),
    mapped("--lr-warmup-fraction", "actor.optim.warmup_steps", "x the steps of --num-rollout", _warmup),
    mapped("--lr-wsd-decay-iters", "actor.optim.decay_steps"),
    mapped("--min-lr", "actor.optim.min_lr_ratio", "/ --lr", ratio_to("--lr", 1e-6)),
    unsupported("--lr-decay-iters --lr-warmup-init",
        "the decay ends at the last step, and the warm-up starts at lr / warmup_steps."),
    mapped("--weight-decay", "actor.optim.weight_decay", "not applied to biases and norms"),
    mapped("--adam-beta1", "actor.optim.betas", "", _betas, default=0.9),
    mapped("--adam-beta2", "actor.optim.betas", "", _betas),
    mapped("--adam-eps", "actor.optim.eps"),
    mapped("--clip-grad", "actor.optim.clip_grad"),
    unsupported("--optimizer", "AdamW only.", ("adam",)),
    unsupported("--use-precision-aware-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
        "--use-stateless-adam --reset-optimizer-states",
        "optimizer states are float32; actor.offload_train moves them between calls.", (False,)),
    same("--use-distributed-optimizer --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32", _NUMERICS),
    unsupported("--attention-dropout --hidden-dropout", _NUMERICS, (0, 0.0)),
    meaningless("--attention-backend --qwen-gdn-backend --bf16 --distributed-backend --distributed-timeout-minutes",
        "model.dtype is bfloat16 by default; actor.layers and actor.attention select kernels."),
    meaningless("--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups "
        "--group-query-attention --kv-channels --vocab-size --max-position-embeddings --normalization --norm-epsilon "
        "--swiglu --rotary-base --rotary-percent --use-rotary-position-embeddings --position-embedding-type "
        "--disable-bias-linear --add-qkv-bias --qk-layernorm --untie-embeddings-and-output-weights --model-name "
        "--spec --num-experts --moe-* --multi-latent-attention --rotary-scaling-factor --no-rope-fusion "
        "--make-vocab-size-divisible-by", _MODEL),
    unsupported("--only-train-params-name-list --freeze-params-name-list --enable-mtp-training --mtp-*",
        "all weights are trained, or LoRA adapters."),
    unsupported("--use-routing-replay --use-rollout-routing-replay", "routing is not replayed."),
)  # fmt: skip

_RUN = (
    mapped("--actor-num-nodes", "trainer.nnodes", "several nodes need cluster.ray_address"),
    mapped("--actor-num-gpus-per-node", "trainer.n_gpus_per_node", "", default=8),
    mapped("--rollout-num-gpus", "rollout.n_gpus_per_node rollout.nnodes", "split over nodes of --num-gpus-per-node",
        lambda value, old: None if old("--colocate") else _rollout_pool(value, old)),
    mapped("--num-gpus-per-node", "rollout.n_gpus_per_node", "of a node of the rollout pool", nothing),
    mapped("--rollout-num-gpus-per-engine", "rollout.tp", "tensor parallel only; an engine never spans nodes"),
    mapped("--colocate", "trainer.colocate rollout.n_gpus_per_node rollout.nnodes", "the engines get the actor's GPUs",
        _colocate),
    mapped("--offload-train --offload", "actor.offload_train", _OFFLOAD, fixed({"actor.offload_train": True})),
    meaningless("--offload-rollout --release-train",
        "the engines are offloaded with trainer.colocate; a loop of your own needs rollout.enable_sleep_mode."),
    same("--use-fault-tolerance", "engines that die or hang are restarted: rollout.max_restarts."),
    mapped("--rollout-health-check-timeout", "rollout.hang_timeout_s",
        "the time without a reply or a finished pass; no request is generated for the check"),
    meaningless("--rollout-health-check-interval --rollout-health-check-first-wait",
        "engines are checked every 5 s once they are ready."),
    mapped("train_async.py", "trainer.scheduler", "the next rollout is generated while the actor trains",
        lambda value, old: "one_step_off"),
    same("train.py", "trainer.scheduler=sync: generate, then train."),
    unsupported("--partial-rollout --mask-offpolicy-in-partial-rollout",
        "trainer.scheduler=stream continues responses over weight updates instead.", (False,)),
    unsupported("--update-weights-interval", "weights are sent to the engines after every step.", (1,)),
    mapped("--update-weight-buffer-size", "weight_sync.bucket_mib", "bytes become MiB",
        lambda value, old: max(int(value) >> 20, 1)),
    meaningless("--update-weight-mode --update-weight-transport --update-weight-disk-* --update-weight-delta-* "
        "--check-weight-update-equal", "weights are broadcast in full; weight_sync.verify compares them by digests."),
    mapped("--rollout-temperature", "rollout.temperature"),
    mapped("--rollout-top-p", "rollout.top_p"),
    unsupported("--rollout-top-k",
        "top-k sampling is not supported, use rollout.top_p; the teacher's top-k is teacher.topk.", (-1,)),
    mapped("--rollout-stop-token-ids", "rollout.stop_token_ids", "", as_list),
    unsupported("--rollout-stop --rollout-skip-special-tokens", "responses end at token ids: rollout.stop_token_ids."),
    mapped("--sglang-mem-fraction-static", "rollout.gpu_memory_utilization",
        "a fraction of the GPU: with trainer.colocate leave room for the actor's rest"),
    mapped("--sglang-max-running-requests", "rollout.max_num_seqs"),
    mapped("--sglang-disable-cuda-graph", "rollout.enforce_eager"),
    mapped("--sglang-server-concurrency", "rollout.max_num_seqs", "",
        lambda value, old: None if old.has("--sglang-max-running-requests") else int(value)),
    unsupported("--sglang-*", "vLLM is the rollout engine; other arguments of the engines cannot be set."),
    unsupported("--rollout-external-engine-addrs --use-slime-router --slime-router-*",
        "the engines are started by the run."),
    unsupported("--custom-* --rollout-function-path --rollout-sample-* --buffer-filter-path --data-source-path "
        "--rollout-data-* --rollout-all-samples-process-path", _HOOKS),
    mapped("--use-wandb", "trainer.loggers", "metrics.jsonl in trainer.run_dir is always written", _trackers),
    mapped("--use-tensorboard", "trainer.loggers", "with --use-wandb both", _trackers),
    mapped("--wandb-project", "trainer.project_name"),
    meaningless("--wandb-* --tb-* --log-*",
        "metrics are written to metrics.jsonl in trainer.run_dir."),
    mapped("--seed", "data.seed", "slime's other seed, --rollout-seed, is data.seed here", nothing),
    mapped("--save-debug-rollout-data --dump-details", "trainer.record_batches",
        "kept in trainer.run_dir/batches, for trainer.replay", lambda value, old: True),
    meaningless("--load-debug-rollout-data", "trainer.replay trains on recorded batches."),
    meaningless("--profile* --use-pytorch-profiler",
        "trainer.profile_steps and trainer.profile_ranks select what is profiled."),
    meaningless("--train-env-vars --train-backend --megatron-to-hf-mode --debug-* "
        "--runtime-env-json --address --memory-* --record-memory-history",
        "one way to run; see docs/operations.md."),
)  # fmt: skip

ROWS: tuple[Row, ...] = (*_DISTILL, *_DATA, *_STUDENT, *_RUN)
TABLE = Table("slime", "slime", ROWS)
