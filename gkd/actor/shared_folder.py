"""Check that the driver and the ranks on other nodes see the same folder, by files in both directions.

    driver: offer -> each rank: answer -> driver: collect, clear

Without this check a run whose folder is not shared would fail at its first save, or scatter its shards over nodes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from gkd.errors import ConfigError
from gkd.run.disk import TMP, remove

_PROBE = f"{TMP}probe"
_FIX = "name a folder on a file system that all nodes share at the same path, and can write."


def offer(root: Path) -> str:
    """Write the driver's probe file and return its random content. Raises ConfigError: it cannot be written."""
    word = secrets.token_hex(8)
    try:
        _probe(root, word).write_text(word)
    except OSError as error:
        raise ConfigError("trainer.run_dir", str(root), f"it cannot be written ({error}).", _FIX) from error
    return word


def answer(root: Path, word: str, rank: str, where: str) -> None:
    """Read the driver's probe file and write one for it.

    Args:
        rank: name of this rank, part of the file name.
        where: the node, for the error.

    Raises:
        ConfigError: this node sees another folder, or cannot write to it.
    """
    try:
        seen = _probe(root, word).read_text()
    except OSError as error:
        problem = f"{rank} on node {where} does not see the driver's file ({error})."
        raise ConfigError("trainer.run_dir", str(root), problem, _FIX) from error
    if seen != word:
        problem = f"{rank} on node {where} reads other content than the driver wrote."
        raise ConfigError("trainer.run_dir", str(root), problem, _FIX)
    try:
        _probe(root, word, rank).write_text(word)
    except OSError as error:
        problem = f"{rank} on node {where} cannot write to it ({error})."
        raise ConfigError("trainer.run_dir", str(root), problem, _FIX) from error


def collect(root: Path, word: str, nodes: Mapping[str, str]) -> None:
    """Check that the driver sees the file of every rank.

    Args:
        nodes: name of the rank -> its node.

    Raises:
        ConfigError: one is missing, so the rank's files would be missing from checkpoints.
    """
    missing = [rank for rank in nodes if not _probe(root, word, rank).exists()]
    if missing:
        rank = missing[0]
        problem = f"the driver does not see the file of {rank} on node {nodes[rank]}."
        raise ConfigError("trainer.run_dir", str(root), problem, _FIX)


def clear(root: Path) -> None:
    """Remove the probe files, including files of a killed run; only one run at a time holds the folder."""
    for file in root.glob(f"{_PROBE}*"):
        remove(file)


def _probe(root: Path, word: str, rank: str = "") -> Path:
    return root / "_".join([_PROBE, word, *rank.split()])
