"""Functions that hold modules of the model, as tools set them around a forward, work on the copy's own modules."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.schedule_copies import copy_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Block(), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(x))


class Wrong(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(input)


class Timer:
    def __init__(self, called: Callable[..., Any]) -> None:
        self.called = called

    def __call__(self, *args: Any) -> Any:
        return self.called(*args)


class Slotted:
    __slots__ = ("called",)

    def __init__(self, called: Callable[..., Any]) -> None:
        self.called = called


def _closure(block: Any) -> None:
    before = block.forward
    block.forward = functools.wraps(before)(lambda *args: before(*args))


def _twice(block: Any) -> None:
    _closure(block)
    _closure(block)


def _recursive(block: Any) -> None:
    before = block.forward

    def run(x: torch.Tensor, again: bool = True) -> Any:
        return run(x, False) if again else before(x)

    block.forward = run


def _bound(block: Any) -> None:
    before = block.forward
    block.forward = types.MethodType(lambda self, x: before(x), block)


def _partial(block: Any) -> None:
    before = block.forward
    block.forward = functools.partial(lambda called, x: before(called(x) * 0 + x), before)


def _default(block: Any) -> None:
    def run(x: torch.Tensor, own: Any = block, *, other: Any = [block]) -> Any:  # noqa: B006
        return type(own).forward(other[0], x)

    block.forward = run


def _objects(block: Any) -> None:
    timer, slotted, table = Timer(block.forward), Slotted(block.forward), {"it": (block.forward,)}
    block.forward = lambda x: (timer(x) + slotted.called(x) + table["it"][0](x)) / 3


def _weak(block: Any) -> None:
    held = weakref.ref(block)
    block.forward = lambda x: Block.forward(held(), x)  # type: ignore[arg-type]


def _hooked(block: Any) -> None:
    block.register_forward_hook(lambda module, args, output: Block.forward(block, *args))


def _outer_module(block: Any) -> None:
    outer: Any = nn.Sequential()
    inner = Block.__new__(Block)
    inner.__dict__.update(block.__dict__)
    outer.append(inner)
    block.forward = lambda x: outer(x)


_kept: list[Any] = []


def _by_global(x: torch.Tensor) -> Any:
    return Block.forward(_kept[-1], x)


def _global(block: Any) -> None:
    _kept.append(block)
    block.forward = lambda x: _by_global(x)


WRAPPED = (
    _closure, _twice, _recursive, _bound, _partial, _default, _objects, _weak, _hooked, _outer_module, _global,
)  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPED, ids=lambda wrap: wrap.__name__[1:])
def test_a_wrong_step_below_a_wrapped_forward_is_found_and_blamed(wrap: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(2, 3).double()
    wrap(model.block)
    expected = model(x)
    sch = slapo.create_schedule(model)
    sch["block.up"].replace(lambda old: Wrong(3, 4))
    sch["block.down"].checkpoint()
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, x, optimizer_steps=0)
    assert len(caught.value.steps) == 1
    assert "'block.up'" in caught.value.steps[0]
    sch.undo(to=0)
    sch["block.up"].checkpoint()
    assert slapo.verify(sch, x, optimizer_steps=0)
    assert torch.equal(model(x), expected)


def test_functions_are_shared_as_before_and_left_alone_where_they_hold_no_module() -> None:
    model, log = Net(), list[str]()
    before = model.block.forward

    def run(x: torch.Tensor) -> Any:
        log.append("called")
        return before(x)

    model.block.forward = model.out.other = run  # type: ignore[method-assign, assignment]
    model.out.plain = plain = lambda: log  # type: ignore[assignment, misc]
    made: Any = copy_model(model)
    assert made.block.forward is made.out.other is not run
    assert made.out.plain is plain
    made.block.forward(torch.randn(1, 3))
    assert log == ["called"]
    inside = dict(zip(made.block.forward.__code__.co_freevars, made.block.forward.__closure__, strict=True))
    assert inside["before"].cell_contents.__self__ is made.block
    assert before.__self__ is model.block


def test_a_constructor_may_hold_a_module() -> None:
    model: Any = Net()
    up = model.block.up

    class Same(nn.Linear):
        def __init__(self) -> None:
            super().__init__(up.in_features, up.out_features)

    sch = slapo.create_schedule(model)
    sch["block.up"].replace(lambda old: Same())
    assert slapo.verify(sch, torch.randn(2, 3), optimizer_steps=0)


@pytest.mark.parametrize("place", ["class", "cache"])
def test_uncopyable_modules_are_refused_by_name(place: str) -> None:
    model: Any = Net()
    block, before = model.block, model.block.forward
    if place == "class":
        block.__class__ = type("Wrapped", (Block,), {"forward": lambda self, x: before(x)})
    else:
        cached = functools.lru_cache(functools.wraps(before)(lambda: block))
        block.forward = lambda x: Block.forward(cached(), x)
    sch = slapo.create_schedule(model)
    with pytest.raises(slapo.SlapoError, match="'forward' of 'block' holds a module of the model") as caught:
        slapo.verify(sch, torch.randn(2, 3))
    assert caught.value.hint is not None


def test_a_hook_that_holds_the_schedule_is_shared_with_copies() -> None:
    model = Net().double()
    sch = slapo.create_schedule(model)
    seen: list[int] = []
    hook = model.block.register_forward_hook(lambda module, args, output: seen.append(len(sch.records)))
    sch["block.down"].checkpoint()
    made: Any = copy_model(model)
    (function,) = model.block._forward_hooks.values()
    assert list(made.block._forward_hooks.values()) == [function]
    assert slapo.verify(sch, torch.randn(2, 3).double(), optimizer_steps=0)
    hook.remove()
