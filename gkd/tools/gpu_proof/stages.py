"""List the stages of `python -m gkd.tools.gpu_proof`: what each runs, with which limit, and what is expected of it.

Bars are in the benchmarks and tests themselves. Expected figures are computed from first principles for an H100 SXM
(989 TFLOP/s dense bfloat16, 3.35 TB/s, PCIe 5 x16 of 55 GB/s, NVLink of 450 GB/s each way). They were never measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

JSON, XML, DEVICE = "{json}", "{xml}", "{device}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table.

    Args:
        command: words after `python -m`. {json} and {xml} become the file of the results, {device} cuda or cpu.
        cpu: the words to use on a machine without a GPU; None: the stage needs a GPU.
        limit_s: the stage is stopped after this time.
        expected: of the figure in the table, on a GPU.
        figure: the beginning of its name; "": the first figure.
    """

    name: str
    what: str
    command: tuple[str, ...]
    cpu: tuple[str, ...] | None
    limit_s: int
    expected: str
    figure: str = ""
    n_gpus: int = 1

    def words(self, device: str) -> list[str]:
        command = self.cpu if device == "cpu" else self.command
        assert command is not None, f"{self.name} has no form without a GPU"
        return [device if word == DEVICE else word for word in command]


def _tests(*words: str) -> tuple[str, ...]:
    return ("pytest", "-q", "-p", "no:cacheprovider", "--junitxml", XML, *words)


def _bench(module: str, *words: str) -> tuple[str, ...]:
    return (module, "--json", JSON, "--device", DEVICE, *words)


_MEMORY, _STUDENT = "tests.bench.bench_memory", "tests.gpu.bench_student_cuda"
_LOOP, _SYNC = "tests.gpu.bench_loop", "tests.bench.bench_weight_sync"
_PASS = "all pass"


