"""A checkpoint in pieces that is in memory, and a model whose tensors lie in every way that a layout can say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

import slapo_core as slapo
from slapo_core.layout import Layout
from slapo_runtime.correspondence.storage import TensorShard

__all__ = ["InMemory", "Odd", "laid_out"]


class InMemory:
    """The implementation of :class:`slapo_runtime.correspondence.storage.ShardSource` by the pieces of all ranks.

    Args:
        pieces: of all ranks; every element must be in exactly one.
    """

    label = "the pieces in memory"

    def __init__(self, pieces: Iterable[TensorShard]) -> None:
        self.full: dict[tuple[str, str], torch.Tensor] = {}
        self.asked = 0
        covered: dict[tuple[str, str], torch.Tensor] = {}
        for piece in pieces:
            key = (piece.kind, piece.name)
            self.full.setdefault(key, torch.zeros(piece.shape, dtype=piece.value.dtype))[_place(piece)] = piece.value
            covered.setdefault(key, torch.zeros(piece.shape))[_place(piece)] += 1
        wrong = [key for key, counts in covered.items() if not bool((counts == 1).all())]
        assert not wrong, wrong

    def like(self, kind: str, name: str) -> torch.Tensor:
        return self.full[kind, name].to("meta")

    def read(self, wanted: Sequence[TensorShard]) -> None:
        self.asked += 1
        for piece in wanted:
            piece.value.copy_(self.full[piece.kind, piece.name][_place(piece)])


def _place(piece: TensorShard) -> tuple[slice, ...]:
    extents = zip(piece.offset, piece.value.shape, strict=True)
    return tuple(slice(offset, offset + extent) for offset, extent in extents)


class Odd(nn.Module):
    """Its loss is the sum of the squares of its parameters: how they lie makes no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.both = nn.Parameter(torch.randn(12, 4)), nn.Parameter(torch.randn(4, 6))
        self.padded, self.summand = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(5))
        self.plain, self.number = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(()))
        self.tied = self.plain
        self.register_buffer("mean", torch.randn(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": x.mean() + sum((one.square().sum() for one in self.parameters()), torch.zeros(()))}


@slapo.register_primitive()
@dataclass(frozen=True)
class Lay(slapo.Primitive):
    """Let a parameter of the model above lie otherwise."""

    name = "pieces.lay"
    equivalence = slapo.Equivalence.REORDERED

    def apply(self, node: Any, edit: Any) -> None:
        tp = ("tp", Shard(0))
        for layout in (
            Layout("packed", (12, 4), (tp,), packing=((0, (4, 8)),)),
            Layout("both", (4, 6), (("tp", Shard(1)),)),
            Layout("padded", (7, 3), (tp,), padding=((0, 1),)),
            Layout("summand", (5,), (("tp", Partial()),)),
        ):
            value = layout.local(node.parameters[layout.origin], node.mesh)
            edit.set_parameter(node, layout.origin, value, layout=layout)


def laid_out(mesh: dict[str, int] | None, seed: int = 0) -> Any:
    """An engine of the model, laid out over ``tp``."""
    torch.manual_seed(seed)
    sch = slapo.create_schedule(Odd(), mesh=mesh, example_inputs={"x": torch.ones(2)})
    sch.lay()
    return slapo.build(sch, optimizer=lambda them: torch.optim.AdamW(them, lr=0.1, eps=1e-4))
