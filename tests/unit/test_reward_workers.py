"""Test the processes that call reward functions, with real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from math_verify.errors import TimeoutException

from examples.quickstart.addition import build_tokenizer
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.data.prompts import RowReader, load_prompts
from gkd.data.row_files import RowTable, decode_row, encode_row
from gkd.errors import DataError, RewardError
from gkd.preflight.user_code import check_answers, check_functions
from gkd.scoring.reward.judging import TRAINING, VALIDATION, Judging, RewardWorkers
from gkd.scoring.reward.worker import Case, Judge, Start, Undecided, judge_of, judged
from gkd.types import Prompt, Rollout
from gkd.user_code import search_path
from tests.refusals import refuses
from tests.structure import ROOT

HERE = "tests.unit.judging_functions"
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("student")
    TOKENIZER.save_pretrained(folder)
    functions = f"reward.functions=[{{path: '{HERE}:count_digits'}}, {{path: '{HERE}:level', weight: 2}}]"
    base = [f"model.path={folder}", "data.max_response_length=8", "eval.answer_marker=;", "reward.timeout_s=20"]
    return load_config(None, [*base, functions, f"eval.metric={HERE}:answer", "data.val_files=[v]"])


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER(text)["input_ids"], np.int32)


def case(response: str, answer: object = None, *, truncated: bool = False, line: int = 7) -> Case:
    return Case("1+2=", response, encode_row(f"f.jsonl:{line}", {"answer": answer}), len(response), truncated)


def cases(*responses: str) -> list[Case]:
    """Return responses to judge, to the lines 6, 7 and so on."""
    return [case(response, line=6 + i) for i, response in enumerate(responses)]


def outcome(cases: Sequence[Case], judge: Judge) -> tuple[list[float], str]:
    """Return the values of cases, and what is wrong with the next one."""
    values = list(judged(cases, [judge]))
    return [value.number for value in values if not value.problem], values[-1].problem


@pytest.fixture(scope="module")
def workers(config: Config) -> Iterator[list[RewardWorkers]]:
    """Return pools of one process that misbehaves on demand, started together; a test pops one that it ends."""
    start = Start(config, (f"{HERE}:misbehave",), search_path())
    pools = [RewardWorkers(start, 1, timeout_s=1.0) for _ in range(4)]
    for pool in pools:
        pool.wait_ready(60)
    yield list(pools)
    for pool in pools:
        pool.close()


def rollout(prompt_id: int, response: str, reason: str = "stop") -> Rollout:
    response_ids = ids(response)
    zeros = np.zeros(len(response_ids), np.float32)
    return Rollout(prompt_id, prompt_id, ids(f"{prompt_id}+2="), response_ids, zeros, (), reason)


def test_judging_calls_the_functions_of_each_set_of_prompts(config: Config) -> None:
    """Fails if a function gets another row, prompt or response, or the functions of another set of prompts."""
    image = bytes(3_000_000)  # more than the connection holds
    columns = {i: {"level": i, "answer": str(3 * i), "image": image} for i in (1, 3, 4)}
    rows = [Prompt(i, ids("x"), row=encode_row(f"t:{i}", columns[i])) for i in columns]
    table, derived = RowTable.of(rows), config.derived
    functions = {TRAINING: (*derived.rewards, "length"), VALIDATION: derived.metrics}
    judging = Judging(config, functions, 2, search_path(), table, table)
    try:
        trajectory = dataclasses.replace(rollout(4, "a12"), own=np.array([True, False, True]))
        chunk = [rollout(4, "a12"), rollout(1, "7"), trajectory]
        training = np.frombuffer(judging.judge(chunk, TRAINING)).reshape(3, 3)
        # The text is that of the last turn, the length that of all own tokens.
        assert training.tolist() == [[2.0, 4.0, 3 / 8], [1.0, 1.5, 1 / 8], [1.0, 4.0, 2 / 8]]
        assert np.frombuffer(judging.judge([rollout(3, "x;9"), rollout(3, ";8")], VALIDATION)).tolist() == [1.0, 0.0]
        with pytest.raises(DataError):
            judging.judge([rollout(2, "1")], TRAINING)
    finally:
        judging.close()
    with pytest.raises(RewardError):  # neither waits for ever nor starts a process
        judging.judge(chunk, TRAINING)


def test_a_process_that_judges_has_no_torch(tmp_path: Path) -> None:
    """Fails if a scoring endpoint, which receives its tokenizer, imports torch: 250 MB with what transformers adds."""
    received = tmp_path / "tokenizer"
    received.write_bytes(pickle.dumps(TOKENIZER))
    code = (
        "import pickle, sys; from pathlib import Path; import gkd.scoring.endpoint, gkd.scoring.group_endpoint;"
        "tokenizer = pickle.loads(Path(sys.argv[1]).read_bytes());"
        f"print(tokenizer.decode({ids('1+2=').tolist()}, skip_special_tokens=True), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(received)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1+2=", "False"]


@pytest.mark.parametrize("response", ["raise", "raise_unshown", "exit", "nan", "inf", "none", "text"])
def test_a_value_that_is_no_finite_number_is_an_error(
    workers: list[RewardWorkers], response: str, config: Config
) -> None:
    """Fails if a failed function counts as a reward of 0, or its error does not name function and row, the line of the
    file; or the log has no traceback of it.
    """
    numbers, problem = outcome(cases("fine", response, "fine"), judge_of(f"{HERE}:misbehave", config))
    assert numbers == [1.0] and problem
    if response == "raise":
        broken = workers.pop()
        for _ in range(2):  # the run ends: nothing else may be judged meanwhile
            place = r"judging_functions\.py:\d+: raise ValueError"
            with pytest.raises(RewardError, match=rf"misbehave.*f\.jsonl:7.*no such unit.*{place}") as raised:
                broken.values([0], cases("fine", response, "fine"))
            trace = "".join(traceback.format_exception(raised.value)).partition("Traceback of your code:")[2]
            assert "in misbehave" in trace and "gkd/scoring" not in trace


@pytest.mark.parametrize(("response", "how"), [("kill", "signal 9"), ("corrupt", "invalid message")])
def test_a_worker_that_dies_is_an_error(workers: list[RewardWorkers], response: str, how: str) -> None:
    """Fails if the death of a worker, or one that writes to the connection, hangs the run, or does not name the row."""
    with pytest.raises(RewardError, match=rf"misbehave.*f\.jsonl:7.*{how}"):
        workers.pop().values([0], cases("fine", response, "fine"))


def test_a_slow_function_is_stopped_with_its_processes(workers: list[RewardWorkers]) -> None:
    """Fails if a function that hangs stops the run without an error, or what it started outlives it; or if the limit
    counts for a list of responses instead of one.
    """
    began_s = time.monotonic()
    assert workers[-1].values([0], cases(*["nap"] * 4)).tolist() == [[1.0]] * 4
    with pytest.raises(RewardError, match=r"misbehave.*f\.jsonl:7.*reward\.timeout_s"):
        workers.pop().values([0], cases("nap", "sleep", "fine"))
    assert time.monotonic() - began_s < 60
    started = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "977"]]
    # The kernel ends a killed process a little later; it is a zombie until its parent asks for it.
    _, left = psutil.wait_procs(started, timeout=30)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "path", ["no_such_module:fn", *(f"{HERE}:{name}" for name in ("missing", "NOT_A_FUNCTION", "compute_score"))]
)
def test_functions_are_imported_before_the_start(config: Config, path: str) -> None:
    """Fails if a typing error in a path is found after the models are loaded, or if a run starts with verl's
    compute_score, which would compare each response with the whole row: 0.
    """
    wrong = load_config(None, [f"model.path={config.model.path}", f"reward.functions=[{{path: '{path}'}}]"])
    with refuses("reward.functions"):
        check_functions(wrong, "reward.functions", wrong.derived.rewards)


def test_a_function_does_not_change_what_the_next_one_reads(config: Config) -> None:
    """Fails if a function that changes a list of the row or the trajectory changes the value of the next function."""
    row, messages = encode_row("f.jsonl:1", {"tests": ["a", "b", "c"]}), b'[{"role": "assistant"}, {"role": "tool"}]'
    trajectory = Case("1+2=", "3", row, 1, False, messages)
    judges = [judge_of(f"{HERE}:takes_out", config)] * 2
    assert [value.number for value in judged([trajectory] * 2, judges)] == [12.0] * 4


@pytest.mark.parametrize(
    "form",
    [
        *("prompts, completions, answer, **kwargs", "completions, **kwargs", "completions, prompt, row"),
        *("prompt, response", "*, prompt, response, row", "prompt, response, row, extra", "response, prompt, row"),
        *("prompt, messages, row", "prompt, response, row, *, extra", "", "async", "yield", "class", "3"),
    ],
)
def test_a_function_of_another_form_is_refused(
    form: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run starts with a function of TRL's form, or one that cannot judge a response, and ends later."""
    names, body = "(prompt, response, row)", "return 1.0"
    others = {
        "async": f"async def judge{names}: {body}",
        "yield": f"def judge{names}: yield 1.0",
        "class": f"class judge:\n    def __init__{names}: pass",
        "3": "judge = 3",
    }
    name = f"rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(others.get(form, f"def judge({form}): {body}") + f"\ndef fine(*_): {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError):
        judge_of(f"{name}:judge", config)
    assert judge_of(f"{name}:fine", config)(case("4", "4")) == 1.0


