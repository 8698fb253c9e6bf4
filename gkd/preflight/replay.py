"""Check, before the start, that this run can train on the recorded batches of trainer.replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gkd.config.load import load_config
from gkd.config.schema import Config, kept_on_resume
from gkd.errors import CheckpointError, ConfigError
from gkd.files.manifest import check_sizes, read_manifest
from gkd.run.checkpoints import step_folder
from gkd.run.folder import BATCHES
from gkd.run.resume_compat import check_same_teacher

# Settings of the recorded scores that must be equal. Which signals are needed depends on the loss.
_SAME = ("temperature", "topk", "mass")


def check_replay(config: Config, total_steps: int, teacher: Mapping[str, Any]) -> None:
    """Check that trainer.replay has complete batches up to the last step, scored as this run would score them.

    The first ones may be missing: a run that resumes from a checkpoint needs the later ones only.

    Args:
        teacher: name and fingerprint of this run's teacher.

    Raises:
        ConfigError: a batch is missing, or was made with other settings.
        CheckpointError: a batch is damaged.
    """
    named = config.trainer.replay
    if not named:
        return
    folder, fix = Path(named), "name the batches folder of a run with trainer.record_batches=true."
    if folder.resolve() == (Path(config.trainer.run_dir) / BATCHES).resolve():
        raise ConfigError("trainer.replay", named, "this run writes its own batches there.", fix)
    if not folder.is_dir():
        raise ConfigError("trainer.replay", named, "no such folder.", fix)
    steps = range(1, total_steps + 1)
    there = [step for step in steps if (folder / step_folder(step)).is_dir()]
    missing = [step for step in range(there[0] if there else 1, total_steps + 1) if step not in set(there)]
    if missing:
        problem = f"batches of {len(missing)} of the {total_steps} steps are missing, the first is step {missing[0]}."
        raise ConfigError("trainer.replay", named, problem, f"lower trainer.total_steps, or {fix}")
    for step in there:
        check_sizes(folder / step_folder(step), read_manifest(folder / step_folder(step)))
    for name in ("config.yaml", "teacher.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing, so it is unknown how its batches were made")
    check_same_teacher(folder / "teacher.json", teacher, config)
    _check_scores(load_config(folder / "config.yaml"), config)


def _check_scores(recorded: Config, now: Config) -> None:
    """Raise ConfigError if this run needs other scores than the recorded ones, or batches of another shape."""
    pairs: dict[str, tuple[Any, Any]] = {
        f"teacher.{key}": (getattr(recorded.teacher, key), getattr(now.teacher, key)) for key in _SAME
    }
    pairs["teacher.routes"] = kept_on_resume(recorded.teacher.routes), kept_on_resume(now.teacher.routes)
    pairs["teacher.prompt_template"] = recorded.teacher.prompt_template, now.teacher.prompt_template
    pairs["data.teacher_prompt_key"] = recorded.data.teacher_prompt_key, now.data.teacher_prompt_key
    pairs["distill.support"] = recorded.distill.support, now.distill.support
    pairs["rollout.n"] = recorded.rollout.n, now.rollout.n
    pairs["trainer.global_batch_size"] = recorded.trainer.global_batch_size, now.trainer.global_batch_size
    if now.reward.functions:  # judged again, with the rows of this run
        pairs["data.train_files"] = recorded.data.train_files, now.data.train_files
    for key, (before, value) in pairs.items():
        if before != value:
            raise ConfigError(key, value, f"the recorded batches have {before!r}.", "use the same value.")
    _check_head(recorded, now)
    missing = set(now.derived.signals) - set(recorded.derived.signals)
    if missing:
        raise ConfigError(
            "trainer.replay",
            now.trainer.replay,
            f"the loss needs the teacher's {', '.join(sorted(missing))}, which was not recorded.",
            "choose a loss and a teacher.signal that need the recorded signals only.",
        )


def _check_head(recorded: Config, now: Config) -> None:
    """Raise ConfigError if recorded hidden states need an LM head that is gone: batches do not contain it."""
    if "hidden" not in now.derived.signals:
        return
    for config, whose in ((recorded, "the recorded run's"), (now, "this run's")):
        if config.teacher.update_interval:
            raise ConfigError(
                "trainer.replay",
                now.trainer.replay,
                f"{whose} teacher.update_interval is {config.teacher.update_interval}: hidden states need the LM head "
                "of their step, and batches do not contain it.",
                "record with teacher.signal topk or logits, or with teacher.update_interval 0.",
            )
