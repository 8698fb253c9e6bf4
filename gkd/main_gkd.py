"""Command line `gkd train`: check the run, start the pools, train.

    gkd train --config X.yaml [key=value ...]
    gkd train --student MODEL --teacher MODEL --data FILE [key=value ...]

`gkd.api.open_pools` checks the run and starts the processes, `gkd.trainer` is the loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from gkd.api import run
from gkd.config.load import add_config, load_config, parse_overrides, read_config
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys, sections
from gkd.console.summary import Closing
from gkd.console.terminal import LINES, Terminal
from gkd.errors import ConfigError, DataError, GkdError, ModelError
from gkd.preflight.preview import preview
from gkd.run import interrupts
from gkd.run.failure_policy import may_start_again, start_again
from gkd.spans import driver
from teacher_server.config.command import command_parser
from teacher_server.vision.images import ImageError


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 the run failed, 2 invalid config, model or prompt file, 130 interrupted.

    A program whose rank failed starts again instead, up to trainer.max_restarts times (`gkd.run.failure_policy`).
    """
    environment = dict(os.environ)
    args = _parse(argv)
    interrupts.install()  # handles SIGINT even if a shell started this in the background with SIGINT ignored
    closing: Closing | None = None
    added: list[str] = []  # settings that were chosen here
    failure: GkdError | None = None
    try:
        overrides = _overrides(args)
        config = load_config(args.config, overrides) if args.show_prompts else _settings(args, overrides)
        if args.show_prompts is not None:
            try:
                for text in preview(config, args.show_prompts):
                    print(text, flush=True)
            except BrokenPipeError:  # the reader has enough, for example head
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what Python writes at its end
            return 0
        added = [word for word in overrides if word not in args.overrides and word.startswith("trainer.run_dir=")]
        closing = Closing(config.trainer.run_dir, [*(sys.argv[1:] if argv is None else argv), *added])
        with ExitStack() as stack:
            if args.teacher:
                from gkd.start.own_teacher import teacher_of_run

                config = stack.enter_context(teacher_of_run(config, args.teacher, args.teacher_gpus))
            run(config, closing)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"config error: {line}", file=sys.stderr)
        return 2
    except (DataError, ModelError, ImageError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except GkdError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 1
        failure = error
    except (KeyboardInterrupt, SystemExit):  # SystemExit: Ray's own SIGTERM handler, in force while Ray starts
        print("interrupted; all started processes are stopped", file=sys.stderr)
        code = 130
    except Exception as error:
        if isinstance(error, PermissionError) and error.filename and (closing is None or closing.state is None):
            print(f"config error: {error}. Fix: permit this user to use it and the folders above it.", file=sys.stderr)
            return 2
        traceback.print_exc()  # a bug: as Python would, and then what the run leaves behind
        code = 1
    else:
        code = 0
    if closing is not None:
        closing.print(code)
        # Restart only a program: a caller of this function would be replaced, too. Never restart before the loop.
        if argv is None and failure is not None and closing.state is not None and may_start_again(failure, config):
            start_again(environment, added)
    return code


def _settings(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the settings. Raises ConfigError: naming their mistakes, and then those that the other checks find.

    Before a teacher is started for the run, everything else is checked.
    """
    config, wrong = read_config(args.config, overrides)
    if config is None or wrong or args.teacher:
        from gkd.preflight.run import problems  # only for a wrong configuration: `open_pools` checks a right one

        with Terminal(LINES, ""), driver.doing("checks"):
            errors = problems(config, wrong, with_teacher=not args.teacher)
        if errors or config is None:
            raise ConfigError.together(errors)
    return config


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "gkd train",
        "On-policy distillation: train a student on its own responses, scored by a teacher.",
        f"{_keys_help(all_keys())}\n\nexample:\n  gkd train --config mine.yaml actor.optim.lr=1e-3",
        add_help=False,
    )
    about = "print this and all keys, or the keys of one section, e.g. actor.optim"
    parser.add_argument("-h", "--help", nargs="?", action=_Help, metavar="SECTION", help=about)
    add_config(parser, "settings that differ from the defaults", required=False)
    parser.add_argument("--student", metavar="MODEL", help="model.path: a folder, or ORG/NAME on the hub")
    parser.add_argument("--data", action="append", metavar="FILE", help="data.train_files; may be repeated")
    about = "serve this model for the run alone, on GPUs that the pools leave; its log: RUN_DIR.teacher.log"
    parser.add_argument("--teacher", metavar="MODEL", help=about)
    parser.add_argument("--teacher-gpus", metavar="A,B,..", default="", help="GPUs of the server of --teacher")
    parser.add_argument(
        "--show-prompts",
        type=int,
        metavar="N",
        help="print the first N training prompts as the models read them, and end",
    )
    args = parse_overrides(parser, argv)
    if args.show_prompts is not None and args.show_prompts < 1:
        parser.error(f"--show-prompts {args.show_prompts}: give the number of prompts, at least 1")
    return args


def _overrides(args: argparse.Namespace) -> list[str]:
    """Return the settings of the command line. Without a file a run has a folder: runs/STUDENT-1, or the next number.

    What is written as key=value comes last, and wins.
    """
    words = [f"model.path={args.student}"] if args.student else []
    words += [f"data.train_files={json.dumps(args.data)}"] if args.data else []
    if args.student and not args.config and not any(word.startswith("trainer.run_dir=") for word in args.overrides):
        name = Path(args.student).name
        folders = (f"runs/{name}-{i}" for i in itertools.count(1))
        words.append(f"trainer.run_dir={next(folder for folder in folders if not Path(folder).exists())}")
    return [*words, *args.overrides]


class _Help(argparse.Action):
    """Print the help, or that of the keys of a section."""

    def __call__(self, parser: argparse.ArgumentParser, args: object, section: object, flag: str | None = None) -> None:
        if section is None:
            parser.print_help()
        elif names := [name for name in all_keys() if f"{name}.".startswith(f"{section}.")]:
            print(_keys_help(names))
        else:
            parser.error(f"{flag} {section}: no section has this name. Fix: use one of {', '.join(sorted(sections()))}")
        parser.exit()


def _keys_help(names: Iterable[str]) -> str:
    lines = ["keys with type and default:"]
    for key in (all_keys()[name] for name in names):
        lines.append(f"  {key.name}: {key.type} = {key.default!r}")
        text = f"{key.help} ({limits})" if (limits := key.setting.all_limits()) else key.help
        lines += textwrap.wrap(text, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
