"""Compute the parallel coordinates of the actor's ranks: tensor, context, pipeline, data and expert.

The driver uses it, too.

Megatron's order tp-cp-dp-pp: TP ranks are neighbors (they communicate most), then CP, then DP, then PP.

    rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank))

With virtual pipeline stages (vpp > 1), a stage holds vpp chunks of layers, and a micro-batch passes it vpp times.
Experts are distributed over neighboring ranks of one stage, and each expert is whole on its rank:

    ep_rank = rank % (tp * cp * dp) % ep
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from gkd.config.schema_actor import ActorConfig
from gkd.hf.model_dims import ModelDims, check_actor_split, check_context_split, check_expert_ranks


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Coordinates of one rank. Raises ConfigError: actor.ep does not divide the ranks of a stage."""

    tp: int
    pp: int
    world_size: int
    rank: int
    _: KW_ONLY
    vpp: int = 1  # model chunks per stage
    ep: int = 1  # expert parallel size
    cp: int = 1  # context parallel size

    def __post_init__(self) -> None:
        check_expert_ranks(self.ep, self.stage_size)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.world_size})")

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp % self.cp

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.tp * self.cp) % self.dp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.stage_size

    @property
    def ep_rank(self) -> int:
        return self.rank % self.stage_size % self.ep

    @property
    def exports(self) -> bool:
        """Return whether this rank joins the export of its stage. Together these ranks hold all of the stage."""
        return self.rank % self.stage_size < math.lcm(self.tp, self.ep)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def check_model(self, dims: ModelDims, *, sequence_parallel: bool = False, layers: str = "auto") -> None:
        """Raise ConfigError if a parallel size cannot split a model of `dims`; the key names the size."""
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep}
        check_actor_split(dims, **sizes, sequence_parallel=sequence_parallel, layers=layers)
        check_context_split(self.cp, (dims.n_heads // self.tp,), (dims.n_kv_heads // self.tp,))

    def holds_embedding(self, chunk: int) -> bool:
        """Return whether chunk `chunk` of this stage has the embedding."""
        return self.is_first_stage and chunk == 0

    def holds_head(self, chunk: int) -> bool:
        """Return whether chunk `chunk` of this stage has the LM head."""
        return self.is_last_stage and chunk == self.vpp - 1

    def layer_range(self, dims: ModelDims, chunk: int = 0) -> range:
        """Return the global indices of the layers in chunk `chunk` of this stage."""
        n_layers = dims.n_layers // (self.pp * self.vpp)
        start = (chunk * self.pp + self.pp_rank) * n_layers
        return range(start, start + n_layers)

    def padded_vocab_size(self, dims: ModelDims) -> int:
        """Return the vocabulary size rounded up to a multiple of TP; Megatron requires equal shards."""
        return -(-dims.vocab_size // self.tp) * self.tp


def layouts_of(actor: ActorConfig, world_size: int) -> list[ParallelLayout]:
    """Return the layouts of all ranks, in rank order."""
    a = actor
    ranks = range(world_size)
    return [ParallelLayout(a.tp, a.pp, world_size, rank, vpp=a.vpp, ep=a.ep, cp=a.cp) for rank in ranks]
