"""Lightning's own strategies train a schedule of one rank and of replicas right, and refuse a model that is split."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as OfFabric
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

from .lightning_model import Losses, Module, Net, data, loaders, quiet, split, trainer_of

preload_modules("lightning.pytorch", "torchmetrics", "torch.distributed.fsdp", "slapo_tp", "slapo_lightning")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


class Scheduled(Module):
    """It schedules its model by itself, in processes that Lightning has started."""

    def __init__(self, mesh: dict[str, int] | None, *, sharded: bool = False) -> None:
        super().__init__()
        self._mesh, self._sharded, self.sch = mesh, sharded, None

    def configure_model(self) -> None:
        if self._mesh is not None and self.sch is None:
            self.sch = slapo.create_schedule(self.model, mesh=self._mesh)
            split(self.sch)
            self.sch["up"].checkpoint()
            if self._sharded:
                slapo.fully_shard(self.sch)


def _refusal(run: Any) -> str:
    try:
        run()
    except (slapo.SlapoError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def _fit(mesh: dict[str, int] | None, strategy: Any, **options: Any) -> Any:
    quiet()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    replicas = (mesh or {}).get("dp", 0) if ranks > 1 else 0
    module, losses = Scheduled(mesh, **options).double(), Losses()
    precision = "32-true" if isinstance(strategy, ModelParallelStrategy) else "64-true"
    trainer = trainer_of(strategy, ranks, callbacks=[losses], precision=precision)
    trainer.fit(module, loaders(replicas)[0])
    return losses.seen, module.norms


def _validate(strategy: Any) -> None:
    trainer_of(strategy, 2).validate(Scheduled({"tp": 2}).double(), loaders(1)[1], verbose=False)


def _fabric(strategy: Any) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    sch = slapo.create_schedule(Net(), mesh={"tp": 2})
    split(sch)
    model = fabric.setup_module(sch.model)
    fabric.backward(model(data().tensors[0].float()).sum())


def _of_two() -> tuple[Any, dict[str, str]]:
    mesh = {"dp": 1, "tp": 2}
    replicas = _fit({"dp": 2, "tp": 1}, "ddp")
    return replicas, {
        "DDPStrategy": _refusal(lambda: _fit(mesh, DDPStrategy())),
        "ModelParallelStrategy": _refusal(lambda: _fit(mesh, ModelParallelStrategy(1, 2))),
        "DDPStrategy, validation": _refusal(lambda: _validate(DDPStrategy())),
        "DDPStrategy of fully_shard": _refusal(lambda: _fit({"dp": 2, "tp": 1}, DDPStrategy(), sharded=True)),
        "DDPStrategy, Fabric": _refusal(lambda: _fabric("ddp")),
        "ModelParallelStrategy, Fabric": _refusal(lambda: _fabric(OfFabric(lambda model, mesh: model, 1, 2))),
    }


def test_lightning_trains_one_rank_and_replicas_right_and_refuses_a_split_model() -> None:
    plain, of_one = _fit(None, "auto"), _fit({"dp": 1, "tp": 1}, "auto")
    (of_two, refused), _ = run_ranks(_of_two, world_size=2)
    for losses, norms in (of_one, of_two):
        assert norms == pytest.approx(plain[1], rel=1e-9)
        for ours, theirs in zip(losses, plain[0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
    assert refused.pop("DDPStrategy of fully_shard").startswith("RuntimeError")  # by torch, which has no such wrapper
    for case, told in refused.items():
        assert told.startswith("MeshError"), case
        assert f"{case.partition(',')[0]} has no schedule" in told, case
        assert ("slapo_lightning.fabric.SlapoStrategy" if "Fabric" in case else "slapo_lightning.SlapoStrategy") in told
