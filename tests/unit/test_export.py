"""Test what `gkd export` and `gkd eval` choose and refuse, the model card, and the upload.

`tests/e2e/test_loop.py` compares both with a run, `tests/dist/resume_cases.py` the weights in every layout.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gkd import api
from gkd.config.check import check_config
from gkd.console.state import RunState
from gkd.console.summary import Closing, write_card
from gkd.metrics.writer import read_metrics
from gkd.run.checkpoints import ACTOR, step_of
from gkd.tools import evaluate, export
from tests.hub import Hub
from tests.refusals import refuses
from tests.unit.world import PROMPTS, World, make

SETTINGS = ("trainer.total_steps=6", "trainer.save_every=2", "trainer.keep_last=2", "eval.every=2")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make(tmp_path, World(), *SETTINGS, "trainer.keep_best=eval/kl", val=PROMPTS).fit()
    return tmp_path / "run"


def test_the_newest_the_best_or_a_step_is_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if another checkpoint is exported than the one that was named, or a run with a better step than its last
    one does not say how to get it.
    """
    for step, best, chosen in [(None, False, 6), (None, True, 2), (4, False, 4)]:
        assert step_of(export.find_checkpoint(run, step, best=best)) == chosen
    closing = Closing(str(run), [])
    closing.state = RunState(6)
    closing.state.step = 6
    closing.print(0)
    assert f"gkd export {run} --best --out {run}/export_of_step_2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "words", "key", "said"),
    [
        ("run", ["--step", "3"], "RUN", "no checkpoint of step 3. Saved steps: 2, 4, 6."),
        ("run", ["--out", "run"], "--out", "exists already"),
        ("run/checkpoints/step_00000004", [], "RUN", "no checkpoint of any step. Saved steps: none."),
        ("run/export", ["--best"], "RUN", "no checkpoint of the best step. Saved steps: none."),
        ("nothing", [], "RUN", "nothing"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: str,
    words: list[str],
    key: str,
    said: str,
) -> None:
    """Fails if a wrong folder or step is a traceback, or the error does not say what there is."""
    monkeypatch.chdir(run.parent)
    assert export.main([folder, *(words if "--out" in words else ["--out", "new", *words])]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"config error: {key} = ") and said in error and "Fix: " in error
    assert not Path("new").exists()


def test_a_run_without_a_best_step(tmp_path: Path) -> None:
    """Fails if --best of a run without trainer.keep_best takes any checkpoint."""
    make(tmp_path, World(), *SETTINGS, val=PROMPTS).fit()
    with refuses("RUN"):
        export.find_checkpoint(tmp_path / "run", None, best=True)


def test_the_card_says_what_the_student_was_made_of(run: Path) -> None:
    """Fails if the export of a run has no card, or the card lacks base, teacher, loss, data, command or the change."""
    text = (run / "export" / "README.md").read_text()
    for row in ("| base model | m |", "| teacher | t |", "| prompts | a |", "| loss | forward_kl |", "| steps | 6"):
        assert row in text, row
    assert "| validation KL | 0.3000 -> 0.3000 |" in text and "| command |" not in text
    words = '["/x/python", "-m", "gkd.main_gkd", "--config", "a b.yaml"]'
    (run / "environment.jsonl").write_text(f'{{"command": {words}}}\n{{"command": ["resumed"]}}\n')
    (run / "teacher.json").write_text('{"name": "t", "routes": {"a": {"name": "t"}, "b": {"name": "u"}}}')
    values = ("distill.losses=[{name: jsd, weight: 0.5}, {name: k1}]", "data.images_key=pictures")
    config = make(run.parent / "other", World(), *values, "model.path=org/name@abc").config
    write_card(run / "export", run, config, RunState(6), 4)
    text = (run / "export" / "README.md").read_text()
    assert "# run, step 4" in text and "| base model | org/name@abc |" in text and "| teacher | t, u |" in text
    assert "| loss | 0.5 jsd + k1 |" in text and "\npipeline_tag: image-text-to-text\n" in text
    assert "| command | /x/python -m gkd.main_gkd --config 'a b.yaml' |" in text


def test_an_evaluation_alone_trains_nothing(run: Path) -> None:
    """Fails if `gkd eval` measures other weights than those of the checkpoint, or makes a step."""
    world = World()
    trainer = make(run.parent / "eval", world, val=PROMPTS)
    trainer.evaluate(run / "checkpoints" / "step_00000004", 4)
    assert world.events[:2] == ["load", "push 4"] and "evaluate" in world.events and "train" not in world.events
    (numbers,) = read_metrics(trainer.folder.metrics_file)
    assert (numbers["step"], numbers["eval/kl"], numbers["eval/accuracy"]) == (4, 0.3, 0.5)
    assert (run / "checkpoints" / "step_00000004" / ACTOR).is_dir()


def test_without_a_teacher_nothing_is_compared_or_sampled_in_vain(tmp_path: Path) -> None:
    """Fails if an evaluation without a teacher has a KL, or a training run starts without one."""
    world = World()
    trainer = make(tmp_path, world, "teacher.backend=none", "eval.metric=exact_match", val=PROMPTS)
    trainer.evaluate(None, 0)
    (numbers,) = read_metrics(trainer.folder.metrics_file)
    assert {key for key in numbers if key.startswith("eval/")} == {"eval/accuracy"}
    assert not {"load", "evaluate", "chunk", "submit"} & {*world.events}
    with refuses("teacher.backend"):
        api.run(trainer.config, Closing("", []))


@pytest.mark.parametrize(
    ("own", "overrides", "expected"),
    [
        ((), [], {"eval.metric": "exact_match", "eval.max_prompts": 200, "trainer.total_steps": 1}),
        (("actor.optim.schedule=wsd", "actor.optim.decay_steps=3"), [], {"actor.optim.schedule": "constant"}),
        (
            ("trainer.scheduler=two_step_off", "trainer.loggers=[wandb]"),
            ["eval.n=4"],
            {"trainer.loggers": [], "eval.n": 4},
        ),
        (("distill.on_policy_share=0.5", "distill.loss=sft"), [], {"data.train_files": ["a"], "data.val_files": ["v"]}),
        (
            ("data.teacher_key=t", "teacher.routes={a: {server_port: 9}, default: {}}", "teacher.signal=hidden"),
            [],
            {"teacher.backend": "none"},
        ),
        (("teacher.backend=rollout", "teacher.prompt_template={answer}"), ["teacher.backend=none"], {}),
        (("teacher.tokenizer=t", "teacher.signal=units"), [], {"teacher.backend": "none"}),
    ],
)
def test_settings_of_an_evaluation(tmp_path: Path, own: Any, overrides: list[str], expected: dict[str, Any]) -> None:
    """Fails if settings of the training refuse an evaluation, or it measures by another function than the run."""
    make(tmp_path, World(), "trainer.total_steps=6", "data.val_files=[v]", *own)
    made = evaluate.settings(tmp_path / "run", None, overrides, tmp_path / "work", is_run=True)
    assert {key: made.value(key) for key in expected} == expected
    check_config(made)
    named = evaluate.settings(tmp_path / "run", "w", ["eval.max_prompts=5"], tmp_path / "work", is_run=True)
    assert (named.data.val_files, named.eval.max_prompts) == (["w"], 5)
    assert evaluate.settings(tmp_path / "run", "w", [], tmp_path, is_run=True).eval.max_prompts == 0


def test_nothing_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if an evaluation without prompts, teacher and metric starts processes, or does not say what is missing."""
    with refuses("--data"):
        evaluate.settings(tmp_path, None, [], tmp_path / "work", is_run=False)
    assert evaluate.main([str(tmp_path), "--data", "x", "teacher.server_port=9"]) == 2
    error = capsys.readouterr().err
    assert "no KL, because no teacher replies" in error and "config error: eval.metric = 'none'" in error
    assert evaluate.main([str(tmp_path), "--data", "hf://x/y.jsonl", "teacher.backend=none", "eval.metric=length"]) == 2
    assert "'hf://x/y.jsonl'" in capsys.readouterr().err, "a name of the hub, as data.val_files takes it"
    assert evaluate.main([str(tmp_path), "--data", "x", "--step", "3"]) == 2
    assert "config error: RUN = " in capsys.readouterr().err


def test_an_upload_makes_a_private_repository_and_names_the_token(tmp_path: Path) -> None:
    """Fails if --push leaves out a file, makes a public repository, or a refused upload does not name HF_TOKEN."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("---\ntags: [gkd]\n---\n")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 300)
    program = "import sys; from pathlib import Path; from gkd.hf.hub import upload\n"
    program += "print(upload(Path('model'), sys.argv[1]))"
    with Hub(tmp_path / "cache") as hub:

        def upload(repo: str, **environment: str) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-c", program, repo]
            env = hub.environment(**environment)
            return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

        done = upload("org/student", HF_TOKEN=hub.token)
        assert done.returncode == 0 and f"{hub.address}/org/student/commit/" in done.stdout, done.stderr
        assert "create org/student, private: True" in hub.requests
        assert hub.files("org/student").keys() == {"README.md", "model.safetensors"}
        for refused in (upload("org/student", HF_TOKEN="hf_wrong"), upload("org/student"), upload("no name")):
            assert refused.returncode == 1 and "set HF_TOKEN to a token" in refused.stderr
            assert "ConfigError: --push = " in refused.stderr
