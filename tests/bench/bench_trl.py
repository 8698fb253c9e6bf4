"""Compare sequences per second with TRL 1.16: same models, prompts, loss and batch, on both cores or on one card.

    python -m pip install --target DIR --no-deps trl==1.16 datasets==5.2.0 pandas==3.1.1 multiprocess==0.70.19 \
        dill==0.4.1 python-dateutil==4.0.0 six
    python -m tests.bench.bench_trl --trl DIR --json docs/results/trl_cpu.json      # about 9 minutes
    python -m tests.bench.bench_trl --trl DIR --real models/smollm2 --only real,real_bfloat16 \
        --json docs/results/trl_real.json
    python -m tests.bench.bench_trl --device cuda --only card [--tiny] [--trl DIR]

DIR is a folder of its own, outside the product's dependencies; TRL uses torch and transformers of this environment.
Run it on an idle machine: TRL, whose threads wait for each other, slows down by far more than its share is.

The runs alternate: TRL's GKDTrainer, ours, TRL's DistillationTrainer, ours, ... Each is a fresh process, and the time
between the ends of its first and its last step counts. The loss is the forward KL over the whole vocabulary, on
responses sampled at temperature 1. Lengths: see `tests.bench.trl_models`. --real: the models of examples/real_model,
which its run.sh makes; our loss has the teacher's 64 most probable tokens there. TRL's asynchronous trainer sends
weights over NCCL, so it does not run on CPU.

card: TRL's DistillationTrainer and ours, each with teacher and vLLM on the student's card, or tiny ones on the CPU. The
weights are random, so nearly all responses reach the limit. Both compute the divergence over the whole vocabulary, in
bfloat16 with float32 weights of the student, recompute nothing, and give the engine the same share of the card. TRL's
micro-batches are half as large: its models all stay on the card. The first losses have the same prompts and weights,
but other samples. GiB: what the card uses above that at the start.

`--rounds N` repeats the series.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.real_model.memory import peak_memory
from gkd.metrics.writer import read_metrics
from tests.bench.command import ROOT, add_device, call, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.bench.trl_models import GPU_SHARE, LEARNING_RATE, SHAPES, Shape, link_files, make_files
from tests.service.harness import ServerProcess

_OURS = ("sync", "one_step_off", "stream")
_TRL = ("gkd", "distillation")
# TRL's runs surround ours, so that a drift of the machine's speed meets both.
_SERIES = ("gkd", "sync", "distillation", "one_step_off", "gkd", "stream", "distillation")
_CARD_SERIES = ("distillation", "sync", "distillation")
_WARM_UP = 2  # steps of ours before the measured ones; TRL needs one
_COOL_DOWN = 2  # steps of ours after the measured ones: at the end of a run, no batch is generated ahead
_LIMIT_S = 600.0
_TRAIN = ("gkd.main_gkd", "--config")


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds of its measured steps, and lengths."""

    name: str
    step_s: list[float]
    mean_response: float
    truncated: float
    peak_gib: float  # of all its processes, or of the card
    losses: list[float]  # of all steps


def card_gib() -> float:
    """Return the memory of the card that all processes use, this one included."""
    import torch  # only here, so that this process stays small on a CPU

    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 2**30


@contextmanager
def peak_of(shape: Shape) -> Iterator[list[float]]:
    """`peak_memory` of the program in this block: of its processes, or of the card, without what was in use before."""
    before = card_gib() if shape.device == "cuda" else 0.0
    with peak_memory(card_gib, every_s=0.5) if shape.device == "cuda" else peak_memory() as peak_gib:
        yield peak_gib
    peak_gib[0] -= before


