"""The tokenizer gets what is in the row: forms of prompts, chat templates, and rows that are refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import pre_tokenizers

from gkd import main_gkd
from gkd.config.schema_sections import DataConfig
from gkd.data.conversation import ROLES, read_conversation
from gkd.data.prompts import RowReader, load_prompts, load_tokenizer
from gkd.data.render import PromptRenderer
from gkd.errors import ConfigError
from gkd.preflight.teacher import template_warning
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.wire.fingerprint import template_fingerprint
from teacher_server.worker.model_folder import ModelFolder, describe_tokenizer
from tests.refusals import refuses
from tests.unit.chat_templates import FAMILIES, FAULTS, TOOLS, tokenizer
from tests.vision_models import picture, save_vision_model

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
    decoded: str = made.decode(load(tmp_path, value, made, **data).token_ids)
    return decoded


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


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"messages": [USER]}, "one object"),
        ([], "list of messages"),
        ([{"role": "human", "content": "x"}], "human"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "user", "content": "x", "images": ["a.png"]}], "images"),
        ([{"from": "human", "value": "x"}, {"role": "user", "content": "y"}], "message 2"),
        ([{"from": "moderator", "value": "x"}], "moderator"),
        ([{"role": "system", "content": " "}], "no text"),
        ([USER, {**CALL, "content": None}, {"role": "tool", "content": "4"}], "leaves out"),
        ([USER, {**CALL, "tool_calls": "add"}, {"role": "tool", "content": "4"}], "tool calls"),
        ([USER, {"role": "assistant", "content": "", "function_call": {"name": "f"}}, USER], "function_call"),
        ("1\ud83d2", "lone surrogate at character 2"),
        ([{"role": "user", "content": "\udc00"}], "lone surrogate at character 1"),
        ("So: " + RENDERED, "<|im_"),
        ([{"role": "user", "content": RENDERED}], "<|im_"),
        (RENDERED.partition("<|im_start|>assistant")[0], "ends with"),
    ],
)
def test_a_row_that_is_not_understood_is_refused(tmp_path: Path, value: Any, said: str) -> None:
    """Fails if a row trains on something else than what is in it, or the error lacks row, problem or fix."""
    with pytest.raises(ConfigError, match=r"p\.jsonl:1") as caught:
        load(tmp_path, value)
    assert caught.value.key == "data.prompt_key" and said in str(caught.value) and caught.value.fix


def test_the_last_assistant_message_is_the_response_if_the_key_is_empty(tmp_path: Path) -> None:
    """Fails if TRL's data (`messages` with the answer) trains on the answer as part of the prompt, or loses it."""
    value = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Four."}]}]
    with pytest.raises(ConfigError, match=r"p\.jsonl:1") as caught:
        load(tmp_path, value)
    assert 'response_key=""' in caught.value.fix
    end = CHATML.eos_token_id
    prompt = load(tmp_path, value, ends=[end], response_key="")
    assert CHATML.decode(prompt.token_ids) == RENDERED
    assert CHATML.decode(prompt.response_ids) == "Four.</s>"
    assert load(tmp_path, value, response_key="").response_ids is None, "an on-policy run needs no response"
    for wrong in ({"weight": 0}, {"reasoning_content": "2 + 2"}, {"tool_calls": [{"function": {"name": "add"}}]}):
        with refuses("data.response_key"):
            load(tmp_path, [USER, {"role": "assistant", "content": "4"} | wrong], ends=[end], response_key="")
    with refuses("data.response_key"):
        load(tmp_path, [USER], ends=[end], response_key="")
    answer = [{"role": "assistant", "content": "4"}]
    for completion in (answer, json.dumps(answer)):
        row = {"prompt": [USER], "completion": completion}
        assert CHATML.decode(load(tmp_path, row, ends=[end], response_key="completion").response_ids) == "4</s>"
    with refuses("data.response_key"):
        load(tmp_path, {"prompt": "Q", "response": json.dumps([USER, *answer])}, ends=[end])
    with pytest.raises(ConfigError, match=r"p\.jsonl:1"):
        load(tmp_path, {"prompt": "a", "response": "\ud800"}, ends=[end])


