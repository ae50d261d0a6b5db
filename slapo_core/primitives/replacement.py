"""Plan the tensors of a replacement module, and check its signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slapo_core.primitive import Violation
from slapo_core.private import full_backward_flag, hooks_of
from slapo_core.tree.assignment import hooks_of_user
from slapo_core.tree.edit import Edit
from slapo_core.tree.node import Node

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.layout import Layout


class TensorPlan:
    """Plan every tensor of the node's module: kept, renamed or dropped."""

    def __init__(self, node: Node, new: nn.Module, renamed: dict[str, str], drop: tuple[str, ...]) -> None:
        self._node = node
        self.old = named_tensors(node.module)
        self.new = named_tensors(new)
        self.renamed, self.drop = renamed, drop
        self.moved: dict[str, str] = {}  # old name -> new name, where they differ
        self.kept: list[str] = []  # the same object
        self.taken: dict[str, Any] = {}  # new name -> old tensor that takes the place
        self.dropped: list[str] = []
        self.violations: list[Violation] = []
        held = {id(tensor): name for name, tensor in self.new.items()}
        for name, tensor in self.old.items():
            self._account(name, tensor, held)
        takers: dict[int, str] = {}  # a tensor of the new module -> what takes its place
        for target, tensor in self.taken.items():
            first = takers.setdefault(id(self.new[target]), target)
            if self.taken[first] is not tensor:
                self.violations.append(
                    Violation(
                        f"'{first}' and '{target}' are one tensor in the new module, but two in the old one",
                        f'untie them, or write drop=["{target}"]',
                    )
                )
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
            unaccounted = f"'{name}' {tuple(tensor.shape)} of the old module has no counterpart in the new one"
            others = ", ".join(f"'{new}' {tuple(t.shape)}" for new, t in self.new.items()) or "no parameters"
            self.violations.append(
                Violation(
                    unaccounted,
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
        elif self._layout(name).is_sharded:
            self.violations.append(
                Violation(
                    f"'{name}' is a shard ({self._layout(name)}), and a new tensor of its shape fits on this mesh only",
                    "let the new module hold the same parameter, as in replace(lambda old: Wrapper(old)), "
                    f'write drop=["{name}"], or replace first and split then',
                )
            )
        else:
            self.taken[target] = tensor

    def _layout(self, name: str) -> Layout:
        path, _, own = name.rpartition(".")
        return (self._node[path] if path else self._node).layout(own)

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


def lost_changes(node: Node, new: nn.Module) -> Iterator[Violation]:
    """Yield a violation for each wrapped forward and hook below that a replacement would drop.

    Steps inactive on this mesh count too: a schedule refused on two ranks is refused on one.
    """
    staying = {id(module) for module in new.modules()}
    for name, module in node.module.named_modules():
        if id(module) in staying:
            continue
        below = node[name] if name else node
        place = ".".join(filter(None, (node.path, name)))
        by = f"by {' and '.join(map(str, below.records)) or 'a step at another module'}"
        changed = below.wrappers or "forward" in module.__dict__
        if changed and (name or not below.runs_own_forward):
            who = by if below.wrappers or below.forward_is_replaced else _OUTSIDE
            yield Violation(
                f"the forward of '{place}' was changed {who}, and that would be lost",
                "replace first, change then",
            )
        registered = [hook for hooks in hooks_of(module).values() for hook in hooks.values()]
        of_user = hooks_of_user(registered, [function for _, function in below.hooks])
        count = len(of_user) + len(below.hooks)
        if name and count:
            who = " and ".join([*([by] if below.hooks else []), *([_OUTSIDE] if of_user else [])])
            yield Violation(
                f"replacing '{node.path}' would drop hooks of '{place}' ({count} set {who})",
                "replace first, add hooks then",
            )
        kinds = {full_backward_flag(each) for each in (module, new) if not name and hooks_of(each)["full_backward"]}
        if len(kinds) > 1:
            yield Violation(
                f"'{place}' and the new module have backward hooks, one by the deprecated register_backward_hook: "
                "torch allows one kind",
                "use register_full_backward_hook",
            )


_OUTSIDE = "outside of the schedule"


def type_of(tensor: Any) -> str:
    """Return ``"parameter"`` or ``"buffer"``."""
    from torch import nn

    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def named_tensors(module: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by every name."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def signature_mismatches(old: nn.Module, new: nn.Module) -> Iterator[Violation]:
    """Yield a violation if the new forward cannot take arguments of the old one."""
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
    anything = len(wanted) < len(before.parameters)  # *args or **kwargs: what callers pass is not known
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
        if not optional and not anything and parameter.name not in names and position >= offered:
            lines.append(f"a required argument '{parameter.name}' that the caller does not pass")
    if lines:
        yield Violation(
            f"forward{after} of {type(new).__name__} does not take what forward{before} of {type(old).__name__} takes: "
            + "; ".join(lines),
            f"give it the signature forward{before}",
        )


def set_tensor(node: Node, name: str, tensor: Any, edit: Edit) -> None:
    """Set the parameter or buffer ``name``, at or below a node, to ``tensor``."""
    path, _, own = name.rpartition(".")
    holder = node[path] if path else node
    if own in holder.parameters:
        edit.set_parameter(holder, own, tensor)
    else:
        edit.set_buffer(holder, own, tensor)


def set_mode(node: Node, edit: Edit, training: bool) -> None:
    """Set training or evaluation mode of a module tree to that of its new place."""
    for below in node.walk():
        if below.module.training != training:
            edit.set_attribute(below, "training", training)
