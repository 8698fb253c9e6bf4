"""Does it fit? Footprints against a card: what is wrong, which keys change it, and by how much.

A fix is tried before it is named: a changed copy of the settings has to pass `check_config`, and its footprint has to
be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from gkd.config.check import check_config
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.footprint.rollout import sequences_together
from gkd.footprint.turns import GENERATE, resting_bytes, turns
from gkd.footprint.types import RankFootprint
from gkd.memory.remedies import ACTOR_REMEDIES, ENGINE_REMEDIES, ENGINE_TP
from gkd.memory.remedy import Changes, as_yaml

_GIB = 1 << 30
_MOST_UTILIZATION = 0.95  # that is recommended

Refit = Callable[[Config], Sequence[RankFootprint]]  # the footprints of changed settings, as `footprint` gives them


def check(
    footprints: Sequence[RankFootprint], card_bytes: int, config: Config, refit: Refit | None = None
) -> list[str]:
    """Problems with their fixes, one line each; empty: it fits.

    Args:
        footprints: of `footprint`, and of `teacher_footprint` if the teacher's are to be checked, too.
        card_bytes: memory of one card; every rank has one to itself.
        refit: None: no fixes are looked for.

    Raises:
        ValueError: card_bytes is not positive.
    """
    if card_bytes <= 0:
        raise ValueError(f"a card of {card_bytes} bytes")
    problems = []
    case = _Case(footprints, card_bytes, config)
    for part in footprints:
        for what, lack in _missing(part, case).items():
            if lack <= 0:
                continue
            fixes = ["more cards for each teacher worker"] if part.role == "teacher" else []
            if refit is not None and part.role != "teacher":
                place = [other for other in footprints if other.role == part.role].index(part)
                fixes = list(_fixes(part, place, what, case, refit)) or ["a larger card"]
            fix = f" Fix: {'; '.join(fixes)}." if fixes else ""
            problems.append(f"{_sentence(part, what, lack, case)}.{fix}")
    return problems


def state_fits(part: RankFootprint, card_bytes: int) -> bool:
    """Weights, gradients and optimizer state alone; where they do not fit, no smaller micro-batch helps."""
    return part.state_bytes <= card_bytes


def kv_room_bytes(part: RankFootprint, card_bytes: int, config: Config) -> int:
    """What rollout.gpu_memory_utilization leaves of a card for the KV cache; may be negative."""
    others = sum(part.parts.get(name, 0) for name in ("weights", "activations", "logits", "context"))
    return round(card_bytes * config.rollout.gpu_memory_utilization) - others


def on_card(footprints: Sequence[RankFootprint], card_bytes: int | None, config: Config) -> list[RankFootprint]:
    """With the KV cache that engines will make on such a card; what their sequences want is `kv_wanted` then."""
    if card_bytes is None or config.trainer.device == "cpu":
        return list(footprints)
    return [_with_cache(part, card_bytes, config) if part.role == "rollout" else part for part in footprints]


def gib(n_bytes: float) -> str:
    """1.5 GiB"""
    return f"{n_bytes / _GIB:.2f} GiB"


def _with_cache(part: RankFootprint, card_bytes: int, config: Config) -> RankFootprint:
    cache = {"kv_cache": max(0, kv_room_bytes(part, card_bytes, config)), "kv_wanted": _wanted(part)}
    return replace(part, parts={**part.parts, **cache})


def _wanted(part: RankFootprint) -> int:
    return part.parts.get("kv_wanted", part.parts["kv_cache"])


@dataclass(frozen=True, slots=True)
class _Case:
    footprints: Sequence[RankFootprint]  # of all ranks
    card_bytes: int
    config: Config

    @property
    def shared(self) -> bool:
        """Do actor and engine have one card?"""
        return self.config.trainer.colocate and self.config.trainer.device != "cpu"

    def turns(self, actor: RankFootprint) -> dict[str, int]:
        (engine,) = (part for part in self.footprints if part.role == "rollout")
        return turns(actor, engine, self.card_bytes, self.config)


def _missing(part: RankFootprint, case: _Case) -> dict[str, int]:
    """Bytes that are not there, by what for; 0 and less: there is enough.

    On CUDA an engine takes its share whatever it needs. vLLM does not start without room in its cache for one sequence
    of full length; and the share must leave room for a weight sync. On a card that actor and engine share, each turn
    has to fit.
    """
    card_bytes, config = case.card_bytes, case.config
    if case.shared and part.role == "actor":
        return {turn: size - card_bytes for turn, size in case.turns(part).items()}
    if part.role != "rollout" or config.trainer.device == "cpu":
        return {"all": part.total_bytes - card_bytes}
    sequence = _wanted(part) // sequences_together(config) - kv_room_bytes(part, card_bytes, config)
    if case.shared:
        return {"sequence": sequence}
    sync = part.parts["weight_sync"] - round(card_bytes * (1 - config.rollout.gpu_memory_utilization))
    return {"sequence": sequence, "sync": sync}


def _sentence(part: RankFootprint, what: str, lack: int, case: _Case) -> str:
    card_bytes, config = case.card_bytes, case.config
    who = f"{part.role} rank {part.rank}"
    if what == "sequence":
        longest = derive(config).max_sequence_length
        return f"{who}: {gib(lack)} are missing for the KV cache of one sequence of {longest} tokens"
    if what == "sync":
        share = config.rollout.gpu_memory_utilization
        short = f"{gib(lack)} too little for a weight-sync bucket of {gib(part.parts['weight_sync'])}"
        return f"{who}: rollout.gpu_memory_utilization {share} leaves {short}"
    if what == "all":
        return f"{who} needs {gib(part.total_bytes)} of a card of {gib(card_bytes)}, {gib(lack)} too much"
    both = gib(lack + card_bytes)
    return f"{who} and its engine need {both} of a card of {gib(card_bytes)} ({what}), {gib(lack)} too much"


def _fixes(part: RankFootprint, place: int, what: str, case: _Case, refit: Refit) -> Iterator[str]:
    """What helps, the largest saving first. Nothing that makes another shortage of this rank, or makes one larger.

    Args:
        place: of the rank among those of its role.
        what: is missing, of `_missing`.
    """
    missing, config = _missing(part, case), case.config
    tried = _actor_changes(part, what, case) if part.role == "actor" else _rollout_changes(part, case)
    savings = []
    for changes in filter(None, tried):
        changed = deepcopy(config)
        for key, value in changes.items():
            section, _, name = key.partition(".")
            setattr(getattr(changed, section), name, value)
        try:
            check_config(changed)
            all_then = refit(changed)
            then = [other for other in all_then if other.role == part.role][place]
        except (ConfigError, ModelError):
            continue  # not to be had with this model or these pools
        left = _missing(then, _Case(all_then, case.card_bytes, changed))
        saved = missing[what] - left.get(what, missing[what])
        if saved > 0 and all(left.get(other, 0) <= max(0, lack) for other, lack in missing.items()):
            text = " with ".join(f"{key} {as_yaml(value)}" for key, value in changes.items())
            savings.append((saved, text, left[what] <= 0))
    for saved, text, enough in sorted(savings, reverse=True):
        yield f"{text}: saves {gib(saved)}{', enough' if enough else ''}"


def _actor_changes(part: RankFootprint, what: str, case: _Case) -> Iterator[Changes]:
    config = case.config
    rows = [row for row in ACTOR_REMEDIES if row.is_tried]
    yield from (row.next(config) for row in (rows if not config.trainer.colocate else [*rows, ENGINE_TP]))
    lower = math.floor(100 * (1 - resting_bytes(part) / case.card_bytes)) / 100
    if what == GENERATE and 0 < lower < config.rollout.gpu_memory_utilization:
        yield {"rollout.gpu_memory_utilization": lower}


def _rollout_changes(part: RankFootprint, case: _Case) -> Iterator[Changes]:
    card_bytes, config = case.card_bytes, case.config
    utilization, sync = config.rollout.gpu_memory_utilization, part.parts["weight_sync"]
    if config.trainer.device != "cpu":
        lack = _missing(part, case)["sequence"]
        higher = math.ceil(100 * (utilization + lack / card_bytes)) / 100
        if utilization < higher <= _MOST_UTILIZATION:
            yield {"rollout.gpu_memory_utilization": higher}
        lower = math.floor(100 * (1 - sync / card_bytes)) / 100
        if 0 < lower < utilization:
            yield {"rollout.gpu_memory_utilization": lower}
    on_cpu = config.trainer.device == "cpu"
    yield from (row.next(config) for row in ENGINE_REMEDIES if row.is_tried and (on_cpu or row.device != "cpu"))
