"""What a step of the engine without a pipeline promises: buffers, the first step, failures, refusals, closing."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.testing import run_ranks
from tests import tied_model

pytestmark = pytest.mark.ranks

DP, TP = {"dp": 2}, {"tp": 2}
OWN = {"optimizer": None, "optimizer_config": {"lr": 1e-2, "adam_eps": 1e-4}}
DISTRIBUTED = {
    "ddp_config": {"use_distributed_optimizer": True},
    "optimizer_config": {"use_distributed_optimizer": True},
}
OVERLAPPED = {"ddp_config": {"overlap_grad_reduce": True, "bucket_size": 60}}


def said(call: Callable[[], Any]) -> str:
    """What is raised, in one line; "" for nothing."""
    try:
        call()
    except (slapo.SlapoError, ValueError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def built(mesh: dict[str, int], **options: Any) -> tuple[slapo.Schedule, Any]:
    return tied_model.built(mesh, target="megatron", **{"max_grad_norm": tied_model.CLIP, **options})


def first_step() -> dict[str, Any]:
    """Batches that differ on the ranks of a replica: refused in the first step, and not compared any more later."""
    found = {}
    for name, options in {"factory": {}, "Megatron's": OWN}.items():
        _, engine = built(TP, **options)
        own = tied_model.batch(dist.get_rank())
        refused = said(lambda engine=engine, own=own: engine.train_step(own))
        engine.train_step(tied_model.batch(0))
        found[name] = refused.split(":")[0], said(lambda engine=engine, own=own: engine.train_step(own))
        engine.close()
    return found


class Normed(nn.Module):
    """Running statistics, and a buffer that every call counts."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("odd", torch.zeros(3, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.odd += 1
        return self.norm(self.product(x)).square().mean()


def buffers() -> dict[str, Any]:
    found = {}
    for target in ("torch", "megatron"):
        torch.manual_seed(1)
        sch = slapo.create_schedule(Normed(), mesh=DP)
        engine = slapo.build(sch, target=target, optimizer=tied_model.adamw, accumulate=2)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            engine.train_step((torch.randn(8, 8, generator=generator),))
        values = {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}
        evaluated = float(engine.eval_step((torch.ones(2, 8),)).loss)
        modes = {name: module.training for name, module in engine.module.named_modules()}
        found[target] = values, evaluated, modes
        engine.close()
    return found


def failing() -> dict[str, Any]:
    """A step that fails in a micro-batch, before or behind one that was accumulated: the next one starts anew."""
    found = {}
    for name, options in {"plain": {}, "distributed": DISTRIBUTED, "overlapped": OVERLAPPED}.items():
        for fatal in (1, 2, 4):  # also in the step behind the first, when Megatron has begun to reduce by itself
            calls = []

            def loss(output: torch.Tensor, batch: Any, calls: list[int] = calls, fatal: int = fatal) -> torch.Tensor:
                calls.append(1)
                if len(calls) == fatal:
                    output.register_hook(failed)  # in the backward pass of the head: others have no gradient yet
                return output

            sch, engine = built(DP, accumulate=2, loss=loss, **options)
            told = []
            for step in [0, 1] if fatal < 3 else [0, 0, 1]:
                batch = tied_model.share(tied_model.batch(step, 8), sch.mesh)
                told.append(said(functools.partial(engine.train_step, batch)))
            found[f"{name} {fatal}"] = told, engine.state_dict()
            engine.close()
    return found


def failed(gradient: torch.Tensor) -> None:
    raise ValueError("bad sample")


def half() -> nn.Module:
    torch.manual_seed(6)
    return Half()


