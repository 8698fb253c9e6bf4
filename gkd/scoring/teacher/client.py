"""A teacher of the teacher server, a `gkd.scoring.teacher.teacher.Teacher`.

`teacher_server.client` sends and checks the requests; this module converts rollouts to requests, and replies to scores.
Imports numpy, but not torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack, cast

import msgspec
import numpy as np

from gkd.config.schema_teacher import TeacherConfig
from gkd.data.score_checks import check_own
from gkd.errors import ConfigError
from gkd.scoring.teacher.info import TeacherArgs, TeacherInfo
from gkd.types import Rollout, TeacherHealth, TeacherScores
from teacher_server.client.client import Advice, Client, ClientStats, OnScored
from teacher_server.client.connection import Connection
from teacher_server.client.generate import AnswerSettings, GenerateCall, NamedPrompt
from teacher_server.client.outage import OutageClock
from teacher_server.client.requests import InfoCall, MatrixCall, NamedSequence, RequestSettings, ScoreCall, Scored
from teacher_server.errors import ServerError
from teacher_server.wire.protocol import InfoReply, Signal, Wire
from teacher_server.wire.table import TopKTable

if TYPE_CHECKING:
    from teacher_server.wire.keys import PeerKeys

MAX_WAITING = 4096


class ZmqTeacher:
    """A teacher at `teacher.server_ip:server_port`. Thread-safe.

    Methods and futures raise TeacherUnavailable if the server sent no reply, or no scores, within the budgets; the
    client remains usable. They raise another TeacherError if a request was refused, scores are invalid, or the client
    is closed.

    Args:
        teacher: the settings, already checked. A request without a reply is sent again after request_timeout_s. The
            client gives up if no message at all arrived for outage_budget_s, or if the server is alive but returned no
            scores for that long plus request_timeout_s.
        on_scored, units: see `gkd.scoring.teacher.teacher.open_teacher`.
        max_waiting: requests waiting in the client before a further one blocks.

    Raises:
        ConfigError: the keys or the address are invalid.
    """

    def __init__(
        self,
        teacher: TeacherConfig,
        *,
        max_waiting: int = MAX_WAITING,
        on_scored: OnScored | None = None,
        units: np.ndarray | None = None,
        **args: Unpack[TeacherArgs],
    ) -> None:
        wire = cast(Wire, teacher.wire)
        resend_s = teacher.request_timeout_s
        sizes = args["k"], teacher.temperature, args["n_vocab"]
        self._settings = RequestSettings(teacher.name, *sizes, wire, resend_s, units)
        self._info: TeacherInfo | None = None
        self._budget_s = args.get("outage_budget_s") or teacher.outage_budget_s
        clock = OutageClock(outage_budget_s=self._budget_s, stall_budget_s=self._budget_s + resend_s)
        keys = load_keys(teacher.keys)
        try:
            connection = Connection(f"tcp://{teacher.server_ip}:{teacher.server_port}", clock, keys)
        except ServerError as error:
            fix = "use a host name or an IPv4 address."
            raise ConfigError("teacher.server_ip", teacher.server_ip, str(error), fix) from error
        self._client = Client(
            connection,
            Advice(server_command(teacher.server_ip, teacher.server_port), "teacher.keys"),
            n_in_flight=args["n_in_flight"],
            max_waiting=max_waiting,
            fingerprint=args.get("fingerprint", ""),
            on_scored=on_scored,
        )

    def __enter__(self) -> ZmqTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail all pending requests and close, without waiting for the server. Idempotent."""
        self._client.close()

    @property
    def stats(self) -> ClientStats:
        """Return the live counters of this client."""
        return self._client.stats

    def health(self) -> TeacherHealth:
        """See `Teacher.health`."""
        client = self._client
        server = client.connection
        return TeacherHealth(client.silent_s, self._budget_s, client.n_in_flight, server.n_workers, server.n_queued)

    def info(self) -> TeacherInfo:
        """See `Teacher.info`; blocks until the server has loaded a model or the outage budget is spent."""
        reply: InfoReply = self._client.submit(InfoCall(self._settings.teacher)).result()
        content = msgspec.structs.asdict(reply)
        del content["request_id"]
        self._info = TeacherInfo(fingerprint=content.pop("model_fingerprint"), is_server=True, **content)
        return self._info

    def submit(
        self, rollouts: Sequence[Rollout], signals: Sequence[Signal], *, mass: float = 0.0
    ) -> Future[list[TeacherScores]]:
        """See `Teacher.submit`; signals hidden and logits take one sequence at a time.

        Blocks only while `max_waiting` requests wait in the client.
        """
        sequences = [sequence_of(rollout) for rollout in rollouts]
        if signals[0] in ("hidden", "logits"):
            return self._submit_rows(sequences, signals[0])
        topk = "topk" in signals
        message = self._settings.score(
            sequences,
            "topk" if topk else "sampled",
            k=self._settings.k if topk else 0,
            mass=mass if topk else 0.0,
            with_sampled=topk and "sampled" in signals,
        )
        return self._client.submit(ScoreCall(message, self._vocab_size(), _scores_of))

    def _submit_rows(self, sequences: Sequence[NamedSequence], signal: Signal) -> Future[list[TeacherScores]]:
        message = self._settings.score(sequences[:1], signal)
        is_hidden = signal == "hidden"
        dtype: type[np.floating] = np.float16 if self._settings.wire == "fp16" and not is_hidden else np.float32
        n_columns = (self._info or self.info()).hidden_size if is_hidden else self._vocab_size()
        shape = (sequences[0].n_rows, n_columns)
        return self._client.submit(MatrixCall(message, shape, partial(_rows_of, signal), dtype))

    def generate(self, prompts: Sequence[NamedPrompt], settings: AnswerSettings) -> Future[list[np.ndarray]]:
        """See `Teacher.generate`; blocks as `submit`."""
        teacher = self._settings.teacher
        return self._client.submit(GenerateCall(prompts, settings, teacher=teacher, resend_s=self._settings.resend_s))

    def lm_head(self) -> np.ndarray:
        """See `Teacher.lm_head`."""
        info = self._info or self.info()
        shape = (info.vocab_size, info.hidden_size)
        return self._client.submit(MatrixCall(self._settings.head(), shape)).result()

    def _vocab_size(self) -> int:
        """Return the upper bound of token ids; asks the server once if `n_vocab` is 0."""
        return self._settings.n_vocab or (self._info or self.info()).vocab_size


