"""Compare student and teacher with different tokenizers: exact sums over what their tokens have in common.

A boundary is a place in the text where a token of each model begins. Two kinds of positions carry loss:

    nodes   at a safe boundary: the sums of both distributions over the tokens of each node, see
            `gkd.text.byte_vocab.Nodes`. The rows are those of the tokens, so this is the familiar loss of a token,
            coarse-grained to outcomes that both models have.
    text    elsewhere, unless the nodes of the boundary before reach that far: the next byte, given the text.

A boundary is safe if the token before it could not have been a longer one that its node does not tell from it: if that
token had at least `SAFE_SHARE` of the mass of these, in both models.

The next byte x, given the text, with c the tokens of the row, u the token before it, w the bytes of the row's own token
in front of the position, and M(c, w) the probability of all tokens that begin with w:

    at the beginning of a token     P(x) ~ M(c before u, u x) + p(u | c before u) M(c, x)
    inside a token                  P(x) ~ M(c, w x); the token may also end at w, and what follows then is not known

What only one of the models can tell apart is one outcome, bytes that begin tokens of one vocabulary included. The loss
of a row is the sum over its positions, so it is an estimate of the divergence of the two models over texts, by the
chain rule; exact up to tokenizations that leave the canonical one earlier than the last token.

A teacher that sends a list of its most probable tokens or units gives the same sums without what the list leaves out.
Outcomes of which the list has nothing are one outcome, together with the rest, in both models. Inside of a token of the
teacher the next byte is compared only if the list has at least `SAFE_SHARE` of the tokens that may begin like it. Bytes
that units do not tell apart are not compared.

These are sums over probabilities: tables = A softmax(z), with A of zeros and ones. So with g the gradient of the
tables, d loss / d z_v = q_v ((A^T g)_v - <g, tables>), and with tensor parallelism only tables are reduced.

Letters: n rows of the chunk, v columns of this rank (n', v' of the teacher), W nodes, P positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.config.loss_spec import LossSpec
from gkd.loss.choices import N_CHOICES
from gkd.loss.divergence import divergence_of, forward_kl
from gkd.loss.divergence_slopes import value_and_slope
from gkd.loss.row_kernels import RowKernels, pieces
from gkd.loss.text_tables import Side, TeacherList, UnitTables
from gkd.loss.token_loss import CANONICAL, PLAIN, TokenLosses, add_ends, sampled_losses_and_slope
from gkd.loss.vocab_parallel import VocabShard, local_statistics, sum_over_shards
from gkd.text.byte_vocab import MARK, NO_BYTE, REST
from gkd.text.targets import TextTargets
from gkd.types import TokenTargets

SAFE_SHARE = 0.95
PAIRED = "paired"
BY_NODES = "by_nodes"
_OUTCOMES = NO_BYTE + 1  # bytes, and the rest
_ENTRIES = 1 << 22  # entries of range sums that are computed at once


def text_losses(
    logits: Tensor,
    teacher_scores: Tensor | TeacherList,
    targets: TokenTargets,
    text: TextTargets,
    previous: Tensor,
    spec: LossSpec,
    shard: VocabShard,
    tables: UnitTables,
    *,
    kernels: RowKernels,
    with_grad: bool,
    with_choices: bool = False,
) -> TokenLosses:
    """Return the losses of a chunk; with `with_grad`, overwrite `logits` with the gradient of their sum.

    Args:
        logits: [o + n, v] the student's; o is 1 if the row in front of the chunk is there, else 0.
        teacher_scores: a list, or [n', v'] float32 (float64 for float64 logits), divided by the temperature, which
            are overwritten.
        targets: of the n rows. Their weights multiply the gradient, but not yet the returned losses.
        text: their positions, see `TextTargets.part`.
        previous: [o + n] int64, the student's token of each row.
        with_choices: set `TokenLosses.choices`; the same on all ranks of the shard's group.

    Returns:
        Losses without gradient.
    """
    n = len(targets)
    temperature = spec.temperature
    n_before = len(logits) - n
    columns = shard.columns(previous[:, None], logits.shape[1])
    log_sum, mean, picked = local_statistics(logits, columns, kernels=kernels, temperature=temperature)
    log_sums, means, picked = sum_over_shards(shard, [log_sum, mean], picked)
    norm = log_sums.logsumexp(dim=-1)
    losses, slope = sampled_losses_and_slope(spec, targets, (picked[:, 0] - norm)[n_before:], None)
    shares = (log_sums - norm[:, None]).exp()
    losses.values["student_entropy"] = (shares * (norm[:, None] - means)).sum(dim=-1)[n_before:]

    q = (logits.to(norm.dtype) / temperature).sub_(norm[:, None]).exp_()
    p = _teacher_shares(teacher_scores, text, tables, shard, kernels)
    is_list = isinstance(teacher_scores, TeacherList)
    student = _Model(q, tables.student, tables, shard, previous, text.row, text.depth, text.is_first)
    teacher = _Model(
        p, tables.teacher, tables, shard, text.teacher_ids, text.teacher_row, text.teacher_depth, text.is_first, is_list
    )
    by_node, by_text = _compared_positions(student, teacher, text, with_nodes=tables.with_nodes)
    weights = norm.new_ones(n) if targets.weights is None else targets.weights.to(norm.dtype)
    rows = text.row - n_before  # rows of the chunk
    # Sums over the positions of each row: divergences, forward KL, overlap, number of positions.
    sums = norm.new_zeros((n, len(spec.divergences) + 3))
    _compare_nodes(sums, student, teacher, torch.nonzero(by_node).flatten(), rows, weights, spec)
    _compare_text(sums, student, teacher, torch.nonzero(by_text).flatten(), rows, weights, spec)

    for i, term in enumerate(spec.divergences):
        losses.total = losses.total + term.weight * sums[:, i]
        losses.values[term.name] = sums[:, i]
    token_kl, overlap, n_compared = sums[:, -3:].unbind(dim=1)
    begins = torch.zeros(n, dtype=torch.int64, device=logits.device) - 1  # position at which a token of each begins
    begins[rows[text.is_common]] = torch.nonzero(text.is_common).flatten()
    is_paired = torch.zeros_like(norm[n_before:]).index_fill_(0, rows, 1.0)
    # Rows of which a list cannot tell any position agree as little as those without a pair.
    otherwise = is_paired.index_fill(0, rows[by_text], 0.0)
    losses.values |= {
        "token_kl": token_kl,
        "overlap": torch.where(n_compared > 0, overlap / n_compared.clamp(min=1.0), otherwise),
        PAIRED: is_paired,
        BY_NODES: torch.zeros_like(is_paired).index_fill_(0, rows[by_node], 1.0),
        CANONICAL: text.canonical.to(norm.dtype),
    }
    teacher_rows = text.teacher_row[begins.clamp(min=0)] if len(rows) else begins.clamp(min=0)
    ended = teacher.sums[teacher_rows, tables.end_node] if len(teacher.sums) else torch.zeros_like(is_paired)
    add_ends(losses, targets, ended.masked_fill(begins < 0, 0.0))
    if with_choices:
        losses.choices = _choices(student, teacher, text, begins, n_before, tables)
    if with_grad and logits.numel():  # empty on a rank that holds only padding
        slope = torch.cat([slope.new_zeros(n_before), slope * weights])
        grad = student.gradient()
        grad.addcmul_(q, slope[:, None], value=-1.0)
        grad.scatter_add_(1, columns.clamp(min=0), slope[:, None].masked_fill(columns < 0, 0.0))
        logits.copy_(grad.div_(temperature))
    return losses


def _teacher_shares(
    scores: Tensor | TeacherList, text: TextTargets, tables: UnitTables, shard: VocabShard, kernels: RowKernels
) -> Tensor:
    """Return the teacher's probabilities of its tokens, [n', v']; overwrite `scores` if they are a tensor."""
    if isinstance(scores, TeacherList):
        return scores.spread(text.teacher_ids, tables.teacher, len(tables.teacher.node))
    none = torch.zeros((len(scores), 0), dtype=torch.int64, device=scores.device)
    log_sum, _, picked = local_statistics(scores, none, kernels=kernels, temperature=1.0)
    log_sums, _ = sum_over_shards(shard, [log_sum], picked)
    return scores.sub_(log_sums.logsumexp(dim=-1)[:, None]).exp_()


