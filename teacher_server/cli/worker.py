"""`gkd teacher worker`: check the model folder, load the engine, join a broker, serve until dismissed.

The server starts its local workers with this command. On another host the user starts it; it needs
the model folder there and, with keys, a key bundle.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from teacher_server.config.command import command_parser
from teacher_server.config.declare import is_path
from teacher_server.config.schema import SERVER_OPTIONS, TEACHER_OPTIONS, GivenSettings
from teacher_server.config.settings import (
    ONLY_TEACHER,
    add_flags,
    check_name,
    flag_of,
    given_flags,
    settings_from,
    tcp_endpoint,
)
from teacher_server.engines.base import image_processor, prefix_block
from teacher_server.errors import ServerError, SettingsError
from teacher_server.log import log_to_stderr
from teacher_server.wire.keys import load_peer_keys
from teacher_server.wire.machine import thread_env
from teacher_server.wire.worker_protocol import LOCAL_WORKER_NAME, WorkerHello
from teacher_server.worker.compute import CREDIT_BATCHES, Worker
from teacher_server.worker.gpus import own_gpus
from teacher_server.worker.link import WorkerLink
from teacher_server.worker.model_folder import ModelFolder, describe_tokenizer, inspect_model_folder

if TYPE_CHECKING:
    from teacher_server.engines.base import Engine


log = logging.getLogger(__name__)

N_STREAMS = 64  # sequences in flight that keep a worker busy, at least; else its credit in sequences of 256 tokens
_OF_SERVER = ("keys", "compute_timeout_s", "log_format")  # flags that a worker has, too
_OPTIONS = (*TEACHER_OPTIONS, *(option for option in SERVER_OPTIONS if option.name in _OF_SERVER))
_EXAMPLES = """examples:
  add two GPUs of another host to the server on 10.0.0.5, which was started with --worker-port 15556 --keys keys:
    gkd teacher worker --broker 10.0.0.5:15556 --model /models/teacher --gpus 0,1 \\
        --tensor-parallel-size 2 --keys bundles/host7

