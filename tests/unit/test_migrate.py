"""The tool that writes our YAML from settings of other systems: forms of input, values, report, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gkd.config.dialects.table import dialects
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.tools.migrate.__main__ import main, migrate
from gkd.tools.migrate.convert import Entry, convert, settings_of
from gkd.tools.migrate.read import read_file
from gkd.tools.migrate.read import settings_of as read_words
from tests.refusals import refuses
from tests.unit.migrate_examples import EXAMPLES, FLAGS, TRL_YAML, VERL_SCRIPT

# What the checks still refuse: TRL's data set is on a hub; slime's 16 engines need a second node.
MISSING = {"trl_gkd": ["data.train_files"], "slime": ["rollout.nnodes"]}


def value_of(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def entries_of(system: str, *words: str) -> dict[str, Entry]:
    """Return the entries of flags by the old names."""
    dialect = dialects()[system]
    return {entry.old: entry for entry in convert(dialect, read_words(words).of(dialect))}


@pytest.mark.parametrize("system", EXAMPLES)
def test_a_whole_configuration_is_converted(system: str, tmp_path: Path) -> None:
    """Fails if a real-looking file of a system gives other values than its run had, or hides what is missing."""
    name, text, expected, code = EXAMPLES[system]
    old, new = tmp_path / name, tmp_path / "mine.yaml"
    old.write_text(text)
    assert main([str(old), "--output", str(new), "--", *FLAGS.get(system, [])]) == code
    written = new.read_text()
    assert f"by python -m gkd.tools.migrate {system}\n" in written.splitlines(keepends=True)[0]
    comments = written.partition("\n\n")[0].partition("# next:\n")[2]
    assert re.findall(r"^#   (\S+) = ", comments, re.MULTILINE) == MISSING.get(system, [])
    config = load_config(new, [])
    assert {key: value_of(config, key) for key in expected} == expected


def test_each_old_key_has_a_line(tmp_path: Path) -> None:
    """Fails if a key of the old file is lost without a word, or a defaults line is missing."""
    file = tmp_path / "run.sh"
    file.write_text(VERL_SCRIPT)
    dialect = dialects()["verl_gkd"]
    values = read_file(file, {}).of(dialect)
    assert len(values) > 25 and values["trainer.scheduler"] == "two_step_off"
    entries = {entry.old: entry for entry in convert(dialect, values)}
    assert values.keys() <= entries.keys()
    text, *_ = migrate("verl_gkd", file)
    assert all(f"{name} = " in text for name in values)
    assert entries["trainer.own_key"].status == "not recognized"
    assert entries["actor_rollout_ref.actor.megatron.context_parallel_size"].settings == {"actor.cp": 2}
    assert entries["actor_rollout_ref.rollout.name"].status == "not supported"
    assert entries["--config-name"].status == "meaningless"
    assert entries["trainer.save_freq"].settings == {"trainer.save_every": 0}
    assert entries["actor_rollout_ref.actor.use_dynamic_bsz"].status == "default"
    assert not entries["trainer.total_epochs"].is_set and entries["trainer.total_epochs"].settings


@pytest.mark.parametrize(
    ("system", "words", "key", "expected"),
    [
        ("verl_gkd", "actor_rollout_ref.actor.distill_loss.name=rkl", "distill.tail", "renorm"),
        ("verl_gkd", "actor_rollout_ref.actor.megatron.grad_offload=True", "actor.offload_train", True),
        ("verl_gkd", "actor_rollout_ref.actor.ppo_mini_batch_size=128 data.train_batch_size=32",
         "trainer.global_batch_size", 32),
        ("verl_gkd", "actor_rollout_ref.model.lora_rank=8", "actor.lora.rank", 8),
        ("verl_gkd", "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=4", "actor.lora.alpha", 4),
        ("verl_gkd", "actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.model.lora_alpha=4", "actor.lora.alpha",
         None),
        ("verl_gkd", "trainer.resume_mode=resume_path trainer.resume_from_path=runs/a/step_3", "trainer.resume",
         "runs/a/step_3"),
        ("verl_gkd", "trainer.profile_steps=[1,5]", "trainer.profile_steps", ["1", "5"]),
        ("verl_gkd", "trainer.profile_steps=[1,5] actor_rollout_ref.actor.profiler.enable=False",
         "trainer.profile_steps", None),
        ("verl_gkd", "actor_rollout_ref.rollout.val_kwargs.n=4", "eval.n", 4),
        ("trl_gkd", '--lr_scheduler_kwargs {"min_lr_rate":0.1}', "actor.optim.min_lr_ratio", 0.1),
        ("trl_gkd", "--beta 0", "distill.loss", None),  # the default here is forward_kl
        ("trl_gkd", "--beta 0.1", "distill.beta", 0.1),
        ("trl_gkd", "--temperature 1.5", "rollout.temperature", 1.5),
        ("trl_gkd", "--temperature 1.5", "teacher.temperature", None),
        ("trl_gkd", "--no_gradient_checkpointing", "actor.recompute", None),
        ("trl_gkd", "--eval_strategy steps --eval_steps 20", "eval.every", 20),
        ("trl_gkd", "--num_processes 16 --num_machines 2", "trainer.n_gpus_per_node", 8),
        ("slime", "--use-opd --opd-kl-coef 0.5", "distill.losses", [{"name": "k1", "weight": 0.5}]),
        ("slime", "--use-opd --opd-type megatron --opd-teacher-load t", "teacher.backend", "local"),
        ("slime", "--colocate --actor-num-gpus-per-node 4", "rollout.n_gpus_per_node", 4),
        ("slime", "--rollout-batch-size 8 --n-samples-per-prompt 4 --num-steps-per-rollout 2",
         "trainer.global_batch_size", 4),
        ("slime", "--max-tokens-per-gpu 4096 --use-dynamic-batch-size --context-parallel-size 2",
         "actor.max_tokens_per_micro_batch", 8192),
        ("verl_gkd", "actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.max_token_len=4096 "
         "actor_rollout_ref.actor.megatron.context_parallel_size=2", "actor.max_tokens_per_micro_batch", 8192),
        ("slime", "--update-weight-buffer-size 1073741824", "weight_sync.bucket_mib", 1024),
        ("slime", "--lr 1e-6", "distill.normalize", "sequence"),
        ("verl_gkd", "+data.apply_chat_template_kwargs.enable_thinking=false", "data.chat_template_kwargs",
         {"enable_thinking": False}),
        ("slime", "--calculate-per-token-loss", "distill.normalize", None),
        ("slime", "--label-key label", "data.answer_key", "label"),
        ("slime", "--min-lr 1e-7 --lr 1e-6", "actor.optim.min_lr_ratio", 0.1),
        ("roll", "distill_loss_weight=0.85 kd_objective=reverse_kl student_pretrain=m", "distill.losses",
         [{"name": "reverse_kl", "weight": 0.85}, {"name": "sft", "weight": 0.15}]),
        ("roll", "distill_loss_weight=1.0 kd_objective=skewed_forward_kl skew_lambda=0.3", "distill.alpha", 0.3),
        ("roll", "student_pretrain=m", "distill.on_policy_share", 0.0),
        ("roll", "student_infer.device_mapping=[0,1] student_train.device_mapping=[2,3] "
         "teacher.device_mapping=[4] teacher.model_args.model_name_or_path=t", "teacher.backend", None),
        ("roll", "student_infer.infer_batch_size=1", "distill.normalize", "sequence"),
        ("roll", "student_infer.infer_batch_size=1 loss_agg_mode=token-mean", "distill.normalize", None),
        ("roll", "student_pretrain=m", "distill.normalize", None),
        ("roll", "student_infer.infer_batch_size=1", "rollout.top_k", 50),  # the default of ROLL's GeneratingArguments
        ("roll", "async_generation_ratio=1.5", "trainer.max_staleness", 2),
        ("roll", "student.training_args.warmup_ratio=0.1 max_steps=200 student_pretrain=m",
         "actor.optim.warmup_steps", 20),
        ("roll", "sequence_length=4096 prompt_length=1024 student_infer.infer_batch_size=1", "data.max_response_length",
         3072),
    ],
)  # fmt: skip
def test_values_are_converted(system: str, words: str, key: str, expected: object) -> None:
    """Fails if a value changes its meaning on the way; None: the key is left at its default."""
    settings = settings_of(list(entries_of(system, *words.split()).values()))
    found = settings.get(key)
    assert found == pytest.approx(expected) if isinstance(expected, float) else found == expected


@pytest.mark.parametrize(
    ("system", "words", "name"),
    [
        ("verl_gkd", "trainer.total_epochs=$EPOCHS", "trainer.total_epochs"),
        ("nemo_rl", "data.train.system_prompt_file=none.txt", "data.train.system_prompt_file"),
        ("verl_gkd", "data.max_prompt_length=long", "data.max_prompt_length"),
        ("verl_gkd", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
         "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"),
        ("verl_gkd", "actor_rollout_ref.actor.distill_loss.name=jsd", "actor_rollout_ref.actor.distill_loss.name"),
        ("verl_gkd", "actor_rollout_ref.actor.distill_loss.name=kl_rkl", "actor_rollout_ref.actor.distill_loss.name"),
        ("verl_main", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
         "actor_rollout_ref.actor.loss_agg_mode"),
        ("trl_gkd", "--learning_rate 1e-5", "num_processes"),
        ("trl_gkd", "--lr_scheduler_type polynomial", "--lr_scheduler_type"),
        ("trl_gkd", "--save_strategy epoch", "--save_strategy"),
        ("slime", "--rollout-batch-size 3 --n-samples-per-prompt 2 --global-batch-size 5", "--global-batch-size"),
        ("roll", "kd_objective=adaptive_kl student_pretrain=m", "kd_objective"),
        ("roll", "teacher_temperature=2.0", "teacher_temperature"),
        ("roll", "student_train.device_mapping=[0,1] student_infer.device_mapping=[1,2]",
         "student_infer.device_mapping"),
        ("roll", "student_train.device_mapping=gpus()", "student_train.device_mapping"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_converted_are_left_to_the_user(system: str, words: str, name: str) -> None:
    """Fails if a value is guessed, or ends in a traceback."""
    entry = entries_of(system, *words.split())[name]
    assert entry.status == "to set" and entry.note and not entry.settings


def test_a_default_of_a_value_that_is_unknown_is_left_to_the_user() -> None:
    """Fails if runs of a script that names them by its date share the folder `checkpoints/verl/run-$(now)`."""
    entries = entries_of("verl_gkd", "trainer.project_name=verl", "trainer.experiment_name=run-$(now)")
    assert entries["trainer.default_local_dir"].status == "to set"
    assert "trainer.run_dir" not in settings_of(list(entries.values()))


def test_a_file_with_a_system_prompt_becomes_the_system_prompt(tmp_path: Path) -> None:
    """Fails if the prompt loses a line, or the file of all datasets wins over that of the training data."""
    text = 'Think: "step by step".\n\nThen answer.\n'
    (tmp_path / "own.txt").write_text(text)
    files = (f"data.default.system_prompt_file={tmp_path}/none", f"data.train.system_prompt_file={tmp_path}/own.txt")
    assert settings_of(list(entries_of("nemo_rl", *files).values()))["data.system_prompt"] == text


def test_two_values_for_one_key_are_reported() -> None:
    """Fails if the later of two old keys silently wins over the first."""
    entries = entries_of("trl_gkd", "--dtype", "float32", "--bf16")
    assert entries["--dtype"].settings == {"model.dtype": "float32"}
    assert entries["--bf16"].status == "to set" and not entries["--bf16"].settings
    entries = entries_of("trl_gkd", "--bf16", "--dtype", "float32")
    assert entries["--bf16"].status == "default" and entries["--dtype"].status == "to set", "a default was given, too"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.yaml", None),
        ("list.yaml", b"- 1\n- 2\n"),
        ("broken.yaml", b"a: [1\n"),
        ("empty.yaml", b""),
        ("binary.sh", b"\xff\xfe\x00"),
        ("quotes.sh", b"python3 train.py --lr 'unclosed\n"),
        ("none.sh", b"echo hello\n"),
    ],
)
def test_unreadable_input_is_a_typed_error(name: str, content: bytes | None, tmp_path: Path) -> None:
    """Fails if bad input ends in a traceback, or an empty YAML is written."""
    file, output = tmp_path / name, tmp_path / "out.yaml"
    if content is not None:
        file.write_bytes(content)
    with refuses("FILE", str(file)):
        migrate("verl_gkd", file)
    assert main(["verl", str(file), "--output", str(output)]) == 2 and not output.exists()


def test_an_unknown_system_or_no_input_is_a_typed_error() -> None:
    """Fails if the tool guesses the system, or writes a YAML from nothing."""
    with refuses("SYSTEM"):
        migrate("other", None, ["--lr", "1"])
    with refuses("FILE"):
        migrate("trl", None)
    assert main(["no_file_and_no_system"]) == 2


def test_old_flags_without_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if old flags in the place of options are refused without a hint to where they belong."""
    with pytest.raises(SystemExit) as caught:
        main(["slime", "--lr", "3e-6", "--num-rollout", "7"])
    assert caught.value.code == 2 and "--lr" in (error := capsys.readouterr().err) and " after --" in error


