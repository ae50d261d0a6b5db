"""What a step of the engine without a pipeline promises: micro-batches, buffers, refusals, the first step, failures."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.messages import Messages
from tests.processor import Outcome, run_case
from tests.support.dialect_models import Normed

from . import small

preload_modules("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3")
pytestmark = pytest.mark.ranks

DP, TP = {"dp": 2}, {"tp": 2}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **more}


def said(call: Callable[[], Any]) -> str:
    """What is raised, in one line; "" for nothing."""
    try:
        call()
    except (slapo.SlapoError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def groups_of_torch() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def micro_batches() -> dict[str, Any]:
    found = {}
    for stage in range(4):
        sch, engine = small.built(DP, zero(stage), accumulate=3, max_grad_norm=small.CLIP)
        results = [engine.train_step(small.share(small.batch(step), sch.mesh)) for step in range(2)]
        assert all(result.output is None for result in results)
        losses = torch.stack([result.loss for result in results])
        dist.all_reduce(losses)
        found[f"losses {stage}"] = (losses / 2).tolist()
        found[f"norms {stage}"] = [float(result.grad_norm) for result in results]
        engine.close()
    return found


def groups() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mesh in (DP, TP, {"dp": 2, "tp": 1}):
        made = []

        def counted(sch: slapo.Schedule, made: list[int] = made) -> None:
            made.append(groups_of_torch())

        sch, engine = small.built(mesh, zero(1), steps=counted)
        assert sch.mesh is not None
        dp, tp = engine.deepspeed.seq_data_parallel_group, engine.deepspeed.optimizer.model_parallel_group
        dims = ("dp", dp), ("tp", tp)
        same = [group is sch.mesh.group(dim) for dim, group in dims if sch.mesh.size(dim) > 1]
        alone = [
            dist.get_process_group_ranks(group) == [dist.get_rank()] for dim, group in dims if sch.mesh.size(dim) == 1
        ]
        found[str(mesh)] = (all(same) and bool(same), all(alone), groups_of_torch() - made[0])
        engine.close()
        from deepspeed.utils import groups as of_deepspeed

        found[f"forgotten {mesh}"] = of_deepspeed.mpu is None
    return found


FIRST_STEPS: dict[str, tuple[dict[str, Any], Any]] = {
    "factory": (zero(1), small.adamw),
    "config": (zero(1, optimizer=ADAMW), None),
    "config, without ZeRO": (zero(0, optimizer=ADAMW), None),
    "bf16": (zero(1, bf16={"enabled": True}), small.adamw),
}


def first_step() -> dict[str, Outcome[tuple[str, str]]]:
    """Batches that differ on the ranks of a replica: refused in the first step, and not compared any more later."""

    def steps(config: dict[str, Any], factory: Any) -> tuple[str, str]:
        _, engine = small.built(TP, config, optimizer=factory, max_grad_norm=small.CLIP)
        own = small.batch(dist.get_rank())
        refused = said(lambda: engine.train_step(own))
        engine.train_step(small.batch(0))
        later = said(lambda: engine.train_step(own))
        engine.close()
        return refused, later

    return {name: run_case(way[0], steps, *way) for name, way in FIRST_STEPS.items()}


def buffers() -> dict[str, Any]:
    found = {}
    for target, stage in (("torch", 0), ("deepspeed", 0), ("deepspeed", 3)):
        torch.manual_seed(1)
        sch = slapo.create_schedule(Normed(), mesh=DP)
        config = {"config": zero(stage)} if target == "deepspeed" else {}
        engine = slapo.build(sch, target=target, optimizer=small.adamw, accumulate=2, **config)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            engine.train_step((torch.randn(8, 8, generator=generator),))
        values = {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}
        evaluated = float(engine.eval_step((torch.ones(2, 8),)).loss)
        found[f"{target} {stage}"] = (
            values,
            evaluated,
            {name: m.training for name, m in engine.module.named_modules()},
        )
        engine.close()
    return found


def failing() -> dict[str, Any]:
    """A loss that fails in a micro-batch: a step without gradients yet is forgotten, any other ends the training."""
    found = {}
    for stage in (0, 2, 3):
        for fatal in (1, 2):
            calls = []

            def loss(output: torch.Tensor, batch: Any, calls: list[int] = calls, fatal: int = fatal) -> torch.Tensor:
                calls.append(1)
                if len(calls) == fatal:
                    raise ValueError("bad sample")
                return output

            sch, engine = small.built(DP, zero(stage), accumulate=2, loss=loss, max_grad_norm=small.CLIP)
            engine_step = functools.partial(engine.train_step, small.share(small.batch(0, 8), sch.mesh))
            first = said(engine_step)
            second = said(engine_step)
            weights = engine.state_dict()["head.weight"]
            found[f"{stage} {fatal}"] = (first, second, weights.tolist())
            engine.close()
    sch, engine = small.built(DP, zero(3), max_grad_norm=small.CLIP)
    broken = {**small.batch(0), "labels": torch.full((6, 5), 99)}
    with contextlib.suppress(IndexError):
        engine.train_step(small.share(broken, sch.mesh))
    found["index"] = said(lambda: engine.train_step(small.share(small.batch(0), sch.mesh)))
    engine.close()
    return found


def refusals() -> dict[str, Any]:
    found = {}
    for stage in range(4):
        sch, engine = small.built(DP, zero(stage), optimizer=None)
        whole = small.share(small.batch(0), sch.mesh)
        found[f"no optimizer {stage}"] = said(lambda engine=engine, whole=whole: engine.train_step(whole))
        found[f"evaluated {stage}"] = float(engine.eval_step(small.batch(0)).loss)
        engine.close()
    _, engine = small.built(DP, zero(1))
    with torch.no_grad():
        found["no gradients"] = said(lambda: engine.train_step(small.batch(0)))
    found["odd"] = float(engine.train_step(list(small.batch(0, 1).values())).loss)  # by position, one sample
    engine.close()
    found["closed"] = said(lambda: engine.train_step(small.batch(0)))
    found["closed, evaluation"] = said(lambda: engine.eval_step(small.batch(0)))
    for stage in (0, 3):
        sch, engine = small.built(DP, zero(stage), loss=lambda output, batch: output.detach())
        whole = small.share(small.batch(0), sch.mesh)
        found[f"detached {stage}"] = said(lambda engine=engine, whole=whole: engine.train_step(whole))
        engine.close()
    for stage in (0, 1):
        made = functools.partial(small.built, DP, zero(stage), optimizer=lambda ps: torch.optim.Adafactor(ps))
        found[f"Adafactor {stage}"] = said(made)
    return found


def unused() -> dict[str, Any]:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x).sum()

    found = {}
    for stage in (0, 2, 3):
        _, engine = small.built(DP, zero(stage), model=Half())
        for step in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.train_step((torch.ones(2, 4),))
            found[f"{stage} {step}"] = [str(one.message) for one in caught if "no gradient" in str(one.message)]
        engine.close()
    return found


CASES = [micro_batches, groups, first_step, buffers, failing, refusals, unused]


def _on_ranks() -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    random.seed(0)
    return {case.__name__: case() for case in CASES}


@functools.cache
def _found() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(_on_ranks, world_size=2)


def _both(name: str) -> list[dict[str, Any]]:
    return [rank[name] for rank in _found()]


def test_the_configurations_micro_batches_give_the_full_batch() -> None:
    losses, norms, _ = small.trained(2)
    for rank in _both("micro_batches"):
        for stage in range(4):
            assert rank[f"losses {stage}"] == pytest.approx(losses, rel=1e-6)
            assert rank[f"norms {stage}"] == pytest.approx(norms, rel=1e-6)


def test_groups_of_the_mesh_are_used_and_no_others_are_made() -> None:
    for rank in _both("groups"):
        assert rank == {
            "{'dp': 2}": (True, True, 0),  # the group of this process alone is there: the case before made it
            "forgotten {'dp': 2}": True,
            "{'tp': 2}": (True, True, 0),
            "forgotten {'tp': 2}": True,
            "{'dp': 2, 'tp': 1}": (True, True, 0),
            "forgotten {'dp': 2, 'tp': 1}": True,
        }


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_the_first_step_compares_batches_and_no_later_one(name: str) -> None:
    for rank in _both("first_step"):
        first, second = rank[name].get()
        assert (first.split(":")[0], second) == ("RankMismatchError", "")


def test_buffers_are_treated_as_target_torch_treats_them() -> None:
    for rank in _both("buffers"):
        assert rank["torch 0"][0]["norm.num_batches_tracked"] == 6
        for stage in (0, 3):
            values, evaluated, modes = rank[f"deepspeed {stage}"]
            assert values.keys() == rank["torch 0"][0].keys()
            for name, value in values.items():
                assert value == pytest.approx(rank["torch 0"][0][name], rel=1e-5), name
            assert evaluated == pytest.approx(rank["torch 0"][1], rel=1e-5)
            assert modes == rank["torch 0"][2]


def test_a_step_that_fails_in_the_middle_is_never_added_to_the_next_one() -> None:
    for rank in _both("failing"):
        for stage in (0, 2, 3):
            first, second, weights = rank[f"{stage} 1"]
            assert "bad sample" in first
            assert second == ""
            torch.testing.assert_close(torch.tensor(weights), _one_step(), rtol=0, atol=2e-6)
            first, second, weights = rank[f"{stage} 2"]
            assert "bad sample" in first
            assert second.startswith("BuildError: the engine is closed, because a step failed")
            assert "ValueError: bad sample" in second
            assert torch.equal(torch.tensor(weights), small.make().head.weight)
        assert rank["index"] == ""


def _one_step() -> torch.Tensor:
    model = small.make()
    optimizer = small.adamw(model.parameters())
    model(**small.batch(0, 8)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), small.CLIP)
    optimizer.step()
    return model.head.weight.detach()


def test_engines_that_cannot_train_raise_the_reason_and_evaluate(message: Messages) -> None:
    for what, *words in (
        ("no optimizer 0", "built without"),
        ("no gradients", "without gradients"),
        ("closed", "is closed"),
        ("detached 0", "does not require grad"),
        ("Adafactor 1", "Adafactor", "split over"),
    ):
        (told,) = {rank[what] for rank in _both("refusals")}
        message(told, "OptimizerError: " if "Adafactor" in what else "BuildError: ", *words)
    for rank in _both("refusals"):
        for stage in range(4):
            assert rank[f"no optimizer {stage}"] == rank["no optimizer 0"]
            assert rank[f"evaluated {stage}"] == pytest.approx(float(small.make()(**small.batch(0)).detach()), rel=1e-6)
        assert rank["odd"] == pytest.approx(float(small.make()(**small.batch(0, 1)).detach()), rel=1e-6)
        assert rank["closed, evaluation"] == rank["closed"]
        assert rank["detached 3"] == rank["detached 0"]
        assert rank["Adafactor 0"] == ""


def test_unused_parameters_of_the_first_step_are_named_once() -> None:
    for rank in _both("unused"):
        for stage in (0, 2, 3):
            assert len(rank[f"{stage} 0"]) == 1
            assert "gave 'unused.weight', 'unused.bias' no gradient" in rank[f"{stage} 0"][0]
            assert rank[f"{stage} 1"] == []
