"""Functions that run in the ranks of `test_frozen_model`: a frozen model alone, with students, and refreshed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gkd.actor.fsdp.optim import host_threads
from gkd.types import Rollout
from teacher_server.engines.base import ScoreParams
from tests.device import host, rank_device
from tests.dist.helpers import caught
from tests.dist.megatron_reference import VOCAB, make_micro_batches
from tests.dist.student_cases import build_student, same_weights, share, weights

CUT = VOCAB - 50  # n_vocab of some tables
# Folder -> whether sequences are packed. gpt2 has biases, learned positions and no rotary embedding.
KINDS = {"qwen3": True, "qwen2_tied": False, "gpt2": True, "mistral3": True, "gemma3": False, "qwen2_5_vl": True}
KINDS |= {"gemma2": True}  # capped logits, which hidden states do not give
PARAMS = (
    ScoreParams("topk", k=8),
    ScoreParams("topk", k=20, mass=0.7, temperature=2.0, n_vocab=CUT),
    ScoreParams("sampled", temperature=0.8, n_vocab=CUT),
    ScoreParams("logits", temperature=1.5, n_vocab=CUT),
    ScoreParams("logits", wire="fp16"),
    ScoreParams("hidden"),
)


def params_of(kind: str) -> tuple[ScoreParams, ...]:
    return PARAMS[:-1] if kind == "gemma2" else PARAMS


PLAIN = (ScoreParams("sampled"),)
N_GIVEN = 3
GIVEN = ScoreParams("topk", k=8, temperature=0.8, n_vocab=CUT, n_given=N_GIVEN, with_sampled=True)
# (prompt, response) tokens: the shortest possible, one longer than a micro-batch, unsorted.
SIZES = ((5, 12), (1, 1), (20, 30), (1, 50), (9, 3), (40, 1), (3, 1))
BATCH_TOKENS = 48
EMA = 0.9
BACKENDS = {1: "fsdp2", 2: "megatron"}  # world size -> the student's backend


def sequences() -> list[Rollout]:
    rng = np.random.default_rng(3)

    def ids(n: int) -> np.ndarray:
        return rng.integers(0, CUT, n).astype(np.int32)

    none = np.zeros(0, np.float32)
    return [Rollout(i, 7, ids(p), ids(r), none, (), "stop", on_policy=False) for i, (p, r) in enumerate(SIZES)]


def with_top_ids(rollouts: Sequence[Rollout], n: int, *, everywhere: bool = False) -> list[Rollout]:
    """Return the sequences with `n` ids at each response token; every third one is from the dataset and has none,
    unless `everywhere`.
    """
    rng = np.random.default_rng(4)
    ids = [np.stack([rng.permutation(CUT)[:n] for _ in r.response_ids]).astype(np.int32) for r in rollouts]
    return [
        replace(r, on_policy=i % 3 > 0, top_ids=ids[i] if i % 3 or everywhere else None) for i, r in enumerate(rollouts)
    ]


def with_masks(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the sequences as trajectories of turns, with ids at each own token; those of one token are whole."""
    masked = []
    for rollout, with_ids in zip(rollouts, with_top_ids(rollouts, N_GIVEN, everywhere=True), strict=True):
        own = np.arange(len(rollout.response_ids)) % 5 < 3
        assert with_ids.top_ids is not None
        masked.append(replace(rollout, own=own if len(own) > 1 else None, top_ids=with_ids.top_ids[own]))
    return masked


def distributions(world_size: int) -> dict[str, list[list[int]]]:
    """Return name -> by rank, the indices of its sequences."""
    indices = list(range(len(SIZES)))
    if world_size == 1:
        return {"all": [indices], "none": [[]], "one": [[2]]}
    return {
        "even": [indices[::2], indices[1::2]],
        "uneven": [indices[:-1], indices[-1:]],
        "one rank has all": [[], indices],
        "none": [[], []],
    }


def build(folder: Path, **changes: Any) -> Any:
    from gkd.actor.frozen.model import FrozenModel

    settings = {"dtype": torch.float32, "key": "teacher.path", "max_batch_tokens": BATCH_TOKENS}
    return FrozenModel(folder, **({"device": rank_device()} | settings | changes))


