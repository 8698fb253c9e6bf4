"""Test the answers to keys that do not exist: names of other systems, their files, and typing errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.config.foreign_keys import nearest_keys, old_answer, old_names, suggestion
from gkd.config.load import load_config
from gkd.config.schema_sections import all_keys, sections
from gkd.errors import ConfigError
from gkd.main_gkd import main
from tests.structure import ROOT

# Files of other systems as their users write them -> keys of the answers, by old key.
VERL = """
data: {train_files: /path/to/train.parquet, prompt_key: question, train_batch_size: 1024, val_batch_size: null}
actor_rollout_ref:
  hybrid_engine: False
  model: {path: /path/to/MODEL, use_remove_padding: False}
  actor:
    strategy: megatron
    micro_batch_size: 2
    megatron: {tensor_model_parallel_size: 2, context_parallel_size: 1, use_dist_checkpointing: False}
    optim: {lr: 1e-6, lr_warmup_steps_ratio: 0.0, min_lr: 0.0, lr_decay_style: constant}
    checkpoint: {load_contents: "${actor_rollout_ref.actor.checkpoint.save_contents}"}
  rollout:
    temperature: 1.0
    top_k: -1
    tensor_model_parallel_size: 4
    gpu_memory_utilization: 0.5
    response_length: ${data.max_response_length}
  teacher: {server_ip: localhost, server_port: 15555}
trainer: {total_training_steps: 200, save_freq: -1, scheduler: one_step_off}
"""
VERL_MAIN = """
distillation:
  enabled: true
  n_gpus_per_node: 4
  teacher_models: {teacher_model: {model_path: Qwen/Qwen3-32B, inference: {tensor_model_parallel_size: 2}}}
  distillation_loss: {loss_mode: k1, topk: 64, use_task_rewards: false, loss_max_clamp: 10.0}
