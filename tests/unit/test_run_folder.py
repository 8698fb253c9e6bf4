"""Test the run folder: locking, refusals, resume, rewind, branches, samples, exports, and kills at each operation."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gkd.config.load import config_yaml, load_config
from gkd.config.schema import Config
from gkd.errors import CheckpointError, ConfigError
from gkd.run.checkpoints import TrainerState
from gkd.run.folder import SHOWN_RESPONSES, RunFolder
from gkd.run.open import check_same_run, open_run_folder
from gkd.types import Prompt, Sample, ScoredChunk, TokenRecord, TrainStats
from teacher_server.vision.images import EncodedImage
from tests.refusals import refuses
from tests.unit import world
from tests.unit.checkpoint_files import check_actor, written
from tests.unit.kills import in_child, kill_at
from tests.vision_models import picture


@cache
def config(run_dir: Path, *overrides: str) -> Config:
    base = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={run_dir}"]
    return load_config(None, [*base, *overrides])


def open_folder(settings: Config, fingerprint: str = "abc") -> RunFolder:
    return open_run_folder(settings, {"name": "teacher", "fingerprint": fingerprint})


def save(folder: RunFolder, step: int) -> Path:
    folder.commit_checkpoint(TrainerState(step, 6 * step), written(folder.store.begin(step), step))
    return folder.store.root / f"step_{step:08d}"


def resumed_step(folder: RunFolder) -> int | None:
    """Return the step from which a run of this folder resumes, and check the student's files."""
    loaded: list[Path] = []
    state = folder.resume(loaded.append)
    if state is None:
        return None
    assert state.sampler_position == 6 * state.step
    check_actor(loaded[0], state.step)
    return state.step


def test_a_folder_of_another_run_is_refused_or_resumed(tmp_path: Path) -> None:
    """If it fails, a second run overwrites the first, or silently resumes with other settings."""
    run_dir = tmp_path / "run"
    open_folder(config(run_dir, "actor.optim.lr=0.5"))
    open_folder(config(run_dir))  # the first run has no results yet, so its config may be corrected
    (run_dir / "metrics.jsonl").write_text("{}\n")
    with refuses("trainer.run_dir"):
        open_folder(config(run_dir))
    open_folder(config(run_dir, "trainer.resume=auto", "trainer.total_steps=9", "teacher.server_port=1"))
    with refuses("actor.optim.lr"):
        open_folder(config(run_dir, "trainer.resume=auto", "actor.optim.lr=0.1"))
    with refuses("teacher.server_port"):
        open_folder(config(run_dir, "trainer.resume=auto"), fingerprint="other")


def test_two_running_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    """If it fails, two runs of the same command write metrics and checkpoints into one folder."""
    first = open_folder(config(tmp_path / "run"))
    with refuses("trainer.run_dir"):
        open_folder(config(tmp_path / "run"))
    del first
    open_folder(config(tmp_path / "run"))


def test_a_damaged_teacher_file_is_named(tmp_path: Path) -> None:
    """If it fails, a resume raises a JSON error."""
    folder = open_folder(config(tmp_path / "run"))
    folder.metrics_file.write_text("{}\n")
    (tmp_path / "run" / "teacher.json").write_text("{")
    del folder
    with pytest.raises(ConfigError, match=r"teacher\.json"):
        open_folder(config(tmp_path / "run", "trainer.resume=auto"))


REWARDS = ("reward.functions=[{path: exact_match}]", "distill.reward_weight=1", "rollout.n=2")


