"""Which splits there are, which of them are simulated, and what of them is printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from gkd.config import Config
from gkd.config_check import check_config
from gkd.config_load import load_config
from gkd.errors import ConfigError
from gkd.split import layout
from gkd.split.estimate import estimate
from gkd.split.layout import Hardware, PoolSize, Split
from gkd.split.rates import Workload, lognormal
from gkd.split.search import Ranking, search, simulated
from gkd.split.table import paste, table
from tests.unit.split_run import settings
from tests.unit.test_split_run import RATES

SCHEDULERS = ("sync", "one_step_off", "two_step_off", "stream")
WORK = Workload(24, 24, 1, 16, 12.0, 0.0, True, True, lognormal(40, 0.6, 300))


def hardware(n_gpus: int, per_node: int = 8, per_worker: int = 1, elsewhere: int = 0) -> Hardware:
    return Hardware(n_gpus, per_node, per_worker, elsewhere)


def counts(config: Config, given: Hardware) -> set[tuple[int, int, int]]:
    return {(s.actor.n_gpus, s.rollout.n_gpus, s.teacher_gpus) for s in layout.splits(config, given)}


def test_all_splits_of_one_node_are_there(tmp_path: Path) -> None:
    """Fails if the best split may be one that nobody looked at."""
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
    """Fails if the lines to paste stop the run that they are pasted into."""
    config = settings(tmp_path, "trainer.scheduler=stream", "trainer.max_staleness=3")
    for scheduler in SCHEDULERS:
        for split in layout.splits(config, hardware(9)):
            changed = layout.with_split(config, split, scheduler)
            check_config(changed)
            candidate = simulated(config, split, scheduler, WORK, RATES, None, 0) if split.actor.n_gpus == 5 else None
            if candidate is None:
                continue
            file = tmp_path / "pasted.yaml"
            file.write_text(paste(candidate, config, 1))
            pasted = load_config(file, ["data.train_files=[a]", "model.path=m", "trainer.run_dir=r"])
            check_config(replace(pasted, trainer=replace(pasted.trainer, global_batch_size=24)))
            assert pasted.trainer.n_gpus_per_node * pasted.trainer.nnodes == 5
            assert pasted.trainer.max_staleness == (3 if scheduler == "stream" else 1)
            assert set(yaml.safe_load(file.read_text())) == {"trainer", "rollout"}


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


def test_gpus_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    """Fails if the tool prints an empty table, or fails on it."""
    with pytest.raises(ConfigError, match="no split of them has actor.tp 4 x actor.pp 1 GPUs"):
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
            candidate = simulated(config, split, scheduler, WORK, RATES, None, 0)
            assert candidate is not None
            by_simulation.append(candidate.outcome.step_s)
        # Some differ by less than their drawn lengths do.
        assert min(by_simulation[i] for i in first[:8]) <= 1.01 * min(by_simulation), scheduler
        assert np.corrcoef(guessed, by_simulation)[0, 1] > 0.85, scheduler


def test_four_thousand_gpus_are_searched_in_the_closed_form(tmp_path: Path) -> None:
    """Fails if a large cluster's splits cannot even be listed."""
    config = settings(tmp_path, "actor.tp=8", "rollout.tp=4", "rollout.n_gpus_per_node=4", "trainer.n_gpus_per_node=8")
    some = list(layout.splits(config, hardware(4096, per_worker=8)))
    assert 2_000 < len(some) < 200_000
    assert Split(PoolSize(8, 8), PoolSize(100, 8), 404, 3232) in some
