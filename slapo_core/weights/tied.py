"""Gradients of parameters that several pipeline stages use: each stage has its summand, and all need the sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from slapo_core.errors import BuildError
from slapo_core.weights.exchange import collect, exchange_device, sum_among

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh
    from slapo_core.weights.correspondence import Correspondence

__all__ = ["TiedGradients"]

_BUCKET = 32 << 20  # bytes that are sent at once; a larger gradient is sent by itself, and not copied before
_NONE, _DENSE, _SPARSE = 0, 1, 2


@dataclass(frozen=True)
class _Tie:
    name: str
    parameter: nn.Parameter


class TiedGradients:
    """Sums them over exactly the ranks along ``pp`` that hold the parameter; of a sharded one, piece by piece.

    All ranks have the same sum to the last bit, because each adds in the order of the ranks.

    Args:
        correspondence: of the scheduled model, every tensor of which is in its place.
    """

    def __init__(self, correspondence: Correspondence) -> None:
        self._mesh: Mesh | None = correspondence.mesh
        self._ties: dict[tuple[int, ...], list[_Tie]] = {}
        if correspondence.placement is None or self._mesh is None:
            return
        anywhere = False
        for live in correspondence.live():
            places = correspondence.placement.holders(live)
            if not isinstance(live.tensor, nn.Parameter) or len(places) < 2:
                continue
            anywhere = True
            if live.is_here:
                self._ties.setdefault(places, []).append(_Tie(live.name, live.tensor))
        if anywhere and exchange_device(self._mesh).type != "cpu":
            import torch.distributed as dist

            # NCCL connects a group with its first collective, which all of its ranks have to join.
            dist.all_reduce(torch.zeros(1, device=exchange_device(self._mesh)), group=self._mesh.group("pp"))

    @torch.no_grad()
    def sum(self, attribute: str = "grad") -> None:
        """Sum them in place: a collective among the ranks that hold the same parameter.

        A rank without a gradient adds nothing to it, and gets the sum; where no rank has one there is none after it.

        Args:
            attribute: of parameters that has the gradient; missing or None: there is none.

        Raises:
            BuildError: on all of these ranks: a gradient is sparse.
        """
        for places in sorted(self._ties):
            ties = [tie for tie in self._ties[places] if tie.parameter.requires_grad]
            if ties:
                self._sum(ties, places, attribute)

    @torch.no_grad()
    def sum_all(self) -> None:
        """Sum those of all of them, as if every rank had one: without asking, where no rank is there to answer."""
        for places in sorted(self._ties):
            for tie in self._ties[places]:
                if tie.parameter.requires_grad and tie.parameter.grad is None:
                    tie.parameter.grad = torch.zeros_like(tie.parameter)
            gradients = [tie.parameter.grad for tie in self._ties[places] if tie.parameter.grad is not None]
            for bucket in _buckets(gradients):
                self._sum_bucket(bucket, places)

    def _sum(self, ties: list[_Tie], places: tuple[int, ...], attribute: str) -> None:
        assert self._mesh is not None
        gradients = [getattr(tie.parameter, attribute, None) for tie in ties]
        own = torch.tensor(
            [_state(gradient) for gradient in gradients], dtype=torch.uint8, device=exchange_device(self._mesh)
        )
        states = torch.stack(collect(own, self._mesh, "pp", places)).amax(0).tolist()
        sparse = [tie.name for tie, state in zip(ties, states, strict=True) if state == _SPARSE]
        if sparse:
            raise BuildError(
                f"the gradients of {', '.join(map(repr, sparse))}, which several pipeline stages use, are sparse, and "
                "sparse ones are not summed over stages",
                hint="nn.Embedding(..., sparse=False)",
            )
        there = []
        for tie, gradient, state in zip(ties, gradients, states, strict=True):
            if state != _DENSE:
                continue
            if gradient is None:
                gradient = torch.zeros_like(tie.parameter)
                setattr(tie.parameter, attribute, gradient)
            there.append(gradient)
        for bucket in _buckets(there):
            self._sum_bucket(bucket, places)

    def _sum_bucket(self, bucket: list[torch.Tensor], places: tuple[int, ...]) -> None:
        assert self._mesh is not None
        device = exchange_device(self._mesh)
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])
        total = sum_among(flat.to(device), self._mesh, "pp", places)
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, part in zip(bucket, total.split(sizes), strict=True):
            gradient.copy_(part.view(gradient.shape))


def _state(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _DENSE if gradient.layout == torch.strided else _SPARSE


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one type together, in their order, as the other ranks have it."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for _, alike in sorted(by_dtype.items(), key=lambda item: str(item[0])):
        bucket: list[torch.Tensor] = []
        for gradient in alike:
            if bucket and sum(one.nbytes for one in (*bucket, gradient)) > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(gradient)
        if bucket:
            yield bucket
