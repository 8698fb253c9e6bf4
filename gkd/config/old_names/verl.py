"""Settings of verl: its GKD recipe (`on_policy_distill_trainer.yaml`, scripts) and common ones of its PPO trainer."""

from __future__ import annotations

from typing import Any

from gkd.config.old_names.row import NotConvertible, OldSettings, Row, Table, mapped, meaningless, same, unsupported
from gkd.config.old_names.values import (
    NO_REWARD,
    as_list,
    choices,
    fixed,
    never_is_zero,
    normalize,
    nothing,
    ratio_to,
    schedule,
    share_of_steps,
    tensor_parallel_only,
    trackers,
)

_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_MEGATRON, _OPTIM, _TEACHER = f"{_ACTOR}.megatron", f"{_ACTOR}.optim", "actor_rollout_ref.teacher"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"


def _loss(name: Any, old: OldSettings) -> dict[str, Any]:
    beta, share = float(old(f"{_ACTOR}.distill_loss.beta", 0.5)), float(old(f"{_ACTOR}.distill_loss.rkl_ratio", 0.1))
    if name == "kl_rkl":
        terms = [{"name": "forward_kl", "weight": round(1.0 - share, 9)}, {"name": "reverse_kl", "weight": share}]
        return {"distill.losses": terms, "distill.tail": "bucket"}
    losses: dict[str, dict[str, Any]] = {
        "kl": {"distill.loss": "forward_kl", "distill.tail": "drop"},
        "rkl": {"distill.loss": "reverse_kl", "distill.tail": "renorm"},
        "jsd": {"distill.loss": "jsd", "distill.beta": beta, "distill.tail": "bucket"},
    }
    if str(name) not in losses:
        raise NotConvertible("choose distill.loss, see docs/losses.md.")
    return losses[str(name)]


def _warmup(value: Any, old: OldSettings) -> int | None:
    ratio, steps = old(f"{_OPTIM}.lr_warmup_steps_ratio", 0.0), old(f"{_OPTIM}.lr_warmup_steps")
    if steps and steps > 0:
        return int(steps)
    return share_of_steps(ratio, old("trainer.total_training_steps"), "actor.optim.warmup_steps")


def _token_budget(value: Any, old: OldSettings) -> int | None:
    return int(value) if old(f"{_ACTOR}.use_dynamic_bsz") else None


def _truncation(value: Any, old: OldSettings) -> Any:
    return "drop" if old("data.filter_overlong_prompts") else value


def _resume(value: Any, old: OldSettings) -> Any:
    return choices({"auto": "auto", "disable": "never", "resume_path": old("trainer.resume_from_path")}, "")(value, old)


def _run_dir(value: Any, old: OldSettings) -> str:
    return str(value).format(
        project=old("trainer.project_name", "verl_examples"), experiment=old("trainer.experiment_name", "gsm8k")
    )


def _reference(value: Any, old: OldSettings) -> float | None:
    return float(old(f"{_ACTOR}.kl_loss_coef", 0.001)) if old(f"{_ACTOR}.use_kl_loss") else None


_NO_CRITIC = "there is no critic."
_OFFLOAD = "weights, gradients and optimizer states move together, between calls on the actor"
_CHECKPOINT_ALWAYS = (
    "a checkpoint always has weights, optimizer and random states; the export is in Hugging Face format."
)

_DATA = (
    mapped("data.train_files", "data.train_files", "parquet or JSONL", as_list),
    mapped("data.val_files", "data.val_files", "", as_list),
    mapped("data.prompt_key", "data.prompt_key", "", default="question"),
    mapped("data.max_prompt_length", "data.max_prompt_length", "", default=512),
    mapped("data.max_response_length", "data.max_response_length", "", default=512),
    mapped("data.train_batch_size", "trainer.global_batch_size", "prompts of one optimizer step", default=1024),
    mapped("data.gen_batch_size", "trainer.global_batch_size", "one batch is generated and trained on"),
    mapped("data.shuffle", "data.shuffle"),
    mapped("data.seed", "data.seed"),
    mapped("data.truncation", "data.truncation", "`middle` is not supported", _truncation),
    mapped("data.filter_overlong_prompts", "data.truncation", "true becomes drop", fixed({"data.truncation": "drop"})),
    mapped("data.trust_remote_code", "model.trust_remote_code", "one key for model and tokenizer",
        fixed({"model.trust_remote_code": True})),
    meaningless("data.val_batch_size", "all held-out prompts are sent to the engines; eval.max_prompts limits them."),
    meaningless("data.tokenizer", "the tokenizer is that of model.path."),
    meaningless("data.dataloader_num_workers data.filter_overlong_prompts_workers",
        "prompts are read once, by one process."),
    meaningless("data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.return_multi_modal_inputs",
        "it selects fields of verl's data batches."),
    meaningless("data.reward_fn_key", NO_REWARD),
    unsupported("data.custom_cls.* data.sampler.* data.datagen.*",
        "own dataset and sampler classes: write a JSONL file instead."),
    unsupported("data.image_key data.video_key", "text only."),
    unsupported("data.tool_config_path", "one turn of text per prompt."),
)  # fmt: skip

