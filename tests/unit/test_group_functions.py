"""Functions that get all responses to a prompt: the teacher's prompts, weights, whole groups in chunks, bad results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_teacher import PROMPT_FUNCTION, RESPONSE_WEIGHT, DistillConfig
from gkd.data.chunks import chunk_size, part_of
from gkd.data.prompts import RowReader, load_prompts
from gkd.data.row_files import RowTable, encode_row
from gkd.errors import DataError, RewardError
from gkd.metrics.step import reward_numbers
from gkd.preflight.user_code import check_group_function
from gkd.rollout.engine.loop import Coalescer
from gkd.rollout.messages import Job, Sampling
from gkd.run.rollout_file import write_sequences
from gkd.scoring.group_endpoint import GroupEndpoint
from gkd.scoring.judged import JudgedScoring, with_numbers
from gkd.scoring.reward.groups import Group
from gkd.scoring.reward.judging import TRAINING, VALIDATION, Judging, group_places
from gkd.scoring.reward.worker import group_judge_of, judged
from gkd.types import Prompt, Rollout, ScoredChunk, VersionSpan
from gkd.user_code import search_path
from tests.refusals import refuses
from tests.rollout_chunks import chunk_of
from tests.unit.chat_templates import FAMILIES, tokenizer
from tests.unit.local_ray import LocalRay, Method, Ref
from tests.unit.test_refused_settings import MINIMAL
from tests.unit.world import World

HERE = "tests.unit.group_functions"
TOKENIZER = tokenizer(FAMILIES["chatml"])
N = 3
EXACT = "reward.functions=[{path: exact_match, weight: 2}]"
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+2=", "answer": "3", "hint": "add"},
    {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2="}], "answer": "4", "hint": "b"},
    {"prompt": "9", "answer": "9", "hint": "c"},
]


def settings(prompt_function: str = "", weight: str = "", *more: str) -> Config:
    words = [f"teacher.prompt_function={prompt_function}"] * bool(prompt_function)
    words += [f"distill.response_weight={weight}"] * bool(weight)
    lengths = ["data.max_prompt_length=99", "data.max_teacher_prompt_length=200", "data.max_response_length=9"]
    base = [EXACT, "eval.answer_marker=;", f"rollout.n={N}", "reward.timeout_s=2"]
    return load_config(None, [*MINIMAL, *lengths, *base, *words, *more])


def prompts_of(config: Config, folder: Path, rows: Sequence[dict[str, Any]]) -> list[Prompt]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = RowReader(config.data, TOKENIZER, config.teacher)
    return load_prompts([str(file)], "data.train_files", reader, keep_rows=True)[0]


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)


def rollout(prompt: Prompt, sample: int, response: str) -> Rollout:
    response_ids = ids(response)
    zeros = np.zeros(len(response_ids), np.float32)
    spans = (VersionSpan(0, len(response_ids), 0),)
    return Rollout(prompt.prompt_id, sample, prompt.token_ids, response_ids, zeros, spans, "stop")


@pytest.fixture
def judging(tmp_path: Path) -> Iterator[Callable[..., Judging]]:
    """Return a function that starts the processes of some settings for rows."""
    started = []

    def start(config: Config, rows: Sequence[dict[str, Any]] = ROWS) -> Judging:
        table = RowTable.of(prompts_of(config, tmp_path, rows))
        functions = {TRAINING: config.derived.rewards, VALIDATION: ("exact_match",)}
        started.append(Judging(config, functions, 1, search_path(), table, table, TOKENIZER))
        return started[-1]

    yield start
    for each in started:
        each.close()


def texts(rollouts: Sequence[Rollout]) -> list[str | None]:
    return [None if r.teacher_ids is None else TOKENIZER.decode(r.teacher_ids.tolist()) for r in rollouts]


def test_each_response_gets_the_prompt_and_the_weight_of_its_group(
    judging: Callable[..., Judging], tmp_path: Path
) -> None:
    """Fails if a function gets other responses, rewards, reasons or rows, or a response the result of another one,
    whatever their order in the chunk; or a function is called for held-out responses.
    """
    config = settings(f"{HERE}:feedback", f"{HERE}:pass_rate")
    one, two, _ = prompts_of(config, tmp_path, ROWS)
    judge = judging(config)
    chunk = [rollout(two, 5, ";5"), rollout(one, 0, ";3"), rollout(two, 3, ";4"), rollout(one, 2, "3;3")]
    chunk += [dataclasses.replace(rollout(one, 1, ";7"), finish_reason="length"), rollout(two, 4, "x")]
    prompted, data = judge.prompted(chunk)
    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\ns<|im_end|>\n"
    expected = [f"{system}{user.format(';5: reward 0, stop, b')}", None, None, None]
    expected += [user.format(";7: reward 0, length, add"), f"{system}{user.format('x: reward 0, stop, b')}"]
    assert texts(prompted) == expected
    rates = [2 / 9] * len(chunk)
    is_own = [text is not None for text in expected]
    rewards = [0, 1, 1, 1, 0, 0]
    table = np.frombuffer(data).reshape(-1, 3)
    np.testing.assert_allclose(table, np.column_stack([rewards, rates, is_own]), rtol=1e-12)
    # Restored from a recording: judged again with the recorded prompts, and held-out responses without functions.
    assert judge.judge(prompted, TRAINING) == data
    assert np.frombuffer(judge.judge(chunk[:2], VALIDATION)).tolist() == [0, 1]
    plain = [(r.prompt_id, r.sample_index, r.response_ids.tolist()) for r in chunk]
    assert [(r.prompt_id, r.sample_index, r.response_ids.tolist()) for r in prompted] == plain


def test_a_prompt_of_a_function_is_that_of_a_column(judging: Callable[..., Judging], tmp_path: Path) -> None:
    """Fails if the teacher reads other tokens than with the same messages in data.teacher_prompt_key."""
    views = ["a rule", [{"role": "system", "content": "r"}, {"role": "user", "content": "é?"}], None]
    rows = [{**row, "t": view} for row, view in zip(ROWS, views, strict=True)]
    more = ("data.system_prompt=be brief",)
    columns = settings("", "", "data.teacher_prompt_key=t", *more)
    expected = [prompt.teacher_ids for prompt in prompts_of(columns, tmp_path, rows)]
    config = settings(f"{HERE}:from_column", "", *more)
    prompts = prompts_of(config, tmp_path, rows)
    assert all(prompt.teacher_ids is None for prompt in prompts)
    chunk = [rollout(prompt, N * i + k, ";1") for i, prompt in enumerate(prompts) for k in range(N)]
    prompted, _ = judging(config, rows).prompted(chunk)
    for i, made in enumerate(prompted):
        np.testing.assert_array_equal(made.teacher_ids, expected[i // N])  # type: ignore[arg-type]


def test_a_solved_sibling_is_the_example(judging: Callable[..., Judging], tmp_path: Path) -> None:
    """Fails if a response is its own example, a wrong one is shown, or a prompt without a solved one has an example."""
    config = settings("solved_sibling")
    prompts = prompts_of(config, tmp_path, ROWS)
    answers = [[";3", ";5", "3;3"], [";1", ";4", ";2"], [";1", ";2", ";3"]]
    chunk = [rollout(prompts[i], N * i + k, answers[i][k]) for i in range(3) for k in range(N)]
    found = texts(judging(config).prompted(chunk)[0])
    shown = [None if text is None else text.partition(":\n\n")[2].partition("\n\n")[0] for text in found]
    assert shown == ["3;3", "3;3", ";3", ";4", None, ";4", None, None, None]
    assert all("1+2=" in text for text in found[:3] if text) and "system\ns" in str(found[3])


def test_a_trajectory_reaches_the_function(judging: Callable[..., Judging], tmp_path: Path) -> None:
    """Fails if what an environment answers cannot become the teacher's prompt."""
    config = settings(f"{HERE}:last_message")
    (prompt,) = prompts_of(config, tmp_path, ROWS[:1])
    said = [[{"role": "assistant", "content": "x"}, {"role": "tool", "content": f"error {k}"}] for k in range(N)]
    chunk = [dataclasses.replace(rollout(prompt, k, "x"), messages=msgspec.json.encode(said[k])) for k in range(N)]
    found = texts(judging(config).prompted(chunk)[0])
    assert ["1+2= error " in str(text) and f"error {k}" in str(text) for k, text in enumerate(found)] == [True] * N


