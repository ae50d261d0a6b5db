"""A wrong step is found, by the right tensor, and named; each test is one way of being wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit
from tests.messages import Messages


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(4))
        self.bn = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layer:
            x = block(x)
        return self.bn(x)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.001


@dataclass(frozen=True)
class Wrap(slapo.Primitive):
    """Wrap the forward in one of the mistakes below."""

    name = "wrong.wrap"
    equivalence = slapo.Equivalence.EXACT
    mistake: str

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, _MISTAKES[self.mistake])


def _wrong_gradient(forward: Any) -> Any:
    return lambda module, x: _WrongBackward.apply(forward(module, x))


def _detached_input(forward: Any) -> Any:
    return lambda module, x: forward(module, x.detach())


def _recomputed_without_its_random_numbers(forward: Any) -> Any:
    return lambda module, x: checkpoint(forward, module, x, use_reentrant=False, preserve_rng_state=False)


def _nan(forward: Any) -> Any:
    return lambda module, x: forward(module, x) + torch.where(x[..., :1] == x[0, :1], math.nan, 0.0)


def _tuple(forward: Any) -> Any:
    return lambda module, x: (forward(module, x), None)


def _raises(forward: Any) -> Any:
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")

    return run


def _half(forward: Any) -> Any:
    return lambda module, x: forward(module, x.float().to(x.dtype))


def _only_in_evaluation(forward: Any) -> Any:
    return lambda module, x: forward(module, x) * (1.0 if module.training else 1.01)


def _second_call(forward: Any) -> Any:
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.__dict__.setdefault("kept", module.weight.detach().clone())
        return nn.functional.linear(x, module.weight + (module.kept - module.weight).detach(), module.bias)

    return run


def _fine(forward: Any) -> Any:
    return lambda module, *args: forward(module, *args)


_MISTAKES = {
    "gradient": _wrong_gradient,
    "detach": _detached_input,
    "random": _recomputed_without_its_random_numbers,
    "nan": _nan,
    "tuple": _tuple,
    "raises": _raises,
    "half": _half,
    "evaluation": _only_in_evaluation,
    "stale": _second_call,
    "fine": _fine,
}


def failure(sch: slapo.Schedule, batch: Any = None, **options: Any) -> slapo.VerifyError:
    torch.manual_seed(1)
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, torch.randn(5, 6) if batch is None else batch, **options)
    return caught.value


def net() -> slapo.Schedule:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Net())
    for index in range(4):
        sch[f"layer.{index}.norm"].apply(Wrap("fine"))
        sch[f"layer.{index}.fc1"].apply(Wrap("fine"))
    return sch


def blamed(error: slapo.VerifyError) -> list[str]:
    """The steps in the message, if they are said to do it alone."""
    _, _, steps = error.message.partition("the steps that cause it")
    return [line.strip().partition("  (")[0] for line in steps.splitlines() if line.startswith("    #")]


def test_another_function_is_found_in_the_output_and_its_step_and_line_are_named() -> None:
    sch = net()
    sch["layer.2.act"].replace(nn.ReLU())
    sch["layer.3.fc1"].apply(Wrap("fine"))
    error = failure(sch)
    assert error.tensor == "output"
    assert error.rank is None
    assert error.difference > error.tolerance > 0
    assert error.steps == ("#9 replace(ReLU()) at 'layer.2.act'",)
    first, allowed, *rest = error.message.splitlines()
    assert ": it differs by up to " in first
    assert allowed == "  allowed: 1e-10 * max|reference| + 1e-12 * scale (float64, REORDERED)"
    assert "the steps that cause it" in rest[0]
    assert rest[1].startswith("    #9 replace(ReLU()) at 'layer.2.act'  (")
    assert "test_verification_finds.py:" in rest[1]
    assert len(rest) == 2


MISTAKES = {
    # the mistake: where, the tensor it is found in
    "gradient": ("layer.1.fc2", "gradient of layer.1.fc2.bias"),
    "detach": ("layer.1.norm", "gradient of layer.0.fc2.bias"),
    "nan": ("layer.1.norm", "output"),
    "half": ("layer.1.norm", "output"),
    "evaluation": ("layer.1.fc2", "output in evaluation mode"),
    "stale": ("layer.1.fc2", "parameter bn.weight after 3 optimizer steps"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found_where_it_shows_first_and_blamed_on_its_step(mistake: str) -> None:
    path, tensor = MISTAKES[mistake]
    sch = net()
    sch[path].apply(Wrap(mistake))
    error = failure(sch)
    assert error.tensor == tensor
    assert blamed(error) == [f"#9 wrap('{mistake}') at '{path}'"]
    assert len(sch.records) == 9


def test_without_the_mistakes_the_same_schedule_agrees() -> None:
    sch = net()
    sch["layer.1.fc2"].apply(Wrap("fine"))
    assert {entry.difference for entry in slapo.verify(sch, torch.randn(5, 6)).largest} == {0.0}


def test_a_stale_copy_of_a_weight_needs_the_optimizer_steps_to_show() -> None:
    sch = net()
    sch["layer.1.fc2"].apply(Wrap("stale"))
    assert slapo.verify(sch, torch.randn(5, 6), optimizer_steps=0)


def test_a_model_that_raises_says_what_and_who() -> None:
    sch = net()
    sch["layer.1.act"].apply(Wrap("raises"))
    error = failure(sch)
    head = error.message.splitlines()[0]
    assert ": ValueError: no such luck (" in head
    assert "test_verification_finds.py:" in head
    assert blamed(error) == ["#9 wrap('raises') at 'layer.1.act'"]
    assert isinstance(error.__cause__, ValueError)


def test_another_output_structure_is_named(message: Messages) -> None:
    sch = net()
    sch["bn"].apply(Wrap("tuple"))
    error = failure(sch)
    message(error, "another structure", "output[0], output[1]")


def test_an_output_of_another_shape_suggests_the_gather_that_is_missing(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(6, 8)))
    sch["0"].replace(lambda old: nn.Linear(6, 4), drop=["weight", "bias"])
    error = failure(sch)
    message(error, "(5, 4), not (5, 8)", "along axis -1")


def test_a_wrong_buffer_update_is_found() -> None:
    sch = net()
    sch["bn"].replace(lambda old: nn.BatchNorm1d(6, momentum=0.2))
    error = failure(sch)
    assert error.tensor == "buffer bn.running_mean after a training step"
    assert error.path == "bn"
    assert [line.partition("(")[0] for line in blamed(error)] == ["#9 replace"]


def test_a_batch_norm_that_counts_twice_because_it_is_recomputed_is_found() -> None:
    class Twice(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, input, use_reentrant=False)

    sch = net()
    sch["bn"].replace(lambda old: Twice(6, momentum=old.momentum))
    error = failure(sch)
    assert error.tensor == "buffer bn.running_mean after a training step"


def test_recomputing_with_other_random_numbers_is_found_and_keeping_them_agrees() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand_like(x)

    for wrong in (False, True):
        sch = slapo.create_schedule(nn.Sequential(nn.Linear(6, 6), Noise()))
        if wrong:
            sch["1"].apply(Wrap("random"))
            error = failure(sch)
            assert error.tensor == "gradient of 0.bias"
            assert blamed(error) == ["#1 wrap('random') at '1'"]
        else:
            sch["1"].checkpoint()
            assert {entry.difference for entry in slapo.verify(sch, torch.randn(5, 6)).largest} == {0.0}


def test_a_parameter_that_gets_no_gradient_any_more_is_found(message: Messages) -> None:
    class NoBias(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(input, self.weight, self.bias.detach())

    sch = net()
    sch["layer.3.fc2"].replace(lambda old: NoBias(8, 6))
    error = failure(sch)
    message(error, "layer.3.fc2.bias: it has no gradient")


def test_a_wrong_gradient_of_a_tied_weight_is_not_taken_for_one_near_the_output() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc, self.out = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.fc(self.embed(ids)))

    sch = slapo.create_schedule(Tied())
    sch["fc"].apply(Wrap("gradient"))
    assert failure(sch, torch.tensor([[1, 2, 3]])).tensor == "gradient of fc.bias"


def test_a_declared_approximation_is_allowed_and_a_larger_error_is_not() -> None:
    def nearly(old: nn.Linear) -> nn.Module:
        class Nearly(nn.Linear):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return super().forward(input) * (1 + 1e-4)

        return Nearly(old.in_features, old.out_features)

    for rtol, atol, agrees in ((1e-2, None, True), (1e-7, None, False), (None, None, False)):
        sch = slapo.create_schedule(nn.Sequential(nn.Linear(6, 6)))
        sch["0"].replace(nearly, rtol=rtol, atol=atol)
        if agrees:
            assert slapo.verify(sch, torch.randn(5, 6)).tolerance.endswith("(float64, APPROXIMATE(rtol=0.01, atol=0))")
        else:
            failure(sch)
    assert slapo.verify(sch, torch.randn(5, 6), rtol=1e-2)
    assert slapo.verify(sch, torch.randn(5, 6), rtol=0.0, atol=1.0)


def test_a_step_that_repeats_a_live_module_is_never_tried_on_it() -> None:
    """The function gives the same module each time: trying it again would work on the user's own."""
    wrong = nn.Linear(6, 8)
    sch = slapo.create_schedule(Net())
    sch["layer.0.fc1"].replace(lambda old: wrong, drop=["weight", "bias"])
    sch["layer.0.norm"].apply(Wrap("fine"))
    before = wrong.weight.detach().clone()
    error = failure(sch)
    assert [line.partition("(")[0] for line in blamed(error)] == ["#1 replace"]  # because the rest agrees
    assert torch.equal(wrong.weight, before)
    assert wrong.weight.dtype == torch.float32
    assert sch["layer.0.fc1"].module is wrong


def test_missing_inputs_bad_inputs_and_bad_arguments_say_what_to_write(message: Messages) -> None:
    sch = net()
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify(sch)
    message(caught, "one batch", "example_inputs")
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify(sch, torch.randn(5, 6, device="meta"))
    message(caught, "'0' (5, 6)", "meta device")
    with pytest.raises(slapo.ArgumentError, match="reference model itself fails"):
        slapo.verify(sch, torch.randn(5, 7))
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify(sch, torch.randn(5, 6), optimizer_steps=-1)
    message(caught, "steps", "got -1")
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify(sch, torch.randn(5, 6), rtol=-1.0)
    message(caught, "rtol", "got -1.0")
    sch.seal()
    with pytest.raises(slapo.SealedError):
        slapo.verify(sch, torch.randn(5, 6))
