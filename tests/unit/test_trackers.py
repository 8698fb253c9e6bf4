"""Test the experiment trackers with their real libraries, offline. A tracker's test is skipped without its library."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.config.schema_sections import TRACKER_NAMES, all_keys
from gkd.errors import ClusterError, TeacherUnavailable
from gkd.metrics import trackers
from gkd.metrics.writer import read_metrics
from gkd.preflight.run import preflight
from gkd.types import ScoredChunk, TrainStats
from tests.refusals import refuses
from tests.unit.world import PROMPTS, World, make

SETTINGS = ("trainer.total_steps=5", "trainer.save_every=2", "trainer.project_name=p")
Values = Counter[tuple[int, str, float]]  # (step, key, value) -> how often the tracker has it


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)


def read_tensorboard(run_dir: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert b"trainer.total_steps: 5\n" in events.Tensors("config")[0].tensor_proto.string_val[0]
    return Counter((event.step, tag, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag))


def read_mlflow(run_dir: Path) -> Values:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.run_name == "run" and run.data.params.keys() == all_keys().keys()
    assert run.data.params["trainer.total_steps"] == "5"
    points = [point for key in run.data.metrics for point in client.get_metric_history(run.info.run_id, key)]
    return Counter((point.step, point.key, point.value) for point in points)


def read_trackio(run_dir: Path) -> Values:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("p")
    assert run.name == "run" and run.config["trainer.total_steps"] == 5
    lines = SQLiteStorage.get_logs("p", "run")
    return Counter((line["step"], key, value) for line in lines for key, value in line.items() if "/" in key)


def read_wandb(run_dir: Path) -> Values:
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "the resumed run has the same id"
    values: Values = Counter()
    for file in files:
        for content in wandb_records(file.read_bytes()):
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "run":
                assert (record.run.project, record.run.display_name) == ("p", "run")
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = record.history.step.num
            values += Counter((step, key, value) for key, value in items.items() if "/" in key)
    return values


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of an offline run's file: LevelDB's log format after 7 bytes, in blocks of 32 KiB."""
    position, parts = 7, []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, position + 4)
        parts.append(data[position + 7 : position + 7 + size])
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


