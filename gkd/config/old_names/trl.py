"""Settings of TRL: GKDConfig, the SFTConfig and TrainingArguments below it, ScriptArguments, ModelConfig."""

from __future__ import annotations

from typing import Any

from gkd.config.old_names.row import NotConvertible, OldSettings, Row, Table, mapped, meaningless, same, unsupported
from gkd.config.old_names.values import as_list, fixed, nothing, ratio_to, schedule, share_of_steps, trackers


def _loss(beta: Any, old: OldSettings) -> dict[str, Any]:
    if not 0 < float(beta) < 1:
        return {"distill.loss": "reverse_kl" if float(beta) else "forward_kl"}
    return {"distill.loss": "jsd", "distill.beta": float(beta)}


def _batch(value: Any, old: OldSettings) -> dict[str, Any]:
    per_device = int(old("per_device_train_batch_size"))
    accumulation, processes = int(old("gradient_accumulation_steps", 1)), int(old("num_processes", 1))
    return {"actor.micro_batch_size": per_device, "trainer.global_batch_size": per_device * accumulation * processes}


def _pools(processes: Any, old: OldSettings) -> dict[str, Any]:
    if not old.has("num_processes"):
        raise NotConvertible(
            "accelerate's number of processes is not in the file: run the tool again with -- --num_processes N."
        )
    nodes = int(old("num_machines", 1))
    each = int(processes) // nodes
    pools = {"trainer.n_gpus_per_node": each, "rollout.n_gpus_per_node": each}
    return pools | {"trainer.nnodes": nodes, "rollout.nnodes": nodes}


def _teacher(path: Any, old: OldSettings) -> dict[str, Any]:
    return {"teacher.backend": "local", "teacher.path": path, "teacher.signal": "hidden", "trainer.colocate": True}


def _warmup(value: Any, old: OldSettings) -> int:
    if float(old("warmup_steps", 0)) >= 1:
        return int(old("warmup_steps"))
    ratio = float(old("warmup_steps", 0)) or float(old("warmup_ratio", 0))
    return share_of_steps(ratio, old("max_steps"), "actor.optim.warmup_steps")


def _every(strategy: str, steps: str, key: str) -> Any:
    def convert(value: Any, old: OldSettings) -> int:
        kind = old(strategy)
        if kind in ("no", "best"):
            return 0
        if kind == "epoch":
            raise NotConvertible(f"set {key} to the steps of an epoch: prompts / trainer.global_batch_size.")
        every = old(steps) or old("logging_steps", 10)
        return int(every) if float(every) >= 1 else share_of_steps(float(every), old("max_steps"), key)

    return convert


def _dtype(name: str) -> Any:
    return lambda value, old: {"model.dtype": name} if value else None


def _model_dtype(value: Any, old: OldSettings) -> Any:
    return None if value == "auto" else {"bf16": "bfloat16", "fp32": "float32"}.get(value, value)


def _adapters(value: Any, old: OldSettings) -> Any:
    size = {"actor.lora.rank": int(old("lora_r", 16)), "actor.lora.alpha": float(old("lora_alpha", 32))}
    return size if value else None


def _epochs(value: Any, old: OldSettings) -> int:
    if not float(value).is_integer():
        raise NotConvertible("epochs are whole here: set trainer.total_steps.")
    return int(value)


def _resume(value: Any, old: OldSettings) -> Any:
    if isinstance(value, bool):
        return "auto" if value else None
    raise NotConvertible("checkpoints of TRL cannot be resumed here; start from the exported model as model.path.")


def _lora(name: str) -> Any:
    def convert(value: Any, old: OldSettings) -> Any:
        if not old("use_peft") or value == "all-linear":
            return None
        return {"actor.lora.targets": as_list(value, old)} if name == "targets" else {f"actor.lora.{name}": value}

    return convert


_TEXT = "write the dataset as JSONL: prompts (text or messages) in data.prompt_key, responses in data.response_key."
_GPU_ONLY = "the number format of the GPU's matrix products is not a setting."
_HUB = "nothing is uploaded; the export in trainer.run_dir can be uploaded with `hf upload`."
_KERNELS = "actor.layers, actor.attention and actor.loss_kernel select kernels."

