"""Provide two tiny vocabularies, responses in the tokens of both, and the losses of `gkd.loss.text_units` in loops.

The loops use strings and Python's sums over the whole vocabulary, no sorted ranges and no tables, and autograd.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gkd.config.loss_spec import LossSpec
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.divergence import divergence_of
from gkd.loss.row_kernels import TorchRows
from gkd.loss.text_tables import UnitTables
from gkd.loss.text_units import SAFE_SHARE
from gkd.loss.vocab_parallel import VocabShard
from gkd.text.byte_vocab import CLOSED, END, MARK, OPEN, WHOLE
from gkd.text.pair import TokenizerPair
from gkd.text.targets import TextTargets
from gkd.types import TokenTargets
from teacher_server.wire.protocol import Signal

LETTERS = [bytes([byte]) for byte in b"abc "]
# Special tokens without a pair and with one, two tokens of the same bytes, strings that only one of them has.
STUDENT = [None, END, *LETTERS, b"ab", b"abc", b"ca", b" a", b"bc", b"\xff\x01", None, b"ab", END, None]
TEACHER = [END, None, *LETTERS, b"ab", b"bca", b" ab", b"cab", b"b ", b"aa", b"\xff\x01"]
H, D = 6, 5
Vocab = Sequence[bytes | None]


def pair_of(student: Vocab = STUDENT, teacher: Vocab = TEACHER, *, by_units: bool = False) -> TokenizerPair:
    return TokenizerPair(student, teacher, "", "", teacher.index(END), 999, by_units)


def segment(rng: random.Random, vocab: Vocab, text: bytes) -> list[int]:
    """Return random tokens with the bytes of a text; not the canonical ones."""
    ids = []
    while text:
        fitting = [i for i, token in enumerate(vocab) if token and text.startswith(token)]
        ids.append(rng.choice(fitting))
        text = text[len(vocab[ids[-1]] or b"") :]
    return ids


@dataclass
class TextCase:
    """Responses to random texts; float64 models of one linear layer."""

    student: Vocab = field(default_factory=lambda: STUDENT)
    teacher: Vocab = field(default_factory=lambda: TEACHER)
    n_sequences: int = 5
    scale: float = 2.0  # of the student's hidden states: large values make boundaries safe
    seed: int = 0
    letters: bytes = b"abc "
    k: int = 0  # the teacher sends a list of k tokens; 0: hidden states
    by_units: bool = False  # of k units

    def __post_init__(self) -> None:
        rng, generator = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        self.pair = pair_of(self.student, self.teacher, by_units=self.by_units)
        self.responses: list[tuple[list[int], list[int]]] = []
        for i in range(self.n_sequences):
            text = bytes(rng.choice(self.letters) for _ in range(12))
            if b"\xff\x01" in self.student:
                text = text[:5] + b"\xff\x01" + text[5:]
            ours, theirs = (segment(rng, vocab, text + (END if i else b"")) for vocab in (self.student, self.teacher))
            if i == 1 and None in self.student:
                last = max(j for j, token in enumerate(self.student) if token is None)
                ours = [*ours[:4], last, *ours[4:], last]  # what follows has no pair
            self.responses.append((ours, theirs))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        n, n_teacher = (sum(len(each[side]) for each in self.responses) for side in (0, 1))
        self.hidden, self.head = self.scale * normal(n, H), normal(len(self.student), H)
        self.teacher_hidden, self.teacher_head = self.scale * normal(n_teacher, D), normal(len(self.teacher), D)
        self.weights = torch.rand(n, generator=generator, dtype=torch.float64)

    def of_units(self, p: Tensor) -> Tensor:
        """Return what the teacher lists of its tokens' probabilities: these, or their sums over units."""
        if self.pair.units is None:
            return p
        ids = torch.from_numpy(self.pair.units.of_token.astype(np.int64))
        return p.new_zeros(len(p), self.pair.n_listed).index_add(1, ids, p)

    def listed_ids(self, ids: Sequence[int]) -> list[int]:
        units = self.pair.units
        return [i if units is None else int(units.of_token[i]) for i in ids]

    def in_float32(self) -> TextCase:
        self.hidden, self.teacher_hidden = self.hidden.float(), self.teacher_hidden.float()
        self.head, self.teacher_head = self.head.float(), self.teacher_head.float()
        return self

    def targets(self, dtype: torch.dtype = torch.float64) -> TokenTargets:
        parts, n_rows, n_teacher, n_positions = [], 0, 0, 0
        for ours, theirs in self.responses:
            at = self.pair.align(np.array(ours), np.array(theirs))
            cover = np.where(at.cover < 0, -1, at.cover + n_positions)
            first = np.arange(len(at.row)) == 0
            parts.append((at.row + n_rows, at.depth, at.teacher_row + n_teacher, at.teacher_depth, cover, first))
            n_rows, n_teacher, n_positions = n_rows + len(ours), n_teacher + len(theirs), n_positions + len(at.row)
        columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True)]
        theirs = torch.tensor([i for _, ids in self.responses for i in self.listed_ids(ids)])
        log_p = self.of_units((self.teacher_hidden @ self.teacher_head.T).softmax(dim=-1)).log().to(dtype)
        logprobs, ids = log_p.topk(self.k or 1, dim=-1)
        listed = {} if not self.k else {"topk_ids": ids, "topk_logprobs": logprobs, "tail_mass": ids[:, 0] * torch.nan}
        if self.k:
            listed |= {"sampled_logprobs": log_p.gather(1, theirs[:, None])[:, 0]}
        return TokenTargets(
            torch.tensor([i for ids, _ in self.responses for i in ids]),
            torch.zeros(n_rows, dtype=dtype),
            torch.arange(n_rows) % 3 != 1,
            hidden=None if self.k else self.teacher_hidden.to(dtype),
            **listed,
            weights=self.weights.to(dtype),
            sequences=torch.repeat_interleave(
                torch.arange(len(self.responses)), torch.tensor([len(ours) for ours, _ in self.responses])
            ),
            text=TextTargets(*columns, theirs, torch.zeros(n_rows, dtype=torch.bool)),
        )

    def loss(
        self,
        spec: LossSpec,
        *,
        with_nodes: bool = True,
        chunk_bytes: int = 1 << 30,
        shard: VocabShard | None = None,
        n_local: int = 0,
        device: torch.device | None = None,
    ) -> DistillLoss:
        """Return the loss; of a rank that has `n_local` rows of the vocabulary with `shard`."""
        device = device or torch.device("cpu")
        shard, n_local = shard or VocabShard(0, len(self.student), None), n_local or len(self.student)
        units = UnitTables(replace(self.pair, with_nodes=with_nodes), shard=shard, n_local=n_local, device=device)
        head = self.teacher_head[units.teacher_rows].to(device)
        spec = replace(spec, compares_texts=True)
        signals: tuple[Signal, ...] = ("topk", "sampled") if self.k else ("hidden",)
        return DistillLoss(spec, signals, shard, TorchRows(), chunk_bytes, None if self.k else head, units)

    def written_out(self, spec: LossSpec, *, with_nodes: bool = True) -> tuple[Tensor, Tensor]:
        """Return the weighed sum of the losses, differentiable in `hidden` and `head`, and [N] the loss of each row."""
        q = (self.hidden @ self.head.T / spec.temperature).softmax(dim=-1)
        # A list has the logprobs at the temperature of the request, which `targets` leaves at 1.
        p = (self.teacher_hidden @ self.teacher_head.T / (1.0 if self.k else spec.temperature)).softmax(dim=-1)
        p, nodes, kinds = self.of_units(p), nodes_of(self.student, self.teacher), None
        if self.pair.units is not None:
            kinds = self.pair.units.kind.tolist()
            for string in {*nodes.values()}:
                nodes[string + MARK] = nodes[string] = string
        if self.k:
            theirs = torch.tensor([i for _, ids in self.responses for i in self.listed_ids(ids)])[:, None]
            is_listed = torch.zeros_like(p, dtype=torch.bool).scatter_(1, p.topk(self.k).indices, True)
            p = p * is_listed.scatter_(1, theirs, True)
        rows = [q.new_zeros(()) for _ in range(len(q))]
        first = first_teacher = 0
        for ours, theirs in self.responses:
            a = _Sequence(self.student, ours, q[first : first + len(ours)])
            b = _Sequence(self.teacher, theirs, p[first_teacher : first_teacher + len(theirs)], is_list=self.k > 0)
            if self.pair.units is not None:
                b.vocab, b.ids, b.kinds = self.pair.units.vocab, self.listed_ids(theirs), kinds
            for row, loss in _losses(a, b, nodes, spec, with_nodes):
                rows[first + row] = rows[first + row] + loss
            first, first_teacher = first + len(ours), first_teacher + len(theirs)
        found = torch.stack(rows)
        if spec.sft is not None:
            targets = self.targets()
            log_q = q.log().gather(1, targets.sampled_ids[:, None])[:, 0]
            found = found - spec.sft.weight * log_q.masked_fill(targets.on_policy, 0.0)
        return (found * self.weights).sum(), found.detach()


