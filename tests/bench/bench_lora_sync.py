"""Measure the bytes and seconds of a weight sync of a run with LoRA: merged weights, and adapters alone.

    python -m tests.bench.bench_lora_sync [--only megatron,fsdp2] [--json FILE] [--rounds N]

Real runs of the whole loop on the CPU, four steps each: Ray, one actor rank, one vLLM engine, a teacher server. The
student has 42 million parameters in float32 and adapters of rank 8 on all linear layers of its blocks. A larger student
has a smaller share of adapters: their size grows with the width, that of the weights with its square.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from gkd.metrics.writer import read_metrics
from tests.bench.command import parsed, parser, run_parts
from tests.bench.student_case import save_model
from tests.bench.teacher_report import Figure, Part, Table
from tests.e2e.conftest import VOCAB, Lab, make_lab
from tests.service.harness import ServerProcess

_SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
_BACKENDS = ("megatron", "fsdp2")


def compare(backend: str, rounds: int) -> Part:
    """Measure both contents on one backend."""
    rows, bytes_of, seconds_of = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        lab = make_lab(Path(folder))
        save_model(lab.student, vocab_size=VOCAB, head_dim=64, num_key_value_heads=4, **_SIZES)
        with ServerProcess(lab.teacher, lab.root) as server:
            for content in ("merged", "adapters"):
                n_bytes, seconds = _syncs(lab, server.port, backend, content, rounds)
                bytes_of[content], seconds_of[content] = n_bytes, median(seconds)
                rows.append([content, str(n_bytes), f"{median(seconds):.3f}"])
    figures = [
        Figure("bytes, adapters / merged", bytes_of["adapters"] / bytes_of["merged"], at_most=0.02),
        Figure("seconds, adapters / merged", seconds_of["adapters"] / seconds_of["merged"]),
    ]
    what = f"Weight syncs after a training step on {backend}, received by one engine; median of {3 * rounds}."
    table = Table("weight sync", ["weight_sync.lora", "bytes", "seconds"], rows)
    return Part(backend, what, figures, [table], {"rounds": rounds, "rank": 8} | _SIZES)


def _syncs(lab: Lab, port: int, backend: str, content: str, rounds: int) -> tuple[int, list[float]]:
    """Return the bytes of a sync and the seconds of each, without the first of a run, which is verified."""
    n_bytes, seconds = set(), []
    for number in range(rounds):
        run_dir = lab.root / f"{backend}_{content}_{number}"
        settings = (f"actor.strategy={backend}", "actor.lora.rank=8", f"weight_sync.lora={content}")
        done = lab.train_run(run_dir, port, *settings, "eval.max_prompts=8")
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if line["step"] > 1]
        n_bytes |= {int(line["weight_sync/bytes"]) for line in lines}
        seconds += [line["time/weight_sync_s"] for line in lines]
    (same,) = n_bytes
    return same, seconds


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(parser("tests.bench.bench_lora_sync", __doc__ or "", _BACKENDS, rounds=1), _BACKENDS, argv)
    return run_parts(args, lambda name: compare(name, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