@pytest.mark.parametrize(
    ("before", "changes", "refused"),
    [
        ((), ("actor.offload_train=true",), ""),
        ((), ("actor.tp=2", "trainer.n_gpus_per_node=2", "cluster.gpus=[0,1,2]", "teacher.fsdp_cpu_offload=false"), ""),
        ((), ("trainer.total_epochs=3",), ""),
        ((), ("trainer.total_epochs=3", "actor.optim.schedule=linear"), "actor.optim.schedule"),
        (("actor.optim.schedule=cosine",), ("trainer.total_steps=9",), "trainer.total_steps"),
        ((), ("data.system_prompt=Be brief.",), "data.system_prompt"),
        ((), ("rollout.top_k=20",), "rollout.top_k"),
        ((), ("data.seed=2",), "data.seed"),
        ((), ("eval.answer_marker=;",), ""),
        ((), ("distill.losses=[{name: jsd}]",), "distill.losses"),
        (REWARDS, ("eval.every=5",), ""),
        (REWARDS, ("eval.answer_marker=;",), "eval.answer_marker"),  # it would train on other rewards
    ],
)
def test_settings_that_a_resumed_run_may_change(
    tmp_path: Path, before: tuple[str, ...], changes: tuple[str, ...], refused: str
) -> None:
    """Fails if a resume refuses a key that does not change results, or accepts one that does."""
    (tmp_path / "config.yaml").write_text(config_yaml(config(tmp_path, *before)))
    with refuses(refused) if refused else nullcontext():
        check_same_run(tmp_path / "config.yaml", config(tmp_path, *before, *changes))


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    """If it fails, a run writes into a folder that belongs to something else."""
    (tmp_path / "x").write_text("mine")
    with refuses("trainer.run_dir"):
        open_folder(config(tmp_path))
    other = tmp_path / "other_tool"
    other.mkdir()
    (other / "config.yaml").write_text("theirs")
    with refuses("trainer.run_dir"):
        open_folder(config(other))
    assert (other / "config.yaml").read_text() == "theirs"
    for not_a_folder in (tmp_path / "x", tmp_path / "x" / "y"):
        with refuses("trainer.run_dir"):
            open_folder(config(not_a_folder))


def run_with_checkpoints(run_dir: Path, *overrides: str) -> list[Path]:
    """Write a run that ended at step 6 with checkpoints 2, 4 and 6, and return the checkpoint folders."""
    folder = open_folder(config(run_dir, "trainer.keep_last=9", *overrides))
    folder.metrics_file.write_text("{}\n")
    return [save(folder, step) for step in (2, 4, 6)]


