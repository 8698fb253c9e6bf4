"""Files of other systems as their users write them, with the values that each must have here."""

from __future__ import annotations

from typing import Any

VERL_SCRIPT = """
set -x
STUDENT=models/student   # a comment
export TP=2
PORT=${TEACHER_PORT:-16000}
train_files=data/train.parquet
FLAGS=(
    trainer.scheduler=two_step_off   # 'quoted'
)
nvidia-smi topo -m | grep --count NV
ray job submit --runtime-env="${ENV}" --working-dir . \\
    -- python3 -m main_gkd --config-name on_policy_distill_trainer \\
    data.train_files="$train_files" data.train_batch_size=96 data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=$STUDENT \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.max_token_len=6000 \\
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \\
    actor_rollout_ref.actor.optim.lr_decay_style=cosine actor_rollout_ref.actor.optim.min_lr=1e-6 \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    +teacher.server_port=$PORT +teacher.n_server_workers=4 \\
    trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=2 trainer.total_training_steps=200 \\
    trainer.save_freq=-1 trainer.test_freq=25 trainer.experiment_name=first trainer.own_key=1 "${FLAGS[@]}" $@
"""

TRL_YAML = """
model_name_or_path: models/student
teacher_model_name_or_path: models/teacher
dataset_name: someone/chats
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_train_epochs: 2
max_steps: 500
lmbda: 0.7
beta: 1.0
max_new_tokens: 128
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 2.0e-06}
warmup_ratio: 0.1
use_peft: true
lora_r: 64
lora_target_modules: [q_proj, v_proj]
save_strategy: steps
save_steps: 0.1
output_dir: runs/trl
report_to: wandb
"""

SLIME_SCRIPT = """
CUDA_VISIBLE_DEVICES=7 python3 -m sglang.launch_server --model-path models/teacher --tp 1 &
TEACHER_IP=10.0.0.7
ROLLOUT_ARGS=(
   --prompt-data data/prompts.jsonl --input-key prompt
   --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 4 --global-batch-size 64
   # --eval-interval 20
   --rollout-max-response-len 2048 --rollout-stop-token-ids 5 6
)
OPD_ARGS=(--use-opd --opd-type sglang --opd-kl-coef 0.5 --rm-url http://$TEACHER_IP:13141/generate)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 4096)
MISC_ARGS=(--attention-backend flash --adam-beta2 0.98 --lr 1e-6 --lr-decay-style constant)
python3 train_async.py --actor-num-gpus-per-node 4 --rollout-num-gpus 16 --hf-checkpoint models/student \\
   --save runs/slime --save-interval 20 \\
   --use-wandb --use-tensorboard --wandb-project math --wandb-group x \\
   ${ROLLOUT_ARGS[@]} ${OPD_ARGS[@]} ${PERF_ARGS[@]} ${MISC_ARGS[@]}
"""

ROLL_YAML = """
exp_name: first
track_with: tensorboard
checkpoint_config: {type: file_system, output_dir: "runs/${exp_name}"}
num_gpus_per_node: 8
max_steps: 100
save_steps: 50
rollout_batch_size: 64
prompt_length: 1024
response_length: 3072
num_return_sequences_in_group: 2
pretrain: models/student
student_train:
  training_args: {learning_rate: 5.0e-7, per_device_train_batch_size: 4, gradient_accumulation_steps: 2}
  data_args: {file_name: [data/a.jsonl, data/b.jsonl], messages: messages}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2, context_parallel_size: 1}
  device_mapping: list(range(0,8))
student_infer:
  generating_args: {top_p: 1.0, temperature: 1.0, top_k: 100}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.7, tensor_parallel_size: 2}}
  device_mapping: list(range(0,8))
teacher:
  model_args: {model_name_or_path: models/teacher}
  device_mapping: list(range(0,8))
rewards: {math_rule: {world_size: 8}}
"""

