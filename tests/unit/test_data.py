"""Prompt files: loading, truncation, chat templates, and errors that name key and line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gkd import main_gkd
from gkd.config.schema_sections import DataConfig
from gkd.data.prompts import RowReader, load_prompts, load_tokenizer
from gkd.errors import ConfigError
from tests.refusals import refuses
from tests.unit import chat_templates as byte_level
from tests.vision_models import picture, save_vision_model


@pytest.fixture
def tokenizer() -> Any:
    """Return a small real tokenizer with one token per character."""
    vocab = {c: i for i, c in enumerate("abcdefghij <>")}
    inner = Tokenizer(models.WordLevel(vocab | {"?": 13}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", eos_token=">")


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(
    files: list[str], tokenizer: Any, response_ends: Sequence[int] | None = None, **kwargs: Any
) -> tuple[list[Any], int]:
    return load_prompts(
        files, "data.train_files", RowReader(DataConfig(**kwargs), tokenizer, response_ends=response_ends)
    )


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path: Path, tokenizer: Any) -> None:
    """Fails if the file format changes the prompts."""
    rows = [{"prompt": "abc", "answer": "x"}, {"prompt": "de"}]
    table = pa.Table.from_pylist([{"prompt": "abc", "answer": "x"}, {"prompt": "de", "answer": None}])
    pq.write_table(table, tmp_path / "p.parquet")
    one, _ = load([jsonl(tmp_path / "p.jsonl", rows)], tokenizer)
    two, _ = load([str(tmp_path / "p.parquet")], tokenizer)
    as_tuples = [[(p.prompt_id, p.token_ids.tolist(), p.answer) for p in prompts] for prompts in (one, two)]
    assert as_tuples[0] == as_tuples[1] == [(0, [0, 1, 2], "x"), (1, [3, 4], None)]


def test_the_mistakes_of_several_rows_are_in_one_error(tmp_path: Path, tokenizer: Any) -> None:
    """Fails if a user has to start again for each wrong row, or if a file of wrong rows is read to its end."""
    rows = [{"prompt": "a"}, {"prompt": None}, {"prompt": "b"}, {"prompt": []}, {"prompt": [{"role": "bot"}]}]
    file = Path(jsonl(tmp_path / "p.jsonl", rows))
    file.write_text(file.read_text() + "{not JSON\n")
    with pytest.raises(ConfigError) as caught:
        load([str(file)], tokenizer)
    first, role, not_json = caught.value.parts()
    assert f"{file}:2" in first.problem and first.fix.endswith(f"Also in {file}:4.")
    assert f"{file}:5" in role.problem and not_json.value == f"{file}:6"

    with pytest.raises(ConfigError, match=":10, and perhaps later rows.$") as caught:
        load([jsonl(tmp_path / "q.jsonl", [{"text": "a"}] * 50)], tokenizer)
    assert len(caught.value.parts()) == 1


@pytest.mark.parametrize(
    ("truncation", "expected", "dropped"),
    [("left", [[1, 2, 3], [4]], 0), ("right", [[0, 1, 2], [4]], 0), ("drop", [[4]], 1)],
)
def test_long_prompts_are_truncated_or_dropped_as_configured(
    tmp_path: Path, tokenizer: Any, truncation: str, expected: list[list[int]], dropped: int
) -> None:
    """Fails if prompts are truncated on the wrong side, or dropped without being counted."""
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "abcd"}, {"prompt": "e"}])
    prompts, n_dropped = load([file], tokenizer, max_prompt_length=3, truncation=truncation)
    assert [p.token_ids.tolist() for p in prompts] == expected
    assert n_dropped == dropped
    assert prompts[-1].prompt_id == 1, "prompt_id must be the row number"


def test_a_long_prompt_is_an_error_by_default(tmp_path: Path, tokenizer: Any) -> None:
    """Fails if prompts are truncated by default."""
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "abcd"}])
    with refuses("data.max_prompt_length") as caught:
        load([file], tokenizer, max_prompt_length=3)
    assert "p.jsonl:2" in str(caught.value) and " 4 " in str(caught.value)


def test_invalid_files_are_refused_with_their_key(tmp_path: Path, tokenizer: Any) -> None:
    """Fails if a wrong path, encoding or column raises an unspecific error, or is accepted."""
    empty = jsonl(tmp_path / "empty.jsonl", [])
    text = tmp_path / "p.txt"
    text.write_text("abc")
    broken = tmp_path / "b.parquet"
    broken.write_text("abc")
    not_utf8 = tmp_path / "u.jsonl"
    not_utf8.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    for file in ("absent.jsonl", empty, str(text), str(broken), str(not_utf8)):
        with pytest.raises(ConfigError, match=Path(file).name) as caught:
            load([file], tokenizer)
        assert caught.value.key == "data.train_files"
    with refuses("data.prompt_key"):
        load([jsonl(tmp_path / "k.jsonl", [{"question": "a"}])], tokenizer)
    everything_too_long = jsonl(tmp_path / "l.jsonl", [{"prompt": "abcd"}])
    with pytest.raises(ConfigError, match="1 rows"):
        load([everything_too_long], tokenizer, max_prompt_length=2, truncation="drop")


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[1]", '{"prompt": 3}', '{"prompt": ""}', '{"prompt": [{"role": "user"}]}'),
        *('{"prompt": "a", "prompt": "b"}', '{"prompt": [{"role": "user", "content": "a", "content": "b"}]}'),
        '{"prompt": "a", "n": 1' + "0" * 5000 + "}",
    ],
)
def test_invalid_rows_are_refused_with_their_line(tmp_path: Path, tokenizer: Any, line: str) -> None:
    """Fails if a malformed row is used, skipped silently, or refused without its line number."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "ab"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl:2"):
        load([str(file)], tokenizer)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_part_of_the_prompt_in_another_column_is_refused(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    """Fails if Alpaca's `input`, OpenOrca's `system_prompt`, images or tools are left out of the prompt silently."""

    def rows(**row: Any) -> str:
        if kind == "jsonl":
            return jsonl(tmp_path / "p.jsonl", [row])
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "p.parquet")
        return str(tmp_path / "p.parquet")

    for part in (
        {"system": "ab"},
        {"images": ["a.png"]},
        {"tools": '[{"type": "function"}]'},
        {"history": ["a"]},
        {"system_prompt": "a"},
        {"functions": [{"name": "f"}]},
        {"documents": [{"text": "a"}]},
        {"audio": "a.wav"},
    ):
        with refuses("data.prompt_key"):
            load([rows(prompt="ab", **part)], tokenizer)
    for name in ("input", "context"):
        with refuses("data.prompt_key"):
            load([rows(instruction="ab", **{name: "cd"})], tokenizer, prompt_key="instruction")
    # Nothing is lost here: the part is empty, read, or no part of this prompt.
    empty: list[dict[str, Any]] = [{"system": ""}, {"images": None}, {"tools": "[]"}, {"documents": []}]
    for row in (*empty, {"input": "cd"}, {"context": "cd"}):
        load([rows(prompt="ab", **row)], tokenizer)
    load([rows(prompt="ab", system="cd")], tokenizer, answer_key="system")
    own = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}{% endfor %}>"
    load([rows(prompt=own, system="a", tools="[1]")], tokenizer)


