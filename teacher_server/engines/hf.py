"""Transformers engine for any causal LM folder, on CPU or one GPU.

The backbone runs on the whole right-padded batch, and on a CPU once on a prompt that several sequences share. The
LM head runs only on the response positions, in chunks of rows (`signals`).

Letters: B sequences, S padded length, H hidden size, C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from teacher_server.engines.base import RowStream, ScoreParams, Scores, TokenSequence
from teacher_server.engines.gpu_kernels import keep_kernels_on_gpus
from teacher_server.engines.signals import MatrixStream, score_hidden
from teacher_server.engines.weight_files import read_json, some_names
from teacher_server.errors import ServerError
from teacher_server.vision.processor import ImageProcessor
from teacher_server.vision.rows import forward_arguments, image_rows
from teacher_server.wire.protocol import Wire

if TYPE_CHECKING:
    from teacher_server.engines.load import EngineSettings

log = logging.getLogger(__name__)

# Padded tokens of one forward pass on a CPU. Larger passes are not faster there, and all sequences of a pass are padded
# to the longest: with geometric lengths, three quarters of a pass of 8192 tokens are padding.
_CPU_PASS_TOKENS = 512
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HfEngine:
    """Transformers implementation of `Engine`. Raises ServerError if the model cannot be loaded or served.

    It shares prompts on a CPU, if the model allows it; a GPU is faster without.

    Args:
        dtype: "float32" | "bfloat16".
        device: "cpu" | "cuda" | "cuda:N".
    """

    name = "hf"
    sums_units = True

    def __init__(self, settings: EngineSettings, *, dtype: str, device: str) -> None:
        path = settings.model
        images = settings.images
        transformers_logging.disable_progress_bar()  # stderr has log lines alone, which may be JSON
        try:
            self.image_processor = ImageProcessor(path) if images else None
            config = AutoConfig.from_pretrained(path)
            load = partial(
                auto_class(config, images=images).from_pretrained, path, dtype=_DTYPES[dtype], output_loading_info=True
            )
            try:
                loaded = load(attn_implementation=own_attention(config) or "sdpa")  # its memory is linear in S
            except ValueError as error:
                if "attention implementation" not in str(error):
                    raise
                log.info("hf: the model has eager attention alone, which takes memory for [heads, S, S] of a sequence")
                loaded = load(attn_implementation="eager")
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise ServerError(f"model folder {path}: transformers cannot load the model: {error}") from error
        model: Any = loaded[0]
        _check_loaded(path, *loaded)
        if not images:
            keep_language_model(model)
        self._device = torch.device(device)
        keep_kernels_on_gpus(model)
        if self._device.type == "cpu":
            use_onednn(model)
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._backbone = self._model.base_model
        if self._backbone is self._model:  # transformers does not find it, as with Llama 4
            kind = type(model).__name__
            raise ServerError(f"model folder {path}: engine hf finds no backbone in {kind}. Fix: use --engine vllm.")
        self._head = self._model.get_output_embeddings()
        self._logits: Callable[[torch.Tensor], torch.Tensor] = self._head
        self.device = device
        self.dtype = dtype
        self.max_tokens = settings.max_tokens
        self.vocab_size, self.hidden_size = map(int, self._head.weight.shape)
        self.has_plain_head = type(self._head) is torch.nn.Linear and self._head.bias is None
        factor, cap = change_of_logits(model)
        if (factor, cap) != (1.0, None):
            self.has_plain_head = False
            self._logits = lambda hidden: _changed(self._head(hidden), factor, cap)
        self._check_head_alone(path)
        self.prefix_block = self._find_prefix_block() if settings.share_prompts and self._device.type == "cpu" else 0
        self._longrope_limit = _longrope_limit(self._backbone)

    def _find_prefix_block(self) -> int:
        problem = sharing_problem(self._backbone, self._model.config, self._device)
        block = 0 if problem else SHORTEST_PROMPT
        shared = f"not shared: {problem}" if problem else f"computed once, if they have more than {block} tokens"
        log.info("hf: prompts that sequences of a batch have in common are %s", shared)
        return block

    def _check_head_alone(self, path: str) -> None:
        """Check that the logits have no NaN, and come from the LM head alone but for known changes."""
        probe = torch.arange(1, min(9, self.vocab_size), device=self._device)[None]  # [1, 8]
        try:
            with torch.inference_mode():
                whole = self._model(input_ids=probe, use_cache=False).logits[0].float()
                alone = self._logits(self._hidden(probe)[0]).float()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            fix = "if it is not about memory or the device, copy config.json again."
            raise ServerError(f"model folder {path}: transformers cannot compute it: {error}. Fix: {fix}") from error
        if torch.isnan(whole).any():
            raise ServerError(
                f"model folder {path}: the model's logits contain a NaN (dtype {self.dtype}). "
                "Fix: copy the weights again if they have a NaN, or use --dtype float32 if it is an overflow."
            )
        # Relative to the largest one: a cap hardly changes small logits.
        if not torch.allclose(whole, alone, rtol=0.0, atol=1e-4 * float(alone.abs().amax())):
            kind = type(self._model).__name__
            raise ServerError(
                f"model folder {path}: {kind} modifies its logits after the LM head, which engine hf does not support. "
                "Fix: use --engine vllm."
            )

    def _hidden(self, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return self._backbone(input_ids=tokens, use_cache=False, **arguments).last_hidden_state  # [B, S, H]

    @torch.inference_mode()
    def score(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[Scores]:
        """See `Engine.score`."""
        scores = score_hidden(self._response_rows(batch), batch, self._logits, params, self.vocab_size)
        if self._device.type == "cpu":
            # The C library keeps freed activations in pieces that those of another length do not fit into, so the
            # process would grow with each batch.
            ctypes.CDLL(None).malloc_trim(0)
        return scores

    def _response_rows(self, batch: Sequence[TokenSequence]) -> torch.Tensor:
        """Return [N, H] hidden states that predict the response tokens with rows, sequence after sequence."""
        rows: dict[int, torch.Tensor] = {}
        groups, single = groups_of(batch, self.prefix_block)
        for group in groups:
            sequences = [batch[i] for i in group]
            rows |= zip(group, rows_of_group(self._backbone, self._model.config, sequences, self._device), strict=True)
        lengths = {i: len(batch[i].token_ids) for i in single}
        for is_long in (False, True):
            part = {i: length for i, length in lengths.items() if (length > self._longrope_limit) == is_long}
            for group in _passes(part, self._most):
                n_rows = [batch[i].n_rows for i in group]
                rows |= zip(group, self._rows_of_pass([batch[i] for i in group]).split(n_rows), strict=True)
        return torch.cat([rows[i] for i in range(len(batch))])

    def _most(self, length: int) -> float:
        """Return how many sequences a forward pass has at most, padded to this length."""
        return _CPU_PASS_TOKENS // length if self._device.type == "cpu" else math.inf

    def _rows_of_pass(self, batch: Sequence[TokenSequence]) -> torch.Tensor:
        longest = max(len(sequence.token_ids) for sequence in batch)
        tokens = np.zeros((len(batch), longest), np.int64)  # [B, S]
        rows: list[np.ndarray] = []
        for i, sequence in enumerate(batch):
            tokens[i, : len(sequence.token_ids)] = sequence.token_ids
            # The logits at position t predict token t + 1.
            rows.append(i * longest + sequence.prompt_length - 1 + sequence.rows)
        # No attention mask: the model is causal and the padding is on the right, so it affects no real token.
        hidden = self._hidden(torch.from_numpy(tokens).to(self._device), **self._image_arguments(tokens, batch))
        return hidden.flatten(0, 1)[torch.from_numpy(np.concatenate(rows)).to(self._device)]

    def _image_arguments(self, tokens: np.ndarray, batch: Sequence[TokenSequence]) -> dict[str, Any]:
        """Return what the backbone needs for the images of a pass; nothing without any."""
        if self.image_processor is None:
            return {}
        spans = [(row, slice(None)) for row in range(len(batch))]
        images = [sequence.images for sequence in batch]
        rows = image_rows(self._model, self.image_processor, torch.from_numpy(tokens), spans, images, self._device)
        return {} if rows is None else forward_arguments(self._model, rows)

    def lm_head(self, wire: Wire) -> RowStream:
        """See `Engine.lm_head`."""
        return MatrixStream(self._head.weight, wire)


def own_attention(config: Any) -> str | None:
    """Return transformers' attention for a model: only "eager" has a soft cap of scores. None leaves the choice."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None else None


