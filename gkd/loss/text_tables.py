"""Tables of one rank for sums over the tokens of a vocabulary, and a teacher's list as a part of a distribution.

Letters: v columns of this rank (n', v' of the teacher), V tokens of a whole vocabulary, W nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gkd.loss.vocab_parallel import VocabShard
from gkd.text.byte_vocab import CLOSED, END, OPEN, REST, WHOLE, ByteVocab, Vocab, alike
from gkd.text.pair import TokenizerPair

_LEAST = -60.0  # nats, of the tokens of a teacher that sends lists


class Side:
    """This rank's part of one model's vocabulary: tables for sums over tokens.

    Args:
        tokens: of the whole vocabulary, see `gkd.text.byte_vocab`.
        node: [V] their nodes.
        start, n_columns: this rank's columns.
        kind: [V], of `gkd.text.byte_vocab.Units`; None: they are tokens.
    """

    def __init__(
        self,
        tokens: Vocab,
        node: np.ndarray,
        start: int,
        n_columns: int,
        device: torch.device,
        kind: np.ndarray | None = None,
    ) -> None:
        vocab = ByteVocab(tokens)
        starts, bounds = vocab.ranges
        is_local = (vocab.order >= start) & (vocab.order < start + n_columns)
        n_before = np.concatenate([[0], np.cumsum(is_local)])
        by_node, range_of = alike(vocab, node)
        own_alike = (by_node >= start) & (by_node < start + n_columns)
        n_alike_before = np.concatenate([[0], np.cumsum(own_alike)])

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        self.start = start
        self.node = tensor(node[start : start + n_columns])
        self.columns = tensor(vocab.order[is_local] - start)
        self.text = tensor(vocab.text[is_local])
        self.sizes = tensor(vocab.lengths[vocab.order[is_local]])
        self.lengths = tensor(vocab.lengths)
        self.starts = tensor(starts[:-1])
        self.bounds = tensor(n_before[bounds])
        self.alike_columns = tensor(by_node[own_alike] - start)
        self.alike = tensor(n_alike_before[range_of])
        kinds = np.full(vocab.n, WHOLE) if kind is None else kind
        # No other token of its node begins with it.
        self.is_alone = tensor((range_of[:, 1] - range_of[:, 0] <= 1) | (kinds == CLOSED))
        self.is_open = tensor(kinds == OPEN)


class TeacherList(NamedTuple):
    """The teacher's most probable tokens in n' rows, in addition to its tokens of the rows; or units in their place."""

    ids: Tensor  # [n', K] int64; -1 beyond the row's count
    logprobs: Tensor  # [n', K] nats
    sampled: Tensor  # [n'] nats, of `TextTargets.teacher_ids`

    def spread(self, ids: Tensor, side: Side, n_columns: int) -> Tensor:
        """Return this rank's columns of the distribution, 0 for tokens that are not listed: [n', n_columns].

        Args:
            ids: [n'] int64, `TextTargets.teacher_ids`.
        """
        listed = torch.cat([self.ids, ids[:, None]], dim=1)
        # With a probability of 0 for its own token nothing could be compared behind it.
        p = torch.cat([self.logprobs, self.sampled[:, None].clamp(min=_LEAST)], dim=1).exp()
        columns = listed - side.start
        absent = (listed < 0) | (columns < 0) | (columns >= n_columns)
        out = p.new_zeros((len(p), max(1, n_columns)))
        # The larger of the two: their sum would count a token twice that is in the list, too.
        return out.scatter_reduce_(1, columns.masked_fill(absent, 0), p.masked_fill(absent, 0.0), "amax")[:, :n_columns]


class UnitTables:
    """Both vocabularies, for one rank of the student's last pipeline stage.

    Args:
        pair: the tokenizers, with as many tokens as the models have rows.
        shard: the student's part of this rank. The teacher's vocabulary is divided evenly over the same ranks.
        n_local: rows of the student's LM head on this rank.
    """

    def __init__(self, pair: TokenizerPair, *, shard: VocabShard, n_local: int, device: torch.device) -> None:
        student = pair.student
        teacher = pair.teacher
        nodes = pair.nodes
        units = pair.units
        teacher_node = nodes.teacher
        kind = None
        if units is not None:
            teacher = units.vocab
            teacher_node = units.node
            kind = units.kind
        self.student = Side(student, nodes.student, shard.start, shard.n_columns(n_local), device)
        size, rank = (1, 0) if shard.group is None else (dist.get_world_size(shard.group), dist.get_rank(shard.group))
        self.n_teacher_rows = step = -(-len(teacher) // size)  # the last ranks may have fewer
        self.teacher_rows = slice(min(rank * step, len(teacher)), min((rank + 1) * step, len(teacher)))
        n_rows = self.teacher_rows.stop - self.teacher_rows.start
        self.teacher = Side(teacher, teacher_node, self.teacher_rows.start, n_rows, device, kind)
        self.with_nodes = pair.with_nodes
        self.n_nodes = nodes.n
        self.first_byte = torch.from_numpy(nodes.first_byte).to(device)
        ends = [i for i, token in enumerate(student) if token == END]
        self.end_node = int(nodes.student[ends[0]])
        name = np.full(nodes.n, -1, np.int64)  # the student's shortest token of each node stands for it in reports
        longest_first = sorted(range(len(student)), key=lambda i: -len(student[i] or b""))
        name[nodes.student[longest_first]] = longest_first
        name[REST] = -1
        self.names = torch.from_numpy(name).to(device)
