"""`python -m gkd.tools.split --gpus 8 --run RUN_DIR | --calibrate CONFIG`: the split with the fastest steps.

Reads how fast each stage of a run was, simulates the loop for every other split and scheduler, and prints the ranking
with the lines to paste. With `--calibrate` it makes that run first: a few steps at two concurrencies.
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

from gkd.cluster.gpus import card_bytes
from gkd.config.check import check_config
from gkd.config.load import load_config, parse_overrides
from gkd.config.schedulers import AHEAD, STREAM
from gkd.config.schema import Config
from gkd.errors import ConfigError, GkdError
from gkd.footprint import check
from gkd.footprint.estimate import read_models
from gkd.tools.split_tuner import layout
from gkd.tools.split_tuner.calibration import SCHEDULER, calibrate, calibration_folder
from gkd.tools.split_tuner.layout import Hardware
from gkd.tools.split_tuner.rates import Workload, lognormal
from gkd.tools.split_tuner.run import Run, check_plannable, read_run
from gkd.tools.split_tuner.search import Candidate, CheckMemory, Ranking, search, simulated
from gkd.tools.split_tuner.table import as_json, left_out, notes, paste, table

SCHEDULERS = (*AHEAD, STREAM)
_LONGEST = 1 << 20  # tokens, of --lengths
_EXAMPLES = """examples:
  python -m gkd.tools.split --gpus 8 --run runs/mine --plot split.png
  python -m gkd.tools.split --gpus 64 --gpu-gib 80 --run runs/mine --schedulers stream,one_step_off --lengths 2000,1.0
  python -m gkd.tools.split --gpus 16 --run runs/mine --teacher-elsewhere --json | jq '.ranking[0].split'
  python -m gkd.tools.split --gpus 8 --calibrate mine.yaml teacher.server_ip=10.0.0.5     # the server must be up

A run that is still going can be read, too. What is shared out: --gpus for actor, rollout and teacher; the first two
keep their tensor and pipeline parallel sizes, a worker of the teacher its number of GPUs.

exit code: 0 a ranking was printed, 1 the run's metrics are damaged, a calibration failed, the plot cannot be written,
or no split fits into memory, 2 wrong arguments or settings, settings that no split of the GPUs agrees with, or a folder
that cannot be used (a run without metrics or with few steps, a calibration's that is taken)
"""


def main(argv: list[str] | None = None) -> int:
    """Exit code, see `_EXAMPLES`."""
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
    """A run's rates, and the steps that a simulation of them can be compared with."""

    run: Run  # its config is the one to plan for
    scheduler: str  # of these steps, and what they took
    step_s: float
    n_steps: int


def _ranked(args: argparse.Namespace) -> int:
    card = card_bytes(args.gpu_gib)
    measured = _calibrated(args) if args.calibrate else _read(args)
    run = measured.run
    check_memory = None if card is None else _memory_check(run.config, card)
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
        from gkd.tools.split_tuner.plot import plot  # half a second, which only those who want one pay

        plot(ranking, own, Path(args.plot), args.top)
    return 0 if ranking.candidates[0].fits else 1


def _read(args: argparse.Namespace) -> _Measured:
    run = read_run([Path(args.run)], **_of_teacher(args), last=args.last)
    return _Measured(run, run.config.trainer.scheduler, run.step_s, run.n_steps)


def _memory_check(config: Config, card: int) -> CheckMemory:
    """Whether the pools fit on cards of so many bytes; the teacher's own memory is its server's business.

    Raises:
        ConfigError: a model of the run is not there any more.
        ModelError: its config.json does not say its sizes.
    """
    models = read_models(config)

    def problems(changed: Config) -> list[str]:  # of many splits; other splits are the fix
        return check(models.footprint(changed), card, changed)

    return problems


def _of_teacher(args: argparse.Namespace) -> dict[str, int]:
    """What was said of the teacher; 0: nothing."""
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
        f"{facts['measured_step_s']:.3g} s; the simulation of the same split says {facts['simulated_step_s']:.3g} s",
        f"an engine's pass {r.pass_s:.3g} s + {r.sequence_s:.3g} s a sequence; the teacher "
        f"{_rate(r.score_token_s)} tokens/s a worker, the actor {_rate(r.train_token_s)} a data-parallel group; "
        f"weight sync {r.sync_s:.3g} s; responses of {facts['mean_response_tokens']:.0f} tokens",
        *([notes(run.notes)] if run.notes else []),
        "",
        f"{hardware.n_gpus} GPUs: {ranking.n_splits} splits, {ranking.n_simulated} simulations; "
        "busy: rollout/teacher/actor",
        table(ranking, own, top),
        *left_out(ranking),
        "",
        paste(best, run.config, hardware),
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
    """On a terminal, over the line before; the last one is left empty."""
    if sys.stderr.isatty():
        print(f"\r{text:60}", end="" if text else "\r", file=sys.stderr, flush=True)


def _calibrated(args: argparse.Namespace) -> _Measured:
    """Makes two short runs, the second with a fourth of the concurrency, and reads both.

    Raises:
        ConfigError: as `read_run`; the settings are wrong, or the folder for the runs is taken.
        ClusterError: a run failed; its own message is on stderr.
    """
    config = load_config(args.calibrate, args.overrides)
    check_config(config)
    check_plannable(config)
    root = calibration_folder(config, args.calibration_dir)
    folders = calibrate(args.calibrate, args.overrides, config, root)
    print(f"calibrated: what was measured stays in {root} (--calibration-dir)", file=sys.stderr)
    run = read_run(folders, **_of_teacher(args), last=args.last)
    # The rates are of both; a step's time is of the one whose concurrency the settings have.
    first = read_run(folders[:1], **_of_teacher(args), last=args.last)
    return _Measured(replace(run, config=config), SCHEDULER, first.step_s, first.n_steps)


def _lengths(text: str) -> tuple[float, float]:
    found = re.fullmatch(r"([0-9.]+),([0-9.]+)", text)
    if not found or not (1 <= float(found[1]) <= _LONGEST and float(found[2]) <= 4):
        raise argparse.ArgumentTypeError(
            f"{text!r}: MEAN,SIGMA of a lognormal, in tokens and of the logarithm, as 800,0.7"
        )
    return float(found[1]), float(found[2])


def _schedulers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in SCHEDULERS]:
        raise argparse.ArgumentTypeError(f"no scheduler {unknown[0]!r}; there are {', '.join(SCHEDULERS)}")
    return names


