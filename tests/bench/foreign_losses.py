"""Compare the losses of other systems, taken from their own sources, with the losses here.

    python -m tests.bench.foreign_losses --source DIR [--json docs/results/foreign_losses.json]

DIR has git repositories, bare or not, up to two levels below it: verl, ms-swift, TRL, NeMo-RL, ROLL and slime with the
commits of `COMMITS`. Their functions are compiled with float64 in place of float32; none of their text is here. The
teacher's list has 8 of 64 tokens. A loss of the sampled token is compared in its mean over all tokens, each with its
probability, so that its direction shows. Seconds on a CPU.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from gkd.config.loss_spec import LossSpec, LossTerm, Tail
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.row_kernels import TorchRows
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table

COMMITS = {
    "verl": "1dda039b9c6311889a9c9a26040677e1254814f9",
    "ms-swift": "3602360a562313afbf2ef6065fdf61f271a2c5b9",
    "TRL": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "NeMo-RL": "7ea279abfbeb698b092856d0dab61e7cf39bc909",
    "ROLL": "8eb27cc2dc34c4d1310b169d9b86d339004d811a",
    "slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
}
N, V, K, T, TOLERANCE = 24, 64, 8, 2.0, 1e-6
Loss = Callable[[Tensor], Tensor]  # of the student's logits [N, V]
Claim = tuple[str, str, Loss, str, Loss, str]  # system, loss, the one here, and the verdict
_RANDOM = torch.randn(2, N, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
STUDENT, TEACHER = 2 * _RANDOM[0], 2 * _RANDOM[0] + 0.8 * _RANDOM[1]
LOG_P, ONES = TEACHER.log_softmax(dim=-1), torch.ones(N, V, dtype=torch.float64)


class _Float64(ast.NodeTransformer):
    """Compute in float64 where a source asks for float32; leave out decorators that are calls."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute):
            node.attr = {"float32": "float64", "float": "double"}.get(node.attr, node.attr)
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [each for each in node.decorator_list if isinstance(each, ast.Name)]
        return self.generic_visit(node)


def taken(source: Path, system: str, wanted: dict[str, str], **names: Any) -> dict[str, Any]:
    """Return functions of a system by the names {path: "function Class.method dataclass ..."}."""
    found = {"__name__": __name__, "torch": torch, "F": torch.nn.functional, "dataclass": dataclass, **names}
    for path, listed in wanted.items():
        tree = ast.parse(_show(source, system, path))
        for name in listed.split():
            node: Any = tree
            for part in name.split("."):
                (node,) = [each for each in node.body if getattr(each, "name", "") == part]
            module = ast.fix_missing_locations(ast.Module([_Float64().visit(node)], []))
            exec(compile(module, path, "exec"), found)  # with this file's `annotations`: names in them may be missing
            found[name] = found[node.name]
    return found


