"""Effects of cuts: messages between stages in an engine, and none of a schedule that runs in one piece."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_runtime.receipts.receipt import Expectation, expectations, receipt
from slapo_runtime.receipts.watch import Observed, Watch
from slapo_testing import run_ranks

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def after_a_layer(sch: Any) -> None:
    sch["layers.1"].pipeline_split()


def in_a_list(sch: Any) -> None:
    sch["layers"].pipeline_split(stages=2)


def scheduled(apply: Any) -> slapo.Schedule:
    sch = slapo.create_schedule(Net(), mesh={"pp": 2}, example_inputs=torch.ones(2, 4, dtype=torch.float64))
    apply(sch)
    return sch


def missing(expected: list[Expectation], record: Observed) -> tuple[int, list[str]]:
    found = receipt(expected, record)
    return len(found), [str(one) for one in found if not one.is_seen]


def check(apply: Any) -> tuple[Any, Any, Any]:
    """Return what a built engine shows, what the uncut model does, and what it would miss as an engine."""
    sch = scheduled(apply)
    expected = expectations(sch, by_runtime=True)
    batch = torch.ones(2, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = slapo.build(
            sch,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            microbatches=2,
            loss=lambda output, batch: output.sum(),
        )
        with Watch(sch).watching() as built:
            built.steps = 1
            engine.train_step(batch)
    whole = scheduled(apply)
    of_engine, alone = expectations(whole, by_runtime=True), expectations(whole)
    with Watch(whole).watching() as record:
        record.steps = 1
        whole.model(batch).sum().backward()
    return missing(expected, built), missing(alone, record), missing(of_engine, record)


@pytest.mark.parametrize("apply", [after_a_layer, in_a_list])
def test_a_cut_is_seen_by_its_messages_on_the_rank_before_it(apply: Any) -> None:
    (first, *others), (last, *_) = run_ranks(functools.partial(check, apply), world_size=2)
    assert first == (1, [])
    assert last == (0, [])
    alone, (number, found) = others
    assert alone == (0, [])
    assert number == 1
    assert "pipeline_split" in found[0]
    assert "expected send over 'pp' in each step, seen: 0 send" in found[0]
