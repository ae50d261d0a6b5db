"""What recorded code makes of sizes and arguments holds at every call, or the call is an error."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_testing.models import Enclosing

from .hostile_models import model

X, Y = torch.randn(2, 6, 8), torch.randn(3, 4, 8)


class Mode(enum.Enum):
    DOUBLE = 1
    SAME = 2


def unbinds(self: Any, x: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in x.unbind(0)])


def iterates(self: Any, x: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in x])


def splits(self: Any, x: Tensor) -> Tensor:
    return torch.cat([part * 2 for part in x.split(2, 1)], 1)


def chunks(self: Any, x: Tensor) -> Tensor:
    return torch.cat([part * 2 for part in torch.chunk(x, 3, dim=1)], 1)


def asks_whether_int(self: Any, x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return x * 2 if isinstance(half, int) and isinstance(x.shape[1] / 2, float) else x


def takes_int(self: Any, x: Tensor, keep: Any) -> Tensor:
    return x[:, slice(-keep, None) if isinstance(keep, int) else keep]


def takes_float(self: Any, x: Tensor, scale: Any) -> Tensor:
    return x * scale if isinstance(scale, float) else x


def takes_member(self: Any, x: Tensor, mode: Mode) -> Tensor:
    return x * 2 if mode is Mode.DOUBLE else x


def takes_two(self: Any, one: Tensor, other: Tensor) -> Tensor:
    return one * 2 + other * 3


def asks_whether_same(self: Any, one: Tensor, other: Tensor) -> Tensor:
    return one * 2 if one is other else one * 5


def looks_up(self: Any, x: Tensor) -> Tensor:
    return x * {6: 2.0, 4: 3.0}[x.shape[1]]


def prints(self: Any, x: Tensor) -> Tensor:
    return x * len(f"{x.shape[1] * 1_000_000:d}") * len(str(x.shape[1] * 30))


def divides(self: Any, x: Tensor) -> Tensor:
    whole, rest = divmod(x.shape[1], 4)
    return x * whole + rest


def computes(self: Any, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    return x[:, : (length + 1) // 2] * torch.tensor(length) + torch.full((batch, 1, 1), 0.5)


def uses_default_dtype(self: Any, x: Tensor) -> Tensor:
    return x.to(torch.get_default_dtype())


def picks(self: Any, x: Tensor) -> Tensor:
    chosen = x[x.sum(-1) > 0]  # how many is known only from the values
    return chosen * 2 + len(x.shape)


def groups(self: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, 4)
    ends = torch.tensor([4, rows.shape[0]], dtype=torch.int32)
    return F.grouped_mm(rows, self.fc.weight.expand(2, 4, 4).contiguous(), offs=ends)


def outcome(module: nn.Module, args: tuple[Any, ...]) -> list[Tensor | None]:
    module.zero_grad()
    args = copy.deepcopy(args)
    for part in args:
        if isinstance(part, Tensor):
            part.requires_grad_()
    out = module(*args)
    out.square().sum().backward()
    return [out.detach(), *(part.grad for part in args if isinstance(part, Tensor))]


CASES: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "rows": (unbinds, (X,), (Y,)),
    "iteration": (iterates, (X,), (Y,)),
    "pieces of a size": (splits, (X,), (Y,)),
    "a number of pieces": (chunks, (X,), (Y,)),
    "a key": (looks_up, (X,), (Y,)),
    "text": (prints, (X,), (torch.randn(2, 1234, 8),)),
    "two numbers": (divides, (X,), (Y,)),
    "int": (asks_whether_int, (X,), (Y,)),
    "an int argument": (takes_int, (X, 3), (Y, 2)),
    "a float argument": (takes_float, (X, 0.5), (Y, 0.75)),
    "a member of an enumeration": (takes_member, (X, Mode.DOUBLE), (X, Mode.SAME)),
    "one tensor twice": (takes_two, (X, X), (X, Y[:2, :1])),
    "one tensor twice, asked for": (asks_whether_same, (X, X), (X, X.clone())),
    "arithmetic": (computes, (X,), (Y,)),
    "shapes that depend on values": (picks, (X,), (Y,)),
    "a grouped product in float32": (groups, (X,), (Y,)),
}
REFUSED = ("rows", "iteration", "pieces of a size", "a number of pieces", "a key", "text", "two numbers")


@pytest.mark.parametrize("name", CASES)
def test_another_call_computes_the_same_or_is_an_error(name: str) -> None:
    forward, first, second = CASES[name]
    torch.manual_seed(0)
    plain = Enclosing(model(forward)())
    twin = copy.deepcopy(plain)
    sch = slapo.create_schedule(twin, example_inputs=first)
    sch["below"].trace()
    assert sch["below"].graph is not None
    for args in (first, tuple(part * 0.5 if isinstance(part, Tensor) else part for part in first), second):
        kept = [args[0], *(args[0] if part is first[0] else part for part in args[1:])]
        expected = outcome(plain, tuple(kept))
        if args is second and name in REFUSED:
            with pytest.raises(slapo.GuardError, match="was recorded with"):
                twin(*kept)
            return
        for mine, other in zip(outcome(twin, tuple(kept)), expected, strict=True):
            assert mine is other is None or torch.equal(mine, other)


def test_the_default_type_is_read_at_every_call() -> None:
    twin = Enclosing(model(uses_default_dtype)())
    slapo.create_schedule(twin, example_inputs=(X,))["below"].trace()
    assert twin(X).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert twin(X).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class Child(nn.Module):
    """A module that stays a call, and gives something else when its attribute says so."""

    def __init__(self, give: Callable[[Tensor, bool], Any]) -> None:
        super().__init__()
        self.give, self.is_other = give, False

    def forward(self, x: Tensor) -> Any:
        return self.give(x, self.is_other)


class Asking(nn.Module):
    def __init__(self, give: Callable[[Tensor, bool], Any], use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.child, self.use = Child(give), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.child(x))


def one_or_two(x: Tensor, is_other: bool) -> Any:
    return x if is_other else (x, x * 2)


def flat_or_not(x: Tensor, is_other: bool) -> Any:
    return x.flatten() if is_other else x


def first_part(out: Any) -> Tensor:
    return out[0] * 2


def by_axes(out: Any) -> Tensor:
    return out * 2 if out.dim() == 3 else out


@pytest.mark.parametrize(
    ("give", "use", "message"),
    [
        (one_or_two, first_part, r"structure_of\(child\) == \('tuple', 2\), and this call has \('Tensor'"),
        (flat_or_not, by_axes, r"dim\(child\) == 3, and this call has 1"),
    ],
)
def test_a_child_that_gives_something_else_is_noticed(give: Any, use: Any, message: str) -> None:
    twin = Enclosing(Asking(give, use))
    slapo.create_schedule(twin, example_inputs=(X,))["below"].trace()
    assert torch.equal(twin(X), X * 2)
    twin.get_submodule("below.child").is_other = True  # type: ignore[assignment]
    with pytest.raises(slapo.GuardError, match=message):
        twin(X)


def test_without_the_guard_on_pieces_a_row_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from slapo_graph.tracing import recorder

    monkeypatch.setattr(recorder, "guard_elements", lambda *_: None)
    twin = Enclosing(model(unbinds)())
    slapo.create_schedule(twin, example_inputs=(X,))["below"].trace()
    assert twin(Y).shape[0] == 2 != len(Y)
