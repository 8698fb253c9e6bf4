"""The tables of other systems' settings, the hints for their names, and the pages that list them."""

from __future__ import annotations

import argparse
import difflib
import re

import numpy as np
import pytest
import torch

from gkd.config.dialects.table import Dialect, OldSettings, Row, compiled, dialects, files, plain
from gkd.config.foreign_keys import flag_suggestion, nearest_keys, old_rows, suggestion
from gkd.config.load import load_config, parse_overrides
from gkd.config.loss_spec import loss_spec
from gkd.config.schema_sections import all_keys, sections
from gkd.errors import ConfigError
from gkd.loss.divergence import DIVERGENCES
from gkd.main_gkd import main
from tests.pages import tables, with_tables
from tests.structure import ROOT

OWN_WORDS = {word for name in all_keys() for word in name.split(".")}
PLAIN_NAMES = [
    (each, row, plain(n)) for each in files().values() for row in each.own for n in row.names if "*" not in n
]


def named_keys(text: str) -> set[str]:
    """Return the words of a text that look like keys of this system."""
    words = {word.strip(".,;:()").removesuffix("'s") for word in re.split(r"[\s=/]+", text)}
    return {word for word in words if word.partition(".")[0] in sections() and "." in word}


@pytest.mark.parametrize("file", files().values(), ids=files())
def test_every_key_that_a_file_names_exists(file: Dialect) -> None:
    """Fails if a renamed key leaves a row or a remark behind that leads nowhere."""
    assert {key for row in file.own for key in row.keys} <= all_keys().keys()
    old = {plain(name) for each in files().values() for row in each.own for name in row.names}
    named = {word for row in file.own for word in named_keys(f"{row.note} {row.otherwise}")}
    assert named <= {*all_keys(), *sections(), *old}
    assert all(row.keys if row.kind == "mapped" else row.note for row in file.own)


@pytest.mark.parametrize("file", files().values(), ids=files())
def test_every_row_can_be_evaluated(file: Dialect) -> None:
    """Fails if an expression is not Python, a field has no effect, or a table of values has no answer for others."""
    for row in file.own:
        results = [each[2:] for each in row.set.values() if isinstance(each, str) and each.startswith("= ")]
        for text in (row.when, row.value, *row.refuse, *results, *filter(None, [row.servers])):
            compiled(text)
        has_value = row.value != "value"
        assert not (has_value and (row.set or row.choices is not None)), row.names
        assert row.choices is None or row.otherwise or {"true", "false"} <= row.choices.keys(), row.names
        assert row.kind in ("refused", "unsupported") or not row.harmless, row.names


@pytest.mark.parametrize("dialect", dialects().values(), ids=dialects())
def test_every_name_is_listed_once_and_found(dialect: Dialect) -> None:
    """Fails if a row is hidden by an earlier one with the same name, or by a pattern."""
    assert len(dialect.rows) > 60
    listed = [plain(name) for row in dialect.rows for name in row.names]
    assert len(listed) == len(set(listed)), {name for name in listed if listed.count(name) > 1}
    for row in dialect.rows:
        for name in row.names:
            if "*" not in name:
                assert dialect.find(name) is row, name
                assert dialect.find(f"--{plain(name).replace('_', '-')}") is row, name


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("actor_rollout_ref.model.path", "model.path"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "actor.pp"),
        ("data.train_batch_size", "trainer.global_batch_size"),
        ("rollout.tensor_model_parallel_size", "rollout.tp"),
        ("actor.param_offload", "actor.offload_train"),
        ("distill.lmbda", "distill.on_policy_share"),
        ("temperature", "rollout.temperature"),
        ("n_samples_per_prompt", "rollout.n"),
        ("teacher.model", "teacher.path"),
        ("logits_topk", "teacher.topk"),
    ],
)
def test_an_old_name_gets_the_key_that_means_the_same(key: str, expected: str) -> None:
    """Fails if a user of another system is sent to a key of another meaning."""
    rows = [row for _, row in old_rows(key, OWN_WORDS)]
    assert any(expected in row.keys for row in rows)
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{key}=1"])
    assert caught.value.key == key and expected in named_keys(caught.value.fix)


@pytest.mark.parametrize("key", ["rollout.name", "etp", "algorithm.adv_estimator", "offload_nccl"])
def test_what_has_no_counterpart_gets_a_reason(key: str) -> None:
    """Fails if a setting that does not exist here is answered with a key of a similar name."""
    rows = [row for _, row in old_rows(key, OWN_WORDS)]
    assert rows and not any(row.keys for row in rows)
    assert all(row.note in suggestion(key) for row in rows)


def test_every_old_name_is_answered_by_its_own_row() -> None:
    """Fails if a listed name is answered by the row of another setting."""
    for file, row, name in PLAIN_NAMES:
        if files()["common"].find(name):  # people write it here: cp is context parallelism, and not Hydra's -cp
            continue
        answers = old_rows(name, OWN_WORDS)
        found = [other for title, other in answers if title == file.title]
        keys = {key for _, other in answers for key in other.keys}
        is_answered = any(set(other.keys) >= set(row.keys) > set() for other in found) or not row.keys and keys
        assert row in found or is_answered, (file.name, name)


# Names of other systems that are misspelled ones here, with the same meaning.
ALIKE = {
    ("actor.optim.beta", "actor.optim.betas"),
    ("actor.optim.min_lr_rate", "actor.optim.min_lr_ratio"),
    ("actor.optim.scheduler", "actor.optim.schedule"),
    ("distill.betas", "distill.beta"),
    ("rollout.topk", "rollout.top_k"),
    ("teacher.top_k", "teacher.topk"),
    ("rollout.gpus_per_node", "rollout.n_gpus_per_node"),
    ("trainer.gpus_per_node", "trainer.n_gpus_per_node"),
}


def test_no_old_name_looks_like_a_misspelled_key() -> None:
    """Fails if an old name in one of our sections gets a suggestion only because its letters are similar."""
    found = set()
    own = {name.rpartition(".")[2] for name in all_keys()}
    for last in {name.rpartition(".")[2] for _, _, name in PLAIN_NAMES}:
        similar = difflib.get_close_matches(last, own - {last}, n=9, cutoff=0.66)
        places = {name.rpartition(".")[0] for name in all_keys() if name.rpartition(".")[2] in similar}
        for key in {f"{section}.{last}" for section in places} - all_keys().keys():
            others = {(key, near) for near in nearest_keys(key) if not near.endswith(f".{last}")}
            if others and not old_rows(key, OWN_WORDS):
                found |= others
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
    row = dialects()["trl_gkd"].find("beta")
    assert isinstance(row, Row)
    settings = row.settings(beta, OldSettings({}, dialects()["trl_gkd"]))
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    (term,) = loss_spec(config.distill, 1.0).terms
    found = DIVERGENCES[term.name](torch.tensor(np.log(q)), torch.tensor(np.log(p)), term)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("system", sorted({each.system for each in dialects().values()}))
def test_the_pages_list_their_tables(system: str) -> None:
    """Fails if a page differs from its files: run python -m tests.pages."""
    page = (ROOT / "docs" / f"from_{system}.md").read_text()
    assert page == with_tables(page, tables()[f"from_{system}.md"])
    assert page.count("\n| `") >= max(len(each.rows) for each in dialects().values() if each.system == system)
