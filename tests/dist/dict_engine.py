"""An engine with the product's weight transfer and a dict as its model.

In a file of its own: a process of this class imports the file that defines it, and the test imports both backends.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gkd.weight_sync.buckets import Bucket, digest
from gkd.weight_sync.group import GroupSpec, TransferGroup
from gkd.weight_sync.transfer import receive
from tests.processes import wait_until


class DictEngine:
    """Holds what it received; dies in the middle of a transfer if it was told to."""

    def __init__(self) -> None:
        self.groups: list[TransferGroup] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.version, self.dies = 0, False

    def join_groups(self, specs: list[GroupSpec]) -> None:
        for group in self.groups:
            group.close()
        self.groups = [TransferGroup(spec, torch.device("cpu")) for spec in specs]

    def receive(self, plans: list[list[Bucket]], policy_version: int, content: str) -> int:
        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            if self.dies and self.weights:
                os._exit(1)
            self.weights |= {name: tensor.clone() for name, tensor in tensors}

        if self.dies:
            self.weights = {}
        n_bytes = sum(receive(group, plan, load) for group, plan in zip(self.groups, plans, strict=True))
        self.version = policy_version
        return n_bytes

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.weights.items()}

    def state(self) -> tuple[int, dict[str, str]]:
        return self.version, self.digests()

    def transports(self) -> list[str]:
        return [group.transport for group in self.groups]

    def die_in_transfer(self) -> None:
        self.dies = True

    def wait_for(self, path: Path) -> None:
        wait_until(path.exists, 600.0, str(path))
