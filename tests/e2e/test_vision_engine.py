"""One real vLLM engine on images: logprobs, prompts that do not fit, a vision tower that changes in mid-response."""

from __future__ import annotations

from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from gkd.errors import DataError
from gkd.log import get_logger
from gkd.types import Prompt, Rollout
from teacher_server.vision.images import EncodedImage
from teacher_server.vision.processor import ImageProcessor
from tests import device
from tests.engine_process import EngineProcess
from tests.vision_models import missing, picture, save_vision_model
from tests.vision_reference import logits_of

pytestmark = pytest.mark.e2e
OTHERS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "gemma3")
SIZES = ((56, 84), (84, 56), (60, 90))


def make_prompts(folder: Path) -> list[Prompt]:
    """Return prompts with no, one and two images; the last two differ in the pixels alone."""
    processor = ImageProcessor(str(folder))
    place = [7, processor.token_id, 8]
    if written := processor.written[1]:
        place = AutoTokenizer.from_pretrained(folder)(written, add_special_tokens=False)["input_ids"]
    images = [EncodedImage(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    own = [(), (images[0],), (images[1], images[2]), (EncodedImage(picture(*SIZES[0], 9)),)]
    prompts = []
    for i, shown in enumerate(own):
        text = [65, 66, *place * len(shown), 70]
        prompts.append(Prompt(i, np.array(processor.expand(text, shown), np.int32), images=shown))
    return prompts


def dtype_of(kind: str) -> torch.dtype:
    """Return that of an engine: the CPU kernel of Qwen3.5's linear attention computes in bfloat16 alone."""
    return torch.bfloat16 if kind.startswith("qwen3_5") else torch.float32


def _probe(folder: Path, later: Path) -> dict[str, Any]:
    """Run in a child process: vLLM allows one engine per process."""
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.messages import Sampling
    from gkd.rollout.vllm.engine import RolloutEngine
    from gkd.rollout.vllm.self_scoring import prompt_logprobs
    from gkd.weight_sync.buckets import differing, digest
    from tests.e2e.weight_sender import WeightSender

    config = RolloutConfig(kv_cache_mib=32, max_num_seqs=8, enforce_eager=device.on_cuda())
    dtype = dtype_of(folder.name)
    place = {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": 128,
        "device": device.kind(),
        "eos_ids": [258],
        "vision": "trained",
    }
    engine = RolloutEngine(str(folder), config, **place)
    prompts, sampling = make_prompts(folder), Sampling(2, 1.0, 1.0, 12, seed=11)
    result: dict[str, Any] = {"rollouts": list(engine.generate(prompts, sampling)), "refused": []}
    result["scored"] = [logprobs[:, 0] for _, logprobs in prompt_logprobs(engine.llm, result["rollouts"], 4, {})]
    two = prompts[2]
    cut = np.delete(two.token_ids, 4)
    longer = np.insert(two.token_ids, 4, two.token_ids[4])
    changes = ({"token_ids": cut}, {"token_ids": longer}, {"images": two.images[:1]})
    for wrong in (msgspec.structs.replace(two, **change) for change in changes):
        with pytest.raises(DataError) as caught:
            list(engine.generate([wrong], sampling))
        result["refused"].append(str(caught.value))
    hot = replace(sampling, n=64, temperature=2.0, max_tokens=16)
    result["sampled"] = np.concatenate([rollout.response_ids for rollout in engine.generate(prompts, hot)])
    engine.add("owner", prompts, sampling, range(len(prompts)))
    for _ in range(4):
        engine.step()
    sender, tensors = WeightSender(engine), load_file(later / "model.safetensors")
    unused = ("layers.2.", "post_layernorm") if "llava" in folder.name else ("none",)
    tensors = {name: t.to(dtype) for name, t in tensors.items() if not any(part in name for part in unused)}
    sender.push(tensors, 1)
    sent = {name: digest(tensor, device.rank_device()) for name, tensor in tensors.items()}
    while engine.n_running:
        engine.step()
    result["changed"] = engine.pop_finished("owner")
    result["same"] = differing(sent, engine.digests()), len(sent)
    return result


@pytest.mark.parametrize("kind", ["llava", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_an_engine_computes_images_as_transformers(tmp_path: Path, kind: str) -> None:
    """Fails if the engine sees no, other or old features, expands ids again, or samples the place of an image."""
    if why := missing(kind):
        pytest.skip(why)
    folders = [tmp_path / f"{kind}_{seed}" for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        folder.mkdir()
        save_vision_model(folder, kind, seed=seed)
    with EngineProcess() as process:
        result = process.call(_probe, *folders, timeout_s=200 * device.patience())
    models = [AutoModelForImageTextToText.from_pretrained(each, dtype=dtype_of(kind)).eval() for each in folders]
    limit = 0.1 if kind == "qwen3_5" else 1e-5  # text positions would be 0.2
    processor = AutoImageProcessor.from_pretrained(folders[0])
    assert max(_errors(models, processor, rollout).max() for rollout in result["rollouts"]) < limit
    for rollout, scored in zip(result["rollouts"], result["scored"], strict=True):  # teacher.backend: rollout
        whole = logits_of(models[0], processor, rollout).float().log_softmax(-1)
        own = whole.gather(1, torch.from_numpy(rollout.response_ids.astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(scored, own.detach(), atol=limit)
    assert all("prompt 2" in message and "images" in message for message in result["refused"])
    placeholders = {getattr(models[0].config, name, -1) for name in ("image_token_id", "video_token_id")}
    assert len(result["sampled"]) > 2000 and placeholders.isdisjoint(result["sampled"].tolist())
    assert result["same"][0] == [] and result["same"][1] > 50
    assert all(len(rollout.version_spans) == 2 for rollout in result["changed"])
    assert max(_errors(models, processor, rollout).max() for rollout in result["changed"]) < limit
    with_pixels = [rollout for rollout in result["changed"] if rollout.prompt_id in (1, 3)]
    assert len({tuple(rollout.response_ids.tolist()) for rollout in with_pixels}) == 4


@torch.no_grad()
def _errors(models: list[Any], processor: Any, rollout: Rollout) -> np.ndarray:
    """Return [R], between the engine's logprobs and those of the model that generated each token."""
    found = np.zeros(len(rollout.response_ids))
    for span in rollout.version_spans:
        logits = logits_of(models[span.policy_version], processor, rollout).float()
        for name in ("image_token_id", "video_token_id"):
            if getattr(models[0].config, name, None) is not None:
                logits[:, getattr(models[0].config, name)] = -torch.inf
        ids = torch.from_numpy(rollout.response_ids.astype(np.int64))[:, None]
        own = logits.log_softmax(-1).gather(1, ids)[:, 0].numpy()
        rows = slice(span.start, span.stop)
        found[rows] = np.abs(own - rollout.rollout_logprobs)[rows]
    return found


def _sleep_and_sync(folder: Path) -> list[str]:
    """Run in a child process: return what the engine logs of a sync without the tower, after its weights were lost."""
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.rollout.vllm.engine import RolloutEngine
    from tests.dist.hf_models import language_model
    from tests.e2e.weight_sender import WeightSender

    config = RolloutConfig(kv_cache_mib=32, max_num_seqs=8, enforce_eager=device.on_cuda())
    place = {"dtype": "float32", "max_model_len": 128, "device": device.kind(), "eos_ids": [258]}
    engine = RolloutEngine(str(folder), config, **place, vision="frozen", enable_sleep_mode=True)
    engine.keep_digests()
    tensors = load_file(folder / "model.safetensors")
    sender = WeightSender(engine)
    engine.sleep(2)
    engine.wake_up(["weights"])
    handler = BufferingHandler(99)
    get_logger("rollout").addHandler(handler)
    sender.push({name: tensors[name] for name in language_model(tensors)}, 0)
    return [record.getMessage() for record in handler.buffer]


def test_a_frozen_tower_outlives_discarded_weights(tmp_path: Path) -> None:
    """Fails if an engine that shares its GPU computes images with uninitialized memory after a training step."""
    folder = tmp_path / "llava"
    folder.mkdir()
    save_vision_model(folder, "llava", seed=1)
    with EngineProcess() as process:
        (line,) = process.call(_sleep_and_sync, folder, timeout_s=200 * device.patience())
    n_equal, _, n_tensors = line.split()[:3]
    assert n_equal == n_tensors