# dialect: (name of the file, text, values here, exit code)
EXAMPLES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "verl_gkd": ("run.sh", VERL_SCRIPT, {
        "data.train_files": ["data/train.parquet"], "data.truncation": "drop", "data.prompt_key": "question",
        "data.max_response_length": 512, "model.path": "models/student", "trainer.global_batch_size": 96,
        "trainer.scheduler": "two_step_off", "trainer.total_steps": 200, "trainer.total_epochs": 30,
        "trainer.n_gpus_per_node": 4, "trainer.experiment_name": "first", "trainer.save_every": 0,
        "trainer.run_dir": "checkpoints/verl_examples/first",
        "trainer.resume": "auto", "eval.every": 25, "actor.tp": 2, "actor.sequence_parallel": True,
        "actor.recompute": "full", "actor.max_tokens_per_micro_batch": 12000, "actor.cp": 2, "actor.optim.lr": 2e-6,
        "actor.optim.betas": [0.9, 0.999], "actor.optim.schedule": "cosine", "actor.optim.warmup_steps": 10,
        "actor.optim.min_lr_ratio": 0.5, "rollout.tp": 2, "rollout.n_gpus_per_node": 2, "teacher.server_port": 16000,
        "teacher.topk": 256, "distill.loss": "forward_kl", "distill.tail": "drop",
    }, 0),
    "trl_gkd": ("gkd.yaml", TRL_YAML, {
        "model.path": "models/student", "actor.strategy": "fsdp2", "teacher.backend": "local",
        "teacher.path": "models/teacher", "teacher.signal": "hidden", "trainer.colocate": True,
        "trainer.n_gpus_per_node": 8, "rollout.n_gpus_per_node": 8, "actor.micro_batch_size": 4,
        "trainer.global_batch_size": 256, "trainer.total_epochs": 500, "trainer.total_steps": 500,
        "trainer.save_every": 50, "trainer.run_dir": "runs/trl", "distill.on_policy_share": 0.7,
        "distill.loss": "reverse_kl", "rollout.temperature": 0.9, "teacher.temperature": 1.0,
        "data.max_response_length": 128, "data.max_prompt_length": 1024, "data.truncation": "left", "data.seed": 42,
        "actor.optim.lr": 2e-5, "actor.optim.schedule": "cosine", "actor.optim.min_lr_ratio": 0.1,
        "actor.optim.warmup_steps": 50, "actor.optim.weight_decay": 0.0, "actor.optim.betas": [0.9, 0.999],
        "actor.lora.rank": 64, "actor.lora.alpha": 32.0, "actor.lora.targets": ["q_proj", "v_proj"],
        "actor.recompute": "full", "trainer.loggers": ["wandb"],
    }, 0),
    "slime": ("run.sh", SLIME_SCRIPT, {
        "data.train_files": ["data/prompts.jsonl"], "data.prompt_key": "prompt", "data.max_response_length": 2048,
        "data.shuffle": False, "data.seed": 42, "model.path": "models/student", "trainer.global_batch_size": 16,
        "rollout.n": 4, "trainer.total_steps": 600, "trainer.save_every": 40, "trainer.run_dir": "runs/slime",
        "trainer.scheduler": "one_step_off", "trainer.n_gpus_per_node": 4, "rollout.n_gpus_per_node": 8,
        "rollout.nnodes": 2, "rollout.stop_token_ids": [5, 6], "actor.tp": 2, "actor.sequence_parallel": True,
        "actor.max_tokens_per_micro_batch": 4096, "actor.optim.betas": [0.9, 0.98], "actor.optim.schedule": "constant",
        "trainer.loggers": ["tensorboard", "wandb"], "trainer.project_name": "math",
        "teacher.server_ip": "10.0.0.7", "teacher.signal": "sampled", "teacher.backend": "zmq",
    }, 0),
    "roll": ("opd.yaml", ROLL_YAML, {
        "data.train_files": ["data/a.jsonl", "data/b.jsonl"], "data.prompt_key": "messages", "data.seed": 42,
        "data.max_prompt_length": 1024, "data.max_response_length": 3072, "model.path": "models/student",
        # 4 per device x 2 x (8 GPUs / 2 stages) = 32 responses of 16 prompts; 128 responses are 4 optimizer steps.
        "trainer.global_batch_size": 16, "rollout.n": 2, "trainer.total_steps": 400, "trainer.save_every": 200,
        "eval.every": 40, "trainer.run_dir": "runs/first", "trainer.experiment_name": "first",
        "trainer.loggers": ["tensorboard"], "trainer.n_gpus_per_node": 8, "rollout.n_gpus_per_node": 8,
        "trainer.colocate": True, "rollout.tp": 2, "rollout.gpu_memory_utilization": 0.7, "rollout.top_p": 1.0,
        "rollout.top_k": 100, "actor.pp": 2, "actor.micro_batch_size": 4, "actor.optim.lr": 5e-7,
        "actor.optim.schedule": "linear", "actor.optim.weight_decay": 0.0, "actor.optim.betas": [0.9, 0.999],
        "teacher.backend": "local", "teacher.path": "models/teacher", "teacher.signal": "sampled", "distill.loss": "k1",
    }, 0),
}  # fmt: skip
# What users give in addition: accelerate's number of processes is not in TRL's YAML.
FLAGS = {"trl_gkd": ["--num_processes", "8"]}
