"""Refuse settings and teachers that cannot have the images of prompts, before a process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.hf.model_folder import check_engines
from gkd.preflight.images import check_image_processors, image_reader
from gkd.preflight.student import chosen
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.vision.images import ImageError
from teacher_server.vision.processor import ImageProcessor
from tests.refusals import refuses
from tests.vision_models import save_vision_model

IMAGES = ("data.images_key=images", "actor.strategy=fsdp2", "data.truncation=drop")
NAMES = Path(__file__).resolve().parents[1] / "torchvision_names"


def test_teachers_with_another_processor(tmp_path: Path) -> None:
    """Fails if a teacher without images or with other pixels scores, or a model that was not compared is a student."""
    folder = save_vision_model(tmp_path)
    config = load_config(
        None, ["data.train_files=[a]", f"model.path={folder}", f"trainer.run_dir={tmp_path}/r", *IMAGES]
    )
    probe = ImageProcessor(str(folder)).probe()
    step = [number + 0.01 for number in probe]  # of 8 bits
    for found, is_accepted in ((probe, True), (step, True), ([], False), ([*probe[:-1], probe[-1] + 0.1], False)):
        info = TeacherInfo("", "t", "", "", 1, 1, "", 1, 1, 1, "hf", "cpu", "float32", True, image_probe=found)
        if is_accepted:
            check_image_processors(config, [info])
            continue
        with refuses("teacher.name"):
            check_image_processors(config, [info])
    own = json.loads((folder / "config.json").read_text())
    for kind, words in (("mistral3", "behind each"), ("qwen3", "no images")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(own | {"model_type": kind}))
        other = ["data.train_files=[a]", f"model.path={tmp_path / kind}", "trainer.run_dir=r", *IMAGES]
        with refuses("model.path") as caught:
            image_reader(load_config(None, other))
        assert words in caught.value.problem


CHANGES = (("config", "feature_layer", '_layer": -1', '_layer": 0'), ("tokenizer_config", "end_image", "end_i", "no_i"))


@pytest.mark.parametrize(("file", "what", "old", "new"), CHANGES)
def test_a_folder_of_tiles(tmp_path: Path, file: str, what: str, old: str, new: str) -> None:
    """Fails if vLLM would compute features of another layer than the student, or no token ends an image."""
    path = save_vision_model(tmp_path, "internvl") / f"{file}.json"
    ImageProcessor(str(tmp_path))
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ImageError, match=what):
        ImageProcessor(str(tmp_path))


def test_images_of_gemma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if images would be attended to causally, in packs, on a CPU or beyond the window, or lost between lines."""
    settings = [f"model.path={save_vision_model(tmp_path, 'gemma3')}", "data.train_files=[a]", "trainer.run_dir=r"]
    config = load_config(None, [*settings, *IMAGES, "data.max_prompt_length=99", "data.max_response_length=9"])
    assert chosen(config).actor.packing is False
    with refuses("actor.packing"):
        chosen(config.with_values({"actor.packing": True}))
    read = ImageProcessor(str(tmp_path)).spelled
    image = "<|vision_start|>"
    assert read(f"x\n\n{image}\n\nx").count("<|image_pad|>") == 1
    for lost in (f"{image}\nx", f"x\n\n\n{image}", f"{image}\n{image}"):  # vLLM's processor does not find these
        with pytest.raises(ImageError, match="line feeds"):
            read(lost)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"sliding_window": 16', '"sliding_window": 3'))
    with pytest.raises(ImageError, match="window of 3"):
        ImageProcessor(str(tmp_path))
    monkeypatch.syspath_prepend(NAMES)  # vLLM needs torchvision
    check_engines(config, "cuda")
    check_engines(config.with_values({"data.images_key": ""}), "cpu")
    with refuses("model.path") as caught:
        check_engines(config, "cpu")
    assert "causal" in caught.value.problem
