"""What runs in the ranks for `test_frozen_model`: the frozen model alone, beside students, and refreshed from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gkd.types import Rollout
from teacher_server.engines.base import ScoreParams
from tests.dist.helpers import caught
from tests.dist.megatron_reference import VOCAB, make_micro_batches
from tests.dist.student_cases import CPU, build_student, same_weights, share, weights

CUT = VOCAB - 50  # of the vocabulary, for some questions
# Folder -> whether sequences are packed. Untied, and the last with everything that the others lack.
KINDS = {"qwen3": True, "qwen2_tied": False, "gpt2": True}
ASKED = (
    ScoreParams("topk", k=8),
    ScoreParams("topk", k=20, mass=0.7, temperature=2.0, n_vocab=CUT),
    ScoreParams("sampled", temperature=0.8, n_vocab=CUT),
    ScoreParams("logits", temperature=1.5, n_vocab=CUT),
    ScoreParams("logits", wire="fp16"),
    ScoreParams("hidden"),
)
PLAIN = (ScoreParams("sampled"),)
# (prompt, response) tokens: the shortest there can be, one longer than a micro-batch, and in no order.
SIZES = ((5, 12), (1, 1), (20, 30), (1, 50), (9, 3), (40, 1), (3, 1))
BATCH_TOKENS = 48
EMA = 0.9
BESIDE = {1: "fsdp2", 2: "megatron"}  # world size -> the student's backend


def sequences() -> list[Rollout]:
    rng = np.random.default_rng(3)

    def ids(n: int) -> np.ndarray:
        return rng.integers(0, CUT, n).astype(np.int32)

    none = np.zeros(0, np.float32)
    return [Rollout(i, 7, ids(p), ids(r), none, (), "stop", on_policy=False) for i, (p, r) in enumerate(SIZES)]


def deals(world_size: int) -> dict[str, list[list[int]]]:
    """Name -> by rank, the places of the sequences it gets."""
    everything = list(range(len(SIZES)))
    if world_size == 1:
        return {"all": [everything], "none": [[]], "one": [[2]]}
    return {
        "even": [everything[::2], everything[1::2]],
        "uneven": [everything[:-1], everything[-1:]],
        "one rank has all": [[], everything],
        "none": [[], []],
    }


def build(folder: Path, **changes: Any) -> Any:
    from gkd.actor.frozen.model import FrozenModel

    settings = {"device": CPU, "dtype": torch.float32, "key": "teacher.path", "max_batch_tokens": BATCH_TOKENS}
    return FrozenModel(folder, **(settings | changes))


def frozen_weights(model: Any) -> dict[str, np.ndarray]:
    """All tensors under their names in the files, float32."""
    from gkd.actor.fsdp.weights import full_tensor

    found = {}
    for place in model.places.values():
        whole = full_tensor(place.tensor, CPU, torch.float32)
        found |= {part.name: part.cut_from(whole).numpy().copy() for part in place.parts}
    return found


def measure(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank: everything that the tests look at."""
    out: dict[str, Any] = {"scores": {}}
    batch = sequences()
    for kind, packing in KINDS.items():
        model = build(root / kind, packing=packing)
        for name, dealt in deals(world_size).items():
            out["scores"][kind, name] = model.score([batch[i] for i in dealt[rank]], ASKED)
        if kind == "qwen3":
            out["head"] = model.lm_head()
            out["sizes"] = (model.vocab_size, model.hidden_size, model.max_tokens)
            out["bad"] = _bad_input(model, batch, rank, world_size)
    out["refused"] = [caught(lambda: build(root / "gemma2", packing=False)), caught(lambda: build(root / "nothing"))]
    out["refreshed"] = _refreshed(root, batch)
    if world_size == 1:
        out |= _once(root, batch)
    out["beside"] = _beside(BESIDE[world_size], root, rank, world_size, batch)
    if world_size == 2:
        from megatron.core import parallel_state

        from tests.dist.local_teacher_cases import teach

        parallel_state.destroy_model_parallel()
        out["teacher"] = teach(rank, root)
    return out


