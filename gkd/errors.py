"""Every error a user can meet has one type here, and says what to do about it.

Floor 0: no imports beyond the standard library, so that any process, client or server side,
can raise and catch these without loading an engine.
"""

from __future__ import annotations

from collections.abc import Sequence


class GkdError(Exception):
    """Root of the errors this project raises on purpose; `main_gkd` prints them without a traceback."""


class ConfigError(GkdError):
    """A setting is wrong. Names the key, the value it had, and the fix.

    Args:
        key: dotted config key, e.g. ``actor.tp``.
        value: what the key was set to.
        problem: what is wrong with it, in one sentence.
        fix: what to write instead, in one sentence.
    """

    def __init__(self, key: str, value: object, problem: str, fix: str) -> None:
        self.key, self.value, self.problem, self.fix = key, value, problem, fix
        super().__init__(f"{key} = {value!r}: {problem} Fix: {fix}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        # Exception's default pickling replays the formatted message as the only argument; errors
        # cross process borders (Ray) here, so the four parts are replayed instead.
        return type(self), (self.key, self.value, self.problem, self.fix)


class DataError(GkdError):
    """A prompt file, a tokenizer or a sequence is not what it should be."""


class ModelError(GkdError):
    """A model folder cannot be used: missing, corrupt, of an unsupported architecture, or with wrong tensors."""


class CheckpointError(GkdError):
    """A checkpoint, or another file of the run folder, is missing, damaged, of another run, or cannot be written."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint does not hold what was saved, and never will again; an earlier one may be used instead."""


class ClusterError(GkdError):
    """The wanted processes or GPUs cannot be had, or one of them died or stayed silent."""


class OutOfMemory(ClusterError):
    """A rank ran out of memory, of its device or its host; says who held it and what to change.

    The other ranks may wait for it for ever, as when one died.
    """


class RankTimeout(ClusterError):
    """Some ranks have not answered in time; they may hang.

    Args:
        late: what they are called, each name with its rank's in it; empty: nobody knows.
        explained: the message says who hangs where.
    """

    def __init__(self, message: str, late: Sequence[str] = (), *, explained: bool = False) -> None:
        self.late, self.explained = tuple(late), explained
        super().__init__(message)


class TeacherError(GkdError):
    """The teacher answered, but refused the request or sent scores that cannot be right."""


class TeacherUnavailable(TeacherError):
    """The teacher did not answer within its budget; names the address and how to start it."""


class WeightSyncError(GkdError):
    """The rollout engine does not hold the weights the actor exported; names the tensors."""


class NumericsError(GkdError):
    """A NaN, an infinity or an impossible value in scores, loss or gradient; raised before the optimizer moves."""
