"""Which names a plugin may use: namespace ``x`` belongs to the distribution ``slapo-x``.

Anybody may use the namespace of a distribution that is not installed, except those of the project.
"""

from __future__ import annotations

import keyword
import re

__all__ = ["CORE_COMMANDS", "CORE_DISTRIBUTION", "FIRST_PARTY", "is_identifier", "owner_of", "split_name"]

CORE_DISTRIBUTION = "slapo-core"

FIRST_PARTY = (
    CORE_DISTRIBUTION,
    "slapo-deepspeed",
    "slapo-fusion",
    "slapo-megatron",
    "slapo-pipeline",
    "slapo-tp",
    "slapo-tune",
)
"""The project's own distributions that provide names: their namespaces are theirs, installed or not."""

CORE_COMMANDS = ("device", "dialects", "doctor", "estimate", "patterns", "plugins", "primitives", "stubs")

_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*\Z")


def owner_of(namespace: str) -> str:
    """The distribution that a namespace, or a name without one, belongs to: ``"slapo-tp"`` for ``"tp"``."""
    return CORE_DISTRIBUTION if namespace in ("slapo", "torch") else f"slapo-{namespace.replace('_', '-')}"


def is_identifier(text: str) -> bool:
    """Whether ``text`` is a lowercase identifier that can be written after a dot: ``"shard"``, ``"fork_rng"``."""
    return _IDENTIFIER.match(text) is not None and not keyword.iskeyword(text)


def split_name(name: str) -> tuple[str, str] | None:
    """``"tp.shard"`` as ``("tp", "shard")``; None if it is not ``<namespace>.<name>`` in lowercase identifiers."""
    namespace, dot, bare = name.partition(".")
    return (namespace, bare) if dot and is_identifier(namespace) and is_identifier(bare) else None
