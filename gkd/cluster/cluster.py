"""Reserve resource pools on Ray: one slot per process.

`placement` chooses the nodes. Each process has its own Ray placement group, pinned to its node. The groups are reserved
one after the other. A node assigns its lowest free GPUs first, so the ids ascend with the ranks and from the first pool
to the last, and no two processes get the same GPU. On CPU, Ray's logical GPUs serve as process slots: the same code,
numbering and errors.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from gkd.cluster.host import make_ray_folder, remove_ray_folder
from gkd.cluster.placement import Node, PoolSpec, Room, in_order, place, shortage
from gkd.cluster.pool import Pool
from gkd.cluster.stacks import listen
from gkd.errors import ClusterError
from gkd.log import get_logger, log_to_file_only
from gkd.user_code import BATCH_SIGNALS, EXEC_S

log = get_logger("pools")

# CPU share of helpers that mostly wait (scoring endpoints), so that they never block a pool.
HELPER_CPUS = 0.1

_CONNECT_S = 10.0
_JOB_ENV = {"worker_process_setup_hook": "gkd.cluster.cluster.begin_process"}
_GRANT_S = 5.0  # Ray grants what is free within milliseconds
_POLL_S = 0.2
_KILLED_S = 5.0
_LOOKS = 25
_LOOK_S = 0.002
_LOG_EVERY_S = 15.0  # between log lines while resources are not free
_RUN = "GKD_CLUSTER_RUN"  # environment variable of all processes of a cluster started here: its `Cluster.run`
_NODE_ID = "ray.io/node-id"  # a label of every Ray node
_HTTP2_SETTINGS = 4  # type of the first frame, which a gRPC server sends without a request


class Cluster:
    """A Ray cluster: started here for this run, or an existing one joined by its address.

    `run` is a unique id of this run.

    Args:
        address: HOST:PORT; empty starts a cluster.
        n_slots: GPUs of all processes; on CPU, the logical GPUs of a cluster started here.
        cpus_a_slot: logical CPUs per slot of a cluster started here.
        gpus: ids of the only GPUs that a cluster started here may assign; empty means all that the driver sees.

    Raises:
        ClusterError: the cluster cannot be started or joined.
    """

    def __init__(
        self,
        address: str,
        *,
        n_slots: int,
        on_cpu: bool,
        gpus: Sequence[int] = (),
        cpus_a_slot: float = 1.0 + HELPER_CPUS,
    ) -> None:
        self.run = uuid.uuid4().hex
        self._is_own = not address
        self._folder: Path | None = None  # folder of a Ray that was started here
        os.environ[_RUN] = self.run  # inherited by all processes that Ray starts here
        # Ray's colors make a log file hard to search; its line on token authentication needs no action.
        if not sys.stderr.isatty():
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a thread that calls Ray after the end must not start a cluster
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # two processes that no actor uses
        common: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": True, "runtime_env": _JOB_ENV}
        log_worker_lines()
        try:
            if address:
                _check_answers(address)
                with _signals_held():
                    ray.init(address=address, **common)
            else:
                set_token_without_home()
                self._folder = make_ray_folder()
                # They grow without an end, and only Ray's dashboard, which is not started, reads them.
                os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
                # "local", because without an address Ray would join a cluster that runs on this machine.
                own = common | {"address": "local", "_temp_dir": str(self._folder), "include_dashboard": False}
                # Logical CPUs, so that processes share the cores of a machine that has too few: some with a GPU have 2.
                own["num_cpus"] = math.ceil(n_slots * cpus_a_slot) + 2
                if on_cpu:
                    own |= {"num_gpus": len(gpus) or n_slots, "object_store_memory": 512 << 20}
                # Ray refuses more slots than CUDA_VISIBLE_DEVICES lists, which job scripts and users set for real GPUs.
                with _visible(gpus, forget=on_cpu), _signals_held():
                    ray.init(**own)
        except Exception as error:  # Ray raises plain ones, too
            problem = " ".join(str(error).split())
            fix = ""
            if "Version mismatch" in problem:
                fix = " Fix: use the Ray and Python versions of the cluster, or restart it with these."
            elif address and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
                # `ray start` requires a token as soon as its host has one, and any local Ray makes one.
                fix = (
                    ". Fix: if Ray's lines above have InvalidAuthToken, the cluster requires its token: set "
                    "RAY_AUTH_MODE=token, with the ~/.ray/auth_token of its head node on this host."
                )
            verb = "joined" if address else "started"
            self.close()
            raise ClusterError(
                f"Ray could not be {verb} (cluster.ray_address = {address!r}): {problem}{fix}"
            ) from error
        except BaseException:  # interrupted: the caller has no cluster to close
            self.close()
            raise
        finally:
            del os.environ[_RUN]

    def make_pools(self, specs: Sequence[PoolSpec], timeout_s: float) -> dict[str, Pool]:
        """Reserve all pools or none; return them by name. The first pool gets the lowest GPU ids.

        Waits for resources that other jobs hold.

        Raises:
            ClusterError: the pools do not fit (raised at once), or are not free in time. Shows what is required and
                what each node has.
        """
        fix = "lower the pool's n_gpus_per_node or nnodes"
        deadline = time.monotonic() + timeout_s
        logged = -math.inf
        while True:
            nodes = in_order(_nodes())
            if place([node.total for node in nodes], specs) is None:
                missing = shortage(nodes, specs, free=False)
                raise ClusterError(f"the pools do not fit into the cluster; {missing}. Fix: {fix}, or add nodes.")
            chosen = place([node.free for node in nodes], specs)
            if chosen is not None:
                pools = _reserve(specs, [[nodes[i].id for i in node_indices] for node_indices in chosen], self.run)
                if pools is not None:
                    return pools
                nodes = in_order(_nodes())
            missing = shortage(nodes, specs, free=True)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ClusterError(
                    f"the pools' GPUs and CPUs were not free within {timeout_s:.0f} s; {missing}. "
                    f"Fix: {fix}, end the jobs that hold them, or wait longer (trainer.init_timeout_s)."
                )
            if time.monotonic() - logged > _LOG_EVERY_S:
                waits = "waiting up to %.0f s (trainer.init_timeout_s) for GPUs or CPUs that other jobs hold; %s"
                log.warning(waits, left_s, missing)
                logged = time.monotonic()
            time.sleep(min(_POLL_S, left_s))

    def close(self) -> None:
        """Stop Ray if it was started here, else disconnect. The pools are freed in both cases.

        The folder of the stopped Ray is removed. While an error is handled, its logs stay.
        """
        left = _children_of_daemons() if self._is_own else []
        state: Any = ray._private.state.state
        restore = partial(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        state.disconnect = lambda: (restore(), type(state).disconnect(state))  # called once Ray has set the default one
        ray.shutdown()
        del state.disconnect
        if self._is_own:
            _kill_rest(self.run, left)
        if self._folder is not None:
            remove_ray_folder(self._folder, keep_logs=isinstance(sys.exc_info()[1], Exception))
            self._folder = None


def begin_process() -> None:
    """Prepare a process of Ray for the run. Call it in the main thread, before Ray's loop."""
    ray._private.utils.set_sigterm_handler = lambda handler: None  # the loop's handler would end the process
    listen()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block what stops a run while Ray starts: its daemons inherit that, and live until the last save."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*BATCH_SIGNALS, signal.SIGHUP))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has replaced it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _children_of_daemons() -> list[psutil.Process]:
    """Return what `ray.shutdown` leaves, because it kills the daemons: they block SIGTERM, for which it would wait."""
    children: list[psutil.Process] = []
    node = ray._private.worker._global_node
    for daemon in [info.process for infos in (node.all_processes if node else {}).values() for info in infos]:
        daemon.terminate = daemon.kill
        with suppress(psutil.NoSuchProcess):
            children += psutil.Process(daemon.pid).children(recursive=True)
    return children