def _show(source: Path, system: str, path: str) -> str:
    for folder in (*source.glob("*/"), *source.glob("*/*/")):
        command = ["git", "-C", str(folder), "show", f"{COMMITS[system]}:{path}"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        if shown.returncode == 0:
            return shown.stdout
    sys.exit(f"--source {source}: no repository has {path} of {system}'s {COMMITS[system]}. Fix: clone it there.")


def ours(*terms: LossTerm, tail: Tail = "renorm", signal: str = "topk", t: float = 1.0) -> Loss:
    """Return the loss of a run here at a temperature; of the sampled token: its mean over all tokens."""
    rows, log_p, everywhere = (V if signal == "sampled" else 1), (TEACHER / t).log_softmax(dim=-1), torch.ones(N) > 0
    targets = TokenTargets(torch.zeros(N, dtype=torch.int64), torch.zeros(N), everywhere)
    if signal == "sampled":
        log_q = STUDENT.log_softmax(dim=-1).flatten()
        targets = TokenTargets(torch.arange(V).repeat(N), log_q, everywhere.repeat(V), sampled_logprobs=log_p.flatten())
        targets.weights = log_q.exp()
    elif signal == "logits":
        targets.logits = log_p
    else:
        targets.topk_logprobs, targets.topk_ids = log_p.topk(K)
    run = DistillLoss(LossSpec(terms, tail, t), (signal,), VocabShard(0, V, None), TorchRows(), 1 << 20)  # type: ignore
    return lambda logits: run.from_logits(logits.repeat_interleave(rows, 0) * 1.0, targets)[0] / N


def topk_claims(source: Path) -> Iterator[Claim]:
    """Yield the losses that compare distributions."""
    verl = taken(source, "verl", {"verl/trainer/distillation/fsdp/losses.py": "kl_divergence compute_forward_kl_topk"},
        get_ulysses_sequence_parallel_world_size=lambda: 1)["compute_forward_kl_topk"]  # fmt: skip
    nested = [torch.nested.nested_tensor([table], layout=torch.jagged) for table in LOG_P.topk(K)]
    for clamp in (None, -4.0):
        config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))
        theirs = lambda x, config=config: verl(x[None], *nested, config, "thd")["distillation_losses"].mean()  # noqa: E731
        claim = ("forward_kl, drop", ours(LossTerm(), tail="drop"), "different" if clamp else "equal")
        yield "verl", f"forward_kl_topk, log_prob_min_clamp {clamp}", theirs, *claim
    swift = taken(source, "ms-swift", {"swift/rlhf_trainers/gkd_loss.py": "TeacherOutput default_log_softmax "
        "default_kl_div default_gather jsd_loss extract_active gkd_loss"})  # fmt: skip
    trl = taken(source, "TRL", {"trl/experimental/gkd/gkd_trainer.py": "GKDTrainer.generalized_jsd_loss"})
    labels, (values, ids) = torch.zeros(1, N, dtype=torch.int64), TEACHER[None].topk(K)
    output = swift["TeacherOutput"](topk_logprobs=values, topk_indices=ids, labels=labels)
    for beta, term in ((0.0, LossTerm()), (1.0, LossTerm("reverse_kl")), (0.3, LossTerm("jsd", beta=0.3))):
        theirs = lambda x, b=beta: swift["gkd_loss"](x[None], output, labels, b, T)[0] / N  # noqa: E731
        yield "ms-swift", f"gkd_loss, top-k, beta {beta}", theirs, f"{term.name}, renorm", ours(term, t=T), "equal"
        theirs = lambda x, b=beta: trl["generalized_jsd_loss"](x[None], TEACHER[None], labels, b, T)  # noqa: E731
        full = ours(term, signal="logits", t=T)
        yield "TRL", f"generalized_jsd_loss, beta {beta}", theirs, f"{term.name}, signal logits", full, "equal"
    wanted, lists = "DistillationLossFn.__init__ DistillationLossFn.__call__", (TEACHER[None] / T).topk(K)
    nemo = taken(source, "NeMo-RL", {"nemo_rl/algorithms/loss/loss_functions.py": wanted,
        "nemo_rl/distributed/model_utils.py": "get_distillation_topk_logprobs_from_logits"})  # fmt: skip
    both = (LossTerm("forward_kl", 0.7), LossTerm("reverse_kl", 0.3))
    kinds = {"forward": (LossTerm(),), "reverse": (LossTerm("reverse_kl"),), "mixed": both}
    for kind, outside in ((kind, outside) for outside in (False, True) for kind in kinds):
        made, config = SimpleNamespace(), SimpleNamespace(kl_type=kind, mixed_kl_weight=0.7, zero_outside_topk=outside)
        nemo["DistillationLossFn.__init__"](made, config)

        def nemo_loss(x: Tensor, made: Any = made, flags: Any = (outside, outside and kind != "forward")) -> Tensor:
            padded = [torch.cat([each, each[:, :1]], dim=1) for each in (x[None] / T, *lists)]  # it omits the last row
            tables = nemo["get_distillation_topk_logprobs_from_logits"](*padded, *flags)
            return nemo["DistillationLossFn.__call__"](made, *tables, {"input_ids": x}, None, None)[0]

        name = f"kl_type {kind}" + (", zero_outside_topk" if outside else "")
        here = " + ".join(f"{term.weight:g} {term.name}" for term in kinds[kind]) + ", renorm"
        yield "NeMo-RL", name, nemo_loss, here, ours(*kinds[kind], t=T), "different" if outside else "equal"
    names = {"forward_kl": "forward_kl", "reverse_kl": "reverse_kl", "js": "jsd"}
    names |= {"skewed_forward_kl": "skew_kl", "skewed_reverse_kl": "skew_reverse_kl"}
    roll = taken(source, "ROLL", {"roll/pipeline/distill/various_divergence.py":
        " ".join(f"VariousDivergence.compute_{name}_divergence" for name in names)})  # fmt: skip
    own, ((values,), (ids,)) = SimpleNamespace(kd_temperature=T, args=SimpleNamespace(skew_lambda=0.1)), lists
    given = (values.softmax(dim=-1), values.log_softmax(dim=-1), values.isinf())
    for name, here in names.items():
        loss = roll[f"compute_{name}_divergence"]
        theirs = lambda x, loss=loss: loss(own, x.gather(1, ids), *given).mean()  # noqa: E731
        yield "ROLL", f"kd_objective {name}", theirs, f"{here}, renorm", ours(LossTerm(here), t=T), "equal"


