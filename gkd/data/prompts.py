"""Load tokenizers and prompt files: rows of JSONL or parquet -> tokenized `Prompt`s.

`gkd.data.row_files` reads rows, `gkd.data.conversation` the forms of a prompt, `gkd.data.render` renders and tokenizes
it. All later stages use token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gkd.config.schema_sections import DataConfig
from gkd.config.schema_teacher import TeacherConfig
from gkd.data.conversation import (
    ON_LEARNING,
    Conversation,
    Setting,
    TeacherPrompts,
    Turn,
    check_unicode,
    excludes,
    is_empty,
    is_learned,
    json_messages,
    meaning,
    quoted,
    read_conversation,
    read_tools,
    reference_text,
    split_conversation,
)
from gkd.data.images import ImageReader, without_images
from gkd.data.render import AS_IS, SYSTEM, PromptRenderer, Rendered, has_system
from gkd.data.responses import ResponseReader
from gkd.data.row_files import MOST_REFUSED, Row, collected, encode_row, read_rows, refusal
from gkd.data.row_routes import RowRoutes
from gkd.data.template import Tools, said, texts_of
from gkd.errors import ConfigError
from gkd.log import get_logger
from gkd.spans import driver
from gkd.types import Prompt
from teacher_server.vision.images import EncodedImage
from teacher_server.wire.fingerprint import add_template

log = get_logger("data")

_PROBE = "A b  c\n\td"  # a text that a tokenizer without the rules of its file loses
_SHOWN = 2000  # The log shows so much of a prompt.
_HEADER = 20  # characters in front of a message: without them it is not the system's
_REPORT_ROWS = 256  # between reports of the progress
_PART = "a part of the prompt", "write it into the prompt, and remove or rename the column."
_LEARNING = "what is learned", "write weight, 0 or 1, into messages (data.messages_key); remove the row or the column."
_ASKS = {  # meaning of a column that is not read -> what it asks for, and the fix; others ask for `_PART`
    "tools": ("tools", "name the column in data.tools_key, with tools in its form, or remove or rename the column."),
    "media": ("media", "name it in data.images_key; rename the column if the prompt does without it."),
    "variables": ("variables of the template", "set data.chat_template_kwargs for all rows, or rename the column."),
    **dict.fromkeys(ON_LEARNING, _LEARNING),
}


def ids_column(response_key: str) -> str:
    """Return the column that has the token ids of the responses, as `gkd generate` writes it."""
    return f"{response_key}_ids"


def load_tokenizer(path: str, key: str, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a local model folder, which errors name by its config key; never accesses a hub.

    Raises:
        ConfigError: the folder is missing or has no usable tokenizer.
        PermissionError: this user may not read it.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        problem = f"no such folder ({Path(path).absolute()})."
        raise ConfigError(key, path, problem, "use a local folder in Hugging Face format.")
    try:
        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        add_template(loaded, Path(path))
        read = loaded.decode(loaded(_PROBE, add_special_tokens=False)["input_ids"], clean_up_tokenization_spaces=False)
        file = Path(path) / "tokenizer.json"
        inner = Tokenizer.from_file(str(file)) if read != _PROBE and file.is_file() else None
        loses = inner is not None and inner.decode(inner.encode(_PROBE, add_special_tokens=False).ids) == _PROBE
    except PermissionError:
        raise  # The files are intact; the error has its path.
    except Exception as error:  # transformers raises many types of errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            key, path, f"cannot load its tokenizer ({reason}).", "check tokenizer.json and tokenizer_config.json."
        ) from error
    if loses:  # transformers builds the class again, with its own rules instead of those of tokenizer.json
        problem = f"its tokenizer_class is not that of tokenizer.json: it reads {_PROBE!r} as {read!r}."
        raise ConfigError(
            key, path, problem, 'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json.'
        )
    return loaded


def load_prompts(
    files: Sequence[str], key: str, reader: RowReader, *, keep_rows: bool = False
) -> tuple[list[Prompt], int]:
    """Tokenize all rows of `files`; also return the number of rows dropped by `data.truncation: drop`.

    Args:
        key: config key of the files ("data.train_files" or "data.val_files"), for errors.
        reader: new, because it counts the rows.
        keep_rows: keep all columns, for functions that judge responses and for environments.

    Raises:
        ConfigError: a file is missing, has another format or lacks `data.prompt_key`; a prompt or a requested response
            is unusable; a row names no route or lacks what the teacher's prompt needs; a prompt exceeds
            `data.max_prompt_length` with `truncation: error`, or the teacher's its own limit. It has the mistakes of up
            to `MOST_REFUSED` rows.
    """
    prompts: list[Prompt] = []
    config = reader.config
    dropped = 0
    converted = Counter[str]()
    refused: list[tuple[str, ConfigError]] = []
    columns = None if keep_rows else reader.reads
    rows = (row_of_file for file in files for row_of_file in read_rows(file, key, columns))
    with driver.doing(f"tokenizing {key}, row"), collected(refused, key):
        for row_id, (where, row) in enumerate(rows):
            if row_id % _REPORT_ROWS == 0:
                driver.done(row_id)
            if len(refused) == MOST_REFUSED:
                break
            with collected(refused, where):
                read = reader.read(row, where)
                converted.update({form for part in read.parts if (form := part.converted)})
                prompt = reader.fit(read.prompt, where)
                teacher_ids = None if read.teacher is None else read.teacher.ids
                if prompt is None or not _teacher_fits(teacher_ids, config, where):
                    dropped += 1
                    continue
                if not prompts:
                    log.info("%s: the first prompt has %d tokens: %.*s", key, len(prompt.ids), _SHOWN, prompt.text)
                response, is_own = reader.response(read, row, where)
                prompts.append(
                    Prompt(
                        row_id,
                        np.asarray(prompt.ids, dtype=np.int32),
                        reference_text(row.get(config.answer_key)),
                        response,
                        read.route,
                        None if teacher_ids is None else np.asarray(teacher_ids, dtype=np.int32),
                        encode_row(where, reader.kept(row)) if keep_rows else None,
                        is_own,
                        read.images,
                    )
                )
    if refused:
        raise refusal(refused) from refused[0][1].__cause__
    if not prompts:
        dropped_note = f" ({dropped} rows exceed data.max_prompt_length)" if dropped else ""
        raise ConfigError(key, list(files), f"no prompts in these files{dropped_note}.", "use files with prompts.")
    for form, n in sorted(converted.items()):
        log.info("%s: %d rows were read as %s", key, n, form)
    reader.log(key)
    return prompts, dropped


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row as the models read it: the student's prompt, the teacher's own, the last message, the teacher's route."""

    prompt: Rendered
    teacher: Rendered | None
    response: Mapping[str, Any] | None
    route: int
    turns: tuple[Turn, ...] = ()  # messages behind the prompt, see data.messages_key
    images: tuple[EncodedImage, ...] = ()  # both prompts have them

    @property
    def parts(self) -> list[Rendered]:
        """Return the student's prompt, and the teacher's if it has its own."""
        return [self.prompt] if self.teacher is None else [self.prompt, self.teacher]


