"""Traps between features: small models in which an obvious split of a layer's features is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["FEATURE_TRAPS", "HEADS", "INNER", "WIDTH", "ByNorm", "Concatenated", "Net", "tokens"]

WIDTH, HEADS, INNER = 24, 4, 48


class Mlp(nn.Module):
    """Two layers; what comes between them is the trap."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.between, self.inner, self.gate = between, INNER, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(INNER))
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self, self.up(x).tanh(), x))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], *, enter: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.enter = nn.Linear(WIDTH, WIDTH) if enter else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x


class ByNorm(torch.autograd.Function):
    """Identity, whose gradient is divided by its norm over the features."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-3)


class Rounded(torch.autograd.Function):
    """Round by the largest feature, as in quantization-aware training; the gradient passes."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        step = x.abs().amax(dim=-1, keepdim=True) / 7
        return (x / step).round() * step

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _hooked(module: Any, h: Tensor, x: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-3))
    return h


def _counted(module: Any, h: Tensor, x: Tensor) -> Tensor:
    module.seen = h.detach().square().mean()
    return h * (1 + module.seen)


def _branch(module: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if h[..., 0].sum() > 0 else h * 3


def _once(module: Any, h: Tensor, x: Tensor) -> Tensor:
    return checkpoint(lambda one: F.gelu(one) * module.scale, h, use_reentrant=False)


def _averaged(module: Any, h: Tensor, x: Tensor) -> Tensor:
    if module.training:
        with torch.no_grad():
            module.average.lerp_(h.mean((0, 1)), 0.5)
    return h - module.average


def _cleared(module: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[..., :5] = 0
    return h.mul_(2)


def _taken(module: Any, h: Tensor, x: Tensor) -> Tensor:
    return h[..., torch.arange(h.shape[-1] - 1, -1, -1)]


BETWEEN: dict[str, Callable[..., Tensor]] = {
    "evaluation centers the features": lambda m, h, x: h if m.training else h - h.mean(-1, keepdim=True),
    "training centers the features": lambda m, h, x: h - h.mean(-1, keepdim=True) if m.training else h,
    "one row centers the features": lambda m, h, x: h - h.mean(-1, keepdim=True) if len(h) == 1 else h,
    "without gradients, centers": lambda m, h, x: h if torch.is_grad_enabled() else h - h.mean(-1, keepdim=True),
    "scaled by its own width": lambda m, h, x: h / math.sqrt(h.shape[-1]),
    "scaled by an attribute": lambda m, h, x: h / m.inner,
    "scaled by the number of elements": lambda m, h, x: h * (len(x) * 100 / h.numel()),
    "normalized": lambda m, h, x: F.normalize(h, dim=-1),
    "largest features only": lambda m, h, x: h * (h >= h.topk(5, dim=-1).values[..., -1:]),
    "cumulative over features": lambda m, h, x: h.cumsum(-1),
    "features shifted by one": lambda m, h, x: h.roll(1, -1),
    "features mirrored": lambda m, h, x: h + h.flip(-1),
    "every second feature": lambda m, h, x: torch.cat([h[..., ::2], h[..., 1::2]], -1),
    "half gates half": lambda m, h, x: torch.cat([h[..., :24] * h[..., 24:], h[..., 24:]], -1),
    "one number scales and shifts": lambda m, h, x: h * m.scale + m.shift,
    "a gate that sees the input": lambda m, h, x: h * m.gate(x).mean(-1, keepdim=True),
    "the mean of the features": lambda m, h, x: h + h.mean(),
    "the spread is kept": _counted,
    "a branch by the values": _branch,
    "gradient divided by its norm": lambda m, h, x: ByNorm.apply(h),
    "rounded by the largest": lambda m, h, x: Rounded.apply(h),
    "a hook divides the gradient by its norm": _hooked,
    "recomputed": _once,
    "a number from the values": lambda m, h, x: h * float(h.detach().abs().max()),
    "a buffer of positions": lambda m, h, x: h * torch.arange(h.shape[-1]).cos(),
    "a buffer of the reference width": lambda m, h, x: h * torch.linspace(0, 1, h.shape[-1]),
    "the weight of the other layer": lambda m, h, x: h + F.linear(x, m.down.weight.T),
    "five features cleared": _cleared,
    "features taken by index": _taken,
    "frequencies": lambda m, h, x: torch.fft.rfft(h, dim=-1).abs().repeat_interleave(2, -1)[..., :INNER],
    "group norm": lambda m, h, x: F.group_norm(h.transpose(1, 2), 4).transpose(1, 2),
    "norm of the rows": lambda m, h, x: F.layer_norm(h.transpose(1, 2), h.shape[1:2]).transpose(1, 2),
    "running average": _averaged,
    "detached": lambda m, h, x: h + h.detach() * x.mean(),
    "gradient reversed": lambda m, h, x: h.detach() * 2 - h,
    "two products": lambda m, h, x: h * F.linear(x, m.up.weight, m.up.bias),
    "features as a list": lambda m, h, x: torch.stack([one * 2 for one in h.unbind(-1)], -1),
    "penalty on the weight": lambda m, h, x: h * m.up.weight.square().mean(),
    "standard deviation of the weight": lambda m, h, x: h / m.up.weight.std(dim=0).sum(),
}  # fmt: skip


class Concatenated(nn.Module):
    """A product of features that are beside each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, WIDTH) * 0.1)

    def forward(self, *features: Tensor) -> Tensor:
        return torch.cat(features, -1) @ self.weight


class Bare(nn.Module):
    """Weights without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (nn.Parameter(torch.randn(size) * 0.1) for size in ((WIDTH, INNER), (INNER, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.into).relu() @ self.out


class Product(nn.Module):
    """The same, alone; what is done with the product is the trap."""

    def __init__(self, behind: Callable[..., Tensor]) -> None:
        super().__init__()
        self.into, self.out, self.probe = (nn.Parameter(torch.randn(size) * 0.1) for size in
                                           ((INNER, WIDTH), (WIDTH, INNER), (1, INNER)))  # fmt: skip
        self.behind, self.scale, self.bias = behind, nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.behind(self, F.linear(x, self.into).tanh(), x)


class Residual(nn.Module):
    """A block whose inner module returns one tensor or more."""

    def __init__(self, inner: nn.Module, form: str = "") -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "tuple":
            found = self.inner((x, x.cos()))
        elif self.form == "turns":
            found = (*self.inner(x, x.cos(), False), *self.inner(x.sin(), x, True))
        else:
            found = self.inner(x)
        for each in found if isinstance(found, tuple) else (found,):
            x = x + each
        return x


class Pair(nn.Module):
    """Two inputs, one of which it only passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.product = Product(lambda m, h, x: F.linear(h, m.out))
        self.into, self.out = self.product.into, self.product.out

    def forward(self, one: Any, other: Tensor | None = None, swap: bool = False) -> tuple[Tensor, Tensor]:
        one, other = one if other is None else (other, one) if swap else (one, other)
        return F.linear(F.linear(one, self.into).tanh(), self.out), other.sin()


PRODUCTS: dict[str, Callable[..., Any]] = {
    "a product squared": lambda m, h, x: (y := F.linear(h, m.out)) * y,
    "divided by a product": lambda m, h, x: x / F.linear(h, m.out),
    "a number is added to a product": lambda m, h, x: F.linear(h, m.out) + 1.5,
    "a product by itself": lambda m, h, x: (y := F.linear(h, m.out)) @ y.transpose(1, 2) @ x,
    "the positive part of a product": lambda m, h, x: torch.maximum(F.linear(h, m.out), torch.zeros(x.shape).to(x)),
    "a product is added at an index": lambda m, h, x: x.index_add(1, torch.tensor([1]), F.linear(h, m.out)[:, :1]),
    "gated by a projection of itself": lambda m, h, x: F.linear(h * F.linear(h, m.probe), m.out),
    "the bias of another module": lambda m, h, x: F.linear(h, m.out, m.other.bias),
    "a bias without a layer": lambda m, h, x: F.linear(h, m.out, m.bias),
    "one weight scales shards and the input": lambda m, h, x: (
        F.linear(h * m.scale.mean(), m.out), x * m.scale),
}  # fmt: skip


class Again(nn.Module):
    """A reduced sum goes into features that are split as the first ones are, with no module between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.back = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(INNER, WIDTH)
        self.weight = nn.Parameter(torch.randn(INNER, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        return x + self.back(h * F.linear(self.down(h), self.weight))


class Outer(nn.Module):
    """Each feature times each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HEADS), nn.Linear(HEADS * HEADS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return x + self.down((h.unsqueeze(-1) * h.unsqueeze(-2)).flatten(-2))


class Packed(nn.Module):
    """A packed matrix, of which a layer on every rank reads a part."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.down, self.rest = nn.Linear(WIDTH, INNER + 6), nn.Linear(INNER, WIDTH), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, rest = self.fused(x).split((INNER, 6), dim=-1)
        return x + self.down(h.tanh()) + self.rest(rest)


class Returned(Product):
    """A model that returns its product, and reads it."""

    def __init__(self) -> None:
        super().__init__(lambda m, h, x: ((y := F.linear(h, m.out)), y * 2))


class Beside(nn.Module):
    """A product that sums over a split axis and a full one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), Concatenated(INNER + WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh(), x.cos())


class Adapted(nn.Module):
    """A frozen pair with a low-rank adapter beside each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, INNER, bias=False)
        self.c, self.d = nn.Linear(INNER, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.up(x) + self.b(self.a(x))).tanh()
        return x + self.down(h) + self.d(self.c(h))


class Crossed(nn.Module):
    """Two inputs, by position or by name, in a tuple or alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, one: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        other = one if other is None else other
        return one.mean(1), self.o(self.q(one) * self.k(other))


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross = Crossed()

    def forward(self, x: Tensor) -> Tensor:
        y = x.cos()
        if len(x) == 3:
            mean, z = self.cross(other=y, one=x)
        else:
            mean, z = self.cross(x, y)
        return x + z + mean[:, None] + self.cross(y)[1]


class OddWords(nn.Embedding):
    """An embedding that does something to the rows that it finds; of another rank's row it has zeros."""

    def __init__(self, behind: Callable[..., Any]) -> None:
        super().__init__(31, WIDTH)
        self.norm, self.scale, self.behind = nn.RMSNorm(WIDTH), nn.Parameter(torch.ones(WIDTH)), behind

    def forward(self, ids: Tensor) -> Any:
        return self.behind(self, super().forward(ids))


class Words(nn.Module):
    def __init__(self, behind: Callable[..., Any]) -> None:
        super().__init__()
        self.words, self.head = OddWords(behind), nn.Linear(WIDTH, 31)
        self.layers = nn.ModuleList(Mlp(lambda m, h, x: h) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids)
        x = found[0] + found[1] if isinstance(found, tuple) else found
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


WORDS: dict[str, Callable[..., Any]] = {
    "an embedding with a norm": lambda m, rows: m.norm(rows),
    "an embedding with a function": lambda m, rows: rows.cos(),
    "an embedding with a weight": lambda m, rows: rows * m.scale,
    "an embedding with a second result": lambda m, rows: (rows, torch.ones(WIDTH).to(rows)),
    "an embedding that reads all rows": lambda m, rows: rows * m.weight.square().mean(),
}


class Convolved(nn.Module):
    """A convolution of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(WIDTH, INNER, 1, groups=2), nn.Conv1d(INNER, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x.transpose(1, 2)).tanh()).transpose(1, 2)


def tokens() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(7))}  # as many words as heads


FEATURE_TRAPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **{name: (lambda between=between: Net(lambda: Mlp(between)), tokens) for name, between in BETWEEN.items()},
    "weights without modules": (lambda: Net(Bare), tokens),
    "shards beside the input": (lambda: Net(Beside), tokens),
    **{
        name: (lambda behind=behind: Words(behind), lambda: {"ids": torch.arange(10).view(2, 5)})
        for name, behind in WORDS.items()
    },
    "a convolution of two groups": (lambda: Net(Convolved), tokens),
    **{
        name: (lambda behind=behind: Net(lambda: Residual(Product(behind))), tokens)
        for name, behind in PRODUCTS.items()
    },
    "a sum gates its own features": (lambda: Net(Again), tokens),
    "each feature times each": (lambda: Net(Outer), tokens),
    "a part of a packed matrix is read in full": (lambda: Net(Packed), tokens),
    "a product is returned and read": (Returned, tokens),
    "two inputs in a tuple": (lambda: Net(lambda: Residual(Pair(), "tuple")), tokens),
    "two inputs in turn": (lambda: Net(lambda: Residual(Pair(), "turns")), tokens),
    "adapters": (lambda: Net(Adapted), tokens),
    "called in three ways": (lambda: Net(Called), tokens),
    "an input with a gradient": (lambda: Net(lambda: Mlp(lambda m, h, x: h), enter=False), tokens),
}
"""Name -> (makes the model, makes its batch)."""
