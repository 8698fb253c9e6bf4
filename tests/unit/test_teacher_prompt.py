"""The teacher's own prompt: columns and templates, bad rows, and how it travels to the scores."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.quickstart.addition import build_tokenizer
from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Route
from gkd.config.schema_sections import DataConfig
from gkd.config.schema_teacher import RouteConfig, TeacherConfig
from gkd.data.batching import make_micro_batches, trained_on
from gkd.data.collate import route_counts
from gkd.data.prompts import RowReader, load_prompts
from gkd.data.row_routes import RowRoutes
from gkd.errors import ConfigError
from gkd.preflight.teacher import check_teacher
from gkd.scoring.teacher.info import TeacherInfo
from gkd.types import Prompt
from teacher_server.wire.fingerprint import tokenizer_fingerprint
from tests.refusals import refuses
from tests.unit.chat_templates import FAMILIES, tokenizer
from tests.unit.test_rollout_file import rollout, scores

BASE = ["data.train_files=[x.jsonl]", "model.path=m", "trainer.run_dir=r"]
KEY = "teacher.prompt_template"


def load(tmp_path: Path, rows: list[Any], tokenizer: Any = None, template: str = "", **data: Any) -> list[Prompt]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = TeacherConfig(prompt_template=template)
    prompts, dropped = load_prompts(
        [str(file)], "data.train_files", RowReader(DataConfig(**data), tokenizer or build_tokenizer(), teacher=teacher)
    )
    assert len(prompts) + dropped == len(rows)
    return prompts


def views(prompts: list[Prompt], tokenizer: Any = None) -> list[str | None]:
    decode = (tokenizer or build_tokenizer()).decode
    return [None if p.teacher_ids is None else decode(p.teacher_ids) for p in prompts]


def test_a_column_holds_the_teachers_prompt_of_some_rows(tmp_path: Path) -> None:
    """Fails if a row has the prompt of another one, or a row without a value has anything but the student's."""
    rows = [{"prompt": "a", "t": "rule: a"}, {"prompt": "b"}, {"prompt": "c", "t": None}, {"prompt": "d", "t": "x d"}]
    prompts = load(tmp_path, rows, teacher_prompt_key="t")
    assert views(prompts) == ["rule: a", None, None, "x d"]
    assert prompts[0].teacher_ids is not None and prompts[0].teacher_ids.dtype == np.int32
    assert [build_tokenizer().decode(p.token_ids) for p in prompts] == ["a", "b", "c", "d"]
    assert views(load(tmp_path, rows)) == [None] * 4, "nothing changes without the key"


def test_a_template_is_filled_with_the_columns_of_the_row(tmp_path: Path) -> None:
    """Fails if a placeholder takes another column, or braces inside of a value are expanded."""
    rows = [{"q": "1+{hint}", "a": 7, "r": "so {answer}", "hint": "add"}, {"q": "", "a": "8", "r": "", "hint": 0.5}]
    template = "{hint}: {prompt} {{{answer}}} {response}."
    keys = {"prompt_key": "q", "answer_key": "a", "response_key": "r"}
    rows[1]["q"] = "2+6"
    assert views(load(tmp_path, rows, template=template, **keys)) == [
        "add: 1+{hint} {7} so {answer}.",
        "0.5: 2+6 {8} .",
    ]


def test_numbers_of_a_column_with_nulls_are_whole(tmp_path: Path) -> None:
    """Fails if the teacher reads 42.0 or nan, or a route has another name, because pandas made floats of a column."""
    prompts = load(tmp_path, [{"prompt": "1", "a": 42.0}, {"prompt": "1", "a": 4.5}], template="{a}")
    assert views(prompts) == ["42", "4.5"]
    with refuses(KEY):
        load(tmp_path, [{"prompt": "1", "a": float("nan")}], template="{a}")
    routes = RowRoutes(TeacherConfig(routes={"7": RouteConfig(), "8": RouteConfig(), "default": RouteConfig()}), "d")
    assert [routes.of({"d": value}, "row") for value in (8, 8.0, 7.0, None)] == [1, 1, 0, 2]


