"""Two ranks: several stages on each, recomputation, a loss that is given, dropout; and that the guards are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.stages.partition import Value
from slapo_testing import preload_modules, run_ranks
from tests.support.odd_pipelines import Run, adamw, batch, differences

pytestmark = pytest.mark.ranks
preload_modules(
    "deepspeed.pipe",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "slapo_deepspeed.pipeline",
    "slapo_pipeline.partition.hook",
)

TWO = {"pp": 2}


def recomputed() -> list[str]:
    return differences(Run(TWO, cuts=("b",), config={"pipeline": {"activation_checkpoint_interval": 1}}))


def several_on_a_rank() -> list[str]:
    return differences(Run(TWO, cuts=("a", "b", "d"), micro_batches=4))


class Plain(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.drop = nn.Linear(4, 4), nn.Linear(4, 2), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.two(self.drop(self.one(x))))


def built(dropout: float, mesh: dict[str, int], **config: Any) -> Any:
    sch = slapo.create_schedule(Plain(dropout), mesh=mesh, example_inputs={"x": torch.ones(1, 4)})
    sch["one"].pipeline_split()
    return slapo.build(
        sch,
        target="deepspeed",
        config={"gradient_accumulation_steps": 2, **config},
        optimizer=adamw,
        loss=lambda output, given: (output - given["only for the loss"]).square().mean(),
    )


def given_loss() -> list[float]:
    """The loss is given, and reads what the model does not; the batch's form changes."""
    engine, model, found = built(0.0, TWO), Plain(0.0), []
    optimizer = adamw(model.parameters())
    for step in range(3):
        given = {"x": torch.randn(2 + 2 * step, 4), "only for the loss": torch.randn(2 + 2 * step, 2)}
        optimizer.zero_grad()
        loss = (model(given["x"]) - given["only for the loss"]).square().mean()
        loss.backward()
        optimizer.step()
        found.append(float(engine.train_step(given).loss - loss.detach()))
    engine.close()
    return found


def dropping() -> tuple[list[float], bool]:
    """Losses of a model with dropout; and whether the ranks of the replica draw alike after it."""
    found = []
    for interval in (0, 1):
        torch.manual_seed(3)
        engine = built(0.5, TWO, pipeline={"activation_checkpoint_interval": interval})
        torch.manual_seed(4)
        given = {"x": torch.ones(8, 4), "only for the loss": torch.zeros(8, 2)}
        found += [float(engine.train_step(given).loss) for _ in range(3)]
        engine.close()
    numbers = [torch.zeros(1) for _ in range(2)]
    torch.distributed.all_gather(numbers, torch.rand(1))
    return found, bool(numbers[0] == numbers[1])


def counting_copies() -> list[str]:
    """Without the mark on copies of ties."""
    from slapo_deepspeed import pipeline as module

    original = module.count_once
    module.count_once = lambda context, copies: original(context, ())
    try:
        return differences(Run(TWO, cuts=("b",), tied=True))
    finally:
        module.count_once = original


def sending_as_it_is() -> None:
    """Every value goes as it is."""
    torch.set_num_threads(1)
    from slapo_runtime.stages import runner as work

    class Naive(work.P2PMessage):
        def __init__(self, values: list[Value], *, backward: bool, **_: Any) -> None:
            super().__init__(values, backward=backward)
            self.values = values

        def empty(self, device: torch.device) -> tuple[torch.Tensor, ...]:
            return tuple(torch.zeros(value.shape, dtype=value.dtype) for value in self.values)

        def pack(self, there: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
            return tuple(there[value.name].contiguous() for value in self.values)

        def unpack(self, message: Any) -> Any:
            return {value.name: one for value, one in zip(self.values, message, strict=True)}, None

    work.P2PMessage = Naive  # type: ignore[misc]
    Run(TWO, cuts=("c",)).build().train_step(batch(2, 0))


def on_two_ranks() -> tuple[Any, ...]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return (
        recomputed(),
        several_on_a_rank(),
        given_loss(),
        dropping(),
        counting_copies(),
    )


def test_two_ranks() -> None:
    recomputing, several, losses, drawn, copies = zip(*run_ranks(on_two_ranks, world_size=2), strict=True)
    assert recomputing == ([], [])
    assert several == ([], [])
    assert all(abs(difference) < 1e-6 for one in losses for difference in one)
    for numbers, are_alike in drawn:
        assert numbers[:3] == pytest.approx(numbers[3:])  # what is recomputed drops the same
        assert len({round(number, 5) for number in numbers}) == 3  # every step drops others
        assert are_alike  # a loader that draws goes on alike
    assert all(any("norm of step 0" in one for one in found) for found in copies)


def test_values_that_go_as_they_are_end_the_step() -> None:
    with pytest.raises(slapo.RankFailedError, match="AssertionError"):  # DeepSpeed wants a gradient for everything
        run_ranks(sending_as_it_is, world_size=2)
