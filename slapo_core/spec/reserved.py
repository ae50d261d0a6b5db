"""Which names a plugin may use: the shape of a name, and what is reserved.

Attribute access on a node (``sch["x"].shard(...)``) shares one space between the node's own members, the namespaces
(``sch["x"].tp``) and the bare names of primitives; a primitive never shadows the other two.
"""

from __future__ import annotations

import keyword
import re

__all__ = [
    "CORE_DISTRIBUTION",
    "FIRST_PARTY_NAMES",
    "FIRST_PARTY_NAMESPACES",
    "RESERVED_NAMES",
    "RESERVED_UNQUALIFIED",
    "canonical_distribution",
    "is_identifier",
    "split_name",
]

CORE_DISTRIBUTION = "slapo-core"

FIRST_PARTY_NAMESPACES: dict[str, tuple[str, ...]] = {
    "core": ("slapo-core",),
    "deepspeed": ("slapo-deepspeed",),
    "fusion": ("slapo-fusion",),
    "megatron": ("slapo-megatron",),
    "pipeline": ("slapo-pipeline",),
    "slapo": ("slapo-core",),
    "torch": ("slapo-core", "slapo-torch"),
    "tp": ("slapo-tp",),
}
"""Namespaces kept for the project's own distributions; the first one listed is named in remedies."""

RESERVED_UNQUALIFIED: dict[str, dict[str, tuple[str, ...]]] = {
    "dialects": {
        "deepspeed": ("slapo-deepspeed",),
        "megatron": ("slapo-megatron",),
        "torch": ("slapo-core",),
    },
}
"""For kinds without namespaces: names kept for the project's own distributions."""

FIRST_PARTY_NAMES: dict[str, dict[str, str]] = {
    "primitives": {
        "annotate": "slapo-core",
        "checkpoint": "slapo-core",
        "decompose": "slapo-fusion",
        "fork_rng": "slapo-tp",
        "fuse": "slapo-fusion",
        "pipeline_split": "slapo-pipeline",
        "replace": "slapo-core",
        "shard": "slapo-tp",
        "sync": "slapo-tp",
        "trace": "slapo-core",
    },
    "dialects": {
        "deepspeed": "slapo-deepspeed",
        "megatron": "slapo-megatron",
        "torch": "slapo-core",
    },
}
"""Bare names that the project's own distributions provide, to tell a user what to install when one is missing."""

RESERVED_NAMES: frozenset[str] = frozenset(
    {
        # members of a node
        "aliases",
        "apply",
        "buffers",
        "children",
        "find",
        "layout",
        "mesh",
        "module",
        "parameters",
        "parent",
        "path",
        "records",
        "records_so_far",
        "records_below",
        "schedule",
        "ties",
        "walk",
        # members of a group of nodes
        "nodes",
        "pattern",
        # members of a schedule
        "apply_at",
        "apply_each",
        "build",
        "copy",
        "document",
        "forget_target",
        "explain",
        "fingerprint",
        "group",
        "hooks",
        "is_sealed",
        "materialize",
        "model",
        "name",
        "node",
        "plugins",
        "primitive_named",
        "primitive_names",
        "rank",
        "registry",
        "removal_of",
        "replay",
        "rewound",
        "root",
        "save",
        "seal",
        "state_dict",
        "to_json",
        "undo",
        "unseal",
        "untouched",
        "verify",
        "world_size",
        *FIRST_PARTY_NAMESPACES,
    }
)
"""Bare names that no primitive may have: they would hide a member of a node or schedule, or a first-party namespace."""

_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*\Z")


def is_identifier(text: str) -> bool:
    """Whether ``text`` is a lowercase identifier that can be written after a dot: ``"shard"``, ``"fork_rng"``."""
    return _IDENTIFIER.match(text) is not None and not keyword.iskeyword(text)


def split_name(name: str) -> tuple[str, str] | None:
    """``"tp.shard"`` as ``("tp", "shard")``; None if it is not ``<namespace>.<name>`` in lowercase identifiers."""
    namespace, dot, bare = name.partition(".")
    return (namespace, bare) if dot and is_identifier(namespace) and is_identifier(bare) else None


def canonical_distribution(name: str) -> str:
    """A distribution's name as installers compare it: ``"Acme_Slapo"`` as ``"acme-slapo"``."""
    return re.sub(r"[-_.]+", "-", name).lower()
