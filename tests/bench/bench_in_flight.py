"""Measure the rate of the teacher by `teacher.max_in_flight`.

    python -m tests.bench.bench_in_flight [--json FILE] [--sequences N] [--rounds N]

Every setting scores the same sequences with the same server, in turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from gkd.config.load import load_config
from gkd.preflight.teacher import request_info
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.teacher.window import window_of_group
from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.service.harness import ServerProcess, random_rollouts, save_model

PARTS = ("in_flight",)
_VOCAB = 2000
CASES = {
    "max_in_flight: 1": ["teacher.max_in_flight=1"],
    "max_in_flight: 4": ["teacher.max_in_flight=4"],
    "max_in_flight: 0 (default)": [],
}


def measure(n_sequences: int, rounds: int) -> Part:
    """Return sequences per second of each case, and its ratio to the default."""
    rollouts = random_rollouts(n_sequences, _VOCAB, seed=3, response=(64, 256))
    rates: dict[str, list[float]] = {name: [] for name in CASES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench.")))
        server = stack.enter_context(ServerProcess(save_model(folder / "model", _VOCAB), folder))
        endpoints = {}
        for name, overrides in CASES.items():
            config = load_config(None, [f"teacher.server_port={server.port}", "teacher.topk=64", *overrides])
            info = request_info(*config.derived.routes)
            window = window_of_group(config.teacher, info, 1)
            endpoints[name] = ScoringEndpoint(config, _VOCAB, [info.fingerprint], [window])
            stack.enter_context(endpoints[name].clients()[0])
            endpoints[name].score(rollouts[:8])
        for _ in range(rounds):
            for name, endpoint in endpoints.items():
                began = time.perf_counter()
                endpoint.score(rollouts)
                rates[name].append(n_sequences / (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    default = medians["max_in_flight: 0 (default)"]
    rows = [[f"`{name}`", f"{rate:.1f}", f"{rate / default:.2f}"] for name, rate in medians.items()]
    figures = [Figure("max_in_flight: 1 against the default", medians["max_in_flight: 1"] / default)]
    table = Table("Rate", ["setting", "sequences/s", "of the default"], rows)
    what = f"One endpoint scores {n_sequences} sequences of 64 to 256 tokens with one server and one worker (hf, CPU)."
    return Part("in_flight", what, figures, [table])


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("tests.bench.bench_in_flight", __doc__ or "", PARTS, rounds=3)
    made.add_argument("--sequences", type=int, default=256, metavar="N", help="default: %(default)s")
    args = parsed(made, PARTS, argv)
    return run_parts(args, lambda _: measure(args.sequences, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
