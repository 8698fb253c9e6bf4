"""Train with every feature on CUDA cards, and train the recorded batches again on the CPU: the losses must agree.

    python -m tests.gpu.matrix [--dry] [--only sync,tp2] [--json FILE]

--dry: on the stand-in cards of tests/dry_card, with the Python of its GPU environment; this process and the CPU's part
use the CPU environment. Without it: on the cards of this machine. A case that needs more cards than there are is
skipped.

A run makes three steps with the quickstart's models and a teacher server on the CPU, in float32 where the feature
allows it. This is checked:

    exit code 0, and what the feature must show in the log
    the engine's logprobs are those of the student that trains, where no step has passed in between
    loss and gradient norm of each step within 1e-3 (relative; bfloat16: 2e-2) of the CPU's with the same batches
    no process, no file in the temporary folder, and no shared memory is left
    the driver has no CUDA context: nvidia-smi does not list it
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from gkd.cluster.gpus import machine_gpus
from gkd.metrics.writer import read_metrics
from tests.bench.command import ROOT, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part
from tests.dist.helpers import free_port
from tests.dry_card.environment import environment, gpu_python, remove_segments
from tests.service.harness import ServerProcess

MODELS = ROOT / "models" / "quickstart"
RUN_S, REPLAY_S = 900, 400
_MARK = "GKD_MATRIX_RUN"  # variable of all processes of a run
# A program that ends when a cluster has this number of nodes.
_JOINED = """
import ray, sys, time
for _ in range(170):
    try:
        ray.init(sys.argv[1], logging_level="ERROR")
        break
    except ConnectionError:
        time.sleep(1)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(1)
"""
_DIFFERENCE = re.compile(r"^(loss/total|optim/grad_norm) +(\S+) +(\S+) +\S+$", re.M)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        cards: of each machine.
        settings: in addition to matrix.yaml.
        variables: of the environment, such as a mode of the stand-in.
        shows: pattern that the output must contain.
        never: pattern that the output must not contain.
        rtol: largest relative difference from the CPU.
        how: "once"; "resumed": ends after two steps and is resumed; "killed": its engine gets SIGKILL after the first
            step; "nodes": actor and engine are on two Ray nodes, each with a machine of the stand-in.
    """

    cards: int
    settings: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    shows: str = ""
    never: str = "unbatched P2P op"
    rtol: float = 1e-3
    how: str = "once"