def nodes_of(student: Vocab, teacher: Vocab) -> dict[bytes, bytes]:
    """Return token -> node, as `gkd.text.byte_vocab` defines them."""

    def beginnings(vocab: Vocab) -> set[bytes]:
        return {token[:n] for token in vocab if token for n in range(1, len(token) + 1)}

    allowed = beginnings(student) & beginnings(teacher)

    def node(token: bytes, strings: set[bytes]) -> bytes:
        return max((token[:n] for n in range(len(token) + 1) if token[:n] in strings or not n), key=len)

    for string in sorted(allowed, key=len, reverse=True):
        sides = [{node(token, allowed) for token in vocab if token} for vocab in (student, teacher)]
        if not all(string in side for side in sides):
            allowed = allowed - {string}
    return {token: node(token, allowed) for token in {*student, *teacher} if token}


class _Sequence:
    """A response of one model: the token that holds each byte, and the probabilities at each row."""

    kinds: list[int] | None = None  # of the units, if `vocab`, `ids` and `p` have these in place of tokens

    def __init__(self, vocab: Vocab, ids: Sequence[int], p: Tensor, *, is_list: bool = False) -> None:
        self.is_list, missing = is_list, is_list * (1.0 - p.sum(dim=1)).clamp(min=torch.finfo(p.dtype).eps)
        total = p.sum(dim=1) + missing
        self.vocab, self.ids, self.p, self.missing = vocab, ids, p / total[:, None], missing / total
        self.strings: list[bytes] = []
        self.places: list[tuple[int, int]] = []
        for row, i in enumerate(ids):
            token = vocab[i]
            if token is None:
                break
            self.strings.append(token)
            self.places += [(row, n) for n in range(1 if token[0] == 255 else len(token))]

    def mass(self, row: int, test: Callable[[bytes | None], bool]) -> Tensor:
        """Return the probability of the tokens for which `test` holds."""
        which = [i for i, token in enumerate(self.vocab) if test(token)]
        return self.p[row, which].sum()

    def kind(self, row: int) -> int:
        return WHOLE if self.kinds is None else self.kinds[self.ids[row]]

    def next_bytes(self, row: int, depth: int, nodes: dict[bytes, bytes]) -> tuple[list[Tensor], list[bool]]:
        """Return 257 probabilities given the text, and which outcomes this model can have, the last one: all else."""

        def behind(row: int, begin: bytes, without: Collection[bytes] = ()) -> list[Tensor]:
            strings = [begin + bytes([x]) for x in range(256)]
            used, none = {*b"".join(token or b"" for token in self.vocab)}, self.p.new_zeros(())
            tests = [lambda t, s=s: _begins_with(t, s) and t not in without for s in strings]
            return [self.mass(row, test) if s[-1] in used else none for s, test in zip(strings, tests, strict=True)]

        kind, at = self.kind(row - (not depth)), MARK[0]
        if depth and kind != WHOLE and depth >= len(self.vocab[self.ids[row]] or b""):
            return [self.p.new_zeros(())] * 257, [False] * 257  # the unit does not tell its tokens' bytes
        if row and not depth and kind == OPEN:
            return [self.p.new_zeros(())] * 257, [False] * 257  # nor whether the token before might be longer
        if depth:
            begin = self.strings[row][:depth]
            longer = behind(row, begin)
            parts = [*longer, self.mass(row, lambda t: t == begin)]
            parts[256], parts[at] = parts[256] + parts[at], parts[at] * 0.0  # longer tokens, of which no byte is known
            total = torch.stack(parts).sum()
            if total < SAFE_SHARE * (total + self.missing[row]):
                return parts, [False] * 257  # the list has too little of the tokens that may stand here
            return [x / total for x in parts], [bool(x > 0) for x in parts]
        others = {token for token in self.vocab if token and not nodes[token]}  # share no beginning: the rest
        first = behind(row, b"", others)
        plain = [*first, self.mass(row, lambda t: not t or t in others) + self.missing[row]]
        if row:
            before = self.strings[row - 1] if kind == WHOLE else self.vocab[self.ids[row - 1]] or b""
            own = self.mass(row - 1, lambda t: t == before)
            longer = behind(row - 1, before)
            plain[256], longer[at] = plain[256] + longer[at] / own, longer[at] * 0.0
            plain = [x * own + (longer[i] if i < 256 else 0.0) for i, x in enumerate(plain)]
        total = torch.stack(plain).sum()
        return [x / total for x in plain], [not self.is_list or bool(x > 0) for x in plain]

    def own_share(self, row: int, nodes: dict[bytes, bytes]) -> float:
        """Return the share of the token before `row` of those of its node that begin with it."""
        if self.kind(row - 1) != WHOLE:
            return float(self.kind(row - 1) == CLOSED)
        before = self.strings[row - 1]
        alike = self.mass(row - 1, lambda t: _begins_with(t, before) and nodes[t or b""] == nodes[before])
        return float((self.p[row - 1, self.ids[row - 1]] / alike).detach())


