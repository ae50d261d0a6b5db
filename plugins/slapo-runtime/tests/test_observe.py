"""``observe`` reports what steps did, and puts everything back."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.effects import Calls, Effect
from slapo_core.errors import ArgumentError, SealedError, SlapoError
from slapo_runtime.launcher import run_ranks
from slapo_runtime.receipts.observation import Kernel, Observation
from tests.messages import Messages

X = torch.randn(4, 8, dtype=torch.float64)


class Block(nn.Module):
    """A residual block with dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x + nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.1, self.training))
        return y


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def split(sch: slapo.Schedule) -> None:
    for block in ("0", "1"):
        sch[f"{block}.up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        sch[f"{block}.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        sch[block].checkpoint()


def mean(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.pow(2).mean()


@dataclass(frozen=True)
class Nothing(slapo.Primitive):
    """Promise calls that never happen."""

    name = "tests.nothing"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("nothing to do")

    def effects(self, node: slapo.Node) -> Iterator[Effect]:
        yield Calls("a kernel", 1)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that an observation must leave."""
    return {
        "values": copy.deepcopy({**dict(model.named_parameters()), **dict(model.named_buffers())}),
        "buffers": {name: id(buffer) for name, buffer in model.named_buffers()},
        "gradients": [None if each.grad is None else (id(each.grad), each.grad.clone()) for each in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [{n: dict(table) for n, table in vars(m).items() if n.endswith("_hooks")} for m in model.modules()],
        "rng": torch.get_rng_state(),
    }


def assert_same(before: Any, after: Any) -> None:
    for name, value in before.items():
        if name == "values":
            assert [key for key in value if not torch.equal(value[key], after[name][key])] == []
        elif name == "gradients":
            assert all(
                one is None is other or (one[0] == other[0] and torch.equal(one[1], other[1]))
                for one, other in zip(value, after[name], strict=True)
            )
        elif name == "rng":
            assert torch.equal(value, after[name])
        else:
            assert value == after[name], name


@pytest.mark.parametrize("training", [True, False])
def test_a_scheduled_model_is_as_before(training: bool) -> None:
    sch = slapo.create_schedule(net())
    sch["0"].checkpoint()
    sch.model(X).sum().backward()
    sch.model.train(training)
    before = state(sch.model)
    seen = slapo.observe(sch, X, steps=2)
    assert_same(before, state(sch.model))
    assert not seen.missing
    assert seen.record.steps == 2
    assert seen.record.calls["1"].forward == 2  # also if it was in evaluation mode
    assert seen.ranks[0].seconds is not None
    sch.undo()  # nothing stands in the way


def test_a_scheduled_model_is_as_before_after_an_error() -> None:
    sch = slapo.create_schedule(net())
    sch["0"].checkpoint()
    before = state(sch.model)

    def fails(output: torch.Tensor, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        slapo.observe(sch, X, loss=fails)
    assert_same(before, state(sch.model))


def test_kept_steps_leave_their_gradients_and_statistics() -> None:
    sch, plain = slapo.create_schedule(net()), net()
    torch.manual_seed(1)
    seen = slapo.observe(sch, X, keep=True)
    torch.manual_seed(1)
    plain(X).sum().backward()
    for (name, one), other in zip(sch.model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert torch.equal(one.grad, other.grad), name
    assert torch.equal(sch.model[0].norm.running_mean, plain[0].norm.running_mean)
    assert seen.ranks[0].seconds is None


def test_a_missing_effect_names_its_step() -> None:
    sch = slapo.create_schedule(net())
    for block in ("0", "1"):
        sch[block].apply(Nothing())
    sch["1"].checkpoint()
    seen = slapo.observe(sch, X)
    assert [one.source for one in seen.missing] == [str(record) for record in sch.records[:2]]
    text = str(seen)
    assert text.startswith("effects seen: 1 of 3")
    assert "#1-2 nothing()" in text
    assert "'{0-1}' (x 2)" in text
    assert text.count("missing: #") == 2
    assert json.loads(json.dumps(seen.to_json()))["missing"] == 2


@pytest.mark.parametrize("output", ["loss", "mapping", "several"])
def test_the_loss_of_the_output_or_its_differentiable_tensors(output: str) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.other = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> Any:
            y, z = self.fc(x), self.other(x)
            if output == "several":
                return {"y": y, "z": [z], "labels": torch.ones(2)}
            return {"loss": y.sum(), "z": z} if output == "mapping" else _Output(y.sum(), z)

    sch = slapo.create_schedule(Head().double())
    record = slapo.observe(sch, (X,)).record
    reached = {place.module for place in record.operators if place.phase == "backward"}
    assert "fc" in reached
    assert ("other" in reached) == (output == "several")


@dataclass
class _Output:
    loss: torch.Tensor
    z: torch.Tensor


def built(**config: Any) -> Any:
    sch = slapo.create_schedule(net())
    sch["0"].checkpoint()
    return slapo.build(
        sch,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        loss=mean,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        **config,
    )


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_observed_engine_trains_on_as_if_it_was_not(steps_before: int) -> None:
    losses = []
    for is_observed in (False, True):
        engine = built()
        torch.manual_seed(1)
        for _ in range(steps_before):
            engine.train_step(X)
        if is_observed:
            seen = slapo.observe(engine, X, steps=2)
            assert not seen.missing
            assert next(one.expected for one in seen.findings).startswith("a forward that backward recomputes")
            assert seen.ranks[0].types["optimizer state"]
            assert seen.record.calls["1"].forward == 2
        assert engine.steps == steps_before
        losses.append([engine.train_step(X).loss.item() for _ in range(3)])
        losses[-1].append(engine.optimizer.param_groups[0]["lr"])
        losses[-1] += [float(buffer.sum()) for buffer in engine.module.buffers()]
    assert losses[0] == losses[1]


def test_kept_steps_of_an_engine_are_training_steps() -> None:
    engine, plain = built(), built()
    torch.manual_seed(1)
    slapo.observe(engine, X, steps=2, keep=True)
    torch.manual_seed(1)
    for _ in range(2):
        plain.train_step(X)
    assert engine.steps == 2
    for one, other in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_memory_at_the_peak_is_that_of_the_step() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()))
    memory = slapo.observe(sch, torch.randn(512, 256)).ranks[0].memory
    weight, rows = 256 * 256 * 4, 512 * 256 * 4
    assert memory.parameters == weight
    assert memory.inputs == rows
    assert memory.total >= 2 * weight + 3 * rows  # also the product, the gradient and what relu keeps
    assert memory.total < 2 * weight + 6 * rows


def test_what_ranks_differ_in_is_told_with_the_ranks() -> None:
    sch = slapo.create_schedule(net())
    sch["0"].checkpoint()
    (one,) = slapo.observe(sch, X).ranks
    (finding,) = one.findings
    other = dataclasses.replace(one, rank=1, findings=(dataclasses.replace(finding, seen="none", is_seen=False),))
    both = Observation(1, {"tp": 2}, (one, other))
    assert [found.ranks for found in both.findings] == [(0,), (1,)]
    assert [str(found).count("on rank 1: none") for found in both.missing] == [1]
    assert "MISSING: none on rank 1" in str(both)
    again = Observation(1, {"tp": 2}, (one, dataclasses.replace(one, rank=1)))
    assert [found.ranks for found in again.findings] == [()]


def test_kernels_are_listed_without_arguments_of_templates() -> None:
    names = {
        "void at::native::(anonymous namespace)::dropout<c10::Half, 1>(TensorInfo<float>, int)": "at::native::dropout",
        "nvjet_sm90_tst_64x8_TNT": "nvjet_sm90_tst_64x8_TNT",
    }
    assert [Kernel(name, 1, 1e-5).short_name for name in names] == list(names.values())
    sch = slapo.create_schedule(nn.Linear(3, 3), example_inputs=(torch.ones(2, 3),))
    seen = slapo.observe(sch, (torch.ones(2, 3),), loss=lambda output, _: output.sum())
    ours = dataclasses.replace(seen.ranks[0], kernels=tuple(Kernel(name, 12, 2.816e-05) for name in names))
    rows = str(dataclasses.replace(seen, ranks=(ours,))).splitlines()[-3:]
    assert [row.split() for row in rows] == [
        ["KERNEL", "RUNS", "TIME"],
        ["at::native::dropout", "12", "28.2", "µs"],
        ["nvjet_sm90_tst_64x8_TNT", "12", "28.2", "µs"],
    ]


def test_refusals(message: Messages) -> None:
    sealed = slapo.create_schedule(net())
    sealed.seal()
    engine = built()
    sch = slapo.create_schedule(net())
    frozen = slapo.create_schedule(net().requires_grad_(False))
    calls: list[tuple[type[SlapoError], tuple[str, ...], Any]] = [
        (ArgumentError, ("steps", "got 0"), lambda: slapo.observe(sch, X, steps=0)),
        (ArgumentError, ("loss must be", "got str"), lambda: slapo.observe(sch, X, loss="mse")),  # type: ignore[arg-type]
        (ArgumentError, ("one batch",), lambda: slapo.observe(sch)),
        (ArgumentError, ("one batch",), lambda: slapo.observe(engine)),
        (ArgumentError, ("got Sequential",), lambda: slapo.observe(net(), X)),  # type: ignore[arg-type]
        (ArgumentError, ("own loss",), lambda: slapo.observe(engine, X, loss=mean)),
        (ArgumentError, ("nothing to differentiate",), lambda: slapo.observe(frozen, X)),
        (SealedError, ("sealed",), lambda: slapo.observe(sealed, X)),
        (ArgumentError, ("got int",), lambda: slapo.observe(sch, X).compare(3)),
    ]
    for error, words, call in calls:
        with pytest.raises(error) as refused:
            call()
        message(refused, *words)
        assert refused.value.hint


@pytest.mark.ranks
def test_a_declared_mesh_is_observed_in_processes_of_its_ranks() -> None:
    sch = slapo.create_schedule(net(), mesh={"tp": 2})
    split(sch)
    sch["0.norm"].apply(Nothing())
    seen = slapo.observe(sch, X, loss=mean)
    assert [one.rank for one in seen.ranks] == [0, 1]
    assert [one.source for one in seen.missing] == [str(sch.records[-1])]
    for one in seen.ranks:
        made = {(call.kind, call.mesh_dim, call.phase, call.bytes): n for call, n in one.record.collectives.items()}
        size = 4 * 8 * 8
        assert made["all_reduce", "tp", "forward", size] >= 1
        assert sum(one.record.collectives.values()) >= 3
        assert all(call.record for call in one.record.collectives)
    assert "2 ranks" in str(seen)


@pytest.mark.ranks
def test_a_live_mesh_is_observed_by_its_ranks() -> None:
    found = run_ranks(_observe_live, world_size=2)
    assert found[0] == found[1]
    text, missing, losses = found[0]
    assert missing == 0
    assert "over 'tp'" in text
    assert losses[0] == losses[1]


def _observe_live() -> tuple[str, int, list[float]]:
    sch = slapo.create_schedule(net(), mesh={"tp": 2})
    split(sch)
    seen = slapo.observe(sch, X)
    losses, text = [], ""
    for is_observed in (False, True):
        sch = slapo.create_schedule(net(), mesh={"tp": 2})
        split(sch)
        engine = slapo.build(sch, optimizer=partial(torch.optim.SGD, lr=1e-2), loss=mean)
        torch.manual_seed(2)
        engine.train_step(X)
        if is_observed:
            of_engine = slapo.observe(engine, X)
            text = "\n".join(map(str, of_engine.findings))
            assert not of_engine.missing, text
        losses.append(engine.train_step(X).loss.item())
    return text, len(seen.missing), losses
