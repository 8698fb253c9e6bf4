"""The model folders of a run, read once, and every rank's memory with them: of these settings, or of changed ones."""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.footprint.estimate import footprint
from gkd.footprint.types import RankFootprint
from gkd.hf.model_folder import ModelFolder, read_model_folder


@dataclass(frozen=True, slots=True)
class RunModels:
    """What the actor's and the rollout's ranks hold."""

    student: ModelFolder
    local_teacher: ModelFolder | None  # None: a server has it
    reference: ModelFolder | None  # None: there is none beside the actor

    def footprint(self, config: Config, teacher_hidden: int | None = None) -> tuple[RankFootprint, ...]:
        """See `gkd.footprint.estimate.footprint`.

        Args:
            teacher_hidden: of a served teacher; a local one's is known.
        """
        local, kept = self.local_teacher, self.reference
        return footprint(
            config,
            self.student.config_json,
            tensors=self.student.tensors,
            teacher_hidden=teacher_hidden if local is None else local.dims.hidden_size,
            local_teacher=None if local is None else (local.config_json, local.tensors),
            reference=None if kept is None else (kept.config_json, kept.tensors),
        )


def read_models(config: Config) -> RunModels:
    """Raises ConfigError: a folder is not there. ModelError: its config.json does not say its sizes."""
    student = read_model_folder(config.model.path, "model.path")
    derived = derive(config)
    teacher = read_model_folder(config.teacher.path, "teacher.path") if derived.is_local_teacher else None
    path = derived.reference_folder
    key = "reference.path" if config.reference.path else "model.path"
    return RunModels(student, teacher, read_model_folder(path, key) if path else None)
