"""Optimizers of full matrices step shards as they step the full model, and are resumed under another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.support import tied_model
from tests.support.tied_model import CLIP, batch
from tests.tiers import sampled

preload_modules("torch.distributed.fsdp", "slapo_tp")
pytestmark = pytest.mark.ranks

Layout = tuple[dict[str, int], dict[str, Any]]
BOTH: Layout = ({"dp": 2, "tp": 2}, {"data_parallel": "fsdp"})
HYBRID: Layout = ({"dp_replicate": 2, "dp": 2}, {"data_parallel": "fsdp"})
REPLICATED: Layout = ({"dp": 2, "tp": 2}, {})
STAGED: Layout = ({"pp": 2, "dp": 2}, {"data_parallel": "fsdp", "microbatches": 2})
GROUPS: dict[str, Any] = {"no_decay": ("*.bias", "*norm*"), "param_groups": {"blocks.1.*": {"lr": 0.02}}}


def make() -> nn.Module:
    """Without its scalar, which fully_shard does not take."""
    model = tied_model.make().double()
    del model.strength
    model.strength = 1.1  # type: ignore[assignment]
    return model


def matrices_alone() -> nn.Module:
    model = make()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return model


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05, weight_decay=0.1)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.02, weight_decay=0.1)


CASES: dict[str, tuple[Any, Any, dict[str, Any], list[Layout]]] = {
    "Adafactor": (make, adafactor, GROUPS, [BOTH, REPLICATED, STAGED]),
    "Muon": (matrices_alone, muon, {}, [HYBRID, BOTH]),
}
SCALED = sampled(CASES)
"""Those that are trained in float16, too."""


def cut(sch: slapo.Schedule) -> None:
    if sch.mesh is not None and sch.mesh.size("pp") > 1:
        sch["blocks.0"].pipeline_split()


def built(case: str, mesh: dict[str, int] | None, **options: Any) -> tuple[slapo.Schedule, Any]:
    model, optimizer, groups, _ = CASES[case]
    options = {**options, **groups, "optimizer": optimizer, "max_grad_norm": CLIP, "lr_scheduler": halved}
    return tied_model.built(mesh, model=model(), steps=cut, **options)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def replica_of(mesh: slapo.Mesh | None) -> tuple[int, int]:
    """The number of replicas of the data, and this rank's."""
    if mesh is None:
        return 1, 0
    size = mesh.size("dp") if "dp" in mesh.sizes else 1
    number = mesh.rank("dp") if "dp" in mesh.sizes else 0
    if "dp_replicate" in mesh.sizes:
        return size * mesh.size("dp_replicate"), mesh.rank("dp_replicate") * size + number
    return size, number


def step(sch: slapo.Schedule, engine: Any, number: int) -> float:
    replicas, own = replica_of(sch.mesh)
    given = {name: tensor.chunk(replicas)[own] for name, tensor in batch(number, samples=8).items()}
    return float(engine.train_step(given).grad_norm)


def own_state(optimizer: torch.optim.Optimizer) -> int:
    """The elements of the state on this rank."""
    return sum(one.numel() for state in optimizer.state.values() for one in state.values() if one.dim())


def resumed_in_turn(case: str, directory: str) -> dict[str, Any]:
    """Two steps under each layout, after the checkpoint of the one before, which is written again."""
    found: dict[str, Any] = {"norms": [], "elements": []}
    for number, (mesh, options) in enumerate(CASES[case][3]):
        sch, engine = built(case, mesh, **options)
        if number:
            engine.load(directory)
            engine.save(directory)
        found["norms"] += [step(sch, engine, 2 * number), step(sch, engine, 2 * number + 1)]
        found["elements"].append(own_state(engine.optimizer))
        engine.check_replicas()
        engine.save(directory)
        found["weights"] = engine.state_dict()
        try:
            engine.optimizer.state_dict()
        except slapo.BuildError as error:
            found["refused"] = error.message
        engine.close()
    return found


