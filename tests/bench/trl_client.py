"""Let TRL's own client and trainer use our HTTP server and `vllm serve` with the same model, and compare.

    PYTHONPATH=DIR python -m tests.bench.trl_client --json docs/results/trl_client.json      # about 3 minutes

DIR has TRL, as for `tests.bench.bench_trl`; nothing of it is changed.

client      `VLLMClient.get_sequence_logprobs` for the same sequences, K = 64
trainer     two steps of `ServerDistillationTrainer` with forward KL over 16 entries, from the same seed
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.bench_http_out import SERVE, SERVE_ENV
from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.dist.helpers import free_port
from tests.service.harness import ServerProcess
from tests.service.http_out import HttpProcess
from tests.service.http_servers import VllmServer

PARTS = ("client", "trainer")
_K, _SEQUENCES, _STEPS, _LISTED = 64, 8, 2, 16


def ask_client(url: str, model: Path) -> dict[str, np.ndarray]:
    """Return what TRL's client makes of the answers: logprobs and ids [rows, K], logprobs of the tokens [rows]."""
    from transformers import AutoConfig
    from trl.generation.vllm_client import VLLMClient  # type: ignore[import-not-found]

    rng = np.random.default_rng(0)
    n_vocab = AutoConfig.from_pretrained(model).vocab_size
    sequences = [rng.integers(3, n_vocab, length).tolist() for length in rng.integers(24, 96, _SEQUENCES)]
    starts = [len(ids) // 2 for ids in sequences]
    client = VLLMClient(base_url=url, connection_timeout=60.0)
    found = client.get_sequence_logprobs(sequences, starts, top_logprobs=_K, chunk_size=2)
    keys = ("logprobs", "logprob_token_ids", "actual_logprobs")
    return {key: np.concatenate([np.array(rows) for rows in found[key]]) for key in keys}


def train(url: str, student: Path, folder: Path) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of TRL's trainer."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.server_distillation import (  # type: ignore[import-not-found]
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )

    arguments = ServerDistillationConfig(
        output_dir=str(folder),
        teacher_model_server_url=url,
        loss_top_k=_LISTED,
        beta=0.0,
        temperature=1.0,
        max_completion_length=24,
        max_steps=_STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-5,
        seed=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = ["Name a color.", "What is rice?", "Where does the sun set?", "Say hello."] * 4
    trainer = ServerDistillationTrainer(
        model=AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in prompts]),
        processing_class=AutoTokenizer.from_pretrained(student, padding_side="left"),
    )
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]


def measure(name: str, teacher: Path, student: Path) -> Part:
    """Ask both servers."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        log, flags = folder / "vllm.log", (*SERVE, "--logprobs-mode", "processed_logprobs")
        vllm = stack.enter_context(VllmServer(teacher, log, free_port(), *flags, lists=_K, env=SERVE_ENV))
        server = stack.enter_context(ServerProcess(teacher, folder, options=("--engine", "vllm", "--dtype", "float32")))
        urls = {"vllm serve": vllm.url, "ours": stack.enter_context(HttpProcess(server.port, folder)).url}
        if name == "client":
            theirs, ours = (ask_client(url, teacher) for url in urls.values())
            keys = ("logprobs", "actual_logprobs")
            most = max(float(np.abs(theirs[key] - ours[key]).max()) for key in keys)
            same = float((theirs["logprob_token_ids"] == ours["logprob_token_ids"]).mean())
            figures = [
                Figure("rows", len(ours["logprobs"])),
                Figure("largest difference of a logprob", most, "nats", at_most=2e-5),
                Figure("entries with the same id at the same rank", same, at_least=0.999, note="ties may be swapped"),
            ]
            return Part(name, f"TRL's VLLMClient, {_SEQUENCES} sequences, K = {_K}; both engines are vLLM.", figures)
        steps = {where: train(url, student, folder / "trl") for where, url in urls.items()}
    rows = [(where, i, *numbers) for where, found in steps.items() for i, numbers in enumerate(found, 1)]
    pairs = zip(np.ravel(steps["vllm serve"]).tolist(), np.ravel(steps["ours"]).tolist(), strict=True)
    off = max(abs(ours / theirs - 1) for theirs, ours in pairs)
    figures = [
        Figure("steps", len(steps["ours"]), at_least=_STEPS),
        Figure("largest relative difference of loss and gradient norm", off, at_most=1e-4),
    ]
    what = f"TRL's ServerDistillationTrainer, float32, batches of 4 responses, forward KL over {_LISTED} entries."
    return Part(name, what, figures, (Table("Steps", ("server", "step", "loss", "gradient norm"), rows),))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Exit code: 1 if a figure missed its goal."""
    made = parser("tests.bench.trl_client", __doc__ or "", PARTS, 1)
    made.add_argument("--teacher", type=Path, default=Path("models/smollm2/whole"), metavar="DIR")
    made.add_argument("--student", type=Path, default=Path("models/smollm2/12_layers"), metavar="DIR")
    args: Any = parsed(made, PARTS, argv)
    os.environ["PYTHONPATH"] = ""  # the servers have the packages of this environment alone
    return run_parts(args, lambda name: measure(name, args.teacher, args.student))


if __name__ == "__main__":
    sys.exit(main())
