"""Compare what the chat templates of student and teacher write around the same message."""

from __future__ import annotations

import os
from typing import Any

from gkd.config.schema_sections import DataConfig
from gkd.data.prompts import load_tokenizer
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.wire.fingerprint import template_example, template_fingerprint

_FIX = (
    "give both folders the same chat template, set data.chat_template_kwargs, or put the teacher's form into a column "
    "and set data.teacher_prompt_key"
)


def template_warning(data: DataConfig, tokenizer: Any, teacher: TeacherInfo, *, trust_remote_code: bool) -> str:
    """Return a sentence if the teacher's own template writes another prompt than the student reads, else "".

    Also if they cannot be compared.

    The teacher scores the student's prompt. Text in a form that it was not trained on lowers its quality. Its folder is
    read if this host has it; else the prompt that its server sends is compared.
    """
    if data.chat_template == "never" or data.teacher_prompt_key:
        return ""
    name, variables = teacher.model_path, data.chat_template_kwargs
    is_here = os.path.isdir(name)  # false where this user may not look
    if not is_here and teacher.template_fingerprint == template_fingerprint(tokenizer.chat_template):
        return ""
    if not is_here and not teacher.template_example:
        return teacher.template_fingerprint and (
            f"the chat template of the teacher {name} is another text than the student's, and its folder is not on "
            f"this host. If it writes other prompts, {_FIX}"
        )
    try:
        ours, its = template_example(tokenizer, variables), teacher.template_example
        if is_here:
            other = load_tokenizer(name, "teacher.path", trust_remote_code=trust_remote_code)
            its = template_example(other, variables)
    except Exception as error:  # a template is a program and may raise any error
        return f"the chat templates of the student and of the teacher {name} are not compared: {error}"
    if ours == its:
        return ""
    without = "" if is_here or not variables else " without data.chat_template_kwargs"
    return (
        f"the chat templates differ: the student reads {ours!r}, and the template of the teacher {name} writes "
        f"{its!r}{without}. The teacher scores the student's form. Fix: {_FIX}"
    )
