"""Give queued prompts to the simulated engines as `gkd.rollout.dispatcher` does: to the one that is free first."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from gkd.data.chunks import reserve_size
from gkd.tools.split_tuner.engine import Engine, finish_times
from gkd.tools.split_tuner.rates import Rates, Workload


def room(workload: Workload, n_engines: int) -> float:
    """Return the number of sequences from which on an engine gets no more prompts; a single engine gets all."""
    if n_engines == 1:
        return math.inf
    return workload.max_num_seqs + reserve_size(workload.max_num_seqs, workload.n_prompts * workload.n, n_engines)


def assign(queue: deque[int], n_held: list[int], limit: float, n: int, engines: Iterable[int]) -> list[tuple[int, int]]:
    """Take prompts from the queue for the engines with room, the least busy first; return (prompt, engine) of each.

    Args:
        n_held: unfinished sequences of each engine; the new ones are added.
        limit: see `room`.
        n: sequences of a prompt.
        engines: that may have room. While prompts are queued, only one whose sequences have finished does.
    """
    if not queue:
        return []
    free = [(n_held[engine], engine) for engine in engines if n_held[engine] < limit]
    heapq.heapify(free)
    given = []
    while queue and free:
        held, engine = heapq.heappop(free)
        given.append((queue.popleft(), engine))
        n_held[engine] = held + n
        if n_held[engine] < limit:
            heapq.heappush(free, (n_held[engine], engine))
    return given


def answer_batch(
    lengths: np.ndarray, workload: Workload, rates: Rates, n_engines: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the engine of each sequence of a batch, and when it finishes: [m] int, [m] float64.

    Args:
        lengths: [m] response tokens; the samples of a prompt are adjacent.
    """
    n, limit, prompt_tokens = workload.n, room(workload, n_engines), workload.prompt_tokens
    queue, n_held = deque(range(len(lengths) // n)), [0] * n_engines
    engine_of, finished = np.zeros(len(lengths), int), np.zeros(len(lengths))
    given = assign(queue, n_held, limit, n, range(n_engines))
    for prompt, number in given:
        engine_of[prompt * n : (prompt + 1) * n] = number
    if not queue:  # all have their engine, so these are independent
        for number in range(n_engines):
            mine = np.flatnonzero(engine_of == number)
            if len(mine):
                finished[mine] = finish_times(lengths[mine], prompt_tokens, workload.max_num_seqs, rates)
        return engine_of, finished
    engines = [Engine(rates, workload.max_num_seqs) for _ in range(n_engines)]
    events: list[tuple[float, int]] = []  # the next time at which a sequence of an engine finishes, and the engine
    changed = set(range(n_engines))
    while True:
        for prompt, number in given:
            for i in range(prompt * n, (prompt + 1) * n):
                engine_of[i] = number
                engines[number].add(i, [int(lengths[i])], prompt_tokens)
        for number in changed:
            engines[number].begin()
            if engines[number].n_running:
                heapq.heappush(events, (engines[number].next_finish_s(), number))
        if not events:
            return engine_of, finished
        _, number = heapq.heappop(events)
        done = engines[number].run_to_finish()
        finished[done] = engines[number].at_s
        n_held[number] -= len(done)
        given = assign(queue, n_held, limit, n, [number])
        changed = {number}