class RowReader:
    """Read rows: find the prompts in the columns, render and tokenize them, and find the teacher.

    Args:
        teacher: its routes, one of which each row must name, and its prompt template; None means neither.
        tools: of rollout.environment, which every prompt offers.
        response_ends: token ids that end a response, to read the dataset's responses, too; None = ignore
            `data.response_key`.
        teacher_tokenizer: of a teacher with another one; None: the teacher reads the student's tokens.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        teacher: TeacherConfig | None = None,
        tools: Tools = (),
        response_ends: Sequence[int] | None = None,
        teacher_tokenizer: Any = None,
        images: ImageReader | None = None,
    ) -> None:
        self._images = images
        self.config = config
        self._tools = tools
        teacher = teacher or TeacherConfig()
        self._ends = response_ends
        offered = ("data.tools_key", config.tools_key) if config.tools_key else None
        if tools:
            names = ", ".join(tool["function"]["name"] for tool in tools)
            if offered is not None:
                problem = f"the class of rollout.environment offers {names}, too."
                raise ConfigError(*offered, problem, "remove the key, or the tools of the class.")
            offered = "rollout.environment", f"its tools {names}"
        self._renderer = PromptRenderer(
            tokenizer,
            config.chat_template,
            config.chat_template_kwargs,
            config.system_prompt,
            offered,
            None if images is None else images.processor,
        )
        self._setting = "data.prompt_key", config.prompt_key
        learned_from = "data.response_key", config.response_key
        if config.messages_key:
            self._setting = learned_from = "data.messages_key", config.messages_key
        self._responses = ResponseReader(config, tokenizer, response_ends or (), self._renderer, learned_from)
        self._teacher_renderer = self._renderer
        self._has_two = teacher_tokenizer is not None
        if self._has_two:
            source = getattr(teacher_tokenizer, "chat_template", None) or ""
            variables = {k: v for k, v in config.chat_template_kwargs.items() if k in str(source)}
            self._teacher_renderer = PromptRenderer(
                teacher_tokenizer, config.chat_template if source else "never", variables, config.system_prompt, offered
            )
        self._n_own_system = self._n_cut = self._n_without_system = 0
        self._routes = RowRoutes(teacher, config.teacher_key)
        self._prompt_function = teacher.prompt_function
        self._views = TeacherPrompts(config, teacher.prompt_template)
        self._used = {config.prompt_key, config.response_key, config.answer_key, config.teacher_key, config.tools_key}
        if config.response_key:
            self._used.add(ids_column(config.response_key))
        self._used |= {config.teacher_prompt_key, config.messages_key, config.images_key} | self._views.columns

    def reads(self, column: str) -> bool:
        """Return whether `read` looks at a column, including answers and responses."""
        return column in self._used or bool(meaning(column))

    def kept(self, row: Row) -> Row:
        """Return the row that functions get: without the bytes of images."""
        return row if self._images is None else without_images(row)

    def read(self, row: Row, where: str) -> ReadRow:
        """Return what the models read. Raises ConfigError: see `load_prompts`.

        The student's messages, images and tools come first, because a template may make the teacher's prompt of them.
        """
        setting = self._setting
        prompt, images, turns = self.conversation(where, row)
        view = self._view(row, prompt, images, where)
        rendered = self._renderer.render(prompt, setting, where)
        self._n_own_system += has_system(prompt)
        if rendered.converted == AS_IS and (self._views.is_template or (self._has_two and view is prompt)):
            reason = "and the template's text would stand outside of its turns"
            other = "with the student's template and not the teacher's"
            problem = f"the prompt of {where} is rendered already, {reason if self._views.is_template else other}."
            key = self._views.setting if self._views.is_template else setting
            raise ConfigError(*key, problem, "write messages, or use data.teacher_prompt_key.")
        teacher = None if view is None else self._teacher_renderer.render(view, self._views.setting, where)
        if self._images is not None:
            turns = tuple((self._renderer.as_text(message, setting, where), is_own) for message, is_own in turns)
            rendered = replace(rendered, ids=self._images.expand(rendered.ids, images, where))
            teacher = teacher and replace(teacher, ids=self._images.expand(teacher.ids, images, where))
        read = ReadRow(rendered, teacher, prompt.response, self._routes.of(row, where), turns, images)
        self._check_columns(row, read, prompt, setting, where)
        return read

    def teacher_ids(self, value: Any, where: str, row: Row) -> list[int]:
        """Return the tokens of a text or messages that teacher.prompt_function has made of a row for the teacher.

        Raises ConfigError: they cannot be rendered, end with the assistant's message, or are too long.
        """
        setting = "teacher.prompt_function", self._prompt_function
        view = read_conversation(value, setting, where)
        if view.response is not None:
            problem = f"the last message is the assistant's: {quoted(view.response['content'])}."
            raise ConfigError(*setting, problem, "end with a message of the user or of a tool.")
        tools = self.conversation(where, row)[0].tools
        ids = self._teacher_renderer.render(replace(view, tools=tools), setting, where).ids
        limit = self.config.max_teacher_prompt_length or self.config.max_prompt_length
        if len(ids) > limit:
            problem = f"the teacher's prompt has {len(ids)} tokens, more than data.max_teacher_prompt_length={limit}."
            raise ConfigError(*setting, problem, "shorten it, or return None.")
        return ids

    def conversation(self, where: str, row: Row) -> tuple[Conversation, tuple[EncodedImage, ...], tuple[Turn, ...]]:
        """Return the student's prompt with its tools, before it is rendered; its images; messages behind it."""
        config = self.config
        setting = self._setting
        value = _column(row, setting, where, "name the prompts' column.")
        prompt = read_conversation(value, setting, where, with_images=self._images is not None)
        prompt, images = self._with_images(prompt, row, setting, where, self._renderer)
        turns = tuple[Turn, ...]()
        if config.messages_key:
            prompt, turns = split_conversation(prompt, setting, where)
        self._check_response(prompt, setting, where)
        tools = self._tools
        if config.tools_key:
            offered = "data.tools_key", config.tools_key
            value = _column(row, offered, where, "name the tools' column; null stands for no tools.")
            tools = read_tools(value, offered, where)
        return replace(prompt, tools=tools), images, turns

    def _with_images(
        self, prompt: Conversation, row: Row, setting: Setting, where: str, renderer: PromptRenderer
    ) -> tuple[Conversation, tuple[EncodedImage, ...]]:
        """Return a prompt with the places of its images, and the images."""
        if self._images is None:
            return prompt, ()
        is_rendered = not prompt.messages and renderer.is_rendered(prompt.text)
        return self._images.place(prompt, row, setting, where, is_rendered=is_rendered)

    def _view(
        self, row: Row, prompt: Conversation, images: tuple[EncodedImage, ...], where: str
    ) -> Conversation | None:
        """Return the prompt that the teacher reads; the student's if only the tokenizers differ; None: the same ids."""
        view = self._views.of(row, prompt, where)
        if view is None:
            return prompt if self._has_two else None
        setting = self._views.setting
        if not self._views.is_template:
            view, same = self._with_images(view, row, setting, where, self._teacher_renderer)
            if same != images:
                problem = f"the teacher's prompt of {where} has other images than the student's."
                raise ConfigError(*setting, problem, "give it the same images, in the same order.")
        self._check_response(view, setting, where)
        return replace(view, tools=prompt.tools)

    def fit(self, prompt: Rendered, where: str) -> Rendered | None:
        """Apply `data.truncation` to a prompt; None = drop the row. Raises ConfigError: it is too long."""
        limit = self.config.max_prompt_length
        how = self.config.truncation
        if len(prompt.ids) <= limit:
            return prompt
        if how == "drop":
            return None
        if how != "error" and (cut := self._renderer.cut(prompt, limit, how)) is not None:
            systems = (m["content"].strip() for m in texts_of(prompt.messages) if m["role"] in SYSTEM)
            whole = [prompt.text.partition(text)[0][-_HEADER:] + text for text in systems if text]
            self._n_cut += 1
            self._n_without_system += any(text not in cut.text for text in whole)
            return cut
        problem = f"the prompt of {where} has {len(prompt.ids)} tokens."
        if how == "right":
            problem += " data.truncation=right would cut off the beginning of the answer, which the template writes."
        fix = "increase it, or set data.truncation to drop, left or, without chat template, right."
        raise ConfigError("data.max_prompt_length", limit, problem, fix)

    def response(self, read: ReadRow, row: Row, where: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the dataset's response, [R] int32, and its own tokens, [R] bool, None for all; None if not requested.

        R <= data.max_response_length. The response is what stands in data.messages_key behind the prompt, or else the
        column's text (its ids, if the row has the column `ids_column`), or with an empty `data.response_key` the last
        message of the prompt. A longer response is truncated and then has no end-of-sequence token. Raises ConfigError:
        the row has none that can be used.
        """
        if self._ends is None:
            return None, None
        if self.config.messages_key:
            return self._responses.read(read.prompt, read.turns, where)
        text = self._answer(read, row, where)
        key = self.config.response_key
        if key and (ids := row.get(ids_column(key))) is not None:
            return self._responses.read_ids(ids, row[key], where, ids_column(key)), None
        answer = said("assistant", text)
        return self._responses.read(read.prompt, [(answer, True)], where)[0], None

    def _answer(self, read: ReadRow, row: Row, where: str) -> str:
        """Return the text of a row's one response."""
        key = self.config.response_key
        setting = "data.response_key", key
        value = row.get(key) if key else None
        message = None if key else read.response
        if isinstance(value, str):
            value = json_messages(value) or value
        if isinstance(value, list) and len(value) == 1:  # one message, as TRL's column `completion` has it
            message = read_conversation([said("user", "-"), *value], setting, where).response
        text = value if message is None else message["content"] if is_learned(message, setting, where) else None
        if not isinstance(text, str) or not text:
            problem = "the last message is not the assistant's, or is not learned"
            if key:
                problem = f"the value is {quoted(value)}" if key in row else f"the only columns are {sorted(row)}"
            problem = f"in {where} {problem}, expected a non-empty string."
            fix = "correct or remove the row, or use no dataset responses: distill.on_policy_share=1."
            raise ConfigError(*setting, problem, fix)
        check_unicode(text, setting, where)
        return text

    def log(self, key: str) -> None:
        """Log how many rows each route, the teacher's own prompt and a system message have; warn about the prompts."""
        if key == "data.train_files" and (date := self._renderer.dated or self._teacher_renderer.dated):
            fix = "set data.chat_template_kwargs.date_string if the template has it; docs/data.md has the other cases"
            log.warning("the chat template writes today's date, %s: prompts of another day differ. Fix: %s", date, fix)
        if self._n_cut:
            kind = "training" if key == "data.train_files" else "held-out"
            text = "truncated %d %s prompts to data.max_prompt_length, %d of them lose a message of the system"
            log.warning(text, self._n_cut, kind, self._n_without_system)
        self._responses.log()
        if self.config.system_prompt and self._n_own_system:
            log.info("%s: %d rows have a system message, not data.system_prompt", key, self._n_own_system)
        if self._images is not None and not self._images.n_read and key == "data.train_files":
            problem = "no row of data.train_files has an image."
            fix = "name the column of the images, or remove the key."
            raise ConfigError("data.images_key", self.config.images_key, problem, fix)
        if self._images is not None:
            log.info("%s: %d images", key, self._images.n_read)
        self._routes.log(key)
        self._views.log(key)

    def _check_columns(self, row: Row, read: ReadRow, prompt: Conversation, setting: Setting, where: str) -> None:
        """Raise ConfigError if a column that is not read asks for something else than is done, by its name."""
        # A text that is rendered already, and a row's own message of the system, may have the tools in them.
        is_rendered = read.prompt.converted == AS_IS
        is_whole = is_rendered or has_system(prompt) or bool(self._tools)
        done = {"user": setting[1] != "instruction", "documents": is_rendered, "system": is_whole, "tools": is_whole}
        for name, value in row.items():
            kind = meaning(name)
            if not kind or name in self._used or is_empty(value):
                continue
            asks = not done.get(kind, False)
            if kind in ON_LEARNING:
                asks = self._ends is not None and excludes(name, value)
            elif kind == "variables":
                asks = self._renderer.changes(read.prompt, name, value)
                asks |= read.teacher is not None and self._teacher_renderer.changes(read.teacher, name, value)
            if asks:
                what, fix = _ASKS.get(kind, _PART)
                problem = f"{where} has {what} in a column that is not read, {name!r}: {quoted(value)}."
                raise ConfigError(*setting, problem, fix)

    def _check_response(self, prompt: Conversation, setting: Setting, where: str) -> None:
        """Raise ConfigError if the last message is the assistant's, and data.response_key names a column."""
        if prompt.response is not None and self.config.response_key:
            problem = f"the last message of {where} is the assistant's: {quoted(prompt.response['content'])}."
            fix = 'remove it, or set data.response_key="" to take it as the dataset\'s response.'
            raise ConfigError(*setting, problem, fix)


def _column(row: Row, setting: Setting, where: str, fix: str) -> Any:
    if setting[1] not in row:
        raise ConfigError(*setting, f"{where} has only the columns {sorted(row)}.", fix)
    return row[setting[1]]


def _teacher_fits(ids: list[int] | None, config: DataConfig, where: str) -> bool:
    """Return whether to keep the row: its prompt for the teacher is short enough. A cut one could lack its rule."""
    limit = config.max_teacher_prompt_length or config.max_prompt_length
    if ids is None or len(ids) <= limit:
        return True
    if config.truncation == "drop":
        return False
    setting = "data.max_teacher_prompt_length", config.max_teacher_prompt_length
    problem = f"the teacher's prompt of {where} has {len(ids)} tokens, more than {limit}."
    raise ConfigError(*setting, problem, "increase it, or set data.truncation to drop.")
