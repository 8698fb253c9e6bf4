"""Say what to write instead of a key that does not exist: the key for a name of another system, or a similar key."""

from __future__ import annotations

import difflib
from functools import cache

from gkd.config.schema_sections import all_keys, sections

# System -> its names that decide what is trained and on how many GPUs: old name | keys here | how the value changes.
# Names without a key have no equal. docs/coming_from.md has the same tables; `python -m tests.pages` writes them.
TABLES = {
    "verl": """\
data.train_batch_size | trainer.global_batch_size | With main_ppo use the value of ppo_mini_batch_size.
data.apply_chat_template_kwargs | data.chat_template_kwargs |
data.filter_overlong_prompts | data.truncation | true becomes drop.
data.image_key | data.images_key | The default of verl is images.
actor_rollout_ref.actor.freeze_vision_tower | model.freeze_vision | true is the default here.
actor_rollout_ref.actor.strategy | actor.strategy | fsdp becomes fsdp2.
actor_rollout_ref.actor.ppo_mini_batch_size | trainer.global_batch_size | The GKD recipe does not use it.
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu | actor.micro_batch_size | The GKD recipe does not use it.
actor_rollout_ref.actor.max_token_len | actor.max_tokens_per_micro_batch | Multiply it by actor.cp.
actor_rollout_ref.actor.ppo_max_token_len_per_gpu | actor.max_tokens_per_micro_batch | Multiply it by actor.cp.
actor_rollout_ref.actor.ulysses_sequence_parallel_size | actor.cp |
actor_rollout_ref.actor.grad_clip | actor.optim.clip_grad |
actor_rollout_ref.actor.optim.lr_warmup_steps | actor.optim.warmup_steps | main_ppo counts batches of train_batch_size.
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio | actor.optim.warmup_steps | Multiply it by the number of steps.
actor_rollout_ref.rollout.temperature | rollout.temperature | main_ppo divides the logits of the student by it, too.
actor_rollout_ref.rollout.tensor_model_parallel_size | rollout.tp |
actor_rollout_ref.rollout.val_kwargs | eval.n | Evaluations sample as training does.
actor_rollout_ref.ref | | See section reference.
actor_rollout_ref.actor.distill_loss.name | distill.loss distill.tail | kl becomes forward_kl with drop, and rkl \
becomes reverse_kl with renorm. kl_rkl and jsd have no equal.
distillation.distillation_loss.loss_mode | distill.loss distill.tail | forward_kl_topk becomes forward_kl with drop. \
k1 and k2 keep their names and need teacher.signal sampled. For k3 use forward_kl.
distillation.distillation_loss.use_policy_gradient | distill.loss | k1 needs true. Others need false.
distillation.distillation_loss.topk | teacher.topk | It has an effect with forward_kl_topk only.
distillation.distillation_loss.use_task_rewards | reward.functions distill.reward_weight | false needs no key.
distillation.distillation_loss.loss_max_clamp | distill.token_clip | It limits divergences and advantages.
distillation.distillation_loss.log_prob_min_clamp | | Logprobs have no limit here.
distillation.teacher_models | teacher.routes | Start gkd teacher for each model. One teacher needs no route.
distillation.teacher_key | data.teacher_key | It has an effect with several teachers only.
distillation.n_gpus_per_node | | It is --gpus of gkd teacher.
reward_model | reward.functions distill.reward_weight | Write rewards as functions.
trainer.experiment_name | trainer.run_dir | The name of this folder is that of the run.
trainer.total_training_steps | trainer.total_steps | main_ppo counts batches of train_batch_size.
trainer.v1.trainer_mode | trainer.scheduler trainer.colocate | sync becomes colocate. separate_async becomes stream.
""",
    "Megatron (verl, slime, ROLL, ms-swift, NeMo-RL)": """\
tensor_model_parallel_size | actor.tp |
pipeline_model_parallel_size | actor.pp |
context_parallel_size | actor.cp |
expert_model_parallel_size | actor.ep |
global_batch_size | trainer.global_batch_size | Divide it by the responses per prompt: prompts are counted here.
lr | actor.optim.lr |
min_lr | actor.optim.min_lr_ratio | Divide it by lr.
lr_decay_style | actor.optim.schedule |
lr_warmup_iters | actor.optim.warmup_steps |
lr_warmup_fraction | actor.optim.warmup_steps | Multiply it by the number of steps.
""",
    "Hugging Face Trainer (TRL, ms-swift, ROLL)": """\
model_name_or_path | model.path actor.strategy | fsdp2 takes every causal language model of transformers.
per_device_train_batch_size | trainer.global_batch_size actor.micro_batch_size | The global batch is this value x \
gradient_accumulation_steps x processes / responses per prompt.
gradient_accumulation_steps | trainer.global_batch_size | It multiplies the global batch.
learning_rate | actor.optim.lr |
lr_scheduler_type | actor.optim.schedule | constant_with_warmup becomes constant. cosine_with_min_lr becomes cosine.
warmup_ratio | actor.optim.warmup_steps | Multiply it by the number of steps.
weight_decay | actor.optim.weight_decay |
adam_beta1 | actor.optim.betas | It is the first of two.
adam_beta2 | actor.optim.betas | It is the second of two.
max_grad_norm | actor.optim.clip_grad |
num_train_epochs | trainer.total_epochs | Epochs are integers.
max_steps | trainer.total_steps | Raise trainer.total_epochs, so that the data suffice.
top_p | rollout.top_p |
top_k | rollout.top_k | -1 becomes 0. The number of the teacher is teacher.topk.
num_processes | trainer.n_gpus_per_node rollout.n_gpus_per_node | Divide it by the number of nodes.
""",
    "TRL and ms-swift": """\
lmbda | distill.on_policy_share |
beta | distill.loss distill.beta | 0 becomes forward_kl, 1 reverse_kl, another value jsd with this beta.
temperature | rollout.temperature teacher.temperature | GKDTrainer of TRL and ROLL keep teacher.temperature 1.
max_new_tokens | data.max_response_length |
max_completion_length | data.max_response_length |
max_length | data.max_prompt_length data.max_response_length | It limits prompt and response together there.
num_generations | rollout.n |
teacher_model_name_or_path | teacher.path | Set teacher.backend local and teacher.signal hidden, or start gkd teacher.
teacher_model_server_url | teacher.server_ip teacher.server_port | A server of vLLM needs teacher.backend http.
seq_kd | | Write responses of the teacher into data.response_key.
loss_top_k | teacher.topk |
loss_add_tail | distill.tail | true becomes bucket, false becomes renorm.
use_uld_loss | teacher.tokenizer | Common texts are compared here, not sorted probabilities.
dataset_name | data.train_files | Write the dataset as JSONL or parquet.
vllm_tensor_parallel_size | rollout.tp |
""",
    "ms-swift": """\
rlhf_type | distill.loss | gkd uses the loss of beta. grpo with a teacher becomes k1 with teacher.signal sampled.
model | model.path |
teacher_model | teacher.path | Set teacher.backend local and trainer.colocate true, or start gkd teacher --model.
teacher_model_server | teacher.server_ip teacher.routes | A server of vLLM needs teacher.backend http.
teacher_kl_coef | distill.losses | It is the weight of k1.
gkd_logits_topk | teacher.topk | Set distill.tail renorm. Files without it need teacher.signal hidden.
sft_alpha | distill.losses | It is the weight of sft.
dataset | data.train_files | Write the dataset as JSONL or parquet. Rows with messages need data.prompt_key messages.
system | data.system_prompt |
truncation_strategy | data.truncation | delete becomes drop.
freeze_vit | model.freeze_vision | freeze_aligner has no key of its own: it is frozen, or trained, with the tower.
vllm_mode | trainer.colocate | colocate becomes true, server becomes false.
train_iters | trainer.total_steps | Raise trainer.total_epochs, so that the data suffice.
train.gpus | trainer.n_gpus_per_node | Divide it by the number of nodes.
rollout.gpus | rollout.n_gpus_per_node | Divide it by the number of nodes.
teacher.gpus | | It is --gpus of gkd teacher.
""",
    "slime": """\
--use-opd | distill.loss teacher.signal | It becomes k1 with teacher.signal sampled.
--opd-kl-coef | distill.losses | It is the weight of k1.
--opd-type | teacher.backend | sglang becomes zmq, megatron becomes local.
--rm-url | teacher.server_ip teacher.server_port | A server of SGLang needs teacher.backend http.
--custom-rm-path | reward.functions | The reward function of the distillation needs no key.
--kl-loss-coef | distill.reference_kl_weight | verl does not use it without task rewards.
--calculate-per-token-loss | distill.normalize | It becomes token, the default. Scripts without it need sequence.
--prompt-data | data.train_files |
--input-key | data.prompt_key |
--multimodal-keys | data.images_key | It is the column of image.
--apply-chat-template | data.chat_template | It becomes always. Scripts without it need never.
--rollout-max-response-len | data.max_response_length |
--rollout-batch-size | trainer.global_batch_size | Divide it by the optimizer steps of a rollout.
--n-samples-per-prompt | rollout.n |
--num-rollout | trainer.total_steps | Multiply it by the optimizer steps of a rollout.
--hf-checkpoint | model.path |
--max-tokens-per-gpu | actor.max_tokens_per_micro_batch | Multiply it by --context-parallel-size.
--actor-num-nodes | trainer.nnodes |
--actor-num-gpus-per-node | trainer.n_gpus_per_node |
--rollout-num-gpus | rollout.n_gpus_per_node | Divide it by rollout.nnodes.
--rollout-num-gpus-per-engine | rollout.tp |
--rollout-temperature | rollout.temperature teacher.temperature |
""",
    "ROLL": """\
student_pretrain | model.path |
pretrain | model.path |
teacher_pretrain | teacher.path | It needs teacher.backend local, or is --model of gkd teacher.
teacher.model_args.model_name_or_path | teacher.path | It needs teacher.backend local, or is --model of gkd teacher.
teacher.device_mapping | teacher.backend | GPUs of the training need local. Others are --gpus of gkd teacher.
opd_kl_coef | distill.losses | It is the weight of k1, which needs teacher.signal sampled.
kd_objective | distill.loss distill.tail | Set distill.tail renorm. js_divergence becomes jsd.
distill_loss_weight | distill.losses | It is the weight of the divergence. The weight of sft is 1 minus it.
kd_temperature | teacher.temperature |
teacher_temperature | | One temperature divides the logits of both models.
logits_topk | teacher.topk | 0 becomes teacher.signal logits.
loss_agg_mode | distill.normalize | token-mean becomes token, seq-mean-token-mean becomes sequence.
data_args.file_name | data.train_files |
answer_key | data.response_key | data.answer_key is for rewards and metrics.
prompt_length | data.max_prompt_length | Set data.truncation drop.
response_length | data.max_response_length |
num_return_sequences_in_group | rollout.n |
rollout_batch_size | trainer.global_batch_size | Divide it by the optimizer steps of a pipeline step.
device_mapping | trainer.n_gpus_per_node rollout.n_gpus_per_node trainer.colocate | Count the GPUs of student_train \
and of student_infer. The same GPUs become trainer.colocate true.
strategy_name | actor.strategy | megatron_train becomes megatron. fsdp2_train and deepspeed_train become fsdp2.
""",
    "NeMo-RL": """\
loss_fn.kl_type | distill.loss distill.tail | Set distill.tail renorm. mixed becomes distill.losses with two entries.
loss_fn.mixed_kl_weight | distill.losses | It is the weight of forward_kl. The weight of reverse_kl is 1 minus it.
loss_fn.zero_outside_topk | | distill.tail bucket compares the probability outside of the list.
distillation.topk_logits_k | teacher.topk |
distillation.num_generations_per_prompt | rollout.n |
distillation.max_num_steps | trainer.total_steps | Multiply it by the optimizer steps of a rollout.
on_policy_distillation | distill.loss teacher.routes | It becomes k1 with teacher.signal sampled. Models become routes.
policy.model_name | model.path |
policy.max_total_sequence_length | data.max_prompt_length data.max_response_length | It limits both together there.
policy.train_global_batch_size | trainer.global_batch_size | Divide it by num_generations_per_prompt.
policy.dtensor_cfg.enabled | actor.strategy | true becomes fsdp2.
policy.megatron_cfg.enabled | actor.strategy | true becomes megatron.
policy.generation.colocated.enabled | trainer.colocate |
teacher.model_name | teacher.path | It needs teacher.backend local, or is --model of gkd teacher.
tensor_parallel_size | rollout.tp | dtensor_cfg.tensor_parallel_size has no equal.
train_mb_tokens | actor.max_tokens_per_micro_batch |
cluster.gpus_per_node | trainer.n_gpus_per_node rollout.n_gpus_per_node |
""",
}
_OTHER_ROLES = ("teacher", "reference", "critic", "reward", "rewards", "validation")  # not the student's optimizer.lr


