"""``replace`` with a match: call a function or a new child instead of the matched operations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core import Edit, Node
from slapo_core.internals import named_tensors, set_mode, set_tensor, type_of
from slapo_core.primitive import Violation
from slapo_graph.graph import graph_of
from slapo_graph.match import Match, by_place

if TYPE_CHECKING:
    from torch import nn


def changes_lost(place: Node, match: Match) -> Iterator[Violation]:
    """Refuse matches whose replacement would drop wrappers or hooks of steps."""
    inside = set(match.nodes)
    graph: Any = graph_of(place)
    called = [str(each.target) for each in graph.fx_graph.nodes if each.op == "call_module" and each.name in inside]
    for path in dict.fromkeys(called):
        for below in place[path].walk():
            if not (below.hooks or below.wrappers or below.forward_is_replaced):
                continue
            by = " and ".join(map(str, below.records)) or "a step at another module"
            yield Violation(
                f"{by} changed '{below.path}', a module that {match} calls; this replacement would drop the change",
                f"call replace() before that step, or choose a match that does not contain '{below.path}'",
            )


_KINDS = inspect.Parameter
_POSITIONAL = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class ReplacementArguments:
    """The arguments: names of captures, or numbers of inputs.

    Args:
        positional: in the order of the parameters.
        keywords: by name.
    """

    positional: tuple[str | int, ...] = ()
    keywords: tuple[tuple[str, str | int], ...] = ()


def arguments_for(function: Callable[..., Any], match: Match, *, shown: str) -> ReplacementArguments | Violation:
    """Map captures of ``match`` to parameters of ``function`` by name, else inputs by order.

    A parameter with a default gets the capture of its name, and else keeps its default.

    Args:
        function: the replacement; it has a signature.
        match: the source of inputs and captured constants.
        shown: the name of ``function``, for messages.
    """
    captures = names_given(match)
    parameters = list(inspect.signature(function).parameters.values())
    if captures and {each.name for each in parameters if _is_required(each)} <= set(captures):
        return _by_name(parameters, captures, shown)
    return _by_order(parameters, match, captures, shown)


def has_signature(function: Callable[..., Any]) -> bool:
    """Return whether a function's parameters are known; most of torch's C functions have no signature."""
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        return False
    return True


def names_given(match: Match) -> list[str]:
    """Return the names of captures that the match does not compute."""
    inner = set(match.nodes)
    return [name for name, value in match.captures.items() if value not in inner]


def _by_name(parameters: list[inspect.Parameter], captures: list[str], shown: str) -> ReplacementArguments | Violation:
    positional: list[str | int] = []
    keywords: list[tuple[str, str | int]] = []
    in_order = True  # until a default is kept
    taken = set()
    for each in parameters:
        if each.name not in captures or each.kind in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD):
            in_order = False
            continue
        if each.kind is _KINDS.POSITIONAL_ONLY and not in_order:
            return _mismatch(parameters, captures, shown)
        taken.add(each.name)
        if in_order and each.kind in _POSITIONAL:
            positional.append(each.name)
        else:
            keywords.append((each.name, each.name))
    left = [name for name in captures if name not in taken]
    if left and any(each.kind is _KINDS.VAR_KEYWORD for each in parameters):
        keywords += [(name, name) for name in left]
        left = []
    if left:
        return _mismatch(parameters, captures, shown)
    return ReplacementArguments(tuple(positional), tuple(keywords))


def _by_order(
    parameters: list[inspect.Parameter], match: Match, captures: list[str], shown: str
) -> ReplacementArguments | Violation:
    count = len(match.inputs)
    places = [each for each in parameters if each.kind in _POSITIONAL]
    required = [each for each in parameters if _is_required(each)]
    more = any(each.kind is _KINDS.VAR_POSITIONAL for each in parameters)
    by_keyword_only = [each for each in required if each.kind is _KINDS.KEYWORD_ONLY]
    names = captures or [f"input_{number}" for number in range(count)]
    fits = len(required) <= count and (count <= len(places) or more) and not by_keyword_only
    constants = [name for name in captures if isinstance(match.captures[name], tuple)]
    named = {match.captures[name]: name for name in captures if isinstance(match.captures[name], str)}
    # A parameter that is called like one input must not get another one.
    crossed = any(
        each.name in captures and named.get(value) != each.name
        for each, value in zip(places, match.inputs, strict=False)
    )
    if not fits or constants or crossed:
        return _mismatch(parameters, names, shown)
    return ReplacementArguments(tuple(range(count)))


def _mismatch(parameters: list[inspect.Parameter], names: list[str], shown: str) -> Violation:
    own = ", ".join(str(each.replace(annotation=_KINDS.empty)) for each in parameters)
    return Violation(
        f"{shown}({own}) does not accept the match's arguments: {', '.join(names) or 'nothing'}",
        f"give it the parameters ({', '.join(names)}); parameters with a default may be absent from the match",
    )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is _KINDS.empty and parameter.kind not in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD)


class MatchReplacement:
    """The planned replacement; made once for the checks and once for the edits.

    Args:
        node: where the primitive is applied.
        new: a function, a module, or the name of a plugin's pattern, for its replacement.
        matches: to be replaced.
        params: ``{"old.name": "new.name"}``: tensors of the traced module that the new module takes over.
        name: of the call, or of the new child; None derives it from ``new``.
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
        """Yield every reason against the replacement."""
        new = self.new
        if not callable(new) or isinstance(new, type):
            yield Violation(
                f"with a match, new_module is a function that computes the same, or a module (got {self.shown})",
                "replace(lambda x, bias: F.gelu(x + bias), match)",
            )
            return
        if self.name is not None and not self.name.isidentifier():
            yield Violation(f"name={self.name!r} is not an identifier", 'name="bias_gelu"')
        if _is_module(new):
            yield from self._module_violations(new)
        elif self.params:
            yield Violation(
                "params= is for the parameters of a new module, and new_module is a function", "leave out params="
            )
        yield from dict.fromkeys(self._match_violations())

    def _match_violations(self) -> Iterator[Violation]:
        for place, matches in self.places:
            for match in matches:
                yield from changes_lost(place, match)
                arguments = self._arguments(place, match)
                if isinstance(arguments, Violation):
                    yield arguments
                else:
                    yield from self._trial(place, match, arguments)

    def apply(self, edit: Edit) -> None:
        """Replace the matches."""
        new = self.new
        for place, matches in self.places:
            graph: Any = graph_of(place)
            target: Any = new
            name = self.name or _name_of(new, self.shown)
            if _is_module(new):
                name = self.name or _unused(place, name)
                child = edit.add_module(place, name, new)
                set_mode(child, edit, place.module.training)
                tensors = named_tensors(place.module)
                for old, own in self.params.items():
                    set_tensor(child, own, tensors[old], edit)
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
            edit.set_forward(place, graph)

    # ----------------------------------------------------------------------------------------------------------

    def _arguments(self, place: Node, match: Match) -> ReplacementArguments | Violation:
        function = self.new.forward if _is_module(self.new) else self.new
        if has_signature(function):
            return arguments_for(function, match, shown=self.shown)
        return self._in_order(match)

    def _in_order(self, match: Match) -> ReplacementArguments | Violation:
        """Return the one input of a match, for a function without a signature, or a refusal of several."""
        constants = [name for name in names_given(match) if isinstance(match.captures[name], tuple)]
        if len(match.inputs) < 2 and not constants:
            return ReplacementArguments(tuple(range(len(match.inputs))))
        named = {value: name for name, value in match.captures.items() if isinstance(value, str)}
        inputs = [named.get(value, f"input_{number}") for number, value in enumerate(match.inputs)]
        call = f"write lambda {', '.join((*inputs, *constants))}: {self.shown}(...)"
        name = match.pattern.name
        if name is None and self.shown == "scaled_dot_product_attention":
            call = f"find the attention by find('fusion.sdpa'), and replace('fusion.sdpa', matches); or {call}"
        return Violation(
            f"{self.shown} has no signature, and the match has several inputs: {', '.join((*inputs, *constants))}",
            call if name is None else f"replace(match={name!r}), with what the pattern brings along; or {call}",
        )

    def _groups(self, place: Node, matches: list[Match]) -> list[tuple[ReplacementArguments, list[Match]]]:
        groups: dict[ReplacementArguments, list[Match]] = {}
        for match in matches:
            arguments = self._arguments(place, match)
            assert isinstance(arguments, ReplacementArguments)  # or the preconditions had refused it
            groups.setdefault(arguments, []).append(match)
        return list(groups.items())

    def _trial(self, place: Node, match: Match, arguments: ReplacementArguments) -> Iterator[Violation]:
        from slapo_graph.rewriting.trial import mismatch

        graph: Any = graph_of(place)
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
            yield Violation(f"{self.shown} cannot replace {match}: {problem}", "it must return the match's outputs")

    def _results_only(self, place: Node) -> bool:
        return self.results_only and place.parent is not None  # the root's output is the model's result

    def _module_violations(self, new: nn.Module) -> Iterator[Violation]:
        root = self.places[0][0]
        while root.parent is not None:
            root = root.parent
        tensors = named_tensors(new)
        if tensors and any(module is new for module in root.module.modules()):
            yield Violation("the new module is in the model already", "make a new module for each traced module")
        if tensors and len(self.places) > 1:
            yield Violation(
                f"one module with tensors cannot be shared by {len(self.places)} modules at once",
                "give each its own: for node in group: node.replace(Fused(...), node.find(pattern))",
            )
        of_model = {id(tensor) for tensor in (*root.module.parameters(), *root.module.buffers())}
        for place, _ in self.places:
            if self.name is not None and hasattr(place.module, self.name):
                yield Violation(f"'{place.path}' has an attribute '{self.name}' already", "take another name=")
            yield from self._declaration_violations(place, tensors, of_model)

    def _declaration_violations(self, place: Node, own: dict[str, Any], of_model: set[int]) -> Iterator[Violation]:
        old = named_tensors(place.module)
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
                f"params= names {', '.join(map(repr, sorted(doubled)))} of the new module for several tensors",
                "parallel projections become one by merge()",
            )
        for name, tensor in own.items():
            if type_of(tensor) == "parameter" and id(tensor) not in of_model and name not in self.params.values():
                yield Violation(
                    f"'{name}' of the new module has no corresponding parameter of the model",
                    f'params={{"old.name": "{name}"}}, or give it the model\'s own parameter',
                )


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
