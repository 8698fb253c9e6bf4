"""Replace names of the Hugging Face hub in the settings: by commits for the run folder, by local paths for loading.

The driver chooses the commits. Every process that loads a model or a tokenizer then replaces the names on its own host:
hosts need not share a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import teacher_server.engines.hub as hub
from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.log import get_logger
from teacher_server.engines.weight_files import FolderError

log = get_logger("hub")

MODELS = ("model.path", "teacher.path", "reference.path")
FILES = ("data.train_files", "data.val_files")


def pinned_names(config: Config, keys: Iterable[str] = (*MODELS, *FILES)) -> dict[str, Any]:
    """Return the keys with names of the hub, and their values with commits in place of branches and tags; log both.

    Raises ConfigError: see `HubName.pinned`.
    """

    def pinned(text: str) -> str:
        name = hub.find(text, log.info)
        return text if name is None else str(name.pinned())

    replaced = _replaced(config, keys, pinned)
    for key, value in replaced.items():
        log.info("%s is %s on the Hugging Face hub", key, value)
    return replaced


def with_local_copies(config: Config, keys: Iterable[str] = MODELS, *, weights: bool = True) -> Config:
    """Return the settings with local paths in place of the hub's names; downloads what this host's cache lacks.

    Args:
        weights: of models also their weights, not only config and tokenizer.

    Raises:
        ConfigError: see `HubName.local`.
    """
    return config.with_values(_replaced(config, keys, partial(hub.local_path, weights=weights)))


def local_path(path: str, key: str, *, weights: bool = True) -> str:
    """Return one path like `with_local_copies`; the key is for errors."""
    with _named(key, path):
        return hub.local_path(_checked(path), weights=weights)


def upload(folder: Path, repo: str) -> str:
    """Upload a model folder as one commit, to a new private repository if there is none, and return its address."""
    try:
        from huggingface_hub import HfApi

        HfApi().create_repo(repo, private=True, exist_ok=True)
        return str(HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload the student"))
    except Exception as error:  # the library raises many types of errors
        problem = f"the hub did not take {folder}, which is complete ({next(iter(str(error).splitlines()), '')})."
        fix = f"write ORG/NAME, set HF_TOKEN to a token that may write there, and run `hf upload {repo} {folder}`."
        raise ConfigError("--push", repo, problem, fix) from error


def cached_folder(path: str) -> str:
    """Return the folder of a model, without its weights, as this host's cache has it; otherwise the path itself."""
    try:
        return hub.local_path(path, weights=False, offline=True)
    except FolderError:
        return path


def _replaced(config: Config, keys: Iterable[str], new: Callable[[str], str]) -> dict[str, Any]:
    """Return the changed values by key. Raises ConfigError."""
    changed: dict[str, Any] = {}
    for key in keys:
        value = config.value(key)
        with _named(key, value):
            if isinstance(value, list):  # data files, whose names on the hub begin with hf://
                result: Any = [new(text) if text.startswith("hf://") else text for text in value]
            else:
                result = new(_checked(value))
        if result != value:
            changed[key] = result
    return changed


def _checked(path: str) -> str:
    """Return the path. Raises FolderError, without asking the hub, if a folder exists that it could be in."""
    name = hub.find(path)
    folder = Path(path).parent
    if name is not None and name.revision is None and not name.file and folder.is_dir():
        fix = f"correct the path, or write {path}@main for the model of this name on the hub."
        raise FolderError(Path(path), f"the folder {folder} has no {Path(path).name}.", fix)
    return path


@contextmanager
def _named(key: str, value: object) -> Iterator[None]:
    """Raise ConfigError naming the key instead of FolderError."""
    try:
        yield
    except FolderError as error:
        raise ConfigError(key, value, error.problem, error.fix) from error
