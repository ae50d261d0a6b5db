"""``node.shard("weight", axis=0)`` for ``node.apply(Shard("weight", axis=0))``, loaded when it is called."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError, SlapoError, Verbatim, place
from slapo_core.plugins.metadata import close_matches
from slapo_core.primitive import public_signature, shown

if TYPE_CHECKING:
    from slapo_core.plugins.registry import Registry
    from slapo_core.primitive import Primitive


@dataclass(frozen=True, repr=False)
class BoundPrimitive:
    """A primitive at one node (or group), to be called with its arguments.

    Naming it imports nothing; ``__signature__``, ``__doc__`` and the call load the plugin.
    """

    _registry: Registry
    _name: str
    _target: Any
    _where: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cls = self._class()
        signature = public_signature(cls)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), None)
            what = f"got an unexpected keyword argument '{unknown}'" if unknown is not None else error
            raise ArgumentError(
                f"{cls.name} at {place(self._where)}: {what}",
                path=self._where,
                hint=_corrected(cls, args, kwargs) or f"{cls.name.rpartition('.')[2]}{_plain(signature)}",
            ) from None
        return self._target.apply(_made(cls, args, kwargs))

    @property
    def __signature__(self) -> inspect.Signature:
        return public_signature(self._class())

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        cls = self._class()
        call = f"{cls.name.rpartition('.')[2]}{_plain(public_signature(cls))}"
        return f"{call}\n\n{inspect.getdoc(cls)}"

    @property
    def __name__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"<primitive {self._name} at '{self._where}'>"

    def _class(self) -> type[Primitive]:
        cls: type[Primitive] = self._registry.load(self._name, "primitives")
        return cls


@dataclass(frozen=True, repr=False)
class Namespace:
    """``node.tp``: the primitives of one namespace."""

    _registry: Registry
    _namespace: str
    _target: Any
    _where: str

    def __getattr__(self, name: str) -> BoundPrimitive:
        if name.startswith("_"):
            raise AttributeError(name)
        entry = self._registry.resolve("primitives", f"{self._namespace}.{name}", path=self._where)
        return BoundPrimitive(self._registry, entry.name, self._target, self._where)

    def __dir__(self) -> list[str]:
        prefix = f"{self._namespace}."
        return [name.removeprefix(prefix) for name in self._registry.names("primitives") if name.startswith(prefix)]

    def __repr__(self) -> str:
        return f"<primitives of namespace '{self._namespace}'>"


def bound_query(schedule: Any, name: str, target: Any, where: str) -> Any:
    """Look up ``target.<name>``, a query.

    The name of its first parameter decides its receiver: ``schedule``, one ``node``, or several ``nodes``. A query
    without further parameters is read like an attribute, the others are called.

    Args:
        schedule: which the nodes belong to.
        name: the attribute asked for.
        target: the node or group.
        where: its path or pattern, for messages.

    Raises:
        PluginError: the distribution cannot be used.
    """
    query = schedule._core.registry.load(name, "queries")
    nodes = tuple(getattr(target, "nodes", (target,)))
    first, *rest = inspect.signature(query).parameters
    if first == "node" and len(nodes) != 1:
        raise ArgumentError(f"'{name}' takes one node; '{where}' is a group", hint=f"[each.{name} for each in group]")
    bound = functools.partial(query, {"schedule": schedule, "nodes": nodes}.get(first, nodes[0] if nodes else None))
    return functools.update_wrapper(bound, query) if rest else bound()


def bound_primitive(registry: Registry, name: str, target: Any, where: str) -> BoundPrimitive | Namespace:
    """Look up ``target.<name>``: a primitive by its bare name, or a namespace.

    Args:
        registry: where names are looked up.
        name: the attribute asked for.
        target: the node or group to apply to.
        where: its path or pattern, for messages.

    Raises:
        UnknownNameError: neither; close matches and the distribution that would provide it are named.
        UnusablePluginError: its plugin cannot be used, or two plugins provide that bare name.
    """
    if name in registry.namespaces() and name not in registry.bare_names("primitives"):
        return Namespace(registry, name, target, where)
    entry = registry.resolve("primitives", name, path=where)
    return BoundPrimitive(registry, entry.name, target, where)


def _made(cls: type[Primitive], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Primitive:
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(*args, **{f"{name}_" if f"{name}_" in fields else name: value for name, value in kwargs.items()})


_SYNONYMS = {
    "dim": "axis",
    "new_mod": "new_module",
    "param_name": "names",
    "subgraph": "match",
    "sync_op_or_fn": "op",
    "type": "mode",
}
"""Keywords of torch and of the paper -> keywords of primitives, for hints."""


def _corrected(cls: type[Primitive], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the corrected call, with its next problem if there is one; None for unknown keywords."""
    signature, named = public_signature(cls), dict[str, Any]()
    for name, value in kwargs.items():
        free = sorted(signature.parameters.keys() - kwargs.keys() - named.keys())
        candidates = [name] if name in signature.parameters else [_SYNONYMS.get(name), *close_matches(name, free)]
        meant = next((each for each in candidates if each in signature.parameters), None)
        if meant is None:
            return None
        named[meant] = value
    try:
        signature.bind(*args, **named)
    except TypeError:
        return None
    given = [*map(shown, args), *(f"{name}={shown(value)}" for name, value in named.items())]
    call = f"{cls.name.rpartition('.')[2]}({', '.join(given)})"
    try:
        _made(cls, args, named)
    except SlapoError as error:
        return f"{call}, where {error.message}"
    return call


def _plain(signature: inspect.Signature) -> str:
    """Format a signature without return annotation and quotes."""
    parameters = [
        parameter.replace(annotation=Verbatim(parameter.annotation))
        if isinstance(parameter.annotation, str)
        else parameter
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
