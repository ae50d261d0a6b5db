"""`build(receipts=True)`: the first step is compared with what the steps promise, and nothing stays."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import Edit, Equivalence, Node, Primitive
from slapo_core.effects import Calls, Effect
from slapo_core.observers import happened
from slapo_runtime.launcher import run_ranks
from slapo_runtime.receipts.collectives import CollectiveCall
from slapo_runtime.receipts.engines import built_of
from slapo_runtime.receipts.receipt import unexplained
from slapo_runtime.receipts.watch import Observed


@dataclass(frozen=True)
class Reported(Primitive):
    """Report each forward, if it ``works``."""

    name = "tests.reported"
    equivalence = Equivalence.EXACT

    works: bool = True
    raises: bool = False

    def apply(self, node: Node, edit: Edit) -> None:
        works = self.works

        def reported(forward: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                if works:
                    happened("call", "report")
                return forward(*args, **kwargs)

            return run

        edit.wrap_forward(node, reported)

    def effects(self, node: Node) -> Iterator[Effect]:
        if self.raises:
            raise ZeroDivisionError("in effects")
        yield Calls("report", 1)


def scheduled(**arguments: Any) -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    sch["0"].apply(Reported(**arguments))
    return sch


def built(sch: slapo.Schedule, **options: Any) -> Any:
    return slapo.build(
        sch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
        **options,
    )


BATCH = (torch.ones(3, 4),)


def test_a_step_in_effect_passes_and_leaves_nothing() -> None:
    plain, engine = built(scheduled()), built(scheduled(), receipts=True)
    with pytest.raises(RuntimeError):
        engine.train_step((torch.ones(3, 5),))
    assert "train_step" in vars(engine)  # no step yet
    losses = [[one.train_step(BATCH).loss.item() for _ in range(2)] for one in (plain, engine)]
    assert losses[0] == losses[1]
    assert "train_step" not in vars(engine)
    hooks = [list(module._forward_pre_hooks) for module in engine.module.modules()]
    assert hooks == [list(module._forward_pre_hooks) for module in plain.module.modules()]
    wrappers = [one.module.get_submodule("0").__dict__["forward"].wrappers[0] for one in (plain, engine)]
    assert [one.__qualname__ for one in wrappers] == ["Reported.apply.<locals>.reported"] * 2


def test_a_step_without_its_effect_raises_with_its_line() -> None:
    sch = scheduled(works=False)
    engine = built(sch, receipts=True)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    with pytest.raises(slapo.ReceiptError, match="1 of 1 effects are missing") as caught:
        engine.train_step(BATCH)
    error = caught.value
    assert error.record == "#1 reported(False) at '0'"
    assert error.location == sch.records[0].location
    assert "test_first_step_receipts.py:" in error.location
    assert error.expected == "1 calls of report"
    assert error.seen.startswith("0 of 1")
    assert any(not torch.equal(before[name], now) for name, now in engine.state_dict().items())
    engine.train_step(BATCH)  # the first step alone is looked at


def missing_on_the_last_rank() -> tuple[str, str]:
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh={"dp": 2})
    sch["0"].apply(Reported())
    engine = built(sch, receipts=True)
    if torch.distributed.get_rank() == 1:
        layer = engine.module.get_submodule("0")
        layer.forward = nn.Linear.forward.__get__(layer)
    with pytest.raises(slapo.ReceiptError) as caught:
        engine.train_step(BATCH)
    assert isinstance(caught.value, slapo.ReceiptError)
    engine.train_step(BATCH)
    return str(caught.value).partition("\n")[0], caught.value.record


@pytest.mark.ranks
def test_an_effect_that_one_rank_misses_raises_on_every_rank() -> None:
    first, second = run_ranks(missing_on_the_last_rank, world_size=2, timeout=120.0)
    assert first == second
    assert "missing on rank 1 in the first" in first[0]
    assert first[1] == "#1 reported() at '0'"


def test_a_broken_effects_method_breaks_receipts_alone() -> None:
    built(scheduled(raises=True)).train_step(BATCH)
    sch = scheduled(raises=True)
    with pytest.raises(slapo.ApplyError, match="ZeroDivisionError: in effects"):
        built(sch, receipts=True)
    assert not sch.is_sealed


def test_an_engine_is_known_as_long_as_it_lives() -> None:
    sch = scheduled()
    engine = built(sch)
    known = built_of(engine)
    assert known is not None
    assert known.schedule is sch
    assert known.plan.target == "torch"
    with known.watch().watching() as record:
        engine.train_step(BATCH)
    assert [event.place.record for event in record.happenings] == ["#1 reported() at '0'"]
    gone = weakref.ref(known)
    del engine, known
    gc.collect()
    assert gone() is None
    assert built_of(object()) is None  # type: ignore[arg-type]
    assert built_of([]) is None  # type: ignore[arg-type]


def test_a_runtime_exchanges_over_replicas_and_stages_without_declaring_it() -> None:
    made = [CollectiveCall("all_reduce", dim, 2, 64, "0", "backward") for dim in ("dp", "pp", "tp")]
    record = Observed(steps=1, collectives=Counter(made))
    assert [one.seen for one in unexplained(record, (), by_runtime=True)] == ["1 all_reduce over 'tp' in '0'"]
    assert len(list(unexplained(record, ()))) == 3
    between = CollectiveCall("all_reduce", "tp", 2, 64, "", "optimizer", in_passes=False)
    assert not list(unexplained(Observed(steps=1, collectives=Counter([between])), ()))
