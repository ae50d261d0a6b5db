"""Sum the partial gradients of an unsharded parameter: ``sync_gradient``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import is_grad_enabled

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.effects import Collective, Effect
from slapo_core.internals import parameters_of
from slapo_core.observers import Forward, Origin, run_from
from slapo_tp import collectives
from slapo_tp.collectives import RankGroup
from slapo_tp.preconditions import needs_mesh
from slapo_tp.split_state import as_tuple, bias_is_left_out, has_split_below, mesh_size, root_of, split_axis


@dataclass(frozen=True)
class SyncGradient(Primitive):
    """Sum unsharded parameters' gradients from this module over the ranks.

    For a module that is the same on every rank, but works on a shard: a norm on this rank's heads (Qwen3's ``q_norm``),
    or a LayerNorm on this rank's part of the sequence. What another module that is tied to the parameter adds to the
    gradient is left as it is.

    Args:
        names: the module's own parameters, e.g. ``"weight"`` or ``["weight", "bias"]``.
        mesh_dim: the mesh dimension whose ranks take part.

    Raises:
        PreconditionError: no mesh, no such parameter, nothing in the model is split, the parameter is split itself, its
            gradient is summed already, or it is a bias that the forward leaves out and ``sync`` adds.

    rewrite: (``dw[r]`` the gradient that rank r sees)
        ``w.grad == dw[r]`` -> ``w.grad == sum over r of dw[r]``

    On a mesh dimension of one rank nothing changes.

    Source: Megatron-LM sums the gradients of LayerNorms under sequence parallelism in the same way, at the end of the
    step: ``megatron/core/distributed/finalize_model_grads.py``.
    """

    name = "tp.sync_gradient"
    equivalence = Equivalence.REORDERED

    names: str | tuple[str, ...]
    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)

    @needs_mesh
    def preconditions(self, node: Node) -> Iterator[Violation]:
        names = as_tuple(self.names)
        if not names:
            yield Violation("it names no parameter", 'write sync_gradient("weight")')
        for name in names:
            yield from self._violations(node, name)
        if not has_split_below(root_of(node), self.mesh_dim):
            yield Violation("nothing in the model is split, so every rank has the full gradient", "shard first")

    def apply(self, node: Node, edit: Edit) -> None:
        assert node.mesh is not None
        active = mesh_size(node, self.mesh_dim) > 1
        if not active:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank, which has the full gradient")
        group = RankGroup.along(node.mesh, self.mesh_dim)
        edit.wrap_forward(node, GradientSum(as_tuple(self.names), group), active=active)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not node.wrappers:
            yield Violation("the module's forward is not wrapped")

    def effects(self, node: Node) -> Iterator[Effect]:
        trained = [name for name in as_tuple(self.names) if node.parameters[name].requires_grad]
        if mesh_size(node, self.mesh_dim) > 1 and trained:
            yield Collective("all_reduce", self.mesh_dim, "backward", len(trained))

    def _violations(self, node: Node, name: str) -> Iterator[Violation]:
        if name not in node.parameters:
            known = ", ".join(f"'{own}'" for own in node.parameters) or "none of its own"
            yield Violation(f"the module has no parameter '{name}'", f"it has {known}")
            return
        if split_axis(node, name, self.mesh_dim) is not None:
            yield Violation(
                f"'{name}' is split over mesh_dim '{self.mesh_dim}': each rank's gradient is that of its own shard",
                f"leave '{name}' out",
            )
        for mesh_dim in node.mesh.sizes if node.mesh is not None and name == "bias" else ():
            if bias_is_left_out(node, mesh_dim):
                yield self._left_out(mesh_dim)
        for record in node.records:
            before = record.primitive
            if isinstance(before, SyncGradient) and before.mesh_dim == self.mesh_dim and name in as_tuple(before.names):
                yield Violation(f"the gradient of '{name}' is summed already, by {record}", f"leave '{name}' out")

    def _left_out(self, mesh_dim: str) -> Violation:
        if mesh_dim == self.mesh_dim:
            return Violation(
                "'bias' is left out of the forward, whose weight is split on its input axis, and sync adds it with its "
                "full gradient",
                "leave 'bias' out",
            )
        return Violation(
            f"'bias' is left out of the forward, whose weight is split on its input axis over mesh_dim '{mesh_dim}', "
            f"and sync adds it where a sum over mesh_dim '{self.mesh_dim}' does not reach it",
            f"leave 'bias' out, and sum its gradient over mesh_dim '{self.mesh_dim}' after the backward",
        )


def summed_among_holders(wrapper: Any) -> tuple[str, ...]:
    """Return the parameters whose gradients a wrapper sums over a shard's holders."""
    return wrapper.names if isinstance(wrapper, GradientSum) and wrapper.group.holders is not None else ()


@dataclass(frozen=True)
class GradientSum:
    """Wrap a forward to run with copies of parameters, whose gradients are summed.

    A static graph that looks into the module has the collectives as calls.

    Args:
        names: of the module's own parameters.
        group: the ranks.
    """

    names: tuple[str, ...]
    group: RankGroup
    slapo_is_inlined = True

    def __call__(self, forward: Forward) -> Forward:
        return _Summed(forward, self)


class _Summed:
    """Run the forward; equal to its wrapper, of which a graph says where a collective is from."""

    slapo_is_inlined = True

    def __init__(self, forward: Forward, wrapper: GradientSum) -> None:
        functools.update_wrapper(self, forward)
        self.slapo_is_inlined = True
        self.forward, self.wrapper, self.origin = forward, wrapper, Origin("", wrapper)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():
            return self.forward(module, *args, **kwargs)
        own: dict[str, Any] = parameters_of(module)  # type: ignore[assignment]
        kept = {name: own[name] for name in self.wrapper.names}
        try:
            for name, parameter in kept.items():
                own[name] = run_from(self.origin, collectives.copy, parameter, self.wrapper.group)
            return self.forward(module, *args, **kwargs)
        finally:
            own.update(kept)

    def __eq__(self, other: object) -> bool:
        return bool(self.wrapper == (other.wrapper if isinstance(other, _Summed) else other))

    def __hash__(self) -> int:
        return hash(self.wrapper)
