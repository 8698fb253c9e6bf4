"""Check the stand-in: right values on a card, a collective over two cards, and memory that is charged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn import functional as F


def values(device: str) -> list[torch.Tensor]:
    """Return results of a small training step, an index operation and a sort, computed on `device`."""
    torch.manual_seed(0)
    x = torch.randn(64, 32).to(device)
    w = torch.randn(48, 32).to(device).requires_grad_()
    loss = F.cross_entropy(x @ w.T, torch.arange(64, device=device) % 48)
    loss.backward()
    optimizer = torch.optim.AdamW([w], lr=0.1, fused=True)
    optimizer.step()
    mask = x[:, 0] > 0
    return [t.detach().cpu() for t in (loss, w.grad, w, x[mask], x.sort(-1)[1], x.to(torch.bfloat16) @ x.T.bfloat16())]


def rank(number: int, store: str) -> None:
    """Take part in NCCL operations between two cards."""
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=number, world_size=2)
    x = torch.arange(1000, device="cuda") * (number + 1.0)
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), torch.arange(1000) * 3.0)
    y = torch.full((10,), float(number), device="cuda")
    dist.broadcast(y, 1)
    assert bool((y == 1).all())
    if number == 0:
        dist.send(x, 1)
    else:
        dist.recv(z := torch.zeros_like(x), 0)
        assert torch.equal(z, x)
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) > 1:
        return rank(int(sys.argv[1]), sys.argv[2])
    assert torch.cuda.device_count() == int(os.environ["DRY_CARD_COUNT"])
    for a, b in zip(values("cpu"), values("cuda"), strict=True):
        torch.testing.assert_close(a, b)
    print("values: equal to the CPU's")
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert free - torch.cuda.mem_get_info()[0] == 64 << 20
    del held
    print("memory: charged to the card")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, __file__, str(r), f"{folder}/store"]) for r in range(2)]
        assert not any([process.wait() for process in ranks])
    print("NCCL: all_reduce, broadcast, send and recv between two cards")


if __name__ == "__main__":
    main()
