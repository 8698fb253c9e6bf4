"""The teacher behind a network address: every request is a future that is done when its sequence is scored.

On the road of one batch: rollout -> *teacher score* -> micro-batches. Any number of threads may use
one client. Behind it: `queries` (what is asked), `pending` and `streams` (which answer is one to it),
`exchange` (the thread and its window), `link` (the connection), `outage` (when to give up). Needs
numpy and zmq, no torch.
"""

from __future__ import annotations

import functools
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from gkd.errors import ConfigError, TeacherUnavailable
from gkd.teacher.base import TeacherInfo
from gkd.teacher.exchange import ClientStats, Exchange
from gkd.teacher.link import TeacherLink
from gkd.teacher.outage import OutageClock
from gkd.teacher.pending import Info, Pending, T
from gkd.teacher.queries import Queries
from gkd.types import Rollout, TeacherTopK
from teacher_server.wire.protocol import MAX_ID, MAX_K, Wire

if TYPE_CHECKING:
    from teacher_server.wire.keys import PeerKeys

MAX_WAITING = 4096


class ZmqTeacher:
    """A `Teacher` at `server_ip:server_port`.

    Every method may raise, and every future may end with, TeacherUnavailable (nothing was heard, or
    nothing answered, for longer than the budgets; the client can be used again) or another TeacherError
    (the request was refused, the answer cannot be right, or the client is closed).

    Args:
        k: top-k entries a response position.
        temperature: the teacher's logits are divided by it.
        n_vocab: size of the common vocabulary; the teacher's rows are cut to it, then normalised. 0 = all.
        n_in_flight: window of unanswered requests at the server; more are kept here.
        request_timeout_s: a request without an answer for this long is sent again.
        outage_budget_s: give up when nothing at all was heard for this long, or when the server lives
            but returned no scores for this long plus `request_timeout_s`.
        wire: "fp16" (5 bytes an entry) or "fp32" (8 bytes, exact).
        expected_fingerprint: of the teacher's weights; another teacher's scores raise TeacherError. Empty: the
            first one that answers is the expected one.
        name: which of the server's teachers; may be empty if there is one.
        keys: folder with server.key and client.key_secret; empty: no encryption.
        max_waiting: requests kept here before `submit` blocks.

    Raises:
        ConfigError: a setting is out of range, or the keys cannot be used.
    """

    def __init__(
        self,
        server_ip: str,
        server_port: int,
        *,
        k: int,
        temperature: float,
        n_vocab: int,
        n_in_flight: int,
        request_timeout_s: float,
        outage_budget_s: float,
        wire: Wire = "fp16",
        expected_fingerprint: str = "",
        name: str = "",
        keys: str = "",
        max_waiting: int = MAX_WAITING,
    ) -> None:
        _check_range("teacher.server_port", server_port, 1, 65535)
        _check_range("n_vocab", n_vocab, 0, MAX_ID + 1)
        _check_range("teacher.topk", k, 1, min(MAX_K, n_vocab or MAX_K))
        _check_range("teacher.temperature", temperature, 1e-4, 1e4)
        _check_range("n_in_flight", n_in_flight, 1, 1 << 20)
        _check_range("max_waiting", max_waiting, 1, 1 << 20)
        _check_range("teacher.request_timeout_s", request_timeout_s, 1e-3, 4e4)
        _check_range("teacher.outage_budget_s", outage_budget_s, 1e-3, 1e6)
        if len(name) > 128:
            raise ConfigError("teacher.name", name, "it is longer than 128 characters.", "use a name of the server's.")
        self._queries = Queries(name, k, temperature, n_vocab, wire, request_timeout_s)
        self._n_in_flight = n_in_flight
        self._described: TeacherInfo | None = None
        clock = OutageClock(outage_budget_s=outage_budget_s, stall_budget_s=outage_budget_s + request_timeout_s)
        link = TeacherLink(server_ip, server_port, clock, load_keys(keys))
        self._exchange = Exchange(
            link, n_in_flight=n_in_flight, max_waiting=max_waiting, fingerprint=expected_fingerprint
        )

    def __enter__(self) -> ZmqTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is not answered and close, without waiting for the server; may be called twice."""
        self._exchange.close()

    @property
    def stats(self) -> ClientStats:
        """Counts since the client was made; its own thread goes on counting."""
        return self._exchange.stats

    def info(self) -> TeacherInfo:
        """See `Teacher.info`. Blocks until a model has loaded there or the outage budget is spent."""
        self._described = self._send(Info(self._queries.teacher)).result()
        return self._described

    def score(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[int, TeacherTopK]]:
        """See `Teacher.score`. Leaving the iterator early cancels what is not answered.

        No more than `n_in_flight` sequences of one call are under way or wait for their consumer.
        """
        vocab_size = self._vocab_size()
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        todo = deque(enumerate(rollouts))
        mine: dict[int, Future[TeacherTopK]] = {}
        try:
            while todo or mine:
                batch = []
                while todo and len(mine) < self._n_in_flight:
                    index, rollout = todo.popleft()
                    pending = self._queries.topk(rollout, vocab_size)
                    pending.future.add_done_callback(functools.partial(_note_done, done, index))
                    mine[index] = pending.future
                    batch.append(pending)
                self._exchange.submit(batch)
                index = done.get()
                try:
                    scores = mine.pop(index).result()
                except TeacherUnavailable as error:
                    unsent = f" {len(todo)} more sequences had not been sent yet." if todo else ""
                    raise TeacherUnavailable(f"{error}{unsent}") from error
                yield index, scores
        finally:
            for future in mine.values():
                future.cancel()

    def submit(self, rollout: Rollout, *, k: int = 0, mass: float = 0.0) -> Future[TeacherTopK]:
        """Score one sequence; any number at a time, done in the order in which they are scored.

        Blocks only while `max_waiting` requests wait here. Cancelling the future drops the request, here and at the
        server.

        Args:
            k: another one than the client's; 0 = the client's.
            mass: list only as many of the k as it takes to reach this probability; 0 = all k.
        """
        return self._send(self._queries.topk(rollout, self._vocab_size(), k, mass))

    def submit_sampled(self, rollout: Rollout) -> Future[np.ndarray]:
        """[R] float32, nats: the teacher's logprob of each response token. See `submit`."""
        return self._send(self._queries.sampled(rollout))

    def submit_hidden(self, rollout: Rollout) -> Future[np.ndarray]:
        """[R, H] float32: the final hidden states. `lm_head` makes logits of them, which are neither cut to `n_vocab`
        nor divided by `temperature` yet. See `submit`."""
        hidden_size = (self._described or self.info()).hidden_size
        return self._send(self._queries.hidden(rollout, hidden_size, self._exchange.acknowledge))

    def logits(self, rollout: Rollout) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, [rows, V] float32) pieces of the logits / temperature, in order; each row's largest is 0.

        The server runs at most 8 messages of up to 4 MiB ahead of the consumer. It is asked with the first `next`;
        leaving the iterator early cancels the request. One thread.
        """
        pending = self._queries.logits(rollout, self._vocab_size(), self._exchange.acknowledge)
        self._send(pending)
        yield from pending.pieces()

    def lm_head(self) -> np.ndarray:
        """[V, H] float32: final hidden states @ lm_head.T are the logits. Blocks until it is here."""
        info = self._described or self.info()
        return self._send(self._queries.head(info, self._exchange.acknowledge)).result()

    def _vocab_size(self) -> int:
        """What ids are checked against; the server is asked once, and only if nobody said it."""
        return self._queries.n_vocab or (self._described or self.info()).vocab_size

    def _send(self, pending: Pending[T]) -> Future[T]:
        self._exchange.submit([pending])
        return pending.future


def _note_done(done: queue.SimpleQueue[int], index: int, _: Future[TeacherTopK]) -> None:
    done.put(index)


def load_keys(folder: str) -> PeerKeys | None:
    """Of teacher.keys; None: empty, no encryption. Raises ConfigError."""
    if not folder:
        return None
    from teacher_server.wire.keys import KeysError, load_peer_keys

    try:
        return load_peer_keys(folder, "client")
    except KeysError as error:
        fix = "give a client's bundle, made by `python -m teacher_server keygen`."
        raise ConfigError("teacher.keys", folder, str(error), fix) from error


def _check_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also true for NaN
        raise ConfigError(key, value, f"it is not within {low:g} to {high:g}.", "choose a value in this range.")
