"""Compare parts of a footprint with manually computed numbers: Qwen2.5-1.5B, on CUDA unless stated otherwise.

Its letters: H 1536, 12 heads and 2 key heads of 128 (q 1536, kv 256), F 8960, V 151936, 28 layers, N 1543714304.
"""

from __future__ import annotations

from typing import Any

import pytest

from gkd.errors import ConfigError
from gkd.hf.model_dims import read_dims
from gkd.memory.footprint.activations import Kernels, LossShape, largest_micro_batch
from gkd.memory.footprint.estimate import footprint
from gkd.memory.footprint.rank import RankFootprint
from gkd.memory.footprint.rollout import max_sequences
from tests.unit.test_footprint import EXPERTS, QWEN25_15B, SIZES, TP2, _actor, _config

N, TABLE = 1_543_714_304, 151936 * 1536
BOUNDARY = 2 * 1536 * 16384  # bytes of the hidden states of a micro-batch


@pytest.mark.parametrize(
    ("settings", "model", "n_bytes"),
    [
        # Norms, in and out: 4 H. Rotated q and k, context: 2 (2 q + kv). Copied values: 2 kv. Angles: 8 D. Sums of the
        # softmax: 4 x 12. MLP: 4 H + 10 F.
        ({}, {}, (6144 + 6656 + 512 + 1024 + 48) + (6144 + 89600)),
        # A padded micro-batch has its values in the projection, 2 (q + 2 kv); angles once for 2 sequences.
        ({"packed": False, "n_sequences": 2}, {}, (6144 + 6656 + 4096 + 512 + 48) + 95744),
        # Neither sums nor copied values are kept, but the projection, of which the values are a view, 2 (q + 2 kv).
        ({"recompute": "selective"}, {}, (6144 + 6656 + 4096 + 1024) + 95744),
        ({"tp": 2}, {}, (6144 + 3328 + 256 + 1024 + 24) + (6144 + 44800)),
        # Fused: no angles, 6 F.
        ({"fused": True}, {}, (6144 + 6656 + 512 + 48) + (6144 + 53760)),
        ({"tp": 2, "sequence_parallel": True}, {}, (3072 + 3328 + 256 + 1024 + 24) + (3072 + 44800)),
        # No kernel takes float32: 4 x 4 q with keys and values repeated, and each sequence's context, 4 q.
        ({"itemsize": 4}, {}, (12288 + 24576 + 6144 + 2048 + 48) + (12288 + 179200)),
        # Nor heads of 100 (q 1200, kv 200): values in the projection, and each sequence's context.
        ({}, {"head_dim": 100}, (6144 + 5200 + 3200 + 2400 + 800 + 48) + 95744),
        # Norms as Megatron's; 2 (2 q + 2 kv). MLP: 4 H + 8 F.
        ({"backend": "fsdp2"}, {}, (6144 + 7168 + 48) + (6144 + 71680)),
        ({"backend": "fsdp2", "itemsize": 4}, {}, (12288 + 24576 + 6144 + 48) + (12288 + 143360)),
        # transformers' norms: 6 H (4 H if frozen), and 2 H of output.
        ({"backend": "fsdp2"}, {"model_type": "olmo2"}, (12288 + 7168 + 48) + (12288 + 71680)),
        ({"backend": "fsdp2", "frozen": True}, {"model_type": "olmo2"}, (9216 + 7168 + 48) + (9216 + 71680)),
    ],
)
def test_what_a_layer_keeps_on_cuda(settings: dict[str, Any], model: dict[str, Any], n_bytes: int) -> None:
    """Fails if a tensor that autograd saves on CUDA is forgotten, or one of the CPU's is counted there."""
    kernels = {"backend": "megatron", "on_cpu": False, "itemsize": 2, "packed": True, "recompute": "none", **settings}
    assert Kernels(**kernels).layer(read_dims({**QWEN25_15B, **model}), 0) == n_bytes


