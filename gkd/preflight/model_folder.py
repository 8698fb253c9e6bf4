"""Check a model folder of a setting, and name the setting in what further checks of the folder raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gkd.errors import ConfigError, ModelError
from gkd.hf.index import check_trained_folder


@contextmanager
def checked_folder(key: str, path: str) -> Iterator[None]:
    """Check that the folder has one meaning, and rewrite the ModelErrors of the block.

    Raises:
        ConfigError: naming `key`. The folder does not exist: it may be a name on the Hugging Face hub; or a check
            failed.
    """
    if not Path(path).is_dir():
        fix = "give a local folder in Hugging Face format; `hf download NAME --local-dir FOLDER` makes one."
        raise ConfigError(key, path, "no such folder.", fix)
    try:
        check_trained_folder(Path(path))
        yield
    except ModelError as error:
        raise ConfigError(key, path, error.problem, error.fix or "name a complete model folder.") from error
