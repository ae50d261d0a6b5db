"""What SlapoStrategy takes: functions and schedules, precision, one submodule; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_lightning import SlapoStrategy
from slapo_testing import preload_modules, run_ranks
from tests.messages import Messages

from .lightning_model import (
    SAMPLES,
    Losses,
    Module,
    Net,
    loaders,
    quiet,
    split,
    trainer_of,
)

preload_modules("lightning.pytorch", "torchmetrics", "torch.distributed.fsdp", "slapo_tp", "slapo_lightning")

MESH = {"dp": 1, "tp": 2}


class Beside(Module):
    """Its scale is trained, and no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(self.scale)


class Two(Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = Net()


class Half(Module):
    """Its optimizer leaves a trained parameter out."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.up.parameters(), lr=0.1)


def fit(strategy: Any, make: Callable[[], Any] = Module, **options: Any) -> Any:
    losses, module = Losses(), make()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    trainer = trainer_of(strategy, ranks, callbacks=[losses], **options)
    trainer.fit(module, loaders(1 if ranks > 1 else 0)[0])
    return trainer, module, [loss for loss, _ in losses.seen], module.norms


def own_schedule() -> Any:
    """A schedule made before Trainer, of the submodule of a module."""
    module = Module()
    torch.manual_seed(0)
    module.model = Net()
    sch = slapo.create_schedule(module.double().model, mesh=MESH)
    split(sch)
    return fit(SlapoStrategy(sch), lambda: module)[2:]


def predicted() -> int:
    trainer, module, *_ = fit(SlapoStrategy(split, MESH))
    return sum(len(one) for one in trainer.predict(module, loaders(1)[1]))


def lowered(strategy: Any) -> Any:
    """Under autocast: losses, norms, and the types of parameters and of a product."""
    types: set[torch.dtype] = set()
    module = Module()
    module.model.up.register_forward_hook(lambda _, __, output: types.add(output.dtype))
    losses, norms = fit(strategy, lambda: module, precision="bf16-mixed")[2:]
    return losses, norms, types | {one.dtype for one in module.model.parameters()}


def refusal(run: Callable[[], Any]) -> slapo.SlapoError:
    with pytest.raises(slapo.SlapoError) as raised:
        run()
    return raised.value


def _of_two() -> Mapping[str, Any]:
    quiet()
    foreign = slapo.create_schedule(Net(), mesh=MESH)
    refused = {
        "beside": refusal(lambda: fit(SlapoStrategy(split, MESH, path="model"), Beside)),
        "two": refusal(lambda: fit(SlapoStrategy(split, MESH), Two)),
        "half": refusal(lambda: fit(SlapoStrategy(split, MESH), Half)),
        "compiled": refusal(lambda: fit(SlapoStrategy(split, MESH), lambda: torch.compile(Module()))),
        "foreign": refusal(lambda: fit(SlapoStrategy(foreign))),
    }
    return {
        "own schedule": own_schedule(),
        "predicted": predicted(),
        "lowered": lowered(SlapoStrategy(split, MESH)),
        "refused": {name: (type(error).__name__, str(error)) for name, error in refused.items()},
    }


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_precision_and_predictions_and_what_is_refused(message: Messages) -> None:
    quiet()
    losses, norms = fit("auto", lambda: Module().double())[2:]
    alone = lowered("auto")
    found, other = run_ranks(_of_two, world_size=2)
    assert found == other
    assert found["own schedule"] == (pytest.approx(losses, rel=1e-9), pytest.approx(norms, rel=1e-9))
    assert found["predicted"] == SAMPLES
    assert found["lowered"][0] == pytest.approx(alone[0], rel=0.02)
    assert found["lowered"][1] == pytest.approx(alone[1], rel=0.02)
    assert found["lowered"][2] == alone[2] == {torch.float32, torch.bfloat16}
    for name, (kind, word) in {
        "beside": ("ArgumentError", "trains 'scale' beside it"),
        "two": ("ArgumentError", "2 have parameters"),
        "half": ("BuildError", "2 of 7 trained parameters"),
        "compiled": ("ArgumentError", "torch.compile"),
        "foreign": ("ArgumentError", "does not contain it"),
    }.items():
        assert found["refused"][name][0] == kind, name
        message(found["refused"][name][1], word)


def test_arguments_are_refused_before_processes_start(message: Messages) -> None:
    sch = slapo.create_schedule(Net())
    for arguments, error, word in (
        ((split,), slapo.ArgumentError, "mesh=None"),
        ((sch, MESH), slapo.ArgumentError, "got Schedule"),
        (("split", MESH), slapo.ArgumentError, "got str"),
        ((split, {"pp": 2, "tp": 1}), slapo.MeshError, "pipeline stages"),
        ((slapo.create_schedule(Net(), mesh={"pp": 2}),), slapo.MeshError, "pipeline stages"),
        ((split, {"model": 2}), slapo.MeshError, "'model'"),
    ):
        with pytest.raises(error) as raised:
            SlapoStrategy(*arguments)
        message(raised, word)
