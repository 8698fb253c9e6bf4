"""The tables of other systems' settings, the hints for their names, and the pages that list them."""

from __future__ import annotations

import argparse
import difflib
import re

import numpy as np
import pytest
import torch

from gkd.config.foreign_keys import flag_suggestion, nearest_keys, suggestion
from gkd.config.key_list import all_keys, sections
from gkd.config.load import load_config, parse_overrides
from gkd.config.loss_spec import loss_spec
from gkd.config.old_names.row import OldSettings, Row, Table, plain
from gkd.config.old_names.systems import SYSTEMS, old_rows
from gkd.errors import ConfigError
from gkd.loss.divergence import DIVERGENCES
from gkd.main_gkd import main
from gkd.tools.migrate.page import page_path, with_tables
from tests.structure import ROOT

OWN_WORDS = {word for name in all_keys() for word in name.split(".")}
NAMES = [(table, row, name) for table in SYSTEMS.values() for row in table.rows for name in row.names]
PLAIN_NAMES = [(table, row, plain(name)) for table, row, name in NAMES if "*" not in name]


def named_keys(text: str) -> set[str]:
    """Return the words of a text that look like keys of this system."""
    words = {word.strip(".,;:()").removesuffix("'s") for word in re.split(r"[\s=/]+", text)}
    return {word for word in words if word.partition(".")[0] in sections() and "." in word}


@pytest.mark.parametrize("table", SYSTEMS.values(), ids=SYSTEMS)
def test_every_key_that_a_table_names_exists(table: Table) -> None:
    """Fails if a renamed key leaves a row or a remark behind that leads nowhere."""
    assert len(table.rows) > 70
    assert {key for row in table.rows for key in row.keys} <= all_keys().keys()
    old = {plain(name) for row in table.rows for name in row.names}
    assert {word for row in table.rows for word in named_keys(row.note)} <= {*all_keys(), *sections(), *old}
    assert all(row.new or row.note for row in table.rows)


def test_every_name_is_listed_once_and_found() -> None:
    """Fails if a row is hidden by an earlier one with the same name, or by a pattern."""
    for table, row, name in NAMES:
        if "*" not in name:
            assert table.find(name) is row, (table.name, name)
            assert table.find(f"--{plain(name).replace('_', '-')}") is row, (table.name, name)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("actor_rollout_ref.model.path", "model.path"),
        ("actor_rollout_ref.teacher.n_server_workers", "teacher.n_server_workers"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "actor.pp"),
        ("data.train_batch_size", "trainer.global_batch_size"),
        ("trainer.test_freq", "eval.every"),
        ("trainer.save_freq", "trainer.save_every"),
        ("rollout.tensor_model_parallel_size", "rollout.tp"),
        ("actor.tensor_model_parallel_size", "actor.tp"),
        ("actor.param_offload", "actor.offload_train"),
        ("lmbda", "distill.on_policy_share"),
        ("distill.lmbda", "distill.on_policy_share"),
        ("beta", "distill.beta"),
        ("temperature", "rollout.temperature"),
        ("max_new_tokens", "data.max_response_length"),
        ("per_device_train_batch_size", "trainer.global_batch_size"),
        ("rollout_num_gpus_per_engine", "rollout.tp"),
        ("n_samples_per_prompt", "rollout.n"),
        ("actor_train.training_args.learning_rate", "actor.optim.lr"),
        ("teacher.model", "teacher.path"),
        ("logits_topk", "teacher.topk"),
    ],
)
def test_an_old_name_gets_the_key_that_means_the_same(key: str, expected: str) -> None:
    """Fails if a user of another system is sent to a key of another meaning."""
    rows = [row for _, row in old_rows(key, OWN_WORDS)]
    assert rows and all(expected in row.keys for row in rows)
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{key}=1"])
    assert caught.value.key == key and expected in named_keys(caught.value.fix)


@pytest.mark.parametrize(
    "key", ["rollout.name", "actor.context_parallel_size", "algorithm.adv_estimator", "offload_nccl"]
)
def test_what_has_no_counterpart_gets_a_reason(key: str) -> None:
    """Fails if a setting that does not exist here is answered with a key of a similar name."""
    rows = [row for _, row in old_rows(key, OWN_WORDS)]
    assert rows and not any(row.new for row in rows)
    assert all(row.note in suggestion(key) for row in rows)


