"""Real worlds in tests: one process per rank, one thread each, a bounded wait, child tracebacks surfaced."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any, Literal

from gkd.errors import GkdError
from tests.device import backend, cards, environment, need_cards, on_cuda, patience, rank_device

if TYPE_CHECKING:
    from torch.distributed import Store

# What almost every rank imports. The fork server imports it once, in a process with one thread and no process group;
# each rank is a fork of that process and saves 10 CPU seconds.
PRELOAD = ("torch", "gkd.actor.megatron.student", "gkd.actor.fsdp.student", "pytest")
RANK_ENV = {"OMP_NUM_THREADS": "1"}
# As Ray and `gkd.start.pools` set it for a run's ranks; the card is added.
CUDA_ENV = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def free_port() -> int:
    """Return a TCP port on loopback that is free, and that the kernel gives to no connection of another test."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().randrange(20_000, 32_000)  # between Ray's ports and the kernel's own choice
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    start: Literal["forkserver", "spawn"] = "forkserver",
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` new processes with torch.distributed on the tests' device.

    Blocks until all are done; kills the others as soon as one fails. On CUDA each rank sees one card of its own, and
    the test is skipped if there are too few.

    Args:
        fn: a module-level function (it is imported again in the children); its result is pickled.
        timeout_s: for all of it, start-up included, times `patience()`.
        start: how a rank starts. "forkserver": as a fork of a process that has imported `PRELOAD`; it has the
            environment of the first such call. "spawn": as a process that has imported nothing, with the caller's
            environment. Take "spawn" for tests of imports or of the environment. On CUDA it is always "spawn".

    Returns:
        The ranks' results, in rank order.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), died or did not finish in time.
    """
    import torch.distributed as dist

    need_cards(world_size)
    seen = cards() if on_cuda() else []
    preloaded = PRELOAD if start == "forkserver" and not on_cuda() else ()
    timeout_s *= patience()
    context = _forkserver() if preloaded else mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port  # never free, unlike one that is only noted
    receivers: list[Connection] = []
    processes = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, fn, rank, world_size, port, timeout_s, args, preloaded))
        with environment({"CUDA_VISIBLE_DEVICES": seen[rank], **CUDA_ENV} if on_cuda() else {}):
            process.start()
        sender.close()  # so that a dead child reads as end-of-file
        receivers.append(receiver)
        processes.append(process)
    try:
        return _collect(receivers, timeout_s)
    finally:
        for process in processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()


class Measured(dict[Any, Any]):
    """Results by world size, or by a key that has one, measured at first use.

    Where cards are lacking, only the tests of larger worlds are skipped.
    """

    def __init__(self, measure: Callable[[Any], Any]) -> None:
        super().__init__()
        self._measure = measure

    def __missing__(self, key: Any) -> Any:
        self[key] = self._measure(key)
        return self[key]


def join_group(store: Store, rank: int, world_size: int, timeout: timedelta | None = None) -> None:
    """Make the process group of all ranks on the tests' device, as `gkd.actor.rank` does."""
    import torch
    import torch.distributed as dist

    if on_cuda():
        torch.cuda.set_device(rank_device())
    dist.init_process_group(backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process the only rank."""
    import torch.distributed as dist

    join_group(dist.HashStore(), 0, 1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def destroy_groups() -> None:
    """Destroy Megatron's groups, so that a rank can build a student with another layout. Collective.

    For ranks with many layouts: `destroy_model_parallel` is faster, but leaves the threads of each group behind. One of
    them polls, and those of hundreds of groups keep the processors busy.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from torch.distributed.distributed_c10d import _world

    parallel_state.destroy_model_parallel()
    for each in gc.get_objects():
        if type(each) is DistributedDataParallel:
            # Its hooks on autograd's nodes hold it, and so its groups. The garbage collector does not see such cycles.
            vars(each).clear()
    gc.collect()  # students have reference cycles, and own groups
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _forkserver() -> ForkServerContext:
    """Return the context whose fork server has imported `PRELOAD`; start that server at the first call."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with environment(RANK_ENV):  # before the imports: OpenMP and BLAS read it once, and threads do not survive a fork
        forkserver.ensure_running()
    return context


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(receivers):
        pending = [rank for rank in range(len(receivers)) if rank not in results]
        ready = wait_any([receivers[rank] for rank in pending], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {pending} did not finish within {timeout_s:g} s")
        for rank in [rank for rank in pending if receivers[rank] in ready]:
            try:
                ok, value = receivers[rank].recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a traceback") from None
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _child(
    sender: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    args: tuple[Any, ...],
    preloaded: tuple[str, ...],
) -> None:
    os.environ.update(RANK_ENV)
    missing = [name for name in preloaded if name not in sys.modules]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        assert not missing, f"PRELOAD: the fork server could not import {missing}"  # it prints nothing itself
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        join_group(store, rank, world_size, timeout)
        result = fn(rank, world_size, *args)
        dist.destroy_process_group()
        sender.send((True, result))
    except BaseException:  # the parent re-raises it as this rank's failure
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()


def caught(action: Callable[[], Any]) -> tuple[str, str]:
    """(type, text) of the GkdError that `action` ends with; ("no error", "") if with none."""
    try:
        action()
    except GkdError as error:
        return type(error).__name__, str(error)
    return "no error", ""
