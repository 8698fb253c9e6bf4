"""Continue trajectories: the environment answers a turn, then the next one starts, or the trajectory ends.

    vLLM finishes a turn -> `ended`: the environment gets its text    -> `replies`: an observation -> the next turn
                                                                                    none, or an end -> the rollout

No vLLM here. The environments run in processes of their own, see `gkd.environment.pool`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from gkd.data.chat_delta import ChatDelta
from gkd.environment.pool import Environments
from gkd.environment.worker import Answer
from gkd.errors import DataError
from gkd.log import get_logger
from gkd.rollout.vllm.sampling import Request, sequence_seed
from gkd.types import Rollout

log = get_logger("environment")

_SHOWN_ERRORS = 5  # limit of the errors of an engine in the log; the metrics count all


class Turns:
    """The trajectories of one engine that have environments. Not thread-safe."""

    def __init__(self, environments: Environments, delta: ChatDelta) -> None:
        self._environments = environments
        self._delta = delta
        # Key -> trajectory whose environment works, and its finish reason, or nothing if the environment makes a step.
        self._open: dict[int, tuple[Request, str]] = {}
        self._continued: dict[int, Request] = {}  # key -> trajectory whose next turn vLLM generates
        self._n_errors = 0
        self._other_ends: set[int] = set()  # end tokens behind which the template writes no message

    def __len__(self) -> int:
        """Return the number of trajectories that wait."""
        return len(self._open)

    def ended(self, request: Request, finish_reason: str) -> None:
        """Note that vLLM has finished a turn, with "stop" or "length"."""
        self._continued.pop(request.key, None)
        is_cut = finish_reason == "length"
        text = self._delta.text(request.ids[-1])
        request.messages.append({"role": "assistant", "content": text})
        self._open[request.key] = request, "length" if is_cut else ""
        if is_cut:  # the environment would read half of a turn
            self._environments.end(request.key)
            return
        sampling = request.sampling
        row = request.prompt.row
        assert row is not None  # preflight keeps the rows
        self._environments.step(request.key, row, sequence_seed(sampling.seed, request.sample_index), text)

    def replies(self) -> Iterator[Request | tuple[Request, Rollout]]:
        """Yield each trajectory of which something is known: one whose next turn starts, or a finished rollout."""
        for reply in self._environments.replies():
            request, closing = self._open.pop(reply.key)
            ending = closing or self._ending(request, reply)
            if closing and reply.error:  # `close` or the reward failed. A turn that was cut stays a cut one.
                failed = self._error(request, reply.error)
                ending = ending if ending == "length" else failed
            if not ending:
                self._continued[request.key] = request
                yield request
            elif closing or reply.error or reply.messages is None:
                yield request, request.rollout(ending, reply.reward)
            else:  # the object lives on: close it and read its reward
                self._open[request.key] = request, ending
                self._environments.end(request.key)

    def _ending(self, request: Request, reply: Answer) -> str:
        """Return the finish reason; empty if the trajectory continues, then with the observation."""
        if reply.error:
            return self._error(request, reply.error)
        if reply.messages is None:
            return "stop"
        if request.n_turns >= request.sampling.max_turns:
            return "environment"
        end = self._delta.end_id
        if (last := int(request.ids[-1][-1])) != end:
            if last not in self._other_ends:
                self._other_ends.add(last)
                log.warning(
                    "a turn that ends with token %d ends its trajectory: the template goes on behind %d", last, end
                )
            return "environment"
        try:
            ids: np.ndarray = self._delta.ids(reply.messages)
        except DataError as error:
            return self._error(request, str(error))
        if request.n_tokens + len(ids) >= request.sampling.max_tokens:  # an observation is never cut
            return "length"
        request.add_observation(ids, reply.messages)
        return ""

    def _error(self, request: Request, problem: str) -> str:
        self._n_errors += 1
        if self._n_errors <= _SHOWN_ERRORS:
            log.warning(
                "the environment of prompt %d, sample %d, ended its trajectory after turn %d: %s%s",
                request.prompt.prompt_id,
                request.sample_index,
                request.n_turns,
                problem,
                "" if self._n_errors < _SHOWN_ERRORS else " (further ones: rollout/environment_errors)",
            )
        return "environment_error"

    def wait(self, timeout_s: float) -> None:
        """Wait until a reply may be there, or for some time."""
        self._environments.wait(timeout_s)

    def abort(self, owner: Hashable) -> None:
        """Drop the trajectories of an owner, also those whose next turn vLLM generates."""
        requests = [*(request for request, _ in self._open.values()), *self._continued.values()]
        keys = [request.key for request in requests if request.owner == owner]
        self._environments.abort(keys)
        for key in keys:
            self._open.pop(key, None)
            self._continued.pop(key, None)

    def close(self) -> None:
        """End the environments' processes."""
        self._environments.close()
