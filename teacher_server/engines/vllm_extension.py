"""Part of the vLLM engine that runs in vLLM's workers: keep hidden states, and compute the signals from them.

vLLM mixes `TeacherExtension` into each of its workers (`worker_extension_cls`), with any executor and
tensor-parallel size, and `VllmEngine` calls it through `LLM.collective_rpc`. vLLM's own prompt logprobs
would compute the logits of whole prompts. Here the forward pass computes one row of logits per sequence,
because vLLM always samples a token, and `signals` computes the rows of the response in chunks.

Every rank keeps the same hidden states and calls the LM head the same number of times, because the LM head
is a collective over the ranks. Rank 0 returns the result, the others return None.

Letters: N rows of a batch, R response tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.core.sched.scheduler import Scheduler

from teacher_server.engines.base import ENGINE_PID, RowStream, ScoreParams, TokenSequence
from teacher_server.engines.signals import MatrixStream, score_hidden
from teacher_server.engines.vllm_process import correct_cpu_kernels, record_loading
from teacher_server.wire.protocol import RowDtype, Wire
from teacher_server.wire.table import TopKTable

ROW_RANGES = "teacher_row_ranges"  # key of SamplingParams.extra_args: each `RowRange` as a list, ascending


class RowRange(NamedTuple):
    """Copy the hidden states at `position` .. `position + n_rows` of a request to `row` .. of the batch's buffer."""

    row: int
    position: int
    n_rows: int


def row_ranges(sequence: TokenSequence, row: int) -> list[RowRange]:
    """Return the ranges of a sequence, one for each run of consecutive response tokens that have rows.

    Args:
        row: of the batch's buffer, for the first one.
    """
    rows = sequence.rows
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)  # the first row of each run
    first = sequence.prompt_length - 1 + rows[starts]
    lengths = np.diff(starts, append=len(rows))
    ranges = zip((row + starts).tolist(), first.tolist(), lengths.tolist(), strict=True)
    return [RowRange(*bounds) for bounds in ranges]


class ModelFacts(NamedTuple):
    vocab_size: int
    hidden_size: int
    dtype: str
    has_plain_head: bool
    suppressed: tuple[int, ...]  # ids that generation_config.json excludes from answers


class StreamHandle(NamedTuple):
    """A `RowStream` in the workers."""

    stream_id: int
    n_rows: int
    n_cols: int
    dtype: RowDtype


class Failure(NamedTuple):
    """An ArithmeticError as a value, because vLLM converts exceptions of its workers to RuntimeError."""

    text: str


def is_child_of_engine() -> bool:
    """Return whether this is a child process. Without tensor parallelism vLLM's worker runs in the engine's process."""
    return os.environ.get(ENGINE_PID) == str(os.getppid())


def die_with_engine() -> None:
    """Let the kernel kill this process when the engine's ends: vLLM monitors its parent only after loading."""
    if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0) != 0:  # 1 is PR_SET_PDEATHSIG
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


if is_child_of_engine():  # vLLM imports this file before it loads the model
    die_with_engine()
correct_cpu_kernels()
record_loading()


