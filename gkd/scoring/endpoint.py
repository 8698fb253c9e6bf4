"""Ray actor of one scoring endpoint: scores the rollouts of one data-parallel group with the teacher servers.

Runs on the group's host without GPU and torch. Tokens come from the object store and go to the teacher over ZMQ. The
scores go to the object store of this host, where the group's last pipeline stage maps them without a copy. Which
signals are requested follows from teacher.signal and the loss (`gkd.config.loss_spec.teacher_signals`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from gkd.config.schema import Config
from gkd.data.chunks import ColumnList
from gkd.data.score_checks import check_top_ids
from gkd.errors import TeacherChanged, TeacherError, TeacherUnavailable
from gkd.roles import Computation
from gkd.scoring.group_endpoint import GroupEndpoint, summary_of
from gkd.scoring.teacher.info import Probe, head_columns
from gkd.scoring.teacher.store import dataset_keys, open_store
from gkd.scoring.teacher.teacher import Teacher, open_teacher
from gkd.scoring.teacher.window import Window, grouped
from gkd.text.comparison import Comparison
from gkd.types import Rollout, ScoreTimes, TeacherHealth, TeacherScores
from teacher_server.wire.protocol import RowsReply, ScoreReply


class ScoringEndpoint(GroupEndpoint):
    """Client of one data-parallel group. Scores several chunks concurrently, one per thread.

    Args:
        comparison: of the student with the teacher, which drops its rows from `n_listed` on before it normalizes.
        fingerprints: by route, of the teacher that preflight checked; scores of another teacher are refused.
        windows: by route, the limits of the sequences in flight.
        probes: by route, of the HTTP servers that preflight probed; empty: they are not probed again.
        numerics: by route, see `TeacherInfo`; empty: without a store.
        names: by route, of the models, for errors.

    Raises:
        ConfigError: invalid loss settings.
    """

    def __init__(
        self,
        config: Config,
        comparison: Comparison,
        fingerprints: Sequence[str],
        windows: Sequence[Window],
        probes: Sequence[Probe | None] = (),
        numerics: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(config)
        self._comparison = comparison
        self._numerics = numerics
        self._names = names
        self._probes = probes
        self._n_vocab = comparison.n_listed
        self._fingerprints = fingerprints
        self._windows = windows
        self._derived = derived = config.derived
        self._signals = derived.signals
        self._routes = derived.routes
        self._n_student_ids = derived.n_student_ids
        self._lock = threading.Lock()
        self._teachers: list[Teacher] = []  # one per route
        self._outage: TeacherUnavailable | None = None
        self._computations = Computations()
        self._store = open_store(config.teacher) if config.teacher.store else None

    def is_up(self) -> bool:
        """Return once the process runs. Raises ConfigError: teacher.keys cannot be read on this host."""
        self.clients()
        return True

    def clients(self) -> list[Teacher]:
        """Return the teachers by route; the first call opens them."""
        with self._lock:
            while len(self._teachers) < len(self._routes):
                self._teachers.append(self._connect(len(self._teachers)))
            return self._teachers

    def _connect(self, route: int) -> Teacher:
        teacher = self._routes[route].teacher
        return open_teacher(
            teacher,
            k=teacher.topk if "topk" in self._signals else 1,
            n_vocab=self._n_vocab,
            n_in_flight=self._windows[route].n_in_flight,
            fingerprint=self._fingerprints[route],
            probe=self._probes[route] if self._probes else None,
            units=self._comparison.unit_of_token,
            on_scored=functools.partial(self._computations.note, route=self._routes[route].name),
        )

    def take_computations(self) -> list[Computation]:
        """Return what the teacher has computed for this endpoint since the last call."""
        return self._computations.take()

    def score(self, rollouts: Sequence[Rollout]) -> tuple[list[TeacherScores], bytes]:
        """Score a chunk; blocks. After an error all its requests are cancelled.

        Returns:
            Scores in the order of `rollouts`, with the tables that the loss needs, and their encoded `ScoreSummary`.
            These are two Ray objects; the driver fetches only the second.

        Raises:
            TeacherError, TeacherUnavailable: see `Teacher`; with several teachers it names the route.
        """
        if self._outage is not None:  # the run is ending: queued chunks must not wait for the teacher again
            raise self._outage
        teachers = self.clients()
        submitted_s = time.time()
        completed_s = [submitted_s] * len(rollouts)  # stays so for scores from the store
        store = self._store
        stored = dict[int, TeacherScores]()
        keys = dict[int, bytes]()
        if store is not None:
            store.refresh()
            keys = dataset_keys(rollouts, self._derived, self._fingerprints, self._n_vocab, self._numerics)
            stored = {i: entry for i, key in keys.items() if (entry := store.get(key, rollouts[i])) is not None}
        asked = [i for i in range(len(rollouts)) if i not in stored]
        texts = self._comparison.for_teacher(rollouts)
        asked = [i for i in asked if len(texts[i].response_ids)]
        try:
            new_scores = self._request_all(teachers, texts, asked, completed_s)
        except TeacherUnavailable as error:
            self._outage = error
            raise
        if store is not None:
            for i in keys.keys() & new_scores.keys():
                store.put(keys[i], rollouts[i], new_scores[i])
        both = self._comparison.completed(new_scores, texts) | stored
        scores = [self._in_columns(both[i], rollout.route) for i, rollout in enumerate(rollouts)]
        return ColumnList(scores), summary_of(scores, ScoreTimes(submitted_s, np.array(completed_s))).encode()

    def health(self) -> TeacherHealth | None:
        """Return the state of the teachers of this endpoint, or None if it has not connected yet."""
        healths = [
            replace(teacher.health(), route=route.name)
            for route, teacher in zip(self._routes, self._teachers, strict=False)  # connecting
        ]
        return TeacherHealth.merged(healths)

    def lm_head(self) -> np.ndarray:
        """Return the LM head, [n_vocab, D] float32; hidden states @ lm_head.T = logits before the temperature.

        The heads of several teachers are side by side, see `_in_columns`; D is the sum of theirs. Called once, for the
        actor; not cached. Raises TeacherError, TeacherUnavailable: as for `score`; also if one has too few rows or
        non-finite values.
        """
        heads: dict[int, np.ndarray] = {}  # first column -> LM head
        for start, teacher, route in zip(self._head_columns[0], self.clients(), self._routes, strict=True):
            if start in heads:
                continue
            head = teacher.lm_head()
            if len(head) < self._n_vocab:
                problem = f"has {len(head)} rows, expected at least {self._n_vocab}"
                raise TeacherError(f"the LM head of {route.label} {problem}")
            if not np.isfinite(head.sum(dtype=np.float64)):  # finite float32 values cannot overflow a float64 sum
                raise TeacherError(f"the LM head of {route.label} contains NaN or infinity")
            heads[start] = head[: self._n_vocab]
        return heads[0] if len(heads) == 1 else np.hstack(list(heads.values()))

    @functools.cached_property
    def _head_columns(self) -> tuple[list[int], int]:
        """Return `head_columns` of the routes; asks the servers once."""
        return head_columns([teacher.info() for teacher in self.clients()])

    def _in_columns(self, scores: TeacherScores, route: int) -> TeacherScores:
        """Return the hidden states of a route's teacher as [R, D of all heads]: zeros in the columns of others.

        So one product with the joined LM head gives each row the logits of its own teacher. They are scaled so that
        teacher.temperature divides them as the route's own would.
        """
        scale = self._config.teacher.temperature / self._routes[route].teacher.temperature
        if scores.hidden is None or (len(self._routes) == 1 and scale == 1):
            return scores
        starts, n_columns = self._head_columns
        wide = np.zeros((len(scores.hidden), n_columns), np.float32)
        columns = wide[:, starts[route] : starts[route] + scores.hidden.shape[1]]
        np.multiply(scores.hidden, np.float32(scale), out=columns)
        return replace(scores, hidden=wide)

    def _request_all(
        self, teachers: Sequence[Teacher], rollouts: Sequence[Rollout], asked: Sequence[int], completed_s: list[float]
    ) -> dict[int, TeacherScores]:
        """Submit the requests of some rollouts and wait; return their scores by position.

        Args:
            asked: positions of these rollouts.
            completed_s: gets the time of the completion of each, at its position.
        """
        one = self._signals[0] in ("hidden", "logits")  # matrices of one sequence
        n_per_request = [1 if one else window.n_per_request for window in self._windows]
        k = max(route.teacher.topk for route in self._routes) if "topk" in self._signals else 1
        requests = grouped([rollouts[i] for i in asked], n_per_request, k)
        groups = [[asked[i] for i in part] for part in requests]
        futures: list[Future[list[TeacherScores]]] = []
        began_s = completed_s.copy()
        try:
            for group in groups:
                together = [rollouts[index] for index in group]
                for r in together:
                    check_top_ids(r, self._n_student_ids, f"prompt {r.prompt_id}, sample {r.sample_index}")
                future = teachers[together[0].route].submit(together, self._signals, mass=self._config.teacher.mass)
                future.add_done_callback(functools.partial(_record_time, completed_s, group))
                futures.append(future)
            done = wait(futures, return_when=FIRST_EXCEPTION).done
            for group, future in zip(groups, futures, strict=True):
                if future in done:
                    with self._named(rollouts[group[0]]):
                        future.result()  # raises the error that ended the wait
                    if completed_s[group[0]] == began_s[group[0]]:  # its callbacks have not run yet
                        _record_time(completed_s, group, future)
            return {
                index: score
                for group, future in zip(groups, futures, strict=True)
                for index, score in zip(group, future.result(), strict=True)
            }
        finally:
            for future in futures:
                future.cancel()

    @contextmanager
    def _named(self, rollout: Rollout) -> Iterator[None]:
        """Name the route of a rollout in errors of its teacher."""
        try:
            yield
        except TeacherError as error:
            route = self._routes[rollout.route]
            original = self._changed(rollout.route, error) if isinstance(error, TeacherChanged) else error
            raise type(original)(f"{route.label}: {original}") if route.name else original from error

    def _changed(self, route: int, error: TeacherChanged) -> TeacherChanged:
        """Return an error with the names of both models: `info` of the server fails with that of the new one."""
        try:
            self.clients()[route].info()
        except TeacherError as named:
            error = named if isinstance(named, TeacherChanged) else error
        name = f" ({self._names[route]})" if self._names else ""
        return TeacherChanged(f"{error}{name}. Fix: start the server with that model and resume, or begin a new run")


def _record_time(completed_s: list[float], group: Sequence[int], _: Future[Any]) -> None:
    for index in group:
        completed_s[index] = time.time()


_MOST = 5000  # batches between two calls of `take`; older ones are dropped


class Computations:
    """Batches whose replies arrived since the last `take`. Thread-safe; the threads of the teachers call `note`."""

    def __init__(self) -> None:
        self._batches: dict[tuple[str, float], Computation] = {}
        self._lock = threading.Lock()

    def note(self, reply: ScoreReply | RowsReply, n_sequences: int, *, route: str = "") -> None:
        """Note a reply; all replies of one batch have the same worker and compute_s.

        Args:
            n_sequences: that are complete with this reply.
            route: of several teachers, whose workers may have equal names.
        """
        worker = f"{route} {reply.worker}".lstrip()
        key = worker, reply.compute_s
        with self._lock:
            batch = self._batches.get(key) or Computation(worker, time.time(), reply.queue_s, reply.compute_s, 0)
            self._batches[key] = replace(batch, n_sequences=batch.n_sequences + n_sequences)
            if len(self._batches) > _MOST:
                del self._batches[next(iter(self._batches))]

    def take(self) -> list[Computation]:
        """Return and forget the batches, in the order of their first replies."""
        with self._lock:
            batches = self._batches
            self._batches = {}
        return list(batches.values())
