"""Settings that decide where the student's states are between calls, and which of two wins."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.memory.footprint import RankFootprint, footprint
from gkd.memory.footprint.combination import with_strategy
from gkd.memory.footprint.limits import GIB
from gkd.preflight.run import preflight
from tests.dist.megatron_reference import VOCAB, make_hf_folder
from tests.refusals import refuses
from tests.unit.test_footprint import QWEN25_15B

ON_HOST = ("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true")
MOVED = "actor.offload_train=true"
RESIDENT_TEACHER = ("teacher.backend=local", "teacher.path=t", "teacher.fsdp_cpu_offload=false")
REFERENCE_ON_GPU = ("distill.reference_kl_weight=1", "reference.fsdp_cpu_offload=false")


@pytest.mark.parametrize(
    ("overrides", "moves"),
    [
        ((), False),
        ((MOVED,), True),
        (RESIDENT_TEACHER, True),
        ((*RESIDENT_TEACHER, "memory.strategy=resident"), False),
        (("teacher.backend=local", "teacher.path=t", "memory.strategy=offload"), False),
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


def test_the_setting_without_effect_is_named(tmp_path: Path, gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if a run ignores actor.offload_train without a warning, or warns of settings that have their effect."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = make_hf_folder(tmp_path / "qwen3", "qwen3", head_dim=32)  # vLLM's attention on the CPU lacks 16
    prompts = tmp_path / "prompts.jsonl"
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    prompts.write_text(json.dumps({"prompt": "w2", "answer": "w3"}) + "\n")
    sizes = ("data.max_prompt_length=8", "data.max_response_length=8", "trainer.device=cpu")
    paths = (f"model.path={folder}", "teacher.backend=local", f"teacher.path={folder}", f"data.train_files=[{prompts}]")
    for name, overrides in (("moved", (MOVED,)), ("host", ON_HOST), ("both", (*ON_HOST, MOVED))):
        plan = preflight(load_config(None, [*sizes, *paths, f"trainer.run_dir={tmp_path / name}", *overrides]))
        assert plan.config.derived.moves_states == (name == "moved")
        warnings = [record.getMessage() for record in gkd_log.records if record.levelno == logging.WARNING]
        keys = [key for key in ("actor.offload_train", "actor.fsdp_cpu_offload") if any(key in w for w in warnings)]
        assert len(keys) == (2 if name == "both" else 0), warnings


@pytest.mark.parametrize("frozen", [RESIDENT_TEACHER, REFERENCE_ON_GPU])
def test_the_strategy_is_resident_where_all_models_fit(frozen: tuple[str, ...]) -> None:
    """Fails if the student's states move on a card where all models fit, or stay where they do not fit."""

    def refit(config: Config) -> Sequence[RankFootprint]:
        of_teacher = (QWEN25_15B, None) if config.derived.teacher_pool == "actor" else None
        of_reference = (QWEN25_15B, None) if config.derived.reference_folder else None
        return footprint(config, QWEN25_15B, local_teacher=of_teacher, reference=of_reference)

    def settings(*overrides: str) -> Config:
        return load_config(None, ["model.path=m", "actor.recompute=full", "trainer.device=cuda", *frozen, *overrides])

    def chosen(gib: int | None, *overrides: str) -> tuple[str, str]:
        config, line = with_strategy(settings(*overrides), refit, gib and gib * GIB)
        return config.memory.strategy, line

    resident = refit(settings("memory.strategy=resident"))
    together = max(part.total_bytes for part in resident if part.role == "actor")
    enough = math.ceil(together / (1 - settings().memory.margin) / GIB)
    assert chosen(enough)[0] == "resident" and chosen(enough - 1)[0] == "offload" == chosen(None)[0]
    assert f"{together / GIB:.2f}" in chosen(enough)[1] and not chosen(None)[1]
    for by_hand in ("resident", "offload"):
        assert chosen(24, f"memory.strategy={by_hand}")[0] == by_hand
    section = frozen[-1].partition(".")[0]
    strategy, hint = chosen(enough, f"{section}.fsdp_cpu_offload=true")
    assert strategy == "offload" and f"{section}.fsdp_cpu_offload=false" in hint
    assert chosen(24, f"{section}.fsdp_cpu_offload=true") == ("offload", "")


@pytest.mark.parametrize("moving", ["trainer.colocate=true", "actor.offload_train=true"])
def test_resident_states_that_have_to_move_are_refused(moving: str) -> None:
    """Fails if states move although the user asked for resident ones."""
    settings = ["data.train_files=[a]", "model.path=student", "trainer.run_dir=r", "memory.strategy=resident", moving]
    with refuses("memory.strategy"):
        check_config(load_config(None, settings))
