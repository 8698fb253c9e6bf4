"""`python -m gkd.tools.split --gpus 8 --run RUN_DIR | --calibrate CONFIG`: the split with the fastest steps.

Measures the rates of a run's stages, estimates the step time of every other split under every scheduler, and prints the
best splits with their settings. With `--calibrate` it makes the run first: a few steps at two concurrencies. The first
has that of the settings, the second one less, which shows the cost of a sequence in an engine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gkd.cluster.gpus import gpu_memory_bytes
from gkd.config.check import check_config
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.config.schema_trainer import AHEAD, STREAM
from gkd.errors import ClusterError, ConfigError
from gkd.memory.footprint.estimate import footprint, read_models
from gkd.memory.footprint.fit import check
from gkd.metrics.bottleneck import MAX_NUM_SEQS
from gkd.run.disk import remove
from gkd.run.folder import CHECKPOINTS, delete_export
from gkd.tools import exit_codes
from gkd.tools.split_tuner.rates import Run, check_plannable, read_run, read_steps
from gkd.tools.split_tuner.splits import Candidate, Hardware, Ranking, candidate, own_split, rank
from teacher_server.config.command import command_parser

SCHEDULERS = (*AHEAD, STREAM)
_LONGEST = 1 << 20  # tokens, limit of --lengths
_STEPS = 10  # steps of a run of --calibrate
_SHORT_RUN = (  # settings of a run that only measures
    "trainer.scheduler=sync",  # stages of different steps do not overlap
    "trainer.max_staleness=1",
    f"trainer.total_steps={_STEPS}",
    "trainer.resume=never",
    "trainer.save_every=0",
    "trainer.record_batches=false",
    "trainer.replay=''",
    # Other schedules may require more steps.
    "actor.optim.schedule=constant",
    "actor.optim.warmup_steps=0",
    "actor.optim.decay_steps=0",
    "data.val_files=[]",
    "eval.metric=none",
    # Without evaluations these would be refused.
    "eval.n=1",
    "eval.teacher_prompts=0",
    "trainer.keep_best=''",
)
_MIN_CONCURRENCY = 4  # the second run has a fourth of rollout.max_num_seqs, but not less
_HEADS = ("", "scheduler", "actor", "rollout", "teacher", "step s", "speed-up", "rollout s", "scoring s", "training s")
_EXAMPLES = """examples:
  python -m gkd.tools.split --gpus 8 --run runs/mine
  python -m gkd.tools.split --gpus 64 --gpu-gib 80 --run runs/mine --schedulers stream,one_step_off --lengths 2000,9000
  python -m gkd.tools.split --gpus 16 --run runs/mine --teacher-elsewhere --json | jq '.ranking[0].split'
  python -m gkd.tools.split --gpus 8 --calibrate mine.yaml teacher.server_ip=10.0.0.5     # the server must be up

The run may still be in progress. --gpus are split between actor, rollout and teacher; actor and rollout keep their
tensor and pipeline parallel sizes, a teacher worker its number of GPUs.

