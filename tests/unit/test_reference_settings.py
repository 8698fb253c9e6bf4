"""Settings of the reference: valid combinations, its model folder, its memory, and when it is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.data.prompts import load_tokenizer
from gkd.data.scatter import ChunkInputs, scatter_to_groups
from gkd.errors import ConfigError
from gkd.hf.model_dims import read_dims
from gkd.memory.footprint.estimate import HOST_PARTS
from gkd.metrics.writer import read_metrics
from gkd.preflight.meta_models import check_reference
from gkd.run.open import open_run_folder
from gkd.types import PendingScores, ScoredChunk
from tests.dist.hf_models import make_model_folder
from tests.dist.megatron_reference import VOCAB, make_hf_folder
from tests.random_models import word_tokenizer
from tests.rollout_chunks import chunk_of
from tests.unit.test_footprint import GSM8K, QWEN25_15B, folder_of, ranks_of
from tests.unit.world import PROMPTS, World, make

ON = "distill.reference_kl_weight=0.1"
LORA = ("actor.strategy=fsdp2", "actor.lora.rank=8")


def config(*overrides: str) -> Config:
    return load_config(None, ["data.train_files=[a]", "model.path=student", "trainer.run_dir=r", *overrides])


@pytest.mark.parametrize(
    ("overrides", "folder", "is_actor"),
    [
        ((), "", False),
        ((ON,), "student", False),
        ((ON, "reference.path=other", "reference.fsdp_cpu_offload=false"), "other", False),
        ((ON, *LORA), "", True),
        ((ON, *LORA, "reference.path=other"), "other", False),
        (LORA, "", False),
        ((ON, "trainer.scheduler=stream", "distill.on_policy_share=0.5"), "student", False),
    ],
)
def test_the_reference_model(overrides: tuple[str, ...], folder: str, is_actor: bool) -> None:
    """Fails if a second model is loaded although the actor is the reference, or a named one is not loaded."""
    found = config(*overrides)
    derived = check_config(found)
    assert (derived.reference_folder, derived.reference_is_actor) == (folder, is_actor)
    # A reference whose shards stay on the GPU needs the memory of the actor's states.
    assert derived.moves_states == (not found.reference.fsdp_cpu_offload)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reference")
    student = make_hf_folder(root / "student", "qwen3")
    word_tokenizer(VOCAB).save_pretrained(student)
    for name in ("other", "cut", "strange", "bare"):
        shutil.copytree(student, root / name)
    shutil.copytree(make_model_folder(root / "olmo2", "olmo2"), root / "other", dirs_exist_ok=True)
    (root / "cut" / "model.safetensors").unlink()
    (root / "bare" / "tokenizer.json").unlink()
    tokenizer = json.loads((root / "strange" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["w1"], vocab["w2"] = vocab["w2"], vocab["w1"]
    (root / "strange" / "tokenizer.json").write_text(json.dumps(tokenizer))
    make_model_folder(root / "opt", "opt")
    return root


def check(root: Path, *overrides: str, vocab: int = VOCAB) -> str:
    sizes = ("data.max_prompt_length=40", "data.max_response_length=24", f"model.path={root / 'student'}")
    tokenizer = load_tokenizer(str(root / "student"), "model.path", trust_remote_code=False)
    return check_reference(config(ON, *sizes, *overrides), tokenizer, vocab)


def test_valid_folders(root: Path) -> None:
    """Fails if the student itself, or a model of another architecture with its tokenizer, is refused."""
    check(root)
    check(root, f"reference.path={root / 'other'}")


@pytest.mark.parametrize(
    ("name", "changes", "key", "text"),
    [
        ("nothing", (), "reference.path", ""),
        ("cut", (), "reference.path", r"model\.safetensors"),
        ("bare", (), "reference.path", r"tokenizer\.json"),
        ("strange", (), "reference.path", r"'w1' \(1 and 2\)"),
        ("other", ("data.max_response_length=25",), "reference.path", "65 .* 64"),
        ("", ("data.max_response_length=25",), "model.path", "64"),
    ],
)
def test_invalid_folders(root: Path, name: str, changes: tuple[str, ...], key: str, text: str) -> None:
    """Fails if only the ranks detect an unusable reference, or the error names another key."""
    with pytest.raises(ConfigError, match=text) as caught:
        check(root, *((f"reference.path={root / name}",) if name else ()), *changes)
    assert caught.value.key == key


@pytest.mark.parametrize("key", ["model.path", "reference.path"])
def test_a_head_within_the_model_is_refused(root: Path, key: str) -> None:
    """Fails if only the ranks detect a head that is not applied last, or the fix is that of a teacher."""
    with pytest.raises(ConfigError) as caught:
        check(root, "actor.packing=false", f"{key}={root / 'opt'}")
    assert caught.value.key == key and "actor.lora.rank" in caught.value.fix


def test_a_smaller_vocabulary_is_refused(root: Path) -> None:
    """Fails if the student can sample a token for which the reference has no logprob."""
    with pytest.raises(ConfigError, match=f"{VOCAB + 1} .* {VOCAB}"):
        check(root, vocab=VOCAB + 1)


def test_a_resumed_run_has_the_same_reference(root: Path, tmp_path: Path) -> None:
    """Fails if a resumed run has a reference with different weights."""
    marks = [check(root, *path) for path in ((), (f"reference.path={root / 'other'}",))]
    assert marks[0] == check(root) != marks[1]
    settings = config(ON, f"trainer.run_dir={tmp_path}", "trainer.resume=auto")
    teacher = {"name": "t", "fingerprint": "f"}
    open_run_folder(settings, teacher | {"reference": marks[0]}).metrics_file.write_text("{}\n")
    open_run_folder(settings, teacher | {"reference": marks[0]})
    with pytest.raises(ConfigError, match=marks[1][:12]) as caught:
        open_run_folder(settings, teacher | {"reference": marks[1]})
    assert caught.value.key == "model.path"


def test_the_memory_estimate_includes_the_reference() -> None:
    """Fails if a reference's shards are not counted, or its forward pass is added to a training step's memory."""
    total = read_dims(QWEN25_15B).n_params

    def rank(*overrides: str, held: bool = True) -> Any:
        reference = folder_of(QWEN25_15B) if held else None
        return ranks_of(load_config(GSM8K, [ON, *overrides]), reference=reference)[0]

    plain, hosted, resident = rank(held=False), rank(), rank("reference.fsdp_cpu_offload=false")
    assert hosted.parts["reference_shards"] == resident.parts["reference_weights"] == 2 * total
    assert hosted.sum_of(HOST_PARTS) - plain.sum_of(HOST_PARTS) == 2 * total and hosted.total_bytes == plain.total_bytes
    assert resident.total_bytes == plain.total_bytes + 2 * total and hosted.parts["reference_pass"] > 2 * 151936 * 1536


def test_only_ranks_that_compute_the_loss_get_logprobs() -> None:
    """Fails if a rank fetches logprobs it does not use, gets them in another order than the scores, or takes one kind
    of list for another one, or if Ray does not see a handle.
    """
    chunk = ScoredChunk(chunk_of(range(2), ref="rollouts"), "scores", None, 0, reference="logprobs")
    (parts,) = scatter_to_groups([chunk, chunk], 1)
    first, last = (ChunkInputs.of_parts(parts, is_last_stage=is_last) for is_last in (False, True))
    assert (first.rollouts, first.scores, first.reference) == (["rollouts"] * 2, [], [])
    assert (last.rollouts, last.scores, last.reference) == (["rollouts"] * 2, ["scores"] * 2, ["logprobs"] * 2)
    assert [ChunkInputs.of_args(*inputs.to_args()) for inputs in (first, last)] == [first, last]
    assert last.to_args()[1:] == ["rollouts"] * 2 + ["scores"] * 2 + ["logprobs"] * 2, (
        "handles are arguments themselves"
    )
    (parts,) = scatter_to_groups([replace(chunk, reference=None)], 1)
    assert ChunkInputs.of_parts(parts, is_last_stage=True).to_args()[1:] == ["rollouts", "scores"]


@dataclass
class Recorder:
    """A reference that records its calls and marks its batches."""

    world: World
    seconds: float = 0.5

    def compute_logprobs(self, batch: Sequence[PendingScores | ScoredChunk], *, blocking: bool = True) -> Recorder:
        self.world.events.append("reference")
        return self

    def wait(self, batch: Sequence[ScoredChunk]) -> list[ScoredChunk]:
        self.world.events.append("reference waits")
        return [replace(chunk, reference="logprobs") for chunk in batch]


@pytest.mark.parametrize("scheduler", ["sync", "one_step_off"])
def test_it_is_computed_before_each_training_step_only(tmp_path: Path, scheduler: str) -> None:
    """Fails if a step trains without it, it starts after the teacher's last score, an evaluation computes it, or its
    times are not in the metrics.
    """
    world, trained = World(), []
    settings = ("trainer.total_steps=2", f"trainer.scheduler={scheduler}", "eval.every=1")
    trainer = make(tmp_path, world, *settings, val=PROMPTS[:2])
    train_step = world.train_step
    world.train_step = lambda batch: trained.append([c.reference for c in batch]) or train_step(batch)  # type: ignore
    trainer.roles = replace(trainer.roles, reference=Recorder(world))
    trainer.fit()
    steps = ("reference", "collect", "reference waits", "train")
    of_actor = [event for event in world.events if event in (*steps, "evaluate")]
    assert of_actor == ["collect", "evaluate", *[*steps, "collect", "evaluate"] * 2]
    assert trained == [["logprobs"] * 2] * 2
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "time/reference_s" in line] == [1, 2]
