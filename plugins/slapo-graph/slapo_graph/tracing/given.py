"""Containers that a module fills while its call is one node: arguments, and values of context variables."""

from __future__ import annotations

import contextvars
import dataclasses
from collections import UserDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from slapo_graph.sizes import is_symbolic
from slapo_graph.structure import Opaque, children, concrete, is_plain, rebuild
from slapo_graph.tracing.recording import Recording

# Functions in graphs: contents of containers after a call, and context variables during a call.


def contents_after(result: Any, tokens: Any, *containers: Any) -> tuple[Any, ...]:
    """Return in a graph the contents of containers after a call, as tuples and dictionaries.

    Args:
        result: of the call, which runs before.
        tokens: of :class:`SetVariables`, whose variables are reset; None without variables.
        containers: that the call was given.
    """
    for variable, token in tokens or ():
        variable.reset(token)
    return tuple(_contents(container) for container in containers)


class SetVariables:
    """In a graph: set context variables for the next call, as the recorded code did.

    Args:
        variables: to set.
    """

    def __init__(self, variables: tuple[contextvars.ContextVar[Any], ...]) -> None:
        self.variables = variables
        self.__name__ = self.__qualname__ = "set_variables"
        self.__module__ = __name__

    def __call__(self, *values: Any) -> list[tuple[contextvars.ContextVar[Any], Any]]:
        return [(variable, variable.set(value)) for variable, value in zip(self.variables, values, strict=True)]

    def __deepcopy__(self, memo: Any) -> SetVariables:
        return self


class MakeDefaultDict:
    """In a graph: make a defaultdict of its parts.

    Args:
        cls: its class.
        factory: of missing values.
    """

    slapo_draws = False

    def __init__(self, cls: type[defaultdict[Any, Any]], factory: Callable[[], Any] | None) -> None:
        self.cls, self.factory = cls, factory
        self.__name__ = self.__qualname__ = cls.__name__
        self.__module__ = __name__

    def __call__(self, parts: Mapping[Any, Any]) -> defaultdict[Any, Any]:
        return self.cls(self.factory, parts)

    def __deepcopy__(self, memo: Any) -> MakeDefaultDict:
        return self


def sets_variables(graph: fx.Graph) -> bool:
    """Return whether a graph sets context variables, which a failure must reset."""
    return any(isinstance(node.target, SetVariables) for node in graph.nodes)


def _contents(container: Any) -> Any:
    if isinstance(container, list):
        return tuple(container)
    return {key: part for _, key, part in children(container) or ()}


# While recording.


class _Container:
    """A container among the arguments of a call.

    Args:
        value: of the recorded code.
        passed: the copy that the call gets.
        before: the parts of ``value`` before the call: kind of access, key, part.
        parts: of ``passed`` before the call.
    """

    def __init__(self, value: Any, passed: Any, before: list[tuple[str, Any, Any]], parts: list[Any]) -> None:
        self.value, self.passed, self.before, self.parts = value, passed, before, parts
        self.after: list[tuple[str, Any, Any]] = []
        self.node: Any = None
        self.holds_changed: bool | None = None

    def find_changes(self) -> bool:
        """Return whether the call has changed it."""
        self.after = list(children(self.passed) or ())
        is_same = len(self.after) == len(self.before) and all(
            key == old and part is own
            for (_, key, part), (_, old, _), own in zip(self.after, self.before, self.parts, strict=True)
        )
        return not is_same


