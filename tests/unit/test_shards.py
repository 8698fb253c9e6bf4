"""The ranks' checkpoint files: what was written comes back, and damage of every kind is named. Real files."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash

from gkd.actor.host_copies import HostCopies, Snapshot
from gkd.actor.rng import restore_rng, rng_state
from gkd.actor.shard_writer import BackgroundWriter, write
from gkd.actor.shards import Piece, ShardReader, file_name
from gkd.errors import CheckpointError

CPU = torch.device("cpu")
WHOLE = torch.arange(1000, dtype=torch.float32)


def _snapshot(*pieces: Piece, step: int = 3, world_size: int = 1) -> Snapshot:
    rng = {"torch": torch.arange(9, dtype=torch.uint8)}
    return HostCopies(CPU).snapshot(pieces, {"step": step, "world_size": world_size}, rng)


def _piece(start: int, stop: int, *, name: str = "model.w", kind: str = "param", part: int = 0) -> Piece:
    return Piece(name, kind, part, start, WHOLE[start:stop])


def _write_two_ranks(folder: Path) -> None:
    """Elements 0:300 and 700:1000 of rank 0, 300:700 of rank 1; each rank has a tensor of its own, too."""
    own = Piece("model.norm", "exp_avg", 1, 5, torch.full((4,), 0.5, dtype=torch.bfloat16))
    write(folder, 0, _snapshot(_piece(700, 1000), _piece(0, 300), world_size=2))
    write(folder, 1, _snapshot(_piece(300, 700), own, world_size=2))


def test_round_trip(tmp_path: Path) -> None:
    """Fails if a range across pieces and files, a dtype, a generator's state or the meta data come back changed."""
    _write_two_ranks(tmp_path)
    with ShardReader(tmp_path) as reader:
        for start, stop in ((0, 1000), (0, 300), (299, 301), (650, 800), (999, 1000), (12, 12)):
            assert torch.equal(reader.read("model.w", "param", 0, start, stop), WHOLE[start:stop])
        own = reader.read("model.norm", "exp_avg", 1, 5, 9)
        assert own.dtype == torch.bfloat16 and own.tolist() == [0.5] * 4
        target = torch.zeros(10)
        reader.read("model.w", "param", 0, 295, 305, out=target)
        assert torch.equal(target, WHOLE[295:305])
        for wrong in (torch.zeros(9), torch.zeros(10, dtype=torch.bfloat16)):
            with pytest.raises(CheckpointError, match="as torch.float32; elements 295:305 do not fit"):
                reader.read("model.w", "param", 0, 295, 305, out=wrong)
        assert reader.meta == {"step": 3, "world_size": 2}
        assert reader.names() == {"model.w", "model.norm"}
        assert reader.rng(1)["torch"].tolist() == list(range(9)) and reader.rng(2) == {}


def test_files_are_safetensors_and_digests_are_theirs(tmp_path: Path) -> None:
    """Fails if other tools cannot open a rank's file, or its digest or size is not that of the bytes on disk."""
    digests = write(tmp_path / "new", 0, _snapshot(_piece(0, 1000)))
    path = tmp_path / "new" / file_name(0)
    tensors = safetensors.torch.load_file(path)
    assert torch.equal(tensors["model.w/param/0/0"], WHOLE)
    data = path.read_bytes()
    assert list(digests) == [path.name]
    assert digests[path.name].n_bytes == len(data)
    assert digests[path.name].xxh3_128 == xxhash.xxh3_128_hexdigest(data)


def test_a_snapshot_is_a_copy_and_its_memory_is_used_again() -> None:
    """Fails if training can still change a snapshot, or memory is reused before, or not after, its release."""
    copies, live = HostCopies(CPU), torch.ones(100)
    first = copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {})
    copies.settle()
    live.add_(1)
    second = copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {})
    second.wait()
    assert first.pieces[0].data.unique().tolist() == [1.0] and second.pieces[0].data.unique().tolist() == [2.0]
    assert _address(first) != _address(second)
    first.release()
    third = copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {})
    assert _address(third) == _address(first)
    third.release()
    bigger = copies.snapshot([Piece("w", "param", 0, 0, torch.ones(1000))], {}, {})
    bigger.wait()
    assert bigger.pieces[0].data.sum() == 1000


