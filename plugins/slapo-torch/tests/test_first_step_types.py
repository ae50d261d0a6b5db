"""The first training step names a type that its precision does not promise, and reports the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slapo_core import BuildError
from slapo_torch import precision as precisions
from slapo_torch.precision import Float32, ModelPrecision

from .precise_models import BF16, ISLANDS, Block, Model, adamw, build, make_batches, seen

pytestmark = pytest.mark.filterwarnings("ignore:AdamW steps parameters in bfloat16")


def no_autocast(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(ModelPrecision, "forward", lambda self: torch.enable_grad())
    return {}


def no_main_weights(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(ModelPrecision, "wanted", lambda self, live: BF16)
    return {}


def no_float32_modules(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(Float32, "begin", lambda self, module, args, kwargs: None)
    return {}


def no_casts_of_inputs(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(precisions, "cast", lambda value, dtype: value)
    return {"precision": "bf16"}


def other_moments(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(round_moments)
        return optimizer

    return {"optimizer": factory}


def round_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


def weights_turn(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The optimizer's step turns the main weights into bfloat16."""

    def turn(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data = parameter.data.bfloat16()

    def factory(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(turn)
        return optimizer

    return {"optimizer": factory}


def other_buffers(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    forward = Model.forward

    def changing(self: Model, **arguments: torch.Tensor) -> Any:
        self.table = self.table.bfloat16()
        return forward(self, **arguments)

    patch.setattr(Model, "forward", changing)
    return {}


def other_products(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    forward = Block.forward

    def within(self: Block, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return forward(self, x)

    patch.setattr(Block, "forward", within)
    return {}


PLANTED = {
    no_autocast: "torch.autocast('cpu') is in float32, not in bfloat16",
    no_main_weights: "is in bfloat16, not in float32",
    no_float32_modules: "autocast in 'blocks.0.norm' is in bfloat16",
    no_casts_of_inputs: "an input of 'blocks.0.up' is in float32, not in bfloat16",
    other_moments: "'exp_avg' of 'embed.weight' is in bfloat16",
    weights_turn: "'embed.weight' is in bfloat16",
    other_buffers: "buffer 'table' is in bfloat16",
    other_products: "the output of 'blocks.0.up' is in float16",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named_in_the_first_step(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"precision": "bf16-mixed", "fp32": ISLANDS, **plant(monkeypatch)}
    engine = build(**options)
    with pytest.raises(BuildError) as error:
        engine.train_step(make_batches()[0])
    assert PLANTED[plant] in str(error.value)
    assert f"precision='{options['precision']}'" in str(error.value)
    assert engine.precision.seen == ()


class Rounding(torch.optim.Optimizer):
    """With moments in bfloat16, deliberately."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("moment", torch.zeros_like(parameter, dtype=BF16)).add_(parameter.grad)
            parameter.sub_(0.1 * state["moment"])


def test_moments_of_an_own_optimizer_are_reported() -> None:
    engine = build(precision="bf16-mixed", optimizer=Rounding, elementwise=True)
    engine.train_step(make_batches()[0])
    assert seen(engine)["other optimizer state"] == {"bfloat16"}
    assert "reported, not checked" in str(engine.precision)


def test_fused_adamw_steps_main_weights() -> None:
    engine = build(precision="bf16-mixed", optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
    engine.train_step(make_batches()[0])
    assert seen(engine)["moments"] == {"float32"}