class TeacherExtension:
    """Mixin of vLLM's worker class, which provides `model_runner`, `device`, `rank` and `execute_model`."""

    model_runner: Any
    device: torch.device
    rank: int
    execute_model: Callable[[Any], Any]

    @torch.inference_mode()
    def teacher_start(self) -> ModelFacts:
        """Hook into the forward pass, and locate the LM head."""
        if is_child_of_engine():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends its workers
        self._teacher_streams: dict[int, RowStream] = {}
        self._teacher_last_stream = 0
        self._teacher_row_ranges: dict[str, list[RowRange]] = {}
        execute_model = self.execute_model

        def execute_and_keep(scheduler_output: Any) -> Any:
            output = execute_model(scheduler_output)
            self._teacher_keep(scheduler_output)
            return output

        self.execute_model = execute_and_keep
        model = self.model_runner.get_model()
        config = self.model_runner.model_config
        suppressed = tuple(config.try_get_generation_config().get("suppress_tokens") or ())
        # vLLM's Gemma 4 would set their logits to -inf. Scores are of the model; `VllmEngine.generate` excludes them.
        if hasattr(model, "_suppress_token_ids"):
            model._suppress_token_ids = None
        hidden_size = int(config.get_hidden_size())
        probe = torch.arange(4.0 * hidden_size, device=self.device).sin_().view(4, hidden_size).to(config.dtype)
        logits, self._teacher_head, plain = _probe_head(model, probe)
        self._teacher_vocab_size = logits.shape[1]
        return ModelFacts(logits.shape[1], hidden_size, str(config.dtype).removeprefix("torch."), plain, suppressed)

    def teacher_begin(self, n_rows: int) -> None:
        """Allocate the hidden states of a batch."""
        config = self.model_runner.model_config
        self._teacher_row_ranges.clear()
        self._teacher_hidden = torch.empty(n_rows, config.get_hidden_size(), dtype=config.dtype, device=self.device)
        self._teacher_kept = np.zeros(n_rows, bool)

    @torch.inference_mode()
    def _teacher_keep(self, scheduler_output: Any) -> None:
        """Copy the hidden states of response rows. A long sequence is split over several forward passes."""
        state = self.model_runner.execute_model_state
        if state is None:  # nothing was scheduled
            return
        for request in scheduler_output.scheduled_new_reqs:
            ranges = request.sampling_params.extra_args[ROW_RANGES]
            self._teacher_row_ranges[request.req_id] = [RowRange(*kept) for kept in ranges]
        for span in _spans(self.model_runner, state):
            for kept in self._teacher_row_ranges[span.request_id]:
                start = max(span.position, kept.position)
                stop = min(span.position + span.n_rows, kept.position + kept.n_rows)
                if start < stop:
                    to = kept.row + start - kept.position
                    source = span.row + start - span.position
                    n_rows = stop - start
                    self._teacher_hidden[to : to + n_rows] = state.hidden_states[source : source + n_rows]
                    self._teacher_kept[to : to + n_rows] = True

    def _teacher_logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model_runner.get_model().compute_logits(hidden)
        if logits is None:
            raise RuntimeError("the LM head of this platform returns its logits on one rank only")
        return logits

    def teacher_score(
        self, batch: Sequence[TokenSequence], params: ScoreParams
    ) -> list[TopKTable | np.ndarray | StreamHandle] | Failure | None:
        """Run `signals.score_hidden` on the batch. Its streams stay here until `teacher_close`."""
        if not self._teacher_kept.all():
            raise RuntimeError(f"vLLM did not compute {int((~self._teacher_kept).sum())} rows of the batch")
        hidden = self._teacher_hidden
        self._teacher_hidden = torch.empty(0)
        try:
            scores = score_hidden(hidden, batch, self._teacher_logits_of, params, self._teacher_vocab_size)
        except ArithmeticError as error:
            return Failure(str(error))
        results: list[TopKTable | np.ndarray | StreamHandle] = []
        for scored in scores:
            if isinstance(scored, TopKTable | np.ndarray):
                results.append(scored)
            else:
                self._teacher_last_stream += 1
                self._teacher_streams[self._teacher_last_stream] = scored
                results.append(StreamHandle(self._teacher_last_stream, scored.n_rows, scored.n_cols, scored.dtype))
        return results if self.rank == 0 else None

    def teacher_rows(self, stream_id: int, start: int, stop: int) -> np.ndarray | Failure | None:
        try:
            rows = self._teacher_streams[stream_id].rows(start, stop)
        except ArithmeticError as error:
            return Failure(str(error))
        return rows if self.rank == 0 else None

    def teacher_close(self, stream_id: int) -> None:
        self._teacher_streams.pop(stream_id).close()

    def teacher_head_rows(self, start: int, stop: int, wire: Wire) -> np.ndarray | Failure | None:
        """Return the part of rows [start, stop) of the LM head in this rank's shard; shards are in order of ranks."""
        shard = self._teacher_head.shard_indices
        first = shard.org_vocab_start_index
        end = shard.org_vocab_end_index
        matrix = self._teacher_head.weight[min(max(start, first), end) - first : min(max(stop, first), end) - first]
        if len(matrix) == 0:
            return None
        try:
            return MatrixStream(matrix, wire).rows(0, len(matrix))
        except ArithmeticError as error:
            return Failure(str(error))


