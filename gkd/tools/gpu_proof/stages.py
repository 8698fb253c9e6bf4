"""List the stages of `python -m gkd.tools.gpu_proof`: what each runs, with which limit, and what is expected of it.

Bars are in the benchmarks and tests themselves. Expected figures are computed from first principles for an H100 SXM
(989 TFLOP/s dense bfloat16, 3.35 TB/s, PCIe 5 x16 of 55 GB/s, NVLink of 450 GB/s each way). They were never measured.

Seconds are expected for 16 cores: a process needs about 10, of them 4 to 6 to import torch and others and the rest to
start CUDA, an engine of vLLM 25 (of them 5 to import vLLM), with CUDA graphs 45, Megatron's layers 25 to compile.

An engine of vLLM asserts at its start that no other process frees GPU memory meanwhile, unless the size of its KV cache
is given. A stage that starts one without it runs alone. Engines' shares of a card count as shares of 80 GiB.
"""

from __future__ import annotations

from pathlib import Path

from gkd.tools.gpu_proof.schedule import expected_seconds
from gkd.tools.gpu_proof.stage import DEVICE, JSON, XML, Stage


def _tests(*words: str) -> tuple[str, ...]:
    return ("pytest", "-q", "-p", "no:cacheprovider", "--junitxml", XML, *words)


def _bench(module: str, *words: str) -> tuple[str, ...]:
    return (module, "--json", JSON, "--device", DEVICE, *words)


_MEMORY, _STUDENT = "tests.bench.bench_memory", "tests.gpu.bench_student_cuda"
_LOOP, _SYNC = "tests.gpu.bench_loop", "tests.bench.bench_weight_sync"
_AS_IN_CI = ("-m", "not slow and not bench and not gpu", "--device", DEVICE)
# Two to four minutes on two cores.
_MODELS = ("examples.quickstart.make_models", "--out", "models/quickstart")


