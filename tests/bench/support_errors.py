"""Part `errors`: the gradient of a top-k list against that of the whole vocabulary, by position, for a real pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gkd.config.loss_spec import LossSpec, LossTerm, teacher_signals
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.row_kernels import TorchRows
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from teacher_server.engines.base import RowStream, ScoreParams, TokenSequence, stream_rows
from teacher_server.engines.hf import HfEngine
from teacher_server.wire.payload import TopKScores
from tests.bench.teacher_report import Figure, Part, Table

LOSSES = ("reverse_kl", "forward_kl", "jsd")
BINS = ((0.0, 0.1), (0.1, 0.5), (0.5, 2.0), (2.0, float("inf")))  # nats, KL(student || teacher) of the position
N_RESPONSE = 24
GOAL_K = 16  # the quickstart's teacher.topk; shorter lists are measured without a goal
_BYTES_OF_ID = 3  # of a given id in the request; an entry of the reply has 5 bytes


class Support(NamedTuple):
    """A list of `k` entries, of which the student gives `n_given`."""

    name: str
    k: int
    n_given: int

    @property
    def n_bytes(self) -> int:
        """Bytes of a position on the wire in fp16, in both directions."""
        return 5 * self.k + 4 + _BYTES_OF_ID * self.n_given


def supports(k: int) -> tuple[Support, ...]:
    """Return the lists: of `k` entries each, and the teacher's own with as many bytes as the union."""
    union = Support("union", k, k // 2)
    return (
        Support("teacher, as many bytes", (union.n_bytes - 4) // 5, 0),
        Support("teacher", k, 0),
        Support("student", k, k),
        union,
    )


def sample(student: Any, prompts: np.ndarray, seed: int) -> list[TokenSequence]:
    """Return one response per prompt, sampled at temperature 1, to its end-of-sequence token or the limit.

    Args:
        prompts: [n, P], all of the same length.
    """
    torch.manual_seed(seed)
    ids = torch.from_numpy(prompts.astype(np.int64))
    whole = student.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=N_RESPONSE,
        pad_token_id=student.config.pad_token_id,
    ).numpy()
    sequences = []
    for tokens in whole.astype(np.int32):
        ends = np.flatnonzero(tokens[prompts.shape[1] :] == student.config.eos_token_id)
        n_response = int(ends[0]) + 1 if len(ends) else N_RESPONSE
        sequences.append(TokenSequence(tokens[: prompts.shape[1] + n_response], prompts.shape[1]))
    return sequences


def student_logits(student: Any, sequences: Sequence[TokenSequence]) -> Tensor:
    """Return [N, V] float64, the rows of all response tokens."""
    rows = []
    for sequence in sequences:
        with torch.inference_mode():
            logits = student(input_ids=torch.from_numpy(sequence.token_ids.astype(np.int64))[None]).logits[0]
        rows.append(logits[sequence.prompt_length - 1 : -1].double())
    return torch.cat(rows)


def gradients(loss: str, logits: Tensor, targets: TokenTargets, head: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of each row in its logits, [N, V], and its KL(student || teacher), [N]."""
    spec = LossSpec((LossTerm(loss),))
    signals = teacher_signals(spec, "topk" if head is None else "hidden")
    made = DistillLoss(spec, signals, VocabShard(0, logits.shape[1], None), TorchRows(), 1 << 30, head)
    rows = logits.clone().requires_grad_()
    values: list[Tensor] = []
    with made.evaluating(values.append):
        made.from_logits(logits.clone(), targets)
    made.from_logits(rows, targets)[0].backward()
    assert rows.grad is not None
    return rows.grad, torch.cat(values)[:, made.report_names.index(loss)]


def targets_of(sequences: Sequence[TokenSequence], **tables: Tensor) -> TokenTargets:
    sampled = torch.from_numpy(np.concatenate([sequence.response for sequence in sequences]).astype(np.int64))
    n = len(sampled)
    return TokenTargets(sampled, torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.bool), **tables)


def listed(engine: HfEngine, sequences: Sequence[TokenSequence], top: np.ndarray, support: Support) -> TokenTargets:
    """Return the targets of a list, rounded as the fp16 wire does.

    Args:
        top: [N, V] the student's ids, most probable first.
    """
    given = iter(np.split(top[:, : support.n_given], np.cumsum([s.n_response for s in sequences])[:-1]))
    batch = [TokenSequence(s.token_ids, s.prompt_length, next(given) if support.n_given else None) for s in sequences]
    scores = engine.score(batch, ScoreParams("topk", k=support.k, n_given=support.n_given))
    tables = [each for each in scores if isinstance(each, TopKScores)]
    ids, logprobs, tail = (np.concatenate([getattr(t, name) for t in tables]) for name in ("ids", "logprobs", "tail"))
    return targets_of(
        sequences,
        topk_ids=torch.from_numpy(ids.astype(np.int64)),
        topk_logprobs=torch.from_numpy(logprobs.astype(np.float16).astype(np.float64)),
        tail_mass=torch.from_numpy(tail.astype(np.float64)),
    )


def whole(engine: HfEngine, sequences: Sequence[TokenSequence]) -> tuple[TokenTargets, Tensor]:
    """Return the targets of `hidden`, and the LM head."""

    def rows_of(stream: Any) -> np.ndarray:
        return np.concatenate([rows for _, _, rows in stream_rows(stream, 1000)])

    streams: list[RowStream] = engine.score(sequences, ScoreParams("hidden"))  # type: ignore[assignment]
    hidden = torch.from_numpy(np.concatenate([rows_of(stream) for stream in streams])).double()
    head = torch.from_numpy(rows_of(engine.lm_head("fp32")).copy()).double()
    return targets_of(sequences, hidden=hidden), head


class Errors(NamedTuple):
    """By bin of KL."""

    n_rows: list[int]
    relative: dict[tuple[int, str, str], list[float]]  # (K, loss, list): relative squared error of the gradient


def measure(models: Path, ks: Sequence[int], n_prompts: int, seed: int) -> Errors:
    """Return the errors of all lists on the responses of one seed."""
    student = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float32).eval()
    engine = HfEngine(str(models / "teacher"), dtype="float32", device="cpu", max_tokens=256)
    tokenizer = AutoTokenizer.from_pretrained(models / "student")
    texts = [json.loads(line)["prompt"] for line in (models / "train.jsonl").read_text().splitlines()]
    chosen = np.random.default_rng(seed).permutation(len(texts))[:n_prompts]
    sequences = sample(student, np.array(tokenizer([texts[i] for i in chosen])["input_ids"]), seed)
    logits = student_logits(student, sequences)
    exact_targets, head = whole(engine, sequences)
    _, kl = gradients("reverse_kl", logits, exact_targets, head)
    top = logits.argsort(dim=1, descending=True).numpy().astype(np.int32)
    inside = [(kl >= low) & (kl < high) for low, high in BINS]
    found = Errors([int(each.sum()) for each in inside], {})
    exact = {loss: gradients(loss, logits, exact_targets, head)[0] for loss in LOSSES}
    for k in ks:
        for support in supports(k):
            targets = listed(engine, sequences, top, support)
            for loss in LOSSES:
                error = (gradients(loss, logits, targets, None)[0] - exact[loss]).square().sum(1)
                size = exact[loss].square().sum(1)
                of_bins = [float(error[each].sum() / size[each].sum()) for each in inside]
                found.relative[k, loss, support.name] = of_bins
    return found


def errors(models: Path, ks: Sequence[int], n_prompts: int, seeds: int) -> Part:
    """Return the errors by KL, and the union's at KL >= 2 relative to the teacher's list of as many bytes."""
    figures, tables = [], []
    runs = [measure(models, ks, n_prompts, seed) for seed in range(seeds)]
    for k in ks:
        names = [support.name for support in supports(k)]
        for loss in LOSSES:
            rows: list[list[str | float]] = []
            for i, (low, high) in enumerate(BINS):
                by_name = {name: [run.relative[k, loss, name][i] for run in runs] for name in names}
                ratios = [u / t for u, t in zip(by_name["union"], by_name[names[0]], strict=True)]
                rows.append(
                    [
                        f"{low:g} to {high:g}",
                        sum(run.n_rows[i] for run in runs),
                        *(float(f"{median(values):.3g}") for values in by_name.values()),
                        float(f"{median(ratios):.3g}"),
                        f"{min(ratios):.3g} to {max(ratios):.3g}",
                    ]
                )
                if loss == "reverse_kl":
                    has_goal = i == len(BINS) - 1 and k == GOAL_K
                    figures.append(
                        Figure(
                            f"error of union / teacher's list, as many bytes, K = {k}, KL {low:g} to {high:g}",
                            median(ratios),
                            at_most=0.1 if has_goal else None,
                            note=f"{min(ratios):.3g} to {max(ratios):.3g} over {seeds} seeds",
                        )
                    )
            columns = ["KL, nats", "positions", *names, "union / first", "over the seeds"]
            sizes = ", ".join(f"{s.name}: {s.k} entries, {s.n_bytes} bytes" for s in supports(k))
            tables.append(Table(f"{loss}, K = {k} ({sizes})", columns, rows))
    what = (
        "Relative squared error of a position's gradient in the logits, sums over the positions of a bin: lists of ids "
        "with bucket against the whole vocabulary; the quickstart's student before its training, on its own responses."
    )
    return Part("errors", what, figures, tables, {"prompts": n_prompts, "seeds": seeds, "K": list(ks)})
