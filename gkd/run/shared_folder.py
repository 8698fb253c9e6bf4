"""Is a folder the same one for the driver and for processes elsewhere? Files go both ways. Floor 1.

    driver: offer -> each rank: answer -> driver: collect, clear

Without it a run whose folder is not shared ends at its first save, after hours, or in shards on the disks of nodes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from gkd.errors import ConfigError
from gkd.run.disk import TMP, remove

_PROBE = f"{TMP}probe"
_FIX = "name a folder of a file system that all nodes share, at the same path, and that they may write."


def offer(root: Path) -> str:
    """Leave a file in the folder for the others to find; the word that it is known by. Raises ConfigError."""
    word = secrets.token_hex(8)
    try:
        _probe(root, word).write_text(word)
    except OSError as error:
        raise ConfigError("trainer.run_dir", str(root), f"it cannot be written ({error}).", _FIX) from error
    return word


def answer(root: Path, word: str, who: str, where: str) -> None:
    """Read the driver's file and leave one beside it.

    Args:
        who: of all that answer; part of a file name.
        where: the node, for the error.

    Raises:
        ConfigError: the folder is another one here, or cannot be written.
    """
    try:
        seen = _probe(root, word).read_text()
    except OSError as error:
        problem = f"{who} on node {where} does not see what the driver wrote there ({error})."
        raise ConfigError("trainer.run_dir", str(root), problem, _FIX) from error
    if seen != word:
        problem = f"{who} on node {where} reads something else there than the driver wrote."
        raise ConfigError("trainer.run_dir", str(root), problem, _FIX)
    try:
        _probe(root, word, who).write_text(word)
    except OSError as error:
        problem = f"{who} on node {where} cannot write there ({error})."
        raise ConfigError("trainer.run_dir", str(root), problem, _FIX) from error


def collect(root: Path, word: str, nodes: Mapping[str, str]) -> None:
    """Does the driver see every answer?

    Args:
        nodes: node by the name of who answered.

    Raises:
        ConfigError: one is missing, so what ranks write there would be missing from checkpoints.
    """
    missing = [who for who in nodes if not _probe(root, word, who).exists()]
    if missing:
        who = missing[0]
        problem = f"the driver does not see what {who} on node {nodes[who]} wrote there."
        raise ConfigError("trainer.run_dir", str(root), problem, _FIX)


def clear(root: Path) -> None:
    """Remove the files of `offer` and `answer`, those of a killed run included; one run at a time holds the folder."""
    for file in root.glob(f"{_PROBE}*"):
        remove(file)


def _probe(root: Path, word: str, who: str = "") -> Path:
    return root / "_".join([_PROBE, word, *who.split()])
