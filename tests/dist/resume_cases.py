"""Save and resume the Megatron student inside the ranks, for `test_megatron_resume`."""

from __future__ import annotations

import hashlib
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gkd.actor.common.shard_writer import write
from gkd.actor.common.shards import ShardReader
from gkd.actor.fsdp.student import readers as fsdp_tensors
from gkd.actor.megatron.checkpoint import readers as megatron_tensors
from gkd.config.load import load_config
from gkd.hf.model_folder import open_tensors
from tests.device import host, rank_device
from tests.dist.helpers import destroy_groups
from tests.dist.megatron_reference import make_micro_batches
from tests.dist.peft_reference import LORA

DEEP = "deep"  # folder of a model with enough layers for four chunks
# name -> (processes, tp, pp, vpp, cp, sequence parallel)
LAYOUTS = {
    "one": (1, 1, 1, 1, 1, False),
    "tp2": (2, 2, 1, 1, 1, False),
    "tp2sp": (2, 2, 1, 1, 1, True),
    "pp2": (2, 1, 2, 1, 1, False),
    "pp2vpp2": (2, 1, 2, 2, 1, False),
    "dp2": (2, 1, 1, 1, 1, False),
    "tp2pp2": (4, 2, 2, 1, 1, False),
    "tp2pp2vpp2sp": (4, 2, 2, 2, 1, True),
    "tp2dp2": (4, 2, 1, 1, 1, False),
    "pp2dp2": (4, 1, 2, 1, 1, False),
    "cp2": (2, 1, 1, 1, 2, False),
    "cp4": (4, 1, 1, 1, 4, False),
    "tp2cp2sp": (4, 2, 1, 1, 2, True),
    "pp2dp2vpp2": (4, 1, 2, 2, 1, False),
}
SAVED_AT, LAST = 2, 4  # steps


@dataclass(frozen=True)
class Case:
    """The model, layout and dtype of a checkpoint; with adapters or of all weights."""

    kind: str
    layout: str
    dtype: torch.dtype = torch.float32
    lora: bool = False

    def folder(self, root: Path) -> Path:
        return root / f"ckpt_{self}"

    def __str__(self) -> str:
        return f"{self.kind}_{self.layout}_{str(self.dtype).removeprefix('torch.')}{'_lora' * self.lora}"


def make_student(root: Path, case: Case, rank: int) -> Any:
    """Build a student of the HF folder `root / case.kind`; replaces the Megatron groups of the previous one."""
    from megatron.core import parallel_state

    from gkd.actor.common.optim_spec import OptimSpec
    from tests.dist.student_cases import build_student

    world_size, tp, pp, vpp, cp, sequence_parallel = LAYOUTS[case.layout]
    if parallel_state.model_parallel_is_initialized():
        destroy_groups()
    optim = OptimSpec(lr=1e-3, schedule="cosine", warmup_steps=2, total_steps=6)
    ranks = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "sequence_parallel": sequence_parallel}
    lora = LORA if case.lora else None
    folder = root / case.kind
    return build_student("megatron", folder, rank, world_size, optim=optim, dtype=case.dtype, lora=lora, **ranks)


def train(student: Any, first: int, last: int) -> list[Any]:
    """Return the stats of steps [first, last), each on this DP rank's share."""
    layout = student.layout
    return [student.train_step(make_micro_batches(step)[layout.dp_rank :: layout.dp]) for step in range(first, last)]


def leave_out(student: Any) -> None:
    """Pass a batch without a loss token as a step, which must not change the weights or count as an update of Adam."""
    before = weights(student)
    stats = student.train_step([])
    assert (stats.n_loss_tokens, str(stats.loss), weights(student) == before) == (0, "nan", True)


def save(student: Any, folder: Path) -> None:
    write(folder, student.layout.rank, student.snapshot(copies=False))
    dist.barrier()


def late_snapshot(student: Any) -> Any:
    """Take a snapshot whose copy starts one second late, and so after a step that does not wait for it."""
    before, deadline = student.step, time.monotonic() + 1.0

    def delay() -> None:
        while student.step == before and time.monotonic() < deadline:
            time.sleep(0.001)

    student._host_copies._thread.submit(delay)
    return student.snapshot()


def weights(student: Any) -> dict[str, str]:
    """Return the digest of each tensor that this rank's stage exports."""
    return {name: digest(tensor) for name, tensor in student.export()}