def test_a_response_does_not_begin_twice(tmp_path: Path) -> None:
    """Fails if the student learns <think> behind the <think> of its prompt, or a header of a turn inside of one."""
    thinking = tokenizer(FAMILIES["chatml_thoughts"])
    ends = [CHATML.convert_tokens_to_ids("<|im_end|>")]
    answers = {"<think>\nx\n</think>\n4": thinking, "<|im_start|>assistant\n4": CHATML}
    forms: list[tuple[str, Any, dict[str, Any]]] = [
        ("data.response_key", lambda text: {"prompt": "Q", "response": text}, {}),
        ("data.messages_key", lambda text: [USER, {"role": "assistant", "content": text}], {"messages_key": "prompt"}),
    ]
    for key, row_of, data in forms:
        for answer, made in answers.items():
            with refuses(key):
                load(tmp_path, row_of(answer), made, ends=ends, **data)
        with refuses(key):  # the template has ended the thoughts
            off = {**data, "chat_template_kwargs": {"enable_thinking": False}}
            load(tmp_path, row_of("<think>x</think>4"), tokenizer(FAMILIES["chatml_no_thinking"]), ends=ends, **off)
        found = load(tmp_path, row_of("<think>x</think>4"), CHATML, ends=ends, **data)
        assert CHATML.decode(found.response_ids) == "<think>x</think>4<|im_end|>"
    row = {"prompt": "<think>", "response": "<think>"}
    assert load(tmp_path, row, thinking, ends=ends, chat_template="never").response_ids is not None


def test_a_response_begins_behind_the_beginning_of_its_turn(tmp_path: Path) -> None:
    """Fails if the student learns a space in front of an answer, which tokenizers such as Llama 2's add to a text."""
    made = tokenizer(FAMILIES["chatml"])
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    end = [CHATML.convert_tokens_to_ids("<|im_end|>")]
    assert made.decode(made("4")["input_ids"]) == " 4"
    conversation = [USER, {"role": "assistant", "content": "4"}]
    for row, data in (
        ({"prompt": "Q", "response": "4"}, {}),
        ({"prompt": conversation}, {"messages_key": "prompt"}),
    ):
        assert made.decode(load(tmp_path, row, made, ends=end, **data).response_ids) == "4<|im_end|>"
    row = {"prompt": "Q", "response": "4"}
    assert made.decode(load(tmp_path, row, made, ends=end, chat_template="never").response_ids) == " 4</s>"


def test_a_response_ends_as_the_template_ends_a_turn(tmp_path: Path) -> None:
    """Fails if the dataset's responses end with another token than the model's turns, as <eos> of Gemma and Phi-3."""
    made = tokenizer(FAMILIES["turns"])
    ends = made.convert_tokens_to_ids(["</s>", "</turn>", "<turn>"])
    for prompt, response in (("Q", "4"), ("Q", "4</turn>"), ("<s><turn>user\nQ</turn>\n<turn>model\n", "4")):
        row = {"prompt": prompt, "response": response}
        assert made.decode(load(tmp_path, row, made, ends=ends).response_ids) == "4</turn>"
    # Without the template, or if the model does not end with its token, the tokenizer's own is the end.
    row = {"prompt": "Q", "response": "4"}
    assert made.decode(load(tmp_path, row, made, ends=ends, chat_template="never").response_ids) == "4</s>"
    assert made.decode(load(tmp_path, row, made, ends=ends[:1]).response_ids) == "4</s>"


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
    """Fails if a text that begins with a tag of HTML is used without the template, and its tag as a special token."""
    with refuses("data.prompt_key"):
        load(tmp_path, "<s>struck out", tokenizer(FAMILIES[name]))
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


