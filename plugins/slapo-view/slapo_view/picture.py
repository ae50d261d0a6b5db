"""`Picture`: a schedule as text, as JSON and as an HTML page."""

from __future__ import annotations

import dataclasses
import linecache
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slapo_core import Schedule
from slapo_core.cli import table_lines
from slapo_core.errors import ArgumentError, SlapoError
from slapo_core.internals import Internals, fold_numbers
from slapo_graph.graph import graph_of
from slapo_pipeline import timeline
from slapo_pipeline.split import cuts_of
from slapo_pipeline.view import Stages, stages
from slapo_runtime.receipts.receipt import expectations
from slapo_runtime.sizes import format_bytes
from slapo_view.memory import predict
from slapo_view.outline import ModuleRow, Signature, outline
from slapo_view.page import in_frame, page_of
from slapo_view.receipts import Receipt

if TYPE_CHECKING:
    import torch

    from slapo_core import Record


def picture(
    schedule: Schedule,
    example_inputs: Any = None,
    *,
    memory: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    loss: Callable[..., Any] | None = None,
    microbatches: int | None = None,
    pipeline_schedule: str | None = None,
    receipt: Any = None,
    title: str = "",
    tell: Callable[[str], None] = lambda text: None,
) -> Picture:
    """Draw a schedule: its module tree with the steps, shards, collectives, stages, and memory over a training step.

    Nothing is built. Without a batch, the picture has neither the values between stages nor the memory.

    Args:
        schedule: on any mesh, or none; on an abstract mesh as of its rank. Its model may be on the meta device.
        example_inputs: one batch, as ``train_step`` takes it. Default: the schedule's example inputs.
        memory: whether to estimate a training step: memory over time, and the bytes of collectives. Takes seconds to a
            minute, and a process for each kind of rank.
        optimizer: of the estimate, as for :func:`slapo_core.estimate`; None for no optimizer.
        loss: of the estimate; likewise.
        microbatches: micro-batches of a pipeline's step. Default: the smallest number that the pipeline schedule runs.
        pipeline_schedule: e.g. ``"1f1b"``, as for :func:`slapo_core.build`. Default: ``"1f1b"``; with several stages on
            a rank ``"interleaved_1f1b"``.
        receipt: what :func:`slapo_core.observe` returned for this schedule, or the path of a file with its JSON.
        title: above the picture. Default: the class of the model.
        tell: called with the name of each part before it is made.

    Returns:
        the picture: print it, ``save`` it as HTML, or show it in a notebook.

    Raises:
        ArgumentError: ``receipt`` is not a receipt of this schedule; or the pipeline schedule is unknown, refuses the
            numbers, or there are no stages on pipeline ranks.
        ApplyError: the effects of a step cannot be told.
    """
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"picture takes a schedule (got {type(schedule).__name__})", hint="slapo.create_schedule(model)"
        )
    batch = schedule.example_inputs if example_inputs is None else example_inputs
    seen = None if receipt is None else Receipt(receipt, schedule)
    left = sorted({record.name for record in schedule.records if record.primitive.targets is not None})
    notes = [f"shapes and bytes of parameters are before {name}, which the target carries out" for name in left]
    tell("the module tree")
    row, signatures = outline(schedule)
    cut = _stages(schedule, batch, notes, tell)
    ranks = _timeline(schedule, microbatches, pipeline_schedule, notes)
    predicted: dict[str, Any] | None = None
    if memory and batch is None:
        notes.append("memory: not estimated without a batch")
    elif memory:
        tell("memory of a training step")
        options = {"microbatches": microbatches, "pipeline_schedule": pipeline_schedule} if ranks is not None else {}
        given = {name: value for name, value in options.items() if value is not None}
        try:
            predicted = predict(schedule, batch, optimizer=optimizer, loss=loss, **given)
        except SlapoError as error:
            notes.append(f"memory: not estimated: {error.message}")
    about = _About(schedule, cut, predicted, seen)
    elements, held = row.size()
    data: dict[str, Any] = {
        "bytes": held,
        "memory": predicted,
        "mesh": {} if schedule.mesh is None else dict(schedule.mesh.sizes),
        "model": type(schedule.model).__name__,
        "notes": notes,
        "parameters": elements,
        "primitives": dict(Counter(record.name for record in schedule.records)),
        "receipt": None if seen is None else {"all": seen.all, "others": seen.others, "seen": seen.seen},
        "stages": None if cut is None else _stage_values(schedule, cut),
        "steps": len(schedule.records),
        "timeline": ranks,
        "title": title or type(schedule.model).__name__,
        "tree": about.row(row),
    }
    return Picture((View(data, row, signatures),))


