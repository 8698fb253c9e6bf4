"""Compute the loss of one micro-batch on this rank: from hidden states or logits to a sum and its gradient.

    from_hidden   LM head and loss together, one chunk of rows at a time: logits -> loss -> gradient of the
                  logits in the same memory -> gradients of hidden states and LM head. The student's [N, V]
                  logits never exist as a whole, nor do the teacher's if it sends hidden states.
    from_logits   for logits that exist already.

`gkd.loss.chunked` has the loop over chunks.

Letters: N loss rows, H hidden size, D hidden size of the teacher, V_local vocabulary rows of this rank, padding
included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gkd.config.loss_spec import LossSpec
from gkd.data.columns import ALL_COLUMNS, Columns
from gkd.errors import DataError
from gkd.loss.choices import listed_choices
from gkd.loss.chunked import HeadLoss, LogitsLoss, capped
from gkd.loss.full_vocab import full_vocab_losses
from gkd.loss.row_kernels import RowKernels, statistics_dtype
from gkd.loss.text_tables import TeacherList, UnitTables
from gkd.loss.text_units import BY_NODES, PAIRED, text_losses
from gkd.loss.token_loss import (
    CANONICAL,
    GROUP_SUMS,
    SUPPORT_MASS,
    TokenLosses,
    domain_sum,
    report_names,
    topk_losses,
    turn_sum,
    weigh,
)
from gkd.loss.token_weights import full_support_mass, listed_support_mass, with_token_weights
from gkd.loss.vocab_parallel import RowLogprobs, VocabShard, row_logprobs, write_logits_gradient
from gkd.types import TokenTargets
from teacher_server.wire.protocol import Signal


@dataclass(slots=True)
class DistillLoss:
    """The loss of a run on one rank of the student's last pipeline stage.

    Args:
        signals: tables that the teacher sends, see `gkd.config.loss_spec.teacher_signals`.
        chunk_bytes: size of the logits of one chunk, including the teacher's logits if there are any.
        teacher_head: [V_local, D] float32, this rank's rows of the teacher's LM head, for the signal `hidden`.
        units: of a teacher with another tokenizer.
        on_rows: called with a table of each chunk's tokens, in row order: [n, number of names without the domains'].
        on_choices: called after it with the teacher's most probable tokens, [n, C, 3], see `gkd.loss.choices`; not
            called if the teacher sends no distribution. Set on all ranks of the shard's group or on none.
        with_support: also report the teacher's probability of the student's most probable tokens.
        columns: of the micro-batch whose loss rows this rank has; distill.token_weight needs the others' of a sequence.
    """

    spec: LossSpec
    signals: tuple[Signal, ...]
    shard: VocabShard
    kernels: RowKernels
    chunk_bytes: int
    teacher_head: Tensor | None = None
    units: UnitTables | None = None
    on_rows: Callable[[Tensor], None] | None = None
    on_choices: Callable[[Tensor], None] | None = None
    with_support: bool = False
    columns: Columns = ALL_COLUMNS

    @property
    def is_full_vocab(self) -> bool:
        """Return whether the teacher sends its distribution over the full vocabulary."""
        return "logits" in self.signals or "hidden" in self.signals

    @property
    def report_names(self) -> tuple[str, ...]:
        """Names of the sums that are returned with a loss; see `TokenLosses`. `total` is the loss itself."""
        by_domain = (domain_sum(domain, name) for domain in self.spec.domains for name in GROUP_SUMS)
        by_turn = (turn_sum(turn, name) for turn in range(self.spec.turns) for name in GROUP_SUMS)
        return (*self._names(self.spec), *by_domain, *by_turn)

    @property
    def evaluation_names(self) -> tuple[str, ...]:
        """Names of the columns of `on_rows` inside `evaluating`."""
        return self._names(self.spec.in_evaluation())

    @contextmanager
    def evaluating(
        self, on_rows: Callable[[Tensor], None] | None, on_choices: Callable[[Tensor], None] | None = None
    ) -> Iterator[None]:
        """Within the block, leave out reference, rewards and token weights, and call `on_rows` and `on_choices`."""
        spec = self.spec
        self.spec = spec.in_evaluation()
        self.on_rows = on_rows
        self.on_choices = on_choices
        try:
            yield
        finally:
            self.spec = spec
            self.on_rows = None
            self.on_choices = None

    def _names(self, spec: LossSpec) -> tuple[str, ...]:
        has_topk = "topk" in self.signals
        names = report_names(
            spec,
            has_distribution=has_topk or self.is_full_vocab,
            has_topk=has_topk and not spec.compares_texts,
            has_sampled=("sampled" in self.signals or self.is_full_vocab) and not spec.compares_texts,
        )
        if spec.compares_texts:  # on all ranks: those of other pipeline stages have no units
            names = (*names, PAIRED, BY_NODES, CANONICAL)
        return ("total", *names, SUPPORT_MASS) if self.with_support else ("total", *names)

    def from_hidden(
        self,
        hidden: Tensor,
        head: Tensor,
        targets: TokenTargets,
        *,
        reduce_hidden_grad: bool = True,
        head_grad_sum: Tensor | None = None,
        bias: Tensor | None = None,
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of all rows from hidden states. Collective over the shard's group.

        Args:
            hidden: [N, H] final hidden states, the same on all ranks of the group.
            head: [V_local, H] this rank's rows of the student's LM head.
            reduce_hidden_grad: sum the gradient of `hidden` over the group. False: return this rank's part only, if
                the caller sums it (sequence parallel: the backward pass of the gather is a reduce-scatter).
            bias: [V_local], added to the logits.
            cap: the logits are cap * tanh((hidden @ head.T + bias) / cap), as in Gemma 2; None: without tanh.
            head_grad_sum: [V_local, H] float32: the forward pass adds the gradient of `head` to it, so the backward
                pass must start with a gradient of 1. If `head` requires a gradient, it gets one of undefined values.

        Returns:
            The sum of the losses of all rows, differentiable once, and float64 sums in the order of `report_names`.

        Raises:
            NumericsError, DataError: see `check`.
        """
        self.check(targets)
        targets = self._weighed(targets, lambda first: first.from_hidden(hidden, head, targets, bias=bias, cap=cap))
        scales = None
        if cap is None and bias is None:
            hidden = self._at_temperatures(hidden, targets)
        else:
            scales = self._scales(hidden, targets)
        if not torch.is_grad_enabled():  # needs_input_grad of a Function ignores no_grad
            hidden = hidden.detach()
            head = head.detach()
            head_grad_sum = None
            bias = None if bias is None else bias.detach()
        loss, sums = HeadLoss.apply(hidden, head, targets, self, reduce_hidden_grad, head_grad_sum, bias, cap, scales)
        return loss, sums

    def from_logits(self, logits_local: Tensor, targets: TokenTargets) -> tuple[Tensor, Tensor]:
        """Compute the same from [N, V_local] logits, which the gradient overwrites: they must have no other use."""
        self.check(targets)
        targets = self._weighed(targets, lambda first: first.from_logits(logits_local, targets))
        if len(targets) == 0:  # a rank without data; its tables may be missing
            return logits_local.sum(), logits_local.new_zeros(len(self.report_names), dtype=torch.float64)
        logits_local = self._at_temperatures(logits_local, targets)
        if not torch.is_grad_enabled():
            logits_local = logits_local.detach()
        loss, sums = LogitsLoss.apply(logits_local, targets, self)
        return loss, sums

    def _weighed(self, targets: TokenTargets, compute: Callable[[DistillLoss], object]) -> TokenTargets:
        """Return the targets with the factors of distill.token_weight, from a first pass without gradients.

        Collective over the ranks that share the micro-batch, also for one without a loss row.
        """
        if self.spec.token_weight == "none" or targets.sequences is None:  # None: of a filler
            return targets
        tables: list[Tensor] = []
        first = replace(
            self,
            spec=self.spec.in_evaluation(),
            on_rows=tables.append,
            with_support=self.spec.token_weight == "teachability",
        )
        with torch.no_grad():
            compute(first)
        table = torch.cat(tables) if tables else torch.zeros(0, len(first.report_names))
        values = dict(zip(first.report_names, table.T, strict=False))
        return with_token_weights(targets, self.spec, values, self.columns)

    def chunks(self, targets: TokenTargets, n_rows: int, step: int) -> list[tuple[int, slice]]:
        """Divide the rows into parts of about `step`; each with the first row whose logits it needs."""
        if targets.text is not None:
            return targets.text.chunks(n_rows, step)
        return [(start, slice(start, min(start + step, n_rows))) for start in range(0, n_rows, step)]

    def chunk(self, logits: Tensor, targets: TokenTargets, rows: slice, *, with_grad: bool) -> Tensor:
        """Return the report sums of some rows; with `with_grad`, overwrite `logits` with its gradient.

        Args:
            logits: [n, v] this rank's columns without padding; more rows if `chunks` names an earlier one.
            targets: of all N rows, on the device of the logits.
            rows: the n of them that the logits belong to.
        """
        chunk = targets.rows(rows)
        if self.units is not None:
            first = rows.stop - len(logits)
            losses = self._text_losses(logits, targets, chunk, first, rows, with_grad=with_grad)
            weigh(losses, chunk.weights)
            return self._sums(losses, chunk)
        if self.is_full_vocab:
            teacher = self._teacher_logits(chunk, logits)
            support = full_support_mass(logits, teacher, self.shard) if self.with_support else None
            losses = full_vocab_losses(
                *(logits, teacher, chunk, self.spec, self.shard),
                kernels=self.kernels,
                with_grad=with_grad,
                with_choices=self.on_choices is not None,
            )
            if support is not None:
                losses.values[SUPPORT_MASS] = support
            weigh(losses, chunk.weights)
            if chunk.weights is not None and with_grad:
                logits.mul_(chunk.weights[:, None])
            return self._sums(losses, chunk)
        sampled = chunk.sampled_ids[:, None]  # the last of the ids whose logprobs the losses use
        ids = sampled if chunk.topk_ids is None else torch.cat([chunk.topk_ids, sampled], dim=1)
        n_listed = ids.shape[1] - 1
        temperature = self.spec.temperature
        rows_out = row_logprobs(
            logits, ids, self.shard, kernels=self.kernels, n_listed=n_listed, temperature=temperature
        )
        with torch.enable_grad():
            logprobs = rows_out.logprobs.requires_grad_()
            tail = rows_out.tail.requires_grad_()
            losses = self._from_table(rows_out, chunk, logits)
            total = losses.total.sum()
        if with_grad:
            grads = torch.autograd.grad(total, (logprobs, tail), allow_unused=True, materialize_grads=True)
            write_logits_gradient(
                logits,
                logits,
                ids,
                RowLogprobs(*(t.detach() for t in rows_out)),
                self.shard,
                grad_logprobs=grads[0],
                grad_tail=grads[1],
                kernels=self.kernels,
                n_listed=n_listed,
                temperature=temperature,
            )
        return self._sums(losses, chunk)

    def _text_losses(
        self, logits: Tensor, targets: TokenTargets, chunk: TokenTargets, first: int, rows: slice, *, with_grad: bool
    ) -> TokenLosses:
        assert targets.text is not None and self.units is not None  # checked
        text, tokens = targets.text.part(first, rows)
        dtype = statistics_dtype(logits)
        teacher: Tensor | TeacherList
        if targets.hidden is None:
            assert targets.topk_ids is not None and targets.topk_logprobs is not None  # checked
            assert targets.sampled_logprobs is not None  # checked
            logprobs = targets.topk_logprobs[tokens].to(dtype)
            teacher = TeacherList(targets.topk_ids[tokens], logprobs, targets.sampled_logprobs[tokens].to(dtype))
        else:
            assert self.teacher_head is not None  # checked
            hidden = targets.hidden[tokens].to(logits.device, dtype)
            teacher = (hidden @ self.teacher_head.to(dtype).T).div_(self.spec.temperature)
        return text_losses(
            logits,
            teacher,
            chunk,
            text.on(logits.device),
            targets.sampled_ids[first : rows.stop],
            self.spec,
            self.shard,
            self.units,
            kernels=self.kernels,
            with_grad=with_grad,
            with_choices=self.on_choices is not None,
        )

    def rows_per_chunk(self, n_columns: int, itemsize: int) -> int:
        """Return how many rows of logits fit into `chunk_bytes`; at least one."""
        row = n_columns * (itemsize + (4 if self.is_full_vocab else 0))
        if self.units is not None:  # probabilities and gradients of both models and of their nodes
            row += 4 * (2 * n_columns + 2 * self.units.n_teacher_rows + 4 * self.units.n_nodes)
        return max(1, self.chunk_bytes // max(1, row))

    def _from_table(self, rows: RowLogprobs, targets: TokenTargets, logits: Tensor) -> TokenLosses:
        """Compute the losses from the logprobs of `chunk`'s ids; `logits` are for `with_support` alone."""
        has_list = targets.topk_ids is not None
        student_topk = rows.logprobs[:, :-1] if has_list else None
        sampled = rows.logprobs[:, -1]
        losses = topk_losses(self.spec, targets, student_topk, sampled, rows.entropy, student_tail=rows.tail)
        if student_topk is not None and self.on_choices is not None:
            losses.choices = listed_choices(targets, student_topk)
        if self.with_support:
            valid = logits[:, : self.shard.n_columns(logits.shape[1])]
            losses.values[SUPPORT_MASS] = listed_support_mass(valid, targets, rows, self.shard, self.spec.temperature)
        weigh(losses, targets.weights)
        return losses

    def _at_temperatures(self, rows: Tensor, targets: TokenTargets) -> Tensor:
        """Return [N, ...] hidden states or logits, scaled to be divided by `spec.temperature`, not the route's."""
        scales = self._scales(rows, targets)
        return rows if scales is None else (rows * scales).to(rows.dtype)

    def _scales(self, rows: Tensor, targets: TokenTargets) -> Tensor | None:
        """Return [N, 1], the common temperature divided by each route's; None: they are equal."""
        if not self.spec.has_temperatures or targets.routes is None:
            return None
        temperatures = torch.tensor(self.spec.temperatures, dtype=statistics_dtype(rows), device=rows.device)
        return (self.spec.temperature / temperatures)[targets.routes.to(rows.device)][:, None]

    def _teacher_logits(self, targets: TokenTargets, like: Tensor) -> Tensor:
        """Return the teacher's logits / temperature, [n, v], for this rank's columns."""
        dtype = statistics_dtype(like)
        n_columns = like.shape[1]
        if targets.hidden is not None:
            assert self.teacher_head is not None  # checked
            hidden = targets.hidden.to(like.device, dtype)
            return (hidden @ self.teacher_head[:n_columns].to(dtype).T).div_(self.spec.temperature)
        assert targets.logits is not None  # checked
        # Copy only this rank's columns to the device.
        return targets.logits[:, self.shard.start : self.shard.start + n_columns].to(like.device, dtype, copy=True)

    def _sums(self, losses: TokenLosses, targets: TokenTargets) -> Tensor:
        values = {"total": losses.total.detach(), **losses.values}
        table = torch.stack([values[name] for name in self._names(self.spec)], dim=1)
        if self.on_rows is not None:
            self.on_rows(table)
        if self.on_choices is not None and losses.choices is not None:
            self.on_choices(losses.choices)
        sums = table.double().sum(dim=0)
        zeros = torch.zeros_like(losses.total)
        columns = torch.stack([zeros + 1, values.get("token_kl", zeros), values["total"]], dim=1).double()
        for group, n in ((targets.routes, len(self.spec.domains)), (targets.turns, self.spec.turns)):
            if n:
                assert group is not None  # checked
                is_of = F.one_hot(group.clamp(max=n - 1), n).double()
                sums = torch.cat([sums, (is_of.T @ columns).flatten()])
        return sums

    def check(self, targets: TokenTargets) -> None:
        """Check targets before a forward pass, which is a collective that other ranks would hang in.

        `gkd.data.batching.check_batch` has checked the teacher's tables; here it is their presence.

        Raises:
            NumericsError: a sampled token is outside the vocabulary.
            DataError: a required table or the teacher's LM head is missing.
        """
        self.shard.check(targets.sampled_ids)
        if len(targets) == 0:  # a rank without data; its tables may be missing
            return
        spec = self.spec
        needs = {
            "reference_logprobs": spec.has_reference,
            "advantages": spec.has_rewards,
            "routes": bool(spec.domains),
            "turns": spec.turns > 0,
            "sequences": spec.token_weight != "none",
        }
        for name, is_needed in needs.items():
            if is_needed and getattr(targets, name) is None:
                raise DataError(f"the loss needs {name}, and the micro-batch has none")
        if self.is_full_vocab:
            if targets.hidden is not None and self.teacher_head is None:
                raise DataError("the teacher sent hidden states, but its LM head is not set (set_teacher_head)")
            if targets.hidden is None and targets.logits is None:
                names = " and ".join(map(repr, self.signals))
                raise DataError(f"the loss needs the teacher's {names}, and the micro-batch has none")
            return
        for signal, table in (("topk", targets.topk_ids), ("sampled", targets.sampled_logprobs)):
            if signal in self.signals and table is None:
                raise DataError(f"the loss needs the teacher's {signal!r} table, and the micro-batch has none")


@torch.no_grad()
def logprobs_of_logits(loss: DistillLoss, logits: Tensor, ids: Tensor) -> Tensor:
    """Return [N] logprobs (nats) of [N] ids from [N, V] logits, with the loss's temperature and vocabulary."""
    temperature = loss.spec.temperature
    rows = row_logprobs(logits, ids[:, None], loss.shard, kernels=loss.kernels, n_listed=0, temperature=temperature)
    return rows.logprobs[:, 0]


@torch.no_grad()
def logprobs_of_hidden(
    loss: DistillLoss,
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute the same from [N, H] final hidden states and the [V, H] LM head, one chunk of logits at a time."""
    step = loss.rows_per_chunk(len(head), hidden.element_size())
    logprobs = [
        logprobs_of_logits(loss, capped(F.linear(hidden[i : i + step], head, bias), cap), ids[i : i + step])
        for i in range(0, max(len(hidden), 1), step)
    ]
    return torch.cat(logprobs)
