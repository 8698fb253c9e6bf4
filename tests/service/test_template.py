"""The chat template of a teacher whose folder is on another host: what its server sends, and what the start logs."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gkd.config.load import load_config
from gkd.config.schema_sections import DataConfig
from gkd.preflight.run import preflight
from gkd.preflight.teacher import template_warning
from gkd.scoring.teacher.info import TeacherInfo
from teacher_server.wire.protocol import MAX_TEXT, InfoRequest, ProtocolError, replies
from tests.e2e.conftest import save_model
from tests.service.harness import TRIVIAL, ServerProcess, trivial_model
from tests.service.scripted import ScriptedServer, always_valid, client, info_reply
from tests.unit.chat_templates import FAMILIES, tokenizer

pytestmark = pytest.mark.service
CHATML = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
ANGLE = "<|user|>\nHello!<|end|>\n<|assistant|>\n"


@pytest.mark.cpu_only("trainer.device=cpu is refused where GPUs are seen")
def test_the_start_shows_both_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the start does not show the prompts of both templates once, with the keys to set, for a teacher that
    only its server has; or if it warns of another template that writes the same prompt.
    """
    student, teacher, prompts = tmp_path / "student", tmp_path / "teacher", tmp_path / "prompts.jsonl"
    save_model(student, seed=0, layers=1, n_vocab=512)
    tokenizer(FAMILIES["angle"]).save_pretrained(trivial_model(teacher, 512))
    prompts.write_text(json.dumps({"prompt": "1+2="}) + "\n")
    settings = [f"model.path={student}", f"data.train_files=[{prompts}]", "trainer.total_steps=1", "trainer.device=cpu"]
    settings += ["data.max_prompt_length=50", "data.max_response_length=8"]
    with ServerProcess(teacher, tmp_path, options=TRIVIAL) as server:
        teacher.rename(tmp_path / "elsewhere")
        for template, n_warnings in ((FAMILIES["chatml"], 1), (FAMILIES["angle"] + "{# revised #}", 0)):
            tokenizer(template).save_pretrained(student)
            own = [f"trainer.run_dir={tmp_path / 'run'}_{n_warnings}", f"teacher.server_port={server.port}"]
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="gkd.preflight"):
                plan = preflight(load_config(None, [*settings, *own]))
            assert plan.teachers[0].template_example == ANGLE and not Path(plan.teachers[0].model_path).exists()
            told = [record.getMessage() for record in caplog.records if str(teacher) in record.getMessage()]
            assert len(told) == n_warnings
            for line in told:
                assert all(part in line for part in (repr(CHATML), repr(ANGLE), "data.teacher_prompt_key"))


def described(**info: Any) -> TeacherInfo:
    """Return what a client reads from a server with these fields."""
    with ScriptedServer(always_valid, info=info) as server, client(server) as teacher:
        return teacher.info()


def test_the_text_of_a_server_is_not_trusted() -> None:
    """Fails if a server's text can write lines or control characters to the log, or has no limit."""
    hostile = "\x1b[2J\n12:00:00 [gkd] step 1\u202e"
    info = described(template_example=hostile)
    warning = template_warning(DataConfig(), tokenizer(FAMILIES["chatml"]), info, trust_remote_code=False)
    assert info.template_example == hostile and repr(hostile) in warning and warning.isprintable()
    longest = msgspec.structs.replace(info_reply(InfoRequest(request_id=bytes(16))), template_example="x" * MAX_TEXT)
    assert replies.decode(replies.encode(longest)) == longest
    with pytest.raises(ProtocolError):
        replies.encode(msgspec.structs.replace(longest, template_example="x" * (MAX_TEXT + 1)))


def test_variables_of_the_template_change_the_text_of_the_student_alone() -> None:
    """Fails if a student that data.chat_template_kwargs brings to its teacher's form is still warned of, or a
    difference that may come from them is shown without saying so.
    """
    student = tokenizer(FAMILIES["chatml_no_thinking"])
    info = replace(described(), template_fingerprint="another", template_example=CHATML + "<think></think>")
    for thinking in (False, True):
        data = DataConfig(chat_template_kwargs={"enable_thinking": thinking})
        warning = template_warning(data, student, info, trust_remote_code=False)
        assert ("without data.chat_template_kwargs" in warning) == bool(warning) == thinking
