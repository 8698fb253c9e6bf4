"""Worker process that calls the functions: `python -m gkd.scoring.reward.worker FD FD`, started by `RewardWorkers`.

The first FD is a socket to the parent, the second one the memory of `Progress`. Messages are pickled: the parent sends
one `Start`, then lists of `Request`s. The worker replies to Start with the text of an error, or an empty one, and to a
list with what `judged` returns. It ends with its parent, also if that is killed, and ignores Ctrl-C, after which the
parent ends it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from gkd.config.schema import Config
from gkd.data.row_files import decode_row
from gkd.errors import GkdError
from gkd.scoring.reward.functions import Case, Judge, Undecided, judge_of
from gkd.user_code import Progress, end_with_parent, finite_number


@dataclass(frozen=True, slots=True)
class Start:
    """Hold what a worker needs.

    Args:
        paths: of the functions.
        search_path: folders in which the driver finds modules.
    """

    config: Config
    paths: tuple[str, ...]
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Hold a response to judge with some of the functions; see `Case`."""

    prompt: str
    response: str
    n_tokens: int
    truncated: bool
    row: bytes  # see `gkd.data.row_files`
    functions: tuple[int, ...]  # positions in `Start.paths`
    messages: bytes | None = None  # see `gkd.types.Rollout`
    reward: float | None = None


def main(fd: int, progress_fd: int) -> None:
    """Serve requests until the parent closes the socket."""
    end_with_parent(fd)
    parent, progress = Connection(fd), Progress(progress_fd)
    start: Start = parent.recv()
    sys.path[:0] = [folder for folder in start.search_path if folder not in sys.path]
    try:
        judges = [judge_of(path, start.config) for path in start.paths]
    except GkdError as error:
        parent.send(str(error))
        return
    parent.send("")
    while True:
        parent.send(judged(parent.recv(), judges, progress.begin))


def judged(
    requests: Sequence[Request], judges: Sequence[Judge], begin: Callable[[int], None]
) -> tuple[list[float], str]:
    """Return a number for each request and each of its functions, and what is wrong with the next; "": nothing.

    Numbers are finite; NaN stands for Undecided.

    Args:
        begin: called before each call, with its place.
    """
    numbers: list[float] = []
    for request in requests:
        _, row = decode_row(request.row)
        messages = None if request.messages is None else msgspec.json.decode(request.messages)
        case = Case(
            request.prompt, request.response, row, request.n_tokens, request.truncated, messages, request.reward
        )
        for index in request.functions:
            begin(len(numbers))
            value = _call(judges[index], case)
            if isinstance(value, str):
                return numbers, value
            numbers.append(value)
    return numbers, ""


def _call(judge: Judge, case: Case) -> float | str:
    try:
        value = judge(case)
    except Undecided:
        return math.nan
    except BaseException as error:  # SystemExit is caught, too: it is the function's own
        return f"raised {type(error).__name__}: {error}"
    number = finite_number(value)
    return f"returned {number}" if isinstance(number, str) else number


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
