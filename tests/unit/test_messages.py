"""Compare the wording of messages with messages.txt: the test that asserts on whole sentences.

After a wanted change `python -m tests.unit.test_messages` writes the file; read the difference before you commit it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.console.state import step_line
from gkd.data.score_checks import Rows, validate_topk
from gkd.errors import GkdError
from gkd.metrics.bottleneck import shares
from gkd.pipeline.staleness import check_staleness
from gkd.run.checkpoints import CheckpointStore, read_state
from gkd.types import TeacherTopK
from teacher_server.config.settings import check_name, tcp_endpoint
from teacher_server.errors import ServerError
from tests.unit.console_runs import run
from tests.unit.world import PROMPTS, answers

FILE = Path(__file__).with_name("messages.txt")
VALID = ["data.train_files=[a.jsonl]", "model.path=m", "trainer.run_dir=r"]
SETTINGS = (
    "distill.loss=rkl",
    "actor.optim.learning_rate=1e-3",
    "trainer.total_steps=many",
    "data.train_files=a.jsonl",
    "model.path=",
    "teacher.topk=0",
    "trainer.scheduler=async",
    "rollout.tp=2",
    "actor.pp=3",
    "distill.on_policy_share=1.5",
    "teacher.signal=sampled",
    "trainer.stage_timeout_s=1",
    "teacher.backend=local",
)


def message(action: Callable[[], object]) -> str:
    """Return type and text of the error that `action` raises."""
    try:
        action()
    except (GkdError, ServerError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def messages(folder: Path) -> Iterator[str]:
    """Yield the messages in the order of the file, with FOLDER in the place of `folder`."""
    for setting in SETTINGS:
        yield message(lambda setting=setting: check_config(load_config(None, [*VALID, setting])))
    state = folder / "step_00000001"
    state.mkdir()
    yield message(lambda: read_state(state))
    yield message(lambda: CheckpointStore(folder).commit(3, {}, {}))
    ids, logprobs = np.array([[1, 1]]), np.log(np.array([[0.5, 0.25]], np.float32))
    yield message(
        lambda: validate_topk(TeacherTopK(ids, logprobs, np.array([0.25], np.float32)), 10, Rows(["prompt 3"], [1]))
    )
    chunk = answers(PROMPTS[0], [0], 8, 0, 1)
    scored = type("Scored", (), {"rollouts": chunk})
    yield message(lambda: check_staleness([scored], 4, 1, "one_step_off"))  # type: ignore[list-item]
    yield message(lambda: tcp_endpoint("--server", "nowhere"))
    yield message(lambda: check_name("a b", "--name"))
    times = {f"time/{stage}_s": 1.0 for stage in ("rollout", "teacher", "train", "weight_sync")} | {"time/step_s": 4.0}
    m = times | shares(times, "sync") | {"loss/total": 0.5, "optim/grad_norm": 1.0, "rollout/response_tokens": 640.0}
    state = run(120)
    state.add(3, m)
    yield step_line(state)


def written() -> str:
    with tempfile.TemporaryDirectory() as folder:
        lines = [line.replace(folder, "FOLDER") for line in messages(Path(folder))]
    return "\n".join(lines) + "\n"


def test_messages_read_as_they_were_approved() -> None:
    """Fails if the wording of a message changed unnoticed, or an error lost its key, value or fix."""
    assert written() == FILE.read_text()


if __name__ == "__main__":
    FILE.write_text(written())