signals: the first SIGTERM or Ctrl-C lets it finish its requests and exit; the second ends it at once.
exit code: 0 exited after finishing its requests, 1 refused by the broker or its engine failed, 2 wrong settings
"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "gkd teacher worker",
        "Add one more copy of a model to a running teacher server.",
        _EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_argument("--broker", required=True, metavar="HOST:PORT", help="host of the server and its --worker-port")
    parser.add_argument("--model", required=True, metavar="PATH", help="the same model as the other workers")
    parser.add_argument(
        "--teacher", default=ONLY_TEACHER, metavar="NAME", help="teacher to join (default: %(default)s)"
    )
    parser.add_argument("--name", metavar="NAME", help="name in the status table (default: host and pid)")
    parser.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)  # die with this process
    add_flags(parser, _OPTIONS, "this worker")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a worker and return the exit code, see `_EXAMPLES`. Raises ServerError."""
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # During loading there is no request to finish. A terminal sends these two to the whole process group; a server
    # ends its own workers itself, so those ignore them.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if args.parent_pid else signal.SIG_DFL)
    settings = settings_from(GivenSettings, [given_flags(args, GivenSettings)], flag_of)
    name = _name(args)
    log_to_stderr(name, settings.log_format)
    if args.parent_pid:
        die_with_parent(args.parent_pid)
    # Local workers of a server get an ipc:// endpoint.
    is_local = args.broker.startswith("ipc://")
    endpoint = args.broker if is_local else tcp_endpoint("--broker", args.broker.removeprefix("tcp://"))
    check_name(args.teacher, "--teacher")
    keys = load_peer_keys(settings.keys, "worker") if settings.keys else None
    folder = inspect_model_folder(args.model, needs_weights=not is_path(settings.engine))
    _limit_process(settings)
    tokenizer = describe_tokenizer(folder)
    engine = _load(folder, settings)
    hello = _hello(name, args.teacher, folder, tokenizer, engine, settings)
    link = WorkerLink(endpoint, hello, keys=keys, compute_timeout_s=settings.compute_timeout_s)
    leave_on = (signal.SIGTERM,) if args.parent_pid else (signal.SIGTERM, signal.SIGINT)
    _watch_signals(leave_on, link)
    log.info("loaded %s on %s (%s, %s)", folder.name, engine.device, engine.name, engine.dtype)
    return _serve(engine, link, hello, settings.max_batch_tokens)


def _name(args: argparse.Namespace) -> str:
    name = args.name or f"{socket.gethostname()}-{os.getpid()}"
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise SettingsError(f"--name {name!r}: not 1 to 128 printable characters.")
    if LOCAL_WORKER_NAME.fullmatch(name) and not args.parent_pid:
        raise SettingsError(f"--name {name}: reserved for workers that the server starts. Fix: choose another name.")
    return name


def _limit_process(settings: GivenSettings) -> None:
    """Set the environment of this process. Call it before torch is imported, which reads it once."""
    os.environ.update(thread_env(settings.threads))
    gpus = settings.gpus
    if gpus is not None and len(gpus) != settings.tensor_parallel_size:
        raise SettingsError(
            f"--gpus {','.join(gpus)}: a worker runs one model copy on --tensor-parallel-size "
            f"{settings.tensor_parallel_size} GPUs. Fix: start one worker per group of GPUs."
        )
    if gpus is not None and settings.device != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # number GPUs as nvidia-smi does


def _load(folder: ModelFolder, settings: GivenSettings) -> Engine:
    from teacher_server.engines.load import EngineSettings, load_engine  # after `_limit_process`

    max_tokens = settings.max_tokens or folder.max_tokens
    if max_tokens > folder.max_tokens:
        raise SettingsError(f"--max-tokens {max_tokens}: more than the model's {folder.max_tokens}.")
    values = {option.name: getattr(settings, option.name) for option in TEACHER_OPTIONS if option.name != "gpus"}
    return load_engine(EngineSettings(**values | {"model": folder.path, "max_tokens": max_tokens}))


def _hello(
    name: str,
    teacher: str,
    folder: ModelFolder,
    tokenizer: tuple[str, str, str],
    engine: Engine,
    settings: GivenSettings,
) -> WorkerHello:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return WorkerHello(
        name=name,
        teacher=teacher,
        host=socket.gethostname()[:128],
        pid=os.getpid(),
        model_name=folder.name[:128],
        model_path=folder.path,
        model_fingerprint=folder.fingerprint,
        tokenizer_fingerprint=tokenizer[0],
        template_fingerprint=tokenizer[1],
        template_example=tokenizer[2],
        image_probe=[] if (processor := image_processor(engine)) is None else processor.probe(),
        vocab_size=engine.vocab_size,
        hidden_size=engine.hidden_size,
        max_tokens=engine.max_tokens,
        engine=engine.name,
        device=engine.device,
        dtype=engine.dtype,
        gpus=own_gpus(engine.device, settings.gpus or (), visible, settings.tensor_parallel_size),
        cuda_visible_devices=visible,
        credit_tokens=CREDIT_BATCHES * settings.max_batch_tokens,
        n_streams=max(N_STREAMS, CREDIT_BATCHES * settings.max_batch_tokens // 256),
        prefix_block=prefix_block(engine),
    )


def _serve(engine: Engine, link: WorkerLink, hello: WorkerHello, max_batch_tokens: int) -> int:
    try:
        reason = Worker(engine, link, hello.model_fingerprint, hello.name, max_batch_tokens).run()
    except RuntimeError as error:  # each failure was logged with its traceback
        reason = f"the engine fails repeatedly: {error}"
    link.close()
    if reason:
        log.error("exiting: %s", reason)
        return 1
    log.info("dismissed")
    return 0


def _watch_signals(numbers: Sequence[signal.Signals], link: WorkerLink) -> None:
    """Let the first of these signals end the link after its requests, and the second one the process, from a thread.

    Python runs a handler between two bytecodes of the main thread, which may be in a forward pass for
    minutes. The C handler writes the wakeup descriptor at once, so a thread that reads it reacts at once.
    Call it in the main thread, once per process.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)  # it stays open
    for number in numbers:
        signal.signal(number, lambda *_: None)

    def run() -> None:
        is_leaving = False
        while True:
            for byte in reader.recv(16):
                if byte in numbers and is_leaving:
                    log.warning("second signal: exiting at once")
                    os._exit(1)
                elif byte in numbers:
                    log.info("signal: exiting after the requests in flight")
                    link.leave()
                    is_leaving = True

    threading.Thread(target=run, name="signals", daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux)."""
    if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL) != 0:  # 1 is PR_SET_PDEATHSIG
        raise ServerError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # the parent died before the call
        raise ServerError(f"the server (pid {parent_pid}) has exited")
