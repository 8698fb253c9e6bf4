"""Compare a second epoch of dataset responses, whose scores are in `teacher.store`, with the first.

    python -m tests.bench.bench_store [--json FILE] [--rounds 3]

A scoring endpoint and a real teacher server (5.8M parameters, float32, one thread) on this host. A round has an empty
store: 128 responses of 192 tokens after prompts of 64, top-64, are scored twice. The scores must be bit-equal.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from gkd.config.load import load_config
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.teacher.window import Window
from gkd.types import TeacherScores
from tests.bench.command import parsed, parser, run_parts
from tests.bench.student_case import VOCAB, save_model, sequences
from tests.bench.teacher_report import Figure, Part, Table
from tests.service.harness import ServerProcess, connect

N_REPEATS, N_IN_FLIGHT, N_PER_REQUEST = 8, 32, 8


def measure(rounds: int) -> Part:
    even, _ = sequences("even")
    rng = np.random.default_rng(0)
    rollouts = [
        replace(
            r,
            response_ids=rng.permutation(r.response_ids),
            prompt_id=i * len(even) + r.prompt_id,
            on_policy=False,
            version_spans=(),
        )
        for i in range(N_REPEATS)
        for r in even
    ]
    rows: list[tuple[str | float, ...]] = []
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as name:
        folder = Path(name)
        save_model(folder / "model")
        with ServerProcess(folder / "model", folder, options=("--dtype", "float32")) as server:
            with connect(server.port) as client:
                info = client.info()
            for i in range(rounds):
                store = folder / f"store_{i}"
                overrides = [f"teacher.server_port={server.port}", f"teacher.store={store}"]
                config = load_config(None, [*overrides, "distill.on_policy_share=0", "teacher.topk=64"])
                window, numerics = Window(N_IN_FLIGHT, N_PER_REQUEST), [info.numerics]
                endpoint = ScoringEndpoint(config, VOCAB, [info.fingerprint], [window], numerics=numerics)
                seconds, found = [], []
                for _ in range(2):
                    began = time.perf_counter()
                    scores, _ = endpoint.score(rollouts)
                    seconds.append(time.perf_counter() - began)
                    found.append(list(scores))
                assert all(_equal(one, other) for one, other in zip(*found, strict=True))
                n_bytes = sum(file.stat().st_size for file in store.iterdir())
                endpoint.clients()[0].close()
                rows.append((str(i), *seconds, n_bytes / sum(len(r.response_ids) for r in rollouts)))
    first, second = (median(float(row[i]) for row in rows) for i in (1, 2))
    figures = [
        Figure("teacher's time, first epoch / second", first / second, at_least=20.0),
        Figure("size of the store", median(float(row[3]) for row in rows), "bytes a token"),
    ]
    columns = ("round", "first epoch, s", "second, s", "bytes a token")
    return Part("store", f"{len(rollouts)} dataset responses, scored twice.", figures, [Table("", columns, rows)], {})


def _equal(one: TeacherScores, other: TeacherScores) -> bool:
    assert one.topk is not None and other.topk is not None
    names = ("topk_ids", "topk_logprobs", "tail_mass")
    return all(np.array_equal(getattr(one.topk, name), getattr(other.topk, name)) for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    args = parsed(parser("tests.bench.bench_store", __doc__ or "", ("store",), rounds=3), ("store",), argv)
    return run_parts(args, lambda _: measure(args.rounds))


if __name__ == "__main__":
    sys.exit(main())
