"""The peak of a step for any set of checkpointed units, of two played steps: with none of them, and with all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slapo_core.estimation.fitting.watching import Profile

__all__ = ["PeakModel"]

_CHUNK = 1 << 24  # numbers at once


class PeakModel:
    """Predicts peaks: the largest of many affine functions of what is checkpointed.

    While a part of the step runs, a unit that is checkpointed holds ``saved`` bytes less for each of its calls that is
    between its forward and its backward pass; in the part in which it runs itself, forward or backward, it holds what
    it held there when all were checkpointed.

    Args:
        none: of each kind of rank, with no unit checkpointed.
        all_: of the same kinds, with all of them.

    Attributes:
        saved: bytes by kind and unit that checkpointing one call of it frees.
        flops: by unit, of computing it again: of all kinds together.
        seconds: likewise; 0 without a device.
    """

    def __init__(self, none: Sequence[Profile], all_: Sequence[Profile]) -> None:
        count = len(none[0].kept)
        saved = torch.zeros(len(none), count, dtype=torch.float64)
        self.flops, self.seconds = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        bases: list[float] = []
        rows: list[torch.Tensor] = []
        for kind, (before, after) in enumerate(zip(none, all_, strict=True)):
            saved[kind] = torch.tensor(before.kept) - torch.tensor(after.kept)
            there = {part.label: part for part in after.parts}
            for part in before.parts:
                row = -torch.tensor(part.live, dtype=torch.float64) * saved[kind]
                other = there.get(part.label)
                if part.active >= 0 and other is not None:
                    row[part.active] += other.most - row.sum() - part.most
                    self.flops[part.active] += other.flops - part.flops
                    self.seconds[part.active] += other.seconds - part.seconds
                bases.append(part.most)
                rows.append(row)
        self.saved = saved
        self._bases, self._rows = _without_doubles(torch.tensor(bases, dtype=torch.float64), torch.stack(rows))

    def peaks(self, sets: torch.Tensor) -> torch.Tensor:
        """Bytes by set.

        Args:
            sets: ``(sets, units)`` booleans: what is checkpointed.
        """
        size = max(1, _CHUNK // max(1, len(self._bases)))
        chunks = [
            (self._bases + chunk.to(torch.float64) @ self._rows.T).amax(dim=1)
            for chunk in sets.split(size)
            if len(chunk)
        ]
        return torch.cat(chunks)


def _without_doubles(bases: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the functions with the same slopes only the largest matters."""
    largest: dict[tuple[float, ...], float] = {}
    for base, row in zip(bases.tolist(), rows, strict=True):
        key = tuple(row.tolist())
        largest[key] = max(base, largest.get(key, base))
    return torch.tensor(list(largest.values()), dtype=torch.float64), torch.tensor(list(largest), dtype=torch.float64)
