"""Small models in which an obvious split is wrong: only a path not taken yet, a backward, or a number tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.trap_features import FEATURE_TRAPS, HEADS, INNER, WIDTH, ByNorm, Concatenated, Net, tokens

__all__ = ["SEQUENCE_TRAPS", "TRAP_MODELS"]


# -- heads -------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention; ``trap`` says what is odd about it."""

    def __init__(self, trap: str) -> None:
        super().__init__()
        self.trap, self.heads, self.window, self.dim = trap, HEADS, HEADS, WIDTH
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(HEADS, HEADS, bias=False)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.norm = nn.LayerNorm(WIDTH // HEADS)
        self.register_buffer("slopes", torch.linspace(0.1, 1, HEADS).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (each(x).view(rows, length, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        places = torch.arange(length)
        distance = (places[:, None] - places).abs()
        scores = q @ k.transpose(-1, -2)
        if self.trap == "scaled by the number of heads":
            scores = scores / self.heads
        elif self.trap == "a window as wide as heads":
            scores = scores.masked_fill(distance >= self.window, -1e4)
        elif self.trap == "heads talk":
            scores = self.mix(scores.movedim(1, -1)).movedim(-1, 1)
        elif self.trap == "a temperature for each head":
            scores = scores * self.temperature
        elif self.trap == "slopes for each head":
            scores = scores - self.slopes * distance
        elif self.trap == "slopes computed":
            scores = scores - torch.linspace(0.1, 1, self.heads).view(-1, 1, 1) * distance
        elif self.trap == "normalized heads":
            scores = self.norm(q) @ self.norm(k).transpose(-1, -2)
        elif self.trap == "attention averaged over heads":
            scores = scores - scores.mean(1, keepdim=True)
        mixed = scores.softmax(-1) @ v
        if self.trap == "features before heads":
            return x + self.o(mixed.permute(0, 2, 3, 1).reshape(rows, length, -1))
        if self.trap == "wrong order of axes":
            return x + self.o(mixed.reshape(rows, length, -1))
        return x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))


class Clipped(torch.autograd.Function):
    """Identity, whose gradient is clipped: not linear in it."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-0.01, 0.01)


class Added(nn.Module):
    """A block with its input added."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Grouped(nn.Module):
    """Attention with a KV head for two query heads; on four ranks each is on two of them."""

    def __init__(self, trap: str) -> None:
        super().__init__()
        self.trap, self.heads, self.kv, self.shared = trap, HEADS, HEADS // 2, 2
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.more = Concatenated(WIDTH // 2)
        self.scales = nn.Parameter(torch.rand(HEADS // 2, 1, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        size, trap = WIDTH // HEADS, self.trap
        x = Clipped.apply(x) if trap in ("an input clips its gradient", "a clipped input read by a function") else x
        by_function = trap in ("keys without their module", "a clipped input read by a function")
        k = F.linear(x, self.k.weight) if by_function else self.k(x)
        v = self.v(x)
        k = Clipped.apply(k) if trap == "keys clip their gradient" else k
        beside = self.more(v) if trap == "values are read besides" else 0.0
        k, v = (each.view(rows, length, self.kv, size).transpose(1, 2) for each in (k, v))
        q = self.q(x).view(rows, length, self.heads, size).transpose(1, 2)
        if trap == "queries of a head beside each other":
            q = q.view(rows, self.kv, self.shared, length, size)
            mixed = ((q @ k[:, :, None].transpose(-1, -2)).softmax(-1) @ v[:, :, None]).flatten(1, 2)
        else:
            groups = self.heads // self.kv
            if trap == "heads in turn":
                k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
            else:
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = q @ k.transpose(-1, -2)
            if trap == "scaled by the queries of a head":
                scores = scores / groups
            elif trap == "scales in another order":  # the second of both axes is that of the KV heads
                scores = scores * self.scales.transpose(0, 2).reshape(HEADS, 1, 1)
            elif trap == "scores averaged over the queries of a head":
                scores = scores - scores.unflatten(1, (-1, groups)).mean(2, keepdim=True).expand(
                    -1, -1, groups, -1, -1
                ).flatten(1, 2)
            mixed = scores.softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(rows, length, -1)) + beside


ATTENTIONS = (
    "scaled by the number of heads", "a window as wide as heads", "heads talk", "a temperature for each head",
    "slopes for each head", "slopes computed", "normalized heads", "attention averaged over heads",
    "features before heads", "wrong order of axes",
)  # fmt: skip


GROUPED = (
    "keys and values of two query heads", "keys without their module", "keys clip their gradient",
    "an input clips its gradient", "a clipped input read by a function", "values are read besides",
    "queries of a head beside each other", "heads in turn", "scaled by the queries of a head",
    "scales in another order", "scores averaged over the queries of a head",
)  # fmt: skip


# -- tokens ------------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A pair behind a norm, and something that may look at other tokens behind it."""

    def __init__(self, behind: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.behind, self.gate = behind, nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.by_token, self.scale = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("places", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self, x + self.down(F.gelu(self.up(self.norm(x)))))


def _first_token(module: Any, x: Tensor) -> Tensor:
    x[:, 0] += 1
    return x


def _aside(module: Any, x: Tensor) -> Tensor:
    module.seen = x
    return x * 2


def _twice(module: Any, x: Tensor) -> Tensor:
    return x * module.scale + x.mean(1, keepdim=True) * module.scale


BEHIND: dict[str, Callable[..., Tensor]] = {
    "nothing between tokens": lambda m, x: x * (1 + m.scale.exp()),
    "tokens shifted by one": lambda m, x: x + x.roll(1, 1),
    "the mean token": lambda m, x: x - x.mean(1, keepdim=True),
    "the mean token gates": lambda m, x: x * m.gate(x.mean(1)).sigmoid()[:, None],
    "the first token for all": lambda m, x: x + x[:, :1],
    "the first token in place": _first_token,
    "tokens in place": lambda m, x: x.mul_(0.5).add_(1),
    "cumulative over tokens": lambda m, x: x.cumsum(1),
    "tokens weighed by position": lambda m, x: x * m.places[: x.shape[1], None],
    "a parameter for each token": lambda m, x: x * m.by_token[: x.shape[1], None],
    "positions computed": lambda m, x: x * torch.arange(x.shape[1])[:, None],
    "positions computed, of one token": lambda m, x: x + torch.ones(x.shape[1]).cumsum(0)[-1:],
    "scaled by the number of tokens": lambda m, x: x / x.shape[1],
    "a convolution over tokens": lambda m, x: x + m.mix(x.transpose(1, 2)).transpose(1, 2),
    "a softmax over tokens": lambda m, x: x * x.softmax(1),
    "normalized over tokens too": lambda m, x: F.layer_norm(x, x.shape[1:]),
    "pairs of tokens": lambda m, x: F.layer_norm(x.reshape(len(x), -1, 2 * WIDTH), (2 * WIDTH,)).view_as(x),
    "tokens as rows": lambda m, x: F.layer_norm(x.flatten(0, 1), (WIDTH,)).view(x.shape),
    "tokens as rows, shifted": lambda m, x: x + x.flatten(0, 1).roll(1, 0).view(x.shape),
    "evaluation averages tokens": lambda m, x: x if m.training else x - x.mean(1, keepdim=True),
    "one row averages tokens": lambda m, x: x - x.mean(1, keepdim=True) if len(x) == 1 else x,
    "tokens kept aside": _aside,
    "a parameter sees slices and all": _twice,
    "gradient of tokens divided by its norm": lambda m, x: ByNorm.apply(x.transpose(1, 2)).transpose(1, 2),
    "every second token": lambda m, x: torch.stack([x[:, 0::2], x[:, 1::2]], 2).flatten(1, 2),
    "half of the tokens": lambda m, x: torch.cat([x[:, : x.shape[1] // 2] * 2, x[:, x.shape[1] // 2 :]], 1),
}  # fmt: skip


class Aside(nn.Module):
    """A block that reads what another kept of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Tokens(_aside), Tokens(lambda m, x: x)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)) + self.one.seen


class Changed(nn.Module):
    """A block that changes its input in place, which is read later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tokens(lambda m, x: x)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.add_(1)) * 0.5


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Changed(), Tokens(lambda m, x: x)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.block(x)
        return self.last(y + x)


SEQUENCE_TRAPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **{name: (lambda behind=behind: Net(lambda: Tokens(behind)), tokens) for name, behind in BEHIND.items()},
    "tokens kept aside and read": (lambda: Net(Aside), tokens),
    "an input changed in place": (lambda: Net(Later), tokens),
}
"""Those where slices of the sequence are wrong, but for the first."""

TRAP_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **FEATURE_TRAPS,
    **{name: (lambda name=name: Net(lambda: Attention(name)), tokens) for name in ATTENTIONS},
    **{name: (lambda name=name: Net(lambda: Added(Grouped(name))), tokens) for name in GROUPED},
    **SEQUENCE_TRAPS,
}
"""Name -> (makes the model, makes its batch)."""