def suggestion(key: str) -> str:
    """Return what to write instead of a key that does not exist; empty if no known name is like it."""
    if name := _old_name(_plain(key)):
        return old_answer(name)
    near = nearest_keys(key)
    return f"did you mean {' or '.join(near)}?" if near else ""


def old_answer(name: str) -> str:
    """Return what to write instead of a name of another system, which may be a flag; empty means it is not listed."""
    if (row := _rows().get(_plain(name))) is None:
        return ""
    keys, change = row
    todo = f"use {' and '.join(keys.split())}." if keys else "remove it."
    return f"{todo} {change}".rstrip()


def nearest_keys(key: str) -> list[str]:
    """Return the keys that differ by a typing error, else the key at its end, else those of this name elsewhere."""
    if typed := difflib.get_close_matches(key, (*all_keys(), *sections()), n=3, cutoff=0.9):
        return typed
    if ends := [name for name in all_keys() if key.endswith(f".{name}") and _is_student_s(key)]:
        return ends
    section, _, last = key.rpartition(".")
    is_ours = section in ("", *sections())
    return [name for name in all_keys() if is_ours and name.rpartition(".")[2] == last][:3]


def tables() -> dict[str, list[list[str]]]:
    """Return system -> its rows of old name, keys here and how the value changes."""
    return {
        system: [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
        for system, table in TABLES.items()
    }


@cache
def _rows() -> dict[str, tuple[str, str]]:
    return {_plain(name): (keys, change) for table in tables().values() for name, keys, change in table}


def _plain(name: str) -> str:
    """Return a name without the signs of flags and of Hydra's overrides: `--save-interval` -> `save_interval`."""
    return name.lstrip("-+~").replace("-", "_")


def _old_name(key: str) -> str:
    """Return the longest name that a key is, or is below; else that it ends with; else that ends with it; or ""."""
    groups = (
        [name for name in _rows() if f"{key}.".startswith(f"{name}.")],
        [name for name in _rows() if key.endswith(f".{name}") and _is_student_s(key)],
        [name for name in _rows() if name.endswith(f".{key}")],
    )
    return max(next(filter(None, groups), [""]), key=len)


def _is_student_s(key: str) -> bool:
    return key.partition(".")[0] not in _OTHER_ROLES
