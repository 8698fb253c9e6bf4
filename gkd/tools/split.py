"""`python -m gkd.tools.split --gpus 8 --run RUN_DIR | --calibrate CONFIG`: the split with the fastest steps.

Measures the rates of a run's stages, simulates the loop for every other split and scheduler, and prints the ranking
with the settings of the best split. With `--calibrate` it makes the run first: a few steps at two concurrencies.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gkd.cluster.gpus import gpu_memory_bytes
from gkd.config.check import check_config
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.config.schema_trainer import AHEAD, STREAM
from gkd.errors import ConfigError, GkdError
from gkd.footprint import check
from gkd.footprint.estimate import read_models
from gkd.footprint.rank import other_processes_bytes, with_other_processes
from gkd.tools.split_tuner import layout
from gkd.tools.split_tuner.calibration import SCHEDULER, calibrate, calibration_folder
from gkd.tools.split_tuner.layout import Hardware
from gkd.tools.split_tuner.rates import Workload, lognormal
from gkd.tools.split_tuner.run import Run, check_plannable, read_run
from gkd.tools.split_tuner.search import Candidate, CheckMemory, Ranking, search, simulated
from gkd.tools.split_tuner.table import as_json, left_out, notes, settings_of, table

SCHEDULERS = (*AHEAD, STREAM)
_LONGEST = 1 << 20  # tokens, limit of --lengths
_EXAMPLES = """examples:
  python -m gkd.tools.split --gpus 8 --run runs/mine --plot split.png
  python -m gkd.tools.split --gpus 64 --gpu-gib 80 --run runs/mine --schedulers stream,one_step_off --lengths 2000,1.0
  python -m gkd.tools.split --gpus 16 --run runs/mine --teacher-elsewhere --json | jq '.ranking[0].split'
  python -m gkd.tools.split --gpus 8 --calibrate mine.yaml teacher.server_ip=10.0.0.5     # the server must be up

The run may still be in progress. --gpus are split between actor, rollout and teacher; actor and rollout keep their
tensor and pipeline parallel sizes, a teacher worker its number of GPUs.

