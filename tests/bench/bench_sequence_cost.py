"""Measure the CPU time of a sequence outside of compute: driver, Ray's daemons and scoring endpoints, by scheduler.

    python -m tests.bench.bench_sequence_cost [--only sync,stream] [--json FILE] [--batch 1024] [--root DIR]

Real runs of small models with real engines and a real teacher server; about a minute for each scheduler. `--root` runs
the product of another checkout, to compare two versions; the parts are then called `other <scheduler>`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gkd.config.schema_trainer import AHEAD, STREAM
from gkd.metrics.writer import read_metrics
from tests.bench.command import parsed, parser, run_parts
from tests.bench.cpu_time import CpuTime
from tests.bench.teacher_report import Figure, Part, Table
from tests.bench.trl_models import SHAPES, make_files
from tests.service.harness import ServerProcess

_ROOT = Path(__file__).resolve().parents[2]
_GOAL_MS = 0.3
SCHEDULERS = (*AHEAD, STREAM)
_OVERHEAD = ("driver", "ray", "endpoint")
# Steps before and after the measured ones: there, more or fewer batches are generated than trained.
_WARM_UP, _STEPS, _COOL_DOWN = 3, 6, 4
_LIMIT_S = 400.0


def measure(scheduler: str, batch: int, root: Path) -> Part:
    shape = SHAPES["short"]
    n_steps = _WARM_UP + _STEPS + _COOL_DOWN
    with tempfile.TemporaryDirectory() as out, CpuTime() as cpu:
        folder = Path(out)
        make_files(shape, folder, 4 * batch)
        with ServerProcess(folder / "teacher", folder, options=("--dtype", "float32")) as server:
            settings = {
                "data.max_prompt_length": 16,
                "data.max_response_length": shape.max_response,
                "model.path": folder / "student",
                "model.dtype": "float32",
                "trainer.device": "cpu",
                "trainer.run_dir": folder / "run",
                "trainer.scheduler": scheduler,
                "trainer.total_steps": n_steps,
                "trainer.total_epochs": n_steps,
                "trainer.global_batch_size": batch,
                "actor.micro_batch_size": 256,
                "rollout.max_num_seqs": 256,
                "rollout.kv_cache_mib": 256,
                "teacher.topk": 16,
                "teacher.server_port": server.port,
            }
            config = folder / "config.yaml"
            config.write_text(f"data: {{train_files: ['{folder / 'prompts.jsonl'}']}}\n")
            command = [sys.executable, "-m", "gkd.main_gkd", "--config", str(config)]
            command += [f"{key}={value}" for key, value in settings.items()]
            environment = os.environ | {"PWD": str(root), "PYTHONPATH": str(root)}
            log = folder / "log.txt"
            with log.open("wb") as file:
                code = subprocess.run(
                    command, cwd=root, env=environment, stdout=file, stderr=file, timeout=_LIMIT_S, check=False
                ).returncode
        if code:
            raise RuntimeError(f"the run ended with exit code {code}:\n{log.read_text(errors='replace')[-3000:]}")
        ends_s = [line["time/unix_s"] for line in read_metrics(folder / "run/metrics.jsonl") if "loss/total" in line]
    start_s, end_s = ends_s[_WARM_UP - 1], ends_s[_WARM_UP + _STEPS - 1]
    used = {kind: 1e3 * s / (batch * _STEPS) for kind, s in sorted(cpu.between(start_s, end_s).items())}
    overhead = sum(used.get(kind, 0.0) for kind in _OVERHEAD)
    name = scheduler if root == _ROOT else f"other {scheduler}"
    print(f"  {name}: {overhead:.3f} ms of {sum(used.values()):.3f} ms a sequence", file=sys.stderr, flush=True)
    what = f"{_STEPS} steps of {batch} sequences; CPU time of {' + '.join(_OVERHEAD)} by sequence."
    rate = batch * _STEPS / (end_s - start_s)
    figures = [
        Figure("CPU time of a sequence outside of compute", overhead, "ms", at_most=_GOAL_MS),
        Figure("sequences per second", rate),
    ]
    rows: list[list[str | float]] = [[kind, ms] for kind, ms in used.items()]
    return Part(name, what, figures, [Table("CPU ms per sequence", ["processes", "ms"], rows)])


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("tests.bench.bench_sequence_cost", __doc__ or "", SCHEDULERS, 1)
    made.add_argument("--batch", type=int, default=1024, metavar="N", help="default: %(default)s")
    made.add_argument("--root", type=Path, default=_ROOT, metavar="DIR", help="checkout to run; default: this one")
    args = parsed(made, SCHEDULERS, argv)
    return run_parts(args, lambda name: measure(name, args.batch, args.root.resolve()))


if __name__ == "__main__":
    sys.exit(main())
