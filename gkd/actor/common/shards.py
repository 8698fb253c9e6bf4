"""Checkpoint files of the ranks: flat pieces of parameters and optimizer state under HF names, and random generators.

    live tensors --host_copies--> Snapshot --shard_writer--> rank_00000.safetensors, ... --ShardReader--> any layout

Every rank writes its own pieces; nothing is gathered. A piece has its position in the parameter, so a reader assembles
any range, whatever the layout of the writers was. Both backends use this module, and define their pieces and meta data.
Before anything is loaded, the meta data tell whether the checkpoint belongs to this student.

The files are plain safetensors with keys "name/kind/part/start" and "rng/name". They are read with pread, not mapped:
if a file is truncated or its disk fails, a mapping kills the process without an error message.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gkd.actor.common.hf_folder import DTYPES
from gkd.errors import CheckpointError
from teacher_server.engines.weight_files import read_header

FORMAT = 1
KINDS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of one part of one parameter, or of its optimizer state."""

    name: str  # HF name of the parameter's (first) tensor
    kind: str  # one of KINDS, or the kind of another model, see `gkd.actor.frozen.model`
    part: int  # index of the tensor-parallel part of the parameter; 0 if it is not split
    start: int  # index of the first element in the flattened part
    data: Tensor  # [n], contiguous


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class _Range:
    """Location of elements [start, stop) of one part."""

    start: int
    stop: int
    dtype: torch.dtype
    path: Path
    offset: int  # bytes, in the file


class ShardReader:
    """Index of the files of all ranks of one checkpoint. A context manager; it keeps files open that it has read.

    Attributes:
        folder: of the files.
        meta: of the writers' snapshots.

    Raises:
        CheckpointError: there is no checkpoint, a file is missing, damaged or of another checkpoint, or two pieces
            overlap. Digests are checked elsewhere, see `gkd.run.manifest`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[Path, int] = {}
        self.index: dict[tuple[str, str, int], list[_Range]] = {}  # (name, kind, part) -> where its values are
        self._rng: dict[tuple[int, str], _Range] = {}
        first, *paths = self._rank_files()
        self.meta = self._add(first, 0)
        for rank, path in enumerate(paths, start=1):
            if self._add(path, rank) != self.meta:
                raise CheckpointError(f"{path} and {first.name} are of different checkpoints.")
        if self.meta.get("world_size") != len(paths) + 1:
            raise CheckpointError(
                f"{self.folder} has files of {len(paths) + 1} ranks; {self.meta.get('world_size')} ranks wrote it."
            )
        for key, ranges in self.index.items():
            ranges.sort(key=lambda item: item.start)
            for one, two in zip(ranges, ranges[1:], strict=False):
                if two.start < one.stop:
                    raise CheckpointError(
                        f"{one.path} and {two.path.name} both have element {two.start} of {_describe(*key)}."
                    )

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, name: str, kind: str, part: int, start: int, stop: int, *, out: Tensor | None = None) -> Tensor:
        """Return elements [start, stop) of one part, assembled from its pieces.

        Args:
            out: [stop - start], contiguous and on the CPU, filled in place; None makes a new tensor.

        Returns:
            [stop - start] on the CPU, in the dtype of the file.

        Raises:
            CheckpointError: elements are missing, of another dtype than `out`, or the file cannot be read.
        """
        ranges = self.index.get((name, kind, part))
        if ranges is None:
            raise CheckpointError(f"{self.folder} has no {_describe(name, kind, part)}.")
        values = torch.empty(stop - start, dtype=ranges[0].dtype) if out is None else out.detach()
        if values.dtype != ranges[0].dtype or values.shape != (stop - start,):
            raise CheckpointError(
                f"{self.folder} has {_describe(name, kind, part)} as {ranges[0].dtype}; elements {start}:{stop} "
                f"do not fit a {values.dtype} tensor of shape {tuple(values.shape)}."
            )
        # These may be live states, so avoid Tensor.numpy(): see `gkd.memory.states`.
        raw = np.from_dlpack(values.view(torch.uint8)).data
        size = values.itemsize
        position = start
        for piece in ranges:
            if piece.stop > position >= piece.start and position < stop:
                end = min(piece.stop, stop)
                target = raw[(position - start) * size : (end - start) * size]
                self._fill(target, piece.path, piece.offset + (position - piece.start) * size)
                position = end
        if position < stop:
            raise CheckpointError(
                f"{self.folder} lacks element {position} of {_describe(name, kind, part)}; requested {start}:{stop}."
            )
        return values

    def rng(self, rank: int) -> dict[str, Tensor]:
        """Return the generator states of the writer with this rank, [n] uint8 by name."""
        states = {}
        for (owner, name), piece in self._rng.items():
            if owner == rank:
                states[name] = torch.empty(piece.stop, dtype=torch.uint8)
                self._fill(states[name].numpy().data, piece.path, piece.offset)
        return states

    def _rank_files(self) -> list[Path]:
        paths = sorted(self.folder.glob("rank_*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder} is not a checkpoint: it has no {file_name(0)}.")
        for rank, path in enumerate(paths):
            if path.name != file_name(rank):
                raise CheckpointError(f"{self.folder / file_name(rank)} is missing.")
        return paths

    def _add(self, path: Path, rank: int) -> dict[str, Any]:
        """Add one file's pieces to the index and return its meta data."""
        try:
            header, data_start = read_header(path)
            meta: dict[str, Any] = json.loads(header.pop("__metadata__")["gkd"])
            if meta.pop("format") != FORMAT or meta.pop("rank") != rank:
                raise CheckpointError(f"{path} does not have format {FORMAT}, or is not of rank {rank}.")
            end = 0
            for key, entry in header.items():
                (n_elements,), (begin, stop) = entry["shape"], entry["data_offsets"]
                dtype = DTYPES[entry["dtype"]]
                if begin != end or stop - begin != n_elements * dtype.itemsize:
                    raise ValueError(f"{key} has {n_elements} elements in bytes {begin}:{stop}, after byte {end}")
                if key.startswith("rng/"):
                    self._rng[rank, key.removeprefix("rng/")] = _Range(0, n_elements, dtype, path, data_start + begin)
                else:
                    name, kind, part, start = key.rsplit("/", 3)
                    ranges = self.index.setdefault((name, kind, int(part)), [])
                    if ranges and ranges[0].dtype != dtype:
                        raise ValueError(f"{key} is {dtype}, elsewhere {ranges[0].dtype}")
                    ranges.append(_Range(int(start), int(start) + n_elements, dtype, path, data_start + begin))
                end = stop
            n_bytes = path.stat().st_size - data_start
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if end != n_bytes:
            raise CheckpointError(f"{path} is truncated: it has {n_bytes} bytes of data, and {end} by its header.")
        return meta

    def _fill(self, target: memoryview, path: Path, offset: int) -> None:
        try:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            done = 0
            while done < len(target):
                n_read = os.preadv(self._open[path], [target[done:]], offset + done)
                if n_read == 0:
                    raise CheckpointError(f"{path} ends at byte {offset + done}: it was truncated while it was read.")
                done += n_read
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _describe(name: str, kind: str, part: int) -> str:
    return f"{kind} of {name} (tensor-parallel part {part})"