def test_an_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    """Fails if the tool overwrites someone's settings."""
    output = tmp_path / "mine.yaml"
    output.write_text("mine")
    assert main(["slime", "--output", str(output), "--", "--lr", "3e-6"]) == 2
    assert output.read_text() == "mine"
    assert main(["slime", "--output", str(output), "--force", "--", "--lr", "3e-6", "--use-opd"]) == 0
    assert load_config(output).actor.optim.lr == 3e-6


def test_flags_override_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if flags after -- are ignored, or the YAML on stdout cannot be loaded."""
    old, new = tmp_path / "gkd.yaml", tmp_path / "new.yaml"
    old.write_text(TRL_YAML)
    assert main(["trl", str(old), "--", "--lmbda=0.25", "--unknown_flag", "--num_processes=1"]) == 0
    new.write_text(capsys.readouterr().out)
    assert load_config(new).distill.on_policy_share == 0.25


@pytest.mark.parametrize(
    ("system", "words", "decides"),
    [
        ("verl_gkd", "distillation.distillation_loss.loss_mode=k1 data.train_batch_size=8", True),
        ("verl_gkd", "distillation.teacher_models.math.model_path=m data.train_batch_size=8", True),
        ("trl_gkd", "--reverse_kl_top_1_mode argmax --beta 0.5", True),
        ("roll", "domain_new_shares=0.5 pretrain=m", True),
        ("roll", "opsd_mode=true pretrain=m", True),
        ("verl_gkd", "--COMMON[@] data.train_batch_size=8", True),
        ("verl_gkd", "trainer.own_key=1 data.train_batch_size=8", False),
        ("slime", "--own-log-level 3 --lr 1e-6 --use-opd", False),
    ],
)
def test_a_key_that_decides_what_is_trained_must_be_understood(
    system: str, words: str, decides: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a loss, teacher or data of a newer version of a system is lost, and the settings are called accepted."""
    new = tmp_path / "mine.yaml"
    assert main([system, "--output", str(new), "--", *words.split()]) == (3 if decides else 0)
    name = words.split()[0].partition("=")[0]
    errors = capsys.readouterr().err
    assert new.exists() and (name in errors.splitlines()[0]) == decides
    assert (name in new.read_text().partition("# next:\n")[2]) == decides
