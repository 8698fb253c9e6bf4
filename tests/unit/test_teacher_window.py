"""Test how the sequences in flight at the teacher are divided."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from gkd.config.schema_teacher import TeacherConfig
from gkd.scoring.teacher.client import sequence_of
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.window import Window, grouped, throttle_warning, window_of_group
from teacher_server.client.requests import RequestSettings
from tests.service.harness import random_rollouts


def info(n_streams: int, is_server: bool = True) -> TeacherInfo:
    return TeacherInfo("t", "m", "p", "f", 10, 4, "x", 99, 1, n_streams, "hf", "cpu", "float32", is_server)


@pytest.mark.parametrize("n_groups", [1, 3, 8])
def test_without_a_limit_the_groups_together_keep_the_server_busy(n_groups: int) -> None:
    """Fails if the default leaves streams of the teacher idle."""
    for n_streams in (1, 24, 64, 256):
        assert n_groups * window_of_group(TeacherConfig(), info(n_streams), n_groups).n_in_flight >= n_streams


def test_the_limit_holds_for_all_groups_together() -> None:
    """If it fails, a teacher that others use too receives more sequences than the user allowed."""
    for limit, n_groups in product((1, 7, 64, 1000), (1, 3, 8)):
        window = window_of_group(TeacherConfig(max_in_flight=limit), info(64), n_groups)
        assert 1 <= n_groups * window.n_in_flight <= max(limit, n_groups)
    assert window_of_group(TeacherConfig(max_in_flight=8), info(64), 2) == Window(4)


def test_requests_share_the_window_and_http_servers_get_single_sequences() -> None:
    """If it fails, one request fills the window, so they take turns, or HTTP requests wait for others."""
    assert window_of_group(TeacherConfig(), info(64), 1) == Window(64, 16)
    assert window_of_group(TeacherConfig(), info(64, is_server=False), 1) == Window(64, 1)
    assert window_of_group(TeacherConfig(max_in_flight=3), info(64), 1).n_per_request == 1


def test_sequences_of_a_request_have_one_route_and_one_number_of_ids() -> None:
    """If it fails, a sequence goes to another teacher, is lost, or a request is larger than the server's batch."""
    rollouts = [
        replace(rollout, route=i % 2, top_ids=np.zeros((len(rollout.response_ids), 4), np.int32) if i % 3 else None)
        for i, rollout in enumerate(random_rollouts(40, 99))
    ]
    long = replace(rollouts[0], response_ids=np.zeros(4096, np.int32))
    groups = grouped([*rollouts, long, long], [3, 5])
    assert sorted(index for group in groups for index in group) == list(range(42))
    assert [40] in groups and [41] in groups
    for group in groups[:-2]:
        kinds = {(rollouts[i].route, rollouts[i].top_ids is None) for i in group}
        assert len(kinds) == 1 and len(group) <= [3, 5][rollouts[group[0]].route]
    assert max(map(len, groups)) == 5


def test_several_sequences_fit_into_one_reply() -> None:
    """Fails if sequences that fit one by one make a request that a teacher server refuses: the run would end."""
    rollouts = [replace(rollout, response_ids=np.zeros(2000, np.int32)) for rollout in random_rollouts(4, 99)]
    for k in (1, 64, 1 << 13, 1 << 14):
        groups = grouped(rollouts, [256], k)
        assert sorted(index for group in groups for index in group) == list(range(4))
        for group in groups:
            sequences = [sequence_of(rollouts[i]) for i in group]
            RequestSettings("t", k, 1.0, 1 << 17, "fp32", 1.0).score(sequences, "topk", k=k)


def test_only_a_limit_below_the_announced_number_is_warned_about() -> None:
    """If it fails, a run with a slow teacher stage does not name the setting and the value that mend it."""
    assert throttle_warning(TeacherConfig(max_in_flight=63), info(64)).count("64") == 1
    for teacher in (TeacherConfig(), TeacherConfig(max_in_flight=64)):
        assert not throttle_warning(teacher, info(64))
