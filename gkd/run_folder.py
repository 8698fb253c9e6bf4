"""A run's folder: what a run writes, where, and how another run is kept from overwriting it.

run_dir/config.yaml            resolved settings
        teacher.json           who scores: name and fingerprint of the teacher's weights
        metrics.jsonl          one line a step
        checkpoints/step_N/    actor/ + trainer.json + config.yaml; complete once it has this name
        samples/step_N.jsonl   greedy answers to held-out prompts
        token_losses/step_N.jsonl  the numbers of each token of an evaluation, with eval.keep_token_losses
        export/                the trained student in Hugging Face format
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from gkd.config import Config
from gkd.config_load import load_config, save_config
from gkd.disk import fsync, fsync_tree
from gkd.errors import CheckpointError, ConfigError
from gkd.roles import Sample, TokenRecord

# Keys a resumed run may change: they say how and where the same thing is computed, not what. A checkpoint can be loaded
# in another layout, so the pools may be split anew.
_FREE_ON_RESUME = {
    "trainer.run_dir",
    "trainer.resume",
    "trainer.save_every",
    "trainer.keep_last",
    "trainer.keep_every",
    "trainer.async_save",
    "trainer.init_timeout_s",
    "trainer.stage_timeout_s",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "actor.tp",
    "actor.pp",
    "actor.vpp",
    "actor.ep",
    "actor.sequence_parallel",
    "actor.recompute",
    "actor.fsdp_cpu_offload",
    "actor.packing",
    "actor.balance",
    "actor.micro_batch_size",
    "actor.max_tokens_per_micro_batch",
    "actor.fused_lm_head",
    "actor.logits_chunk_mib",
    "actor.loss_kernel",
    "rollout.n_gpus_per_node",
    "rollout.nnodes",
    "rollout.tp",
    "rollout.max_num_seqs",
    "rollout.gpu_memory_utilization",
    "rollout.cpu_kv_cache_mib",
    "rollout.enforce_eager",
    "teacher.server_ip",
    "teacher.server_port",
    "teacher.name",
    "teacher.keys",
    "teacher.n_server_workers",
    "teacher.overlap_rollout",
    "teacher.request_timeout_s",
    "teacher.outage_budget_s",
}
_FREE_SECTIONS = ("cluster.", "eval.", "weight_sync.")
# The end of the run shapes every step of a schedule that ends there, and none of a constant one.
_FREE_IF_CONSTANT = {"trainer.total_steps", "trainer.total_epochs"}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the driver needs to go on; the rest is in the actor's part of the checkpoint."""

    step: int
    sampler_position: int


