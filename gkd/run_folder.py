"""A run's folder: what a run writes, where, and how another run is kept from overwriting it.

run_dir/config.yaml            resolved settings
        teacher.json           who scores: name and fingerprint of the teacher's weights
        metrics.jsonl          one line a step
        checkpoints/           see `gkd.checkpoints`
        branched_from          the checkpoint of another run that this one began with, if it did
        samples/step_N.jsonl   greedy answers to held-out prompts
        token_losses/step_N.jsonl  the numbers of each token of an evaluation, with eval.keep_token_losses
        export/                the trained student in Hugging Face format
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from gkd.checkpoints import ACTOR, STATE, CheckpointStore, TrainerState, read_state, step_of, verified
from gkd.config import Config
from gkd.config_load import config_yaml, load_config
from gkd.disk import fsync, write_synced
from gkd.errors import ConfigError
from gkd.manifest import NAME as MANIFEST
from gkd.manifest import Manifest
from gkd.roles import FileDigest, Sample, TokenRecord

_ORIGIN = "branched_from"
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


class RunFolder:
    """Paths and checkpoints of one run. Made by `open_run_folder`, which decides whether it may be used.

    Args:
        start: the checkpoint that the run goes on from, of this run or of another; None: it begins at step 0.
    """

    def __init__(
        self, root: Path, config: Config, teacher: Mapping[str, str], lock: TextIO, start: Path | None
    ) -> None:
        self.root, self.config, self.start = root, config, start
        self._teacher = teacher
        self._lock = lock  # held while this object lives
        self.metrics_file = root / "metrics.jsonl"
        self.export = root / "export"
        self.store = CheckpointStore(root / "checkpoints")

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

    def commit_checkpoint(self, state: TrainerState, actor: Mapping[str, FileDigest]) -> Manifest:
        """Make a finished save the newest checkpoint, then delete those that trainer.keep_last and keep_every let go.

        Raises:
            CheckpointError: the disk is full or read-only; earlier checkpoints are untouched.
        """
        documents = {
            STATE: state.to_bytes(),
            "config.yaml": config_yaml(self.config).encode(),
            "teacher.json": _teacher_json(self._teacher).encode(),
        }
        manifest = self.store.commit(state.step, documents, actor)
        self.store.prune(self.config.trainer.keep_last, self.config.trainer.keep_every)
        return manifest

    def resume(self, load_actor: Callable[[Path], None]) -> TrainerState | None:
        """Load the checkpoint that the run goes on from; None: it begins at step 0.

        Of the run's own checkpoints later ones are given up as soon as this one is loaded.
        """
        if self.start is None:
            return None
        state = read_state(self.start)
        load_actor(self.start / ACTOR)
        if self.start.parent == self.store.root:
            self.store.go_on_from(self.start)
        return state

    def clear_export(self) -> None:
        """Remove the export of an earlier end of this run; it is written again at the new end."""
        if self.export.exists():
            shutil.rmtree(self.export)


def open_run_folder(config: Config, teacher: dict[str, str]) -> RunFolder:
    """Take `trainer.run_dir` for this run, and hold it: a new folder, or (unless resume: never) the same run's.

    Reads the whole checkpoint that the run goes on from. A refused run changes nothing.

    Args:
        teacher: name and fingerprint of the model that scores; a resumed run must have the same fingerprint.

    Raises:
        ConfigError: it holds another run and trainer.resume is never or a checkpoint of another run, or the teacher or
            settings that shape the result have changed; trainer.resume is no checkpoint; another process holds it; it
            is a folder of something else; it cannot be written.
        CheckpointError: the checkpoint that trainer.resume names is damaged, or (auto) all of the run's are.
    """
    root = Path(config.trainer.run_dir)
    if root.exists() and not root.is_dir():
        raise ConfigError("trainer.run_dir", str(root), "it is a file.", "name a folder.")
    is_ours = (root / "config.yaml").exists() and (root / "teacher.json").exists()
    if root.exists() and any(root.iterdir()) and not is_ours:
        problem = "it is not empty and holds no whole run of ours."
        raise ConfigError("trainer.run_dir", str(root), problem, "name a new folder.")
    store, named = CheckpointStore(root / "checkpoints"), named_checkpoint(config)
    if named is not None and named.parent == store.root.resolve():
        named = store.root / named.name
    elif is_ours and _has_begun(root):
        if config.trainer.resume != "auto":
            raise ConfigError(
                "trainer.run_dir",
                str(root),
                "it holds a run already.",
                "name another folder, or set trainer.resume=auto to go on with that run.",
            )
        _check_same_run(root / "config.yaml", config)
        _check_same_teacher(root / "teacher.json", teacher, config)
    if named is not None:
        _check_checkpoint(named, teacher, config)
    try:
        root.mkdir(parents=True, exist_ok=True)
        fsync(root.parent)
        lock = _hold(root)
        try:
            start = named
            if config.trainer.resume == "auto":
                start = store.newest() or _origin(root, teacher, config)
            store.remove_leftovers()
            _replace(root / "teacher.json", _teacher_json(teacher))
            _replace(root / "config.yaml", config_yaml(config))
            if start is not None and start.parent != store.root:
                _replace(root / _ORIGIN, f"{start}\n")
            elif config.trainer.resume == "never":
                (root / _ORIGIN).unlink(missing_ok=True)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise ConfigError("trainer.run_dir", str(root), f"it cannot be written ({error}).", "name another.") from error
    return RunFolder(root, config, teacher, lock, start)


def named_checkpoint(config: Config) -> Path | None:
    """The folder that trainer.resume names; None where it is auto or never.

    Raises:
        ConfigError: there is no such folder, or it is no checkpoint.
    """
    resume = config.trainer.resume
    if resume in ("auto", "never"):
        return None
    problem = "it is neither auto nor never, and there is no such folder."
    if os.path.isdir(resume):
        folder = Path(resume).resolve()
        if step_of(folder) is not None and any((folder / file).exists() for file in (MANIFEST, STATE)):
            return folder
        problem = "that folder is no checkpoint."
    raise ConfigError("trainer.resume", resume, problem, "name one, like RUN_DIR/checkpoints/step_00000100.")


def _origin(root: Path, teacher: Mapping[str, str], config: Config) -> Path | None:
    """The other run's checkpoint that a branch began with: where it goes on from until it has saved one of its own."""
    file = root / _ORIGIN
    if not file.exists():
        return None
    folder = Path(file.read_text().removesuffix("\n"))
    _check_checkpoint(folder, teacher, config)
    return folder


