"""Measure what distill.normalize does for two domains, a teacher each, whose answers differ in length.

    python -m tests.bench.bench_domains --models DIR --out DIR [--seeds N] [--steps N] [--json FILE] [--only costs]

Addition (28 tokens an answer, the quickstart's task) and running sums (6 tokens) have 8 to 1 of the tokens.
Recovered is (accuracy - before) / (teacher - before) of a domain; the worse domain counts. The last part compares one
route with two routes of the same teacher: losses, and CPU seconds per step of two runs at the same time, each with a
server of its own, so that whatever else the machine does slows both.

A run that `--out` has is not repeated, so the command can be interrupted and continued. About 1.5 minutes per run on
two cores: 6 runs with three seeds and 6 for the costs. `--only costs` keeps the other figures of the file. The models
of `--models` are made if they are missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

from tests.bench.cpu_time import CpuTime
from tests.bench.domain_models import DOMAINS, make
from tests.bench.quickstart_run import train
from tests.bench.teacher_report import machine
from tests.service.harness import ServerProcess

NORMALIZATIONS = ("token", "domain")
SHARES = "{addition: 7, sums: 4}"  # of the prompts: 8 to 1 of the tokens
BATCH = 132  # 84 and 48 prompts
_COST_STEPS, _COST_FROM = 40, 4  # steps of a run of the costs, and the first one that counts
_ROUNDS = 3
_ROUTES = {"one": "{all: {}}", "two": "{addition: {}, sums: {}}"}


def run(out: Path, settings: Sequence[str], steps: int, servers: Sequence[int] = ()) -> dict[str, Any]:
    """Run the trainer, unless `out` has the result, and return it. Arguments and errors as `train`."""
    file = out / "result.json"
    if not file.exists():
        lines, cpu = train(out, settings, steps, servers=servers)
        trained = [line for line in lines if "loss/total" in line]
        result: dict[str, Any] = {
            "domains": {
                domain: {
                    "before": lines[0].get(f"domain/{domain}/accuracy"),
                    "after": lines[-1].get(f"domain/{domain}/accuracy"),
                    **{
                        name: mean(line[f"domain/{domain}/{name}"] for line in trained)
                        for name in ("tokens_share", "loss_share", "length")
                        if f"domain/{domain}/{name}" in trained[0]
                    },
                }
                for domain in DOMAINS
            },
            "losses": [line["loss/total"] for line in trained],
            "cpu_s": _cpu_per_step(cpu, trained),
        }
        file.write_text(json.dumps(result) + "\n")
        shutil.rmtree(out / "run")  # checkpoints and samples
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded


def _cpu_per_step(cpu: CpuTime, trained: Sequence[Mapping[str, float]]) -> float:
    """Return the CPU seconds per step, without the first ones, of all that was measured."""
    first, last = trained[min(_COST_FROM, len(trained) - 2)], trained[-1]
    used = cpu.between(first["time/unix_s"], last["time/unix_s"])
    return sum(used.values()) / (last["step"] - first["step"])


def recovered(result: Mapping[str, Any], models: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return for each domain the share of its headroom that was recovered."""
    return {
        domain: (found["after"] - found["before"]) / (models[domain]["teacher"] - found["before"])
        for domain, found in result["domains"].items()
    }


def common(out: Path, *more: str) -> list[str]:
    return [
        *(f"data.train_files=[{out / 'train.jsonl'}]", f"data.val_files=[{out / 'heldout.jsonl'}]"),
        *(f"model.path={out / 'student'}", "data.teacher_key=domain", "trainer.scheduler=sync"),
        *(f"trainer.global_batch_size={BATCH}", f"actor.micro_batch_size={BATCH}", "eval.max_prompts=0", *more),
    ]