def _begins_with(token: bytes | None, begin: bytes) -> bool:
    return bool(token) and (token or b"").startswith(begin)


def _losses(
    a: _Sequence, b: _Sequence, nodes: dict[bytes, bytes], spec: LossSpec, with_nodes: bool
) -> list[tuple[int, Tensor]]:
    """Return (row of the student, loss) of the positions of one response."""
    found: list[tuple[int, Tensor]] = []
    names = [b"", *sorted(set(nodes.values()) - {b""})]
    reach = -1  # first byte that the last safe boundary does not compare
    for at, ((row, depth), (other, other_depth)) in enumerate(zip(a.places, b.places, strict=False)):
        lines, common = ((a, row), (b, other)), depth == other_depth == 0
        if not common and at < reach:
            continue
        safe = common and with_nodes and all(not at or s.own_share(line, nodes) >= SAFE_SHARE for s, line in lines)
        if common:
            reach = at + min(len(nodes[s.strings[line]]) for s, line in lines) if safe else -1
        if safe:
            q, p = (
                torch.stack([s.mass(line, lambda t, name=name: nodes.get(t or b"", b"") == name) for name in names])
                for s, line in lines
            )
            if b.is_list:
                p = torch.cat([p[:1] + b.missing[other], p[1:]])
                listed = [i for i, x in enumerate(p) if x > 0]  # the rest is the first
                unlisted = [i for i, x in enumerate(p) if not x > 0]
                q = torch.cat([q[:1] + q[unlisted].sum(), q[listed[1:]]])
                p = p[listed]
        else:
            (x, known), (y, known_too) = a.next_bytes(row, depth, nodes), b.next_bytes(other, other_depth, nodes)
            both = [i for i in range(256) if known[i] and known_too[i]]
            rest = [i for i in range(257) if i not in both] if known[256] and known_too[256] else []
            groups = [[i] for i in both] + [rest] * bool(rest)
            if not groups:
                continue
            q, p = (torch.stack([torch.stack([v[i] for i in group]).sum() for group in groups]) for v in (x, y))
            q, p = q / q.sum(), p / p.sum()
        tiny = torch.finfo(torch.float64).tiny
        log_q, log_p = (t.clamp(min=tiny).log()[None] for t in (q, p))
        for term in spec.divergences:
            found.append((row, term.weight * divergence_of(term.name)(log_q, log_p, term)[0]))
    return found
