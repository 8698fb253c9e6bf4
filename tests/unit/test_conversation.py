"""The tokenizer gets what is in the row: forms of prompts, chat templates, and rows that are refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.config.schema_sections import DataConfig
from gkd.data.conversation import read_conversation
from gkd.data.prompts import RowReader, load_prompts, load_tokenizer
from gkd.data.render import PromptRenderer
from gkd.errors import ConfigError
from gkd.preflight.teacher import template_warning
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.wire.fingerprint import template_fingerprint
from teacher_server.worker.model_folder import ModelFolder, describe_tokenizer
from tests.refusals import refuses
from tests.unit.chat_templates import FAMILIES, FAULTS, TOOLS, tokenizer

SETTING = "data.prompt_key", "prompt"
USER = {"role": "user", "content": "What is 2+2?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add_numbers", "arguments": {}}}]}
CHATML = tokenizer(FAMILIES["chatml"])
RENDERED = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"


def load(tmp_path: Path, value: Any, made: Any = CHATML, ends: list[int] | None = None, **data: Any) -> Any:
    """Load one row, given as its prompt or as a whole."""
    row = value if isinstance(value, dict) and "prompt" in value else {"prompt": value}
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(row) + "\n")
    prompts, _ = load_prompts([str(file)], "data.train_files", RowReader(DataConfig(**data), made, response_ends=ends))
    return prompts[0]


def text(tmp_path: Path, value: Any, made: Any = CHATML, **data: Any) -> str:
    return str(made.decode(load(tmp_path, value, made, **data).token_ids))


@pytest.mark.parametrize(
    "value",
    [
        "What is 2+2?",
        [USER],
        [{**USER, "tool_calls": None, "name": None}],
        [{"role": "user", "content": [{"type": "text", "text": "What is 2+2?", "image": None}]}],
        [{"role": "user", "content": ["What is 2+2?"]}],
        [{"from": "human", "value": "What is 2+2?"}],
        json.dumps([USER]),
        json.dumps([{"from": "human", "value": "What is 2+2?"}], indent=1),
        RENDERED,
    ],
)
@pytest.mark.parametrize("family", ["chatml", "chatml_parts"])
def test_each_form_of_a_prompt_is_read(tmp_path: Path, value: Any, family: str) -> None:
    """Fails if a form that people have is rendered without its text, as JSON, or twice."""
    assert text(tmp_path, value, tokenizer(FAMILIES[family])) == RENDERED


def test_parts_and_roles_are_converted(tmp_path: Path) -> None:
    """Fails if parts are lost, or ShareGPT's names are not the roles of the template."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in text(tmp_path, parts)
    names = [("system", "s"), ("human", "q"), ("gpt", "x"), ("observation", "t"), ("user", "r")]
    found = text(tmp_path, [{"from": name, "value": value} for name, value in names])
    roles = "".join(
        f"<|im_start|>{role}\n{value}<|im_end|>\n"
        for role, value in (("system", "s"), ("user", "q"), ("assistant", "x"), ("tool", "t"), ("user", "r"))
    )
    assert found == roles + "<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [None, *FAMILIES.values()])
def test_no_second_beginning_and_no_end_of_the_tokenizer(tmp_path: Path, template: str | None) -> None:
    """Fails if a text that begins with the beginning gets another one, or a prompt ends with the tokenizer's end."""
    made = tokenizer(template, post="<s> $A </s>")
    for value in ("Q", "<s>Q"):
        assert text(tmp_path, value, made, chat_template="never") == "<s>Q"
    assert not text(tmp_path, "Q", made).endswith("</s>")
    assert not text(tmp_path, "Q", tokenizer(template, post="$A </s>")).endswith("</s>")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rendered_text_is_used_as_it_is(tmp_path: Path, name: str) -> None:
    """Fails if a text is rendered twice with any family of templates that can be recognized."""
    made = tokenizer(FAMILIES[name])
    rendered = text(tmp_path, "What is 2+2?", made)
    if name in ("plain", "names_one_line"):  # their prompts cannot be told from a user's text
        return
    assert text(tmp_path, rendered, made) == rendered
    assert text(tmp_path, rendered.removeprefix("<s>").lstrip(), made) == rendered.removeprefix("<s>").lstrip()


