"""Write the files of a checkpoint as the ranks do, with real digests, for tests of the driver's part."""

from __future__ import annotations

import random
from pathlib import Path

from gkd.run.checkpoints import CheckpointStore, TrainerState
from gkd.run.disk import write_synced
from gkd.run.manifest import digest_bytes
from gkd.types import FileDigest

FILES = ("common.pt", "rank_0/weights", "rank_1/weights")


def content(step: int, name: str) -> bytes:
    """Return 3 kB that are unique to this step and file."""
    return random.Random(f"{step} {name}").randbytes(3000)


def write_actor(folder: Path, step: int) -> dict[str, FileDigest]:
    """Write and flush the files of one save, and return their digests."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_synced(folder / name, content(step, name))
    return {name: digest_bytes(content(step, name)) for name in FILES}


def written(folder: Path, step: int) -> dict[str, FileDigest]:
    """Write the actor's files into a checkpoint folder, and return their digests by path in that folder."""
    return {f"actor/{name}": digest for name, digest in write_actor(folder / "actor", step).items()}


def check_actor(folder: Path, step: int) -> None:
    """Assert that the files are those that `write_actor` wrote for this step."""
    for name in FILES:
        assert (folder / name).read_bytes() == content(step, name), name


def commit(store: CheckpointStore, step: int) -> Path:
    """Save and commit one checkpoint, and return its folder."""
    actor = written(store.begin(step), step)
    documents = {"trainer.json": TrainerState(step, 6 * step).to_bytes(), "config.yaml": b"a: 1\n"}
    store.commit(step, documents, actor)
    return store.root / f"step_{step:08d}"