# Keys of config.json whose value multiplies logits, or divides them: Cohere, Falcon-H1, Granite.
_FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
_CAP = "final_logit_softcapping"


def change_of_logits(model: Any) -> tuple[float, float | None]:
    """Return what a model multiplies its logits by, and its soft cap (Gemma 2) or None.

    Keys that the code of the model does not name have no effect.
    """
    config = model.config.get_text_config()
    module = inspect.getmodule(type(model))
    try:
        code = inspect.getsource(module) if module is not None else ""
    except OSError:
        code = ""
    values = {name: float(getattr(config, name, None) or 0) for name in (*_FACTORS, _CAP) if name in code}
    factor = 1.0
    for name, power in _FACTORS.items():
        if value := values.get(name):
            factor *= value**power
    return factor, values.get(_CAP) or None


def _changed(logits: torch.Tensor, factor: float, cap: float | None) -> torch.Tensor:
    logits = logits * factor
    return logits if cap is None else cap * torch.tanh(logits / cap)


def auto_class(config: Any, *, images: bool = False) -> Any:
    """Return transformers' class for the model of a config. For most that read images it has no causal one.

    Args:
        images: the model shall read images; a causal class is without the tower.
    """
    if images:
        return AutoModelForImageTextToText
    own_code = getattr(config, "auto_map", None) or {}
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or AutoModelForCausalLM.__name__ in own_code
    has_decoder = config.get_text_config() is not config and not config.is_encoder_decoder
    reads_images = has_decoder and config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if reads_images and not is_causal else AutoModelForCausalLM


