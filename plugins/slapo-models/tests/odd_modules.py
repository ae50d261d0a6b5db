"""Small models with one difficulty each, to schedule automatically."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, SIZE = 16, 4, 4


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * SIZE**-0.5
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention whose forward reads a number of heads and a width."""

    def __init__(self, *, scale: Callable[[int], Any] | None = None) -> None:
        super().__init__()
        self.heads, self.inner, self.scale = HEADS, HEADS * SIZE, scale
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, SIZE).transpose(1, 2) for part in self.qkv(x).split(self.inner, dim=-1)
        )
        found = attended(q, k, v)
        return self.out(found if self.scale is None else found / self.scale(self.heads))  # type: ignore[no-any-return]


class Parallel(nn.Module):
    """Attention with one shared key and value, and an MLP, by one fused matrix each and of one normalized input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = HEADS * SIZE, nn.LayerNorm(WIDTH)
        self.fused, self.out = nn.Linear(WIDTH, (HEADS + 2) * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(32, WIDTH)
        self.head_norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.fused(y).split((self.inner, SIZE, SIZE), dim=-1)
        gate, up = self.up(y).chunk(2, dim=-1)
        mixed = attended(self.head_norm(heads_of(q)), heads_of(k), heads_of(v))
        return x + self.out(mixed) + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Latent(nn.Module):
    """Attention with keys and values from a latent, of which one part is for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * (SIZE + 2), bias=False)
        self.latent, self.norm = nn.Linear(WIDTH, 6 + 2), nn.LayerNorm(6)
        self.expand, self.out = nn.Linear(6, HEADS * 2 * SIZE), nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (-1, SIZE + 2)).transpose(1, 2)
        latent, shared = self.latent(x).split((6, 2), dim=-1)
        k, v = self.expand(self.norm(latent)).unflatten(-1, (-1, 2 * SIZE)).transpose(1, 2).split(SIZE, dim=-1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], dim=-1)
        return self.out(attended(q, k, v))  # type: ignore[no-any-return]


class ReadsASum(nn.Module):
    """A split pair whose reduced result a second pair reads without a module between them."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH, bias=False)
        for parameter in (*self.up.parameters(), *self.down.parameters()) if frozen else ():
            parameter.requires_grad_(False)
        self.weight, self.back = nn.Parameter(torch.randn(24, WIDTH) / 4), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.relu(self.up(x)))
        return self.back(torch.tanh(F.linear(y, self.weight)))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Two experts, each token by one, with weights of all experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.up, self.down = nn.Parameter(torch.randn(2, WIDTH, 48) / 4), nn.Parameter(torch.randn(2, 24, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for number in range(2):
            (tokens,) = torch.where(chosen == number)
            gate, up = (flat[tokens] @ self.up[number]).chunk(2, dim=-1)
            found = (F.silu(gate) * up) @ self.down[number]
            result.index_add_(0, tokens, found * weights[tokens, None])
        return result.view_as(x)


class Named(nn.Module):
    """Experts by their names, and a router moved in the forward, behind a recurrent layer; they may be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.router = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleDict(
            {f"expert_{n}": nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for n in range(2)}
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.read(x)[0].flatten(0, 1)
        result = torch.zeros_like(flat)
        if torch.rand([]) < 1e-9:
            return result.view_as(x)
        self.router = self.router.to(flat.dtype)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        mask = F.one_hot(chosen, 2)
        for number in mask.sum(0).nonzero():
            (tokens,) = torch.where(mask[:, number[0]])
            found = self.experts[f"expert_{number[0]}"](flat[tokens])
            result.index_add_(0, tokens, found * weights[tokens, None])
        return result.view_as(x)


class Sized(Experts):
    """The same experts, whose tokens are put in order and split by their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        order, found = chosen.argsort(), []
        for number, tokens in enumerate(flat[order].split(F.one_hot(chosen, 2).sum(0).tolist())):
            gate, up = (tokens @ self.up[number]).chunk(2, dim=-1)
            found.append((F.silu(gate) * up) @ self.down[number])
        return torch.zeros_like(flat).index_add(0, order, torch.cat(found) * weights[order, None]).view_as(x)


class Convolutions(nn.Module):
    """Convolutions, one of them of each channel by itself, with norms of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.each, self.last = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 4, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.each(F.relu(self.norm(self.first(x))))
        return self.head(self.last(y).mean((-1, -2)))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One block called twice, with a matrix that a residual reads besides."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.block(self.norm(x))
        return x + self.block(self.norm(x))  # type: ignore[no-any-return]


class Dropping(nn.Module):
    """Layers that drop split features, and features of the input too."""

    def __init__(self, *, inputs: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.inputs = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), inputs

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training) if self.inputs else x
        return self.down(F.dropout(self.up(x).relu(), 0.5, self.training))  # type: ignore[no-any-return]