exit code: 0 a ranking was printed, 1 the run's metrics are damaged, or a calibration failed, 2 wrong arguments or
settings, no split is possible with the settings or fits into memory, or a folder that cannot be used (a run without
metrics or with few steps, a non-empty calibration folder)
"""


@exit_codes(ConfigError)
def main(argv: list[str] | None = None) -> int:
    """Return the exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    gpu_bytes = gpu_memory_bytes(args.gpu_gib)
    run = _calibrated(args) if args.calibrate else _measured([Path(args.run)], args)
    workload, config = run.workload, run.config
    own = own_split(config, run.sizes.workers, run.gpus_per_worker, elsewhere=args.teacher_elsewhere)
    same = candidate(config, own, run.scheduler, workload, run.rates)
    notes = list(run.notes)
    if gpu_bytes is None:
        notes.append("every split fits into memory: there is no GPU here, and no --gpu-gib")
    elif config.teacher.signal == "hidden":
        notes.append("the actor's ranks have room for the teacher's LM head, whose size the run does not record")
    if args.lengths:
        workload = replace(workload, response_tokens=args.lengths[0], longest_tokens=args.lengths[1])
    planned = candidate(config, own, config.trainer.scheduler, workload, run.rates)
    elsewhere = run.sizes.workers if args.teacher_elsewhere else 0
    hardware = Hardware(args.gpus, args.gpus_per_node, run.gpus_per_worker, elsewhere)
    ranking = rank(config, hardware, args.schedulers, workload, run.rates, _check(config, gpu_bytes))
    if args.json:
        facts = {
            "scheduler": run.scheduler,
            "steps": run.n_steps,
            "measured_step_s": run.step_s,
            "estimated_step_s": same.time.step_s,
            "sizes": asdict(run.sizes),
            "rates": asdict(run.rates),
            "workload": asdict(workload),
            "assumed": notes,
        }
        excluded = [{"scheduler": e.scheduler, "n": e.n, "first": str(e.first)} for e in ranking.excluded]
        told = {"run": facts, "n_splits": ranking.n_splits, "excluded": excluded, "own": asdict(planned)}
        print(json.dumps(told | {"ranking": [asdict(one) for one in ranking.candidates]}, indent=1), flush=True)
    else:
        print("\n".join(_text(run, same, notes, ranking, planned, hardware, args.top)), flush=True)
    return 0


def _check(config: Config, gpu_bytes: int | None) -> Callable[[Config], None]:
    """Return a check of settings, and that the pools and the teacher servers on the same GPUs fit into them.

    Args:
        gpu_bytes: None means that the memory is not checked.

    Raises:
        ConfigError: a model folder of the run is missing.
        ModelError: its config.json lacks sizes.
    """
    models = None if gpu_bytes is None else read_models(config)

    def checked(changed: Config) -> None:
        check_config(changed)
        if models is None or gpu_bytes is None:
            return
        if problems := check(footprint(changed, models, gpu_bytes), gpu_bytes, changed):
            problem = f"{problems[0]}."
            raise ConfigError(
                "--gpu-gib", gpu_bytes / 2**30, problem, "use more GPUs, or settings that need less memory."
            )

    return checked


def _measured(folders: Sequence[Path], args: argparse.Namespace) -> Run:
    """Read run folders; raises as `read_run`."""
    return read_run(folders, workers=args.teacher_workers, gpus_per_worker=args.gpus_per_teacher_worker, last=args.last)


