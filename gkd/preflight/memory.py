"""Will it fit? The memory of every rank, worked out before any process starts and held against the real cards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gkd.cluster.gpus import machine_cards, visible_cards
from gkd.config.schema import ClusterConfig, Config
from gkd.errors import ConfigError, ModelError
from gkd.footprint import RankFootprint, check
from gkd.footprint.limits import gib, on_card, state_fits
from gkd.footprint.models import read_models
from gkd.footprint.table import footprint_table, kv_line, sums_line
from gkd.footprint.turns import turns_table
from gkd.log import get_logger

log = get_logger("preflight")


def check_memory(config: Config, device: str, teacher_hidden: int | None) -> None:
    """Logs the table; on CUDA a shortage is a warning, since the worst case (every sequence as long as it may be) need
    not come, unless weights, gradients and optimizer state alone do not fit.

    Args:
        device: "cpu" | "cuda"; on cpu only the sums are logged.
        teacher_hidden: hidden size of the teacher, where it sends hidden states.

    Raises:
        ConfigError: naming trainer.n_gpus_per_node: the actor's state does not fit on its cards.
    """
    config = replace(config, trainer=replace(config.trainer, device=device))
    try:
        models = read_models(config)
        refit = partial(models.footprint, teacher_hidden=teacher_hidden)
        found: Sequence[RankFootprint] = refit(config)
    except ModelError as error:  # fsdp2 takes models that name their sizes otherwise
        log.warning("nobody can tell how much memory this run will need: %s", error)
        return
    if device == "cpu":
        log.info("memory by rank, beside what imports take: %s", sums_line(found))
        return
    card_bytes = smallest_card(config.cluster)
    found = on_card(found, card_bytes, config)
    log.info("memory by rank:\n%s", footprint_table(found, card_bytes))
    log.info(kv_line(found, models.student.dims, card_bytes, config))
    if config.trainer.colocate:
        log.info(turns_table(found, card_bytes, config))
    if card_bytes is None:
        where = f"Ray at {config.cluster.ray_address} has the GPUs" if config.cluster.ray_address else "no driver tells"
        log.info("nobody knows here how much memory the cards have (%s): compare it yourself", where)
        return
    _refuse_state(found, card_bytes, config)
    for problem in check(found, card_bytes, config, refit):
        log.warning("memory: %s", problem)


def smallest_card(cluster: ClusterConfig) -> int | None:
    """Bytes of the GPU with the least memory among those that the pools may get; None: nobody here knows them.

    A cluster's GPUs are on other machines, which need not have cards like this one's. Those of cluster.gpus are asked
    of nvidia-smi, whose numbers they are; torch may count in another order.
    """
    if cluster.ray_address:
        return None
    if cluster.gpus:
        cards = visible_cards(os.environ.get("CUDA_VISIBLE_DEVICES"), machine_cards())
        found = [card.memory_total_mib for card in cards if card.id in map(str, cluster.gpus)]
        known = [mib << 20 for mib in found if mib]
        return min(known) if len(known) == len(cluster.gpus) else None
    import torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes, default=None)


def _refuse_state(found: Sequence[RankFootprint], card_bytes: int, config: Config) -> None:
    for part in found:
        if part.role == "actor" and not state_fits(part, card_bytes):
            spread = "actor.tp, actor.pp or more GPUs" if config.actor.strategy == "megatron" else "more GPUs"
            raise ConfigError(
                "trainer.n_gpus_per_node",
                config.trainer.n_gpus_per_node,
                f"weights, gradients and optimizer state of actor rank {part.rank} are {gib(part.state_bytes)}, a card "
                f"has {gib(card_bytes)}.",
                f"spread them over {spread}, use actor.strategy=fsdp2 with actor.fsdp_cpu_offload=true, or, if only "
                "some GPUs are that small, name the others in cluster.gpus.",
            )