def run_trl(name: str, shape: Shape, folder: Path, args: Any, **more: Any) -> Run:
    """Run TRL's trainer in a process of its own; `more`: other values of its case."""
    case = {
        **asdict(shape),
        "trainer": name,
        "folder": str(folder),
        "output": str(folder / "trl"),
        "steps": shape.trl_steps + 1,
        "max_prompt": shape.max_prompt,
        "learning_rate": LEARNING_RATE,
        "seconds": 1e9,
        "student_to": "",
        **more,
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str((args.trl or ROOT).resolve()), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "PYTHONWARNINGS": "ignore",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [sys.executable, "-m", "tests.bench.trl_run", json.dumps(case)]
    with (folder / "log.txt").open("wb") as log, peak_of(shape) as peak_gib:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, timeout=_LIMIT_S, check=False
        )
    if done.returncode:
        raise RuntimeError(f"TRL ended with exit code {done.returncode}:\n{_tail(folder / 'log.txt')}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    lengths = result["mean_response"], result["truncated"]
    return Run(name, _differences(result["ends_s"]), *lengths, peak_gib[0], result["losses"])


@contextmanager
def our_settings(shape: Shape, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield our settings. The teacher is a server that runs in this block, or next to the student, with TRL's loss."""
    settings = {
        "data.train_files": f"[{folder / 'prompts.jsonl'}]",
        "data.max_prompt_length": shape.max_prompt,
        "data.max_response_length": shape.max_response,
        "model.path": folder / "student",
        "model.dtype": shape.dtype,
        "trainer.device": shape.device,
        "trainer.global_batch_size": shape.batch,
        "actor.micro_batch_size": shape.micro_batch or shape.batch,
        "rollout.max_num_seqs": shape.batch,
    }
    if shape.is_colocated:
        yield settings | {
            "trainer.colocate": True,
            "teacher.backend": "local",
            "teacher.path": folder / "teacher",
            "teacher.signal": "hidden",  # the whole vocabulary
            "data.shuffle": False,
            "rollout.gpu_memory_utilization": GPU_SHARE,
            "rollout.enforce_eager": shape.is_tiny,
        }
    else:
        with ServerProcess(folder / "teacher", folder, options=("--dtype", shape.dtype)) as server:
            teacher = {"teacher.topk": shape.topk, "teacher.server_port": server.port}
            yield settings | teacher | {"rollout.kv_cache_mib": 256}


def run_ours(scheduler: str, shape: Shape, folder: Path, args: Any) -> Run:
    with tempfile.TemporaryDirectory(dir=folder) as out, peak_of(shape) as peak_gib:
        run_dir = Path(out) / "run"
        with our_settings(shape, folder) as settings:
            settings |= {
                "trainer.run_dir": run_dir,
                "trainer.scheduler": scheduler,
                "trainer.total_steps": _WARM_UP + shape.steps + _COOL_DOWN,
                "actor.optim.lr": LEARNING_RATE,
            }
            config = Path(out) / "config.yaml"
            config.write_text("{}\n")
            # A card does not wait for the checkpoint of 1.5 billion parameters.
            words = ("tests.gpu.timed_run",) if shape.is_colocated else _TRAIN
            words = (*words, str(config), *(f"{key}={value}" for key, value in settings.items()))
            code = call(*words, log=folder / "log.txt", timeout_s=_LIMIT_S, check=False)
        if code:
            raise RuntimeError(f"the run ended with exit code {code}:\n{_tail(folder / 'log.txt')}")
        every = list(read_metrics(run_dir / "metrics.jsonl"))
    lines = [line for line in every if line["step"] >= _WARM_UP][:-_COOL_DOWN]
    ends = [line["time/unix_s"] for line in lines]
    steps = lines[1:]
    mean = sum(line["rollout/response_tokens"] for line in steps) / (shape.batch * len(steps))
    truncated = sum(line["rollout/truncated_share"] for line in steps) / len(steps)
    return Run(scheduler, _differences(ends), mean, truncated, peak_gib[0], [line["loss/total"] for line in every])


def _differences(ends_s: Sequence[float]) -> list[float]:
    return [end - start for start, end in zip(ends_s, ends_s[1:], strict=False)]


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def measure(name: str, args: Any) -> Part:
    shape = SHAPES[name].on(args.device, is_tiny=args.tiny)
    series = _CARD_SERIES if shape.is_colocated else _SERIES
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out)
        n_prompts = shape.batch * (_WARM_UP + shape.steps + _COOL_DOWN + 4)
        if shape.is_real:
            link_files(args.real, folder, n_prompts)
        else:
            make_files(shape, folder, n_prompts)
        for system in series * args.rounds:
            if system in args.programs.split(","):
                run = (run_trl if system in _TRL else run_ours)(system, shape, folder, args)
                print(f"  {system}: {_rate([run], shape):.1f} sequences/s", file=sys.stderr, flush=True)
                runs.append(run)
    by_name = {system: [run for run in runs if run.name == system] for system in dict.fromkeys(series)}
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
    if shape.is_colocated and by_name["distillation"] and by_name["sync"]:
        trl, ours = (by_name[system] for system in ("distillation", "sync"))
        # The mean over 128 tokens varies by 0.005. Over a step's 16384 it varies by far less.
        off = max(abs(a.losses[0] / b.losses[0] - 1) for a in ours for b in trl)
        figures.append(Figure("first loss, ours / TRL: off by", off, at_most=0.05 if shape.is_tiny else 0.01))
        figures.append(Figure("peak memory, ours / TRL", max(a.peak_gib for a in ours) / max(b.peak_gib for b in trl)))
    rows: list[list[str | float]] = []
    for system, made in by_name.items():
        for run in made:
            per_step = [shape.batch / seconds for seconds in run.step_s]
            title = f"TRL {system}" if system in _TRL else system
            speeds = [_rate([run], shape), min(per_step), max(per_step)]
            rows.append([title, *speeds, run.mean_response, run.truncated, run.peak_gib, run.losses[0]])
    columns = ["program", "sequences/s", "slowest step", "fastest step", "mean response", "cut", "GiB", "first loss"]
    what = (
        f"Student {shape.student}, teacher {shape.teacher} (hidden size, layers), {shape.dtype}, "
        f"prompts of up to {shape.max_prompt} tokens, at most {shape.max_response} response tokens, "
        f"{shape.batch} sequences a step. Runs in this order: {', '.join(series)}."
    )
    return Part(name, what, figures, [Table("runs", columns, rows)], {"rounds": args.rounds, "device": shape.device})


def _rate(runs: Sequence[Run], shape: Shape) -> float:
    """Return sequences per second over all measured steps."""
    seconds = [step for run in runs for step in run.step_s]
    return shape.batch * len(seconds) / sum(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    usual = [name for name, shape in SHAPES.items() if not shape.is_real and not shape.is_colocated]
    made = parser("tests.bench.bench_trl", __doc__ or "", usual, 1)
    made.add_argument("--trl", type=Path, metavar="DIR", help="folder with TRL, see the docstring; default: installed")
    made.add_argument("--programs", default=",".join(dict.fromkeys(_SERIES)), help="default: %(default)s")
    made.add_argument("--real", type=Path, metavar="DIR", help="models/smollm2, for the parts real and real_bfloat16")
    add_device(made, "cpu")
    args = parsed(made, SHAPES, argv)
    if needed := [name for name in args.only.split(",") if SHAPES[name].is_real and args.real is None]:
        made.error(f"--only {needed[0]} needs --real DIR, which `bash examples/real_model/run.sh` makes")
    if args.device == "cuda" and args.only != "card":
        made.error(f"--device cuda --only {args.only}: the only part on a card is card")
    if not (importlib.util.find_spec("trl") if args.trl is None else (args.trl / "trl").is_dir()):
        made.error(f"--trl {args.trl}: no TRL there; see the docstring of this module")
    return run_parts(args, lambda name: measure(name, args))


if __name__ == "__main__":
    sys.exit(main())
