"""Dropout, recomputation, buffers and losses in Megatron's pipeline; and that its guards are needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.support import tied_model
from tests.support.odd_pipelines import Run, differences

pytestmark = pytest.mark.ranks
preload_modules("slapo_megatron.pipeline", "slapo_pipeline.partition.hook", "slapo_torch.pipeline_engine")

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
    return {name: torch.randn(8, 4, generator=generator) for name in ("x", "only for the loss")}


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
    for cuts, recomputed in (("one", ""), ("three", "two")):
        wanted = trained("torch", cuts, 0.5, recomputed)
        found[cuts] = same(trained("megatron", cuts, 0.5, recomputed), wanted)
    return found


def mean_of(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a batch in four micro-batches."""
    chunks = zip(*(tensor.chunk(4) for tensor in batch(step).values()), strict=True)
    pieces = [dict(zip(batch(step), one, strict=True)) for one in chunks]
    return torch.stack([squares(model(piece["x"]), piece) for piece in pieces]).mean()


def by_hand() -> bool:
    model = Plain(0.0)
    optimizer, losses = sgd(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        loss = mean_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        losses += [float(mean_of(model, 7))] * 2
    torch.manual_seed(4)
    wanted = losses, model.state_dict(), float(torch.rand(()))
    return same(trained("megatron", "three", 0.0), wanted)


class Thrice(nn.Module):
    """One weight in three stages, two of which are on the first rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.two, self.three, self.four = (nn.Linear(4, 4) for _ in range(4))
        self.two.weight = self.three.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.four(self.three(self.two(self.one(x).tanh()).tanh()).tanh())


def tied_thrice(*, sharded: bool) -> list[str]:
    """What is otherwise than in the reference model, by the factory's optimizer or the distributed one."""
    sch = slapo.create_schedule(Thrice(), mesh=TWO, example_inputs={"x": torch.ones(2, 4)})
    for path in ("one", "two", "three"):
        sch[path].pipeline_split()
    options: dict[str, Any] = {"optimizer": adam}
    if sharded:
        settings = {"lr": 1e-2, "adam_eps": 1e-4, "adam_beta2": 0.999, "weight_decay": 0.0}
        options = {"optimizer_config": settings, "ddp_config": {"use_distributed_optimizer": True}}
    engine = slapo.build(sch, target="megatron", microbatches=4, loss=squares, max_grad_norm=0.1, **options)
    model, found = Thrice(), []
    optimizer = adam(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        squares(model(batch(step)["x"]), batch(step)).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        own = float(engine.train_step(batch(step)).grad_norm)
        found += [] if abs(own - norm) < 1e-5 else [f"norm {own} instead of {norm}"]
    state = engine.state_dict()
    engine.close()
    wanted = model.state_dict().items()
    return found + [name for name, one in wanted if not torch.allclose(state[name], one, rtol=1e-5, atol=1e-6)]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.0)


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
    from slapo_megatron import marks
    from slapo_runtime import context

    def tied(**options: Any) -> list[str]:
        run = Run(TWO, ("b",), tied=True, target="megatron", options=options, forms=((1, 5),))
        return differences(run)

    return {  # where it is an error, the engine is gone without having been closed; the next one takes its groups
        "not marked as shared": changed(marks, "_as_copy", lambda *_: {}, tied),
        "ties not summed": changed(context.TiedGradients, "sum", lambda *_: None, tied),
    }


def sending_views() -> None:
    from slapo_runtime.stages import p2p_packing
    from tests.support.cpu_megatron import install

    def viewed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(one.view(-1) for one in pack(self, *args, **kwargs))

    install()
    pack, p2p_packing.P2PMessage.pack = p2p_packing.P2PMessage.pack, viewed  # type: ignore[method-assign]
    freed = {"model_parallel_config": {"deallocate_pipeline_outputs": True}}
    differences(Run(TWO, ("b",), tied=True, target="megatron", options=freed, forms=((1, 5),)))


def over_megatrons_groups() -> dict[str, Any]:
    """As on GPUs: Megatron sends by itself, and is told the shapes of what comes."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from slapo_megatron.pipeline import Communicator

    def sending(run: Callable[[], Any], *, batched: bool) -> Any:
        def made(self: Any, group: Any, config: Any) -> None:
            make(self, group, config)
            self.config.batch_p2p_comm = batched

        own = P2PCommunicator._communicate
        return changed(Communicator, "_communicate", own, lambda: changed(Communicator, "__init__", made, run))

    make = Communicator.__init__
    found = {}
    for name, cuts in {"one stage a rank": ("c",), "two stages a rank": ("a", "b", "d")}.items():
        run = Run(TWO, cuts, target="megatron", micro_batches=4, forms=((1, 5),))
        found[name] = sending(functools.partial(differences, run), batched=False)
    alike: dict[str, Any] = {"mesh": TWO, "target": "megatron", "steps": cut, "microbatches": 4}

    def losses() -> list[float]:
        _, engine = tied_model.built(**alike)
        found = [float(engine.train_step(tied_model.batch(step, 8)).loss) for step in range(3)]
        engine.close()
        return found

    found["guarded"] = losses()
    found["megatron's, not batched"] = sending(losses, batched=False)
    found["batched"] = sending(losses, batched=True)
    return found


def cut(sch: slapo.Schedule) -> None:
    for path in ("embedding", "blocks.0", "blocks.1"):  # messages of one size
        sch[path].pipeline_split()


def on_rank(*, guards: bool) -> Any:
    from tests.support.cpu_megatron import install

    install()
    torch.set_num_threads(1)
    return (
        (without_guards(), over_megatrons_groups())
        if guards
        else (drawn(), by_hand(), tied_thrice(sharded=False) + tied_thrice(sharded=True))
    )


def test_every_kind_of_stage_trains_as_the_torch_target_and_as_by_hand() -> None:
    for draws, is_as_by_hand, thrice in run_ranks(on_rank, guards=False, world_size=2):
        assert draws == dict.fromkeys(CUTS, True)
        assert is_as_by_hand
        assert thrice == []


@pytest.mark.breadth
def test_the_guards_are_needed_and_megatrons_own_communication_is_right_with_them() -> None:
    for guards, sent in run_ranks(on_rank, guards=True, world_size=2):
        assert guards["not marked as shared"][0].startswith("the norm of step 0: 136.")
        assert "replicas of 'a.weight' differ" in guards["ties not summed"]
        assert sent["one stage a rank"] == sent["two stages a rank"] == []
        assert sent["megatron's, not batched"] == pytest.approx(sent["guarded"], rel=1e-6)
        assert sent["batched"] != pytest.approx(sent["guarded"], rel=1e-4)


def test_megatron_refuses_to_free_views() -> None:
    with pytest.raises(slapo.RankFailedError, match="free a view of another tensor"):
        run_ranks(sending_views, world_size=2)