def test_experts_on_cuda() -> None:
    """Fails if a mixture's tokens are not counted once for each expert that they go through."""
    shape = read_dims({"model_type": "qwen3_moe", **SIZES, **EXPERTS, "head_dim": 8})
    kernels = Kernels("megatron", False, 2, True, "none")
    # H 48, q 48, kv 16, 6 heads, E 4, 2 of them active, F 24. Norms on q and k: the copied queries, 2 q, and the
    # projection, of which the keys are a view, 2 (q + 2 kv).
    attention = 4 * 48 + 2 * (96 + 16) + 2 * 16 + 8 * 8 + 4 * 6 + 2 * 48 + 2 * (48 + 32)
    experts = 4 * 48 + 2 * 2 * (48 + 6 * 24) + 3 * 4 * 4
    assert kernels.layer(shape, 0) == attention + experts
    fused = Kernels("megatron", False, 2, True, "none", fused=True)
    assert kernels.layer(shape, 0) - fused.layer(shape, 0) == 2 * 2 * 3 * 24 + 8 * 8


@pytest.mark.parametrize(
    ("overrides", "boundaries"),
    [
        # One batch has 12 micro-batches. A stage of 7 layers keeps their inputs, what came in and what went out.
        (("trainer.n_gpus_per_node=4", "actor.pp=4"), [4 * 9, 3 * 9, 2 * 9, 1 * 9 + 1]),
        # Chunks of 7 layers: 5 of the first stage are in flight, 3 of the second.
        (("trainer.n_gpus_per_node=2", "actor.pp=2", "actor.vpp=2"), [5 * 9, 3 * 9 + 1]),
        # Of a single micro-batch each stage has one.
        (("trainer.n_gpus_per_node=2", "actor.pp=2", "trainer.global_batch_size=8"), [16 * 0.75, 17 * 0.75]),
    ],
)
def test_micro_batches_under_way(overrides: tuple[str, ...], boundaries: list[float]) -> None:
    """Fails if a pipeline's stage is thought to hold more or fewer micro-batches than 1F1B gives it."""
    found = footprint(_config("actor.recompute=full", *overrides), QWEN25_15B)[:-1]
    assert [part.parts["activations"] / BOUNDARY for part in found] == boundaries  # the last norm is one more


def test_logits_and_tables() -> None:
    """Fails if the loss's working memory is counted of other rows than a chunk's, or the teacher's lists are not."""
    piece, listed = (1 << 22) * 4 * 2, 16384 * 64 * 12
    # A chunk of 1 GiB has 3533 rows.
    assert _loss().logits_bytes == 3533 * 151936 * 2 + piece + listed + 3533 * 65 * 4 * 12
    whole = 16384 * 151936 * 2 + piece + listed + 16384 * 65 * 4 * 12
    assert _loss("actor.fused_lm_head=false").logits_bytes == whole
    # The teacher's logits are float32 and share the chunk: 1177 rows. There are no lists, but the sampled column.
    full = 1177 * 151936 * (2 + 4) + piece + 1177 * 4 * 12
    assert _loss("teacher.signal=logits").logits_bytes == full


def _loss(*overrides: str, frozen: bool = False, in_place: bool = False) -> LossShape:
    config = _config(*overrides)
    sizes = {"hidden": 1536, "rows_of_head": 151936, "itemsize": 2}
    return LossShape(config, largest_micro_batch(config), **sizes, on_cpu=False, frozen=frozen, in_place=in_place)


def test_the_heads_gradient() -> None:
    """Fails if the sum of the chunks' gradients of the LM head, its cast copy, or the one that is kept is forgotten; or
    adapters are charged for a gradient of the head, which is frozen, or Megatron for one that is added in place.
    """
    rows = 16384 * 1536 * 2
    trained, frozen = _loss(), _loss(frozen=True)
    assert (trained.forward_bytes, trained.backward_bytes) == (2 * rows + 6 * TABLE, 2 * rows + 2 * TABLE)
    assert (frozen.forward_bytes, frozen.backward_bytes) == (2 * rows, 2 * rows)
    in_place = _loss(in_place=True)
    assert (in_place.forward_bytes, in_place.backward_bytes, in_place.head_grad_bytes) == (2 * rows, 2 * rows, 0)
    assert _loss("actor.fused_lm_head=false", in_place=True).head_grad_bytes == 2 * TABLE
    separate = _loss("actor.fused_lm_head=false", frozen=True)
    assert (separate.forward_bytes, separate.backward_bytes) == (rows, rows + 16384 * 151936 * 2)


