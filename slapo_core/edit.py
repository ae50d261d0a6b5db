"""The interface of edits for primitives, and hooks carried over to a replaced module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slapo_core.node import Node
from slapo_core.private import HOOK_TABLES, hooks_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core.layout import Layout
    from slapo_core.primitive import Primitive
    from slapo_graph.match import Graph

__all__ = ["Carried", "Edit", "Forward", "HookKind", "goes_around", "runs_own_forward", "without"]


HookKind = Literal["forward_pre", "forward", "full_backward_pre", "full_backward"]
Forward = Callable[..., Any]
"""An unbound forward: ``forward(module, *args, **kwargs)``."""


class Edit(Protocol):
    """Changes made by one application of a primitive; undone together, in reverse order.

    A node is a place: after ``replace_module`` it is the new module. What lay below the old one and has no place in the
    new one is gone; editing it raises ApplyError.
    """

    def set_parameter(self, node: Node, name: str, value: torch.Tensor | None, *, layout: Layout | None = None) -> None:
        """Replace an own parameter, everywhere it is tied.

        Args:
            node: the module that holds it.
            name: the parameter's own name, e.g. ``"weight"``.
            value: the new tensor, of any shape; a plain tensor becomes a parameter that requires a gradient if the old
                one did. Attributes set on the old parameter are carried over, and where the shape is the same, the
                hooks that the user registered on it; where it is not, the edit is refused. None empties the slot.
            layout: of the new tensor in the reference tensor; None keeps the present layout, or, where ``value`` is
                a tensor of the model already (a tie), its own: then the old one is given up.
        """
        ...

    def set_buffer(self, node: Node, name: str, value: torch.Tensor | None, *, layout: Layout | None = None) -> None:
        """Replace an own buffer; it stays persistent or not."""
        ...

    def set_requires_grad(self, node: Node, name: str, flag: bool) -> None:
        """Freeze an own parameter or train it, everywhere it is tied, and in the reference model of ``verify``."""
        ...

    def set_layout(self, node: Node, name: str, layout: Layout) -> None:
        """Record the layout of an own parameter or buffer, without changing the tensor.

        A split over a mesh dimension of one rank is such a case: what later steps may do must not depend on the size.
        """
        ...

    def replace_module(
        self,
        node: Node,
        module: nn.Module,
        *,
        moved: Mapping[str, str] | None = None,
        dropped: Collection[str] = (),
    ) -> None:
        """Replace the node's module, under every path where it is reachable.

        Args:
            node: any node but the root.
            module: the new module. Hooks that the user registered on tensors of the old one are treated as by
                :meth:`set_parameter`.
            moved: where parameters and buffers of the old module live in the new one, both as names relative to the
                node; names that are the same on both sides need no entry.
            dropped: parameters and buffers of the old module without a successor in the new one, even where a
                name is the same. Each tensor without a successor must be named here, or a plugin must translate it
                (``slapo_to_reference``): ``build`` and ``verify`` refuse a tensor that got lost.
        """
        ...

    def add_module(self, node: Node, name: str, module: nn.Module) -> Node:
        """Give a traced module another child, for its graph to call.

        Args:
            node: the module.
            name: of the child, e.g. ``"qkv"``; new there.
            module: the child. Tensors of the model that it holds are tied; others need a layout, or
                the plugin (``slapo_to_reference``).

        Returns:
            the child's node.
        """
        ...

    def add_hook(
        self,
        node: Node,
        kind: HookKind,
        function: Callable[..., Any],
        *,
        prepend: bool = False,
        active: bool = True,
    ) -> None:
        """Register a hook on the module.

        Args:
            node: the module.
            kind: when it is called.
            function: forward hooks are called with keyword arguments, ``function(module, args, kwargs)`` and
                ``function(module, args, kwargs, output)``; backward hooks as torch calls them.
            prepend: before the hooks that are there, and not behind them.
            active: False where it has nothing to do, such as a collective on a mesh of one rank: it is recorded, and
                ``node.hooks`` gives it, but torch is not told of it, so that it costs nothing. What later steps may do
                then does not depend on the size of the mesh.
        """
        ...

    def wrap_forward(
        self, node: Node, wrapper: Callable[[Forward], Forward], *, active: bool = True, inside: bool = False
    ) -> None:
        """Replace the module's forward ``f`` by ``wrapper(f)``; both take the module first.

        Args:
            node: the module.
            wrapper: called again when ``f`` changes, or for a copy of the model. The result must not keep a reference
                to a particular module, so that a deep copy of the model runs on itself.
            active: False where it has nothing to do, as for a hook: it is recorded, and ``node.wrappers`` gives it, but
                it is not called and the forward stays.
            inside: within the wrappers that are there, and not around them.
        """
        ...

    def set_graph(self, node: Node, graph: Graph) -> None:
        """Run a static graph instead of the module's forward.

        Args:
            node: the module; what steps wrapped around its forward stays around the graph.
            graph: never changed once it is here: another one comes in its place.
        """
        ...

    def set_attribute(self, node: Node, name: str, value: Any) -> None:
        """Set a plain attribute of the module, such as ``num_heads``."""
        ...

    def annotate(self, node: Node, name: str, key: str, value: Any) -> None:
        """Set attribute ``key`` on the own parameter ``name``; it follows the parameter through later edits."""
        ...

    def apply(self, node: Node, primitive: Primitive) -> Node:
        """Apply another primitive as part of this one: checked as usual, recorded and undone with this one."""
        ...

    def note(self, text: str) -> None:
        """Say why nothing was changed, e.g. ``"mesh_dim 'tp' has one rank"``; shown by ``explain``."""
        ...


def goes_around(wrapper: Callable[..., Any]) -> bool:
    """Return whether a wrapper fits around any forward, because it runs the forward given.

    Its function says so by ``slapo_goes_around = True``; what computes something itself (a kernel) does not.
    """
    while isinstance(wrapper, functools.partial):
        wrapper = wrapper.func
    return getattr(wrapper, "slapo_goes_around", False) is True


@dataclass(frozen=True)
class Carried:
    """The hooks and wrappers of a module, in order, each active or not on this mesh.

    To be made before ``edit.replace_module``, and carried over after it::

        carried = Carried.of(node, new)
        edit.replace_module(node, new)
        carried.over(node, edit)
    """

    hooks: tuple[tuple[HookKind, Callable[..., Any], bool], ...]
    wrappers: tuple[tuple[Callable[[Forward], Forward], bool], ...]

    @classmethod
    def of(cls, node: Node, new: nn.Module, *, is_same: bool = False) -> Carried:
        """Collect the hooks and wrappers for calls of ``new``; none if it contains the old module.

        Args:
            node: the old module.
            new: what comes in its place.
            is_same: whether it computes the same from the same parameters, so that what steps wrapped around the
                forward fits whatever it does; otherwise only what goes around any forward (:func:`goes_around`).
        """
        if any(module is node.module for module in new.modules()):
            return cls((), ())
        active: tuple[Any, ...] = getattr(node.module.__dict__.get("forward"), "wrappers", ())
        wrappers = [wrapper for wrapper in node.wrappers if is_same or goes_around(wrapper)]
        return cls(tuple(_hooks(node)), tuple((each, any(each is other for other in active)) for each in wrappers))

    def over(self, node: Node, edit: Edit) -> None:
        """Add them to the current module at ``node``."""
        for kind, function, active in self.hooks:
            edit.add_hook(node, kind, function, active=active)
        for wrapper, active in self.wrappers:
            edit.wrap_forward(node, wrapper, active=active)


def runs_own_forward(node: Node) -> bool:
    """Return whether calls run the forward of the module's class.

    What steps wrapped and is not active on this mesh counts too: a schedule is refused on every mesh, or on none.
    """
    forward = node.module.__dict__.get("forward")
    is_set = forward is not None and getattr(forward, "has_own", True)
    return node.graph is None and not is_set and all(map(goes_around, node.wrappers))


def _hooks(node: Node) -> Iterator[tuple[HookKind, Callable[..., Any], bool]]:
    old = node.module
    for kind, table in hooks_of(old).items():
        of_steps = [function for one, function in node.hooks if one == kind]
        inactive = without(of_steps, list(table.values()))
        for identity, function in table.items():
            if any(function is one for one in of_steps):  # those in front of it stay in front of it
                ahead = of_steps[: next(index for index, one in enumerate(of_steps) if one is function)]
                yield from ((kind, one, False) for one in inactive if any(one is other for other in ahead))
                inactive = without(inactive, ahead)
            if kind in ("forward_pre", "forward"):
                has_kwargs = identity in getattr(old, HOOK_TABLES[kind][1])
                function = _with_kwargs(function, has_kwargs, 2 if kind == "forward_pre" else 3)
            yield kind, function, True
        yield from ((kind, function, False) for function in inactive)


def without(functions: Sequence[Callable[..., Any]], others: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """``functions``, each of ``others`` taken out once."""
    left = list(others)
    kept = []
    for function in functions:
        position = next((index for index, other in enumerate(left) if other is function), None)
        if position is None:
            kept.append(function)
        else:
            del left[position]
    return kept


def _with_kwargs(function: Callable[..., Any], has_kwargs: bool, position: int) -> Callable[..., Any]:
    if has_kwargs:
        return function

    def hook(module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
        result = function(module, args, *output)
        if result is None or position == 3:
            return result
        return (result if isinstance(result, tuple) else (result,)), kwargs

    return hook
