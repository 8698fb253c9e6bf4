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
                is_config = isinstance(error, ConfigError)
                kind = "config error" if is_config else type(error).__name__
                for line in str(error).splitlines() if is_config else [error]:
                    print(f"{kind}: {line}", file=sys.stderr)
                return 2 if isinstance(error, refused) else 1
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                return 130

        return run

    return decorated
