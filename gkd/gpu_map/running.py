"""Look again at the ranks of a job that runs, from the machine they are on, without asking Ray for anything.

What a process did to its environment after its start is not in /proc/PID/environ (Ray sets CUDA_VISIBLE_DEVICES so),
hence that column stays what the rank said itself. What is new: who lives, and who computes on which GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gkd.cluster.gpu_table import TEACHER, Card, Finding, GpuMap, RankPlace
from gkd.cluster.processes import look_at, root_among
from gkd.gpu_map.findings import judge, used_cards


def look_again(saved: GpuMap, host: str, machine: Sequence[Card], teacher: Sequence[RankPlace]) -> GpuMap:
    """The saved table with what is so now. Reads /proc of this machine.

    Args:
        host: this machine, as the ranks call it; rows of others are left as they are, and noted.
        machine: its GPUs with their processes now; empty: there are none, or nobody tells.
        teacher: its workers' rows now.
    """
    ranks = [row for row in saved.rows if row.pool != TEACHER]
    here = [row for row in ranks if row.host == host]
    gone = [row for row in here if not _lives(row)]
    owners = {row.pid: row for row in (*here, *(row for row in teacher if row.host == host)) if row not in gone}
    now = {card.uuid: _strangers_only(card, owners) for card in machine if card.uuid}
    rows = [_refreshed(row, now) if row.host == host else row for row in ranks]
    rows += [_refreshed(row, now) if row.host == host else row for row in teacher]
    verdicts = [
        Finding(
            kind="process_gone",
            ranks=(row.label,),
            problem=f"{row.label}, process {row.pid} on {host}, is not there any more.",
            fix="the job has ended or is ending; its log says why. Go on with trainer.resume=auto.",
        )
        for row in gone
    ]
    verdicts += _on_other_cards(saved, machine, owners)
    elsewhere = Counter(row.host for row in ranks if row.host != host)
    notes = tuple(
        f"{count} ranks on {other} are shown as they were at the start; run this there to look again"
        for other, count in elsewhere.items()
    )
    verdicts += judge(rows, saved.pools, loaded=True, gpus=saved.gpus)
    return replace(saved, rows=tuple(rows), verdicts=tuple(verdicts), notes=notes)


def _lives(row: RankPlace) -> bool:
    process = look_at(row.pid)
    return process is not None and row.started in (None, process.started)


def _strangers_only(card: Card, owners: Mapping[int, RankPlace]) -> Card:
    """Without the ranks, their children, and processes that cannot be seen from here (another container's)."""
    return replace(
        card, pids=tuple(pid for pid in card.pids if look_at(pid) is not None and root_among(pid, owners) is None)
    )


def _refreshed(row: RankPlace, now: Mapping[str, Card]) -> RankPlace:
    cards = (
        replace(now[card.uuid], id=card.id) if card.uuid and card.uuid in now else replace(card, pids=())
        for card in row.cards
    )
    return replace(row, cards=tuple(cards))


def _on_other_cards(saved: GpuMap, machine: Sequence[Card], owners: Mapping[int, RankPlace]) -> list[Finding]:
    """Ranks of the pools that compute on a GPU that is not theirs: NCCL or CUDA begun on the wrong one."""
    needs = {pool.name: pool for pool in saved.pools}
    found = []
    for card in machine:
        for pid in card.pids:
            root = root_among(pid, owners)
            row = owners[root] if root is not None else None
            if row is None or row.pool not in needs:
                continue
            own = used_cards(row, needs)
            in_parts = any((other.uuid or "").startswith("MIG-") for other in own)  # the driver names the whole card
            if not in_parts and card.uuid not in {other.uuid for other in own}:
                found.append(
                    Finding(
                        kind="wrong_gpu",
                        ranks=(row.label,),
                        problem=f"{row.label} (process {pid}) computes on GPU {card.id} ({card.uuid}), and its own is "
                        f"{', '.join(f'{other.id} ({other.uuid})' for other in own) or 'none'}.",
                        fix="restart the job with the CUDA_VISIBLE_DEVICES that Ray sets, and nothing that calls "
                        "torch.cuda.set_device before the rank does.",
                    )
                )
    return found
