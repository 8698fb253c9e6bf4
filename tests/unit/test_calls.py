"""Calls of tools are read in the forms in which chat templates write them; other forms are refused before the start."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gkd.config.load import load_config
from gkd.environment.calls import CallError, ToolCall, parse_calls, written_calls
from gkd.environment.tools import value_of
from gkd.errors import EnvironmentError
from gkd.preflight.user_code import environment_tools
from tests.refusals import refuses
from tests.unit.chat_templates import tokenizer
from tests.unit.test_environment_tools import CALL, ToolEnvironment, Tools, add, play

HEAD, END = "<|header|>assistant<|end|>\n\n", "<|eot|>"
_ITEMS = "{% for k, v in c.arguments | items %}"
_QWEN = (
    "\n<tool_call>\n<function={{ c.name }}>{{ '\n' }}" + _ITEMS + "<parameter={{ k }}>{{ '\n' }}{{ VALUE }}"
    "\n</parameter>{{ '\n' }}{% endfor %}</function>\n</tool_call>"
)
_BEGIN, _END_OF_ONE, _END_OF_ALL = (f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "call▁end", "calls▁end"))
_DEEPSEEK = "{{ '" + _BEGIN + "' if loop.first else 'NEXT' }}<｜tool▁call▁begin｜>FORM" + _END_OF_ONE
_DEEPSEEK += "{{ '" + _END_OF_ALL + "' if loop.last else '' }}"
# Name -> what the real template writes for each call `c`; `a` are its arguments as JSON text.
FORMS: dict[str, str] = {
    "hermes": '\n<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ a }}}\n</tool_call>',
    "llama3.1": '{"name": "{{ c.name }}", "parameters": {{ a }}}',
    "mistral3": "{{ '[TOOL_CALLS] [' if loop.first else ', ' }}"
    '{"name": "{{ c.name }}", "arguments": {{ a }}, "id": "call00000"}{{ "]" if loop.last else "" }}',
    "mistral11": "[TOOL_CALLS]{{ c.name }}[CALL_ID]call00000[ARGS]{{ a }}",
    "mistral13": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ a }}",
    "deepseek3": _DEEPSEEK.replace("NEXT", "\n").replace(
        "FORM", "function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ a }}\n```"
    ),
    "deepseek3.1": _DEEPSEEK.replace("NEXT", "").replace("FORM", "{{ c.name }}<｜tool▁sep｜>{{ a }}"),
    "glm4.5": "\n<tool_call>{{ c.name }}{{ '\n' }}" + _ITEMS + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{{ '\n' }}{% endfor %}</tool_call>",
    "qwen3.5": _QWEN.replace("VALUE", "v if v is string else v | tojson"),
    "qwen3coder": _QWEN.replace("VALUE", "v | tojson if v is mapping or (v is sequence and v is not string) else v"),
    "harmony": " to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ a }}<|call|>",
}
OTHERS = {
    "pythonic": "[{{ c.name }}(" + _ITEMS + "{{ k }}={{ v | tojson }}, {% endfor %})]",
    "invoke": '<invoke name="{{ c.name }}">{{ a }}</invoke>',
    "fenced": '```json {"name": "{{ c.name }}", "arguments": {{ a }}} ```',
    "gemma4": "<|tool_call>call:{{ c.name }}{{ a }}<tool_call|>",
}
ONE_A_TURN = ("llama3.1", "harmony")


@cache
def make(form: str, name: str = "") -> Any:
    """Return a tokenizer whose template writes calls in a form. DeepSeek 3's copies arguments, which are JSON text."""
    arguments = "'' + c.arguments" if name == "deepseek3" else "c.arguments | tojson"
    only = "{{ raise_exception('one') if m.tool_calls | length > 1 else '' }}" if name in ONE_A_TURN else ""
    call = f"{only}{{% set c = t.function %}}{{% set a = {arguments} %}}{form}"
    return tokenizer(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
        "<|header|>{{ m.role }}<|end|>{{ '\n\n' }}{{ m.content }}"
        f"{{% for t in m.tool_calls or [] %}}{call}{{% endfor %}}{END}{{% endfor %}}"
        "{% if add_generation_prompt %}<|header|>assistant<|end|>{{ '\n\n' }}{% endif %}"
    )


