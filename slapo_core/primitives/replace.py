"""``replace``: another module in the place of one, with every parameter accounted for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ApplyError
from slapo_core.spec.edit import Edit
from slapo_core.spec.equivalence import Equivalence
from slapo_core.spec.node import Node
from slapo_core.spec.primitive import Primitive
from slapo_core.spec.violation import Violation

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Replace"]


@dataclass(frozen=True)
class Replace(Primitive):
    """Put another module in the place of this one; its weights, ties and hooks stay.

    Every parameter and buffer of the old module must be accounted for: the new module holds the same object, or has a
    tensor of the same name and shape (which then *becomes* the old one, so that real weights and ties stay), or it is
    renamed by ``params``, or given up by ``drop``.

    Args:
        new_module: the new module, or a function ``fn(old) -> new`` that must not change the old one.
        params: ``{"old.name": "new.name"}``, relative to the module, for parameters and buffers whose name changes.
        drop: names of parameters and buffers of the old module that the new one does without. Their untouched values
            are what a state dict will hold.
        rtol: the difference allowed in ``verify``, relative to the largest element; None means "the same function, up
            to the order of floating-point sums".
        atol: the absolute difference allowed in ``verify``.

    Raises:
        PreconditionError: it is the root; the new forward cannot take the old one's arguments; a parameter is not
            accounted for; the module is in the model already.
        ApplyError: the function raised or returned no module.

    rewrite:
        ``parent.child: Old(weight (m, n))`` -> ``parent.child: New(weight (m, n))``, ``weight`` the same object

    Source: paper section 3.2.1, ``.replace(new_mod)``.
    """

    name = "core.replace"

    new_module: Any
    params: Any = ()
    drop: str | tuple[str, ...] = ()
    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.params, Mapping):
            object.__setattr__(self, "params", tuple(sorted(self.params.items())))
        if isinstance(self.drop, str):
            object.__setattr__(self, "drop", (self.drop,))
        super().__post_init__()

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        if self.rtol is None and self.atol is None:
            return Equivalence.REORDERED
        return Equivalence.approximate(self.rtol or 0.0, self.atol or 0.0)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        from torch import nn

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
            # A function runs only once, inside apply: there its result is held against the same rules.
            yield from self._mismatches(node, new)

    def apply(self, node: Node, edit: Edit) -> None:
        from torch import nn

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
        plan = self._plan(old, new)
        edit.replace_module(node, new, moved=plan.moved)
        for new_name, tensor in plan.taken.items():
            holder, _, own_name = new_name.rpartition(".")
            target = node[holder] if holder else node
            if own_name in target.parameters:
                edit.set_parameter(target, own_name, tensor)
            else:
                edit.set_buffer(target, own_name, tensor)
        if old.training != new.training:
            _set_mode(node, edit, old.training)
        for kind, function, prepend in _hooks_to_carry(old, new):
            edit.add_hook(node, kind, function, prepend=prepend)
        edit.note(plan.describe())

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if isinstance(self.new_module, _module_class()) and node.module is not self.new_module:
            yield Violation("another module stands there")

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
        yield from _signature_mismatches(old, new)
        yield from self._plan(old, new).violations

    def _plan(self, old: nn.Module, new: nn.Module) -> _Plan:
        return _Plan(old, new, dict(self.params), tuple(self.drop))


class _Plan:
    """What becomes of every tensor of the old module."""

    def __init__(self, old: nn.Module, new: nn.Module, renamed: dict[str, str], drop: tuple[str, ...]) -> None:
        self.old = _named_tensors(old)
        self.new = _named_tensors(new)
        self.renamed, self.drop = renamed, drop
        self.moved: dict[str, str] = {}  # old name -> new name, where they differ
        self.kept: list[str] = []  # the same object
        self.taken: dict[str, Any] = {}  # new name -> old tensor that takes the place
        self.dropped: list[str] = []
        self.violations: list[Violation] = []
        held = {id(tensor): name for name, tensor in self.new.items()}
        for name, tensor in self.old.items():
            self._account(name, tensor, held)
        for name in [*renamed, *drop]:
            if name not in self.old:
                known = ", ".join(self.old) or "nothing"
                self.violations.append(Violation(f"the old module has no '{name}'", f"it has {known}"))
        reached = {*self.kept, *self.moved.values(), *self.taken}
        self.added = [name for name in self.new if name not in reached]

    def _account(self, name: str, tensor: Any, held: dict[int, str]) -> None:
        if name in self.drop:
            self.dropped.append(name)
            return
        target = self.renamed.get(name) or held.get(id(tensor)) or name
        if target not in self.new:
            buffer_lost = f"'{name}' {tuple(tensor.shape)} of the old module has no counterpart in the new one"
            others = ", ".join(f"'{new}' {tuple(t.shape)}" for new, t in self.new.items()) or "no parameters"
            self.violations.append(
                Violation(
                    buffer_lost,
                    f'write params={{"{name}": "its new name"}} or drop=["{name}"]; the new one has {others}',
                )
            )
            return
        there = self.new[target]
        if target != name:
            self.moved[name] = target
        if there is tensor:
            self.kept.append(target)
        elif there.shape != tensor.shape or type_of(there) != type_of(tensor):
            self.violations.append(
                Violation(
                    f"'{name}' is a {type_of(tensor)} of shape {tuple(tensor.shape)}, "
                    f"but '{target}' of the new module is a {type_of(there)} of shape {tuple(there.shape)}",
                    f'make them the same, or write drop=["{name}"] to give the old one up',
                )
            )
        else:
            self.taken[target] = tensor

    def describe(self) -> str:
        parts = []
        for label, names in (
            ("same objects", self.kept),
            ("taken over from the old module", list(self.taken)),
            ("dropped", self.dropped),
            ("added", self.added),
        ):
            if names:
                parts.append(f"{label}: {', '.join(names)}")
        if self.moved:
            parts.append("renamed: " + ", ".join(f"{old} -> {new}" for old, new in self.moved.items()))
        return "parameters " + "; ".join(parts) if parts else "no parameters on either side"


def type_of(tensor: Any) -> str:
    """``"parameter"`` or ``"buffer"``."""
    from torch import nn

    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _module_class() -> type[nn.Module]:
    from torch import nn

    return nn.Module


def _named_tensors(module: nn.Module) -> dict[str, Any]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _set_mode(node: Node, edit: Edit, training: bool) -> None:
    for below in _walk(node):
        if below.module.training != training:
            edit.set_attribute(below, "training", training)


def _walk(node: Node) -> Iterator[Node]:
    yield from node.walk()


def _hooks_to_carry(old: nn.Module, new: nn.Module) -> Iterator[tuple[Any, Callable[..., Any], bool]]:
    """Hooks on the old module that calls of the new one must still run; none where the old one lives on inside."""
    if any(module is old for module in new.modules()):
        return
    for identity, function in old._forward_pre_hooks.items():
        yield "forward_pre", _with_kwargs(function, identity in old._forward_pre_hooks_with_kwargs, 2), False
    for identity, function in old._forward_hooks.items():
        yield "forward", _with_kwargs(function, identity in old._forward_hooks_with_kwargs, 3), False
    for function in old._backward_pre_hooks.values():
        yield "full_backward_pre", function, False
    for function in old._backward_hooks.values():
        yield "full_backward", function, False


def _with_kwargs(function: Callable[..., Any], has_kwargs: bool, position: int) -> Callable[..., Any]:
    if has_kwargs:
        return function

    def hook(module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
        result = function(module, args, *output)
        if result is None or position == 3:
            return result
        return (result if isinstance(result, tuple) else (result,)), kwargs

    return hook


def _signature_mismatches(old: nn.Module, new: nn.Module) -> Iterator[Violation]:
    """Arguments that callers of the old forward may pass and the new one cannot take."""
    try:
        before, after = inspect.signature(old.forward), inspect.signature(new.forward)
    except (TypeError, ValueError):
        return  # a forward implemented in C has no signature to compare
    kinds = inspect.Parameter
    takes = list(after.parameters.values())
    any_positional = any(p.kind is kinds.VAR_POSITIONAL for p in takes)
    any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in takes)
    positional = [p for p in takes if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name for p in takes if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    wanted = [p for p in before.parameters.values() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    names = {parameter.name for parameter in wanted}
    lines: list[str] = []
    for index, parameter in enumerate(p for p in wanted if p.kind is not kinds.KEYWORD_ONLY):
        # Another name at the same place is fine, unless the two signatures permute their arguments.
        in_place = index < len(positional) and (
            positional[index].name == parameter.name
            or (parameter.name not in by_name and positional[index].name not in names)
        )
        if not (in_place or (any_positional and (parameter.name in by_name or any_keyword))):
            lines.append(f"argument {index + 1}, '{parameter.name}'")
    for parameter in wanted:
        if parameter.kind is kinds.KEYWORD_ONLY and parameter.name not in by_name and not any_keyword:
            lines.append(f"keyword argument '{parameter.name}'")
    offered = sum(p.kind is not kinds.KEYWORD_ONLY for p in wanted)
    for position, parameter in enumerate(takes):
        optional = parameter.default is not kinds.empty or parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if not optional and parameter.name not in names and position >= offered:
            lines.append(f"a required argument '{parameter.name}' that nobody passes")
    if lines:
        yield Violation(
            f"forward{after} of {type(new).__name__} does not take what forward{before} of {type(old).__name__} takes: "
            + "; ".join(lines),
            f"give it the signature forward{before}",
        )
