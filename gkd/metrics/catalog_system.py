"""List the keys of metrics.jsonl about the system (times, throughput, memory), and all sections."""

from __future__ import annotations

from gkd.metrics.catalog import EVERY_STEP, LEARNING, Row

_GPU = "GPU"
_MOVES = "states that move"

_TIME = (
    Row("time/unix_s", "s", "every line", "When the line was written, in seconds since 1970-01-01 UTC."),
    Row(
        "time/step_s", "s", EVERY_STEP,
        "Duration of the step, with its evaluation and checkpoint.",
        "About constant for about constant `rollout/response_tokens`.",
        "Rises: compare the stages; with `memory/alloc_retries` see there.",
    ),
    Row(
        "time/<stage>_s", "s", "each stage of the step",
        "What the loop waited for the stage. The duration of the stage only under `sync`; otherwise rollouts and "
        "scoring overlap with training.",
        "The largest is that of the pool which the step line names.",
        "See `perf/waited_<pool>_share`.",
    ),
    Row(
        "time/accounted_share", "share", EVERY_STEP,
        "Share of the step that the stages explain.",
        "Above 0.95.",
        "Low: the driver's host has no free core, or its disk is slow.",
    ),
    Row(
        "time/<call>/onload", "s", _MOVES,
        "Reload of the states that the call needs, with the wait for the slowest rank. Each number of a call is the "
        "largest of all ranks, summed since the line before.",
        "A small part of `time/<call>/execute`.",
        "Large: keep more on the GPU (`memory.strategy`), or give the actor more GPUs.",
    ),
    Row("time/<call>/execute", "s", _MOVES, "The call itself."),
    Row("time/<call>/offload", "s", _MOVES, "Offload of the states afterwards.", "", "As for `onload`."),
    Row(
        "time/<call>/barrier_wait_s", "s", _MOVES,
        "The part of `onload` and `offload` that a rank waited for the others.",
        "Near 0.",
        "Large: one rank is slower; check its host's memory bandwidth and processes that share its GPU.",
    ),
)  # fmt: skip
_PERF = (
    Row(
        "perf/response_tokens_per_s", "tokens/s", EVERY_STEP,
        "Response tokens of the batch by the duration of the step.",
        "About constant; the number to compare settings by.",
        "Low from the start: `bash launch/split.sh` recommends another split of the GPUs.",
    ),
    Row(
        "perf/waited_<pool>_share", "share", EVERY_STEP,
        "Share of the step that the loop waited for the pool, without evaluation, checkpoint and recording.",
        "Under `sync` they add up to about 1; otherwise the actor's is near 1.",
        "rollout or teacher above 0.05 under another scheduler than `sync`: this pool is too slow; give it more GPUs.",
    ),
    Row(
        "perf/bound_by_<pool>", "0 or 1", EVERY_STEP,
        "1 for the bottleneck pool, which the step line names.",
        "The actor.",
        "See [GPU split](split.md).",
    ),
    Row(
        "perf/rollout_busy_share", "share", "steps without a stream's evaluation",
        "Share of the step that the engines were computing, mean over the engines.",
        "Under `stream` near 1.",
        "Low, and the bottleneck is the rollout pool: raise `rollout.max_num_seqs`, or the batch is too small for the "
        "number of engines.",
    ),
    Row(
        "perf/group_tokens_max", "tokens", EVERY_STEP,
        "Tokens of the data-parallel group that generated most, before the groups are evened out.",
        "Near all tokens divided by the data-parallel size.",
    ),
    Row(
        "perf/checkpoint_write_s", "s", "a save has finished",
        "Duration of the save that finished in this step, from its start; also in the background.",
        "Less than the interval `trainer.save_every`.",
        "Longer than the interval between saves: `time/checkpoint_s` grows; raise `trainer.save_every`, or use a "
        "faster disk.",
    ),
    Row("perf/checkpoint_bytes", "bytes", "a save has finished", "Size of that checkpoint.", "Constant."),
    Row(
        "perf/engine_restarts", "engines", EVERY_STEP,
        "Rollout engines that died or hung and were started again (`rollout.max_restarts`), since the line before.",
        "0.",
        "Above 0: the log names cause, host and GPU.",
    ),
    Row(
        "perf/engine_recovery_s", "s", EVERY_STEP,
        "Sum over them of the time from the failure until the engine held the current weights.",
        "0.",
        "Long: an engine's start takes long; see [operations](operations.md#a-rollout-engine-dies).",
    ),
    Row("perf/prompts_regenerated", "prompts", EVERY_STEP, "Prompts generated again: their engine failed.", "0."),
)  # fmt: skip
_MEMORY = (
    Row(
        "memory/<phase>/peak_gib", "GiB", _GPU,
        "The most that was in tensors at once within the phase. This and the next numbers are the largest of all "
        "ranks, and of all times that the phase came since the line before.",
        "Constant after the longest batches, and below the GPU's memory.",
        "Grows from step to step: a leak; `gkd.memory.usage.allocation_lines` lists where it was allocated. Near the "
        "limit: see [what to change](memory.md#what-to-change).",
    ),
    Row("memory/<phase>/peak_rank", "rank", _GPU, "The rank of that peak, the lowest if there are several."),
    Row(
        "memory/<phase>/allocated_gib", "GiB", _GPU,
        "In tensors when the phase ended.",
        "Constant for each phase.",
        "Grows from step to step: a leak, as for `peak_gib`.",
    ),
    Row(
        "memory/<phase>/reserved_gib", "GiB", _GPU,
        "What torch's allocator had taken from the GPU by then.",
        "Near `peak_gib`.",
        "Far above `peak_gib`: see `memory/external_ratio`.",
    ),
    Row(
        "memory/<phase>/host_rss_gib", "GiB", "every line",
        "Host memory of the actor's process when the phase ended.",
        "Constant after the first checkpoint.",
        "Grows from step to step: a leak in host memory; compare the phases to see where it begins.",
    ),
    Row(
        "memory/<engine_phase>/rollout_params_gib", "GiB", "every line",
        "Weights that the GPUs of an engine hold together (on the CPU its processes) when its phase ended; the largest "
        "engine. Its work in an evaluation is not included.",
        "Constant; near 0 after `offloading_states`.",
    ),
    Row(
        "memory/<engine_phase>/rollout_kv_cache_gib", "GiB", "every line",
        "The same of the KV cache.",
        "Constant; 0 after `offloading_states`.",
    ),
    Row(
        "memory/<engine_phase>/rollout_host_rss_gib", "GiB", "every line",
        "Host memory of the engine's largest process.",
    ),
    Row(
        "memory/<engine_phase>/rollout_device_used_gib", "GiB", _GPU,
        "What all processes together have of the engine's GPU.",
        "Below the GPU's memory.",
        "Near the limit: lower `rollout.gpu_memory_utilization`.",
    ),
    Row(
        "memory/external_ratio", "share", f"{_GPU}, every tenth step",
        "1 - largest free block / all free bytes of the allocator, see [fragmentation](memory.md#fragmentation).",
        "Not conclusive alone.",
        "This and `memory/unused_ratio` above 0.2: set "
        "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
    ),
    Row(
        "memory/unused_ratio", "share", f"{_GPU}, every tenth step",
        "(reserved - allocated) / reserved.",
        "Not conclusive alone.",
        "As above.",
    ),
    Row(
        "memory/alloc_retries", "calls", _GPU,
        "Failed calls of cudaMalloc that were repeated after the cache had been given back, since the line before.",
        "0.",
        "Above 0 in every step: memory is almost used up and steps are slow, see "
        "[memory](memory.md#slow-steps-when-memory-is-almost-used-up).",
    ),
    Row(
        "memory/ooms", "errors", _GPU,
        "Out-of-memory errors, also those that a library caught.",
        "0.",
        "See [what to change](memory.md#what-to-change).",
    ),
    Row(
        "memory/device_allocs", "calls", _GPU,
        "Calls of cudaMalloc (with expandable segments, of cuMemMap).",
        "0 after the first steps, unless states move.",
        "In every step without moves: as for `memory/alloc_retries`.",
    ),
    Row("memory/device_frees", "calls", _GPU, "Calls of cudaFree (or cuMemUnmap).", "As above.", "As above."),
    Row(
        "memory/<call>/before_onload", "GiB", _MOVES,
        "Allocated before the states of the call are reloaded (on the CPU: of the states alone).",
        "Near 0 while all states are offloaded.",
        "Above 0.25: the log lists the largest allocations.",
    ),
    Row("memory/<call>/after_onload", "GiB", _MOVES, "Allocated after the reload."),
    Row("memory/<call>/before_offload", "GiB", _MOVES, "Allocated at the end of the call."),
    Row("memory/<call>/after_offload", "GiB", _MOVES, "Allocated after the offload.", "As `before_onload`."),
    Row(
        "memory/moved_to_host", "GiB", _MOVES,
        "Copied to host memory since the line before.",
        "Constant.",
        "Large, and `time/<call>/offload` too: see `memory.strategy`.",
    ),
    Row("memory/moved_to_device", "GiB", _MOVES, "Copied to the GPU since the line before.", "Constant.", "As above."),
)  # fmt: skip
# Heading -> rows, in the order of the page.
SECTIONS: dict[str, tuple[Row, ...]] = LEARNING | {"Time": _TIME, "Throughput": _PERF, "Memory": _MEMORY}
ROWS = tuple(row for rows in SECTIONS.values() for row in rows)