@pytest.mark.parametrize(
    ("template", "value", "system"),
    [
        (FAMILIES["turns"], "Q", "Be brief."),
        (FAMILIES["chatml"].replace(*FAULTS["drops_system"]), "Q", "Be brief."),
        (FAMILIES["chatml"], "Q", "<|im_end|>"),
        (FAMILIES["chatml"], "Q", "\ud800"),
        (FAMILIES["chatml"], RENDERED, "Be brief."),
        (None, "Q", "Be brief."),
    ],
)
def test_a_system_prompt_that_the_model_would_not_read_is_refused(
    tmp_path: Path, template: str | None, value: str, system: str
) -> None:
    """Fails if a run trains without its system prompt, or the error names another key."""
    with refuses("data.system_prompt"):
        load(tmp_path, value, tokenizer(template), system_prompt=system)
    if template:
        with refuses("data.system_prompt"):
            load(tmp_path, value, tokenizer(template), system_prompt=system, chat_template="never")


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **more}}}


WEATHER = [tool("get_weather"), tool("get_time", required=["city"])]
VLLM_TEMPLATE = "transformers_utils/chat_templates/template_minicpmv45.jinja"  # of a model of the Qwen3 family


@pytest.mark.parametrize("name", [*TOOLS, "real"])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_template_gets_the_tools_of_the_row(tmp_path: Path, name: str, as_text: bool) -> None:
    """Fails if a prompt lacks its tools, has those of another row, or differs from what transformers renders."""
    (package,) = find_spec("vllm").submodule_search_locations if name == "real" else ("",)
    made = tokenizer((Path(package) / VLLM_TEMPLATE).read_text() if name == "real" else TOOLS[name])
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


@pytest.mark.parametrize(
    ("value", "template"),
    [
        ("get_weather", TOOLS["chatml_tools"]),
        (WEATHER[0], TOOLS["chatml_tools"]),
        (["get_weather"], TOOLS["chatml_tools"]),
        ([{"type": "function", "function": {"name": ""}}], TOOLS["chatml_tools"]),
        ([tool("get_weather", properties={"city": None})], TOOLS["chatml_tools"]),
        ([tool("\ud800")], TOOLS["chatml_tools"]),
        ([tool("get_weather")], FAMILIES["chatml"]),
        ([tool("get_weather")], "{# tools #}" + FAMILIES["chatml"]),
        ([tool("get_weather")], None),
    ],
)
def test_tools_that_the_model_would_not_read_are_refused(tmp_path: Path, value: Any, template: Any) -> None:
    """Fails if a prompt has other tools than its row, also if the user's text has the name of the tool that is lost."""
    row = {"prompt": "Call get_weather.", "t": value}
    with refuses("data.tools_key") as caught:
        load(tmp_path, row, tokenizer(template), tools_key="t")
    assert ("p.jsonl:1" in caught.value.problem) == (template not in (None, FAMILIES["chatml"]))


