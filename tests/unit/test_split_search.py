"""Test the enumeration of splits, the choice of those to simulate, and the printed table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.footprint import check, footprint
from gkd.tools.split_tuner import layout
from gkd.tools.split_tuner.estimate import estimate
from gkd.tools.split_tuner.layout import Hardware, PoolSize, Split
from gkd.tools.split_tuner.rates import Workload, lognormal
from gkd.tools.split_tuner.search import Ranking, search, simulated
from gkd.tools.split_tuner.table import left_out, settings_of, table
from tests.unit.split_run import settings
from tests.unit.test_split_run import RATES

SCHEDULERS = ("sync", "one_step_off", "two_step_off", "stream")
WORK = Workload(24, 24, 1, 16, 16, 12.0, 0.0, True, True, True, lognormal(40, 0.6, 300))


def hardware(n_gpus: int, per_node: int = 8, per_worker: int = 1, elsewhere: int = 0) -> Hardware:
    return Hardware(n_gpus, per_node, per_worker, elsewhere)


def counts(config: Config, given: Hardware) -> set[tuple[int, int, int]]:
    return {(s.actor.n_gpus, s.rollout.n_gpus, s.teacher_gpus) for s in layout.splits(config, given)}


def test_all_splits_of_one_node_are_there(tmp_path: Path) -> None:
    """Fails if the best split may be one that was not simulated."""
    expected = {(a, r, 8 - a - r) for a in range(1, 7) for r in range(1, 8 - a)}
    assert counts(settings(tmp_path), hardware(8)) == expected
    assert counts(settings(tmp_path), hardware(3)) == {(1, 1, 1)}
    assert counts(settings(tmp_path), hardware(2)) == set()
    assert counts(settings(tmp_path), hardware(2, elsewhere=3)) == {(1, 1, 0)}


def test_parallel_sizes_are_kept(tmp_path: Path) -> None:
    """Fails if a recommended split is refused by the config's checks, or cuts a teacher's worker in two."""
    config = settings(tmp_path, "actor.tp=2", "actor.pp=2", "rollout.tp=2", "rollout.n_gpus_per_node=2")
    got = counts(config, hardware(16, per_worker=4))
    assert got and all(a % 4 == 0 and r % 2 == 0 and t % 4 == 0 and t > 0 for a, r, t in got)
    assert (8, 4, 4) in got and (4, 2, 8) in got
    groups = settings(tmp_path, "trainer.global_batch_size=2")
    assert max(a for a, _, _ in counts(groups, hardware(8))) == 2


def test_experts_can_be_spread_over_every_actor_pool(tmp_path: Path) -> None:
    """Fails if a run with a recommended split ends at its start, with actor.ep not dividing a stage's ranks."""
    config = settings(tmp_path, "actor.tp=2", "actor.pp=2", "actor.ep=4", "trainer.n_gpus_per_node=8")
    assert {a for a, _, _ in counts(config, hardware(24))} == {8, 16}
    with pytest.raises(ConfigError, match=r"with actor.ep 4: 8\)"):
        ranked(config, hardware(7))


def test_a_teacher_elsewhere_leaves_every_split_that_none_exceeds(tmp_path: Path) -> None:
    """Fails if splits are lost because a few GPUs stay idle in them, or one is listed that another one exceeds."""
    wide = settings(tmp_path, "trainer.global_batch_size=4096")
    for n_gpus, n_splits in ((8, 7), (12, 2), (70, 9), (100, 13)):
        given = hardware(n_gpus, elsewhere=2)
        got = counts(wide, given)
        # All pairs that fit, from the same packing with a teacher that takes what is left, and none.
        every = {(a, r, 0) for a, r, _ in counts(wide, hardware(n_gpus))} | got
        assert {s for s in every if not any(o != s and o[0] >= s[0] and o[1] >= s[1] for o in every)} == got
        assert len(got) == n_splits, n_gpus
    sizes = ("actor.tp=4", "rollout.tp=4", "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4")
    assert counts(settings(tmp_path, *sizes), hardware(12, per_node=6, elsewhere=2)) == {(4, 4, 0)}


@pytest.mark.parametrize("n_gpus", [12, 24, 128])
def test_pools_fit_onto_the_nodes(tmp_path: Path, n_gpus: int) -> None:
    """Fails if Ray could not place what is recommended, or a tensor-parallel group would span two nodes."""
    config = settings(tmp_path, "actor.tp=4", "rollout.tp=2", "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=4")
    given = hardware(n_gpus)
    some = list(layout.splits(config, given))
    assert some
    for split in some:
        free = given.nodes
        for pool in sorted((split.actor, split.rollout), key=lambda p: -p.per_node):
            for _ in range(pool.nnodes):
                node = min((i for i, n in enumerate(free) if n >= pool.per_node), key=lambda i: free[i])
                free[node] -= pool.per_node
        assert sum(free) == split.teacher_gpus
        assert split.actor.per_node % 4 == 0 and split.rollout.per_node % 2 == 0