def test_auto_resumes_from_the_newest_undamaged_checkpoint(tmp_path: Path) -> None:
    """Fails if a resume ignores a checkpoint, uses a damaged one, or leaves `latest` at a skipped one."""
    auto = config(tmp_path / "run", "trainer.resume=auto", "trainer.keep_last=9")
    assert resumed_step(open_folder(auto)) is None
    *_, newest = run_with_checkpoints(tmp_path / "run")
    assert load_config(newest / "config.yaml") == config(tmp_path / "run", "trainer.keep_last=9")
    assert resumed_step(open_folder(auto)) == 6
    (newest / "actor" / "common.pt").write_text("")
    folder = open_folder(auto)
    assert folder.store.newest() == newest.with_name("step_00000004")
    assert resumed_step(folder) == 4
    assert (folder.store.root / "latest").read_text() == "step_00000004\n"
    save(folder, 5)
    assert [path.name[-1] for path in folder.store.committed()] == ["2", "4", "5"]
    del folder
    for path in newest.parent.glob("step_*"):
        (path / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000005.*step_00000004.*step_00000002"):
        open_folder(auto)
    (tmp_path / "run" / "metrics.jsonl").unlink()  # a checkpoint alone makes it a run
    with refuses("trainer.run_dir"):
        open_folder(config(tmp_path / "run"))


def test_rewinding_to_a_named_checkpoint(tmp_path: Path) -> None:
    """Fails if a run cannot be rewound, or later checkpoints are deleted before the next save or kept after it."""
    run_dir = tmp_path / "run"
    two, four, six = run_with_checkpoints(run_dir)
    again = ("trainer.keep_last=9", f"trainer.resume={four}")
    with refuses("actor.optim.lr"):
        open_folder(config(run_dir, *again, "actor.optim.lr=0.1"))
    with refuses("teacher.server_port"):
        open_folder(config(run_dir, *again), fingerprint="other")
    assert (two.parent / "latest").read_text() == "step_00000006\n", "a refused run changes nothing"
    folder = open_folder(config(run_dir, *again))
    assert folder.store.newest() == six, "nothing is discarded before the checkpoint is loaded"
    assert resumed_step(folder) == 4
    assert folder.store.newest() == four and six.is_dir()
    save(folder, 7)
    assert [path.name[-1] for path in folder.store.committed()] == ["2", "4", "7"]
    assert not six.exists()


def test_a_branch_does_not_modify_the_original_run(tmp_path: Path) -> None:
    """Fails if a new run cannot start from the checkpoint of another run, or modifies that run."""
    two, *_ = run_with_checkpoints(tmp_path / "run", "actor.optim.lr=0.5")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    branch = ("trainer.keep_last=9", f"trainer.resume={two}")
    with refuses("actor.optim.lr"):
        open_folder(config(tmp_path / "branch", *branch))
    branch = (*branch, "actor.optim.lr=0.5")
    with refuses("teacher.server_port"):
        open_folder(config(tmp_path / "branch", *branch), fingerprint="other")
    assert not (tmp_path / "branch").exists(), "a refused run writes nothing"
    assert resumed_step(open_folder(config(tmp_path / "branch", *branch))) == 2
    assert resumed_step(open_folder(config(tmp_path / "branch", *branch))) == 2, "the first start has no results yet"
    folder = open_folder(config(tmp_path / "branch", *branch))
    folder.metrics_file.write_text("{}\n")
    del folder
    with refuses("trainer.run_dir"):
        open_folder(config(tmp_path / "branch", *branch))
    auto = config(tmp_path / "branch", "trainer.resume=auto", "actor.optim.lr=0.5")
    folder = open_folder(auto)
    assert resumed_step(folder) == 2, "a branch without its own checkpoint does not start at step 0"
    save(folder, 3)
    del folder
    assert resumed_step(open_folder(auto)) == 3
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_branch_finds_the_run_of_checkpoints_on_another_disk(tmp_path: Path) -> None:
    """Fails if changed training data is accepted because checkpoints/ is a link, so that its parent is not the run."""
    run_with_checkpoints(tmp_path / "run")
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "disk")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    marks = [{"key": "data.train_files", "file": "a", "rows": 3, "xxh3_128": mark} for mark in ("old", "new")]
    (tmp_path / "run" / "environment.jsonl").write_text(json.dumps({"data": marks[:1]}) + "\n")
    branch = config(tmp_path / "branch", f"trainer.resume={tmp_path / 'run' / 'checkpoints' / 'step_00000002'}")
    teacher = {"name": "teacher", "fingerprint": "abc"}
    with refuses("data.train_files"):
        open_run_folder(branch, teacher, marks[1:])
    assert resumed_step(open_run_folder(branch, teacher, marks[:1])) == 2
    own = config(tmp_path / "run", f"trainer.resume={tmp_path / 'disk' / 'step_00000002'}")
    assert resumed_step(open_folder(own)) == 2


