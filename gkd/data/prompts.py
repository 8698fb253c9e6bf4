"""Load tokenizers and prompt files: rows of JSONL or parquet -> tokenized `Prompt`s.

This is the only module that tokenizes text. All later stages use token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gkd.config.schema import DataConfig, TeacherConfig
from gkd.console.activity import activities
from gkd.data.row_routes import RowRoutes
from gkd.data.rows import encode_row
from gkd.data.teacher_prompt import TeacherPrompts
from gkd.errors import ConfigError
from gkd.types import Prompt

_REPORT_ROWS = 256  # between reports of the progress


def load_tokenizer(path: str, key: str, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a local model folder; never accesses a hub.

    Args:
        key: config key of the folder, for errors.

    Raises:
        ConfigError: the folder is missing or has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise ConfigError(key, path, "no such folder.", "use a local folder in Hugging Face format.")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types of errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            key, path, f"cannot load its tokenizer ({reason}).", "check tokenizer.json and tokenizer_config.json."
        ) from error


def load_prompts(
    files: Sequence[str],
    config: DataConfig,
    tokenizer: Any,
    key: str,
    *,
    response_ends: Sequence[int] | None = None,
    teacher: TeacherConfig | None = None,
    keep_rows: bool = False,
) -> tuple[list[Prompt], int]:
    """Tokenize all rows of `files`; also return the number of rows dropped by `data.truncation: drop`.

    Args:
        key: config key of the files ("data.train_files" or "data.val_files"), for errors.
        response_ends: token ids that end a response, to load the dataset's responses, too; None = ignore
            `data.response_key`.
        teacher: its routes, one of which each row must name, and its prompt template; None: neither.
        keep_rows: keep all columns, for functions that judge responses.

    Raises:
        ConfigError: a file is missing, has another format or lacks `data.prompt_key`; a prompt or a requested response
            is unusable; a row names no route or lacks what the teacher's prompt needs; a prompt exceeds
            `data.max_prompt_length` with `truncation: error`, or the teacher's its own limit.
    """
    prompts: list[Prompt] = []
    dropped = 0
    setting = "data.prompt_key", config.prompt_key
    teacher = teacher or TeacherConfig()
    routes, views = RowRoutes(teacher, config.teacher_key), TeacherPrompts(config, teacher.prompt_template)
    rows = (found for file in files for found in _read_rows(file, key))
    with activities.during(f"tokenizing {key}, row"):
        for row_id, (where, row) in enumerate(rows):
            if row_id % _REPORT_ROWS == 0:
                activities.done(row_id)
            if config.prompt_key not in row:
                problem = f"{where} has only the columns {sorted(row)}."
                raise ConfigError(*setting, problem, "set it to the column of the prompts.")
            route = routes.of(row, where)
            ids = _fit(_encode(row[config.prompt_key], config, tokenizer, where, setting), config, where)
            view = views.of(row, where)
            teacher_ids = None if view is None else _encode(view, config, tokenizer, where, views.setting)
            if ids is None or not _teacher_fits(teacher_ids, config, where):
                dropped += 1
                continue
            answer = row.get(config.answer_key)
            prompts.append(
                Prompt(
                    row_id,
                    np.asarray(ids, dtype=np.int32),
                    None if answer is None else str(answer),
                    None if response_ends is None else _response(row, config, tokenizer, response_ends, where),
                    route,
                    None if teacher_ids is None else np.asarray(teacher_ids, dtype=np.int32),
                    encode_row(where, row) if keep_rows else None,
                )
            )
    if not prompts:
        dropped_note = f" ({dropped} rows exceed data.max_prompt_length)" if dropped else ""
        raise ConfigError(key, list(files), f"no prompts in these files{dropped_note}.", "use files with prompts.")
    routes.log(key)
    views.log(key)
    return prompts, dropped


def _read_rows(file: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(key, file, "no such file.", "use the path of a .jsonl or .parquet file.")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except Exception as error:
            raise ConfigError(key, file, f"not a parquet file ({error}).", "create it again.") from error
        yield from ((f"{file}:{i}", row) for i, row in enumerate(table.to_pylist(), 1))
    elif path.suffix == ".jsonl":
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise ConfigError(key, file, f"not readable as UTF-8 ({error}).", "create it again.") from error
        # Not splitlines(): JSON strings may contain other characters that it treats as line ends.
        for i, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{file}:{i}", _json_object(line, f"{file}:{i}", key)
    else:
        raise ConfigError(key, file, f"unknown file type {path.suffix!r}.", "use .jsonl or .parquet.")


def _json_object(line: str, where: str, key: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(key, where, f"invalid JSON ({error}).", "correct or remove the line.") from error
    if not isinstance(row, dict):
        problem = f"the line is a JSON {type(row).__name__}, expected an object."
        raise ConfigError(key, where, problem, "correct or remove the line.")
    return row


def _encode(prompt: Any, config: DataConfig, tokenizer: Any, where: str, setting: tuple[str, str]) -> list[int]:
    """Return the tokens of a prompt.

    Args:
        setting: key that the prompt comes from and its value, for errors.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if config.chat_template == "always" and not has_template:
        raise ConfigError("data.chat_template", "always", "this tokenizer has no chat template.", "use auto or never.")
    is_messages = isinstance(prompt, list)
    if not (is_messages or isinstance(prompt, str)) or not prompt:
        problem = f"the prompt of {where} is {prompt!r}, expected a non-empty string or list of messages."
        raise ConfigError(*setting, problem, "correct or remove the row.")
    if has_template and config.chat_template != "never":
        messages = prompt if is_messages else [{"role": "user", "content": prompt}]
        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template is a program and may raise any error
            problem = f"the chat template failed for the prompt of {where} ({error})."
            raise ConfigError("data.chat_template", config.chat_template, problem, "correct the row.") from error
        return _not_empty(encoded["input_ids"], setting, where)
    if is_messages:
        reason = "chat templates are disabled" if has_template else "this tokenizer has no chat template"
        fix = "use auto, or string prompts." if has_template else "use string prompts, or add one to the tokenizer."
        problem = f"the prompt of {where} is a list of messages, but {reason}."
        raise ConfigError("data.chat_template", config.chat_template, problem, fix)
    return _not_empty(tokenizer(prompt)["input_ids"], setting, where)