def test_two_columns_of_one_name_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    """Fails if the prompts are those of the second column, without a word."""
    file, columns = tmp_path / "p.parquet", [pa.array(["ab"]), pa.array(["cd"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "prompt"]), file)
    with refuses("data.train_files"):
        load([str(file)], tokenizer)
    pq.write_table(pa.Table.from_arrays([*columns, columns[0]], names=["prompt", "x", "x"]), file)
    assert load([str(file)], tokenizer)[0][0].token_ids.tolist() == [0, 1]


def test_the_chat_template_is_applied_if_the_tokenizer_has_one(tmp_path: Path, tokenizer: Any) -> None:
    """Fails if a chat model gets prompts without its template, or data.chat_template has no effect."""
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "ab"}])
    messages = jsonl(tmp_path / "m.jsonl", [{"prompt": [{"role": "user", "content": "ab"}]}])
    for source, setting in ((file, "always"), (messages, "auto"), (messages, "never")):
        with refuses("data.chat_template", setting) as caught:
            load([source], tokenizer, chat_template=setting)
        assert "use auto" not in caught.value.fix or setting == "always", "auto cannot help without a template"
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    for source in (file, messages):
        assert load([source], tokenizer)[0][0].token_ids.tolist() == [11, 0, 1, 12]
    assert load([file], tokenizer, chat_template="never")[0][0].token_ids.tolist() == [0, 1]
    with refuses("data.chat_template") as caught:
        load([messages], tokenizer, chat_template="never")
    assert "auto" in caught.value.fix


