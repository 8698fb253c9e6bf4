"""Error types of the project; every error that a user can see is one of these and names a fix.

Imports only the standard library, so that any process can raise and catch these without loading an engine. The errors
of the teacher's client are defined with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from teacher_server.errors import GkdError as GkdError
from teacher_server.errors import TeacherChanged as TeacherChanged
from teacher_server.errors import TeacherError as TeacherError
from teacher_server.errors import TeacherRefusal as TeacherRefusal
from teacher_server.errors import TeacherUnavailable as TeacherUnavailable


class ConfigError(GkdError):
    """A setting is invalid. Names the key, its value, the problem and the fix.

    Args:
        key: dotted config key, e.g. ``actor.tp``.
        value: the invalid value.
        problem: one sentence.
        fix: what to write instead, one sentence.
        more: other mistakes found at the same time; each is a further line of the message.
    """

    def __init__(self, key: str, value: object, problem: str, fix: str, more: Sequence[ConfigError] = ()) -> None:
        self.key = key
        self.value = value
        self.problem = problem
        self.fix = fix
        self.more = tuple(more)
        advice = f" Fix: {fix}" if fix else ""
        super().__init__("\n".join([f"{key} = {value!r}: {problem}{advice}", *map(str, more)]))

    def parts(self) -> list[ConfigError]:
        """Return an error for each mistake that this one names."""
        first = ConfigError(self.key, self.value, self.problem, self.fix)
        return [first, *(part for error in self.more for part in error.parts())]

    @classmethod
    def together(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """Return one error for at least one mistake; it has the key, value, problem and fix of the first."""
        first, *more = errors
        return cls(first.key, first.value, first.problem, first.fix, more)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str, tuple[ConfigError, ...]]]:
        # Exception's default pickling passes the formatted message as the only argument. Errors cross process
        # borders (Ray), so pickle the parts instead.
        return type(self), (self.key, self.value, self.problem, self.fix, self.more)


class DataError(GkdError):
    """A prompt file, a tokenizer, a sequence or an encoded message is malformed."""


class ModelError(GkdError):
    """A model folder is missing or corrupt, or has an unsupported architecture or unexpected tensors.

    Args:
        fix: what to do, one sentence; empty advises a complete folder.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = problem
        self.fix = fix
        super().__init__(problem, fix)  # both, for pickle

    def __str__(self) -> str:
        return f"{self.problem} Fix: {self.fix}" if self.fix else self.problem


class CheckpointError(GkdError):
    """A checkpoint or another file of the run folder is missing, damaged, from another run, or cannot be written."""


class DamagedCheckpoint(CheckpointError):
    """The content of a checkpoint does not match its manifest; an earlier checkpoint may still be valid."""


class ClusterError(GkdError):
    """The requested processes or GPUs are not available, or a process died or timed out."""


class RankFailed(ClusterError):
    """A process died, or raised an error that is not a `GkdError`; a new process may succeed.

    Args:
        raised: the error that it raised, in one line; empty if it died.
    """

    def __init__(self, message: str, raised: str = "") -> None:
        self.raised = raised
        super().__init__(message, raised)  # both, for pickle

    def __str__(self) -> str:
        return str(self.args[0])


class SenderFailed(RankFailed):
    """An actor rank died while it gave a restarted engine its weights; another process of the engine would not help."""


class EngineFailed(ClusterError):
    """A rollout engine failed more often than rollout.max_restarts allows; names its host and GPU."""


class OutOfMemory(ClusterError):
    """A rank ran out of GPU or host memory. Lists the largest users of it and what to change.

    The other ranks may be blocked in a collective, as after the death of a rank.
    """


class RankTimeout(ClusterError):
    """Some ranks did not complete a call in time; they may hang.

    Args:
        late: names of these ranks; empty if they are unknown.
        diagnosed: the message includes a hang report.
    """

    def __init__(self, message: str, late: Sequence[str] = (), *, diagnosed: bool = False) -> None:
        self.late = tuple(late)
        self.diagnosed = diagnosed
        super().__init__(message)


class RewardError(GkdError):
    """A reward function failed, took too long or returned no finite number; names the function and the row."""


class EnvironmentError(GkdError):
    """An environment class cannot be imported or has the wrong form; names its path."""


class WeightSyncError(GkdError):
    """A rollout engine does not hold the weights that the actor sent; names the tensors.

    Args:
        lost: engines that died or failed otherwise during the transfer, by index. It can be repeated without them.
    """

    def __init__(self, message: str, lost: Mapping[int, GkdError] | None = None) -> None:
        self.lost = dict(lost or {})
        super().__init__(message)


class TransferCutOff(WeightSyncError):
    """A connection of a weight transfer broke: another member of it failed, whose error is the cause."""


class HealthAlarm(GkdError):
    """A health check found something, and health.on_alarm is stop; the step is saved.

    Args:
        checks: names of the checks.
    """

    def __init__(self, message: str, checks: Sequence[str] = ()) -> None:
        self.checks = tuple(checks)
        super().__init__(message)


class NumericsError(GkdError):
    """NaN, infinity or another invalid value in scores, loss or gradients; raised before the optimizer step."""
