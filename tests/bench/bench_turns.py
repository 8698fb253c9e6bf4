"""Measure what an environment costs the rollout engine.

    python -m tests.bench.bench_turns [--json docs/results/turns.json] [--only trivial,slow] [--rounds 3]

trivial: 256 sequences of examples/tools' student, as single turns and through an environment that ends each trajectory
    at once, in turns in one engine.
slow: 64 trajectories of SmolLM2-135M-Instruct in a stream, of up to 4 turns, with a tool that answers at once and one
    that takes 0.5 s.

Needs models/tools (bash examples/tools/run.sh) and models/smollm2 (bash examples/real_model/run.sh). About ten minutes
on two idle cores.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gkd.rollout.vllm.start import CPU_ENV
from tests.bench.command import in_fresh_process, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table

PARTS = ("trivial", "slow")
MODELS = {"trivial": Path("models/tools/student"), "slow": Path("models/smollm2/whole")}
DATA = {"trivial": Path("models/tools/train.jsonl"), "slow": Path("models/smollm2/train.jsonl")}
N_SEQUENCES = {"trivial": 256, "slow": 64}
N_SAMPLES, MAX_RUNNING, MAX_TURNS = 4, {"trivial": 64, "slow": 16}, 4
DELAY_S = 0.5
_TIMEOUT_S = 1500.0


class Over:
    """End each trajectory after its first turn."""

    def __init__(self, row: dict[str, Any], seed: int) -> None: ...

    async def step(self, text: str) -> None: ...


class Asking(Over):
    """Answer each turn at once."""

    async def step(self, text: str) -> Any:
        return [{"role": "user", "content": "Say it in other words."}]


class AskingSlowly(Asking):
    """Answer each turn after some time."""

    async def step(self, text: str) -> Any:
        await asyncio.sleep(DELAY_S)
        return await super().step(text)


def measure(name: str, rounds: int) -> Part:
    """Measure a part in a process of its own, in which vLLM has one engine."""
    found = in_fresh_process(
        "tests.bench.bench_turns", {"part": name, "rounds": rounds}, threads=1, timeout_s=_TIMEOUT_S
    )
    kinds = list(found)
    rates = {kind: [run["tokens"] / run["seconds"] for run in found[kind]] for kind in kinds}
    ratio = statistics.median(b / a for a, b in zip(*(rates[kind] for kind in kinds), strict=True))
    rows = [
        [kind, run["tokens"], run["turns"], run["seconds"], run["tokens"] / run["seconds"]]
        for kind in kinds
        for run in found[kind]
    ]
    limit = 0.95 if name == "trivial" else 0.9
    title = f"{N_SEQUENCES[name]} sequences, at most {MAX_RUNNING[name]} at a time"
    return Part(
        name,
        f"Own tokens per second: {kinds[0]}, and {kinds[1]}, in alternation in one engine.",
        [Figure(f"{kinds[1]} / {kinds[0]}, tokens per second", ratio, at_least=limit)],
        [Table(title, ["environment", "own tokens", "turns", "seconds", "tokens/s"], rows)],
    )


def _run(part: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    import os

    os.environ.update(CPU_ENV)
    from transformers import AutoTokenizer

    from gkd.config.function_path import search_path
    from gkd.config.schema_rollout import RolloutConfig
    from gkd.config.schema_sections import DataConfig
    from gkd.data.chat_delta import ChatDelta
    from gkd.data.prompts import load_prompts
    from gkd.environment.pool import Environments
    from gkd.environment.worker import Start
    from gkd.hf.model_folder import eos_token_ids
    from gkd.rollout.engine.coalesce import Coalescer
    from gkd.rollout.engine.loop import EngineLoop
    from gkd.rollout.messages import Job, Sampling
    from gkd.rollout.vllm.engine import RolloutEngine
    from gkd.rollout.vllm.turns import Turns

    folder, most = MODELS[part], MAX_RUNNING[part]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = eos_token_ids(str(folder), tokenizer)
    prompts, _ = load_prompts([str(DATA[part])], DataConfig(), tokenizer, "data.train_files", keep_rows=True)
    prompts = prompts[: N_SEQUENCES[part] // N_SAMPLES]
    delta = ChatDelta(tokenizer, {}, ends, setting=("rollout.environment", part))
    max_tokens = 64 if part == "trivial" else 160
    engine = RolloutEngine(
        str(folder),
        RolloutConfig(kv_cache_mib=512, max_num_seqs=most),
        dtype="float32",
        max_model_len=max_tokens + 128,
        device="cpu",
        eos_ids=ends,
    )
    sampling = Sampling(N_SAMPLES, 1.0, 1.0, max_tokens, seed=1)

    def timed(kind: type | None) -> dict[str, float]:
        turns = None
        if kind is not None:
            start = Start(f"tests.bench.bench_turns:{kind.__name__}", search_path())
            environments = Environments(start, 1, 30.0)
            environments.wait_ready(60.0)
            turns = Turns(environments, delta, MAX_TURNS)
        engine._turns = turns
        loop = EngineLoop(engine, most, Coalescer(1, 16))
        loop.admit(Job(1, sampling, 2.5), prompts, range(len(prompts)))
        began_s, rollouts = time.perf_counter(), []
        for _, _, finished in loop.run():
            rollouts += finished
            if len(rollouts) == N_SEQUENCES[part]:
                break
        seconds = time.perf_counter() - began_s
        if turns is not None:
            turns.close()
        return {
            "seconds": seconds,
            "tokens": sum(rollout.n_own for rollout in rollouts),
            "turns": sum(rollout.n_turns for rollout in rollouts),
        }

    kinds: dict[str, type | None] = {"single turn": None, "trivial environment": Over}
    if part == "slow":
        kinds = {"tool at once": Asking, f"tool of {DELAY_S} s": AskingSlowly}
    if part == "trivial":
        timed(None)  # warm up
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            found[name].append(timed(kind))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a goal was missed."""
    args = parsed(parser("tests.bench.bench_turns", __doc__ or "", PARTS, 3), PARTS, argv)
    return run_parts(args, lambda name: measure(name, args.rounds))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        case = json.loads(sys.argv[1])
        print(json.dumps(_run(case["part"], case["rounds"])))
    else:
        sys.exit(main())
