"""Compute the requested signal from final hidden states, without storing the [N, V] logits.

Both model engines call this module with the hidden states of the response rows and a function that applies
the LM head to some of them. The head runs in chunks of rows of `CHUNK_BYTES`, and buffers are reused in place.
Scoring 4096 tokens at V = 152k on a CPU therefore needs 32 MiB for logits instead of twice 2.5 GB.

Letters: N rows of a batch, C rows of a chunk, H hidden size, V vocabulary, K top-k entries, G given ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from teacher_server.engines.base import ScoreParams, Scores, TokenSequence
from teacher_server.wire.payload import WIRE_DTYPES
from teacher_server.wire.protocol import RowDtype, Wire
from teacher_server.wire.table import NO_ID, TopKTable

# Bytes of float32 logits. At V = 152k, 55 rows suffice on a CPU, and larger blocks are mapped by the kernel again for
# every chunk. A GPU reads the whole LM head for each chunk, which takes as long as the arithmetic of 200 rows.
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}

LogitsOf = Callable[[torch.Tensor], torch.Tensor]  # [C, H] -> [C, V], which the caller may overwrite


@torch.inference_mode()
def score_hidden(
    hidden: torch.Tensor,
    batch: Sequence[TokenSequence],
    logits_of: LogitsOf,
    params: ScoreParams,
    vocab_size: int,
) -> list[Scores]:
    """Return the result of `Engine.score` from the final hidden states of a batch.

    Args:
        hidden: [N, H], the rows of all sequences one after the other, in the engine's dtype.
        batch: the sequences; N is the sum of their rows.

    Raises:
        ArithmeticError: on a NaN or an infinity, after all chunks, so that tensor-parallel ranks run the same calls.
    """
    lengths = [sequence.n_rows for sequence in batch]
    if sum(lengths) != len(hidden):
        raise ValueError(f"{len(hidden)} rows of hidden states for {sum(lengths)} rows of the sequences")
    n_vocab = params.n_vocab or vocab_size
    if params.signal == "topk":
        return [*topk_rows(hidden, batch, logits_of, params, vocab_size).split(lengths)]
    if params.signal == "sampled":
        return [*np.split(sampled_rows(hidden, batch, logits_of, params, vocab_size), np.cumsum(lengths)[:-1])]
    # Copy the rows of each stream: a view would keep the rows of the whole batch in memory.
    pieces = [part.clone() if len(lengths) > 1 else part for part in hidden.split(lengths)]
    if params.signal == "hidden":
        return [MatrixStream(part, params.wire) for part in pieces]
    return [LogitsStream(part, logits_of, params.temperature, n_vocab, params.wire) for part in pieces]


def topk_rows(
    hidden: torch.Tensor, batch: Sequence[TokenSequence], logits_of: LogitsOf, params: ScoreParams, vocab_size: int
) -> TopKTable:
    """Compute the top-k of all N rows as one TopKTable: the given ids, and the most probable others up to K.

    With l the logits below n_vocab, m their maximum and T the temperature, e = exp((l - m) / T), the logprob of an
    entry is (l - m) / T - log(sum e), and the tail is the sum of e over all other ids divided by sum e. Summing the
    rest, instead of computing 1 - mass, keeps a tail of 1e-12 exact.

    With `ScoreParams.units` the ids are units, and exp(l / T) is the sum over the tokens of the unit.
    """
    n_rows = len(hidden)
    k = params.k
    device = hidden.device
    if len({None if sequence.given is None else sequence.given.shape[1] for sequence in batch}) > 1:
        raise ValueError("the sequences of a batch have different numbers of given ids")
    given_ids = _columns([sequence.given for sequence in batch if sequence.given is not None], device)  # [N, G]
    own_ids = [sequence.own_ids for sequence in batch]
    temperature = params.temperature
    if params.units is not None:
        own_ids = [params.units.units[ids] for ids in own_ids]
        temperature = 1.0  # the sums are divided already
    targets = _columns(own_ids, device) if params.with_sampled else None  # [N]
    ids = torch.empty(n_rows, k, dtype=torch.int32, device=device)
    logprobs = torch.empty(n_rows, k, dtype=torch.float32, device=device)
    tail = torch.empty(n_rows, dtype=torch.float32, device=device)
    counts = torch.empty(n_rows, dtype=torch.int32, device=device) if params.mass else None
    sampled = torch.empty(n_rows, dtype=torch.float32, device=device) if params.with_sampled else None
    for chunk, logits in _chunks(hidden, logits_of, vocab_size, params):
        sampled_logits = None if targets is None else logits.gather(1, targets[chunk, None])  # [C, 1]
        if given_ids is None:
            values, columns = topk(logits, k)
            top = values[:, :1].clone()
        else:
            values, columns, top = _topk_with(logits, given_ids[chunk], k)
        rest = _exp_in_place(logits, top, temperature).scatter_(1, columns, 0.0).sum(-1)  # [C]
        scaled = values.sub_(top).div_(temperature)
        kept = scaled.exp()
        total = rest + kept.sum(-1)
        ids[chunk] = columns.int()
        # Rounding may give +1e-7 for a token with probability 1.
        logprobs[chunk] = scaled.sub_(total.log()[:, None]).clamp_(max=0.0)
        if sampled is not None and sampled_logits is not None:
            sampled[chunk] = (sampled_logits - top).div_(temperature)[:, 0].sub_(total.log()).clamp_(max=0.0)
        if counts is not None:
            reached = (kept.double().cumsum(-1) / total[:, None] < params.mass).sum(-1)  # entries before the target
            count = (reached + 1).clamp_(max=k)
            kept[torch.arange(k, device=device) < count[:, None]] = 0.0
            rest = rest + kept.sum(-1)  # entries that the mass target leaves out belong to the tail
            counts[chunk] = count.int()
        tail[chunk] = rest / total
    scores = TopKTable(
        ids.cpu().numpy(),
        logprobs.cpu().numpy(),
        tail.cpu().numpy(),
        None if counts is None else counts.cpu().numpy(),
        None if sampled is None else sampled.cpu().numpy(),
    )
    _check_finite(scores.logprobs, scores.tail, *([] if scores.sampled is None else [scores.sampled]))
    if scores.counts is not None:
        dropped = np.arange(k) >= scores.counts[:, None]
        scores.ids[dropped] = NO_ID
        scores.logprobs[dropped] = -np.inf
    return scores


def _topk_with(logits: torch.Tensor, wanted: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values [C, K] and columns [C, K] of the given columns and the largest others, and the maxima [C, 1].

    Values are descending. Overwrites the given columns of `logits` with -inf, [C, V].
    """
    values = logits.gather(1, wanted)
    columns = wanted
    logits.scatter_(1, wanted, -torch.inf)
    top = torch.maximum(values.amax(-1, keepdim=True), logits.amax(-1, keepdim=True))
    if n_others := k - wanted.shape[1]:
        top_values, other_columns = topk(logits, n_others)
        values = torch.cat([values, top_values], 1)
        columns = torch.cat([columns, other_columns], 1)
    values, order = values.sort(-1, descending=True)
    return values, columns.gather(1, order), top


