"""Changes with which a run fits: that they suffice, that none is needless, and the totals of pools and hosts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from gkd.cluster import host
from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.memory.footprint import RankFootprint, footprint, teacher_footprint
from gkd.memory.footprint.combination import HOST, find_combination
from gkd.memory.footprint.estimate import PROCESS_BYTES, host_shortage, host_totals, pool_totals
from gkd.memory.footprint.limits import check, shortages, smallest_margin
from gkd.memory.footprint.report import bound, combination_lines
from gkd.memory.footprint.rollout import with_engine_cache
from gkd.tools import memory
from tests.unit.test_footprint import GIB, GSM8K, QWEN25_15B, TP2, _config

COLOCATED = ("trainer.colocate=true", "rollout.n_gpus_per_node=1")
OFFLOADED = ("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true")


def refit(config: Config) -> tuple[RankFootprint, ...]:
    return footprint(config, QWEN25_15B)


def fits(overrides: list[str], gpu_bytes: int) -> bool:
    """Return whether the settings fit with a tenth of each actor GPU free, by what the tool reports."""
    config = _config(*overrides)
    found = refit(config)
    return not check(found, gpu_bytes, config) and smallest_margin(found, gpu_bytes, config)[1] >= 0.1


@pytest.mark.parametrize(
    ("gib", "overrides"),
    [
        (24, ()),
        (24, COLOCATED),
        (8, ("actor.max_tokens_per_micro_batch=0",)),
        (12, ("trainer.n_gpus_per_node=2", "actor.tp=2", "actor.sequence_parallel=true", "actor.recompute=selective")),
        (80, ("rollout.gpu_memory_utilization=0.99", "weight_sync.bucket_mib=2048")),
    ],
)
def test_the_combination_fits_and_no_change_is_needless(gib: int, overrides: tuple[str, ...]) -> None:
    """Fails if pasted overrides are refused, do not fit, differ from the prediction, or include a needless change."""

    def suffice(changes: list[str]) -> bool:
        try:
            check_config(_config(*overrides, *changes))
            return fits([*overrides, *changes], gib * GIB)
        except (ConfigError, ModelError):
            return False

    found = find_combination(_config(*overrides), refit, gib * GIB)
    assert found.fits and len(found.steps) > 1
    kept = [o for o in overrides if o.partition("=")[0] not in {c.partition("=")[0] for c in found.overrides}]
    assert fits([*kept, *found.overrides], gib * GIB)
    so_far: list[str] = []
    for step in found.steps:
        so_far += [f"{key}={value}" for key, value in step.changes.items()]
        config = _config(*overrides, *so_far)
        check_config(config)
        assert step.config == config and tuple(step.footprints) == refit(config)
        assert fits([*overrides, *so_far], gib * GIB) == (step is found.steps[-1])
        assert not suffice([change for change in found.overrides if change.partition("=")[0] not in step.changes]) or (
            step is found.steps[0]
        )


def test_nothing_fits() -> None:
    """Fails if changes that do not suffice are printed as if they did, or what is missing and the bound are not."""
    found = find_combination(_config(), refit, 3 * GIB)
    last = found.steps[-1]
    assert not found.fits and found.more_gpus == () and set(OFFLOADED) < set(found.overrides)
    assert last.short_bytes == max(shortages(last.footprints, 3 * GIB, last.config).values())
    assert "rollout rank 0" in bound(last)
    lines = combination_lines(found, "run --config x")
    assert not any("--config" in line for line in lines) and any(
        f"{last.short_bytes / GIB:.2f} GiB" in line for line in lines
    )


def test_more_gpus_are_the_last_resort() -> None:
    """Fails if more GPUs are demanded although less would do, or are not found where nothing else helps."""
    mixed = {**QWEN25_15B, "num_hidden_layers": 280}

    def large(config: Config) -> tuple[RankFootprint, ...]:
        return footprint(config, mixed)

    found = find_combination(_config("rollout.n_gpus_per_node=1"), large, 24 * GIB)
    assert not found.fits and [key for step in found.more_gpus for key in step.changes] == [
        "rollout.tp",
        "rollout.n_gpus_per_node",
    ]
    changed = _config("rollout.n_gpus_per_node=1", *found.overrides)
    assert check(large(changed), 24 * GIB, changed) == [] and changed.rollout.n_gpus_per_node == 2


def test_a_host_bounds_the_combination() -> None:
    """Fails if states are moved to a host that cannot hold them."""

    def lacks(host_bytes: int, config: Config, found: object) -> int:
        return host_shortage(host_totals(refit(config), 0, config), host_bytes)

    small = find_combination(_config(), refit, 24 * GIB, lambda config, found: lacks(32 * GIB, config, found))
    assert not small.fits and max(small.steps[-1].short.values()) > 0
    assert small.steps[-1].short[HOST] <= small.steps[0].short[HOST] and not set(OFFLOADED) <= set(small.overrides)
    offloads = find_combination(_config(), refit, 24 * GIB, lambda config, found: lacks(80 * GIB, config, found))
    assert offloads.fits and offloads.steps[-1].short[HOST] <= 0


def test_the_totals_add_up() -> None:
    """Fails if a pool's GPUs or a host's memory are not the sum of the ranks'."""
    config = _config("trainer.n_gpus_per_node=4", "actor.pp=2", "rollout.n_gpus_per_node=2")
    found = with_engine_cache(refit(config), 80 * GIB, config)
    first, last, engine = found
    actor, rollout = pool_totals(found, 80 * GIB, config)
    assert (actor.n_gpus, actor.total) == (4, 2 * first.total_bytes + 2 * last.total_bytes)
    assert actor.largest == max(first.total_bytes, last.total_bytes)
    assert (rollout.n_gpus, rollout.total) == (2, 2 * engine.total_bytes)
    (host,) = host_totals(found, 5, config)
    ranks = 2 * first.parts["saved_copy"] + 2 * last.parts["saved_copy"]
    n_processes = 1 + 4 + 2 + 2  # driver, ranks, engines, teacher server
    processes, kept = n_processes * PROCESS_BYTES["cuda"], host.parts["kept_weights"]
    assert host.parts == {"scores": 5, "processes": processes, "saved_copy": ranks, "kept_weights": kept}
    assert host_shortage([host], host.total) == 0 == host_shortage([host], host.total + 1) + 1


