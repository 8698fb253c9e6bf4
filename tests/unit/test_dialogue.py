"""Conversations and responses of a dataset: which tokens are prompt, own and read, and that they are the template's."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from gkd.config.schema_sections import DataConfig
from gkd.data.batching import make_micro_batches
from gkd.data.chunks import dataset_rollouts
from gkd.data.prompts import RowReader, load_prompts
from gkd.errors import ConfigError
from gkd.types import Prompt
from tests.refusals import refuses
from tests.unit import chat_templates
from tests.unit.turn_templates import FAMILIES, end_ids, tokenizer

Message = dict[str, Any]
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6"},
]


def load(
    folder: Path, messages: Any, family: str = "smollm2", columns: dict[str, Any] | None = None, **settings: Any
) -> tuple[Prompt, Any]:
    """Return the prompt of a file with one conversation, and the tokenizer."""
    file = folder / "d.jsonl"
    file.write_text(json.dumps({"messages": messages, **(columns or {})}) + "\n")
    made = tokenizer(FAMILIES[family])
    config = DataConfig(messages_key="messages", **settings)
    ends = end_ids(FAMILIES[family], made)
    (prompt,), _ = load_prompts([str(file)], "data.train_files", RowReader(config, made, response_ends=ends))
    return prompt, made


def test_the_tokens_are_those_of_the_template_and_the_assistants_are_own(tmp_path: Path) -> None:
    """Fails if a conversation is tokenized in another form than the template's, or a tool's text is learned."""
    prompt, made = load(tmp_path, LONG)
    text = made.apply_chat_template(LONG, tokenize=False)
    whole = made(text, add_special_tokens=False)["input_ids"]
    ids = [*prompt.token_ids.tolist(), *prompt.response_ids.tolist()]
    assert ids == whole[: len(ids)] and not made.decode(whole[len(ids) :]).strip()
    turns = [made.decode(part) for part in np.split(prompt.response_ids, np.flatnonzero(np.diff(prompt.own)) + 1)]
    assert turns[::2] == [f"{m['content']}{made.eos_token}" for m in LONG if m["role"] == "assistant"]
    assert "4" in turns[1] and "And 3 + 3?" in turns[3]


@pytest.mark.parametrize(
    "key",
    [
        *("weight", "loss", "train", "training", "loss_mask", "sft_weight", "train_on_turn", "calculate_loss"),
        *("step_loss_mask", "loss_scale", "isTrainable", "not masked", "not is_masked", "not exclude_from_training"),
    ],
)
def test_turns_that_a_row_excludes_are_read_and_not_learned(key: str, tmp_path: Path) -> None:
    """Fails if a turn with `weight: 0`, or such a key of another framework, is trained on, or changes other tokens."""
    plain, _ = load(tmp_path, LONG)
    inverted, key = key.startswith("not "), key.removeprefix("not ")

    def flagged(learned: Callable[[int], bool]) -> list[Message]:
        return [{**m, key: (m["role"] == "assistant" and learned(i)) != inverted} for i, m in enumerate(LONG)]

    middle, made = load(tmp_path, flagged(lambda i: i != 4))
    assert np.array_equal(middle.response_ids, plain.response_ids)
    excluded = made.decode(plain.response_ids[plain.own & ~middle.own])
    assert excluded == f"It is 4.{made.eos_token}" and not (middle.own & ~plain.own).any()
    first, _ = load(tmp_path, flagged(lambda i: i > 2))
    assert first.own.sum() == plain.own.sum() - int((~plain.own).argmax())
    whole = [*plain.token_ids.tolist(), *plain.response_ids.tolist()]
    assert [*first.token_ids.tolist(), *(first.response_ids if first.response_ids is not None else ())] == whole


def test_a_conversation_becomes_loss_rows_of_own_tokens(tmp_path: Path) -> None:
    """Fails if a dataset's trajectory reaches the loss without its mask."""
    prompt, made = load(tmp_path, LONG)
    (rollout,) = dataset_rollouts([prompt], [made.eos_token_id])
    assert rollout.finish_reason == "stop" and rollout.n_turns == 3 and not rollout.on_policy
    (batch,) = make_micro_batches([rollout], None, micro_batch_size=1)
    predicted = batch.tokens.flatten()[batch.loss_index + 1].tolist()
    assert predicted == prompt.response_ids[prompt.own].tolist() and batch.n_loss_tokens == rollout.n_own