def measure_domains(out: Path, models: dict[str, dict[str, float]], seeds: int, steps: int) -> list[dict[str, Any]]:
    """Train with each normalization and seed; return the runs."""
    runs = []
    with ExitStack() as stack:
        servers = {
            domain: stack.enter_context(ServerProcess(out / domain, out, options=("--dtype", "float32")))
            for domain in DOMAINS
        }
        routes = ", ".join(f"{domain}: {{server_port: {server.port}}}" for domain, server in servers.items())
        for seed, normalize in itertools.product(range(seeds), NORMALIZATIONS):
            print(f"normalize={normalize}, seed {seed}", file=sys.stderr, flush=True)
            settings = common(
                out,
                f"data.seed={seed}",
                f"teacher.routes={{{routes}}}",
                f"distill.normalize={normalize}",
                f"data.domain_shares={SHARES}",
            )
            result = run(out / f"{normalize}_seed{seed}", settings, steps)
            runs.append({"normalize": normalize, "seed": seed, **result, "recovered": recovered(result, models)})
    return runs


def measure_costs(out: Path) -> dict[str, Any]:
    """Train with one route and with two of the same teacher, otherwise equal; compare costs and losses."""
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(_ROUNDS):
        print(f"one route beside two, round {number}", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(len(_ROUTES)) as threads:
            found = {name: threads.submit(_run_routes, out, name, number) for name in _ROUTES}
        rounds.append({name: future.result() for name, future in found.items()})
    cpu = {name: [each[name]["cpu_s"] for each in rounds] for name in _ROUTES}
    one, two = (rounds[0][name]["losses"] for name in _ROUTES)
    ratios = [a / b for a, b in zip(cpu["one"], cpu["two"], strict=True)]
    return {
        "cpu_seconds_per_step": cpu,
        "throughput_of_two_by_round": ratios,
        "throughput_of_two": median(ratios),
        "largest_difference_of_losses": max(abs(a - b) for a, b in zip(one, two, strict=True)),
    }


def _run_routes(out: Path, name: str, number: int) -> dict[str, Any]:
    """Train with these routes and a server of their own."""
    folder = out / f"server_{name}"
    folder.mkdir(exist_ok=True)
    with ServerProcess(out / "addition", folder, options=("--dtype", "float32")) as server:
        default = ["teacher.default_route=all"] if name == "one" else []
        settings = common(out, f"teacher.routes={_ROUTES[name]}", f"teacher.server_port={server.port}", *default)
        settings += ["eval.metric=none", "data.val_files=[]"]
        return run(out / f"routes_{name}_{number}", settings, _COST_STEPS, [server.process.pid])


def main(argv: list[str] | None = None) -> int:
    """Return 1 if the worse domain recovers less than 80% with `domain`, or two routes cost more than 5%."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_domains")
    parser.add_argument("--models", type=Path, required=True, help="folder of examples.quickstart.make_models")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; those that exist are not repeated")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=120, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", choices=("costs",), help="measure what two routes cost, and nothing else")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    models = make(args.models.absolute(), out)
    result: dict[str, Any] = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    if args.only is None:
        runs = measure_domains(out, models, args.seeds, args.steps)
        _print(runs)
        worst = {
            name: [min(r["recovered"].values()) for r in runs if r["normalize"] == name] for name in NORMALIZATIONS
        }
        result = {"machine": machine(), "models": models, "steps": args.steps, "worst_recovered": worst, "runs": runs}
    result["costs"] = measure_costs(out) | {"machine": machine()}
    print(f"costs: {json.dumps(result['costs'])}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    recovered = min(result.get("worst_recovered", {}).get("domain", [1.0]))
    return int(recovered < 0.8 or result["costs"]["throughput_of_two"] < 0.95)


def _print(runs: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'normalize':12}{'seed':>5}  " + "".join(f"{domain:>24}" for domain in DOMAINS) + "   worse")
    for each in runs:
        cells = "".join(
            f"{each['domains'][d]['before']:10.1%} ->{each['domains'][d]['after']:7.1%} ({each['recovered'][d]:4.0%})"
            for d in DOMAINS
        )
        print(f"{each['normalize']:12}{each['seed']:5}  {cells}{min(each['recovered'].values()):8.0%}")


if __name__ == "__main__":
    sys.exit(main())
