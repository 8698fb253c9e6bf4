"""The teachers behind a broker: find one by a client's model name, score one sequence with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from teacher_server.client.requests import InfoCall, NamedSequence, RequestSettings, StatusCall
from teacher_server.errors import TeacherError
from teacher_server.http.link import RESEND_S, BrokerLink, RelayCall
from teacher_server.http.question import Refusal, Wanted
from teacher_server.wire.protocol import MAX_ID, Buffer, InfoReply, ScoreReply, Wire
from teacher_server.wire.status import ServerStatus, TeacherStatus

_IN_FLIGHT = 256  # sequences at the broker


class Teachers:
    """All teachers of one broker."""

    def __init__(self, link: BrokerLink) -> None:
        self._link = link
        self._names: dict[str, TeacherStatus] = {}  # a client's name of a model -> teacher
        self._epoch = b""  # the broker that has these
        self._window = asyncio.Semaphore(_IN_FLIGHT)

    async def known(self) -> list[tuple[TeacherStatus, int]]:
        """Return each teacher and its longest sequence in tokens, 0 before it has loaded. Raises Refusal."""
        status: ServerStatus = await self._link.ask(StatusCall())
        return [(teacher, await self._max_tokens(teacher)) for teacher in status.teachers]

    async def _max_tokens(self, teacher: TeacherStatus) -> int:
        if not teacher.n_workers:
            return 0
        reply: InfoReply = await self._link.ask(InfoCall(teacher.name))
        return reply.max_tokens

    async def find(self, model: str) -> TeacherStatus:
        """Return the teacher of a client's model name: a teacher, its model, or the model's path.

        Its fingerprint is empty before it has loaded.

        Raises:
            Refusal: no teacher has this name, or there are several and the request names none.
        """
        cached = self._names.get(model)
        epoch = self._link.epoch
        if self._epoch != epoch or cached is None or not cached.model_fingerprint:
            teachers = [teacher for teacher, _ in await self.known()]
            by_alias: dict[str, set[str]] = {"": {teacher.name for teacher in teachers}}
            for teacher in teachers:
                for name in (teacher.model_name, teacher.model_path):
                    by_alias.setdefault(name, set()).add(teacher.name)
            by_alias |= {teacher.name: {teacher.name} for teacher in teachers}
            by_name = {teacher.name: teacher for teacher in teachers}
            self._names = {name: by_name[next(iter(of))] for name, of in by_alias.items() if len(of) == 1}
            self._epoch = epoch  # The broker may have restarted since then.
            if model not in self._names:
                names = ", ".join(sorted(by_name))
                problem = "missing, and there are several teachers" if not model else "not one of the teachers"
                raise Refusal(404, f"model = {model!r}: {problem}. Fix: one of {names}; see /v1/models.")
        return self._names[model]

    async def score(self, teacher: TeacherStatus, wanted: Wanted, wire: Wire) -> tuple[ScoreReply, list[Buffer]]:
        """Return the reply for R rows of `wanted.depth` entries with the tokens' own logprobs, and its frames.

        Raises:
            Refusal: as `BrokerLink.ask`, or a value is out of the protocol's range, or the reply is of another model.
        """
        settings = RequestSettings(teacher.name, wanted.depth, wanted.temperature, 0, wire, RESEND_S)
        sequence = NamedSequence("a sequence", wanted.ids[: wanted.start], wanted.ids[wanted.start :])
        try:
            request = RelayCall(settings.score([sequence], "topk", k=settings.k, with_sampled=True), MAX_ID + 1)
        except TeacherError as error:
            raise Refusal(400, f"{error}. Fix: change the request.") from error
        async with self._window:
            reply, frames = await self._link.ask(request)
        if teacher.model_fingerprint not in ("", reply.model_fingerprint):  # the request was sent again after a restart
            raise Refusal(503, "the teacher server was restarted with another model. Fix: send the request again.")
        return reply, frames

    async def score_all(
        self, teacher: TeacherStatus, wanted: Sequence[Wanted], wire: Wire
    ) -> list[tuple[ScoreReply, list[Buffer]]]:
        """Return `score` of each sequence. The first error cancels the others. Raises as `score`."""
        tasks = [asyncio.create_task(self.score(teacher, sequence, wire)) for sequence in wanted]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