def test_keys_that_the_template_does_not_have_change_nothing(tmp_path: Path) -> None:
    """Fails if conversations with the time or an id of each message are refused, or keys that are written are lost."""
    marked = [{**message, "timestamp": "2024-05-01", "toxic": False, "language": None} for message in LONG]
    plain, found = (load(tmp_path, messages)[0] for messages in (LONG, marked))
    assert np.array_equal(plain.response_ids, found.response_ids) and np.array_equal(plain.own, found.own)
    template = chat_templates.FAMILIES["chatml"].replace("m.content", "(m.name or '') + m.content")
    reader = reader_of("small chatml", template, messages_key="m")
    timed, named = ({"m": [*LONG[1:3], {**LONG[5], key: "x"}, LONG[6]]} for key in ("time", "name"))
    assert len(learned(timed, reader, chat("small chatml")[0])) == 2
    with refuses("data.messages_key", "m"):
        learned(named, reader, None)


@pytest.mark.parametrize("limit", [1, 9, 24, 40])
def test_a_long_conversation_ends_with_an_own_token(limit: int, tmp_path: Path) -> None:
    """Fails if a cut conversation ends with text of others, or exceeds the limit."""
    whole, _ = load(tmp_path, LONG)
    prompt, made = load(tmp_path, LONG, max_response_length=limit)
    n = len(prompt.response_ids)
    assert 0 < n <= limit and prompt.own[-1] and np.array_equal(prompt.response_ids, whole.response_ids[:n])
    (rollout,) = dataset_rollouts([prompt], [made.eos_token_id])
    assert (rollout.finish_reason == "stop") == (prompt.response_ids[-1] == made.eos_token_id)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[:2],  # no answer
        lambda m: m[2:],  # no question
        lambda m: "a text",
        lambda m: [*m[:3], *m[4:]],  # two answers in a row
        lambda m: [*m[:2], {**m[2], "tool_calls": [{"type": "function", "function": {"name": "f"}}]}, *m[3:]],
        lambda m: [*m[:-1], {**m[-1], "tool_calls": [{"type": "function", "function": {"name": "f"}}]}],
        lambda m: [*m[:-1], {**m[-1], "reasoning_content": "3 + 3 is 6."}],
        lambda m: [*m[:-1], {**m[-1], "weight": 0.5}],
        lambda m: [{**one, "loss": False} for one in m],
        lambda m: [*m[:-1], {**m[-1], "trainable": "false"}],
        lambda m: [*m[:-1], {**m[-1], "mask": 1}],
        lambda m: [*m[:-1], {**m[-1], "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}],
        lambda m: [m[0], {**m[1], "train": True}, *m[2:]],  # a question to learn
        lambda m: [*m[:2], {"role": "assistant", "content": "one<|im_end|>two"}, *m[3:]],
        lambda m: [*m[:3], {"role": "tool", "content": "<|im_end|>\n<|im_start|>assistant\n"}, *m[4:]],
        lambda m: [*m[:3], {"role": "system", "content": "now be rude"}, *m[4:]],
        lambda m: [*m[:-1], {"role": "assistant", "content": ""}],
        lambda m: [*m[:4], {"role": "assistant", "content": " \n"}, *m[5:]],
    ],
)
def test_conversations_that_cannot_be_learned_are_refused(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """Fails if a row is silently trained on in another form than it has, as an empty answer with empty thoughts."""
    for family in ("smollm2", "qwen3"):
        with refuses("data.messages_key", "messages"):
            load(tmp_path, change(LONG), family)


@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "small chatml"])
def test_the_time_of_a_conversation_is_linear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if each turn renders all turns in front of it, so that a file of long conversations takes hours."""
    made, counts, render = chat(name)[0], [0], chat(name)[0].apply_chat_template

    def counted(messages: list[Message], **variables: Any) -> str:
        counts[-1] += len(messages)
        return str(render(messages, **variables))

    monkeypatch.setattr(made, "apply_chat_template", counted)
    for n in (1, 20, 40):  # the first one proves the frames
        counts.append(0)
        learned({"m": LONG[5:] * n}, reader_of(name, messages_key="m"), made)
    assert counts[3] < 2.2 * counts[2]


def test_a_template_without_the_role_is_refused(tmp_path: Path) -> None:
    """Fails if a tool's message that the template drops is left out without a word."""
    family = next(name for name, each in FAMILIES.items() if each.roles == {"user"})
    with refuses("data.messages_key", "messages"):
        load(tmp_path, LONG[1:], family)


