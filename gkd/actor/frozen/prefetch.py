"""Copy the next layer's weights to the GPU while a layer computes, for a lone rank with its shards in host memory.

With several ranks fully_shard gathers the next layer on a stream of its own. A lone rank has nothing to gather, so
torch 2.11 to 2.13 copy each layer on the stream that computes: 43% of the time of a 7B model's pass over micro-batches
of 16,384 tokens on an H200. Depends on private names of fully_shard's records, as `into_one_block` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gkd.actor.common.torch_versions import param_groups

_ALIGN = 64  # bytes; a multiple of every item size


class NextLayer:
    """Hooks of a model's layers, which fully_shard gathers one at a time in a forward pass without gradients.

    The memory of one layer is allocated during a pass. A pass copies what it uses: a refresh in between counts, and a
    pass that was not completed leaves nothing that the next one reads.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._buffer: Tensor | None = None
        self._layer: nn.Module | None = None  # whose copy is in the buffer
        self._copies: list[tuple[Any, Tensor, Tensor]] = []  # fully_shard's record, its shard in host memory, the copy
        # In front of fully_shard's own hooks, which read the shards, and behind them.
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            layer.register_forward_pre_hook(self._use, prepend=True)
            layer.register_forward_pre_hook(partial(self._copy, following))

    def _use(self, layer: nn.Module, unused: Any) -> None:
        """Let fully_shard read the layer's copy instead of its shards."""
        if layer is self._layer:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            for record, _, on_device in self._copies:
                record._sharded_param_data = on_device

    def _copy(self, following: nn.Module | None, *unused: Any) -> None:
        """Start to copy the layer that follows. fully_shard has read what was in the buffer."""
        for record, at_home, _ in self._copies:
            record._sharded_param_data = at_home
        self._layer, self._copies = following, []
        if following is None:
            self._buffer = None
            return
        records = [record for group in param_groups(following) for record in group.fsdp_params]
        shards: list[Tensor] = [record._sharded_param_data for record in records]
        starts = [0]
        for shard in shards:
            starts.append(starts[-1] - (-shard.nbytes // _ALIGN) * _ALIGN)
        if self._buffer is None or len(self._buffer) < starts[-1]:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)  # the old one is free from here on
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for record, shard, start in zip(records, shards, starts, strict=False):
                on_device = self._buffer[start : start + shard.nbytes].view(shard.dtype).view(shard.shape)
                on_device.copy_(shard, non_blocking=True)
                self._copies.append((record, shard, on_device))