class ReadsRows(nn.Module):
    """Rows of an embedding that split features read with no module between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
        self.weight, self.back = nn.Parameter(torch.randn(24, WIDTH) / 4), nn.Linear(24, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.back(torch.tanh(F.linear(self.words(ids), self.weight)))
        return F.cross_entropy(self.head(y).flatten(0, 1), ids.flatten())


class Normalized(nn.Embedding):
    """Rows of an embedding, normalized with a weight of its own."""

    def __init__(self) -> None:
        super().__init__(20, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(super().forward(input))  # type: ignore[no-any-return]


class Words(nn.Module):
    """A normalized embedding and a head of as many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = Normalized(), nn.Linear(WIDTH, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(ids)).flatten(0, 1), ids.flatten())


class Classes(nn.Module):
    """A classifier with its loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


@dataclass(frozen=True)
class Odd:
    """A model, and what is split in it.

    Args:
        make: the model.
        split: paths of split matrices.
        batch: one batch.
    """

    make: Callable[[], nn.Module]
    split: tuple[str, ...]
    batch: Callable[[], Any] = lambda: (torch.randn(3, 5, WIDTH),)


ODD = {
    "attention": Odd(Attention, ("qkv.weight", "out.weight")),
    "attention scaled by its heads": Odd(lambda: Attention(scale=float), ()),
    "attention scaled by a tensor of its heads": Odd(lambda: Attention(scale=lambda n: torch.tensor(float(n))), ()),
    "attention scaled by its heads, filled in": Odd(lambda: Attention(scale=lambda n: torch.full((1,), n)), ()),
    "parallel": Odd(Parallel, ("fused.weight", "out.weight", "up.weight", "down.weight")),
    "latent": Odd(Latent, ("query.weight", "expand.weight", "out.weight")),
    "a sum is read": Odd(ReadsASum, ("up.weight", "down.weight")),
    "a sum of frozen layers is read": Odd(lambda: ReadsASum(frozen=True), ("up.weight", "down.weight")),
    "experts": Odd(Experts, ("up", "down")),
    "named experts": Odd(Named, tuple(f"experts.expert_{n}.{layer}.weight" for n in range(2) for layer in (0, 2))),
    "experts of computed sizes": Odd(Sized, ("up", "down")),
    "convolutions": Odd(
        Convolutions, ("first.weight", "each.weight", "last.weight"), lambda: (torch.randn(2, 3, 6, 6),)
    ),
    "rows are read": Odd(ReadsRows, ("weight", "back.weight", "head.weight"), lambda: (torch.randint(20, (2, 5)),)),
    "a normalized embedding": Odd(Words, ("head.weight",), lambda: (torch.randint(20, (2, 5)),)),
    "many classes": Odd(
        lambda: Classes(13), ("head.weight",), lambda: (torch.randn(3, 5, WIDTH), torch.tensor([12, 0, 7]))
    ),
    "few classes": Odd(lambda: Classes(3), (), lambda: (torch.randn(3, 5, WIDTH), torch.tensor([2, 0, 1]))),
    "twice": Odd(Twice, ("block.0.weight", "block.2.weight")),
}


def made(name: str) -> tuple[nn.Module, Any]:
    """The model and its batch, the same each time."""
    torch.manual_seed(0)
    return ODD[name].make().double(), tuple(
        each.double() if each.is_floating_point() else each for each in ODD[name].batch()
    )