class Half(nn.Module):
    """Some of it is frozen, and some is used every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        y = self.frozen(self.used(x)).tanh()
        return (self.unused(y) if uses_all else y).square().mean()


def unused() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {"factory": {}, "Megatron's": OWN, "distributed": DISTRIBUTED}.items():
        _, engine = built(DP, model=half(), **options)
        for step, uses_all in enumerate((True, False, False)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.train_step({"x": torch.ones(2, 4), "uses_all": uses_all})
            found[f"{name} {step}"] = [str(one.message) for one in caught if "no gradient" in str(one.message)]
        found[name] = {key: one.clone() for key, one in engine.state_dict().items()}
        engine.close()
    _, engine = built(DP, model=half(), **OVERLAPPED)
    found["waited for"] = [
        said(lambda engine=engine, uses_all=uses_all: engine.train_step({"x": torch.ones(2, 4), "uses_all": uses_all}))
        for uses_all in (False, True, True, False, True)
    ]
    engine.close()
    return found


def refusals() -> dict[str, Any]:
    found = {}
    sch, engine = built(DP, optimizer=None)
    batch = tied_model.share(tied_model.batch(0), sch.mesh)
    found["no optimizer"] = said(lambda: engine.train_step(batch))
    found["evaluated"] = float(engine.eval_step(tied_model.batch(0)).loss)
    engine.close()
    _, engine = built(DP)
    with torch.no_grad():
        found["no gradients"] = said(lambda: engine.train_step(batch))
    found["by position"] = float(engine.train_step(list(tied_model.batch(0, 1).values())).loss)
    engine.close()
    found["closed"] = said(lambda: engine.train_step(batch))
    found["closed, evaluation"] = said(lambda: engine.eval_step(batch))
    found["double"] = said(lambda: built(DP, model=tied_model.make().double()))
    found["half"] = said(lambda: built(DP, model=tied_model.make().bfloat16()))
    found["SGD, distributed"] = said(lambda: built(DP, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), **DISTRIBUTED))
    rates = {"optimizer": None, "optimizer_config": {"lr": 1e-2, "decoupled_lr": 1e-3}}
    found["decoupled"] = said(lambda: built(DP, **rates))
    return found


def marks_after_failure() -> dict[str, Any]:
    model = tied_model.make()
    before = [dict(vars(one)) for one in model.parameters()]
    told = said(lambda: built(DP, model=model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), **DISTRIBUTED))
    return {"told": told[:60], "same": [dict(vars(one)) for one in model.parameters()] == before}


def closing() -> dict[str, Any]:
    """A closed engine leaves a model that trains by itself, in plain torch."""
    found: dict[str, Any] = {}
    gathered = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    both = {"ddp_config": {**gathered, "overlap_grad_reduce": True}, "optimizer_config": gathered}
    for name, options in {"plain": {}, "overlapped": both}.items():
        sch, engine = built(DP, **options)
        for step in range(2):
            engine.train_step(tied_model.share(tied_model.batch(step), sch.mesh))
        state = {key: one.clone() for key, one in engine.state_dict().items()} if name == "plain" else None
        engine.close()
        model = engine.module
        model(**tied_model.batch(5)).backward()
        left = sorted({key for one in model.parameters() for key in vars(one)})
        gradients = {key: one.grad for key, one in model.named_parameters()}
        found[name] = left, gradients, state, dict(model.state_dict())
    return found


def evaluation() -> dict[str, Any]:
    """Between two steps, it changes nothing."""
    found = {}
    for name in ("with", "without"):
        sch, engine = built(DP, accumulate=3)
        losses = []
        for step in range(2):
            losses.append(float(engine.train_step(tied_model.share(tied_model.batch(step), sch.mesh)).loss))
            if name == "with":
                before = [one.grad for one in engine.module.parameters()]
                engine.eval_step(tied_model.batch(9))
                assert all(
                    one.grad is gradient for one, gradient in zip(engine.module.parameters(), before, strict=True)
                )
        found[name] = losses, engine.state_dict()
        engine.close()
    return found


CASES = [first_step, buffers, failing, unused, refusals, marks_after_failure, closing, evaluation]


def on_rank() -> dict[str, dict[str, Any]]:
    from tests.cpu_megatron import install

    install()
    found = {}
    for case in CASES:
        found[case.__name__] = case()
    return found


@functools.cache
def found() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(on_rank, world_size=2)


def both(name: str) -> list[dict[str, Any]]:
    return [rank[name] for rank in found()]


def stepped_by_hand(*steps: int, samples: int = 8) -> dict[str, torch.Tensor]:
    model = tied_model.make()
    optimizer = tied_model.adamw(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        model(**tied_model.batch(step, samples)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), tied_model.CLIP)
        optimizer.step()
    return dict(model.state_dict())


def test_the_first_step_compares_batches_and_no_later_one() -> None:
    for rank in both("first_step"):
        assert rank == dict.fromkeys(("factory", "Megatron's"), ("RankMismatchError", ""))


def test_buffers_are_treated_as_target_torch_treats_them() -> None:
    for rank in both("buffers"):
        (values, evaluated, modes), wanted = rank["megatron"], rank["torch"]
        assert values["norm.num_batches_tracked"] == 6
        assert values.keys() == wanted[0].keys()
        for name, value in values.items():
            assert value == pytest.approx(wanted[0][name], rel=1e-5), name
        assert evaluated == pytest.approx(wanted[1], rel=1e-5)
        assert modes == wanted[2]


def test_a_step_that_fails_in_the_middle_leaves_nothing_to_the_next_one() -> None:
    for rank in both("failing"):
        for name in ("plain", "distributed", "overlapped"):
            for fatal in (1, 2, 4):
                told, state = rank[f"{name} {fatal}"]
                which = 0 if fatal < 3 else 1
                assert [bool(one) for one in told] == [number == which for number in range(len(told))], told
                assert "bad sample" in told[which]
                wanted = stepped_by_hand(*([1] if fatal < 3 else [0, 1]))
                torch.testing.assert_close(state, wanted, rtol=1e-5, atol=2e-6)


def test_what_a_step_gives_no_gradient_is_named_once_and_stepped_with_zeros() -> None:
    for rank in both("unused"):
        for name in ("factory", "Megatron's", "distributed"):
            assert rank[f"{name} 0"] == rank[f"{name} 2"] == []
            assert len(rank[f"{name} 1"]) == 1
            assert (
                "training step 2 gave 'unused.weight', 'unused.bias' no gradient: Megatron steps"
                in rank[f"{name} 1"][0]
            )
            for key in ("frozen.weight", "frozen.bias"):
                assert torch.equal(rank[name][key], half().state_dict()[key])
        torch.testing.assert_close(rank["factory"], rank["distributed"], rtol=1e-5, atol=2e-6)
        assert not torch.equal(rank["factory"]["unused.weight"], half().state_dict()["unused.weight"])


def test_with_overlap_a_parameter_without_gradient_is_refused_and_the_next_step_goes_on() -> None:
    for rank in both("unused"):
        told = rank["waited for"]
        assert [bool(one) for one in told] == [True, False, False, True, False]
        for one in (told[0], told[3]):
            assert one.startswith("BuildError: the last micro-batch of a step gave 'unused.weight', 'unused.bias' no")


def test_what_cannot_train_says_why() -> None:
    for rank in both("refusals"):
        assert rank["no optimizer"].startswith("BuildError: this engine cannot train: it was built without")
        evaluated = float(tied_model.make()(**tied_model.batch(0)).detach())
        assert rank["evaluated"] == pytest.approx(evaluated, rel=1e-6)
        assert rank["no gradients"].startswith("BuildError: train_step() was called without gradients")
        one = float(tied_model.make()(**tied_model.batch(0, 1)).detach())
        assert rank["by position"] == pytest.approx(one, rel=1e-6)
        assert rank["closed"].startswith("BuildError: the engine is closed")
        assert rank["closed, evaluation"].startswith("BuildError: the engine is closed")
        assert "is trained in float64, and Megatron's optimizer steps float32" in rank["double"]
        assert "is trained in bfloat16" in rank["half"]
        assert "steps AdamW only, and the factory makes SGD" in rank["SGD, distributed"]
        assert "which acts on parameters that are marked as those of embeddings" in rank["decoupled"]


def test_a_build_that_fails_leaves_no_marks() -> None:
    for rank in both("marks_after_failure"):
        assert rank["same"]
        assert "Megatron's distributed optimizer" in rank["told"]


def test_a_closed_engine_leaves_a_model_that_trains_by_itself() -> None:
    wanted = stepped_by_hand(0, 1, samples=6)
    model = tied_model.make()
    model.load_state_dict(wanted)
    model(**tied_model.batch(5)).backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    for rank in both("closing"):
        for name in ("plain", "overlapped"):
            left, own, state, values = rank[name]
            assert left == []
            torch.testing.assert_close(values, wanted, rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(own, gradients, rtol=1e-4, atol=2e-5)
            assert state is None or all(torch.equal(one, values[key]) for key, one in state.items())


def test_an_evaluation_between_steps_changes_nothing() -> None:
    for rank in both("evaluation"):
        assert rank["with"][0] == rank["without"][0]
        assert all(torch.equal(one, rank["without"][1][name]) for name, one in rank["with"][1].items())