class Given:
    """The arguments of a call that stays one node, and the containers among them.

    Args:
        recording: of the calling code.
        args: of the call.
        kwargs: likewise.
    """

    def __init__(self, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recording = recording
        self._containers: dict[int, _Container] = {}
        self.args: tuple[Any, ...] = tuple([self._hand_over(value) for value in args])
        self.kwargs: dict[str, Any] = {name: self._hand_over(value) for name, value in kwargs.items()}
        self._arguments = len(self._containers)
        present = contextvars.copy_context().items()
        self._variables = [(variable, value) for variable, value in present if _is_some(value)]
        for _, value in self._variables:
            self._hand_over(value)
        self._changed: list[_Container] = []
        self._are_set = False

    @property
    def has_variables(self) -> bool:
        """Return whether the recorded code set a context variable to a filled container."""
        return bool(self._variables)

    def is_changed(self) -> bool:
        """Return whether the call has changed a container."""
        self._changed = [container for container in self._containers.values() if container.find_changes()]
        return bool(self._changed)

    def before_call(self, out: Any) -> None:
        """Write the nodes of the changed containers, as they were before the call.

        Args:
            out: the result of the call.

        Raises:
            Untraceable: a container is of a class that a graph cannot make.
        """
        ambient = list(self._containers.values())[self._arguments :]
        known = set(map(id, _parts(out)))
        self._are_set = any(
            container in self._changed
            and not all(self._is_known(part, container, known) for _, _, part in container.after)
            for container in ambient
        )
        if not self._are_set:  # hooks note only values that the graph has anyway
            self._changed = [container for container in self._changed if container not in ambient]
        for container in self._containers.values():
            self._recording.forget(container.value)
        for container in self._changed:
            _put(container.value, container.before)
        for container in self._changed:
            self._write(container)
        for container in self._containers.values():
            self._write_holders(container)
        self._tokens = self._set() if self._are_set else None

    def after_call(self, node: fx.Node) -> None:
        """Write the new contents of the changed containers, and give them to the recorded code.

        Args:
            node: the call.
        """
        if not self._changed:
            return
        recording = self._recording
        contents = recording.compute(
            contents_after, (node, self._tokens, *[container.node for container in self._changed])
        )
        found = []
        for number, container in enumerate(self._changed):
            part = recording.take(contents, number)
            now = {key: each for _, key, each in container.after}
            own = {id(passed): each for passed, (_, _, each) in zip(container.parts, container.before, strict=True)}
            recording.register(snapshot := tuple(now.values()) if isinstance(container.value, list) else now, part)
            recording.guard_structure(snapshot, part)
            parts = []
            for how, key, each in container.after:
                if id(each) in own:
                    each = own[id(each)]
                elif not recording.is_known(each):
                    each = recording.give(each, recording.take(part, key))
                parts.append((how, key, each))
            found.append(snapshot)
            _put(container.value, parts)
        recording.register(tuple(found), contents)
        for container in self._containers.values():
            recording.forget(container.value)

    # ----------------------------------------------------------------------------------------------------------

    def _hand_over(self, value: Any) -> Any:
        """Return the value that the call gets: without symbolic numbers and opaque objects."""
        if isinstance(value, torch.Tensor) or is_symbolic(value) or type(value) is Opaque:
            return concrete(value)
        if id(value) in self._containers:
            return self._containers[id(value)].passed
        before = children(value)
        if before is None:
            return concrete(value)
        own = list(before)
        parts = [self._hand_over(part) for _, _, part in own]
        is_same = all(part is passed for (_, _, part), passed in zip(own, parts, strict=True))
        passed = value if is_same else rebuild(value, parts)
        self._containers[id(value)] = _Container(value, passed, own, parts)
        return passed

    def _is_known(self, part: Any, container: _Container, results: Collection[int]) -> bool:
        is_old = any(part is each for each in container.parts)
        return is_old or id(part) in results or is_plain(part) or self._recording.is_known(part)

    def _write(self, container: _Container) -> None:
        """Write the call that makes a container like one, with its parts."""
        if container.node is not None:
            return
        for _, _, part in container.before:  # inner ones first
            inner = self._containers.get(id(part))
            if inner is not None and inner in self._changed:
                self._write(inner)
        recording, value = self._recording, container.value
        if not all(is_plain(key) for _, key, _ in (*container.before, *container.after)):
            raise recording.refusal(f"calls a module that fills a {type(value).__name__} by keys that are objects")
        parts = {key: recording.node(part) for _, key, part in container.before}
        if isinstance(value, list):
            container.node = recording.compute(type(value), (list(parts.values()),))
        elif dataclasses.is_dataclass(value):
            container.node = recording.compute(type(value), (), parts)
        elif isinstance(value, dict | UserDict):
            container.node = recording.compute(_class_like(value), (parts,))
        else:
            raise recording.refusal(
                f"calls a module that changes the {type(value).__name__} that it is given",
                "give it a list, a dictionary or a dataclass",
            )
        recording.represent(value, container.node)

    def _write_holders(self, container: _Container) -> bool:
        """Rebuild a container that holds a changed one; return whether it is or holds one."""
        if container.holds_changed is None:
            inner = [self._containers[id(part)] for _, _, part in container.before if id(part) in self._containers]
            holds_changed = any(list(map(self._write_holders, inner)))
            container.holds_changed = holds_changed or container in self._changed
            if holds_changed and container.node is None:
                if type(container.value) in (list, tuple, dict):
                    parts = [self._recording.node(part) for _, _, part in container.before]
                    self._recording.represent(container.value, rebuild(container.value, parts))
                elif not isinstance(container.value, tuple):
                    self._write(container)
        return container.holds_changed

    def _set(self) -> fx.Node:
        variables, values = zip(*self._variables, strict=True)
        node: fx.Node = self._recording.compute(SetVariables(variables), tuple(map(self._recording.node, values)))
        return node


def _is_some(value: Any) -> bool:
    return isinstance(value, list | dict) and bool(value)


def _parts(value: Any) -> Iterator[Any]:
    yield value
    if not isinstance(value, torch.Tensor):
        for _, _, part in children(value) or ():
            yield from _parts(part)


def _put(value: Any, parts: list[tuple[str, Any, Any]]) -> None:
    """Let a container have these parts."""
    if isinstance(value, list):
        value[:] = [part for _, _, part in parts]
    elif isinstance(value, dict | UserDict):
        for key in [key for key in value if all(key != each for _, each, _ in parts)]:
            del value[key]
        for _, key, part in parts:
            value[key] = part
    else:
        for _, key, part in parts:
            setattr(value, key, part)


def _class_like(value: Mapping[Any, Any]) -> Callable[..., Any]:
    """Return a class or function that is called with the parts alone."""
    return MakeDefaultDict(type(value), value.default_factory) if isinstance(value, defaultdict) else type(value)
