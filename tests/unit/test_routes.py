"""Several teachers: settings, the column of a row, shares of a batch, and what a resumed run may change."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from gkd.config.check import check_config
from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config
from gkd.config.schema_teacher import RouteConfig
from gkd.data.prompts import RowReader, load_prompts
from gkd.data.sampler import PromptSampler, make_sampler
from gkd.metrics.writer import read_metrics
from gkd.preflight.run import teacher_identity
from gkd.preflight.settings import check_shares
from gkd.run.folder import teacher_json
from gkd.run.open import check_same_run, check_same_teacher
from gkd.scoring.teacher.info import TeacherInfo, head_columns
from gkd.types import GreedyReport, Prompt
from tests.refusals import refuses
from tests.unit.test_data import tokenizer as tokenizer  # fixture
from tests.unit.world import World, make

BASE = ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "eval.metric=none"]
TWO = [*BASE, "data.teacher_key=domain", "teacher.routes={math: {server_port: 7}, code: {weight: 2, temperature: 0.5}}"]


def test_a_route_inherits_what_it_leaves_out() -> None:
    """Fails if a route ignores a key of its own or of the section, or the order of the YAML changes the indices."""
    code, math = load_config(None, [*TWO, "teacher.server_ip=host", "teacher.topk=5"]).derived.routes
    assert (code.name, math.name) == ("code", "math")
    assert (code.teacher.server_port, code.teacher.temperature, code.weight) == (15555, 0.5, 2.0)
    assert (math.teacher.server_port, math.teacher.temperature, math.weight) == (7, 1.0, 1.0)
    assert {route.teacher.server_ip for route in (code, math)} == {"host"} and code.teacher.topk == 5
    assert math.key("server_port") == "teacher.routes.math.server_port" and math.key("keys") == "teacher.keys"
    swapped = load_config(None, [*BASE, "teacher.routes={code: {}, math: {}}"])
    assert [route.name for route in swapped.derived.routes] == ["code", "math"]
    (only,) = load_config(None, BASE).derived.routes
    assert only.name == "" and only.key("server_port") == "teacher.server_port"


def test_routes_to_the_same_weights_share_an_lm_head() -> None:
    """Fails if a head is held twice, its memory counted twice, or the head of another precision taken for it."""
    of_a = TeacherInfo("a", "m", "p", "f", 300, 32, "", 99, 1, 1, "hf", "cpu", "float32", True)
    of_b = replace(of_a, fingerprint="g", hidden_size=48)
    assert head_columns([of_a]) == ([0], 32)
    assert head_columns([of_a, of_b, of_a, of_b]) == ([0, 32, 0, 32], 80)
    assert head_columns([of_a, replace(of_a, dtype="bfloat16", teacher="b"), of_b]) == ([0, 32, 64], 112)


def rows(tmp_path: Path, *values: Any) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a b", **value}) + "\n" for value in values))
    return str(file)


def test_each_row_names_its_route(tmp_path: Path, tokenizer: Any) -> None:
    """Fails if a row gets another teacher, or one that names none does not stop the start."""
    config = load_config(None, TWO)

    def routes(*values: Any, more: Mapping[str, RouteConfig] = MappingProxyType({})) -> list[int]:
        teacher = replace(config.teacher, routes={**config.teacher.routes, **more})
        prompts, _ = load_prompts(
            [rows(tmp_path, *values)], "data.train_files", RowReader(config.data, tokenizer, teacher=teacher)
        )
        return [prompt.route for prompt in prompts]

    assert routes({"domain": "math"}, {"domain": "code"}, {"domain": "math"}) == [1, 0, 1]
    for bad in ({"domain": "law"}, {"domain": None}, {}):
        with refuses("data.teacher_key", text="rows.jsonl:2"):
            routes({"domain": "math"}, bad)
    assert routes({"domain": "law"}, {"domain": None}, {}, {"domain": "math"}, more={"default": RouteConfig()}) == [
        1,
        1,
        1,
        2,
    ]


def prompts(*counts: int) -> list[Prompt]:
    """Return prompts of each route, as many as given."""
    each = [route for route, count in enumerate(counts) for _ in range(count)]
    return [Prompt(i, np.array([i], np.int32), route=route) for i, route in enumerate(each)]


def shared(shares: str, size: int, *settings: str) -> Config:
    names = [part.split(":")[0].strip() for part in shares.strip("{}").split(",")]
    routes = "teacher.routes={" + ", ".join(f"{name}: {{}}" for name in names) + "}"
    batch = f"trainer.global_batch_size={size}"
    config = load_config(None, [*BASE, "data.teacher_key=d", routes, f"data.domain_shares={shares}", batch, *settings])
    check_config(config)
    return config


@pytest.mark.parametrize(
    ("shares", "size", "exact"),
    [
        ("{a: 0.29, b: 0.71}", 100, [Fraction(29), Fraction(71)]),
        ("{a: 3, b: 1}", 6, [Fraction(9, 2), Fraction(3, 2)]),
        ("{a: 1, b: 1, c: 1}", 8, [Fraction(8, 3)] * 3),
        ("{a: 0.001, b: 1}", 4, [Fraction(4, 1001), Fraction(4000, 1001)]),
    ],
)
def test_shares_are_exact_over_time(shares: str, size: int, exact: list[Fraction]) -> None:
    """Fails if the prompts of a route drift from its share, or a batch has another size."""
    sampler = make_sampler(shared(shares, size), prompts(*[7] * len(exact)))
    counts = Counter[int]()
    for step in range(300):
        batch = sampler.take(step * size, size)
        assert len(batch) == size
        counts.update(prompt.route for prompt in batch)
        for route, each in enumerate(exact):
            assert abs(counts[route] - (step + 1) * each) < max(1, len(exact) - 1)
    small = exact.index(min(exact))
    assert counts[small] == int(300 * exact[small])


def test_the_order_with_shares_depends_only_on_the_position() -> None:
    """Fails if a resumed run or a stream, which take single positions, get other prompts."""
    config = shared("{a: 3, b: 1}", 6)
    whole = make_sampler(config, prompts(5, 9)).take(0, 90)
    sampler = make_sampler(config, prompts(5, 9))
    for position in (80, 3, 4, 41, 0):
        assert sampler.take(position, 1)[0].prompt_id == whole[position].prompt_id
    first = [prompt.prompt_id for prompt in whole if prompt.route == 1][:9]
    assert sorted(first) == list(range(5, 14)), "an epoch of a route has each of its prompts once"
    orders = {tuple(prompt.route for prompt in whole[start : start + 6]) for start in range(0, 60, 6)}
    assert len(orders) > 2, "the routes of a batch are mixed"


def test_without_shares_the_order_is_that_of_all_prompts() -> None:
    """Fails if routes alone change the order: two routes of one teacher would not equal one route."""
    config = load_config(None, TWO)
    all_prompts = prompts(5, 9)
    plain = PromptSampler(all_prompts, shuffle=True, seed=config.data.seed).take(0, 40)
    assert make_sampler(config, all_prompts).take(0, 40) == plain


def test_shares_that_cannot_be_drawn_are_refused() -> None:
    """Fails if a run starts with a route without rows."""
    config = shared("{a: 1, b: 1}", 8)
    check_shares(config, prompts(1, 1))
    with refuses("data.domain_shares"):
        check_shares(config, prompts(3))


def test_a_resumed_run_refuses_other_routes(tmp_path: Path) -> None:
    """Fails if a run continues with other teachers, weights or temperatures, or cannot follow a server that moved."""
    before = tmp_path / "config.yaml"
    before.write_text(config_yaml(load_config(None, TWO)))
    moved = "teacher.routes={code: {weight: 2, temperature: 0.5, server_ip: there, keys: k}, math: {name: m}}"
    check_same_run(before, load_config(None, [*TWO, moved]))
    for change in (
        "teacher.routes.math.weight=3",
        "teacher.routes.code.temperature=0.7",
        "teacher.routes.law={}",
        "data.teacher_key=topic",
        "data.domain_shares={math: 1, code: 1}",
        "distill.normalize=domain",
    ):
        key = change.partition("=")[0]
        with refuses("teacher.routes" if key.startswith("teacher.routes") else key):
            check_same_run(before, load_config(None, [*TWO, change]))


class Info:
    probe = ()

    def __init__(self, mark: str, dtype: str = "bfloat16") -> None:
        self.model_name, self.fingerprint, self.dtype = f"model-{mark}", mark * 32, dtype


def test_a_resumed_run_refuses_another_model_of_a_route(tmp_path: Path) -> None:
    """Fails if one of several teachers may change its weights or dtype unnoticed."""
    config, file = load_config(None, TWO), tmp_path / "teacher.json"
    routes: Any = config.derived.routes
    same: Any = teacher_identity(routes, [Info("a"), Info("b")])  # type: ignore[list-item]
    file.write_text(teacher_json(same))
    check_same_teacher(file, same, config)
    for infos, key in (("xb", "teacher.server_port"), ("ax", "teacher.routes.math.server_port")):
        changed: Any = teacher_identity(routes, [Info(mark) for mark in infos])  # type: ignore[misc]
        with refuses(key):
            check_same_teacher(file, changed, config)
    other: Any = teacher_identity(routes, [Info("a"), Info("b", "float32")])  # type: ignore[list-item]
    with refuses("teacher.routes.math.server_port"):
        check_same_teacher(file, other, config)
    check_same_teacher(file, other, config, any_dtype=True)
    one = load_config(None, BASE)
    with refuses("teacher.routes"):
        check_same_teacher(file, teacher_identity(one.derived.routes, [Info("a")]), one)  # type: ignore[list-item]


class Routed(World):
    """Reports these accuracies by route, and half over all."""

    def __init__(self, by_route: dict[int, float]) -> None:
        super().__init__()
        self.by_route = by_route

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        return GreedyReport(0.5, [], self.by_route)


def test_evaluations_report_the_accuracy_of_each_route(tmp_path: Path) -> None:
    """Fails if the accuracy of one domain is reported for another, or for a run with one teacher."""
    routes = ("data.teacher_key=d", "teacher.routes={math: {}, code: {}}")
    settings = ("trainer.total_steps=1", "eval.metric=exact_match")
    make(tmp_path / "two", Routed({0: 0.25, 1: 1.0}), *settings, *routes, val=prompts(2, 1)).fit()
    make(tmp_path / "one", Routed({0: 0.5}), *settings, val=prompts(2, 1)).fit()
    two, one = (read_metrics(tmp_path / name / "run" / "metrics.jsonl")[-1] for name in ("two", "one"))
    assert (two["domain/code/accuracy"], two["domain/math/accuracy"], two["eval/accuracy"]) == (0.25, 1.0, 0.5)
    assert not [key for key in one if key.startswith("domain/")]
