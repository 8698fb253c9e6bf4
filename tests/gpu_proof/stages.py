"""List the stages of the plans of `python -m tests.gpu_proof`: commands and limits. docs/gpu_proof.md explains each.

The bars are in the tests and benchmarks themselves. A limit is several times what an H100 with 16 cores is expected to
need, including two to four minutes for the quickstart's models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

JSON, DEVICE = "{json}", "{device}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table.

    Args:
        gpu: words after `python -m`. {json} becomes the file for the figures of a benchmark, {device} cuda or cpu.
        cpu: the words on a machine without a GPU; None means the stage needs one.
        limit_s: the stage is stopped after this time.
        min_gib: memory of each GPU; on a smaller one the stage is skipped.
        minutes: what an H200 is expected to need; with less time left the stage is skipped.
        needs: packages besides torch, Transformers and Megatron-core; without them the stage is skipped.
    """

    name: str
    gpu: tuple[str, ...]
    cpu: tuple[str, ...] | None
    limit_s: int
    n_gpus: int = 1
    min_gib: int = 0
    minutes: float = 0.0
    needs: tuple[str, ...] = ()


def _tests(*words: str) -> tuple[str, ...]:
    # -v: the log of a stage that is stopped names what failed.
    return ("pytest", "-v", "-p", "no:cacheprovider", *words)


def _bench(module: str, *words: str) -> tuple[str, ...]:
    return (module, "--json", JSON, "--device", DEVICE, *words)


def _both(command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commands for a GPU and for a CPU: the same."""
    return command, command


def _student(only: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    gpu, cpu = (_bench("tests.gpu.bench_student_cuda", "--only", only, "--rounds", rounds) for rounds in "32")
    return gpu, cpu


_AS_IN_CI = ("-m", "not slow and not bench and not gpu", "--device", DEVICE)
_MEMORY, _SYNC = "tests.bench.bench_memory", ("tests.bench.bench_weight_sync", "--only", "qwen25_05b", "--rounds")
_SWITCH = ("--only", "switch", "--ways", "manual,states", "--rounds", "3")
_OPTIMIZER = ("--only", "optimizer", "--ways", "states", "--rounds", "5")
_ATTENTION, _LOSS = "tests.gpu.bench_attention", "tests.gpu.bench_loss_cuda"
_LOOP = _bench("tests.gpu.bench_loop", "--steps", "40")

STAGES = (
    Stage("environment", *_both(_bench("tests.gpu.bench_environment")), 60),
    Stage("dist", *_both(_tests("tests/dist", "-n", "4", *_AS_IN_CI)), 1800),
    Stage("service", *_both(_tests("tests/service", *_AS_IN_CI)), 1200),
    Stage(
        "loss",
        _tests("tests/gpu/test_loss_cuda.py"),
        _tests("tests/unit/test_triton_rows.py", "tests/unit/test_loss_precision.py"),
        180,
    ),
    Stage("loss_floor", _bench(_LOSS), _bench(_LOSS, "--rounds", "3"), 120, min_gib=10),
    Stage("attention", *_both(_tests("tests/unit/test_attention.py")), 120),
    Stage("attention_speed", _bench(_ATTENTION), _bench(_ATTENTION, "--rounds", "3"), 120, min_gib=15),
    Stage("parity", *_both(_bench("tests.gpu.bench_parity")), 240),
    Stage("mfu_1.5b", *_student("1.5b"), 240, min_gib=60),
    Stage("mfu_7b", *_student("7b"), 240, min_gib=70),
    Stage("fsdp_offload", *_student("offload"), 240, min_gib=34),
    Stage("frozen", _tests("tests/gpu/test_frozen_cuda.py"), _tests("tests/dist/test_host_block.py"), 180),
    Stage("offload", _tests("tests/gpu/test_states_cuda.py"), _tests("tests/unit/test_states.py"), 240, min_gib=8),
    Stage("offload_speed", _bench(_MEMORY, *_OPTIMIZER), None, 300, min_gib=30),
    Stage("memory_claims", *_both(_bench(_MEMORY, *_SWITCH)), 420, min_gib=44),
    Stage(
        "memory_reports",
        _tests("tests/gpu/test_memory_cuda.py"),
        _tests("tests/unit/test_memory_oom.py"),
        120,
        min_gib=8,
    ),
    Stage("rollout", *_both(_tests("tests/e2e/test_stream_engine.py")), 300),
    Stage("turns", *_both(_tests("tests/e2e/test_turns.py")), 300),
    Stage(
        "sleep",
        _tests("tests/gpu/test_engine_sleep_cuda.py", "-k", "graphs"),
        _tests("tests/e2e/test_rollout_sleep.py", "-m", "not slow"),
        360,
    ),
    Stage(
        "teacher",
        *_both(_bench("tests.bench.bench_teacher", "--only", "engines", "--quick")),
        420,
        min_gib=32,  # four engines and a model in float32
    ),
    Stage("sync", _bench(*_SYNC, "2"), _bench(*_SYNC, "1"), 300),
    Stage("sync_nccl", _bench(*_SYNC, "3", "--gpus", "2"), None, 300, n_gpus=2),
    Stage("loop", *_both(_LOOP), 600),
    Stage("step", *_both(_bench("tests.gpu.bench_step")), 420, min_gib=100),
    Stage("loop_two", (*_LOOP, "--gpus", "2"), None, 600, n_gpus=2),
)


def _short(name: str, minutes: float, *needs: str) -> Stage:
    """Return a stage of the proof with the time that it takes on an H200."""
    stage = next(one for one in STAGES if one.name == name)
    return replace(stage, minutes=minutes, needs=needs, limit_s=min(stage.limit_s, round(120 * minutes) + 30))


_RUN, _TRL = ("vllm", "ray"), ("vllm", "ray", "trl")
_PAIR, _BESIDE = "tests.gpu.bench_real_pair", _bench("tests.bench.bench_trl", "--only", "card")
_LONG = _bench("tests.gpu.bench_student_cuda", "--only", "long", "--tokens", "32768", "--rounds", "3")


# For a card that is at hand for some minutes, most valuable first.
TWELVE_MINUTES = (
    _short("environment", 0.1),
    _short("loss", 0.3),
    _short("attention", 0.3, "ray"),  # what tests/unit share imports Ray
    _short("parity", 1.0),
    *(
        # An H200 started models of these sizes in 156 s, and the figures come after the last step.
        Stage(f"step_{name}", *_both(_bench("tests.gpu.bench_step", "--only", name)), 420, 1, 100, 3.5, _RUN)
        for name in ("megatron", "fsdp2")
    ),
    Stage("trl", *_both(_BESIDE), 590, min_gib=130, minutes=8.5, needs=_TRL),
    Stage("real_pair", *_both(_bench(_PAIR, "--only", "ours")), 540, min_gib=20, minutes=6.5, needs=(*_RUN, "gguf")),
    Stage("real_pair_trl", *_both(_bench(_PAIR, "--only", "trl")), 540, min_gib=20, minutes=6.5, needs=(*_TRL, "gguf")),
    Stage("long", *_both(_LONG), 180, min_gib=120, minutes=1.0),
    _short("sync", 1.7, *_RUN),
    _short("teacher", 1.4, *_RUN),
    _short("attention_speed", 0.3),
)
PLANS = {"gpu_proof": STAGES, "twelve_minutes": TWELVE_MINUTES}