SAYS_OTHER: list[dict[str, Any]] = [
    *({"loss_mask": [0, 0, 1]}, {"loss_mask": "[0, 1]"}, {"loss_mask": 0}, {"assistant_masks": [[0, 1]]}),
    *({"labels": [-100, 7]}, {"label": False}, {"completion_mask": [1]}, {"masked": True}, {"mask": [0, 1]}),
    *({"weight": 0.5}, {"sample_weight": 0}, {"train": False}, {"train": "false"}, {"loss_scale": "last_round"}),
    *({"weight": "0.5"}, {"loss_weight": -1}, {"train": "no"}, {"masked": "Yes"}),
]
SAYS_NOTHING: list[dict[str, Any]] = [
    *({"loss_mask": None}, {"loss_mask": []}, {"loss_mask": 1}, {"masked": False}, {"train": True}, {"weight": 1.0}),
    *({"weight": "70 kg"}, {"label": 0}, {"label": "good"}, {"labels": ["a"]}, {"loss": 0.7}, {"split": "train"}),
    *({"attention_mask": [1, 1]}, {"mask": "a.png"}, {"training_step": 0}, {"learning_rate": 0.1}),
    *({"train": "yes"}, {"used_in_training": "no"}, {"weight": "1.0"}),
]


@pytest.mark.parametrize("column", SAYS_OTHER)
def test_a_column_that_says_what_is_learned_is_refused(column: dict[str, Any], tmp_path: Path) -> None:
    """Fails if a row's mask, weight or label is ignored, in a file of either kind; or stops a run without responses."""
    with refuses("data.messages_key"):
        load(tmp_path, LONG, columns=column)
    file, made = tmp_path / "p.parquet", tokenizer(FAMILIES["smollm2"])
    pq.write_table(pa.Table.from_pylist([{"prompt": "Q", "response": "4", **column}]), file)
    with refuses("data.prompt_key"):
        load_prompts([str(file)], "data.train_files", RowReader(DataConfig(), made, response_ends=[1]))
    load_prompts([str(file)], "data.train_files", RowReader(DataConfig(), made))


@pytest.mark.parametrize("column", SAYS_NOTHING)
def test_a_column_that_says_nothing_else_is_accepted(column: dict[str, Any], tmp_path: Path) -> None:
    """Fails if a plain column of a dataset, or a mask that excludes nothing, stops a run."""
    assert load(tmp_path, LONG, columns=column)[0].own is not None


