"""Prompts of all jobs that wait for an engine, in order, and which of them an engine gets next."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from gkd.rollout.stream import JobStream, Waiting

Lane = tuple[int, int]  # job, data-parallel group: sequences of one lane share chunks


class PromptQueue:
    """First in, first out, but an engine may go on with one data-parallel group, so that its chunks fill up.

    Not thread-safe.

    Args:
        n_groups: data-parallel groups; a prompt's index modulo this is its group.
        window: a prompt that is taken out of turn stood fewer than this many places behind the first one.
    """

    def __init__(self, n_groups: int, window: int) -> None:
        self._n_groups, self._window = n_groups, window
        self._lanes: defaultdict[Lane, deque[tuple[int, Waiting]]] = defaultdict(deque)  # lane -> (place, prompt)
        self._heads: list[tuple[int, Lane]] = []  # heap: place of the first prompt of each lane; also outdated ones
        self._first = self._end = self._n = 0  # places and number of the prompts

    def __len__(self) -> int:
        return self._n

    def append(self, prompts: Iterable[Waiting]) -> None:
        for prompt in prompts:
            lane = self._lane(prompt)
            self._lanes[lane].append((self._end, prompt))
            if len(self._lanes[lane]) == 1:
                heapq.heappush(self._heads, (self._end, lane))
            self._end += 1
            self._n += 1

    def prepend(self, prompts: Sequence[Waiting]) -> None:
        """Put these before all others; no other prompt is taken out of turn before them."""
        self._first -= self._window
        for prompt in reversed(prompts):
            self._first -= 1
            lane = self._lane(prompt)
            self._lanes[lane].appendleft((self._first, prompt))
            heapq.heappush(self._heads, (self._first, lane))
            self._n += 1

    def take(self, lane: Lane | None) -> tuple[Lane, Waiting]:
        """Remove and return the prompt that an engine gets, and its lane.

        Args:
            lane: of the last prompt that the engine got; None means it got none.
        """
        while not self._is_head(*self._heads[0]):
            heapq.heappop(self._heads)
        first, chosen = self._heads[0]
        if lane is not None and lane in self._lanes and self._lanes[lane][0][0] < first + self._window:
            chosen = lane
        prompts = self._lanes[chosen]
        _, prompt = prompts.popleft()
        if prompts:
            heapq.heappush(self._heads, (prompts[0][0], chosen))
        else:
            del self._lanes[chosen]
        self._n -= 1
        return chosen, prompt

    def unanswered(self, stream: JobStream) -> list[int]:
        """Return the indices of a job's queued prompts, except requeued prompts with some samples returned."""
        lanes = [prompts for lane, prompts in self._lanes.items() if lane[0] == stream.job.id]
        return [prompt.index for prompts in lanes for _, prompt in prompts if prompt.is_unanswered]

    def drop(self, stream: JobStream) -> None:
        """Remove the prompts of a job."""
        for lane in [lane for lane in self._lanes if lane[0] == stream.job.id]:
            self._n -= len(self._lanes.pop(lane))

    def _lane(self, prompt: Waiting) -> Lane:
        return prompt.stream.job.id, prompt.index % self._n_groups

    def _is_head(self, place: int, lane: Lane) -> bool:
        return lane in self._lanes and self._lanes[lane][0][0] == place