def test_training_waits_for_the_copy_and_no_longer() -> None:
    """Fails if weights may change before they are copied, or each settle or snapshot waits for the file, too."""
    copies, live = HostCopies(CPU), torch.zeros(16 << 20)
    taken = []
    for number in range(1, 6):
        live.fill_(number)
        taken.append(copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {}))
        copies.settle()
    live.fill_(0)
    for number, snapshot in enumerate(taken, start=1):
        assert all(bool((piece.data == number).all()) for piece in snapshot.pieces)
    with pytest.raises(RuntimeError, match="size"):  # a copy that fails is not a snapshot
        copies._copy([torch.zeros(3)], [torch.zeros(4)])()
    with pytest.raises(RuntimeError, match="size"):
        copies.settle()


def test_pieces_lie_in_slabs_without_gaps(tmp_path: Path) -> None:
    """Fails if more than a slab's end is wasted, or a piece that crosses a border or is empty is damaged."""
    live = [
        Piece("half", "param", 0, 3, torch.arange(101, dtype=torch.bfloat16)),
        Piece("none", "param", 0, 7, torch.zeros(0)),
        *(Piece(f"w{i}", "exp_avg", 1, 10 * i, WHOLE[i : 400 + 37 * i].clone()) for i in range(8)),
        Piece("bytes", "param", 0, 0, torch.arange(33, dtype=torch.uint8)),
        Piece("double", "param", 0, 0, WHOLE.double()),
    ]
    n_bytes = sum(piece.data.nbytes for piece in live)
    snapshot = HostCopies(CPU, slab_bytes=1024).snapshot(live, {"step": 1, "world_size": 1}, {})
    assert len(snapshot.slabs) == -(-n_bytes // 1024) and {slab.nbytes for slab in snapshot.slabs} == {1024}
    write(tmp_path, 0, snapshot)
    with ShardReader(tmp_path) as reader:
        for piece in live:
            if piece.name != "none":
                stop = piece.start + piece.data.numel()
                values = reader.read(piece.name, piece.kind, piece.part, piece.start, stop)
                assert torch.equal(values, piece.data), piece.name
        assert reader.names() == {piece.name for piece in live} - {"none"}


def _address(snapshot: Snapshot) -> int:
    return snapshot.slabs[0].data_ptr()


def _flip(data: bytearray) -> bytearray:
    data[len(data) // 8] = 0xFF  # in the header
    return data


DAMAGE: dict[str, tuple[Callable[[bytearray], bytearray], str]] = {
    "empty": (lambda data: data[:0], "cut off or garbled"),
    "header cut": (lambda data: data[:100], "cut off or garbled"),
    "data cut": (lambda data: data[:-10], "cut off"),
    "longer": (lambda data: data + b"x", "data"),
    "flipped": (_flip, "garbled"),
    "huge header": (lambda data: bytearray(b"\xff" * 8) + data[8:], "cut off or garbled"),
    "other JSON": (lambda data: bytearray((2).to_bytes(8, "little") + b"[]"), "garbled"),
    "no meta": (lambda data: bytearray((2).to_bytes(8, "little") + b"{}"), "garbled"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    """Fails if a damaged file is read, ends in another error than CheckpointError, or is not named."""
    _write_two_ranks(tmp_path)
    damage, words = DAMAGE[kind]
    path = tmp_path / file_name(1)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    with pytest.raises(CheckpointError) as caught:
        ShardReader(tmp_path)
    assert file_name(1) in str(caught.value) and words in str(caught.value)


def test_random_damage_of_a_header_never_escapes(tmp_path: Path) -> None:
    """Fails if some garbled header raises anything but CheckpointError, at the opening or at a read."""
    write(tmp_path, 0, _snapshot(_piece(0, 1000)))
    path, chance = tmp_path / file_name(0), random.Random(5)
    whole = path.read_bytes()
    n_header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(n_header)] = chance.choice(b'0123456789{}[]",:-.eFx\x00\xff')
        path.write_bytes(data)
        try:
            with ShardReader(tmp_path) as reader:
                reader.read("model.w", "param", 0, 0, 1000)
        except CheckpointError:
            refused += 1
    assert refused > 400  # what is left changed nothing but blanks or the meta data, whose digest is elsewhere


def test_gaps_overlaps_and_strangers_are_refused(tmp_path: Path) -> None:
    """Fails if elements that nobody wrote are made up, two writers disagree unseen, or files of two saves are mixed."""
    with pytest.raises(ValueError, match="same name, kind, part and start"):
        write(tmp_path, 0, _snapshot(_piece(0, 10), _piece(0, 20)))
    _write_two_ranks(tmp_path)
    with ShardReader(tmp_path) as reader:
        for args, words in (
            (("model.v", "param", 0, 0, 1), "no param of model.v"),
            (("model.w", "exp_avg", 0, 0, 1), "no exp_avg of model.w"),
            (("model.w", "param", 1, 0, 1), "part 1"),
            (("model.w", "param", 0, 900, 1001), "lacks element 1000 of param of model.w"),
            (("model.norm", "exp_avg", 1, 0, 9), "lacks element 0 of exp_avg of model.norm"),
        ):
            with pytest.raises(CheckpointError, match=words):
                reader.read(*args)
    write(tmp_path, 1, _snapshot(_piece(300, 600), world_size=2))
    with ShardReader(tmp_path) as reader, pytest.raises(CheckpointError, match="lacks element 600"):
        reader.read("model.w", "param", 0, 0, 1000)
    write(tmp_path, 1, _snapshot(_piece(300, 701), world_size=2))
    with pytest.raises(CheckpointError, match="both have element 700 of param of model.w"):
        ShardReader(tmp_path)
    write(tmp_path, 1, _snapshot(_piece(300, 700), world_size=2, step=4))
    with pytest.raises(CheckpointError, match="different checkpoints"):
        ShardReader(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """Fails if a checkpoint without all of its ranks' files, or none at all, is opened."""
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        ShardReader(tmp_path / "nothing")
    _write_two_ranks(tmp_path)
    (tmp_path / file_name(1)).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="files of 1 ranks; 2 wrote it"):
        ShardReader(tmp_path)
    (tmp_path / file_name(0)).rename(tmp_path / file_name(1))
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors is missing"):
        ShardReader(tmp_path)


def test_a_file_that_shrinks_after_the_opening_is_named(tmp_path: Path) -> None:
    """Fails if a file cut off under the reader's hands kills the process or gives back wrong elements."""
    write(tmp_path, 0, _snapshot(_piece(0, 1000)))
    with ShardReader(tmp_path) as reader:
        os.truncate(tmp_path / file_name(0), 2000)
        with pytest.raises(CheckpointError, match="became shorter"):
            reader.read("model.w", "param", 0, 0, 1000)


def test_the_background_writer_writes_one_at_a_time(tmp_path: Path) -> None:
    """Fails if a poll says "done" too early, the answer gets lost, or two saves run into each other."""
    writer = BackgroundWriter()
    with pytest.raises(CheckpointError, match="no save was started"):
        writer.finished(wait=False)
    os.mkfifo(tmp_path / file_name(0))  # its writer waits until somebody reads: a save as slow as this test wants
    writer.start(tmp_path, 0, _snapshot(_piece(0, 1000)))
    time.sleep(0.05)
    assert writer.finished(wait=False) is None
    with pytest.raises(CheckpointError, match=f"save to {tmp_path} is still being written"):
        writer.start(tmp_path / "other", 0, _snapshot(_piece(0, 10)))
    (tmp_path / file_name(0)).read_bytes()
    with pytest.raises(CheckpointError, match="rank 0 cannot write .*Invalid argument"):  # a pipe has no fsync
        writer.finished(wait=True)
    writer.start(tmp_path / "other", 0, _snapshot(_piece(0, 10)))
    digests = writer.finished(wait=True)
    assert digests is not None and digests == writer.finished(wait=False)
    assert digests[file_name(0)].n_bytes == (tmp_path / "other" / file_name(0)).stat().st_size


def test_the_next_save_may_begin_once_the_last_has_its_answer(tmp_path: Path) -> None:
    """Fails if "done" can be seen before the writer is ready for the next save, or before the memory is free."""

    class SlowCopies(HostCopies):
        def give_back(self, slabs: Sequence[torch.Tensor]) -> None:
            time.sleep(0.05)
            super().give_back(slabs)

    writer, copies, addresses = BackgroundWriter(), SlowCopies(CPU), set()
    for _ in range(5):
        snapshot = copies.snapshot([_piece(0, 10)], {"step": 1, "world_size": 1}, {})
        addresses.add(_address(snapshot))
        writer.start(tmp_path, 0, snapshot)
        while writer.finished(wait=False) is None:
            time.sleep(0)
    assert len(addresses) == 1


def test_the_writer_gives_way_to_training(tmp_path: Path) -> None:
    """Fails if the writing thread is as urgent as the training one, or its lower priority spreads to that."""
    writer, before = BackgroundWriter(), os.getpriority(os.PRIO_PROCESS, 0)
    os.mkfifo(tmp_path / file_name(0))
    writer.start(tmp_path, 0, _snapshot(_piece(0, 1000)))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint")
    deadline = time.monotonic() + 10
    while (priority := os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)) == before:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert priority == min(19, before + 10) and os.getpriority(os.PRIO_PROCESS, 0) == before
    (tmp_path / file_name(0)).read_bytes()
    with pytest.raises(CheckpointError, match="Invalid argument"):
        writer.finished(wait=True)


def test_a_rank_makes_its_folder_and_no_parent(tmp_path: Path) -> None:
    """Fails if a rank that outlived its run brings a removed folder back, or an unshared disk is not named."""
    with pytest.raises(CheckpointError, match="rank 3 .*gone/ranks.* does not see the folder's parent.*run_dir"):
        write(tmp_path / "gone" / "ranks", 3, _snapshot(_piece(0, 10)))
    assert not (tmp_path / "gone").exists()


def test_the_writer_releases_the_memory(tmp_path: Path) -> None:
    """Fails if a snapshot's memory is not free for the next one after a save, good or bad."""
    copies, writer = HostCopies(CPU), BackgroundWriter()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "good", tmp_path / "file" / "bad", tmp_path / "again"):
        snapshot = copies.snapshot([_piece(0, 1000)], {"step": 1, "world_size": 1}, {})
        address = _address(snapshot)
        writer.start(folder, 0, snapshot)
        if "bad" in folder.name:
            with pytest.raises(CheckpointError, match="Not a directory"):
                writer.finished(wait=True)
        else:
            writer.finished(wait=True)
        after = copies.snapshot([_piece(0, 1000)], {}, {})
        assert _address(after) == address, folder
        after.release()


def test_read_only_and_full_devices_are_named(tmp_path: Path) -> None:
    """Fails if a target that cannot be written passes, or its error lacks the path or the system's reason."""
    with pytest.raises(CheckpointError, match="/sys/.*rank_00000.safetensors"):
        write(Path("/sys"), 0, _snapshot(_piece(0, 10)))
    (tmp_path / file_name(0)).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(tmp_path, 0, _snapshot(_piece(0, 1000)))


_CHILD = """
    import sys, torch
    from pathlib import Path
    from gkd.actor.shard_writer import BackgroundWriter
    from gkd.actor.host_copies import HostCopies
    from gkd.actor.shards import Piece

    pieces = [Piece("w", "param", 0, 0, torch.ones(1_000_000))]
    snapshot = HostCopies(torch.device("cpu")).snapshot(pieces, {"step": 1, "world_size": 1}, {})
    writer = BackgroundWriter()
    writer.start(Path(sys.argv[1]), 0, snapshot)
"""


def _child(code: str, folder: Path, limit_bytes: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILD) + code, str(folder)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_file_that_may_not_grow_ends_the_save_with_its_reason(tmp_path: Path) -> None:
    """Fails if a save that stops in the middle of its file is taken for a whole one."""
    done = _child("writer.finished(wait=True)", tmp_path, 1 << 20)
    assert "CheckpointError: rank 0 cannot write" in done.stderr and "File too large" in done.stderr
    assert (tmp_path / file_name(0)).stat().st_size == 1 << 20
    with pytest.raises(CheckpointError, match="cut off"):
        ShardReader(tmp_path)


def test_a_process_may_end_while_it_writes(tmp_path: Path) -> None:
    """Fails if a process that ends, for whatever reason, waits for its disk."""
    os.mkfifo(tmp_path / file_name(0))  # nobody reads it, so the write never ends
    done = _child("print('over')", tmp_path, resource.RLIM_INFINITY)
    assert done.returncode == 0 and done.stdout == "over\n", done.stderr


def test_generators_go_on_where_they_were() -> None:
    """Fails if a restored generator of Python, numpy or torch draws other numbers, its cached half included."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(), float(np.random.randn()), float(torch.randn(1))]

    before = rng_state()
    draw()  # leaves a second Gaussian of Python's and numpy's cached
    states = rng_state()
    expected = draw()
    restore_rng(states, "a file")
    assert draw() == expected
    states["numpy"] = states["python"]
    with pytest.raises(CheckpointError, match="a file has generator states that cannot be restored"):
        restore_rng(states, "a file")
    restore_rng(before, "here")


def test_headers_hold_the_meta_data_as_json(tmp_path: Path) -> None:
    """Fails if what a checkpoint says of itself can be read by this project only."""
    write(tmp_path, 0, _snapshot(_piece(0, 10)))
    with safetensors.safe_open(tmp_path / file_name(0), "pt") as file:
        assert json.loads(file.metadata()["gkd"]) == {"step": 3, "world_size": 1, "format": 1, "rank": 0}
