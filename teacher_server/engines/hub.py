"""Download models and data files of the Hugging Face hub that a setting names instead of a local path.

    org/name[@REVISION]                        a model, unless there is such a folder
    hf://datasets/org/name[@REVISION]/FILE     one file of a dataset

The library huggingface_hub keeps them in its cache, and reads HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. It is
imported only for such a name. The server and the trainer use this module before they start a process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from teacher_server.engines.weight_files import FolderError

_REPO = r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)"
_MODEL = re.compile(rf"{_REPO}(@(?P<revision>[^@\s]+))?(?P<file>)")
_FILE = re.compile(rf"hf://datasets/{_REPO}(@(?P<revision>refs/(convert|pr)/\w+|[^/@\s]+))?/(?P<file>[^*?\[\]]+)")
_USED = ["*.safetensors", "*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"]
_UNUSED = ["*/*.safetensors", "consolidated*"]  # other copies of the weights, which no program here loads


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub, or one file of a dataset.

    Args:
        revision: branch, tag or commit; None means the default branch.
        file: path in the dataset; empty for a model.
    """

    repo: str
    revision: str | None = None
    file: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://datasets/{self.repo}{revision}/{self.file}" if self.file else f"{self.repo}{revision}"

    def pinned(self) -> HubName:
        """Return the name with the commit that the revision is now or, without the hub, in the cache.

        Raises FolderError: neither place has the model or the dataset, or it may not be read.
        """
        try:
            from huggingface_hub import resolve_revision

            kind = "dataset" if self.file else "model"
            return replace(self, revision=resolve_revision(self.repo, repo_type=kind, revision=self.revision).resolved)
        except Exception as error:  # the library raises many types of errors
            raise FolderError(Path(str(self)), *self._explained(error)) from error

    def local(self, *, weights: bool = True, offline: bool = False) -> str:
        """Download what the cache lacks, and return the path there: of the model's folder, or of the file.

        Args:
            weights: of a model also its weights.
            offline: use only the cache.

        Raises:
            FolderError: as `pinned`; or the download failed, or the model has no safetensors files.
        """
        try:
            from huggingface_hub import hf_hub_download, snapshot_download

            if self.file:
                get = partial(hf_hub_download, self.repo, self.file, repo_type="dataset")
            else:
                used = _USED if weights else _USED[1:]
                get = partial(snapshot_download, self.repo, allow_patterns=used, ignore_patterns=_UNUSED)
            path = _interruptible(partial(get, revision=self.revision, local_files_only=offline))
        except Exception as error:  # the library raises many types of errors
            raise FolderError(Path(str(self)), *self._explained(error)) from error
        if weights and not self.file and not any(Path(path).glob("*.safetensors")):
            problem = "it has no *.safetensors files, and weights in other formats are not downloaded."
            raise FolderError(Path(str(self)), problem, "name a model or a revision that has them, or convert it.")
        return path

    def _explained(self, error: Exception) -> tuple[str, str]:
        """Return the problem and the fix."""
        from huggingface_hub import constants, errors

        hub = constants.ENDPOINT
        kind = "dataset" if self.file else "model"
        page = f"{hub}/{'datasets/' if self.file else ''}{self.repo}"
        absent = "" if self.file else f"no folder {Path(str(self)).absolute()}, and "
        text = next(iter(str(error).splitlines()), "")
        cause = error.__cause__
        if isinstance(cause, errors.HfHubHTTPError) and cause.response.status_code < 500:
            error = cause
        if isinstance(error, errors.GatedRepoError):
            problem = f"it is gated: {hub} gives it only to accounts that have accepted its license."
            return problem, f"accept it at {page}, and set HF_TOKEN to a token of that account."
        if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            problem = f"{absent}{hub} has no such {kind}, or it is private."
            return problem, "correct the path or the name; for a private one set HF_TOKEN."
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{hub} has no revision {self.revision} of it.", f"name a branch, a tag or a commit of {page}."
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return f"{page} has no file {self.file}.", "correct its path in the dataset."
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            problem = f"{hub} refuses access to it ({error.response.status_code})."
            return problem, "set HF_TOKEN to a valid token that may read it."
        if isinstance(error, (errors.RevisionResolutionError, errors.LocalEntryNotFoundError)):
            reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else text
            revision = f" --revision {self.revision}" if self.revision else ""
            options = f" {self.file} --repo-type dataset{revision}" if self.file else revision
            problem = f"{absent}the cache {constants.HF_HUB_CACHE} does not have all of it, and {hub} was not asked or "
            return f"{problem}did not reply ({reason}).", f"run `hf download {self.repo}{options}` with a network."
        return f"the download failed ({type(error).__name__}: {text}).", "start again: it goes on where it stopped."


def find(text: str, notice: Callable[[str], object] | None = None) -> HubName | None:
    """Return what a path names on the hub; None means that the path is local.

    Args:
        notice: called with a sentence if the path of an existing folder could also be a name.

    Raises:
        FolderError: the text begins with hf:// and has another form than that of a file.
    """
    if text.startswith("hf://"):
        match = _FILE.fullmatch(text)
        if match is None:
            problem = "it is not hf://datasets/ORG/NAME[@REVISION]/FILE. Wildcards are not supported."
            raise FolderError(Path(text), problem, "name each file like that, and a model as ORG/NAME[@REVISION].")
    else:
        match = _MODEL.fullmatch(text)
        if match is not None and Path(text).exists():
            match = None
            if notice is not None:
                notice(f"{text} is the local folder, not the model of that name on the Hugging Face hub")
    if match is None:
        return None
    revision = match["revision"]
    return HubName(match["repo"], unquote(revision) if revision else None, match["file"])


def local_path(
    path: str, *, weights: bool = True, offline: bool = False, notice: Callable[[str], object] | None = None
) -> str:
    """Return a local path for one that may be a name. Arguments and errors as for `find` and `HubName.local`."""
    name = find(path, notice)
    if name is None:
        return path
    pinned = name if offline else name.pinned()
    if notice is not None:
        notice(f"{path} is {pinned} on the Hugging Face hub")
    return pinned.local(weights=weights, offline=offline)


def name_of(folder: Path) -> str | None:
    """Return org/name of a model folder in the hub's cache; None for another folder."""
    words = folder.parent.parent.name.split("--")
    return f"{words[1]}/{words[2]}" if folder.parent.name == "snapshots" and len(words) == 3 else None


def _interruptible(download: Callable[..., str]) -> str:
    """Run a download so that Ctrl-C ends it; the library's own threads would first complete their files."""
    from huggingface_hub.utils import tqdm

    stopped = threading.Event()

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if stopped.is_set():
                raise KeyboardInterrupt
            return super().update(n)

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(download, tqdm_class=Bar).result()
        except BaseException:
            stopped.set()
            raise
