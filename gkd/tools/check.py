"""`gkd check --config X.yaml`: find every mistake in the settings, models, data and functions of a run, in one list.

Starts nothing and writes nothing. `gkd train` makes the same checks.
"""

from __future__ import annotations

import argparse
import json
import sys

from gkd.config.load import add_config, parse_overrides, read_config
from gkd.console.terminal import LINES, Terminal
from gkd.errors import GkdError
from gkd.preflight.run import problems
from gkd.spans import driver
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

_EXAMPLES = """examples:
  gkd check --config mine.yaml
  gkd check --config mine.yaml rollout.n=8 --json | jq '.[].key'

A mistake that may follow from another one, or needs what that one hides, is in the next list. A model of the hub is
downloaded, as `gkd train` would do.

exit code: 0 nothing is wrong, 2 mistakes
"""


@exit_codes(GkdError)
def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    with Terminal(LINES, ""), driver.doing("checks"):
        mistakes = problems(*read_config(args.config, args.overrides))
    if args.json:
        rows = [{name: getattr(mistake, name) for name in ("key", "value", "problem", "fix")} for mistake in mistakes]
        print(json.dumps(rows, indent=1, default=str))
    else:
        print("\n".join(map(str, mistakes)) or "nothing is wrong: `gkd train` with the same words starts this run")
    return 2 if mistakes else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    about = "Find every mistake of a run that can be found without a start: settings, models, data, functions, teacher."
    parser = command_parser("gkd check", about, _EXAMPLES)
    add_config(parser, "the settings of the run")
    parser.add_argument("--json", action="store_true", help="print a list of objects: key, value, problem, fix")
    return parse_overrides(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
