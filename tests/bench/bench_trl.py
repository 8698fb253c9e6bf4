"""Compare sequences per second with TRL 1.16 on CPU: same models, prompts, loss and batch, on both cores.

    python -m pip install --target DIR --no-deps trl==1.16 datasets==5.2.0 pandas==3.1.1 multiprocess==0.70.19 \
        dill==0.4.1 python-dateutil==4.0.0 six
    python -m tests.bench.bench_trl --trl DIR --json docs/results/trl_cpu.json      # about 9 minutes
    python -m tests.bench.bench_trl --trl DIR --real models/smollm2 --only real,real_bfloat16 \
        --json docs/results/trl_real.json

DIR is a folder of its own, outside the product's dependencies; TRL uses torch and transformers of this environment.
Run it on an idle machine: TRL, whose threads wait for each other, slows down by far more than its share is.

The runs alternate: TRL's GKDTrainer, ours, TRL's DistillationTrainer, ours, ... Each is a fresh process, and the time
between the ends of its first and its last step counts. The loss is the forward KL over the whole vocabulary, on
responses sampled at temperature 1. Lengths: see `tests.bench.trl_models`. --real: the models of examples/real_model,
which its run.sh makes; our loss has the teacher's 64 most probable tokens there. TRL's asynchronous trainer sends
weights over NCCL, so it does not run on CPU.

`--rounds N` repeats the series.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.real_model.memory import peak_memory
from gkd.metrics.writer import read_metrics
from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.bench.trl_models import LEARNING_RATE, SHAPES, Shape, link_files, make_files
from tests.service.harness import ServerProcess

_OURS = ("sync", "one_step_off", "stream")
_TRL = ("gkd", "distillation")
# TRL's runs surround ours, so that a drift of the machine's speed meets both.
_SERIES = ("gkd", "sync", "distillation", "one_step_off", "gkd", "stream", "distillation")
_WARM_UP = 2  # steps of ours before the measured ones; TRL needs one
_COOL_DOWN = 2  # steps of ours after the measured ones: at the end of a run, no batch is generated ahead
_LIMIT_S = 300.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds of its measured steps, and lengths."""

    name: str
    step_s: list[float]
    mean_response: float
    truncated: float
    peak_gib: float  # of all its processes