def _both(*command: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the command for a GPU and the one for a CPU: the same."""
    return command, command


STAGES = (
    Stage(
        "environment",
        "driver, compiler, headers, shared memory, free GPU memory",
        *_both(*_bench("tests.gpu.bench_environment")),
        60,
        "0 (driver >= 580 for CUDA 13)",
    ),
    Stage(
        "nccl",
        "all-reduce, broadcast and reduce-scatter of two GPUs against a peer copy",
        *_both(*_bench("tests.gpu.bench_collectives")),
        120,
        "0.8 of the copy; 350 GB/s over NVLink, 45 over PCIe 5",
        n_gpus=2,
    ),
    Stage(
        "loss",
        "loss kernels against float64",
        _tests("tests/gpu/test_loss_cuda.py"),
        _tests("tests/unit/test_triton_rows.py", "tests/unit/test_loss_precision.py"),
        180,
        _PASS,
    ),
    Stage(
        "loss_floor",
        "both passes over the logits against reading them twice and writing them once; Liger-Kernel if installed",
        _bench("tests.gpu.bench_loss_cuda"),
        _bench("tests.gpu.bench_loss_cuda", "--rounds", "3"),
        120,
        "1.1: 7.5 GB in 2.5 ms at T = 8k, V = 152k",
        figure="both passes / three-pass floor",
    ),
    Stage(
        "attention",
        "packed attention and its gradients against an explicit mask",
        *_both(*_tests("tests/unit/test_attention.py")),
        120,
        _PASS,
    ),
    Stage(
        "attention_speed",
        "packed attention against SDPA sequence by sequence: time, error, share of the peak",
        _bench("tests.gpu.bench_attention"),
        _bench("tests.gpu.bench_attention", "--rounds", "3"),
        120,
        "1.0 of SDPA; FlashAttention-2 reaches 29% of the peak at 16k",
        figure="time, packed / SDPA",
    ),
    Stage(
        "parity",
        "Megatron and FSDP2, one rank: logprobs and gradients against Hugging Face, float32 and bfloat16",
        *_both(*_bench("tests.gpu.bench_parity")),
        180,
        "1e-6 in float32; as Hugging Face in bfloat16",
        figure="megatron, float32: gradients",
    ),
    Stage(
        "mfu_1.5b",
        "training steps of 1.5B, 8k tokens: model FLOPs utilisation; against Hugging Face + AdamW",
        _bench(_STUDENT, "--only", "1.5b", "--rounds", "5"),
        _bench(_STUDENT, "--only", "1.5b", "--rounds", "2"),
        240,
        "0.47 (0.36 with actor.layers: torch and small loss chunks)",
        figure="megatron: MFU",
    ),
    Stage(
        "mfu_7b",
        "training steps of 8 layers of 7B, 8k tokens: model FLOPs utilisation",
        _bench(_STUDENT, "--only", "7b", "--rounds", "5"),
        _bench(_STUDENT, "--only", "7b", "--rounds", "2"),
        240,
        "0.45 to 0.54",
        figure="megatron: MFU",
    ),
    Stage(
        "fsdp_offload",
        "FSDP2 step of 0.6B with states in host memory against resident",
        _bench(_STUDENT, "--only", "offload", "--rounds", "5"),
        _bench(_STUDENT, "--only", "offload", "--rounds", "2"),
        240,
        "2 to 4: AdamW on the CPU",
        figure="FSDP2 step",
    ),
    Stage(
        "frozen",
        "FSDP2 with host memory: weights stay where the setting puts them",
        _tests("tests/gpu/test_frozen_cuda.py"),
        _tests("tests/dist/test_host_block.py"),
        180,
        _PASS,
    ),
    Stage(
        "offload",
        "offload and reload of states, 200 cycles, nothing changed; students train the same",
        _tests("tests/gpu/test_states_cuda.py"),
        _tests("tests/unit/test_states.py", "tests/unit/test_moved_states.py"),
        240,
        _PASS,
    ),
    Stage(
        "offload_speed",
        "reload and offload of 1.5B with optimizer states, share of a pinned copy (PCIe)",
        _bench(_MEMORY, "--only", "optimizer", "--ways", "states", "--rounds", "5"),
        None,
        300,
        "0.9: 15.4 GB in 0.3 s each way",
        figure="reload, share",
    ),
    Stage(
        "memory_claims",
        "peak, unused memory and empty_cache of a 7B teacher taking turns with 25 GB: ours against .cpu() / .cuda()",
        _bench(_MEMORY, "--only", "switch", "--ways", "manual,states", "--rounds", "3"),
        _bench(_MEMORY, "--only", "switch", "--ways", "manual,states", "--rounds", "3"),
        420,
        "1.57: 25.0 + 15.2 GB reserved, less 0.2 of reuse and rounding, against 25.7; unused 38% against 2%",
        figure="claim: peak of reserved memory",
    ),
    Stage(
        "memory_reports",
        "allocator counts, fragmentation and out-of-memory reports against the real allocator",
        _tests("tests/gpu/test_memory_cuda.py"),
        _tests("tests/unit/test_memory_fragmentation.py", "tests/unit/test_memory_oom.py"),
        120,
        _PASS,
    ),
    Stage(
        "rollout",
        "engine's logprobs against Hugging Face; new weights in the middle of streams, asynchronous scheduling",
        *_both(*_tests("tests/e2e/test_stream_engine.py")),
        300,
        _PASS,
    ),
    Stage(
        "sleep",
        "sleep levels of a vLLM engine: responses unchanged, memory released and restored",
        _tests("tests/gpu/test_engine_sleep_cuda.py"),
        _tests("tests/e2e/test_rollout_sleep.py", "-m", "not slow"),
        360,
        _PASS,
    ),
    Stage(
        "teacher",
        "teacher engines (hf, vllm) against Hugging Face: largest error of a logprob",
        *_both(*_bench("tests.bench.bench_engines", "--only", "error")),
        300,
        "0.08 in bfloat16",
        figure="hf: largest error",
    ),
    Stage(
        "teacher_speed",
        "tokens/s of the teacher server against the bare engine",
        *_both(*_bench("tests.bench.bench_teacher", "--only", "engines", "--quick")),
        420,
        "0.95",
        figure="vllm: server / bare engine",
    ),
    Stage(
        "sync",
        "weights of 0.5B to an engine on the same GPU over CUDA IPC and over gloo, verified by digests",
        _bench(_SYNC, "--only", "qwen25_05b", "--rounds", "2"),
        None,
        300,
        "0.1 s (2 GB); at least 5 times as fast as gloo",
    ),
    Stage(
        "sync_nccl",
        "weights of 0.5B to an engine on another GPU over NCCL, verified by digests",
        _bench(_SYNC, "--only", "qwen25_05b", "--rounds", "3", "--gpus", "2"),
        None,
        300,
        "0.8 s, of it 0.7 for the digests",
        n_gpus=2,
    ),
    Stage(
        "loop",
        "the quickstart on one GPU, actor and engine in turns",
        *_both(*_bench(_LOOP, "--steps", "40")),
        600,
        "below 0.5",
        figure="KL after / before",
    ),
    Stage(
        "loop_two",
        "the quickstart on two GPUs, one for the actor and one for the engine",
        _bench(_LOOP, "--steps", "40", "--gpus", "2"),
        None,
        600,
        "below 0.5",
        figure="KL after / before",
        n_gpus=2,
    ),
)


def page_with_stages(page: str) -> str:
    """Return docs/gpu_proof.md with its table of stages replaced."""
    lines = ["| stage | GPUs | CPU form | limit, s | what it shows | expected |", "|---|---|---|---|---|---|"]
    for one in STAGES:
        form = "no" if one.cpu is None else "yes"
        lines.append(f"| `{one.name}` | {one.n_gpus} | {form} | {one.limit_s} | {one.what} | {one.expected} |")
    before, _, rest = page.partition(_BEGIN)
    return "\n".join([before + _BEGIN, *lines, _END + rest.partition(_END)[2]])


_BEGIN, _END = "<!-- stages, written by python -m gkd.tools.gpu_proof.stages -->", "<!-- end of the stages -->"

if __name__ == "__main__":
    _page = Path("docs/gpu_proof.md")
    _page.write_text(page_with_stages(_page.read_text()))
