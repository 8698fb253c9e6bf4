"""Judge the responses of one data-parallel group, in the process of its scoring endpoint; no GPU, no torch.

Tokens come from the object store, as they do for the teacher. The driver reads 8 bytes per sequence and function.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

import numpy as np

from gkd.config.schema import Config
from gkd.config.schema_teacher import PROMPT_FUNCTION, RESPONSE_WEIGHT
from gkd.data.chunks import ColumnList
from gkd.data.prompts import RowReader, load_tokenizer
from gkd.data.row_files import RowTable, decode_row
from gkd.data.template import Tools
from gkd.errors import ConfigError, DataError, RewardError
from gkd.hf.hub import with_local_copies
from gkd.hosts import Died, Host, wait_for_messages
from gkd.scoring.reward.groups import Group
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
        search_path: folders in which the driver finds modules.
        training, validation: rows of the prompts; arguments of their own, because Ray maps each without a copy.
        tokenizer: the student's. None: it is loaded here, which imports torch; to receive it does not.
        tools: of rollout.environment, which every prompt offers.

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
        tools: Tools = (),
    ) -> None:
        self._config = config
        self._rows = {TRAINING: training, VALIDATION: validation}
        paths = tuple(dict.fromkeys(path for paths_of_set in functions.values() for path in paths_of_set))
        self._functions = {name: tuple(map(paths.index, paths_of_set)) for name, paths_of_set in functions.items()}
        groups = config.derived.groups
        self._group_functions = {key: len(paths) + i for i, (key, _) in enumerate(groups)}
        start = Start(config, paths, tuple(search_path), groups)
        self._workers = RewardWorkers(start, n_workers, config.reward.timeout_s)
        self._tokenizer = student_tokenizer(config) if tokenizer is None else tokenizer  # while the workers start
        self._rendering = threading.Lock()
        self._reader = RowReader(config.data, self._tokenizer, config.teacher, tools) if groups else None
        self._workers.wait_ready(config.trainer.init_timeout_s)

    def close(self) -> None:
        """End the workers; without it they end with this process."""
        self._workers.close()

    def judge(self, rollouts: Sequence[Rollout], prompts: str) -> bytes:
        """Return [n, functions] float64 of a chunk, as bytes; not finite: see `UNKNOWN`. Blocks.

        If functions get groups, two more columns: the factor of the function of distill.response_weight (else 1), and 1
        for a prompt of teacher.prompt_function (else 0).

        Args:
            prompts: the set that the rollouts answer, `TRAINING` or `VALIDATION`.

        Raises:
            RewardError: see `RewardWorkers.values`.
            DataError: a rollout answers a prompt that is not in the set; or functions get groups, and one is not whole.
        """
        return self._judge(rollouts, prompts, prompted=False)[1]

    def prompted(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], bytes]:
        """Return training rollouts with the teacher's prompts that teacher.prompt_function makes, and `judge` of them.

        Raises as `judge`; RewardError also for a prompt that cannot be rendered, or is too long.
        """
        return self._judge(rollouts, TRAINING, prompted=True)

    def _judge(self, rollouts: Sequence[Rollout], prompts: str, *, prompted: bool) -> tuple[list[Rollout], bytes]:
        cases = self._cases(rollouts, prompts)
        values = self._workers.values(self._functions[prompts], cases)
        changed = ColumnList(rollouts)
        if self._group_functions and prompts == TRAINING:
            order = group_places(rollouts, self._config.rollout.n)
            groups = self._groups(rollouts, cases, values, order)
            if prompted:
                self._add_prompts(changed, groups, order)
            factors = np.ones(len(rollouts))
            if (function := self._group_functions.get(RESPONSE_WEIGHT)) is not None:
                factors[order] = self._workers.results(function, groups)
            has_prompt = [rollout.teacher_ids is not None for rollout in changed]
            values = np.column_stack([values, factors, has_prompt])
        return changed, np.ascontiguousarray(values, "<f8").tobytes()

    def _groups(
        self, rollouts: Sequence[Rollout], cases: Sequence[Case], values: np.ndarray, order: np.ndarray
    ) -> list[Group]:
        """Return the groups of a chunk; `order` is [groups, n], the places of their sequences."""
        assert self._reader is not None
        weights = [entry.weight for entry in self._config.reward.functions]
        rewards = [total if weights and math.isfinite(total) else None for total in (values @ weights).tolist()]
        prompts = {i: self._reader.conversation(*decode_row(cases[i].encoded_row))[0] for i in order[:, 0].tolist()}
        return [
            Group(
                cases[places[0]].encoded_row,
                list(prompts[places[0]].messages) or prompts[places[0]].text,
                [cases[i].response for i in places],
                [rewards[i] for i in places],
                [rollouts[i].finish_reason for i in places],
                [cases[i].messages for i in places],
                sum(weights),
            )
            for places in order.tolist()
        ]

    def _add_prompts(self, rollouts: list[Rollout], groups: Sequence[Group], order: np.ndarray) -> None:
        """Replace rollouts by those with the teacher's own prompt, where the function makes one."""
        assert self._reader is not None
        path = self._config.teacher.prompt_function
        made = self._workers.results(self._group_functions[PROMPT_FUNCTION], groups)
        for (g, number), place in np.ndenumerate(order):
            where, row = decode_row(groups[g].encoded_row)
            if (prompt := made[g][number]) is None:
                continue
            try:
                with self._rendering:
                    ids = self._reader.teacher_ids(prompt, where, row)
            except ConfigError as error:
                of_whom = f"{path}, row {where}, response {number} of prompt {rollouts[place].prompt_id}"
                raise RewardError(f"{of_whom}: {error.problem} Fix: {error.fix}") from error
            rollouts[place] = replace(rollouts[place], teacher_ids=np.array(ids, np.int32))

    def _cases(self, rollouts: Sequence[Rollout], prompts: str) -> list[Case]:
        ids = {rollout.prompt_id: rollout.prompt_ids for rollout in rollouts}  # a prompt has several responses
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        texts = {prompt_id: decode(prompt_ids.tolist()) for prompt_id, prompt_ids in ids.items()}
        encoded_rows = {prompt_id: self._rows[prompts].row(prompt_id) for prompt_id in ids}
        return [
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


def group_places(rollouts: Sequence[Rollout], n: int) -> np.ndarray:
    """Return the places of the n responses to each prompt: [groups, n] int64. Raises DataError: some are missing."""
    samples = np.array([rollout.sample_index for rollout in rollouts])
    order = np.argsort(samples)
    first = np.unique(samples // n) * n
    if not np.array_equal(samples[order], (first[:, None] + np.arange(n)).ravel()):
        raise DataError(f"a chunk has a part of the rollout.n={n} responses to a prompt: samples {samples.tolist()}")
    return order.reshape(-1, n)


class RewardWorkers:
    """Processes that call the functions. Thread-safe: a call takes the process that is idle first.

    Args:
        timeout_s: limit of each call of a function.
    """

    def __init__(self, start: Start, n: int, timeout_s: float) -> None:
        self._paths = (*start.paths, *(path for _, path in start.groups))
        late = f"took longer than {timeout_s:g} s. Fix: correct it, or raise reward.timeout_s"
        self._workers = [Host("gkd.scoring.reward.worker", start, Value, timeout_s, late) for _ in range(n)]
        self._idle: SimpleQueue[Host[Value]] = SimpleQueue()
        self._error: RewardError | None = None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all have imported the functions; call it once. After an error all have ended.

        Raises:
            RewardError: a process cannot import them, or not in this time from its start.
        """
        for worker in self._workers:
            try:
                worker.wait_ready(timeout_s)
            except Died as problem:
                self.close()
                raise RewardError(problem.of(*self._paths)) from None
            self._idle.put(worker)

    def values(self, functions: Sequence[int], cases: Sequence[Case]) -> np.ndarray:
        """Return the values of functions, by their positions: [cases, functions] float64; blocks.

        Raises:
            RewardError: a function raised an error, took too long, returned no finite number, or its process died.
                Names function and row. All later calls raise it, too, because the run ends.
        """
        numbers = [value.number for value in self._answers(functions, cases)]
        return np.array(numbers, np.float64).reshape(len(cases), len(functions))

    def results(self, function: int, groups: Sequence[Group]) -> list[list[Any]]:
        """Return what a function of groups returns for each response of each group; blocks. Raises as `values`."""
        return [value.result for value in self._answers([function], groups)]

    def _answers(self, functions: Sequence[int], cases: Sequence[Case | Group]) -> list[Value]:
        worker = self._idle.get()
        try:
            if self._error is not None:
                raise self._error
            return self._asked(worker, functions, cases)
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

    def _asked(self, worker: Host[Value], functions: Sequence[int], cases: Sequence[Case | Group]) -> list[Value]:
        values: list[Value] = []
        worker.send((functions, cases))
        worker.start_clock()
        try:
            while missing := len(cases) * len(functions) - len(values):
                wait_for_messages([worker])
                for value in islice(worker.messages(), missing):
                    if value.problem:
                        error = RewardError(f"{self._call(functions, cases, len(values))}: {value.problem}")
                        if value.trace:
                            error.add_note(value.trace)  # the log of the run shows it, not the terminal's last line
                        raise error
                    values.append(value)
                    worker.start_clock()  # of the next call
        except Died as problem:
            raise RewardError(f"{self._call(functions, cases, len(values))}: {problem}") from None
        return values

    def _call(self, functions: Sequence[int], cases: Sequence[Case | Group], index: int) -> str:
        """Return the function and the row of a call."""
        where, _ = decode_row(cases[index // len(functions)].encoded_row)
        return f"{self._paths[functions[index % len(functions)]]}, row {where}"
