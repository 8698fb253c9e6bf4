"""Release and restore the memory of a rollout engine's workers, for `gkd.rollout.sleep_state`.

On CUDA this is vLLM's sleep mode: virtual addresses stay, the physical memory behind them is released. vLLM's CPU
worker ignores sleep, so there the storages of the same tensors are resized to 0 and filled again. Tensors are views of
their storage, so references stay valid. No code may keep a raw address; our plain linear layers and experts do not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gkd.memory.usage import read_usage
from gkd.rollout.sleep_state import KV_CACHE, TAGS, WEIGHTS
from teacher_server.engines.vllm_versions import discard, sleep, wake_up

_NAN_BYTE = 0xFF  # a float of any width made of these bytes is NaN


@dataclass(slots=True)
class _Block:
    """A storage; several tensors may share it."""

    storage: torch.UntypedStorage
    n_bytes: int  # size while awake
    host: torch.UntypedStorage | None = None  # host copy, reused by later sleeps


class SleepMixin:
    """Mixin for vLLM's worker class, which provides the attributes below, `sleep`, `wake_up` and `discard`."""

    model_runner: Any
    vllm_config: Any
    device: torch.device

    def gkd_sleep(self, tags: list[str], remaining: list[str], level: int) -> None:
        """Release the memory of tags that are awake.

        On CUDA vLLM raises an AssertionError if the device has less free memory afterwards, so no other process may
        allocate on it during this call.

        Args:
            remaining: the other tags that are awake. vLLM cannot put the weights alone to sleep; in that case the KV
                cache is released too and restored at once, zeroed.
            level: 1 = copy the weights to host memory | 2 = keep only the model's buffers.
        """
        if self.device.type == "cpu":
            self._gkd_release(tags, level)
            return
        worker: Any = self
        if WEIGHTS in tags:
            sleep(worker, level)
            if KV_CACHE in remaining:
                self.gkd_wake([KV_CACHE], False)
        else:
            discard(worker, KV_CACHE)

    def gkd_wake(self, tags: list[str], discarded: bool) -> None:
        """Restore tags: the weights with their old values, the KV cache zeroed.

        Args:
            discarded: no copy of the weights exists. On CPU they are filled with NaN, so that an incomplete sync is
                noticed; on CUDA they are uninitialized.
        """
        if self.device.type == "cpu":
            self._gkd_restore(tags, discarded)
            return
        worker: Any = self
        wake_up(worker, tags)
        if KV_CACHE in tags:  # uninitialized memory may be NaN, which survives attention masks
            for storage in _storages(self.model_runner.kv_caches):
                _bytes_of(storage).zero_()
            torch.cuda.synchronize(self.device)

    def gkd_memory(self) -> dict[str, int]:
        """Return bytes on the device by tag. On CUDA with sleep mode: bytes mapped by its allocator, whole pages."""
        if self.vllm_config.model_config.enable_sleep_mode:
            from vllm.device_allocator import get_mem_allocator_instance

            allocations = list(get_mem_allocator_instance().pointer_to_data.values())
            return {t: sum(a.handle[1] for a in allocations if a.tag == t and not a.is_asleep) for t in TAGS}
        return {tag: sum(s.nbytes() for s in _storages(self._gkd_tensors(tag))) for tag in TAGS}

    def gkd_process_memory(self) -> dict[str, int]:
        """Return bytes: `host_rss` of this process and, on CUDA, `device_used` by all processes on its GPU."""
        usage = read_usage(self.device)
        on_device = {} if usage.free is None or usage.total is None else {"device_used": usage.total - usage.free}
        return {"host_rss": usage.host_rss, **on_device}

    def _gkd_tensors(self, tag: str) -> Iterator[torch.Tensor]:
        if tag == KV_CACHE:
            yield from self.model_runner.kv_caches
        else:
            model = self.model_runner.get_model()
            yield from model.parameters()
            yield from model.buffers()

    def _gkd_release(self, tags: list[str], level: int) -> None:
        known: dict[int, _Block] = getattr(self, "_gkd_blocks", {})
        storages = {tag: _storages(self._gkd_tensors(tag)) for tag in TAGS}
        self._gkd_blocks = {
            s._cdata: known.get(s._cdata) or _Block(s, s.nbytes()) for tag in TAGS for s in storages[tag]
        }
        kept = self._gkd_kept(level)
        for tag in tags:
            for storage in storages[tag]:
                block = self._gkd_blocks[storage._cdata]
                if storage._cdata not in kept:
                    block.host = None
                elif storage.nbytes():
                    block.host = block.host or torch.UntypedStorage(block.n_bytes)
                    block.host.copy_(storage)
                storage.resize_(0)
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps freed blocks of up to 32 MiB
            trim(0)

    def _gkd_restore(self, tags: list[str], discarded: bool) -> None:
        for tag in tags:
            for storage in _storages(self._gkd_tensors(tag)):
                block = self._gkd_blocks[storage._cdata]
                if storage.nbytes() == block.n_bytes:
                    continue  # restored by an earlier attempt that failed at another storage
                storage.resize_(block.n_bytes)
                if tag == WEIGHTS and block.host is not None:
                    storage.copy_(block.host)
                else:
                    _bytes_of(storage).fill_(_NAN_BYTE if discarded and tag == WEIGHTS else 0)

    def _gkd_kept(self, level: int) -> set[int]:
        """Return the storages to copy to host memory, by identity."""
        model = self.model_runner.get_model()
        tensors = model.buffers() if level == 2 else self._gkd_tensors(WEIGHTS)
        return {storage._cdata for storage in _storages(tensors)}


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return distinct storages in order, keyed by identity: an empty storage has no address."""
    return list({storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of the storage, [n_bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
