"""Backward passes in two parts, and values that came from another stage."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

from slapo_torch.running_stage import Received
from slapo_torch.split_backward import SplitCheck, backward_of_inputs
from tests.messages import Messages
from tests.support.hand_stages import Double


class Hard(nn.Module):
    """Parameters that meet what is received once, twice, never, in a custom function, and through others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.once, self.twice = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.never, self.custom, self.through = (nn.Parameter(torch.randn(4).double()) for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(4).double(), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4).double())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.twice(torch.tanh(self.twice(self.once(x))))
        h = Double.apply(h, self.custom) * self.through.exp().cumsum(0) * self.frozen  # type: ignore[no-untyped-call]
        return h + y, self.never.sin() * torch.ones(3, 4).double(), y


def whole(module: Hard, given: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor | None]:
    leaves = [one.clone().requires_grad_() for one in given]
    torch.autograd.backward(module(*leaves), gradients)
    return [*(leaf.grad for leaf in leaves), *(parameter.grad for parameter in module.parameters())]


def test_a_backward_in_two_parts_gives_every_gradient_and_runs_custom_functions_once() -> None:
    given = [torch.randn(3, 4).double() for _ in range(2)]
    gradients = [torch.randn(3, 4).double() for _ in range(3)]
    module, other = Hard(), Hard()
    expected = whole(other, given, gradients)
    received = [Received(one.clone(), carries_gradient=True) for one in given]
    roots = module(*(one.take() for one in received))
    fired: list[str] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    before = Double.passes
    later = backward_of_inputs(roots, gradients, [one.start for one in received if one.start is not None])
    first_part = set(fired)
    later()
    assert Double.passes == before + 1
    assert first_part == {"twice.weight", "twice.bias", "never", "custom"}  # what cannot wait
    assert sorted(fired) == sorted({*first_part, "once.weight", "once.bias", "through"})  # each once
    found = [*(one.give_back() for one in received), *(parameter.grad for parameter in module.parameters())]
    for one, wanted in zip(found, expected, strict=True):
        assert (one is None) == (wanted is None)
        if one is not None and wanted is not None:
            torch.testing.assert_close(one, wanted, rtol=0, atol=1e-14)


def test_a_received_value_may_be_written_to_and_passed_on() -> None:
    """Its gradient is that of its own uses, of the write, and of what comes back from behind."""
    value = torch.randn(3).double()
    leaf = value.clone().requires_grad_()
    own = leaf * 1.0
    use = (own * 3).sum()
    own.mul_(2)
    torch.autograd.backward([use, own], [torch.ones(()).double(), torch.full((3,), 5.0).double()])
    received = Received(value.clone(), carries_gradient=True)
    own = received.take()
    use = (own * 3).sum()
    own.mul_(2)
    torch.autograd.backward([use, own], [torch.ones(()).double(), torch.full((3,), 5.0).double()])
    assert torch.equal(received.give_back(), leaf.grad)
    assert torch.equal(received.give_back(), torch.zeros(3).double())  # nothing since


def test_received_values_are_freed_after_their_last_use() -> None:
    """Activations must not wait for the garbage collector."""
    gc.disable()
    try:
        received = Received(torch.ones(3), carries_gradient=True)
        own = received.take()
        seen = weakref.ref(own)
        loss = (own * own).sum()
        del own
        loss.backward()
        del loss
        assert seen() is None
        assert torch.equal(received.give_back(), torch.full((3,), 2.0))
    finally:
        gc.enable()


def test_tensor_hooks_and_checkpoints_prevent_a_split_backward(message: Messages) -> None:
    class Hooked(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.inner, self.kind = nn.Linear(2, 2), kind

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind == "checkpoint":
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
            x = self.inner(x)
            if self.kind == "hook":
                x.register_hook(lambda gradient: gradient * 2)
            return x

    for kind, word in (
        ("plain", ""),
        ("hook", "a tensor's hook"),
        ("checkpoint", "recomputed"),
        ("compiled", "compiled"),
    ):
        module = Hooked(kind)
        if kind == "compiled":
            module.inner.compile(backend="eager")
        watch = SplitCheck(module, "stage 1")
        with pytest.warns(UserWarning, match="stage 1") if kind != "plain" else contextlib.nullcontext() as caught:  # type: ignore[attr-defined]
            with watch.watch_forward():
                module(torch.ones(2, requires_grad=True))
        assert bool(watch.reason) == (caught is not None)
        if caught is not None:
            message(caught[0].message, "stage 1", f"because {watch.reason}: ", word)
