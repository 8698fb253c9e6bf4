"""Pools on a real Ray cluster of three nodes on one machine: placement on nodes and GPUs, and errors."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gkd.cluster import cluster as cluster_module
from gkd.cluster.calls import gather
from gkd.cluster.cluster import Cluster
from gkd.cluster.placement import PoolSpec
from gkd.cluster.pool import Pool
from gkd.errors import ClusterError
from gkd.start.gpu_map import PlacementProbe
from gkd.start.pools import worker_env
from tests.dist.ray_nodes import NodeSpec, Place, my_place, ray_nodes
from tests.processes import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]

HERE, NINE, TEN = "here", "127.0.0.9", "127.0.0.10"
ACTOR, ROLLOUT = PoolSpec("actor", 2, 2, gpus_per_worker=1), PoolSpec("rollout", 1, 2, gpus_per_worker=2)
# Each pool needs two of the three nodes.
OVERLAPPING = [ACTOR, PoolSpec("rollout", 2, 1, gpus_per_worker=2)]
# Each node has a part of both pools.
EVERYWHERE = [PoolSpec("actor", 3, 2, gpus_per_worker=1), PoolSpec("rollout", 3, 1, gpus_per_worker=2)]
ROUNDS = 4


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    # The tenth is older than the ninth: neither age nor the order of strings may decide.
    nodes = [NodeSpec(gpus=4, cpus=5), NodeSpec(4, 5, TEN), NodeSpec(4, 5, NINE, visible="4,5,6,7")]
    with ray_nodes(nodes) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(address: str) -> Iterator[Cluster]:
    made = Cluster(address, n_slots=0, on_cpu=True)
    yield made
    made.close()


@contextmanager
def reserved(
    cluster: Cluster, specs: Sequence[PoolSpec], timeout_s: float = 20.0, *, others: int = 0
) -> Iterator[dict[str, Pool]]:
    """Create the pools and remove them afterwards; `others` is the number of GPUs that another job holds."""
    pools = cluster.make_pools(specs, timeout_s)
    try:
        yield pools
    finally:
        for pool in pools.values():
            for group in pool.groups:
                remove_placement_group(group)
        until_free(12 - others)


def until_free(n_gpus: int) -> None:
    wait_until(lambda: ray.available_resources().get("GPU", 0) >= n_gpus, 20.0, "the release of the GPUs")


def places(pools: dict[str, Pool]) -> dict[str, list[Place]]:
    """Return node and GPUs by pool and rank, from a task in each slot, whose process Ray reuses in the next round."""
    here = ray.get_runtime_context().get_node_id()
    names = {n["NodeID"]: HERE if n["NodeID"] == here else n["NodeManagerAddress"] for n in ray.nodes()}
    refs: dict[str, list[Any]] = {}
    for name, pool in pools.items():
        task = ray.remote(num_cpus=1, num_gpus=pool.spec.gpus_per_worker, max_calls=0)(my_place)
        strategies = [PlacementGroupSchedulingStrategy(group, 0) for group in pool.groups]
        refs[name] = [task.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    return {name: [(names[node], ids) for node, ids in ray.get(its, timeout=250)] for name, its in refs.items()}


def test_the_same_ids_in_the_same_order_at_every_start(cluster: Cluster) -> None:
    """Fails if the first pool does not get the low ids, a rank's node or GPU changes between starts,
    addresses are ordered as strings, or an engine's GPUs are not adjacent.
    """
    actor, rollout = OVERLAPPING
    for _ in range(ROUNDS):
        with reserved(cluster, [actor, rollout]) as pools:
            assert places(pools) == {
                "actor": [(HERE, ("0",)), (HERE, ("1",)), (NINE, ("4",)), (NINE, ("5",))],
                "rollout": [(NINE, ("6", "7")), (TEN, ("0", "1"))],
            }
        with reserved(cluster, [rollout, actor]) as pools:
            assert places(pools) == {
                "rollout": [(HERE, ("0", "1")), (NINE, ("4", "5"))],
                "actor": [(NINE, ("6",)), (NINE, ("7",)), (TEN, ("0",)), (TEN, ("1",))],
            }


def test_each_pool_on_nodes_of_its_own(cluster: Cluster) -> None:
    """Fails if two parts of a pool are on one node, or pools share nodes although each could have its own."""
    for specs, nodes in (
        ([ACTOR, ROLLOUT], {"actor": [HERE, HERE, NINE, NINE], "rollout": [TEN, TEN]}),
        ([ROLLOUT, ACTOR], {"rollout": [HERE, HERE], "actor": [NINE, NINE, TEN, TEN]}),
    ):
        with reserved(cluster, specs) as pools:
            found = places(pools)
        assert {name: [node for node, _ in its] for name, its in found.items()} == nodes
        assert [ids for _, ids in found["rollout"]] == [("0", "1"), ("2", "3")]


def test_processes_are_in_the_slots_of_their_ranks(cluster: Cluster) -> None:
    """Fails if a process gets the rank of another slot, does not see the GPUs of its slot, or sees them in the order of
    a set, which differs between processes.
    """
    specs = [PoolSpec("actor", 1, 2, gpus_per_worker=1), PoolSpec("rollout", 1, 1, gpus_per_worker=4)]
    with reserved(cluster, specs) as pools:
        workers = {name: pool.spawn(PlacementProbe, worker_env(on_cpu=True)) for name, pool in pools.items()}
        all_workers = {f"{name} {i}": (w, name) for name, its in workers.items() for i, w in enumerate(its)}
        rows = gather({label: w.placement.remote(name, False) for label, (w, name) in all_workers.items()}, "place", 60)
        assert {label: (row.label, row.cuda_visible_devices) for label, row in rows.items()} == {
            "actor 0": ("actor 0", "0"),
            "actor 1": ("actor 1", "1"),
            "rollout 0": ("rollout 0", "4,5,6,7"),
        }
        assert rows["rollout 0"].ray_gpu_ids == ("4", "5", "6", "7")
        for worker, _ in all_workers.values():
            ray.kill(worker)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (PoolSpec("actor", 1, 5, 1), ("5 GPUs", "0 of 1 node")),
        (PoolSpec("actor", 4, 1, 1), ("3 of 4 nodes",)),
        (PoolSpec("actor", 1, 4, 1, helper_cpus=1.1), ("8.4 CPUs", "0 of 1 node")),
    ],
)
def test_impossible_pools_are_refused_at_once(cluster: Cluster, spec: PoolSpec, expected: tuple[str, ...]) -> None:
    """Fails if a job waits ten minutes for GPUs that no node has, or the error does not list the nodes."""
    began = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        cluster.make_pools([spec], 600)
    text = str(caught.value)
    assert time.monotonic() - began < 60 and all(each in text for each in expected), text
    assert text.index("127.0.0.9") < text.index("127.0.0.10") and text.count("GPU 4") == 3


OTHER_JOB = """
import sys
from gkd.cluster.placement import PoolSpec
from gkd.cluster.cluster import Cluster
cluster = Cluster(sys.argv[1], n_slots=0, on_cpu=True)
cluster.make_pools([PoolSpec("other", 3, 1, gpus_per_worker=2)], 20)
print("held", flush=True)
sys.stdin.read()
"""


def test_gpus_of_another_job_are_waited_for(address: str, cluster: Cluster, gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if GPUs that become free are not used, the wait is not logged or has no end, or GPUs stay reserved although
    others are missing.
    """
    command = [sys.executable, "-c", OTHER_JOB, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ClusterError) as caught:
                cluster.make_pools(EVERYWHERE, 1.0)
            text = str(caught.value)
            assert "within 1 s" in text and "trainer.init_timeout_s" in text
            assert "actor" in text and "rollout" in text and text.count("(2 free)") >= 3
            with reserved(cluster, EVERYWHERE[:1], 1.0, others=6) as pools:
                ids = [gpus for _, gpus in places(pools)["actor"]]
            assert ids == [("2",), ("3",), ("6",), ("7",), ("2",), ("3",)]
        finally:
            release = threading.Timer(1.0, other.stdin.close)
            release.start()
        with reserved(cluster, EVERYWHERE, 30.0) as pools:
            assert len(pools["rollout"].groups) == 3
        release.join()
    assert "30 s (trainer.init_timeout_s)" in gkd_log.text


