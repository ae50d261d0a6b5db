"""The full schedules: lines, kernels, collectives; verified, saved and replayed, estimated, tuned."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_models
import slapo_tune

from slapo_models import schedules

from .families import FAMILIES

EVERYTHING = {"kernels": True, "checkpoint": 0.5, "embeddings": True}


def sampled(*names: str) -> list[Any]:
    """All families, those not named in the whole run only."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.breadth) for name in FAMILIES]


def lines_of(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> int:
    """Lines of statements without headers of loops and branches and without the docstring, and those of its helpers."""
    headed = (ast.For, ast.If, ast.With, ast.FunctionDef)
    found = [each for each in ast.walk(function) if isinstance(each, ast.stmt) and not isinstance(each, headed)]
    if ast.get_docstring(function) is not None:
        found.remove(function.body[0])
    called = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)} & functions.keys()
    helpers = sum(lines_of(functions[name], functions) for name in called)
    return helpers + sum((each.end_lineno or each.lineno) - each.lineno + 1 for each in found)


def parsed(source: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("name", FAMILIES)
def test_lines_of_schedule_are_at_most_those_of_the_papers_table(name: str) -> None:
    functions = parsed(inspect.getsource(schedules))
    assert 0 < lines_of(functions[name], functions) <= FAMILIES[name].lines


def test_the_count_of_lines_has_helpers_and_wrapped_statements_and_no_headers() -> None:
    source = '''
def helper(sch):
    """It helps."""
    sch.a()


def schedule(sch):
    """Schedule.

    More.
    """
    for each in sch:
        if each:
            each.b(
                1,
            )
    helper(sch)
'''
    functions = parsed(source)
    assert {name: lines_of(function, functions) for name, function in functions.items()} == {"helper": 1, "schedule": 5}


def scheduled(name: str, mesh: dict[str, int], **options: Any) -> slapo.Schedule:
    family = FAMILIES[name]
    sch = slapo.create_schedule(family.make(), mesh=mesh, example_inputs=family.batch)
    family.apply(sch, **{**EVERYTHING, **options})
    return sch


@pytest.mark.parametrize("name", FAMILIES)
def test_each_layer_has_its_kernels_and_the_schedule_can_be_replayed(name: str) -> None:
    family = FAMILIES[name]
    sch = scheduled(name, {"pp": 2, "tp": 2}, stages=2)
    layers = [layer.path for layer in sch[family.layers]]
    found = {pattern: dict.fromkeys(layers, 0) for pattern in family.kernels}
    for record in sch.records:
        for match in getattr(record.primitive, "match", None) or ():
            found[match.pattern.name][match.path] += 1
    assert {pattern: tuple(counts.values()) for pattern, counts in found.items()} == family.kernels
    checkpointed = [record.path for record in sch.records if record.primitive.name == "core.checkpoint"]
    assert checkpointed == layers[: round(len(layers) / 2)]
    (cut,) = [record.path for record in sch.records if record.primitive.name == "pipeline.pipeline_split"]
    assert cut == layers[len(layers) // 2 - 1]

    again = slapo.replay(family.make(), sch.to_json(), example_inputs=family.batch)
    assert [str(record) for record in again.records] == [str(record) for record in sch.records]
    assert str(again[layers[-1]].graph) == str(sch[layers[-1]].graph)


# Per layer, (forward, backward); a block of T5's decoder has another cross-attention, which reads two values.
ALL_REDUCES = {name: dict.fromkeys(("layer",), (2, 2)) for name in FAMILIES}


@pytest.mark.ranks
@pytest.mark.parametrize("name", sampled("llama", "t5"))
def test_a_layer_has_the_all_reduces_of_megatrons_layout(name: str) -> None:
    family = FAMILIES[name]
    sch = scheduled(name, {"tp": 2}, checkpoint=0.0)
    (kind,) = sch.estimate(optimizer=torch.optim.AdamW, loss=family.loss).kinds
    layers = {layer.path: Counter[str]() for layer in sch[family.layers]}
    outside = Counter[tuple[str, str]]()
    for each in kind.collectives:
        path = next((path for path in layers if each.module.startswith(f"{path}.")), None)
        if path is None:
            outside[each.kind, each.phase] += 1
        else:
            layers[path][each.phase] += 1
    print(layers, outside)