@pytest.mark.parametrize("name", ["inst", "headers", "turns"])
def test_the_beginning_alone_is_not_a_rendered_text(tmp_path: Path, name: str) -> None:
    """Fails if a text with a tag of HTML is used without the template, or its tag as a special token."""
    assert text(tmp_path, "struck <b>out", tokenizer(FAMILIES[name])).count("<s>") == 1
    listed = '[{"from": "a@b.c", "subject": "x"}]'
    assert "user" in text(tmp_path, listed) and listed in text(tmp_path, listed), "JSON of something else is a text"


def test_variables_of_the_template_are_set(tmp_path: Path) -> None:
    """Fails if data.chat_template_kwargs has no effect, or an unknown variable is ignored."""
    made = tokenizer(FAMILIES["chatml_no_thinking"])
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert text(tmp_path, "Q", made, **off).endswith("assistant\n<think></think>")
    assert text(tmp_path, "Q", made).endswith("assistant\n")
    for other, setting in ((CHATML, "auto"), (tokenizer(), "auto"), (made, "never")):
        with refuses("data.chat_template_kwargs.enable_thinking"):
            load(tmp_path, "Q", other, chat_template=setting, **off)


def test_variables_of_a_row_that_change_its_prompt_are_refused(tmp_path: Path) -> None:
    """Fails if a row's own variables of the template are left out silently, or stop a run that has them already."""
    made, off = tokenizer(FAMILIES["chatml_no_thinking"]), {"enable_thinking": False}
    settings, rendered = {"chat_template_kwargs": off}, text(tmp_path, "Q", made)
    same = [{"enable_thinking": True}, {"enable_thinking": None}, {"chat_template_kwargs": {}}, {"thinking": "Hm."}]
    for row in (off, {"enable_thinking": "false"}, {"chat_template_kwargs": off}, {"template_kwargs": json.dumps(off)}):
        with refuses("data.prompt_key"):
            load(tmp_path, {"prompt": "Q", **row}, made)
        pq.write_table(pa.Table.from_pylist([{"prompt": "Q", **row}]), tmp_path / "p.parquet")
        with refuses("data.prompt_key"):
            load_prompts([str(tmp_path / "p.parquet")], "data.train_files", RowReader(DataConfig(), made))
        assert text(tmp_path, {"prompt": "Q", **row}, made, **settings).endswith("<think></think>")
        assert text(tmp_path, {"prompt": rendered, **row}, made) == rendered, "rendered already"
        load(tmp_path, {"prompt": "Q", **row}, CHATML)  # which has no such variable
    with refuses("data.prompt_key"):
        load(tmp_path, {"prompt": "Q", "enable_thinking": True}, made, **settings)
    with refuses("data.prompt_key"):
        load(tmp_path, {"prompt": "Q", "t": "R", **off}, made, teacher_prompt_key="t")
    for row in same:
        assert text(tmp_path, {"prompt": "Q", **row}, made) == rendered
    with refuses("data.prompt_key"):
        load(tmp_path, {"prompt": "Q", "chat_template_kwargs": {"tools": [1]}}, made)


SYSTEM = {"role": "system", "content": "Be brief."}


