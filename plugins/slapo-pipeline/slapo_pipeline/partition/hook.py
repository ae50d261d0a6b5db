"""`slapo_partition`: where the steps of a schedule cut it, and the stages that this makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slapo_core import TraceError, hookimpl
from slapo_core.spec.pipeline import Output, Partition, Stage, Value
from slapo_core.tracing import FlatGraph, compiled, flat
from slapo_pipeline.partition.output import assembler
from slapo_pipeline.partition.places import Places, Uncuttable
from slapo_pipeline.partition.segments import Segment, Segments
from slapo_pipeline.partition.stage import CutStage
from slapo_pipeline.partition.ties import ties_of
from slapo_pipeline.split import PipelineSplit

__all__ = ["slapo_partition"]


@hookimpl
def slapo_partition(schedule: Any, inputs: Mapping[str, Any], batch_axes: Mapping[str, int | None]) -> Partition | None:
    """The stages between the cuts of :class:`PipelineSplit`.

    Source: paper section 3.4, partition propagation.
    """
    cuts = {
        path: record
        for record in schedule.records
        if isinstance(record.primitive, PipelineSplit)
        for path in record.primitive.cuts(record.path)
    }
    if not cuts:
        return None
    root = schedule.model
    above = {path[:end] for path in cuts for end, letter in enumerate(path) if letter == "."} | {""}
    with torch.enable_grad():
        graph = flat(root, type(root).forward, inputs, lambda module, path: path not in above)
    try:
        places = Places(graph, list(cuts))
        return _partition(root, graph, places)
    except Uncuttable as error:
        path = error.path or next(iter(cuts))
        raise TraceError(
            f"cannot cut after '{path}' ({cuts[path]}): {error.problem}",
            path=path,
            location=error.location,
            hint=error.hint,
        ) from error


def _partition(root: nn.Module, graph: FlatGraph, places: Places) -> Partition:
    segments = Segments(graph, places)
    pieces: dict[Any, str] = {}
    output = next(node for node in graph.recorded.graph.nodes if node.op == "output")
    assemble = assembler(output.args[0], graph, pieces)
    for node in pieces:
        segments.give(node)
    stages, values = [], {}
    for segment in segments.segments:
        stages.append(_stage(root, graph, places, segment))
        for node in segment.makes:
            tensor = graph.notes.values[node]
            readers = tuple(other.index for other in segments.segments if node in other.uses)
            values[node.name] = Value(
                node.name, segment.index, readers, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
            )
    return Partition(tuple(stages), values, ties_of(stages, root), Output(tuple(pieces.values()), assemble))


def _stage(root: nn.Module, graph: FlatGraph, places: Places, segment: Segment) -> Stage:
    module = CutStage(segment.index)
    for node in segment.graph.nodes:
        if node.op == "call_module":
            module.hold(str(node.target), root.get_submodule(str(node.target)))
    for node in segment.graph.nodes:
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            tensor = getattr(root.get_submodule(owner), name)
            if not _has(module, str(node.target)):
                module.hold_tensor(str(node.target), tensor)
    segment.graph.output({node.name: made for node, made in segment.makes.items()})
    sources: list[tuple[str, Any]] = []
    inputs = {made: name for name, made in segment.inputs.items()}
    used = {made: node.name for node, made in segment.uses.items()}
    captured = {made: number for number, made in segment.captured.items()}
    for node in segment.graph.nodes:
        if node.op != "placeholder":
            continue
        if node in inputs:
            sources.append(("input", inputs[node]))
        elif node in used:
            sources.append(("value", used[node]))
        elif node in captured:
            sources.append(("constant", graph.recorded.captured[captured[node]]))
        else:
            sources.append(("grad", None))
    module.run_with(compiled(segment.graph, module), sources, graph.require, graph.violated)
    return Stage(
        segment.index,
        module,
        tuple(segment.inputs),
        tuple(node.name for node in segment.uses),
        tuple(node.name for node in segment.makes),
        places.order[segment.index] if segment.index < places.count - 1 else None,
    )


def _has(module: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    try:
        return hasattr(module.get_submodule(owner), name)
    except AttributeError:
        return False
