"""Schedules printed as Python: run again, they give the same records."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import SerializationError, SlapoError
from slapo_models.source import python_source

from .families import FAMILIES

MESH = {"pp": 2, "tp": 2}


def run(source: str, sch: slapo.Schedule) -> slapo.Schedule:
    space: dict[str, Any] = {}
    exec(compile(source, "printed", "exec"), space)
    space["schedule"](sch)
    return sch


def sampled(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases of which those not kept run in the whole run only."""
    return [pytest.param(each, marks=() if each in kept else pytest.mark.breadth) for each in cases]


@pytest.mark.parametrize("name", sampled(FAMILIES, "llama", "t5"))
def test_source_of_a_familys_schedule_gives_its_records(name: str) -> None:
    family = FAMILIES[name]

    def new() -> slapo.Schedule:
        return slapo.create_schedule(family.make(), mesh=MESH, example_inputs=family.batch)

    sch = new()
    family.apply(sch, kernels=False, checkpoint=0.5, stages=2)
    source = python_source(sch)
    assert run(source, new()).records == sch.records
    assert source.count("\n") < 45


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["llama", "bert"], "llama"))
def test_source_has_the_names_of_patterns(name: str) -> None:
    family = FAMILIES[name]

    def new() -> slapo.Schedule:
        return slapo.create_schedule(family.make(), mesh=MESH, example_inputs=family.batch)

    sch = new()
    family.apply(sch, kernels=True, checkpoint=1.0)
    source = python_source(sch)
    assert run(source, new()).records == sch.records
    assert '.replace(match="fusion.sdpa")' in source


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.q_proj(x) * self.k_proj(x))


class Drawn(nn.Module):
    """Two lists of blocks, a single module, and a name that is no identifier of a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.layer = nn.ModuleList(Part() for _ in range(12)), nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.h, *self.layer):
            x = block(x)
        return self.head(x)


CALLS = (
    lambda node: node.shard("weight", axis=0),
    lambda node: node.shard(["bias"], axis=0),
    lambda node: node.shard("weight", axis=1),
    lambda node: node.sync("fwd_post", "all_reduce"),
    lambda node: node.sync("bwd_post", "all_reduce"),
    lambda node: node.checkpoint(),
    lambda node: node.fork_rng(),
    lambda node: node.pipeline_split(),
)
PLACES = ("", ".q_proj", ".k_proj", ".out", ".[qk]_proj")


def drawn(seed: int) -> slapo.Schedule:
    """A schedule of groups, single places and layer by layer, in any order; refused steps are left out."""
    generator = random.Random(seed)
    sch = slapo.create_schedule(Drawn(), mesh=MESH, example_inputs=torch.randn(2, 8))
    for _ in range(generator.randint(1, 14)):
        container, below = generator.choice(("h", "layer")), generator.choice(PLACES)
        calls = generator.sample(CALLS, generator.randint(1, 3))
        count = len(sch.model.get_submodule(container))  # type: ignore[arg-type]
        numbers = sorted(generator.sample(range(count), generator.randint(1, count)))
        if generator.random() < 0.3:
            generator.shuffle(numbers)
        paths = [f"{container}.*{below}"] if generator.random() < 0.4 else [f"{container}.{n}{below}" for n in numbers]
        paths = ["head"] if generator.random() < 0.1 else paths
        order = [(path, call) for path in paths for call in calls]
        if generator.random() < 0.5:
            order = [(path, call) for call in calls for path in paths]
        for path, call in order:
            try:
                call(sch[path])
            except SlapoError:
                continue
    return sch


@pytest.mark.parametrize("seed", sampled(range(40), *range(12)))
def test_source_of_drawn_orders_gives_their_records(seed: int) -> None:
    sch = drawn(seed)
    new = slapo.create_schedule(Drawn(), mesh=MESH, example_inputs=torch.randn(2, 8))
    assert run(python_source(sch), new).records == sch.records


def test_layer_by_layer_becomes_one_loop_and_a_range_a_slice() -> None:
    sch: Any = slapo.create_schedule(Drawn(), mesh=MESH)
    for number in range(2, 9):
        block = sch[f"h.{number}"]
        block["q_proj"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        block["out"].shard("weight", axis=1)
    for number in range(5):
        sch[f"h.{number}"].checkpoint()
    assert python_source(sch, "split").split("\n\n\n")[1] == (
        "def split(sch: slapo.Schedule) -> None:\n"
        '    blocks = sch["h.*"]\n'
        "    for block in blocks[2:9]:\n"
        '        block["q_proj"].shard("weight", axis=0).sync("bwd_post", "all_reduce")\n'
        '        block["out"].shard("weight", axis=1)\n'
        "    blocks[:5].checkpoint()\n"
    )


def test_no_steps_are_a_function_that_does_nothing() -> None:
    sch = slapo.create_schedule(Drawn())
    assert not run(python_source(sch), slapo.create_schedule(Drawn())).records


def test_a_step_without_source_is_refused() -> None:
    sch: Any = slapo.create_schedule(Drawn())
    sch["head"].replace(nn.Linear(8, 8))
    with pytest.raises(SerializationError, match="has no source"):
        python_source(sch)


def test_some_of_the_matches_of_a_pattern_have_no_source() -> None:
    sch: Any = slapo.create_schedule(Drawn(), example_inputs=torch.randn(2, 8))
    sch["h.0"].trace()
    sch["h.0"].fuse(lambda x, y: x * y, compiler="eager")
    with pytest.raises(SerializationError, match="pattern with a name"):
        python_source(sch)
