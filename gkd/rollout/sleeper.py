"""The part of a rollout engine's workers that frees their memory and takes it again, for `gkd.rollout.residency`.

On CUDA vLLM's own sleep mode does it: the addresses stay, only the memory behind them goes. vLLM's CPU worker ignores
sleep. There, the storages of the same tensors are emptied and filled again: tensors are views of a storage that stays,
so nothing that refers to them notices. Nothing may keep a bare address; our plain linear layers and experts keep none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gkd.memory.usage import read_usage
from gkd.rollout.residency import KV_CACHE, PARTS, WEIGHTS

_NAN_BYTE = 0xFF  # a float of such bytes, of any width, is a NaN


@dataclass(slots=True)
class _Block:
    """A storage, which several tensors may share."""

    storage: torch.UntypedStorage
    n_bytes: int  # when it is there
    host: torch.UntypedStorage | None = None  # its copy, kept for the next time


class Sleeper:
    """Mixed into vLLM's worker class: the attributes below, `sleep`, `wake_up` and `discard` are the worker's."""

    model_runner: Any
    vllm_config: Any
    device: torch.device

    def gkd_sleep(self, parts: list[str], staying: list[str], level: int) -> None:
        """Free the memory of parts that have it.

        On CUDA vLLM raises an AssertionError if the device has less free memory after than before: nobody else may take
        memory of it meanwhile.

        Args:
            staying: the other parts that have memory. (vLLM cannot let the weights sleep alone, so then the KV cache
                is freed, too, and comes back at once, zeroed.)
            level: 1 = the host keeps the weights | 2 = it keeps the model's buffers only.
        """
        if self.device.type == "cpu":
            self._gkd_empty(parts, level)
            return
        worker: Any = self
        if WEIGHTS in parts:
            worker.sleep(level)
            if KV_CACHE in staying:
                self.gkd_wake([KV_CACHE], False)
        else:
            worker.discard((KV_CACHE,))

    def gkd_wake(self, parts: list[str], lost: bool) -> None:
        """Bring parts back: weights as they were, the KV cache zeroed.

        Args:
            lost: nobody has kept the weights. On CPU they come back as NaN, so that a sync that leaves any of them out
                shows; on CUDA as whatever lies there.
        """
        if self.device.type == "cpu":
            self._gkd_fill(parts, lost)
            return
        worker: Any = self
        worker.wake_up(parts)
        if KV_CACHE in parts:  # as at the start: whatever lies there may be NaN, which no mask takes away
            for storage in _storages(self.model_runner.kv_caches):
                _bytes_of(storage).zero_()
            torch.cuda.synchronize(self.device)

    def gkd_memory(self) -> dict[str, int]:
        """Bytes on the device by part. On CUDA with sleep mode: what its allocator has mapped, in whole pages."""
        if self.vllm_config.model_config.enable_sleep_mode:
            from vllm.device_allocator import get_mem_allocator_instance

            allocations = list(get_mem_allocator_instance().pointer_to_data.values())
            return {p: sum(a.handle[1] for a in allocations if a.tag == p and not a.is_asleep) for p in PARTS}
        return {part: sum(s.nbytes() for s in _storages(self._gkd_tensors(part))) for part in PARTS}

    def gkd_process_memory(self) -> dict[str, int]:
        """Bytes: this worker's host memory; and on CUDA what everybody together has of its device."""
        usage = read_usage(self.device)
        on_device = {} if usage.free is None or usage.total is None else {"device_used": usage.total - usage.free}
        return {"host_rss": usage.host_rss, **on_device}

    def _gkd_tensors(self, part: str) -> Iterator[torch.Tensor]:
        if part == KV_CACHE:
            yield from self.model_runner.kv_caches
        else:
            model = self.model_runner.get_model()
            yield from model.parameters()
            yield from model.buffers()

    def _gkd_empty(self, parts: list[str], level: int) -> None:
        known: dict[int, _Block] = getattr(self, "_gkd_blocks", {})
        storages = {part: _storages(self._gkd_tensors(part)) for part in PARTS}
        self._gkd_blocks = {
            s._cdata: known.get(s._cdata) or _Block(s, s.nbytes()) for part in PARTS for s in storages[part]
        }
        kept = self._gkd_kept(level)
        for part in parts:
            for storage in storages[part]:
                block = self._gkd_blocks[storage._cdata]
                if storage._cdata not in kept:
                    block.host = None
                elif storage.nbytes():
                    block.host = block.host or torch.UntypedStorage(block.n_bytes)
                    block.host.copy_(storage)
                storage.resize_(0)
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what is freed, up to some 32 MiB each
            trim(0)

    def _gkd_fill(self, parts: list[str], lost: bool) -> None:
        for part in parts:
            for storage in _storages(self._gkd_tensors(part)):
                block = self._gkd_blocks[storage._cdata]
                if storage.nbytes() == block.n_bytes:
                    continue  # an earlier attempt, which failed at another one, has brought it back
                storage.resize_(block.n_bytes)
                if part == WEIGHTS and block.host is not None:
                    storage.copy_(block.host)
                else:
                    _bytes_of(storage).fill_(_NAN_BYTE if lost and part == WEIGHTS else 0)

    def _gkd_kept(self, level: int) -> set[int]:
        """The storages of which the host keeps a copy."""
        model = self.model_runner.get_model()
        tensors = model.buffers() if level == 2 else self._gkd_tensors(WEIGHTS)
        return {storage._cdata for storage in _storages(tensors)}


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once, in order. One that is empty is found again by its identity: it has no address."""
    return list({storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[n_bytes] uint8, a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
