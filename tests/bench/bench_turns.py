"""Measure what a slow tool costs the rollout engine.

    python -m tests.bench.bench_turns [--json docs/results/turns.json] [--rounds 3]

64 trajectories in a stream, each of exactly 4 turns, with a tool that answers at once and one that takes 0.5 s. Their
student has the layers of SmolLM2-135M, so a pass takes as long as its passes, and ends its turn with a fixed
probability, 1 of 16 tokens: real students end their trajectories early. Four turns exceed the 512 tokens of a response
with a probability of 1e-9.

Needs models/tools (bash examples/tools/run.sh). About four minutes on two idle cores.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gkd.rollout.vllm.start import CPU_ENV
from tests.bench.command import in_fresh_process, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table

PARTS = ("slow",)
STUDENT, DATA = Path("models/tools/student"), Path("models/tools/train.jsonl")
N_SEQUENCES, N_SAMPLES, MAX_RUNNING, MAX_TURNS, MAX_TOKENS = 64, 4, 16, 4, 512
DELAY_S, TURN_TOKENS = 0.5, 16
_TIMEOUT_S = 1500.0


class Asking:
    """Answer each turn at once."""

    def __init__(self, row: dict[str, Any], seed: int) -> None: ...

    async def step(self, text: str) -> Any:
        return [{"role": "tool", "content": "12345"}]


class AskingSlowly(Asking):
    """Answer each turn after some time."""

    async def step(self, text: str) -> Any:
        await asyncio.sleep(DELAY_S)
        return await super().step(text)


def measure(name: str, rounds: int) -> Part:
    """Measure a part in a process of its own, in which vLLM has one engine."""
    found = in_fresh_process("tests.bench.bench_turns", {"rounds": rounds}, threads=1, timeout_s=_TIMEOUT_S)
    kinds = list(found)
    rates = {kind: [run["tokens"] / run["seconds"] for run in found[kind]] for kind in kinds}
    ratio = statistics.median(b / a for a, b in zip(*(rates[kind] for kind in kinds), strict=True))
    rows = [
        [kind, run["tokens"], run["turns"], run["seconds"], run["tokens"] / run["seconds"]]
        for kind in kinds
        for run in found[kind]
    ]
    title = f"{N_SEQUENCES} sequences, at most {MAX_RUNNING} at a time"
    return Part(
        name,
        f"Own tokens per second: {kinds[0]}, and {kinds[1]}, in alternation in one engine.",
        [Figure(f"{kinds[1]} / {kinds[0]}, tokens per second", ratio, at_least=0.9)],
        [Table(title, ["environment", "own tokens", "turns", "seconds", "tokens/s"], rows)],
    )


def _run(rounds: int) -> dict[str, list[dict[str, float]]]:
    import os

    os.environ.update(CPU_ENV)
    from transformers import AutoTokenizer

    from gkd.config.schema_rollout import RolloutConfig
    from gkd.config.schema_sections import DataConfig
    from gkd.data.chat_delta import ChatDelta
    from gkd.data.prompts import RowReader, load_prompts
    from gkd.environment.pool import Environments
    from gkd.environment.worker import Start
    from gkd.hf.model_folder import eos_token_ids
    from gkd.rollout.engine.loop import Coalescer, EngineLoop
    from gkd.rollout.messages import Job, Sampling
    from gkd.rollout.vllm.engine import RolloutEngine
    from gkd.rollout.vllm.turns import Turns
    from gkd.user_code import search_path

    folder = steady_student(Path(tempfile.mkdtemp(prefix="gkd_bench_turns_")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = eos_token_ids(str(folder), tokenizer)
    prompts, _ = load_prompts([str(DATA)], "data.train_files", RowReader(DataConfig(), tokenizer), keep_rows=True)
    prompts = prompts[: N_SEQUENCES // N_SAMPLES]
    delta = ChatDelta(tokenizer, {}, ends, setting=("rollout.environment", "slow"))
    engine = RolloutEngine(
        str(folder),
        RolloutConfig(kv_cache_mib=512, max_num_seqs=MAX_RUNNING),
        dtype="float32",
        max_model_len=MAX_TOKENS + 128,
        device="cpu",
        eos_ids=ends,
    )
    sampling = Sampling(N_SAMPLES, 1.0, 1.0, MAX_TOKENS, seed=1, max_turns=MAX_TURNS)

    def timed(kind: type) -> dict[str, float]:
        environments = Environments(Start(f"tests.bench.bench_turns:{kind.__name__}", search_path()), 1, 30.0)
        environments.wait_ready(60.0)
        engine._turns = turns = Turns(environments, delta)
        loop = EngineLoop(engine, MAX_RUNNING, Coalescer(1, 16))
        loop.admit(Job(1, sampling, 2.5), prompts, range(len(prompts)))
        began_s, rollouts = time.perf_counter(), []
        for _, _, finished in loop.run():
            rollouts += finished
            if len(rollouts) == N_SEQUENCES:
                break
        seconds = time.perf_counter() - began_s
        turns.close()
        assert {rollout.n_turns for rollout in rollouts} == {MAX_TURNS}
        return {
            "seconds": seconds,
            "tokens": sum(rollout.n_own for rollout in rollouts),
            "turns": sum(rollout.n_turns for rollout in rollouts),
        }

    kinds = {"tool at once": Asking, f"tool of {DELAY_S} s": AskingSlowly}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            found[name].append(timed(kind))
    shutil.rmtree(folder)
    return found


def steady_student(folder: Path) -> Path:
    """Save a model with the layers of SmolLM2-135M that ends its turn with a fixed probability, and return its folder.

    A large constant in each embedding is all that the last norm lets through, and it is the logit of the end token.
    """
    import math

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(STUDENT, folder, dirs_exist_ok=True)
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    }
    config = AutoConfig.from_pretrained(STUDENT)
    kinds = ["full_attention"] * sizes["num_hidden_layers"]
    config.update({**sizes, "layer_types": kinds, "max_position_embeddings": 1024, "tie_word_embeddings": False})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1e4
        model.model.norm.weight.zero_()[0] = 1.0  # what is let through is the root of hidden_size
        head = model.get_output_embeddings().weight.zero_()
        head[config.eos_token_id, 0] = math.log((config.vocab_size - 1) / (TURN_TOKENS - 1)) / math.sqrt(576)
    model.save_pretrained(folder)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a goal was missed."""
    args = parsed(parser("tests.bench.bench_turns", __doc__ or "", PARTS, 3), PARTS, argv)
    return run_parts(args, lambda name: measure(name, args.rounds))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(_run(**json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