def frozen_weights(model: Any) -> dict[str, np.ndarray]:
    """Return all tensors by their names in the files, float32."""
    from gkd.actor.fsdp.weights import full_tensor

    found = {}
    for place in model.places.values():
        whole = full_tensor(place.tensor, rank_device(), torch.float32)
        found |= {part.name: host(part.cut_from(whole)).copy() for part in place.parts}
    return found


def measure(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank: return all results of the tests."""
    out: dict[str, Any] = {"scores": {}}
    batch = sequences()
    for kind, packing in KINDS.items():
        model = build(root / kind, packing=packing)
        for name, by_rank in distributions(world_size).items():
            out["scores"][kind, name] = model.score([batch[i] for i in by_rank[rank]], params_of(kind))
        if kind == "qwen3":
            out["bad"] = _bad_input(model, batch, rank, world_size)
    out["refused"] = [caught(lambda: build(root / "opt", packing=False)), caught(lambda: build(root / "nothing"))]
    out["refreshed"] = _refreshed(root, batch)
    if world_size == 1:
        out |= _once(root, batch)
    out["with student"] = _with_student(BACKENDS[world_size], root, rank, world_size, batch)
    if world_size == 2:
        from megatron.core import parallel_state

        from tests.dist.local_teacher_cases import teach

        parallel_state.destroy_model_parallel()
        out["teacher"] = teach(rank, root)
    return out


def _once(root: Path, batch: Sequence[Rollout]) -> dict[str, Any]:
    """Return the results for which one rank suffices."""
    out: dict[str, Any] = {"resident": build(root / "qwen3", cpu_offload=False).score(batch, PLAIN)}
    out["given"] = build(root / "qwen3").score(with_top_ids(batch, N_GIVEN), (GIVEN,))
    masked = with_masks(batch)
    out["own given"] = build(root / "qwen3").score(masked, (GIVEN,))
    masked = [replace(rollout, top_ids=None) for rollout in masked]
    out["own"] = build(root / "qwen3").score(masked, PARAMS)
    out["own padded"] = build(root / "qwen2_tied", packing=False).score(masked, PARAMS)
    out["mask"] = caught(lambda: build(root / "qwen3").score([replace(batch[0], own=np.zeros(12, bool))], PLAIN))
    half = build(root / "qwen3", dtype=torch.bfloat16)
    out["bf16"] = [
        half.score(batch, (ScoreParams("sampled"), ScoreParams("hidden"))),
        {p.dtype for p in half.model.parameters()} == {torch.bfloat16},
    ]
    with host_threads(2):
        reference = build(root / "qwen3", key="reference.path")
    out["named"] = [_poisoned(each, batch, PLAIN[0], True) for each in (reference, build(root / "qwen3"))]
    n_threads: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in _tensors(root / "qwen3"):
            n_threads.append(torch.get_num_threads())
            yield pair

    reference.refresh(tensors(), EMA)
    out["threads"] = [torch.get_num_threads(), set(n_threads), torch.get_num_threads()]
    out["packs"] = caught(lambda: build(root / "falcon"))
    slow = {
        is_float: build(root / "qwen3", dtype=torch.bfloat16, float32_weights=is_float) for is_float in (True, False)
    }
    for each in slow.values():
        for _ in range(3):
            each.refresh(_tensors(root / "qwen3_other"), 0.999)
    out["slow"] = {flag: frozen_weights(each) for flag, each in slow.items()}
    return out


def _bad_input(model: Any, batch: Sequence[Rollout], rank: int, world_size: int) -> dict[str, Any]:
    """Return name -> (error, whether the next call is correct). Only the last rank has the bad sequence."""
    good = model.score(batch, PLAIN)
    last = rank == world_size - 1

    def with_bad(**changes: Any) -> list[Rollout]:
        return [*batch[:-1], replace(batch[-1], **changes)] if last else list(batch)

    def ids(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    tries = {
        "past the vocabulary": (with_bad(response_ids=ids(VOCAB)), PLAIN),
        "negative": (with_bad(prompt_ids=ids(1, -1)), PLAIN),
        "empty response": (with_bad(response_ids=ids()), PLAIN),
        "empty prompt": (with_bad(prompt_ids=ids()), PLAIN),
        "too long": (with_bad(response_ids=np.zeros(64, np.int32)), PLAIN),
        "no top ids": (with_bad(on_policy=True), (GIVEN,)),
        "n_vocab": (batch, (ScoreParams("topk", k=1, n_vocab=VOCAB + 1),)),
        "k": (batch, (ScoreParams("topk", k=VOCAB + 1),)),
        "cut response": (with_bad(response_ids=ids(CUT)), (ScoreParams("sampled", n_vocab=CUT),)),
    }
    found: dict[str, Any] = {}
    for name, (rollouts, params) in tries.items():
        error = caught(lambda r=rollouts, p=params: model.score(r, p))  # type: ignore[misc]
        found[name] = (error, _same(model.score(batch, PLAIN), good))
    for each in PARAMS:
        found[f"NaN {each.signal}"] = (_poisoned(model, batch, each, last), _same(model.score(batch, PLAIN), good))
    return found


def _poisoned(model: Any, batch: Sequence[Rollout], params: ScoreParams, with_work: bool) -> tuple[str, str]:
    """Return the error of a model whose last norm has a NaN; ranks without `with_work` score no sequence."""
    norm = model.places["model.norm.weight"].tensor.to_local()
    saved = norm.clone()
    norm.fill_(float("nan"))
    try:
        return caught(lambda: model.score(batch if with_work else [], (params,)))
    finally:
        norm.copy_(saved)


def _same(one: Any, two: Any) -> bool:
    return all(np.array_equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return iter(load_file(folder / "model.safetensors").items())


def _refreshed(root: Path, batch: Sequence[Rollout]) -> dict[str, Any]:
    """Refresh a teacher from `qwen3_other`, in several ways."""
    model, given = build(root / "qwen3"), dict(_tensors(root / "qwen3_other"))
    model.score(batch, PLAIN)
    for _ in range(2):
        model.refresh(iter(given.items()), EMA)
    out: dict[str, Any] = {"ema": frozen_weights(model)}
    model.refresh(iter(given.items()))
    out |= {"copied": frozen_weights(model), "scores": model.score(batch, PLAIN)}
    for kind in ("qwen2_tied", "mixtral"):
        other = build(root / kind)
        other.refresh((name, tensor * 2) for name, tensor in _tensors(root / kind))
        out[kind] = frozen_weights(other)
    plan = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()]
    wide = (plan[0][0], (1, *plan[0][1][1:]), plan[0][2])
    out["plan"] = [
        caught(lambda p=p: model.check_plan(p))  # type: ignore[misc]
        for p in (plan, plan[1:], [*plan, ("more", (1,), torch.float32)], [wide, *plan[1:]])
    ]
    name = next(iter(given))
    bad = ([], [*given.items(), (name, given[name])], [(name, given[name][:1])], [("more", given[name])])
    out["stream"] = [caught(lambda b=b: model.refresh(iter(b))) for b in bad]  # type: ignore[misc]
    return out


def _with_student(backend: str, root: Path, rank: int, world_size: int, batch: Sequence[Rollout]) -> dict[str, Any]:
    """Train a student and score with a teacher in the same processes; compare with each alone."""

    def steps(student: Any, between: Any) -> list[float]:
        losses = []
        for step in range(2):
            losses.append(student.train_step(share(make_micro_batches(step), rank, world_size)).loss)
            between()
        return losses

    alone = build_student(backend, root / "qwen3", rank, world_size)
    expected = steps(alone, lambda: None)
    student = build_student(backend, root / "qwen3", rank, world_size)
    teacher = build(root / "qwen3_other")
    scores: list[Any] = []
    losses = steps(student, lambda: scores.append(teacher.score(batch, PLAIN)))
    out: dict[str, Any] = {"losses": losses == expected, "weights": same_weights(weights(student), weights(alone))}
    out["scores"] = scores
    teacher.check_plan(student.export_plan())
    teacher.refresh(student.export())
    refreshed = {name: torch.from_numpy(array) for name, array in frozen_weights(teacher).items()}
    out["follows"] = same_weights(refreshed, weights(student))
    return out
