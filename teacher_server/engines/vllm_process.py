"""Set what both kinds of vLLM engines need, and check that they compute with all that the model's folder holds.

vLLM's loaders are generous: some skip a tensor that their model has no place for, and some read the first rows of one
that is larger than their parameter. So each worker records what vLLM reads of each tensor, and writes of each
parameter, while it loads the folder. This needs no list of models.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from teacher_server.engines.folder_check import WITHOUT_TORCHVISION
from teacher_server.engines.weight_files import FolderError, read_json, some_names
from teacher_server.wire.protocol import MAX_IMAGES

# vLLM does not start unless `gpu_memory_utilization` of the GPU is free (`request_memory` of its worker), also if the
# size of the KV cache is given. The share decides nothing else then: such an engine needs its weights, one forward pass
# and its cache, on whatever part of the GPU other processes leave. Zero is not accepted.
_FREE = 0.001


def gpu_memory_arguments(share: float, kv_cache_bytes: int | None) -> dict[str, Any]:
    """Return arguments of vLLM.

    Args:
        share: of each GPU, for weights, a forward pass and the KV cache; without effect if the cache has a size.
        kv_cache_bytes: size of the KV cache on each GPU; None takes what the share leaves.
    """
    if kv_cache_bytes is None:
        return {"gpu_memory_utilization": share}
    return {"gpu_memory_utilization": _FREE, "kv_cache_memory_bytes": kv_cache_bytes}


def architecture_arguments(folder: str, *, images: bool = False) -> dict[str, Any]:
    """Return arguments of vLLM that name the model's class: vLLM goes by `architectures`, transformers by `model_type`.

    A folder with several models, with code of its own, or with a class that vLLM has under another name (Phi-3.5-MoE)
    keeps the class that it names. Without images only the language model of several is built: vLLM's processor of
    images needs a tokenizer, and the tower memory.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_json(Path(folder, "config.json"))
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    named = config.get("architectures") or []
    keeps = named and ("text_config" in config or "auto_map" in config or _is_vllms(named[0], name))
    if config.get("model_type") in WITHOUT_TORCHVISION and find_spec("torchvision") is None:
        _load_llava()
    arguments: dict[str, Any] = {"skip_tokenizer_init": not images}
    if images:
        arguments |= {"limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0}, "mm_device_do_normalize": False}
    elif "text_config" in config:
        arguments["language_model_only"] = True
    if "kv_lora_rank" in (config.get("text_config") or config) and not torch.cuda.is_available():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        # On CPUs with AMX vLLM would take a kernel for bfloat16 alone, whose layer packs its weight and deletes it.
        arguments["attention_backend"] = AttentionBackendEnum.CPU_MLA
    return arguments if keeps or name is None else arguments | {"hf_overrides": {"architectures": [name]}}


def _is_vllms(named: str, name: str | None) -> bool:
    """Return whether vLLM has a class under the name of the folder, and none under that of transformers."""
    if name is None or named == name:
        return False
    from vllm import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    return named in supported and name not in supported


def _load_llava() -> None:
    """Load vLLM's LLaVA without torchvision: it imports a function for Pixtral, and transformers has another copy.

    vLLM would look at the class in a process of its own, in which that import fails.
    """
    from transformers.models.pixtral import image_processing_pil_pixtral as with_pil

    sys.modules.setdefault(f"{with_pil.__package__}.image_processing_pixtral", with_pil)
    from vllm import ModelRegistry
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration as Llava

    ModelRegistry.register_model(Llava.__name__, Llava)


def has_state(folder: str, trust_remote_code: bool) -> bool:
    """Return whether layers of the model keep a state instead of keys and values, such as Mamba's."""
    from vllm import EngineArgs

    arguments = architecture_arguments(folder)
    config = EngineArgs(folder, trust_remote_code=trust_remote_code, **arguments).create_model_config()
    return bool(config.is_hybrid or config.is_attention_free)


def keep_files_in(folder: Path, remove: Callable[[Path], None]) -> None:
    """Make the engine that this process starts next keep its files in this folder; `remove` it at exit.

    They are its sockets and the file of its rendezvous, which outlive a process that is killed.
    """
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    folder.mkdir(mode=0o700, exist_ok=True)
    atexit.register(remove, folder)
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = lambda: f"file://{folder}/vllm_dist_{uuid4().hex}"


@functools.cache
def correct_cpu_kernels() -> None:
    """Let vLLM compute on a CPU what it computes on a GPU; without effect there. Call it before a model is built.

    vLLM 0.32's kernel of rotary embeddings rotates other numbers of tensors with a dimension for the heads (LFM2, and
    attention with latents). Its router leaves out the bias of experts without groups, and refuses a sigmoid for them.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu
    route = CPURouter._compute_routing

    def forward(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        return (self.forward_native if query.dim() > 2 else functools.partial(rotate, self))(positions, query, key)

    def compute_routing(self: Any, *args: Any, **more: Any) -> Any:
        is_plain = self.e_score_correction_bias is None and self.scoring_func == "softmax"
        if not is_plain and not self.use_grouped_topk and self.scoring_func in ("softmax", "sigmoid"):
            # all experts are one group
            self.use_grouped_topk = True
            self.num_expert_group = 1
            self.topk_group = 1
        return route(self, *args, **more)

    setattr(RotaryEmbedding, "forward_cpu", forward)  # noqa: B010  (vLLM's method)
    setattr(CPURouter, "_compute_routing", compute_routing)  # noqa: B010


class Part(NamedTuple):
    """A part of a folder's tensor that vLLM has read. Distances are in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in the tensor
    offset: int
    place: str = ""  # parameter or buffer that holds these numbers; empty: vLLM has computed something with them
    place_strides: tuple[int, ...] = ()
    place_offset: int = 0


class LoadRecord(NamedTuple):
    """The tensors of the folder that a worker has loaded; none of a quantized model, which holds others."""

    kind: str = ""  # class of vLLM's model
    read: Mapping[str, tuple[tuple[int, ...], list[Part]]] = {}  # tensor -> its shape, and what was read of it
    dtypes: Mapping[str, torch.dtype] = {}  # tensor -> its dtype in the folder
    problem: str = ""  # why loading failed, or which parameters were not filled


_records = [LoadRecord()]


def load_record(worker: object = None) -> LoadRecord:
    """Return what this process has loaded last. With a worker of vLLM it is a function for `collective_rpc`."""
    return _records[-1]


@functools.cache
def record_loading() -> None:
    """Record what vLLM loads in this process. The module of the workers' extension calls it at import."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights

    def load_and_record(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        if model_config.quantization is not None:
            load(self, model, model_config)
            return
        recorder = _Recorder(model)
        weights = self.get_all_weights
        self.get_all_weights = lambda *arguments: recorder.watched(weights(*arguments))
        try:
            with recorder:
                load(self, model, model_config)
            record = recorder.record(model)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # `check_taken` raises it: of a worker process that ends, vLLM does not tell why.
            text = shorten(str(error), 200) or type(error).__name__
            record = LoadRecord(type(model).__name__, problem=f"cannot load {recorder.current}: {text}")
        _records.append(record)

    DefaultModelLoader.load_weights = load_and_record


_FIX = "copy the whole folder, or try --engine hf."


def check_taken(path: str, engine: Any) -> None:
    """Check that the workers of vLLM's engine, together, have read all of the folder and filled their parameters.

    Raises:
        FolderError: naming the tensors. What transformers ignores, too, may be left out.
    """
    records: list[LoadRecord] = engine.collective_rpc(load_record)
    for record in records:
        if record.problem:
            raise FolderError(Path(path), f"vLLM's {record.kind} {record.problem}.", _FIX)
    lost: dict[str, str] = {}
    for name, (shape, _) in records[0].read.items():
        read_parts = [part for record in records for part in record.read[name][1]]
        n_read = _n_elements({_region(part.sizes, part.strides, part.offset) for part in read_parts})
        if n_read < prod(shape):
            lost[name] = f"{n_read} of the {prod(shape)} numbers of {name}"
    if lost:
        from vllm.config import set_current_vllm_config

        from teacher_server.engines.hf import needed_tensors

        with set_current_vllm_config(engine.vllm_config):  # vLLM changes the classes of transformers that it runs
            needed = [lost[name] for name in needed_tensors(path, list(lost))]
        if needed:
            problem = f"vLLM's {records[0].kind} reads {some_names(needed)}, so it is another model."
            raise FolderError(Path(path), problem, _FIX)


class _Recorder(TorchDispatchMode):
    """Record, of each operator within its block, what it reads of the folder's tensors and writes of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.current = "its files"  # or the tensor that is loaded
        self._read: dict[str, tuple[tuple[int, ...], list[Part]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        held = (*model.named_buffers(), *model.named_parameters())  # vLLM has buffers that are views of parameters
        self._places = {_storage(tensor): (name, _layout(tensor)[2]) for name, tensor in held}
        self._written: defaultdict[str, set[Region]] = defaultdict(set)  # key: place
        self._computed: set[str] = set()  # places that were written again, with other numbers
        # All views of a tensor have its storage. The weak reference keeps the address from being used again.
        self._names: dict[int, tuple[str, StorageWeakRef]] = {}
        # Of storages that are a rearranged copy of a part: tensor, the part, and the copy's strides.
        self._copies: dict[int, tuple[str, Part, tuple[int, ...], StorageWeakRef]] = {}

    def watched(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the folder's tensors."""
        for name, tensor in weights:
            self.current = f"{name} {list(tensor.shape)}"
            self._read[name] = tuple(tensor.shape), []
            self._dtypes[name] = tensor.dtype
            self._names[_storage(tensor)] = name, StorageWeakRef(tensor.untyped_storage())
            yield name, tensor
        self.current = "its parameters"

    def record(self, model: torch.nn.Module) -> LoadRecord:
        """Return what was recorded. vLLM itself finds no linear layer or embedding of which nothing was written."""
        held = [(name, weight) for name, weight in model.named_parameters() if _storage(weight) in self._places]
        unfilled = [name for name, weight in held if _n_elements(self._written[name]) < weight.numel()]
        problem = f"does not get all of its {some_names(unfilled)}, so it is another model" if unfilled else ""
        for _, reads in self._read.values():
            reads[:] = [part._replace(place="") if part.place in self._computed else part for part in reads]
        return LoadRecord(type(model).__name__, self._read, self._dtypes, problem)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(_tensors(value))
        views = set() if written else set(map(_storage, _tensors(result)))
        read = [t for t in read if _storage(t) in self._names and _storage(t) not in views]
        place, start = self._places.get(_storage(written[0]), ("", 0)) if written else ("", 0)
        if place:
            region = _region(*_layout(written[0]))
            if not read and region in self._written[place]:
                self._computed.add(place)
            self._written[place].add(region)
        is_copy = bool(place) and func is torch.ops.aten.copy_.default
        _, strides, offset = _layout(written[0]) if is_copy else ((), (), 0)
        if is_copy and (copied := self._copies.get(_storage(args[1]))) and args[1].stride() == copied[2]:
            name, part, _, _ = copied
            reads = self._read[name][1]
            reads[reads.index(part)] = part._replace(place=place, place_strides=strides, place_offset=offset - start)
        for tensor in read:
            name, _ = self._names[_storage(tensor)]
            part = Part(*_layout(tensor))
            if is_copy:
                part = Part(*_layout(tensor.expand(written[0].shape)), place, strides, offset - start)
            elif func is torch.ops.aten.clone.default:  # gpt-oss: [E, I, H] of the folder is [E, H, I] in vLLM
                copy = result.untyped_storage()
                self._copies[copy._cdata] = name, part, result.stride(), StorageWeakRef(copy)
            self._read[name][1].append(part)
        return result


# A part of a storage: the first element, and distance and number of the elements of each dimension, sorted.
Region = tuple[int, tuple[tuple[int, int], ...]]


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return sizes, strides and the first element in the storage."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _region(sizes: Sequence[int], strides: Sequence[int], offset: int) -> Region:
    return offset, tuple(sorted((stride, n) for stride, n in zip(strides, sizes, strict=True) if stride and n != 1))


def _n_elements(regions: set[Region]) -> int:
    return sum(prod(n for _, n in dimensions) for _, dimensions in regions)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