def exported(folder: Path, base: Path, lora: Any = None) -> dict[str, str]:
    """Return the digest of each tensor that `gkd export` writes of a checkpoint."""
    with ShardReader(folder) as reader, open_tensors(base) as held:
        saved = megatron_tensors if reader.meta["strategy"] == "megatron" else fsdp_tensors
        config = load_config(None).with_values({} if lora is None else {"actor.lora": lora})
        weights, factors = saved(reader, config, base, held)
        for (_, shape, dtype), read in (*weights.items(), *factors.items()):
            assert (tuple(read().shape), read().dtype) == (shape, dtype)
        return {name: digest(read()) for (name, _, _), read in weights.items()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(host(tensor.contiguous().view(-1).view(torch.uint8)), digest_size=16).hexdigest()


def save_and_resume(rank: int, world_size: int, root: Path, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """Train with a concurrent save, then again from the save in a new object; return whether both are equal."""
    results = {}
    for case in cases:
        student = make_student(root, case, rank)
        train(student, 0, SAVED_AT - 1)
        leave_out(student)
        _draw()  # so that the generators are not saved in their seeded state
        saved = weights(student)
        snapshot = late_snapshot(student) if case == cases[0] else student.snapshot()
        drawn = _draw()
        stats, final = train(student, SAVED_AT, LAST), weights(student)
        write(case.folder(root), rank, snapshot)
        dist.barrier()
        whole = exported(case.folder(root), root / case.kind, LORA if case.lora else None)
        resumed = make_student(root, case, rank)
        resumed.load_checkpoint(case.folder(root))
        results[case] = {
            "step": resumed.step,
            "saved": saved,
            "loaded_equal": weights(resumed) == saved,
            "export_equal": saved.items() <= whole.items(),
            "rng_equal": _draw() == drawn,
            "stats_equal": train(resumed, SAVED_AT, LAST) == stats,
            "final_equal": weights(resumed) == final,
            "losses": [s.loss for s in stats],
        }
    return results


def load_elsewhere(rank: int, world_size: int, root: Path, pairs: list[tuple[Case, str]]) -> dict[Any, dict[str, Any]]:
    """Load each case's checkpoint in another layout, save it again from there, and continue training."""
    results = {}
    for case, layout in pairs:
        student = make_student(root, replace(case, layout=layout), rank)
        student.load_checkpoint(case.folder(root))
        result: dict[str, Any] = {"step": student.step, "loaded": weights(student)}
        save(student, again(root, case, layout))
        result["losses"] = [s.loss for s in train(student, SAVED_AT, LAST)]
        results[case, layout] = result
    return results


def again(root: Path, case: Case, layout: str) -> Path:
    """Return the folder of a checkpoint that was loaded in `layout` and saved again."""
    return root / f"again_{case}_{layout}"


def whole_state(folder: Path, hf_folder: Path, *, lora: bool) -> dict[tuple[str, str], str]:
    """Return the digests of every full HF tensor and its moments, assembled from the pieces of all ranks."""
    from gkd.actor.megatron.checkpoint import part_shape
    from gkd.actor.megatron.hf_mapping import stage_entries
    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.lora import adapters_of
    from gkd.actor.megatron.model_config import read_megatron_dims

    dims = read_megatron_dims(hf_folder)
    state = {}
    with ShardReader(folder) as reader:
        tp = reader.meta["layout"]["tp"]
        whole = ParallelLayout(tp=1, pp=1, world_size=1, rank=0)
        factors = [entry for adapter in adapters_of(dims, whole, LORA) for entry in (adapter.a, adapter.b)]
        for entry in factors if lora else stage_entries(dims, whole):
            n_parts = 1 if entry.layout.partition_dim is None else tp
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                shape = part_shape(entry, n_parts)
                parts = [
                    reader.read(entry.hf_names[0], kind, part, 0, math.prod(shape)).view(shape)
                    for part in range(n_parts)
                ]
                for name, tensor in zip(entry.hf_names, entry.layout.join(torch.stack(parts), dims), strict=True):
                    state[name, kind] = digest(tensor)
    return state


def _draw() -> tuple[float, ...]:
    """Draw one number from each generator that is not Megatron's."""
    from megatron.core import tensor_parallel

    with tensor_parallel.get_cuda_rng_tracker().fork():
        of_tracker = float(torch.rand(1, device=rank_device()))
    of_torch = [float(torch.rand(1, device=device)) for device in ("cpu", rank_device())]
    return random.random(), float(np.random.rand()), *of_torch, of_tracker