exit code: 0 a ranking was printed, 1 the run's metrics are damaged, a calibration failed, the plot cannot be written,
or no split fits into memory, 2 wrong arguments or settings, no split is possible with the settings, or a folder that
cannot be used (a run without metrics or with few steps, a non-empty calibration folder)
"""


def main(argv: list[str] | None = None) -> int:
    """Return the exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    try:
        return _ranked(args)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except (GkdError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


@dataclass(frozen=True, slots=True)
class _Measured:
    """Rates of a run, and measured steps to compare with a simulation."""

    run: Run  # measured run, with the config to plan for
    scheduler: str  # scheduler of the measured steps
    step_s: float
    n_steps: int


def _ranked(args: argparse.Namespace) -> int:
    gpu_bytes = gpu_memory_bytes(args.gpu_gib)
    measured = _calibrated(args) if args.calibrate else _read(args)
    run = measured.run
    check_memory = None if gpu_bytes is None else _memory_check(run.config, gpu_bytes)
    workload = _workload(run, args.lengths)
    elsewhere = run.sizes.workers if args.teacher_elsewhere else 0
    hardware = Hardware(args.gpus, args.gpus_per_node, run.gpus_per_worker, elsewhere)
    own_split = layout.own_split(run.config, run.sizes.workers, run.gpus_per_worker, elsewhere=args.teacher_elsewhere)
    own_scheduler = run.config.trainer.scheduler
    own = simulated(run.config, own_split, own_scheduler, workload, run.rates, check_memory, args.seed)
    same = simulated(run.config, own_split, measured.scheduler, run.workload, run.rates, None, args.seed)
    ranking = search(
        run.config,
        hardware,
        args.schedulers,
        workload,
        run.rates,
        check_memory=check_memory,
        seed=args.seed,
        progress=_progress,
    )
    _progress("")
    facts = _facts(measured, same)
    if args.json:
        print(json.dumps(as_json(ranking, own, facts), indent=1), flush=True)
    else:
        print(_text(run, ranking, own, facts, hardware, args.top), flush=True)
    if args.plot:
        from gkd.tools.split_tuner.plot import plot  # takes half a second to import

        plot(ranking, own, Path(args.plot), args.top)
    return 0 if ranking.candidates[0].fits else 1


def _read(args: argparse.Namespace) -> _Measured:
    run = read_run([Path(args.run)], **_of_teacher(args), last=args.last)
    return _Measured(run, run.config.trainer.scheduler, run.step_s, run.n_steps)


def _memory_check(config: Config, gpu_bytes: int) -> CheckMemory:
    """Return a check whether the pools fit into GPUs of this size, with what teacher servers take of the same GPUs.

    Raises:
        ConfigError: a model folder of the run is missing.
        ModelError: its config.json lacks sizes.
    """
    models = read_models(config)

    def problems(changed: Config) -> list[str]:  # without fixes: the ranking has other splits
        others = other_processes_bytes(changed, gpu_bytes)
        return check(with_other_processes(models.footprint(changed), others, changed), gpu_bytes, changed)

    return problems


def _of_teacher(args: argparse.Namespace) -> dict[str, int]:
    """Return the arguments about the teacher; 0: not given."""
    return {"workers": args.teacher_workers, "gpus_per_worker": args.gpus_per_teacher_worker}


def _facts(measured: _Measured, same: Candidate) -> dict[str, Any]:
    run = measured.run
    return {
        "measured_scheduler": measured.scheduler,
        "measured_steps": measured.n_steps,
        "measured_step_s": measured.step_s,
        "simulated_step_s": same.outcome.step_s,
        "steps": run.n_steps,
        "sizes": asdict(run.sizes),
        "rates": asdict(run.rates),
        "mean_response_tokens": run.workload.lengths.mean,
        "assumed": list(run.notes),
    }


def _text(run: Run, ranking: Ranking, own: Candidate, facts: dict[str, Any], hardware: Hardware, top: int) -> str:
    best = ranking.candidates[0]
    r = run.rates
    lines = [
        f"measured over {facts['measured_steps']} steps of {facts['measured_scheduler']}: step "
        f"{facts['measured_step_s']:.3g} s; simulation of the same split: {facts['simulated_step_s']:.3g} s",
        f"engine pass {r.pass_s:.3g} s + {r.sequence_s:.3g} s per sequence; teacher "
        f"{_rate(r.score_token_s)} tokens/s per worker; actor {_rate(r.train_token_s)} per data-parallel group; "
        f"weight sync {r.sync_s:.3g} s; responses of {facts['mean_response_tokens']:.0f} tokens",
        *([notes(run.notes)] if run.notes else []),
        "",
        f"{hardware.n_gpus} GPUs: {ranking.n_splits} splits, {ranking.n_simulated} simulations; "
        "busy: rollout/teacher/actor",
        table(ranking, own, top),
        *left_out(ranking),
        "",
        settings_of(best, run.config, hardware),
    ]
    if not best.fits:
        lines += ["", *(f"WRONG {text}" for text in best.too_large or ())]
    return "\n".join(lines)


def _rate(token_s: float) -> str:
    return f"{1 / token_s:.3g}" if token_s > 0 else "any"


def _workload(run: Run, lengths: tuple[float, float] | None) -> Workload:
    if lengths is None:
        return run.workload
    longest = run.config.data.max_response_length
    return replace(run.workload, lengths=lognormal(*lengths, longest=longest))


def _progress(text: str) -> None:
    """Show progress on a terminal, replacing the previous line; empty text clears it."""
    if sys.stderr.isatty():
        print(f"\r{text:60}", end="" if text else "\r", file=sys.stderr, flush=True)


def _calibrated(args: argparse.Namespace) -> _Measured:
    """Make two short runs, the second with a fourth of the concurrency, and read both.

    Raises:
        ConfigError: as `read_run`; the settings are wrong, or the folder is not empty.
        ClusterError: a run failed; its error is on stderr.
    """
    config = load_config(args.calibrate, args.overrides)
    check_config(config)
    check_plannable(config)
    root = calibration_folder(config, args.calibration_dir)
    folders = calibrate(args.calibrate, args.overrides, config, root)
    print(f"calibrated: the measured runs are in {root} (--calibration-dir)", file=sys.stderr)
    run = read_run(folders, **_of_teacher(args), last=args.last)
    # Rates come from both runs, the step time from the one with the concurrency of the settings.
    first = read_run(folders[:1], **_of_teacher(args), last=args.last)
    return _Measured(replace(run, config=config), SCHEDULER, first.step_s, first.n_steps)


def _lengths(text: str) -> tuple[float, float]:
    found = re.fullmatch(r"([0-9.]+),([0-9.]+)", text)
    if not found or not (1 <= float(found[1]) <= _LONGEST and float(found[2]) <= 4):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected MEAN,SIGMA of a lognormal (tokens, sigma of the logarithm), like 800,0.7"
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
    parser = argparse.ArgumentParser(
        prog="python -m gkd.tools.split",
        description="Recommend a split of the GPUs and a scheduler from the measured rates of a run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        metavar="MEAN,SIGMA",
        help="response lengths, truncated at the run's maximum; default: measured",
    )
    parser.add_argument("--last", type=_at_least(1), default=0, metavar="N", help="steps of the run; default: all")
    parser.add_argument(
        "--calibration-dir", metavar="DIR", help="folder for the runs of --calibrate; default: RUN_DIR_calibration"
    )
    parser.add_argument("--top", type=_at_least(1), default=10, metavar="N", help="rows; default: %(default)s")
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="seed of the response lengths")
    parser.add_argument("--gpu-gib", type=float, metavar="80", help="memory of a GPU; default: of this machine's GPUs")
    parser.add_argument("--plot", metavar="FILE", help="also write a PNG")
    parser.add_argument("--json", action="store_true", help="print a JSON object with every simulated split")
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
