"""The module tree of a schedule as data: repeated modules with equal steps are one row."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core.internals import Internals, buffers_of, children_of, fold_numbers, fold_paths, parameters_of

if TYPE_CHECKING:
    import torch

    from slapo_core import Record, Schedule


@dataclass(frozen=True)
class TensorRow:
    """A parameter or buffer.

    Args:
        name: its own, e.g. ``"weight"``.
        kind: ``"parameter"`` or ``"buffer"``.
        before: its shape in the reference model; None for a tensor that the schedule added.
        after: its shape on this rank; None before a lazy module's first call.
        layout: its placements, e.g. ``"tp: S(0)"``; empty without.
        dtype: e.g. ``"float32"``.
        bytes: on this rank; 0 where it is tied to an earlier one, or has no shape yet.
        elements: of the reference model's tensor; likewise.
        tied_to: the full name of the first of tied tensors; empty for the first itself.
    """

    name: str
    kind: str
    before: tuple[int, ...] | None
    after: tuple[int, ...] | None
    layout: str
    dtype: str
    bytes: int
    elements: int
    tied_to: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """A module, or several with equal classes, tensors and steps all the way down.

    Args:
        name: its last name, or e.g. ``"0-18"`` of several.
        paths: of all modules that the row stands for.
        type: the name of its class.
        tensors: its own, of the first module.
        steps: the records of each step applied here, one of each module.
        children: rows below.
        alias_of: path of the same module, which the tree has elsewhere; empty if it is here.
    """

    name: str
    paths: tuple[str, ...]
    type: str
    tensors: tuple[TensorRow, ...] = ()
    steps: tuple[tuple[Record, ...], ...] = ()
    children: tuple[ModuleRow, ...] = ()
    alias_of: str = ""

    @property
    def path(self) -> str:
        """The paths, e.g. ``"model.layers.{0-18}.mlp"``; of ranges within ranges the first and their number."""
        folded = fold_paths(self.paths) if self.paths != ("",) else "''"
        if folded.count("'") > 2:
            return f"{self.paths[0]} and {len(self.paths) - 1} more"
        return folded.strip("'")

    @property
    def count(self) -> int:
        """The number of modules."""
        return len(self.paths)

    def walk(self) -> Iterator[ModuleRow]:
        """This row and all rows below, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def size(self) -> tuple[int, int]:
        """Return the parameters of the reference model, and their bytes on this rank, of all modules and below."""
        own = [tensor for tensor in self.tensors if tensor.kind == "parameter"]
        elements = sum(tensor.elements for tensor in own) * self.count
        held = sum(tensor.bytes for tensor in own) * self.count
        below = [child.size() for child in self.children]
        return elements + sum(each for each, _ in below), held + sum(each for _, each in below)


Signature = tuple[object, ...]


def outline(schedule: Schedule) -> tuple[ModuleRow, dict[str, Signature]]:
    """Return the rows of a schedule's module tree, and what tells modules of two schedules apart, by path.

    Args:
        schedule: it may be sealed; its model is only read.
    """
    reader = _Reader(schedule)
    row = reader.row("", "")
    return row, reader.signatures


class _Reader:
    def __init__(self, schedule: Schedule) -> None:
        self._tree = Internals(schedule).tree
        self._tree.structure_changed()  # changes outside of the schedule, too
        self._records: dict[str, list[Record]] = {}
        for record in schedule.records:
            self._records.setdefault(record.path, []).append(record)
        self.signatures: dict[str, Signature] = {}

    def row(self, path: str, name: str) -> ModuleRow:
        index = self._tree.index
        if path not in index.modules:
            target = index.aliases[path]
            return ModuleRow(name, (path,), type(index.modules[target]).__name__, alias_of=target)
        module = index.modules[path]
        records = self._records.get(path, [])
        tensors = (*self._tensors(path, parameters_of(module)), *self._tensors(path, buffers_of(module)))
        self.signatures[path] = (type(module), tensors, tuple(str(record.primitive) for record in records))
        children = [
            self.row(f"{path}.{own}" if path else own, own)
            for own, child in children_of(module).items()
            if child is not None
        ]
        return ModuleRow(
            name,
            (path,),
            type(module).__name__,
            tensors,
            tuple((record,) for record in records),
            tuple(_folded(children)),
        )

    def _tensors(self, path: str, table: Mapping[str, torch.Tensor | None]) -> Iterator[TensorRow]:
        from torch import nn
        from torch.nn.parameter import is_lazy

        for name, tensor in table.items():
            if tensor is None:
                continue
            full = f"{path}.{name}" if path else name
            first_path, first_name = next(iter(self._tree.sites.of(tensor)), (path, name))
            first = f"{first_path}.{first_name}" if first_path else first_name
            layout = self._tree.tensors.layout(tensor, full)
            after = None if is_lazy(tensor) else tuple(tensor.shape)
            before = tuple(layout.shape) if layout.origin else after if not layout.placements else None
            counts = after is not None and first == full
            yield TensorRow(
                name,
                "parameter" if isinstance(tensor, nn.Parameter) else "buffer",
                before,
                after,
                str(layout) if layout.placements else "",
                str(tensor.dtype).removeprefix("torch."),
                math.prod(after or ()) * tensor.element_size() if counts else 0,
                math.prod(before or after or ()) if counts else 0,
                "" if first == full else first,
            )


_NUMBER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?!\w)|(?<![\w.])\d+(?=\.[A-Za-z_])")
"""A number that is a level of a path, and never a part of a decimal number."""


def _key(row: ModuleRow) -> Signature:
    """Return what equal rows share: everything but the numbers of layers."""
    tensors = tuple(dataclasses.replace(each, tied_to=_NUMBER.sub("*", each.tied_to)) for each in row.tensors)
    own = f"'{row.paths[0]}'"
    steps = tuple((str(one[0].primitive), one[0].location, _unnumbered(one[0].edits, own)) for one in row.steps)
    below = tuple((child.name, _key(child)) for child in row.children)
    return row.type, tensors, steps, below, _NUMBER.sub("*", row.alias_of), row.count


def _unnumbered(edits: Sequence[str], own: str) -> tuple[str, ...]:
    return tuple(_NUMBER.sub("*", edit.replace(own, "*")) for edit in edits)


def _folded(rows: Sequence[ModuleRow]) -> Iterator[ModuleRow]:
    """Join numbered rows, one after another, that are equal."""
    run: list[ModuleRow] = []
    key: Signature | None = None
    for row in rows:
        own = _key(row) if row.name.isdigit() else None
        if run and (own is None or own != key):
            yield _joined(run)
            run = []
        run.append(row)
        key = own
    if run:
        yield _joined(run)


def _joined(rows: Sequence[ModuleRow]) -> ModuleRow:
    if len(rows) == 1:
        return rows[0]
    numbers = [int(row.name) for row in rows] if all(row.name.isdigit() for row in rows) else []
    first = rows[0]
    return dataclasses.replace(
        first,
        name=fold_numbers(numbers) if numbers else first.name,
        paths=tuple(path for row in rows for path in row.paths),
        steps=tuple(
            tuple(record for each in same for record in each) for same in zip(*(row.steps for row in rows), strict=True)
        ),
        children=tuple(_joined(below) for below in zip(*(row.children for row in rows), strict=True)),
    )
