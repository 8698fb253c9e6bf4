"""Find the prompt that a row has for the teacher: a column of its own, or a template filled with the row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gkd.config.check_values import template_parts
from gkd.config.schema_sections import DataConfig
from gkd.data.conversation import Conversation, read_conversation
from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("data")

_PRIVILEGED = ("answer", "response")  # placeholders of text that each row has for itself, and the student does not read


class TeacherPrompts:
    """Return the teacher's prompt of each row, before tokenization, and count them.

    Args:
        template: teacher.prompt_template.

    Raises:
        ConfigError: the template is not valid.
    """

    def __init__(self, config: DataConfig, template: str) -> None:
        self._config, self._template = config, template
        self._parts = template_parts(template) if template else []
        self._columns = {
            "prompt": config.prompt_key,
            "answer": config.answer_key,
            "response": config.response_key,
        }
        self._n_rows = self._n_own = 0

    @property
    def setting(self) -> tuple[str, str]:
        """Return the key that the teacher's prompts come from, and its value."""
        if self._template:
            return "teacher.prompt_template", self._template
        return "data.teacher_prompt_key", self._config.teacher_prompt_key

    @property
    def is_template(self) -> bool:
        """Return whether the teacher's prompts are made with teacher.prompt_template."""
        return bool(self._template)

    @property
    def columns(self) -> set[str]:
        """Return the columns of a row that `of` uses, apart from the prompt's."""
        return {self._columns.get(name, name) for _, name in self._parts if name}

    def of(self, row: Mapping[str, Any], prompt: Conversation, where: str) -> Conversation | None:
        """Return the row's prompt for the teacher. None means the student's prompt.

        A template replaces the text of a prompt. Of messages it replaces the last one; the others stay.

        Args:
            prompt: the student's.
            where: file and line of the row.

        Raises:
            ConfigError: the row lacks a column of the template, or its prompt for the teacher is unusable.
        """
        self._n_rows += 1
        found = None
        if self._template:
            found = self._filled(row, prompt, where)
        elif own := row.get(self._config.teacher_prompt_key) if self._config.teacher_prompt_key else None:
            found = read_conversation(own, self.setting, where)
        self._n_own += found is not None
        return found

    def _filled(self, row: Mapping[str, Any], prompt: Conversation, where: str) -> Conversation:
        last = prompt.messages[-1] if prompt.messages else None
        texts: dict[str, Any] = {"prompt": last["content"] if last else prompt.text}
        if not self._columns["response"]:  # the response is the last message
            texts["response"] = prompt.response and prompt.response["content"]
        for name in {name for _, name in self._parts if name} - texts.keys():
            texts[name] = row.get(self._columns.get(name, name))
        for name, value in texts.items():
            if not isinstance(value, str | int | float):
                column = self._columns.get(name, name)
                problem = f"{where} has no text in the column {column!r}; its columns are {sorted(row)}."
                raise ConfigError(*self.setting, problem, "correct the row, or the placeholder.")
        text = "".join(before + (str(texts[name]) if name else "") for before, name in self._parts)
        messages = (*prompt.messages[:-1], {**last, "content": text}) if last else ()
        return replace(prompt, messages=messages, text="" if last else text)

    def log(self, key: str) -> None:
        """Log how many rows have a prompt for the teacher, and warn if training rows hold what differs per row.

        Args:
            key: config key of the files.

        Raises:
            ConfigError: no training row has the column.
        """
        setting, value = self.setting
        if not value:
            return
        if not self._n_own and key == "data.train_files":
            problem = "no row of data.train_files has a value in this column."
            raise ConfigError(setting, value, problem, "name the column of the teacher's prompts, or remove the key.")
        names = [name for name in _PRIVILEGED if name in {name for _, name in self._parts}]
        if names and key == "data.train_files":
            log.warning(
                "%s has {%s}, a text of each row that the student does not read: a weak signal, because the student "
                "cannot produce it from its own prompt. A rule that all rows share is learned. docs/losses.md.",
                setting,
                "} and {".join(names),
            )
        log.info("%s: %d of %d rows have a prompt for the teacher", key, self._n_own, self._n_rows)