FSDP2, COLOCATE = "actor.strategy=fsdp2", "trainer.colocate=true"
TWO_RANKS = "trainer.n_gpus_per_node=2"
SHARED = (COLOCATE, TWO_RANKS, "rollout.n_gpus_per_node=2")
ADAPTERS = ("weight_sync.lora=adapters", "model.dtype=bfloat16")  # vLLM's kernels compute in 16 bits
LORA = ("actor.lora.rank=4", "actor.lora.alpha=8")
LOCAL = ("teacher.backend=local", "teacher.path=models/quickstart/teacher")
# models/tools: bash examples/tools/run.sh, or python -m examples.tools.make_models --out models/tools
ACTS = (
    "rollout.environment=examples.tools.calculator:Calculator",
    "rollout.max_turns=3",
    "data.train_files=[models/tools/train.jsonl]",
    "data.max_prompt_length=24",
    "data.max_response_length=96",
    "model.path=models/tools/student",
    "teacher.backend=local",
    "teacher.path=models/tools/teacher",
)
# models/tokenizers: made by `python -m tests.bench.bench_tokenizers --only-models`
PAIR = (
    "model.path=models/tokenizers/student_left",
    "teacher.tokenizer=models/quickstart/teacher",
    "teacher.signal=hidden",
)
CASES = {
    "sync": Case(2),
    "one_step_off": Case(2, ("trainer.scheduler=one_step_off",)),
    "two_step_off": Case(2, ("trainer.scheduler=two_step_off",)),
    "stream": Case(2, ("trainer.scheduler=stream", "trainer.max_staleness=2")),
    "colocate": Case(1, (COLOCATE,), shows=r"\(ipc\)"),
    "colocate_tp2": Case(2, (*SHARED, "actor.tp=2", "actor.sequence_parallel=true")),
    "colocate_local_teacher": Case(2, (*SHARED, FSDP2, *LOCAL)),
    "local_teacher": Case(2, LOCAL),
    "local_teacher_offload": Case(
        3, (*LOCAL, TWO_RANKS, FSDP2, "teacher.fsdp_cpu_offload=false", "memory.strategy=offload")
    ),
    "fsdp2": Case(3, (FSDP2, TWO_RANKS)),
    "fsdp2_offload": Case(2, (FSDP2, "actor.fsdp_cpu_offload=true")),
    "fsdp2_offload_two_ranks": Case(3, (FSDP2, "actor.fsdp_cpu_offload=true", TWO_RANKS)),
    "turns": Case(1, (*ACTS, COLOCATE)),
    "offload_train": Case(2, ("actor.offload_train=true",)),
    "reference": Case(2, ("distill.reference_kl_weight=0.1", "actor.offload_train=true")),
    "lora_merged": Case(2, LORA),
    "lora_adapters": Case(2, (*LORA, *ADAPTERS), rtol=0.02),
    "lora_adapters_fsdp2": Case(3, (*LORA, *ADAPTERS, FSDP2, TWO_RANKS), rtol=0.02),
    "tp2": Case(3, (TWO_RANKS, "actor.tp=2")),
    "pp2": Case(3, (TWO_RANKS, "actor.pp=2")),
    "masked_vocabulary": Case(3, (TWO_RANKS, "actor.tp=2", "model.n_vocab=200")),
    "dp2": Case(3, (TWO_RANKS,)),
    "other_tokenizer": Case(2, PAIR),
    "other_tokenizer_tp2": Case(3, (*PAIR, TWO_RANKS, "actor.tp=2", "distill.units=text")),
    "other_tokenizer_lists": Case(2, (*PAIR, "teacher.signal=topk", "teacher.topk=32"), {"DRY_CARD_POISON": "1"}),
    "other_tokenizer_units": Case(
        3, (*PAIR, TWO_RANKS, "actor.tp=2", "teacher.signal=units", "teacher.topk=32"), {"DRY_CARD_POISON": "1"}
    ),
    "rollout_tp2": Case(3, ("rollout.n_gpus_per_node=2", "rollout.tp=2")),
    "resumed": Case(2, ("trainer.save_every=1",), how="resumed"),
    "engine_killed": Case(2, shows="is up again after", how="killed"),
    "two_machines": Case(1, ("trainer.scheduler=one_step_off",), how="nodes"),
    "late_copies": Case(2, ("trainer.scheduler=stream", "actor.offload_train=true"), {"DRY_CARD_LATE": "1"}),
    "late_copies_fsdp2": Case(
        2,
        (FSDP2, "actor.fsdp_cpu_offload=true", *SHARED),
        {"DRY_CARD_LATE": "1"},
    ),
    "poisoned_memory": Case(3, (TWO_RANKS, "actor.tp=2"), {"DRY_CARD_POISON": "1"}),
    "poisoned_memory_fsdp2": Case(2, (FSDP2, *LOCAL), {"DRY_CARD_POISON": "1"}),
    "sanitizer": Case(2, ("actor.offload_train=true",), {"TORCH_CUDA_SANITIZER": "1"}, never="CSAN|P2P op"),
    "sanitizer_fsdp2": Case(2, (FSDP2,), {"TORCH_CUDA_SANITIZER": "1"}, never="CSAN|P2P op"),
}
ONLY_DRY = ("late", "poisoned", "two_machines")