@dataclass(frozen=True)
class View:
    """One schedule of a picture.

    Args:
        data: everything as plain values.
        row: the module tree.
        signatures: what tells its modules apart from another schedule's modules, by path.
    """

    data: dict[str, Any]
    row: ModuleRow = field(repr=False)
    signatures: Mapping[str, Signature] = field(repr=False)


@dataclass(frozen=True)
class Picture:
    """A schedule, or two side by side.

    Args:
        views: one or two.
    """

    views: tuple[View, ...]

    def beside(self, other: Picture) -> Picture:
        """Put another picture beside this one; modules that differ are marked.

        Raises:
            ArgumentError: there would be more than two schedules.
        """
        if len(self.views) + len(other.views) != 2:
            raise ArgumentError("two schedules stand side by side", hint="first.picture().beside(second.picture())")
        one, two = self.views[0], other.views[0]
        return Picture((_marked(one, two.signatures), _marked(two, one.signatures)))

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values, for ``json.dumps``."""
        return {"schedules": [view.data for view in self.views]}

    def html(self) -> str:
        """Return a page of one file, which loads nothing from a network."""
        return page_of(self.to_json(), title=" and ".join(view.data["title"] for view in self.views), text=str(self))

    def save(self, path: str | Path) -> None:
        """Write the page.

        Raises:
            ArgumentError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written: {error.strerror}", hint='save("schedule.html")') from error

    def _repr_html_(self) -> str:
        return in_frame(self.html())

    def __str__(self) -> str:
        return "\n\n".join("\n".join(_lines(view.data)) for view in self.views)


def _marked(view: View, others: Mapping[str, Signature]) -> View:
    """Mark the rows with modules that another schedule does not have as they are here."""

    def mark(row: ModuleRow, data: dict[str, Any]) -> dict[str, Any]:
        differing = sum(view.signatures.get(path) != others.get(path) for path in row.paths)
        below = [mark(*pair) for pair in zip(row.children, data.get("children", ()), strict=True)]
        return {**data, **({"differs": differing} if differing else {}), **({"children": below} if below else {})}

    return dataclasses.replace(view, data={**view.data, "tree": mark(view.row, view.data["tree"])})


# -- the tree ----------------------------------------------------------------------------------------------------------


