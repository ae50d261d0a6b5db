"""Repeated blocks of a model, and the modules that may be checkpointed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import Node
from slapo_core.errors import ArgumentError, PreconditionError
from slapo_core.internals import (
    Checkpoint,
    Internals,
    buffers_of,
    checkpoints,
    children_of,
    module_index,
    parameters_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from slapo_core import Schedule

_NAMED = 'layers=["encoder", "decoder"], paths or globs of modules that may be checkpointed'


def blocks_of(schedule: Schedule, layers: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the paths of modules that may be checkpointed and are not yet.

    Args:
        schedule: the schedule as it is now.
        layers: paths or globs, whose order is kept; None: the repeated blocks, in the model's order.

    Raises:
        PathError: a path or glob matches nothing.
        ArgumentError: one block lies within another; or no blocks repeat.
        PreconditionError: a named block cannot be checkpointed.
    """
    if layers is None:
        paths = repeated_blocks(schedule.model)
        if not paths:
            raise ArgumentError(
                f"{type(schedule.model).__name__} has no repeated blocks, so fit has no default for layers",
                hint=_NAMED,
            )
    else:
        patterns = (layers,) if isinstance(layers, str) else tuple(layers)
        found: dict[str, None] = {}
        for pattern in patterns:
            selected = schedule[pattern]
            found.update((node.path, None) for node in ((selected,) if isinstance(selected, Node) else selected))
        paths = list(found)
        if not paths:
            raise ArgumentError("layers must name at least one module (got an empty list)", hint=_NAMED)
    nodes = [Internals(schedule).node(path) for path in paths]
    _refuse_nested(paths)
    free = [node for node in nodes if not _is_checkpointed(node)]
    return tuple(node.path for node in free if _may_be_checkpointed(schedule, node, named=layers is not None))


def _may_be_checkpointed(schedule: Schedule, node: Node, *, named: bool) -> bool:
    """Return whether ``.checkpoint()`` applies, by applying and undoing it; raise errors of named paths."""
    before = len(schedule.records)
    try:
        Internals(schedule).apply(node, Checkpoint())
    except PreconditionError:
        if named:
            raise
        return False
    finally:
        if len(schedule.records) > before:  # also after an interrupt
            schedule.undo(to=before)
    return True


def _is_checkpointed(node: Node) -> bool:
    """Return whether the module or one of its parents is checkpointed."""
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
                    f"layers names '{path}' and its parent '{outer}': only one of them can be checkpointed",
                    hint="name one level of modules",
                )


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the paths of a model's repeated blocks.

    Blocks are siblings of one class in a ``ModuleList`` or ``Sequential``. Siblings without any two of equal shapes
    that contain further blocks are stages (ResNet, Swin): the blocks are within.
    """
    siblings = list(_siblings(model))
    repeated = {type(group[0][1]) for group in siblings if _have_equal_structure(group)}
    return [path for path, _ in _blocks(model, "", repeated)]


def _blocks(module: nn.Module, path: str, repeated: set[type]) -> Iterable[tuple[str, nn.Module]]:
    groups = {id(child): group for group in _block_groups(module) for _, child in group}
    for name, child in children_of(module).items():
        if child is None:
            continue
        child_path = module_index.full_name(path, name)
        within = list(_blocks(child, child_path, repeated))
        if id(child) in groups and (type(child) in repeated or not within) and any(True for _ in child.children()):
            yield child_path, child
        else:
            yield from within


def _siblings(model: nn.Module) -> Iterable[list[tuple[str, nn.Module]]]:
    for module in model.modules():
        yield from _block_groups(module)


def _block_groups(module: nn.Module) -> Iterable[list[tuple[str, nn.Module]]]:
    """Group numbered children by class; at least two of each."""
    by_class: dict[type, list[tuple[str, nn.Module]]] = {}
    for name, child in children_of(module).items():
        if child is not None and name.isdigit():
            by_class.setdefault(type(child), []).append((name, child))
    return (group for group in by_class.values() if len(group) > 1)


def _have_equal_structure(group: Sequence[tuple[str, nn.Module]]) -> bool:
    return len({structure_of(child) for _, child in group}) < len(group)


def structure_of(module: nn.Module) -> tuple[object, ...]:
    """Return a value that is equal for modules of equal classes, shapes and dtypes."""
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for table in (parameters_of(module), buffers_of(module))
        for name, tensor in table.items()
        if tensor is not None
    )
    children = tuple((name, structure_of(child)) for name, child in children_of(module).items() if child is not None)
    return (type(module), tensors, children)
