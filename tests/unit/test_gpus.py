"""Which worker gets which GPUs, and the refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from teacher_server.errors import SettingsError
from teacher_server.wire.status import Gpu
from teacher_server.worker.gpus import FoundGpus, find_gpus, may_need_gpus, own_gpus, parse_nvidia_smi, plan_workers
from tests.unit.test_server_settings import in_file, settings_of

UUIDS = {str(i): f"GPU-{i}{i}" for i in range(8)}
EIGHT = FoundGpus(tuple(UUIDS), "nvidia-smi", UUIDS)
NONE = FoundGpus((), "", {})

SMI = """GPU 0: NVIDIA H200 (UUID: GPU-aa-1)
GPU 1: NVIDIA A100 (UUID: GPU-bb-2)
  MIG 1g.5gb      Device  0: (UUID: MIG-cc-3)
  MIG 2g.10gb     Device  1: (UUID: MIG-dd-4)
"""


def groups(*words: str, found: FoundGpus = EIGHT) -> list[tuple[str, ...]]:
    return [plan.gpus for plan in plan_workers(settings_of(*words), found)]


@pytest.mark.parametrize(
    "flags,expected",
    [
        (("--gpus", "4,5,6,7", "--tensor-parallel-size", "2"), [("4", "5"), ("6", "7")]),
        (("--gpus", "6,4"), [("6",), ("4",)]),
        (("--tensor-parallel-size", "4"), [("0", "1", "2", "3"), ("4", "5", "6", "7")]),
        (("--n-workers", "2", "--tensor-parallel-size", "3"), [("0", "1", "2"), ("3", "4", "5")]),
        (("--gpus", "GPU-33,2"), [("GPU-33",), ("2",)]),
        (("--device", "cpu"), [()]),
        (("--device", "cpu", "--n-workers", "3"), [(), (), ()]),
        (("--device", "cpu", "--gpus", "a,b"), [("a",), ("b",)]),
        (("--engine", "trivial", "--n-workers", "2"), [(), ()]),
    ],
)
def test_groups(flags: tuple[str, ...], expected: list[tuple[str, ...]]) -> None:
    """Would break if a worker got a GPU that was not meant for it."""
    assert groups("--model", "/m", "--engine", "vllm", *flags) == expected


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--gpus", "4,4"), ("GPU 4", "twice")),
        (("--gpus", "4,GPU-44"), ("GPU GPU-44", "twice")),
        (("--gpus", "4,5,6", "--tensor-parallel-size", "2"), ("3 GPUs", "--tensor-parallel-size 2")),
        (("--gpus", "4,5", "--n-workers", "1"), ("2 GPUs", "--n-workers")),
        (("--n-workers", "9"), ("8 GPUs", "9 groups")),
        (("--tensor-parallel-size", "16"), ("8 GPUs", "--tensor-parallel-size 16")),
        (("--tensor-parallel-size", "3"), ("8 GPUs", "divisible")),
        (("--gpus", "8"), ("GPU 8", "not among")),
    ],
)
def test_refusals(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Would break if two model copies met on one GPU, or a GPU were left idle without a word."""
    with pytest.raises(SettingsError) as caught:
        groups("--model", "/m", "--engine", "vllm", *flags)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_without_a_gpu() -> None:
    """Would break if --gpus on a machine without any started on its CPU, or --device cuda waited for torch to fail."""
    assert groups("--model", "/m", found=NONE) == [()]
    with pytest.raises(SettingsError, match="no GPU found"):
        groups("--model", "/m", "--gpus", "0", found=NONE)
    with pytest.raises(SettingsError, match="0 GPUs with --device cuda"):
        groups("--model", "/m", "--device", "cuda", found=NONE)
    # No driver to ask, but the user says what is there.
    assert groups("--model", "/m", "--device", "cuda", "--gpus", "0,1", found=NONE) == [("0",), ("1",)]


def test_several_teachers(tmp_path: Path) -> None:
    """Would break if teachers shared a GPU that nobody said they could share."""
    two = ("--teacher", "a=/a", "--teacher", "b=/b")
    assert groups(*two, "--gpus", "0,1,2,3", "--tensor-parallel-size", "2") == [("0", "1"), ("2", "3")]
    with pytest.raises(SettingsError, match="cannot be dealt evenly"):
        groups(*two, "--gpus", "0,1,2")
    text = "teachers: {{a: {{model: /a, gpus: [0, 1]}}, b: {{model: /b{}}}}}\nshare_gpus: {}"
    with pytest.raises(SettingsError, match="teacher b has none"):
        groups(*in_file(tmp_path, text.format("", "false")))
    with pytest.raises(SettingsError, match="given to both a and b.*share_gpus"):
        groups(*in_file(tmp_path, text.format(", gpus: [1]", "false")))
    assert groups(*in_file(tmp_path, text.format(", gpus: [1]", "true"))) == [("0",), ("1",), ("1",)]


def test_the_driver_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break if a card that is cut into MIG parts were handed out whole, or a job scheduler's choice ignored."""
    ids, uuids = parse_nvidia_smi(SMI)
    assert ids == ["0", "MIG-cc-3", "MIG-dd-4"] and uuids == {"0": "GPU-aa-1", "1": "GPU-bb-2"}
    monkeypatch.setattr("teacher_server.worker.gpus._ask_nvidia_smi", lambda: SMI)
    assert find_gpus({}).ids == tuple(ids)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}).ids == ("3", "1")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}).ids == ()
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "2,-1,3"}).ids == ("2",)
    mig = find_gpus({})
    with pytest.raises(SettingsError, match="MIG"):
        groups("--model", "/m", "--gpus", "MIG-cc-3,MIG-dd-4", "--tensor-parallel-size", "2", found=mig)
    with pytest.raises(SettingsError, match="not among"):
        groups("--model", "/m", "--gpus", "1", found=mig)


def test_labels_on_a_cpu_have_no_devices() -> None:
    """Would break if the status table showed GPUs that a CPU worker does not have."""
    assert own_gpus("cpu", ("a",), None) == [Gpu(id="a")] and own_gpus("cpu", (), "0") == []


def test_the_driver_is_asked_only_for_those_who_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break if a stuck driver, or a nvidia-smi that we may not run, kept a CPU server from starting."""
    assert may_need_gpus(settings_of("--model", "/m"))
    for words in (("--device", "cpu"), ("--engine", "trivial"), ("--n-workers", "0", "--worker-port", "0")):
        assert not may_need_gpus(settings_of("--model", "/m", *words))
    (tmp_path / "nvidia-smi").write_text("")  # not executable
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus({}).ids == ()


def test_a_trivial_teacher_takes_no_gpu_of_another(tmp_path: Path) -> None:
    """Would break if a teacher for load tests halved, or doubly claimed, the cards of a real one."""
    text = "teachers: {a: {model: /a, engine: trivial}, b: {model: /b, device: cuda}}"
    assert groups(*in_file(tmp_path, text), "--gpus", "4,5") == [(), ("4",), ("5",)]
    assert groups(*in_file(tmp_path, text), found=FoundGpus(("0",), "nvidia-smi", {})) == [(), ("0",)]


def test_a_joined_worker_names_all_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break if `status` showed one card of a model that is split over two."""
    import torch

    cards = [SimpleNamespace(uuid=f"u{index}", name="H200") for index in range(4)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert own_gpus("cuda", (), "3, 1", 2) == [Gpu("3", "GPU-u0", "H200"), Gpu("1", "GPU-u1", "H200")]
    assert [gpu.id for gpu in own_gpus("cuda:0", (), None, 2)] == ["0", "1"]
