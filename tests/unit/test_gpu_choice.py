"""The choice of the pools' GPUs on a host with a teacher server (cluster.gpus: auto)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gkd.cluster.gpu_table import TEACHER, GpuInfo, RankPlacement
from gkd.config.check import check_config
from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config
from gkd.scoring.teacher.gpus import with_own_gpus
from tests.refusals import refuses
from tests.unit.test_gpu_collect import GOOD, nvidia_smi, smi_script

__all__ = ["nvidia_smi"]  # a fixture

GPUS = "\n".join(f"{i}, GPU-{i}{i}, H100, 00000000:0{i}:00.0, 81920, 81000" for i in range(4)) + "\n"
AUTO = [*GOOD, "trainer.device=cuda", "cluster.gpus=auto"]


def rows(*gpus: str, uuids: bool = True) -> list[RankPlacement]:
    """Return one teacher worker on each of these GPUs; without UUIDs it is on the CPU."""
    return [
        RankPlacement(
            pool=TEACHER,
            rank=rank,
            host="another container of this machine",
            pid=1,
            cuda_visible_devices=gpu,
            gpus=(GpuInfo(id=gpu, uuid=f"GPU-{gpu}{gpu}" if uuids else None),),
        )
        for rank, gpu in enumerate(gpus)
    ]


def chosen(teacher: list[RankPlacement], *overrides: str, device: str = "cuda") -> list[int]:
    return with_own_gpus(load_config(None, [*AUTO, *overrides]), device, teacher).cluster.gpus


@pytest.mark.parametrize("visible", [None, "GPU-33,GPU-22,GPU-11,GPU-00"])
def test_the_pools_keep_off_the_teachers_gpus(
    visible: str | None, nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a GPU of a teacher on this host is chosen, or one of a teacher on another host is left out."""
    nvidia_smi(smi_script(GPUS, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert chosen(rows("0", "2")) == [1, 3]
    assert chosen([]) == chosen(rows("9")) == chosen(rows("0", uuids=False)) == [], "all"
    assert chosen(rows("0"), "cluster.gpus=[0,1]") == [0, 1], "the user's choice"
    assert chosen(rows("0", "1", "2", "3"), "cluster.teacher_gpu_share=0.1") == [], "all, shared with the teacher"
    assert chosen(rows("0"), "cluster.ray_address=h:1") == [] == chosen(rows("0"), device="cpu")


def test_visible_gpus_are_the_only_candidates(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if GPUs that the trainer does not see are chosen, or slices of GPUs are numbered."""
    nvidia_smi(smi_script(GPUS, ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    assert chosen(rows("0", "1")) == [2, 3]
    assert chosen(rows("0")) == [], "the teacher's GPU is not visible"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,MIG-a,MIG-b")
    assert chosen(rows("0")) == []


def test_too_few_gpus_are_left(nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run starts on the teacher's GPUs, or is refused without the key."""
    nvidia_smi(smi_script(GPUS, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for taken, *overrides in (("012",), ("0123", "trainer.colocate=true")):
        with refuses("cluster.gpus", "auto"):
            chosen(rows(*taken), *overrides)
    assert chosen(rows("0", "1", "2"), "trainer.colocate=true") == [3]


def test_the_word_auto(tmp_path: Path) -> None:
    """Fails if auto is refused in a file or on the command line, or another word is accepted."""
    (tmp_path / "x.yaml").write_text("cluster: {gpus: auto, ray_address: ''}\n")
    config = load_config(tmp_path / "x.yaml", GOOD)
    check_config(config)
    assert config.cluster.gpus == []
    assert load_config(tmp_path / "x.yaml", [*GOOD, "cluster.gpus=[3]"]).cluster.gpus == [3]
    (tmp_path / "x.yaml").write_text("cluster: {gpus: [0, 1]}\n")
    config = load_config(tmp_path / "x.yaml", [*GOOD, "cluster.gpus=auto"])
    assert config.cluster.gpus == [] and isinstance(config, Config)
    (tmp_path / "y.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "y.yaml") == config
