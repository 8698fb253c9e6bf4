"""Before anything starts: can this run be trained on the batches that trainer.replay names? Floor 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gkd.config.derived import derive
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import CheckpointError, ConfigError
from gkd.run.checkpoints import step_folder
from gkd.run.folder import BATCHES
from gkd.run.manifest import check_sizes, read_manifest
from gkd.run.resume_compat import check_same_teacher

# What the recorded scores are; which of them there are is compared by what the loss needs.
_SAME = ("temperature", "topk", "mass")


def check_replay(config: Config, total_steps: int, teacher: Mapping[str, str]) -> None:
    """Has the folder that trainer.replay names whole batches up to the last step, scored as this run would have it?

    The first ones may be missing: a run that goes on from a checkpoint needs those after it.

    Args:
        teacher: name and fingerprint of the one that would score.

    Raises:
        ConfigError: names what is missing or different.
        CheckpointError: a batch is damaged.
    """
    named = config.trainer.replay
    if not named:
        return
    folder, fix = Path(named), "name the batches folder of a run that had trainer.record_batches: true."
    if folder.resolve() == (Path(config.trainer.run_dir) / BATCHES).resolve():
        raise ConfigError("trainer.replay", named, "this run's own batches are written there.", fix)
    if not folder.is_dir():
        raise ConfigError("trainer.replay", named, "there is no such folder.", fix)
    steps = range(1, total_steps + 1)
    there = [step for step in steps if (folder / step_folder(step)).is_dir()]
    missing = [step for step in range(there[0] if there else 1, total_steps + 1) if step not in set(there)]
    if missing:
        problem = f"it has no batch of {len(missing)} of the {total_steps} steps, the first is step {missing[0]}."
        raise ConfigError("trainer.replay", named, problem, f"lower trainer.total_steps, or {fix}")
    for step in there:
        check_sizes(folder / step_folder(step), read_manifest(folder / step_folder(step)))
    for name in ("config.yaml", "teacher.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing, so nobody knows how its batches were made")
    check_same_teacher(folder / "teacher.json", teacher, config)
    _check_scores(load_config(folder / "config.yaml"), config)


def _check_scores(recorded: Config, now: Config) -> None:
    """Would this run ask the teacher for what was recorded, and shape its batches alike?"""
    pairs = {f"teacher.{key}": (getattr(recorded.teacher, key), getattr(now.teacher, key)) for key in _SAME}
    pairs["rollout.n"] = recorded.rollout.n, now.rollout.n
    pairs["trainer.global_batch_size"] = recorded.trainer.global_batch_size, now.trainer.global_batch_size
    for key, (before, value) in pairs.items():
        if before != value:
            raise ConfigError(key, value, f"the batches to be replayed have {before!r}.", "take their value.")
    _check_head(recorded, now)
    missing = set(derive(now).signals) - set(derive(recorded).signals)
    if missing:
        raise ConfigError(
            "trainer.replay",
            now.trainer.replay,
            f"the loss needs the teacher's {', '.join(sorted(missing))}, which was not recorded.",
            "choose a loss and a teacher.signal that need what the recorded run's needed.",
        )


def _check_head(recorded: Config, now: Config) -> None:
    """Are recorded hidden states those of the LM head that this run multiplies them with? A head is in no batch."""
    if "hidden" not in derive(now).signals:
        return
    for config, whose in ((recorded, "the recorded run's"), (now, "this run's")):
        if interval := config.teacher.update_interval:
            raise ConfigError(
                "trainer.replay",
                now.trainer.replay,
                f"{whose} teacher.update_interval is {interval}: recorded hidden states belong to the LM head that the "
                "teacher had at their step, and a batch does not hold it.",
                "record with teacher.signal topk or logits, or with teacher.update_interval 0.",
            )
