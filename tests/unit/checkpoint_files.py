"""What the ranks would write, for tests of the driver's side: real files on disk, with their real digests."""

from __future__ import annotations

import random
from pathlib import Path

from gkd.handles import FileDigest
from gkd.run.checkpoints import CheckpointStore, TrainerState
from gkd.run.disk import write_synced
from gkd.run.manifest import digest_bytes

FILES = ("common.pt", "rank_0/weights", "rank_1/weights")


def content(step: int, name: str) -> bytes:
    """A few kilobytes that no other step and file has."""
    return random.Random(f"{step} {name}").randbytes(3000)


def write_actor(folder: Path, step: int) -> dict[str, FileDigest]:
    """The files of one save, flushed."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_synced(folder / name, content(step, name))
    return {name: digest_bytes(content(step, name)) for name in FILES}


def written(folder: Path, step: int) -> dict[str, FileDigest]:
    """The same in a checkpoint's folder, named as the store is told of them."""
    return {f"actor/{name}": digest for name, digest in write_actor(folder / "actor", step).items()}


def check_actor(folder: Path, step: int) -> None:
    """Are the files there what `write_actor` wrote for that step?"""
    for name in FILES:
        assert (folder / name).read_bytes() == content(step, name), name


def commit(store: CheckpointStore, step: int) -> Path:
    """One whole save; the checkpoint's folder."""
    actor = written(store.begin(step), step)
    documents = {"trainer.json": TrainerState(step, 6 * step).to_bytes(), "config.yaml": b"a: 1\n"}
    store.commit(step, documents, actor)
    return store.root / f"step_{step:08d}"
