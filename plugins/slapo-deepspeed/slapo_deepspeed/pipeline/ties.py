"""Sum the gradients of parameters tied over stages, and count them once in the norm."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from slapo_runtime.context import BuildContext


class Ties:
    """The ties of this rank, with groups over the ranks of each: a collective over the mesh.

    Args:
        context: of the build; every tensor is in its place.
        topology: DeepSpeed's.

    Attributes:
        groups: that were made, of which this rank is a member.
        copies: those of its parameters that an earlier rank holds too.
    """

    def __init__(self, context: BuildContext, topology: Any) -> None:
        import torch.distributed as dist

        mesh, placement = context.schedule.mesh, context.placement
        assert mesh is not None
        assert placement is not None
        holders = {
            live.name: placement.holders(live)
            for live in context.state.tensors()
            if isinstance(live.tensor, nn.Parameter)
        }
        groups: dict[tuple[int, ...], Any] = {}
        for places in sorted({one for one in holders.values() if len(one) > 1}):
            for data, model in itertools.product(range(mesh.size("dp")), range(mesh.size("tp"))):
                ranks = [topology.get_rank(pipe=place, data=data, model=model) for place in places]
                group = dist.new_group(ranks)
                if mesh.global_rank in ranks:
                    groups[places] = group
        self.groups: list[Any] = list(groups.values())
        self._ties: list[tuple[nn.Parameter, Any]] = []
        self.copies: list[nn.Parameter] = []
        for live in context.state.tensors():
            places = holders.get(live.name, ())
            if live.is_local and len(places) > 1:
                assert isinstance(live.tensor, nn.Parameter)
                self._ties.append((live.tensor, groups[places]))
                if mesh.rank("pp") != places[0]:
                    self.copies.append(live.tensor)

    def ready(self, engine: Any) -> list[tuple[nn.Parameter, Any]]:
        """The ties with their groups, each with a gradient: a rank that has none adds zeros.

        Args:
            engine: DeepSpeed's, which sums them then; but not where its optimizer keeps gradients in another type
                under a name of its own: those are summed here.
        """
        found = []
        for parameter, group in self._ties:
            if not parameter.requires_grad:
                continue
            if engine.using_bf16_optimizer:
                _count_as_there(engine.optimizer, parameter)
            elif getattr(engine.optimizer, "use_grad_accum_attribute", False):
                _sum_accumulated(engine.optimizer, parameter, group)
                continue
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append((parameter, group))
        return found


def _count_as_there(optimizer: Any, parameter: nn.Parameter) -> None:
    """Its gradient is zeros where there was none, which DeepSpeed would not clip after the sum."""
    for number, group in enumerate(optimizer.bf16_groups):
        for place, one in enumerate(group):
            if one is parameter:
                optimizer.fp32_groups_has_gradients[number][place] = True
                one._hp_grad = optimizer.fp32_groups_gradients[number][place]  # type: ignore[attr-defined]


def _sum_accumulated(optimizer: Any, parameter: Any, group: Any) -> None:
    import torch.distributed as dist

    if parameter.grad_accum is None:
        parameter.grad_accum = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
    dist.all_reduce(parameter.grad_accum, group=group)