# End token of each family of `chat_templates`, by the beginning of its name.
_ENDS = {"inst_": "</s>", "inst": "</s>", "angle_eos": "</s>", "chatml": "<|im_end|>", "named": "<|im_end|>"}
_ENDS |= {"headers": "<|eot|>", "turns": "</turn>", "angle": "<|end|>", "channels": "<|end|>"}
_SMALL = chat_templates.FAMILIES | chat_templates.TOOLS
# Templates that move the system's text, drop thoughts or refuse plain answers behind thoughts: the text is not theirs.
_LATE, _DROP, _REFUSE = ("inst_late_system", "mistral"), ("chatml_thoughts", "deepseek"), ("nemotron",)
_WITHOUT_SYSTEM = ("turns", "gemma", "phi3")
_ONE_TURN = ("inst_late_system", "mistral")  # their second question is written otherwise
_CANNOT_CONTINUE = ("instruction", "names_one_line", "plain", "glm4", "gpt_oss", "small names")
_TEXT = st.text("abX 0.<>|[]\n\té漢", min_size=1, max_size=9).map(lambda text: text.strip() or "x")


@cache
def chat(name: str) -> tuple[Any, list[int]]:
    """Return a tokenizer of a family of either file, and its end tokens."""
    if name in FAMILIES:
        made = tokenizer(FAMILIES[name])
        return made, end_ids(FAMILIES[name], made)
    small = name.removeprefix("small ")
    made = chat_templates.tokenizer(_SMALL[small])
    end = next((end for begin, end in _ENDS.items() if small.startswith(begin)), "</s>")
    return made, [made.convert_tokens_to_ids(end)]


@cache
def reader_of(name: str, template: str = "", **data: str) -> RowReader:
    made, ends = chat(name)
    made = chat_templates.tokenizer(template) if template else made
    variables = FAMILIES[name].variables if name in FAMILIES else {}
    return RowReader(DataConfig(chat_template_kwargs=dict(variables), **data), made, response_ends=ends)


def learned(row: dict[str, Any], reader: RowReader, made: Any) -> list[str]:
    """Return the texts that are learned of a row."""
    ids, own = reader.response(reader.read(row, "f:1"), row, "f:1")
    assert ids is not None
    parts = [ids] if own is None else np.split(ids, np.flatnonzero(np.diff(own)) + 1)[::2]
    return [made.decode(part) for part in parts]


QUESTION = {"role": "user", "content": "What is 2+2?"}
ANSWER = [{"role": "assistant", "content": "4"}]


def test_the_last_assistant_message_is_the_response_if_the_key_is_empty() -> None:
    """Fails if TRL's data (`messages` with the answer) trains on the answer as part of the prompt, or loses it."""
    made = chat("small chatml")[0]
    row = {"prompt": [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "Four."}]}]}
    with refuses("data.prompt_key") as caught:
        reader_of("small chatml").read(row, "f:1")
    assert "f:1" in caught.value.problem and 'response_key=""' in caught.value.fix
    reader = reader_of("small chatml", response_key="")
    assert made.decode(reader.read(row, "f:1").prompt.ids).endswith("2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert learned(row, reader, made) == ["Four.<|im_end|>"]
    on_policy = RowReader(DataConfig(response_key=""), made)
    assert on_policy.response(on_policy.read(row, "f:1"), row, "f:1")[0] is None, "it needs no response"
    for completion in (ANSWER, json.dumps(ANSWER)):
        row = {"prompt": [QUESTION], "completion": completion}
        assert learned(row, reader_of("small chatml", response_key="completion"), made) == ["4<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        *(
            ({"prompt": [QUESTION, ANSWER[0] | wrong]}, "")
            for wrong in (
                {"weight": 0},
                {"reasoning_content": "2 + 2"},
                {"tool_calls": [{"function": {"name": "add"}}]},
            )
        ),
        ({"prompt": [QUESTION]}, ""),
        ({"prompt": "Q", "response": json.dumps([QUESTION, *ANSWER])}, "response"),
        ({"prompt": "Q", "response": "\ud800"}, "response"),
    ],
)
def test_a_row_without_one_response_is_refused(row: dict[str, Any], key: str) -> None:
    """Fails if the student learns a part of an answer, or a row's JSON."""
    with refuses("data.response_key", text="f:1"):
        learned(row, reader_of("small chatml", response_key=key), None)


