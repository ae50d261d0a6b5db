"""Models as people write them for themselves: no library's names, and structures that a table of families misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ODD_MODELS"]

WIDTH, HEADS, WORDS = 24, 4, 61


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.relu() ** 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = context.saved_tensors
        return gradient * 2 * x.relu()


class Attention(nn.Module):
    """Packed projections, cut in one of three ways.

    Args:
        packing: ``"matrices"``: queries, keys, values one after the other; ``"heads"``: head by head; ``"groups"``:
            two KV heads, each behind its two queries.
    """

    def __init__(self, packing: str = "matrices", *, causal: bool = False) -> None:
        super().__init__()
        self.packing, self.causal = packing, causal
        self.h, self.size = HEADS, WIDTH // HEADS
        self.groups = HEADS // 2
        rows = WIDTH + 2 * self.groups * self.size if packing == "groups" else 3 * WIDTH
        self.into, self.out = nn.Linear(WIDTH, rows), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        packed = self.into(x)
        if self.packing == "matrices":
            q, k, v = (part.view(rows, length, self.h, -1).transpose(1, 2) for part in packed.chunk(3, dim=-1))
        elif self.packing == "heads":
            q, k, v = packed.view(rows, length, self.h, 3, self.size).permute(3, 0, 2, 1, 4)
        else:
            packed = packed.view(rows, length, self.groups, -1, self.size)
            q = packed[..., :-2, :].flatten(2, 3).transpose(1, 2)
            k, v = (
                packed[..., place, :].repeat_interleave(self.h // self.groups, dim=2).transpose(1, 2)
                for place in (-2, -1)
            )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Gated(nn.Module):
    """A gate and its values in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        return self.back(F.silu(gate) * value)


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Square.apply(self.up(x)))


class Experts(nn.Module):
    """The two best experts for each word, in a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.Linear(WIDTH, 3, bias=False)
        self.each = nn.ModuleList(Squared() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.choice(flat).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.each):
            words, place = (chosen == number).nonzero(as_tuple=True)
            result = result.index_add(0, words, expert(flat[words]) * weights[words, place, None])
        return result.view_as(x)


class StackedExperts(nn.Module):
    """All experts in two tensors of three axes, each word by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(3, 2 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(torch.einsum("bld,edf->blef", x, self.up))
        return torch.einsum("blef,efd,ble->bld", inner, self.down, self.choice(x).softmax(-1))


class Block(nn.Module):
    def __init__(self, mixing: nn.Module, inner: nn.Module, *, parallel: bool = False) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixing, self.inner, self.parallel = mixing, inner, parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel:
            return x + self.mixing(self.n1(x)) + self.inner(self.n2(x))
        x = x + self.mixing(self.n1(x))
        return x + self.inner(self.n2(x))


class Tower(nn.Module):
    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words
        self.blocks = nn.ModuleList(Block(Attention(), Squared()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, early: bool) -> dict[str, Any]:
        x, states = self.words(ids), []
        for number, block in enumerate(self.blocks):
            x = block(x)
            states.append(x.mean())
            if early and number == 0:
                break
        return {"pooled": self.norm(x).mean(1), "states": states}


class TwoTowers(nn.Module):
    """Two towers with a shared embedding, one of which may leave early."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.a, self.b = Tower(self.words), Tower(self.words)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, left: Tensor, right: Tensor, early: bool = False) -> dict[str, Any]:
        one, other = self.a(left, early), self.b(right, False)
        near = F.normalize(one["pooled"], dim=-1) @ F.normalize(other["pooled"], dim=-1).T * self.scale.exp()
        return {"loss": F.cross_entropy(near, torch.arange(len(near))), "near": near, "rest": [one, other]}


class Words(nn.Module):
    """A small GPT.

    Args:
        block: makes a block.
        tied: whether embedding and head share a weight.
    """

    def __init__(self, block: Callable[[], nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.stack = nn.Sequential(*(block() for _ in range(2)))
        self.last, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.scores.weight = self.table.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.table(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        logits = self.scores(self.last(self.stack(x)))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class EarlyExits(nn.Module):
    """A head after every block; in evaluation the first one that is certain ends the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(Attention("heads"), Gated()) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))

    def forward(self, ids: Tensor) -> list[Tensor]:
        x, answers = self.table(ids), []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            answers.append(leave(x.mean(1)))
            if not self.training and answers[-1].softmax(-1).max() > 0.6:
                break
        return answers


def _gpt(packing: str, inner: Callable[[], nn.Module], **options: Any) -> Callable[[], nn.Module]:
    parallel = options.pop("parallel", False)
    return lambda: Words(lambda: Block(Attention(packing, causal=True), inner(), parallel=parallel), **options)


def _ids() -> Tensor:
    return torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(7))


ODD_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "two towers": (TwoTowers, lambda: {"left": _ids(), "right": _ids().flip(0)}),
    "two towers, one leaves early": (TwoTowers, lambda: {"left": _ids(), "right": _ids().flip(0), "early": True}),
    "early exits": (EarlyExits, lambda: {"ids": _ids()}),
    "experts in a list": (_gpt("matrices", Experts), lambda: {"input_ids": _ids()}),
    "experts in a tensor": (_gpt("matrices", StackedExperts), lambda: {"input_ids": _ids()}),
    "packed by heads": (_gpt("heads", Gated), lambda: {"input_ids": _ids()}),
    "packed by groups": (_gpt("groups", Gated, tied=True), lambda: {"input_ids": _ids()}),
    "parallel block, custom function": (
        _gpt("matrices", Squared, parallel=True),
        lambda: {"input_ids": _ids()},
    ),
}
"""Name -> (makes the model, makes its batch)."""