OF_BOTH = ("raise", "few", "none", "text")
CASES = [(key, kind) for key in (PROMPT_FUNCTION, RESPONSE_WEIGHT) for kind in OF_BOTH]
CASES += [(RESPONSE_WEIGHT, kind) for kind in ("nan", "infinite", "negative", "words")]
CASES += [(PROMPT_FUNCTION, kind) for kind in ("object", "no_json", "surrogate")]


@pytest.mark.parametrize(("key", "kind"), CASES)
def test_a_wrong_result_is_an_error(key: str, kind: str) -> None:
    """Fails if a run trains with a weight or a prompt that is none."""
    row = encode_row("f.jsonl:7", {"hint": kind})
    group = Group(row, "a", ["b"] * N, [None] * N, ["stop"] * N, [None] * N, 0.0)
    (value,) = judged([group], [group_judge_of(key, f"{HERE}:misbehave")])
    assert value.problem and not value.result


@pytest.mark.parametrize("kind", ["raise", "sleep"])
def test_an_error_names_function_and_row(judging: Callable[..., Judging], tmp_path: Path, kind: str) -> None:
    """Fails if a function that fails or hangs does not end the run with its name and the row, or passes the checks
    before the start.
    """
    config = settings("solved_sibling", f"{HERE}:misbehave")
    rows = [ROWS[0], {**ROWS[0], "hint": kind}]
    prompts = prompts_of(config, tmp_path, rows)
    chunk = [rollout(prompts[1], k, ";3") for k in range(N)]
    with pytest.raises(RewardError, match=r"misbehave, row .*rows\.jsonl:2"):
        judging(config, rows).prompted(chunk)
    if kind == "raise":
        with refuses(RESPONSE_WEIGHT):
            check_group_function(config, RESPONSE_WEIGHT, prompts[1], TOKENIZER, ())


