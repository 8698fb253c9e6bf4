"""Check the settings of what the teacher sees instead of the student's prompt, and parse its template."""

from __future__ import annotations

import string

from gkd.config.schema import Config, Derived
from gkd.errors import ConfigError

_TEMPLATE = "teacher.prompt_template"


def template_parts(template: str) -> list[tuple[str, str]]:
    """Return the parts of `teacher.prompt_template`: a text, and the placeholder that follows it (empty: none).

    Raises:
        ConfigError: a placeholder is not a plain name in braces, or there is none.
    """
    fix = "write {prompt}, {answer}, {response} or {COLUMN}, and {{ }} for braces."
    parts = []
    try:
        for text, name, spec, conversion in string.Formatter().parse(template):
            if name is not None and (not name or name.isdigit() or spec or conversion or set(".[]") & set(name)):
                raise ConfigError(_TEMPLATE, template, f"the placeholder {{{name}}} is not the name of a column.", fix)
            parts.append((text, name or ""))
    except ValueError as error:
        raise ConfigError(_TEMPLATE, template, f"unbalanced braces ({error}).", fix) from error
    if not any(name for _, name in parts):
        raise ConfigError(_TEMPLATE, template, "no placeholder: every row would have the same prompt.", fix)
    return parts


def check_teacher_prompt(config: Config, derived: Derived) -> None:
    """Check the teacher's prompt, and that tokens carry loss."""
    data, template = config.data, config.teacher.prompt_template
    if template:
        template_parts(template)
        if data.teacher_prompt_key:
            problem = f"data.teacher_prompt_key = {data.teacher_prompt_key} is set, too."
            raise ConfigError(_TEMPLATE, template, problem, "remove one of them.")
    elif data.max_teacher_prompt_length and not data.teacher_prompt_key:
        problem = "the teacher sees the student's prompt."
        fix = f"remove it, or set data.teacher_prompt_key or {_TEMPLATE}."
        raise ConfigError("data.max_teacher_prompt_length", data.max_teacher_prompt_length, problem, fix)
    skipped, longest = config.distill.skip_first_tokens, data.max_response_length
    if skipped >= longest:
        problem = f"a response has at most data.max_response_length = {longest} tokens, so none carries loss."
        raise ConfigError("distill.skip_first_tokens", skipped, problem, f"use less than {longest}.")
