"""Describe a command as the user typed it: `gkd memory`, or `python -m gkd.tools.memory`."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def command_parser(prog: str, description: str, epilog: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of this command line.

    Args:
        prog: `python -m MODULE [COMMAND]`. Under `gkd.cli` the module is replaced, here and in the epilog.
        epilog: examples, printed as they are.
        options: further arguments of ArgumentParser.
    """

    module = " ".join(prog.split()[:3])

    def typed(text: str) -> str:
        return text.replace(module, sys.argv[0]) if sys.argv[0].startswith("gkd ") else text

    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=typed(prog), description=description, epilog=typed(epilog), formatter_class=raw, **options
    )