_STUDENT = (
    mapped(f"{_MODEL}.path", "model.path", "a local folder; download the model first"),
    mapped(f"{_MODEL}.trust_remote_code", "model.trust_remote_code", "", fixed({"model.trust_remote_code": True})),
    mapped(f"{_MODEL}.enable_gradient_checkpointing", "actor.recompute", "true becomes full",
        fixed({"actor.recompute": "full"})),
    mapped(f"{_MODEL}.use_remove_padding", "actor.packing", "on by default; it never changes the result", nothing),
    mapped(f"{_MODEL}.lora_rank {_MODEL}.lora.rank", "actor.lora.rank", "0 = off, as here"),
    mapped(f"{_MODEL}.lora_alpha {_MODEL}.lora.alpha", "actor.lora.alpha"),
    mapped(f"{_MODEL}.target_modules {_MODEL}.lora.target_modules", "actor.lora.targets",
        "all-linear is the default here", lambda value, old: None if value == "all-linear" else as_list(value, old)),
    mapped("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    unsupported(f"{_MODEL}.custom_chat_template",
        "put it into the model folder as chat_template.jinja."),
    unsupported(f"{_MODEL}.external_lib {_MODEL}.override_config {_MODEL}.override_config.*",
        "config.json of the model folder is used as it is.", ({}, False, {"num_nextn_predict_layers": 0}, 0)),
    meaningless(f"{_MODEL}.use_shm {_MODEL}.use_fused_kernels {_MODEL}.tokenizer_path {_MODEL}.use_liger",
        "loading and kernels are not settings; see actor.fused_lm_head and actor.loss_kernel."),
    mapped(f"{_ACTOR}.strategy", "actor.strategy", "megatron, or fsdp2 for fsdp",
        choices({"megatron": "megatron", "fsdp": "fsdp2", "fsdp2": "fsdp2"}, "choose megatron or fsdp2.")),
    mapped(f"{_ACTOR}.micro_batch_size", "actor.micro_batch_size", "sequences", default=2),
    mapped(f"{_ACTOR}.ppo_micro_batch_size_per_gpu {_ACTOR}.ppo_micro_batch_size", "actor.micro_batch_size",
        "sequences", lambda value, old: None if old.has(f"{_ACTOR}.micro_batch_size") else int(value)),
    mapped(f"{_ACTOR}.ppo_mini_batch_size", "trainer.global_batch_size",
        "the recipe ignores it: a step is one data.train_batch_size",
        lambda value, old: None if old.has("data.train_batch_size") else int(value)),
    mapped(f"{_ACTOR}.use_dynamic_bsz", "actor.max_tokens_per_micro_batch", "the number of tokens is max_token_len",
        nothing),
    mapped(f"{_ACTOR}.max_token_len {_ACTOR}.ppo_max_token_len_per_gpu", "actor.max_tokens_per_micro_batch",
        "with use_dynamic_bsz; at least one longest sequence", _token_budget),
    mapped(f"{_ACTOR}.grad_clip {_OPTIM}.clip_grad", "actor.optim.clip_grad"),
    mapped(f"{_ACTOR}.use_kl_loss", "distill.reference_kl_weight", "KL to the initial student, with kl_loss_coef",
        _reference),
    mapped(f"{_ACTOR}.kl_loss_coef", "distill.reference_kl_weight", "with use_kl_loss; estimated as k3", _reference),
    mapped(f"{_ACTOR}.distill_loss.name", "distill.loss distill.tail",
        "kl, the default, is forward_kl with tail drop; rkl is reverse_kl with tail renorm; kl_rkl and jsd get tail "
        "bucket", _loss, default="kl"),
    mapped(f"{_ACTOR}.distill_loss.beta", "distill.beta", "the teacher's share of the mixture, as here", nothing),
    mapped(f"{_ACTOR}.distill_loss.rkl_ratio", "distill.losses", "weight of the reverse KL of kl_rkl", nothing),
    mapped(f"{_ACTOR}.checkpoint.async_save", "trainer.async_save"),
    meaningless(f"{_ACTOR}.checkpoint.*", _CHECKPOINT_ALWAYS),
    meaningless(f"{_ACTOR}.data_loader_seed {_ACTOR}.shuffle {_ACTOR}.load_weight {_MEGATRON}.seed",
        "data.seed is the only seed; weights are always loaded."),
    meaningless(f"{_ACTOR}.use_torch_compile",
        "actor.layers selects what of the layers is compiled, actor.loss_kernel the loss kernels."),
    unsupported(f"{_ACTOR}.ulysses_sequence_parallel_size", "context and Ulysses parallelism are not supported.", (1,)),
    unsupported(f"{_ACTOR}.clip_ratio* {_ACTOR}.entropy_coeff {_ACTOR}.ppo_epochs "
        f"{_ACTOR}.kl_loss_type {_ACTOR}.policy_loss.*", NO_REWARD),
    mapped(f"{_ACTOR}.loss_agg_mode", "distill.normalize", "mean of all tokens, or of the responses' means", normalize),
    mapped("trainer.profile_steps global_profiler.steps", "trainer.profile_steps",
        "torch's profiler, on the actor ranks of trainer.profile_ranks",
        lambda value, old: list(map(str, as_list(value, old))) if old(f"{_ACTOR}.profiler.enable", True) else None),
    meaningless(f"{_ACTOR}.profiler.* {_ROLLOUT}.profiler.* global_profiler.*",
        "trainer.profile_steps and trainer.profile_ranks select what is profiled."),
    mapped(f"{_MEGATRON}.tensor_model_parallel_size", "actor.tp"),
    mapped(f"{_MEGATRON}.pipeline_model_parallel_size", "actor.pp"),
    mapped(f"{_MEGATRON}.virtual_pipeline_model_parallel_size", "actor.vpp"),
    mapped(f"{_MEGATRON}.expert_model_parallel_size", "actor.ep"),
    mapped(f"{_MEGATRON}.sequence_parallel {_TRANSFORMER}.sequence_parallel", "actor.sequence_parallel",
        "off with a tensor parallel size of 1", tensor_parallel_only(f"{_MEGATRON}.tensor_model_parallel_size"),
        default=True),
    mapped(f"{_MEGATRON}.param_offload {_ACTOR}.fsdp_config.param_offload", "actor.offload_train", _OFFLOAD,
        fixed({"actor.offload_train": True})),
    mapped(f"{_MEGATRON}.grad_offload", "actor.offload_train", _OFFLOAD, fixed({"actor.offload_train": True})),
    mapped(f"{_MEGATRON}.optimizer_offload {_ACTOR}.fsdp_config.optimizer_offload", "actor.offload_train", _OFFLOAD,
        fixed({"actor.offload_train": True})),
    mapped(f"{_ACTOR}.fsdp_config.offload_policy", "actor.fsdp_cpu_offload"),
    meaningless(f"{_ACTOR}.fsdp_config.*",
        "actor.strategy=fsdp2 shards every layer over all ranks; model.dtype is the dtype."),
    unsupported(f"{_MEGATRON}.context_parallel_size", "context parallelism is not supported.", (1,)),
    unsupported(f"{_MEGATRON}.expert_tensor_parallel_size", "experts are split by actor.ep only.", (1, None)),
    same(f"{_MEGATRON}.use_distributed_optimizer", "optimizer states are always sharded over the data-parallel ranks."),
    meaningless(f"{_MEGATRON}.use_dist_checkpointing {_MEGATRON}.dist_checkpointing_path {_MEGATRON}.use_mbridge "
        f"{_MEGATRON}.vanilla_mbridge {_MEGATRON}.load_weight",
        "weights are read from the safetensors of model.path; no conversion is needed."),
    mapped(f"{_TRANSFORMER}.recompute_granularity", "actor.recompute", "full or selective"),
    meaningless(f"{_TRANSFORMER}.recompute_method {_TRANSFORMER}.recompute_num_layers",
        "actor.recompute=full recomputes every layer."),
    unsupported(f"{_TRANSFORMER} {_TRANSFORMER}.*", "Megatron-core's other options follow from the model folder.",
        ({},)),
    mapped(f"{_OPTIM}.lr", "actor.optim.lr"),
    mapped(f"{_OPTIM}.betas", "actor.optim.betas", "Megatron-core's and PyTorch's default", as_list,
        default=[0.9, 0.999]),
    mapped(f"{_OPTIM}.weight_decay", "actor.optim.weight_decay", "not applied to biases and norms"),
    mapped(f"{_OPTIM}.lr_decay_style {_OPTIM}.warmup_style {_OPTIM}.lr_scheduler_type", "actor.optim.schedule", "",
        schedule),
    mapped(f"{_OPTIM}.lr_warmup_steps", "actor.optim.warmup_steps", "", _warmup),
    mapped(f"{_OPTIM}.lr_warmup_steps_ratio", "actor.optim.warmup_steps", "x trainer.total_training_steps", _warmup),
    mapped(f"{_OPTIM}.lr_wsd_decay_steps", "actor.optim.decay_steps"),
    mapped(f"{_OPTIM}.min_lr", "actor.optim.min_lr_ratio", "/ lr", ratio_to(f"{_OPTIM}.lr", 1e-6)),
    mapped(f"{_OPTIM}.min_lr_ratio", "actor.optim.min_lr_ratio"),
    meaningless(f"{_OPTIM}.total_training_steps {_OPTIM}.use_checkpoint_opt_param_scheduler "
        f"{_OPTIM}.override_optimizer_config {_OPTIM}.override_optimizer_config.*",
        "the schedule follows from the number of steps."),
    unsupported(f"{_OPTIM}.optimizer", "AdamW only.", ("adam", "AdamW", "adamw")),
    unsupported(f"{_OPTIM}.lr_decay_steps {_OPTIM}.lr_warmup_init",
        "the decay ends at the last step, and the warm-up starts at lr / warmup_steps.", (0.0, None)),
    unsupported(f"{_OPTIM}.weight_decay_incr_style {_OPTIM}.lr_wsd_decay_style",
        "a constant weight decay; wsd decays linearly.", ("constant", "linear", "exponential")),
)  # fmt: skip