def sequence_of(rollout: Rollout) -> NamedSequence:
    """Return what the teacher scores of a rollout. Raises TeacherError: `own` marks no token."""
    name = f"prompt {rollout.prompt_id}, sample {rollout.sample_index}"
    sent = rollout.for_teacher()
    check_own(sent, name)
    return NamedSequence(name, sent.prompt_ids, sent.response_ids, sent.own, sent.top_ids, sent.images)


def _scores_of(scored: list[Scored]) -> list[TeacherScores]:
    return [
        TeacherScores(replace(table, sampled=None), table.sampled)
        if isinstance(table, TopKTable)
        else TeacherScores(sampled_logprobs=table)
        for table in scored
    ]


def _rows_of(signal: str, rows: np.ndarray) -> list[TeacherScores]:
    return [TeacherScores(hidden=rows) if signal == "hidden" else TeacherScores(logits=rows)]


def server_command(host: str, port: int) -> str:
    """Return the command of a server at an address, as the user typed that of the trainer: gkd, or launch/*.sh."""
    typed = os.environ.get("GKD_COMMAND", "")
    command = re.sub(r"\btrain(?=(\.sh)?'?$)", "teacher", typed)
    return f"{command if command != typed else 'gkd teacher'} --model PATH --host {host} --port {port}"


def load_keys(folder: str) -> PeerKeys | None:
    """Load the keys in teacher.keys; None if it is empty (no encryption). Raises ConfigError."""
    if not folder:
        return None
    from teacher_server.wire.keys import KeysError, load_peer_keys

    try:
        return load_peer_keys(os.path.abspath(folder), "client")
    except KeysError as error:
        problem, _, fix = str(error).partition(" Fix: ")
        fix = fix or "give a client's bundle, made by `gkd teacher keygen`."
        raise ConfigError("teacher.keys", folder, problem, fix) from error