def measure(name: str, *, dry: bool, teacher_port: int) -> Part:
    """Run a case and return its figures."""
    case, began_s = CASES[name], time.monotonic()
    n_here = case.cards if dry else len(machine_gpus())
    if case.cards > n_here or (not dry and name.startswith(ONLY_DRY)):
        return Part(name, f"Skipped: needs {case.cards} cards, or stand-in cards; this machine has {n_here}.", ())
    with tempfile.TemporaryDirectory(prefix="gkd-matrix-") as folder:
        run = _Run(case, Path(folder), dry, teacher_port)
        run.train()
        replay = run.replay()
        rows = [(key, float(before), float(now)) for key, before, now in _DIFFERENCE.findall(replay)]
        off = max((abs(now - before) / abs(before) for _, before, now in rows), default=9e9)
        text = (run.folder / "log").read_text(errors="replace")
        figures = [
            Figure("exit code", abs(run.code), at_most=0, note="of a signal: its number"),
            Figure("steps compared with the CPU", len(rows) / 2, at_least=1 if case.how == "resumed" else 3),
            Figure("largest relative difference of loss and gradient norm", off, at_most=case.rtol),
            Figure("largest loss/engine_kl of steps without staleness", run.engine_kl(), at_most=case.rtol / 10),
            Figure("missing or unwanted in the log", _judged(case, text), at_most=0),
            Figure("processes, files and segments left", len(run.left), at_most=0, note=", ".join(run.left)),
            Figure("looks that found ranks on the cards", run.ranks, at_least=1),
            Figure("looks that found a CUDA context of the driver", run.contexts, at_most=0, note=f"{run.looks} looks"),
        ]
        if any(figure.met is False for figure in figures):
            print(f"{text[-6000:]}\n{replay[-2000:]}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began_s
    where = "stand-in cards: kernels computed on the CPU" if dry else "cards"
    what = f"{' '.join(case.settings) or 'default settings'}; {case.how}, {case.cards} {where}."
    return Part(name, what, figures, (), {**case.variables, **_versions(dry), "seconds": round(seconds)})


def _versions(dry: bool) -> dict[str, str]:
    """Return the versions of what runs on the cards."""
    prefix = gpu_python().parents[1] if dry else Path(sys.prefix)
    sites = [str(path) for path in prefix.glob("lib/python3.*/site-packages")]
    found = {one.name: one.version for one in importlib.metadata.distributions(path=sites)}
    return {name: found[name] for name in ("torch", "vllm", "megatron-core", "ray", "nvidia-cuda-runtime")}


def _judged(case: Case, text: str) -> int:
    return int(bool(case.shows) and not re.search(case.shows, text)) + int(bool(re.search(case.never, text)))


class _Run:
    """One case in a temporary folder. After `train`: exit code, leftovers, and CUDA contexts of the driver."""

    def __init__(self, case: Case, folder: Path, dry: bool, teacher_port: int) -> None:
        self.folder, self.left = folder, list[str]()
        self.code = self.contexts = self.ranks = self.looks = 0
        self._case, self._dry, self._mark = case, dry, secrets.token_hex(6)
        config = ROOT / "tests" / "gpu" / "matrix.yaml"
        self._command = [str(gpu_python()) if dry else sys.executable, "-m", "gkd.main_gkd", "--config", str(config)]
        self._command += ["trainer.device=cuda", f"trainer.run_dir={folder / 'run'}", *case.settings]
        if LOCAL[0] not in case.settings:
            self._command.append(f"teacher.server_port={teacher_port}")

    def train(self) -> None:
        """Run the case to its end."""
        temporary = self.folder / "tmp"
        temporary.mkdir()
        segments = _unused_segments()
        with self._environment("a") as env:
            env |= {**self._case.variables, "TMPDIR": str(temporary), _MARK: self._mark, "PYTHONUNBUFFERED": "1"}
            if self._case.how == "resumed":
                self._drive(env, "trainer.total_steps=2")
                self._drive(env, "trainer.resume=auto")
            elif self._case.how == "nodes":
                third = {"DRY_CARD_MACHINE": self._mark}
                with self._environment("b") as other, _nodes(env, env | other | third) as address:
                    self._drive(env, f"cluster.ray_address={address}")
                remove_segments(third)
            else:
                self._drive(env)
            self.left += [f"process {p.pid} {p.name()}" for p in self._processes()]
        for process in self._processes():
            process.kill()
        files = [path.relative_to(temporary) for path in temporary.rglob("*") if not path.is_dir()]
        own_ray = self._case.how == "nodes"  # its nodes are not stopped by the run
        self.left += [f"file {path}" for path in files if not (own_ray and path.parts[0] == "ray")]
        self.left += [f"segment {name}" for name in _unused_segments() - segments]

    @contextmanager
    def _environment(self, name: str) -> Iterator[dict[str, str]]:
        """Yield the variables of a machine."""
        if not self._dry:
            yield dict(os.environ)
            return
        env = environment(cards=self._case.cards, machine=f"{self._mark}{name}")
        try:
            yield env
        finally:
            remove_segments(env)

    def _drive(self, env: Mapping[str, str], *more: str) -> None:
        log = self.folder / "log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self._command, *more], env=env, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )
            deadline, killed = time.monotonic() + RUN_S, False
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(2)
                    found = _pids_on_cards(env)
                    self.ranks, self.contexts = self.ranks + bool(found), self.contexts + (process.pid in found)
                    self.looks += 1
                    if self._case.how == "killed" and not killed:
                        killed = self._kill_engine()
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(60)
                    process.kill()
                self.code = self.code or process.wait()

    def _kill_engine(self) -> bool:
        """Kill the engine's process after the first step. Return whether it was killed."""
        metrics = self.folder / "run" / "metrics.jsonl"
        if not metrics.exists() or not any(line["step"] == 1 for line in read_metrics(metrics)):
            return False
        engines = [process for process in self._processes() if "RolloutWorker" in " ".join(process.cmdline())]
        for process in engines:
            process.kill()
        return bool(engines)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found

    def replay(self) -> str:
        """Train the recorded batches on the CPU and return the output of gkd.tools.replay."""
        command = [sys.executable, "-m", "gkd.tools.replay", str(self.folder / "run"), "--step", "3"]
        command += ["--rtol", str(self._case.rtol), "trainer.device=cpu", "cluster.ray_address=''"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=REPLAY_S
        )
        return done.stdout

    def engine_kl(self) -> float:
        """Return the largest KL(engine || student) of steps whose rollouts the newest weights generated."""
        metrics = self.folder / "run" / "metrics.jsonl"
        lines = read_metrics(metrics) if metrics.exists() else []
        fresh = [float(line["loss/engine_kl"]) for line in lines if line.get("staleness/max") == 0]
        return max(fresh, default=9e9)


def _unused_segments() -> set[str]:
    """Return the names of shared memory that no living process has mapped."""
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped |= {line.split()[4] for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    found = set[str]()
    for path in Path("/dev/shm").iterdir():
        with suppress(OSError):
            if "dry-card" not in path.name and str(path.stat().st_ino) not in mapped:
                found.add(path.name)
    return found


def _pids_on_cards(env: Mapping[str, str]) -> list[int]:
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    done = subprocess.run(query, env=env, capture_output=True, text=True, timeout=60)
    return [int(pid) for pid in re.findall(r"\d+$", done.stdout, re.M)]


@contextmanager
def _nodes(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    """Start a Ray node with one card on each of two machines; yield the address of the first one."""
    python, port = gpu_python(), free_port()
    address = f"127.0.0.1:{port}"
    common = ["--num-cpus", "8", "--num-gpus", "1", "--object-store-memory", "300000000", "--block"]
    head = ["--head", "--port", str(port), "--node-ip-address", "127.0.0.1", "--include-dashboard=false"]
    nodes = []
    try:
        for env, where in ((first, head), (second, ["--address", address, "--node-ip-address", "127.0.0.10"])):
            env = {**env, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
            command = [str(python.parent / "ray"), "start", *where, *common]
            nodes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL))
            wait = [str(python), "-c", _JOINED, address, str(len(nodes))]
            subprocess.run(wait, env=env, cwd=ROOT, check=True, timeout=180)
        yield address
    finally:
        for node in reversed(nodes):
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(30)
            node.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.matrix", __doc__ or "", CASES, rounds=1)
    made.add_argument("--dry", action="store_true", help="on the stand-in cards of tests/dry_card")
    args = parsed(made, CASES, argv)
    if not (MODELS / "models.json").exists():
        subprocess.run(
            [sys.executable, "-m", "examples.quickstart.make_models", "--out", str(MODELS)], cwd=ROOT, check=True
        )
    with (
        tempfile.TemporaryDirectory(prefix="gkd-matrix-") as folder,
        ServerProcess(MODELS / "teacher", Path(folder), options=("--device", "cpu")) as teacher,
    ):
        return run_parts(args, lambda name: measure(name, dry=args.dry, teacher_port=teacher.port), levels=2)


if __name__ == "__main__":
    sys.exit(main())