def test_the_totals_of_shared_gpus_and_offloaded_states() -> None:
    """Fails if states in host memory, a sleeping engine's weights or gloo's buckets are left out of the host."""
    config = _config(*COLOCATED, *OFFLOADED, "teacher.server_ip=10.0.0.5", "weight_sync.transport=gloo")
    actor, engine = found = refit(config)
    (pool,) = pool_totals(found, 24 * GIB, config)
    assert pool.n_gpus == 1 and pool.total == pool.largest
    (host,) = host_totals(found, 0, config)
    on_card = _config(*COLOCATED, *OFFLOADED)  # CUDA IPC
    assert "weight_sync" not in host_totals(refit(on_card), 0, on_card)[0].parts
    assert all(a.parts["weight_sync"] > b.parts["weight_sync"] for a, b in zip(refit(on_card), found, strict=True))
    assert host.parts == {
        "processes": 3 * PROCESS_BYTES["cuda"],
        "offloaded": actor.parts["offloaded"],
        "moved_states": actor.parts["moved_states"] + engine.parts["moved_states"],
        "saved_copy": actor.parts["saved_copy"],
        "weight_sync": 2 * 2 * (config.weight_sync.bucket_mib << 20),
        "kept_weights": engine.parts["weights"],
    }


def test_the_weights_that_are_kept_for_restarted_engines() -> None:
    """Fails if the copy of the last weights is left out, counted per rank instead of once, or counted without restarts
    and shared memory, or all of it on the first of several nodes.
    """

    def kept(*overrides: str) -> int:
        config = _config(*overrides)
        return host_totals(refit(config), 0, config)[0].parts.get("kept_weights", 0)

    student = 2 * 1_543_714_304  # bytes in bfloat16
    assert kept() == kept(*TP2) == kept("rollout.n_gpus_per_node=2", "rollout.tp=2") == student
    assert kept("trainer.n_gpus_per_node=4", "actor.pp=2") == pytest.approx(student, abs=2)
    two_nodes = ("cluster.ray_address=h:1", "trainer.nnodes=2", "actor.pp=2", "actor.tp=1")
    assert 0.4 * student < kept(*two_nodes) < 0.8 * student
    none = "rollout.max_restarts=0"
    assert kept(none) == 0 < kept(none, "weight_sync.transport=shared_memory")
    assert kept(none, "trainer.device=cpu") > 0 == kept(none, "trainer.device=cpu", "weight_sync.transport=gloo")


