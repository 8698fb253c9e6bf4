"""How the cores of a CPU machine are divided between actor and engines."""

from __future__ import annotations

import os

import pytest

from gkd.config.load import load_config
from gkd.start.pools import cpu_threads, worker_env


@pytest.mark.parametrize(
    ("scheduler", "ranks", "engines", "expected"),
    [
        ("sync", 1, 1, (8, 8)),
        ("sync", 4, 2, (2, 4)),
        ("one_step_off", 1, 1, (4, 4)),
        ("stream", 2, 1, (2, 4)),
        ("stream", 16, 16, (1, 1)),
    ],
)
def test_roles_that_take_turns_have_all_cores(
    scheduler: str, ranks: int, engines: int, expected: tuple[int, int]
) -> None:
    """Fails if a role idles cores while the other waits, or both together use more than there are."""
    sizes = [f"trainer.n_gpus_per_node={ranks}", f"rollout.n_gpus_per_node={engines}", "trainer.cpu_cores=8"]
    assert cpu_threads(load_config(None, [*sizes, f"trainer.scheduler={scheduler}"])) == expected


def test_the_default_is_what_this_process_may_use() -> None:
    """Fails if a job that was given two of a host's cores starts threads for all of them."""
    assert cpu_threads(load_config(None)) == (len(os.sched_getaffinity(0)),) * 2


def test_workers_on_the_cpu_have_their_threads() -> None:
    """Fails if the number does not reach the libraries, which read it at their import."""
    assert worker_env(True, n_threads=3)["OMP_NUM_THREADS"] == "3"
    assert worker_env(True)["OMP_NUM_THREADS"] == "1" and "OMP_NUM_THREADS" not in worker_env(False, n_threads=3)
