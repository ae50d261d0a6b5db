"""ZeRO-3: tensors are partitioned one by one, and steps of every kind train as under target torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode

import slapo_core as slapo
from slapo_deepspeed.private import linear_restored
from slapo_deepspeed.zero3 import Partitioning, partitioned_linear
from slapo_testing import preload_modules, run_ranks
from tests.tiers import sampled

from . import small

preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3")
pytestmark = pytest.mark.ranks

ZERO_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
DP = {"dp": 2}


class Apart(nn.Module):
    """A Linear with its product and its sum apart."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + self.bias


def fused(sch: slapo.Schedule) -> None:
    sch["blocks.0.up"].decompose()
    sch["blocks.0"].trace(flatten=True)
    sch["blocks.0"].fuse("fusion.bias_gelu", compiler="eager", name="bias_gelu")


def fused_and_recomputed(sch: slapo.Schedule) -> None:
    fused(sch)
    sch["blocks.0"].checkpoint()
    sch["blocks.1"].checkpoint()


def recorded_in_a_step(sch: slapo.Schedule) -> None:
    """A graph of evaluation only: that of training is recorded in the first step, where activations are recomputed."""
    sch.model.eval()
    fused_and_recomputed(sch)
    sch.model.train()


def merged(sch: slapo.Schedule) -> None:
    sch["blocks.1"].trace()
    sch["blocks.1"].merge(["q", "k"])


def root(sch: slapo.Schedule) -> None:
    sch[""].trace(flatten=True)


def compiled(sch: slapo.Schedule) -> None:
    sch["blocks.0"].compile(backend="eager")
    sch["blocks.1.up"].replace(lambda old: Apart(old))
    sch["blocks.1.q"].quantize()


STEPS = sampled([fused_and_recomputed, recorded_in_a_step, merged, root, compiled], 3)


def _trained(
    steps: Callable[[slapo.Schedule], None], config: dict[str, Any] | None, *, meta: bool = False
) -> list[float]:
    model: nn.Module | None = None
    if meta:
        with torch.device("meta"):
            model = small.Tied()
    weights = small.make().state_dict() if meta else None
    sch, engine = small.built(DP, config, steps=steps, model=model, weights=weights, max_grad_norm=small.CLIP)
    found = []
    for step in range(3):
        result = engine.train_step(small.share(small.batch(step), sch.mesh))
        found += [float(result.loss), float(result.grad_norm)]
        found.append(float(engine.eval_step(small.batch(9)).loss))
    names = [name for name, _ in engine.module.named_parameters()]
    assert names == list(dict(sch.model.named_parameters()))
    engine.close()
    return found


def one_by_one() -> dict[str, Any]:
    """How many elements of parameters are whole at once while a model on the meta device is built, at most."""
    most, seen = [0], []
    kept = Partitioning._partition

    def counting(self: Partitioning, parameter: nn.Parameter) -> None:
        tensors = [one for one in self._context.schedule.model.parameters() if not one.is_meta]
        most[0] = max(most[0], sum(one.numel() for one in tensors))
        kept(self, parameter)
        seen.append((parameter.numel(), parameter.ds_tensor.numel() * 2 >= parameter.ds_numel))  # type: ignore[attr-defined]

    Partitioning._partition = counting  # type: ignore[method-assign]
    try:
        losses = _trained(lambda sch: None, ZERO_3, meta=True)
    finally:
        Partitioning._partition = kept  # type: ignore[method-assign]
    return {"most": most[0], "seen": seen, "losses": losses, "torch": _trained(lambda sch: None, None)}


def shapes() -> dict[str, Any]:
    """A factory that tells matrices from vectors, and one that fails: the model is as before, and can be built."""

    def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        decayed = [one for one in parameters if one.dim() > 1]
        others = [one for one in parameters if one.dim() < 2]
        found["sizes"] = (len(decayed), len(others), sum(one.numel() for one in parameters))
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}])

    def bad(parameters: Any) -> torch.optim.Optimizer:
        raise ValueError("no optimizer today")

    found: dict[str, Any] = {}
    model = small.make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(one)) for name, one in model.named_parameters()}
    sch = slapo.create_schedule(model, mesh=DP, example_inputs=small.batch(0))
    try:
        slapo.build(sch, target="deepspeed", config=ZERO_3, optimizer=bad)
    except slapo.BuildError as error:
        found["error"] = str(error)
    found["same"] = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found["clean"] = attributes == {name: set(vars(one)) for name, one in model.named_parameters()}
    found["runs"] = float(model(**small.batch(0)).detach())
    engine = slapo.build(sch, target="deepspeed", config=ZERO_3, optimizer=groups)
    found["loss"] = float(engine.eval_step(small.batch(0)).loss)
    found["linear"] = (F.linear.__module__, F.linear.__name__)
    engine.close()
    return found


