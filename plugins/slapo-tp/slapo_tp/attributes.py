"""Divide a module's integer attributes (its number of heads) by the number of ranks: ``shard_attribute``."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_tp.layers import layer_type_of
from slapo_tp.preconditions import Distributed, Divisible
from slapo_tp.splits import as_tuple, mesh_size, sized_tensor, split_axis


@dataclass(frozen=True)
class ShardAttribute(Primitive):
    """Divide integer attributes of the module by the number of ranks, to fit the shards that its children hold.

    Args:
        names: e.g. ``"num_heads"``, or ``["num_attention_heads", "all_head_size"]``.
        mesh_dim: the mesh dimension to divide by.

    Raises:
        PreconditionError: no mesh, no such attribute, not a positive integer, not divisible, or divided already.

    rewrite:
        ``module.num_heads == 12`` -> ``module.num_heads == 12 // n`` on a mesh dimension of n ranks

    On a mesh dimension of one rank nothing changes.

    Source: paper section 3.2.2; Megatron-LM's ``num_attention_heads_per_partition``.
    """

    name = "tp.shard_attribute"
    equivalence = Equivalence.EXACT

    names: str | tuple[str, ...]
    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        unplaced = list(Distributed(self.mesh_dim)(node))
        if unplaced:
            yield from unplaced
            return
        names = as_tuple(self.names)
        if not names:
            yield Violation("it names no attribute", 'write shard_attribute("num_heads")')
        for name in names:
            if names.count(name) > 1:
                yield Violation(f"'{name}' is named {names.count(name)} times", "name each attribute once")
                return
            yield from self._violations(node, name)

    def apply(self, node: Node, edit: Edit) -> None:
        size = mesh_size(node, self.mesh_dim)
        if size == 1:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: nothing to divide")
        for name in as_tuple(self.names):
            edit.set_attribute(node, name, getattr(node.module, name) // size)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        for name in as_tuple(self.names):
            value = getattr(node.module, name, None)
            if type(value) is not int or value < 1:
                yield Violation(f"'{name}' must be a positive integer (got {value!r})")

    def _violations(self, node: Node, name: str) -> Iterator[Violation]:
        module = node.module
        if isinstance(inspect.getattr_static(type(module), name, None), property):
            yield Violation(
                f"'{name}' of {type(module).__name__} is a property", "divide the attributes that it is computed from"
            )
            return
        if not hasattr(module, name):
            numbers = [own for own, value in vars(module).items() if type(value) is int and not own.startswith("_")]
            close = difflib.get_close_matches(name, numbers, n=1)
            listed = ", ".join(numbers) or "none"
            hint = f"did you mean '{close[0]}'? " if close else ""
            yield Violation(
                f"this {type(module).__name__} has no attribute '{name}'", f"{hint}its integer attributes: {listed}"
            )
            return
        value = getattr(module, name)
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
        yield from Divisible(f"'{name}'", value, self.mesh_dim, "choose a mesh size that divides it")(node)

    def _divided_by(self, node: Node, name: str) -> str | None:
        """The step that divided the attribute before."""
        for record in node.records if name in node.changed_attributes else ():
            before = record.primitive
            if (
                isinstance(before, ShardAttribute)
                and before.mesh_dim == self.mesh_dim
                and name in as_tuple(before.names)
            ):
                return str(record)
        kind = layer_type_of(node.module)
        sized = sized_tensor(node, kind) if kind is not None else None
        if kind is not None and sized is not None:
            axis = split_axis(node, sized, self.mesh_dim)
            part = kind.axes[axis] if axis is not None else None
            if part is not None and name in (part.attribute, *part.divided):
                return f"tp.shard of its {sized}"
        return None