READERS: Mapping[str, Callable[[Path], Values]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.parametrize("name", TRACKER_NAMES)
def test_a_tracker_has_every_number_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a tracker misses a number of metrics.jsonl, or a resumed run starts another tracker run or logs the
    repeated steps twice.
    """
    if name != "tensorboard":
        pytest.importorskip(name, reason=f"the extra {name} is not installed")
    if name == "trackio":  # the library reads its folder once per process
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    world, again = World(rank_dies_at=3), World()  # the newest checkpoint is that of step 2
    with pytest.raises(ClusterError):
        make(tmp_path, world, *SETTINGS, f"trainer.loggers=[{name}]", val=PROMPTS[:1]).fit()
    lost = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["step"] > 2]
    settings = (*SETTINGS, f"trainer.loggers=[{name}]", "trainer.resume=auto")
    make(tmp_path, again, *settings, val=PROMPTS[:1]).fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lost] == [3] and [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    found = READERS[name](tmp_path / "run")
    assert {(step, key): n for (step, key, _), n in found.items() if n != 1} == {}
    values = {(step, key): value for step, key, value in found}
    assert len(values) == len(found)
    kept = {line["step"]: line for line in lines} | ({} if name == "tensorboard" else {3: lost[0]})
    expected = {(int(step), key): value for step, line in kept.items() for key, value in line.items() if key != "step"}
    assert values == pytest.approx(expected, rel=1e-6)


class FakeWandB:
    """The module wandb with a server: a run that resumes drops a line whose step the server has."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []
        self.starting_step = 0
        self._last = -1
        self.axes: dict[str, str] = {}

    def init(self, **_: object) -> FakeWandB:
        self.starting_step = self._last + 1
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if step > self._last:
            self.rows.append(numbers)
            self._last = step

    def finish(self) -> None:
        pass


def test_wandb_has_an_evaluation_made_at_resume_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if W&B drops the evaluation of a step that it has, or shows it, or a line after it, at another step."""
    server, first = FakeWandB(), World(teacher_dies_at=2)  # in the evaluation of step 2, which is saved
    monkeypatch.setitem(sys.modules, "wandb", server)
    settings = (*SETTINGS, "trainer.loggers=[wandb]", "eval.every=2")
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, first, *settings, val=PROMPTS[:1]).fit()
    make(tmp_path, World(), *settings, "trainer.resume=auto", val=PROMPTS[:1]).fit()
    evaluated = [row[server.axes["*"]] for row in server.rows if "eval/kl" in row]
    trained = [row[server.axes["*"]] for row in server.rows if "loss/total" in row]
    assert (evaluated, trained) == ([0, 2, 4, 5], [1, 2, 3, 4, 5])


class LostInEvaluation(World):
    """Its rank fails in the evaluation of step 4, so that the step is not saved."""

    def evaluate(self, batch: Sequence[ScoredChunk], *, keep_tokens: int = 0) -> TrainStats:
        if self.engine_version == 4:
            raise ClusterError("actor rank 1: the process died")
        return super().evaluate(batch, keep_tokens=keep_tokens)


def test_a_repeated_step_brings_the_evaluation_that_it_lacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an evaluation in which a rank failed is never in a tracker, or a number of a step is there twice."""
    server = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", server)
    settings = ("trainer.total_steps=5", "trainer.save_every=3", "trainer.loggers=[wandb]", "eval.every=4")
    with pytest.raises(ClusterError):
        make(tmp_path, LostInEvaluation(), *settings, val=PROMPTS[:1]).fit()
    make(tmp_path, World(), *settings, "trainer.resume=auto", val=PROMPTS[:1]).fit()
    counts = Counter((row["step"], key) for row in server.rows for key in row if key != "step")
    assert [step for step, key in counts if key == "eval/kl"] == [0, 4, 5]
    assert set(counts.values()) == {1}


def test_a_tracker_that_a_resume_adds_has_the_repeated_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if its charts begin behind the last step of the trackers before it, or later resumes repeat steps in it."""
    server = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", server)
    settings = ("trainer.save_every=3", "eval.every=4", "trainer.loggers=[tensorboard]")
    with pytest.raises(ClusterError):
        make(tmp_path, LostInEvaluation(), *settings, "trainer.total_steps=5", val=PROMPTS[:1]).fit()
    for n_steps in (5, 6):
        more = ("trainer.loggers=[tensorboard,wandb]", "trainer.resume=auto", f"trainer.total_steps={n_steps}")
        make(tmp_path, World(), *settings, *more, val=PROMPTS[:1]).fit()
    assert [row["step"] for row in server.rows if "loss/total" in row] == [4, 5, 6]


class Unloadable(World):
    def load(self, folder: Path) -> None:
        raise ClusterError("actor rank 0: the process died")


def test_a_rewind_whose_first_start_failed_starts_a_new_run_of_the_tracker(tmp_path: Path) -> None:
    """Fails if trackers keep the values of discarded steps, and do not get those of the steps that replace them."""
    settings = (*SETTINGS, "trainer.loggers=[tensorboard]")
    make(tmp_path, World(), *settings).fit()
    before = json.loads((tmp_path / "run" / "trackers.json").read_bytes())
    back = tmp_path / "run" / "checkpoints" / "step_00000004"
    with pytest.raises(ClusterError):
        make(tmp_path, Unloadable(), *settings, f"trainer.resume={back}").fit()
    make(tmp_path, World(), *settings, "trainer.resume=auto").fit()
    rewound = json.loads((tmp_path / "run" / "trackers.json").read_bytes())
    assert rewound["id"] != before["id"] and rewound["through"] == -1
    make(tmp_path, World(), *settings, "trainer.resume=auto").fit()
    assert json.loads((tmp_path / "run" / "trackers.json").read_bytes())["id"] == rewound["id"]


def test_a_copy_of_a_run_folder_is_another_run_of_the_tracker(tmp_path: Path) -> None:
    """Fails if a run that goes on in a copy writes into the original's run, or a moved folder begins another one."""
    settings = (*SETTINGS, "trainer.loggers=[tensorboard]")
    make(tmp_path / "a", World(), *settings).fit()
    before = json.loads((tmp_path / "a" / "run" / "trackers.json").read_bytes())
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    make(tmp_path / "copy", World(), *settings, "trainer.resume=auto").fit()
    copied = json.loads((tmp_path / "copy" / "run" / "trackers.json").read_bytes())
    assert copied["id"] != before["id"]
    (tmp_path / "a").rename(tmp_path / "moved")
    make(tmp_path / "moved", World(), *settings, "trainer.resume=auto").fit()
    assert json.loads((tmp_path / "moved" / "run" / "trackers.json").read_bytes())["id"] == before["id"]
    make(tmp_path / "copy", World(), *settings, "trainer.resume=auto").fit()
    assert json.loads((tmp_path / "copy" / "run" / "trackers.json").read_bytes())["id"] == copied["id"]


def test_without_trackers_no_library_is_imported(tmp_path: Path) -> None:
    """Fails if a run without trackers needs or loads one of their libraries."""
    code = f"import sys, gkd.metrics.run_metrics; print([m for m in ('torch', *{TRACKER_NAMES}) if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    make(tmp_path, World(), *SETTINGS).fit()
    assert not (tmp_path / "run" / "trackers.json").exists() and not (tmp_path / "run" / "tensorboard").exists()


class Unreliable:
    """A tracker whose server is lost after the first step."""

    def __init__(self, run: trackers.TrackedRun) -> None:
        self.steps: list[int] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.steps.append(step)
        if step > 1:
            raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


@pytest.mark.parametrize("opens", [True, False])
def test_a_failing_tracker_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gkd_log: pytest.LogCaptureFixture, opens: bool
) -> None:
    """Fails if a lost server ends the run, fills the log, or keeps the numbers from the other trackers."""
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Unreliable)
    trainer = make(tmp_path, World(), *SETTINGS, "trainer.loggers=[wandb,tensorboard]")
    if not opens:
        (tmp_path / "run" / "tensorboard").write_text("not a folder")
    trainer.fit()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 5
    logged = [record.getMessage() for record in gkd_log.records if record.name == "gkd.trackers"]
    assert [line.split()[1] for line in logged] == (["wandb"] if opens else ["tensorboard", "wandb"])
    if opens:
        assert {step for step, _, _ in read_tensorboard(tmp_path / "run")} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", TRACKER_NAMES)
def test_a_library_that_is_not_installed_is_refused_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a missing library is found only after the models are loaded, or the error names another extra."""
    monkeypatch.setitem(sys.modules, name, None)
    config = load_config(
        None, ["data.train_files=[a]", "model.path=m", "trainer.run_dir=r", f"trainer.loggers=[{name}]"]
    )
    with refuses("trainer.loggers", name, text=f'pip install -e ".[{name}]"'):
        preflight(config)