@pytest.mark.parametrize("key", ["data.response_key", "data.messages_key"])
def test_a_response_does_not_begin_twice(key: str) -> None:
    """Fails if the student learns <think> behind the <think> of its prompt, or a header of a turn inside of one."""
    data = {"messages_key": "m"} if key == "data.messages_key" else {}

    def row_of(text: str) -> dict[str, Any]:
        return {"prompt": "Q", "response": text, "m": [QUESTION, {"role": "assistant", "content": text}]}

    for family, answer in (("chatml_thoughts", "<think>\nx\n</think>\n4"), ("chatml", "<|im_start|>assistant\n4")):
        with refuses(key):
            learned(row_of(answer), reader_of(f"small {family}", **data), None)
    config = DataConfig(chat_template_kwargs={"enable_thinking": False}, **data)
    ended = RowReader(config, chat("small chatml_no_thinking")[0], response_ends=[1])
    with refuses(key):  # the template has ended the thoughts
        learned(row_of("<think>x</think>4"), ended, None)
    made = chat("small chatml")[0]
    plain = reader_of("small chatml", **data)
    assert learned(row_of("<think>x</think>4"), plain, made) == ["<think>x</think>4<|im_end|>"]
    never = reader_of("small chatml_thoughts", chat_template="never")
    assert learned({"prompt": "<think>", "response": "<think>"}, never, made) == ["<think></s>"]


def test_a_response_begins_behind_the_beginning_of_its_turn() -> None:
    """Fails if the student learns a space in front of an answer, which tokenizers such as Llama 2's add to a text."""
    made = chat_templates.tokenizer(chat_templates.FAMILIES["chatml"])
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert made.decode(made("4")["input_ids"]) == " 4"
    cases: list[tuple[Any, dict[str, str], str]] = [
        ("Q", {}, "4<|im_end|>"),
        ([QUESTION, *ANSWER], {"messages_key": "prompt"}, "4<|im_end|>"),
        ("Q", {"chat_template": "never"}, " 4</s>"),
    ]
    for prompt, data, expected in cases:
        reader = RowReader(DataConfig(**data), made, response_ends=chat("small chatml")[1])
        assert learned({"prompt": prompt, "response": "4"}, reader, made) == [expected]


def test_a_response_ends_as_the_template_ends_a_turn() -> None:
    """Fails if the dataset's responses end with another token than the model's turns, as <eos> of Gemma and Phi-3."""
    made = chat("small turns")[0]
    ends = made.convert_tokens_to_ids(["</s>", "</turn>", "<turn>"])
    reader = RowReader(DataConfig(), made, response_ends=ends)
    for prompt, response in (("Q", "4"), ("Q", "4</turn>"), ("<s><turn>user\nQ</turn>\n<turn>model\n", "4")):
        assert learned({"prompt": prompt, "response": response}, reader, made) == ["4</turn>"]
    # Without the template, or if the model does not end with its token, the tokenizer's own is the end.
    row = {"prompt": "Q", "response": "4"}
    never = RowReader(DataConfig(chat_template="never"), made, response_ends=ends)
    for reader in (never, RowReader(DataConfig(), made, response_ends=ends[:1])):
        assert learned(row, reader, made) == ["4</s>"]


