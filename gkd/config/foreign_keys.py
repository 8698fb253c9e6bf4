"""Suggest a key for one that does not exist: names known from verl, TRL and Megatron, then the nearest key."""

from __future__ import annotations

import difflib

from gkd.config.key_list import all_keys, sections

# The last part of a foreign key, or the whole key -> the key here, or a sentence.
_METRICS = "metrics are written to metrics.jsonl in trainer.run_dir."
FOREIGN = {
    "ckpt_path": "trainer.resume",
    "context_parallel_size": "context parallelism is not supported.",
    "cp": "context parallelism is not supported.",
    "default_local_dir": "trainer.run_dir",
    "distill.temperature": "teacher.temperature",
    "enable_gradient_checkpointing": "actor.recompute",
    "eval_steps": "eval.every",
    "experiment_name": _METRICS,
    "expert_model_parallel_size": "actor.ep",
    "grad_offload": "actor.offload_train",
    "gradient_checkpointing": "actor.recompute",
    "learning_rate": "actor.optim.lr",
    "lmbda": "distill.on_policy_share",
    "lambda": "distill.on_policy_share",
    "logger": _METRICS,
    "lora_r": "actor.lora.rank",
    "lr_scheduler_type": "actor.optim.schedule",
    "lr_warmup_steps": "actor.optim.warmup_steps",
    "max_completion_length": "data.max_response_length",
    "max_grad_norm": "actor.optim.clip_grad",
    "max_new_tokens": "data.max_response_length",
    "max_steps": "trainer.total_steps",
    "max_tokens": "data.max_response_length",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.n",
    "num_train_epochs": "trainer.total_epochs",
    "optimizer_offload": "actor.offload_train",
    "output_dir": "trainer.run_dir",
    "param_offload": "actor.offload_train",
    "per_device_train_batch_size": "actor.micro_batch_size",
    "pipeline_model_parallel_size": "actor.pp",
    "ppo_max_token_len_per_gpu": "actor.max_tokens_per_micro_batch",
    "ppo_micro_batch_size": "actor.micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "actor.micro_batch_size",
    "ppo_mini_batch_size": "trainer.global_batch_size",
    "project_name": _METRICS,
    "report_to": _METRICS,
    "resume_from_checkpoint": "trainer.resume",
    "resume_from_path": "trainer.resume",
    "resume_mode": "trainer.resume",
    "rollout.name": "vLLM is the only rollout engine; remove the key.",
    "rollout.tensor_model_parallel_size": "rollout.tp",
    "save_freq": "trainer.save_every",
    "save_steps": "trainer.save_every",
    "save_total_limit": "trainer.keep_last",
    "target_modules": "actor.lora.targets",
    "teacher.model": "teacher.path",
    "teacher.n_gpus_per_node": "remove the key: the GPUs of the teacher are chosen where its server is started "
    "(python -m teacher_server).",
    "teacher_model_name_or_path": "teacher.path",
    "tensor_model_parallel_size": "actor.tp",
    "test_freq": "eval.every",
    "top_k": "top-k sampling is not supported, use rollout.top_p; the teacher's top-k is teacher.topk.",
    "total_training_steps": "trainer.total_steps",
    "train_batch_size": "trainer.global_batch_size",
    "use_dynamic_bsz": "actor.max_tokens_per_micro_batch",
    "use_remove_padding": "actor.packing",
    "virtual_pipeline_model_parallel_size": "actor.vpp",
}
_MOST = 3  # keys of one suggestion


def suggestion(key: str) -> str:
    """Return what to write instead of a key that does not exist, as a sentence."""
    last = key.rpartition(".")[2]
    foreign = FOREIGN.get(key) or FOREIGN.get(last)
    if foreign:
        return f"use {foreign}." if foreign in all_keys() else foreign
    nearest = difflib.get_close_matches(key, [*all_keys(), *sections()], n=1, cutoff=0.75)
    # The same name in another section, such as `actor.lr`.
    elsewhere = [name for name in all_keys() if name.rpartition(".")[2] == last][:_MOST]
    found = nearest if nearest and not elsewhere else elsewhere
    return f"did you mean {' or '.join(found)}?" if found else "python -m gkd.main_gkd --help lists all keys."