def test_a_template_replaces_the_last_message(tmp_path: Path) -> None:
    """Fails if the history of a chat is lost, or a string prompt is not the user's message for the teacher."""
    rows = [
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], "answer": "yo"},
        {"prompt": "hi", "answer": "yo"},
    ]
    chat = tokenizer("{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}")
    prompts = load(tmp_path, rows, chat, "{prompt} ({answer})")
    assert views(prompts, chat) == ["system:s|user:hi (yo)|", "user:hi (yo)|"]
    rows = [{"prompt": "hi", "t": [{"role": "system", "content": "rule"}, {"role": "user", "content": "hi"}]}]
    assert views(load(tmp_path, rows, chat, teacher_prompt_key="t"), chat) == ["system:rule|user:hi|"]
    with refuses(KEY):  # the template's text would follow the beginning of the response
        load(tmp_path, [{"prompt": "<|im_start|>user\nhi"}], tokenizer(FAMILIES["chatml"]), "{prompt} x")
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    prompts = load(tmp_path, [{"prompt": conversation}], chat, "{prompt} ({response})", response_key="")
    assert views(prompts, chat) == ["user:hi (yo)|"]


@pytest.mark.parametrize(
    ("template", "n"), [("{prompt} {answer} {response}", 1), ("rule {prompt}", 0), ("{hint} {prompt} {{answer}}", 0)]
)
def test_a_text_that_the_student_cannot_see_is_warned_about(
    tmp_path: Path, gkd_log: pytest.LogCaptureFixture, template: str, n: int
) -> None:
    """Fails if a run starts without a word with a teacher that reads each row's answer, or a shared rule warns."""
    load(tmp_path, [{"prompt": "a", "answer": "b", "response": "c", "hint": "d"}] * 3, template=template)
    warnings = {record.getMessage() for record in gkd_log.records if record.levelno == logging.WARNING}
    assert len(warnings) == n and all("{answer} and {response}" in text for text in warnings)


@pytest.mark.parametrize(
    ("key", "row", "template", "data"),
    [
        (KEY, {"prompt": "a"}, "{prompt} {answer}", {}),
        (KEY, {"prompt": "a", "hint": ["x"]}, "{prompt} {hint}", {}),
        ("data.teacher_prompt_key", {"prompt": "a"}, "", {"teacher_prompt_key": "t"}),
        ("data.teacher_prompt_key", {"prompt": "a", "t": 3}, "", {"teacher_prompt_key": "t"}),
        ("data.teacher_prompt_key", {"prompt": "a", "t": [{"role": "user"}]}, "", {"teacher_prompt_key": "t"}),
        ("data.max_teacher_prompt_length", {"prompt": "a"}, "12{prompt}", {"max_teacher_prompt_length": 2}),
        ("data.max_teacher_prompt_length", {"prompt": "a"}, "12{prompt}", {"max_prompt_length": 2}),
    ],
)
def test_a_row_without_a_usable_teacher_prompt_is_refused(
    tmp_path: Path, key: str, row: dict[str, Any], template: str, data: dict[str, Any]
) -> None:
    """Fails if the teacher would see a prompt with a part missing, or a shorter one than the row's."""
    with refuses(key) as caught:
        load(tmp_path, [row], template=template, **data)
    names_row = key != "data.teacher_prompt_key" or "t" in row
    assert ("rows.jsonl:1" in caught.value.problem) == names_row


def test_a_row_is_omitted_or_kept_whole(tmp_path: Path) -> None:
    """Fails if data.truncation cuts the teacher's prompt, which may be where its rule is."""
    rows = [{"prompt": "abc", "t": "rule abc"}, {"prompt": "abc", "t": "r abc"}]
    data = {"teacher_prompt_key": "t", "max_teacher_prompt_length": 5, "max_prompt_length": 2}
    assert views(load(tmp_path, rows[1:], truncation="left", **data)) == ["r abc"]
    with pytest.raises(ConfigError):
        load(tmp_path, rows, truncation="left", **data)
    assert views(load(tmp_path, rows, truncation="drop", **{**data, "max_prompt_length": 3})) == ["r abc"]


