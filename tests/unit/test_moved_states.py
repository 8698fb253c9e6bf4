"""Settings that decide where the student's states are between calls, and which of two wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.preflight.run import preflight
from tests.dist.megatron_reference import VOCAB, make_hf_folder

ON_HOST = ("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true")
MOVED = "actor.offload_train=true"
RESIDENT_TEACHER = ("teacher.backend=local", "teacher.path=t", "teacher.fsdp_cpu_offload=false")


@pytest.mark.parametrize(
    ("overrides", "moves"),
    [
        ((), False),
        ((MOVED,), True),
        (RESIDENT_TEACHER, True),
        (ON_HOST, False),
        ((*ON_HOST, MOVED), False),
        ((*ON_HOST, *RESIDENT_TEACHER), False),
        ((*ON_HOST, "trainer.colocate=true"), True),
    ],
)
def test_states_on_the_host_are_not_moved(overrides: tuple[str, ...], moves: bool) -> None:
    """Fails if states that fsdp_cpu_offload keeps in host memory are moved before and after each call, or others are
    not moved although the settings require it.
    """
    settings = ["data.train_files=[a]", "model.path=student", "trainer.run_dir=r", *overrides]
    assert check_config(load_config(None, settings)).moves_states == moves


def test_the_setting_without_effect_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run ignores actor.offload_train without a warning, or warns of settings that have their effect."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder, prompts, warnings = make_hf_folder(tmp_path / "qwen3", "qwen3"), tmp_path / "prompts.jsonl", []
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    prompts.write_text(json.dumps({"prompt": "w2", "answer": "w3"}) + "\n")
    monkeypatch.setattr("gkd.preflight.run.log.warning", lambda text, *args: warnings.append(text % args))
    sizes = ("data.max_prompt_length=8", "data.max_response_length=8", "trainer.device=cpu")
    paths = (f"model.path={folder}", "teacher.backend=local", f"teacher.path={folder}", f"data.train_files=[{prompts}]")
    for name, overrides in (("moved", (MOVED,)), ("host", ON_HOST), ("both", (*ON_HOST, MOVED))):
        plan = preflight(load_config(None, [*sizes, *paths, f"trainer.run_dir={tmp_path / name}", *overrides]))
        assert plan.derived.moves_states == (name == "moved")
        keys = [key for key in ("actor.offload_train", "actor.fsdp_cpu_offload") if any(key in w for w in warnings)]
        assert len(keys) == (2 if name == "both" else 0), warnings
