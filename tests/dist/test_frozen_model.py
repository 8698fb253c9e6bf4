"""Compare a frozen model on all ranks of a world with the teacher server's engine and with plain transformers.

1 and 2 ranks. The references are computed on the CPU. Not covered: pinned memory (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.types import Rollout
from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.wire.table import TopKTable
from tests.dist.frozen_cases import (
    CUT,
    EMA,
    GIVEN,
    KINDS,
    N_GIVEN,
    PARAMS,
    PLAIN,
    distributions,
    measure,
    params_of,
    sequences,
    with_masks,
    with_top_ids,
)
from tests.dist.helpers import Measured, group_of_one, run_ranks
from tests.dist.hf_models import IMAGE_KINDS, make_model_folder
from tests.dist.local_teacher_cases import INDICES
from tests.dist.megatron_reference import VOCAB, logprob_rows, make_hf_folder, read_model, response_logprobs
from tests.service.engine_host import own_rows, score

pytestmark = pytest.mark.dist
WORLDS = (1, 2)
TOLERANCE = 1e-5  # measured: 2.9e-6; the contract of the engines (tests/service) allows 1e-3
BF16_TOLERANCE = 0.1


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("frozen")
    for kind in ("qwen3", "qwen2_tied"):
        make_hf_folder(root / kind, kind)
    for kind in ("gpt2", "gemma2", "opt", "falcon", "mixtral", "olmo2", *IMAGE_KINDS):
        make_model_folder(root / kind, kind)
    make_hf_folder(root / "qwen3_other", "qwen3")
    tensors = load_file(root / "qwen3" / "model.safetensors")
    generator = torch.Generator().manual_seed(8)
    other = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(other, root / "qwen3_other" / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def ranks(root: Path) -> Measured:
    """Return, by world size, the results of each rank. The single rank is this process, which has the libraries."""

    def world(size: int) -> list[dict[str, Any]]:
        if size > 1:
            return run_ranks(measure, size, root, timeout_s=250.0)
        with group_of_one():
            return [measure(0, 1, root)]

    return Measured(world)


def engine_scores(
    folder: Path, params: tuple[ScoreParams, ...], dtype: str = "float32", rollouts: Sequence[Rollout] | None = None
) -> list[list[Any]]:
    """Return, for each of `params`, the tables of the server's engine for these sequences; None: all."""
    from teacher_server.engines.hf import HfEngine
    from teacher_server.engines.load import EngineSettings

    engine = HfEngine(EngineSettings(model=str(folder), max_tokens=64), dtype=dtype, device="cpu")
    batch = [
        TokenSequence(np.concatenate([s.prompt_ids, s.response_ids]), len(s.prompt_ids), s.top_ids)
        for s in rollouts or sequences()
    ]
    return [score(engine, batch, each) for each in params]


