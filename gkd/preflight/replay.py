"""Check, before the start, that this run can train on the recorded batches of trainer.replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_teacher import BY_UNITS
from gkd.errors import CheckpointError
from gkd.run.checkpoints import step_folder
from gkd.run.folder import BATCHES
from gkd.run.manifest import check_sizes, read_manifest
from gkd.run.open import check_same_teacher, kept_value

# Settings of the recorded batches that must be equal. Which signals are needed depends on the loss.
_SAME = (
    *("teacher.temperature", "teacher.topk", "teacher.mass", "teacher.routes", "teacher.prompt_template"),
    "teacher.prompt_function",
    *("teacher.special_tokens", "data.teacher_prompt_key", "distill.support", "rollout.n", "trainer.global_batch_size"),
)


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
    folder = Path(named)
    fix = "name the batches folder of a run with trainer.record_batches=true."
    if folder.resolve() == (Path(config.trainer.run_dir) / BATCHES).resolve():
        raise config.error("trainer.replay", "this run writes its own batches there.", fix)
    if not folder.is_dir():
        raise config.error("trainer.replay", f"no such folder ({folder.absolute()}).", fix)
    steps = range(1, total_steps + 1)
    there = [step for step in steps if (folder / step_folder(step)).is_dir()]
    missing = [step for step in range(there[0] if there else 1, total_steps + 1) if step not in set(there)]
    if missing:
        problem = f"batches of {len(missing)} of the {total_steps} steps are missing, the first is step {missing[0]}."
        raise config.error("trainer.replay", problem, f"lower trainer.total_steps, or {fix}")
    for step in there:
        check_sizes(folder / step_folder(step), read_manifest(folder / step_folder(step)))
    for name in ("config.yaml", "teacher.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing, so it is unknown how its batches were made")
    check_same_teacher(folder / "teacher.json", teacher, config, any_dtype=True)
    _check_scores(load_config(folder / "config.yaml"), config)


def _check_scores(recorded: Config, now: Config) -> None:
    """Raise ConfigError if this run needs other scores than the recorded ones, or batches of another shape."""
    # Batches with rewards are judged again, with the rows of this run.
    for key in (*_SAME, *(("data.train_files",) if now.reward.functions or now.derived.groups else ())):
        before = kept_value(recorded, key)
        if before != kept_value(now, key):
            raise now.error(key, f"the recorded batches have {before!r}.", "use the same value.")
    for key, values in (
        ("teacher.tokenizer", [bool(config.teacher.tokenizer) for config in (recorded, now)]),
        ("teacher.signal", [config.teacher.signal == BY_UNITS for config in (recorded, now)]),
    ):
        if values[0] != values[1]:
            problem = f"the recorded batches have {kept_value(recorded, key)!r}, whose lists mean something else."
            raise now.error(key, problem, "use the recorded run's value.")
    for config, whose in ((recorded, "the recorded run's"), (now, "this run's")):
        if "hidden" in now.derived.signals and config.teacher.update_interval:
            problem = (
                f"{whose} teacher.update_interval is {config.teacher.update_interval}: hidden states need the LM head "
                "of their step, and batches do not contain it."
            )
            fix = "record with teacher.signal topk or logits, or with teacher.update_interval 0."
            raise now.error("trainer.replay", problem, fix)
    missing = set(now.derived.signals) - set(recorded.derived.signals)
    if missing:
        problem = f"the loss needs the teacher's {', '.join(sorted(missing))}, which was not recorded."
        fix = "choose a loss and a teacher.signal that need the recorded signals only."
        raise now.error("trainer.replay", problem, fix)
