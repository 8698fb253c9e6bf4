"""Hold the positions at which the loss of a micro-batch compares two models on text, see `gkd.text.pair`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(slots=True)
class TextTargets:
    """P positions of the texts of N loss rows, ordered by row; N' rows of the teacher's hidden states."""

    row: torch.Tensor  # [P] int64, the student's loss row
    depth: torch.Tensor  # [P] int64, bytes of its token in front of the position; 0: the token begins here
    teacher_row: torch.Tensor  # [P] int64, row of `TokenTargets.hidden`
    teacher_depth: torch.Tensor  # [P] int64
    cover: torch.Tensor  # [P] int64, see `Alignment.cover`; of the micro-batch's positions
    is_first: torch.Tensor  # [P] bool, the first position of its sequence
    teacher_ids: torch.Tensor  # [N'] int64, the teacher's tokens; their units if it lists units
    canonical: torch.Tensor  # [N] bool, see `TokenizerPair.canonical`; False for tokens that it did not sample

    def on(self, device: torch.device) -> TextTargets:
        return TextTargets(*(getattr(self, item.name).to(device) for item in fields(self)))

    @property
    def is_common(self) -> torch.Tensor:
        """Return [P] bool, whether a token of each model begins at the position."""
        return (self.depth == 0) & (self.teacher_depth == 0)

    def chunks(self, n_rows: int, step: int) -> list[tuple[int, slice]]:
        """Divide the rows into parts that each begin where a token of each model begins.

        Args:
            step: rows of a part; more if no token of both begins within them.

        Returns:
            For each part its rows, and in front of them the first row whose logits it needs: that of the token before.
        """
        begins = torch.ones(n_rows, dtype=torch.bool)
        begins[self.row] = False
        begins[self.row[self.is_common]] = True
        follows = torch.zeros(n_rows, dtype=torch.bool)
        follows[self.row[self.is_common & ~self.is_first]] = True
        places = [*torch.nonzero(begins).flatten().tolist(), n_rows]
        chunks = list[tuple[int, slice]]()
        start = 0
        while start < n_rows:
            inside = [place for place in places if start < place <= start + step]
            stop = inside[-1] if inside else next(place for place in places if place > start)
            chunks.append((start - int(follows[start]), slice(start, stop)))
            start = stop
        return chunks

    def part(self, first: int, rows: slice) -> tuple[TextTargets, slice]:
        """Return the positions of an item of `chunks`, and the rows of the teacher that they need.

        Returns:
            Positions whose rows count from `first`, and the teacher's from the start of the returned rows.
        """
        low, high = torch.searchsorted(self.row, torch.tensor([rows.start, rows.stop])).tolist()
        positions = slice(low, high)
        if low == high:
            teacher = slice(0, 0)
        else:
            begin = int(self.teacher_row[low]) - int(first < rows.start)
            teacher = slice(begin, int(self.teacher_row[high - 1]) + 1)
        cover = self.cover[positions]
        part = TextTargets(
            row=self.row[positions] - first,
            depth=self.depth[positions],
            teacher_row=self.teacher_row[positions] - teacher.start,
            teacher_depth=self.teacher_depth[positions],
            cover=torch.where(cover < 0, cover, cover - low),
            is_first=self.is_first[positions],
            teacher_ids=self.teacher_ids[teacher],
            canonical=self.canonical[rows],
        )
        return part, teacher