def test_a_date_in_the_prompts_is_told(tmp_path: Path, gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if prompts of another day differ, as with Llama 3.2, and no line tells; or one tells falsely."""
    date = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    made = tokenizer(date + "{% if messages[0].role == 'user' %}{{ date_string }}{% endif %}" + FAMILIES["chatml"])
    assert datetime.now().strftime("%Y") in text(tmp_path, [USER], made)
    assert "data.chat_template_kwargs.date_string" in gkd_log.text
    gkd_log.clear()
    assert text(tmp_path, [USER], made, chat_template_kwargs={"date_string": "26 Jul 2024"}).startswith("26 Jul 2024")
    load(tmp_path, [SYSTEM, USER], made)
    load(tmp_path, [USER])
    assert "date" not in gkd_log.text


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"turns"}))
def test_the_system_prompt_stands_in_front_of_prompts_without_one(tmp_path: Path, name: str) -> None:
    """Fails if a family of templates reads another prompt than with the message in the row, or a row's own is lost."""
    made, ours = tokenizer(FAMILIES[name]), {"system_prompt": "Be brief."}
    expected = text(tmp_path, [SYSTEM, USER], made)
    assert "Be brief." in expected
    assert text(tmp_path, [USER], made, **ours) == text(tmp_path, USER["content"], made, **ours) == expected
    assert text(tmp_path, [SYSTEM, USER], made, system_prompt="Be long.") == expected
    if name == "chatml":
        assert "Be brief." not in text(tmp_path, [{"role": "developer", "content": "Be exact."}, USER], made, **ours)


def test_the_system_prompt_is_a_part_of_each_prompt(tmp_path: Path) -> None:
    """Fails if the limit of a prompt's length does not count it, or the teacher's own prompt lacks it."""
    n = len(load(tmp_path, "Q", system_prompt="Be brief.").token_ids)
    load(tmp_path, "Q", system_prompt="Be brief.", max_prompt_length=n)
    with refuses("data.max_prompt_length"):
        load(tmp_path, "Q", system_prompt="Be brief.", max_prompt_length=n - 1)
    row = {"prompt": "Q", "t": [{"role": "user", "content": "Q, please"}]}
    view = load(tmp_path, row, system_prompt="Be brief.", teacher_prompt_key="t").teacher_ids
    assert CHATML.decode(view) == text(tmp_path, [SYSTEM, {"role": "user", "content": "Q, please"}])


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **more}}}


WEATHER = [tool("get_weather"), tool("get_time", required=["city"])]
VLLM_TEMPLATE = "transformers_utils/chat_templates/template_minicpmv45.jinja"  # of a model of the Qwen3 family


@pytest.mark.parametrize("name", [*TOOLS, "real"])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_template_gets_the_tools_of_the_row(tmp_path: Path, name: str, as_text: bool) -> None:
    """Fails if a prompt lacks its tools, has those of another row, or differs from what transformers renders."""
    spec = find_spec("vllm")
    made = tokenizer((Path(spec.origin).parent / VLLM_TEMPLATE).read_text() if name == "real" else TOOLS[name])
    row = {"prompt": [USER], "t": json.dumps(WEATHER) if as_text else WEATHER}
    found = text(tmp_path, row, made, tools_key="t", system_prompt="Be brief.")
    render = partial(made.apply_chat_template, tokenize=False, add_generation_prompt=True)
    assert found == render([SYSTEM, USER], tools=WEATHER) and "get_time" in found
    for nothing in (None, "", []):
        assert text(tmp_path, {**row, "t": nothing}, made, tools_key="t") == render([USER])
    own = load(tmp_path, {**row, "o": "Q"}, made, tools_key="t", teacher_prompt_key="o").teacher_ids
    assert made.decode(own) == render([{"role": "user", "content": "Q"}], tools=WEATHER)
    n = len(load(tmp_path, row, made, tools_key="t").token_ids)
    with refuses("data.max_prompt_length"):
        load(tmp_path, row, made, tools_key="t", max_prompt_length=n - 1)