_ENGINES = (
    mapped(f"{_ROLLOUT}.temperature", "rollout.temperature"),
    mapped(f"{_ROLLOUT}.top_p", "rollout.top_p"),
    mapped(f"{_ROLLOUT}.n", "rollout.n", "responses per prompt; the recipe trains on one"),
    mapped(f"{_ROLLOUT}.tensor_model_parallel_size", "rollout.tp"),
    mapped(f"{_ROLLOUT}.gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    mapped(f"{_ROLLOUT}.max_num_seqs", "rollout.max_num_seqs"),
    mapped(f"{_ROLLOUT}.enforce_eager", "rollout.enforce_eager"),
    mapped(f"{_ROLLOUT}.update_weights_bucket_megabytes {_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "weight_sync.bucket_mib"),
    mapped(f"{_ROLLOUT}.dtype", "model.dtype", "one dtype for student and engines"),
    mapped("rollout.n_gpus_per_node", "rollout.n_gpus_per_node", "", default=4),
    mapped("rollout.nnodes", "rollout.nnodes"),
    unsupported(f"{_ROLLOUT}.name", "vLLM is the only rollout engine.", ("vllm",)),
    unsupported(f"{_ROLLOUT}.top_k",
        "top-k sampling is not supported, use rollout.top_p; the teacher's top-k is teacher.topk.", (-1, 0)),
    unsupported(f"{_ROLLOUT}.do_sample", "rollouts are always sampled.", (True,)),
    unsupported(f"{_ROLLOUT}.ignore_eos",
        "a response ends at the student's end-of-sequence tokens, or rollout.stop_token_ids.", (False,)),
    same(f"{_ROLLOUT}.data_parallel_size", "the number of engines is the GPUs of the pool / rollout.tp."),
    unsupported(f"{_ROLLOUT}.expert_parallel_size {_ROLLOUT}.pipeline_model_parallel_size",
        "an engine is split by rollout.tp only.", (1,)),
    meaningless(f"{_ROLLOUT}.prompt_length {_ROLLOUT}.response_length {_ROLLOUT}.max_model_len",
        "it follows from data.max_prompt_length and data.max_response_length."),
    meaningless(f"{_ROLLOUT}.mode {_ROLLOUT}.load_format {_ROLLOUT}.layer_name_map {_ROLLOUT}.layer_name_map.* "
        f"{_ROLLOUT}.agent.* {_ROLLOUT}._target_ {_ROLLOUT}.free_cache_engine {_ROLLOUT}.disable_log_stats",
        "the engines receive prompts and weights in one way only; trainer.colocate frees their caches by itself."),
    meaningless(f"{_ROLLOUT}.max_num_batched_tokens {_ROLLOUT}.enable_chunked_prefill {_ROLLOUT}.enable_prefix_caching",
        "vLLM's defaults are used."),
    meaningless(f"{_ROLLOUT}.log_prob_* {_ROLLOUT}.calculate_log_probs",
        "the engines send the sampled tokens' logprobs if the loss needs them."),
    mapped(f"{_ROLLOUT}.val_kwargs.n", "eval.n", "sampled as in training, for the KL and pass@k"),
    meaningless(f"{_ROLLOUT}.val_kwargs.*",
        "evaluations compute the KL on sampled responses, and accuracy on greedy ones."),
    unsupported(f"{_ROLLOUT}.engine_kwargs.*", "other arguments of the engines cannot be set.", (None, False)),
    unsupported(f"{_ROLLOUT}.multi_turn.*", "one turn of text per prompt: no tools, no environments.",
        (False, None, 1, 256, "middle", "strict", "hermes", "verl.workers.config.MultiTurnConfig")),
)  # fmt: skip

_RUN = (
    mapped(f"{_TEACHER}.server_ip teacher.server_ip", "teacher.server_ip",
        "the server is another program here: python -m teacher_server"),
    mapped(f"{_TEACHER}.server_port teacher.server_port", "teacher.server_port"),
    mapped(f"{_TEACHER}.overlap_rollout teacher.overlap_rollout", "teacher.overlap_rollout"),
    mapped(f"{_TEACHER}.n_server_workers teacher.n_server_workers", "teacher.n_server_workers",
        "connections to the server; teacher.max_in_flight limits the sequences"),
    mapped("--n-logprobs", "teacher.topk", "an argument of verl's teacher worker; here the trainer asks for K",
        default=256),
    mapped("trainer.scheduler", "trainer.scheduler", "the same names; here also sync and stream",
        default="one_step_off"),
    mapped("trainer.total_epochs", "trainer.total_epochs", "", default=30),
    mapped("trainer.total_training_steps", "trainer.total_steps"),
    mapped("trainer.n_gpus_per_node", "trainer.n_gpus_per_node", "GPUs of the student", default=4),
    mapped("trainer.nnodes", "trainer.nnodes", "several nodes need cluster.ray_address"),
    mapped("trainer.save_freq", "trainer.save_every", "-1 becomes 0: only at the end", never_is_zero),
    mapped("trainer.test_freq", "eval.every", "-1 becomes 0: before the first and after the last step", never_is_zero),
    mapped("trainer.balance_batch", "actor.balance"),
    mapped("trainer.device", "trainer.device", "cuda or cpu"),
    mapped("trainer.default_local_dir", "trainer.run_dir", "checkpoints, metrics and export in one folder", _run_dir,
        default="checkpoints/{project}/{experiment}"),
    mapped("trainer.resume_mode", "trainer.resume", "disable becomes never", _resume, default="auto"),
    mapped("trainer.resume_from_path", "trainer.resume", "with resume_mode=resume_path", nothing),
    mapped("trainer.max_actor_ckpt_to_keep", "trainer.keep_last", "verl keeps all unless it is set"),
    mapped("trainer.ray_wait_register_center_timeout", "trainer.init_timeout_s", "s"),
    mapped("trainer.logger", "trainer.loggers", "metrics.jsonl in trainer.run_dir is always written", trackers),
    mapped("trainer.project_name", "trainer.project_name", "of the trackers"),
    mapped("trainer.experiment_name", "trainer.experiment_name", "of the trackers"),
    meaningless("trainer.log_val_generations", "greedy responses are written to samples in trainer.run_dir."),
    unsupported("trainer.val_before_train",
        "with data.val_files a run evaluates before the first and after the last step.", (True,)),
    meaningless("trainer.critic_warmup trainer.max_critic_ckpt_to_keep", _NO_CRITIC),
    meaningless("trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.esi_redundant_time",
        "checkpoints are local files, and trainer.keep_last of them are kept."),
    meaningless("actor_rollout_ref.hybrid_engine", "trainer.colocate=true puts actor and engines on the same GPUs."),
    meaningless("actor_rollout_ref.nccl_timeout",
        "trainer.stage_timeout_s and weight_sync.timeout_s limit the waiting."),
    meaningless("actor_rollout_ref.ref.*", "the reference uses the actor's ranks; see section reference."),
    meaningless("ray_init.* ray_kwargs.*", "cluster.ray_address names a running cluster; else one is started."),
    unsupported("algorithm.* reward_model.* reward.* custom_reward_function.*", NO_REWARD, (False, None)),
    unsupported("critic.*", _NO_CRITIC),
    meaningless("--config-path --config-name --config-dir -cn -cp hydra.* defaults",
        "there is no Hydra; use --config FILE.yaml with all settings."),
)  # fmt: skip

ROWS: tuple[Row, ...] = (*_DATA, *_STUDENT, *_ENGINES, *_RUN)
TABLE = Table("verl", "verl", ROWS)
