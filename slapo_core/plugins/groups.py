"""The entry-point groups of plugins, the base class of each, and the names that plugins may use."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass

__all__ = [
    "CORE_COMMANDS",
    "CORE_DISTRIBUTION",
    "FIRST_PARTY",
    "GROUP_PREFIX",
    "KINDS",
    "Kind",
    "is_identifier",
    "noun",
    "owner_of",
    "split_name",
]


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
    "primitives": Kind("slapo_core.primitive:Primitive", namespaced=True),
    "dialects": Kind("slapo_core.dialect:Dialect"),
    "compilers": Kind("slapo_fusion.compilers:Compiler"),
    "patterns": Kind("slapo_graph.match:Pattern", namespaced=True),
    "samplers": Kind("slapo_tune.sampler:Sampler"),
    "tracers": Kind("slapo_graph.protocol:Tracer"),
    "commands": Kind("slapo_core.cli.main:Command"),
    "guards": Kind("builtins:object"),
    "hooks": Kind(None),
}


def noun(kind: str) -> str:
    """A kind in the singular, for messages: ``"primitives"`` as ``"primitive"``."""
    return "hooks module" if kind == "hooks" else kind.removesuffix("s")


CORE_DISTRIBUTION = "slapo-core"

FIRST_PARTY = (
    CORE_DISTRIBUTION,
    "slapo-deepspeed",
    "slapo-estimate",
    "slapo-fusion",
    "slapo-graph",
    "slapo-megatron",
    "slapo-pipeline",
    "slapo-runtime",
    "slapo-tp",
    "slapo-tune",
)
"""The project's own distributions that provide names: their namespaces are theirs, installed or not."""

CORE_COMMANDS = ("dialects", "doctor", "patterns", "plugins", "primitives", "stubs")

_OWNERS = {
    "device": "slapo-estimate",
    "live": "slapo-runtime",
    "record": "slapo-graph",
    "slapo": CORE_DISTRIBUTION,
    "torch": "slapo-runtime",
}

_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*\Z")


def owner_of(namespace: str) -> str:
    """The distribution that a namespace, or a name without one, belongs to: ``"slapo-tp"`` for ``"tp"``."""
    return _OWNERS.get(namespace, f"slapo-{namespace.replace('_', '-')}")


def is_identifier(text: str) -> bool:
    """Whether ``text`` is a lowercase identifier that can be written after a dot: ``"shard"``, ``"fork_rng"``."""
    return _IDENTIFIER.match(text) is not None and not keyword.iskeyword(text)


def split_name(name: str) -> tuple[str, str] | None:
    """``"tp.shard"`` as ``("tp", "shard")``; None if it is not ``<namespace>.<name>`` in lowercase identifiers."""
    namespace, dot, bare = name.partition(".")
    return (namespace, bare) if dot and is_identifier(namespace) and is_identifier(bare) else None