def test_an_invalid_checkpoint_path_is_refused(tmp_path: Path) -> None:
    """Fails if a mistyped trainer.resume starts at step 0, or a named but damaged checkpoint is used."""
    two, four, six = run_with_checkpoints(tmp_path / "run")
    empty = tmp_path / "step_00000001"
    empty.mkdir()
    renamed = shutil.copytree(two, tmp_path / "best")
    for wrong in ("Auto", "", "always", two / "trainer.json", two.parent, tmp_path / "run", empty, renamed, "x" * 999):
        with refuses("trainer.resume"):
            open_folder(config(tmp_path / "new", f"trainer.resume={wrong}"))
    (two / "actor" / "common.pt").write_text("")
    (four / "manifest.json").unlink()
    for damaged, file in ((two, "common.pt"), (four, "manifest.json")):
        for run_dir in (tmp_path / "new", tmp_path / "run"):
            with pytest.raises(CheckpointError, match=file):
                open_folder(config(run_dir, f"trainer.resume={damaged}"))
    assert not (tmp_path / "new").exists()
    assert resumed_step(open_folder(config(tmp_path / "run", "trainer.resume=auto"))) == 6
    link = tmp_path / "link"
    link.symlink_to(six)
    assert resumed_step(open_folder(config(tmp_path / "new", f"trainer.resume={link}"))) == 6


def test_an_infinite_token_loss_is_written_as_null(tmp_path: Path) -> None:
    """If it fails, lines with infinite losses, the most interesting ones, are invalid JSON."""
    folder = open_folder(config(tmp_path / "run"))
    record = TokenRecord(7, 0, [4], [5, 6], {"total": [0.5, float("inf")]}, [[(5, 0.5, 0.25)], []])
    folder.write_token_losses(3, [record])
    (line,) = (tmp_path / "run" / "token_losses" / "step_00000003.jsonl").read_text().splitlines()
    expected = {
        **{"prompt_id": 7, "sample_index": 0, "prompt_ids": [4], "response_ids": [5, 6]},
        **{"values": {"total": [0.5, None]}, "choices": [[[5, 0.5, 0.25]], []]},
    }
    assert json.loads(line, parse_constant=pytest.fail) == expected


def test_a_later_rewind_replaces_an_earlier_one(tmp_path: Path) -> None:
    """Fails if the checkpoint that was named last is not used, or a damaged one is silently skipped."""
    run_dir = tmp_path / "run"
    two, four, six = run_with_checkpoints(run_dir)
    for named in (four, two):
        open_folder(config(run_dir, f"trainer.resume={named}", "trainer.keep_last=9"))
    auto = config(run_dir, "trainer.resume=auto", "trainer.keep_last=9")
    (two / "manifest.json").unlink()
    with pytest.raises(CheckpointError):
        open_folder(auto)
    open_folder(config(run_dir, f"trainer.resume={six}", "trainer.keep_last=9"))
    assert resumed_step(open_folder(auto)) == 6
    assert not (run_dir / "going_back").exists()


def test_a_missing_new_export_keeps_the_old_one(tmp_path: Path) -> None:
    """Fails if a failed replacement deletes the old export."""
    folder = open_folder(config(tmp_path / "run"))
    (folder.root / "export").mkdir()
    (folder.root / "export" / "config.json").write_text("old")
    with pytest.raises(CheckpointError):
        folder.publish_export()
    assert (folder.root / "export" / "config.json").read_text() == "old"


def test_samples_are_written_atomically_and_discarded_with_their_step(tmp_path: Path) -> None:
    """Fails if a full disk leaves a partial file, or samples of discarded steps are kept."""
    folder = open_folder(config(tmp_path / "run"))
    sample = Sample(1, [1], [2], "x" * 400, "y", correct=False, prompt="p")
    record = TokenRecord(7, 0, [4], [5, 6], {"total": [0.5, 0.25]})
    for step in (0, 2, 4):
        folder.write_samples(step, [sample])
        folder.write_token_losses(step, [record])

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        with pytest.raises(CheckpointError):
            folder.write_samples(6, [sample])

    assert in_child(on_a_full_disk) == 0
    (folder.root / "samples" / "notes.txt").write_text("mine")
    folder.forget_after(2)
    left = sorted(path.name for path in (folder.root / "samples").iterdir())
    assert left == ["notes.txt", "step_00000000.jsonl", "step_00000002.jsonl"]
    assert len(list((folder.root / "token_losses").iterdir())) == 2


