"""Check settings against their limits and against each other. `gkd.preflight` checks files and sockets."""

from __future__ import annotations

from gkd.config.check_losses import (
    check_backend,
    check_mixture,
    check_reference,
    check_scheduler,
    check_signal,
    check_support,
    check_tail,
    check_token_weights,
)
from gkd.config.check_pools import check_adapter_sync, check_cluster, check_pools, check_sizes, check_strategy
from gkd.config.check_reward import check_reward
from gkd.config.check_routes import check_routes
from gkd.config.check_values import check_values
from gkd.config.derived import Derived, derive
from gkd.config.schema import Config
from gkd.config.teacher_prompt import check_teacher_prompt

_CHECKS = (
    check_strategy,
    check_pools,
    check_cluster,
    check_adapter_sync,
    check_sizes,
    check_scheduler,
    check_signal,
    check_support,
    check_tail,
    check_backend,
    check_token_weights,
    check_mixture,
    check_routes,
    check_teacher_prompt,
    check_reference,
    check_reward,
)


def check_config(config: Config) -> Derived:
    """Return what follows from the settings.

    Raises:
        ConfigError: names every value outside its limits, or the first contradiction between keys.
    """
    check_values(config)
    derived = derive(config)
    for check in _CHECKS:
        check(config, derived)
    return derived