def test_every_recommended_split_passes_the_config_s_checks(tmp_path: Path) -> None:
    """Fails if the printed settings are refused by the run that they are given to."""
    config = settings(tmp_path, "trainer.scheduler=stream", "trainer.max_staleness=3")
    for scheduler in SCHEDULERS:
        for split in layout.splits(config, hardware(9)):
            changed = layout.with_split(config, split, scheduler)
            check_config(changed)
            if split.actor.n_gpus != 5:
                continue
            candidate = simulated(config, split, scheduler, WORK, RATES, None, 0)
            (line, *_) = settings_of(candidate, config, hardware(9)).splitlines()
            given = load_config(None, ["data.train_files=[a]", "model.path=m", "trainer.run_dir=r", *line.split()])
            check_config(replace(given, trainer=replace(given.trainer, global_batch_size=24)))
            assert given.trainer.n_gpus_per_node * given.trainer.nnodes == 5
            assert given.trainer.max_staleness == (3 if scheduler == "stream" else 1)
            assert {setting.partition(".")[0] for setting in line.split()} == {"trainer", "rollout"}


def ranked(config: Config, given: Hardware, **more: object) -> Ranking:
    return search(config, given, SCHEDULERS, WORK, RATES, **({"check_memory": None} | more))  # type: ignore[arg-type]


def test_the_ranking_is_by_step_time_and_what_does_not_fit_comes_last(tmp_path: Path) -> None:
    """Fails if the first row is not the one to take."""
    config = settings(tmp_path)
    ranking = ranked(config, hardware(5))
    assert ranking.n_splits == 6 and ranking.n_simulated == 24
    steps = [c.outcome.step_s for c in ranking.candidates]
    assert steps == sorted(steps)
    best = ranking.candidates[0]

    def too_small(changed: Config) -> list[str]:
        mine = (changed.trainer.n_gpus_per_node, changed.rollout.n_gpus_per_node)
        return ["actor rank 0 needs 90 GiB"] if mine == (best.split.actor.n_gpus, best.split.rollout.n_gpus) else []

    checked = ranked(config, hardware(5), check_memory=too_small).candidates
    assert [c.fits for c in checked] == [True] * 20 + [False] * 4
    assert checked[0] == replace(next(c for c in ranking.candidates if c.split != best.split), too_large=())
    text = table(Ranking(checked, 6, 24), checked[-1], top=3)
    assert text.splitlines()[1].endswith("fits") and text.splitlines()[-1].endswith("too small")
    assert len(text.splitlines()) == 5 and "memory" not in table(ranking, best, top=2)