def _compared_positions(
    student: _Model, teacher: _Model, text: TextTargets, *, with_nodes: bool
) -> tuple[Tensor, Tensor]:
    """Return where nodes are compared, and where text is: [P] bool each.

    Nodes are compared at safe boundaries. Positions that the nodes of the boundary before cover are in neither.
    """
    by_node = torch.zeros_like(text.is_first)
    if with_nodes:
        common = text.is_common
        shares = torch.minimum(student.own_shares(common), teacher.own_shares(common))
        by_node = common & (shares >= SAFE_SHARE)
    return by_node, ~by_node & ~((text.cover >= 0) & by_node[text.cover.clamp(min=0)])


class _Model:
    """One model's probabilities at the rows of a chunk, and sums over them.

    Args:
        p: [r, v] this rank's columns.
        ids: [r] int64, the token of each row.
        row, depth, is_first: of the positions.
        is_list: p has only some tokens of the rows.
    """

    def __init__(
        self,
        p: Tensor,
        side: Side,
        tables: UnitTables,
        shard: VocabShard,
        ids: Tensor,
        row: Tensor,
        depth: Tensor,
        is_first: Tensor,
        is_list: bool = False,
    ) -> None:
        self._p = p
        self._side = side
        self._tables = tables
        self._group = shard.group
        self._ids = ids
        self.row = row
        self.depth = depth
        self.is_first = is_first
        self.sums = self._reduced(p.new_zeros((len(p), tables.n_nodes)).index_add_(1, side.node, p))
        self.missing: Tensor | None = None  # [r] probability outside of the list; None: p has all tokens
        if is_list:  # rounded for the wire, so the sum may be above 1
            self.missing = (1.0 - self.sums.sum(dim=1)).clamp(min=torch.finfo(p.dtype).eps)
            self.sums[:, REST] += self.missing
            total = self.sums.sum(dim=1, keepdim=True)
            self.sums.div_(total)
            p.div_(total)
        self.grad_sums = torch.zeros_like(self.sums)  # derivative of the losses in the sums
        self._asked: tuple[Tensor, Tensor, Tensor] | None = None  # state of the last `masses`
        self._grad_masses = self._masses = p.new_zeros((0, _OUTCOMES))

    def own_shares(self, where: Tensor) -> Tensor:
        """Return what share the token before a position has of the tokens of its node that begin with it: [P].

        Args:
            where: [P] bool, positions to compute it for; others get 1.
        """
        shares = self._p.new_ones(len(self.row))
        positions = torch.nonzero(where & ~self.is_first).flatten()
        before = self._ids[self.row[positions] - 1]
        shares[positions[self._side.is_open[before]]] = 0.0
        positions = positions[~(self._side.is_alone | self._side.is_open)[before]]
        rows = self.row[positions] - 1
        ids = self._ids[rows]
        sums = self._p.new_zeros((len(positions), 2))
        for asked, columns, _ in self._entries(self._side.alike[ids], self._side.alike_columns):
            mass = self._p[rows[asked], columns]
            sums[:, 0].index_add_(0, asked, mass)
            sums[:, 1].index_add_(0, asked, mass * (columns + self._side.start == ids[asked]))
        sums = self._reduced(sums)
        shares[positions] = sums[:, 1] / sums[:, 0].clamp(min=torch.finfo(sums.dtype).tiny)
        return shares

    def first_bytes(self, positions: Tensor) -> Tensor:
        """Return the mass of the tokens with each first byte in the rows of some positions: [A, `_OUTCOMES`]."""
        out = self.sums.new_zeros((len(positions), _OUTCOMES))
        return out.index_add_(1, self._tables.first_byte, self.sums[self.row[positions]])

    def masses(self, positions: Tensor) -> Tensor:
        """Return the mass of the tokens that begin with given bytes, by their next byte: [A, `_OUTCOMES`].

        Inside a token the bytes are those of the token in front of the position, in its row; at the beginning of one
        all bytes of the token before it, in the row of that. The last column is the mass of exactly these bytes.
        """
        begins = self.depth[positions] == 0
        rows = self.row[positions] - begins.long()
        ids = self._ids[rows.clamp(min=0)]
        depth = torch.where(begins, self._side.lengths[ids], self.depth[positions])
        # A first position has no token before it: whatever stands there is not used, and may have no bytes.
        place = (self._side.starts[ids] + (depth - 1).clamp(min=0)).clamp(max=len(self._side.bounds) - 1)
        bounds = self._side.bounds[place]
        untold = ~begins & (depth >= self._side.lengths[ids])  # bytes behind the string of a unit
        bounds = torch.where((self.is_first[positions] | (depth == 0) | untold)[:, None], 0, bounds)
        self._asked = rows, depth, bounds
        out = self._p.new_zeros(len(positions) * _OUTCOMES)
        for asked, columns, places in self._entries(bounds, self._side.columns):
            slot = self._slots(asked, places, depth)
            out.index_add_(0, asked * _OUTCOMES + slot, self._p[rows[asked], columns])
        self._masses = self._reduced(out.view(len(positions), _OUTCOMES))
        return self._masses

    def tells(self, positions: Tensor) -> Tensor:
        """Return whether the next byte at some positions is known well enough, [A] bool; always without a list."""
        if self.missing is None:
            return torch.ones_like(positions, dtype=torch.bool)
        listed_mass = self.masses(positions).sum(dim=1)
        rows = self.row[positions]
        is_listed = listed_mass >= SAFE_SHARE * (listed_mass + self.missing[rows])
        # What is longer than a token of an open unit is not known.
        is_open = self._side.is_open[self._ids[(rows - 1).clamp(min=0)]] & ~self.is_first[positions]
        return torch.where(self.depth[positions] == 0, ~is_open, is_listed)

    def add_gradient(self, positions: Tensor, grad_first_bytes: Tensor, grad_masses: Tensor) -> None:
        """Take the derivatives in `first_bytes` and in the last result of `masses`."""
        by_row = torch.zeros((len(self.sums), _OUTCOMES), dtype=self.sums.dtype, device=self.sums.device)
        by_row.index_add_(0, self.row[positions], grad_first_bytes)
        self.grad_sums += by_row[:, self._tables.first_byte]
        self._grad_masses = grad_masses

    def gradient(self) -> Tensor:
        """Return the derivative of the losses in this rank's logits / temperature, [r, v]."""
        total = (self.grad_sums * self.sums).sum(dim=1)
        grad = self.grad_sums.index_select(1, self._side.node)
        if self._asked is not None and len(self._grad_masses):
            rows, depth, bounds = self._asked
            total.index_add_(0, rows.clamp(min=0), (self._grad_masses * self._masses).sum(dim=1))
            flat = grad.view(-1)
            flat_grad = self._grad_masses.reshape(-1)
            for asked, columns, places in self._entries(bounds, self._side.columns):
                slot = self._slots(asked, places, depth)
                flat.index_add_(0, rows[asked] * grad.shape[1] + columns, flat_grad[asked * _OUTCOMES + slot])
        return grad.sub_(total[:, None]).mul_(self._p)

    def _slots(self, asked: Tensor, places: Tensor, depth: Tensor) -> Tensor:
        """Return the byte of each token behind the given ones; `NO_BYTE` if it has no more."""
        text = self._side.text
        deep = depth[asked]
        following = text[places, deep.clamp(max=text.shape[1] - 1)].long()
        return torch.where(self._side.sizes[places] > deep, following, NO_BYTE)

    def _entries(self, bounds: Tensor, columns: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for the places of each range, in parts: the index of the range, the column, and the place."""
        sizes = bounds[:, 1] - bounds[:, 0]
        ends = sizes.cumsum(0)
        n_before = 0
        while n_before < int(ends[-1] if len(ends) else 0):
            # A part ends behind the last range that fits, but has at least one.
            low = int((ends <= n_before).sum())
            high = max(low + 1, int((ends <= n_before + _ENTRIES).sum()))
            part = sizes[low:high]
            asked = torch.repeat_interleave(torch.arange(low, high, device=sizes.device), part)
            offset = torch.arange(len(asked), device=sizes.device) - (ends[low:high] - part - n_before)[asked - low]
            places = bounds[asked, 0] + offset
            yield asked, columns[places], places
            n_before = int(ends[high - 1])

    def _reduced(self, sums: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums


def _compare_nodes(
    sums: Tensor, student: _Model, teacher: _Model, places: Tensor, rows: Tensor, weights: Tensor, spec: LossSpec
) -> None:
    """Add the divergences over nodes at some positions, and their gradients."""
    tiny = torch.finfo(student.sums.dtype).tiny
    terms = [(term, value_and_slope(term.name)) for term in spec.divergences]
    for some in pieces(student.sums.new_empty((len(places), 1)).expand(len(places), student.sums.shape[1])):
        part = places[some]
        row = rows[part]
        of_student = student.row[part]
        q = student.sums[of_student]
        p = teacher.sums[teacher.row[part]]
        if teacher.missing is not None:  # outcomes that are not listed are compared as part of `REST`
            unlisted = p <= 0
            unlisted[:, REST] = False
            q[:, REST] += (q * unlisted).sum(dim=1)
            q.masked_fill_(unlisted, 0.0)
        log_q = q.clamp(min=tiny).log_()
        log_p = p.clamp(min=tiny).log_()
        values = [forward_kl(log_q, log_p, PLAIN), torch.minimum(p, q).sum(dim=-1), torch.ones_like(weights[row])]
        slope = torch.zeros_like(log_q)
        for i, (term, divergence) in enumerate(terms):
            value, term_slope = divergence(log_q, log_p, term)
            values.insert(i, value)
            slope.add_(term_slope, alpha=term.weight)
        sums.index_add_(0, row, torch.stack(values, dim=1))
        slope.mul_(weights[row, None]).div_(q.clamp_(min=tiny))
        if teacher.missing is not None:
            slope = torch.where(unlisted, slope[:, REST, None], slope)
        student.grad_sums.index_add_(0, of_student, slope)


def _compare_text(
    sums: Tensor, student: _Model, teacher: _Model, places: Tensor, rows: Tensor, weights: Tensor, spec: LossSpec
) -> None:
    """Add the divergences over the next byte at some positions, and their gradients."""
    places = places[teacher.tells(places)]
    sides = []
    for model in (student, teacher):
        begins = (model.depth[places] == 0)[:, None]
        sides.append((model.first_bytes(places), model.masses(places), begins, begins & ~model.is_first[places, None]))
    # Units of longer tokens go on with a mark, which no token has behind other bytes. It is not told from all else.
    longer = sides[1][1][:, MARK[0], None].clone()
    sides[1][1][:, MARK[0]] = 0.0
    # The last outcome is all else; inside of a token, that the token may end here. Where no token ends here, all else
    # has no probability only because the row's tokens are given, and is not compared.
    is_known = torch.ones((len(places), _OUTCOMES), dtype=torch.bool, device=places.device)
    for (_, masses, begins, _), more in zip(sides, (torch.zeros_like(longer), longer), strict=True):
        is_known &= begins | (torch.cat([masses[:, :NO_BYTE], masses[:, NO_BYTE:] + more], dim=1) > 0)
    if teacher.missing is not None:
        first_bytes, masses, begins, _ = sides[1]
        is_known[:, :NO_BYTE] &= ((masses > 0) | (begins & (first_bytes > 0)))[:, :NO_BYTE]
    leaves = [tensor.requires_grad_() for tensor in (sides[0][0].detach(), sides[0][1].detach())]
    with torch.enable_grad():
        log_q = _next_byte(leaves[0], leaves[1], *sides[0][2:], is_known)
        log_p = _next_byte(*sides[1], is_known, longer)
        values = [divergence_of(term.name)(log_q, log_p, term) for term in spec.divergences]
        weighed = [term.weight * value for term, value in zip(spec.divergences, values, strict=True)]
        total = torch.stack(weighed).sum(dim=0).dot(weights[rows[places]]) if weighed else weights[:0].sum()
    with torch.no_grad():
        overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(dim=-1)
        values += [forward_kl(log_q, log_p, PLAIN), overlap, torch.ones_like(overlap)]
        sums.index_add_(0, rows[places], torch.stack([value.detach() for value in values], dim=1))
    if total.requires_grad:
        student.add_gradient(places, *torch.autograd.grad(total, leaves))


def _next_byte(
    first_bytes: Tensor, masses: Tensor, begins: Tensor, follows: Tensor, is_known: Tensor, longer: Tensor | float = 0.0
) -> Tensor:
    """Return the logprob of each next byte that both models can tell apart, and of all else: [A, `_OUTCOMES`].

    An outcome that is not compared has the logprob of the smallest number in both models.

    Args:
        first_bytes, masses: of `_Model`, [A, `_OUTCOMES`].
        begins: [A, 1] bool, whether a token begins at the position.
        follows: [A, 1] bool, whether one does behind another token of the response.
        is_known: [A, `_OUTCOMES`] bool, what both can tell apart; the last column: whether both can have all else.
        longer: [A, 1] mass of units whose tokens go on with unknown bytes.
    """
    following = torch.cat([masses[:, :NO_BYTE], torch.zeros_like(masses[:, NO_BYTE:])], dim=1)
    given_text = following + masses[:, NO_BYTE:] * first_bytes
    p = torch.where(follows, given_text, torch.where(begins, first_bytes, masses))
    tiny = torch.finfo(p.dtype).tiny
    bytes_known = is_known[:, :NO_BYTE]
    rest = torch.where(bytes_known, 0.0, p[:, :NO_BYTE]).sum(dim=1, keepdim=True) + p[:, NO_BYTE:] + longer
    p = torch.where(is_known, torch.cat([p[:, :NO_BYTE], rest], dim=1), 0.0)
    return (p / p.sum(dim=1, keepdim=True).clamp(min=tiny)).clamp(min=tiny).log()


def _choices(
    student: _Model, teacher: _Model, text: TextTargets, begins: Tensor, n_before: int, tables: UnitTables
) -> Tensor:
    """Return the teacher's most probable nodes of each row as `gkd.loss.choices`, by a token of the student."""
    n = len(begins)
    choices = student.sums.new_zeros((n, N_CHOICES, 3))
    choices[:, :, 0] = -1
    has = torch.nonzero(begins >= 0).flatten()
    p, nodes = teacher.sums[teacher.row[begins[has]]].topk(min(N_CHOICES, tables.n_nodes), dim=1)
    q = student.sums[has + n_before].gather(1, nodes)
    choices[has, : nodes.shape[1]] = torch.stack([tables.names[nodes].to(p.dtype), p, q], dim=2)
    return choices