def test_a_gathered_layer_on_cuda() -> None:
    """Fails if fully_shard's own buffers are forgotten: the shard that travels, and the reduced gradient."""
    layer = 46_797_824  # (H + 1) (q + 2 kv) + q H + 2 H + 3 H F
    small = {**QWEN25_15B, "vocab_size": 1024}  # else the loss is the fullest moment
    rows, table, widths = 2 * 16384 * 1536 * 2, 2 * 1024 * 1536, 16384 * 2 * 2 * (1536 + 8960)
    overrides = ("actor.strategy=fsdp2", "trainer.n_gpus_per_node=4")
    gathered, gradient = 2 * 2 * layer + 2 * layer // 4, (2 + 4) * layer + 4 * layer // 4
    found = _actor(*overrides, shape=small).parts["transient"]
    assert found == rows + 2 * table + gathered + gradient + widths  # the table, and its gradient
    offloaded = _actor(*overrides, "actor.fsdp_cpu_offload=true", shape=small).parts["transient"]
    assert offloaded - found == 4 * layer // 4  # shards come in float32
    adapters = _actor(*overrides, "actor.lora.rank=16", shape=small).parts["transient"]
    assert adapters == rows + table + gathered + widths


def test_the_optimizers_step() -> None:
    """Fails if working memory is forgotten: gloo's copy of the gradient buffer, or AdamW's copies of a large table."""
    assert _actor().parts["optimizer_step"] == 0  # fused
    assert _actor("trainer.device=cpu").parts["optimizer_step"] == 2 * 4 * TABLE
    assert _actor("trainer.device=cpu", "trainer.n_gpus_per_node=2").parts["optimizer_step"] == 4 * N
    wide = {"hidden_size": 64, "vocab_size": 1 << 20, "num_hidden_layers": 1, "intermediate_size": 64}
    found = _actor("trainer.device=cpu", shape={**QWEN25_15B, **wide}).parts
    assert found["optimizer_step"] == 2 * 4 * 64 * (1 << 20)
    assert _actor("actor.strategy=fsdp2").parts["optimizer_step"] == 0


def test_the_weight_sync() -> None:
    """Fails if a bucket is thought to be smaller than the tensor in it, or a gathered tensor is forgotten."""
    assert _actor().parts["weight_sync"] == 2 * 2 * TABLE  # one is sent while the next is filled
    assert _actor("weight_sync.bucket_mib=1024").parts["weight_sync"] == 2048 << 20
    assert _actor("weight_sync.bucket_mib=2048").parts["weight_sync"] == 2 * N, "more than all weights"
    assert _actor(*TP2).parts["weight_sync"] == 4 * 2 * TABLE
    assert _actor("actor.strategy=fsdp2").parts["weight_sync"] == 3 * 2 * TABLE
    # All experts of a layer are one tensor for two of their matrices.
    experts = {**SIZES, **EXPERTS, "num_experts": 64, "head_dim": 8}
    found = _actor("actor.strategy=fsdp2", shape={"model_type": "qwen3_moe", **experts}).parts["weight_sync"]
    n = read_dims({"model_type": "qwen3_moe", **experts}).n_params
    assert found == 2 * n + 2 * (2 * 64 * 24 * 48)  # all of it is less than a bucket


def test_an_engine() -> None:
    """Fails if the trial pass of an engine has the size of a batch and not that of the engine's limits."""
    config = _config("data.val_files=[]", "trainer.global_batch_size=6")
    engine = footprint(config, QWEN25_15B)[-1]
    assert engine == RankFootprint(
        "rollout",
        0,
        {
            "weights": 2 * N,
            "kv_cache": 2 * 1536 * 28672,  # of 6 prompts on 3 engines
            "activations": 16384 * 2 * 3 * (1536 + 8960),
            "logits": 2 * 256 * 151936 * 4,
            "weight_sync": 2 * 2 * TABLE,
            "context": 1 << 30,
        },
    )
    few = footprint(_config("rollout.max_num_seqs=2"), QWEN25_15B)[-1].parts
    assert (few["activations"], few["logits"]) == (2 * 1536 * 2 * 3 * (1536 + 8960), 2 * 2 * 151936 * 4)
    two = footprint(_config("rollout.n_gpus_per_node=2", "rollout.tp=2"), QWEN25_15B)[-1].parts
    assert (two["weights"], two["activations"]) == (N, 16384 * 2 * 3 * (1536 + 4480))