@pytest.mark.parametrize(
    ("path", "response", "answer", "value"),
    [
        ("exact_match", "2*3;6", "6", 1.0),
        ("exact_match", "2*3=6", "6", 0.0),
        ("exact_match", "2*3;7", "6", 0.0),
        ("exact_match", "6;", "6", 0.0),
        ("exact_match", ";0.5", 0.5, 1.0),
        ("length", "abcd", "", 0.5),
        ("math_verify", r"so it is $\frac{3}{6}$", "0.5", 1.0),
        ("math_verify", r"so it is $x^2 - 1$", "(x-1)(x+1)", 1.0),
        ("math_verify", "it is 7", "0.5", 0.0),
        # Reference answers of data sets: a formula without marks, never a number in it.
        ("math_verify", r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1.0),
        ("math_verify", r"\boxed{2}", r"2\sqrt{3}", 0.0),
        ("math_verify", "it is $100000$", "10^{5}", 1.0),
        ("math_verify", r"\boxed{6-5i}", "6 - 5i", 1.0),
        ("math_verify", r"\boxed{\frac{3}{2}}", r"1 \frac{1}{2}", 1.0),
        ("math_verify", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1.0),
        ("math_verify", "it is 20", "20 miles per hour", 1.0),
        ("math_verify", "it is 5", "5 m", 1.0),
        ("math_verify", "it is 0.00001", 1e-05, 1.0),
        ("math_verify", "it is $2 \\times 10^{16}$", 2e16, 1.0),
        ("math_verify", "it is 1", 1e-05, 0.0),
        ("math_verify", "it is 7", "7}", 1.0),
        ("math_verify", "it is 18", "\u20ac18", 1.0),
        ("math_verify", "it is 7", "3 + 4 = <<3+4=7>>7 apples\n#### 7", 1.0),
        ("math_verify", "it is 7", r"so it is \boxed{7}", 1.0),
        ("math_verify", "no answer", "0.5", 0.0),
        ("math_verify", "$\u0663$", "3", 0.0),  # a digit at which the package's parser fails
    ],
)
def test_builtin_functions(config: Config, path: str, response: str, answer: object, value: float) -> None:
    """Fails if a function of the package judges differently than documented; truncated answers are wrong."""
    judge = judge_of(path, config)
    assert decided(judge, case(response, answer)) == value
    if path != "length":
        assert decided(judge, case(response, answer, truncated=True)) == 0.0