def _calibrated(args: argparse.Namespace) -> Run:
    """Make two short runs, the second with a fourth of the concurrency, and read both. Blocks.

    Raises:
        ConfigError: as `read_run`; the settings are wrong, a run was refused, or the folder is not empty.
        ClusterError: a run failed; its error is on stderr.
    """
    config = load_config(args.calibrate, args.overrides)
    check_config(config)
    check_plannable(config)
    # Like trainer.run_dir it must be shared by all nodes.
    root = Path(args.calibration_dir or f"{os.path.abspath(config.trainer.run_dir)}_calibration")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        problem = "it is a file, or not empty. It may hold an earlier calibration, which --run can read."
        raise ConfigError("--calibration-dir", str(root), problem, "delete it, or name a new folder.")
    most = config.rollout.max_num_seqs
    folders = [_short_run(args, root, most)]
    if not most:  # preflight chose the number
        most = int(read_steps(folders[0])[-1][MAX_NUM_SEQS])
    fewer = max(min(_MIN_CONCURRENCY, most), most // 4)
    if fewer != most:
        folders.append(_short_run(args, root, fewer))
    print(f"calibrated: the measured runs are in {root} (--calibration-dir)", file=sys.stderr)
    return replace(_measured(folders, args), config=config)


def _short_run(args: argparse.Namespace, root: Path, concurrency: int) -> Path:
    """Make one run, and return its folder, without checkpoints and exports. Raises as `_calibrated`."""
    folder, file = root / f"max_num_seqs_{concurrency}", args.calibrate
    print(
        f"calibrating: {_STEPS} steps, {concurrency or 'auto'} sequences per engine, in {folder} ...", file=sys.stderr
    )
    settings = [f"trainer.run_dir={folder}", f"rollout.max_num_seqs={concurrency}", *_SHORT_RUN]
    code = launched([sys.executable, "-m", "gkd.main_gkd", "--config", file, *args.overrides, *settings])
    remove(folder / CHECKPOINTS)
    delete_export(folder)
    if code == 2:
        problem = f"the run in {folder} was refused, see above."
        raise ConfigError("--calibrate", file, problem, "correct it, or name another folder: --calibration-dir.")
    if code:
        where = f"its files are in {folder}; delete {root} or name another --calibration-dir before the next one"
        raise ClusterError(f"the calibration run of {file} ended with exit code {code}, see above; {where}")
    return folder


def launched(command: Sequence[str]) -> int:
    """Run a command and return its exit code. Its stdout goes to stderr, since stdout is for the ranking."""
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def _text(
    run: Run,
    same: Candidate,
    notes: Sequence[str],
    ranking: Ranking,
    own: Candidate,
    hardware: Hardware,
    top: int,
) -> Iterator[str]:
    """Yield the lines to print.

    Args:
        same: the measured split, with the scheduler and the lengths of the measured steps.
        own: the split of the run to plan for.
        top: splits of each scheduler.
    """
    r, w, off = run.rates, run.workload, same.time.step_s / run.step_s - 1
    yield (
        f"measured over {run.n_steps} steps of {run.scheduler}: step {run.step_s:.3g} s; estimate for the same split: "
        f"{same.time.step_s:.3g} s ({off:+.0%})"
    )
    yield (
        f"engine pass {r.pass_s:.3g} s + {r.sequence_s:.3g} s per sequence; teacher {_rate(r.score_token_s)} tokens/s "
        f"per worker; actor {_rate(r.train_token_s)} per data-parallel group; weight sync {r.sync_s:.3g} s; responses "
        f"of {w.response_tokens:.0f} tokens, the longest of a step {w.longest_tokens:.0f}"
    )
    yield from (f"assumed: {note}" for note in notes)
    yield f"\n{hardware.n_gpus} GPUs: {ranking.n_splits} splits"
    best = {
        name: [c for c in ranking.candidates if c.scheduler == name][:top]
        for name in dict.fromkeys(c.scheduler for c in ranking.candidates)
    }
    rows = [_row(f"{i}", c, own) for some in best.values() for i, c in enumerate(some, start=1)]
    rows = [_HEADS, *rows, _row("own", own, own)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for e in ranking.excluded:
        yield f"excluded: {e.n} splits under {e.scheduler}, the first because of {e.first}"
    for first, *_ in best.values():
        yield "\n" + "\n".join(settings_of(first, run.config, hardware))


def _row(name: str, one: Candidate, own: Candidate) -> tuple[str, ...]:
    s, t = one.split, one.time
    gpus = (str(s.actor), str(s.rollout), str(s.teacher_gpus or "elsewhere"))
    speed_up = f"{own.time.step_s / t.step_s:.2f}x"
    seconds = (f"{t.rollout_s:.3g}", f"{t.scoring_s:.3g}", f"{t.training_s:.3g}")
    return (name, one.scheduler, *gpus, f"{t.step_s:.3g}", speed_up, *seconds)


def settings_of(one: Candidate, config: Config, hardware: Hardware) -> Iterator[str]:
    """Yield the settings of a split as one line of `key=value`, then comments on what the user has to choose."""
    split, settings = one.split, one.split.settings(one.scheduler)
    if one.scheduler == STREAM:
        settings["trainer.max_staleness"] = config.trainer.max_staleness
    if config.teacher.max_in_flight:
        settings["teacher.max_in_flight"] = 0
    yield " ".join(f"{key}={value}" for key, value in settings.items())
    if not config.cluster.ray_address and split.actor.n_gpus + split.rollout.n_gpus > hardware.per_node:
        yield "# the pools are on several nodes: start a Ray cluster, and set cluster.ray_address"
    if config.cluster.gpus:
        yield f"# cluster.gpus is {list(config.cluster.gpus)}: set it to the GPUs of this split, or remove it"
    if split.teacher_gpus:
        size = hardware.gpus_per_worker
        flags = f"--n-workers {split.workers}" + f" --tensor-parallel-size {size}" * (size > 1)
        yield f"# teacher server: python -m teacher_server serve ... {flags}   # {split.teacher_gpus} GPUs"


def _rate(token_s: float) -> str:
    return f"{1 / token_s:.3g}" if token_s > 0 else "any"


def _lengths(text: str) -> tuple[float, float]:
    found = re.fullmatch(r"([0-9.]+),([0-9.]+)", text)
    if not found or not 1 <= float(found[1]) <= float(found[2]) <= _LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected MEAN,LONGEST of a step's responses in tokens, like 800,4096"
        )
    return float(found[1]), float(found[2])


def _schedulers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in SCHEDULERS]:
        raise argparse.ArgumentTypeError(f"unknown scheduler {unknown[0]!r}; use one of {', '.join(SCHEDULERS)}")
    return names


