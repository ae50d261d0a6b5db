"""The repeated blocks of a model, or what the user names: what `fit` may checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from slapo_core.errors import ArgumentError, PreconditionError
from slapo_core.primitives.checkpoint import Checkpoint, checkpoints
from slapo_core.tree.group import NodeGroup
from slapo_core.tree.index import full_name

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.tree.node import TreeNode

__all__ = ["blocks_of", "repeated_blocks"]

_NAMED = 'layers=["encoder", "decoder"], paths or globs of modules that may be computed again'


def blocks_of(schedule: Schedule, layers: str | Sequence[str] | None) -> tuple[str, ...]:
    """Give the paths of what may be checkpointed and is not yet: those named in their order, else in the model's.

    Args:
        schedule: as it is now.
        layers: paths or globs; None: the repeated blocks.

    Raises:
        PathError: a path or glob matches nothing.
        ArgumentError: one block lies within another; or there is nothing that repeats.
        PreconditionError: a block that the user names cannot be checkpointed.
    """
    if layers is None:
        paths = repeated_blocks(schedule.model)
        if not paths:
            raise ArgumentError(
                f"no blocks of {type(schedule.model).__name__} repeat, so that fit does not know what to checkpoint",
                hint=_NAMED,
            )
    else:
        patterns = (layers,) if isinstance(layers, str) else tuple(layers)
        found: dict[str, None] = {}
        for pattern in patterns:
            selected = schedule[pattern]
            found.update((node.path, None) for node in (selected if isinstance(selected, NodeGroup) else (selected,)))
        paths = list(found)
        if not paths:
            raise ArgumentError("layers names nothing that could be checkpointed (got an empty list)", hint=_NAMED)
    nodes = [schedule.tree.node(path) for path in paths]
    _refuse_nested(paths)
    free = [node for node in nodes if not _is_checkpointed(node)]
    return tuple(node.path for node in free if _may_be_checkpointed(schedule, node, named=layers is not None))


def _may_be_checkpointed(schedule: Schedule, node: TreeNode, *, named: bool) -> bool:
    """Whether nothing refuses it: tried, and taken back. What the user names must not be refused."""
    before = len(schedule.records)
    try:
        schedule.apply_at(node, Checkpoint())
    except PreconditionError:
        if named:
            raise
        return False
    schedule.undo(to=before)
    return True


def _is_checkpointed(node: TreeNode) -> bool:
    """Whether it, or something that it is part of, is computed again already."""
    names = node.path.split(".") if node.path else []
    above = [".".join(names[:length]) for length in range(len(names) + 1)]
    return any(checkpoints(node._tree.node(path)) for path in above)


def _refuse_nested(paths: Sequence[str]) -> None:
    known = set(paths)
    for path in paths:
        names = path.split(".")
        for length in range(len(names)):
            outer = ".".join(names[:length])
            if outer in known and outer != path:
                raise ArgumentError(
                    f"'{path}' lies within '{outer}', and both were named in layers: which of them is computed again?",
                    hint="name one level of modules",
                )


def repeated_blocks(model: nn.Module) -> list[str]:
    """Paths of the blocks that a model repeats.

    Blocks are siblings with numbers for names and one class: of a ``ModuleList`` or ``Sequential``. Where some of one
    class are alike in all shapes, or none of them holds further blocks, they are what repeats; else they are stages
    (ResNet, Swin), and the blocks are looked for within.
    """
    siblings = list(_siblings(model))
    alike = {type(group[0][1]) for group in siblings if _some_alike(group)}
    return [path for path, _ in _blocks(model, "", alike)]


def _blocks(module: nn.Module, path: str, alike: set[type]) -> Iterable[tuple[str, nn.Module]]:
    groups = {id(child): group for group in _groups(module) for _, child in group}
    for name, child in module._modules.items():
        if child is None:
            continue
        child_path = full_name(path, name)
        within = list(_blocks(child, child_path, alike))
        if id(child) in groups and (type(child) in alike or not within) and any(True for _ in child.children()):
            yield child_path, child
        else:
            yield from within


def _siblings(model: nn.Module) -> Iterable[list[tuple[str, nn.Module]]]:
    for module in model.modules():
        yield from _groups(module)


def _groups(module: nn.Module) -> Iterable[list[tuple[str, nn.Module]]]:
    """Children with numbers for names, by class; at least two of each."""
    by_class: dict[type, list[tuple[str, nn.Module]]] = {}
    for name, child in module._modules.items():
        if child is not None and name.isdigit():
            by_class.setdefault(type(child), []).append((name, child))
    return (group for group in by_class.values() if len(group) > 1)


def _some_alike(group: Sequence[tuple[str, nn.Module]]) -> bool:
    return len({_structure(child) for _, child in group}) < len(group)


def _structure(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules of the same classes, whose tensors have the same shapes and types."""
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    )
    children = tuple((name, _structure(child)) for name, child in module._modules.items() if child is not None)
    return (type(module), tensors, children)