def sampled_claims(source: Path) -> Iterator[Claim]:
    """Yield the losses of the sampled token, for an engine with the student's weights."""
    tiny, core = SimpleNamespace, "kl_penalty_forward kl_penalty compute_policy_loss_vanilla"
    verl = taken(source, "verl", {"verl/trainer/ppo/core_algos.py": core}, verl_F=MagicMock(), AlgoConfig=tuple,
        agg_loss=lambda loss_mat, **_: loss_mat.sum() / N)  # fmt: skip
    config = tiny(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={}, get=lambda _, c: c)
    for name, is_policy in ((name, is_policy) for name in ("k1", "k2", "k3") for is_policy in (True, False)):

        def theirs(x: Tensor, name: str = name, is_policy: bool = is_policy) -> Tensor:
            log_q = x.log_softmax(dim=-1)
            old, kl = log_q.detach(), verl["kl_penalty"](log_q, LOG_P, name)
            given = (old, log_q, -kl.detach(), ONES, "", config, old.exp())
            return verl["compute_policy_loss_vanilla"](*given)[0] if is_policy else (old.exp() * kl).sum() / N

        claim = (f"{name}, use_policy_gradient {is_policy}", theirs, name, ours(LossTerm(name), signal="sampled"))
        same = (name, is_policy) in (("k1", True), ("k2", False))
        yield "verl", *claim, "equal gradient" if same else "different"

    slime = taken(source, "slime", {"slime/backends/megatron_utils/loss.py": "apply_opd_kl_to_advantages",
        "slime/utils/ppo_utils.py": "compute_policy_loss"})  # fmt: skip

    def theirs_opd(x: Tensor) -> Tensor:
        log_q, advantages = x.log_softmax(dim=-1), [0 * ONES]
        opd = tiny(opd_kl_coef=1.0, opd_type="")
        slime["apply_opd_kl_to_advantages"](opd, {"teacher_log_probs": [LOG_P]}, advantages, [log_q.detach()])
        policy = slime["compute_policy_loss"](log_q.detach() - log_q, advantages[0], 0.2, 0.2)[0]
        return (log_q.detach().exp() * policy).sum() / N

    k1 = ours(LossTerm("k1"), signal="sampled")
    yield "slime", "--use-opd --opd-kl-coef 1", theirs_opd, "k1", k1, "equal gradient"


def losses(source: Path) -> Part:
    """Compare all losses, relative to those here."""
    rows, equal, others = [], list[float](), list[float]()
    directions = {name: _gradient(ours(LossTerm(name), signal="logits"))[1] for name in ("forward_kl", "reverse_kl")}
    for system, name, theirs, here, mine, verdict in (*topk_claims(source), *sampled_claims(source)):
        (value, gradient), (own_value, own) = _gradient(theirs), _gradient(mine)
        difference = max(_distance(gradient, own), abs(value / own_value - 1) if verdict == "equal" else 0.0)
        (others if verdict == "different" else equal).append(difference)
        if verdict == "different":
            follows = [each for each, direction in directions.items() if _distance(gradient, direction) < TOLERANCE]
            verdict += f": the gradient of {follows[0]}" if follows else "" if gradient.abs().max() > 1e-9 else ": none"
        rows.append((system, name, here, abs(value - own_value), _distance(gradient, own), verdict))
    figures = [Figure("largest difference of the equal ones", max(equal), at_most=TOLERANCE)]
    figures.append(Figure("smallest difference of the others", min(others), at_least=0.01))
    columns = ("system", "its loss", "here", "value: difference", "gradient: relative difference", "verdict")
    what = f"Losses of other systems and those here: {N} rows of {V} tokens, {K} of them in the list, float64."
    return Part("losses", what, figures, (Table("differences", columns, rows),), {"commits": COMMITS})


def _gradient(loss: Loss) -> tuple[float, Tensor]:
    value = loss(logits := STUDENT.clone().requires_grad_())
    return float(value.detach()), torch.autograd.grad(value, logits)[0]


def _distance(gradient: Tensor, other: Tensor) -> float:
    return float((gradient - other).abs().max() / other.abs().max())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code is 1 if a claim does not hold."""
    made = parser("tests.bench.foreign_losses", __doc__ or "", ("losses",), rounds=1)
    made.add_argument("--source", type=Path, required=True, metavar="DIR", help="folder with the repositories")
    args = parsed(made, ("losses",), argv)
    return run_parts(args, lambda _: losses(args.source))


if __name__ == "__main__":
    sys.exit(main())
