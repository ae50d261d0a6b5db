"""A loop of Fabric over a scheduled model: losses, norms, checkpoints and resumption as without a schedule."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision

import slapo_core as slapo
from slapo_lightning.fabric import SlapoStrategy
from slapo_testing import preload_modules, run_ranks

from .lightning_model import MESHES, SHARDED, Net, data, loaders, quiet, replicas_of, split, split_and_shard

preload_modules("lightning.pytorch", "torchmetrics", "torch.distributed.fsdp", "slapo_tp", "slapo_lightning")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.02, eps=1e-4)


def fabric_of(name: str | None, precision: Any = "64-true", plugins: Any = None) -> L.Fabric:
    quiet()
    strategy = SlapoStrategy(split_and_shard if name in SHARDED else split, MESHES[name]) if name else "auto"
    options = {"precision": precision} if plugins is None else {"plugins": plugins}
    fabric = L.Fabric(accelerator="cpu", devices=4 if name else 1, strategy=strategy, **options)
    fabric.launch()
    return fabric


def trained(name: str | None, file: Path, resume: Path | None = None) -> dict[str, Any]:
    """Two epochs of a loop, of which the first accumulates over two batches; or the second one, resumed."""
    fabric = fabric_of(name)
    torch.manual_seed(0)
    model = fabric.setup_module(Net().double())
    optimizer = fabric.setup_optimizers(adamw(model))
    _, ordered = loaders(replicas_of(name) if name else 1)
    loader = fabric.setup_dataloaders(ordered)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resume is not None:
        fabric.load(resume, state, strict=name != "fsdp x tp")
    losses, norms = [], []
    for epoch in range(state["epoch"], 2):
        for number, (inputs, targets) in enumerate(loader):
            is_accumulating = epoch == 0 and number == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = (model(inputs) - targets).square().mean()
                fabric.backward(loss)
            losses.append(float(fabric.all_reduce(loss.detach())))
            if not is_accumulating:
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 0 and resume is None:
            fabric.save(file, {**state, "epoch": 1})
    fabric.save(file.with_suffix(".last"), state)
    return {"losses": losses, "norms": norms, "seen": int(fabric.all_gather(torch.ones(8)).sum())}


def overflow(name: str) -> tuple[bool, float]:
    """Whether one rank's infinite gradient leaves all weights as they are, and the scale after it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    fabric = fabric_of(name, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    torch.manual_seed(0)
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(adamw(model))
    if fabric.global_rank == 1:
        model.up.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = [one.detach().clone() for one in model.parameters()]
    fabric.backward(model(data().tensors[0].float()).square().mean())
    optimizer.step()
    return all(map(torch.equal, before, model.parameters())), fabric._precision.scaler.get_scale()


def _refused() -> list[str]:
    told, alike = [], SlapoStrategy(split, MESHES["hsdp"])
    for run in (
        lambda fabric: fabric.setup(model := Net(), adamw(model)),
        lambda fabric: (fabric.setup_module(Net()), fabric.setup_module(Net())),
        lambda _: (one := L.Fabric(accelerator="cpu", strategy=alike, devices=4)).launch() or one.setup_module(Net()),
    ):
        with pytest.raises(slapo.SlapoError) as raised:
            run(fabric_of("tp"))
        told.append(f"{type(raised.value).__name__}: {raised.value}")
    return told


def _scheduled(root: Path, names: tuple[str, ...]) -> dict[str, Any]:
    runs = {name: trained(name, root / name) for name in names}
    resumed = {name: trained(name, root / f"{name}, resumed", root / names[0]) for name in names}
    return {"runs": runs, "resumed": resumed, "overflow": overflow("dp x tp"), "refused": _refused()}


def saved(file: Path) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    state = torch.load(file, weights_only=True)
    moments = state["optimizer"]["state"]
    names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    return state["model"], [moments[name][kind] for name in names for kind in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize(
    "names",
    [("dp x tp", "fsdp x tp"), pytest.param(("tp", "dp x tp", "hsdp"), marks=pytest.mark.breadth)],
    ids="+".join,
)
def test_a_loop_of_fabric_trains_saves_and_resumes_as_without_a_schedule(names: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        alone = trained(None, root / "alone")
        found, *others = run_ranks(_scheduled, root, names, world_size=4)
        assert all(theirs == found for theirs in others)
        for name, run in found["runs"].items():
            resumed = found["resumed"][name]
            for kind in ("losses", "norms"):
                assert run[kind] == pytest.approx(alone[kind], rel=1e-9), name
                later = run[kind][-len(resumed[kind]) :]
                assert resumed[kind] == (later if name == names[0] else pytest.approx(later, rel=1e-9)), name
            assert run["seen"] == 8 * replicas_of(name), name
            for file in (name, f"{name}.last", f"{name}, resumed.last"):
                for ours, theirs in zip(
                    saved(root / file), saved((root / "alone").with_suffix(Path(file).suffix)), strict=True
                ):
                    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert found["overflow"] == (True, 2.0)
    stale, second, alike = found["refused"]
    assert stale.startswith("OptimizerError")
    assert "fabric.setup_module(model)" in stale
    assert second.startswith("ArgumentError")
    assert "one module" in second
    assert alike.startswith("MeshError")
    assert "'dp_replicate'" in alike
