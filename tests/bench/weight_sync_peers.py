"""The two processes of `bench_weight_sync`: a sender with a student's tensors, and a real vLLM engine that gets them.

Commands come over pipes from the benchmark. Each reply has the times of its start and end (the clock of the host, which
both processes have in common) and the CPU seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

BUCKET_BYTES = 256 << 20


def tensors_of(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded = load_file(folder / "model.safetensors")
    return {name: tensor.to(device, copy=True) for name, tensor in loaded.items()}


def device_of(gpu: int | None) -> torch.device:
    """Return the device of this process, which then sees no other GPU; None: the CPU. Call it before CUDA is used."""
    if gpu is None:
        return torch.device("cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(8)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu]
    return torch.device("cuda", 0)


def serve(connection: Connection, commands: dict[str, Callable[..., Any]]) -> None:
    """Run commands (name, arguments), in a `Child`; the reply to each is (result, times)."""
    connection.send("ready")
    while True:
        name, args = connection.recv()
        cpu, began = time.process_time(), time.monotonic()
        result: Any = commands[name](*args)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        connection.send((result, (began, time.monotonic(), time.process_time() - cpu)))


def sender(connection: Connection, folder: Path, gpu: int | None) -> None:
    """Hold the student's tensors, as a rank without shards does; `export` yields them without a copy.

    memcpy: to other memory of the CPU, from a GPU to pinned memory.
    """
    device = device_of(gpu)
    from gkd.weight_sync.buckets import TensorSpec, layout, plan_buckets
    from gkd.weight_sync.group import TransferGroup
    from gkd.weight_sync.segment import Segment
    from gkd.weight_sync.transfer import send

    torch.set_num_threads(1)
    tensors = tensors_of(folder, device)
    specs = [TensorSpec(name, tuple(t.shape), "float32") for name, t in tensors.items()]
    plan = plan_buckets(specs, BUCKET_BYTES)
    kept = Segment(layout(plan)[1], pinned=gpu is not None)
    target = torch.zeros(sum(spec.n_bytes for spec in specs), dtype=torch.uint8, pin_memory=gpu is not None)
    groups: dict[str, TransferGroup] = {}

    def join(name: str, spec: Any) -> None:
        groups[name] = TransferGroup(spec, device)

    def memcpy() -> None:
        start = 0
        for tensor in tensors.values():
            n_bytes = tensor.numel() * 4
            target[start : start + n_bytes].copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
            start += n_bytes
        if gpu is not None:
            torch.cuda.synchronize()

    def tensor_by_tensor() -> None:
        for tensor in tensors.values():
            groups["gloo"].broadcast(tensor.to("cpu", copy=True))

    def transfer(name: str, with_digests: bool, keeps: bool) -> dict[str, str]:
        host = kept if keeps or groups[name].shares_memory else None
        return send(groups[name], plan, tensors.items(), with_digests=with_digests, kept=host)

    def step() -> None:
        """Change all tensors, so that a transfer that loads nothing is noticed."""
        for tensor in tensors.values():
            tensor.mul_(1.01)

    serve(
        connection,
        {
            "plan": lambda: plan,
            "join": join,
            "memcpy": memcpy,
            "tensor_by_tensor": tensor_by_tensor,
            "transfer": transfer,
            "step": step,
        },
    )


def engine(connection: Connection, folder: Path, gpu: int | None) -> None:
    """Hold a real engine. It receives with the product's `RolloutEngine.receive`, or only the bytes."""
    from gkd.rollout.vllm.start import CPU_ENV

    device = device_of(gpu)
    os.environ.update({**(CPU_ENV if gpu is None else {}), "VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"})
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.vllm.engine import RolloutEngine
    from gkd.weight_sync.group import TransferGroup
    from gkd.weight_sync.transfer import receive

    made = RolloutEngine(
        str(folder),
        # Nothing is generated, so CUDA graphs would only take time.
        RolloutConfig(kv_cache_mib=64, max_num_seqs=4, gpu_memory_utilization=0.3, enforce_eager=True),
        dtype="float32",
        max_model_len=64,
        device=device.type,
        eos_ids=[0],
    )
    worker = made.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    groups: dict[str, TransferGroup] = {}

    def join(name: str, spec: Any) -> None:
        worker._gkd_groups = []  # it would leave the groups of other transports
        made.join_groups([spec])
        groups[name] = worker._gkd_groups[0]

    def tensor_by_tensor(plan: Any, loads: bool) -> None:
        group, model = groups["gloo"], worker.model_runner.get_model()

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in plan:
                for spec in bucket.specs:
                    tensor = torch.empty(spec.shape, dtype=spec.torch_dtype)
                    group.broadcast(tensor)
                    yield spec.name, tensor.to(device)

        if loads:
            model.load_weights(received())
        else:
            for _ in received():
                pass

    def transfer(name: str, plan: Any, loads: bool, with_digests: bool) -> dict[str, str]:
        if not loads:
            receive(groups[name], plan, lambda tensors: None)
            return {}
        worker._gkd_groups = [groups[name]]
        made.receive([plan], 1)
        return made.digests() if with_digests else {}

    serve(
        connection,
        {"join": join, "tensor_by_tensor": tensor_by_tensor, "transfer": transfer, "digests": made.digests},
    )
