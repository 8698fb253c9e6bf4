"""Read the rows of prompt files, JSONL or parquet, a few at a time, and identify the content of such a file."""

from __future__ import annotations

import json
import os
import pickle
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gkd.config.schema_sections import DataConfig
from gkd.errors import ConfigError, DataError
from gkd.types import Prompt

_BATCH_ROWS = 32  # A parquet file is read in such batches; a row may have images of megabytes.

Row = dict[str, Any]


def read_rows(file: str, key: str, reads: Callable[[str], bool] | None = None) -> Iterator[tuple[str, Row]]:
    """Yield each row with its file and line, "FILE:LINE". Memory does not grow with the file.

    Args:
        key: config key of the file, for errors.
        reads: whether a column is used; others of a parquet file are not read, and have None as value. None means all.

    Raises:
        ConfigError: the file is missing, has another format, or has a line that is not a JSON object in UTF-8.
    """
    path = Path(file)
    if not path.is_file():
        problem = f"no such file ({path.absolute()})."
        raise ConfigError(key, file, problem, "use the path of a .jsonl or .parquet file.")
    if not os.access(path, os.R_OK):
        raise ConfigError(key, file, "this user may not read it.", "change its permissions.")
    if path.suffix == ".parquet":
        yield from _parquet(file, key, reads)
    elif path.suffix == ".jsonl":
        yield from _jsonl(file, key)
    else:
        raise ConfigError(key, file, f"unknown file type {path.suffix!r}.", "use .jsonl or .parquet.")


def _parquet(file: str, key: str, reads: Callable[[str], bool] | None) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet as pq

    line = 0
    try:
        # pyarrow keeps all that it reads ahead, that is the whole file, unless told otherwise.
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as source:
            names = source.schema_arrow.names
            used = [name for name in names if reads is None or reads(name)]
            if len(set(used)) < len(used):  # Of a row only the last value would be left.
                raise ValueError(f"two of its columns have the same name: {', '.join(used)}")
            unread = dict.fromkeys(name for name in names if name not in used)
            for batch in source.iter_batches(_BATCH_ROWS, columns=used):
                for row in batch.to_pylist() if used else [{}] * batch.num_rows:
                    line += 1
                    yield f"{file}:{line}", {**unread, **row}
    except Exception as error:  # pyarrow raises many types of errors
        raise ConfigError(key, file, f"cannot be read as a parquet file ({error}).", "create it again.") from error


def _jsonl(file: str, key: str) -> Iterator[tuple[str, Row]]:
    # Lines of bytes end with a line feed alone. A JSON string may contain other characters that end a line of text.
    with Path(file).open("rb") as source:
        for i, line in enumerate(source, 1):
            if i == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of some editors
            try:
                if text := line.decode().strip():
                    yield f"{file}:{i}", _json_object(text, f"{file}:{i}", key)
            except UnicodeDecodeError as error:
                raise ConfigError(key, file, f"line {i} is not UTF-8 ({error}).", "create it again.") from error


def _json_object(line: str, where: str, key: str) -> Row:
    if where.endswith(":1") and line.startswith("["):
        problem = "the file is a JSON array, and one JSON object a line is needed."
        raise ConfigError(key, where, problem, "write each element of the array as one line.")
    try:
        row = json.loads(line, object_pairs_hook=_distinct)
    except ValueError as error:  # A number with thousands of digits raises it, too.
        raise ConfigError(key, where, f"invalid JSON ({error}).", "correct or remove the line.") from error
    if not isinstance(row, dict):
        problem = f"the line is a JSON {type(row).__name__}, expected an object."
        raise ConfigError(key, where, problem, "correct or remove the line.")
    return row