def _not_empty(ids: Sequence[int], setting: tuple[str, str], where: str) -> list[int]:
    if not ids:
        raise ConfigError(*setting, f"the prompt of {where} has no tokens.", "remove the row.")
    return list(ids)


def _fit(ids: list[int], config: DataConfig, where: str) -> list[int] | None:
    """Apply `data.truncation`; None = drop the row."""
    limit = config.max_prompt_length
    if len(ids) <= limit:
        return ids
    if config.truncation == "drop":
        return None
    if config.truncation == "left":
        return ids[-limit:]
    if config.truncation == "right":
        return ids[:limit]
    raise ConfigError(
        "data.max_prompt_length",
        limit,
        f"the prompt of {where} has {len(ids)} tokens.",
        "increase it, or set data.truncation to drop, left or right.",
    )


def _teacher_fits(ids: list[int] | None, config: DataConfig, where: str) -> bool:
    """Return whether to keep the row: its prompt for the teacher is short enough. A cut one could lack its rule."""
    limit = config.max_teacher_prompt_length or config.max_prompt_length
    if ids is None or len(ids) <= limit:
        return True
    if config.truncation == "drop":
        return False
    raise ConfigError(
        "data.max_teacher_prompt_length",
        config.max_teacher_prompt_length,
        f"the teacher's prompt of {where} has {len(ids)} tokens, more than {limit}.",
        "increase it, or set data.truncation to drop.",
    )


def _response(row: dict[str, Any], config: DataConfig, tokenizer: Any, ends: Sequence[int], where: str) -> np.ndarray:
    """Return the dataset's response in the form of a rollout, [R] int32, R <= data.max_response_length.

    The text is tokenized separately, without special tokens, and an end-of-sequence token is appended unless it ends
    with one. A longer response is truncated and then has no end-of-sequence token.
    """
    text = row.get(config.response_key)
    if not isinstance(text, str) or not text:
        found = f"the value is {text!r}" if config.response_key in row else f"the only columns are {sorted(row)}"
        raise ConfigError(
            "data.response_key",
            config.response_key,
            f"in {where} {found}, expected a non-empty string.",
            "correct or remove the row, or use no dataset responses: distill.on_policy_share=1.",
        )
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        problem = f"the response of {where} has no tokens."
        raise ConfigError("data.response_key", config.response_key, problem, "correct or remove the row.")
    if any(token in ends for token in ids[:-1]):
        problem = f"the response of {where} contains an end-of-sequence token before its end."
        fix = "remove it from the text, or from rollout.stop_token_ids if it is one of them."
        raise ConfigError("data.response_key", config.response_key, problem, fix)
    if ids[-1] not in ends:
        ids.append(tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0])
    return np.asarray(ids[: config.max_response_length], dtype=np.int32)
