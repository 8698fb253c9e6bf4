"""Test the checkpoint store: atomic commits under kills, detection of damage, retention, full disks."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gkd.errors import CheckpointError, DamagedCheckpoint
from gkd.run.checkpoints import CheckpointStore, TrainerState, read_state, step_of, verified
from gkd.run.manifest import Manifest, _seal, digest_bytes, digest_file, read_manifest
from gkd.types import FileDigest
from tests.unit.checkpoint_files import FILES, check_actor, commit, written
from tests.unit.kills import in_child, kill_at


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def steps(store: CheckpointStore) -> list[int | None]:
    return [step_of(folder) for folder in store.committed()]


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def newest_step(store: CheckpointStore) -> int | None:
    folder = store.newest()
    if folder is None:
        return None
    state, _ = verified(folder)
    check_actor(folder / "actor", state.step)
    return state.step


def test_the_newest_committed_checkpoint_is_found(store: CheckpointStore) -> None:
    """Fails if a resume starts from an older checkpoint, or from an interrupted save."""
    assert store.newest() is None
    commit(store, 2)
    folder = commit(store, 10)
    store.begin(12)
    (folder / "actor" / "NOTE").write_text("a file that a user adds does not invalidate it")
    assert store.newest() == folder
    state, manifest = verified(folder)
    assert state == TrainerState(10, 60)
    assert set(manifest.files) == {"trainer.json", "config.yaml", *(f"actor/{name}" for name in FILES)}
    assert manifest.n_bytes == sum((folder / name).stat().st_size for name in manifest.files)
    assert (store.root / "latest").read_text() == "step_00000010\n"


def test_a_kill_at_every_operation_of_a_save(in_memory: Path) -> None:
    """Fails if a kill during a save, a rewind or a deletion can lose a committed checkpoint.

    The process is killed before every open, mkdir, rename, remove and rmdir of this sequence: rewind from step 6 to
    step 4, save step 5, delete all others.
    """
    before = CheckpointStore(in_memory / "before")
    for step in (2, 4, 6):
        commit(before, step)
    before.begin(8)
    n, seen = 0, set()
    while True:
        n += 1
        store = CheckpointStore(in_memory / "now")
        shutil.rmtree(store.root, ignore_errors=True)
        shutil.copytree(before.root, store.root)
        committed = in_memory / "committed"
        committed.unlink(missing_ok=True)

        def work(n: int = n, store: CheckpointStore = store, committed: Path = committed) -> None:
            kill_at(n)
            store.rewind_to(store.root / "step_00000004")
            commit(store, 5)
            os.close(os.open(committed, os.O_CREAT | os.O_WRONLY))
            store.prune(keep_last=1)

        code = in_child(work)
        found = newest_step(store)
        assert found in ({5} if committed.exists() else {4, 5, 6}), (n, found)
        seen.add(found)
        for folder in store.committed():
            verified(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL, (n, code)
        # The next run resumes from this checkpoint, and its save removes all leftovers of the killed one.
        store.rewind_to(store.root / f"step_{found:08d}")
        commit(store, 7)
        assert newest_step(store) == 7
        assert not [name for name in names(store) if name.startswith(".")]
        assert set(steps(store)) <= {2, 4, 5, 6, 7} and steps(store)[-2] == found, "no discarded step reappears"
    assert n > 30, "the audit hook saw the operations"
    assert seen == {4, 5, 6}
    assert names(store) == ["latest", "step_00000005"]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["actor/rank_1/weights", "trainer.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(
    store: CheckpointStore, gkd_log: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    """Fails if a resume loads corrupted bytes, ignores the previous checkpoint, or does not log the cause."""
    commit(store, 1)
    folder = commit(store, 2)
    damage(folder / name)
    if (name, damage) == ("manifest.json", cut):
        assert newest_step(store) == 2, "the last byte is a newline"
        cut(folder / name)
    assert newest_step(store) == 1
    assert f"{folder}: {name} " in gkd_log.text


def test_every_flipped_bit_of_the_manifest_is_detected(store: CheckpointStore) -> None:
    """Fails if a corrupted manifest can hide a corrupted file."""
    folder, rng = commit(store, 1), random.Random(0)
    whole = read_manifest(folder)
    data = (folder / "manifest.json").read_bytes()
    n_refused = 0
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 1 << rng.randrange(8)
        (folder / "manifest.json").write_bytes(damaged)
        try:
            assert read_manifest(folder) == whole, i  # a flip of one whitespace character to another
        except CheckpointError:
            n_refused += 1
    assert n_refused > 0.9 * len(data)


def test_a_manifest_cannot_list_files_outside_its_folder(store: CheckpointStore) -> None:
    """Fails if a manifest may list files outside its folder, which a copy of the checkpoint would lack."""
    folder = commit(store, 1)
    for name in ("../x", "/etc/hostname"):
        (folder / "manifest.json").write_bytes(Manifest(1, {name: digest_bytes(b"")}).to_bytes())
        with pytest.raises(CheckpointError, match=re.escape(repr(name))):
            read_manifest(folder)


def test_a_renamed_checkpoint_is_refused(store: CheckpointStore) -> None:
    """Fails if a manually renamed folder resumes at the wrong step."""
    other = shutil.copytree(commit(store, 1), store.root / "step_00000002")
    with pytest.raises(CheckpointError):
        verified(other)


@pytest.mark.parametrize("pointer", ["", "step_00000002", "\0" * 14])
def test_a_corrupted_latest_file_is_recovered(
    store: CheckpointStore, gkd_log: pytest.LogCaptureFixture, pointer: str
) -> None:
    """Fails if a corrupted `latest` file loses a checkpoint: the folders have the same information."""
    commit(store, 1)
    folder = commit(store, 2)
    (store.root / "latest").write_text(pointer)
    assert store.newest() == folder
    assert "checkpoints/latest " in gkd_log.text
    store.rewind_to(folder)
    assert (store.root / "latest").read_text() == "step_00000002\n"


def test_a_lost_latest_file_is_told_from_a_killed_first_save(
    store: CheckpointStore, gkd_log: pytest.LogCaptureFixture
) -> None:
    """Fails if an uncommitted folder is used, or a deleted `latest` file makes a run start at step 0."""
    commit(store, 1)
    (store.root / "latest").unlink()
    assert store.newest() is None
    assert "step_00000001" in gkd_log.text
    commit(store, 1)
    commit(store, 2)
    (store.root / "latest").unlink()
    assert newest_step(store) == 2


def test_an_error_names_every_damaged_checkpoint(store: CheckpointStore) -> None:
    """Fails if a run whose checkpoints are all damaged starts at step 0, or the error does not name each problem."""
    for step in (1, 2, 3):
        commit(store, step)
    shutil.rmtree(store.root / "step_00000003")
    flip(store.root / "step_00000002" / "actor" / "common.pt")
    cut(store.root / "step_00000001" / "config.yaml")
    with pytest.raises(CheckpointError) as caught:
        store.newest()
    for part in ("step_00000003", "step_00000002: actor/common.pt", "step_00000001: config.yaml"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [8]), (2, [7, 8])])
def test_retention(store: CheckpointStore, keep_last: int, kept: list[int]) -> None:
    """Fails if trainer.keep_last keeps the wrong checkpoints."""
    for step in range(1, 9):
        commit(store, step)
        store.prune(keep_last)
    work = store.begin(9)
    store.prune(keep_last)
    assert work.is_dir(), "a save in progress is kept"
    assert steps(store) == kept
    assert newest_step(store) == 8


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 1}',
        '{"step": 1, "sampler_position": 6, "unfinished": [], "epoch": 0}',
        '{"step": true, "sampler_position": 6, "unfinished": []}',
        '{"step": 1, "sampler_position": -6, "unfinished": []}',
        '{"step": 1, "sampler_position": 6, "unfinished": ["3"]}',
        '{"step": 2, "sampler_position": 6, "unfinished": []}',
        "{",
    ],
)
def test_trainer_state_is_validated(tmp_path: Path, text: str) -> None:
    """Fails if a trainer.json of another version is accepted in part: the sampler would restart at its beginning."""
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    (folder / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step_00000001: trainer\.json"):
        read_state(folder)


def test_file_digest_matches_byte_digest(tmp_path: Path) -> None:
    """Fails if the digest of a file, computed in chunks, differs from the digest of its bytes."""
    data = random.Random(0).randbytes((4 << 20) + 17)
    (tmp_path / "f").write_bytes(data)
    (tmp_path / "empty").touch()
    assert digest_file(tmp_path / "f") == digest_bytes(data)
    # The published digest of empty input: XXH3_128bits("") with seed 0.
    assert digest_file(tmp_path / "empty") == FileDigest(0, "99aa06d3014798d86001c324468d497f")


@pytest.mark.parametrize("wrong", ["missing", "longer", "none"])
def test_a_commit_checks_the_files_of_the_ranks(store: CheckpointStore, wrong: str) -> None:
    """Fails if a checkpoint is committed whose files do not match the reported digests."""
    commit(store, 1)
    actor = written(store.begin(2), 2)
    if wrong == "missing":
        actor["gone"] = digest_bytes(b"x")
    elif wrong == "longer":
        actor["common.pt"] = digest_bytes(b"x")
    else:
        actor.clear()
    with pytest.raises(CheckpointError, match={"missing": "gone", "longer": "common.pt", "none": "nothing"}[wrong]):
        store.commit(2, {"trainer.json": TrainerState(2, 12).to_bytes()}, actor)
    assert names(store) == ["latest", "step_00000001"]
    assert newest_step(store) == 1


@pytest.mark.parametrize("limit", [0, 40, 300])
def test_a_file_size_limit_fails_only_the_current_save(store: CheckpointStore, limit: int) -> None:
    """Fails if a truncated file of the driver is committed, or its error loses an earlier checkpoint.

    The limit on file sizes fails trainer.json (0 bytes), config.yaml (40) and manifest.json (300) with a real EFBIG.
    """
    commit(store, 1)

    def work() -> None:
        actor = written(store.begin(2), 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        documents = {"trainer.json": TrainerState(2, 12).to_bytes(), "config.yaml": b"#" * 200}
        with pytest.raises(CheckpointError):
            store.commit(2, documents, actor)

    assert in_child(work) == 0
    assert names(store) == ["latest", "step_00000001"]
    assert newest_step(store) == 1


def test_a_failed_pointer_update_removes_its_checkpoint(store: CheckpointStore) -> None:
    """Fails if a save that raised an error is used by the next run, or leaves files."""
    commit(store, 1)
    actor = written(store.begin(2), 2)
    (store.root / ".tmp_latest").mkdir()  # the temporary name of the new pointer
    with pytest.raises(CheckpointError):
        store.commit(2, {}, actor)
    assert names(store) == ["latest", "step_00000001"]
    assert newest_step(store) == 1


def test_a_commit_flushes_files_before_the_rename(store: CheckpointStore, flushed: list[tuple[Path, int]]) -> None:
    """Fails if a power loss after a commit may leave names without content. Killing a process cannot show that."""
    work_folder = store.begin(2)
    assert [path for path, _ in flushed] == [store.root.parent], "the parent folder has its name"
    actor = written(work_folder, 2)
    flushed.clear()
    store.commit(2, {"trainer.json": b"x", "config.yaml": b"y"}, actor)
    work = f"/{work_folder.name}"
    *contents, folder, pointer, last = (str(path).removeprefix(str(store.root)) for path, _ in flushed)
    assert sorted(contents) == [
        work,
        *(f"{work}/actor{sub}" for sub in ("", "/rank_0", "/rank_1")),
        *(f"{work}/{name}" for name in ("config.yaml", "manifest.json", "trainer.json")),
    ], "the ranks flush their files, but not the folders"
    assert (folder, pointer, last) == ("", "/.tmp_latest", ""), "the rename, the pointer, the pointer's rename"


def test_a_rank_of_a_killed_run_cannot_write_into_the_next_save(store: CheckpointStore) -> None:
    """Fails if two saves of one step share a folder: files of the killed run would be committed with the next save."""
    first = store.begin(5)
    written(first, 4)
    second = CheckpointStore(store.root).begin(5)
    assert second != first and not first.exists()
    with pytest.raises(FileNotFoundError):
        (first / "actor").mkdir(exist_ok=True)  # a rank creates it without its parent
    first.mkdir()  # even if the folder reappears, its files are ignored
    (first / "late").write_text("x")
    actor = written(store.begin(5), 5)
    assert not first.exists() and not second.exists()
    store.commit(5, {"trainer.json": TrainerState(5, 30).to_bytes()}, actor)
    assert newest_step(store) == 5


def test_a_commit_needs_a_begun_save_of_a_newer_step(store: CheckpointStore) -> None:
    """Fails if a second writer or a repeated step raises an unrelated error, or moves `latest` backwards."""
    commit(store, 3)
    for step, problem in ((4, "step 4"), (3, "latest .* step 3"), (2, "latest .* step 3")):
        actor = written(store.begin(step), step) if step != 4 else {}
        with pytest.raises(CheckpointError, match=problem):
            store.commit(step, {}, actor)
    assert newest_step(store) == 3


@pytest.mark.parametrize(("method", "name"), [("open", "common.pt"), ("stat", "common.pt"), ("open", "manifest.json")])
def test_an_io_error_is_not_damage(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, method: str, name: str
) -> None:
    """Fails if a temporary I/O error makes a run fall back, so that its next save deletes the newest checkpoint."""
    commit(store, 1)
    commit(store, 2)
    real = getattr(Path, method)

    def failing(path: Path, *args: object, **kwargs: object) -> object:
        if path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, method, failing)
        with pytest.raises(CheckpointError, match=f"{name}.*{os.strerror(errno.EIO)}") as caught:
            store.newest()
        assert not isinstance(caught.value, DamagedCheckpoint)
    assert newest_step(store) == 2


def test_a_newer_format_is_not_damage(store: CheckpointStore) -> None:
    """Fails if an older version of the program skips and later deletes checkpoints of a newer version."""
    commit(store, 1)
    folder = commit(store, 2)
    newer = {"format": 2, "step": 2, "pieces": ["of another kind"]}
    (folder / "manifest.json").write_text(json.dumps(newer | {"xxh3_128": _seal(newer)}))
    with pytest.raises(CheckpointError) as caught:
        store.newest()
    assert not isinstance(caught.value, DamagedCheckpoint)
    (folder / "manifest.json").write_text(json.dumps(newer | {"xxh3_128": "0" * 32}))
    assert newest_step(store) == 1, "with a wrong seal the manifest is damaged"
