"""Models of torch.nn's own parts, among them the shapes of module trees that are rare in transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

__all__ = ["TORCH_MODELS"]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(7))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.recurrent = kind(16, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(ids))[0])


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = x
        for layer in self.layers:
            attended, weights = layer(x, x, x)
            x = self.norm(x + attended)
        return x, weights


class Residual(nn.Module):
    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + x).relu_()


class ResNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), norm(8), nn.ReLU())
        self.blocks = nn.Sequential(*(Residual(8, norm) for _ in range(3)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, as in mobile networks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1), nn.SiLU())
            for _ in range(2)
        )

    def forward(self, image: Tensor) -> Tensor:
        for layer in self.layers:
            image = layer(image)
        return image


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="mean")
        self.head = nn.Bilinear(16, 16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.bag(ids)
        return self.head(words, words.tanh())


class Normed(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(norm(nn.Linear(16, 16)) for _ in range(2))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.out(x)


class Outputs(NamedTuple):
    value: Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    """Nested inputs and outputs, keyword-only arguments, None, numbers, a named tuple."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, pair: tuple[Tensor, Tensor], *, scale: float, extra: Tensor | None = None) -> Outputs:
            left, right = pair
            return Outputs(self.inner(left) * scale, {"right": right + 1, "list": [right, None, scale], "extra": extra})

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor, *, scale: float = 0.5) -> dict[str, Any]:
        pair = (x, x * 2)
        output = Outputs(x, {})
        for block in self.blocks:
            output = block(pair, scale=scale, extra=pair[0])
            pair = (output.value, output.rest["right"])
        return {"last": output, "pair": pair}


class Shared(nn.Module):
    """One module in three places, and two tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.layers = nn.ModuleList([block, nn.Sequential(nn.Linear(8, 8), nn.Tanh()), block])
        self.again = block
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.again(x))


class OwnParameters(nn.Module):
    """Parameters in lists and dictionaries, a scalar, an empty one, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(8)), "b": nn.Parameter(torch.tensor(0.5))})
        self.register_parameter("absent", None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("first", "second")})
        self.heads = nn.ModuleList([nn.Linear(8, 8), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for scale, layer in zip(self.scales, self.layers.values(), strict=True):
            x = layer(x * scale * self.mask) + self.named["a"]
        for head in self.heads:
            x = head(x)
        return x * self.named["b"]


class Lazy(nn.Module):
    """Frozen parts, and a module list that is used out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.never = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.layers[2](self.layers[1](x)).relu())


def Transformer() -> nn.Module:
    return nn.Transformer(16, 4, 2, 2, 32, dropout=0.1, batch_first=True)


def Encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def LSTM() -> nn.Module:
    return Recurrent(nn.LSTM)


def GRU() -> nn.Module:
    return Recurrent(nn.GRU)


def GroupNormResNet() -> nn.Module:
    return ResNet(lambda channels: nn.GroupNorm(2, channels))


def WeightNorm() -> nn.Module:
    return Normed(weight_norm)


def SpectralNorm() -> nn.Module:
    return Normed(spectral_norm)


_IDS = lambda: (_ids(30, 2, 6),)  # noqa: E731
_ROWS = lambda: (_random(4, 8),)  # noqa: E731
_IMAGE = lambda: (_random(4, 3, 16, 16),)  # noqa: E731

TORCH_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "transformer": (Transformer, lambda: (_random(2, 5, 16), _random(2, 4, 16))),
    "transformer encoder": (Encoder, lambda: {"src": _random(2, 5, 16)}),
    "lstm": (LSTM, _IDS),
    "gru": (GRU, _IDS),
    "multihead attention": (SelfAttention, lambda: (_random(2, 5, 16),)),
    "resnet with batch norm": (ResNet, _IMAGE),
    "resnet with group norm": (GroupNormResNet, _IMAGE),
    "depthwise convolution": (Separable, lambda: (_random(2, 8, 8, 8),)),
    "embedding bag": (Bags, _IDS),
    "weight norm": (WeightNorm, lambda: (_random(4, 16),)),
    "spectral norm": (SpectralNorm, lambda: (_random(4, 16),)),
    "nested outputs": (Nested, lambda: {"x": _random(4, 8), "scale": 0.25}),
    "shared modules": (Shared, _IDS),
    "own parameters": (OwnParameters, _ROWS),
    "frozen and unused": (Lazy, _ROWS),
}
"""Name -> (makes the model, makes its batch: positional arguments, or keyword ones)."""
