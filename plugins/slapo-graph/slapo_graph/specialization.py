"""Specializations of a traced forward: the modules they were recorded with, and their code."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from torch import fx, nn

from slapo_core.internals import children_of, module_index, parameters_of
from slapo_graph import autocast_state
from slapo_graph.guards import BoundChecks, Checks
from slapo_graph.leaves import LeafRule, inlined_modules, is_changed
from slapo_graph.private import CHILDREN, FORWARDS, HOOKS, PARAMETERS, TENSOR_TABLES
from slapo_graph.protocol import Flag, Recorded
from slapo_graph.tracing.given import sets_variables


def graph_function(graph: fx.Graph) -> Callable[..., Any]:
    """Compile a graph to a function of its module and the placeholders, in order."""
    module = fx.GraphModule({}, fx.Graph())
    module.graph = graph  # code without copies of what the names stand for, which may be held by plain objects
    return type(module).forward


# `Structure`: the modules below a traced one that a graph assumes, found again quickly at every call.


class Structure:
    """Record the module structure that a graph assumes, without the modules.

    Args:
        root: the traced module.
        leaves: which modules below stay calls.
    """

    def __init__(self, root: nn.Module, leaves: LeafRule) -> None:
        inlined = inlined_modules(root, leaves)
        self.paths = tuple(inlined)
        index = {path: number for number, path in enumerate(inlined)}
        self._inlined = [
            (
                index[_parent(path)],
                _name(path),
                type(module),
                len(children_of(module)),
                module_index.around(module) if is_changed(module) else None,
            )
            for path, module in inlined.items()
            if path
        ]
        self._root = (type(root), len(children_of(root)))
        self._leaves = leaves
        self._below: list[tuple[int, str, str, tuple[type[nn.Module], bool] | None]] = []
        where = dict(index)
        for path, module in root.named_modules(remove_duplicate=False):
            if path not in where:
                where[path] = len(where)
                was = (type(module), is_changed(module)) if _parent(path) in index else None  # None: below a call
                self._below.append((where[_parent(path)], _name(path), path, was))
        self.index = index
        by_path = dict(root.named_modules(remove_duplicate=False))
        self._ties = _ties([by_path[path] for path in where])

    def modules_of(self, root: nn.Module) -> list[nn.Module] | None:
        """Return the inlined modules in the order of :attr:`paths`, then all others.

        None if they no longer fit: a module was added, removed or replaced, an inlined one was hooked or got
        another forward, or a called one would be inlined now.
        """
        found, children = [root], [children_of(root)]
        if self._root != (type(root), len(children[0])):
            return None
        for parent, name, cls, count, steps in self._inlined:
            module: Any = children[parent].get(name)
            if type(module) is not cls or len(below := children_of(module)) != count or _differs(module, steps):
                return None
            found.append(module)
            children.append(below)
        for parent, name, path, was in self._below:
            module = children[parent].get(name)
            if module is None:
                return None
            is_new = was is not None and (was[1] or type(module) is not was[0] or is_changed(module))
            if is_new and not self._leaves(module, path):
                return None  # it would be looked into now
            found.append(module)
            children.append(children_of(module))
        for (here, table, name), (there, other_table, other_name) in self._ties:
            one = found[here] if not table else found[here].__dict__[table].get(name)
            other = found[there] if not other_table else found[there].__dict__[other_table].get(other_name)
            if one is not other:
                return None
        return found

    def snapshot(self, modules: Sequence[nn.Module]) -> Snapshot | None:
        """Return a snapshot of the result of :meth:`modules_of`; None if a class computes an attribute that it
        compares.
        """
        classes = {type(module) for module in modules}
        if any(cls.__eq__ is not object.__eq__ or any(hasattr(cls, name) for name in _COMPARED) for cls in classes):
            return None
        inlined = [(modules[number], each[4]) for number, each in enumerate(self._inlined, 1)]
        return Snapshot(modules, inlined, [tie for tie in self._ties if tie[0][1]])


def _differs(module: nn.Module, steps: Any) -> bool:
    """Return whether the hooks and forward of a module changed."""
    if steps is None:
        return is_changed(module)
    return not is_changed(module) or module_index.around(module) != steps


def _ties(modules: list[nn.Module]) -> list[tuple[Any, Any]]:
    """Return pairs of places that hold the same module or tensor."""
    first: dict[int, Any] = {}
    found = []
    for number, module in enumerate(modules):
        places = [(id(module), (number, "", ""))]
        for table in TENSOR_TABLES:
            own = module.__dict__[table]
            places += [(id(own[name]), (number, table, name)) for name in own if own[name] is not None]
        for key, place in places:
            if first.setdefault(key, place) is not place:
                found.append((first[key], place))
    return found


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _name(path: str) -> str:
    return path.rpartition(".")[2]


# `Snapshot`: the modules of a structure as one call found them.

_COMPARED = ("training", CHILDREN, PARAMETERS)
_TRAINING, _CHILDREN, _PARAMETERS = map(itemgetter, _COMPARED)
_FORWARD, _COMPILED = map(repeat, FORWARDS)
_DTYPE, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")


class Snapshot:
    """Check quickly whether the recorded modules are unchanged, and return their modes.

    Tables are read at every call and compared with their former contents. The root is not kept, so that a copy of a
    model is freed with its last reference.

    Args:
        modules: the root, and the others.
        inlined: the inlined ones without the root, each with the hooks and wrappers of steps, or None.
        ties: pairs of places of one tensor.

    Attributes:
        calls: the variant to run, by modes and input signature.
        root: tells when it is freed.
    """

    root: weakref.ref[nn.Module]

    def __init__(
        self,
        modules: Sequence[nn.Module],
        inlined: Sequence[tuple[nn.Module, Any]],
        ties: Sequence[tuple[Any, Any]],
    ) -> None:
        self.calls: dict[Any, PreparedCall] = {}
        self._root, self._below = type(modules[0]), [module.__dict__ for module in modules[1:]]
        self._inlined = [module for module, _ in inlined]
        self._types = [*map(type, self._inlined)]
        self._bare = [module.__dict__ for module, steps in inlined if steps is None]
        self._stepped = [(module, steps) for module, steps in inlined if steps is not None]
        recorded = {id(module) for module in (modules[0], *self._inlined)}
        parents = [module for module in modules if id(module) in recorded or children_of(module)]
        self._parents = [module.__dict__ for module in parents[1:]]
        self._children = [dict(children_of(module)) for module in parents]
        self._holders = [module.__dict__ for module in modules[1:] if parameters_of(module)]
        self._others = [module.__dict__ for module in modules[1:] if not parameters_of(module)]
        self._has_unset = any(each is None for module in modules for each in parameters_of(module).values())
        self._ties = ties

    def modes(self, root: nn.Module) -> Any:
        """Return the modes of all modules and the dtypes of their parameters; None if the structure may differ."""
        own = root.__dict__
        if (
            type(root) is not self._root
            or [*map(_CHILDREN, (own, *self._parents))] != self._children
            or any(map(_PARAMETERS, self._others))
            or (self._inlined and self._differ())
            or (self._ties and not self._are_tied(own))
        ):
            return None
        tables = map(dict.values, map(_PARAMETERS, (own, *self._holders)))
        parameters = [*chain.from_iterable(tables)]
        if self._has_unset:
            parameters = [each for each in parameters if each is not None]
        try:
            dtypes, trained = tuple(map(_DTYPE, parameters)), tuple(map(_REQUIRES_GRAD, parameters))
        except AttributeError:  # of None: one was unset meanwhile
            return None
        return tuple(map(_TRAINING, (own, *self._below))), dtypes, trained

    def _differ(self) -> bool:
        """Return whether something else runs for a module whose code was recorded."""
        return (
            [*map(type, self._inlined)] != self._types
            or any(chain.from_iterable(map(HOOKS, self._bare)))
            or any(map(dict.__contains__, self._bare, _FORWARD))
            or any(map(dict.__contains__, self._bare, _COMPILED))
            or any(_differs(module, steps) for module, steps in self._stepped)
        )

    def _are_tied(self, own: dict[str, Any]) -> bool:
        owns = (own, *self._below)
        return all(
            owns[here][table].get(name) is owns[there][other_table].get(other_name)
            for (here, table, name), (there, other_table, other_name) in self._ties
        )


class PreparedCall(NamedTuple):
    """A variant prepared for calls of one input signature.

    Args:
        variant: the graph.
        arrange: see :meth:`slapo_graph.arguments.Parameters.arranging`.
        checks: the variant's, for these modules.
        no_longer_called: modules that the graph does not call any more.
        state: of gradients and autocast, where the graph switches them.
    """

    variant: Specialization
    arrange: Callable[..., Sequence[Any]] | None
    checks: BoundChecks
    no_longer_called: tuple[nn.Module, ...]
    state: autocast_state.State | None

    def holds(self, root: nn.Module) -> bool:
        """Return whether the graph is still valid for ``root``, in the modes of the call."""
        return (
            self.checks.hold(root)
            and (not self.no_longer_called or not any(map(is_changed, self.no_longer_called)))
            and (self.state is None or self.state == autocast_state.state())
        )


# `Specialization`: a recorded graph with the code that runs it.


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Specialization:
    """One graph of a traced module, as it runs.

    Args:
        recorded: the graph and what it holds for.
        structure: of the modules.
        surroundings: global names that the recorded code reads.
        no_longer_called: modules that rewrites removed from the graph.
    """

    def __init__(
        self,
        recorded: Recorded,
        structure: Structure,
        surroundings: tuple[Flag, ...] = (),
        no_longer_called: tuple[str, ...] = (),
    ) -> None:
        self.recorded, self.structure, self.surroundings = recorded, structure, surroundings
        self.no_longer_called = no_longer_called
        self.checks = Checks((*recorded.flags, *surroundings), structure.index)
        self.code = graph_function(recorded.graph)
        self._rewritten: dict[Any, Specialization] = {}
        self.used = 0  # when it was called last, as a number that grows
        self._sets_variables = sets_variables(recorded.graph)
        switches = any(node.target is autocast_state.set_state for node in recorded.graph.nodes)
        self.has_regions = switches or self._sets_variables

    def calls_of_steps(self) -> list[str]:
        """Return the names of the calls that rewrites put into the graph; a run makes each of them."""
        return [node.meta["step"] for node in self.recorded.graph.nodes if "step" in node.meta]

    def rewritten_alike(self, rewrite: Hashable, module: nn.Module) -> Specialization | None:
        """Return the rewritten specialization of an equal module, if known."""
        try:
            found = self._rewritten.get((rewrite, self._calls(module)))
        except TypeError:  # it holds a function that cannot be hashed
            found = None
        if found is None:
            return None
        modules = found.structure.modules_of(module)
        return found if modules is not None and found.checks.violated(modules) is None else None

    def keep_rewritten(self, rewrite: Hashable, module: nn.Module, made: Specialization) -> None:
        """Remember what a rewrite made of this variant, for modules that share it."""
        with contextlib.suppress(TypeError):
            self._rewritten[(rewrite, self._calls(module))] = made

    def _calls(self, module: nn.Module) -> tuple[Any, ...]:
        """Return class and hooks state of the modules that the graph calls."""
        calls = dict.fromkeys(str(node.target) for node in self.recorded.graph.nodes if node.op == "call_module")
        found = [module.get_submodule(path) for path in calls]
        return tuple((type(below), is_changed(below)) for below in found)

    def run(self, module: nn.Module, given: Sequence[Any]) -> Any:
        """Call it.

        Args:
            module: as the forward takes it first.
            given: one value for each parameter of the forward that is not left out.

        Raises:
            GuardViolation: the graph is not valid for this call.
        """
        if not self.has_regions:
            return self.code(module, *self.recorded.captured, *given)
        before = autocast_state.state()
        run = contextvars.copy_context().run if self._sets_variables else _called
        try:
            return run(self.code, module, *self.recorded.captured, *given)
        finally:
            autocast_state.set_state(*before)
