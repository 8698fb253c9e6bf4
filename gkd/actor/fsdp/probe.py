"""Check by forward passes of a few tokens that the model satisfies the assumptions of packing and the fused loss.

Both replace parts of a model's computation. Anything unusual that a model does there would silently be skipped. The
driver probes the model without weights, which finds most problems. The ranks probe it with weights, and compare packs
with their sequences alone: that finds any other computation, also of a model with code of its own. Of layers whose
kernels get the boundaries of a pack, they compare gradients, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gkd.actor.common.agree import same_error
from gkd.actor.fsdp.attention import CURRENT_PACK, Pack, layers_with_boundaries, refuse_packing, run_per_sequence
from gkd.actor.fsdp.model import LossModel, reshard
from gkd.errors import ConfigError, GkdError
from gkd.log import get_logger
from gkd.loss.chunked import capped

log = get_logger("actor.fsdp")

_LENGTHS = (40, 24)  # tokens of the two compared sequences: more than a convolution or an index reads
_N_TOKENS = 20  # most probable tokens whose logprobs are compared
_LARGEST = 1e-3  # nats
_LARGEST_16 = 0.3  # nats; rounding to 16 bits is 0.02 to 0.1 in deep models
_GRADIENT_LENGTHS = (70, 3, 24)  # tokens; more and less than a kernel's chunk of 64
_LARGEST_GRADIENT = 0.05  # relative, Frobenius norm; rounding to 16 bits is 0.02, and kernels without boundaries 1


@torch.no_grad()
def probe(root: LossModel, *, packing: bool, fused: bool, device: torch.device) -> None:
    """Probe a model with weights. Collective over the world; all ranks raise the same error.

    Raises:
        ConfigError: the model does not support packing or the fused loss; the key is actor.packing or
            actor.fused_lm_head.
    """
    try:
        _check_forward(root, packing=packing, fused=fused, device=device)
    finally:
        reshard(root)


@torch.no_grad()
def probe_on_meta(hf: PreTrainedModel, *, packing: bool, fused: bool) -> None:
    """Probe a model without weights. Moves `hf` to the meta device.

    Logits cannot be compared, so changes to them after the LM head are not found.

    Raises:
        ConfigError: see `probe`.
    """
    root = LossModel(hf.to("meta"))
    try:
        hf.set_experts_implementation("batched_mm")  # its shapes do not depend on the router's choice
        _check_forward(root, packing=packing, fused=fused, device=torch.device("meta"))
    except GkdError:
        raise
    except Exception as error:  # the model's own code needs values that a meta tensor does not have
        text = "a %s model cannot be probed without weights (%s); the ranks probe it"
        log.info(text, hf.config.model_type, type(error).__name__)


def _check_forward(root: LossModel, *, packing: bool, fused: bool, device: torch.device) -> None:
    calls: list[str] = []
    tokens = torch.tensor([[0, 1, 0]], device=device)
    arguments: dict[str, Any] = {}
    if packing:
        # On the meta device nothing is computed, but the boundaries are read.
        boundaries = torch.tensor([0, 2, 3], dtype=torch.int32, device="cpu" if device.type == "meta" else device)
        pack = Pack(boundaries, (2, 1), 2, calls)
        arguments = {"pack": pack, "position_ids": torch.tensor([[0, 1, 0]], device=device)}
    seen: dict[str, Tensor] = {}

    def keep_hidden(_module: Any, _inputs: Any, output: Any) -> None:
        seen["hidden"] = output[0]

    def keep_head(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["head_input"] = inputs[0]
        seen["head_output"] = output[0]

    hooks = [root.hf.base_model.register_forward_hook(keep_hidden), root.head.register_forward_hook(keep_head)]
    model_type = root.hf.config.model_type
    try:
        logits = root(tokens, torch.arange(3, device=device), **arguments)
    # Such as of a mask, which is not built for a pack, or of a package of another version.
    except (AttributeError, ImportError, LookupError, TypeError) as error:
        if not packing:
            raise
        raise refuse_packing(model_type, f"cannot compute a pack ({type(error).__name__}: {error})") from error
    finally:
        for hook in hooks:
            hook.remove()
    if packing and not calls:
        raise refuse_packing(model_type, "has neither attention nor recurrent layers that support packed sequences")
    if packing and device.type != "meta":
        differences = _pack_differences(root, device) or _gradient_differences(root, device, logits.dtype)
        with same_error(device):
            if differences:
                raise refuse_packing(model_type, differences)
    if fused and len(seen) < 3:
        what = "does not use its backbone and LM head in its forward pass, as the fused loss does"
        raise _refuse_fused(model_type, what)
    if fused and device.type != "meta":
        between = not _same(seen["hidden"], seen["head_input"])
        changed = capped(seen["head_output"] * root.head.factor, root.head.cap)
        if between or not _same(changed, logits, rtol=1e-2):
            what = "its hidden states before" if between else "its logits after"
            raise _refuse_fused(model_type, f"changes {what} the LM head, which the fused loss would skip")


def _pack_differences(root: LossModel, device: torch.device) -> str:
    """Return how a pack of two sequences differs from each alone, or these from the model's own attention."""
    text = root.hf.config.get_text_config()
    sequences = (torch.arange(sum(_LENGTHS), device=device) * 7 % min(int(text.vocab_size), 1000)).split(_LENGTHS)
    packed = logits_of_pack(root, sequences)
    alone = torch.cat([logits_of_pack(root, [part]) for part in sequences])
    attention = text._attn_implementation
    text._attn_implementation = "eager"
    try:
        eager = torch.cat([root(part[None], torch.arange(len(part), device=device)) for part in sequences])
    finally:
        text._attn_implementation = attention
    expected = alone.float().log_softmax(-1)
    chosen = expected.topk(min(_N_TOKENS, expected.shape[1])).indices
    leak, other = (
        (expected - logits.float().log_softmax(-1)).gather(1, chosen).abs().amax(1).nan_to_num(torch.inf)
        for logits in (packed, eager)
    )
    # The first sequence of a pack has none before it, so its difference is that of the kernels' rounding.
    rounding = float(leak[: _LENGTHS[0]].max())
    exact = alone.dtype == torch.float32
    if float(leak.max()) > (_LARGEST if exact else max(_LARGEST_16, 8 * rounding)):
        return f"computes other logprobs in a pack than alone, by {float(leak.max()):.2g} nats"
    if float(other.mean()) > (_LARGEST if exact else _LARGEST_16):
        return f"computes other logprobs than with its own attention, by {float(other.mean()):.2g} nats"
    return ""