def _once(root: Path, batch: Sequence[Rollout]) -> dict[str, Any]:
    """What more ranks would not make any harder."""
    out: dict[str, Any] = {"resident": build(root / "qwen3", cpu_offload=False).score(batch, PLAIN)}
    half = build(root / "qwen3", dtype=torch.bfloat16)
    out["bf16"] = [
        half.score(batch, (ScoreParams("sampled"), ScoreParams("hidden"))),
        {p.dtype for p in half.model.parameters()} == {torch.bfloat16},
    ]
    of_reference = build(root / "qwen3", key="reference.path")
    out["who"] = [_poisoned(each, batch, PLAIN[0], True) for each in (of_reference, build(root / "qwen3"))]
    seen: list[int] = []
    of_reference._n_threads = 2

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in _tensors(root / "qwen3"):
            seen.append(torch.get_num_threads())
            yield pair

    of_reference.refresh(given(), EMA)
    out["threads"] = [torch.get_num_threads(), set(seen), torch.get_num_threads()]
    out["packs"] = caught(lambda: build(root / "gemma2"))
    slow = {kept: build(root / "qwen3", dtype=torch.bfloat16, float32_weights=kept) for kept in (True, False)}
    for each in slow.values():
        for _ in range(3):
            each.refresh(_tensors(root / "qwen3_other"), 0.999)
    out["slow"] = {kept: frozen_weights(each) for kept, each in slow.items()}
    return out


def _bad_input(model: Any, batch: Sequence[Rollout], rank: int, world_size: int) -> dict[str, Any]:
    """(error, is the next call right) by what is wrong; where a sequence is, the last rank alone has it."""
    good = model.score(batch, PLAIN)
    last = rank == world_size - 1

    def instead(**changes: Any) -> list[Rollout]:
        return [*batch[:-1], replace(batch[-1], **changes)] if last else list(batch)

    def ids(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    tries = {
        "past the vocabulary": (instead(response_ids=ids(VOCAB)), PLAIN),
        "negative": (instead(prompt_ids=ids(1, -1)), PLAIN),
        "empty response": (instead(response_ids=ids()), PLAIN),
        "empty prompt": (instead(prompt_ids=ids()), PLAIN),
        "too long": (instead(response_ids=np.zeros(64, np.int32)), PLAIN),
        "n_vocab": (batch, (ScoreParams("topk", k=1, n_vocab=VOCAB + 1),)),
        "k": (batch, (ScoreParams("topk", k=VOCAB + 1),)),
        "cut response": (instead(response_ids=ids(CUT)), (ScoreParams("sampled", n_vocab=CUT),)),
    }
    found: dict[str, Any] = {}
    for name, (rollouts, asked) in tries.items():
        error = caught(lambda r=rollouts, a=asked: model.score(r, a))  # type: ignore[misc]
        found[name] = (error, _same(model.score(batch, PLAIN), good))
    for asked in ASKED:
        found[f"NaN {asked.signal}"] = (_poisoned(model, batch, asked, last), _same(model.score(batch, PLAIN), good))
    return found


def _poisoned(model: Any, batch: Sequence[Rollout], asked: ScoreParams, with_work: bool) -> tuple[str, str]:
    """The error of a model whose last norm has a NaN; but one rank has nothing to score."""
    norm = model.places["model.norm.weight"].tensor.to_local()
    saved = norm.clone()
    norm.fill_(float("nan"))
    try:
        return caught(lambda: model.score(batch if with_work else [], (asked,)))
    finally:
        norm.copy_(saved)


def _same(one: Any, two: Any) -> bool:
    return all(np.array_equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return iter(load_file(folder / "model.safetensors").items())


def _refreshed(root: Path, batch: Sequence[Rollout]) -> dict[str, Any]:
    """A teacher that takes the weights of `qwen3_other`, in several ways."""
    model, given = build(root / "qwen3"), dict(_tensors(root / "qwen3_other"))
    model.score(batch, PLAIN)
    homes = [_home(param) for param in model.model.parameters()]
    for _ in range(2):
        model.refresh(iter(given.items()), EMA)
    out: dict[str, Any] = {"ema": frozen_weights(model)}
    model.refresh(iter(given.items()))
    out |= {"copied": frozen_weights(model), "scores": model.score(batch, PLAIN)}
    out["stayed"] = homes == [_home(param) for param in model.model.parameters()]
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


def _home(param: torch.Tensor) -> tuple[str, int]:
    local = param.to_local()  # type: ignore[attr-defined]
    return str(local.device), local.data_ptr()


def _beside(backend: str, root: Path, rank: int, world_size: int, batch: Sequence[Rollout]) -> dict[str, Any]:
    """A student that trains while a teacher in the same processes scores: does either notice?"""

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
    held = {name: torch.from_numpy(array) for name, array in frozen_weights(teacher).items()}
    out["follows"] = same_weights(held, weights(student))
    return out
