"""What the ranks of test_megatron_single_stage_steps do: one function a promise, all in one launch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from tests.support import tied_model
from tests.support.dialect_models import Normed

__all__ = ["half", "on_rank"]

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
    """A step that fails before its backward pass, which leaves nothing, and one that fails in it, which closes."""
    found = {}
    for name, options in {"plain": {}, "distributed": DISTRIBUTED, "overlapped": OVERLAPPED}.items():
        calls: list[int] = []

        def loss(output: torch.Tensor, batch: Any, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 1:
                raise ValueError("bad sample")
            return output

        def fail(gradient: torch.Tensor, calls: list[int] = calls) -> None:
            if len(calls) == 5:
                raise ValueError("bad gradient")

        sch, engine = built(DP, accumulate=2, loss=loss, **options)
        engine.module.scale.register_hook(fail)  # behind the blocks in the backward pass
        told = []
        for step in (0, 1, 2, 2):
            batch = tied_model.share(tied_model.batch(step, 8), sch.mesh)
            told.append(said(functools.partial(engine.train_step, batch)))
            if step == 1:
                state = {key: one.clone() for key, one in engine.state_dict().items()}
        marked = sorted({key for one in engine.module.parameters() for key in vars(one)})
        found[name] = told, state, marked
    return found


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
        for uses_all in (True, False, True)
    ]
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
    _, engine = built(DP, loss=lambda output, batch: output.detach())
    found["detached"] = said(lambda: engine.train_step(batch))
    found["detached, state"] = float(engine.state_dict()["head.weight"].sum())
    engine.close()
    _, engine = built(DP, model=tied_model.make().requires_grad_(False))
    found["frozen"] = said(lambda: engine.train_step(batch))
    engine.close()
    found["double, distributed"] = said(
        lambda: built(DP, model=tied_model.make().double(), max_grad_norm=None, **DISTRIBUTED)
    )
    for target in ("torch", "megatron"):
        _, engine = tied_model.built(DP, target=target, model=tied_model.make().double())
        found[f"double, {target}"] = [float(engine.train_step(batch).loss) for _ in range(3)]
        engine.close()
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
    from tests.support.cpu_megatron import install

    install()
    found = {}
    for case in CASES:
        found[case.__name__] = case()
    return found
