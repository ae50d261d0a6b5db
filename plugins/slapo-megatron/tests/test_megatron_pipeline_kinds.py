"""Dropout, recomputation, buffers and losses in Megatron's pipeline; and that its guards are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.testing import preload_modules, run_ranks
from tests.odd_pipelines import Run, differences

pytestmark = pytest.mark.ranks
preload_modules("slapo_megatron.pipeline.running", "slapo_pipeline.partition.hook", "slapo_core.native.pipeline.engine")

TWO = {"pp": 2}
CUTS = {"one": ("one",), "three": ("one", "norm", "two")}


class Plain(nn.Module):
    """Its batch norm has running statistics; it draws in every stage."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.drop(self.one(x))))
        return self.drop(self.three(self.drop(self.two(x))))


def squares(output: torch.Tensor, given: Any) -> torch.Tensor:
    return (output - given["only for the loss"]).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    samples = 8 + 4 * (step % 2)  # another form
    return {name: torch.randn(samples, 4, generator=generator) for name in ("x", "only for the loss")}


def trained(target: str, cuts: str, dropout: float, recomputed: str = "", **options: Any) -> Any:
    """Losses of three steps and an evaluation, the state after them, and the next number of torch's stream."""
    sch = slapo.create_schedule(Plain(dropout), mesh=TWO, example_inputs={"x": torch.ones(2, 4)})
    for path in CUTS[cuts]:
        sch[path].pipeline_split()
    if recomputed:
        sch[recomputed].checkpoint()
    engine = slapo.build(sch, target=target, microbatches=4, optimizer=sgd, loss=squares, **options)
    torch.manual_seed(4)
    losses = [float(engine.train_step(batch(step)).loss) for step in range(3)]
    losses += [float(engine.eval_step(batch(7)).loss) for _ in range(2)]
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    engine.close()
    return losses, state, float(torch.rand(()))


def same(one: Any, other: Any) -> bool:
    torch.testing.assert_close(one[:2], other[:2], rtol=1e-5, atol=1e-6)
    return one[0][-1] == one[0][-2] and one[2] == other[2]


def drawn() -> dict[str, bool]:
    """Whether it is as target torch, which draws in the same order whatever the schedule."""
    found = {}
    for cuts in CUTS:
        for recomputed in ("", "two"):
            wanted = trained("torch", cuts, 0.5, recomputed)
            found[f"{cuts}, recomputed: {recomputed}"] = same(trained("megatron", cuts, 0.5, recomputed), wanted)
    return found


def by_hand() -> bool:
    model = Plain(0.0)
    optimizer, losses = sgd(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        pieces = [dict(zip(batch(step), one, strict=True)) for one in zip(*(t.chunk(4) for t in batch(step).values()))]
        found = [squares(model(piece["x"]), piece) for piece in pieces]
        torch.stack(found).mean().backward()
        optimizer.step()
        losses.append(float(torch.stack(found).mean().detach()))
    model.eval()
    pieces = [dict(zip(batch(7), one, strict=True)) for one in zip(*(t.chunk(4) for t in batch(7).values()))]
    with torch.no_grad():
        losses += [float(torch.stack([squares(model(piece["x"]), piece) for piece in pieces]).mean())] * 2
    torch.manual_seed(4)
    wanted = losses, model.state_dict(), float(torch.rand(()))
    return same(trained("megatron", "three", 0.0), wanted)


def changed(place: Any, name: str, value: Any, run: Callable[[], Any]) -> Any:
    """What happens with something replaced; an error as its message."""
    original = getattr(place, name)
    setattr(place, name, value)
    try:
        return run()
    except slapo.SlapoError as error:
        return str(error)
    finally:
        setattr(place, name, original)


def without_guards() -> dict[str, Any]:
    from slapo_core.spec import stage_work
    from slapo_megatron import marks
    from slapo_megatron.pipeline import communicator

    def tied(**options: Any) -> list[str]:
        return differences(Run(TWO, ("b",), tied=True, target="megatron", options=options))

    def viewed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(one.view(-1) for one in pack(self, *args, **kwargs))

    def batched(self: Any, group: Any, config: Any, own: Any = None) -> None:
        make(self, group, config, own)
        self._own, self.config.batch_p2p_comm = None, True

    pack, make = stage_work.Parcel.pack, communicator.Communicator.__init__
    freed = {"model_parallel_config": {"deallocate_pipeline_outputs": True}}
    twice = Run(TWO, ("a", "b", "c"), target="megatron")
    found = {"guarded": [*tied(), *tied(**freed)]}
    found["not marked as shared"] = changed(marks, "_as_copy", lambda *_: {}, tied)
    found["ties not summed"] = changed(
        __import__("slapo_core.building.request").building.request.TiedGradients, "sum", lambda *_: None, tied
    )
    found["views"] = changed(stage_work.Parcel, "pack", viewed, lambda: tied(**freed))
    return found


def on_rank() -> Any:
    from tests.cpu_megatron import install

    install()
    torch.set_num_threads(1)
    return {}, by_hand(), without_guards()


def test_every_kind_of_stage_trains_as_the_torch_target_and_as_by_hand() -> None:
    for draws, is_as_by_hand, guards in run_ranks(on_rank, world_size=2):
        assert all(draws.values()), draws
        assert is_as_by_hand
        print({k: str(v)[:200] for k, v in guards.items()})
