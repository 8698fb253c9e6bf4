"""Check `TritonRows` in a separate process; `test_triton_rows` runs this file and reads its output.

Triton decides when it is first imported whether kernels are interpreted (TRITON_INTERPRET=1) or compiled, and other
tests of the same process may have imported it. Each function is one check and raises an error if it fails.

    TRITON_INTERPRET=1 python -m tests.unit.triton_rows_cases interpreted
    python -m tests.unit.triton_rows_cases compiled
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.testing import assert_close

from gkd.errors import NumericsError
from gkd.loss import triton_rows
from gkd.loss.row_kernels import RowGradient, RowKernels, TorchRows
from gkd.loss.triton_rows import TritonRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 7, 1000, 5003)
# Small programs, so that a row needs several iterations; 16-byte loads of float32 need at least 64 elements per warp.
SMALL = TritonRows(block=512, num_warps=1)
NAN, INF = float("nan"), float("inf")


def rows(n: int, v: int, dtype: torch.dtype, *, padding: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(v)
    return (torch.randn(n, v + padding, generator=generator) * 4).to(dtype)[:, :v]


def expected_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    z = logits.double() / temperature
    mean = (z.softmax(-1) * z.masked_fill(z == -INF, 0.0)).sum(-1)
    return z.logsumexp(-1), mean.masked_fill((z == -INF).all(-1), 0.0)


def check_statistics(logits: Tensor, temperature: float, kernels: RowKernels = SMALL) -> None:
    got = kernels.statistics(logits, temperature)
    assert all(t.dtype == torch.float32 and t.shape == (len(logits),) for t in got)
    expected = expected_statistics(logits, temperature)
    assert_close([t.double() for t in got], list(expected), atol=2e-5, rtol=2e-6)
    assert_close(list(got), list(TorchRows().statistics(logits, temperature)), atol=2e-5, rtol=2e-6)


def expected_gradient(logits: Tensor, g: dict[str, Tensor], temperature: float) -> Tensor:
    z = logits.double() / temperature
    grad = -g["row_grad"].double()[:, None] * (z - g["log_normalizer"].double()[:, None]).exp()
    added = g["column_grad"].double().masked_fill(g["columns"] < 0, 0.0)
    return grad.scatter_add(1, g["columns"].clamp(min=0), added) / temperature


def gradient_inputs(logits: Tensor, n_ids: int, temperature: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n_ids)
    (n, v), border = logits.shape, torch.tensor([0, 511, 512, 513, 1023, 1024])
    columns = torch.randint(-1, v, (n, n_ids), generator=generator)
    columns[:, : len(border)] = border[:n_ids].clamp(max=v - 1)
    repeats = columns[:, len(border) : len(border) + 3]
    repeats.copy_(columns[:, : repeats.shape[1]])
    columns[-1] = -1  # a row with no id at all
    column_grad = torch.randn(n, n_ids, generator=generator).masked_fill(columns < 0, NAN)
    row_grad = torch.randn(n, generator=generator)
    row_grad[0] = 0.0
    log_normalizer = expected_statistics(logits, temperature)[0].float() + 0.1  # more than this rank's columns
    return {"columns": columns, "column_grad": column_grad, "row_grad": row_grad, "log_normalizer": log_normalizer}


def check_gradient(logits: Tensor, g: dict[str, Tensor], temperature: float, *, in_place: bool) -> None:
    expected = expected_gradient(logits, g, temperature)
    by_torch = torch.empty_like(logits)
    TorchRows().write_gradient(logits, by_torch, RowGradient(**g, temperature=temperature))
    out = logits if in_place else torch.empty_like(logits)
    SMALL.write_gradient(logits, out, RowGradient(**g, temperature=temperature))
    # One unit in the last place, because the interpreter truncates where a GPU rounds; plus the error of float32.
    rtol = torch.finfo(logits.dtype).eps + 2e-5
    assert_close(out.double(), expected, equal_nan=True, atol=2e-6, rtol=rtol)
    assert_close(out, by_torch, equal_nan=True, atol=2e-6, rtol=1.5 * rtol)


def statistics_equal_float64() -> None:
    """Raise if an iteration, a lane or the last columns are skipped, or the running maximum is wrong."""
    for dtype, v in product(DTYPES, WIDTHS):
        check_statistics(rows(3, v, dtype), 1.0)
    for temperature in (0.7, 2.0):
        check_statistics(rows(3, 1000, torch.bfloat16), temperature)
    check_statistics(rows(2, 5003, torch.bfloat16), 1.0, TritonRows())
    check_statistics(rows(3, 1000, torch.float32) + 900.0, 1.0)  # an exponential of the logits themselves overflows


def statistics_of_impossible_tokens() -> None:
    """Raise if logits of -inf, also in whole iterations at the start, make the mean or the maximum NaN."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = rows(5, 1601, dtype)
        logits[0, :1100] = -INF  # two whole iterations and part of the third
        logits[1, 3:] = -INF
        logits[2, :-1] = -INF
        logits[3, ::2] = torch.finfo(dtype).min
        logits[4] = -INF  # another shard of the vocabulary has all of the row's mass
        check_statistics(logits, 1.0)
        check_statistics(logits, 0.7)


