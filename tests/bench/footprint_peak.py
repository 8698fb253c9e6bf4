"""One measurement of `footprint_allocator`: the blocks of torch's CUDA allocator at the peak of training steps.

    python -m tests.bench.footprint_peak '{"name": "4096 tokens"}'

prints a JSON line. The allocator's history of the steps is replayed up to the moment with the most bytes, and the
blocks of that moment are grouped by the stack of their allocation.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gkd.data.batching import make_micro_batches
from gkd.memory.footprint import footprint
from tests.bench.command import in_fresh_process
from tests.bench.footprint_case import Case, as_metered, case_config
from tests.bench.student_case import MIXES, TOPK, make_student, save_model, sequences

# Shapes of Qwen3-0.6B, with fewer layers and a smaller vocabulary.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
STATES, SAVED, LOSS, PASSING, WORKSPACES = "states", "saved", "loss", "passing", "workspaces"
N_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class PeakCase:
    """A student of one rank, and its steps."""

    name: str
    strategy: str = "megatron"
    n_tokens: int = 4096
    n_layers: int = 6
    n_vocab: int = 65_536
    tied: bool = True
    dtype: str = "bfloat16"
    recompute: str = "none"
    cpu_offload: bool = False
    n_batches: int = 1  # packs of a step, all alike

    @property
    def lengths(self) -> tuple[int, int]:
        """(prompt, response) tokens of each sequence."""
        prompt = self.n_tokens // 64
        return prompt, self.n_tokens // N_SEQUENCES - prompt

    @property
    def sizes(self) -> dict[str, Any]:
        more = {"num_hidden_layers": self.n_layers, "vocab_size": self.n_vocab, "tie_word_embeddings": self.tied}
        return SIZES | more


@dataclass(frozen=True, slots=True)
class PeakFound:
    """Bytes beyond those that were allocated before the student was built.

    `items`: of the blocks at the peak: `states` (weights, gradients of Megatron's buffer, optimizer), `saved` (by the
    forward pass of the layers), `loss`, `passing` (allocated by the backward pass), and `workspaces` of cuBLAS, which
    stay allocated after the steps. Their sum is less than `peak` by the allocator's rounding.
    """

    peak: int
    items: dict[str, int]
    predicted: dict[str, int]  # parts of the footprint
    predicted_peak: int


def measure(case: PeakCase, timeout_s: float = 900.0) -> PeakFound:
    """Run the case in a fresh process; raises as `in_fresh_process`."""
    return PeakFound(**in_fresh_process("tests.bench.footprint_peak", asdict(case), threads=1, timeout_s=timeout_s))


def predict(case: PeakCase, folder: Path) -> tuple[dict[str, int], int]:
    """Return the parts and the peak of the prediction, without what torch's allocator does not count."""
    prompt, response = case.lengths
    settings = (
        f"data.max_prompt_length={prompt}", f"data.max_response_length={response}", f"teacher.topk={TOPK}",
        f"trainer.global_batch_size={N_SEQUENCES * case.n_batches}", f"actor.micro_batch_size={N_SEQUENCES}",
        f"model.dtype={case.dtype}", f"actor.strategy={case.strategy}",
        f"actor.recompute={case.recompute}", f"actor.fsdp_cpu_offload={str(case.cpu_offload).lower()}",
    )  # fmt: skip
    shape = {"model_type": "qwen3", **case.sizes}
    found = footprint(case_config(Case(case.name, settings), folder, "cuda"), shape)
    (actor,) = (as_metered(part) for part in found if part.role == "actor")
    return actor.parts, actor.total_bytes


def run(case: PeakCase) -> PeakFound:
    """Build the student and make two steps in this process."""
    if os.environ.get("DRY_CARD_VALUES") == "0":
        _ignore_values()
    dtype = getattr(torch, case.dtype)
    MIXES["one_pack"] = lambda rng: [case.lengths] * (N_SEQUENCES * case.n_batches)
    batches = make_micro_batches(
        *sequences("one_pack", case.n_vocab), micro_batch_size=N_SEQUENCES, max_tokens=0, packed=True
    )
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        model = Path(folder) / "model"
        save_model(model, dtype=dtype, **case.sizes)
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        before = torch.cuda.memory_allocated()
        more: dict[str, Any] = {"recompute": case.recompute}
        if case.strategy == "fsdp2":
            more["cpu_offload"] = case.cpu_offload
        student = make_student(case.strategy, model, dtype=dtype, device="cuda:0", **more)
        built = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)
        for _ in range(2):
            student.train_step(batches)
        peak = torch.cuda.max_memory_allocated() - before
        items = at_peak(torch.cuda.memory._snapshot()["device_traces"][0])
        items[STATES] += built
        return PeakFound(peak, dict(items), *predict(case, Path(folder)))


def at_peak(trace: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Return the bytes of each item at the moment with the most allocated bytes.

    Args:
        trace: entries of the allocator's history, oldest first.
    """
    live: dict[int, Mapping[str, Any]] = {}
    fullest: list[Mapping[str, Any]] = []
    size = most = 0
    grew = False
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            size += entry["size"]
            grew = True
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            if grew and size > most:  # the last moment before memory shrinks
                most, fullest = size, list(live.values())
            size -= live.pop(entry["addr"])["size"]
            grew = False
    if size > most:
        fullest = list(live.values())
    stays = {id(entry) for entry in live.values()}
    found: Counter[str] = Counter()
    for entry in fullest:
        found[_item(entry["frames"], stays=id(entry) in stays)] += entry["size"]
    return found


def _item(frames: Sequence[Mapping[str, Any]], *, stays: bool) -> str:
    names = {frame["name"] for frame in frames}
    if stays:
        return STATES if "_update" in names else WORKSPACES
    if any("/gkd/loss/" in frame["filename"] for frame in frames):
        return LOSS
    # The backward pass runs in a thread of its own, whose stack does not contain the step.
    return SAVED if "train_step" in names else PASSING


def _ignore_values() -> None:
    """Let a step succeed whose kernels do nothing, so that each number is what was in memory before."""
    import gkd.actor.common.base as base
    import gkd.actor.fsdp.probe as probe
    import gkd.loss.chunked as chunked

    diff = torch.Tensor.diff
    torch.Tensor.diff = lambda self: diff(self.cpu())  # type: ignore[method-assign]  # lengths of a pack's sequences
    add = base.Student._add

    def with_tokens(self: Any, batches: Any, *, completes: bool) -> Any:
        return replace(add(self, batches, completes=completes), n_loss_tokens=1)

    base.Student._add = with_tokens  # type: ignore[method-assign]
    base.not_finite = lambda *_: None
    probe._check_forward = lambda *_, **__: None
    chunked.adds_to_float32 = lambda *_: True  # as on a card; this probe compares numbers


if __name__ == "__main__":
    print(json.dumps(asdict(run(PeakCase(**json.loads(sys.argv[1]))))), flush=True)
    os._exit(0)  # without NCCL's destructors, which wait for a thread for minutes
