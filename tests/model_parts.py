"""Measure parts of the product with the folders of one model family. Runs in child processes of `tests.models`.

The reference is transformers alone, each sequence computed by itself, with torch's AdamW. Each part begins with the
checks that a run makes before it starts.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_rollout import RolloutConfig
from gkd.data.batching import make_micro_batches
from gkd.errors import ConfigError, GkdError
from gkd.hf.model_folder import check_engines
from gkd.rollout.messages import Sampling
from gkd.rollout.vllm.engine import RolloutEngine
from gkd.types import Prompt, Rollout, TeacherScores
from gkd.weight_sync.buckets import differing
from teacher_server.engines.base import ScoreParams, TokenSequence
from teacher_server.engines.load import EngineSettings, load_engine
from teacher_server.engines.weight_files import read_json
from teacher_server.errors import ServerError
from teacher_server.wire.table import TopKTable
from tests.dist.megatron_reference import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, read_model
from tests.e2e.weight_sender import WeightSender
from tests.model_families import N_BYTES, VOCAB, save_family
from tests.vision_reference import logits_of, loss_of, train

SIZES = ((5, 22), (4, 15), (9, 25))  # tokens of prompts and responses, longer than the families' windows
LONGEST = 64
K = 8  # ids in the teacher's tables
# How much a part may differ. Weights: after a step with a learning rate of 1e-3. bfloat16: the mean over tokens.
BOUNDS = {"logprobs": 1e-3, "bfloat16 logprobs": 0.1, "losses": 1e-4, "gradient norms": 1e-4, "weights": 2e-5}
OWN = (GkdError, ServerError)
FILE = "model.safetensors"
PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
Scored = list[tuple[Rollout, np.ndarray, np.ndarray]]  # ids and logprobs at each place of the response, [M, K]


class Cell(NamedTuple):
    """The outcome of a part: its kind, the largest difference, marks, and why it is not ok. See docs/models.md."""

    kind: str
    error: float = 0.0
    marks: str = ""
    why: str = ""


def attempt(part: Callable[..., Any], *args: Any) -> Any:
    """Return what a part returns, or the cell of its error."""
    try:
        return part(*args)
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(root.__traceback__)]
        is_foreign = not isinstance(root, OWN) and any("/site-packages/vllm/" in file for file in files)
        if isinstance(error, OWN):
            return Cell("V" if is_foreign else "R", why=str(error))
        return Cell("C", why=f"{type(error).__name__}: {error}")


def _judge(errors: dict[str, float], marks: str = "", bounds: Mapping[str, float] = BOUNDS) -> Cell:
    """Return ok, or W if an error is above its bound or not a number."""
    wrong = [f"{name} differ by {error:.1g}" for name, error in errors.items() if not error <= bounds[name]]
    return Cell("W" if wrong else "ok", max(errors.values()), marks, "; ".join(wrong))


def make(root: Path, name: str) -> None:
    """Save two models with different weights."""
    save_family(root / "first", name, seed=1)
    save_family(root / "second", name, seed=2)


def _config(folder: Path, *settings: str) -> Config:
    lengths = (f"data.max_prompt_length={LONGEST // 2}", f"data.max_response_length={LONGEST // 2}")
    return load_config(None, [f"model.path={folder}", *lengths, *settings])


@functools.cache
def _sequences() -> list[tuple[Rollout, TeacherScores]]:
    """Return sequences, and tables with a mass of 0.3 to 0.9."""
    rng = np.random.default_rng(0)
    made = []
    for i, (n_prompt, n) in enumerate(SIZES):
        ids = rng.integers(0, N_BYTES, n_prompt + n).astype(np.int32)
        shares = rng.uniform(0.3, 0.9, (n, 1)) * rng.dirichlet(np.ones(K), n)
        listed = np.stack([rng.permutation(VOCAB)[:K] for _ in range(n)]).astype(np.int32)
        topk = TopKTable.without_tail(listed, np.log(-np.sort(-shares)).astype(np.float32))
        rollout = Rollout(i, i, ids[:n_prompt], ids[n_prompt:], np.zeros(n, np.float32), (), "stop", on_policy=False)
        made.append((rollout, TeacherScores(topk)))
    return made


@functools.cache
def _join() -> None:
    """Make this process the only rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _plain(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model of transformers. Its default attention leaves out caps and sinks."""
    _join()
    return read_model(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def _loss(model: Any) -> float:
    sums = [loss_of(logits_of(model, None, rollout), scores.topk) for rollout, scores in _sequences()]
    return float(sum(sums)) / sum(n for _, n in SIZES)


@torch.no_grad()
def _logprobs(model: Any, rollout: Rollout, ids: np.ndarray) -> torch.Tensor:
    """Return those of [M, K] ids."""
    return logits_of(model, None, rollout).float().log_softmax(-1).gather(1, torch.from_numpy(ids).long())


@functools.cache
def _reference(folder: Path) -> tuple[torch.Tensor, np.ndarray, float]:
    """Make a step. Return logprobs, losses before and after it, and the gradient norm; save the weights in `after`."""
    model = _plain(folder)
    logprobs = torch.cat([_logprobs(model, each, each.response_ids[:, None])[:, 0] for each, _ in _sequences()])
    settings: dict[str, Any] = {"weight_decay": WEIGHT_DECAY, "clip": CLIP, "lr": LR, "betas": BETAS, "eps": EPS}
    (loss,), (norm,) = train(model, None, [_sequences()], frozen=False, **settings)
    model.save_pretrained(folder / "after")
    return logprobs, np.array([loss, _loss(model)]), norm


@functools.cache
def _student(backend: str, folder: Path, packing: bool, dtype: str = "float32", fused: bool = True) -> tuple[Any, str]:
    """Return a student; and u if its LM head cannot be fused with the loss."""
    from gkd.preflight.student import check_student
    from tests.dist.student_cases import build_student

    _join()
    own = {"packing": packing} if backend == "fsdp2" else {}
    settings = (f"actor.strategy={backend}", f"actor.packing={packing}", f"actor.fused_lm_head={fused}")
    try:
        check_student(_config(folder, *settings))
        made = build_student(backend, folder, 0, 1, fused_lm_head=fused, dtype=getattr(torch, dtype), **own)
    except ConfigError as error:
        if error.key != "actor.fused_lm_head" or not fused:
            raise
        return _student(backend, folder, packing, dtype, False)
    return made, "" if fused else "u"


def _batches(packing: bool) -> Any:
    rollouts, scores = zip(*_sequences(), strict=True)
    return make_micro_batches(rollouts, scores, micro_batch_size=len(SIZES), packed=packing)


def student(root: Path, backend: str, packing: bool) -> Cell:
    """Compare logprobs, losses, gradient norm, and the weights after a step."""
    trained, mark = _student(backend, root / "first", packing)
    expected, losses, norm = _reference(root / "first")
    batches = _batches(packing)
    (logprobs,) = trained.compute_logprobs(batches)
    stats = trained.train_step(batches)
    exported = dict(trained.export())
    before = load_file(root / "first" / FILE)
    after = load_file(root / "first" / "after" / FILE)
    lost = [name for name in after if name not in exported and not torch.equal(before[name], after[name])]
    if lost or not exported.keys() <= after.keys():
        return Cell("W", why=f"the student lacks {lost[:2]}, and has {sorted(exported.keys() - after.keys())[:2]} more")
    errors = {
        "logprobs": float((logprobs - expected).abs().max()),
        "losses": float(np.abs(losses - [stats.loss, trained.evaluate(batches).loss]).max()),
        "gradient norms": abs(stats.grad_norm / norm - 1),
        "weights": max(float((tensor - after[name]).abs().max()) for name, tensor in exported.items()),
    }
    return _judge(errors, mark)


def student_in_16_bits(root: Path) -> Cell:
    """Compare logprobs of a packed student in bfloat16, and train it."""
    trained, mark = _student("fsdp2", root / "first", True, "bfloat16")
    batches = _batches(True)
    (logprobs,) = trained.compute_logprobs(batches)
    trained.train_step(batches)
    return _judge({"bfloat16 logprobs": float((logprobs - _reference(root / "first")[0]).abs().mean())}, mark)


def export(root: Path) -> Cell:
    """Compare the loss of a padded student with that of its export in transformers."""
    exporter, mark = _student("fsdp2", root / "first", False)
    exporter.save_hf(root / "export", root / "first")
    return _judge({"losses": abs(_loss(_plain(root / "export")) - exporter.evaluate(_batches(False)).loss)}, mark)


def compare(folder: Path, scored: Scored, dtype: str) -> Cell:
    """Compare logprobs with those of transformers.

    In bfloat16 two right engines may differ by as much as transformers in bfloat16 does from float32: 0.15 for Zamba2.
    """
    model = _plain(folder, getattr(torch, dtype))
    off = [(_logprobs(model, rollout, ids) - torch.from_numpy(given)).abs().flatten() for rollout, ids, given in scored]
    if dtype != "bfloat16":
        return _judge({"logprobs": float(torch.cat(off).max())})
    exact = _plain(folder)
    rounding = [(_logprobs(exact, rollout, ids) - _logprobs(model, rollout, ids)).abs() for rollout, ids, _ in scored]
    name = "bfloat16 logprobs"
    bound = max(BOUNDS[name], float(torch.cat(rounding).mean()))
    return _judge({name: float(torch.cat(off).mean())}, "b", {name: bound})


def _scored(tables: Iterable[Any]) -> Scored:
    return [(rollout, table.ids, table.logprobs) for (rollout, _), table in zip(_sequences(), tables, strict=True)]


def local(root: Path) -> Scored:
    """Return the scores of a teacher on the actor's ranks."""
    from gkd.actor.frozen.model import FrozenModel
    from gkd.preflight.meta_models import local_teacher

    _join()
    folder = root / "first"
    local_teacher(_config(folder, "teacher.backend=local", f"teacher.path={folder}"), "cpu")
    teacher = FrozenModel(folder, device=torch.device("cpu"), dtype=torch.float32, key="teacher.path")
    tables = teacher.score([rollout for rollout, _ in _sequences()], [ScoreParams("topk", k=K)])
    return _scored(table for (table,) in tables)


def teach(root: Path, engine: str, dtype: str) -> Scored:
    """Return the scores of an engine of the teacher server."""
    if engine == "vllm":
        enter_vllm()
    rows = [TokenSequence(np.concatenate([r.prompt_ids, r.response_ids]), len(r.prompt_ids)) for r, _ in _sequences()]
    settings = {"engine": engine, "dtype": dtype, "device": "cpu", "max_batch_tokens": 256}
    loaded = load_engine(EngineSettings(model=str(root / "first"), max_tokens=LONGEST, **settings))
    return _scored(loaded.score(rows, ScoreParams("topk", k=K, with_sampled=True)))


def enter_vllm() -> None:
    """Let vLLM look at a model's code in this process: a further one for that takes seconds."""
    from vllm.model_executor.models import registry

    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    if find_spec("torchvision") is None:
        sys.path.append(str(Path(__file__).with_name("torchvision_names")))


_engines = list[Any]()  # the rollout engine of this process


def start(root: Path, dtype: str) -> None:
    """Start a rollout engine with the first model."""
    enter_vllm()
    check_engines(_config(root / "first", f"model.dtype={dtype}"), "cpu")
    sizes = RolloutConfig(kv_cache_mib=64, max_num_seqs=8)
    # Gemma 4 in transformers computes a placeholder that has no image as padding, so a response ends with one.
    placeholders = [i for name, i in read_json(root / "first/config.json").items() if name in PLACEHOLDERS]
    place: dict[str, Any] = {"dtype": dtype, "max_model_len": LONGEST, "device": "cpu", "eos_ids": [1, *placeholders]}
    _engines.append(RolloutEngine(str(root / "first"), sizes, **place))
    _engines[0].keep_digests()


def generate() -> Scored:
    prompts = [Prompt(i, rollout.prompt_ids) for i, (rollout, _) in enumerate(_sequences())]
    rollouts = _engines[0].generate(prompts, Sampling(1, 1.0, 1.0, max_tokens=40, seed=3))
    return [(rollout, rollout.response_ids[:, None], rollout.rollout_logprobs[:, None]) for rollout in rollouts]


def save_sent(root: Path, model: str, dtype: str) -> None:
    """Save what a student of the first or second model sends to an engine."""
    sender, _ = _student("fsdp2", root / model, False, dtype)
    save_file({name: tensor.clone() for name, tensor in sender.export()}, root / "sent.safetensors")


def sync(root: Path, version: int) -> Cell:
    """Send weights to the engine, and compare digests. The mark is the number of tensors that they do not compare.

    Version 0 has the weights of the engine's folder, so the engine compares all its parameters and buffers.
    """
    sent, _ = WeightSender(_engines[0]).push(load_file(root / "sent.safetensors"), version, bucket_bytes=1 << 18)
    held = _engines[0].digests()
    opaque = {name for name, digest in held.items() if not digest}
    wrong = [name for name in differing(sent, held) if name not in opaque]
    text = f"{len(wrong)} of {len(sent)} tensors differ, first {wrong[:2]}" if wrong else ""
    return Cell("W" if wrong else "ok", 0.0, f"d{len(opaque)}" if opaque else "", text)