_DISTILL = (
    mapped("lmbda", "distill.on_policy_share",
        "TRL draws once per micro-batch; here the share of prompts is exact over time", default=0.5),
    mapped("beta", "distill.loss distill.beta",
        "the same sides: 0 is forward_kl, 1 is reverse_kl; between them jsd with the teacher's share beta", _loss,
        default=0.5),
    mapped("temperature", "rollout.temperature",
        "TRL uses it for sampling only; its loss is at temperature 1, as teacher.temperature's default", default=0.9),
    mapped("max_new_tokens", "data.max_response_length", "", default=128),
    mapped("max_completion_length", "data.max_response_length", "of TRL's other trainers"),
    mapped("max_prompt_length", "data.max_prompt_length", "of TRL's other trainers"),
    mapped("num_generations", "rollout.n", "of TRL's other trainers"),
    mapped("max_length", "data.max_prompt_length data.truncation",
        "prompt and response together in TRL, which keeps the end",
        lambda value, old: {"data.max_prompt_length": int(value), "data.truncation": "left"}, default=1024),
    mapped("teacher_model_name_or_path", "teacher.backend teacher.path teacher.signal trainer.colocate",
        "a local folder; the teacher stays on the training GPUs and compares whole vocabularies, as in TRL. A "
        "separate server (teacher.backend=zmq) with topk is usually faster", _teacher),
    unsupported("seq_kd", "the teacher does not generate; write its responses into data.response_key.", (False,)),
    unsupported("teacher_model_init_kwargs teacher_model_init_kwargs.*", "the teacher's dtype is that of its folder.",
        ({},)),
    same("disable_dropout", "dropout is off."),
)  # fmt: skip

_STUDENT = (
    mapped("model_name_or_path", "model.path actor.strategy",
        "a local folder: download the model first; fsdp2 takes every causal language model of transformers",
        lambda value, old: {"model.path": value, "actor.strategy": "fsdp2"}),
    mapped("trust_remote_code", "model.trust_remote_code"),
    mapped("dtype torch_dtype", "model.dtype", "weights are kept in float32 for the optimizer in any case",
        _model_dtype),
    mapped("bf16", "model.dtype", "", _dtype("bfloat16")),
    mapped("use_peft", "actor.lora.rank actor.lora.alpha",
        "adapters on all linear layers; TRL's rank is 16 and alpha 32 unless set", _adapters),
    mapped("lora_r", "actor.lora.rank", "with use_peft", _lora("rank")),
    mapped("lora_alpha", "actor.lora.alpha", "with use_peft", _lora("alpha")),
    mapped("lora_target_modules", "actor.lora.targets", "with use_peft; the default here is all linear layers",
        _lora("targets")),
    mapped("gradient_checkpointing", "actor.recompute", "true becomes full", fixed({"actor.recompute": "full"}),
        default=True),
    unsupported("fp16", "bfloat16 or float32.", (False,)),
    unsupported("lora_dropout", "adapters have no dropout.", (0, 0.0)),
    unsupported("use_dora use_rslora lora_modules_to_save lora_target_parameters lora_task_type",
        "plain LoRA on linear layers only.", (False, "CAUSAL_LM")),
    unsupported("load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
        "the student is not quantized.", (False, "nf4")),
    unsupported("model_init_kwargs model_init_kwargs.* chat_template_path router_aux_loss_coef",
        "config.json and tokenizer of model.path are used as they are."),
    unsupported("activation_offloading", "actor.recompute=full reduces activations instead.", (False,)),
    meaningless("model_revision", "model.path is a local folder."),
    meaningless("attn_implementation use_liger_kernel torch_compile use_kernels liger_kernel_config", _KERNELS),
    meaningless("tf32 bf16_full_eval fp16_full_eval half_precision_backend gradient_checkpointing_kwargs "
        "gradient_checkpointing_kwargs.* torch_empty_cache_steps", _GPU_ONLY),
)  # fmt: skip

_OPTIM = (
    mapped("per_device_train_batch_size", "actor.micro_batch_size trainer.global_batch_size",
        "x gradient_accumulation_steps x num_processes", _batch, default=8),
    mapped("gradient_accumulation_steps", "trainer.global_batch_size", "a factor of it",
        lambda value, old: {"trainer.global_batch_size": _batch(value, old)["trainer.global_batch_size"]}),
    mapped("num_processes", "trainer.n_gpus_per_node rollout.n_gpus_per_node trainer.nnodes rollout.nnodes",
        "of accelerate, not in TRL's YAML: give it as a flag; / num_machines", _pools, default=1),
    mapped("num_machines", "trainer.nnodes rollout.nnodes", "of accelerate; several nodes need cluster.ray_address",
        lambda value, old: {"trainer.nnodes": int(value), "rollout.nnodes": int(value)}),
    mapped("learning_rate", "actor.optim.lr", "", default=2e-5),
    mapped("lr_scheduler_type", "actor.optim.schedule", "", schedule, default="linear"),
    mapped("warmup_steps", "actor.optim.warmup_steps", "a number below 1 is a share of max_steps", _warmup),
    mapped("warmup_ratio", "actor.optim.warmup_steps", "x max_steps", _warmup),
    mapped("lr_scheduler_kwargs.min_lr", "actor.optim.min_lr_ratio", "/ learning_rate",
        ratio_to("learning_rate", 2e-5)),
    mapped("lr_scheduler_kwargs.min_lr_rate", "actor.optim.min_lr_ratio"),
    mapped("lr_scheduler_kwargs.num_decay_steps", "actor.optim.decay_steps"),
    unsupported("lr_scheduler_kwargs lr_scheduler_kwargs.*", "the schedules have no other parameters.", ({},)),
    mapped("weight_decay", "actor.optim.weight_decay", "", default=0.0),
    mapped("adam_beta1", "actor.optim.betas", "",
        lambda value, old: [float(old("adam_beta1", 0.9)), float(old("adam_beta2", 0.999))], default=0.9),
    mapped("adam_beta2", "actor.optim.betas", "",
        lambda value, old: [float(old("adam_beta1", 0.9)), float(old("adam_beta2", 0.999))]),
    mapped("adam_epsilon", "actor.optim.eps"),
    mapped("max_grad_norm", "actor.optim.clip_grad"),
    unsupported("optim optim_args", "AdamW only.", ("adamw_torch", "adamw_torch_fused", "adamw_hf")),
    mapped("num_train_epochs", "trainer.total_epochs", "whole epochs", _epochs, default=3),
    mapped("max_steps", "trainer.total_steps", "", lambda value, old: max(int(value), 0)),
    mapped("seed", "data.seed", "", default=42),
    mapped("data_seed", "data.seed", "", lambda value, old: None if old.has("seed") else int(value)),
)  # fmt: skip

