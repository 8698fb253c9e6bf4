"""Settings of the student and its optimizer: section `actor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gkd.config.declare import auto_is, key


class Limit(NamedTuple):
    """List the values of a key of `actor` that a backend supports."""

    values: tuple[object, ...]  # the last one replaces a value that is not supported
    why: str


class StudentBackend(NamedTuple):
    """Hold the facts of one value of `actor.strategy`.

    `gkd.actor.rank`, `gkd.memory.footprint.actor` and `gkd.preflight.student` list its functions.
    """

    limits: Mapping[str, Limit]  # a key that is missing has none
    shards_every_tensor: bool  # each rank has a part of every tensor, so all of them send the weights together
    adapts_moe_models: bool  # dense MLPs of a model with experts can have LoRA adapters

    def supports(self, name: str, value: object) -> bool:
        return name not in self.limits or value in self.limits[name].values


_DATA_PARALLEL = Limit((1,), "is data and context parallel only")
BACKENDS = {
    "megatron": StudentBackend(
        {
            "fsdp_cpu_offload": Limit((False,), "does not shard its weights"),
            "compile": Limit(("auto", "off"), "compiles what actor.layers says"),
        },
        shards_every_tensor=False,
        adapts_moe_models=False,
    ),
    "fsdp2": StudentBackend(
        {
            **dict.fromkeys(("tp", "pp", "vpp", "ep"), _DATA_PARALLEL),
            "recompute": Limit(("none", "full"), "always recomputes attention scores, in its kernels"),
            "sequence_parallel": Limit((False,), "has no tensor-parallel regions"),
            "layers": Limit(("auto",), "has transformers' layers"),
        },
        shards_every_tensor=True,
        adapts_moe_models=True,
    ),
}


@dataclass(frozen=True)
class OptimConfig:
    lr: float = key(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    betas: list[float] = key([0.9, 0.95], ge=0, lt=1, limits="two numbers")
    """Adam's beta1 and beta2."""
    eps: float = key(1e-8, gt=0)
    """Added to Adam's denominator."""
    weight_decay: float = key(0.01, ge=0)
    """Decoupled weight decay; not applied to biases and norms."""
    clip_grad: float = key(1.0, ge=0)
    """Limit of the global gradient norm; 0 = off."""
    schedule: str = key("constant", choices=("constant", "linear", "cosine", "wsd"))
    """Learning rate after the warm-up: constant, or a decay to min_lr_ratio x lr at the last step. wsd is constant
    until the last decay_steps steps."""
    warmup_steps: int = key(0, ge=0)
    """Steps of linear warm-up; the first step has lr / warmup_steps."""
    decay_steps: int = key(0, ge=0)
    """wsd: steps of linear decay at the end of the run."""
    min_lr_ratio: float = key(0.0, ge=0, le=1)
    """Final learning rate of linear, cosine and wsd, as a fraction of lr."""


@dataclass(frozen=True)
class LoraConfig:
    rank: int = key(0, ge=0)
    """Rank of the LoRA adapters; 0 = train all weights."""
    alpha: float = key(16.0, gt=0)
    """The adapters' product is scaled by alpha / rank."""
    targets: list[str] = key(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    """Linear layers that get an adapter: the last part of their names."""

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class ActorConfig:
    strategy: str = key("auto", choices=("auto", *BACKENDS))
    """Training backend. megatron: Megatron-core with tensor, pipeline and expert parallelism. fsdp2: fully_shard
    around the Hugging Face model, data and context parallel. auto = megatron if it supports model and settings,
    else fsdp2. docs/models.md."""
    tp: int = key(1, gt=0, resume=True)
    """Tensor parallel size."""
    pp: int = key(1, gt=0, resume=True)
    """Pipeline parallel size."""
    vpp: int = key(1, gt=0, resume=True)
    """Model chunks of each pipeline stage (interleaved 1F1B): smaller pipeline bubbles, more messages; 1 = off."""
    cp: int = key(1, gt=0, resume=True)
    """Context parallel size: neighboring ranks that share each micro-batch, a part of the columns each, so that
    activations of a sequence are split. It divides the model's attention heads / tp."""
    ep: int = key(1, gt=0, resume=True)
    """Expert parallel size: neighboring ranks of a pipeline stage that share the experts. Mixture-of-experts
    students only."""
    sequence_parallel: bool = key(False, resume=True)
    """Split activations between tensor-parallel regions along the sequence; needs actor.tp > 1."""
    layers: str = key("auto", choices=("auto", "torch", "te"), resume=True)
    """megatron: modules of the layers. auto = Megatron's own, on cuda with SwiGLU, and norms and rotation of queries
    and keys, compiled (needs a C compiler); torch = the same without compiling; te = Transformer Engine's, which must
    be installed."""
    compile: str = key("auto", choices=("auto", "on", "off"), resume=True)
    """fsdp2: compile each layer with torch.compile, which needs a C compiler. auto = on cuda, and uncompiled if that
    fails at the start; on = also on cpu, and a failure ends the run. docs/student.md."""
    attention: str = key("auto", choices=("auto", "fa3", "fa4"), resume=True)
    """Attention kernels on cuda: auto = torch's FlashAttention-2; fa3, fa4 = FlashAttention-3 or -4, whose package must
    be installed. Those need model.dtype=bfloat16."""
    recompute: str = key("none", choices=("none", "selective", "full"), resume=True)
    """Activations recomputed in the backward pass: none, selective (attention; megatron only), or full (whole
    layers)."""
    fsdp_cpu_offload: bool = key(False, resume=True)
    """fsdp2: keep sharded parameters, gradients and optimizer state in host memory and copy one layer at a time to
    the GPU. actor.offload_train is then ignored."""
    offload_train: bool = key(False, resume=True)
    """Move weights, gradients and optimizer state to host memory between calls on the actor. docs/memory.md."""
    packing: bool | None = key(None, read=auto_is(None), example="auto, true or false", resume=True)
    """Concatenate the sequences of a micro-batch instead of padding each to the longest. auto = unless the model
    does not support it."""
    micro_batch_size: int = key(8, gt=0, resume=True)
    """Sequences of one forward pass; used if max_tokens_per_micro_batch is 0."""
    max_tokens_per_micro_batch: int = key(
        0, ge=0, limits="0, or >= data.max_prompt_length + data.max_response_length", resume=True
    )
    """Tokens of one forward pass, padding included, on all cp ranks together; 0 = use micro_batch_size."""
    fused_lm_head: bool | None = key(None, read=auto_is(None), example="auto, true or false", resume=True)
    """Compute LM head and loss in chunks of rows, so that the full logits never exist. false: all logits at once,
    for models that do more with them than scale, bias and soft cap. auto = unless the model does."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def group_size(self) -> int:
        """Ranks of a data-parallel group."""
        return self.tp * self.cp * self.pp

    @property
    def backend_name(self) -> str:
        """Return `strategy`, or before `gkd.preflight.student.chosen` the first one that has these settings."""
        if self.strategy != "auto":
            return self.strategy
        fitting = (
            name
            for name, backend in BACKENDS.items()
            if all(backend.supports(option, getattr(self, option)) for option in backend.limits)
        )
        return next(fitting, "megatron")

    @property
    def backend(self) -> StudentBackend:
        """Return the facts of `backend_name`."""
        return BACKENDS[self.backend_name]

    @property
    def packs(self) -> bool:
        """Return whether sequences are packed: `packing`, and before a choice True."""
        return self.packing is not False

    @property
    def fuses(self) -> bool:
        """Return whether LM head and loss are computed together: `fused_lm_head`, and before a choice True."""
        return self.fused_lm_head is not False
