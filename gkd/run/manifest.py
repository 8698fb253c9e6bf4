"""What a checkpoint consists of: every file's size and digest, written down last and checked before any use. Floor 1.

manifest.json: {"format": 1, "step": N, "files": {"actor/x": [bytes, xxh3_128 as hex], ...}, "xxh3_128": of the rest}

A folder whose manifest is whole and agrees with its files is exactly what was saved. Further files do no harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from gkd.errors import CheckpointError, DamagedCheckpoint
from gkd.handles import FileDigest

NAME = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 4 << 20  # of a file in memory at a time, in each thread
_N_THREADS = 4


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of one checkpoint, by name relative to its folder."""

    step: int
    files: Mapping[str, FileDigest]

    @property
    def n_bytes(self) -> int:
        """Of all files together, without the manifest itself."""
        return sum(digest.n_bytes for digest in self.files.values())

    def to_bytes(self) -> bytes:
        """The manifest as it is stored."""
        files = {name: [digest.n_bytes, digest.xxh3_128] for name, digest in sorted(self.files.items())}
        content = {"format": _FORMAT, "step": self.step, "files": files}
        return (json.dumps(content | {"xxh3_128": _seal(content)}, indent=1) + "\n").encode()


def digest_bytes(data: bytes) -> FileDigest:
    """Size and digest of what is already in memory."""
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data))


def digest_file(path: Path) -> FileDigest:
    """Size and digest of a file, read in bounded chunks. Raises OSError."""
    hasher, buffer, n_bytes = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES)), 0
    with path.open("rb", buffering=0) as file:
        while n_read := file.readinto(buffer):
            hasher.update(buffer[:n_read])
            n_bytes += n_read
    return FileDigest(n_bytes, hasher.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The list of a checkpoint's files.

    Raises:
        DamagedCheckpoint: there is none, or it is not as it was written.
        CheckpointError: it cannot be read now, or is of a version of this program that this one does not know.
    """
    file = folder / NAME
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{folder}: {NAME} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{folder}: {NAME} cannot be read ({error})") from error
    except ValueError as error:  # JSON's and UTF-8's errors alike
        raise DamagedCheckpoint(f"{folder}: {NAME} is damaged: it is not JSON ({error})") from error
    try:
        _check_seal(content)
        if content["format"] != _FORMAT:
            problem = f"has the format {content['format']!r}, and this version reads {_FORMAT}"
            raise CheckpointError(f"{folder}: {NAME} {problem}; resume with the version that wrote it")
        return _parsed(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder}: {NAME} is damaged: {error}") from error


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Are all files there, as long as they should be?

    Raises:
        DamagedCheckpoint: names the first that is not.
        CheckpointError: names the first that cannot be looked at now.
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
            raise DamagedCheckpoint(f"{folder}: {name} has {n_bytes} bytes where {wanted.n_bytes} were written")


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare. Blocks for as long as the disk takes.

    Raises:
        DamagedCheckpoint: names the first file that is missing, of another size, or with other content.
        CheckpointError: names the first file that cannot be read now, which says nothing about what it holds; or see
            `read_manifest`.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)

    def problem_of(name: str) -> CheckpointError | None:
        try:
            same = digest_file(folder / name) == manifest.files[name]
        except OSError as error:
            return CheckpointError(f"{folder}: {name} cannot be read ({error})")
        text = f"{folder}: {name} has other content than was written (its digest differs)"
        return None if same else DamagedCheckpoint(text)

    with ThreadPoolExecutor(_N_THREADS, thread_name_prefix="verify") as threads:
        for problem in threads.map(problem_of, manifest.files):
            if problem is not None:
                threads.shutdown(wait=False, cancel_futures=True)
                raise problem
    return manifest


def _seal(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _check_seal(content: Any) -> None:
    """Takes the seal out of it. The seal of every format is made like this, so one can be told from damage."""
    seal = content.pop("xxh3_128")
    if seal != _seal(content):
        raise ValueError("its own digest differs")


def _parsed(content: Any) -> Manifest:
    files = {}
    for name, (n_bytes, digest) in content["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it lists {name!r}, which is outside of its folder")
        files[name] = FileDigest(n_bytes, digest)
    return Manifest(content["step"], files)
