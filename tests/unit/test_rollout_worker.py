"""The rollout worker and pool around a fake engine: who gets which prompt, how answers are judged, seeds."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config.load import load_config
from gkd.data.chunks import dataset_chunks, decode_sizes, encode_sizes
from gkd.data.prompt_codec import decode_prompts, encode_prompts
from gkd.errors import ClusterError, DataError, OutOfMemory
from gkd.handles import EngineUsage, RolloutChunk
from gkd.memory import oom
from gkd.memory.usage import GIB
from gkd.rollout.sampling import Sampling, sequence_seed
from gkd.rollout.worker import RolloutWorker
from gkd.types import Prompt, Rollout, VersionSpan

WORDS = {1: "work", 2: ";", 3: "42", 4: "43"}


class Engine:
    """Answers prompt i with `answers[i]` (token ids, finish reason), last prompt first; notes what it is asked for."""

    n_running = 0

    def __init__(self, answers: Sequence[tuple[list[int], str]]) -> None:
        self.answers = answers
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
        return EngineUsage(0.5, 0.0, np.zeros((4, 4)), np.zeros(0, np.int32))

    def receive(self, plans: Any, policy_version: int) -> int:
        self.calls.append("receive")
        return 8

    def digests(self) -> dict[str, str]:
        self.calls.append("digests")
        return {}

    def join_groups(self, specs: Any) -> None:
        self.calls.append("join_groups")

    def settle(self) -> None:
        self.calls.append("settle")

    def drop(self, owner: Any) -> None:
        self.calls.append("drop")

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int] | None = None
    ) -> Iterator[Rollout]:
        self.calls.append("generate")
        for prompt, place in reversed(list(zip(prompts, prompt_indices or range(len(prompts)), strict=True))):
            ids, reason = self.answers[prompt.prompt_id]
            for index in range(place * sampling.n, (place + 1) * sampling.n):
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
        return "".join(WORDS[int(i)] for i in ids)


def worker(answers: Sequence[tuple[list[int], str]]) -> RolloutWorker:
    made = RolloutWorker(0)
    made._engine = Engine(answers)  # type: ignore[assignment]
    made._tokenizer = Tokenizer()
    made._config = load_config(None, [])
    made._run_dir, made._device = Path("not_there"), torch.device("cpu")
    return made


def prompts(n: int) -> list[Prompt]:
    return [Prompt(i, np.array([i], np.int32), "42") for i in range(n)]


def test_an_answer_is_right_only_if_it_ends_by_itself_after_the_marker() -> None:
    """If it fails, the reported accuracy counts cut-off or unmarked answers, or the wrong prompt's reference."""
    answers = [([1, 2, 3], "stop"), ([1, 2, 3], "length"), ([3], "stop"), ([1, 2, 4], "stop")]
    n_correct, samples = worker(answers).greedy(prompts(4), ";", n_samples=3)
    assert n_correct == 1
    assert [(s.prompt_id, s.text, s.correct) for s in samples] == [
        (0, "work;42", True),
        (1, "work;42", False),
        (2, "42", False),
    ]


