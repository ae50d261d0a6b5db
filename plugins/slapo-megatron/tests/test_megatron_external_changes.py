"""What a user changes between two steps counts, or is refused: Megatron keeps copies, and buffers of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import slapo_core as slapo
from tests.messages import Messages
from tests.support import between_steps
from tests.support.between_steps import adamw, batch, make, outcome, plain, share, told

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


def on_module(name: str) -> Callable[[Any], Any]:
    return lambda engine: between_steps.CHANGES[name](engine.module)


CHANGES: dict[str, Callable[[Any], Any]] = {
    **{name: on_module(name) for name in between_steps.CHANGES},
    "own state": lambda engine: engine.load_state_dict(engine.state_dict()),
}


FEW = {
    "in place, on another rank": ("bf16, distributed",),
    "frozen": ("plain", "bf16, distributed"),
    "unfrozen": ("plain", "bf16, distributed"),
    "another one": ("plain", "bf16, distributed"),
}
"""What is found alike in all forms, or can be in one only."""
CASES = [(form, change) for change in CHANGES for form in FEW.get(change, FORMS)]


def backward_by_hand() -> dict[str, torch.Tensor]:
    """Steps with a backward pass of the user's own in between, while Megatron reduces beside the backward pass."""
    sch = slapo.create_schedule(make(), mesh={"dp": 2})
    options = {"ddp_config": {"overlap_grad_reduce": True, "bucket_size": 40}}
    engine: Any = slapo.build(sch, target="megatron", optimizer=adamw, **options)
    for step in range(3):
        engine.train_step(share(step))
        engine.module(batch(9)).backward()
    return dict(engine.state_dict())


def strided(form: str) -> str:
    """What comes of a parameter that is stored by columns: steps, and the refusal of a load."""
    model = make()
    model.up.weight.data = model.up.weight.data.t().contiguous().t()
    sch = slapo.create_schedule(model, mesh={"dp": 2})
    engine: Any = slapo.build(sch, target="megatron", optimizer=adamw, **FORMS[form][1])
    engine.train_step(share(0))
    try:
        engine.load_state_dict(engine.state_dict())
    except slapo.BuildError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def outcomes() -> dict[tuple[str, str], Any]:
    from tests.support.cpu_megatron import install

    install()
    found: dict[tuple[str, str], Any] = {}
    for form, name in CASES:
        dtype, options = FORMS[form]
        found[form, name] = outcome(CHANGES[name], make().to(dtype), target="megatron", **options)
    found["overlap", "by hand"] = backward_by_hand()
    return found | {(form, "strided"): strided(form) for form in ("plain", "distributed")}


@functools.cache
def found() -> Mapping[tuple[str, str], Any]:
    return told(outcomes)


COUNTS = [
    ("plain", "in place"),
    ("plain", "other memory"),
    ("plain", "other memory, same values"),
    ("distributed", "in place"),
    *((form, each) for form in FORMS for each in ("nothing", "own state")),
    ("bf16", "other memory, same values"),
]


@pytest.mark.parametrize(("form", "change"), COUNTS)
def test_settings_of_parameters_act_as_in_plain_training(form: str, change: str) -> None:
    state = found()[form, change]
    assert not isinstance(state, str), state
    wanted = plain(change)
    is_low = form.startswith("bf16")
    close = {"atol": 2e-2, "rtol": 2e-2} if is_low else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close({name: one.float() for name, one in state.items()}, wanted, **close)


SAYS = {
    "in place": ("'up.weight'", "in place"),
    "in place, on another rank": ("'down.bias'", "in place"),
    "other memory": ("'up.weight'",),
    "other memory, same values": ("'up.weight'", "new memory"),
    "frozen": ("'down.weight'", "frozen"),
    "another one": ("'up.weight'", "replaced after build()"),
    "unfrozen": ("'frozen.weight'", "unfrozen"),
}


@pytest.mark.parametrize(("form", "change"), [case for case in CASES if case[1] in SAYS and case not in COUNTS])
def test_changes_that_megatron_would_ignore_are_refused(form: str, change: str, message: Messages) -> None:
    text = found()[form, change]
    assert isinstance(text, str)
    message(text, *SAYS[change], "\n  hint: ")


def test_a_parameter_that_cannot_be_saved_is_trained(message: Messages) -> None:
    message(found()["plain", "strided"], "load_state_dict", "contiguous", "shape (8, 6)")
    assert found()["distributed", "strided"] == ""


def test_a_backward_pass_by_hand_leaves_the_steps_as_they_are() -> None:
    torch.testing.assert_close(found()["overlap", "by hand"], plain("nothing"), atol=1e-6, rtol=1e-5)
