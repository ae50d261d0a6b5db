"""The entry-point groups that core reads, what each must hold, and the names that plugins may use."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from typing import Literal

import slapo_core

GROUP_PREFIX = "slapo.v1."
CORE_DISTRIBUTION = "slapo-core"
FIRST_PARTY: tuple[str, ...] = slapo_core.DISTRIBUTIONS


@dataclass(frozen=True)
class Kind:
    """A kind of entry.

    Args:
        holds: what its objects must be: a subclass of ``base``, a function, a module; ``"text"`` is never imported.
        base: ``"module:Class"`` of a class.
        namespaced: whether names must be ``<namespace>.<name>``, of which ``<name>`` alone may be used.
    """

    holds: Literal["class", "function", "module", "text"] = "class"
    base: str = "builtins:object"
    namespaced: bool = False


KINDS: dict[str, Kind] = {
    "primitives": Kind(base="slapo_core.primitive:Primitive", namespaced=True),
    "dialects": Kind(base="slapo_core.dialect:Dialect"),
    "commands": Kind(base="slapo_core.cli.main:Command"),
    "queries": Kind("function"),  # of a node, nodes or a schedule; leave no record
    "selectors": Kind(base="slapo_core.primitive:Selector"),  # what users write for a part of a module
    "codecs": Kind(base="slapo_core.schedule.records:Codec"),  # values in saved schedules
    "guards": Kind(),  # of live models: told of each step
    "hooks": Kind("module"),
    "hookspecs": Kind("module"),  # further hooks, known before any hooks module is loaded
    "kinds": Kind("text"),  # further kinds, each with the base class of its objects
    "renamed": Kind("text"),  # former name of a primitive -> its name
}
"""The kinds of core; distributions declare others under ``slapo.v1.kinds``."""


def noun(kind: str) -> str:
    """A kind in the singular, for messages: ``"primitives"`` as ``"primitive"``."""
    if kind in ("hooks", "hookspecs"):
        return f"{kind} module"
    return "query" if kind == "queries" else kind.removesuffix("s")


_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*\Z")


def owner_of(namespace: str) -> str:
    """The distribution that a namespace belongs to: ``"slapo-tp"`` for ``"tp"``."""
    return CORE_DISTRIBUTION if namespace == "slapo" else f"slapo-{namespace.replace('_', '-')}"


def is_identifier(text: str) -> bool:
    """Whether ``text`` is a lowercase identifier that can be written after a dot: ``"shard"``, ``"fork_rng"``."""
    return _IDENTIFIER.match(text) is not None and not keyword.iskeyword(text)


def split_name(name: str) -> tuple[str, str] | None:
    """``"tp.shard"`` as ``("tp", "shard")``; None if it is not ``<namespace>.<name>`` in lowercase identifiers."""
    namespace, dot, bare = name.partition(".")
    return (namespace, bare) if dot and is_identifier(namespace) and is_identifier(bare) else None