def test_a_prompt_that_cannot_be_read_is_an_error(judging: Callable[..., Judging], tmp_path: Path) -> None:
    """Fails if the teacher scores after a prompt that is cut, has markers of the template in a text, or answers
    itself; or an error does not name the response.
    """
    config = settings(f"{HERE}:misbehave")
    rows = [{**ROWS[0], "hint": kind} for kind in ("no_text", "answers", "marker", "empty", "long")]
    judge = judging(config, rows)
    for prompt in prompts_of(config, tmp_path, rows):
        where = rf"rows\.jsonl:{prompt.prompt_id + 1}, response 0 of prompt {prompt.prompt_id}: "
        with pytest.raises(RewardError, match=rf"misbehave, row .*{where}"):
            judge.prompted([rollout(prompt, k, ";3") for k in range(N)])
    with refuses(PROMPT_FUNCTION):
        check_group_function(config, PROMPT_FUNCTION, prompt, TOKENIZER, ())


@pytest.mark.parametrize("name", ["missing", "of_two"])
def test_functions_are_checked_before_the_start(tmp_path: Path, name: str) -> None:
    """Fails if a typing error, or a function of another form, is found when the models are loaded, or a right function
    of groups is refused.
    """
    config = settings(f"{HERE}:{name}", f"{HERE}:pass_rate")
    (prompt,) = prompts_of(config, tmp_path, ROWS[:1])
    with refuses(PROMPT_FUNCTION):
        check_group_function(config, PROMPT_FUNCTION, prompt, TOKENIZER, ())
    check_group_function(config, RESPONSE_WEIGHT, prompt, TOKENIZER, ())


def test_a_part_of_a_group_is_an_error() -> None:
    """Fails if a function gets some of the responses to a prompt, and takes them for all."""
    for samples in ([0, 1], [0, 1, 3], [1, 2, 3]):
        with pytest.raises(DataError):
            group_places([rollout(Prompt(0, ids("a")), k, "b") for k in samples], N)


def test_chunks_of_engines_and_recordings_have_whole_groups(tmp_path: Path) -> None:
    """Fails if responses to one prompt leave an engine, or are restored, in two chunks; or others wait for them."""
    chunks = Coalescer(2, 6, whole=True)
    job = Job(1, Sampling(N, 1.0, 1.0, 8, seed=0), 0.5)
    order = [0, 6, 3, 1, 7, 2, 12, 13, 8, 14, 4]  # prompts 0, 2 and 4 of group 0 are complete; 1 is not
    prompt = Prompt(0, ids("a"))
    for sample in order:
        chunks.add(job, rollout(prompt, sample, "b"), 0.0)
    left = [(group, [r.sample_index for r in part]) for _, group, part in chunks.due(0.1, flush=False)]
    assert left == [(0, [0, 1, 2, 6, 7, 8])]
    left = [(group, [r.sample_index for r in part]) for _, group, part in chunks.due(0.6, flush=False)]
    assert left == [(0, [12, 13, 14])]
    chunks.add(job, rollout(prompt, 5, "b"), 0.6)
    chunks.add(job, rollout(prompt, 11, "b"), 0.6)
    assert not list(chunks.due(1.0, flush=False))
    chunks.add(job, rollout(prompt, 3, "b"), 0.6)
    with (tmp_path / "batch_group_0.npz").open("wb") as file:
        write_sequences(file, [rollout(prompt, sample, "b") for sample in (5, 0, 4, 13, 2, 12, 3, 1, 14)], None)
    assert chunk_size(settings("solved_sibling", "", "rollout.n=7")) % 7 == 0
    items = list(GroupEndpoint(settings("solved_sibling")).restore([str(tmp_path / "batch_group_0.npz")], 0, 1, 4))
    assert [[r.sample_index for r in chunk] for chunk in items[::4]] == [[0, 1, 2, 3, 4, 5], [12, 13, 14]]