CHECKER = """
import sys
import ray
from gkd.tools.check_gpus import main
version, ray.__version__ = ray.__version__, "2.40.0"
if main(sys.argv[1:]) != 1:
    sys.exit(3)
ray.__version__ = version
sys.exit(main(sys.argv[1:]))
"""


def test_the_checker_lists_every_node_and_ranks_outside_of_gpus(address: str, cluster: Cluster, tmp_path: Path) -> None:
    """Fails if a rank on a GPU outside of cluster.gpus passes, the setting or a node is not listed, or a cluster of
    another version raises a bare traceback without a fix.
    """
    config = tmp_path / "check.yaml"
    config.write_text(
        "data: {train_files: [none.jsonl]}\nmodel: {path: none}\neval: {metric: none}\n"
        "trainer: {device: cpu, run_dir: none, init_timeout_s: 60, nnodes: 2}\n"
        "teacher: {server_port: 1, outage_budget_s: 0.5}\n"
        f"cluster: {{ray_address: '{address}', gpus: [0, 1, 2, 3]}}\n"
    )
    command = [sys.executable, "-c", CHECKER, "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    for expected in (ray.__version__, "2.40.0", "Fix: "):
        assert expected in done.stderr
    table = json.loads(done.stdout)
    rows = [(row["pool"], row["rank"], row["ray_gpu_ids"]) for row in table["rows"]]
    assert rows == [("actor", 0, ["0"]), ("actor", 1, ["4"]), ("rollout", 0, ["0"])]
    assert len({row["node"] for row in table["rows"]}) == 3
    assert table["gpus"] == [0, 1, 2, 3]
    assert [finding["kind"] for finding in table["findings"]] == ["outside_gpus", "teacher_silent"]
    assert table["findings"][0]["ranks"] == ["actor 1"]
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 ray start" in table["findings"][0]["fix"]
    until_free(12)


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 no\r\n", b""])
def test_an_address_without_ray_is_refused(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if only Ray's own retries, which last for minutes, detect a different server at the address."""
    monkeypatch.setattr(cluster_module, "_CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(reply)
                connection.recv(1)

        threading.Thread(target=respond, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ClusterError, match=address):
            Cluster(address, n_slots=1, on_cpu=True)
        assert time.monotonic() - began < 60


JOIN = """
import sys
from gkd.cluster.cluster import Cluster
from gkd.errors import ClusterError
try:
    Cluster(sys.argv[1], n_slots=0, on_cpu=True).close()
except ClusterError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
def test_a_cluster_that_requires_a_token(tmp_path: Path) -> None:
    """Fails if a cluster of `ray start` on a host that has a token cannot be joined, or the error without the token
    does not name the variable that is missing.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    plain = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    env = plain | {"HOME": str(tmp_path), "RAY_py_gcs_connect_timeout_s": "3"}
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    where = ["--node-ip-address", "127.0.0.1", "--port", str(port)]
    start = [*ray_command, "start", "--head", "--block", *where, "--num-cpus", "2", "--include-dashboard", "false"]
    with (tmp_path / "ray.log").open("wb") as log, subprocess.Popen(start, env=env, stdout=log, stderr=log) as head:
        try:
            wait_until(lambda: b"Ray runtime started" in (tmp_path / "ray.log").read_bytes(), 60, "ray start")
            join = [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"]
            refused = subprocess.run(join, env=env, capture_output=True, text=True, timeout=120, check=False)
            assert refused.returncode == 1 and "RAY_AUTH_MODE=token" in refused.stderr, refused.stderr
            joined = subprocess.run(join, env=env | {"RAY_AUTH_MODE": "token"}, timeout=120, check=False)
            assert joined.returncode == 0
        finally:
            head.terminate()
