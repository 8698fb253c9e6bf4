"""One Ray cluster for all files whose tests do not depend on how it was started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Start a node with four logical GPUs, and return the address of its cluster."""
    from tests.dist.ray_nodes import NodeSpec, ray_nodes  # imports Ray, which most files do not need

    with ray_nodes([NodeSpec(gpus=4, cpus=16)]) as address:
        yield address