def keep_language_model(model: Any) -> None:
    """Remove from a model that reads images what it does not need for text: all but its decoder and LM head.

    A tower would take memory and, if it is trained, decay without a gradient. See `outside_names`.
    """
    removed = outside_parts(model)
    for parent, name, _ in removed:
        setattr(parent, name, None)
    model.removed_prefixes = tuple(path for _, _, path in removed)


def outside_parts(model: Any) -> list[tuple[Any, str, str]]:
    """Return what a model that reads images has in addition to its decoder and LM head: its tower and its projection.

    Returns:
        (parent, attribute, path) of each module and parameter; the path of a module ends with a dot.
    """
    if model.config.get_text_config() is model.config:
        return []
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    path = next(name for name, module in model.named_modules() if module is decoder)
    outside: list[tuple[Any, str, str]] = []
    parent = model
    where = ""
    for step in path.split("."):
        children = {name for name, child in parent.named_children() if name != step and child is not head}
        outside += [(parent, name, f"{where}{name}.") for name in sorted(children)]
        # Such as the parameter of the ends of lines of LLaVA-NeXT.
        outside += [(parent, name, where + name) for name, _ in parent.named_parameters(recurse=False)]
        parent = getattr(parent, step)
        where += f"{step}."
    return outside


def outside_names(model: Any, names: Iterable[str]) -> set[str]:
    """Return which tensors of the folder belong to what `keep_language_model` has removed."""
    removed = getattr(model, "removed_prefixes", ())
    renamings = [renaming for renaming in get_model_conversion_mapping(model) if isinstance(renaming, WeightRenaming)]
    mapped = {name: rename_source_key(name, renamings, [])[0] for name in names}
    base = model.base_model_prefix
    return {name for name in mapped if mapped[name].startswith(removed) or f"{base}.{mapped[name]}".startswith(removed)}


def _check_loaded(path: str, model: Any, info: Mapping[str, Any]) -> None:
    """Raise ServerError if a weight is missing, which transformers makes up, or one has no place in the model.

    Args:
        info: output_loading_info of transformers, which only logs both.
    """
    unused = _without_place(path, model, info["unexpected_keys"])
    if getattr(model.config, "quantization_config", None) is not None:
        unused = []
    for names, problem in ((info["missing_keys"], "lacks"), (unused, "has tensors that config.json has no place for:")):
        if names:
            raise ServerError(
                f"model folder {path}: it {problem} {some_names(sorted(names))}. "
                "Fix: copy the whole folder, with the config.json and the index of these weights."
            )


