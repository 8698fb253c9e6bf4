"""Format a `ServerStatus` as a human-readable table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from teacher_server.wire.status import Gpu, ServerStatus

_WORKER_HEADS = (
    *("WORKER", "TEACHER", "STATE", "HOST:PID", "ENGINE", "DEVICE", "DTYPE"),
    *("IN FLIGHT", "TOKENS/S", "QUEUE", "COMPUTE", "HEARTBEAT", "GPUS"),
)
_SHORT = 12  # digits of a fingerprint that are shown; --json has all of them


def status_table(endpoint: str, status: ServerStatus) -> str:
    """Return totals, teachers, workers and excluded workers; columns are as wide as their longest cell."""
    state = "draining" if status.draining else "serving"
    errors = ", ".join(f"{count} {code}" for code, count in sorted(status.n_errors.items())) or "none"
    lines = [
        f"{endpoint}  {state}  up {_duration(status.uptime_s)}  server process {status.epoch[:8]}",
        f"completed {status.n_answered:,}   queued {status.n_queued:,} ({status.queued_bytes / 2**20:.1f} MiB)   "
        f"retried {status.n_retried:,}   workers lost {status.n_lost_workers}   errors {errors}   "
        f"tokens/s {sum(worker.tokens_per_s for worker in status.workers):,.0f}",
        "",
    ]
    lines += _table(
        ("TEACHER", "WORKERS", "QUEUED", "FINGERPRINT", "TOKENIZER", "MODEL"),
        [
            (
                teacher.name,
                str(teacher.n_workers),
                f"{teacher.n_queued:,}",
                teacher.model_fingerprint[:_SHORT] or "-",
                teacher.tokenizer_fingerprint[:_SHORT] or "-",
                teacher.model_path or "(no worker yet)",
            )
            for teacher in status.teachers
        ],
    )
    lines += [""] + _table(
        _WORKER_HEADS,
        [
            (
                worker.name,
                worker.teacher,
                worker.state,
                f"{worker.host}:{worker.pid}",
                worker.engine,
                worker.device,
                worker.dtype,
                f"{worker.n_in_flight} ({worker.tokens_in_flight:,} tokens)",
                f"{worker.tokens_per_s:,.0f}",
                f"{worker.queue_s:.3f} s",
                f"{worker.compute_s:.3f} s",
                f"{worker.last_heard_s:.1f} s ago",
                ", ".join(_gpu(gpu) for gpu in worker.gpus) or "-",
            )
            for worker in status.workers
        ],
    )
    for name, why in status.excluded.items():
        lines.append(_printable(f"excluded {name}: {why}"))
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_printable(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _printable(text: str) -> str:
    """Replace control characters: a worker chooses its names and errors, and they must not control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _gpu(gpu: Gpu) -> str:
    return " ".join(part for part in (gpu.id, gpu.uuid if gpu.uuid != gpu.id else "", gpu.name) if part)


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60) % 60, int(seconds // 3600)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds % 60)} s"
