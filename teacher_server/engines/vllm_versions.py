"""Bridge what differs between vLLM 0.26 and the pinned 0.32, for both kinds of engines. 0.32 runs its own code only.

vLLM 0.26 is the last one for torch 2.11. Each function looks for the newer name, not for a version number. The
differences of torch are in `gkd.actor.common.torch_versions`: this server runs without gkd.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

WEIGHTS = "weights"


def with_vllm_errors(*others: type[BaseException]) -> tuple[type[BaseException], ...]:
    """Return `others` and what vLLM raises besides Python's own classes: before VLLMError, these had no common base."""
    from vllm import exceptions

    if hasattr(exceptions, "VLLMError"):
        return (*others, exceptions.VLLMError)
    classes = [value for value in vars(exceptions).values() if isinstance(value, type)]
    return (*others, *(k for k in classes if issubclass(k, Exception) and k.__module__ == exceptions.__name__))


def choose_model_runner() -> None:
    """Let vLLM use its first model runner if the batch of its second one lacks what `vllm_extension` reads.

    Otherwise vLLM chooses: the second one for dense models on GPUs.
    """
    from vllm.v1.worker.gpu import input_batch

    names = {"req_ids", "query_start_loc_np", "num_computed_tokens_np"}
    if not names <= {field.name for field in fields(input_batch.InputBatch)}:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def sleep(worker: Any, level: int) -> None:
    """Put a worker's memory to sleep; what sleeps already stays as it is.

    vLLM 0.26 would release sleeping allocations once more, which is an error of the driver: they are hidden from it.
    """
    if hasattr(worker, "discard"):
        worker.sleep(level)
        return
    with _hidden_while_asleep():
        worker.sleep(level)


def discard(worker: Any, tag: str) -> None:
    """Release a tag's memory without a copy. vLLM 0.26 can do that with all tags only: its allocator is called here."""
    if hasattr(worker, "discard"):
        worker.discard((tag,))
        return
    import torch
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.device_allocator.cumem import unmap_and_release

    torch.accelerator.synchronize()
    for allocation in get_mem_allocator_instance().pointer_to_data.values():
        if allocation.tag == tag and not allocation.is_asleep:
            unmap_and_release(allocation.handle)
            allocation.is_asleep = True


def wake_up(worker: Any, tags: Sequence[str]) -> None:
    """Restore tags that are asleep.

    vLLM 0.26 writes the buffers that it saved at level 2 back with any tag, also into weights that still sleep.
    """
    if hasattr(worker, "discard") or WEIGHTS in tags:
        worker.wake_up(list(tags))
        return
    saved, worker._sleep_saved_buffers = worker._sleep_saved_buffers, {}
    try:
        worker.wake_up(list(tags))
    finally:
        worker._sleep_saved_buffers = saved


@contextmanager
def shared_nccl_env() -> Iterator[None]:
    """Create NCCL groups with processes that do not run vLLM, without the NCCL settings that vLLM pins for its own.

    It pins them with VLLM_BATCH_INVARIANT=1, in its own processes only. Members with different settings hang. NCCL
    reads most settings once. From version 2.29.7 on it can read them again, and vLLM uses that in `unpinned_nccl_env`.
    Without either the settings stay, also if the variables are removed.

    Raises:
        RuntimeError: the pinned settings would apply here, too.
    """
    if not int(os.environ.get("VLLM_BATCH_INVARIANT") or 0):
        yield
        return
    from vllm.utils import nccl

    unpinned = getattr(nccl, "unpinned_nccl_env", None)
    if unpinned is None or nccl._unpinned_env == {}:  # empty: vLLM has found an older NCCL
        raise RuntimeError(
            "VLLM_BATCH_INVARIANT = 1: the rollout engine keeps the NCCL settings that vLLM has pinned, so an NCCL "
            "group with the actor would hang. Fix: weight_sync.transport = gloo, or vLLM 0.32 with NCCL 2.29.7"
        )
    with unpinned():
        yield


@contextmanager
def _hidden_while_asleep() -> Iterator[None]:
    from vllm.device_allocator import get_mem_allocator_instance

    allocations = get_mem_allocator_instance().pointer_to_data
    asleep = {pointer: data for pointer, data in allocations.items() if data.is_asleep}
    for pointer in asleep:
        del allocations[pointer]
    try:
        yield
    finally:
        allocations.update(asleep)