def decided(judge: Callable[[Case], float | None], case: Case) -> float | None:
    """Return the value of a function that a busy machine may leave no time."""
    for _ in range(20):
        with contextlib.suppress(Undecided):
            return judge(case)
    raise AssertionError("undecided 20 times")


def test_a_missing_answer_is_an_error(config: Config) -> None:
    """Fails if a row without the answer silently counts as wrong."""
    for path, answer in product(("exact_match", "math_verify"), (None, ["1"], {"a": "1"}, float("nan"))):
        numbers, problem = outcome([case("1", answer)], judge_of(path, config))
        assert not numbers and problem
    with pytest.raises(ValueError):
        judge_of("math_verify", config)(case("1", ""))
    with refuses("data.answer_key"):
        check_answers(config, "data.train_files", [Prompt(0, ids("1"))], [("reward.functions", "math_verify")])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        *((42.0, "42"), (42, "42"), (Decimal("42.00"), "42"), (1e6, "1000000"), (1e22, "1" + 22 * "0"), ("4.0", "4.0")),
        *((Decimal("-0.50"), "-0.5"), (0.5, "0.5"), (1e-5, "0.00001"), (-0.0, "0"), (Decimal("9" * 38), "9" * 38)),
    ],
)
def test_a_number_is_the_same_answer_everywhere(config: Config, tmp_path: Path, answer: object, said: str) -> None:
    """Fails if a reward compares with another text than an evaluation, as 42.0, which no response has."""
    file = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "1+2=", "answer": answer}]), file)
    (prompt,), _ = load_prompts([str(file)], "data.val_files", RowReader(config.data, TOKENIZER), keep_rows=True)
    assert prompt.answer == said and prompt.row is not None
    assert judge_of("exact_match", config)(dataclasses.replace(case(f"so ;{said}"), encoded_row=prompt.row)) == 1.0


