"""A HF folder -> this rank's shard of any causal language model, as one module from tokens to loss.

The parameters come to life sharded: the model is built on the meta device, cut by fully_shard, and only then given
memory, which `weights.py` fills.

Letters: B sequences, S columns, N loss rows, H hidden size, V rows of the LM head.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from gkd.actor.fsdp.attention import PACKED_ATTENTION, Pack, refuse_packing, register_packed_attention
from gkd.actor.fsdp.head import HeadUse, RowsHead
from gkd.actor.fsdp.host_run import into_one_run
from gkd.errors import ModelError
from gkd.loss.distill_loss import DistillLoss
from gkd.types import TokenTargets


class LossModel(nn.Module):
    """The whole student. Its forward pass ends in the loss, so that the LM head is gathered where the loss uses it."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    @property
    def head(self) -> RowsHead:
        head: RowsHead = self.hf.get_output_embeddings()
        return head

    def forward(
        self,
        tokens: Tensor,
        rows: Tensor,
        *,
        position_ids: Tensor | None = None,
        pack: Pack | None = None,
        targets: TokenTargets | None = None,
        loss: DistillLoss | None = None,
        fused: bool = True,
        use: HeadUse | None = None,
    ) -> Any:
        """One micro-batch.

        Args:
            tokens: [B, S] int64.
            rows: [N] int64 into the flattened [B * S] positions.
            position_ids: [B, S] int64; None: column numbers.
            pack: borders of the sequences of a packed row (B = 1).
            loss: what to compute from `targets`; None: nothing, for a look at the logits.
            fused: LM head and loss together; else all logits first.
            use: instead of a loss, what to do with the hidden states of `rows` and the LM head's weight.

        Returns:
            What `DistillLoss.from_hidden` or `use` returns; [N, V] logits without either.
        """
        arguments = {"position_ids": position_ids, "pack": pack}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        self.head.rows = rows
        try:
            if loss is not None and fused:
                if targets is None:
                    raise ModelError("the LM head was given a loss and nothing to learn from")
                use = partial(loss.from_hidden, targets=targets)
            if use is not None:
                return self.head(self.hf.base_model(input_ids=tokens, use_cache=False, **arguments)[0], use)
            logits: Tensor = self.hf(input_ids=tokens, use_cache=False, **arguments).logits[0]
            if loss is None or targets is None:
                return logits
            return loss.from_logits(logits, targets)
        finally:
            self.head.rows = None


def read_config(model_path: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """config.json of a local HF folder. Raises ModelError if there is none or it cannot be read."""
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a HF model folder: it has no config.json. Name a local folder.")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error}") from error


def build_on_meta(
    model_path: str | Path, *, dtype: torch.dtype, packing: bool, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of a folder, its parameters without memory, its buffers as its code makes them; no weights are read.

    Args:
        dtype: of the parameters.
        packing: attention takes packed sequences; else it is the model's own.

    Raises:
        ModelError: no causal language model can be made of the folder, or its LM head is not one linear layer.
        ConfigError: naming actor.packing: the model's attention cannot be replaced.
    """
    config = read_config(model_path, trust_remote_code=trust_remote_code)
    register_packed_attention()
    # The soft cap is known to "eager" alone of the model's own ways; None leaves the choice to transformers.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    attention = PACKED_ATTENTION if packing else "eager" if capped else None
    try:
        # Buffers keep their memory: non-persistent ones, such as rotary frequencies, are in no file.
        with no_init_weights(), init_empty_weights(include_buffers=False):
            hf: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a model's own code may raise anything
        # Some look their attention up in a table of their own: KeyError: 'gkd_packed'.
        if packing and ("attention" in str(error).lower() or PACKED_ATTENTION in str(error)):
            raise refuse_packing(config.model_type, f"has no attention that can be replaced ({error})") from error
        what = f"{type(error).__name__}: {error}"
        raise ModelError(f"{model_path}: no causal language model can be made of it: {what}") from error
    if packing and not hf._supports_attention_backend:
        raise refuse_packing(config.model_type, "does not let its attention be replaced")
    head = hf.get_output_embeddings()
    if head is None or hf.base_model is hf:
        raise ModelError(f"{model_path}: a {config.model_type} model has no LM head behind a backbone.")
    hf.set_output_embeddings(RowsHead(head))
    hf.tie_weights()
    # No dropout, whatever config.json says: the answers that it learns from were written, and scored, without.
    return hf.eval()


def is_tied(hf: PreTrainedModel) -> bool:
    """Is the LM head the embedding?"""
    tied: bool = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    return tied


def shard(
    hf: PreTrainedModel, *, device: torch.device, dtype: torch.dtype, recompute: bool, offload: bool
) -> LossModel:
    """Cuts the model over all ranks and gives this rank's shard memory, still unfilled; every rank calls it.

    Each layer is gathered for its own forward and backward pass, embeddings and LM head on their own where they are
    two; the root holds the rest (a last norm, tied embeddings).

    Args:
        dtype: of activations and gathered parameters; gradients are reduced in float32.
        recompute: keep only the layers' inputs for the backward pass.
        offload: shards, their gradients and with them the optimizer state live in host memory.
    """
    layers = layer_list(hf)
    if recompute:
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    mixed = dtype != torch.float32
    # Inputs stay as they are: the cast would reach into the targets, whose logprobs are float32 on purpose. A model's
    # own code runs in the dtype of its parameters.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if mixed else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    place = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()  # pinned below, all in one
    cut = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=place)
    for layer in layers:
        cut(layer)
    root = LossModel(hf)
    if not is_tied(hf):
        cut(hf.get_input_embeddings())
        # Its backward pass comes right after its forward pass.
        cut(root.head, reshard_after_forward=False)
    cut(root)
    home = torch.device("cpu") if offload else device
    root._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(device))
    if offload and device.type == "cuda":
        into_one_run(root, pinned=True)
    for module in fsdp_modules(root):
        # A plain sum, divided once by the global number of tokens; gloo knows neither averages nor factors.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # A parameter that one rank's tokens did not reach, such as an expert, is reduced all the same: as zeros.
        module.set_reduce_scatter_unused_params(True, recurse=False)
    return root


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """Every module that is gathered on its own, the root included."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def reshard(root: nn.Module) -> None:
    """Makes every parameter a shard again; a forward pass without a backward pass leaves some of them gathered."""
    for module in fsdp_modules(root):
        module.reshard()


def reset(root: nn.Module) -> None:
    """Makes every parameter a shard again after an error within a forward or backward pass; its gradients are lost."""
    assert isinstance(root, FSDPModule)
    root.reset_iter_state()


def layer_list(hf: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers. Raises ModelError if the model has no list of them."""
    lists = [module for module in hf.base_model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ModelError(f"{type(hf).__name__} has no list of layers that could be sharded one by one.")
    named = set(hf._no_split_modules or ())
    # A list of experts may be longer than that of the layers, which transformers names.
    blocks = [block for block in lists if any(type(module).__name__ in named for module in block)]
    return max(blocks or lists, key=len)