def _distinct(pairs: list[tuple[str, Any]]) -> Row:
    """Return an object. Raises ValueError: a key occurs twice, and json would keep the last value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        key = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {key!r} occurs twice")
    return row


def encode_row(where: str, row: Mapping[str, Any]) -> bytes:
    """Encode a row and its file and line; parquet has values that JSON does not have."""
    return pickle.dumps((where, dict(row)), protocol=5)


def decode_row(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return file and line of a row, and its columns."""
    where, row = pickle.loads(data)
    return where, row


@dataclass(frozen=True, slots=True)
class RowTable:
    """Encoded rows by prompt id, for the functions that judge responses. They travel to each host once, at the start.

    They are arrays, so that Ray maps them into each process without a copy.
    """

    prompt_ids: np.ndarray  # [n] int64, ascending
    ends: np.ndarray  # [n] int64, of each row in `data`
    data: np.ndarray  # [bytes] uint8

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> RowTable:
        """Return the rows of prompts that were loaded with them, in the order of their ids."""
        rows = [prompt.row or b"" for prompt in prompts]
        ids = np.array([prompt.prompt_id for prompt in prompts], np.int64)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return cls(ids, ends, np.frombuffer(b"".join(rows), np.uint8))

    def row(self, prompt_id: int) -> bytes:
        """Return the encoded row of a prompt. Raises DataError: there is none."""
        row = bisect_left(self.prompt_ids, prompt_id)  # np.searchsorted releases the GIL, which other threads then take
        if row == len(self.prompt_ids) or self.prompt_ids[row] != prompt_id:
            raise DataError(
                f"prompt {prompt_id} has no row in the data of this run, and a reward function needs it. "
                "Fix: replay batches with the data.train_files of the run that recorded them"
            )
        start = int(self.ends[row - 1]) if row else 0
        return self.data[start : int(self.ends[row])].tobytes()


_CHUNK_BYTES = 4 << 20


def describe_files(data: DataConfig) -> list[dict[str, Any]]:
    """Return config key, path and `fingerprint` of each prompt file. Raises as `fingerprint`."""
    files = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    return [{"key": key, "file": file, **fingerprint(file, key)} for key in files for file in files[key]]


def fingerprint(file: str, key: str) -> dict[str, object]:
    """Return `bytes`, `xxh3_128` and `rows` of a JSONL or parquet file that `load_prompts` has accepted.

    Reads the file once, right after `load_prompts` has: usually from the cache of the operating system. Rows that
    `data.truncation: drop` leaves out are counted. Raises ConfigError: the file cannot be read any more.
    """
    path = Path(file)
    digest = xxhash.xxh3_128()
    n_bytes = 0
    n_rows = 0
    rest = b""
    try:
        with path.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                n_bytes += len(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                n_rows += sum(1 for line in lines if line.strip())
        n_rows += bool(rest.strip())
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            n_rows = pq.ParquetFile(path).metadata.num_rows
    except OSError as error:
        raise ConfigError(key, file, f"cannot be read any more ({error}).", "restore the file.") from error
    return {"bytes": n_bytes, "xxh3_128": digest.hexdigest(), "rows": n_rows}


MOST_REFUSED = 10  # rows that are read to list more than one mistake


@contextmanager
def collected(refused: list[tuple[str, ConfigError]], where: str) -> Iterator[None]:
    """Add the ConfigError of the block to `refused`."""
    try:
        yield
    except ConfigError as error:
        refused.append((where, error))


def refusal(refused: Sequence[tuple[str, ConfigError]]) -> ConfigError:
    """Return the error for refused rows: of those with the same fix the first one, and the lines of the others."""
    by_fix: dict[tuple[str, str], list[tuple[str, ConfigError]]] = {}
    for where, error in refused:
        by_fix.setdefault((error.key, error.fix), []).append((where, error))
    end = ", and perhaps later rows" if len(refused) == MOST_REFUSED else ""
    errors = []
    for (_, first), *others in by_fix.values():
        also = f" Also in {', '.join(where for where, _ in others)}{end}." if others else ""
        errors.append(ConfigError(first.key, first.value, first.problem, first.fix + also, first.more))
    return ConfigError.together(errors)