@pytest.mark.parametrize("key", ["data.response_key", "data.messages_key"])
@pytest.mark.parametrize("name", [*(f"small {name}" for name in _SMALL), *FAMILIES])
@settings(max_examples=6)
@given(st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=3), st.booleans())
def test_learned_is_what_the_template_writes(name: str, key: str, texts: list[tuple[str, str]], system: bool) -> None:
    """Fails if an answer lacks what the template writes around its text, or has more, in either form of a dataset."""
    family, (made, ends) = name.removeprefix("small "), chat(name)
    system &= family not in _WITHOUT_SYSTEM
    is_whole = key == "data.messages_key"
    texts = texts[: 1 if is_whole and family in _ONE_TURN else None]
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
    for question, answer in texts:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    variables = FAMILIES[name].variables if name in FAMILIES else {}
    data = {"messages_key": "m"} if is_whole else {"prompt_key": "m", "response_key": ""}
    try:
        found = learned({"m": messages}, reader_of(name, **data), made)
    except ConfigError as error:
        several = is_whole and len(texts) > 1
        assert error.key == key and (family in _REFUSE or (several and {name, family} & {*_CANNOT_CONTINUE}))
        return
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, text in zip(places if is_whole else places[-1:], found, strict=True):
        prompt = made.apply_chat_template(messages[:i], add_generation_prompt=True, tokenize=False, **variables)
        whole = made.apply_chat_template(messages[: i + 1], tokenize=False, **variables)
        answer = messages[i]["content"]
        if family in _DROP or (family in _LATE and system):
            assert not whole.startswith(prompt) and text == answer + made.decode(ends[:1])
        else:
            assert whole.startswith(prompt)
            written = whole[len(prompt) :]
            ends_at = [(written.find(end), end) for end in made.batch_decode([[i] for i in ends]) if end in written]
            at, end = min(ends_at, default=(len(written.rstrip()), made.eos_token))
            assert text == written[:at] + end


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("small channels", "x", "<|message|>x<|end|>"),
        ("small channels", "<|message|>x<|end|>", "<|message|>x<|end|>"),  # has the form already
        ("gpt_oss", "x", "<|channel|>final<|message|>x<|return|>"),
        ("gpt_oss", "<|channel|>analysis<|message|>t", "<|channel|>analysis<|message|>t<|return|>"),
        ("small inst", " x ", " x </s>"),
        ("small inst", "x</s>", " x </s>"),
        ("small headers", " x\n", "x<|eot|>"),
        ("small chatml", " x\n", " x\n<|im_end|>"),
        ("qwen3", "x", "<think>\n\n</think>\n\nx<|im_end|>"),
        ("qwen3", "<think>\nt\n</think>\n\nx", "<think>\nt\n</think>\n\nx<|im_end|>"),
        ("qwen3", "t\n</think>\n\nx", "<think>\nt\n</think>\n\nx<|im_end|>"),
        ("qwen3", "<think>\nt", "<think>\nt<|im_end|>"),  # cut within the thoughts
        ("qwen3_no_think", "x", "x<|im_end|>"),
        ("qwen3_no_think", "t\n</think>\n\nx", None),
        ("qwen3.5", "x", "\n</think>\n\nx<|im_end|>"),
        ("qwen3.5", "t\n</think>\n\nx", "t\n</think>\n\nx<|im_end|>"),
        ("deepseek", "x", "x<|end_of_sentence|>"),
        ("deepseek", "t\n</think>\n\nx", "t\n</think>\n\nx<|end_of_sentence|>"),
        ("nemotron", "x", None),
        ("nemotron", "t\n</think>x", "t\n</think>x<|im_end|>"),
    ],
)
def test_forms_of_answers(name: str, answer: str, expected: str | None) -> None:
    """Fails if a channel, a space, or thoughts are lost, doubled, or learned behind thoughts that have ended."""
    row = {"prompt": "a", "response": answer}
    if expected is not None:
        assert learned(row, reader_of(name), chat(name)[0]) == [expected]
        return
    with refuses("data.response_key") as caught:
        learned(row, reader_of(name), chat(name)[0])
    assert "f:1" in caught.value.problem and caught.value.problem.count("<|im_start|>assistant") == 2, "both texts"


