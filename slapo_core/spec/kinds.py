"""The kinds of things that a plugin can provide, and the base class of each.

A kind is the last part of an entry-point group: ``slapo.v1.<kind>``. The base class is given as
``"module:Class"`` so that naming a kind imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["API_MAJOR", "KINDS", "PLANNED_KINDS", "Kind"]

API_MAJOR = 1


@dataclass(frozen=True)
class Kind:
    """A kind of plugin object.

    Args:
        base: ``"module:Class"`` that the object must derive from; None for hooks, which are a module.
        namespaced: whether names must be ``<namespace>.<name>``.
        dotted: whether names may be ``<family>.<name>``, which is used as a whole: it has no short form.
    """

    base: str | None
    namespaced: bool
    dotted: bool = False


KINDS: dict[str, Kind] = {
    "primitives": Kind("slapo_core.spec.primitive:Primitive", namespaced=True),
    "dialects": Kind("slapo_core.spec.dialect:Dialect", namespaced=False),
    "compilers": Kind("slapo_core.spec.compiler:Compiler", namespaced=False),
    "patterns": Kind("slapo_core.spec.pattern:Pattern", namespaced=True),
    "samplers": Kind("slapo_core.spec.sampler:Sampler", namespaced=False, dotted=True),
    "tracers": Kind("slapo_core.spec.tracer:Tracer", namespaced=False),
    "commands": Kind("slapo_core.spec.command:Command", namespaced=False),
    "hooks": Kind(None, namespaced=False),
}

PLANNED_KINDS = ("templates",)
"""Names kept for kinds that this version does not use: what a plugin provides of them is told and left alone."""
