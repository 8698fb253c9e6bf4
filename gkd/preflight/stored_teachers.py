"""Start a run without its teacher servers: `gkd score` has stored the scores of all responses, and what scored them.

    <teacher.store>/teachers.json    a list of `TeacherInfo`, by route

A score is found by a key that contains the teacher's fingerprint, so a wrong description finds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gkd.config.schema import Config
from gkd.data.chunks import dataset_rollouts
from gkd.errors import TeacherUnavailable
from gkd.files.disk import replace_file
from gkd.log import get_logger
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.store import dataset_keys, open_store
from gkd.types import Prompt

log = get_logger("preflight")

_FILE = "teachers.json"


def record_teachers(config: Config, teachers: Sequence[TeacherInfo]) -> None:
    """Write the descriptions of the teachers into the store, which exists. Raises OSError."""
    replace_file(Path(config.teacher.store) / _FILE, msgspec.json.encode(teachers))


def recorded_teachers(config: Config, away: TeacherUnavailable) -> tuple[TeacherInfo, ...]:
    """Return the descriptions in the store for a run that needs no teacher server.

    Raises:
        TeacherUnavailable: `away`: the run needs the server, or nothing is recorded.
    """
    needs = config.distill.on_policy_share > 0 or config.data.val_files or config.teacher.signal == "hidden"
    try:
        if needs or not config.teacher.store:
            raise away
        content = (Path(config.teacher.store) / _FILE).read_bytes()
        teachers = msgspec.json.decode(content, type=tuple[TeacherInfo, ...])
    except (OSError, msgspec.DecodeError):
        raise away from None
    if len(teachers) != len(config.derived.routes):
        raise away
    names = ", ".join(f"{teacher.model_name} ({teacher.fingerprint[:12]})" for teacher in teachers)
    log.warning(
        "%s; teacher.store has the scores of %s: the run asks no teacher", str(away).partition(" Fix:")[0], names
    )
    return teachers


def check_all_stored(
    config: Config, prompts: Sequence[Prompt], teachers: Sequence[TeacherInfo], n_vocab: int, eos_ids: Sequence[int]
) -> None:
    """Raise TeacherUnavailable unless the store has the scores of each response."""
    store, fingerprints = open_store(config.teacher), [teacher.fingerprint for teacher in teachers]
    keys = dataset_keys(dataset_rollouts(prompts, eos_ids), config.derived, fingerprints, n_vocab)
    n_missing = len(prompts) - sum(key in store for key in keys.values())
    if n_missing:
        problem = f"it lacks the scores of {n_missing} of {len(prompts)} responses, and no teacher server replies."
        fix = "start the server, or run `gkd score` with these settings before"
        raise TeacherUnavailable(f"teacher.store = {config.teacher.store}: {problem} Fix: {fix}")