def named_images(run: Path, folder: str) -> dict[int, list[str | None] | None]:
    lines = [line for file in (run / folder).iterdir() for line in file.read_text().splitlines()]
    return {row["prompt_id"]: row.get("images") for row in map(json.loads, lines)}


class Recording(world.World):
    """A world that keeps tokens of each response of an evaluation."""

    def evaluate(self, batch: Sequence[ScoredChunk], *, keep_tokens: int = 0) -> TrainStats:
        tokens = [TokenRecord(each.rollouts.ref, 0, [1], [2], {"sampled_reverse_kl": [0.1]}) for each in batch]
        return replace(super().evaluate(batch), tokens=tokens)


@pytest.mark.parametrize(("metric", "n"), [("none", 3), ("exact_match", 1), ("none", 0)])
def test_images_of_shown_prompts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, n: int) -> None:
    """Fails if images of other prompts are written, as of training prompts with the same ids, or a record lacks its.

    n: samples of validation prompts; 0: there are none, and the samples of steps 2 and 4 are training prompts.
    """
    images = [(EncodedImage(picture(8, 8, i)),) if i % 4 < 3 else () for i in range(14)]
    prompts = [Prompt(i % 8, np.array([1], np.int32), "x", images=images[i]) for i in range(14)]
    monkeypatch.setattr(world, "PROMPTS", prompts[:8])
    settings = (f"eval.metric={metric}", "eval.max_prompts=3", "trainer.total_steps=4", "eval.every=2")
    world.make(tmp_path, Recording(), *settings, val=prompts[8:] if n else ()).fit()
    run = tmp_path / "run"
    samples = named_images(run, "samples")
    records = named_images(run, "token_losses") if n else samples
    own = prompts[8:] if n else prompts[:8]
    names = {each.prompt_id: [f"{image.digest.hex()}.png" for image in each.images] or None for each in own}
    assert len(samples) == (n or 4) and len(records) == (3 if n else 4)
    assert all(files == names[prompt_id] for prompt_id, files in (*samples.items(), *records.items()))
    written = {file.name: EncodedImage(file.read_bytes()).digest.hex() for file in (run / "images").iterdir()}
    assert sorted(written) == sorted(str(name) for files in records.values() for name in files or ())
    assert all(name == f"{digest}.png" for name, digest in written.items())