def test_an_answer_that_is_no_text_is_refused(config: Config, tmp_path: Path) -> None:
    """Fails if every response counts as wrong because the answers are verl's reward_model, lists, NaN or empty."""
    functions, file = [("eval.metric", "exact_match")], tmp_path / "p.jsonl"
    for answer in ({"ground_truth": "3"}, ["3"], float("nan"), " ", "3", 3, 3.0):
        file.write_text(json.dumps({"prompt": "1+2=", "answer": answer}) + "\n")
        prompts, _ = load_prompts([str(file)], "data.val_files", RowReader(config.data, TOKENIZER))
        if answer in ("3", 3):
            check_answers(config, "data.val_files", prompts, functions)
            assert prompts[0].answer == "3"
        else:
            with refuses("data.answer_key", text="row 1 of"):
                check_answers(config, "data.val_files", prompts, functions)


def test_math_verify_hides_no_failed_comparison(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an error within the package, or a comparison that takes too long, silently counts as wrong, or if a
    reference answer that takes too long ends the run.
    """
    judge = judge_of("math_verify", config)

    def failing(error: BaseException, text: str = "") -> Callable[..., list[int]]:
        def call(first: object, *_: Any, **__: Any) -> list[int]:
            if not text or first == text:
                raise error
            return [8]

        return call

    for where, call, undecided in (
        ("grader.sympy_expr_eq", failing(TypeError("no such unit")), False),
        ("grader.sympy_expr_eq", failing(TimeoutException()), True),
        ("parser.extract_target_from_pred", failing(TimeoutException(), "$8$"), True),
        ("parser.extract_target_from_pred", failing(TimeoutException(), "it is 7"), True),
    ):
        monkeypatch.setattr(f"math_verify.{where}", call)
        numbers, problem = outcome([case("it is 7", "8")], judge)
        assert np.isnan(numbers).tolist() == [True] * undecided and bool(problem) != undecided
    assert judge(case("it is 7", "8", truncated=True)) == 0.0


def test_rows_keep_all_columns_and_their_line(tmp_path: Path) -> None:
    """Fails if a function would see another row than that of its prompt, or a run without functions keeps rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1", "extra": [1, 2]}\n\n{"prompt": "111111", "extra": 0}\n{"prompt": "2"}\n')
    settings = load_config(None, ["data.max_prompt_length=4", "data.truncation=drop"]).data
    prompts, dropped = load_prompts([str(file)], "data.train_files", RowReader(settings, TOKENIZER), keep_rows=True)
    assert dropped == 1
    table = RowTable.of(prompts)
    assert decode_row(table.row(0)) == (f"{file}:1", {"prompt": "1", "extra": [1, 2]})
    assert decode_row(table.row(2)) == (f"{file}:4", {"prompt": "2"})
    for missing in (1, 3):
        with pytest.raises(DataError):
            table.row(missing)
    plain, _ = load_prompts([str(file)], "data.train_files", RowReader(settings, TOKENIZER))
    assert [prompt.row for prompt in plain] == [None, None]
