"""The dense bfloat16 peak of a card by its name, from NVIDIA's data sheets."""

from __future__ import annotations

import re

from tests.bench.teacher_report import Figure

# TFLOP/s without sparsity, products summed in float32. The first row that is a word of the name counts.
PEAKS = {
    "GB300": 2500.0, "GB200": 2500.0, "B300": 2250.0, "B200": 2250.0, "GH200": 989.0,
    "H200 NVL": 835.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H800": 989.0, "H20": 148.0,
    "A100": 312.0, "A800": 312.0, "A40": 150.0, "A30": 165.0, "A10": 125.0,
    "L40S": 362.0, "L40": 181.0, "L4": 121.0,
    "RTX 5090": 210.0, "RTX 4090": 165.0, "RTX 3090": 71.0,
}  # fmt: skip


def peak_tflops(card: str) -> float | None:
    """Return the peak of a card as `torch.cuda.get_device_name` names it; None: unknown, or a slice of one (MIG)."""
    if re.search(r"\bMIG\b", card):
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", card)), None)


def share_of_peak(name: str, tflops: float, peak: float | None, at_least: float | None = None) -> Figure:
    """Return the share of the peak with its bar; of an unknown card the rate, without one."""
    if peak is None:
        return Figure(name, tflops, "TFLOP/s", note="the peak of this card is unknown: no share, and no bar")
    return Figure(name, tflops / peak, at_least=at_least)
