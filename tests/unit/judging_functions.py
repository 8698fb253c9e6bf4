"""Reward functions that tests name by their path; the worker processes import this file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any

from gkd.data.answers import is_correct

NOT_A_FUNCTION = 3


class UnshownError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def write_everywhere() -> None:
    """Write to all files that the process has opened, and so to the connection with its parent."""
    for fd in range(3, 20):
        with suppress(OSError):
            os.write(fd, b'{"key": "no number"}\n')


def count_digits(prompt: str, response: str, row: dict[str, Any]) -> float:
    row["level"] = 0  # a copy of its own
    return float(sum(character.isdigit() for character in response))


def level(prompt: str, response: str, row: dict[str, Any]) -> float:
    return row["level"] + 0.5 * prompt.startswith("1+")


def answer(prompt: str, response: str, row: dict[str, Any]) -> bool:
    return is_correct(response, row["answer"], ";")


def checksum(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return a number that differs between responses of the same length."""
    return sum(map(ord, response)) % 7 / 7


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Have verl's form."""
    return float(solution_str == ground_truth)


def takes_out(prompt: str, response: str, row: dict[str, Any], messages: list[dict[str, str]]) -> float:
    """Change what the columns and the trajectory hold; return what is left."""
    messages.pop()
    row["tests"].pop()
    return float(len(row["tests"]) + 10 * len(messages))


def misbehave(prompt: str, response: str, row: dict[str, Any]) -> Any:
    """Do what the response demands."""
    if response == "raise":
        raise ValueError("no such unit")
    if response == "raise_unshown":
        raise UnshownError
    if response == "exit":
        raise SystemExit(0)
    if response == "corrupt":
        write_everywhere()
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "nap":
        time.sleep(0.4)
    if response == "sleep":
        subprocess.Popen(["sleep", "977"])  # ends with the worker
        threading.Event().wait()
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1"}.get(response, 1.0)


def n_messages(prompt: str, response: str, row: dict[str, Any], messages: list[dict[str, str]]) -> float:
    """Return the length of a trajectory."""
    turn = re.sub(r"<\|\w+\|>", "", messages[-1]["content"])  # without special tokens
    assert messages[-1]["role"] == "assistant" and response == turn, (response, messages)
    return float(len(messages))
