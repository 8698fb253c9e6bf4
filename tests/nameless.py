"""A user id without an entry in /etc/passwd, as containers of clusters have it. Only root can take one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

UID = 1_234_567
_USER = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups")
# Read any file, for a Python in a folder of root. It allows no write.
_READ = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
_CONTAINER = ("env", "-u", "USER", "-u", "LOGNAME", "HOME=/nonexistent")


def nameless(*command: str) -> list[str]:
    """Return the command for this user id, with the HOME that it has in a container; skip the test if that fails."""
    if os.getuid() or shutil.which("setpriv") is None:
        pytest.skip("only root can take another user id, with setpriv")
    for capabilities in ((), _READ):
        words = [*_USER, *capabilities, *_CONTAINER]
        done = subprocess.run([*words, sys.executable, "-c", "import numpy"], capture_output=True, check=False)
        if done.returncode == 0:
            return [*words, *command]
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
