"""Assignment of GPUs to workers, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from teacher_server.errors import SettingsError
from teacher_server.wire.status import Gpu
from teacher_server.worker.gpus import FoundGpus, find_gpus, may_need_gpus, own_gpus, parse_nvidia_smi, plan_workers
from tests.unit.test_launch import put_tool
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
        (("--tensor-parallel-size", "4"), [("0", "1", "2", "3"), ("4", "5", "6", "7")]),
        (("--n-workers", "2", "--tensor-parallel-size", "3"), [("0", "1", "2"), ("3", "4", "5")]),
        (("--gpus", "GPU-33,2"), [("GPU-33",), ("2",)]),
        (("--device", "cpu", "--n-workers", "3"), [(), (), ()]),
        (("--device", "cpu", "--gpus", "a,b"), [("a",), ("b",)]),
    ],
)
def test_groups(flags: tuple[str, ...], expected: list[tuple[str, ...]]) -> None:
    """Fails if a worker gets a wrong GPU."""
    assert groups("--model", "/m", "--engine", "vllm", *flags) == expected


@pytest.mark.parametrize(
    "flags,tokens",
    [
        (("--gpus", "4,4"), ("--gpus", "GPU 4 ")),
        (("--gpus", "4,GPU-44"), ("--gpus", "GPU GPU-44 ")),
        (("--gpus", "4,5,6", "--tensor-parallel-size", "2"), ("3 GPUs", "--tensor-parallel-size 2")),
        (("--n-workers", "9"), ("8 GPUs", " 9 ")),
        (("--tensor-parallel-size", "3"), ("8 GPUs", "--tensor-parallel-size 3")),
        (("--gpus", "8"), ("GPU 8 ", "nvidia-smi", "0,1,2,3,4,5,6,7")),
    ],
)
def test_wrong_gpus_are_errors(flags: tuple[str, ...], tokens: tuple[str, ...]) -> None:
    """Fails if two model copies share a GPU, or a GPU is left idle silently."""
    with pytest.raises(SettingsError) as caught:
        groups("--model", "/m", "--engine", "vllm", *flags)
    for token in tokens:
        assert token in str(caught.value), str(caught.value)


def test_without_a_gpu() -> None:
    """Fails if --gpus without any GPU starts on the CPU, or a setting fails only later in the worker."""
    assert groups("--model", "/m", found=NONE) == [()]
    with pytest.raises(SettingsError, match="--gpus"):
        groups("--model", "/m", "--gpus", "0", found=NONE)
    with pytest.raises(SettingsError):
        groups("--model", "/m", "--device", "cuda", found=NONE)
    with pytest.raises(SettingsError):  # the engine is hf, and does not split a model
        groups("--model", "/m", "--tensor-parallel-size", "2", found=NONE)
    assert groups("--model", "/m", "--tensor-parallel-size", "2", "--engine", "vllm", found=NONE) == [()]
    # Without a driver, the list of the user is accepted.
    assert groups("--model", "/m", "--device", "cuda", "--gpus", "0,1", found=NONE) == [("0",), ("1",)]


def test_several_teachers(tmp_path: Path) -> None:
    """Fails if teachers share a GPU without `share_gpus`, or GPUs are distributed unevenly."""
    two = ("--teacher", "a=/a", "--teacher", "b=/b")
    assert groups(*two, "--gpus", "0,1,2,3", "--tensor-parallel-size", "2") == [("0", "1"), ("2", "3")]
    with pytest.raises(SettingsError):
        groups(*two, "--gpus", "0,1,2")
    text = "teachers: {{a: {{model: /a, gpus: [0, 1]}}, b: {{model: /b{}}}}}\nshare_gpus: {}"
    with pytest.raises(SettingsError, match=r"teachers\.a\.gpus.* b "):
        groups(*in_file(tmp_path, text.format("", "false")))
    with pytest.raises(SettingsError):
        groups(*in_file(tmp_path, text.format(", gpus: [1]", "false")))
    assert groups(*in_file(tmp_path, text.format(", gpus: [1]", "true"))) == [("0",), ("1",), ("1",)]


def test_nvidia_smi_and_cuda_visible_devices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a GPU with MIG instances is assigned as a whole, or CUDA_VISIBLE_DEVICES is ignored."""
    ids, uuids = parse_nvidia_smi(SMI)
    assert ids == ["0", "MIG-cc-3", "MIG-dd-4"] and uuids == {"0": "GPU-aa-1", "1": "GPU-bb-2"}
    put_tool(tmp_path, "nvidia-smi", f"echo '{SMI}'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    assert find_gpus({}).ids == tuple(ids)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}).ids == ("3", "1")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}).ids == ()
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "2,-1,3"}).ids == ("2",)
    mig = find_gpus({})
    with pytest.raises(SettingsError, match=r"--tensor-parallel-size 1\."):
        groups("--model", "/m", "--gpus", "MIG-cc-3,MIG-dd-4", "--tensor-parallel-size", "2", found=mig)
    with pytest.raises(SettingsError):
        groups("--model", "/m", "--gpus", "1", found=mig)


def test_nvidia_smi_is_run_only_if_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a hung driver, or a nvidia-smi without execute permission, prevents the start of a CPU server."""
    assert may_need_gpus(settings_of("--model", "/m"))
    for words in (("--device", "cpu"), ("--n-workers", "0", "--worker-port", "0")):
        assert not may_need_gpus(settings_of("--model", "/m", *words))
    (tmp_path / "nvidia-smi").write_text("")  # not executable
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus({}).ids == ()


def test_a_teacher_on_the_cpu_gets_no_gpu(tmp_path: Path) -> None:
    """Fails if a teacher on the CPU gets GPUs, or takes a share of another teacher's."""
    text = "teachers: {a: {model: /a, device: cpu}, b: {model: /b, device: cuda}}"
    assert groups(*in_file(tmp_path, text), "--gpus", "4,5") == [(), ("4",), ("5",)]
    assert groups(*in_file(tmp_path, text), found=FoundGpus(("0",), "nvidia-smi", {})) == [(), ("0",)]


def test_a_joined_worker_reports_all_its_gpus(
    torch_sees: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if `status` shows one GPU of a model that is split over two."""
    import torch

    properties = [SimpleNamespace(uuid=f"u{index}", name="H200") for index in range(4)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    torch_sees(4)
    assert own_gpus("cuda", (), "3, 1", 2) == [Gpu("3", "GPU-u0", "H200"), Gpu("1", "GPU-u1", "H200")]
    assert [gpu.id for gpu in own_gpus("cuda:0", (), None, 2)] == ["0", "1"]
    assert own_gpus("cpu", ("a",), None) == [Gpu(id="a")] and own_gpus("cpu", (), "0") == []
