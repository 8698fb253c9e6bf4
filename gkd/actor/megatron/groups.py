"""Create and probe Megatron's process groups for a layout. They are global to a process."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from gkd.actor.common.agree import distinct_groups, probe_group
from gkd.actor.megatron.layout import ParallelLayout
from gkd.errors import ClusterError

# Groups that a training step uses. Megatron creates more, which connect on first use.
_USED = ("tp", "pp", "dp", "dp_cp", "mp", "embd", "ep", "expt_dp", "tp_ep", "tp_ep_pp", "intra_dist_opt")


def init_groups(layout: ParallelLayout, timeout_s: float = 1800.0) -> ProcessGroupCollection:
    """Build Megatron's process groups over torch.distributed's world, once per process. Collective.

    Args:
        timeout_s: of a collective; rounded up to minutes.

    Returns:
        Megatron's bundle of groups: `tp`, `pp`, `dp`, `mp`, `embd` and more.

    Raises:
        ClusterError: Megatron is already initialized with other sizes.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            # Gloo groups are used only by Megatron's own checkpoints.
            create_gloo_process_groups=False,
        )
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_expert_model_parallel_world_size(),
    )
    if sizes != (layout.tp, layout.pp, layout.vpp, layout.ep):
        tp, pp, vpp, ep = sizes
        raise ClusterError(
            f"Megatron's groups of this process have tp={tp} pp={pp} vpp={vpp} ep={ep}, the layout has tp={layout.tp} "
            f"pp={layout.pp} vpp={layout.vpp} ep={layout.ep}. Fix: start a new process; groups are global to a process."
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def probe_groups(groups: ProcessGroupCollection, device: torch.device, on_phase: Callable[[str], None]) -> None:
    """Run one small collective over each group of this rank that a step uses. Collective.

    Args:
        on_phase: called with the name of each group before its probe.

    Raises:
        ClusterError: see `probe_group`.
    """
    made = {name: getattr(groups, name) for name in _USED}
    mine = {name: group for name, group in made.items() if isinstance(group, dist.ProcessGroup)}
    for name, group in distinct_groups(mine).items():
        on_phase(f"probing group {name} of ranks {dist.get_process_group_ranks(group)}")
        probe_group(name, group, device)
