"""The kinds of things that a plugin can provide, and the base class of each.

A kind is the last part of an entry-point group: ``slapo.v1.<kind>``. The base class is given as
``"module:Class"`` so that naming a kind imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUP_PREFIX", "KINDS", "Kind", "noun"]

GROUP_PREFIX = "slapo.v1."


@dataclass(frozen=True)
class Kind:
    """A kind of plugin object.

    Args:
        base: ``"module:Class"`` that the object must derive from; None for hooks, which are a module.
        namespaced: whether names must be ``<namespace>.<name>``, of which ``<name>`` alone may be used; other names
            have no short form.
    """

    base: str | None
    namespaced: bool = False


KINDS: dict[str, Kind] = {
    "primitives": Kind("slapo_core.spec.primitive:Primitive", namespaced=True),
    "dialects": Kind("slapo_core.spec.dialect:Dialect"),
    "compilers": Kind("slapo_core.spec.compiler:Compiler"),
    "patterns": Kind("slapo_core.spec.pattern:Pattern", namespaced=True),
    "samplers": Kind("slapo_core.spec.sampler:Sampler"),
    "tracers": Kind("slapo_core.spec.tracer:Tracer"),
    "commands": Kind("slapo_core.spec.command:Command"),
    "hooks": Kind(None),
}


def noun(kind: str) -> str:
    """A kind in the singular, for messages: ``"primitives"`` as ``"primitive"``."""
    return "hooks module" if kind == "hooks" else kind.removesuffix("s")