def _at_least(lowest: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least {lowest}")
        return int(text)

    return number


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "python -m gkd.tools.split",
        "Recommend a split of the GPUs and a scheduler from the measured rates of a run.",
        _EXAMPLES,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", metavar="RUN_DIR", help="run folder of a finished or running job")
    which.add_argument("--calibrate", metavar="X.yaml", help="make two short runs of these settings first")
    parser.add_argument("--gpus", type=_at_least(1), required=True, metavar="N", help="GPUs to split, at least 3")
    parser.add_argument("--gpus-per-node", type=_at_least(1), default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--teacher-elsewhere", action="store_true", help="the teacher keeps its own GPUs, which are not part of --gpus"
    )
    parser.add_argument(
        "--teacher-workers",
        type=_at_least(1),
        default=0,
        metavar="N",
        help="workers that the run had; default: as in gpus.json",
    )
    parser.add_argument(
        "--gpus-per-teacher-worker", type=_at_least(1), default=0, metavar="N", help="default: as in gpus.json"
    )
    parser.add_argument("--schedulers", type=_schedulers, default=SCHEDULERS, metavar="A,B", help="default: all")
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="MEAN,LONGEST",
        help="mean and longest response of a step, in tokens; default: measured",
    )
    parser.add_argument("--last", type=_at_least(1), default=0, metavar="N", help="steps of the run; default: all")
    parser.add_argument(
        "--calibration-dir", metavar="DIR", help="folder for the runs of --calibrate; default: RUN_DIR_calibration"
    )
    parser.add_argument(
        "--top", type=_at_least(1), default=3, metavar="N", help="splits of each scheduler; default: %(default)s"
    )
    parser.add_argument("--gpu-gib", type=float, metavar="80", help="memory of a GPU; default: of this machine's GPUs")
    parser.add_argument("--json", action="store_true", help="print a JSON object with every ranked split")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="with --calibrate: settings that differ from the file"
    )
    args = parse_overrides(parser, argv)
    least = 2 if args.teacher_elsewhere else 3
    if args.gpus < least:
        pools = "actor and rollout" if args.teacher_elsewhere else "actor, rollout and teacher"
        parser.error(f"argument --gpus: {args.gpus} GPUs, but {pools} need at least one each: use {least} or more")
    if args.teacher_elsewhere and args.gpus_per_teacher_worker:
        parser.error(
            "--gpus-per-teacher-worker does not apply with --teacher-elsewhere: its workers take none of --gpus"
        )
    if args.run and (args.overrides or args.calibration_dir):
        parser.error("--run uses the run's settings: remove key=value and --calibration-dir")
    return args


if __name__ == "__main__":
    sys.exit(main())