def test_a_folder_without_tokenizer_names_the_key(tmp_path: Path) -> None:
    """Fails if a wrong model.path raises a hub error."""
    for path in (tmp_path / "absent", tmp_path):
        with refuses("model.path"):
            load_tokenizer(str(path), "model.path")


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    """Fails if a folder whose class has other rules than its file, as DeepSeek's distilled Llama, reads no spaces."""
    byte_level.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, is_right in (("LlamaTokenizerFast", False), ("PreTrainedTokenizerFast", True)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        if is_right:
            assert "b  c" in (made := load_tokenizer(str(tmp_path), "k")).decode(made("b  c")["input_ids"])
        else:
            with refuses("model.path"):
                load_tokenizer(str(tmp_path), "model.path")


def test_a_dataset_response_has_the_form_of_a_rollout(tmp_path: Path, tokenizer: Any) -> None:
    """Fails if the end-of-sequence token is missing, doubled, or appended to a truncated response."""
    responses = ["ab", "abc", "abcd", "ab>", "abc>"]
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "text": text} for text in responses])
    prompts, _ = load([file], tokenizer, [5, 12], max_response_length=3, response_key="text")
    assert [p.response_ids.tolist() for p in prompts] == [[0, 1, 12], [0, 1, 2], [0, 1, 2], [0, 1, 12], [0, 1, 2]]
    assert {p.response_ids.dtype.name for p in prompts} == {"int32"}


def test_a_dataset_response_gets_no_special_token_except_eos(tmp_path: Path) -> None:
    """Fails if a begin-of-sequence token is inserted between prompt and response."""
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3, "?": 4}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "response": "ab"}])
    with_begin = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    (prompt,) = load([file], with_begin, [1, 3, 9])[0]
    assert prompt.token_ids.tolist() == [2, 0]
    assert prompt.response_ids.tolist() == [0, 1], "b is an end token here"
    (prompt,) = load([file], with_begin, [3, 9])[0]
    assert prompt.response_ids.tolist() == [0, 1, 3], "the tokenizer's eos has priority"
    (prompt,) = load([file], PreTrainedTokenizerFast(tokenizer_object=inner), [9])[0]
    assert prompt.response_ids.tolist() == [0, 1, 9]


@pytest.mark.parametrize(
    "rest", ["", ', "response": null', ', "response": ""', ', "response": ["a"]', ', "response": "a>b"']
)
def test_a_row_without_a_usable_response_is_refused_with_its_line(tmp_path: Path, tokenizer: Any, rest: str) -> None:
    """Fails if a row without a usable response is accepted or skipped."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "ab", "response": "c"}\n{"prompt": "ab"' + rest + "}\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl:2") as caught:
        load([str(file)], tokenizer, [12])
    assert caught.value.key == "data.response_key"


def test_a_response_without_tokens_is_refused(tmp_path: Path) -> None:
    """Fails if an empty response is sent to the teacher."""
    inner = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "response": " "}])
    with pytest.raises(ConfigError, match=r"p\.jsonl:1") as caught:
        load([file], PreTrainedTokenizerFast(tokenizer_object=inner), [1])
    assert caught.value.key == "data.response_key"


def test_large_files_are_read_by_row_and_by_column(tmp_path: Path) -> None:
    """Fails if a byte order mark, line ends inside of texts, or unread columns change the prompts."""
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n{"prompt": "c"}')
    plain = byte_level.tokenizer()
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
    chatml = byte_level.tokenizer(byte_level.FAMILIES["chatml"])
    chatml.save_pretrained(tmp_path / "model")
    value = [{"from": "human", "value": "What is 2+2?"}, {"from": "gpt", "value": "Four."}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"chat": value}) + "\n" + json.dumps({"chat": "b"}) + "\n")
    (tmp_path / "c.yaml").write_text("teacher: {prompt_template: '{prompt} Be brief.'}\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--show-prompts", "1"]
    words += [f"model.path={tmp_path / 'model'}", f"data.train_files=[{tmp_path / 'p.jsonl'}]"]
    words += ["data.prompt_key=chat", "data.response_key=", "distill.on_policy_share=0.5"]
    children = psutil.Process().children()
    assert main_gkd.main(words) == 0 and psutil.Process().children() == children
    out = capsys.readouterr().out
    rendered = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered in out and rendered.replace("2+2?", "2+2? Be brief.") in out
    assert "Four.</s>" in out and "ShareGPT" in out and str(chatml.encode("W")[0]) in out
    stop = chatml.convert_tokens_to_ids("<|im_end|>")
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
