"""Every check of the settings by themselves: a wrong config dies here, by name.

Pure: looks at the config only. What needs a look at files or sockets is in `gkd.preflight.run`.
"""

from __future__ import annotations

from gkd.config.check_losses import check_backend, check_mixture, check_reference, check_scheduler, check_signal
from gkd.config.check_pools import check_cluster, check_pools, check_sizes, check_strategy
from gkd.config.check_values import check_ranges, check_required
from gkd.config.schema import Config

_CHECKS = (
    check_ranges,
    check_required,
    check_strategy,
    check_pools,
    check_cluster,
    check_sizes,
    check_scheduler,
    check_signal,
    check_backend,
    check_mixture,
    check_reference,
)


def check_config(config: Config) -> None:
    """Raises ConfigError for the first thing that is wrong."""
    for check in _CHECKS:
        check(config)