def linears() -> list[bool]:
    """Whether DeepSpeed's linear function runs: as it is, with a default device, and while torch's are watched."""
    import deepspeed.runtime.zero.linear  # noqa: F401 - it sets its own linear, which the engine takes back

    layer, x, found = nn.Linear(2, 2), torch.ones(1, 2), []
    layer.weight.ds_id = 0  # type: ignore[assignment]
    with linear_restored(), partitioned_linear(ZERO_3):
        for mode in (contextlib.nullcontext(), torch.device("cpu"), BaseTorchFunctionMode()):
            with mode:
                found.append("Zero" in type(layer(x).grad_fn).__name__)
    return found


def compilations() -> dict[str, list[int]]:
    """How many graphs compilers have been given after each of some steps: the schedule's, and the user's."""
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def by_user(sch: slapo.Schedule) -> None:
        sch.model.blocks[0].compile(backend=counting)

    found = {}
    for name, steps in {"schedule": lambda sch: sch["blocks.0"].compile(backend=counting), "user": by_user}.items():
        sch, engine = small.built(DP, ZERO_3, steps=steps)
        graphs.clear()
        found[name] = []
        for step in range(5):
            engine.train_step(small.share(small.batch(step), sch.mesh))
            engine.eval_step(small.batch(9))
            found[name].append(len(graphs))
        engine.close()
    return found


def _on_ranks() -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {"one_by_one": one_by_one(), "shapes": shapes(), "compilations": compilations(), "linears": linears()}
    for steps in STEPS:
        found[steps.__name__] = [_trained(steps, config) for config in (None, ZERO_3)]
    dist.barrier()
    return found


@functools.cache
def _found() -> list[dict[str, Any]]:
    return run_ranks(_on_ranks, world_size=2)


@pytest.mark.breadth
@pytest.mark.parametrize("steps", STEPS, ids=lambda steps: steps.__name__)
def test_steps_train_as_under_target_torch(steps: Callable[[slapo.Schedule], None]) -> None:
    for rank in _found():
        by_torch, by_deepspeed = rank[steps.__name__]
        assert by_deepspeed == pytest.approx(by_torch, rel=2e-6)


def test_deepspeeds_linear_runs_with_a_default_device_and_not_in_a_recording() -> None:
    assert [rank["linears"] for rank in _found()] == [[True, True, False]] * 2


def test_at_most_one_full_parameter_exists_at_a_time() -> None:
    sizes = [one.numel() for one in small.make().parameters()]
    for rank in _found():
        found = rank["one_by_one"]
        assert found["most"] == max(sizes)
        assert len(found["seen"]) == len(sizes)  # the tied one once
        assert all(left == 0 and is_part for left, is_part in found["seen"])
        assert found["losses"] == pytest.approx(found["torch"], rel=2e-6)


def test_a_factory_sees_full_shapes_and_a_failing_one_restores_the_model() -> None:
    parameters = list(small.make().parameters())
    matrices = sum(one.dim() > 1 for one in parameters)
    for rank in _found():
        found = rank["shapes"]
        assert found["sizes"] == (matrices, len(parameters) - matrices, sum(one.numel() for one in parameters))
        assert "no optimizer today" in found["error"]
        assert found["same"]
        assert found["clean"]
        assert found["loss"] == pytest.approx(found["runs"], rel=1e-6)
        assert found["linear"] == (F.linear.__module__, F.linear.__name__)  # other models find torch's own


def test_compiled_modules_are_compiled_in_the_first_steps_only() -> None:
    for rank in _found():
        for counts in rank["compilations"].values():
            assert counts[0] > 0
            assert counts[2:] == counts[1:2] * 3, counts
