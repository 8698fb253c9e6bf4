"""Send the numbers of metrics.jsonl to experiment trackers, too: `trainer.loggers`.

Each tracker is written by its own library, which is imported only if the tracker is named. An error of a tracker does
not end the run. Without the address of a server in its environment variables a library writes into the run folder.

A run that resumes with trainer.resume=auto continues the tracker's run, and repeats the steps after its checkpoint.
TensorBoard discards the earlier values of these steps. The others cannot, so they receive of these steps only numbers
that the earlier lines lack, such as those of an evaluation in which a rank failed.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys
from gkd.log import get_logger
from gkd.metrics.writer import read_metrics
from gkd.run.disk import naming, replace_file
from gkd.run.folder import RunFolder

log = get_logger("trackers")

_STATE = "trackers.json"  # file in the run folder: id of the trackers' run, and the last step that they may have
_PARAMS_PER_CALL = 100  # limit of MLflow


class Tracker(Protocol):
    """One tracker of one run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one line; they are finite."""

    def close(self) -> None:
        """Send what is pending, and end the tracker's run."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The part of a run that its trackers need.

    Args:
        first_step: the first step that this start makes, after its checkpoint's step.
        is_continued: the tracker has a run with this id.
        settings: key of the config -> value.
    """

    folder: Path
    run_id: str
    project: str
    name: str
    first_step: int
    is_continued: bool
    settings: dict[str, Any]


class TensorBoard:
    """Event files in run_dir/tensorboard, written without torch and TensorFlow."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._summary = Summary
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        restart = SessionLog(status=SessionLog.START)  # readers discard earlier values from this step on
        config = text_pb("config", "".join(f"    {key}: {value!r}\n" for key, value in run.settings.items()))
        for content in ({"session_log": restart}, {"summary": config}):
            self._writer.add_event(Event(wall_time=time.time(), step=run.first_step, **content))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. WANDB_MODE selects online or offline; unset: online if there is an API key.

    Its own steps only count up: it drops or moves a line of a step that it has, such as an evaluation made at resume.
    So the x axis of the charts is the number `step`.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        names = {"project": run.project, "name": run.name, "id": run.run_id}
        self._run = wandb.init(dir=run.folder, config=run.settings, mode=mode, resume="allow", **names)
        self._run.define_metric("*", step_metric="step")
        self._next = self._run.starting_step

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        own_step = max(step, self._next)
        self._next = own_step + 1
        self._run.log({**numbers, "step": step}, step=own_step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, at MLFLOW_TRACKING_URI or in run_dir/mlflow.db."""

    def __init__(self, run: TrackedRun) -> None:
        # Without limits of its own a server that does not reply holds up each step for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / 'mlflow.db'}")
        existing = self._client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
        earlier = (
            self._client.search_runs([experiment], f"tags.`gkd.run_id` = '{run.run_id}'") if run.is_continued else []
        )
        self._run_id = (
            earlier[0]
            if earlier
            else self._client.create_run(experiment, run_name=run.name, tags={"gkd.run_id": run.run_id})
        ).info.run_id
        params = [] if earlier else [Param(key, str(value)) for key, value in run.settings.items()]
        for i in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[i : i + _PARAMS_PER_CALL])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Trackio:
    """Trackio, at TRACKIO_SERVER_URL or TRACKIO_SPACE_ID, else in TRACKIO_DIR, by default run_dir/trackio."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder / "trackio"))  # read when the library is imported
        import trackio

        resume = "allow" if run.is_continued else "never"
        self._run = trackio.init(run.project, name=run.name, config=run.settings, resume=resume, embed=False)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


class Trackers:
    """All trackers of `trainer.loggers`. An error of one of them is logged once and does not end the run.

    Args:
        resumed_at: the step of the checkpoint that the run has loaded; None means a new run. Create the trackers before
            metrics.jsonl is truncated to this step.

    Raises:
        CheckpointError: a file of the run folder cannot be read or written.
    """

    def __init__(self, config: Config, folder: RunFolder, resumed_at: int | None) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._failed: set[str] = set()
        self._had_lines: set[str] = set()  # trackers that have lines of the run before this start
        self._repeated: dict[int, set[str] | None] = {}  # step -> numbers that trackers have already; None: all
        if not config.trainer.loggers:
            return
        run_id, through, lines, self._had_lines = _continued(config, folder, resumed_at)
        run = TrackedRun(
            folder.root,
            run_id or uuid.uuid4().hex[:8],
            config.trainer.project_name,
            folder.root.resolve().name,
            first_step=0 if resumed_at is None else resumed_at + 1,
            is_continued=run_id is not None,
            settings={name: config.value(name) for name in all_keys()},
        )
        self._repeated = dict.fromkeys(range(run.first_step, through + 1))
        for line in lines:
            if (step := int(line["step"])) in self._repeated:
                self._repeated[step] = {*line, *(self._repeated[step] or ())}
        loggers = sorted(self._had_lines | set(config.trainer.loggers))
        state = {"id": run.run_id, "through": through, "folder": str(folder.root.resolve()), "loggers": loggers}
        with naming(folder.root / _STATE):
            replace_file(folder.root / _STATE, json.dumps(state).encode())
        for name in config.trainer.loggers:
            with self._never_fatal(name, "was not opened"):
                self._trackers[name] = TRACKERS[name](run)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the finite numbers of one line to every tracker."""
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        has = self._repeated.get(step, set())
        news = {} if has is None else {name: value for name, value in finite.items() if name not in has}
        for name, tracker in self._trackers.items():
            # TensorBoard discards the steps from a restart on; a tracker that the resume adds never had them.
            if sent := finite if isinstance(tracker, TensorBoard) or name not in self._had_lines else news:
                with self._never_fatal(name, f"did not receive step {step}"):
                    tracker.log(step, sent)

    def close(self) -> None:
        """End the trackers' runs; waits until they have sent what is pending."""
        for name, tracker in self._trackers.items():
            with self._never_fatal(name, "was not closed"):
                tracker.close()

    @contextmanager
    def _never_fatal(self, name: str, problem: str) -> Iterator[None]:
        """Log the first error of each tracker. Any library error: a run of days must not end because of a chart."""
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                text = "tracker %s %s (%s: %s); the run continues, and metrics.jsonl has all numbers"
                log.warning(text, name, problem, type(error).__name__, error)
            self._failed.add(name)


def _continued(
    config: Config, folder: RunFolder, resumed_at: int | None
) -> tuple[str | None, int, Sequence[Mapping[str, float]], set[str]]:
    """Return the id of the trackers' run that this start continues, the last step, lines and trackers that it may have.

    A new run, a branch, a rewind to a named checkpoint and a copy of a folder begin a run of their own, without lines.
    """
    file = folder.root / _STATE
    if resumed_at is None or config.trainer.resume != "auto" or folder.goes_back or not file.exists():
        return None, -1, (), set()
    with naming(file, "read"):
        state = json.loads(file.read_bytes())
    if _is_copy(file, state):
        return None, -1, (), set()
    lines = read_metrics(folder.metrics_file) if folder.metrics_file.exists() else []
    through = max([int(state["through"]), *(int(line["step"]) for line in lines)])
    return str(state["id"]), through, lines, set(state["loggers"])


def _is_copy(file: Path, state: Mapping[str, Any]) -> bool:
    """Return whether the folder that the state names is another one, and still that of the trackers' run."""
    try:
        original = Path(state["folder"]) / _STATE
        return not original.samefile(file) and json.loads(original.read_bytes())["id"] == state["id"]
    except (OSError, ValueError):  # the folder was moved
        return False