def repeated_after_a_failure() -> tuple[float, float]:
    """Norms of the gradients of a second step: at once, and after one that failed in the optimizer."""
    found = []
    for fails in (False, True):
        mesh, options = BOTH
        sch, engine = built("Adafactor", mesh, **options)
        step(sch, engine, 0)
        if fails:
            rates = [group.pop("lr") for group in engine.optimizer.param_groups]
            with pytest.raises(KeyError):
                step(sch, engine, 1)
            for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        found.append(step(sch, engine, 1))
        engine.close()
    return found[0], found[1]


def skipped_by_a_scaler(case: str) -> dict[str, Any]:
    """Two steps in float16, and between them one with an infinite gradient on the last rank alone."""
    sch, engine = built(case, {"dp": 2, "tp": 2}, data_parallel="fsdp", precision="fp16-mixed")
    engine.scaler.scaled_one()
    engine.scaler.update(256.0)  # a loss in float16 is infinite times the first scale of torch
    is_last = torch.distributed.get_rank() == 3
    norms = [step(sch, engine, 0)]
    scale, before = engine.scaler.get_scale(), values(engine)
    unscale = engine.scaler.unscale_

    def planted(optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"] if is_last else ():
            parameter.grad.to_local().fill_(torch.inf)
        unscale(optimizer)

    engine.scaler.unscale_ = planted
    norms.append(step(sch, engine, 1))
    engine.scaler.unscale_ = unscale
    after, backed_off = values(engine), engine.scaler.get_scale() / scale
    norms.append(step(sch, engine, 1))
    is_same = len(before) == len(after) and all(map(torch.equal, before, after))
    found = {"norms": norms, "kept": is_same, "scale": backed_off}
    found["epoch"], found["weights"] = engine.lr_scheduler.last_epoch, engine.state_dict()
    engine.close()
    return found


def values(engine: Any) -> list[torch.Tensor]:
    """Copies of the weights, and of the optimizer's state on this rank."""
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    return [one.detach().clone() for one in (*engine.state_dict().values(), *states)]


def everything(directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {case: resumed_in_turn(case, f"{directory}/{case}") for case in CASES}
    found["scaled"] = {case: skipped_by_a_scaler(case) for case in SCALED}
    return {**found, "repeated": repeated_after_a_failure()}


def check_scaled(results: list[dict[str, Any]], norms: list[float], weights: dict[str, torch.Tensor]) -> None:
    """The step with an infinite gradient did nothing on any rank; the others are those in float64."""
    for found in results:
        first, infinite, second = found["norms"]
        assert [first, second] == pytest.approx(norms, rel=0.03)
        assert not torch.tensor(infinite).isfinite()
        assert (found["kept"], found["scale"], found["epoch"]) == (True, 0.5, 2)
        for name, value in weights.items():
            torch.testing.assert_close(found["weights"][name].double(), value, rtol=0, atol=5e-3)


def test_full_matrices_are_stepped_from_shards_and_resumed(tmp_path: Path) -> None:
    results = run_ranks(everything, str(tmp_path), world_size=4)
    for result in results:
        assert result["repeated"][1] == pytest.approx(result["repeated"][0], rel=1e-12)
    for case in CASES:
        sch, plain = built(case, None)
        norms = []
        for number in range(2 * len(CASES[case][3])):
            norms.append(step(sch, plain, number))
            if number == 1 and case in SCALED:
                check_scaled([result["scaled"][case] for result in results], norms, plain.state_dict())
        for result in results:
            torch.testing.assert_close(result[case]["norms"], norms, rtol=1e-8, atol=0)
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(result[case]["weights"][name], value, rtol=1e-7, atol=1e-9)
            assert "engine.save" not in result[case]["refused"]
        # every element of the state is on one of the ranks that share its parameter, and the ranks have about as much
        elements = torch.tensor([result[case]["elements"] for result in results])
        assert int(elements[:, 0].sum()) >= own_state(plain.optimizer)
        assert 0 < int(elements[:, 0].max()) < own_state(plain.optimizer) * 0.7
        # and the last checkpoint is that of one process, too
        _, alone = built(case, None)
        alone.load(tmp_path / case)
        assert own_state(alone.optimizer) == own_state(plain.optimizer)
        for parameter, other in zip(alone.module.parameters(), plain.module.parameters(), strict=True):
            state, expected = alone.optimizer.state.get(parameter, {}), plain.optimizer.state.get(other, {})
            assert set(state) == set(expected)
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-9)