class _About:
    """Data of the modules of a schedule, besides the tree.

    Args:
        schedule: the schedule.
        cut: its stages; None without.
        predicted: of :func:`~slapo_view.memory.predict`; None without.
        seen: the receipt; None without.
    """

    def __init__(
        self, schedule: Schedule, cut: Stages | None, predicted: Mapping[str, Any] | None, seen: Receipt | None
    ) -> None:
        self._internals, self._seen = Internals(schedule), seen
        self._effects: dict[int, list[str]] = {}
        for one in expectations(schedule, by_runtime=True):
            if one.step is not None:
                at = "" if one.path == one.step.path else f" at '{one.path}'"
                self._effects.setdefault(one.step.index, []).append(f"{one.effect}{at}")
        self._stages: dict[int, set[int]] = {}
        for stage in cut.partition.stages if cut is not None else ():
            for module in stage.module.modules():
                self._stages.setdefault(id(module), set()).add(stage.index)
        self._collectives: dict[str, list[dict[str, Any]]] = {}
        for path, calls in _of_busiest(predicted["kinds"] if predicted is not None else ()).items():
            self._collectives[path] = [{**call, "source": "estimate"} for call in calls]
        for call in seen.collectives if seen is not None else ():
            each = {**call, "count": call["count"] / seen.steps, "bytes": call["bytes"] / seen.steps}  # type: ignore[union-attr]
            self._collectives.setdefault(call["module"], []).append({**each, "source": "receipt"})

    def row(self, row: ModuleRow) -> dict[str, Any]:
        """Return a row, and the rows below, as plain values, without empty ones."""
        if row.alias_of:
            return {"name": row.name, "path": row.path, "type": row.type, "alias": row.alias_of}
        elements, held = row.size()
        node = self._internals.node(row.paths[0])
        graph = graph_of(node)
        below = [self.row(child) for child in row.children]
        tensors = [_without_empty(dataclasses.asdict(each)) for each in row.tensors]
        found = {
            "name": row.name,
            "path": row.path,
            "type": row.type,
            "count": row.count if row.count > 1 else 0,
            "tensors": tensors,
            "steps": [self._step(records) for records in row.steps],
            "collectives": self._collectives_of(row.paths),
            "graph": "" if graph is None else str(graph),
            "stages": self._stages_of(row, below),
            "elements": elements,
            "bytes": held,
            "children": below,
        }
        return {"name": row.name, **_without_empty(found)}

    def _step(self, records: Sequence[Record]) -> dict[str, Any]:
        first = records[0]
        findings = [one for record in records for one in self._findings(record)]
        missing = [one for one in findings if not one["is_seen"]]
        found = {
            "call": str(first.primitive),
            "name": first.name,
            "numbers": fold_numbers([record.index for record in records]),
            "plugin": f"{first.distribution} {first.version}",
            "at": first.location,
            "line": _source_line(first.location),
            "edits": list(first.edits),
            "effects": self._effects.get(first.index, []),
            "seen": [len(findings) - len(missing), len(findings)] if findings else [],
            "missing": [
                f"expected {one['expected']}, seen: {one['seen']}" + (f"; {one['cause']}" if one["cause"] else "")
                for one in missing[:3]
            ],
        }
        return _without_empty(found)

    def _findings(self, record: Record) -> list[dict[str, Any]]:
        return [] if self._seen is None else self._seen.by_step.get(str(record), [])

    def _collectives_of(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """Return the collectives of modules together: of one step of repeated modules, one."""
        sums: dict[tuple[str, ...], list[float]] = {}
        for path in paths:
            for call in self._collectives.get(path, ()):
                step = call["record"].partition(" ")[2].partition(" at ")[0]
                key = (call["kind"], call["mesh_dim"], call["phase"], call["dtype"], step, call["source"])
                one = sums.setdefault(key, [0, 0])
                one[0] += call["count"]
                one[1] += call["bytes"]
        names = ("kind", "mesh_dim", "phase", "dtype", "step", "source")
        return [
            {**dict(zip(names, key, strict=True)), "count": count, "bytes": size} for key, (count, size) in sums.items()
        ]

    def _stages_of(self, row: ModuleRow, below: Sequence[Mapping[str, Any]]) -> list[int]:
        own = {stage for path in row.paths for stage in self._stages.get(id(self._internals.node(path).module), ())}
        return sorted(own.union(*(each.get("stages", ()) for each in below)))


def _of_busiest(kinds: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the collectives of each module on the kind of rank that sends most there."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in kinds:
        own: dict[str, list[dict[str, Any]]] = {}
        for call in kind["collectives"]:
            own.setdefault(call["module"], []).append(call)
        for path, calls in own.items():
            if _sent(calls) > _sent(found.get(path, ())):
                found[path] = calls
    return found


def _sent(calls: Sequence[Mapping[str, Any]]) -> int:
    return sum(call["bytes"] + 1 for call in calls)


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in ("", 0, [], None)}


def _source_line(location: str) -> str:
    """Return the line of the user's program that applied a step; empty where the file is not here."""
    file, _, number = location.rpartition(":")
    return linecache.getline(str(Path(file).absolute()), int(number)).strip() if number.isdigit() and file else ""


# -- stages ------------------------------------------------------------------------------------------------------------


def _stages(schedule: Schedule, batch: Any, notes: list[str], tell: Callable[[str], None]) -> Stages | None:
    if not cuts_of(schedule.records):
        return None
    if batch is None:
        notes.append("stages: not shown without a batch, for which the model is cut")
        return None
    tell("the stages")
    try:
        return stages(schedule, batch)
    except SlapoError as error:
        notes.append(f"stages: not shown: {error.message}")
        return None


def _stage_values(schedule: Schedule, cut: Stages) -> dict[str, Any]:
    found = cut.to_json()
    for stage, values in zip(cut.partition.stages, found["stages"], strict=True):
        values["bytes"] = sum(each.numel() * each.element_size() for each in stage.module.parameters())
        values["bytes_sent"] = cut.bytes_sent(stage.index)
        del values["received"]  # what the stage before sends
    return found


def _timeline(
    schedule: Schedule, microbatches: int | None, name: str | None, notes: list[str]
) -> dict[str, Any] | None:
    """Return the work of pipeline ranks over time; None where there are none, or with a note."""
    count = 1 + len(cuts_of(schedule.records))
    pp = schedule.mesh.size("pp") if schedule.mesh is not None and "pp" in schedule.mesh else 1
    is_asked = name is not None or microbatches is not None
    if pp == 1:
        if is_asked:
            raise ArgumentError(
                "microbatches and pipeline_schedule are for stages on ranks along pp (the mesh has pp=1)",
                hint='leave them out, or mesh={"pp": 2} and a model cut by pipeline_split()',
            )
        return None
    name = name or ("1f1b" if count <= pp else "interleaved_1f1b")
    tried = (microbatches,) if microbatches is not None else range(pp, 2 * pp + 1)
    for number in tried:
        try:
            found = timeline.simulate(timeline.orders(name, stages=count, microbatches=number, pp=pp))
            break
        except ArgumentError as error:
            if number == tried[-1]:
                if is_asked:
                    raise
                notes.append(f"pipeline ranks over time: not shown: {error.message}")
                return None
    return {
        "actions": [[one.rank, *dataclasses.astuple(one.action), one.start, one.end] for one in found.actions],
        "bubble": found.bubble,
        "length": found.length,
        "microbatches": number,
        "ranks": found.ranks,
        "schedule": name,
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    mesh = ", ".join(f"{name}={size}" for name, size in data["mesh"].items())
    title = data["title"] if data["title"] == data["model"] else f"{data['title']}: {data['model']}"
    yield f"{title}{f' on {mesh}' if mesh else ''}: {data['steps']} step{'' if data['steps'] == 1 else 's'}"
    of = " of all stages" if data["mesh"].get("pp", 1) > 1 else ""
    yield f"{data['parameters']:,} parameters; on a rank {format_bytes(data['bytes'])}{of}"
    yield ""
    rows = list(_rows(data["tree"], "", ""))
    yield from table_lines(("MODULE", "PARAMETERS", "ON A RANK", "SHARDS", "STEPS"), rows)
    if any(" x " in module for module, *_ in rows):
        yield "x N: a row of N equal modules; it and the rows below have their sums"
    if data["stages"] is not None:
        yield ""
        yield from table_lines(
            ("STAGE", "MODULES", "PARAMETERS", "ON A RANK", "SENDS"), list(_stage_rows(data["stages"]))
        )
    if data["timeline"] is not None:
        ranks = data["timeline"]
        what = f"{ranks['schedule']}, {ranks['microbatches']} micro-batches"
        yield f"\n{what}: ranks wait {100 * ranks['bubble']:.1f} % of a step"
    for kind in data["memory"]["kinds"] if data["memory"] is not None else ():
        peak = kind["peak"]
        where = f"in '{peak['module']}', {peak['phase']}" if peak["module"] else peak["phase"]
        of = f"rank {kind['rank']}, {len(kind['ranks'])} of its kind"
        yield f"\n{of}: {format_bytes(peak['total'])} at the peak, {where}"
    if data["receipt"] is not None:
        yield f"\nreceipt: {data['receipt']['seen']} of {data['receipt']['all']} effects seen"
    for note in data["notes"]:
        yield f"note: {note}"


def _rows(row: Mapping[str, Any], first: str, others: str, parent: str = "") -> Iterator[tuple[str, ...]]:
    name = row["name"] if not row.get("count") or not row["name"][:1].isdigit() else f"{row['name']} x {row['count']}"
    if row.get("count") and row["name"][:1].isdigit() and parent:
        name = f"{parent}.{name}"
    label = f"{name}: {row['type']}" if name else row["type"]
    if "alias" in row:
        yield f"{first}{name}: same module as '{row['alias']}'", "", "", "", ""
        return
    tensors = row.get("tensors", ())
    shards = ", ".join(
        f"{each['name']} {_shape(each.get('after'))} of {_shape(each.get('before'))}"
        for each in tensors
        if "layout" in each
    )
    tied = ", ".join(f"tied to {each['tied_to']}" for each in tensors if "tied_to" in each)
    elements = f"{row['elements']:,}" if row.get("elements") else tied
    mark = "" if not row.get("differs") else " (differs)"
    steps = ", ".join(step["call"] for step in row.get("steps", ()))
    size = format_bytes(row["bytes"]) if row.get("bytes") else ""
    yield f"{first}{label}{mark}", elements, size, shards, steps
    below = row.get("children", ())
    for child in below:
        is_last = child is below[-1]
        yield from _rows(
            child, f"{others}{'└─ ' if is_last else '├─ '}", others + ("   " if is_last else "│  "), row["name"]
        )


def _shape(sizes: Sequence[int] | None) -> str:
    return "nothing" if sizes is None else "x".join(map(str, sizes)) or "a scalar"


def _stage_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for stage in found["stages"]:
        modules = stage["first"] if stage["first"] == stage["last"] else f"{stage['first']} .. {stage['last']}"
        sent = format_bytes(stage["bytes_sent"]) if stage["sent"] else "-"
        yield str(stage["index"]), modules, f"{stage['parameters']:,}", format_bytes(stage["bytes"]), sent
