"""`gkd score --config X.yaml`: let the teacher score each dataset response of a run once, into `teacher.store`.

A run over the same data then asks no teacher for these responses. Responses whose scores are stored are skipped, so the
same command goes on after an interruption, or after new rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

from gkd.config.load import add_config, load_config, parse_overrides
from gkd.console.numbers import clock, count
from gkd.data.chunks import dataset_rollouts
from gkd.errors import CheckpointError, ConfigError, DataError, ModelError
from gkd.log import get_logger
from gkd.preflight.dataset import DatasetPlan, check_scoring
from gkd.preflight.teacher import record_teachers
from gkd.run import interrupts
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.teacher.store import ScoreStore, dataset_keys, open_store
from gkd.scoring.teacher.window import window_of_group
from gkd.text.comparison import Comparison
from gkd.tools import exit_codes
from gkd.types import Rollout
from teacher_server.config.command import command_parser

log = get_logger("score")

_EXAMPLES = """examples:
  gkd score --config mine.yaml
  gkd score --config mine.yaml teacher.store=scores distill.on_policy_share=0

exit code: 0 all responses are stored, 1 the teacher or the disk failed, 2 wrong settings, data or models,
130 interrupted
"""
_REPORT_S = 10.0
_THREADS = 3  # one more than fill the window, so that it does not run half empty at the end of a chunk


@exit_codes(ConfigError, DataError, ModelError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    interrupts.install()
    try:
        score_all(check_scoring(load_config(args.config, args.overrides)))
    except KeyboardInterrupt:
        print("interrupted; the same command scores what is not stored", file=sys.stderr)
        return 130
    return 0


def score_all(plan: DatasetPlan) -> None:
    """Score what the store lacks, and log the progress.

    Raises:
        CheckpointError: the store has not kept them.
        TeacherError, TeacherUnavailable: see `gkd.scoring.teacher.teacher.Teacher`.
    """
    config = plan.config
    fingerprints = [teacher.fingerprint for teacher in plan.teachers]
    numerics = [teacher.numerics for teacher in plan.teachers]
    rollouts = dataset_rollouts(plan.prompts, plan.eos_ids)
    keys = dataset_keys(rollouts, config.derived, fingerprints, plan.n_vocab, numerics)
    store = open_store(config.teacher)
    left = {key: rollouts[i] for i, key in keys.items() if store.get(key, rollouts[i]) is None}  # missing, or damaged
    log.info("%d of %d responses are to score, into %s", len(left), len(rollouts), config.teacher.store)
    if left:
        windows = [window_of_group(config.teacher, teacher, 1) for teacher in plan.teachers]
        endpoint = ScoringEndpoint(config, Comparison(plan.n_vocab), fingerprints, windows, numerics=numerics)
        _score(endpoint, store, left, max(1, sum(window.n_in_flight for window in windows) // (_THREADS - 1)))
    _check_kept(store, keys.values())
    record_teachers(config, plan.teachers)
    log.info("%s has the scores of all %d responses", config.teacher.store, len(rollouts))


def _score(endpoint: ScoringEndpoint, store: ScoreStore, left: Mapping[bytes, Rollout], chunk_size: int) -> None:
    """Score chunks in threads; an error or an interruption ends all of them."""
    began_s = reported_s = time.monotonic()
    keys = list(left)
    n_done = 0
    n_tokens = 0
    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            chunks = [keys[start : start + chunk_size] for start in range(0, len(keys), chunk_size)]
            futures = {threads.submit(endpoint.score, [left[key] for key in chunk]): chunk for chunk in chunks}
            for future in as_completed(futures):
                future.result()
                store.refresh()
                _check_kept(store, futures[future])
                n_done += len(futures[future])
                n_tokens += sum(left[key].for_teacher().n_tokens for key in futures[future])
                now_s = time.monotonic()
                if now_s - reported_s > _REPORT_S or n_done == len(left):
                    rate = n_done / (now_s - began_s)
                    reported_s = now_s
                    rates = f"{count(rate)} responses/s, {count(n_tokens / (now_s - began_s))} tok/s"
                    log.info("scored %d/%d  %s  ETA %s", n_done, len(left), rates, clock((len(left) - n_done) / rate))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for teacher in endpoint.clients():
                teacher.close()


def _check_kept(store: ScoreStore, keys: Collection[bytes]) -> None:
    """Raise CheckpointError if the store lacks some of these keys; the log has the cause."""
    if n_missing := sum(key not in store for key in keys):
        fix = "free the disk, and run the command again"
        raise CheckpointError(f"teacher.store has not kept the scores of {n_missing} responses. Fix: {fix}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    description = "Score each dataset response of a run once, into teacher.store. A run over it then asks no teacher."
    parser = command_parser("gkd score", description, _EXAMPLES)
    add_config(parser, "settings of the run, as for gkd train")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
