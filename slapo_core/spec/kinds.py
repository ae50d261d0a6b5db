"""The kinds of things that a plugin can provide, and the base class of each.

A kind is the last part of an entry-point group: ``slapo.v1.<kind>``. The base class is given as
``"module:Class"`` so that naming a kind imports nothing; None means that any object is accepted for now.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["API_MAJOR", "KINDS", "SUPPORTED_API_MAJORS", "Kind", "group_name"]

API_MAJOR = 1
SUPPORTED_API_MAJORS = (1,)


@dataclass(frozen=True)
class Kind:
    """A kind of plugin object.

    Args:
        name: plural, the last part of the group name, e.g. ``"primitives"``.
        base: ``"module:Class"`` that the object must derive from; None where the entry point is checked otherwise.
        namespaced: whether names must be ``<namespace>.<name>``.
        description: one line for ``slapo plugins show``.
    """

    name: str
    base: str | None
    namespaced: bool
    description: str


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("primitives", "slapo_core.spec.primitive:Primitive", True, "steps of a schedule"),
        Kind("dialects", "slapo_core.spec.dialect:Dialect", False, "runtimes that train a scheduled model"),
        Kind("hooks", None, False, "a module of @hookimpl functions, at most one a distribution"),
        Kind("tracers", "slapo_core.spec.tracer:Tracer", False, "ways to get a static graph of a module"),
        Kind("compilers", "slapo_core.spec.compiler:Compiler", False, "ways to compile a subgraph"),
        Kind("templates", "slapo_core.spec.template:Template", False, "schedules for model families"),
        Kind("samplers", "slapo_core.spec.sampler:Sampler", False, "search strategies of the tuner"),
    )
}


def group_name(kind: str, *, major: int = API_MAJOR) -> str:
    """The entry-point group of a kind: ``group_name("primitives") == "slapo.v1.primitives"``."""
    return f"slapo.v{major}.{kind}"
