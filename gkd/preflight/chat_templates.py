"""Compare what the chat templates of student and teacher write around the same message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gkd.config.schema import DataConfig
from gkd.data.prompts import load_tokenizer
from gkd.teacher.info import TeacherInfo
from teacher_server.wire.fingerprint import template_fingerprint

_FIX = (
    "give both folders the same chat template, set data.chat_template_kwargs, or put the teacher's form into a column "
    "and set data.teacher_prompt_key"
)
_MESSAGE = {"role": "user", "content": "Hello!"}


def template_warning(data: DataConfig, tokenizer: Any, teacher: TeacherInfo, *, trust_remote_code: bool) -> str:
    """Return a sentence if the teacher's own template writes another prompt than the student reads, else "".

    Also if they cannot be compared.

    The teacher scores the student's prompt. Text in a form that it was not trained on lowers its quality. Its folder is
    read if this host has it; else the fingerprints of both templates are compared.
    """
    if data.chat_template == "never" or data.teacher_prompt_key:
        return ""
    if not Path(teacher.model_path).is_dir():
        if teacher.template_fingerprint in ("", template_fingerprint(tokenizer.chat_template)):
            return ""
        return (
            f"the chat template of the teacher {teacher.model_path} is another text than the student's, and its folder "
            f"is not on this host. If it writes other prompts, {_FIX}"
        )
    try:
        other = load_tokenizer(teacher.model_path, "teacher.path", trust_remote_code=trust_remote_code)
        ours, its = (_rendered(each, data.chat_template_kwargs) for each in (tokenizer, other))
    except Exception as error:  # a template is a program and may raise any error
        return f"the chat templates of the student and of the teacher {teacher.model_path} are not compared: {error}"
    if ours == its:
        return ""
    return (
        f"the chat templates differ: the student reads {ours!r}, and the template of the teacher {teacher.model_path} "
        f"writes {its!r}. The teacher scores the student's form. Fix: {_FIX}"
    )


def _rendered(tokenizer: Any, variables: dict[str, Any]) -> str:
    if tokenizer.chat_template is None:
        return _MESSAGE["content"]
    text: str = tokenizer.apply_chat_template([_MESSAGE], add_generation_prompt=True, tokenize=False, **variables)
    return text