def a_nan_or_infinity_stays() -> None:
    """Raise if a maximum drops a NaN, so that training continues on broken logits, or a gradient's NaN is lost."""
    for column, bad in product((0, 700, 1599), (NAN, INF)):
        logits = rows(2, 1600, torch.float32)
        logits[1, column] = bad
        log_sum, mean = SMALL.statistics(logits, 1.0)
        assert log_sum.isfinite().tolist() == mean.isfinite().tolist() == [True, False], (column, bad, log_sum, mean)
    logits = rows(3, 600, torch.bfloat16)
    g = gradient_inputs(logits, 9, 1.0)
    g["column_grad"][0, 1], g["column_grad"][1, 2] = NAN, INF
    expected = expected_gradient(logits, g, 1.0)
    assert expected.isnan().sum() == 1 and expected.isinf().sum() == 1
    check_gradient(logits, g, 1.0, in_place=True)


def strided_rows() -> None:
    """Raise if the padded columns of a wider matrix are read or written, or a transposed table is misread."""
    for dtype, padding in product((torch.float32, torch.bfloat16), (1, 24)):
        logits = rows(4, 1000, dtype, padding=padding)
        check_statistics(logits, 1.0)
        whole = torch.full((4, 1000 + padding), 7.0, dtype=dtype)
        out, g = whole[:, :1000], gradient_inputs(logits, 5, 1.0)
        SMALL.write_gradient(logits, out, RowGradient(**g, temperature=1.0))
        assert bool((whole[:, 1000:] == 7.0).all()), "the padding was written to"
        assert_close(out.double(), expected_gradient(logits, g, 1.0), atol=2e-6, rtol=torch.finfo(dtype).eps)
        check_gradient(logits, g, 1.0, in_place=True)
    # Non-contiguous values, like the results of expand and transpose.
    logits = rows(3, 600, torch.float32)
    g = gradient_inputs(logits, 5, 1.0)
    g["row_grad"] = torch.ones(1).expand(3)
    g["columns"], g["column_grad"] = g["columns"].T.contiguous().T, g["column_grad"].T.contiguous().T
    check_gradient(logits, g, 1.0, in_place=False)


def rows_beyond_32_bits() -> None:
    """Raise if row offsets are 32-bit: 8192 rows of 300,000 columns have more than 2^31 elements."""
    # Untouched memory is not allocated physically; only the pages of three rows are.
    logits = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 40), (2**30, 1))
    logits.copy_(rows(3, 40, torch.bfloat16))
    check_statistics(logits, 1.0)
    check_gradient(logits, gradient_inputs(logits.clone(), 5, 1.0), 1.0, in_place=True)


def gradient_equals_float64() -> None:
    """Raise if repeated ids are not summed, an id at a boundary or -1 is misplaced, or T is ignored."""
    for dtype, v, n_ids in product(DTYPES, WIDTHS, (0, 1, 65)):
        logits = rows(3, v, dtype)
        check_gradient(logits, gradient_inputs(logits, n_ids, 1.0), 1.0, in_place=n_ids == 65)
    for temperature, n_ids, in_place in product((0.7, 2.0), (5, 130), (True, False)):
        logits = rows(3, 1000, torch.bfloat16)
        check_gradient(logits, gradient_inputs(logits, n_ids, temperature), temperature, in_place=in_place)
    logits = rows(2, 700, torch.float32)
    logits[:, ::2] = -INF
    check_gradient(logits, gradient_inputs(logits, 300, 1.0), 1.0, in_place=True)


def rounded_once() -> None:
    """Raise if the value at an id is summed in bfloat16, where target and share cancel completely."""
    # At the id the shares of target and student nearly cancel: rounding either one first loses the difference.
    logits = torch.full((1, 600), -20.0, dtype=torch.bfloat16)
    logits[0, 3] = 5.0
    log_normalizer = expected_statistics(logits, 1.0)[0].float()
    share = (logits[0, 3].float() - log_normalizer).exp()
    columns, parts = torch.tensor([[3, 9, 3]]), torch.tensor([[0.25, 0.5, 0.0]])
    parts[0, 2] = share - 0.25 + 1e-4
    g = {"columns": columns, "column_grad": parts, "row_grad": torch.ones(1), "log_normalizer": log_normalizer}
    expected = expected_gradient(logits, g, 1.0)
    SMALL.write_gradient(logits, logits, RowGradient(**g, temperature=1.0))
    assert_close(logits.double()[0, [3, 9]], expected[0, [3, 9]], atol=0.0, rtol=torch.finfo(torch.bfloat16).eps)


