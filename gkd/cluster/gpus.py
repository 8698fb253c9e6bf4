"""The GPUs of this machine as its driver tells them, in bounded time and without a CUDA context.

`nvidia-smi` and not its library: a call into a driver that is stuck never returns, a program can be left behind.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from gkd.cluster.gpu_table import Card, visible_ids
from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("gpus")

_LIMIT_S = 10.0
_LEAST_GIB, _MOST_GIB = 2**-10, 2**20  # 1 MiB to 1 PiB
_CARDS = "--query-gpu=index,uuid,name,pci.bus_id,memory.total,memory.free"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid"
_SYS = Path("/sys/bus/pci/devices")


def machine_cards() -> list[Card]:
    """All of them; empty where there is no nvidia-smi, or none that we may run (one that fails or hangs is
    logged).
    """
    cards = parse_cards(_ask(_CARDS))
    return with_processes(cards, _ask(_PROCESSES)) if cards else []


def card_bytes(gpu_gib: float | None) -> int | None:
    """Memory of the cards that a tool plans for: what was given, else this machine's smallest; None: it has none.

    Raises:
        ConfigError: `gpu_gib`, of `--gpu-gib`, is no size.
    """
    if gpu_gib is None:
        sizes = [card.memory_total_mib for card in machine_cards() if card.memory_total_mib]
        return min(sizes) << 20 if sizes else None
    if not _LEAST_GIB <= gpu_gib <= _MOST_GIB:  # also true of NaN
        fix = "give its size in GiB, for example 80."
        raise ConfigError("--gpu-gib", gpu_gib, "no card has so much memory, or so little.", fix)
    return round(gpu_gib * 2**30)


def visible_cards(visible: str | None, machine: Sequence[Card]) -> tuple[Card, ...]:
    """What a process with this CUDA_VISIBLE_DEVICES sees, in its order; ids as it names them.

    Args:
        machine: all cards; empty: nobody knows them, and every entry counts.
    """
    if visible is None:
        return tuple(machine)
    entries = visible_ids(visible)
    if not machine:
        return tuple(Card(id=entry) for entry in entries)
    found = (_find(entry, machine) for entry in entries)
    return tuple(card for card in takewhile(lambda card: card is not None, found) if card is not None)


def parse_cards(listing: str) -> list[Card]:
    """Cards of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; "[N/A]" and the like are None."""
    cards = []
    for line in listing.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 6 and parts[0].isdecimal():
            index, uuid, name, bus, total, free = (None if part.startswith("[") else part for part in parts)
            assert index is not None
            cards.append(
                Card(
                    id=index,
                    uuid=uuid,
                    name=name,
                    pci_bus=bus,
                    numa_node=_numa_node(bus) if bus else None,
                    memory_total_mib=_number(total),
                    memory_free_mib=_number(free),
                )
            )
    return cards


def with_processes(cards: Sequence[Card], listing: str) -> list[Card]:
    """The cards with the processes of `nvidia-smi --query-compute-apps=gpu_uuid,pid`."""
    pids: dict[str, list[int]] = {}
    for line in listing.splitlines():
        uuid, _, pid = (part.strip() for part in line.partition(","))
        if pid.isdecimal():
            pids.setdefault(uuid, []).append(int(pid))
    return [replace(card, pids=tuple(pids.get(card.uuid or "", ()))) for card in cards]


def _find(entry: str, machine: Sequence[Card]) -> Card | None:
    if entry.startswith("MIG-"):  # a part of a card; only the driver's own list knows of which
        return Card(id=entry, uuid=entry)
    for card in machine:
        if card.id == entry or (entry.startswith("GPU-") and (card.uuid or "").startswith(entry)):
            return replace(card, id=entry)
    return None


def _numa_node(bus: str) -> int | None:
    """nvidia-smi writes 00000000:18:00.0, the kernel 0000:18:00.0, and -1 for a machine without NUMA."""
    file = _SYS / bus[-12:].lower() / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _ask(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (FileNotFoundError, PermissionError):
        return ""
    except subprocess.TimeoutExpired:
        log.warning("nvidia-smi does not answer within %.0f s: is the driver stuck? The GPUs stay unknown", _LIMIT_S)
        return ""
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        log.warning("nvidia-smi ended with exit code %d: %s. The GPUs stay unknown", done.returncode, said)
        return ""
    return done.stdout
