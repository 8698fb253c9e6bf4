"""Profile chosen training steps of actor rank 0 with torch's profiler (`trainer.profile_steps`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gkd.config.check_values import listed_steps
from gkd.config.schema_trainer import TrainerConfig
from gkd.files.disk import TMP, make_folder, naming
from gkd.log import get_logger

log = get_logger("profile")


@contextmanager
def profiled(
    step: int, rank: int, config: TrainerConfig, device: torch.device, run_dir: Path, *, part: str = ""
) -> Iterator[None]:
    """Profile the block on rank 0 if the settings select this step; else do nothing.

    Writes run_dir/profile/step_N_rank_0.json.gz, a Chrome trace of the CPU's and the GPU's work, before it returns. The
    other ranks wait for this one at their next collective.

    Args:
        step: the optimizer step that the block makes, from 1.
        part: added to N, for a part of a step.
        run_dir: absolute path of the run folder.

    Raises:
        CheckpointError: the trace cannot be written.
    """
    if rank or step not in listed_steps(config.profile_steps):
        yield
        return
    file = run_dir / "profile" / f"step_{step:08d}{part}_rank_0.json.gz"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with naming(file):
        make_folder(file.parent)
        fresh = file.with_name(f"{TMP}{file.name}")
        profiler.export_chrome_trace(str(fresh))
        fresh.replace(file)
    log.info("wrote the profile of step %d to %s", step, file)
