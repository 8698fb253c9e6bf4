"""Names of the server's teachers, and the model of each.

If the server has the model's folder, the folder determines the fingerprint; otherwise the first worker
of the teacher does. Every later worker must have the same model and dtype for as long as the server
runs, because otherwise two replies to one request could differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from teacher_server.broker.request_queue import RequestQueue
from teacher_server.wire.protocol import ErrorReply, InfoReply, InfoRequest, ModelHeader
from teacher_server.wire.status import TeacherStatus
from teacher_server.wire.worker_protocol import WorkerHello

_SHOWN = ("model_name", "model_path", "model_fingerprint", "tokenizer_fingerprint")
_MUST_AGREE = ("model_fingerprint", "tokenizer_fingerprint", "vocab_size", "hidden_size", "dtype", "image_probe")


class Teachers:
    """Teachers of one server.

    Args:
        expected: teacher name -> model fingerprint, empty if the first worker determines it. Requests for these
            teachers are queued before a worker has joined. Without entries, a worker of any teacher may join.
    """

    def __init__(self, expected: Mapping[str, str]) -> None:
        self._expected = dict(expected)
        self._first: dict[str, WorkerHello | None] = dict.fromkeys(expected)

    def resolve(self, name: str) -> str:
        """Return the name of a teacher; an empty name selects the only one. Raises LookupError with a client's text."""
        if name in self._first:
            return name
        names = ", ".join(sorted(self._first)) or "none"
        if name:
            raise LookupError(f"no teacher {name!r} on this server; available: {names}")
        if len(self._first) > 1:
            raise LookupError(f"this server has several teachers; name one of: {names}")
        return next(iter(self._first), "")

    def refusal(self, hello: WorkerHello) -> str:
        """Return why this worker cannot join. If it can, record it and return an empty string."""
        if self._expected and hello.teacher not in self._expected:
            # A second teacher would make every request without a teacher's name ambiguous.
            return f"no teacher {hello.teacher!r} on this server; available: {', '.join(sorted(self._first))}"
        model = self._expected.get(hello.teacher, "")
        if model and hello.model_fingerprint != model:
            # Checked for the first worker too: a leftover worker must not determine the model that is served.
            return _mismatch(hello, "model_fingerprint", hello.model_fingerprint, model)
        first = self._first.get(hello.teacher)
        if first is None:
            self._first[hello.teacher] = hello
            return ""
        for field in _MUST_AGREE:
            if getattr(first, field) != getattr(hello, field):
                return f"{_mismatch(hello, field, getattr(hello, field), getattr(first, field))} ({first.model_path})"
        return ""

    def info(self, request: InfoRequest, request_queue: RequestQueue) -> InfoReply | ErrorReply:
        """Return the description of a teacher, or the error `busy` while it has no worker. Raises as `resolve`."""
        request_id = request.request_id
        name = self.resolve(request.teacher)
        hellos = [worker.hello for worker in request_queue.workers.values() if worker.hello.teacher == name]
        if not hellos:
            text = "no worker has loaded the model yet"
            return ErrorReply(request_id=request_id, code="busy", text=text, retry_after_s=0.5)
        model = {field: getattr(hellos[0], field) for field in ModelHeader.__struct_fields__}
        model |= {
            "max_tokens": min(hello.max_tokens for hello in hellos),
            "n_streams": sum(hello.n_streams for hello in hellos),
            "engine": _all_of(hello.engine for hello in hellos),
            "device": _all_of(hello.device for hello in hellos),
        }
        return InfoReply(request_id=request_id, n_workers=len(hellos), **model)

    def statuses(self, request_queue: RequestQueue) -> list[TeacherStatus]:
        """Return one entry per teacher, with or without workers."""
        return [
            TeacherStatus(
                name=name,
                **{field: getattr(first, field) if first else "" for field in _SHOWN},
                n_queued=request_queue.n_queued_for(name),
                n_workers=sum(worker.hello.teacher == name for worker in request_queue.workers.values()),
            )
            for name, first in self._first.items()
        ]


def _mismatch(hello: WorkerHello, field: str, got: object, expected: object) -> str:
    return f"its {field} {got} differs from the {expected} of teacher {hello.teacher!r}"


def _all_of(values: Iterable[str]) -> str:
    """Return the distinct values as text, `cuda:0,cuda:1`, truncated to the limit of the header."""
    distinct: Sequence[str] = sorted(set(values))
    return ",".join(distinct)[:128]
