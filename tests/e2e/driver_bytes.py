"""Count the bytes per sequence that pass through the driver, for batches of two sizes and two lengths.

    python -m tests.e2e.driver_bytes --config X.yaml key=value ...

Accepts the arguments of `gkd.main_gkd` (a teacher server must be running), starts the run's pools, processes some
batches (rollout, scores, train step), and prints one JSON object: for each batch its name and these numbers. The last
entry, "control", is a result of 50,000 bytes that Ray may inline and that is then fetched.

- read_bytes, written_bytes: data and metadata of every object that this process deserialised (results that it
  fetched) or serialised (arguments that are not handles, puts). Counted in Ray's own serialiser, so nothing
  that becomes a Python object here, or was one, is missed. Handles are not counted.
- inline_bytes: growth of Ray's in-process store, which holds the results that were sent to the driver instead of an
  object store, fetched or not. It is measured while all handles of the batch are alive.
- tcp_bytes: received and acknowledged by the other end, of all TCP connections of this process (TCP_INFO): Ray's calls
  with their arguments, and its bookkeeping of handles. Not counted: the Unix socket to the local Ray daemon, which
  carries names of objects; the objects themselves are in shared memory.

Greedy responses (`GreedyReport`) and token losses send human-readable samples to the driver. They do not
belong to a step and are not in these batches.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.serialization import SerializationContext
from ray._private.worker import global_worker

from gkd.config.load import load_config
from gkd.preflight.run import preflight
from gkd.start.launcher import started_roles
from gkd.trainer import Roles
from gkd.types import Prompt

# (prompts, longest response / data.max_response_length) of each batch; the first one warms everything up.
BATCHES = {"warm-up": (8, 1.0), "small": (8, 1.0), "large": (40, 1.0), "short": (40, 0.25)}
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # of struct tcp_info, linux/tcp.h; since Linux 4.1


@dataclass
class Counters:
    """Bytes through this process so far."""

    read_bytes: int = 0
    written_bytes: int = 0
    tcp: dict[str, int] = field(default_factory=dict)  # by socket: what it had when it was last seen

    def look(self) -> dict[str, int]:
        for inode, connection in _tcp_sockets():
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            acked, received = (struct.unpack_from("<Q", info, at)[0] for at in (_BYTES_ACKED, _BYTES_RECEIVED))
            self.tcp[inode] = acked + received
        return {
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "inline_bytes": global_worker.core_worker.get_local_memory_store_bytes_used(),
            "tcp_bytes": sum(self.tcp.values()),
        }


def _tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            copy = os.dup(int(number)) if name.startswith("socket:") else -1
        except OSError:  # closed since the folder was listed; the folder's own descriptor always is
            continue
        if copy < 0:
            continue
        with socket.socket(fileno=copy) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield name, found


@contextmanager
def counted() -> Iterator[Counters]:
    """Counts in Ray's serialiser of this process."""
    counters = Counters()
    read, write = SerializationContext.deserialize_objects, SerializationContext.serialize

    def deserialize_objects(self: Any, objects: Any, *args: Any) -> Any:
        counters.read_bytes += sum(len(o.data or b"") + len(o.metadata or b"") for o in objects)
        return read(self, objects, *args)

    def serialize(self: Any, value: Any) -> Any:
        done = write(self, value)
        counters.written_bytes += done.total_bytes + len(done.metadata)
        return done

    SerializationContext.deserialize_objects, SerializationContext.serialize = deserialize_objects, serialize
    try:
        yield counters
    finally:
        SerializationContext.deserialize_objects, SerializationContext.serialize = read, write


def measure(roles: Roles, prompts: Sequence[Prompt], n: int, counters: Counters) -> dict[str, int]:
    """One batch down the road; what it added to the counters."""
    before = counters.look()
    answers = roles.rollout.generate(prompts, prompt_indices=range(len(prompts)), n=n, temperature=1.0, seed=1)
    pending = [roles.scoring.submit(chunk) for chunk in answers]
    batch = roles.scoring.collect(pending)
    roles.actor.train_step(batch)
    after = counters.look()
    return {
        "n_sequences": sum(chunk.rollouts.n_sequences for chunk in batch),
        "n_prompt_tokens": sum(int((c.rollouts.n_tokens - c.rollouts.n_response).sum()) for c in batch),
        "n_response_tokens": sum(int(c.rollouts.n_response.sum()) for c in batch),
        "n_teacher_bytes": sum(chunk.n_teacher_bytes for chunk in batch),
        **{name: after[name] - before[name] for name in after},
    }


def control(counters: Counters) -> dict[str, int]:
    """Return the counts of a result that does pass through this process."""
    before = counters.look()
    ref = ray.remote(lambda: bytes(50_000)).options(num_cpus=0.1).remote()
    ray.wait([ref])
    ray.get(ref)
    after = counters.look()
    return {name: after[name] - before[name] for name in after}


def main(argv: Sequence[str]) -> None:
    config = load_config(argv[argv.index("--config") + 1], [word for word in argv if "=" in word])
    plan = preflight(config)
    longest = config.data.max_response_length
    results: dict[str, dict[str, int]] = {}
    with counted() as counters, started_roles(plan) as roles:
        for name, (n_prompts, share) in BATCHES.items():
            # The rollout pool reads the length for each batch. Other settings would need other processes.
            object.__setattr__(config.data, "max_response_length", int(longest * share))
            results[name] = measure(roles, plan.train_prompts[:n_prompts], config.rollout.n, counters)
        results["control"] = control(counters)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