def _kill_rest(run: str, left: Sequence[psutil.Process] = ()) -> None:
    """Kill the processes of a cluster that `ray.shutdown` has left, some of them known: titles hide the environment.

    An agent that starts while its raylet ends may wait for it for more than a minute.
    """
    killed: set[psutil.Process] = set()
    deadline = time.monotonic() + EXEC_S
    is_left = True
    while is_left:
        is_left = False
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or belongs to another user
                if process.pid == os.getpid() or process in killed:
                    continue
                environment = process.environ()
                if is_new := not environment and bool(process.exe()):  # a thread of the kernel has no program either
                    # It is being started, and Linux shows no environment yet. A pass over all processes may take as
                    # long as EXEC_S on a busy machine, so it is looked at again at once.
                    for _ in range(_LOOKS):
                        time.sleep(_LOOK_S)
                        if environment := process.environ():
                            break
                if environment.get(_RUN) == run or process in left:
                    process.kill()
                    killed.add(process)
                    is_left = True
                    deadline = time.monotonic() + EXEC_S  # the others may have waited for a core until now
                elif is_new:
                    is_left |= time.monotonic() < deadline
    psutil.wait_procs(killed, timeout=_KILLED_S)  # they write into Ray's folder until they have ended


def _reserve(specs: Sequence[PoolSpec], nodes: Sequence[Sequence[str]], run: str) -> dict[str, Pool] | None:
    """Reserve all slots on these nodes (Ray ids); None if another job was faster, with nothing reserved.

    All or nothing, so that two jobs that start together never deadlock with half of the resources each.
    """
    held: list[PlacementGroup] = []
    pools: dict[str, Pool] = {}
    for spec, node_ids in zip(specs, nodes, strict=True):
        groups = []
        for rank in range(spec.world_size):
            group = placement_group(
                [{"GPU": float(spec.gpus_per_worker), "CPU": 1.0 + spec.helper_cpus}],
                strategy="STRICT_PACK",
                name=f"{spec.name}_{rank}",
                bundle_label_selector=[{_NODE_ID: node_ids[rank // spec.workers_per_node]}],
            )
            held.append(group)
            # One after the other, so that the GPU ids ascend with the ranks.
            if not group.wait(timeout_seconds=_GRANT_S):
                for taken in held:
                    remove_placement_group(taken)
                return None
            groups.append(group)
        pools[spec.name] = Pool(spec, groups, run)
    return pools


def _nodes() -> list[Node]:
    """Return the nodes that are alive; a node that has not reported its free resources counts as full."""
    free = available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
            total=_room(node["Resources"]),
            free=_room(free.get(node["NodeID"], {})),
            is_drivers=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def log_worker_lines() -> None:
    """Copy the lines of ranks and engines, which Ray forwards and prints on the terminal, to the log of the run."""
    name = "gkd_log_file"
    global_worker_stdstream_dispatcher.remove_handler(name)  # left by an earlier cluster of this process
    global_worker_stdstream_dispatcher.add_handler(name, _log_batch)


def _log_batch(batch: dict[str, Any]) -> None:
    """Log the lines of one process that Ray has forwarded. Runs in a thread of Ray."""
    if batch.get("pid") == "autoscaler":
        return  # a table of the cluster every 5 s
    who = batch.get("actor_name") or batch.get("task_name") or "process"
    name = f"{who} pid={batch.get('pid')} ip={batch.get('ip')}"
    for line in batch.get("lines") or ():
        log_to_file_only(str(line), name)


def _room(resources: Mapping[str, float]) -> Room:
    return Room(resources.get("GPU", 0.0), resources.get("CPU", 0.0))


@contextmanager
def _visible(gpus: Sequence[int], *, forget: bool = False) -> Iterator[None]:
    """Limit the Ray daemons that are started in this context to these GPUs; empty means no limit.

    Args:
        forget: hide this process's CUDA_VISIBLE_DEVICES from them.
    """
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if forget:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted(gpus)))
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]


