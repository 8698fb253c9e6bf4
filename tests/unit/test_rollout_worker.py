"""Rollout worker around a fake engine: chunk assignment, exact-match evaluation, offloading, seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.data.chunks import dataset_chunks, decode_sizes, distinct_4grams, encode_sizes
from gkd.errors import ClusterError, DataError, OutOfMemory
from gkd.memory.usage import GIB
from gkd.rollout.engine.worker import RolloutWorker
from gkd.rollout.messages import Sampling, decode_prompts, encode_prompts
from gkd.rollout.vllm.sampling import sequence_seed
from gkd.types import FINISH_REASONS, EngineUsage, Prompt, Rollout, RolloutChunk, VersionSpan
from tests.unit.local_ray import worker_of

WORDS = {0: "<start>", 1: "work", 2: ";", 3: "42", 4: "43"}


class Engine:
    """Return `responses[i]` (token ids, finish reason) for prompt i, last prompt first; record the calls."""

    n_running = n_generating = n_passes = 0
    has_weights = True

    def __init__(self, responses: Sequence[tuple[list[int], str]]) -> None:
        self.responses = responses
        self.calls: list[Any] = []

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    def sleep(self, level: int, tags: Sequence[str]) -> None:
        self.calls.append(("sleep", level, tags))

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 5, "kv_cache": 7}

    def process_memory(self) -> dict[str, int]:
        return {"host_rss": GIB}

    def usage(self) -> EngineUsage:
        return EngineUsage(0.5)

    def receive(self, plans: Any, policy_version: int, *, adapters: bool = False) -> int:
        self.calls.append("receive")
        return 8

    def digests(self) -> dict[str, str]:
        self.calls.append("digests")
        return {}

    def join_groups(self, specs: Any) -> None:
        self.calls.append("join_groups")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def abort(self, owner: Any) -> None:
        self.calls.append("abort")

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int] | None = None
    ) -> Iterator[Rollout]:
        self.calls.append("generate")
        for prompt, prompt_index in reversed(list(zip(prompts, prompt_indices or range(len(prompts)), strict=True))):
            ids, reason = self.responses[prompt.prompt_id]
            for index in range(prompt_index * sampling.n, (prompt_index + 1) * sampling.n):
                yield Rollout(
                    prompt.prompt_id,
                    index,
                    prompt.token_ids,
                    np.array(ids, np.int32),
                    np.zeros(len(ids), np.float32),
                    (VersionSpan(0, len(ids), 7),),
                    reason,
                )


class Tokenizer:
    def decode(self, ids: np.ndarray, skip_special_tokens: bool) -> str:
        return "".join(WORDS[int(i)] for i in ids if i or not skip_special_tokens)


def worker(
    responses: Sequence[tuple[list[int], str]], *overrides: str, run_dir: Path = Path("not_there")
) -> RolloutWorker:
    return worker_of(Engine(responses), load_config(None, list(overrides)), run_dir, Tokenizer())


def prompts(n: int) -> list[Prompt]:
    return [Prompt(i, np.array([i], np.int32), "42") for i in range(n)]


def chunks_of(rows: list[Prompt], indices: Sequence[int], **changed: int) -> list[tuple[list[Rollout], RolloutChunk]]:
    """Return the chunks of dataset responses that end with token 3, of one group unless it is changed."""
    options = {"n": 1, "dp_size": 1, "chunk_size": 16, "policy_version": 0} | changed
    return list(dataset_chunks(rows, indices, **options, eos_ids=frozenset({3})))


def test_a_response_is_correct_only_if_it_is_complete_and_marked() -> None:
    """Fails if the accuracy counts truncated or unmarked responses, or uses another prompt's reference answer, or a
    sample lacks its prompt's text.
    """
    responses = [([1, 2, 3], "stop"), ([1, 2, 3], "length"), ([3], "stop"), ([1, 2, 4], "stop")]
    n_correct, samples = worker(responses).greedy(prompts(4), range(4), ";", n_samples=3)
    assert n_correct == {0: 1}
    assert [(s.prompt_id, s.prompt, s.text, s.correct) for s in samples] == [
        (0, "<start>", "work;42", True),
        (1, "work", "work;42", False),
        (2, ";", "42", False),
    ]


def test_the_first_sample_of_each_prompt_is_shown_as_text() -> None:
    """Fails if a text belongs to another prompt or sample, or is judged."""
    texts = [Rollout(i // 2, i, np.array([0, i // 2]), np.array([1, i + 2]), np.zeros(2), (), "stop") for i in range(4)]
    (first, second) = worker([]).texts([[0], [1]], texts[:2], texts[1:3])
    assert (first.prompt_id, first.prompt, first.text, first.correct) == (0, "<start><start>", "work;", None)
    assert (second.prompt_id, second.prompt, second.text) == (1, "<start>work", "work" + WORDS[4])


@pytest.mark.parametrize(("dp_size", "chunk_size"), [(1, 3), (2, 2), (4, 16)])
def test_dataset_responses_belong_to_the_group_of_their_prompt(dp_size: int, chunk_size: int) -> None:
    """Fails if a dataset response goes to another group than a rollout would, is marked as on-policy, or gets the
    teacher's prompt of another row.
    """
    prompt_indices = [0, 1, 4, 5, 6, 9]
    rows = [
        Prompt(i, np.array([i], np.int32), "42", np.array([1] * i + [3], np.int32), 0, np.arange(i) if i % 2 else None)
        for i in range(6)
    ]
    chunks = chunks_of(rows, prompt_indices, n=3, dp_size=dp_size, chunk_size=chunk_size, policy_version=8)
    seen: list[tuple[int, int]] = []
    for rollouts, chunk in chunks:
        assert 0 < len(rollouts) <= chunk_size
        assert chunk.n_response.tolist() == [r.prompt_id + 1 for r in rollouts]
        assert (chunk.n_tokens - chunk.n_response).tolist() == [1] * chunk.n_sequences == [1] * len(rollouts)
        assert (chunk.endings.max(), chunk.versions.tolist(), chunk.on_policy) == (0, [8] * len(rollouts), False)
        assert {r.sample_index // 3 % dp_size for r in rollouts} == {chunk.dp_rank}
        for r in rollouts:
            assert (r.on_policy, r.version_spans, r.finish_reason) == (False, (), "stop")
            assert r.rollout_logprobs.dtype == np.float32
            assert r.rollout_logprobs.tolist() == [0.0] * len(r.response_ids)
            assert r.response_ids.tolist() == rows[r.prompt_id].response_ids.tolist()  # type: ignore[union-attr]
            assert r.teacher_ids is rows[r.prompt_id].teacher_ids
        seen += [(r.prompt_id, r.sample_index) for r in rollouts]
    assert sorted(seen) == [(i, index * 3) for i, index in enumerate(prompt_indices)]


def test_encoded_chunk_sizes_are_small_and_complete() -> None:
    """Fails if a field is lost in the encoding, or a sequence takes more than 32 bytes."""
    n = 16
    rows = [Prompt(i, np.arange(i + 1, dtype=np.int32), None, np.array([1] * (i + 2), np.int32)) for i in range(n)]
    ((rollouts, chunk),) = chunks_of(rows, range(n), n=2**20, policy_version=2**30)
    data = encode_sizes(chunk)
    assert len(data) == 16 + 32 * n
    job, again = decode_sizes(encode_sizes(chunk, 7), "handle")
    assert job == 7
    for name in (f.name for f in fields(RolloutChunk)):
        expected = "handle" if name == "ref" else getattr(chunk, name)
        assert np.array_equal(getattr(again, name), expected), name
    assert again.sizes.dtype == np.int32
    assert [r.sample_index for r in rollouts] == again.sample_index.tolist()
    for bad in (data[:15], data[:-1], data + b"x"):
        with pytest.raises(DataError):
            decode_sizes(bad, None)


@pytest.mark.parametrize(("length", "vocab"), [(0, 1), (3, 1), (4, 2), (40, 6), (300, 2**31 - 1)])
def test_distinct_4grams_are_those_of_a_set(length: int, vocab: int) -> None:
    """Fails if rollout/repeated_4gram_share counts other 4-grams than a set of tuples would, or large ids collide."""
    ids = np.random.default_rng(length).integers(0, vocab, length).astype(np.int32)
    ids = np.concatenate([ids, ids[length // 2 :]])
    rows = ids.tolist()
    assert distinct_4grams(ids) == len(set(zip(rows, rows[1:], rows[2:], rows[3:], strict=False)))


def test_the_4grams_of_a_chunk_are_counted_in_each_response() -> None:
    """Fails if a 4-gram counts as repeated because another response has it, or short responses count."""
    responses = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [7, 7, 7, 7, 7, 7], [1, 2, 3])
    rows = [Prompt(i, np.array([i], np.int32), None, np.array(r, np.int32)) for i, r in enumerate(responses)]
    ((_, chunk),) = chunks_of(rows, range(4))
    assert chunk.sizes[5].tolist() == [0, 0, 2, 0]


def test_a_dataset_response_without_an_end_token_counts_as_truncated() -> None:
    """Fails if the share of truncated responses misses dataset responses that exceed data.max_response_length."""
    truncated = Prompt(0, np.array([1], np.int32), None, np.array([1, 2], np.int32))
    ((rollouts, chunk),) = chunks_of([truncated], [0])
    assert (rollouts[0].finish_reason, chunk.endings.tolist()) == ("length", [FINISH_REASONS.index("length")])
    with pytest.raises(DataError):  # loaded without its response
        chunks_of(prompts(1), [0])


def test_encoded_prompts_hold_exactly_ids_and_tokens() -> None:
    """Fails if tokens, the teacher's prompt or indices change in the encoding, or a prompt takes more than its tokens
    and 24 bytes.
    """
    tokens = [np.arange(i, i + n, dtype=np.int32) for i, n in enumerate((3, 1, 400))]
    sent = [Prompt(i * 10**8, ids, "secret", ids, i, ids[:2] if i else None) for i, ids in enumerate(tokens)]
    data = encode_prompts(sent, [7, 0, 2**30])
    assert len(data) <= 3 * 24 + (404 + 3) * 4
    received, prompt_indices = decode_prompts(data)
    assert prompt_indices == [7, 0, 2**30]
    for prompt, expected in zip(received, sent, strict=True):
        assert (prompt.prompt_id, prompt.route) == (expected.prompt_id, expected.route)
        assert (prompt.answer, prompt.response_ids) == (None, None)
        assert prompt.token_ids.dtype == np.int32 and np.array_equal(prompt.token_ids, expected.token_ids)
    views = [None if prompt.teacher_ids is None else prompt.teacher_ids.tolist() for prompt in received]
    assert views == [None, [1], [2, 3]]
    for bad in (b"", data[:20], data[:-4], data + b"abcd", data[1:]):
        with pytest.raises(DataError):
            decode_prompts(bad)


def test_calls_reload_the_states_they_need() -> None:
    """Fails if a call finds the engine asleep, or reloads states that it does not use."""
    engine = Engine([([1], "stop")])
    made = worker_of(engine, load_config(None), tokenizer=Tokenizer())
    uses = [
        lambda: made.greedy(prompts(1), [0], ";", 1),
        lambda: made.receive([], 1),
        lambda: made.digests(),
        lambda: made.join_groups([]),
        lambda: made.open_stream(1, 1, 16),
    ]
    seen: list[Any] = []
    for use in uses:
        engine.calls = []
        use()
        seen.append(engine.calls)
    everything, weights = ("wake_up", None), ("wake_up", ["weights"])
    assert seen == [
        [everything, "generate"],
        [weights, "receive"],
        [weights, "digests"],
        ["join_groups"],
        [everything, "synchronize"],
    ]


def test_states_have_the_actor_s_names() -> None:
    """Fails if a state name maps to another tag, or states are offloaded while a stream is open."""
    engine = Engine([])
    made = worker_of(engine, load_config(None))
    assert made.offload_states() == {"params": 5, "kv_cache": 7} == made.reload_states(["kv_cache"])
    made.offload_states(["params"], 2)
    made.reload_states()
    assert engine.calls == [
        ("sleep", 1, ["weights", "kv_cache"]),
        ("wake_up", ["kv_cache"]),
        ("sleep", 2, ["weights"]),
        ("wake_up", ["weights", "kv_cache"]),
    ]
    for move in (made.offload_states, made.reload_states):
        with pytest.raises(ClusterError, match="'optimizer'"):
            move(["params", "optimizer"])
    made.open_stream(1, 1, 16)
    with pytest.raises(ClusterError, match="rollout engine 0 .*offload_states"):
        made.offload_states()
    made.close_stream()
    made.offload_states()


def test_memory_is_recorded_at_the_end_of_each_phase() -> None:
    """Fails if memory metrics are missing or reported twice."""
    made = worker([([1], "stop")])
    made.greedy(prompts(1), [0], ";", n_samples=0)
    made.receive([], 3)
    made.offload_states()
    memory = made.usage().memory
    held = {"rollout_params_gib": 5 / GIB, "rollout_kv_cache_gib": 7 / GIB, "rollout_host_rss_gib": 1.0}
    phases = ("generating", "receiving_weights", "offloading_states")
    assert memory == {f"memory/{phase}/{name}": value for phase in phases for name, value in held.items()}
    assert made.usage().memory == {}


def out_of_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("Unable to allocate 3.00 GiB for an array")


@pytest.mark.parametrize("method", ["receive", "wake_up", "generate"])
def test_out_of_memory_errors_of_the_engine_are_explained(tmp_path: Path, method: str) -> None:
    """Fails if an engine's out-of-memory error is not explained, or the advice names the actor's keys."""
    broken = type("Broken", (Engine,), {method: out_of_memory})([])
    made = worker_of(broken, load_config(None, ["trainer.device=cpu"]), tmp_path)
    calls = {"receive": lambda: made.receive([], 1), "wake_up": made.reload_states}
    with pytest.raises(OutOfMemory) as raised:
        calls.get(method, lambda: made.greedy(prompts(1), [0], ";", n_samples=0))()
    assert "try rollout.kv_cache_mib=128." in str(raised.value) and "actor." not in str(raised.value)


def test_an_out_of_memory_error_of_a_stream_is_explained_once(tmp_path: Path) -> None:
    """Fails if a call that waits for the stream reports the stream's error a second time."""
    broken = type("Broken", (Engine,), {"n_running": 1, "n_generating": 1, "step": out_of_memory})([])
    made = worker_of(broken, load_config(None), tmp_path)
    made.open_stream(1, 1, 16)
    with pytest.raises(OutOfMemory):
        list(made.stream())
    with pytest.raises(OutOfMemory) as raised:
        made.receive([], 1)
    assert str(raised.value).count("what to change:") == 1


def test_sequence_seeds_are_unique() -> None:
    """Fails if a prompt that occurs twice in a batch, or again in a later step, gets the same samples."""
    assert len({sequence_seed(1 + step, index) for step in range(40) for index in range(64)}) == 40 * 64
    assert sequence_seed(5, 6) == sequence_seed(5, 6)