def _both(*command: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the command for a GPU and the one for a CPU: the same."""
    return command, command


STAGES = (
    Stage(
        "environment",
        "driver, compiler, headers, shared memory, free GPU memory",
        *_both(*_bench("tests.gpu.bench_environment")),
        60,
        15,
        "0: driver >= 580 for CUDA 13, a compiler and Python.h for Triton, no other process on the card",
    ),
    Stage(
        "dist",
        "CI's tests of ranks with a card each: losses, gradients, resume, offload, weight sync over NCCL",
        *_both(*_tests("tests/dist", "-n", "4", *_AS_IN_CI)),
        1800,
        420,
        "all pass, or are skipped for lack of cards: the same asserts as on a CPU",
    ),
    Stage(
        "service",
        "CI's tests of the teacher server, with its engines on the GPU",
        *_both(*_tests("tests/service", *_AS_IN_CI)),
        1200,
        360,
        "all pass: the same asserts as on a CPU",
    ),
    Stage(
        "nccl",
        "all-reduce, broadcast and reduce-scatter of two GPUs against a peer copy",
        *_both(*_bench("tests.gpu.bench_collectives")),
        120,
        30,
        "0.8 of the copy: NCCL spends a fifth on its protocol; 350 of 450 GB/s over NVLink, 45 of 55 over PCIe 5",
        n_gpus=2,
        ahead_s=4,
    ),
    Stage(
        "loss",
        "loss kernels against float64",
        _tests("tests/gpu/test_loss_cuda.py"),
        _tests("tests/unit/test_triton_rows.py", "tests/unit/test_loss_precision.py"),
        180,
        25,
        "all pass: sums of 152k float32 terms round by 1e-6, bfloat16 gradients by 2^-9",
        shares_gib=10,
    ),
    Stage(
        "loss_floor",
        "both passes over the logits against reading them twice and writing them once; Liger-Kernel if installed",
        _bench("tests.gpu.bench_loss_cuda"),
        _bench("tests.gpu.bench_loss_cuda", "--rounds", "3"),
        120,
        20,
        "1.1: 7.5 GB in 2.5 ms at T = 8k, V = 152k",
        figure="both passes / three-pass floor",
        min_gib=10,
        ahead_s=4,
    ),
    Stage(
        "attention",
        "packed attention and its gradients against an explicit mask",
        *_both(*_tests("tests/unit/test_attention.py")),
        120,
        12,
        "all pass: bfloat16 rounds by 2^-9, as the mask's way does",
        shares_gib=2,
    ),
    Stage(
        "attention_speed",
        "packed attention against SDPA sequence by sequence: time, error, share of the peak",
        _bench("tests.gpu.bench_attention"),
        _bench("tests.gpu.bench_attention", "--rounds", "3"),
        120,
        20,
        "1.0: the same kernel, FlashAttention-2; 29% of the peak at 16k",
        figure="time, packed / SDPA",
        min_gib=15,
        ahead_s=4,
    ),
    Stage(
        "parity",
        "Megatron and FSDP2, dense and experts: logprobs and gradients against Hugging Face, float32 and bfloat16",
        *_both(*_bench("tests.gpu.bench_parity")),
        240,
        85,
        "1e-6 in float32: 6 layers of roundings by 6e-8; in bfloat16 the roundings of Hugging Face: 1.0",
        figure="megatron, float32: gradients",
        shares_gib=4,
    ),
    Stage(
        "mfu_1.5b",
        "training steps of 1.5B, 8k tokens: model FLOPs utilisation, predicted memory; against Hugging Face + AdamW",
        _bench(_STUDENT, "--only", "1.5b", "--rounds", "3"),
        _bench(_STUDENT, "--only", "1.5b", "--rounds", "2"),
        240,
        65,
        "0.47 (0.36 with actor.layers: torch and small loss chunks); 44 GiB predicted",
        figure="megatron: MFU",
        min_gib=60,
        ahead_s=6,
    ),
    Stage(
        "mfu_7b",
        "training steps of 8 layers of 7B, 8k tokens: model FLOPs utilisation, predicted memory",
        _bench(_STUDENT, "--only", "7b", "--rounds", "3"),
        _bench(_STUDENT, "--only", "7b", "--rounds", "2"),
        240,
        60,
        "0.45 to 0.54: products at 65-70% of the peak, and their share of the step; 61 GiB predicted",
        figure="megatron: MFU",
        min_gib=70,
        ahead_s=6,
    ),
    Stage(
        "fsdp_offload",
        "FSDP2 step of 0.6B with states in host memory against resident",
        _bench(_STUDENT, "--only", "offload", "--rounds", "3"),
        _bench(_STUDENT, "--only", "offload", "--rounds", "2"),
        240,
        40,
        "3 to 4: 0.1 s resident; 7 GB over PCIe (0.14 s) and 17 GB of AdamW in host memory (0.17 s at 100 GB/s) more",
        figure="FSDP2 step",
        min_gib=34,
        ahead_s=6,
    ),
    Stage(
        "frozen",
        "FSDP2 with host memory: weights stay where the setting puts them",
        _tests("tests/gpu/test_frozen_cuda.py"),
        _tests("tests/dist/test_host_block.py"),
        180,
        25,
        "all pass: copies round nothing",
        shares_gib=2,
    ),
    Stage(
        "offload",
        "offload and reload of states, 200 cycles, nothing changed",
        _tests("tests/gpu/test_states_cuda.py"),
        _tests("tests/unit/test_states.py", "tests/unit/test_moved_states.py"),
        240,
        40,
        "all pass: copies round nothing; 200 x 2 x 1.07 GB in 8 s",
        min_gib=8,
        shares_gib=6,
    ),
    Stage(
        "offload_speed",
        "reload and offload of 1.5B with optimizer states, share of a pinned copy (PCIe)",
        _bench(_MEMORY, "--only", "optimizer", "--ways", "states", "--rounds", "5"),
        None,
        300,
        35,
        "0.9: 15.4 GB in 0.3 s each way",
        figure="reload, share",
        min_gib=30,
        ahead_s=10,
    ),
    Stage(
        "memory_claims",
        "peak, unused memory and empty_cache of a 7B teacher taking turns with 25 GB: ours against .cpu() / .cuda()",
        _bench(_MEMORY, "--only", "switch", "--ways", "manual,states", "--rounds", "3"),
        _bench(_MEMORY, "--only", "switch", "--ways", "manual,states", "--rounds", "3"),
        420,
        65,
        "1: outputs are equal; 40.5 GB reserved against 25.7 (1.57 times), unused 38% against 2%",
        figure="outputs are the same",
        min_gib=44,
        ahead_s=10,
    ),
    Stage(
        "memory_reports",
        "allocator counts, fragmentation and out-of-memory reports against the real allocator",
        _tests("tests/gpu/test_memory_cuda.py"),
        _tests("tests/unit/test_memory_fragmentation.py", "tests/unit/test_memory_oom.py"),
        120,
        15,
        "all pass: the allocator's own counters, exact",
        min_gib=8,
        shares_gib=6,
    ),
    Stage(
        "rollout",
        "engine's logprobs against Hugging Face; new weights in the middle of streams, asynchronous scheduling",
        *_both(*_tests("tests/e2e/test_stream_engine.py")),
        300,
        80,
        "all pass: vLLM's attention in float32 rounds its factors to TF32, 1e-3; on a CPU the order of sums, 1e-5",
        shares_gib=8,
    ),
    Stage(
        "sleep",
        "sleep levels of a vLLM engine with CUDA graphs: responses unchanged, memory released and restored",
        # Without pytest's time limit of a test, which would include the wait for the turn.
        _tests("tests/gpu/test_engine_sleep_cuda.py", "-k", "graphs", "--timeout", "0"),
        _tests("tests/e2e/test_rollout_sleep.py", "-m", "not slow"),
        360,
        60,
        "all pass: copies round nothing, and vLLM unmaps what sleeps",
        ahead_s=13,
    ),
    Stage(
        "teacher",
        "teacher engines (hf, vllm): error against Hugging Face; tokens/s of the server against the bare engine",
        *_both(*_bench("tests.bench.bench_teacher", "--only", "engines", "--quick")),
        420,
        # Process 10, model 5; two servers and two bare engines at the same time 5 + 25. Of each engine error and trial
        # 6, three runs 12, end 7.
        95,
        "0.9 to 1.0: 1 ms of packing for a batch of 2,048 tokens, which takes 12; errors as plain bfloat16",
        figure="vllm: server / bare engine",
        min_gib=32,  # four engines and a model in float32
        ahead_s=6,
    ),
    Stage(
        "sync",
        "weights of 0.5B to an engine on the same GPU over CUDA IPC and over gloo, verified by digests",
        _bench(_SYNC, "--only", "qwen25_05b", "--rounds", "2"),
        _bench(_SYNC, "--only", "qwen25_05b", "--rounds", "1"),
        300,
        65,
        "0.1 s (2 GB); at least 5 times as fast as gloo",
        ahead_s=21,
    ),
    Stage(
        "sync_nccl",
        "weights of 0.5B to an engine on another GPU over NCCL, verified by digests",
        _bench(_SYNC, "--only", "qwen25_05b", "--rounds", "3", "--gpus", "2"),
        None,
        300,
        55,
        "0.8 s, of it 0.7 for the digests",
        n_gpus=2,
        ahead_s=21,
    ),
    Stage(
        "loop",
        "the quickstart on one GPU, actor and engine in turns",
        *_both(*_bench(_LOOP, "--steps", "40")),
        600,
        150,
        "0.33, as measured on a CPU: a GPU only rounds differently",
        figure="KL after / before",
        prepare=_MODELS,
        shares_gib=38,
        ahead_s=4,
    ),
    Stage(
        "loop_two",
        "the quickstart on two GPUs, one for the actor and one for the engine",
        _bench(_LOOP, "--steps", "40", "--gpus", "2"),
        None,
        600,
        120,
        "0.33, as measured on a CPU: a GPU only rounds differently",
        figure="KL after / before",
        n_gpus=2,
        prepare=_MODELS,
        ahead_s=4,
    ),
)


def page_with_stages(page: str) -> str:
    """Return docs/gpu_proof.md with its table of stages replaced."""
    lines = ["| stage | GPUs | GiB | shares, GiB | CPU form | limit, s | expected, s | what it shows | expected |"]
    lines.append("|---" * 9 + "|")
    for one in STAGES:
        form = "no" if one.cpu is None else "yes"
        cells = (one.n_gpus, one.min_gib or "", one.shares_gib or "", form, one.limit_s, one.expected_s, one.what)
        lines.append(f"| `{one.name}` | {' | '.join(map(str, cells))} | {one.expected} |")
    for n_gpus, machine in ((1, "one GPU"), (2, "two GPUs")):
        stages = [one for one in STAGES if one.n_gpus <= n_gpus]
        seconds, one_by_one = expected_seconds(stages), sum(one.expected_s for one in stages)
        times = f"{seconds / 60:.0f} minutes; one after the other {one_by_one / 60:.0f}"
        lines.append(f"| all on {machine} | | | | | | {seconds:.0f} | | {times} |")
    before, _, rest = page.partition(_BEGIN)
    return "\n".join([before + _BEGIN, *lines, _END + rest.partition(_END)[2]])


_BEGIN, _END = "<!-- stages, written by python -m gkd.tools.gpu_proof.stages -->", "<!-- end of the stages -->"

if __name__ == "__main__":
    _page = Path("docs/gpu_proof.md")
    _page.write_text(page_with_stages(_page.read_text()))
