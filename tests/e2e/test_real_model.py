"""The example with a real language model, in a short form. Downloads 331 MB, takes minutes: not run in CI."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gkd.metrics.writer import read_metrics
from tests.e2e.test_quickstart import ENVIRONMENT, ROOT, strangers
from tests.processes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SHORT = ("trainer.total_steps=2", "eval.max_prompts=4", "data.max_response_length=16", "trainer.global_batch_size=4")
COMMAND = [sys.executable, "-m", "examples.real_model", *SHORT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory; the example writes its model and its runs there."""
    made = tmp_path_factory.mktemp("real_model")
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.mark.parametrize("task", ["rule", "shrink"])
def test_the_example_prints_responses_from_before_and_after(folder: Path, task: str) -> None:
    """Fails if the example does not run to its table on a machine that has nothing but the package index."""
    command = [*COMMAND, "--task", task, "--results", f"{task}.json"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "responses of one sentence" in done.stdout and "What makes salt special?" in done.stdout
    found = json.loads((folder / f"{task}.json").read_text())
    assert found["steps"] == 2 and len(found["responses"]) == 4 and all(kl > 0 for kl in found["kl"])
    assert found["peak_gib"] > 2  # the student with its optimizer, the engine and the teacher
    assert not strangers(folder)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("teacher", [[], ["--teacher", "smollm2"]], ids=["gemma3", "smollm2"])
def test_gemma_learns_in_packs_that_are_longer_than_its_window(folder: Path, teacher: list[str]) -> None:
    """Fails if Gemma's packs compute something else than vLLM, or if its terms are shown after the download."""
    results = folder / f"examples{len(teacher)}.json"
    command = [*COMMAND, "--task", "examples", *teacher, "trainer.global_batch_size=8", "--results", str(results)]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if fetching := "fetching 238 MB" in done.stdout:
        assert 0 < done.stdout.find("Gemma Terms of Use") < done.stdout.find("fetching 238 MB")
    assert fetching or teacher, "the test without a teacher of its own runs first, and fetches the model"
    assert (folder / "models/gemma3/whole/GEMMA_TERMS.html").stat().st_size > 10_000
    run_dir = sorted((folder / "runs/real_model").glob("examples-*/metrics.jsonl"))[-1]
    first = next(line for line in read_metrics(run_dir) if line["step"] == 1)
    assert first["rollout/prompt_tokens"] > 512  # at least one prompt has the examples
    assert 0 <= first["loss/engine_kl"] < 1e-6 and first["loss/token_kl"] > 0.1
    found = json.loads(results.read_text())
    assert found["steps"] == 2 and all(kl > 0 for kl in found["kl"])
    assert not strangers(folder)


def test_an_interrupt_leaves_no_process(folder: Path) -> None:
    """Fails if Ctrl-C in training leaves a teacher server or processes of Ray."""
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(COMMAND, cwd=folder, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)
    wait_until(lambda: "step 1/2" in log.read_text(), 300, "the first step")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    wait_until(lambda: not strangers(folder), 30, "the end of all processes")