def _gradient_differences(root: LossModel, device: torch.device, dtype: torch.dtype) -> str:
    """Return how gradients of a pack differ from those of its sequences alone, in layers that compute it in one call.

    They are those of one layer with random weights: the whole model would need memory for all of its gradients. The
    sequences alone are computed by transformers' code in torch, on the CPU in float32.
    """
    layers = layers_with_boundaries(root.hf) if device.type == "cuda" else []
    if not layers or not any(parameter.requires_grad for parameter in root.parameters()):
        return ""
    kind: Any = type(layers[0])
    config = root.hf.config.get_text_config()
    with torch.random.fork_rng(devices=[]):  # other random numbers do not depend on the probe
        torch.manual_seed(0)
        layer = kind(config, layers[0].layer_idx).to(dtype)
        layer.A_log.fill_(-4)  # so slow a decay that a state would pass into the next sequence
        layer.dt_bias.fill_(1)  # and so large a state
        for key, buffer in layers[0].named_buffers(recurse=False):  # Falcon-H1's model adds one to its layers
            layer.register_buffer(key, buffer.cpu())
        x, weights = torch.randn(2, 1, sum(_GRADIENT_LENGTHS), config.hidden_size).to(dtype)
    own = nn.ModuleList([layer])
    alone = _gradients(deepcopy(own).float(), x.float(), weights.float())
    run_per_sequence(own.to(device))
    borders = torch.tensor([0, *_GRADIENT_LENGTHS], device=device).cumsum(0).int()
    setattr(own, CURRENT_PACK, Pack(borders, _GRADIENT_LENGTHS))
    packed = _gradients(own, x.to(device), weights.to(device), is_pack=True)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(packed, alone, strict=True))
    name = kind.__name__
    if not error <= _LARGEST_GRADIENT:
        return f"computes other gradients in a pack than alone, by {error:.2g} of their norm in {name}"
    log.info("%d layers (%s) compute a pack in one call; its gradients are off by %.1g", len(layers), name, error)
    return ""


@torch.enable_grad()
def _gradients(own: Any, x: Tensor, weights: Tensor, *, is_pack: bool = False) -> list[Tensor]:
    """Return the output of a layer and the gradient of its input, by sequence, and the gradient of its convolution."""
    x = x.detach().requires_grad_()
    parts = [x] if is_pack else x.split(_GRADIENT_LENGTHS, dim=1)
    output = torch.cat([own[0](part) for part in parts], dim=1)
    of_input, of_kernel = torch.autograd.grad(output, (x, own[0].conv1d.weight), weights)
    tensors = [*output.detach().split(_GRADIENT_LENGTHS, dim=1), *of_input.split(_GRADIENT_LENGTHS, dim=1), of_kernel]
    return [tensor.float().cpu() for tensor in tensors]


def logits_of_pack(root: LossModel, texts: Sequence[Tensor]) -> Tensor:
    """Return [S, V], of sequences in one pack."""
    lengths = [len(part) for part in texts]
    device = texts[0].device
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    rows = torch.arange(sum(lengths), device=device)
    pack = Pack(borders, lengths, max(lengths))
    logits: Tensor = root(torch.cat(list(texts))[None], rows, position_ids=positions[None], pack=pack)
    return logits


def _refuse_fused(model_type: str, what: str) -> ConfigError:
    return ConfigError("actor.fused_lm_head", True, f"a {model_type} model {what}.", "use actor.fused_lm_head=false.")


def _same(a: Tensor, b: Tensor, rtol: float = 0.0) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=rtol, atol=0.0, equal_nan=True)