actor_rollout_ref: {actor: {ppo_mini_batch_size: 128, fsdp_config: {param_offload: true}}}
"""
TRL = """
model_name_or_path: models/student
teacher_model_name_or_path: models/teacher
dataset_name: someone/chats
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
learning_rate: 2.0e-05
lmbda: 0.7
beta: 1.0
temperature: 0.9
max_new_tokens: 128
seq_kd: true
lr_scheduler_kwargs: {min_lr: 2.0e-06}
push_to_hub: true
"""
ROLL = """
hydra: {run: {dir: .}}
rollout_batch_size: 64
response_length: 3072
num_return_sequences_in_group: 2
student_train:
  training_args: {learning_rate: 5.0e-7, per_device_train_batch_size: 4}
  data_args: {file_name: [data/a.jsonl]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {pipeline_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
student_infer: {generating_args: {max_new_tokens: "${response_length}", top_p: 0.99}}
teacher:
  model_args: {model_name_or_path: models/teacher}
  strategy_args: {strategy_config: {tensor_model_parallel_size: 2}}
"""
MS_SWIFT = """
rlhf_type: gkd
model: models/student
teacher_model: models/teacher
gkd_logits_topk: 64
dataset: someone/chats#2000
global_batch_size: 16
lr: 1e-6
temperature: 1.0
max_completion_length: 8192
train: {gpus: 4, tuner_type: lora, tensor_model_parallel_size: 2}
rollout: {gpus: 4, vllm_tensor_parallel_size: 2}
"""
NEMO_RL = """
distillation: {num_prompts_per_step: 128, topk_logits_k: 64, max_num_steps: 1000}
loss_fn: {kl_type: mixed, zero_outside_topk: false}
policy: &BASE
  model_name: Qwen/Qwen3-1.7B-Base
  train_global_batch_size: 64
  max_total_sequence_length: 8192
  make_sequence_length_divisible_by: ${mul:${.dtensor_cfg.tensor_parallel_size}, 2}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, context_parallel_size: 2}
  optimizer: {kwargs: {lr: 2.0e-5}}
  generation: {temperature: 1.0, max_new_tokens: "${..max_total_sequence_length}"}
teacher: {<<: *BASE, model_name: Qwen/Qwen3-4B}
cluster: {gpus_per_node: 8}
"""
FILES = {
    "verl": (VERL, {
        "data.train_batch_size": "trainer.global_batch_size", "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "actor.tp",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tp",
        "actor_rollout_ref.actor.optim.lr": "actor.optim.lr",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "actor.optim.warmup_steps",
        "actor_rollout_ref.actor.optim.min_lr": "actor.optim.min_lr_ratio",
        "actor_rollout_ref.rollout.top_k": "rollout.top_k", "actor_rollout_ref.teacher.server_ip": "teacher.server_ip",
        "trainer.total_training_steps": "trainer.total_steps",
    }),
    "verl's main_ppo": (VERL_MAIN, {
        "distillation.distillation_loss.loss_mode": "distill.loss",
        "distillation.distillation_loss.topk": "teacher.topk",
        "distillation.distillation_loss.loss_max_clamp": "distill.token_clip",
        "distillation.teacher_models.teacher_model.model_path": "teacher.routes",
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size": "teacher.routes",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.global_batch_size",
    }),
    "TRL": (TRL, {
        "model_name_or_path": "model.path", "teacher_model_name_or_path": "teacher.path",
        "dataset_name": "data.train_files", "per_device_train_batch_size": "trainer.global_batch_size",
        "learning_rate": "actor.optim.lr", "lmbda": "distill.on_policy_share", "beta": "distill.loss",
        "temperature": "rollout.temperature", "max_new_tokens": "data.max_response_length", "seq_kd": "",
        "lr_scheduler_kwargs.min_lr": "actor.optim.min_lr_ratio",
    }),
    "ROLL": (ROLL, {
        "rollout_batch_size": "trainer.global_batch_size", "response_length": "data.max_response_length",
        "num_return_sequences_in_group": "rollout.n", "student_train.training_args.learning_rate": "actor.optim.lr",
        "student_train.data_args.file_name": "data.train_files",
        "student_train.strategy_args.strategy_config.pipeline_model_parallel_size": "actor.pp",
        "student_train.device_mapping": "trainer.n_gpus_per_node",
        "student_infer.generating_args.top_p": "rollout.top_p",
        "teacher.model_args.model_name_or_path": "teacher.path",
    }),
    "ms-swift": (MS_SWIFT, {
        "rlhf_type": "distill.loss", "model": "model.path", "teacher_model": "teacher.path",
        "gkd_logits_topk": "teacher.topk", "dataset": "data.train_files",
        "global_batch_size": "trainer.global_batch_size", "lr": "actor.optim.lr", "temperature": "teacher.temperature",
        "train.gpus": "trainer.n_gpus_per_node", "train.tensor_model_parallel_size": "actor.tp",
        "rollout.gpus": "rollout.n_gpus_per_node", "rollout.vllm_tensor_parallel_size": "rollout.tp",
    }),
    "NeMo-RL": (NEMO_RL, {
        "distillation.topk_logits_k": "teacher.topk", "loss_fn.kl_type": "distill.loss",
        "loss_fn.zero_outside_topk": "",
        "policy.model_name": "model.path", "policy.train_global_batch_size": "trainer.global_batch_size",
        "policy.dtensor_cfg.context_parallel_size": "actor.cp", "policy.optimizer.kwargs.lr": "actor.optim.lr",
        "policy.generation.temperature": "teacher.temperature", "teacher.model_name": "teacher.path",
        "cluster.gpus_per_node": "trainer.n_gpus_per_node",
    }),
}  # fmt: skip


@pytest.mark.parametrize(("text", "answers"), FILES.values(), ids=FILES)
def test_one_error_translates_a_file_of_another_system(text: str, answers: dict[str, str], tmp_path: Path) -> None:
    """Fails if a user has to start a run for each key of an old file, or is sent to a key of another meaning."""
    (tmp_path / "old.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "old.yaml")
    errors = {error.key: error for error in (caught.value, *caught.value.more)}
    found = {key: errors[key].fix.split(". ")[0].strip(".?").split() for key in answers}
    assert {key: words if not answers[key] else answers[key] in words for key, words in found.items()} == {
        key: ["remove", "it"] if not wanted else True for key, wanted in answers.items()
    }


def test_keys_that_nothing_is_known_of_share_a_line(tmp_path: Path) -> None:
    """Fails if the hundred other settings of an old file bury its translation, or one of them is left out."""
    (tmp_path / "old.yaml").write_text("hydra: {run: {dir: .}}\nlmbda: 0.5\nray_init: {num_cpus: 8}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "old.yaml")
    values = [error.value for error in (caught.value, *caught.value.more)]
    assert values[:2] == [0.5, ["hydra.run.dir", "ray_init.num_cpus"]]


def test_what_belongs_to_another_model_is_not_taken_for_the_student() -> None:
    """Fails if the optimizer or the sizes of a teacher or a critic become those of the student."""
    for key in ("teacher.optimizer.kwargs.lr", "critic.optim.lr", "teacher.strategy_args.tensor_model_parallel_size"):
        assert not suggestion(key), key


def test_the_table_leads_to_keys_that_exist() -> None:
    """Fails if a renamed key leaves a row behind that leads nowhere, or a row hides a key or another row."""
    page = (ROOT / "docs/coming_from.md").read_text()
    names = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert 100 < len(names) <= 150 and len(set(names)) == len(names) and all(map(old_answer, names))
    assert {key for keys, _ in old_names().values() for key in keys} <= all_keys().keys()
    assert not old_names().keys() & all_keys().keys()
    words = {word.strip(".,:") for _, change in old_names().values() for word in change.split()}
    named = {word for word in words if "." in word and word.partition(".")[0] in sections()}
    assert named <= {*all_keys(), *sections()}
    assert len(page.split()) <= 2500
    assert (ROOT / "gkd/config/coming_from.md").readlink() == Path("../../docs/coming_from.md")


def misspelled(key: str) -> list[str]:
    """Return a key with the last word misspelled: a letter missing, a letter doubled, two letters swapped."""
    section, _, word = key.rpartition(".")
    i = len(word) // 2
    swapped = word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :]
    return [f"{section}.{each}" for each in (word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:], swapped)]


def test_typing_errors_are_corrected() -> None:
    """Fails if one or two wrong letters in a key are no longer recognized."""
    for key in all_keys():
        if len(key.rpartition(".")[2]) > 5:
            for wrong in misspelled(key):
                assert wrong in all_keys() or key in nearest_keys(wrong), (key, wrong)
    assert nearest_keys("trianer.total_steps") == ["trainer.total_steps"]
    assert nearest_keys("actor.lora_rank") == ["actor.lora.rank"]
    assert not nearest_keys("trainer.test_freq") and not nearest_keys("hydra.run.path")


SLIME = """--use-opd --opd-type sglang --rm-url http://10.0.0.7:13141/generate --hf-checkpoint models/student --lr 1e-6
--rollout-batch-size 32 --n-samples-per-prompt 4 --tensor-model-parallel-size 2 --balance-data"""


def test_all_flags_of_another_system_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the flags of slime end in "unrecognized arguments", or are answered one at a time."""
    with pytest.raises(SystemExit) as caught:
        main(["--config", "x.yaml", *SLIME.split()])
    answers = capsys.readouterr().err.rpartition("error: ")[2].splitlines()
    found = {line.partition(": ")[0]: line.partition(": ")[2] for line in answers}
    assert caught.value.code == 2 and list(found) == [word for word in SLIME.split() if word.startswith("--")]
    for flag, key in (("--use-opd", "distill.loss"), ("--lr", "actor.optim.lr"), ("--hf-checkpoint", "model.path")):
        assert key in found[flag].split(". ")[0]


def test_a_setting_that_is_written_as_a_flag_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if --actor.tp=2 is refused without the way in which settings are written."""
    with pytest.raises(SystemExit) as caught:
        main(["--config", "x.yaml", "--actor.tp=2"])
    answer = capsys.readouterr().err.rpartition("error: ")[2].partition(": ")[2]
    assert caught.value.code == 2 and "actor.tp=2" in answer