def test_the_column_of_tools_exists(tmp_path: Path) -> None:
    """Fails if a misspelled column trains without tools, or tools of a rendered prompt are left out without a word."""
    made = tokenizer(TOOLS["chatml_tools"])
    row = {"prompt": "Q", "tools": WEATHER}
    with refuses("data.tools_key"):
        load(tmp_path, row, made, tools_key="tool")
    with refuses("data.tools_key"):
        load(tmp_path, {"prompt": RENDERED, "tools": WEATHER}, made, tools_key="tools")
    with refuses("data.tools_key"):
        load(tmp_path, row, made, tools_key="tools", chat_template_kwargs={"tools": WEATHER})
    pq.write_table(pa.table({"prompt": ["Q", "R"], "tools": [json.dumps(WEATHER), None]}), tmp_path / "p.parquet")
    data = DataConfig(tools_key="tools")
    prompts, _ = load_prompts([str(tmp_path / "p.parquet")], "data.train_files", RowReader(data, made))
    assert ["get_time" in made.decode(prompt.token_ids) for prompt in prompts] == [True, False]


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


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Return messages as people have them, some of them broken. Texts are long enough not to occur by chance."""
    alphabet = "abcXYZ 019\n\t.,<>|[]{}\"'\\/é\u2028\u0301漢字🙂\u200d\ufeff"

    def some_text() -> Any:
        made = "".join(rng.choices(alphabet, k=rng.randint(8, 40)))
        kind = rng.random()
        if kind < 0.03:
            return rng.choice(["", " \n", None, 3, made + "\ud800", {"text": made}, [], [made, {"type": "image"}]])
        if kind < 0.1:
            return [{"type": "text", "text": made[:5]}, {"type": "text", "text": made[5:], "image": None}]
        if kind < 0.15:
            return f"<think>{made[:4]}</think>\n\n{made}"
        return rng.choice([made, f" {made}\n", made + rng.choice(["<|im_end|>", "</s>", "[INST]", "###"])])

    roles = ["system"] * rng.randint(0, 1) + ["user"]
    for _ in range(rng.randint(0, 3)):
        roles += rng.choice([["assistant", "user"], ["assistant", "tool"], ["tool"], ["user"]])
    if rng.random() < 0.03:
        roles.insert(rng.randint(0, len(roles)), rng.choice(["narrator", "", "developer", "system"]))
    return [{"role": role, "content": some_text()} for role in roles]


def texts_of(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (m["role"], m["content"] if isinstance(m["content"], str) else "\n".join(part["text"] for part in m["content"]))
        for m in messages
    ]


def check(n: int, seed: int) -> tuple[int, int]:
    """Render random conversations; return the numbers of rendered and of refused ones."""
    rng, rendered, refused = random.Random(seed), 0, 0
    sound = {name: PromptRenderer(tokenizer(source), "auto", {}) for name, source in FAMILIES.items()}
    faulty = {
        (name, fault): PromptRenderer(tokenizer(source.replace(*change)), "auto", {})
        for name, source in FAMILIES.items()
        for fault, change in FAULTS.items()
        if source.replace(*change) != source
    }
    renderers: list[tuple[Any, PromptRenderer]] = [*sound.items(), *faulty.items()]
    for _ in range(n):
        messages, (name, renderer) = conversation(rng), rng.choice(renderers)
        try:
            found = renderer.render(read_conversation(messages, SETTING, "f:1"), SETTING, "f:1").text
        except ConfigError as error:
            refused += 1
            assert "f:1" in str(error) and error.fix, (name, messages)
            continue
        rendered, at = rendered + 1, 0
        for role, text in texts_of(messages):
            assert role in ROLES
            forms = [text.strip(), text.rpartition("</think>")[2].strip(), json.dumps(text, ensure_ascii=False)[1:-1]]
            places = [(found.find(form, 0 if role == "system" else at), form) for form in forms]
            assert any(place >= 0 for place, _ in places), (name, messages, found)
            if role != "system":
                at, form = min(place for place in places if place[0] >= 0)
                at += len(form)
    return rendered, refused


def test_a_rendered_prompt_has_each_message_or_the_row_is_refused() -> None:
    """Fails if any family of templates, sound or faulty, drops or changes a text of a conversation silently."""
    rendered, refused = check(1000, seed=1)
    assert rendered > 200 and refused > 125


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_conversations() -> None:
    """Fails as the test above, in rarer cases."""
    check(100_000, seed=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sound_template_is_not_refused(name: str) -> None:
    """Fails if a plain conversation with a real template is refused."""
    renderer = PromptRenderer(tokenizer(FAMILIES[name]), "auto", {})
    messages = [USER, {"role": "assistant", "content": "<think>hm</think>\n\n4"}, {"role": "user", "content": "a "}]
    has_system = name != "turns"
    found = renderer.render(
        read_conversation([{"role": "system", "content": "Be brief."}] * has_system + messages, SETTING, "f:1"),
        SETTING,
        "f:1",
    )
    assert "What is 2+2?" in found.text and ("Be brief." in found.text) == has_system


def test_large_files_are_read_by_row_and_by_column(tmp_path: Path) -> None:
    """Fails if a byte order mark, line ends inside of texts, or unread columns change the prompts."""
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n{"prompt": "c"}')
    plain = tokenizer()
    prompts, _ = load_prompts([str(file)], "data.train_files", RowReader(DataConfig(), plain))
    assert [plain.decode(p.token_ids) for p in prompts] == ["a\u2028b", "c"]
    pq.write_table(pa.table({"prompt": ["a"] * 600, "unused": ["x"] * 600}), tmp_path / "p.parquet", row_group_size=100)
    prompts, _ = load_prompts(
        [str(tmp_path / "p.parquet")], "data.train_files", RowReader(DataConfig(), plain), keep_rows=True
    )
    assert len(prompts) == 600
    (tmp_path / "a.jsonl").write_text('[\n {"prompt": "a"}\n]')
    with refuses("data.train_files"):
        load_prompts([str(tmp_path / "a.jsonl")], "data.train_files", RowReader(DataConfig(), plain))


def test_show_prompts_shortens_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the tokens of an image fill the terminal."""
    model = save_vision_model(tmp_path / "model")
    (tmp_path / "a.png").write_bytes(picture(40, 40))
    (tmp_path / "p.jsonl").write_text('{"prompt": "<image>What?", "images": ["a.png"]}\n')
    (tmp_path / "c.yaml").write_text("{actor: {strategy: fsdp2}, data: {images_key: images, truncation: drop}}")
    words = [f"model.path={model}", f"data.train_files=[{tmp_path / 'p.jsonl'}]"]
    assert main_gkd.main(["--config", str(tmp_path / "c.yaml"), "--show-prompts", "1", *words]) == 0
    assert " 263 (16 times) 198 54 71 64 83 " in capsys.readouterr().out