CHAT, TOOL_CHAT = FAMILIES["chatml"], TOOLS["chatml_tools"]
# Key -> the part of the error that tells, or "", the row, the template, and settings.
REFUSED: dict[str, list[tuple[str, Any, Any, dict[str, Any]]]] = {
    "data.prompt_key": [
        ("one object", {"messages": [USER]}, CHAT, {}),
        ("list of messages", [], CHAT, {}),
        ("human", [{"role": "human", "content": "x"}], CHAT, {}),
        ("content", [{"role": "user"}], CHAT, {}),
        ("image_url", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], CHAT, {}),
        ("images", [{"role": "user", "content": "x", "images": ["a.png"]}], CHAT, {}),
        ("message 2", [{"from": "human", "value": "x"}, {"role": "user", "content": "y"}], CHAT, {}),
        ("moderator", [{"from": "moderator", "value": "x"}], CHAT, {}),
        ("no text", [{"role": "system", "content": " "}], CHAT, {}),
        ("leaves out", [USER, {**CALL, "content": None}, {"role": "tool", "content": "4"}], CHAT, {}),
        ("tool calls", [USER, {**CALL, "tool_calls": "add"}, {"role": "tool", "content": "4"}], CHAT, {}),
        ("function_call", [USER, {"role": "assistant", "content": "", "function_call": {"name": "f"}}, USER], CHAT, {}),
        ("lone surrogate at character 2", "1\ud83d2", CHAT, {}),
        ("lone surrogate at character 1", [{"role": "user", "content": "\udc00"}], CHAT, {}),
        ("<|im_", "So: " + RENDERED, CHAT, {}),
        ("<|im_", [{"role": "user", "content": RENDERED}], CHAT, {}),
        ("ends with", RENDERED.partition("<|im_start|>assistant")[0], CHAT, {}),
        # The text that the template drops is a word that the template writes.
        ("leaves out", [USER, {"role": "tool", "content": "user"}, USER], CHAT.replace(*FAULTS["drops_tool"]), {}),
        ("leaves out", [{**USER, "content": " \n"}, USER], FAMILIES["names"].replace(*FAULTS["reversed"]), {}),
        # The beginning alone is not a rendered text.
        *(("<s>", "<s>struck out", FAMILIES[name], {}) for name in ("inst", "headers", "turns")),
    ],
    "data.system_prompt": [
        ("", "Q", FAMILIES["turns"], {"system_prompt": "Be brief."}),
        ("", "Q", CHAT.replace(*FAULTS["drops_system"]), {"system_prompt": "Be brief."}),
        ("", "Q", CHAT, {"system_prompt": "<|im_end|>"}),
        ("", "Q", CHAT, {"system_prompt": "\ud800"}),
        ("p.jsonl:1", RENDERED, CHAT, {"system_prompt": "Be brief."}),
        ("", "Q", CHAT, {"system_prompt": "Be brief.", "chat_template": "never"}),
        ("", "Q", None, {"system_prompt": "Be brief."}),
    ],
    "data.tools_key": [
        ("p.jsonl:1", {"prompt": "Q", "t": "get_weather"}, TOOL_CHAT, {"tools_key": "t"}),
        ("p.jsonl:1", {"prompt": "Q", "t": WEATHER[0]}, TOOL_CHAT, {"tools_key": "t"}),
        ("p.jsonl:1", {"prompt": "Q", "t": ["get_weather"]}, TOOL_CHAT, {"tools_key": "t"}),
        ("p.jsonl:1", {"prompt": "Q", "t": [tool("")]}, TOOL_CHAT, {"tools_key": "t"}),
        ("nulls", {"prompt": "Q", "t": [tool("get", properties={"city": None})]}, TOOL_CHAT, {"tools_key": "t"}),
        ("lone surrogate", {"prompt": "Q", "t": [tool("\ud800")]}, TOOL_CHAT, {"tools_key": "t"}),
        ("does not use", {"prompt": "Q", "t": WEATHER}, CHAT, {"tools_key": "t"}),
        # The user's text has the name of the tool that is lost.
        ("get_weather", {"prompt": "Call get_weather.", "t": WEATHER}, "{# tools #}" + CHAT, {"tools_key": "t"}),
        ("no chat template", {"prompt": "Q", "t": WEATHER}, None, {"tools_key": "t"}),
        ("columns", {"prompt": "Q", "t": WEATHER}, TOOL_CHAT, {"tools_key": "misspelled"}),
        ("rendered already", {"prompt": RENDERED, "t": WEATHER}, TOOL_CHAT, {"tools_key": "t"}),
        ("is set, too", {"prompt": "Q"}, TOOL_CHAT, {"tools_key": "t", "chat_template_kwargs": {"tools": WEATHER}}),
    ],
}