def test_splits_that_cannot_cut_the_model_are_left_out(tmp_path: Path) -> None:
    """Fails if one number of GPUs over which experts cannot be spread ends the search for all others."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    model = {"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, **experts}
    config = settings(tmp_path, "actor.ep=2", "trainer.n_gpus_per_node=2")

    def check_memory(changed: Config) -> list[str]:
        return check(footprint(changed, model), 80 << 30, changed)

    ranking = search(config, hardware(8), ["sync"], WORK, RATES, check_memory=check_memory)
    assert {c.split.actor.n_gpus for c in ranking.candidates} == {2, 4, 6}


def test_where_the_measured_run_was_does_not_limit_the_plan(tmp_path: Path) -> None:
    """Fails if a run on one machine hides the splits of several nodes, or one on some GPUs those with more of them."""
    config = settings(tmp_path, "cluster.gpus=[4,5,6,7]", "teacher.max_in_flight=3")
    assert not config.cluster.ray_address
    given = hardware(10, per_node=4)
    ranking = search(config, given, ["sync"], WORK, RATES, check_memory=None)
    assert not ranking.refused and ranking.n_looked_at == ranking.n_splits == 22
    of_nodes = next(c for c in ranking.candidates if c.split.rollout.nnodes > 1)
    printed = settings_of(of_nodes, config, given)
    assert "teacher.max_in_flight=0" in printed.split()
    assert "cluster.ray_address" in printed and "cluster.gpus is [4, 5, 6, 7]" in printed
    assert "planned:" not in printed and config.cluster.gpus == [4, 5, 6, 7]
    # One node is enough for two pools of a few GPUs, and a cluster that the run had is there.
    for rollout, told in ((2, False), (3, True)):
        few = replace(of_nodes, split=Split(PoolSize(1, 2), PoolSize(1, rollout), 5, 5))
        assert ("ray_address" in settings_of(few, config, given)) is told
    clustered = settings(tmp_path, "cluster.ray_address=head:6379")
    text = settings_of(of_nodes, clustered, given)
    assert "cluster" not in text and "max_in_flight" not in text
    assert layout.with_split(clustered, of_nodes.split, "sync").cluster.ray_address == "head:6379"


def test_settings_that_no_split_allows_are_refused(tmp_path: Path) -> None:
    """Fails if the tool fails on an empty ranking, or does not name the key."""
    with pytest.raises(ConfigError, match=r"\b6\b.*\b5\b") as caught:
        ranked(settings(tmp_path, "trainer.stage_timeout_s=301"), hardware(5))
    assert caught.value.key == "trainer.stage_timeout_s"


def test_splits_that_are_too_large_take_no_place_from_those_that_fit(tmp_path: Path) -> None:
    """Fails if `no split fits` is reported because only the fastest sixty of hundreds were checked."""
    config, given = settings(tmp_path), hardware(20)
    some = list(layout.splits(config, given))
    n_splits = len(some)
    units = np.array([[s.actor.n_gpus, s.rollout.n_gpus, s.workers] for s in some], float)
    order = np.argsort(estimate("sync", units[:, 0], units[:, 1], units[:, 2], WORK, RATES, 0), kind="stable")
    slow = [some[place] for place in order[70:]]
    fitting = {str(layout.with_split(config, split, "sync")) for split in slow}

    def needs_more(changed: Config) -> list[str]:
        return [] if str(changed) in fitting else ["actor rank 0 needs 90 GiB"]

    ranking = search(config, given, ["sync"], WORK, RATES, check_memory=needs_more)
    n_fit = sum(c.fits for c in ranking.candidates)
    assert n_fit == len(slow) == n_splits - 70 > 0
    assert len(ranking.candidates) == n_fit + 4 and ranking.candidates[0].fits
    assert ranking.n_looked_at == n_splits and ranking.n_too_large == 70
    assert left_out(ranking) == [f"memory: of {n_splits} checked splits 70 do not fit; 4 of these are in the ranking"]
    none = search(config, given, ["sync"], WORK, RATES, check_memory=lambda changed: ["too large"])
    assert len(none.candidates) == 4 and none.n_too_large == n_splits and "none fits" in left_out(none)[0]


def test_a_search_ends_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a large cluster is searched for hours, or a slow one is given up before a split that fits is found."""
    monkeypatch.setattr("gkd.tools.split_tuner.search._BUDGET_S", -1.0)
    given = hardware(8)
    assert search(settings(tmp_path), given, ["sync"], WORK, RATES, check_memory=None).n_simulated == 4
    monkeypatch.setattr("gkd.tools.split_tuner.search._LOOKED_AT", 15)
    calls: list[Config] = []

    def last_fits(changed: Config) -> list[str]:
        calls.append(changed)
        return [] if len(calls) == 15 else ["too large"]

    ranking = search(settings(tmp_path), given, ["sync"], WORK, RATES, check_memory=last_fits)
    assert ranking.n_looked_at == 15 < ranking.n_splits and ranking.candidates[0].fits


def test_gpus_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    """Fails if the tool prints an empty table, or fails on it."""
    with pytest.raises(ConfigError, match="actor.tp 4 x actor.pp 1 GPUs"):
        ranked(settings(tmp_path, "actor.tp=4", "trainer.n_gpus_per_node=4"), hardware(5))


def test_the_closed_form_puts_the_best_among_the_first(tmp_path: Path) -> None:
    """Fails if, where there are too many splits to simulate them all, the best ones are left out."""
    config = settings(tmp_path)
    some = list(layout.splits(config, hardware(9)))
    units = np.array([[s.actor.n_gpus, s.rollout.n_gpus, s.workers] for s in some], float)
    for scheduler in SCHEDULERS:
        guessed = estimate(scheduler, *units.T, WORK, RATES, 1)
        first = np.argsort(guessed)
        by_simulation = []
        for split in some:
            by_simulation.append(simulated(config, split, scheduler, WORK, RATES, None, 0).outcome.step_s)
        # Some differ by less than their drawn lengths do.
        assert min(by_simulation[i] for i in first[:8]) <= 1.01 * min(by_simulation), scheduler
        assert np.corrcoef(guessed, by_simulation)[0, 1] > 0.85, scheduler


def test_four_thousand_gpus_are_searched_in_the_closed_form(tmp_path: Path) -> None:
    """Fails if a large cluster's splits cannot even be listed."""
    config = settings(tmp_path, "actor.tp=8", "rollout.tp=4", "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=8")
    some = list(layout.splits(config, hardware(4096, per_worker=8)))
    assert 2_000 < len(some) < 200_000
    assert Split(PoolSize(8, 8), PoolSize(100, 8), 404, 3232) in some
