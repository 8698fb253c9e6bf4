"""Prompt files and tokenizers: rows of JSONL or parquet -> tokenized `Prompt`s.

The only place where text becomes tokens. From here to the optimizer everything is token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gkd.config.schema import DataConfig
from gkd.errors import ConfigError, ModelError
from gkd.types import Prompt


def load_tokenizer(path: str, key: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local model folder; never asks a hub.

    Raises:
        ConfigError: naming `key`, when the folder is missing or holds no usable tokenizer.
    """
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise ConfigError(key, path, "there is no such folder.", "give a local folder in Hugging Face format.")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever its many formats raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            key, path, f"its tokenizer cannot be loaded ({reason}).", "check tokenizer.json and tokenizer_config.json."
        ) from error


def eos_token_ids(path: str, tokenizer: Any) -> list[int]:
    """Tokens that end a response: those of generation_config.json and the tokenizer's own.

    Raises:
        ModelError: there is none.
    """
    ids: set[int] = set()
    file = Path(path) / "generation_config.json"
    if file.is_file():
        try:
            listed = json.loads(file.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{file} is not a JSON object: {error}") from error
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ModelError(f"{path} names no end-of-sequence token, neither in generation_config.json nor its tokenizer")
    return sorted(ids)


def load_prompts(
    files: Sequence[str], config: DataConfig, tokenizer: Any, key: str, *, response_ends: Sequence[int] | None = None
) -> tuple[list[Prompt], int]:
    """All rows of `files`, tokenized; and how many were left out by `data.truncation: drop`.

    Args:
        key: the config key that named the files ("data.train_files" or "data.val_files"), for errors.
        response_ends: token ids that end a response, to load the dataset's responses, too; None = do not look at
            `data.response_key`.

    Raises:
        ConfigError: a file is missing, of another format, or without `data.prompt_key`; a row is not usable, or longer
            than `data.max_prompt_length` under `truncation: error`; a row has no usable response, if they are wanted.
    """
    prompts: list[Prompt] = []
    dropped = 0
    row_id = 0
    for file in files:
        for where, row in _read_rows(file, key):
            if config.prompt_key not in row:
                raise ConfigError(
                    "data.prompt_key",
                    config.prompt_key,
                    f"{where} has only the columns {sorted(row)}.",
                    "name the column that holds the prompt.",
                )
            ids = _fit(_encode(row[config.prompt_key], config, tokenizer, where), config, where)
            if ids is None:
                dropped += 1
            else:
                answer = row.get(config.answer_key)
                prompts.append(
                    Prompt(
                        row_id,
                        np.asarray(ids, dtype=np.int32),
                        None if answer is None else str(answer),
                        None if response_ends is None else _response(row, config, tokenizer, response_ends, where),
                    )
                )
            row_id += 1
    if not prompts:
        left_out = f" ({dropped} rows are over data.max_prompt_length)" if dropped else ""
        raise ConfigError(key, list(files), f"there is no prompt in it{left_out}.", "give files with rows.")
    return prompts, dropped


def _read_rows(file: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(key, file, "there is no such file.", "give the path of a .jsonl or .parquet file.")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except Exception as error:
            raise ConfigError(key, file, f"it is not a parquet file ({error}).", "write it again.") from error
        yield from ((f"{file}:{i}", row) for i, row in enumerate(table.to_pylist(), 1))
    elif path.suffix == ".jsonl":
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise ConfigError(key, file, f"it is not readable as UTF-8 ({error}).", "write it again.") from error
        # Not splitlines(): JSON strings may hold the other characters that it takes for line ends.
        for i, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{file}:{i}", _json_object(line, f"{file}:{i}", key)
    else:
        raise ConfigError(key, file, f"its ending {path.suffix!r} is not known.", "use .jsonl or .parquet.")


def _json_object(line: str, where: str, key: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(key, where, f"the line is not JSON ({error}).", "correct or remove it.") from error
    if not isinstance(row, dict):
        problem = f"the line is a JSON {type(row).__name__}, not an object with the prompt in a column."
        raise ConfigError(key, where, problem, "correct or remove it.")
    return row


def _encode(prompt: Any, config: DataConfig, tokenizer: Any, where: str) -> list[int]:
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if config.chat_template == "always" and not has_template:
        raise ConfigError(
            "data.chat_template", "always", "the student's tokenizer has no chat template.", "use auto or never."
        )
    is_messages = isinstance(prompt, list)
    if not (is_messages or isinstance(prompt, str)) or not prompt:
        problem = f"in {where} it holds {prompt!r}, not a non-empty string or list of messages."
        raise ConfigError("data.prompt_key", config.prompt_key, problem, "correct or remove that row.")
    if has_template and config.chat_template != "never":
        messages = prompt if is_messages else [{"role": "user", "content": prompt}]
        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template is a program and may raise anything
            problem = f"the tokenizer's template refuses the prompt of {where} ({error})."
            raise ConfigError("data.chat_template", config.chat_template, problem, "correct the row.") from error
        return list(encoded["input_ids"])
    if is_messages:
        problem = f"the prompt of {where} is a list of messages, which needs a chat template."
        raise ConfigError("data.chat_template", config.chat_template, problem, "give strings, or use auto.")
    return list(tokenizer(prompt)["input_ids"])


def _fit(ids: list[int], config: DataConfig, where: str) -> list[int] | None:
    """Apply `data.truncation`; None = leave the row out."""
    limit = config.max_prompt_length
    if not ids:
        problem = f"the prompt of {where} has no tokens."
        raise ConfigError("data.prompt_key", config.prompt_key, problem, "remove that row.")
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
        "raise it, or set data.truncation to drop, left or right.",
    )


def _response(row: dict[str, Any], config: DataConfig, tokenizer: Any, ends: Sequence[int], where: str) -> np.ndarray:
    """[R] int32: the dataset's response as a rollout would hold it, R <= data.max_response_length.

    The text is tokenized on its own, without special tokens, and one end-of-sequence token is put after it, unless it
    brings its own. What is longer is cut, and then has no such token.
    """
    text = row.get(config.response_key)
    if not isinstance(text, str) or not text:
        held = f"it holds {text!r}" if config.response_key in row else f"there are only the columns {sorted(row)}"
        raise ConfigError(
            "data.response_key",
            config.response_key,
            f"in {where} {held}, not a non-empty string with the dataset's response.",
            "correct or remove that row, or let the student answer all prompts: distill.on_policy_share=1.",
        )
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        problem = f"the response of {where} has no tokens."
        raise ConfigError("data.response_key", config.response_key, problem, "correct or remove that row.")
    if any(token in ends for token in ids[:-1]):
        problem = f"the response of {where} has a token before its end at which a rollout would stop."
        fix = "remove it from the text, or from rollout.stop_token_ids if it is one of them."
        raise ConfigError("data.response_key", config.response_key, problem, fix)
    if ids[-1] not in ends:
        ids.append(tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0])
    return np.asarray(ids[: config.max_response_length], dtype=np.int32)
