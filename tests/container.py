"""Run a process as a container does: a user id without an entry in /etc/passwd, few rights, other mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

UID = 1_234_567
_USER = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups")
# Read any file, for a Python in a folder of root. It allows no write.
_READ = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
_CONTAINER = ("env", "-u", "USER", "-u", "LOGNAME", "HOME=/nonexistent")
_MOUNTS = """
mount -t tmpfs -o size=64m none /dev/shm && mount --bind "$0" /etc/hosts && mount --bind /dev/null /etc/resolv.conf &&
! getent ahosts "$(hostname)" >/dev/null && exec "$@"
"""


def nameless(*command: str) -> list[str]:
    """Return the command for this user id, with the HOME that it has in a container; skip the test if that fails."""
    return [*_in_front(), *command]


@cache
def _in_front() -> list[str]:
    if os.getuid() or shutil.which("setpriv") is None:
        pytest.skip("only root can take another user id, with setpriv")
    for capabilities in ((), _READ):
        words = [*_USER, *capabilities, *_CONTAINER]
        done = subprocess.run([*words, sys.executable, "-c", "import numpy"], capture_output=True, check=False)
        if done.returncode == 0:
            return words
    pytest.skip(f"another user id cannot run {sys.executable}: {done.stderr.decode()}")


@contextmanager
def without_rights() -> Iterator[None]:
    """Give this process the rights of that user id in the block, if it is root, which may read every file."""
    user = os.geteuid()
    os.seteuid(user or UID)
    try:
        yield
    finally:
        os.seteuid(user)


def small_and_unresolved(hosts: Path, *command: str) -> list[str]:
    """Return the command with 64 MiB of shared memory and a host name without an address; skip the test if that fails.

    Args:
        hosts: file to write, /etc/hosts of the command.
    """
    hosts.write_text("127.0.0.1 localhost\n")
    words = ["unshare", "-rm", "sh", "-c", _MOUNTS, str(hosts)]
    try:
        done = subprocess.run([*words, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode:
        pytest.skip(f"no mount namespace for this user: {done.stderr.decode()}")
    return [*words, *command]