def test_the_totals_of_several_nodes_and_of_the_cpu() -> None:
    """Fails if all nodes are added up, or the ranks of a CPU run are not counted in host memory."""
    config = _config("cluster.ray_address=h:1", "trainer.nnodes=2", "trainer.n_gpus_per_node=2", "actor.pp=4")
    found = refit(config)
    actor, engines = host_totals(found, 8, config)
    stages = [part.parts["saved_copy"] for part in found if part.role == "actor"]
    assert actor.parts["scores"] == 4 and engines.parts["processes"] == 3 * PROCESS_BYTES["cuda"]
    assert actor.parts["saved_copy"] == max(sum(stages[:2]), sum(stages[2:]))
    on_cpu = _config("trainer.device=cpu", "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=1")
    worker = teacher_footprint(QWEN25_15B, n_tokens=1536)
    found = (*refit(on_cpu), worker)
    (host,) = host_totals(found, 0, on_cpu)
    assert host.parts["actor ranks"] == 2 * found[0].total_bytes and host.parts["rollout ranks"] == found[1].total_bytes
    assert host.parts["teacher ranks"] == worker.total_bytes and pool_totals(found, None, on_cpu) == []


def test_the_memory_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the limit of a container is ignored, or a missing or unlimited one is taken for a number."""
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("1048576\n")
    found = []
    for limits in (("none", "max"), ("max", "limit")):
        monkeypatch.setattr(host, "_LIMITS", tuple(tmp_path / name for name in limits))
        found.append(host.host_memory_bytes())
    assert found[0] > 1 << 28 and found[1] == 1 << 20


def test_the_command_prints_overrides_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the printed command is not the run with changes that fit, or totals are missing."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_15B))
    given = [f"model.path={tmp_path}", "actor.max_tokens_per_micro_batch=8192", "data.prompt_key=my question"]
    call = ["--config", str(GSM8K), "--gpu-gib", "24", "--host-gib", "256", *given]
    assert memory.main(call) == 1
    lines = capsys.readouterr().out.splitlines()
    words = shlex.split(lines[-1])
    assert words[:5] == ["python", "-m", "gkd.main_gkd", "--config", str(GSM8K)]
    config = load_config(words[4], words[5:])
    check_config(config)
    assert config.data.prompt_key == "my question" and config.actor.max_tokens_per_micro_batch == 4096
    assert sum(word.startswith("actor.max_tokens") for word in words) == 1
    assert memory.main(["--config", str(GSM8K), "--gpu-gib", "24", "--host-gib", "256", *words[5:]]) == 0
    assert "--config" not in capsys.readouterr().out.splitlines()[-1]
    assert memory.main([*call, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["combination"]["overrides"] == [word for word in words[5:] if word not in given]
    assert found["combination"]["steps"][-1]["short_bytes"] == 0 and found["host_fits"] is True
    assert [pool["pool"] for pool in found["pools"]] == ["actor", "rollout"] and len(found["hosts"]) == 1
    assert memory.main([*call[:4], "--host-gib", "8", *given, *found["combination"]["overrides"]]) == 1
    for wrong in ("x", "0", "nan", "-1", "1e300"):
        assert memory.main([*call[:4], f"--host-gib={wrong}", *given]) == 2
        assert "--host-gib" in capsys.readouterr().err