@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_that_a_template_drops_are_learned_once(thinking: bool) -> None:
    """Fails if an answer's thoughts are lost, or are learned behind those that the prompt has ended (DeepSeek-V3.1)."""
    end = "<think>" if thinking else "</think>"
    turn = "'<|assistant|></think>' + m.content.split('</think>')[-1] + '<|end|>'"
    made = chat_templates.tokenizer(
        "{% for m in messages %}{{ '<|user|>' + m.content if m.role == 'user' else " + turn + " }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>" + end + "' }}{% endif %}"
    )
    reader = RowReader(DataConfig(), made, response_ends=[made.convert_tokens_to_ids("<|end|>")])
    for answer, is_right in (("t</think>x", thinking), ("x", not thinking)):
        row = {"prompt": "a", "response": answer}
        if is_right:
            assert learned(row, reader, made) == [answer + "<|end|>"]
        else:
            with refuses("data.response_key"):
                learned(row, reader, made)


@pytest.mark.parametrize(
    ("name", "end", "answer", "expected"),
    [
        ("small channels", "<|start|>user<|message|>a<|end|><|start|>assistant", "x", "<|message|>x<|end|>"),
        ("small channels", "<|start|>user<|message|>a<|end|><|start|>assistant<|message|>So", " x", " x<|end|>"),
        ("small inst", "<s>[INST] a [/INST] ", "x", "x </s>"),
        ("qwen3", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n", "t\n</think>\n\nx", None),
        ("qwen3", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nSo", " x", " x<|im_end|>"),
        ("small chatml", "<|im_start|>user\na<|im_end|>\n<|im_start|>bot\n", "x", "x<|im_end|>"),
    ],
)
def test_an_answer_goes_on_from_a_rendered_prompt(name: str, end: str, answer: str, expected: str | None) -> None:
    """Fails if a response is written as behind the template's prompt, when the row's own has begun the answer."""
    assert learned({"prompt": end, "response": answer}, reader_of(name), chat(name)[0]) == [
        expected or f"{answer}<|im_end|>"
    ]


@pytest.mark.parametrize(
    "change",
    [
        ("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>bot\n' }}"),  # another name
        ("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant ' }}"),  # other white space
        ("for m in messages", "for m in messages if m.role != 'assistant'"),
        ("m.content", "(m.content | lower)"),
        ("{% for m", "{{ raise_exception('no') if messages[-1].role == 'assistant' }}{% for m"),
    ],
)
def test_an_answer_that_is_not_written_behind_its_prompt_is_refused(change: tuple[str, str]) -> None:
    """Fails if the student learns another text than its template's, in a form that no prompt leads to."""
    template = chat_templates.FAMILIES["chatml"].replace("'TAIL'", "'<|im_start|>assistant\n'")
    changed = template.replace(*change)
    assert changed != template
    turns = [LONG[1], {"role": "assistant", "content": "X"}]
    for row, data in (({"prompt": "a", "response": "X"}, {}), ({"m": turns}, {"messages_key": "m"})):
        with pytest.raises(ConfigError):
            learned(row, reader_of("small chatml", changed, **data), None)


def test_responses_that_never_end_their_thoughts_are_counted(gkd_log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Fails if the student learns to answer within its thoughts, and no line tells how often, or one tells falsely."""
    made, ends = chat("small chatml_thoughts")
    file = tmp_path / "p.jsonl"
    for texts, told in (
        (["x", "t</think>x", "y"], ["2 of 3", "<think>", "enable_thinking", "</think>"]),
        (["</think>x"], []),
    ):
        gkd_log.clear()
        file.write_text("".join(json.dumps({"prompt": "a", "response": text}) + "\n" for text in texts))
        load_prompts([str(file)], "data.train_files", RowReader(DataConfig(), made, response_ends=ends))
        warnings = [record.getMessage() for record in gkd_log.records if record.levelname == "WARNING"]
        assert len(warnings) == bool(told) and all(each in warnings[0] for each in told)