@pytest.mark.parametrize(("key", "case"), [(key, case) for key, cases in REFUSED.items() for case in cases])
def test_a_row_that_is_not_understood_is_refused(tmp_path: Path, key: str, case: tuple[str, Any, Any, Any]) -> None:
    """Fails if a prompt lacks what is in its row or in the settings, or the error lacks key, row, problem or fix."""
    words, row, template, data = case
    with refuses(key) as caught:
        load(tmp_path, row, tokenizer(template), **data)
    assert words in str(caught.value) and caught.value.fix
    assert key != "data.prompt_key" or "p.jsonl:1" in caught.value.problem


_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ' ' + ARGUMENTS }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_arguments_of_calls_are_objects_in_the_prompt(tmp_path: Path) -> None:
    """Fails if a prompt has a call whose arguments are quoted twice, as Qwen2.5's template does with OpenAI's text."""
    quoting = tokenizer(_CALLS.replace("ARGUMENTS", "(c.function.arguments | tojson)"))
    copying = tokenizer(_CALLS.replace("ARGUMENTS", "c.function.arguments"))

    def called(arguments: Any) -> list[dict[str, Any]]:
        return [USER, {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    tail = [{"role": "user", "content": "And?"}]
    expected = """f {"x": "é"}<|im_end|>"""
    assert expected in text(tmp_path, [*called({"x": "é"}), *tail], quoting)
    assert expected in text(tmp_path, [*called('{"x": "é"}'), *tail], copying)
    for arguments in ('{"x": "é"}', "{}"):
        with refuses("data.prompt_key"):
            load(tmp_path, [*called(arguments), *tail], quoting)
    with refuses("data.prompt_key"):
        load(tmp_path, [USER, {**CALL, "tool_calls": [{"function": "f"}]}, *tail], quoting)


@pytest.mark.parametrize("tools", [[], [tool("add_numbers")]])
def test_a_call_that_the_template_leaves_out_is_refused(tmp_path: Path, tools: Any) -> None:
    """Fails if the name in a tool, in a question or in another call passes for a call that the prompt lacks."""
    first_only = _CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]").replace("ARGUMENTS", "''")
    named, answer = {"role": "user", "content": "Use add_numbers."}, {"role": "tool", "content": "4"}
    row = {"prompt": [named, CALL, answer], "t": tools}
    with refuses("data.prompt_key"):
        load(tmp_path, row, tokenizer(TOOLS["chatml_tools"]), tools_key="t")
    assert "add_numbers " in text(tmp_path, row["prompt"], tokenizer(first_only))
    twice = {**CALL, "tool_calls": CALL["tool_calls"] * 2}
    assert text(tmp_path, [named, twice, answer], tokenizer(_CALLS.replace("ARGUMENTS", "''"))).count("add") == 3
    with refuses("data.prompt_key"):
        load(tmp_path, [named, twice, answer], tokenizer(first_only))


def test_nulls_that_parquet_adds_to_arguments_are_refused(tmp_path: Path) -> None:
    """Fails if a call has the arguments of other rows, as null."""
    quoting = tokenizer(_CALLS.replace("ARGUMENTS", "(c.function.arguments | tojson)"))

    def row(**arguments: Any) -> list[dict[str, Any]]:
        return [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}, USER]

    reader, file = partial(RowReader, DataConfig(), quoting), tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": row(x=1)}, {"prompt": row(y=2)}]), file)
    with refuses("data.prompt_key"):
        load_prompts([str(file)], "data.train_files", reader())
    pq.write_table(pa.Table.from_pylist([{"prompt": json.dumps(row(x=1))}, {"prompt": json.dumps(row(y=None))}]), file)
    prompts, _ = load_prompts([str(file)], "data.train_files", reader())
    assert ['f {"y": null}' in quoting.decode(prompt.token_ids) for prompt in prompts] == [False, True]


