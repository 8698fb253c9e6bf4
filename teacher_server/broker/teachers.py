"""Which teachers this server has: their names, and the one model that stands behind each.

A server that starts with the model's folder knows its fingerprint; otherwise the first worker of a
teacher says which model it is. Every later one must hold the same, in the same dtype, as long as the
server lives: otherwise two answers to one request could differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from teacher_server.broker.request_queue import RequestQueue
from teacher_server.wire.protocol import PROTOCOL_VERSION, ErrorReply, InfoReply
from teacher_server.wire.status import TeacherStatus
from teacher_server.wire.worker_protocol import WorkerHello

_MUST_AGREE = ("model_fingerprint", "tokenizer_fingerprint", "vocab_size", "hidden_size", "dtype")


class Teachers:
    """
    Args:
        expected: model fingerprint of each teacher by name, empty if the first worker says it; requests for them may
            wait for their workers. Nothing expected: any name may join.
    """

    def __init__(self, expected: Mapping[str, str]) -> None:
        self._expected = dict(expected)
        self._first: dict[str, WorkerHello | None] = dict.fromkeys(expected)

    def resolve(self, name: str) -> str:
        """The full name of the teacher asked for. Raises LookupError with the text for the client."""
        if name in self._first:
            return name
        names = ", ".join(sorted(self._first)) or "none"
        if name:
            raise LookupError(f"no teacher {name!r} here, but: {names}")
        if len(self._first) > 1:
            raise LookupError(f"this server has several teachers, name one of: {names}")
        return next(iter(self._first), "")

    def refusal(self, hello: WorkerHello) -> str:
        """Why this worker may not join; empty if it may, and then it is noted."""
        if self._expected and hello.teacher not in self._expected:
            # A new name would make `the only teacher` ambiguous, and with it every request that names none.
            return f"there is no teacher {hello.teacher!r} here, but: {', '.join(sorted(self._first))}"
        model = self._expected.get(hello.teacher, "")
        if model and hello.model_fingerprint != model:
            # Also if it is the first: one that was left over from another model must not decide what is served.
            return f"its model_fingerprint {hello.model_fingerprint} is not the {model} of teacher {hello.teacher!r}"
        first = self._first.get(hello.teacher)
        if first is None:
            self._first[hello.teacher] = hello
            return ""
        for what in _MUST_AGREE:
            if getattr(first, what) != getattr(hello, what):
                return (
                    f"its {what} {getattr(hello, what)} is not the {getattr(first, what)} of teacher {hello.teacher!r} "
                    f"({first.model_path})"
                )
        return ""

    def info(self, request_id: bytes, name: str, ledger: RequestQueue) -> InfoReply | ErrorReply:
        """The description of a resolved teacher, or `busy` while none of its workers is there."""
        hellos = [worker.hello for worker in ledger.workers.values() if worker.hello.teacher == name]
        if not hellos:
            text = "no worker has loaded the model yet"
            return ErrorReply(request_id=request_id, code="busy", text=text, retry_after_s=0.5)
        return InfoReply(
            request_id=request_id,
            protocol_version=PROTOCOL_VERSION,
            teacher=name,
            model_name=hellos[0].model_name,
            model_path=hellos[0].model_path,
            model_fingerprint=hellos[0].model_fingerprint,
            tokenizer_fingerprint=hellos[0].tokenizer_fingerprint,
            vocab_size=hellos[0].vocab_size,
            hidden_size=hellos[0].hidden_size,
            max_tokens=min(hello.max_tokens for hello in hellos),
            n_workers=len(hellos),
            n_streams=sum(hello.n_streams for hello in hellos),
            engine=_all_of(hello.engine for hello in hellos),
            device=_all_of(hello.device for hello in hellos),
            dtype=hellos[0].dtype,
        )

    def statuses(self, ledger: RequestQueue) -> list[TeacherStatus]:
        """One entry a teacher, those without workers included."""
        return [
            TeacherStatus(
                name=name,
                model_name=first.model_name if first else "",
                model_path=first.model_path if first else "",
                model_fingerprint=first.model_fingerprint if first else "",
                tokenizer_fingerprint=first.tokenizer_fingerprint if first else "",
                n_queued=ledger.n_queued_for(name),
                n_workers=sum(worker.hello.teacher == name for worker in ledger.workers.values()),
            )
            for name, first in self._first.items()
        ]


def _all_of(values: Iterable[str]) -> str:
    """The distinct values, for people: `cuda:0,cuda:1`; cut to what the header takes."""
    distinct: Sequence[str] = sorted(set(values))
    return ",".join(distinct)[:128]