def no_rows() -> None:
    """Raise if a micro-batch without loss rows launches a grid of zero programs, which CUDA refuses."""
    logits = rows(0, 9, torch.float32)
    assert [t.shape for t in SMALL.statistics(logits, 1.0)] == [(0,), (0,)]
    g = {name: torch.zeros(0) for name in ("row_grad", "log_normalizer")}
    ids = {"columns": torch.zeros(0, 4, dtype=torch.int64), "column_grad": torch.zeros(0, 4)}
    SMALL.write_gradient(logits, logits, RowGradient(**ids, **g, temperature=1.0))


def refusals() -> None:
    """Raise if float64 is silently computed in float32, or a transposed matrix is read along the wrong axis."""
    for logits, words in ((rows(2, 9, torch.float64), "float64"), (rows(9, 4, torch.float32).T, "(1, 4)")):
        try:
            SMALL.statistics(logits, 1.0)
        except NumericsError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{words}: accepted")


def cpu_tensors_are_refused() -> None:
    """Raise if a student on the CPU gets a driver error instead of one that names the setting."""
    try:
        TritonRows().statistics(rows(2, 9, torch.float32), 1.0)
    except NumericsError:
        return
    raise AssertionError("tensors on the CPU were accepted by kernels that are not interpreted")


def kernels_compile_for_hopper() -> None:
    """Raise if the kernels do not compile, lack the barriers at the loop, or load less than 16 bytes at once."""
    for dtype, vector in (("bf16", 8), ("fp16", 8), ("fp32", 4)):
        shape: dict[str, int] = {"LOADS": 32 // vector, "LANES": 256, "VECTOR": vector}
        ptx = compiled(triton_rows._statistics, f"*{dtype}", shape)["ptx"]
        assert ptx.count("ld.global.v4.b32") == 32 // vector, f"{dtype}: not one load of 16 bytes for {vector} elements"
        loop = ptx[ptx.index("ld.global.v4.b32") :].split("bra", 1)[0]
        assert "shfl" not in loop and "bar.sync" not in loop, f"{dtype}: threads synchronize in each iteration"
        for ids in (0, 16, 64, 256):
            shape = {"BLOCK": 8192, "IDS": ids, "COMPARED": min(ids, 4096 // ids) if ids else 0}
            stages = compiled(triton_rows._write_gradient, f"*{dtype}", shape)
            ptx = stages["ptx"]
            assert ptx.count("st.global.v4.b32") == 32 // vector, f"{dtype}: stores of less than 16 bytes"
            assert dtype == "fp32" or re.search(r"cvt\.rn\.(b?f16x2)\.f32", ptx), f"{dtype}: not rounded to nearest"
            # The kernel's own barriers, before those that the compiler adds for shared sums.
            order = re.findall(r"barrier|scf\.for|tt\.store", stages["ttgir"])
            order_with_ids = ["scf.for", "barrier", "scf.for", "tt.store", "barrier", "tt.store"]
            assert order == (order_with_ids if ids else ["scf.for", "tt.store"]), f"{dtype}, {ids} ids: {order}"
            after = ptx[ptx.rindex("st.global.v4.b32") : ptx.rindex("st.global.")]
            assert not ids or "bar.sync" in after, f"{dtype}, {ids} ids: a barrier is missing"


def compiled(kernel: object, logits_type: str, shape: dict[str, int]) -> dict[str, str]:
    """Return the text of two compilation stages of a kernel for compute capability 9.0, by stage name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    types = dict.fromkeys(names, "*fp32") | dict.fromkeys(("logits", "out"), logits_type) | {"columns": "*i64"}
    types |= dict.fromkeys(("row_stride", "logits_stride", "out_stride", "v", "n_ids"), "i32")
    types |= dict.fromkeys(("scale", "inv_temperature"), "fp32") | dict.fromkeys(shape, "constexpr")
    signature = {name: types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if types[name].startswith("*") or types[name] == "i32"]
    # Strides and widths are multiples of 16, like a padded vocabulary; otherwise there are no 16-byte loads.
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned if names[i] != "n_ids"}
    source = ASTSource(kernel, signature, shape, attrs)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return {stage: result.asm[stage] for stage in ("ttgir", "ptx")}


INTERPRETED = (
    statistics_equal_float64,
    statistics_of_impossible_tokens,
    a_nan_or_infinity_stays,
    strided_rows,
    rows_beyond_32_bits,
    gradient_equals_float64,
    rounded_once,
    no_rows,
    refusals,
)
COMPILED = (cpu_tensors_are_refused, kernels_compile_for_hopper)


def problem_of(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:  # the parent shows it under the check's name
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    checks = {"interpreted": INTERPRETED, "compiled": COMPILED}[sys.argv[1]]
    print(json.dumps({check.__name__: problem_of(check) for check in checks}))
