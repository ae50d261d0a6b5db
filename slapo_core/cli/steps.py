"""``slapo explain``: what each step changed; ``slapo diff``: two schedules, or one at two meshes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core.cli.arguments import AsJson, MeshSizes, StepsBatch
from slapo_core.cli.output import print_json, print_table
from slapo_core.cli.schedules import SCHEDULE_HELP, ModelName, ScheduleName, batch_for_steps, find_schedule

if TYPE_CHECKING:
    from slapo_core.primitive import Record
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.tree.node import Node


def explain(
    schedule: ScheduleName,
    model: ModelName = None,
    mesh: MeshSizes = None,
    batch: StepsBatch = None,
    as_json: AsJson = False,
) -> None:
    """Explain a schedule: each step with its source line, and what it changed. Equal steps of layers are folded.

    The model is made on the meta device, without memory; nothing runs. Of a mesh, rank 0 is shown. Example:

    slapo explain bert:schedule --model bert:make_model --mesh tp=2
    """
    named = find_schedule(schedule, model=model, mesh=mesh)
    made = named.make(functools.partial(batch_for_steps, words=batch), on_meta=True)
    if as_json:
        from slapo_core.schedule.mesh_dims import unused_mesh_dims

        steps = [record_to_json(record) for record in made.records]
        print_json({**header(made), "steps": steps, "unused_mesh_dims": unused_mesh_dims(made)})
    else:
        print(made.explain())


def header(schedule: Schedule) -> dict[str, Any]:
    """Return model class and mesh as JSON."""
    kind = type(schedule.model)
    sizes = None if schedule.mesh is None else schedule.mesh.sizes
    return {"mesh": sizes, "model": f"{kind.__module__}.{kind.__qualname__}"}


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record as JSON, its call as text."""
    return {
        "call": str(record.primitive),
        "changes": list(record.edits),
        "distribution": record.distribution,
        "index": record.index,
        "location": record.location,
        "path": record.path,
        "primitive": record.name,
        "version": record.version,
    }


def diff(
    schedules: Annotated[list[str], typer.Argument(metavar="SCHEDULE [OTHER]", help=SCHEDULE_HELP)],
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODULE:FUNCTION", help="A function that returns the model; twice: of each."),
    ] = None,
    mesh: Annotated[
        list[str] | None, typer.Option("--mesh", metavar="SIZES", help="Sizes, e.g. tp=2; twice: of each schedule.")
    ] = None,
    batch: StepsBatch = None,
    as_json: AsJson = False,
) -> None:
    """Compare two schedules, or one at two meshes: steps added, removed, changed; shapes that differ in modules.

    Exits with 0 if they are equal, and with 1 if not. The models are made on the meta device, without memory; nothing
    runs. Of a mesh, rank 0 is compared. Values of parameters are not. Examples:

    slapo diff bert:schedule saved.json --model bert:make_model

    slapo diff bert:schedule --model bert:make_model --mesh tp=2 --mesh tp=4
    """
    given: tuple[Sequence[str | None], ...] = (schedules, model or [None], mesh or [None])
    count = max(map(len, given))
    if count != 2:
        raise typer.BadParameter(
            f"two are compared: give another schedule, or --mesh twice (got {count})", param_hint="SCHEDULE [OTHER]"
        )
    names, models, meshes = ((values[0], values[-1]) for values in given)
    named = [
        find_schedule(str(name), model=each, mesh=sizes, model_is_optional=True)
        for name, each, sizes in zip(names, models, meshes, strict=True)
    ]
    if model is not None and all(one.make_model is None for one in named):
        raise typer.BadParameter("neither schedule needs it: both make their models", param_hint="--model")
    example_inputs = functools.partial(batch_for_steps, words=batch)
    first, second = (one.make(example_inputs, on_meta=True) for one in named)
    found = Difference.between(first, second)
    if as_json:
        sides = {"a": {"name": names[0], **header(first)}, "b": {"name": names[1], **header(second)}}
        print_json({**sides, **found.to_json()})
    else:
        for side, name, one in zip("AB", names, (first, second), strict=True):
            steps = f"{len(one.records)} step{'' if len(one.records) == 1 else 's'}"
            print(f"{side}: {name}, {steps}, {'no mesh' if one.mesh is None else f'mesh {one.mesh}'}")
        found.print()
    if not found.is_empty:
        raise typer.Exit(1)


