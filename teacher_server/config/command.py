"""Describe a command of `gkd`. `python -m MODULE` runs the same program."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Any


def command_parser(prog: str, description: str, epilog: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of this command line.

    Args:
        prog: `gkd COMMAND`.
        epilog: examples, printed as they are.
        options: further arguments of ArgumentParser.
    """
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=description, epilog=epilog, formatter_class=raw, **options)


def gkd_words() -> list[str]:
    """Return the words that run `gkd` of this environment: its name if a shell finds it, else its path."""
    script = os.path.join(os.path.dirname(sys.executable), "gkd")
    if not os.path.isfile(script):  # the package is not installed
        return [sys.executable, "-m", "gkd.cli"]
    return ["gkd" if shutil.which("gkd") == script else script]
