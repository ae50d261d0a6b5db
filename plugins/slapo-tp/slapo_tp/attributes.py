"""Divide a module's integer attributes by the number of ranks: ``shard_attribute``."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_tp.heads import HEAD_GROUPS, KV_HEAD_COUNTS
from slapo_tp.layers import layer_type_of
from slapo_tp.preconditions import Divisible, needs_mesh
from slapo_tp.split_state import as_tuple, mesh_size, sized_tensor, split_axis
from slapo_tp.splits import shards_violations


@dataclass(frozen=True)
class ShardAttribute(Primitive):
    """Divide integer attributes of the module by the number of ranks.

    Args:
        names: e.g. ``"num_heads"``, or ``["num_attention_heads", "all_head_size"]``; ``"config.num_attention_heads"``
            for a module whose forward reads its configuration (Phi3's attention): it gets a copy of its own.
        mesh_dim: the mesh dimension to divide by.
        shards: as of ``shard(..., shards=)``: divide by the number of shards where the ranks are more, e.g. the number
            of KV heads.
        holders_of: as ``shards``, but divide by the number of ranks that hold the same shard, e.g. the number of query
            heads for each KV head (``shard`` does that for ``num_key_value_groups`` and ``n_rep``).

    Raises:
        PreconditionError: no mesh, no such attribute, not a positive integer, not divisible, or divided already.

    rewrite:
        ``module.num_heads == 12`` -> ``module.num_heads == 12 // n`` on a mesh dimension of n ranks

        ``shards=k``: ``12 // min(n, k)``; ``holders_of=k``: ``12 // max(1, n // k)``

    On a mesh dimension of one rank nothing changes.

    Source: paper section 3.2.2; Megatron-LM's ``num_attention_heads_per_partition``.
    """

    name = "tp.shard_attribute"
    equivalence = Equivalence.EXACT

    names: str | tuple[str, ...]
    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)
    shards: int | None = dataclasses.field(default=None, kw_only=True)
    holders_of: int | None = dataclasses.field(default=None, kw_only=True)

    @needs_mesh
    def preconditions(self, node: Node) -> Iterator[Violation]:
        names = as_tuple(self.names)
        if not names:
            yield Violation("it names no attribute", 'write shard_attribute("num_heads")')
        if self.shards is not None and self.holders_of is not None:
            yield Violation(
                f"shards and holders_of exclude each other (got shards={self.shards} and holders_of={self.holders_of})",
                "write one call for each",
            )
            return
        count = self.shards if self.holders_of is None else self.holders_of
        uneven = list(
            shards_violations(node, self.mesh_dim, count, "shards" if self.holders_of is None else "holders_of")
        )
        if uneven:
            yield from uneven
            return
        for name in names:
            if names.count(name) > 1:
                yield Violation(f"'{name}' is named {names.count(name)} times", "name each attribute once")
                return
            yield from self._violations(node, name)

    def apply(self, node: Node, edit: Edit) -> None:
        divisor = self._divisor(node)
        if mesh_size(node, self.mesh_dim) == 1:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: nothing to divide")
        elif divisor == 1:
            edit.note("each shard is on one rank" if self.holders_of else "every rank holds the one shard")
        for name in as_tuple(self.names):
            owner, own = _owner(node.module, name)
            value = getattr(owner, own) // divisor
            if owner is node.module:
                edit.set_attribute(node, name, value)
                continue
            changed = copy.copy(owner)
            setattr(changed, own, value)
            edit.set_attribute(node, name.rpartition(".")[0], changed)
            edit.note(f"{name} {getattr(owner, own)} -> {value}, in a copy of the {type(owner).__name__}")

    def postconditions(self, node: Node) -> Iterator[Violation]:
        for name in as_tuple(self.names):
            owner, own = _owner(node.module, name)
            value = getattr(owner, own, None)
            if type(value) is not int or value < 1:
                yield Violation(f"'{name}' must be a positive integer (got {value!r})")

    def _violations(self, node: Node, name: str) -> Iterator[Violation]:
        module, own_name = _owner(node.module, name)
        if isinstance(inspect.getattr_static(type(module), own_name, None), property):
            yield Violation(
                f"'{name}' of {type(module).__name__} is a property", "divide the attributes that it is computed from"
            )
            return
        if not hasattr(module, own_name):
            numbers = [own for own, value in vars(module).items() if type(value) is int and not own.startswith("_")]
            close = difflib.get_close_matches(name, numbers, n=1)
            listed = ", ".join(numbers) or "none"
            hint = f"did you mean '{close[0]}'? " if close else ""
            yield Violation(
                f"this {type(module).__name__} has no attribute '{name}'", f"{hint}its integer attributes: {listed}"
            )
            return
        value = getattr(module, own_name)
        if type(value) is not int or value < 1:
            shown = repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
            yield Violation(f"'{name}' must be a positive integer (got {shown})", "name a count or a size")
            return
        divided_by = self._divided_by(node, name)
        if divided_by is not None:
            yield Violation(
                f"'{name}' is divided over mesh_dim '{self.mesh_dim}' already, by {divided_by}", f"leave '{name}' out"
            )
            return
        size, divisor = mesh_size(node, self.mesh_dim), self._divisor(node)
        if divisor == size:
            hint = "choose a mesh size that divides it"
            if own_name in KV_HEAD_COUNTS and size % value == 0:
                hint += f", or let several ranks hold the same head: shards={value} here and at the layer's shard(...)"
            yield from Divisible(f"'{name}'", value, self.mesh_dim, hint)(node)
        elif value % divisor:
            by = f"the {divisor} ranks that hold the same shard" if self.holders_of else f"shards={divisor}"
            yield Violation(f"'{name}' is {value}, not divisible by {by}", "choose a mesh size that divides it")

    def _divisor(self, node: Node) -> int:
        size = mesh_size(node, self.mesh_dim)
        if self.holders_of is not None:
            return max(1, size // self.holders_of)
        return size if self.shards is None else min(size, self.shards)

    def _divided_by(self, node: Node, name: str) -> str | None:
        """Return the step that divided the attribute before."""
        for record in node.records if name.partition(".")[0] in node.changed_attributes else ():
            before = record.primitive
            if (
                isinstance(before, ShardAttribute)
                and before.mesh_dim == self.mesh_dim
                and name in as_tuple(before.names)
            ):
                return str(record)
        if name in HEAD_GROUPS and name in node.changed_attributes:
            return "tp.shard of its keys and values"
        kind = layer_type_of(node.module)
        sized = sized_tensor(node, kind) if kind is not None else None
        if kind is not None and sized is not None:
            axis = split_axis(node, sized, self.mesh_dim)
            part = kind.axes[axis] if axis is not None else None
            if part is not None and name in (part.attribute, *part.divided):
                return f"tp.shard of its {sized}"
        return None


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    """Return the module, or its configuration, that has an attribute, and its name there."""
    before, _, own = name.rpartition(".")
    configuration = getattr(module, before, None) if before else None
    if configuration is None or isinstance(configuration, nn.Module) or not hasattr(configuration, "__dict__"):
        return module, name
    return configuration, own