@dataclass(frozen=True)
class TensorDifference:
    """A module or one of its tensors that differs.

    Args:
        path: of the module.
        name: of the parameter or buffer; ``""`` for the module itself.
        a: shape, layout and type, or the module's class; None: there is none.
        b: of the other schedule.
    """

    path: str
    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Difference:
    """What differs between the schedules A and B.

    Args:
        added: steps of B alone.
        removed: steps of A alone.
        changed: steps of one primitive at one module, with other arguments.
        reordered: modules whose equal steps are in another order.
        by_name: arguments of equal steps that were compared by their names or types only.
        tensors: modules and tensors that differ.
    """

    added: tuple[Record, ...]
    removed: tuple[Record, ...]
    changed: tuple[tuple[Record, Record], ...]
    reordered: tuple[str, ...]
    by_name: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]

    @classmethod
    def between(cls, a: Schedule, b: Schedule) -> Difference:
        """Compare two schedules."""
        added, removed, equal, changed = [], [], [], []
        ours, theirs = _by_place(a.records), _by_place(b.records)
        for key in dict.fromkeys((*ours, *theirs)):
            rest = list(theirs.get(key, ()))
            unmatched = []
            for record in ours.get(key, ()):
                same = next((one for one in rest if _arguments(one) == _arguments(record)), None)
                if same is None:
                    unmatched.append(record)
                else:
                    rest.remove(same)
                    equal.append((record, same))
            pairs = min(len(unmatched), len(rest))
            changed += list(zip(unmatched, rest, strict=False))
            removed += unmatched[pairs:]
            added += rest[pairs:]
        return cls(
            tuple(added),
            tuple(removed),
            tuple(changed),
            tuple(_reordered(equal)),
            tuple(dict.fromkeys(text for record, _ in equal for text in _by_name(record))),
            tuple(_tensors(a, b)),
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.removed or self.changed or self.reordered or self.tensors)

    def to_json(self) -> dict[str, Any]:
        return {
            "added": [record_to_json(record) for record in self.added],
            "changed": [{"a": record_to_json(a), "b": record_to_json(b)} for a, b in self.changed],
            "compared_by_name": list(self.by_name),
            "is_equal": self.is_empty,
            "removed": [record_to_json(record) for record in self.removed],
            "reordered": list(self.reordered),
            "tensors": [{"a": one.a, "b": one.b, "path": one.path, "tensor": one.name} for one in self.tensors],
        }

    def print(self) -> None:
        """Print the differences, repeated layers folded."""
        from slapo_core.errors import place

        if self.is_empty:
            print("equal: the same steps, and the same shapes in each module")
        lines = [("-", str(one.primitive), one.path) for one in self.removed]
        lines += [("+", str(one.primitive), one.path) for one in self.added]
        lines += [("~", f"{a.primitive} -> {b.primitive}", a.path) for a, b in self.changed]
        for (sign, call), paths in _folded(((sign, call), path) for sign, call, path in lines):
            print(f"{sign} {call} at {paths}")
        for path in self.reordered:
            print(f"the steps at {place(path)} are in another order")
        if self.tensors:
            print()
            folded = _folded(((one.name, one.a or "-", one.b or "-"), one.path) for one in self.tensors)
            print_table(("MODULE", "TENSOR", "A", "B"), [(paths, name, a, b) for (name, a, b), paths in folded])
        for text in self.by_name:
            print(f"note: compared by name or type only: {text}")


def _by_place(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.path, record.name), []).append(record)
    return found


def _arguments(record: Record) -> str:
    from slapo_core.tree.render import describe

    return describe(record.primitive.arguments())


_NAMED = re.compile(r"<[\w.]+>")  # an object's type, a lambda, an inner function; patterns have a digest


def _by_name(record: Record) -> Iterator[str]:
    from slapo_core.tree.render import describe

    for name, value in record.primitive.arguments().items():
        for kind in _NAMED.findall(describe(value)):
            yield f"'{name}' of {record.name}, {kind}"


def _reordered(equal: Sequence[tuple[Record, Record]]) -> Iterator[str]:
    """Yield the modules whose equal steps are in another order."""
    at: dict[str, list[tuple[int, int]]] = {}
    for a, b in equal:
        at.setdefault(a.path, []).append((a.index, b.index))
    for path, indexes in at.items():
        others = [other for _, other in sorted(indexes)]
        if others != sorted(others):
            yield path


def _tensors(a: Schedule, b: Schedule) -> Iterator[TensorDifference]:
    """Yield modules of another class, and parameters and buffers of other shapes, layouts or types."""
    ours, theirs = ({node.path: node for node in one.root.walk()} for one in (a, b))
    for path in dict.fromkeys((*ours, *theirs)):
        first, second = _described(ours.get(path)), _described(theirs.get(path))
        for name in dict.fromkeys((*first, *second)):
            if first.get(name) != second.get(name):
                yield TensorDifference(path, name, first.get(name), second.get(name))


def _described(node: Node | None) -> dict[str, str]:
    """Describe the class of a module, and its tensors."""
    if node is None:
        return {}
    found = {"": type(node.module).__name__}
    for name, tensor in {**node.parameters, **node.buffers}.items():
        layout = node.layout(name)
        frozen = "" if tensor.requires_grad or name in node.buffers else ", frozen"
        placed = f" [{layout}]" if layout.placements else ""
        found[name] = f"{tuple(tensor.shape)}{placed} {str(tensor.dtype).removeprefix('torch.')}{frozen}"
    return found


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _folded(items: Iterable[tuple[tuple[str, ...], str]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Join the paths of equal items in repeated layers."""
    from slapo_core.tree.render import fold_paths

    groups: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for key, path in items:
        groups.setdefault((key, _NUMBER.sub("*", path)), []).append(path)
    for (key, _), paths in groups.items():
        times = f" (x {len(paths)})" if len(paths) > 1 else ""
        yield key, fold_paths(list(dict.fromkeys(paths))) + times
