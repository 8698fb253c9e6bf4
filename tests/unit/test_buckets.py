"""Buckets and digests of weight sync."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gkd.weight_sync.buckets import TensorSpec, differing, digest, plan_buckets

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=12)


@settings(max_examples=60)
@given(SHAPES, st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=1, max_size=3), st.integers(1, 2000))
@example([(3,), (2,)], ["bfloat16", "float32"], 2000)  # behind 6 bytes there is no view of a float32
def test_tensors_round_trip_through_buckets(
    shapes: list[tuple[int, ...]], dtypes: list[str], bucket_bytes: int
) -> None:
    """Fails if tensors overlap, are misaligned or are lost."""
    specs = [TensorSpec(f"t{i}", shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    tensors = {s.name: torch.randn(s.shape).to(s.torch_dtype) for s in specs}
    buckets = plan_buckets(specs, bucket_bytes)
    got: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        assert len(bucket.specs) == 1 or bucket.n_bytes <= bucket_bytes
        buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8)
        for name, view in bucket.views(buffer):
            view.copy_(tensors[name])
        got |= {name: view.clone() for name, view in bucket.views(buffer)}
    assert list(got) == [s.name for s in specs]
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("device", [None, torch.device("cuda")])
def test_a_digest_depends_on_every_bit_the_dtype_and_the_shape(device: torch.device | None) -> None:
    """Fails if a damaged or reinterpreted weight passes verification, in a run on the CPU or on GPUs."""
    tensor = torch.zeros(4, 6)
    flipped = tensor.clone()
    flipped.view(torch.int32)[3, 5] ^= 1
    views = [tensor, flipped, tensor.view(6, 4), tensor.to(torch.bfloat16), -tensor]
    assert len({digest(v, device) for v in views}) == len(views)
    assert digest(tensor.t().contiguous().t(), device) == digest(tensor, device)


def test_a_tensor_can_be_offloaded_after_its_digest() -> None:
    """Fails if a weight cannot be offloaded on CPU after its digest was computed."""
    for tensor in (torch.randn(4, 6), torch.randn(5).bfloat16(), torch.tensor(1.0), torch.nn.Parameter(torch.ones(2))):
        digest(tensor)
        tensor.untyped_storage().resize_(0)
    assert digest(torch.empty(0)) != digest(torch.empty(0, 3))


def test_differing_names_tensors_of_either_side() -> None:
    """Fails if a tensor that one side lacks counts as equal."""
    assert differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "d": "4"}) == ["b", "c", "d"]
    assert differing({"a": "1"}, {"a": "1"}) == []
