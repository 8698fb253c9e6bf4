"""Predict the memory of every rank before any process starts, and compare it with the GPUs."""

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
    """Log the predicted memory. On CUDA, warn about a shortage: the worst case (all sequences at full length) is rare.

    Args:
        device: "cpu" | "cuda"; on cpu only the totals are logged.
        teacher_hidden: hidden size of the teacher, if it sends hidden states.

    Raises:
        ConfigError: naming trainer.n_gpus_per_node: weights, gradients and optimizer state alone do not fit.
    """
    config = replace(config, trainer=replace(config.trainer, device=device))
    try:
        models = read_models(config)
        refit = partial(models.footprint, teacher_hidden=teacher_hidden)
        found: Sequence[RankFootprint] = refit(config)
    except ModelError as error:  # fsdp2 supports models with other names for their sizes
        log.warning("cannot estimate the memory of this run: %s", error)
        return
    if device == "cpu":
        log.info("estimated memory per rank, without libraries: %s", sums_line(found))
        return
    card_bytes = smallest_card(config.cluster)
    found = on_card(found, card_bytes, config)
    log.info("estimated memory per rank:\n%s", footprint_table(found, card_bytes))
    log.info(kv_line(found, models.student.dims, card_bytes, config))
    if config.trainer.colocate:
        log.info(turns_table(found, card_bytes, config))
    if card_bytes is None:
        where = f"those of {config.cluster.ray_address}" if config.cluster.ray_address else "no driver"
        log.info("the memory of the GPUs is unknown here (%s), so the estimate is not checked", where)
        return
    _refuse_state(found, card_bytes, config)
    for problem in check(found, card_bytes, config, refit):
        log.warning("memory: %s", problem)


def smallest_card(cluster: ClusterConfig) -> int | None:
    """Return the bytes of the smallest GPU that the pools may get; None if they are unknown.

    The GPUs of a cluster are on other machines and may differ. cluster.gpus are numbers of nvidia-smi; torch may number
    GPUs in another order.
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
                f"weights, gradients and optimizer state of actor rank {part.rank} need {gib(part.state_bytes)}, and a "
                f"GPU has {gib(card_bytes)}.",
                f"use {spread}, or actor.strategy=fsdp2 with actor.fsdp_cpu_offload=true. If only some GPUs are small, "
                "name the others in cluster.gpus.",
            )