def test_braces_of_a_template_may_be_doubled() -> None:
    """Fails if a template cannot contain braces."""
    check_config(load_config(None, [*BASE, f"{KEY}='{{{{x}}}} {{prompt}}'", "data.max_teacher_prompt_length=9"]))


def test_the_teachers_limit_is_that_of_its_own_prompt() -> None:
    """Fails if the teacher's longer prompt is not compared with its context, or the student's model gets its length."""
    settings = ["data.max_prompt_length=8", "data.max_response_length=8", "data.teacher_prompt_key=t", "teacher.topk=1"]
    config = load_config(None, [*BASE, *settings, "data.max_teacher_prompt_length=25"])
    assert (config.derived.max_sequence_length, config.derived.max_teacher_length) == (16, 33)
    tokenizer = build_tokenizer()
    own = tokenizer_fingerprint(tokenizer.get_vocab())
    info = TeacherInfo("t", "m", "p", "f", 10, 4, own, 99, 1, 1, "hf", "cpu", "float32", True)
    route = Route("", config.teacher)
    assert check_teacher(config, route, replace(info, max_tokens=33), tokenizer, 9) == 9
    with pytest.raises(ConfigError, match="Fix: .*max_teacher_prompt_length"):
        check_teacher(config, route, replace(info, max_tokens=32), tokenizer, 9)


def test_the_teacher_scores_after_its_own_prompt() -> None:
    """Fails if the teacher's sequence has other response tokens, or the student's gets the teacher's prompt."""
    plain = rollout(1)
    own = replace(plain, teacher_ids=np.array([5, 6, 7], np.int32))
    assert plain.for_teacher() is plain
    assert own.for_teacher().prompt_ids.tolist() == [5, 6, 7]
    assert own.for_teacher().response_ids is own.response_ids and own.n_tokens == plain.n_tokens


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["mass", "logits", "hidden"])
def test_skipped_tokens_have_no_loss_rows(kind: str, packed: bool) -> None:
    """Fails if a skipped token keeps its row, a later one loses it, or the student no longer reads it."""
    n, rollouts = 3, [rollout(i, length=length) for i, length in enumerate((2, 8, 3, 5, 4, 2))]
    tables = [
        replace(scores(r, kind), reference_logprobs=-np.arange(len(r.response_ids), dtype=np.float32)) for r in rollouts
    ]
    (whole,) = make_micro_batches(rollouts, tables, micro_batch_size=6, packed=packed)
    kept, of_kept = trained_on(rollouts, tables, n)
    (cut,) = make_micro_batches(kept, of_kept, micro_batch_size=6, packed=packed)
    at = [(i, j) for i, r in enumerate(rollouts) for j in range(len(r.response_ids))]
    rows = [row for row, (_, j) in enumerate(at) if j >= n]
    assert cut.n_loss_tokens == len(rows) == int(route_counts(kept, 4)[:, 0].sum())
    for name in ("sampled_ids", "rollout_logprobs", "ends", "topk_ids", "tail_mass", "logits", "hidden"):
        table = getattr(whole.targets, name)
        assert table is None or np.array_equal(getattr(cut.targets, name), table[rows]), name
    assert np.array_equal(cut.targets.reference_logprobs, whole.targets.reference_logprobs[rows])
    long = [i for i, r in enumerate(rollouts) if len(r.response_ids) > n]
    assert [r.n_tokens for r in kept] == [rollouts[i].n_tokens for i in long]
    reads = cut.tokens.flatten()[cut.loss_index], whole.tokens.flatten()[whole.loss_index][rows]
    assert np.array_equal(*reads)
    assert trained_on(rollouts, tables, 0) == (rollouts, tables)