_RUN = (
    mapped("output_dir", "trainer.run_dir", "checkpoints, metrics and export"),
    mapped("save_steps", "trainer.save_every", "", _every("save_strategy", "save_steps", "trainer.save_every"),
        default=500),
    mapped("save_strategy", "trainer.save_every", "no becomes 0: only at the end",
        _every("save_strategy", "save_steps", "trainer.save_every")),
    mapped("save_total_limit", "trainer.keep_last", "TRL keeps all unless it is set"),
    mapped("eval_steps", "eval.every", "", _every("eval_strategy", "eval_steps", "eval.every")),
    mapped("eval_strategy evaluation_strategy", "eval.every", "no becomes 0: before the first and after the last step",
        _every("eval_strategy", "eval_steps", "eval.every")),
    mapped("resume_from_checkpoint", "trainer.resume", "true becomes auto", _resume),
    mapped("packing padding_free", "actor.packing",
        "on by default; sequences stay separate, so it never changes the result", nothing),
    mapped("shuffle_dataset", "data.shuffle", "transformers shuffles in any case", nothing),
    unsupported("dataset_name dataset_config datasets dataset_mixture",
        "datasets of a hub are not loaded. Set data.train_files: " + _TEXT),
    meaningless("dataset_train_split dataset_test_split dataset_streaming dataset_text_field dataset_kwargs "
        "dataset_kwargs.* dataset_num_proc ignore_bias_buffers remove_unused_columns", _TEXT),
    mapped("report_to", "trainer.loggers", "metrics.jsonl in trainer.run_dir is always written", trackers),
    mapped("run_name", "trainer.experiment_name", "of the trackers"),
    meaningless("logging_* log_level log_on_each_node disable_tqdm trackio_*",
        "every step is written to metrics.jsonl in trainer.run_dir."),
    meaningless("push_to_hub hub_* save_safetensors save_only_model save_on_each_node overwrite_output_dir", _HUB),
    meaningless("per_device_eval_batch_size eval_accumulation_steps eval_on_start eval_packing eval_delay",
        "an evaluation samples with the engines; eval.max_prompts limits it."),
    meaningless("eos_token pad_token pad_to_multiple_of packing_strategy truncation_mode",
        "the student's tokenizer and its end-of-sequence tokens are used."),
    same("completion_only_loss assistant_only_loss", "the loss covers the response."),
    meaningless("loss_type", "distill.loss selects the loss; this one is that of SFT."),
    meaningless("dataloader_* ddp_* group_by_length average_tokens_across_devices auto_find_batch_size local_rank "
        "full_determinism", "tokens are balanced over the ranks, and losses are averaged over all tokens of a step."),
    meaningless("deepspeed fsdp fsdp_config fsdp_config.* accelerator_config accelerator_config.* use_cpu",
        "actor.strategy=fsdp2 shards the student; actor.fsdp_cpu_offload moves it to host memory."),
    meaningless("do_train do_eval do_predict load_best_model_at_end metric_for_best_model greater_is_better",
        "the last weights are exported; trainer.keep_best keeps the best evaluated step, too."),
    unsupported("neftune_noise_alpha label_smoothing_factor", "no noise or smoothing is added.", (0, 0.0)),
    meaningless("config_file accelerate_config main_process_port main_process_ip machine_rank mixed_precision "
        "use_deepspeed nproc_per_node master_port",
        "Ray starts the ranks; there is no accelerate or torchrun command."),
    meaningless("--config", "of TrlParser: give that file to python -m gkd.tools.migrate trl."),
)  # fmt: skip


ROWS: tuple[Row, ...] = (*_DISTILL, *_STUDENT, *_OPTIM, *_RUN)
TABLE = Table("trl", "TRL", ROWS)