def _check_checkpoint(folder: Path, teacher: Mapping[str, str], config: Config) -> None:
    """Is this checkpoint whole, and may a run of this config and teacher go on from it?"""
    verified(folder)
    _check_same_run(folder / "config.yaml", config)
    _check_same_teacher(folder / "teacher.json", teacher, config)


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


def _replace(path: Path, text: str) -> None:
    """Write beside `path`, flush and rename: a kill or a power cut in between leaves the old file whole."""
    fresh = path.with_name(f".{path.name}.tmp")
    write_synced(fresh, text.encode())
    fresh.replace(path)
    fsync(path.parent)


def _teacher_json(teacher: Mapping[str, str]) -> str:
    return json.dumps(teacher, indent=2) + "\n"


def _has_begun(root: Path) -> bool:
    """Is there anything of a run to lose? A config alone is that of a run that never came to its first number."""
    metrics = root / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or CheckpointStore(root / "checkpoints").has_any()


def _check_same_run(before: Path, now: Config) -> None:
    """Args: before: the config.yaml of the run or of the checkpoint that is to go on."""
    old, new = _flat(asdict(load_config(before))), _flat(asdict(now))
    free_keys = _FREE_ON_RESUME | (_FREE_IF_CONSTANT if now.actor.optim.schedule == "constant" else set())
    for key in sorted(new):
        free = key in free_keys or key.startswith(_FREE_SECTIONS)
        if not free and old.get(key) != new[key]:
            raise ConfigError(
                key,
                new[key],
                f"{before.parent} was started with {old.get(key)!r}.",
                "keep the old value to resume, or start a new run in another trainer.run_dir.",
            )


def _check_same_teacher(file: Path, teacher: Mapping[str, str], now: Config) -> None:
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
            "start the server with the old model to resume, or start a new run in another trainer.run_dir.",
        )


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
