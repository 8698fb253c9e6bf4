"""Test losses that are named by their import path; tests/unit/test_loss_paths.py has their values and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gkd.actor.common.base import StudentArgs, build_loss
from gkd.actor.common.step import BatchSums, diagnostics
from gkd.config.load import load_config
from gkd.config.loss_spec import LossSpec, LossTerm, loss_spec
from gkd.config.schema_teacher import DistillConfig, LossTermConfig
from gkd.data.columns import ALL_COLUMNS
from gkd.errors import ConfigError
from gkd.loss.divergence_slopes import value_and_slope
from gkd.metrics.catalog import ROWS
from gkd.preflight.loss_functions import check_loss_functions
from gkd.preflight.run import preflight
from tests.refusals import refuses
from tests.unit.loss_cases import OWN, SHARD, distill_loss

NOT_A_FUNCTION = 3


def plain_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def two_arguments(log_q: Tensor, log_p: Tensor) -> Tensor:
    return plain_kl(log_q, log_p, LossTerm())


def per_outcome(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    return log_p.exp() * (log_p - log_q)


def a_float(log_q: Tensor, log_p: Tensor, term: LossTerm) -> float:
    return 1.0


def infinite(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    return plain_kl(log_q, log_p, term) / 0


def of_the_largest(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    return (log_p - log_q).amax(dim=-1)


def of_the_batch(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    return plain_kl(log_q, log_p, term) / len(log_q)


def counting(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    return (log_p - log_q).square().add(1.0).sum(dim=-1)


def stops_the_gradient(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    return (log_q.exp().detach() * (log_q - log_p)).sum(dim=-1)


def without_gradient(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    return plain_kl(log_q.detach(), log_p, term)


def refusal(path: str) -> ConfigError:
    """Return the error of a run with this loss."""
    config = load_config(None, [f"distill.loss={path}"])
    with pytest.raises(ConfigError) as caught:
        check_loss_functions(config)
    return caught.value


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("missing", "cannot be imported"),
        ("NOT_A_FUNCTION", "int"),
        ("two_arguments", "TypeError"),
        ("per_outcome", "[4, 6]"),
        ("a_float", "float"),
        ("infinite", "inf"),
        ("of_the_largest", "sum"),
        ("of_the_batch", "sum"),
        ("counting", "impossible"),
        ("stops_the_gradient", "finite differences"),
        ("without_gradient", "RuntimeError"),
    ],
)
def test_a_wrong_function_is_refused(name: str, found: str) -> None:
    """Fails if a function that would crash, or train something else than it reports, is found after the start."""
    error = refusal(f"{__name__}:{name}")
    assert (error.key, error.value) == ("distill.loss", f"{__name__}:{name}")
    assert found in error.problem and error.fix


def test_the_start_is_refused(tmp_path: Path) -> None:
    """Fails if a run with a wrong function starts, or the function is behind the prompts in the list."""
    settings = ["data.train_files=[none.jsonl]", "model.path=none", "teacher.backend=local", "teacher.path=none"]
    config = load_config(None, [*settings, f"trainer.run_dir={tmp_path}", f"distill.loss={__name__}:counting"])
    with refuses("distill.loss"):
        preflight(config)


@pytest.mark.parametrize("path", [OWN, f"{__name__}:plain_kl"])
def test_a_right_function_is_accepted(path: str) -> None:
    """Fails if the example of the documentation, or a formula without care for infinities, is refused."""
    check_loss_functions(load_config(None, [f"distill.loss={path}"]))


def test_an_entry_of_a_mixture_is_named_and_has_parameters() -> None:
    """Fails if the error does not name the entry, or the function of an entry cannot have its own alpha."""
    wrong = f"{{name: '{__name__}:counting'}}"
    config = load_config(None, [f"distill.losses=[{{name: forward_kl}},{wrong}]"])
    with refuses("distill.losses[1].name"):
        check_loss_functions(config)
    spec = loss_spec(DistillConfig(losses=[LossTermConfig("k1"), LossTermConfig(OWN, 2.0, alpha=0.3)]), 1.0)
    assert spec.divergences == (LossTerm(OWN, 2.0, alpha=0.3),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_outcomes_add_nothing(dtype: torch.dtype) -> None:
    """Fails if padding of a list, or a token that is impossible for the teacher, gives NaN in a user's formula."""
    log_p = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=dtype).log()
    log_q = torch.tensor([[0.25, 0.25, 0.5, 0.0]], dtype=dtype).log()
    found = value_and_slope(f"{__name__}:plain_kl")(log_q, log_p, LossTerm())
    torch.testing.assert_close(found, value_and_slope("forward_kl")(log_q, log_p, LossTerm()))


def test_a_host_without_the_function_fails_at_the_start() -> None:
    """Fails if a rank on a host without the module starts, and ends the run in its first step."""
    args: StudentArgs = {"loss": LossSpec((LossTerm("no_such_module:loss"),)), "device": torch.device("cpu")}
    with refuses("distill.loss"):
        build_loss(args, SHARD, ALL_COLUMNS, 0)


def test_the_metric_has_a_name_that_trackers_accept() -> None:
    """Fails if the number of a user's loss is missing or not documented, or has a colon, which MLflow refuses."""
    loss = distill_loss(LossSpec((LossTerm(OWN),)), "topk")
    numbers = diagnostics(loss, BatchSums(2, 2, dict.fromkeys(loss.report_names, 1.0)))
    name = "loss/examples.own_loss.alpha_divergence"
    assert numbers[name] == 0.5 and sum(row.matches(name) for row in ROWS) == 1