def _at_least(lowest: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {lowest}")
        return int(text)

    return number


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gkd.tools.split",
        description="Which share of the GPUs each pool should have, and which scheduler, from a run's measured rates.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", metavar="RUN_DIR", help="the run folder of a job that runs or is done")
    which.add_argument("--calibrate", metavar="X.yaml", help="make two short runs of these settings first")
    parser.add_argument("--gpus", type=_at_least(1), required=True, metavar="N", help="GPUs to share out, at least 3")
    parser.add_argument("--gpus-per-node", type=_at_least(1), default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--teacher-elsewhere", action="store_true", help="the teacher has GPUs of its own, as it has now"
    )
    parser.add_argument(
        "--teacher-workers",
        type=_at_least(1),
        default=0,
        metavar="N",
        help="that the run had; default: as in gpus.json",
    )
    parser.add_argument(
        "--gpus-per-teacher-worker", type=_at_least(1), default=0, metavar="N", help="default: as in gpus.json"
    )
    parser.add_argument("--schedulers", type=_schedulers, default=SCHEDULERS, metavar="A,B", help="default: all")
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="MEAN,SIGMA",
        help="response lengths, cut at the run's longest; default: its own",
    )
    parser.add_argument("--last", type=_at_least(1), default=0, metavar="N", help="steps of the run; default: all")
    parser.add_argument(
        "--calibration-dir", metavar="DIR", help="of the runs of --calibrate; default: RUN_DIR_calibration"
    )
    parser.add_argument("--top", type=_at_least(1), default=10, metavar="N", help="rows; default: %(default)s")
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of the drawn lengths")
    parser.add_argument(
        "--gpu-gib", type=float, metavar="80", help="a card's memory: what must fit; default: this machine's cards"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a PNG, too")
    parser.add_argument("--json", action="store_true", help="one JSON object with every simulated split")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of --calibrate: differ from the file")
    args = parse_overrides(parser, argv)
    least = 2 if args.teacher_elsewhere else 3
    if args.gpus < least:
        pools = "actor and rollout" if args.teacher_elsewhere else "actor, rollout and teacher"
        parser.error(f"argument --gpus: {args.gpus} GPUs, but {pools} need at least one each: use {least} or more")
    if args.teacher_elsewhere and args.gpus_per_teacher_worker:
        parser.error("--teacher-elsewhere: its workers take none of --gpus, so no --gpus-per-teacher-worker")
    if args.run and (args.overrides or args.calibration_dir):
        parser.error("--run takes the run's own settings: no key=value, no --calibration-dir")
    return args


if __name__ == "__main__":
    sys.exit(main())
