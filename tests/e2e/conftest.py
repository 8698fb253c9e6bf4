"""Make a student and a teacher with 32003 token ids (odd, so that TP pads them), prompts and a teacher server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from tests.dist.ray_nodes import NodeSpec, ray_nodes
from tests.metric_keys import unlisted_keys
from tests.random_models import save_random
from tests.service.harness import ServerProcess

VOCAB = 32003
EOS = 1
N_TRAIN = 40
# Two routes of one teacher, by the column `domain`.
TWO_ROUTES = ("data.teacher_key=domain", "teacher.routes={a: {}, b: {}}")
# Rewards that train, of a function that workers import.
REWARDS = ("reward.functions=[{path: 'tests.unit.judging_functions:checksum'}]", "distill.reward_weight=0.5")
# Options of a teacher server with one sequence per batch, so that scores do not depend on concurrent requests and runs
# are bit-exact.
ALONE = ("--max-batch-tokens", "2")
N_HELDOUT = 52  # more than the 50 answers that an evaluation keeps


@dataclass(frozen=True)
class Lab:
    """Folders of the end-to-end tests."""

    root: Path
    teacher: Path
    student: Path
    train: Path
    heldout: Path

    def command(self, run_dir: Path, port: int, *overrides: str) -> list[str]:
        """Return a `python -m gkd.main_gkd` command with a few small steps. Later overrides take precedence."""
        settings = [
            f"data.train_files=[{self.train}]",
            f"data.val_files=[{self.heldout}]",
            "data.max_prompt_length=12",
            "data.max_response_length=10",
            f"model.path={self.student}",
            "model.dtype=float32",
            "trainer.device=cpu",
            "trainer.total_steps=4",
            "trainer.total_epochs=9",
            "trainer.global_batch_size=6",
            "trainer.init_timeout_s=600",
            "trainer.stage_timeout_s=360",
            "teacher.outage_budget_s=60",
            "teacher.request_timeout_s=20",
            f"trainer.run_dir={run_dir}",
            "actor.micro_batch_size=4",
            "actor.optim.lr=0.01",
            "rollout.n=2",
            "rollout.max_num_seqs=16",
            "rollout.kv_cache_mib=32",
            f"teacher.server_port={port}",
            "teacher.topk=64",
            "teacher.wire=fp32",
            "weight_sync.bucket_mib=1",
            "eval.metric=exact_match",
            "trainer.cpu_cores=1",
            "eval.max_prompts=0",
        ]
        config = self.root / "base.yaml"
        config.write_text("{}\n")
        return [sys.executable, "-m", "gkd.main_gkd", "--config", str(config), *settings, *overrides]

    def train_run(
        self, run_dir: Path, port: int, *overrides: str, timeout_s: float = 800.0, temporary: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, return exit code and output, and assert that docs/metrics.md has all keys.

        Args:
            temporary: folder for temporary files of the run; empty: the one of this process.
        """
        command = self.command(run_dir, port, *overrides)
        env = os.environ | ({"TMPDIR": temporary} if temporary else {})
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)
        assert done.returncode or not unlisted_keys(run_dir), "add a row to gkd/metrics/catalog*.py"
        return done

    def finished_run(
        self, run_dir: Path, port: int, *overrides: str, timeout_s: float = 800.0
    ) -> subprocess.CompletedProcess[str]:
        """Run the command, and assert that it succeeds."""
        done = self.train_run(run_dir, port, *overrides, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr[-4000:]
        return done


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("lab"))


