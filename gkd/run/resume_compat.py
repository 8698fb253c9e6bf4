"""Is what is to go on the same run? Which settings and which teacher a resume may not change. Floor 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from gkd.config.derived import derive
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ConfigError

# Keys a resumed run may change: they say how and where the same thing is computed, not what. A checkpoint can be loaded
# in another layout, so the pools may be split anew.
FREE_ON_RESUME = {
    "trainer.run_dir",
    "trainer.resume",
    "trainer.save_every",
    "trainer.keep_last",
    "trainer.keep_every",
    "trainer.async_save",
    "trainer.record_batches",
    "trainer.replay",
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
    "teacher.path",
    "teacher.fsdp_cpu_offload",
    "reference.fsdp_cpu_offload",
    "teacher.server_ip",
    "teacher.server_port",
    "teacher.name",
    "teacher.keys",
    "teacher.n_server_workers",
    "teacher.overlap_rollout",
    "teacher.request_timeout_s",
    "teacher.outage_budget_s",
}
_FREE_SECTIONS = ("cluster.", "eval.", "memory.", "weight_sync.")
# The end of the run shapes every step of a schedule that ends there, and none of a constant one.
FREE_IF_CONSTANT = {"trainer.total_steps", "trainer.total_epochs"}


def check_same_run(before: Path, now: Config) -> None:
    """Args: before: the config.yaml of the run or of the checkpoint that is to go on."""
    old, new = _flat(asdict(load_config(before))), _flat(asdict(now))
    free_keys = FREE_ON_RESUME | (FREE_IF_CONSTANT if now.actor.optim.schedule == "constant" else set())
    for key in sorted(new):
        free = key in free_keys or key.startswith(_FREE_SECTIONS)
        if not free and old.get(key) != new[key]:
            raise ConfigError(
                key,
                new[key],
                f"{before.parent} was started with {old.get(key)!r}.",
                "keep the old value to resume, or start a new run in another trainer.run_dir.",
            )


def check_same_teacher(file: Path, teacher: Mapping[str, str], now: Config) -> None:
    try:
        before = json.loads(file.read_text())
        before["fingerprint"], before["name"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"its teacher.json is damaged ({error!r})."
        raise ConfigError("trainer.run_dir", now.trainer.run_dir, problem, "name another folder.") from error
    if before["fingerprint"] != teacher["fingerprint"]:
        key, fix = "teacher.server_port", "start the server with the old model to resume"
        if derive(now).is_local_teacher:
            key, fix = "teacher.path", "name the old model to resume"
        raise ConfigError(
            key,
            now.teacher.path or now.teacher.server_port,
            f"the teacher there is {teacher['name']} ({teacher['fingerprint'][:12]}); this run was scored by "
            f"{before['name']} ({before['fingerprint'][:12]}).",
            f"{fix}, or start a new run in another trainer.run_dir.",
        )


def check_same_reference(file: Path, identity: Mapping[str, str], now: Config) -> None:
    """Args: file: a teacher.json that `check_same_teacher` has read; identity: as it would be written now."""
    before, fingerprint = json.loads(file.read_text()).get("reference"), identity.get("reference")
    if before != fingerprint:
        key, path = ("reference.path", now.reference.path) if now.reference.path else ("model.path", now.model.path)
        raise ConfigError(
            key,
            path,
            f"its weights ({(fingerprint or 'none')[:12]}) are not those of the reference that this run was held to "
            f"({(before or 'none')[:12]}).",
            "put the old ones there to resume, or start a new run in another trainer.run_dir.",
        )


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
