"""Fuzz the decoder of protocol v1 for minutes: `python -m tests.fuzz --mutations 10000000 --guided 5000000`.

Random mutations run in one process per core; the coverage-guided part requires `pip install atheris`.
Prints a table and, with --json FILE, writes it. Exits with 1 at the first bug, and writes its message
to fuzz-crash.bin.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import check, corpus, join
from tests.results import write_results

_MAX_GROWTH_MIB = 32


def rss_mib() -> float:
    """Return the resident memory of this process."""
    return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def run_mutations(n: int, seed: int) -> dict[str, Any]:
    """Check `n` random mutations, and return the number of valid ones and the growth of memory."""
    messages, rng = corpus(), random.Random(seed)
    n_valid, start_s = 0, time.monotonic()
    warm = 0.0
    for i in range(n):
        message = mutate(rng.choice(messages), messages, rng)
        try:
            n_valid += check(message, correct_checksums=bool(i % 4))
        except BaseException:
            Path("fuzz-crash.bin").write_bytes(join(message))
            raise
        if i == min(n // 10, 100_000):
            warm = rss_mib()
    return {"n": n, "n_valid": n_valid, "growth_mib": rss_mib() - warm, "s": time.monotonic() - start_s}


def _worker(n: int, seed: int, results: Any) -> None:
    results.put(run_mutations(n, seed))


def mutations(n: int, n_processes: int) -> dict[str, Any]:
    """Run `run_mutations` in several processes. Raises RuntimeError if one finds a bug."""
    results: Any = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=_worker, args=(n // n_processes, seed, results)) for seed in range(n_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(
                f"a mutated message was neither refused nor decoded as valid (exit code {process.exitcode})"
            )
    parts = [results.get(timeout=10) for _ in processes]
    return {
        "n": sum(part["n"] for part in parts),
        "still valid": sum(part["n_valid"] for part in parts),
        "other than ProtocolError": 0,
        "memory growth MiB": round(max(part["growth_mib"] for part in parts), 1),
        "seconds": round(max(part["s"] for part in parts), 1),
    }


def guided(n: int) -> dict[str, Any]:
    """Run `n` coverage-guided inputs in a separate process, because libFuzzer ends its process."""
    with tempfile.TemporaryDirectory() as folder:
        for i, message in enumerate(corpus()):
            (Path(folder) / str(i)).write_bytes(join(message))
        start_s = time.monotonic()
        options = [f"-runs={n}", "-max_len=2048", "-print_final_stats=1", "-rss_limit_mb=1024", "-seed=1"]
        process = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.guided", folder, *options], capture_output=True, text=True, check=False
        )
    if process.returncode != 0:
        raise RuntimeError(f"the guided fuzzer found a bug:\n{process.stderr[-3000:]}")
    found = dict(re.findall(r"stat::(\w+):\s+(\d+)", process.stderr))
    coverage = re.findall(r"cov: (\d+)", process.stderr)
    if not coverage:
        raise RuntimeError(f"the guided fuzzer measures no coverage:\n{process.stderr[-3000:]}")
    return {
        "n": int(found["number_of_executed_units"]),
        "coverage points, first and last": [int(coverage[0]), int(coverage[-1])],
        "other than ProtocolError": 0,
        "peak memory MiB": int(found["peak_rss_mb"]),
        "seconds": round(time.monotonic() - start_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--guided", type=int, default=0, help="coverage-guided runs (needs atheris)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"python": platform.python_version()}
    if args.mutations:
        results["random mutations"] = mutations(args.mutations, args.processes)
        assert results["random mutations"]["memory growth MiB"] < _MAX_GROWTH_MIB, results
    if args.guided:
        results["coverage-guided"] = guided(args.guided)
    results["peak MiB of the driver"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(results, indent=2))
    if args.json:
        write_results(args.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