def difference(one: Any, two: Any) -> float:
    """Return the largest difference of two tables; infinite if they are of different kinds."""
    if isinstance(one, TopKTable):
        counts = [s.counts if s.counts is not None else np.full(len(s.ids), s.ids.shape[1]) for s in (one, two)]
        listed = np.arange(one.ids.shape[1]) < np.minimum(*counts)[:, None]
        by_value = np.where(listed, np.abs(one.logprobs - two.logprobs, where=listed), 0.0)
        # If rounding decides whether a mass target is reached, the lists may differ by one entry.
        kept = (counts[0] == counts[1]).mean() if len(counts[0]) else 1.0
        same_ids = (one.ids == two.ids)[listed].mean() if listed.any() else 1.0
        tail = np.where(counts[0] == counts[1], np.abs(one.tail - two.tail), 0.0)
        return float(max(by_value.max(), tail.max())) if kept > 0.9 and same_ids > 0.99 else float("inf")
    if one.shape != two.shape or one.dtype != two.dtype:
        return float("inf")
    slack = 2**-10 * np.abs(two.astype(np.float64)) if two.dtype == np.float16 else 0.0  # one bit of a rounded number
    return float(np.maximum(np.abs(one.astype(np.float64) - two.astype(np.float64)) - slack, 0.0).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_scores_equal_those_of_the_servers_engine(root: Path, ranks: Any, world_size: int, kind: str) -> None:
    """Fails if a row is off by one, packed sequences see one another, an uneven distribution mixes up sequences, or the
    LM head's chunks, temperature or n_vocab differ from the server's."""
    expected = engine_scores(root / kind, params_of(kind))
    worst = 0.0
    for name, by_rank in distributions(world_size).items():
        for rank, indices in enumerate(by_rank):
            scored = ranks[world_size][rank]["scores"][kind, name]
            assert len(scored) == len(indices)
            for index, tables in zip(indices, scored, strict=True):
                worst = max(worst, *(difference(t, expected[i][index]) for i, t in enumerate(tables)))
    assert 0.0 < worst <= TOLERANCE, worst


@pytest.mark.parametrize("kind", ["qwen3", *IMAGE_KINDS])
@pytest.mark.parametrize("world_size", WORLDS)
def test_sampled_logprobs_are_right_in_float64(root: Path, ranks: Any, world_size: int, kind: str) -> None:
    """Fails if both teachers have the same error: this reference is plain transformers."""
    plain = read_model(root / kind, dtype=torch.float64).eval()
    at = next(i for i, params in enumerate(PARAMS) if params.signal == "sampled")
    name, by_rank = next(iter(distributions(world_size).items()))
    batch = sequences()
    for rank, indices in enumerate(by_rank):
        for index, tables in zip(indices, ranks[world_size][rank]["scores"][kind, name], strict=True):
            rows = logprob_rows(plain, batch[index], PARAMS[at].temperature, CUT)
            np.testing.assert_allclose(tables[at], response_logprobs(rows, batch[index]), atol=2e-5, rtol=0)


def test_scores_without_cpu_offload(root: Path, ranks: Any) -> None:
    """Fails if the model without CPU offload has different scores."""
    expected = engine_scores(root / "qwen3", PLAIN)[0]
    for a, b in zip(ranks[1][0]["resident"], expected, strict=True):
        np.testing.assert_allclose(a[0], b, atol=TOLERANCE, rtol=0)


def test_given_ids_of_some_sequences_of_a_micro_batch(root: Path, ranks: Any) -> None:
    """Fails if a response of the dataset gets the ids of another sequence, or the sampled token of another table."""
    rollouts = with_top_ids(sequences(), N_GIVEN)
    for rollout, (table,) in zip(rollouts, ranks[1][0]["given"], strict=True):
        ((expected,),) = engine_scores(root / "qwen3", (GIVEN,), rollouts=[rollout])
        assert difference(table, expected) <= TOLERANCE
        np.testing.assert_allclose(table.sampled, expected.sampled, atol=TOLERANCE)
        if rollout.top_ids is not None:
            assert all(set(given) <= set(row) for given, row in zip(rollout.top_ids, table.ids, strict=True))


def test_rows_of_own_tokens_are_those_of_the_whole_response(root: Path, ranks: Any) -> None:
    """Fails if a trajectory's row is of another token or lacks the observations before it, packed or padded."""
    whole = with_top_ids(sequences(), N_GIVEN, everywhere=True)
    for name, kind, params, rollouts in (
        ("own", "qwen3", PARAMS, sequences()),
        ("own padded", "qwen2_tied", PARAMS, sequences()),
        ("own given", "qwen3", (GIVEN,), whole),
    ):
        expected = engine_scores(root / kind, params, rollouts=rollouts)
        for i, (rollout, tables) in enumerate(zip(with_masks(sequences()), ranks[1][0][name], strict=True)):
            own = np.ones(len(rollout.response_ids), bool) if rollout.own is None else rollout.own
            references = [own_rows(of_params[i], own) for of_params in expected]
            assert max(map(difference, tables, references)) <= TOLERANCE
            if name == "own given":
                np.testing.assert_allclose(tables[0].sampled, references[0].sampled, atol=TOLERANCE)
    assert "prompt 0, sample 7: own is bool [12] with 0 own tokens" in str(ranks[1][0]["mask"])


def test_bfloat16(root: Path, ranks: Any) -> None:
    """Fails if bfloat16 weights are stored or scored in another dtype, or hidden states are not returned as float32."""
    sampled, hidden = engine_scores(root / "qwen3", (ScoreParams("sampled"), ScoreParams("hidden")))
    scored, is_half = ranks[1][0]["bf16"]
    assert is_half
    for i, (logprobs, states) in enumerate(scored):
        assert states.dtype == np.float32
        np.testing.assert_allclose(states, hidden[i], atol=BF16_TOLERANCE, rtol=0.05)
        np.testing.assert_allclose(logprobs, sampled[i], atol=BF16_TOLERANCE, rtol=0.05)
    assert any((logprobs != sampled[i]).any() for i, (logprobs, _) in enumerate(scored))


@pytest.mark.parametrize("world_size", WORLDS)
def test_bad_input_is_one_error_on_all_ranks(ranks: Any, world_size: int) -> None:
    """Fails if a bad sequence of one rank leaves the others waiting in an all-gather, or affects the next call."""
    texts = {
        "past the vocabulary": "vocab_size",
        "negative": " -1 ",
        "empty response": "",
        "empty prompt": "",
        "too long": "64",
        "no top ids": "none",
        "n_vocab": "n_vocab",
        "k": f"k = {VOCAB + 1} ",
        "cut response": "n_vocab",
        **{f"NaN {params.signal}": "" for params in PARAMS},
    }
    for name, text in texts.items():
        errors = {rank["bad"][name][0] for rank in ranks[world_size]}
        assert len(errors) == 1, (name, errors)
        kind, message = errors.pop()
        assert kind == "TeacherError" and text in message and "sample 7" in message, (name, message)
        assert all(rank["bad"][name][1] for rank in ranks[world_size]), name


def test_errors_name_the_model(root: Path, ranks: Any) -> None:
    """Fails if the error of a broken reference names the teacher."""
    for (kind, text), key in zip(ranks[1][0]["named"], ("reference.path=", "teacher.path="), strict=True):
        assert kind == "TeacherError" and f"({key}{root / 'qwen3'})" in text, text


def test_a_refresh_uses_the_ranks_cores(ranks: Any) -> None:
    """Fails if a refresh of billions of weights runs in a single thread, or leaves more threads afterwards."""
    before, within, after = ranks[1][0]["threads"]
    assert before == after == 1 and within == {2}


@pytest.mark.parametrize("world_size", WORLDS)
def test_unsupported_models_are_refused(ranks: Any, world_size: int) -> None:
    """Fails if a model is scored without what it does before or after its LM head, or only some ranks refuse it."""
    for rank in ranks[world_size]:
        other, nothing = rank["refused"]
        assert other[0] == "ConfigError" and other[1].startswith("teacher.path")
        assert nothing[0] == "ModelError" and "config.json" in nothing[1]
    kind, text = ranks[1][0]["packs"]
    assert kind == "ConfigError" and text.startswith("actor.packing")


@pytest.mark.parametrize("world_size", WORLDS)
class TestRefresh:
    def test_a_copy_is_the_student(self, root: Path, ranks: Any, world_size: int) -> None:
        """Fails if a shard misses rows, or the next forward pass uses old weights."""
        given = load_file(root / "qwen3_other" / "model.safetensors")
        expected = engine_scores(root / "qwen3_other", PLAIN)[0]
        for rank in ranks[world_size]:
            refreshed = rank["refreshed"]
            assert refreshed["copied"].keys() == given.keys()
            for name, tensor in given.items():
                np.testing.assert_array_equal(refreshed["copied"][name], tensor.numpy())
            for a, b in zip(refreshed["scores"], expected, strict=True):
                np.testing.assert_allclose(a[0], b, atol=TOLERANCE, rtol=0)

    def test_ema(self, root: Path, ranks: Any, world_size: int) -> None:
        """Fails if the weights of teacher and student are swapped in the average."""
        old, new = (load_file(root / kind / "model.safetensors") for kind in ("qwen3", "qwen3_other"))
        for name, tensor in old.items():
            expected = EMA**2 * tensor.double() + (1 - EMA**2) * new[name].double()
            for rank in ranks[world_size]:
                np.testing.assert_allclose(rank["refreshed"]["ema"][name], expected.numpy(), atol=1e-6)

    @pytest.mark.parametrize("kind", ["qwen2_tied", "mixtral"])
    def test_tied_and_stacked_tensors(self, root: Path, ranks: Any, world_size: int, kind: str) -> None:
        """Fails if shared embeddings, or experts that are rows of one parameter, are written to wrong rows."""
        given = load_file(root / kind / "model.safetensors")
        for rank in ranks[world_size]:
            assert rank["refreshed"][kind].keys() == given.keys()
            for name, tensor in given.items():
                np.testing.assert_array_equal(rank["refreshed"][kind][name], 2 * tensor.numpy(), err_msg=name)

    def test_other_tensors_are_refused(self, ranks: Any, world_size: int) -> None:
        """Fails if a teacher is silently refreshed in part."""
        for rank in ranks[world_size]:
            good, *bad = rank["refreshed"]["plan"]
            assert good[0] == "no error"
            assert [kind for kind, _ in bad] == ["ModelError"] * 3
            assert "more" in bad[1][1], bad
            assert [kind for kind, _ in rank["refreshed"]["stream"]] == ["ModelError"] * 4


def test_small_updates_of_a_bfloat16_teacher(root: Path, ranks: Any) -> None:
    """Fails if an average with a small step has no float32 weights: in bfloat16, rounding discards the updates."""
    old, new = (load_file(root / kind / "model.safetensors") for kind in ("qwen3", "qwen3_other"))
    name = "model.layers.0.mlp.up_proj.weight"
    expected = new[name] + 0.999**3 * (old[name] - new[name])
    slow = ranks[1][0]["slow"]
    np.testing.assert_allclose(slow[True][name], expected.numpy(), atol=1e-6)
    unchanged = slow[False][name] == old[name].bfloat16().float().numpy()
    assert unchanged.mean() > 0.5


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_student_in_the_same_process(root: Path, ranks: Any, world_size: int) -> None:
    """Fails if student and teacher in one process affect each other: groups, gradients, random numbers, weights.

    With one rank the student is an fsdp2 one, with two Megatron's.
    """
    expected = engine_scores(root / "qwen3_other", PLAIN)[0]
    for rank in ranks[world_size]:
        result = rank["with student"]
        assert result["losses"] and result["weights"] and result["follows"]
        for scored in result["scores"]:
            for a, b in zip(scored, expected, strict=True):
                np.testing.assert_allclose(a[0], b, atol=TOLERANCE, rtol=0)


class TestLocalTeacher:
    """The methods that a worker calls, with a Megatron student of two pipeline stages."""

    def test_scores_follow_the_settings(self, root: Path, ranks: Any) -> None:
        """Fails if a sequence gets the scores of another one, or a setting of the run has no effect."""
        params = (
            ScoreParams("topk", k=8, n_vocab=CUT),
            ScoreParams("sampled", n_vocab=CUT),
            ScoreParams("logits", temperature=0.7, n_vocab=CUT, wire="fp16"),
            ScoreParams("hidden"),
        )
        topk, sampled, logits, hidden = engine_scores(root / "qwen3_other", params)
        for rank, sequence_indices in enumerate(INDICES):
            scores = ranks[2][rank]["teacher"]["scores"]
            for signal in scores.values():
                assert [len(part) for part in signal] == [len(indices) for indices in sequence_indices]
            for number, indices in enumerate(sequence_indices):
                for j, index in enumerate(indices):
                    at = index if number == 0 else index + len(topk) - 3
                    both = scores["both"][number][j]
                    table = TopKTable(both.topk.ids, both.topk.logprobs, both.topk.tail)
                    assert difference(table, topk[at]) <= TOLERANCE
                    assert difference(both.sampled_logprobs, sampled[at]) <= TOLERANCE
                    assert difference(scores["logits"][number][j].logits, logits[at]) <= TOLERANCE
                    assert difference(scores["hidden"][number][j].hidden, hidden[at]) <= TOLERANCE

    def test_the_last_stage_gets_the_head(self, root: Path, ranks: Any) -> None:
        """Fails if the head is not updated by a refresh, or the first stage has one."""
        first, last = (rank["teacher"] for rank in ranks[2])
        assert first["head"] is None and first["head_copied"] is None
        for name, folder in (("head", "qwen3_other"), ("head_copied", "qwen3")):
            expected = load_file(root / folder / "model.safetensors")["lm_head.weight"]
            np.testing.assert_array_equal(last[name], expected.numpy())

    def test_it_follows_the_student(self, root: Path, ranks: Any) -> None:
        """Fails if a pipeline stage's weights do not reach all ranks, or a refresh is at a wrong step."""
        student, old = (load_file(root / kind / "model.safetensors") for kind in ("qwen3", "qwen3_other"))
        for rank in ranks[2]:
            teacher = rank["teacher"]
            assert teacher["kept"] and teacher["copied"].keys() == student.keys()
            for name, tensor in student.items():
                np.testing.assert_array_equal(teacher["copied"][name], tensor.numpy())
                np.testing.assert_allclose(teacher["average"][name], (tensor + old[name]) / 2, atol=1e-6)

    def test_another_architecture_is_refused(self, ranks: Any) -> None:
        """Fails if a teacher of another architecture is detected only during the first refresh."""
        for rank in ranks[2]:
            kind, text = rank["teacher"]["other architecture"]
            assert kind == "ConfigError" and text.startswith("teacher.update_interval")
