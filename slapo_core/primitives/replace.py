"""``replace``: replace a module by another one, with every parameter accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ApplyError, place
from slapo_core.primitive import Equivalence, Primitive, Violation
from slapo_core.primitives.replacement import TensorPlan, lost_changes, set_mode, set_tensor, signature_mismatches
from slapo_core.tree.edit import Edit
from slapo_core.tree.node import Node

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.effects import Effect


@dataclass(frozen=True)
class Replace(Primitive):
    """Replace this module, or a match, by another module; weights, ties and hooks stay.

    Without a match, every parameter and buffer of the old module must be accounted for: the new module holds the same
    object, or has a tensor of the same name and shape (which then *becomes* the old one, so that real weights and ties
    stay), or it is renamed by ``params``, or given up by ``drop``.

    With a match, a function *is* the new computation: the graph calls it with the captures of the match, by its
    parameters' names, or else with the match's inputs in their order. A C function, e.g.
    ``F.scaled_dot_product_attention``, has no names of parameters: of a match with several inputs it is refused. A
    pattern's own replacement is taken by its name, ``replace("fusion.sdpa", matches)``; else a lambda passes the inputs
    in order. A module becomes a child of the traced one, and the graph calls it; the same object at every match, so
    that one with parameters can be in one traced module only. Modules inside the match keep their paths and parameters.
    Several outputs are a tuple, in the graph's order.

    Args:
        new_module: the new module, or a function ``fn(old) -> new`` that must not change the old one. A function at the
            top level of a module is saved by its name, and can be replayed; a lambda or a module cannot. With a match:
            a module, or a function that computes the same as the match; None takes the ``replacement`` of the pattern
            that ``match`` names.
        match: a match or a list of matches to replace, or a pattern, as for ``find``, of which every match is.
        params: ``{"old.name": "new.name"}``, relative to the module, for parameters and buffers whose name changes.
        drop: names of parameters and buffers of the old module that the new one does without. Their reference values
            stay in the state dict.
        rtol: the difference allowed in ``verify``, relative to the largest element; None means "the same function, up
            to the order of floating-point sums".
        atol: the absolute difference allowed in ``verify``.
        name: of the call in the printed graph, or of the new child; only with a match.

    Raises:
        PreconditionError: it is the root; the new forward cannot take the old one's arguments; a parameter is not
            accounted for; the module is in the model already. With a match: nothing matches; the replacement does
            not accept the match's arguments (a C function: in no order, or in several), or returns other numbers of
            values, shapes or types; hooks or steps of a swallowed module would be lost.
        ApplyError: the function raised or returned no module; the match cannot be taken out of the graph.
        StaleError: an earlier step changed the place of the match.

    rewrite:
        ``parent.child: Old(weight (m, n))`` -> ``parent.child: New(weight (m, n))``, ``weight`` the same object

        ``y = gelu(x + bias)`` -> ``y = new(x, bias)``

    Source: paper section 3.2.1, ``.replace(new_mod)``; section 3.3.1, ``.replace(new_mod, subgraph)``.
    """

    name = "core.replace"
    named_functions = ("new_module",)
    selections = ("match",)

    new_module: Any = None
    match: Any = None
    params: Any = ()
    drop: str | tuple[str, ...] = ()
    rtol: float | None = None
    atol: float | None = None
    name_: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.params, Mapping):
            object.__setattr__(self, "params", tuple(sorted(self.params.items())))
        if isinstance(self.drop, str):
            object.__setattr__(self, "drop", (self.drop,))
        if self.new_module is None and isinstance(self.match, str):
            object.__setattr__(self, "new_module", self.match)
        super().__post_init__()

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        if self.rtol is None and self.atol is None:
            return Equivalence.REORDERED
        return Equivalence.APPROXIMATE(self.rtol or 0.0, self.atol or 0.0)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        from torch import nn

        if self.match is not None:
            if self.drop:
                yield Violation(
                    "drop= is for replacing a module; replacing a match keeps every parameter", "leave it out"
                )
            yield from self.match.replacement_violations(
                node, self.new_module, params=dict(self.params), name=self.name_
            )
            return
        if self.name_ is not None:
            yield Violation("name= is for the replacement of a match", "leave it out: the path stays")
        if not node.path:
            yield Violation("the root of the model cannot be replaced", "replace its children one by one")
            return
        new = self.new_module
        if not isinstance(new, nn.Module) and not callable(new):
            yield Violation(
                f"new_module must be a module or a function of the old one (got {new!r})",
                "replace(MyAttention(config))",
            )
        elif isinstance(new, type):
            yield Violation(
                f"new_module is the class {new.__name__}, not a module",
                f"replace({new.__name__}(...)), or a function: replace(lambda old: {new.__name__}(...))",
            )
        elif isinstance(new, nn.Module):
            # A function runs only once, inside apply, where its result is checked by the same rules.
            yield from self._mismatches(node, new)

    def apply(self, node: Node, edit: Edit) -> None:
        from torch import nn

        if self.match is not None:
            self.match.replace(node, edit, self.new_module, params=dict(self.params), name=self.name_)
            return
        new = self.new_module
        old = node.module
        if not isinstance(new, nn.Module):
            new = new(old)
            if not isinstance(new, nn.Module):
                raise ApplyError(
                    f"the function given to replace at '{node.path}' must return a module (got {new!r})", path=node.path
                )
            violations = list(self._mismatches(node, new))
            if violations:
                text = "; ".join(str(violation) for violation in violations)
                raise ApplyError(f"the module made for '{node.path}' does not fit: {text}", path=node.path)
        plan = self._plan(node, new)
        edit.replace_module(node, new, moved=plan.moved, dropped=plan.dropped)
        for new_name, tensor in plan.taken.items():
            set_tensor(node, new_name, tensor, edit)
        if old.training != new.training:
            set_mode(node, edit, old.training)
        edit.note(plan.describe())

    def postconditions(self, node: Node) -> Iterator[Violation]:
        from torch import nn

        if self.match is None and isinstance(self.new_module, nn.Module) and node.module is not self.new_module:
            yield Violation("the module was not replaced")

    def effects(self, node: Node) -> Iterator[Effect]:
        from slapo_core.effects import Calls

        if self.match is None:
            yield Calls(node.path)
        else:
            yield from self.match.effects(node)

    def _mismatches(self, node: Node, new: nn.Module) -> Iterator[Violation]:
        old = node.module
        if new is old:
            yield Violation("the new module is the old one", "give another module, or remove this step")
            return
        root: Any = node
        while root.parent is not None:
            root = root.parent
        if any(module is new for module in root.module.modules()):
            yield Violation(
                "the new module is in the model already", "make a module of its own, e.g. copy.deepcopy(it)"
            )
            return
        above: Any = node.parent
        while above is not None:
            if any(module is above.module for module in new.modules()):
                yield Violation(f"the new module contains {place(above.path)}, which would contain it")
                return
            above = above.parent
        yield from lost_changes(node, new)
        yield from signature_mismatches(old, new)
        yield from self._plan(node, new).violations

    def _plan(self, node: Node, new: nn.Module) -> TensorPlan:
        return TensorPlan(node, new, dict(self.params), tuple(self.drop))
