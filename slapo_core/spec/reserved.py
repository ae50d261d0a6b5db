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
    "PLANNED_PRIMITIVES",
    "RESERVED_COMMANDS",
    "RESERVED_DIALECTS",
    "RESERVED_NAMES",
    "RESERVED_NAMESPACES",
    "RESERVED_SAMPLERS",
    "RESERVED_TRACERS",
    "is_identifier",
    "split_name",
]

CORE_DISTRIBUTION = "slapo-core"

RESERVED_NAMESPACES: dict[str, str] = {
    "core": "slapo-core",
    "deepspeed": "slapo-deepspeed",
    "fusion": "slapo-fusion",
    "megatron": "slapo-megatron",
    "pipeline": "slapo-pipeline",
    "slapo": "slapo-core",
    "torch": "slapo-core",
    "tp": "slapo-tp",
    "tune": "slapo-tune",
}
"""Namespaces kept for the project's own distributions, whether or not this version has them."""

RESERVED_DIALECTS: dict[str, str] = {
    "deepspeed": "slapo-deepspeed",
    "megatron": "slapo-megatron",
    "torch": "slapo-core",
}
"""Names of dialects kept for the project's own distributions, whether or not this version has them."""

RESERVED_COMMANDS: dict[str, str] = {
    **RESERVED_NAMESPACES,
    **dict.fromkeys(
        (
            "build",
            "check",
            "device",
            "dialects",
            "doctor",
            "estimate",
            "help",
            "patterns",
            "plugins",
            "primitives",
            "replay",
            "stubs",
            "verify",
        ),
        "slapo-core",
    ),
}
"""Names of commands kept for the project's own distributions: ``slapo plugins``, ``slapo pipeline``."""

RESERVED_TRACERS: dict[str, str] = dict.fromkeys(("export", "fx", "record"), "slapo-core")
"""Names of tracers kept for the project's own distributions."""

RESERVED_SAMPLERS: dict[str, str] = dict.fromkeys(
    ("coordinate", "exhaustive", "frontier", "optuna", "random"), "slapo-tune"
)
"""Names and families of samplers kept for the project's own distributions."""

FIRST_PARTY_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "slapo-core": {
        "primitives": ("annotate", "checkpoint", "merge", "replace", "trace"),
        "dialects": ("torch",),
        "tracers": ("record",),
    },
    "slapo-deepspeed": {"dialects": ("deepspeed",)},
    "slapo-fusion": {
        "primitives": ("bind", "compile", "cudagraphify", "decompose", "fuse", "quantize"),
        "compilers": ("aot_eager", "eager", "inductor", "torchscript"),
        "patterns": (
            "bias_dropout_add_norm",
            "bias_gelu",
            "gelu",
            "gelu_tanh",
            "qkv",
            "rms_norm",
            "rotary",
            "sdpa",
            "swiglu",
            "swiglu_projections",
        ),
    },
    "slapo-megatron": {"dialects": ("megatron",)},
    "slapo-pipeline": {"primitives": ("pipeline_split",), "commands": ("pipeline",)},
    "slapo-tp": {"primitives": ("fork_rng", "shard", "shard_attribute", "sync", "sync_gradient")},
    "slapo-tune": {
        "commands": ("tune",),
        "samplers": ("coordinate", "exhaustive", "frontier", "optuna.random", "optuna.tpe", "random"),
    },
}
"""The project's own distributions of this version and the bare names they provide, to tell a user what to install."""

PLANNED_PRIMITIVES: tuple[str, ...] = ()
"""Bare names that the project's own distributions do not provide yet."""

RESERVED_NAMES: frozenset[str] = frozenset(
    {
        # members of a node
        "aliases",
        "apply",
        "buffers",
        "changed_attributes",
        "children",
        "example_call",
        "example_calls",
        "find",
        "graph",
        "is_traced",
        "layout",
        "mesh",
        "module",
        "parameters",
        "parent",
        "path",
        "records",
        "records_below",
        "records_so_far",
        "ties",
        "walk",
        "wrappers",
        # members of a group of nodes
        "nodes",
        "pattern",
        # members of a schedule
        "apply_at",
        "apply_each",
        "document",
        "entries",
        "estimate",
        "estimates",
        "example_call_of",
        "example_calls_of",
        "example_inputs",
        "explain",
        "find_at",
        "fit",
        "forget_target",
        "hooks",
        "is_sealed",
        "is_verified",
        "kept",
        "mark_verified",
        "model",
        "name",
        "plugin",
        "plugin_named",
        "plugins",
        "prefer",
        "primitive_named",
        "primitive_names",
        "registry",
        "removal_of",
        "rewound",
        "root",
        "seal",
        "settled",
        "to_json",
        "tree",
        "undo",
        "untouched",
        # kept for members to come
        "build",
        "copy",
        "fingerprint",
        "group",
        "materialize",
        "node",
        "rank",
        "replay",
        "save",
        "schedule",
        "state_dict",
        "verify",
        "world_size",
        *RESERVED_NAMESPACES,
    }
)
"""Bare names that no primitive may have: they would hide a member of a node or schedule, or a reserved namespace."""

_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*\Z")


def is_identifier(text: str) -> bool:
    """Whether ``text`` is a lowercase identifier that can be written after a dot: ``"shard"``, ``"fork_rng"``."""
    return _IDENTIFIER.match(text) is not None and not keyword.iskeyword(text)


def split_name(name: str) -> tuple[str, str] | None:
    """``"tp.shard"`` as ``("tp", "shard")``; None if it is not ``<namespace>.<name>`` in lowercase identifiers."""
    namespace, dot, bare = name.partition(".")
    return (namespace, bare) if dot and is_identifier(namespace) and is_identifier(bare) else None