def _columns(ids: Sequence[np.ndarray], device: torch.device) -> torch.Tensor | None:
    """Return the ids of all sequences, one after the other, as indices of logits; None without any."""
    return torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device) if ids else None


def sampled_rows(
    hidden: torch.Tensor, batch: Sequence[TokenSequence], logits_of: LogitsOf, params: ScoreParams, vocab_size: int
) -> np.ndarray:
    """Return [N] float32 logprobs of the response tokens."""
    columns = _columns([sequence.own_ids for sequence in batch], hidden.device)
    assert columns is not None  # a batch has sequences
    logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for chunk, logits in _chunks(hidden, logits_of, vocab_size, params):
        top = logits.amax(-1, keepdim=True)
        shifted = (logits.gather(1, columns[chunk, None]) - top).div_(params.temperature)[:, 0]  # [C]
        total = _exp_in_place(logits, top, params.temperature).sum(-1)
        logprobs[chunk] = (shifted - total.log()).clamp_(max=0.0)
    result = logprobs.cpu().numpy()
    _check_finite(result)
    return result


def _chunks(
    hidden: torch.Tensor, logits_of: LogitsOf, vocab_size: int, params: ScoreParams
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (rows, their float32 logits below n_vocab), which the caller may overwrite.

    With units these are the logs of the units' sums at the temperature.
    """
    step = max(1, CHUNK_BYTES[hidden.device.type] // (4 * vocab_size))
    n_ids = params.n_vocab or vocab_size
    units = None
    if params.units is not None:
        # int64, because index_add_ takes six times as long with int32.
        units = torch.from_numpy(params.units.units).to(hidden.device, torch.int64)
        n_ids = len(units)
    for start in range(0, len(hidden), step):
        chunk = slice(start, start + step)
        logits = logits_of(hidden[chunk])[:, :n_ids].float()
        if units is not None:
            p = _exp_in_place(logits, logits.amax(-1, keepdim=True), params.temperature)
            sums = p.new_zeros(len(p), params.n_vocab).index_add_(1, units, p)
            logits = sums.clamp_(min=torch.finfo(sums.dtype).tiny).log_()  # a unit may have no token
        yield chunk, logits


def _exp_in_place(logits: torch.Tensor, top: torch.Tensor, temperature: float) -> torch.Tensor:
    """Compute exp((logits - top) / temperature) in place of `logits`."""
    logits.sub_(top)
    if temperature != 1.0:
        logits.div_(temperature)
    return logits.exp_()


def _check_finite(*arrays: np.ndarray) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ArithmeticError("the model's logits contain a NaN or an infinity")


# Compute the exact top-k of long rows in two stages: select the blocks that can contain it, then search them.
#
# `torch.topk` runs its selection on all V numbers. But the k blocks with the largest maxima contain k numbers that
# are at least as large as any number outside of them. So a maximum per block (one pass at memory speed) leaves k *
# BLOCK candidates of V = 152k. The result is exact for any input; ties may be broken in either order.
#
# Letters: C rows, V columns, K top-k entries.

BLOCK = 64
MIN_SHRINK = 8  # use two stages if at most 1/8 of the columns remain; otherwise torch.topk is as fast


def topk(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest numbers of each row: values [C, K] in descending order and their columns [C, K] int64.

    A NaN counts as the largest number, as in torch.
    """
    if rows.shape[1] < MIN_SHRINK * BLOCK * k:
        return torch.topk(rows, k, dim=-1)
    return topk_two_stage(rows, k, BLOCK)


def topk_two_stage(rows: torch.Tensor, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `topk` by block maxima for any sizes. Requires at least k whole blocks."""
    n_blocks = rows.shape[1] // block
    n_whole = n_blocks * block
    maxima = rows[:, :n_whole].unflatten(1, (n_blocks, block)).amax(-1)  # [C, V / block]
    best = torch.topk(maxima, k, dim=-1, sorted=False).indices  # [C, K]
    inside = torch.arange(block, device=rows.device)
    columns = (best[:, :, None] * block + inside).flatten(1)  # [C, K * block]
    if n_whole < rows.shape[1]:  # columns after the last whole block are always candidates
        rest = torch.arange(n_whole, rows.shape[1], device=rows.device).expand(len(rows), -1)
        columns = torch.cat([columns, rest], dim=1)
    values, indices = torch.topk(rows.gather(1, columns), k, dim=-1)
    return values, columns.gather(1, indices)


# Row streams: compute or convert a large matrix a few rows at a time. Letters: R rows, C columns.

_MAX_FP16 = 65504.0
_ROW_DTYPES: dict[torch.dtype, RowDtype] = {getattr(torch, name): name for name in WIRE_DTYPES}


def row_dtype(dtype: torch.dtype, wire: Wire) -> RowDtype:
    """Return the dtype on the wire: two-byte dtypes unchanged, float32 as float16 if the wire is compact."""
    return "float16" if wire == "fp16" and dtype == torch.float32 else _ROW_DTYPES[dtype]


def to_numpy(rows: torch.Tensor) -> np.ndarray:
    """Return [R, C], contiguous, of a dtype of `payload.WIRE_DTYPES`; bfloat16 as uint16 of the same bits."""
    if rows.dtype == torch.bfloat16:
        rows = rows.contiguous().view(torch.uint16)
    return rows.contiguous().cpu().numpy()


class MatrixStream:
    """A `RowStream` of a matrix in memory: hidden states, or the LM head.

    Args:
        matrix: [R, C] in the engine's dtype; kept until `close`.
    """

    def __init__(self, matrix: torch.Tensor, wire: Wire) -> None:
        self.n_rows, self.n_cols = matrix.shape
        self.dtype = row_dtype(matrix.dtype, wire)
        self._matrix: torch.Tensor | None = matrix

    @torch.inference_mode()
    def rows(self, start: int, stop: int) -> np.ndarray:
        """See `RowStream.rows`. Also raises ArithmeticError for a float32 number above the float16 range."""
        if self._matrix is None:
            raise RuntimeError("rows() of a closed stream")
        piece = self._matrix[start:stop]
        largest = float(piece.abs().amax())
        if not np.isfinite(largest):
            raise ArithmeticError("a NaN or an infinity in the hidden states or the LM head")
        if self.dtype == "float16" and piece.dtype == torch.float32:
            if largest > _MAX_FP16:
                raise ArithmeticError(f"{largest:g} is above float16's maximum {_MAX_FP16:g}. Fix: use wire fp32.")
            piece = piece.half()
        return to_numpy(piece)

    def close(self) -> None:
        """See `RowStream.close`."""
        self._matrix = None


class LogitsStream:
    """A `RowStream` of logits / temperature, each row shifted so that its maximum is 0.

    The LM head runs on the requested rows at each call; a CPU is efficient from about 50 rows on.

    Args:
        hidden: [R, H], kept until `close`.
        n_vocab: number of columns that are kept.
    """

    def __init__(self, hidden: torch.Tensor, logits_of: LogitsOf, temperature: float, n_vocab: int, wire: Wire) -> None:
        self.n_rows = len(hidden)
        self.n_cols = n_vocab
        self.dtype: RowDtype = "float16" if wire == "fp16" else "float32"
        self._hidden: torch.Tensor | None = hidden
        self._logits_of = logits_of
        self._temperature = temperature

    @torch.inference_mode()
    def rows(self, start: int, stop: int) -> np.ndarray:
        """See `RowStream.rows`."""
        if self._hidden is None:
            raise RuntimeError("rows() of a closed stream")
        logits = self._logits_of(self._hidden[start:stop])[:, : self.n_cols].float()
        logits.sub_(logits.amax(-1, keepdim=True))
        if self._temperature != 1.0:
            logits.div_(self._temperature)
        # A row with maximum +inf becomes NaN, so the minimum detects every fault.
        if not np.isfinite(float(logits.amin())):
            raise ArithmeticError("the model's logits contain a NaN or an infinity")
        if self.dtype == "float16":
            logits = logits.clamp_(min=-_MAX_FP16).half()
        return to_numpy(logits)

    def close(self) -> None:
        """See `RowStream.close`."""
        self._hidden = None
