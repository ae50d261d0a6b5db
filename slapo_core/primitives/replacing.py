"""``replace`` with a match: a call of a function or of a new child in the place of what the match computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slapo_core.primitives.at_matches import changes_swallowed
from slapo_core.primitives.calling import Arguments, arguments_for, has_signature, names_given
from slapo_core.primitives.fitting import type_of
from slapo_core.primitives.modes import set_mode
from slapo_core.spec.edit import Edit
from slapo_core.spec.graph import Match, by_place
from slapo_core.spec.node import Node
from slapo_core.spec.primitive import Violation

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MatchReplacement"]


class MatchReplacement:
    """What is to be done; made once for the checks and once for the edits.

    Args:
        node: where the primitive is applied.
        new: a function or a module, or the name of a pattern of a plugin, whose replacement is taken.
        matches: where it comes.
        params: ``{"old.name": "new.name"}``: tensors below the traced module that become the new module's.
        name: of the call, or of the new child; None takes one from ``new``.
    """

    def __init__(
        self,
        node: Node,
        new: Any,
        matches: tuple[Match, ...],
        params: dict[str, str],
        name: str | None,
    ):
        pattern: Any = node.plugin("patterns", new) if isinstance(new, str) else None
        self.new: Any = new if pattern is None else getattr(pattern.replacement, "__func__", pattern.replacement)
        self.results_only = pattern is not None and pattern.results_only
        self.shown = new if isinstance(new, str) else _shown(new)
        self.places = by_place(node, matches)
        self.params, self.name = params, name

    def violations(self) -> Iterator[Violation]:
        """Everything that speaks against it."""
        new = self.new
        if not callable(new) or isinstance(new, type):
            yield Violation(
                f"with a match, new_module is a function that computes the same, or a module (got {self.shown})",
                "replace(lambda x, bias: F.gelu(x + bias), match)",
            )
            return
        if self.name is not None and not self.name.isidentifier():
            yield Violation(f"name={self.name!r} is no name", 'name="bias_gelu"')
        if _is_module(new):
            yield from self._module_violations(new)
        elif self.params:
            yield Violation("params= is for the parameters of a new module, and a function has none", "leave it out")
        yield from dict.fromkeys(self._match_violations())

    def _match_violations(self) -> Iterator[Violation]:
        for place, matches in self.places:
            for match in matches:
                yield from changes_swallowed(place, match)
                arguments = self._arguments(place, match)
                if isinstance(arguments, Violation):
                    yield arguments
                else:
                    yield from self._trial(place, match, arguments)

    def apply(self, edit: Edit) -> None:
        """Do it."""
        new = self.new
        for place, matches in self.places:
            graph: Any = place.graph
            target: Any = new
            name = self.name or _name_of(new, self.shown)
            if _is_module(new):
                name = self.name or _unused(place, name)
                child = edit.add_module(place, name, new)
                set_mode(child, edit, place.module.training)
                for old, own in self.params.items():
                    self._tie(place, child, old, own, edit)
                target = name
            for arguments, members in self._groups(place, matches):
                graph = graph.replaced(
                    place.module,
                    members,
                    target,
                    arguments=arguments.positional,
                    keywords=dict(arguments.keywords),
                    name=name,
                    results_only=self._results_only(place),
                )
            edit.set_graph(place, graph)

    # ----------------------------------------------------------------------------------------------------------

    def _arguments(self, place: Node, match: Match) -> Arguments | Violation:
        function = self.new.forward if _is_module(self.new) else self.new
        if has_signature(function):
            return arguments_for(function, match, shown=self.shown)
        return self._in_order(match)

    def _in_order(self, match: Match) -> Arguments | Violation:
        """The one input of a match, for a function without a signature; the order of several is not known."""
        constants = [name for name in names_given(match) if isinstance(match.captures[name], tuple)]
        if len(match.inputs) < 2 and not constants:
            return Arguments(tuple(range(len(match.inputs))))
        named = {value: name for name, value in match.captures.items() if isinstance(value, str)}
        inputs = [named.get(value, f"input_{number}") for number, value in enumerate(match.inputs)]
        call = f"write lambda {', '.join((*inputs, *constants))}: {self.shown}(...)"
        name = match.pattern.name
        return Violation(
            f"{self.shown} has no signature, and the match has several inputs: {', '.join((*inputs, *constants))}",
            call if name is None else f"replace(match={name!r}), with what the pattern brings along; or {call}",
        )

    def _groups(self, place: Node, matches: list[Match]) -> list[tuple[Arguments, list[Match]]]:
        groups: dict[Arguments, list[Match]] = {}
        for match in matches:
            arguments = self._arguments(place, match)
            assert isinstance(arguments, Arguments)  # or the preconditions had refused it
            groups.setdefault(arguments, []).append(match)
        return list(groups.items())

    def _trial(self, place: Node, match: Match, arguments: Arguments) -> Iterator[Violation]:
        from slapo_core.graph.rewriting.trial import mismatch

        graph: Any = place.graph
        problem = mismatch(
            graph.first.recorded,
            place.module,
            match,
            self.new,
            arguments.positional,
            dict(arguments.keywords),
            results_only=self._results_only(place),
        )
        if problem is not None:
            yield Violation(f"{self.shown} cannot stand for {match}: {problem}", "it must give what the match gives")

    def _results_only(self, place: Node) -> bool:
        return self.results_only and place.parent is not None  # what the root gives out is the model's result

    def _module_violations(self, new: nn.Module) -> Iterator[Violation]:
        root = self.places[0][0]
        while root.parent is not None:
            root = root.parent
        tensors = [*new.named_parameters(remove_duplicate=False), *new.named_buffers(remove_duplicate=False)]
        if tensors and any(module is new for module in root.module.modules()):
            yield Violation("the new module is in the model already", "make one of its own for each traced module")
        if tensors and len(self.places) > 1:
            yield Violation(
                f"one module with tensors cannot stand in {len(self.places)} modules at once",
                "give each its own: for node in group: node.replace(Fused(...), node.find(pattern))",
            )
        of_model = {id(tensor) for tensor in (*root.module.parameters(), *root.module.buffers())}
        for place, _ in self.places:
            if self.name is not None and hasattr(place.module, self.name):
                yield Violation(f"'{place.path}' has an attribute '{self.name}' already", "take another name=")
            yield from self._declaration_violations(place, dict(tensors), of_model)

    def _declaration_violations(self, place: Node, own: dict[str, Any], of_model: set[int]) -> Iterator[Violation]:
        module = place.module
        old = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        for before, after in self.params.items():
            if before not in old:
                yield Violation(f"'{place.path}' has no tensor '{before}'", f"it has {', '.join(old) or 'none'}")
            elif after not in own:
                yield Violation(f"the new module has no tensor '{after}'", f"it has {', '.join(own) or 'none'}")
            elif old[before].shape != own[after].shape or type_of(old[before]) != type_of(own[after]):
                yield Violation(
                    f"'{before}' is a {type_of(old[before])} of shape {tuple(old[before].shape)}, and '{after}' of the "
                    f"new module a {type_of(own[after])} of shape {tuple(own[after].shape)}",
                    "make them the same; several projections become one by merge()",
                )
        doubled = [after for after in set(self.params.values()) if list(self.params.values()).count(after) > 1]
        if doubled:
            yield Violation(
                f"{', '.join(map(repr, sorted(doubled)))} of the new module is to be several tensors at once",
                "parallel projections become one by merge()",
            )
        for name, tensor in own.items():
            if type_of(tensor) == "parameter" and id(tensor) not in of_model and name not in self.params.values():
                yield Violation(
                    f"'{name}' of the new module is no parameter of the model, and nothing says for which it stands",
                    f'params={{"old.name": "{name}"}}, or give it the model\'s own parameter',
                )

    def _tie(self, place: Node, child: Node, old: str, own: str, edit: Edit) -> None:
        def holder(node: Node, name: str) -> tuple[Node, str]:
            path, _, last = name.rpartition(".")
            return (node[path] if path else node), last

        old_node, old_name = holder(place, old)
        new_node, new_name = holder(child, own)
        if old_name in old_node.parameters:
            edit.set_parameter(new_node, new_name, old_node.parameters[old_name])
        else:
            edit.set_buffer(new_node, new_name, old_node.buffers[old_name])


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _shown(new: Any) -> str:
    if isinstance(new, type):
        return f"the class {new.__name__}"
    name = getattr(new, "__name__", None) or type(new).__name__
    return "the lambda" if name == "<lambda>" else str(name)


def _name_of(new: Any, shown: str) -> str:
    name = shown.rpartition(".")[2] if _is_module(new) or shown.replace(".", "").isidentifier() else "replaced"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _unused(place: Node, name: str) -> str:
    number, found = 1, name
    while hasattr(place.module, found):
        number += 1
        found = f"{name}_{number}"
    return found