@pytest.mark.parametrize(
    ("overrides", "n"),
    [
        # 128 prompts a step on 3 engines, and 500 in an evaluation.
        (("data.val_files=[]",), 43),
        ((), 167),
        (("eval.max_prompts=0",), 256),  # their number is unknown
        (("trainer.scheduler=one_step_off",), 210),
        (("trainer.scheduler=two_step_off", "data.val_files=[]"), 43),  # one batch at a time
        (("trainer.scheduler=stream", "data.val_files=[]"), 86),
        (("trainer.scheduler=stream", "trainer.max_staleness=3", "data.val_files=[]"), 171),
        (("rollout.max_num_seqs=100",), 100),
    ],
)
def test_sequences_of_an_engine(overrides: tuple[str, ...], n: int) -> None:
    """Fails if a prefetching scheduler, or an evaluation, is counted with the cache of one batch."""
    assert max_sequences(_config(*overrides)) == n


def test_adapters_beside_experts() -> None:
    """Fails if adapters are counted for expert MLPs, which are not linear layers."""
    shape = {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "head_dim": 8, "mlp_only_layers": [1]}
    overrides = ("actor.strategy=fsdp2", "actor.lora.rank=4", "actor.lora.targets=[mlp.up_proj,q_proj]")
    n = 4 * ((48 + 80) + 3 * (48 + 48))
    assert _actor(*overrides, shape=shape).parts["gradients"] == 4 * n
    for strategy, dense in (("fsdp2", []), ("megatron", [1])):
        with pytest.raises(ConfigError):
            _actor(*overrides, f"actor.strategy={strategy}", shape={**shape, "mlp_only_layers": dense})


def test_adapters_of_an_engine() -> None:
    """Fails if the adapters that an engine holds are left out, or are not padded to one of vLLM's ranks."""
    lora = ("actor.lora.rank=20", "actor.lora.targets=[q_proj,down_proj]")
    weights = {
        content: footprint(_config(*lora, f"weight_sync.lora={content}"), QWEN25_15B)[-1].parts["weights"]
        for content in ("merged", "adapters")
    }
    assert weights["adapters"] - weights["merged"] == 2 * 32 * 28 * ((1536 + 1536) + (8960 + 1536))


def test_only_a_save_during_training_makes_a_copy() -> None:
    """Fails if a run that saves its last step alone is charged for a copy, or one that keeps its best step is not."""
    assert _actor().parts["saved_copy"] == 12 * N
    assert _actor("trainer.save_every=0").parts["saved_copy"] == 0
    assert _actor("trainer.save_every=0", "trainer.keep_best=eval/kl").parts["saved_copy"] == 12 * N


def test_adapters_of_a_megatron_rank() -> None:
    """Fails if frozen weights are charged for gradients or moments, or a factor that TP splits is counted whole."""
    lora = ("actor.lora.rank=16", "actor.lora.targets=[q_proj,v_proj,down_proj]")
    for overrides, tp in (((), 1), (TP2, 2)):
        n = 16 * 28 * ((1536 + 1536 // tp) + (1536 + 256 // tp) + (8960 // tp + 1536))
        found, whole = _actor(*lora, *overrides), _actor(*overrides)
        assert found.parts["weights"] - whole.parts["weights"] == 4 * n
        assert (found.parts["gradients"], found.parts["optimizer"]) == (4 * n, 8 * n)
        assert found.parts["saved_copy"] == 12 * n
    n = 16 * 28 * ((1536 + 1536) + (1536 + 256) + (8960 + 1536))
    assert _actor(*lora, "trainer.n_gpus_per_node=4").parts["optimizer"] == 2 * n
