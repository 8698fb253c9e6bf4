"""Compare the step times that `gkd split` estimates from one run of each scheduler with those of runs on other splits.

    python -m tests.bench.bench_split --json docs/results/split_cpu.json

The loop, schedulers, Ray's actors, streams, endpoints and weight sync are the product's own. A stage holds for the time
that its tokens would take (`tests.bench.timed_roles`), so slots of processes need no GPU. The teacher has slots of its
own. About 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path

from gkd.config.load import load_config
from gkd.tools.report.read import read_runs
from gkd.tools.split import Measured, Split, measure, steps_of
from tests.bench.bench_pipeline import Processes
from tests.bench.teacher_report import machine
from tests.bench.timed_roles import Rates, Stages
from tests.results import write_results

SPLITS = ((1, 2), (1, 1), (1, 3), (1, 4), (2, 1), (2, 2))  # ranks, engines; the first is the run that is read
SCHEDULERS = ("sync", "one_step_off", "stream")
BATCH, MAX_RUNNING, PROMPT, N_STEPS = 96, 8, 12, 14
RATES = Rates(0.004, 0.0005, 0.0, score_token_s=0.00005, train_s=0.0, train_token_s=0.0002, sync_s=0.02)
STAGES = Stages(RATES, mean_tokens=24.0, sigma=0.6)


def measured(processes: Processes, folder: Path, scheduler: str, n_ranks: int, n_engines: int) -> Measured:
    """Make a run and return its mean step, as `gkd split` reads it."""
    names = "data.train_files=[none] model.path=none eval.metric=none trainer.device=cpu weight_sync.verify=never"
    sizes = f"trainer.n_gpus_per_node={n_ranks} rollout.n_gpus_per_node={n_engines} trainer.total_steps={N_STEPS}"
    limits = f"rollout.max_num_seqs={MAX_RUNNING} data.max_response_length=90 trainer.global_batch_size={BATCH}"
    settings = f"{names} {sizes} {limits} trainer.run_dir={folder} trainer.scheduler={scheduler}"
    config = load_config(None, settings.split())
    processes.train(config, STAGES, PROMPT)
    (found,) = read_runs([folder])
    return measure(found, config, steps_of(found, config), elsewhere=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="F", required=True, help="write the figures here")
    args = parser.parse_args()
    rows = []
    n_ranks, n_engines = (max(column) for column in zip(*SPLITS, strict=True))
    with (
        closing(Processes(n_ranks, n_engines)) as processes,
        tempfile.TemporaryDirectory(prefix="bench_split.") as root,
    ):
        for scheduler in SCHEDULERS:
            runs = {(s, r): measured(processes, Path(root, f"{scheduler}_{s}_{r}"), scheduler, s, r) for s, r in SPLITS}
            for (student, rollout), one in runs.items():
                estimated_s = runs[SPLITS[0]].on(Split(rollout, 0, student)).step_s
                row = {"scheduler": scheduler, "student": student, "rollout": rollout, "measured_s": one.step_s}
                rows.append(row | {"estimated_s": estimated_s, "off": estimated_s / one.step_s - 1})
                print(json.dumps(rows[-1]), flush=True)
    write_results(args.json, {"machine": machine(), "runs": rows}, levels=2)


if __name__ == "__main__":
    main()
