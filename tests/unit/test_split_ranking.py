"""Test the enumeration of splits, their ranking, and the printed settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.tools.split import settings_of
from gkd.tools.split_tuner import splits
from gkd.tools.split_tuner.splits import Candidate, Hardware, PoolSize, Ranking, Split, Workload, candidate, rank
from tests.unit.split_run import settings
from tests.unit.test_split_run import RATES

SCHEDULERS = ("sync", "one_step_off", "two_step_off", "stream")
WORK = Workload(24, 24.0, 1, 16, 12.0, 0.0, 40.0, 150.0, True)


def hardware(n_gpus: int, per_node: int = 8, per_worker: int = 1, elsewhere: int = 0) -> Hardware:
    return Hardware(n_gpus, per_node, per_worker, elsewhere)


def counts(config: Config, given: Hardware) -> set[tuple[int, int, int]]:
    return {(s.actor.n_gpus, s.rollout.n_gpus, s.teacher_gpus) for s in splits.splits(config, given)}


def test_all_splits_of_one_node_are_there(tmp_path: Path) -> None:
    """Fails if the best split may be one that was not estimated."""
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
    with pytest.raises(ConfigError) as error:
        ranked(config, hardware(7))
    assert error.value.key == "--gpus"


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


@pytest.mark.parametrize("n_gpus", [12, 24])
def test_pools_fit_onto_the_nodes(tmp_path: Path, n_gpus: int) -> None:
    """Fails if Ray could not place what is recommended, or a tensor-parallel group would span two nodes."""
    config = settings(tmp_path, "actor.tp=4", "rollout.tp=2", "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=4")
    given = hardware(n_gpus)
    some = list(splits.splits(config, given))
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
        for split in splits.splits(config, hardware(9)):
            changed = splits.with_split(config, split, scheduler)
            check_config(changed)
            if split.actor.n_gpus != 5:
                continue
            (line, *_) = settings_of(candidate(config, split, scheduler, WORK, RATES), config, hardware(9))
            given = load_config(None, ["data.train_files=[a]", "model.path=m", "trainer.run_dir=r", *line.split()])
            check_config(replace(given, trainer=replace(given.trainer, global_batch_size=24)))
            assert given.trainer.n_gpus_per_node * given.trainer.nnodes == 5
            assert given.trainer.max_staleness == (3 if scheduler == "stream" else 1)
            assert {setting.partition(".")[0] for setting in line.split()} == {"trainer", "rollout"}


def ranked(config: Config, given: Hardware, schedulers: tuple[str, ...] = SCHEDULERS) -> Ranking:
    return rank(config, given, schedulers, WORK, RATES, check_config)


def test_the_ranking_is_by_step_time_without_what_is_refused(tmp_path: Path) -> None:
    """Fails if the first row is not the one to take, or one is recommended that a run refuses."""
    config = settings(tmp_path)
    ranking = ranked(config, hardware(5))
    assert ranking.n_splits == 6 and len(ranking.candidates) == 24 and not ranking.excluded
    times = [c.time for c in ranking.candidates]
    order = [(t.step_s, t.rollout_s + t.scoring_s + t.training_s) for t in times]
    assert order == sorted(order), "of equal steps, the one whose pools have less to do comes first"
    best = ranking.candidates[0].split
    best_gpus = (best.actor.n_gpus, best.rollout.n_gpus)

    def check(changed: Config) -> None:
        if (changed.trainer.n_gpus_per_node, changed.rollout.n_gpus_per_node) == best_gpus:
            raise ConfigError("--gpu-gib", 80, "actor rank 0 needs 90 GiB.", "use more GPUs.")

    smaller = rank(config, hardware(5), SCHEDULERS, WORK, RATES, check)
    assert smaller.candidates == tuple(c for c in ranking.candidates if c.split != best)
    assert [(e.scheduler, e.n, e.first.key) for e in smaller.excluded] == [(s, 1, "--gpu-gib") for s in SCHEDULERS]


def test_where_the_measured_run_was_does_not_limit_the_plan(tmp_path: Path) -> None:
    """Fails if a run on one machine hides the splits of several nodes, or one on some GPUs those with more of them."""
    config = settings(tmp_path, "cluster.gpus=[4,5,6,7]", "teacher.max_in_flight=3")
    assert not config.cluster.ray_address
    given = hardware(10, per_node=4)
    ranking = ranked(config, given, ("sync",))
    assert not ranking.excluded and len(ranking.candidates) == ranking.n_splits == 22

    def printed(one: Candidate, of: Config) -> str:
        return "\n".join(settings_of(one, of, given))

    of_nodes = next(c for c in ranking.candidates if c.split.rollout.nnodes > 1)
    text = printed(of_nodes, config)
    assert "teacher.max_in_flight=0" in text.split()
    assert "cluster.ray_address" in text and "cluster.gpus is [4, 5, 6, 7]" in text
    assert "planned:" not in text and config.cluster.gpus == [4, 5, 6, 7]
    # One node is enough for two pools of a few GPUs, and a cluster that the run had is there.
    for rollout, told in ((2, False), (3, True)):
        few = replace(of_nodes, split=Split(PoolSize(1, 2), PoolSize(1, rollout), 5, 5))
        assert ("ray_address" in printed(few, config)) is told
    clustered = settings(tmp_path, "cluster.ray_address=head:6379")
    text = printed(of_nodes, clustered)
    assert "cluster" not in text and "max_in_flight" not in text
    assert splits.with_split(clustered, of_nodes.split, "sync").cluster.ray_address == "head:6379"


def test_a_slow_split_that_fits_is_found_behind_many_that_do_not(tmp_path: Path) -> None:
    """Fails if only the fastest splits are checked, or more are kept than anybody reads."""
    config, given = settings(tmp_path), hardware(20)
    every = sorted(
        (candidate(config, split, "sync", WORK, RATES) for split in splits.splits(config, given)),
        key=lambda one: one.order,
    )
    slowest = {str(splits.with_split(config, one.split, "sync")) for one in every[-3:]}

    def check(changed: Config) -> None:
        if str(changed) not in slowest:
            raise ConfigError("--gpu-gib", 80, "actor rank 0 needs 90 GiB.", "use more GPUs.")

    ranking = rank(config, given, ["sync"], WORK, RATES, check)
    assert [c.split for c in ranking.candidates] == [c.split for c in every[-3:]]
    assert [e.n for e in ranking.excluded] == [len(every) - 3]
    assert len(ranked(config, given, ("sync",)).candidates) == 60 < len(every)
