"""Judge the responses of one data-parallel group, in the process of its scoring endpoint; no GPU, no torch.

Tokens come from the object store, as they do for the teacher. The driver reads 8 bytes per sequence and function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

import numpy as np

from gkd.config.schema import Config
from gkd.data.prompts import load_tokenizer
from gkd.data.row_files import RowTable, decode_row
from gkd.errors import RewardError
from gkd.hf.hub import with_local_copies
from gkd.hosts import Died, Host, wait_for_messages
from gkd.scoring.reward.worker import Case, Start, Value
from gkd.types import Rollout

TRAINING = "training"
VALIDATION = "validation"


def student_tokenizer(config: Config) -> Any:
    """Load the student's tokenizer on this host. Raises ConfigError: see `load_tokenizer`."""
    model = with_local_copies(config, ("model.path",), weights=False).model
    return load_tokenizer(model.path, "model.path", trust_remote_code=model.trust_remote_code)


class Judging:
    """Judge rollouts of two sets of prompts, training and held-out, each with its own functions.

    Args:
        functions: by set of prompts, paths of its functions.
        n_workers: processes that call them.
        search_path: folders in which the driver finds modules.
        training, validation: rows of the prompts; arguments of their own, because Ray maps each without a copy.
        tokenizer: the student's. None: it is loaded here, which imports torch; to receive it does not.

    Raises:
        RewardError: a worker could not import the functions within trainer.init_timeout_s.
    """

    def __init__(
        self,
        config: Config,
        functions: Mapping[str, Sequence[str]],
        n_workers: int,
        search_path: Sequence[str],
        training: RowTable,
        validation: RowTable,
        tokenizer: Any = None,
    ) -> None:
        self._rows = {TRAINING: training, VALIDATION: validation}
        paths = tuple(dict.fromkeys(path for paths_of_set in functions.values() for path in paths_of_set))
        self._functions = {name: tuple(map(paths.index, paths_of_set)) for name, paths_of_set in functions.items()}
        self._workers = RewardWorkers(Start(config, paths, tuple(search_path)), n_workers, config.reward.timeout_s)
        self._tokenizer = student_tokenizer(config) if tokenizer is None else tokenizer  # while the workers start
        self._workers.wait_ready(config.trainer.init_timeout_s)

    def close(self) -> None:
        """End the workers; without it they end with this process."""
        self._workers.close()

    def judge(self, rollouts: Sequence[Rollout], prompts: str) -> bytes:
        """Return [n, functions] float64 of a chunk, as bytes; not finite: see `UNKNOWN`. Blocks.

        Args:
            prompts: the set that the rollouts answer, `TRAINING` or `VALIDATION`.

        Raises:
            RewardError: see `RewardWorkers.values`.
            DataError: a rollout answers a prompt that is not in the set.
        """
        ids = {rollout.prompt_id: rollout.prompt_ids for rollout in rollouts}  # a prompt has several responses
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        texts = {prompt_id: decode(prompt_ids.tolist()) for prompt_id, prompt_ids in ids.items()}
        encoded_rows = {prompt_id: self._rows[prompts].row(prompt_id) for prompt_id in ids}
        cases = [
            Case(
                texts[rollout.prompt_id],
                decode(rollout.last_turn.tolist()),
                encoded_rows[rollout.prompt_id],
                rollout.n_own,
                rollout.finish_reason == "length",
                rollout.messages,
                math.nan if rollout.finish_reason == "environment_error" else rollout.reward,
            )
            for rollout in rollouts
        ]
        return np.ascontiguousarray(self._workers.values(self._functions[prompts], cases), "<f8").tobytes()


class RewardWorkers:
    """Processes that call the functions. Thread-safe: a call takes the process that is idle first.

    Args:
        timeout_s: limit of each call of a function.
    """

    def __init__(self, start: Start, n: int, timeout_s: float) -> None:
        self._paths = start.paths
        late = f"took longer than {timeout_s:g} s. Fix: correct it, or raise reward.timeout_s"
        self._workers = [Host("gkd.scoring.reward.worker", start, Value, timeout_s, late) for _ in range(n)]
        self._idle: SimpleQueue[Host[Value]] = SimpleQueue()
        self._error: RewardError | None = None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all have imported the functions; call it once.

        Raises:
            RewardError: a process cannot import them, or not in this time from its start.
        """
        for worker in self._workers:
            try:
                worker.wait_ready(timeout_s)
            except Died as problem:
                raise RewardError(problem.of(*self._paths)) from None
            self._idle.put(worker)

    def values(self, functions: Sequence[int], cases: Sequence[Case]) -> np.ndarray:
        """Return the values of functions, by their positions: [cases, functions] float64; blocks.

        Raises:
            RewardError: a function raised an error, took too long, returned no finite number, or its process died.
                Names function and row. All later calls raise it, too, because the run ends.
        """
        worker = self._idle.get()
        try:
            if self._error is not None:
                raise self._error
            return self._values(worker, functions, cases)
        except BaseException as error:
            worker.close()  # a call that takes too long is stopped with its process alone
            if isinstance(error, RewardError):
                self._error = error
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()

    def _values(self, worker: Host[Value], functions: Sequence[int], cases: Sequence[Case]) -> np.ndarray:
        numbers: list[float] = []
        worker.send((functions, cases))
        worker.start_clock()
        try:
            while missing := len(cases) * len(functions) - len(numbers):
                wait_for_messages([worker])
                for value in islice(worker.messages(), missing):
                    if value.problem:
                        error = RewardError(f"{self._call(functions, cases, len(numbers))}: {value.problem}")
                        if value.trace:
                            error.add_note(value.trace)  # the log of the run shows it, not the terminal's last line
                        raise error
                    numbers.append(value.number)
                    worker.start_clock()  # of the next call
        except Died as problem:
            raise RewardError(f"{self._call(functions, cases, len(numbers))}: {problem}") from None
        return np.array(numbers, np.float64).reshape(len(cases), len(functions))

    def _call(self, functions: Sequence[int], cases: Sequence[Case], index: int) -> str:
        """Return the function and the row of a call."""
        where, _ = decode_row(cases[index // len(functions)].encoded_row)
        return f"{self._paths[functions[index % len(functions)]]}, row {where}"