def test_a_cut_prompt_keeps_its_beginning_and_the_beginning_of_the_answer(tmp_path: Path) -> None:
    """Fails if Gemma or Llama read a cut prompt without their first token, or a student goes on with a cut question."""
    made = tokenizer(FAMILIES["turns"], post="<s> $A")
    whole = load(tmp_path, "abcdefgh", made).token_ids.tolist()
    n = len(whole) - 20
    for each in (made, tokenizer(FAMILIES["turns"])):  # the second one does not add what the template writes
        cut = load(tmp_path, "abcdefgh", each, max_prompt_length=n, truncation="left").token_ids.tolist()
        assert cut == [whole[0], *whole[1 - n :]] and len(cut) == n
    turns = tokenizer(FAMILIES["chatml"])
    turns.bos_token = "<|im_start|>"  # as SmolLM2's, where it begins each turn
    found = text(tmp_path, "abcdefgh", turns, max_prompt_length=16, truncation="left")
    assert found == "fgh<|im_end|>\n<|im_start|>assistant\n"
    assert load(tmp_path, "abcdefgh", made, max_prompt_length=1, truncation="left").token_ids.tolist() == whole[:1]
    with refuses("data.max_prompt_length"):
        load(tmp_path, "abcdefgh", made, max_prompt_length=n, truncation="right")
    plain = {"chat_template": "never", "max_prompt_length": 4}
    assert text(tmp_path, "abcdefgh", made, truncation="right", **plain) == "<s>abc"
    assert text(tmp_path, "abcdefgh", made, truncation="left", **plain) == "<s>fgh"


