"""What a user changes between two steps counts, or is refused: Megatron keeps copies, and buffers of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.testing import run_ranks

pytestmark = pytest.mark.ranks

_DISTRIBUTED = {"use_distributed_optimizer": True}
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {}),
    "distributed": (torch.float32, {"optimizer_config": _DISTRIBUTED, "ddp_config": _DISTRIBUTED}),
    "bf16": (torch.bfloat16, {"optimizer_config": {"bf16": True}, "model_parallel_config": {"bf16": True}}),
    "bf16, distributed": (
        torch.bfloat16,
        {
            "optimizer_config": {**_DISTRIBUTED, "bf16": True},
            "ddp_config": _DISTRIBUTED,
            "model_parallel_config": {"bf16": True},
        },
    ),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.frozen = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return (self.down(self.up(x).tanh()) + self.frozen(x)).square().mean()


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1)


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("up.weight").clamp_(-0.1, 0.1)


def replace(model: nn.Module) -> None:
    parameter = model.get_parameter("up.weight")
    parameter.data = parameter.data.clamp(-0.1, 0.1)


def move(model: nn.Module) -> None:
    parameter = model.get_parameter("up.weight")
    parameter.data = parameter.data.clone()


def freeze(model: nn.Module) -> None:
    model.get_submodule("down").requires_grad_(False)


def unfreeze(model: nn.Module) -> None:
    model.get_submodule("frozen").requires_grad_(True)


def exchange(model: nn.Module) -> None:
    model.up.weight = nn.Parameter(model.get_parameter("up.weight").detach().clone())  # type: ignore[union-attr]


def on_module(change: Callable[[nn.Module], None]) -> Callable[[Any], None]:
    return lambda engine: change(engine.module)


CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda engine: None,
    "in place": on_module(clamp),
    "other memory": on_module(replace),
    "other memory, same values": on_module(move),
    "frozen": on_module(freeze),
    "unfrozen": on_module(unfreeze),
    "another one": on_module(exchange),
    "own state": lambda engine: engine.load_state_dict(engine.state_dict()),
}


def outcome(form: str, change: str) -> dict[str, torch.Tensor] | str:
    """The state after a step, the change, and two more steps; or the refusal."""
    dtype, options = FORMS[form]
    sch = slapo.create_schedule(make().to(dtype), mesh={"dp": 2})
    engine: Any = slapo.build(sch, target="megatron", optimizer=adamw, **options)
    try:
        for step in range(3):
            engine.train_step(batch(step).chunk(2)[dist.get_rank()])
            if step == 0:
                CHANGES[change](engine)
        return dict(engine.state_dict())
    except slapo.BuildError as error:
        return str(error)
    finally:
        engine.close()


def backward_by_hand() -> dict[str, torch.Tensor]:
    """Steps with a backward pass of the user's own in between, while Megatron reduces beside the backward pass."""
    sch = slapo.create_schedule(make(), mesh={"dp": 2})
    options = {"ddp_config": {"overlap_grad_reduce": True, "bucket_size": 40}}
    engine: Any = slapo.build(sch, target="megatron", optimizer=adamw, **options)
    for step in range(3):
        engine.train_step(batch(step).chunk(2)[dist.get_rank()])
        engine.module(batch(9)).backward()
    return dict(engine.state_dict())


def strided(form: str) -> str:
    """What comes of a parameter that is stored by columns: the refusal, or nothing after steps, a save and a load."""
    model = make()
    model.up.weight.data = model.up.weight.data.t().contiguous().t()
    sch = slapo.create_schedule(model, mesh={"dp": 2})
    try:
        engine: Any = slapo.build(sch, target="megatron", optimizer=adamw, **FORMS[form][1])
    except slapo.BuildError as error:
        return str(error)
    engine.train_step(batch(0).chunk(2)[dist.get_rank()])
    engine.load_state_dict(engine.state_dict())
    engine.close()
    return ""


def outcomes() -> dict[tuple[str, str], Any]:
    from tests.cpu_megatron import install

    install()
    found = {(form, change): outcome(form, change) for form in FORMS for change in CHANGES}
    found["overlap", "by hand"] = backward_by_hand()
    return found | {(form, "strided"): strided(form) for form in ("plain", "distributed")}


@functools.cache
def found() -> dict[tuple[str, str], Any]:
    mine, other = run_ranks(outcomes, world_size=2, timeout=300)
    assert {key: isinstance(value, str) for key, value in mine.items()} == {
        key: isinstance(value, str) for key, value in other.items()
    }
    return mine


@functools.cache
def plain(change: str) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
        if step == 0 and change in ("in place", "other memory"):
            clamp(model)
    return dict(model.state_dict())


COUNTS = [
    ("plain", "in place"),
    ("plain", "other memory"),
    ("plain", "other memory, same values"),
    ("distributed", "in place"),
    *((form, each) for form in FORMS for each in ("nothing", "own state")),
    ("bf16", "other memory, same values"),
]


@pytest.mark.parametrize(("form", "change"), COUNTS)
def test_what_counts_in_plain_training_counts(form: str, change: str) -> None:
    state = found()[form, change]
    assert not isinstance(state, str), state
    wanted = plain(change)
    is_low = form.startswith("bf16")
    close = {"atol": 2e-2, "rtol": 2e-2} if is_low else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close({name: one.float() for name, one in state.items()}, wanted, **close)


SAYS = {
    "in place": "'up.weight' was changed in place since the last step, and Megatron trains a copy of it",
    "other memory": "'up.weight' ",
    "other memory, same values": "'up.weight' got other memory after the build (parameter.data = ...), and Megatron",
    "frozen": "'down.weight' was frozen after the build: Megatron would go on to step it",
    "another one": "'up.weight' is another parameter now than at the build: Megatron would go on to train that one",
    "unfrozen": "'frozen.weight' was unfrozen after the build: Megatron has no state for it, and would never step it",
}


@pytest.mark.parametrize(
    ("form", "change"), [(form, each) for each in SAYS for form in FORMS if (form, each) not in COUNTS]
)
def test_what_megatron_would_pass_over_is_refused(form: str, change: str) -> None:
    text = found()[form, change]
    assert isinstance(text, str)
    assert text.startswith(SAYS[change]), text
    assert "\n  hint: " in text


def test_a_parameter_that_could_not_be_saved_is_refused_before_it_is_trained() -> None:
    assert found()["plain", "strided"] == (
        "'up.weight' is not contiguous (strides (1, 8) of shape (8, 6)), and could not be saved from beside Megatron's "
        "optimizer\n  hint: parameter.data = parameter.data.contiguous() for 'up.weight', before the schedule is made"
    )
    assert found()["distributed", "strided"] == ""


def test_a_backward_pass_by_hand_leaves_the_steps_as_they_are() -> None:
    torch.testing.assert_close(found()["overlap", "by hand"], plain("nothing"), atol=1e-6, rtol=1e-5)