@pytest.mark.parametrize(("dp_size", "chunk_size"), [(1, 3), (2, 4), (4, 16)])
def test_every_sample_leaves_once_for_the_group_of_its_place(dp_size: int, chunk_size: int) -> None:
    """If it fails, a data-parallel group trains on another group's rollouts, twice on some, or never on others."""
    prompt_indices = [0, 2, 3, 5]  # what one of two engines is given of a batch of six
    items: list[Any] = list(
        worker([([1, 2], "stop")] * 4).generate(
            encode_prompts(prompts(4), prompt_indices), dp_size, Sampling(3, 1.0, 1.0, 9, 0), chunk_size
        )
    )
    seen: list[int] = []
    for rollouts, sizes in zip(items[::2], items[1::2], strict=True):
        chunk = decode_sizes(sizes, "handle")
        assert chunk.ref == "handle"
        assert chunk.sample_index.tolist() == [r.sample_index for r in rollouts]
        assert chunk.n_tokens.tolist() == [r.n_tokens for r in rollouts] and chunk.n_truncated == 0
        assert chunk.n_prompt_tokens == len(rollouts)
        assert (chunk.n_sequences, chunk.n_response_tokens) == (len(rollouts), 2 * len(rollouts))
        assert len(rollouts) <= chunk_size and chunk.policy_version == 7 and chunk.on_policy
        assert {r.sample_index // 3 % dp_size for r in rollouts} == {chunk.dp_rank}
        seen += [r.sample_index for r in rollouts]
    assert sorted(seen) == [place * 3 + j for place in prompt_indices for j in range(3)]


@pytest.mark.parametrize(("dp_size", "chunk_size"), [(1, 3), (2, 2), (4, 16)])
def test_dataset_responses_go_to_the_group_of_their_place(dp_size: int, chunk_size: int) -> None:
    """If it fails, a group's share of a mixed batch depends on who answers, or a response is taken for a rollout."""
    prompt_indices = [0, 1, 4, 5, 6, 9]
    rows = [Prompt(i, np.array([i], np.int32), "42", np.array([1] * i + [3], np.int32)) for i in range(6)]
    chunks = list(
        dataset_chunks(
            rows, prompt_indices, n=3, dp_size=dp_size, chunk_size=chunk_size, policy_version=8, eos_ids={3, 9}
        )
    )
    seen: list[tuple[int, int]] = []
    for rollouts, chunk in chunks:
        assert 0 < len(rollouts) <= chunk_size
        assert (chunk.n_sequences, chunk.n_prompt_tokens) == (len(rollouts), len(rollouts))
        assert chunk.n_response_tokens == sum(r.prompt_id + 1 for r in rollouts)
        assert (chunk.n_truncated, chunk.policy_version, chunk.on_policy) == (0, 8, False)
        assert {r.sample_index // 3 % dp_size for r in rollouts} == {chunk.dp_rank}
        for r in rollouts:
            assert (r.on_policy, r.version_spans, r.finish_reason) == (False, (), "stop")
            assert r.rollout_logprobs.dtype == np.float32
            assert r.rollout_logprobs.tolist() == [0.0] * len(r.response_ids)
            assert r.response_ids.tolist() == rows[r.prompt_id].response_ids.tolist()  # type: ignore[union-attr]
        seen += [(r.prompt_id, r.sample_index) for r in rollouts]
    assert sorted(seen) == [(i, place * 3) for i, place in enumerate(prompt_indices)]


@pytest.mark.parametrize("n", [1, 2, 16])
def test_the_driver_gets_few_bytes_of_a_chunk_and_all_that_it_needs(n: int) -> None:
    """Fails if a number of a chunk's sizes is lost on the way, or a chunk of one sequence costs over 100 bytes."""
    rows = [Prompt(i, np.arange(i + 1, dtype=np.int32), None, np.array([1] * (i + 2), np.int32)) for i in range(n)]
    ((rollouts, chunk),) = dataset_chunks(
        rows, range(n), n=2**20, dp_size=1, chunk_size=16, policy_version=2**40, eos_ids={3}
    )
    data = encode_sizes(chunk)
    assert len(data) == 40 + 8 * n <= 100 * n
    again = decode_sizes(data, "handle")
    for name in (f.name for f in fields(RolloutChunk)):
        wanted = "handle" if name == "ref" else getattr(chunk, name)
        assert np.array_equal(getattr(again, name), wanted), name
    assert again.sample_index.dtype == again.n_tokens.dtype == np.int32
    assert again.n_tokens.sum() == again.n_prompt_tokens + again.n_response_tokens
    assert [r.sample_index for r in rollouts] == again.sample_index.tolist()
    for bad in (data[:39], data[:-1], data + b"x"):
        with pytest.raises(DataError, match=f"are {len(bad)} bytes, expected"):
            decode_sizes(bad, None)


def test_a_dataset_response_without_its_end_counts_as_cut() -> None:
    """If it fails, rollout/cut_share hides that responses are longer than data.max_response_length."""
    cut = Prompt(0, np.array([1], np.int32), None, np.array([1, 2], np.int32))
    ((rollouts, chunk),) = dataset_chunks(
        [cut], [0], n=1, dp_size=1, chunk_size=16, policy_version=0, eos_ids=frozenset({3})
    )
    assert (rollouts[0].finish_reason, chunk.n_truncated) == ("length", 1)


def test_a_prompt_that_was_loaded_without_response_is_named() -> None:
    """If it fails, a mistake in the wiring shows as an AttributeError of numpy."""
    with pytest.raises(DataError, match="prompt 1"):
        list(dataset_chunks(prompts(2)[1:], [0], n=1, dp_size=1, chunk_size=16, policy_version=0, eos_ids=()))


def test_prompts_reach_an_engine_whole_and_without_what_it_does_not_need() -> None:
    """Fails if an engine answers other tokens or counts them to another place, or a prompt costs more than its tokens
    and 12 bytes."""
    asked = [Prompt(i * 10**8, np.arange(i, i + n, dtype=np.int32), "secret") for i, n in enumerate((3, 1, 400))]
    data = encode_prompts(asked, [7, 0, 2**30])
    assert len(data) == 4 + 3 * 12 + 404 * 4
    got, prompt_indices = decode_prompts(data)
    assert prompt_indices == [7, 0, 2**30]
    for prompt, wanted in zip(got, asked, strict=True):
        assert prompt.prompt_id == wanted.prompt_id and (prompt.answer, prompt.response_ids) == (None, None)
        assert prompt.token_ids.dtype == np.int32 and np.array_equal(prompt.token_ids, wanted.token_ids)
    nothing, backwards = b"\0" * 4, np.array([2, 5, 0, 3, 6, 1, -1, 9, 9], "<i4").tobytes()
    for bad in (b"", data[:20], data[:-1], data[:-4], data + b"abcd", nothing, backwards):
        with pytest.raises(DataError, match=f"are not {len(bad)} bytes"):
            decode_prompts(bad)
    ids = np.arange(3, dtype=np.int32)
    with pytest.raises(DataError, match="empty"):
        encode_prompts([], [])
    for prompt_id, place in ((2**31, 0), (-1, 0), (0, 2**31), (0, -1)):
        with pytest.raises(DataError, match=r"from 0 to 2147483647"):
            encode_prompts([Prompt(prompt_id, ids)], [place])


def test_whatever_needs_offloaded_states_reloads_them_first() -> None:
    """Fails if a call finds the engine asleep, or takes memory for what it does not need."""
    made = worker([([1], "stop")])
    uses = [
        lambda: list(made.generate(encode_prompts(prompts(1), [0]), 1, Sampling(1, 1.0, 1.0, 9, 0), 1)),
        lambda: made.greedy(prompts(1), ";", 1),
        lambda: made.receive([], 1),
        lambda: made.digests(),
        lambda: made.join_groups([]),
        lambda: made.open_stream(Sampling(1, 1.0, 1.0, 9, 0)),
    ]
    seen: list[Any] = []
    for use in uses:
        made._engine.calls = []  # type: ignore[attr-defined]
        use()
        seen.append(made._engine.calls)  # type: ignore[attr-defined]
    everything, weights = ("wake_up", None), ("wake_up", ["weights"])
    assert seen == [
        [everything, "generate"],
        [everything, "generate"],
        [weights, "receive"],
        [weights, "digests"],
        ["join_groups"],
        [everything, "settle"],
    ]


def test_states_are_offloaded_by_the_names_that_the_actor_uses() -> None:
    """Fails if another part of the engine goes than was named, or the engine goes while a stream may use it."""
    made = worker([])
    assert made.offload_states() == {"params": 5, "kv_cache": 7} == made.reload_states(["kv_cache"])
    made.offload_states(["params"], 2)
    made.reload_states()
    assert made._engine.calls == [  # type: ignore[attr-defined]
        ("sleep", 1, ["weights", "kv_cache"]),
        ("wake_up", ["kv_cache"]),
        ("sleep", 2, ["weights"]),
        ("wake_up", ["weights", "kv_cache"]),
    ]
    for move in (made.offload_states, made.reload_states):
        with pytest.raises(ClusterError, match=r"no state 'optimizer'. Fix: include some of params, kv_cache"):
            move(["params", "optimizer"])
    made.open_stream(Sampling(1, 1.0, 1.0, 9, 0))
    with pytest.raises(ClusterError, match="close the stream"):
        made.offload_states()
    made.close_stream()
    made.offload_states()


def test_a_move_in_a_thread_of_its_own_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a non-blocking move blocks, two threads use the engine at a time, or the move's error is nobody's."""
    made = worker([])
    engine: Any = made._engine
    may_end = threading.Event()

    def slow(level: int, tags: Sequence[str]) -> None:
        assert may_end.wait(30)
        engine.calls.append("asleep")

    monkeypatch.setattr(engine, "sleep", slow)
    assert made.offload_states(non_blocking=True) == {} and "asleep" not in engine.calls
    threading.Timer(0.1, may_end.set).start()
    made.digests()
    assert engine.calls == ["settle", "asleep", "settle", ("wake_up", ["weights"]), "digests"]
    monkeypatch.setattr(engine, "sleep", lambda level, tags: 1 / 0)
    assert made.offload_states(non_blocking=True) == {}
    with pytest.raises(ZeroDivisionError):
        made.settle_states()
    assert made.reload_states(non_blocking=True) == {}
    assert made.settle_states() == {"params": 5, "kv_cache": 7} == made.settle_states()


def test_what_an_engine_holds_is_noted_where_a_phase_ends() -> None:
    """Fails if nobody can see what an engine keeps while others have its GPU, numbers are told twice, or it is asked
    although memory.timeline is off."""
    made = worker([([1], "stop")])
    made.greedy(prompts(1), ";", n_samples=0)
    made.receive([], 3)
    made.offload_states()
    memory = made.usage().memory
    held = {"rollout_params_gib": 5 / GIB, "rollout_kv_cache_gib": 7 / GIB, "rollout_host_rss_gib": 1.0}
    phases = ("generating", "receiving_weights", "offloading_states")
    assert memory == {f"memory/{phase}/{name}": value for phase in phases for name, value in held.items()}
    assert made.usage().memory == {}
    made._config = load_config(None, ["memory.timeline=false"])
    made.receive([], 4)
    assert made.usage().memory == {}


def test_an_engine_that_runs_out_of_memory_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the user gets a bare traceback of an engine that ran out, or the actor's keys for advice."""
    monkeypatch.setattr(oom, "holders", lambda device: [])  # seconds, and not what is tested here
    made = worker([])
    made._run_dir = tmp_path

    def out_of_memory(*_: Any) -> None:
        raise MemoryError("Unable to allocate 3.00 GiB for an array")

    moves = {"receive": lambda: made.receive([], 1), "wake_up": made.reload_states, "sleep": made.offload_states}
    moves["generate"] = lambda: made.greedy(prompts(1), ";", n_samples=0)
    for method, call in moves.items():
        with monkeypatch.context() as broken:
            broken.setattr(made._engine, method, out_of_memory)
            with pytest.raises(OutOfMemory, match="rollout engine 0 ran out of memory of the host") as raised:
                call()
        assert "rollout.cpu_kv_cache_mib=256: lower it" in str(raised.value) and "actor." not in str(raised.value)
    assert len(list((tmp_path / "memory").iterdir())) == len(moves)


def test_a_stream_s_shortage_is_explained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if whoever waits for the stream explains its shortage as one of his own: other advice, a second report."""
    monkeypatch.setattr(oom, "holders", lambda device: [])
    made = worker([])
    made._run_dir = tmp_path

    def out_of_memory() -> None:
        raise MemoryError("Unable to allocate 3.00 GiB for an array")

    engine: Any = made._engine
    monkeypatch.setattr(engine, "n_running", 1, raising=False)
    monkeypatch.setattr(engine, "step", out_of_memory, raising=False)
    made.open_stream(Sampling(1, 1.0, 1.0, 9, 0))
    with pytest.raises(OutOfMemory, match="generating"):
        list(made.stream(1))
    with pytest.raises(OutOfMemory, match="generating"):
        made.receive([], 1)
    assert len(list((tmp_path / "memory").iterdir())) == 1


def test_no_two_sequences_share_a_seed() -> None:
    """If it fails, a prompt that stands twice in a batch, or comes again in a later step, is answered alike."""
    seeds = {sequence_seed(1 + step, index) for step in range(40) for index in range(64)}
    assert len(seeds) == 40 * 64
    assert sequence_seed(5, 6) == sequence_seed(5, 6)