def check_same_student(
    folder: str | Path, saved: Mapping[str, Any], current: Mapping[str, Any], *, settings: Sequence[str], model: str
) -> None:
    """Raise CheckpointError that names the first difference between the checkpoint's student and this one.

    It begins with `check_trained`.

    Args:
        saved: the checkpoint's meta data.
        current: this student's meta data, without the step.
        settings: keys whose values must be equal.
        model: key of the model's tensors by name, which must be equal, too.
    """
    check_trained(folder, saved, current)
    if missing := {"step", *current} - saved.keys():
        raise CheckpointError(f"{folder} has no {', '.join(sorted(missing))} in its meta data.")
    for key in settings:
        if saved[key] != current[key]:
            raise CheckpointError(f"{folder} was saved with {key} = {saved[key]}, this student has {current[key]}.")
    for name in dict.fromkeys([*current[model], *saved[model]]):
        in_checkpoint = saved[model].get(name, "missing")
        here = current[model].get(name, "missing")
        if in_checkpoint != here:
            raise CheckpointError(f"{folder} has a different model: {name} = {in_checkpoint}, this student has {here}.")


def check_trained(folder: str | Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise CheckpointError if one student trains adapters and the other one does not, or they train different ones.

    Args:
        saved, current: meta data. `base`: digest of frozen weights; empty or missing without adapters. `shapes`: of all
            trained tensors by name; may be missing without adapters.
    """
    bases = saved.get("base", ""), current.get("base", "")
    if not all(bases) and any(bases):
        adapters, weights = ("the checkpoint", "this student") if bases[0] else ("this student", "the checkpoint")
        raise CheckpointError(
            f"{folder} belongs to another student: {adapters} trains adapters, {weights} all weights. Fix: use the "
            "actor.lora.rank of the checkpoint."
        )
    if bases[0] != bases[1]:
        raise CheckpointError(
            f"{folder} holds adapters of another base model than model.path. Fix: set model.path to the base model of "
            "the checkpoint."
        )
    theirs = saved.get("shapes", current.get("shapes", {}))
    ours = current.get("shapes", theirs)
    for one, other, side in ((theirs, ours, "this student"), (ours, theirs, "the checkpoint")):
        if missing := sorted(one.keys() - other.keys()):
            raise CheckpointError(
                f"{folder} belongs to another student: {side} does not train {missing[0]}. Fix: use the model.path, "
                "actor.lora.rank and actor.lora.targets of the checkpoint."
            )


def rng_state() -> dict[str, Tensor]:
    """Return the states of the generators of Python, numpy, torch and, if there is one, the current CUDA device.

    Returns:
        Name -> [n] uint8 on the CPU.
    """
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    states = {"python": _encoded(random.getstate()), "numpy": _encoded(numpy), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Tensor], source: str | Path) -> None:
    """Restore the states that `rng_state` returned on a machine of the same kind.

    Args:
        source: the file or folder of `states`, for the error.

    Raises:
        CheckpointError: `states` is not a result of `rng_state`.
    """
    try:
        version, internal, gauss_next = _decoded(states["python"])
        random.setstate((version, tuple(internal), gauss_next))
        numpy = _decoded(states["numpy"])
        numpy["state"]["key"] = np.array(numpy["state"]["key"], np.uint32)
        np.random.set_state(numpy)
        torch.set_rng_state(states["torch"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{source}: the random generators cannot be restored: {type(error).__name__}: {error}"
        ) from error


def _encoded(state: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _decoded(state: Tensor) -> Any:
    return json.loads(state.numpy().tobytes())
