"""Judge the responses of one data-parallel group, in the process of its scoring endpoint; no GPU, no torch.

Tokens come from the object store, as they do for the teacher. The driver reads 8 bytes per sequence and function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gkd.config.schema import Config
from gkd.data.prompts import load_tokenizer
from gkd.data.row_files import RowTable
from gkd.hf.hub import with_local_copies
from gkd.scoring.reward.pool import RewardWorkers
from gkd.scoring.reward.worker import Request, Start
from gkd.types import Rollout

TRAINING, VALIDATION = "training", "validation"


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
        paths = tuple(dict.fromkeys(path for own in functions.values() for path in own))
        self._functions = {name: tuple(paths.index(path) for path in own) for name, own in functions.items()}
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
        rows, functions = self._rows[prompts], self._functions[prompts]
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        ids = {rollout.prompt_id: rollout.prompt_ids for rollout in rollouts}  # a prompt has several responses
        texts = {prompt_id: decode(own.tolist()) for prompt_id, own in ids.items()}
        encoded = {prompt_id: rows.row(prompt_id) for prompt_id in ids}
        requests = [
            Request(
                texts[rollout.prompt_id],
                decode(rollout.last_turn.tolist()),
                rollout.n_own,
                rollout.finish_reason == "length",
                encoded[rollout.prompt_id],
                functions,
                rollout.messages,
                math.nan if rollout.finish_reason == "environment_error" else rollout.reward,
            )
            for rollout in rollouts
        ]
        return np.ascontiguousarray(self._workers.values(requests), "<f8").tobytes()
