"""What does not go together with a cut is refused, at once where modules show it, and else when stages are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import PreconditionError, Schedule, TraceError, create_schedule
from slapo_runtime.stages import staged
from tests.messages import Messages

from .staging import bound, compare, cut as stages


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x) + 1)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 2)

    def forward(self, x: Any, times: int = 1) -> Any:
        for _ in range(times):
            x = self.inner(x)
        return self.head(x)


X = torch.rand(2, 4)


def schedule(model: nn.Module | None = None) -> Schedule:
    return create_schedule(model or Model(), example_inputs=X)


def own_forward(model: Any) -> None:
    model.inner.forward = type(model.inner).forward.__get__(model.inner)


def rewrite(sch: Any) -> None:
    sch["inner"].trace()
    sch["inner"].replace(torch.tanh, match=sch["inner"].find("relu"))


BEFORE: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = [
    (lambda sch: sch["inner"].checkpoint(), ("'inner' lies above", "wrapped (#1 checkpoint() at")),
    (lambda sch: sch.model.inner.register_forward_hook(lambda *_: None), ("'inner' lies above", "hooks")),
    (lambda sch: sch.model.register_forward_pre_hook(lambda *_: None), ("the root lies above", "hooks")),
    (lambda sch: own_forward(sch.model), ("'inner' lies above", "on the instance")),
    (lambda sch: sch.model.inner.compile(backend="eager"), ("'inner' lies above", "compiled")),
    (lambda sch: sch["inner.layers.0"].pipeline_split(), ("already",)),
    (rewrite, ("'inner' lies above", "rewritten (#2 replace(")),
]


@pytest.mark.parametrize(("before", "words"), BEFORE)
def test_a_cut_is_refused_at_once(before: Callable[[Any], Any], words: tuple[str, ...], message: Messages) -> None:
    sch = schedule()
    before(sch)
    with pytest.raises(PreconditionError) as caught:
        sch["inner.layers.0"].pipeline_split()
    text = message(caught, *words)
    assert ("sch['inner.layers.*']" in text) is ("lies above" in text)


def test_cuts_after_the_root_and_after_a_list_are_refused(message: Messages) -> None:
    with pytest.raises(PreconditionError) as caught:
        schedule()[""].pipeline_split()
    message(caught, "after the root")
    with pytest.raises(PreconditionError) as caught:
        schedule()["inner.layers"].pipeline_split()
    message(caught, "never called", "sch['inner.layers'].pipeline_split(stages=2)")


AFTER: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = [
    (lambda sch: sch["inner"].checkpoint(), ("'inner' lies above", "#1 pipeline_split() at 'inner.layers.0'")),
    (lambda sch: sch[""].checkpoint(), ("recomputes",)),
    (lambda sch: sch["inner"].replace(Inner()), ("replaces it", "apply this step first")),
    (rewrite, ("rewrites", "sch['inner.layers.*']")),
]


@pytest.mark.parametrize(("after", "words"), AFTER)
def test_a_step_above_a_cut_is_refused_at_once(
    after: Callable[[Any], Any], words: tuple[str, ...], message: Messages
) -> None:
    sch = schedule()
    sch["inner.layers.0"].pipeline_split()
    with pytest.raises(PreconditionError) as caught:
        after(sch)
    message(caught, *words)
    schedule_without = schedule()
    after(schedule_without)  # the control: it is the cut that refuses it


def test_steps_that_compose_with_a_cut_are_applied() -> None:
    torch.manual_seed(0)
    model = Model().double()
    x = X.double()
    sch = create_schedule(model, example_inputs=x)
    sch["inner"].trace()  # merely traced: looked through
    sch["inner.layers.0"].pipeline_split()
    sch["inner.layers.*"].checkpoint()  # the cut module itself too
    made = staged(sch, bound(model, (x,), {}))
    assert made is not None
    torch.testing.assert_close(made.run({"x": x}), model(x))
    assert "forward" in model.inner.__dict__, "it is traced as before"


def test_hooks_added_later_are_refused_when_stages_are_made(message: Messages) -> None:
    model = Model()
    sch = schedule(model)
    sch["inner.layers.0"].pipeline_split()
    model.inner.register_forward_hook(lambda *_: None)
    with pytest.raises(TraceError) as caught:
        staged(sch, {"x": X})
    message(caught, "'inner.layers.0' (#1 ", "'inner' lies above", "hooks")


@pytest.mark.parametrize(
    ("cuts", "call", "word"),
    [
        (["head"], {}, "nothing comes after"),
        (["inner.unused"], {}, "not call it"),
        (["inner.layers.1"], {"times": 2}, "more than once"),
        (["inner"], {"times": 2}, "more than once"),
    ],
)
def test_cuts_that_only_a_run_shows_are_refused_when_stages_are_made(
    cuts: list[str], call: Any, word: str, message: Messages
) -> None:
    with pytest.raises(TraceError) as caught:
        stages(Model(), cuts, X, **call)
    message(caught, f"'{cuts[0]}' (#1 pipeline_split() at '{cuts[0]}')", word)


class Caching(nn.Module):
    """Layers change an object that the model made."""

    class KeyCache:
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Any, cache: Any) -> Any:
            y = self.fc(x)
            if cache is None:
                return y
            cache.kept.append(y)
            return sum(cache.kept)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Any, use_cache: bool = True) -> Any:
        cache = self.KeyCache()
        for layer in self.layers:
            x = layer(x, cache if use_cache else None)
        return x


def test_an_object_that_modules_change_cannot_cross() -> None:
    with pytest.raises(TraceError) as caught:
        stages(Caching(), ["layers.0"], X)
    assert "KeyCache" in str(caught.value)
    assert "use_cache=False" in str(caught.value)
    compare(Caching().double(), ["layers.0"], X.double(), use_cache=False)
