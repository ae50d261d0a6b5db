"""Classes that override ``__call__``: what they do around the forward is done once, wherever the module is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Scaling:
    """A mixin."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return {name: 3 * out[name] for name in out} if isinstance(out, dict) else 2 * out


class Block(Scaling, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Casting(nn.Linear):
    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x.double() * 0.5)


class Twice(Block):
    """An override above another one, with an argument of its own; it runs the forward twice."""

    def __call__(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        return super().__call__(super().__call__(x)) * scale


class Bypassing(Block):
    def __call__(self, x: torch.Tensor) -> Any:
        return self.forward(x) + 1


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = Block(), Casting(4, 4), Twice(), Bypassing()

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x)), scale=0.3))


class Model(Scaling, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Middle(), Middle()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.last(self.first(x)).square().mean()}


STEPS: dict[str, Callable[[slapo.Schedule], Any]] = {
    "root": lambda sch: sch.trace(),
    "root, flat": lambda sch: sch.trace(flatten=True),
    "child": lambda sch: sch["first"].trace(),
    "child, flat": lambda sch: sch["first"].trace(flatten=True, leaves="d"),
    "leaf": lambda sch: (sch["first.b"].trace(), sch["first.c"].trace(), sch["first"].trace()),
    "compiled leaf": lambda sch: (sch["first.a"].module.compile(backend="eager"), sch["first"].trace()),
    "compiled child": lambda sch: (sch["first.a"].module.compile(backend="eager"), sch["first"].trace(flatten=True)),
    "cut": lambda sch: sch["first"].pipeline_split(),
    "cut below": lambda sch: (sch["first.b"].pipeline_split(), sch["last.c"].pipeline_split()),
    "cut behind a graph": lambda sch: (sch["first.b"].trace(), sch["first.c"].trace(), sch["first"].pipeline_split()),
    "checkpoint": lambda sch: (sch["first"].checkpoint(), sch["last.c"].checkpoint(), sch["last"].trace(flatten=True)),
    "replace": lambda sch: sch["first.c"].replace(copy.deepcopy(sch["first.c"].module)),
    "rewrite": lambda sch: (sch["last"].trace(flatten=True), sch["last"].replace(torch.tanh, match="tanh")),
}


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Model().double()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_an_overridden_call_is_made_once(steps: Callable[[slapo.Schedule], Any]) -> None:
    model, plain = pair()
    sch = slapo.create_schedule(model, example_inputs=X)
    steps(sch)
    torch.testing.assert_close(model(X), plain(X))
    assert slapo.verify(sch).steps_verified == len(sch.records)


def test_classes_are_as_before_a_recording() -> None:
    before = [vars(cls).get("__call__") for cls in (Scaling, Twice, Middle, nn.Module)]
    slapo.create_schedule(pair()[0], example_inputs=X).trace(flatten=True)
    assert [vars(cls).get("__call__") for cls in (Scaling, Twice, Middle, nn.Module)] == before


def test_another_global_name_in_an_overridden_call_is_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(Block):
        def __call__(self, x: torch.Tensor) -> Any:
            return super().__call__(x) + SHIFT

    model = nn.Sequential(Shifted()).double()
    sch = slapo.create_schedule(model, example_inputs=X)
    sch.trace(flatten=True)
    before = model(X)
    monkeypatch.setitem(globals(), "SHIFT", 3.0)
    torch.testing.assert_close(model(X), before + 2.0)


SHIFT = 1.0


def test_layers_with_an_overridden_call_are_not_merged() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Casting(4, 4), Casting(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    sch = slapo.create_schedule(Three().double(), example_inputs=X)
    sch.trace()
    with pytest.raises(slapo.PreconditionError, match="Casting"):
        sch.merge(("a", "b"))
