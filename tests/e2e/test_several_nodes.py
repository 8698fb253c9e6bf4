"""Test a training run on three simulated Ray nodes: the student on two, the engine on the third."""

from __future__ import annotations

import pytest

from gkd.cluster.gpu_table import gpu_map_from_json
from tests.dist.ray_nodes import NodeSpec, ray_nodes
from tests.e2e.conftest import Lab
from tests.e2e.exactness import differences, steps_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_training_over_three_nodes(lab: Lab, teacher_port: int) -> None:
    """Fails if ranks, endpoints, the weight sync or a checkpoint count on being on the driver's node, pools of several
    nodes are not spread over as many, or where a rank sits changes what it learns.
    """
    same = ("actor.tp=2", "trainer.save_every=2", "weight_sync.verify=always")
    one_node, run_dir = lab.root / "one_node", lab.root / "three_nodes"
    lab.finished_run(one_node, teacher_port, *same, "trainer.n_gpus_per_node=4", timeout_s=400)
    with ray_nodes([NodeSpec(2, 4), NodeSpec(2, 4, "127.0.0.10"), NodeSpec(2, 4, "127.0.0.9")]) as address:
        pools = (
            f"cluster.ray_address={address}",
            "cluster.gpus=[0,1]",
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=2",
        )
        lab.finished_run(run_dir, teacher_port, *same, *pools, timeout_s=400)
    assert differences(one_node, run_dir) == []
    table = gpu_map_from_json((run_dir / "gpus.json").read_bytes(), "gpus.json")
    ranks = [row for row in table.rows if row.pool != "teacher"]
    assert [(row.label, row.ray_gpu_ids) for row in ranks] == [
        ("actor 0", ("0",)),
        ("actor 1", ("1",)),
        ("actor 2", ("0",)),
        ("actor 3", ("1",)),
        ("rollout 0", ("0",)),
    ]
    nodes = [row.node for row in ranks]
    assert nodes[0] == nodes[1] and nodes[2] == nodes[3] and len({nodes[0], nodes[2], nodes[4]}) == 3
    assert table.findings == () and table.gpus == (0, 1)
    lines = steps_of(run_dir)
    assert sorted(lines) == [0, 1, 2, 3, 4]
    assert all(lines[step]["optim/grad_norm"] > 0 and lines[step]["rollout/sequences"] == 12 for step in range(1, 5))
    assert lines[4]["eval/kl"] < 0.98 * lines[0]["eval/kl"]
    assert (run_dir / "checkpoints" / "step_00000004").is_dir() and (run_dir / "export").is_dir()
