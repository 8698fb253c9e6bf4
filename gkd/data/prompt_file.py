"""Identify the content of a prompt file: size, digest and number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from gkd.config.schema_sections import DataConfig
from gkd.errors import ConfigError

_CHUNK_BYTES = 4 << 20


def describe_files(data: DataConfig) -> list[dict[str, Any]]:
    """Return config key, path and `fingerprint` of each prompt file. Raises as `fingerprint`."""
    files = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    return [{"key": key, "file": file, **fingerprint(file, key)} for key in files for file in files[key]]


def fingerprint(file: str, key: str) -> dict[str, object]:
    """Return `bytes`, `xxh3_128` and `rows` of a JSONL or parquet file that `load_prompts` has accepted.

    Reads the file once, right after `load_prompts` has: usually from the cache of the operating system. Rows that
    `data.truncation: drop` leaves out are counted.

    Args:
        key: config key of the file, for the error.

    Raises:
        ConfigError: the file cannot be read any more.
    """
    path, digest, n_bytes, n_rows, rest = Path(file), xxhash.xxh3_128(), 0, 0, b""
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