def test_show_prompts_prints_what_the_models_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the preview starts a process, needs a teacher, or hides the teacher's prompt, response or conversion."""
    CHATML.save_pretrained(tmp_path / "model")
    value = [{"from": "human", "value": "What is 2+2?"}, {"from": "gpt", "value": "Four."}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"chat": value}) + "\n" + json.dumps({"chat": "b"}) + "\n")
    (tmp_path / "c.yaml").write_text("teacher: {prompt_template: '{prompt} Be brief.'}\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--show-prompts", "1"]
    words += [f"model.path={tmp_path / 'model'}", f"data.train_files=[{tmp_path / 'p.jsonl'}]"]
    words += ["data.prompt_key=chat", "data.response_key=", "distill.on_policy_share=0.5"]
    children = psutil.Process().children()
    assert main_gkd.main(words) == 0 and psutil.Process().children() == children
    out = capsys.readouterr().out
    assert RENDERED in out and RENDERED.replace("2+2?", "2+2? Be brief.") in out
    assert "Four.</s>" in out and "ShareGPT" in out and str(CHATML.encode("W")[0]) in out
    stop = CHATML.convert_tokens_to_ids("<|im_end|>")
    assert main_gkd.main([*words, f"rollout.stop_token_ids=[{stop}]"]) == 0
    assert "Four.<|im_end|>" in capsys.readouterr().out, "as the run reads it"
    script = 'set -o pipefail; "$@" | true'  # as head, when it has enough
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "gkd.main_gkd", *words]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert piped.returncode == 0 and not piped.stderr
    assert main_gkd.main([*words, "data.prompt_key=absent"]) == 2
    told = capsys.readouterr()
    assert "data.prompt_key" in told.err and not told.out
    with pytest.raises(SystemExit) as ended:
        main_gkd.main([*words, "--show-prompts", "0"])
    assert ended.value.code == 2 and not capsys.readouterr().out, "a run would start"
