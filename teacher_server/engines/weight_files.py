"""Find the weight files of a model folder, and read their headers. Uses only the standard library.

The server and the trainer call it, before either of them starts a process.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teacher_server.errors import ServerError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_SAMPLE_BYTES = 4 << 10  # hashed of each tensor
_EDGE_BYTES = 8 << 20  # hashed at each end of the embedding and of the LM head
_SHOWN = 5  # names in one error message


class FolderError(ServerError):
    """A model folder cannot be used.

    Args:
        problem: one sentence.
        fix: what to do, one sentence.
    """

    def __init__(self, folder: Path, problem: str, fix: str) -> None:
        self.folder = folder
        self.problem = problem
        self.fix = fix
        super().__init__(folder, problem, fix)  # all of them, for pickle

    def __str__(self) -> str:
        return f"model folder {self.folder}: {self.problem} Fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a safetensors file."""

    file: Path
    dtype: str  # name in the header: F32, BF16, ...
    shape: tuple[int, ...]
    start: int  # first byte in the file
    stop: int


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files, which are the same for transformers and vLLM. Raises FolderError if there are none.

    transformers loads model.safetensors, or else the files in the index. vLLM loads the files in the index, or else all
    safetensors files. A folder is accepted only if these are the same.
    """
    has_single = (folder / SINGLE).is_file()
    if not (folder / INDEX).is_file():
        present = {file.name for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_")}
        if present == {SINGLE}:
            return [folder / SINGLE]
        if unexpected := sorted(present - {SINGLE}):
            problem = f"which files are the model is unknown: {some_names(unexpected)}; {INDEX} is missing."
            fix = f"delete them, because {SINGLE} is there, too." if has_single else f"copy {INDEX}, too."
            raise FolderError(folder, problem, fix)
        fix = "copy the whole folder; convert weights in another format to safetensors."
        raise FolderError(folder, f"{SINGLE} is missing, and so is {INDEX}.", fix)
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FolderError(folder, f"{INDEX} has no weight_map.", "copy it again.")
    names = sorted(set(map(str, weight_map.values())))
    if has_single and names != [SINGLE]:
        problem = f"there are both {SINGLE} and {INDEX}, which lists other files: {some_names(names)}."
        raise FolderError(folder, problem, f"delete {INDEX}, or {SINGLE} if the listed files are the model.")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise FolderError(folder, f"missing weights: {some_names(absent)}, see {INDEX}.", "copy the whole folder.")
    return [folder / name for name in names]


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name. Raises FolderError if it does not end after the last one."""
    size = file.stat().st_size
    try:
        header, data_at = read_header(file)
        entries: dict[str, TensorEntry] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = (data_at + int(offset) for offset in entry["data_offsets"])
                entries[name] = TensorEntry(file, entry["dtype"], tuple(map(int, entry["shape"])), start, stop)
        end = max(entry.stop for entry in entries.values())
        if end != size:
            raise ValueError(f"{size} bytes, but {end} according to its header")
    except PermissionError:
        raise  # The file is intact; the error has its path.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FolderError(file.parent, f"{file.name} is damaged ({error}).", "copy or download it again.") from error
    return entries


def fingerprint_of(folder: Path, weights: list[Path]) -> str:
    """Return 32 hex digits of a hash of config.json and of each weight file's name, header and samples of its tensors.

    Hashing all bytes of 60 GB takes longer than loading them. Every tensor is sampled, because a merged
    adapter leaves many tensors unchanged: in the middle, and those with a row for each token also at both ends, where
    added tokens are. Raises FolderError: config.json or a weight file is damaged.
    """
    config = read_json(folder / "config.json")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    n_rows = (config.get("text_config") or config).get("vocab_size")
    for file in weights:
        header = json.dumps(read_header(file)[0], sort_keys=True)
        digest.update(f"{file.name}:{file.stat().st_size}:{header}".encode())
        with file.open("rb") as stream:
            for _, entry in sorted(read_entries(file).items()):
                middle = (entry.start + entry.stop - _SAMPLE_BYTES) // 2
                n_bytes = entry.stop - entry.start
                places = [(middle, _SAMPLE_BYTES)]
                if entry.shape[:1] == (n_rows,):
                    places += [(entry.start, _EDGE_BYTES), (entry.stop - _EDGE_BYTES, _EDGE_BYTES)]
                for start, size in places:
                    stream.seek(max(entry.start, start))
                    digest.update(stream.read(min(size, n_bytes)))
    return digest.hexdigest()[:32]


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the JSON header of a safetensors file, and the position of the first byte of data.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not begin with such a header.
    """
    with file.open("rb") as stream:
        n_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= n_bytes <= min(_MAX_HEADER_BYTES, file.stat().st_size - 8):
            raise ValueError("the header is truncated")
        header: dict[str, Any] = json.loads(stream.read(n_bytes))
        return header, stream.tell()


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file. Raises FolderError: it is missing, or not a JSON object."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise FolderError(file.parent, f"{file.name} is missing.", "copy the whole folder.") from error
    except PermissionError:
        raise  # The file is intact; the error has its path.
    except (OSError, ValueError) as error:
        raise FolderError(file.parent, f"{file.name} is not readable JSON ({error}).", "copy it again.") from error
    if not isinstance(content, dict):
        raise FolderError(file.parent, f"{file.name} is not a JSON object.", "copy it again.")
    return content


def some_names(names: list[str]) -> str:
    """Return the first names and the number of the others, for an error message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
