"""A model with two of each kind of repeated block: what differs between models of any depth."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.internals import children_of
from slapo_estimate.blocks import repeated_blocks, structure_of
from slapo_runtime.schedule_copies import copy_model

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT = 2
"""Blocks of each kind in a reduced model: the first is checkpointed, the second is not."""


@dataclass(frozen=True)
class BlockKinds:
    """The repeated blocks of a model, and their kinds.

    Blocks are of one kind if they lie in one container, and have equal classes, shapes, dtypes and settings.

    Args:
        paths: paths of the blocks, in the model's order.
        kinds: the kind of each block, numbered from 0 in the order of their first block.
    """

    paths: tuple[str, ...]
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module) -> BlockKinds:
        """Find the blocks of a model; there may be none."""
        numbers: dict[Hashable, int] = {}
        paths = tuple(repeated_blocks(model))
        settings = {path: _settings(model.get_submodule(path)) for path in paths}
        siblings: dict[str, list[str]] = {}
        for path in paths:
            siblings.setdefault(path.rpartition(".")[0], []).append(path)
        counts = {
            container: {key for key in settings[own[0]] if _counts(key, own, settings)}
            for container, own in siblings.items()
        }
        kinds = []
        for path in paths:
            container = path.rpartition(".")[0]
            own = tuple((key, value) for key, value in settings[path].items() if key not in counts[container])
            key = (container, structure_of(model.get_submodule(path)), own)
            kinds.append(numbers.setdefault(key, len(numbers)))
        return cls(paths, tuple(kinds))

    def count(self, kind: int) -> int:
        """Return the number of blocks of a kind."""
        return self.kinds.count(kind)

    def kept(self, most: int | None = KEPT) -> tuple[int, ...]:
        """Return the numbers of the first blocks of each kind.

        Args:
            most: of each kind; None for all.
        """
        seen: dict[int, int] = {}
        chosen = []
        for number, kind in enumerate(self.kinds):
            seen[kind] = seen.get(kind, 0) + 1
            if most is None or seen[kind] <= most:
                chosen.append(number)
        return tuple(chosen)


@dataclass(frozen=True)
class ReducedModel:
    """A copy of a model with few blocks.

    Args:
        model: the copy; its blocks are numbered from 0.
        paths: paths of the kept blocks in the copy.
        kinds: the kind of each of them, as in the model's :class:`BlockKinds`.
    """

    model: nn.Module
    paths: tuple[str, ...]
    kinds: tuple[int, ...]

    def checkpointed(self) -> tuple[str, ...]:
        """Return the paths of the first block of each kind that has another one."""
        return tuple(
            path
            for number, (path, kind) in enumerate(zip(self.paths, self.kinds, strict=True))
            if kind not in self.kinds[:number] and kind in self.kinds[number + 1 :]
        )


def reduce_model(model: nn.Module, blocks: BlockKinds, most: int | None = KEPT) -> ReducedModel:
    """Copy a model with few blocks of each kind; the model is only read.

    Args:
        model: the model.
        blocks: its blocks.
        most: blocks of each kind; None for all.

    Raises:
        SerializationError: the model cannot be copied.
    """
    kept = blocks.kept(most)
    dropped = [path for number, path in enumerate(blocks.paths) if number not in kept]
    memo: dict[int, Any] = {id(model.get_submodule(path)): nn.Identity() for path in dropped}
    copied = copy_model(model, memo, shares_memory=True)
    renamed: dict[str, str] = {path: path for path in blocks.paths}
    for container in dict.fromkeys(path.rpartition(".")[0] for path in dropped):
        children = children_of(copied.get_submodule(container) if container else copied)
        numbered = [name for name in children if name.isdigit()]
        gone = {path.rpartition(".")[2] for path in dropped if path.rpartition(".")[0] == container}
        stay = [(name, children[name]) for name in numbered if name not in gone]
        for name in numbered:
            del children[name]
        for number, (name, child) in enumerate(stay):
            children[str(number)] = child
            renamed[_joined(container, name)] = _joined(container, str(number))
    return ReducedModel(
        copied,
        tuple(_renamed(blocks.paths[number], renamed) for number in kept),
        tuple(blocks.kinds[number] for number in kept),
    )


def _renamed(path: str, renamed: Mapping[str, str]) -> str:
    return renamed.get(path, path)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _settings(block: nn.Module) -> dict[tuple[str, str], Hashable]:
    """Return the settings of a block by module and attribute; of a rate, whether it is zero."""
    return {
        (name, key): bool(value) if isinstance(value, float) else value
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and not key.startswith("_")
    }


def _counts(
    key: tuple[str, str], siblings: Sequence[str], settings: Mapping[str, Mapping[tuple[str, str], Hashable]]
) -> bool:
    """Return whether an attribute has the number of the block, counted from any number."""
    offsets = set()
    for path in siblings:
        value = settings[path].get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        offsets.add(value - int(path.rpartition(".")[2]))
    return len(siblings) > 1 and len(offsets) == 1


def places_of(paths: Sequence[str]) -> dict[str, int]:
    """Return the number of each path, for :func:`block_of`."""
    return {path: number for number, path in enumerate(paths)}


def block_of(path: str, places: Mapping[str, int]) -> int:
    """Return the number of the block that holds the module at ``path``; -1 for none."""
    while path:
        if path in places:
            return places[path]
        path = path.rpartition(".")[0]
    return -1
