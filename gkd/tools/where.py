"""`gkd where RUN [RUN]`: show which tokens the KL of a run is at, from its token_losses/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gkd.errors import ConfigError
from gkd.tools import exit_codes
from gkd.tools.report.groups import evaluations, rows, sentence
from gkd.tools.report.read import read_runs
from teacher_server.config.command import command_parser

_EXAMPLES = """examples:
  gkd where runs/mine
  gkd where runs/forward runs/reverse      # side by side

KL, tokens: shares of the last evaluation's kept responses. change: of the share of the KL, since the first evaluation.
largest: tokens with most KL in the group. The student is "sure of another" token if it has more than 0.9.

exit code: 0 the table was printed; 1 a file of a run is damaged; 2 wrong arguments, or the run has no such files
"""


@exit_codes(ConfigError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    if len(args.runs) > 2:
        raise ConfigError("RUN", len(args.runs), "more than two runs.", "name one run, or two.")
    runs = read_runs(args.runs)
    history = [evaluations(run) for run in runs]
    for number, (run, one) in enumerate(zip(runs, history, strict=True), start=1):
        print(f"{'' if len(runs) == 1 else f'{number}, {run.name}: '}{sentence(one)}")
        for part in one[-1].missing:
            print(f"  {part}")
    table = rows(history)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        texts = zip(table[0], row, widths, strict=True)
        cells = (text.ljust(n) if name in ("", "group", "largest") else text.rjust(n) for name, text, n in texts)
        print("  ".join(cells).rstrip())
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "gkd where", "Show where the KL of a run is: which tokens, positions and choices.", _EXAMPLES
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder; the run may be in progress")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
