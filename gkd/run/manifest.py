"""The manifest of a checkpoint: size and digest of every file, written last and checked before use.

manifest.json: {"format": 1, "step": N, "files": {"actor/x": [bytes, xxh3_128 as hex], ...}, "xxh3_128": of the rest}

A folder whose manifest is valid and matches its files is exactly what was saved. Additional files are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from gkd.errors import CheckpointError, DamagedCheckpoint
from gkd.types import FileDigest

NAME = "manifest.json"
_FORMAT = 1
_N_THREADS = 4


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one checkpoint, by name relative to its folder."""

    step: int
    files: Mapping[str, FileDigest]

    @property
    def n_bytes(self) -> int:
        """Size of all files together, without the manifest."""
        return sum(digest.n_bytes for digest in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        files = {name: [digest.n_bytes, digest.xxh3_128] for name, digest in sorted(self.files.items())}
        content = {"format": _FORMAT, "step": self.step, "files": files}
        return (json.dumps(content | {"xxh3_128": _seal(content)}, indent=1) + "\n").encode()


def digest_bytes(data: bytes) -> FileDigest:
    """Return size and digest of bytes in memory."""
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data))


def digest_file(path: Path) -> FileDigest:
    """Return size and digest of a file, read in bounded chunks. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        hasher = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileDigest(file.tell(), hasher.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, or differs from what was written.
        CheckpointError: it cannot be read now, or has a format of another version.
    """
    file = folder / NAME
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{folder}: {NAME} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{folder}: {NAME} cannot be read ({error})") from error
    except ValueError as error:  # JSON's and UTF-8's errors alike
        raise DamagedCheckpoint(f"{folder}: {NAME} is damaged: not valid JSON ({error})") from error
    try:
        # The seal is the same in every format, so another format is not mistaken for damage.
        if content.pop("xxh3_128") != _seal(content):
            raise ValueError("the digest of the manifest differs")
        if content["format"] != _FORMAT:
            problem = f"has format {content['format']!r}, but this version reads {_FORMAT}"
            raise CheckpointError(f"{folder}: {NAME} {problem}; resume with the version that wrote it")
        return _parsed(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder}: {NAME} is damaged: {error}") from error


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that all files exist with the right size.

    Raises:
        DamagedCheckpoint: one does not; names the first.
        CheckpointError: one cannot be read now; names the first.
    """
    for name, wanted in manifest.files.items():
        path = folder / name
        try:
            if not path.is_file():
                raise DamagedCheckpoint(f"{folder}: {name} is missing")
            n_bytes = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read ({error})") from error
        if n_bytes != wanted.n_bytes:
            raise DamagedCheckpoint(f"{folder}: {name} has {n_bytes} bytes, but {wanted.n_bytes} were written")


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest; blocks on the disk.

    Raises:
        DamagedCheckpoint: a file is missing, or has another size or content; names the first.
        CheckpointError: a file cannot be read now, so it may still be intact (names the first); or see `read_manifest`.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)

    def check(name: str) -> None:
        try:
            same = digest_file(folder / name) == manifest.files[name]
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read ({error})") from error
        if not same:
            raise DamagedCheckpoint(f"{folder}: {name} differs from what was written (its digest differs)")

    with ThreadPoolExecutor(_N_THREADS, thread_name_prefix="verify") as threads:
        list(threads.map(check, manifest.files))  # the first error cancels what has not begun
    return manifest


def _seal(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _parsed(content: Any) -> Manifest:
    files = {}
    for name, (n_bytes, digest) in content["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it lists {name!r}, which is outside the folder")
        files[name] = FileDigest(n_bytes, digest)
    return Manifest(content["step"], files)