def _without_place(path: str, model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the tensors that the model has no place for. Of a multimodal folder, those of a tower have none."""
    if "text_config" not in read_json(Path(path, "config.json")):
        return list(unexpected)
    modules = dict(model.named_modules())
    lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, torch.nn.ModuleList))
    return [name for name in unexpected if name.rpartition(".")[0] in modules or name.startswith(lists)]


def needed_tensors(path: str, names: Sequence[str]) -> list[str]:
    """Return which of the folder's tensors an engine may not leave out. Reads no weights.

    It may leave out what transformers ignores, what is not of the language model, and further copies of tied weights;
    all are needed if transformers cannot build the model.
    """
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path)
            model: Any = auto_class(config).from_config(config)
            keep_language_model(model)
    except Exception as error:  # a model may have code of its own
        log.warning("%s: transformers cannot build the model: %s", path, error)
        return list(names)
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    state = model.state_dict()
    copies = tuple(model.all_tied_weights_keys)
    names = [name for name in names if not name.endswith(copies)]
    conversions = get_model_conversion_mapping(model)
    renamings = [renaming for renaming in conversions if isinstance(renaming, WeightRenaming)]
    converters = [converter for converter in conversions if isinstance(converter, WeightConverter)]
    rename = partial(rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=state)
    mapped = {name: rename(name, renamings, converters)[0] for name in names}
    read = [name for name in names if name in state or mapped[name] in state]
    needed = {*read, *outside_names(model, names)}
    rest = {mapped[name]: name for name in names if name not in needed and not any(re.search(p, name) for p in ignored)}
    return [*read, *(rest[name] for name in _without_place(path, model, rest))]


def _longrope_limit(backbone: Any) -> float:
    """Return the length above which a pass has other rotary embeddings, for all of its sequences; inf without one."""
    limits = [
        parameters["original_max_position_embeddings"]
        for module in backbone.modules()
        if "longrope" in str(getattr(module, "rope_type", ""))
        for parameters in (module.config.rope_parameters, *module.config.rope_parameters.values())
        if isinstance(parameters, Mapping) and parameters.get("rope_type") == "longrope"
    ]
    return min(limits, default=math.inf)


def _passes(lengths: Mapping[int, int], most: Callable[[int], float]) -> Iterator[list[int]]:
    """Yield the sequence indices of each forward pass, from short to long.

    Args:
        lengths: index of a sequence -> its tokens.
        most: length of the longest sequence of a pass -> most sequences of it; a single one is always a pass.
    """
    group: list[int] = []
    for i in sorted(lengths, key=lengths.__getitem__):
        if group and len(group) + 1 > most(lengths[i]):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


# Prompts of fewer tokens are computed with each sequence: two small passes cost more than they save. Measured on a CPU
# with 4 layers. On an H200 sharing was slower up to 2,048 tokens of prompt: the cache rules out the fast attention.
SHORTEST_PROMPT = 64
_PASS_TOKENS = 512  # padded response tokens of a pass, which also bounds the attention mask
_CACHE_TOKENS = 8192  # tokens in the KV cache of a pass: most of its memory


def sharing_problem(backbone: Any, config: Any, device: torch.device) -> str:
    """Return why this model's prompts cannot be shared; empty if they can. Runs two short passes."""
    rope = {str(getattr(module, "rope_type", "")) for module in backbone.modules()}
    if any("dynamic" in kind or "longrope" in kind for kind in rope):
        return "its rotary embedding depends on the length of the whole sequence"
    cache = DynamicCache(config=config)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        kinds = sorted({type(layer).__name__ for layer in cache.layers} - {DynamicLayer.__name__})
        return f"its cache has layers of the kind {', '.join(kinds)}"
    tokens = torch.arange(1, 9, device=device)[None] % config.get_text_config().vocab_size  # [1, 8]
    with torch.inference_mode():
        whole = backbone(input_ids=tokens, use_cache=False).last_hidden_state[0]
        try:
            backbone(input_ids=tokens[:, :5], past_key_values=cache, use_cache=True)
            if cache.get_seq_length() != 5:
                return "it does not keep its state in the cache that it is given"
            continued = backbone(input_ids=tokens[:, 5:], past_key_values=cache, use_cache=True).last_hidden_state[0]
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            return f"it does not take a cache: {type(error).__name__}: {error}"
    tolerance = 1e-3 if whole.dtype == torch.float32 else 0.05
    if not torch.allclose(continued, whole[5:], rtol=tolerance, atol=tolerance * float(whole.abs().max())):
        return "with a cache it computes other hidden states"
    return ""


def groups_of(batch: Sequence[TokenSequence], block: int) -> tuple[list[list[int]], list[int]]:
    """Return the indices of sequences with a common prompt of more than `block` tokens, and those of all others."""
    by_prompt: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(batch):
        # The ids of two images of one size are the same.
        key = b"%d" % index if sequence.images else sequence.token_ids[: sequence.prompt_length].tobytes()
        by_prompt.setdefault(key, []).append(index)
    groups = [g for g in by_prompt.values() if block and len(g) > 1 and batch[g[0]].prompt_length > block]
    grouped = {index for group in groups for index in group}
    return groups, [index for index in range(len(batch)) if index not in grouped]


def rows_of_group(backbone: Any, config: Any, batch: Sequence[TokenSequence], device: torch.device) -> list[Any]:
    """Return the [M, H] hidden states that predict the M response tokens with rows, of each sequence.

    On a CPU the prompt is computed once. Its KV cache is repeated for the sequences of a pass, which then computes
    their responses only.

    Args:
        backbone: without the LM head.
        config: of the model, for its cache.
        batch: sequences with the same prompt, of P tokens, and responses of R tokens.
    """
    n_prompt = batch[0].prompt_length
    cache = DynamicCache(config=config)
    prompt = torch.from_numpy(batch[0].token_ids[:n_prompt].astype(np.int64))[None].to(device)
    # The logits at position t predict token t + 1: the prompt's last row predicts the first token of every response.
    hidden = backbone(input_ids=prompt, past_key_values=cache, use_cache=True).last_hidden_state
    first = hidden[0, -1:].clone()  # [1, H]
    rows: list[Any] = [first] * len(batch)
    lengths = {i: sequence.n_response - 1 for i, sequence in enumerate(batch) if sequence.n_response > 1}

    def most(length: int) -> int:
        return min(_PASS_TOKENS // length, _CACHE_TOKENS // (n_prompt + length))

    for group in _passes(lengths, most):
        inputs = [batch[i].response[:-1] for i in group]
        tokens = np.zeros((len(group), max(map(len, inputs))), np.int64)  # [B, S]; the last token predicts none
        for row, ids in zip(tokens, inputs, strict=True):
            row[: len(ids)] = ids
        # The cache holds the prompt alone, once or for the pass before: its first entry becomes B entries.
        cache.batch_select_indices(torch.zeros(len(group), dtype=torch.int64, device=device))
        hidden = _responses(backbone, cache, torch.from_numpy(tokens).to(device))
        cache.crop(-tokens.shape[1])
        for i, ids, states in zip(group, inputs, hidden, strict=True):
            every = torch.cat([first, states[: len(ids)]])  # [R, H]
            rows[i] = every if batch[i].own is None else every[torch.from_numpy(batch[i].rows).to(device)]
    return rows


def _responses(backbone: Any, cache: DynamicCache, tokens: torch.Tensor) -> torch.Tensor:
    """Return [B, S, H]. A response that is longer than a pass is computed in several: its mask would be large."""
    step = max(1, _PASS_TOKENS // len(tokens))
    states = [
        backbone(input_ids=part, past_key_values=cache, use_cache=True).last_hidden_state
        for part in tokens.split(step, dim=1)
    ]
    return torch.cat(states, dim=1)


def use_onednn(model: torch.nn.Module) -> None:
    """Replace the forward of every plain float32 linear layer, unless torch lacks oneDNN.

    torch uses oneDNN on a CPU for bfloat16 only. For float32 it uses MKL, which is half as fast on AMD processors
    with AVX-512: 1.9 ms for a row of the LM head (V = 152k, H = 512) against 0.95 ms. torch has no switch for it,
    so this module calls the operator that torch's compiler substitutes for a linear layer.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and layer.weight.dtype == torch.float32:
            layer.forward = partial(_linear, layer)  # type: ignore[method-assign]


def _linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
