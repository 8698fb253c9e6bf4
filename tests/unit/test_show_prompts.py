"""`--show-prompts` prints what the models read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gkd import main_gkd
from tests.unit.chat_templates import FAMILIES, tokenizer
from tests.vision_models import picture, save_vision_model

CHATML = tokenizer(FAMILIES["chatml"])
RENDERED = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"


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
    CHATML.save_pretrained(tmp_path / "model")
    value = [{"from": "human", "value": "What is 2+2?"}, {"from": "gpt", "value": "Four."}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"chat": value}) + "\n" + json.dumps({"chat": "b"}) + "\n")
    (tmp_path / "c.yaml").write_text("teacher: {prompt_template: '{prompt} Be brief.'}\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--show-prompts", "1"]
    words += [f"model.path={tmp_path / 'model'}", f"data.train_files=[{tmp_path / 'p.jsonl'}]"]
    words += ["data.prompt_key=chat", "data.response_key=", "distill.on_policy_share=0.5"]
    children = psutil.Process().children()
    assert main_gkd.main(words) == 0 and psutil.Process().children() == children
    out = capsys.readouterr().out
    assert RENDERED in out and RENDERED.replace("2+2?", "2+2? Be brief.") in out
    assert "Four.</s>" in out and "ShareGPT" in out and str(CHATML.encode("W")[0]) in out
    stop = CHATML.convert_tokens_to_ids("<|im_end|>")
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
