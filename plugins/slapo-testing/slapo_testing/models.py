"""Small models with unusual structures, in float32."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 8)) for _ in range(layers)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class CNN(nn.Module):
    """Two residual blocks, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(Block(4), Block(4))
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(torch.relu(self.bn1(self.conv1(x))))


class Tied(nn.Module):
    """An embedding tied with the output, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.again = self.shared
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.again(self.shared(self.embed(ids))))


class Counting(nn.Module):
    """A module whose ``__setattr__`` counts and lists assignments."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["assigned"] = 0
        self.__dict__["seen"] = []
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("scale", torch.ones(8))
        self.width = 8

    def __setattr__(self, name: str, value: Any) -> None:
        if "assigned" in self.__dict__:
            self.__dict__["assigned"] += 1
            self.__dict__["seen"].append(name)
        super().__setattr__(name, value)

    @property  # type: ignore[override]
    def half(self) -> int:
        return self.width // 2

    @half.setter
    def half(self, value: int) -> None:
        self.__dict__["width"] = 2 * value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = nn.functional.linear(x, self.weight) * self.get_buffer("scale")
        return scaled


class Frozen(nn.Module):
    """A module that refuses assignments after its construction."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.__dict__["done"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("done"):
            raise RuntimeError(f"frozen: {name} stays as it is")
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Odd(nn.Module):
    """Layers with hooks, parametrizations, or second references to modules and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.counting = Counting()
        self.hooked = nn.Linear(8, 8)
        self.hooked.register_forward_pre_hook(double)
        self.hooked.register_forward_hook(keep, with_kwargs=True)
        self.hooked.register_full_backward_hook(keep)
        self.own = nn.Linear(8, 8)
        self.own.forward = functools.partial(other_forward, self.own)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        return self.own(self.hooked(self.counting(self.normed(x))))


def double(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(2 * arg for arg in args)


def keep(*_: Any) -> None:
    return None


def other_forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, module.weight) - 1


def bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        **{
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "vocab_size": 50,
            "max_position_embeddings": 16,
            "attn_implementation": "eager",
            **options,
        }
    )
    return BertForMaskedLM(config)


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        **{"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 50, "n_positions": 16, "use_cache": False, **options}
    )
    return GPT2LMHeadModel(config)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return CNN()


INPUTS: dict[str, Any] = {
    "bert": lambda: {"input_ids": torch.arange(8).reshape(2, 4), "labels": torch.arange(8).reshape(2, 4)},
    "gpt2": lambda: {"input_ids": torch.arange(8).reshape(2, 4), "labels": torch.arange(8).reshape(2, 4)},
    "cnn": lambda: {"x": torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)},
}
MODELS: dict[str, Any] = {"bert": bert, "gpt2": gpt2, "cnn": cnn}


def run(model: nn.Module, name: str) -> torch.Tensor:
    """Return a scalar output of one of ``MODELS``."""
    dtype = next(model.parameters()).dtype
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in INPUTS[name]().items()}
    output = model(**inputs)
    return output.loss if hasattr(output, "loss") else output.square().mean()


class Enclosing(nn.Module):
    def __init__(self, below: nn.Module) -> None:
        super().__init__()
        self.below = below

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.below(*args, **kwargs)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Branched(nn.Module):
    """Three layers, running statistics, dropout, and one tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(16, 8)
        self.again = nn.Linear(8, 16, bias=False)
        self.layers = nn.ModuleList([self.up, self.down])
        self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        hidden = self.drop(self.act(self.norm(self.up(x))))
        return self.down(hidden + self.again(x)) * scale


class TwoBranched(nn.Module):
    """Two branched blocks; inputs are ``(5, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Branched()
        self.second = Branched()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, scale=0.5))