def test_cut_prompts_are_counted_and_shown_as_they_are_used(tmp_path: Path, gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if prompts lose their system message without a word, or the log shows what no model reads."""
    rows: list[Any] = [[SYSTEM, {"role": "user", "content": "x" * n}] for n in (60, 30, 1)]
    rows.append([{"role": "system", "content": ""}, {"role": "user", "content": "x" * 60}])
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in [*rows, "y" * 90]))
    reader = RowReader(DataConfig(max_prompt_length=62, truncation="left"), CHATML)
    prompts, _ = load_prompts([str(tmp_path / "p.jsonl")], "data.train_files", reader)
    shown, cut = (record.getMessage() for record in gkd_log.records[-2:])
    assert CHATML.decode(prompts[0].token_ids) in shown and SYSTEM["content"] not in shown
    assert [int(word) for word in cut.split() if word.isdigit()] == [4, 2], "the second one keeps a text without header"


def test_named_templates_have_a_default(tmp_path: Path) -> None:
    """Fails if a tokenizer with several templates renders a prompt with another one than transformers does."""
    made = tokenizer()
    made.chat_template = {"default": FAMILIES["chatml"], "tool_use": FAMILIES["angle"]}
    assert text(tmp_path, USER["content"], made) == text(tmp_path, RENDERED, made) == RENDERED


def test_templates_that_differ_are_named(tmp_path: Path) -> None:
    """Fails if a teacher scores prompts in a form that its own template does not write, and nothing tells."""
    info = TeacherInfo("", "t", str(tmp_path), "", 1, 1, "", 1, 1, 1, "hf", "cpu", "float32", True)
    for template in (FAMILIES["chatml"], FAMILIES["angle"], None):
        tokenizer(template).save_pretrained(tmp_path)
        warning = template_warning(DataConfig(), CHATML, info, trust_remote_code=False)
        assert ("data.teacher_prompt_key" in warning and "<|im_start|>" in warning) == (template != FAMILIES["chatml"])
        assert ("<|user|>" in warning) == (template == FAMILIES["angle"])
        read = describe_tokenizer(ModelFolder(str(tmp_path), "t", 1, ""))
        assert read[1] == template_fingerprint(template) and bool(read[1]) == (template is not None)
        assert (repr(read[2]) in warning) == bool(warning)
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    of_images = tmp_path / "chat_template.json"  # a folder of LLaVA has its template here alone
    of_images.write_text(json.dumps({"chat_template": FAMILIES["angle"]}))
    assert describe_tokenizer(ModelFolder(str(tmp_path), "t", 1, ""))[1] == template_fingerprint(FAMILIES["angle"])
    assert load_tokenizer(str(tmp_path), "model.path").chat_template == FAMILIES["angle"]
    of_images.unlink()
    for template in ("{{ 'long' * 1025 }}", "{{ raise_exception('no') }}"):
        tokenizer(template).save_pretrained(tmp_path)
        assert describe_tokenizer(ModelFolder(str(tmp_path), "t", 1, ""))[1:] == (template_fingerprint(template), "")
    assert str(tmp_path) in template_warning(DataConfig(), CHATML, info, trust_remote_code=False), "not compared"
    assert not template_warning(DataConfig(teacher_prompt_key="t"), CHATML, info, trust_remote_code=False)
    for fingerprint, differs in (("", False), (template_fingerprint(CHATML.chat_template), False), ("0" * 64, True)):
        elsewhere = replace(info, model_path="/absent", template_fingerprint=fingerprint)
        assert bool(template_warning(DataConfig(), CHATML, elsewhere, trust_remote_code=False)) == differs


_LONG = st.text("abcXYZ 019\n\t.,<>|[]{}\"'\\/é\u2028\u0301漢字🙂\u200d\ufeff", min_size=8, max_size=40)
_BROKEN: list[Any] = ["", " \n", None, 3, "broken \ud800", {"text": "broken"}, [], ["broken", {"type": "image"}]]
_CONTENT = st.one_of(
    _LONG,
    _LONG.map(lambda text: f" {text}\n"),
    st.tuples(_LONG, st.sampled_from(["<|im_end|>", "</s>", "[INST]", "###"])).map("".join),
    _LONG.map(lambda text: f"<think>{text[:4]}</think>\n\n{text}"),
    _LONG.map(lambda text: [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:], "image": None}]),
    st.integers(0, 39).flatmap(lambda i: st.sampled_from(_BROKEN) if i == 0 else _LONG),
)
_TURNS = st.lists(st.sampled_from(["assistant user", "assistant tool", "tool", "user", "user developer"]), max_size=3)
_ROLES = st.tuples(st.sampled_from(["user", "system user"]), _TURNS).map(lambda r: " ".join([r[0], *r[1]]).split())
_MESSAGES = _ROLES.flatmap(
    lambda roles: st.tuples(*(st.fixed_dictionaries({"role": st.just(role), "content": _CONTENT}) for role in roles))
)
_RENDERERS = {
    (name, fault): PromptRenderer(tokenizer(source.replace(*change)), "auto", {})
    for name, source in FAMILIES.items()
    for fault, change in {"": ("", ""), **FAULTS}.items()
    if not fault or source.replace(*change) != source
}


def check(n: int) -> Counter[str]:
    """Render conversations with sound and faulty templates; return the numbers of rendered and of refused ones."""
    counts = Counter[str]()

    @settings(max_examples=n)
    @given(_MESSAGES, st.sampled_from(sorted(_RENDERERS)))
    def render(messages: tuple[dict[str, Any], ...], name: tuple[str, str]) -> None:
        try:
            found = _RENDERERS[name].render(read_conversation([*messages], SETTING, "f:1"), SETTING, "f:1").text
        except ConfigError as error:
            counts["refused"] += 1
            assert "f:1" in str(error) and error.fix
            return
        counts["rendered"] += 1
        at = 0
        for message in messages:
            role = message["role"]
            content = message["content"]
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            forms = [text.strip(), text.rpartition("</think>")[2].strip(), json.dumps(text, ensure_ascii=False)[1:-1]]
            places = [(found.find(form, 0 if role == "system" else at), form) for form in forms]
            assert any(place >= 0 for place, _ in places), found
            if role != "system":
                at, form = min(place for place in places if place[0] >= 0)
                at += len(form)

    render()
    return counts


def test_a_rendered_prompt_has_each_message_or_the_row_is_refused() -> None:
    """Fails if any family of templates, sound or faulty, drops or changes a text of a conversation silently."""
    counts = check(1000)
    assert counts["rendered"] > 200 and counts["refused"] > 125


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_conversations() -> None:
    """Fails as the test above, in rarer cases."""
    check(20_000)