def test_images_are_written_once_and_of_bounded_number(tmp_path: Path) -> None:
    """Fails if a step writes the images of all its samples, or all 64 of a video, or those that are there already."""
    folder = open_folder(config(tmp_path / "run"))
    images = {i: (EncodedImage(picture(8, 8, i)),) for i in range(SHOWN_RESPONSES + 1)}
    images[0] = tuple(EncodedImage(picture(8, 8, 50 + i, ("PNG", "JPEG", "WEBP")[i % 3])) for i in range(9))
    times = []
    for step in (1, 2):
        folder.write_samples(step, [Sample(i, [1], [2], "", "", correct=None, prompt="") for i in images], images)
        times.append({file.name: file.stat().st_mtime_ns for file in (folder.root / "images").iterdir()})
    found = named_images(folder.root, "samples")
    assert times[0] == times[1] and len(times[0]) == SHOWN_RESPONSES - 1 + 8 and found[SHOWN_RESPONSES] is None
    ends = [name and name.rpartition(".")[2] for name in found[0] or ()]
    assert ends == ["png", "jpg", "webp", "png", "jpg", "webp", "png", "jpg", None]


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the error blames permissions or another run."""

    def flock(descriptor: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError) as caught:
        open_folder(config(tmp_path / "run"))
    assert caught.value.key == "trainer.run_dir" and "flock" in caught.value.fix


def kill_at_every_operation(before: Path, now: Path, work: Callable[[], object], look: Callable[[], None]) -> int:
    """Run `work` on a copy of `before` in `now`, killed before its n-th file operation for n = 1, 2, ...

    Call `look` after each. Return the number of runs: the last one was not killed.
    """
    n = 0
    while True:
        n += 1
        shutil.rmtree(now, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, now)

        def killed(n: int = n) -> None:
            kill_at(n)
            work()

        code = in_child(killed)
        assert code in (0, -signal.SIGKILL), (n, code)
        look()
        if code == 0:
            return n


def test_a_kill_at_every_operation_of_a_first_start(in_memory: Path) -> None:
    """Fails if a killed start leaves a folder that later starts refuse."""
    run_dir = in_memory / "run"

    def look() -> None:
        assert resumed_step(open_folder(config(run_dir, "trainer.resume=auto"))) is None
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        open_folder(config(run_dir))

    assert kill_at_every_operation(in_memory / "none", run_dir, lambda: open_folder(config(run_dir)), look) > 5
    (run_dir / "config.yaml").unlink()
    (run_dir / "notes.txt").touch()
    with refuses("trainer.run_dir"):
        open_folder(config(run_dir))


def test_a_kill_at_every_operation_of_a_branch_s_first_start(in_memory: Path) -> None:
    """Fails if `auto` starts at step 0 in the folder of a branch."""
    two, *_ = run_with_checkpoints(in_memory / "run")
    run_dir, seen = in_memory / "branch", set()

    def look() -> None:
        recorded = (run_dir / "branched_from").exists()
        assert recorded or not (run_dir / "config.yaml").exists(), "a run's folder does not say that it is a branch"
        step = resumed_step(open_folder(config(run_dir, "trainer.resume=auto")))
        assert step == (2 if recorded else None)
        seen.add(step)

    def start() -> None:
        open_folder(config(run_dir, f"trainer.resume={two}"))

    kill_at_every_operation(in_memory / "none", run_dir, start, look)
    assert seen == {2, None}


def test_a_kill_at_every_operation_of_a_rewind(in_memory: Path) -> None:
    """Fails if a run that died before it loaded the rewind's checkpoint resumes from the newest one."""
    *_, four, _ = run_with_checkpoints(in_memory / "before")
    run_dir, seen = in_memory / "run", set()
    auto = config(run_dir, "trainer.resume=auto", "trainer.keep_last=9")

    def look() -> None:
        recorded = (run_dir / "going_back").exists()
        folder = open_folder(auto)
        assert resumed_step(folder) == (4 if recorded else 6)
        if recorded not in seen:
            save(folder, 7)
            del folder
            assert resumed_step(open_folder(auto)) == 7, "a rewind happens once"
        seen.add(recorded)

    def start() -> None:
        open_folder(config(run_dir, f"trainer.resume={run_dir / 'checkpoints' / four.name}", "trainer.keep_last=9"))

    kill_at_every_operation(in_memory / "before", run_dir, start, look)
    assert seen == {True, False}


def write_export(folder: Path, text: str) -> None:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(text)


def test_a_kill_at_every_operation_of_an_export_replacement(in_memory: Path) -> None:
    """Fails if a kill can leave an incomplete export or none."""
    folder = open_folder(config(in_memory / "before"))
    write_export(folder.root / "export", "old")
    write_export(folder.new_export, "new")
    del folder
    run_dir, seen = in_memory / "run", set()

    def texts() -> set[str]:
        return {(run_dir / "export" / name).read_text() for name in ("config.json", "model.safetensors")}

    def exchange() -> None:
        RunFolder(run_dir, config(run_dir), {}, (run_dir / ".lock").open(), None).publish_export()

    def look() -> None:
        if (run_dir / "export").exists():
            assert len(texts()) == 1, "an incomplete export under the final name"
        open_folder(config(run_dir))
        (text,) = texts()
        assert not list(run_dir.glob(".*export*"))
        seen.add(text)

    assert kill_at_every_operation(in_memory / "before", run_dir, exchange, look) > 4
    assert seen == {"old", "new"}
