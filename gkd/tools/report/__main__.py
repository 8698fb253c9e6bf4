"""`gkd report RUN [RUN ...]`: write one HTML page about one run, or compare several."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gkd.errors import ConfigError
from gkd.run.disk import naming, replace_file
from gkd.tools import exit_codes
from gkd.tools.report.page import page
from gkd.tools.report.read import folder_state, read_runs
from teacher_server.config.command import command_parser

_EXAMPLES = """examples:
  gkd report runs/mine                        # runs/mine/report.html
  gkd report runs/forward runs/reverse        # compare: ./report.html
  gkd report runs/mine --watch 30             # rewrite it while the run goes on, until Ctrl-C

exit code: 0 written; 1 a file of a run is damaged, or the page cannot be written; 2 wrong arguments, or no such run
"""


@exit_codes(ConfigError)
def main(argv: list[str] | None = None) -> int:
    """Return the exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    out = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html"))
    if args.watch is not None and args.watch <= 0:
        raise ConfigError("--watch", args.watch, "is not above 0.", "give seconds, for example --watch 10.")
    if args.watch is None:
        _write(args.runs, out)
    else:
        _watch(args.runs, out, args.watch)
    return 0


def _write(folders: Sequence[Path], out: Path, reload_s: float = 0) -> None:
    began = time.perf_counter()
    content = page(read_runs(folders), reload_s).encode()
    with naming(out):
        replace_file(out, content)
    print(f"{out}: {len(content) / 1e6:.1f} MB in {time.perf_counter() - began:.1f} s", flush=True)


def _watch(folders: Sequence[Path], out: Path, seconds: float) -> None:
    """Write the page, and again whenever a run has changed, until Ctrl-C; the last page does not reload itself."""
    print(f"watching {len(folders)} run(s) every {seconds:g} s, until Ctrl-C", flush=True)
    try:
        seen = None
        while True:
            state = [folder_state(folder) for folder in folders]
            if state != seen:
                _write(folders, out, seconds)
                seen = state
            time.sleep(seconds)
    except KeyboardInterrupt:
        _write(folders, out)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "gkd report",
        "Write one HTML page about a run, or about several to compare them. It needs no network.",
        _EXAMPLES,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (trainer.run_dir)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: report.html in the run folder; of several runs here"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=10.0,
        metavar="SECONDS",
        help="write the page again when a run has changed, and let it reload itself; default: every 10 s",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
