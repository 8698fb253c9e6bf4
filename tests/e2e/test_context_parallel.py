"""Test whole runs with context parallelism, against runs of one rank: Ray, vLLM, both backends, a teacher server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import EOS, Lab, make_lab
from tests.e2e.exactness import steps_of
from tests.e2e.test_local_teacher import UNUSED_PORT
from tests.service.harness import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # in CI test_own_pipeline.py has two ranks that share sequences
CP = ("actor.cp=2", "trainer.n_gpus_per_node=2")
LONG = 33000  # tokens of the longest sequence
SAME = ("loss/total", "optim/grad_norm", "loss/tokens", "loss/token_kl")


def check_same(plain: Path, shared: Path, first: int = 1) -> None:
    """Compare the steps of a run on one rank and of one whose ranks share sequences."""
    one, both = steps_of(plain), steps_of(shared)
    for step in range(first, 5):
        for name in SAME:
            assert both[step][name] == pytest.approx(one[step][name], rel=2e-6), (step, name)
    assert both[4]["eval/kl"] == pytest.approx(one[4]["eval/kl"], rel=1e-5)


def test_a_run_goes_on_with_ranks_that_share_sequences(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """Fails if a checkpoint of one rank is read otherwise by two, or sequences, scores or weights do not reach both."""
    run_dir = lab.root / "cp_resumed"
    begin = base_run / "checkpoints" / "step_00000002"
    settings = (f"trainer.resume={begin}", f"trainer.replay={base_run / 'batches'}", "weight_sync.verify=always")
    lab.finished_run(run_dir, teacher_port, *CP, *settings)
    check_same(base_run, run_dir, first=3)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("actor.strategy=fsdp2",),
        ("actor.strategy=fsdp2", "teacher.backend=local", "teacher.signal=hidden"),
        ("distill.token_weight=entropy", "distill.token_share=0.5", "distill.reference_kl_weight=0.1"),
        ("actor.lora.rank=4", "distill.reference_kl_weight=0.1"),
    ],
)
def test_a_run_computes_the_same_on_two_ranks(
    tmp_path: Path, lab: Lab, teacher_port: int, settings: tuple[str, ...]
) -> None:
    """Fails if two ranks train on other numbers, or a frozen model, which has whole sequences, scores others."""
    is_local = "teacher.backend=local" in settings
    local, port = ((f"teacher.path={lab.teacher}",), UNUSED_PORT) if is_local else ((), teacher_port)
    one, two = tmp_path / "one", tmp_path / "two"
    lab.finished_run(one, port, *settings, *local, "trainer.record_batches=true")
    lab.finished_run(two, port, *settings, *local, *CP, f"trainer.replay={one / 'batches'}")
    check_same(one, two)


@pytest.mark.timeout(2400)
def test_responses_of_32k_tokens(tmp_path: Path) -> None:
    """Fails if an engine, the teacher, a rank or a limit does not reach responses of 32,768 tokens."""
    lab = make_lab(tmp_path, student={"max_position_embeddings": LONG}, teacher={"max_position_embeddings": LONG})
    never_ends(lab.student)
    settings = (
        *("data.max_response_length=32768", "actor.micro_batch_size=1", "actor.recompute=full", "rollout.n=1"),
        *("trainer.total_steps=2", "trainer.global_batch_size=2", "rollout.kv_cache_mib=256", "rollout.max_num_seqs=2"),
        *("data.val_files=[]", "eval.metric=none", "trainer.stage_timeout_s=1200", "teacher.request_timeout_s=600"),
        *("trainer.record_batches=true", "actor.optim.lr=1e-4"),
    )
    with ServerProcess(lab.teacher, lab.root, options=("--max-batch-tokens", str(LONG))) as server:
        for name, ranks in (("shared", CP), ("alone", (f"trainer.replay={tmp_path / 'shared' / 'batches'}",))):
            lab.finished_run(tmp_path / name, server.port, *settings, *ranks, timeout_s=1100.0)
    shared, alone = steps_of(tmp_path / "shared"), steps_of(tmp_path / "alone")
    for step in (1, 2):
        assert shared[step]["rollout/response_length_mean"] == 32768
        for name in SAME:
            assert shared[step][name] == pytest.approx(alone[step][name], rel=1e-5), (step, name)


def never_ends(folder: Path) -> None:
    """Give a model's hidden states a part that is the same for all tokens, and its end token a logit of nearly -inf."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 8.0
        model.get_output_embeddings().weight[EOS] = 0.0
        model.get_output_embeddings().weight[EOS, 0] = -8.0
    model.save_pretrained(folder)
