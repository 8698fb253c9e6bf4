"""Test the whole loop with expert parallelism on two actor ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from examples.quickstart.evaluate import count_equal
from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import EOS, VOCAB, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
N_LAYERS, N_EXPERTS = 2, 4


def _save_experts(lab: Lab) -> Path:
    """Save a mixture-of-experts student with the tokenizer of the dense one."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(2)
    folder = lab.root / "experts"
    shutil.copytree(lab.student, folder)
    old = json.loads((folder / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = Qwen3MoeConfig(
        **{key: old[key] for key in kept},
        vocab_size=VOCAB,
        num_hidden_layers=N_LAYERS,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.35,
        num_experts=N_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def test_experts_of_two_ranks_reach_the_engine_and_the_export(lab: Lab, teacher_port: int) -> None:
    """Fails if actor.ep has no effect, an expert is not synced or exported, or a resume loads the wrong experts."""
    run_dir, student = lab.root / "experts_run", _save_experts(lab)
    overrides = [f"model.path={student}", "trainer.n_gpus_per_node=2", "actor.ep=2", "weight_sync.verify=always"]
    for end in (["trainer.total_steps=3"], ["trainer.total_steps=4", "trainer.resume=auto"]):
        shutil.rmtree(run_dir / "export", ignore_errors=True)
        lab.finished_run(run_dir, teacher_port, *overrides, *end)
    lines = {int(line["step"]): line for line in read_metrics(run_dir / "metrics.jsonl")}
    assert sorted(lines) == [0, 1, 2, 3, 4]
    n_tensors = 2 + N_LAYERS * (9 + 3 * N_EXPERTS)
    assert all(lines[step]["weight_sync/verified_tensors"] == n_tensors for step in (1, 2, 3, 4))
    assert lines[4]["eval/kl"] < lines[0]["eval/kl"]
    assert count_equal(run_dir / "export", run_dir / "samples" / "step_00000004.jsonl") == (50, 50)