def _check_answers(address: str) -> None:
    """Raise ClusterError if no Ray listens at HOST:PORT; ray.init itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto" and the like: Ray itself fails at once
    problem = ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as probe:
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):  # a TLS client sends first
                head = probe.recv(9)  # [length: 3, type, flags, stream: 4]
                if len(head) < 4 or head[3] != _HTTP2_SETTINGS:
                    problem = "another program listens there, not Ray"
    except TimeoutError:
        problem = f"no reply within {_CONNECT_S:.0f} s"
    except (OSError, ValueError, OverflowError) as error:  # invalid host name or port
        problem = f"cannot connect ({error})"
    if problem:
        raise ClusterError(
            f"Ray could not be joined (cluster.ray_address = {address!r}): {problem}. "
            f"Fix: start it (ray start --head --port {port}), or leave the key empty to have one started here."
        )


# Give Ray its token where it cannot keep one below HOME: containers with a user id of their own have HOME=/.

_TOKEN = "RAY_AUTH_TOKEN"


def set_token_without_home() -> None:
    """Set RAY_AUTH_TOKEN for this process and its children, unless Ray has a token or can write ~/.ray/auth_token."""
    if os.environ.get(_TOKEN) or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    try:
        folder = Path.home() / ".ray"  # RuntimeError: neither HOME nor an entry in /etc/passwd
        if os.access(folder / "auth_token", os.R_OK):
            return
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK) and not (folder / "auth_token").exists()
    except (OSError, RuntimeError):
        writable = False
    if not writable:
        os.environ[_TOKEN] = secrets.token_hex(32)