# A character stands next to a tag that would end a value in front of another one, or begin the next one.
MARKS = (
    *("<think>", "</think><b>", "<tool_call>", "</tool_call>", "<function=x>", "</function>", "</parameter>'", "\n"),
    *("'<parameter=x>", "[TOOL_CALLS]", "<|call|>", _END_OF_ONE, "\n```", "<arg_key>", "</arg_value>'", '"', "}"),
    "[ARGS]{",
)
TEXTS = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=5)), max_size=5).map("".join)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=6)
NAMES = st.from_regex(r"[a-z_]\w{0,9}", fullmatch=True)
CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=25, deadline=None)
@example([ToolCall("f", {"query": "what does </think> mean", "code": 'print("</parameter>")\n'}), ToolCall("g", {})])
@given(CALLS)
def test_calls_that_a_template_writes_come_back(name: str, calls: list[ToolCall]) -> None:
    """Fails if a tool gets another argument than the student wrote, or one of several calls is not made."""
    calls = calls[:1] if name in ONE_A_TURN else calls
    written = [json.dumps(call.arguments) if name == "deepseek3" else call.arguments for call in calls]
    functions = [{"function": {"name": call.name, "arguments": a}} for call, a in zip(calls, written, strict=True)]
    message = {"role": "assistant", "content": "", "tool_calls": functions}
    turn = make(FORMS[name], name).apply_chat_template([message], tokenize=False)[len(HEAD) : -len(END)]
    thoughts = ["<think>a <tool_call></think>\n", f"{OTHER} <tool_call>?</think>\n\n"]
    if name == "harmony":
        thoughts = ["<|channel|>analysis<|message|>a <tool_call><|end|><|start|>assistant"]
    for before in ("", *thoughts):
        found = [one for one in parse_calls(before + turn, [call.name for call in calls]) if isinstance(one, ToolCall)]
        assert [(one.name, [*one.arguments]) for one in found] == [(call.name, [*call.arguments]) for call in calls]
        for one, call in zip(found, calls, strict=True):
            for key, value in call.arguments.items():
                assert value_of(one.arguments[key], type(value), one.is_text) == value


def function(value: str) -> str:
    return f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n"


ONE, OTHER = '{"name": "add", "arguments": {"a": 1}}', CALL.format("sub", "{}")
ADD, NOW = ToolCall("add", {"a": 1}), ToolCall("now", {})
GOOD: dict[str, list[ToolCall]] = {
    "The answer is 4.": [],
    'I add.\n<tool_call>\n{"arguments": "{\\"a\\": 1}", "name": "add"}\n</tool_call>': [ADD],
    '<tool_call>{"name": "add", "parameters": {"a": 1}}': [ADD],
    '<tool_call>{"name": "now"}</tool_call>': [NOW],
    '<function=add>{"a": 1}</function>': [ADD],
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>x\n\ny</parameter>\n</function>\n</tool_call>"
    "<function=now></function>": [ToolCall("add", {"a": "1", "b": "x\n\ny"}, True), ToolCall("now", {}, True)],
    # Several calls in one block
    f"<tool_call>{ONE}\n{ONE}</tool_call>": [ADD, ADD],
    f"<tool_call>[{ONE}, {ONE}]</tool_call>": [ADD, ADD],
    f"<tool_call>{function('1')}{function('2')}</tool_call>": [ToolCall("f", {"a": a}, True) for a in "12"],
    '<|python_tag|>{"name": "now"}; {"name": "now"}': [NOW, NOW],
    # Thoughts
    f"<think>{OTHER}</think><tool_call>{ONE}": [ADD],
    f"<think>{OTHER}": [],
    f"{OTHER}</think><tool_call>{ONE}</tool_call> What does </think> mean?": [ADD],
    f"Use <function=f><parameter=a>.</think>\n\n<tool_call>{function('1')}": [ToolCall("f", {"a": "1"}, True)],
    f"Use <function=f><parameter=a>.</think>\n\nI add.\n<tool_call>{function('1')}": [ToolCall("f", {"a": "1"}, True)],
    "Should I use <tool_call>? No.</think>It is 4.": [],
    f"<|channel|>analysis<|message|>{OTHER}<|end|><|start|>assistant<|channel|>final<|message|>4": [],
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}': [ADD],
    # JSON alone
    f'[{{"name": "add", "arguments": {{"a": 1}}}}, {ONE}]': [ADD, ADD],
    f"I add.\n{ONE}": [],
    # Answers
    **dict.fromkeys(('{"name": "Bob", "parameters": {"x": 1}}', '{"name": "add", "sum": 3}', "[1, 2]", "{"), []),
    **{mark * 10_000: [] for mark in ("<think>", "</think>", "</parameter>\n\n", f"x\n{ONE}")},
}
BAD = (
    *("", "{", "[]", "3", '{"name": 3}', '{"name": "f"', "[" * 99999, f"{ONE} so"),
    *("add 1", "<function=add>a=1</function>"),
    *('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": "1"}'),
    *('{"name": "add", "arguments": {"a": "</think>"', function("1\n</parameter>\n<parameter=a>\n2")),
    function("x</parameter></function></tool_call> y"),
    *(function(f"1\n<parameter=b>\n{value}") for value in ("2", "2\n</parameter>\n<parameter=c>\n3")),
    "f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value>",
)
MARKED = (
    *(
        f"{mark}add(1)"
        for mark in (_BEGIN, "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call_start|>", " to=functions.f ")
    ),
    *('{"name": "add", "parameters": {"a": 1}', f"{ONE} is what I call"),
    *(mark * 10_000 for mark in ("<tool_call>", "<function=f><parameter=a>", "[TOOL_CALLS]", _BEGIN, '<tool_call>["')),
    *(mark * 10_000 for mark in ("<tool_call></tool_call>", OTHER)),
)
ERRORS = [*MARKED, *(f"<tool_call>{text}</tool_call>" for text in BAD)]


