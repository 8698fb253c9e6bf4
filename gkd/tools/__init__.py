"""Command-line tools around a run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from gkd.errors import ConfigError, GkdError

P = ParamSpec("P")


def exit_codes(*refused: type[Exception]) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Return a decorator of `main`: an error is printed, and the exit code is 2 if it is one of `refused`, else 1."""

    def decorated(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except (GkdError, OSError) as error:
                kind = "config error" if isinstance(error, ConfigError) else type(error).__name__
                print(f"{kind}: {error}", file=sys.stderr)
                return 2 if isinstance(error, refused) else 1

        return run

    return decorated