def make_lab(
    root: Path,
    *,
    student: Mapping[str, int] = MappingProxyType({}),
    teacher: Mapping[str, int] = MappingProxyType({}),
) -> Lab:
    made = Lab(root, root / "teacher", root / "student", root / "train.jsonl", root / "heldout.jsonl")
    save_model(made.teacher, **{"seed": 0, "layers": 2, **teacher})
    save_model(made.student, **{"seed": 1, "layers": 2, **student})
    rng = np.random.default_rng(0)
    for path, n in ((made.train, N_TRAIN), (made.heldout, N_HELDOUT)):
        texts = ({"prompt": _words(rng), "answer": "w2", "response": _words(rng)} for _ in range(n))
        rows = ({**row, "domain": "ab"[i % 2]} for i, row in enumerate(texts))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def resized(folder: Path, n_rows: int) -> Path:
    """Write a copy of a model with another number of rows; the logits of additional ones are the largest."""
    import torch
    from transformers import AutoModelForCausalLM

    copied = folder.with_name(f"{folder.name}_{n_rows}")
    shutil.copytree(folder, copied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    n_before = model.config.vocab_size
    model.resize_token_embeddings(n_rows, mean_resizing=False)
    head = model.get_output_embeddings().weight.data
    head[n_before:] = 3 * head[: max(n_rows - n_before, 0)]
    model.save_pretrained(copied)
    return copied


@pytest.fixture(scope="session")
def acting_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the models and prompts of trajectories, see `turn_environments`."""
    from tests.e2e.turn_models import small_models  # imports torch

    return small_models(tmp_path_factory.mktemp("acting") / "models")


@pytest.fixture(scope="session")
def teacher_port(lab: Lab) -> Iterator[int]:
    with ServerProcess(lab.teacher, lab.root, options=ALONE) as server:
        yield server.port


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[str]:
    """Start one Ray for the runs that need not start their own, and return the setting with which a run joins it."""
    with ray_nodes([NodeSpec(gpus=4, cpus=16)]) as address:
        yield f"cluster.ray_address={address}"


# Variables of job scripts, containers and other launchers. None of them may change a run on the CPU.
JOB = {
    "MKL_NUM_THREADS": "2",  # vLLM's kernels would end the process
    "OMP_NUM_THREADS": "7",
    "CUDA_VISIBLE_DEVICES": "-1",
    "ROCR_VISIBLE_DEVICES": "0",
    "HIP_VISIBLE_DEVICES": "0",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "ALL_PROXY": "http://127.0.0.1:9",
    "grpc_proxy": "http://127.0.0.1:9",
    "RAY_ADDRESS": "http://127.0.0.1:9",
    "WORLD_SIZE": "8",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "VLLM_USE_V1": "0",
    "VLLM_ATTENTION_BACKEND": "FLASHINFER",
    "LC_ALL": "C",
}


@pytest.fixture(scope="session")
def base_run(lab: Lab, teacher_port: int) -> Path:
    """Run four steps on one actor rank and one engine: every sync verified, a checkpoint every second step, every batch
    recorded, one step profiled.

    The run starts a Ray of its own and may use GPUs 4 and 6, with variables of a job script.
    """
    run_dir = lab.root / "base_run"
    settings = ("trainer.save_every=2", "trainer.keep_last=9", "weight_sync.verify=always", "cluster.gpus=[6,4]")
    kept = ("trainer.record_batches=true", "trainer.profile_steps=[2]")
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as job:
        for name, value in JOB.items():
            job.setenv(name, value)
        done = lab.train_run(run_dir, teacher_port, *settings, *kept, temporary=temporary)
        (lab.root / "base_run.left").write_text("\n".join(left_behind(temporary)))
    assert done.returncode == 0, done.stderr[-4000:]
    (lab.root / "base_run.stderr").write_text(done.stderr)
    return run_dir


def left_behind(temporary: str) -> list[str]:
    """Return the names in a temporary folder without torch's cache, which is kept."""
    return [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]


def _words(rng: np.random.Generator) -> str:
    return " ".join(f"w{i}" for i in rng.integers(2, VOCAB, rng.integers(3, 13)))


def save_model(folder: Path, *, seed: int, layers: int, n_vocab: int = VOCAB, **sizes: int) -> None:
    """Save a random model whose top 64 of 32003 probabilities hold much of the mass, but never all of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_random(
        folder,
        seed=seed,
        vocab_size=n_vocab,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        initializer_range=0.35,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        **sizes,
    )
    words = {"<pad>": 0, "<eos>": EOS, **{f"w{i}": i for i in range(2, n_vocab)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