def run_trl(name: str, shape: Shape, folder: Path, trl: Path) -> Run:
    case = {
        "trainer": name,
        "folder": str(folder),
        "output": str(folder / "trl"),
        "batch": shape.batch,
        "steps": shape.trl_steps + 1,
        "max_response": shape.max_response,
        "dtype": shape.dtype,
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(trl), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "PYTHONWARNINGS": "ignore",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [sys.executable, "-m", "tests.bench.trl_run", json.dumps(case)]
    with (folder / "log.txt").open("wb") as log, peak_memory() as peak_gib:
        process = subprocess.Popen(command, env=environment, cwd=_ROOT, stdout=subprocess.PIPE, stderr=log)
        output, _ = process.communicate(timeout=_LIMIT_S)
    if process.returncode:
        raise RuntimeError(f"TRL ended with exit code {process.returncode}:\n{_tail(folder / 'log.txt')}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return Run(name, _differences(result["ends_s"]), result["mean_response"], result["truncated"], peak_gib[0])


def run_ours(scheduler: str, shape: Shape, folder: Path) -> Run:
    with tempfile.TemporaryDirectory(dir=folder) as out, peak_memory() as peak_gib:
        run_dir = Path(out) / "run"
        with ServerProcess(folder / "teacher", folder, options=("--dtype", shape.dtype)) as server:
            settings = {
                "data.max_prompt_length": shape.max_prompt,
                "data.max_response_length": shape.max_response,
                "model.path": folder / "student",
                "model.dtype": shape.dtype,
                "trainer.device": "cpu",
                "trainer.run_dir": run_dir,
                "trainer.scheduler": scheduler,
                "trainer.total_steps": _WARM_UP + shape.steps + _COOL_DOWN,
                "trainer.global_batch_size": shape.batch,
                "actor.micro_batch_size": 2 if shape.is_real else shape.batch,
                "actor.optim.lr": LEARNING_RATE,
                "rollout.max_num_seqs": shape.batch,
                "rollout.kv_cache_mib": 256,
                "teacher.topk": shape.topk,
                "teacher.server_port": server.port,
            }
            config = Path(out) / "config.yaml"
            config.write_text(f"data: {{train_files: ['{folder / 'prompts.jsonl'}']}}\n")
            command = [sys.executable, "-m", "gkd.main_gkd", "--config", str(config)]
            command += [f"{key}={value}" for key, value in settings.items()]
            with (folder / "log.txt").open("wb") as log:
                code = subprocess.run(
                    command, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=_LIMIT_S, check=False
                ).returncode
        if code:
            raise RuntimeError(f"the run ended with exit code {code}:\n{_tail(folder / 'log.txt')}")
        lines = [line for line in read_metrics(run_dir / "metrics.jsonl") if line["step"] >= _WARM_UP][:-_COOL_DOWN]
    ends = [line["time/unix_s"] for line in lines]
    steps = lines[1:]
    mean = sum(line["rollout/response_tokens"] for line in steps) / (shape.batch * len(steps))
    truncated = sum(line["rollout/truncated_share"] for line in steps) / len(steps)
    return Run(scheduler, _differences(ends), mean, truncated, peak_gib[0])


def _differences(ends_s: Sequence[float]) -> list[float]:
    return [end - start for start, end in zip(ends_s, ends_s[1:], strict=False)]


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def measure(name: str, trl: Path, rounds: int, only: Sequence[str], real: Path | None) -> Part:
    shape = SHAPES[name]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out)
        n_prompts = shape.batch * (_WARM_UP + shape.steps + _COOL_DOWN + 4)
        if real is not None and shape.is_real:
            link_files(real, folder, n_prompts)
        else:
            make_files(shape, folder, n_prompts)
        for system in _SERIES * rounds:
            if system in only:
                run = run_trl(system, shape, folder, trl) if system in _TRL else run_ours(system, shape, folder)
                print(f"  {system}: {_rate([run], shape):.1f} sequences/s", file=sys.stderr, flush=True)
                runs.append(run)
    by_name = {system: [run for run in runs if run.name == system] for system in dict.fromkeys(_SERIES)}
    rates = {system: _rate(made, shape) for system, made in by_name.items() if made}
    fastest = max((rates[system] for system in _TRL if system in rates), default=float("nan"))
    figures = [
        Figure(
            f"{system} / faster TRL trainer", rates[system] / fastest, at_least=shape.goal if system == best else None
        )
        for best in [max((s for s in _OURS if s in rates), key=rates.__getitem__, default="")]
        for system in _OURS
        if system in rates
    ]
    rows: list[list[str | float]] = []
    for system, made in by_name.items():
        for run in made:
            per_step = [shape.batch / seconds for seconds in run.step_s]
            title = f"TRL {system}" if system in _TRL else system
            speeds = [_rate([run], shape), min(per_step), max(per_step)]
            rows.append([title, *speeds, run.mean_response, run.truncated, run.peak_gib])
    columns = ["program", "sequences/s", "slowest step", "fastest step", "mean response", "cut", "GiB"]
    what = (
        f"Student {shape.student}, teacher {shape.teacher} (hidden size, layers), {shape.dtype}, "
        f"prompts of up to {shape.max_prompt} tokens, at most {shape.max_response} response tokens, "
        f"{shape.batch} sequences a step. Interleaved runs."
    )
    return Part(name, what, figures, [Table("runs", columns, rows)], {"rounds": rounds})


def _rate(runs: Sequence[Run], shape: Shape) -> float:
    """Return sequences per second over all measured steps."""
    seconds = [step for run in runs for step in run.step_s]
    return shape.batch * len(seconds) / sum(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("tests.bench.bench_trl", __doc__ or "", [name for name in SHAPES if not SHAPES[name].is_real], 1)
    made.add_argument("--trl", type=Path, required=True, metavar="DIR", help="folder with TRL, see the docstring")
    made.add_argument("--programs", default=",".join(dict.fromkeys(_SERIES)), help="default: %(default)s")
    made.add_argument("--real", type=Path, metavar="DIR", help="models/smollm2, for the parts real and real_bfloat16")
    args = parsed(made, SHAPES, argv)
    if needed := [name for name in args.only.split(",") if SHAPES[name].is_real and args.real is None]:
        made.error(f"--only {needed[0]} needs --real DIR, which `bash examples/real_model/run.sh` makes")
    if not (args.trl / "trl").is_dir():
        made.error(f"--trl {args.trl}: no TRL there; see the docstring of this module")
    return run_parts(
        args, lambda name: measure(name, args.trl.resolve(), args.rounds, args.programs.split(","), args.real)
    )


if __name__ == "__main__":
    sys.exit(main())