def test_every_old_name_is_answered_by_its_own_row() -> None:
    """Fails if a listed name is answered by the row of another setting."""
    for table, row, name in PLAIN_NAMES:
        if name == "cp":  # Hydra's -cp; without the dash it is context parallelism
            continue
        found = [other for title, other in old_rows(name, OWN_WORDS) if title == table.title]
        assert row in found or any(set(other.keys) >= set(row.keys) > set() for other in found), (table.name, name)


# Names of other systems that are misspelled ones here, with the same meaning.
ALIKE = {
    ("actor.lora._target_", "actor.lora.targets"),
    ("actor.optim.beta", "actor.optim.betas"),
    ("actor.optim.min_lr_rate", "actor.optim.min_lr_ratio"),
    ("actor.optim.scheduler", "actor.optim.schedule"),
    ("distill.betas", "distill.beta"),
    ("teacher.top_k", "teacher.topk"),
}


def test_no_old_name_looks_like_a_misspelled_key() -> None:
    """Fails if an old name in one of our sections gets a suggestion only because its letters are similar."""
    found = set()
    own = {name.rpartition(".")[2] for name in all_keys()}
    for last in {name.rpartition(".")[2] for _, _, name in PLAIN_NAMES}:
        if not difflib.get_close_matches(last, own, n=1, cutoff=0.66):
            continue
        for key in {f"{section}.{last}" for section in sections()} - all_keys().keys():
            if not old_rows(key, OWN_WORDS):
                found |= {(key, near) for near in nearest_keys(key) if not near.endswith(f".{last}")}
    assert found == ALIKE


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
    assert not nearest_keys("trainer.test_freq")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--config-path=configs", "--config-name=x", "trainer.total_steps=1"], "--config"),
        (["--config-name", "x"], "--config"),
        (["--config", "x.yaml", "--tensor-model-parallel-size", "2"], "actor.tp"),
        (["--config", "x.yaml", "--lmbda", "0.5"], "distill.on_policy_share"),
        (["--config", "x.yaml", "--actor.tp=2"], "actor.tp=2"),
    ],
)
def test_flags_of_other_systems_are_answered(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if Hydra's flags, or those of TRL and slime, end in "unrecognized arguments" without a way on."""
    with pytest.raises(SystemExit) as caught:
        main(flags)
    answer = capsys.readouterr().err.rpartition("error: ")[2].partition(": ")[2]
    assert caught.value.code == 2 and named in answer


def test_the_command_line_of_this_system_is_still_read() -> None:
    """Fails if the check for foreign flags refuses our own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("overrides", nargs="*")
    args = parse_overrides(parser, ["--config", "x.yaml", "trainer.run_dir=train.py", "rollout.n=2"])
    assert (args.config, args.overrides) == ("x.yaml", ["trainer.run_dir=train.py", "rollout.n=2"])
    assert flag_suggestion("--foo") == flag_suggestion("rollout.n=2") == ""


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_trl_s_beta_keeps_its_loss(beta: float) -> None:
    """Fails if beta is turned around: 0 must be KL(teacher || student) and 1 KL(student || teacher)."""
    generator = np.random.default_rng(0)
    p, q = (generator.dirichlet(np.ones(7), size=5) for _ in range(2))
    m = beta * p + (1 - beta) * q
    forward, reverse = np.sum(p * np.log(p / q), -1), np.sum(q * np.log(q / p), -1)
    mixed = beta * np.sum(p * np.log(p / m), -1) + (1 - beta) * np.sum(q * np.log(q / m), -1)
    expected = {0.0: forward, 1.0: reverse}.get(beta, mixed)
    row = SYSTEMS["trl"].find("beta")
    assert isinstance(row, Row)
    settings = row.convert(beta, OldSettings({}, SYSTEMS["trl"]))
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    (term,) = loss_spec(config.distill, 1.0).terms
    found = DIVERGENCES[term.name](torch.tensor(np.log(q)), torch.tensor(np.log(p)), term)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("table", SYSTEMS.values(), ids=SYSTEMS)
def test_the_pages_list_their_tables(table: Table) -> None:
    """Fails if a page differs from its table: run python -m gkd.tools.migrate.page."""
    page = (ROOT / page_path(table)).read_text()
    assert page == with_tables(page, table)
    assert page.count("\n| `") >= len(table.rows)