class _Span(NamedTuple):
    """Rows of one request in a forward pass."""

    request_id: str
    row: int
    position: int
    n_rows: int


def _spans(runner: Any, state: Any) -> Iterator[_Span]:
    """Yield the spans of the last forward pass. vLLM's second model runner keeps the batch in the pass's state."""
    if (batch := getattr(state, "input_batch", None)) is not None:
        ids = batch.req_ids
        rows = batch.query_start_loc_np
        positions = batch.num_computed_tokens_np
    else:
        ids = runner.input_batch.req_ids
        rows = runner.query_start_loc.np
        positions = [runner.requests[request_id].num_computed_tokens for request_id in ids]
    for i, request_id in enumerate(ids):
        yield _Span(request_id, int(rows[i]), int(positions[i]), int(rows[i + 1] - rows[i]))


def _probe_head(model: Any, probe: torch.Tensor) -> tuple[torch.Tensor, Any, bool]:
    """Return (logits of `probe`, LM head layer, whether logits = hidden @ weight.T), [4, H] -> [4, V]."""
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    hooks = [
        module.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True)
        for module in model.modules()
        if isinstance(module, LogitsProcessor)
    ]
    logits = model.compute_logits(probe)
    for hook in hooks:
        hook.remove()
    if len(calls) != 1:
        return logits, None, False
    processor, args, kwargs = calls[0]
    head = args[0] if args else kwargs["lm_head"]
    bias = args[2] if len(args) > 2 else kwargs.get("embedding_bias")
    weight = getattr(head, "weight", None)
    if bias is not None or processor.scale != 1.0 or processor.soft_cap is not None:
        return logits, head, False
    if weight is None or weight.dtype != probe.dtype or weight.ndim != 2 or weight.shape[1] != probe.shape[1]:
        return logits, head, False  # quantized
    first = head.shard_indices.org_vocab_start_index
    end = head.shard_indices.org_vocab_end_index
    local = torch.nn.functional.linear(probe, weight[: end - first]).float()
    whole = logits[:, first:end].float()
    # Kernels round bfloat16 differently, by less than a factor that the model applies to its logits.
    return logits, head, bool((local - whole).abs().amax() <= 0.02 * whole.abs().amax())


class CappedScheduler(Scheduler):
    """vLLM's scheduler, for requests with `ROW_RANGES`: `EngineArgs.scheduler_cls`.

    It lets vLLM reuse the KV cache of a prompt, but never of a row whose hidden state is needed.
    vLLM's prefix cache finds the longest beginning of a request that it has computed, whole blocks of it, at most
    all tokens but the last. Cached tokens are not computed, so they have no hidden states. Two responses may begin
    alike, and a request may be repeated; then the longest beginning reaches into the response. This scheduler ends
    it at the first row that the request needs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        find = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = lambda request: find(_Beginning(request))


class _Beginning:
    """A request that ends with the first row that it needs. vLLM looks for all of its tokens but the last."""

    def __init__(self, request: Any) -> None:
        ranges = request.sampling_params.extra_args[ROW_RANGES]
        self._request = request
        self.num_tokens = request.num_tokens  # a request for an answer needs no rows
        if ranges:
            self.num_tokens = min(request.num_tokens, RowRange(*ranges[0]).position + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
