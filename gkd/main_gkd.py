"""Command line `python -m gkd.main_gkd --config X.yaml [key=value ...]`: check the run, start the pools, train.

`gkd.api.open_pools` checks the run and starts the processes, `gkd.trainer` is the loop.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Iterable

from gkd.api import open_pools
from gkd.cluster.garbage import collect_garbage_rarely
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
from gkd.trainer import Trainer
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
    failure: GkdError | None = None
    try:
        config = load_config(args.config, args.overrides) if args.show_prompts else _settings(args)
        if args.show_prompts is not None:
            try:
                for text in preview(config, args.show_prompts):
                    print(text, flush=True)
            except BrokenPipeError:  # the reader has enough, for example head
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what Python writes at its end
            return 0
        closing = Closing(config, sys.argv[1:] if argv is None else argv)
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
        code, failure = 1, error
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
            start_again(environment)
    return code


def run(config: Config, closing: Closing) -> None:
    """Check the run, start the pools, train, and stop the pools. Blocks until training ends."""
    with Terminal(config.trainer.progress, config.trainer.run_dir) as terminal, open_pools(config) as pools:
        plan = pools.plan
        trainer = Trainer(plan.config, pools, plan.train_prompts, plan.val_prompts, plan.folder, plan.total_steps)
        closing.state, closing.device = trainer.metrics.state, plan.device
        with terminal.watching(trainer.metrics.state, pools.teacher_health):
            collect_garbage_rarely()
            trainer.fit()


def _settings(args: argparse.Namespace) -> Config:
    """Return the settings. Raises ConfigError: naming their mistakes, and then those that the other checks find."""
    config, wrong = read_config(args.config, args.overrides)
    if config is None or wrong:
        from gkd.preflight.run import problems  # not for a right configuration: `open_pools` checks it

        with Terminal(LINES, ""), driver.doing("checks"):
            raise ConfigError.together(problems(config, wrong))
    return config


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "python -m gkd.main_gkd",
        "On-policy distillation: train a student on its own responses, scored by a teacher.",
        f"{_keys_help(all_keys())}\n\nexample:\n  python -m gkd.main_gkd --config mine.yaml actor.optim.lr=1e-3",
        add_help=False,
    )
    about = "print this and all keys, or the keys of one section, e.g. actor.optim"
    parser.add_argument("-h", "--help", nargs="?", action=_Help, metavar="SECTION", help=about)
    add_config(parser, "settings that differ from the defaults")
    parser.add_argument(
        "--show-prompts",
        type=int,
        metavar="N",
        help="print the first N training prompts as the models read them, and end",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the file")
    args = parse_overrides(parser, argv)
    if args.show_prompts is not None and args.show_prompts < 1:
        parser.error(f"--show-prompts {args.show_prompts}: give the number of prompts, at least 1")
    return args


class _Help(argparse.Action):
    """Print the help, or that of the keys of a section."""

    def __call__(self, parser: argparse.ArgumentParser, args: object, section: object, flag: str | None = None) -> None:
        if section is None:
            parser.print_help()
        elif names := [name for name in all_keys() if f"{name}.".startswith(f"{section}.")]:
            print(_keys_help(names))
        else:
            parser.error(f"{flag} {section}: there is no such section. Fix: use one of {', '.join(sorted(sections()))}")
        parser.exit()


def _keys_help(names: Iterable[str]) -> str:
    lines = ["keys with type and default:"]
    for each in (all_keys()[name] for name in names):
        lines.append(f"  {each.name}: {each.type} = {each.default!r}")
        text = f"{each.key.help} ({limits})" if (limits := each.key.all_limits()) else each.key.help
        lines += textwrap.wrap(text, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
