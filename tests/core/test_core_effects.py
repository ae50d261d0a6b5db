"""What checkpointed and replaced modules show in a training step, and that it is missing where they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo


class Block(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Blocks, of which a list keeps the modules that it began with."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.kept: list[nn.Module] = []
        self.without_gradients, self.unused = False, -1

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.kept or self.blocks):
            with torch.set_grad_enabled(not self.without_gradients):
                y = block(x)
            x = x if number == self.unused else y
        return x if x.requires_grad else x + self.blocks[0].up.bias.sum()


def schedule() -> slapo.Schedule:
    torch.manual_seed(0)
    return slapo.create_schedule(Model().double())


def observed(sch: slapo.Schedule) -> slapo.Observation:
    return slapo.observe(sch, torch.randn(2, 4, dtype=torch.float64))


def sources(findings: Any) -> list[str]:
    return [each.source.partition(" (")[0] for each in findings]


def test_each_checkpointed_module_is_seen_to_be_recomputed() -> None:
    sch = schedule()
    sch["blocks.*"].checkpoint()
    found = observed(sch)
    assert not found.missing
    assert len(found.findings) == 3
    assert "1 recomputed" in found.findings[0].seen


def no_gradients(sch: slapo.Schedule) -> None:
    sch.model.without_gradients = True


def another_forward(sch: slapo.Schedule) -> None:
    block = sch.model.blocks[1]
    block.forward = Block.forward.__get__(block)


@pytest.mark.parametrize(
    ("plant", "missing"), [(no_gradients, [1, 2, 3]), (another_forward, [2])], ids=["no_grad", "another_forward"]
)
def test_a_checkpoint_that_recomputes_nothing_is_missing(plant: Callable[[Any], None], missing: list[int]) -> None:
    sch = schedule()
    sch["blocks.*"].checkpoint()
    plant(sch)
    found = observed(sch).missing
    assert sources(found) == [str(sch.records[number - 1]).partition(" (")[0] for number in missing]
    assert found[0].cause


def test_an_inner_recomputation_does_not_stand_for_an_outer_one() -> None:
    sch = schedule()
    sch["blocks.1.up"].checkpoint()
    sch["blocks.1"].checkpoint()
    assert not observed(sch).missing
    sch = schedule()
    sch["blocks.1.up"].checkpoint()
    sch["blocks.1"].checkpoint()
    another_forward(sch)
    assert sources(observed(sch).missing) == [str(sch.records[1]).partition(" (")[0]]


def test_a_module_whose_output_is_unused_is_no_alarm() -> None:
    sch = schedule()
    sch["blocks.*"].checkpoint()
    sch.model.unused = 1
    assert not observed(sch).missing


def test_a_frozen_module_is_no_alarm() -> None:
    sch = schedule()
    sch["blocks.0"].checkpoint()
    sch.model.blocks[0].requires_grad_(False)
    assert not observed(sch).missing


class Wide(Block):
    """Another implementation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))) + x


def test_a_replaced_module_is_seen_to_be_called() -> None:
    sch = schedule()
    sch["blocks.*"].replace(lambda old: Wide().double())
    found = observed(sch)
    assert not found.missing
    assert len(found.findings) == 3


def test_a_replacement_is_missing_where_the_old_module_runs() -> None:
    sch = schedule()
    old = list(sch.model.blocks)
    sch["blocks.*"].replace(lambda old: Wide().double())
    sch.model.kept = [old[0], *list(sch.model.blocks)[1:]]
    (missing,) = observed(sch).missing
    assert missing.source == str(sch.records[0])
    assert "replaced" in missing.cause


def test_an_unobserved_checkpoint_reports_to_nobody() -> None:
    from slapo_core.observers import is_observed, watched

    sch = schedule()
    sch["blocks.*"].checkpoint()
    assert not is_observed()
    seen: list[str] = []
    with watched(lambda event, name, **facts: seen.append(name)):
        sch.model(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
    assert sorted(seen) == ["blocks.0", "blocks.1", "blocks.2"]
    assert not is_observed()