class Endpoint:
    """Makes prompts, and has the values 10 i, factor i, and whether i is odd; a handle is a list of sample indices."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events
        self.prompted = Method(self._prompted)
        self.judge = Method(lambda rollouts, _: self._values(rollouts))

    def _values(self, samples: list[Any]) -> bytes:
        self._events.append(samples)
        numbers = [int(str(sample).split()[-1]) for sample in samples]
        return np.array([[10.0 * i, i, i % 2] for i in numbers]).tobytes()

    def _prompted(self, samples: list[int]) -> Iterator[Any]:
        return iter([[f"prompted {i}" for i in samples], Ref(self._values(samples))])


def test_a_chunk_is_scored_with_the_prompts_of_its_function(local_ray: LocalRay, tmp_path: Path) -> None:
    """Fails if the teacher scores, or a checkpoint keeps, responses without the prompts that were made of them; a
    resumed run makes other ones; dataset responses get some; or a part of a chunk has the weights of another one.
    """
    events: list[Any] = []
    config = settings("solved_sibling", f"{HERE}:pass_rate")
    scoring = JudgedScoring(World(), [Endpoint(events)], 9.0, TRAINING, 1, groups=dict(config.derived.groups))
    whole = scoring.submit(chunk_of([0, 1, 2, 3, 4, 5], 2, ref=[0, 1, 2, 3, 4, 5]))
    dataset = scoring.submit(chunk_of([9], 2, ref=[9], on_policy=False))
    assert whole.rollouts.ref == [f"prompted {i}" for i in range(6)] and dataset.rollouts.ref == [9]
    scoring.record([whole], tmp_path, "batch", scored=False)
    (again,) = scoring.restore(tmp_path, "batch")
    assert again.rollouts.ref == whole.rollouts.ref
    parts = [dataclasses.replace(whole, rollouts=part_of(whole.rollouts, at)) for at in ([3, 5], [0, 1, 2, 4])]
    batch = scoring.collect([parts[0], dataset, parts[1]])
    assert events == [[0, 1, 2, 3, 4, 5], whole.rollouts.ref]
    weighed = with_numbers(batch, config.distill, [1.0], N)
    factors = [chunk.numbers[:, 1].tolist() for chunk in weighed if chunk.numbers is not None]
    assert factors == [pytest.approx([1, 5 / 3]), [1.0], pytest.approx([0, 1 / 3, 2 / 3, 4 / 3])]
    numbers = reward_numbers(weighed, config)
    assert (numbers["teacher/own_prompt_share"], numbers["reward/trained_share"]) == (0.5, 5 / 6)


def test_a_function_weighs_as_the_kind_that_it_implements() -> None:
    """Fails if the factors of a function are normalized in another way than those of pass_rate, by a bit."""
    rewards = np.random.default_rng(0).random((24, 1))
    rates = np.repeat([(r := (rewards[i : i + N, 0] >= 0.5).mean()) * (1 - r) for i in range(0, 24, N)], N)
    columns = np.column_stack([rates, np.zeros(24)])
    places = [range(0, 9), range(9, 24)]
    batch = [
        ScoredChunk(chunk_of(at, 2), None, None, 0, rewards=rewards[list(at)], of_group=columns[list(at)])
        for at in places
    ]
    kinds = [DistillConfig(response_weight=kind) for kind in ("pass_rate", f"{HERE}:pass_rate")]
    one, other = ([chunk.numbers for chunk in with_numbers(batch, kind, [1.0], N)] for kind in kinds)
    for expected, found in zip(one, other, strict=True):
        np.testing.assert_array_equal(found, expected)  # type: ignore[arg-type]
