"""Exact resume of the student: weights, optimizer, step number and every RNG, in Megatron's format.

The format (torch_dist, `fully_reshardable`) stores tensors by name and global shape, so a
checkpoint can be loaded under another TP, PP or DP size. In the same layout the resume is
bit-exact; in another one the RNG states, which belong to ranks, stay as they are after seeding.
Only the choice of a DP-sharded optimizer is fixed: Megatron stores the two kinds differently.

Atomicity of the folder (temporary name, rename) is the caller's, who has more to put into it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.megatron.model import StudentModel
from gkd.errors import CheckpointError


def save_checkpoint(path: str | Path, model: StudentModel, optimizer: MegatronOptimizer, *, step: int) -> None:
    """Writes the folder `path`, which all ranks share; creates it if needed. Collective over the world, blocks.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = _sharded_state(model, optimizer, is_loading=False)
        state["step"] = step
        state["layout"] = _layout_of(model.layout)
        state["shard_over_dp"] = optimizer.config.use_distributed_optimizer
        dist_checkpointing.save(state, str(folder))
    except (OSError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"the student's checkpoint cannot be written to {folder}: {error}") from error


def load_checkpoint(path: str | Path, model: StudentModel, optimizer: MegatronOptimizer) -> int:
    """Fills model and optimizer from `path`, and the RNGs if the layout is the same. Collective, blocks.

    Returns:
        The number of optimizer steps the checkpoint was saved after.

    Raises:
        CheckpointError: no checkpoint there, or it is damaged or of another model.
    """
    folder = Path(path)
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        if common["shard_over_dp"] != optimizer.config.use_distributed_optimizer:
            raise CheckpointError(
                f"{folder} was saved with OptimSpec.shard_over_dp = {common['shard_over_dp']}; resume with the same."
            )
        same_layout = common["layout"] == _layout_of(model.layout)
        state = _sharded_state(model, optimizer, is_loading=True)
        if not same_layout:
            del state["rng"]
        loaded = dist_checkpointing.load(state, str(folder))
        model.gpt.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    except (OSError, KeyError, RuntimeError, ValueError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{folder} is not a checkpoint that this student can continue from: {error}") from error
    if same_layout:
        _set_rng_state(loaded["rng"])
    step: int = common["step"]
    return step


def _sharded_state(model: StudentModel, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": model.groups.dp_cp,
    }
    model_state = model.gpt.sharded_state_dict(metadata=metadata)
    rank, world_size = model.layout.rank, model.layout.world_size
    return {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata),
        "rng": ShardedObject("rng", _rng_state(), (world_size,), (rank,), replica_id=0),
    }


def _layout_of(layout: ParallelLayout) -> dict[str, int]:
    return {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep}


def _rng_state() -> dict[str, Any]:
    """Every generator that anything in this process may draw from."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    torch.cuda.set_rng_state(state["cuda"])
    torch.set_rng_state(state["torch"])