@pytest.mark.parametrize("text", [*GOOD, *ERRORS], ids=lambda text: text[:20])
def test_calls_are_found_in_text(text: str) -> None:
    """Fails if a call is overlooked, which ends the trajectory, has other arguments, or takes minutes to read."""
    found = parse_calls(text, ["add"])
    assert found == GOOD[text] if text in GOOD else [type(call) for call in found] == [CallError]


class Fenced(ToolEnvironment):
    @staticmethod
    def parse(text: str, names: Any) -> list[ToolCall | CallError]:
        return parse_calls(text.replace("```json", "<tool_call>").replace("```", "</tool_call>"), names)


def test_a_template_whose_calls_are_not_read_is_refused() -> None:
    """Fails if a run starts in which no tool is ever called, or one is refused whose calls are read."""

    class Own(Tools):
        pass

    for name, form in FORMS.items():
        made = written_calls(make(form, name), {})
        assert made, name
        Own.learn_form(made)
    Fenced.learn_form(written_calls(make(OTHERS["fenced"]), {}))
    for form in OTHERS.values():
        with pytest.raises(EnvironmentError):
            Own.learn_form(written_calls(make(form), {}))
    with pytest.raises(EnvironmentError):
        type("Wrong", (Tools,), {"parse": len}).learn_form(written_calls(make(FORMS["hermes"]), {}))
    assert written_calls(tokenizer("{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"), {}) == ()
    config = load_config(None, ["rollout.environment=examples.tools.calculator:Calculator"])
    assert [tool["function"]["name"] for tool in environment_tools(config, make(FORMS["glm4.5"]))] == ["calculate"]
    with refuses("rollout.environment") as caught:
        environment_tools(config, make(OTHERS["pythonic"]))
    assert "[find_item(" in str(caught.value) and "Llama 3.1" in str(caught.value) and "parse" in caught.value.fix


def test_json_alone_is_a_call_where_the_template_writes_it() -> None:
    """Fails if a student of Llama's form reads no error of a wrong name, or the JSON of an answer becomes a call."""

    class Llama(ToolEnvironment):
        functions = (add,)

    turns = ['I add.\n{"name": "add", "parameters": {"a": 1}}', '{"name": "sum", "parameters": {"a": 1}}', '{"sum": 2}']
    assert play(Llama, [turns[0][7:], *turns])[0] == [["2"], None, None, None]
    Llama.learn_form(written_calls(make(FORMS["llama3.1"], "llama3.1"), {}))
    made, wrong, answered = play(Llama, turns)[0]
    assert made == ["2"] and wrong[0].startswith("Error: ") and answered is None

    class Fence(Llama):
        pass

    Fence.learn_form(written_calls(make('\n```json\n{"name": "{{ c.name }}", "arguments": {{ a }}}\n```'), {}))
    assert play(Fence, [f"I add.\n```json\n{ONE}\n```\n```json\n{ONE}\n```"])[0] == [["2", "2"]]