class RunFolder:
    """Paths and checkpoints of one run. Made by `open_run_folder`, which decides whether it may be used."""

    def __init__(self, root: Path, config: Config, lock: TextIO) -> None:
        self.root, self.config = root, config
        self._lock = lock  # held while this object lives
        self.metrics_file = root / "metrics.jsonl"
        self.export = root / "export"
        self.checkpoints = root / "checkpoints"

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """One JSON line a greedy answer."""
        file = self.root / "samples" / f"step_{step:08d}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))

    def write_token_losses(self, step: int, records: Sequence[TokenRecord]) -> None:
        """One JSON line a sequence of an evaluation; see `TokenRecord`. Infinities are null, as in the metrics."""
        file = self.root / "token_losses" / f"step_{step:08d}.jsonl"
        file.parent.mkdir(exist_ok=True)
        lines = []
        for record in records:
            values = {name: [v if math.isfinite(v) else None for v in row] for name, row in record.values.items()}
            lines.append(json.dumps(asdict(record) | {"values": values}) + "\n")
        file.write_text("".join(lines))

    def save_checkpoint(self, state: TrainerState, save_actor: Callable[[Path], None], keep_last: int) -> Path:
        """Write into a temporary folder, sync it to disk, rename, then delete the ones beyond `keep_last`.

        Raises:
            CheckpointError: the disk is full or read-only; earlier checkpoints are untouched.
        """
        final = self.checkpoints / f"step_{state.step:08d}"
        work = self.checkpoints / f".tmp_step_{state.step:08d}"
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            save_actor(work / "actor")
            save_config(self.config, work / "config.yaml")
            (work / "trainer.json").write_text(json.dumps(asdict(state)))
            fsync_tree(work)
            shutil.rmtree(final, ignore_errors=True)
            work.rename(final)
            fsync(self.checkpoints)
            for old in self._complete()[:-keep_last]:
                shutil.rmtree(old)
        except OSError as error:
            raise CheckpointError(f"checkpoint {final} could not be written: {error}") from error
        return final

    def clear_export(self) -> None:
        """Remove the export of an earlier end of this run; it is written again at the new end."""
        if self.export.exists():
            shutil.rmtree(self.export)

    def newest_checkpoint(self) -> tuple[TrainerState, Path] | None:
        """State and actor folder of the newest complete checkpoint."""
        complete = self._complete()
        if not complete:
            return None
        file = complete[-1] / "trainer.json"
        try:
            state = TrainerState(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged: {error}. Delete its folder to use the one before.") from error
        return state, complete[-1] / "actor"

    def _complete(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step_*"))


def open_run_folder(config: Config, teacher: dict[str, str]) -> RunFolder:
    """Take `trainer.run_dir` for this run, and hold it: a new folder, or (resume: auto) the same run's.

    Args:
        teacher: name and fingerprint of the model that scores; a resumed run must have the same fingerprint.

    Raises:
        ConfigError: it holds another run and trainer.resume is never, or the teacher or settings that shape the result
            have changed; another process holds it; it is a folder of something else; it cannot be written.
    """
    root = Path(config.trainer.run_dir)
    if root.exists() and not root.is_dir():
        raise ConfigError("trainer.run_dir", str(root), "it is a file.", "name a folder.")
    is_ours = (root / "config.yaml").exists() and (root / "teacher.json").exists()
    if root.exists() and any(root.iterdir()) and not is_ours:
        problem = "it is not empty and holds no whole run of ours."
        raise ConfigError("trainer.run_dir", str(root), problem, "name a new folder.")
    if is_ours and _has_begun(root):
        if config.trainer.resume != "auto":
            raise ConfigError(
                "trainer.run_dir",
                str(root),
                "it holds a run already.",
                "name another folder, or set trainer.resume=auto to go on with that run.",
            )
        _check_same_run(load_config(root / "config.yaml"), config)
        _check_same_teacher(root / "teacher.json", teacher, config)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = _hold(root)
        _replace(root / "teacher.json", lambda path: path.write_text(json.dumps(teacher, indent=2) + "\n"))
        _replace(root / "config.yaml", lambda path: save_config(config, path))
    except OSError as error:
        raise ConfigError("trainer.run_dir", str(root), f"it cannot be written ({error}).", "name another.") from error
    return RunFolder(root, config, lock)


def _hold(root: Path) -> TextIO:
    """Lock the folder for as long as the file stays open; the kernel lets go of it however the process ends."""
    lock = (root / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(
            "trainer.run_dir", str(root), "another run is writing into it right now.", "wait for it, or name another."
        ) from error
    return lock


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path` and rename: a kill in between leaves the old file whole."""
    fresh = path.with_name(f".{path.name}.tmp")
    write(fresh)
    fresh.replace(path)


def _has_begun(root: Path) -> bool:
    """Is there anything of a run to lose? A config alone is that of a run that never came to its first number."""
    metrics = root / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or any((root / "checkpoints").glob("step_*"))


def _check_same_run(before: Config, now: Config) -> None:
    old, new = _flat(asdict(before)), _flat(asdict(now))
    free_keys = _FREE_ON_RESUME | (_FREE_IF_CONSTANT if now.actor.optim.schedule == "constant" else set())
    for key in sorted(new):
        free = key in free_keys or key.startswith(_FREE_SECTIONS)
        if not free and old.get(key) != new[key]:
            raise ConfigError(
                key,
                new[key],
                f"the run in {now.trainer.run_dir} was started with {old.get(key)!r}.",
                "keep the old value to resume, or name another trainer.run_dir.",
            )


def _check_same_teacher(file: Path, teacher: dict[str, str], now: Config) -> None:
    try:
        before = json.loads(file.read_text())
        before["fingerprint"], before["name"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"its teacher.json is damaged ({error!r})."
        raise ConfigError("trainer.run_dir", now.trainer.run_dir, problem, "name another folder.") from error
    if before["fingerprint"] != teacher["fingerprint"]:
        raise ConfigError(
            "teacher.server_port",
            now.teacher.server_port,
            f"the server there has the model {teacher['name']} ({teacher['fingerprint'][:12]}); this run was scored by "
            f"{before['name']} ({before['fingerprint'][:12]}).",
            "start the server with the old model to resume, or name another trainer.run_dir.",
        )


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
