"""Who is who among the actor's ranks: tensor, pipeline and data parallel coordinates. Pure, so the driver has it too.

Order tp-dp-pp, Megatron's own: TP ranks are neighbours (they talk most), then DP, then PP.

    rank = tp_rank + tp * (dp_rank + dp * pp_rank)
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.actor.megatron.hf_config import HfDims
from gkd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """This rank's place. Checked when it is made.

    Raises:
        ConfigError: naming actor.tp or actor.pp, if the sizes do not divide the world.
    """

    tp: int
    pp: int
    world_size: int
    rank: int

    def __post_init__(self) -> None:
        for key, value in (("actor.tp", self.tp), ("actor.pp", self.pp)):
            if value < 1:
                raise ConfigError(key, value, "must be at least 1.", "Use 1 to switch this parallelism off.")
        if self.world_size % (self.tp * self.pp):
            raise ConfigError(
                "actor.tp",
                self.tp,
                f"actor.tp * actor.pp = {self.tp} * {self.pp} does not divide the actor's {self.world_size} processes.",
                "Change actor.tp, actor.pp or the number of GPUs of the actor pool.",
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.world_size})")

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp * self.dp)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def check_model(self, dims: HfDims) -> None:
        """Raises ConfigError naming actor.tp or actor.pp if this layout cannot split a model of `dims`."""
        for what, count in (
            ("attention heads", dims.n_heads),
            ("key/value heads", dims.n_kv_heads),
            ("MLP columns", dims.ffn_size),
        ):
            if count % self.tp:
                raise ConfigError(
                    "actor.tp",
                    self.tp,
                    f"does not divide the model's {count} {what}.",
                    f"Choose a divisor of {count}.",
                )
        if dims.n_layers % self.pp:
            raise ConfigError(
                "actor.pp",
                self.pp,
                f"does not divide the model's {dims.n_layers} layers.",
                f"Choose a divisor of {dims.n_layers}.",
            )

    def layer_range(self, dims: HfDims) -> range:
        """Global numbers of the layers that this stage holds."""
        per_stage = dims.n_layers // self.pp
        return range(self.pp_rank * per_stage, (self.pp_rank + 1) * per_stage)

    def padded_vocab_size(self, dims: HfDims) -> int:
        """The vocabulary rounded up to a multiple of TP; Megatron wants equal shards."""
        return -(-dims.vocab_size // self.tp) * self.tp
