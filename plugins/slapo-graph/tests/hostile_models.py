"""Modules that a careless tracer gets wrong without a word, and what happens to them after they are traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SCALE = 2.0
TABLE = {"gain": 3.0}
COUNT = 0
LOG: list[int] = []
TENSOR = torch.tensor(2.0)


class Settings:
    gain = 2.0


SETTINGS = Settings()
SETTINGS.bias = 1.0  # type: ignore[attr-defined]


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def other_helper(x: torch.Tensor) -> torch.Tensor:
    return x * 7


class Base(nn.Module):
    """One linear layer, what a subclass computes with it, and attributes to change."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table, self.sizes, self.rule, self.fn = {"gain": 2.0}, [1, [2]], Rule(), F.gelu
        self.part = functools.partial(F.leaky_relu, negative_slope=0.2)
        self.tensors = [torch.tensor(2.0)]
        self.optional: Any = None
        self.count = 0


class Rule:
    def __init__(self) -> None:
        self.gain = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def model(compute: Callable[..., Any]) -> type[nn.Module]:
    """A class whose forward is ``compute``."""
    return type("Hostile", (Base,), {"forward": compute, "__module__": __name__})


# -- forwards ----------------------------------------------------------------------------------------------------


def reads_global(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * SCALE


def reads_global_in_helper(self: Any, x: torch.Tensor) -> torch.Tensor:
    return helper(self.fc(x))


def reads_global_table(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * TABLE["gain"]


def reads_global_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) + SETTINGS.bias


def reads_class_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * self.factor


def reads_table(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * self.table["gain"]


def reads_nested_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * self.sizes[1][0]


def reads_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.rule(self.fc(x))


def reads_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fn(self.fc(x))


def reads_partial(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.part(self.fc(x))


def asks_for_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * 5 if hasattr(self, "late") else self.fc(x)


def asks_for_module(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.optional(self.fc(x)) if self.optional is not None else self.fc(x)


def reads_global_tensor(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * TENSOR


def reads_tensor_in_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * self.tensors[0]


def asks_requires_grad(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * (3 if self.fc.weight.requires_grad else 1)


def asks_contiguous(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * (3 if x.is_contiguous() else 1)


def asks_batch_of_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * (3 if x.shape[0] == 1 else 1)


def asks_dtype(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * (3 if self.fc.weight.dtype is torch.float64 else 1)


def dispatches_on_class(self: Any, x: Any) -> torch.Tensor:
    return self.fc(x[0]) * 2 if isinstance(x, (tuple, list)) else self.fc(x)


def returns_early(self: Any, x: torch.Tensor, options: Any = None) -> torch.Tensor:
    return x if options and options.get("skip") else self.fc(x)


def draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.dropout(self.fc(x), 0.5, self.training) + torch.rand(4)
    return x + torch.randn_like(x) + F.dropout(x, 0.1, self.training)


def writes_to_argument(self: Any, x: torch.Tensor) -> torch.Tensor:
    x[0] = 0
    x.mul_(2)
    return self.fc(x)


def returns_views(self: Any, x: torch.Tensor) -> Any:
    y = self.fc(x)
    part = y[0]
    part += 1
    return y, part, y


def default_tensor(self: Any, x: torch.Tensor, gain: torch.Tensor = torch.tensor(3.0)) -> torch.Tensor:  # noqa: B008
    return self.fc(x) * gain


@torch.no_grad()
def decorated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x)


def nested_regions(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.fc(x)
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            gate = self.second(y.float()).sigmoid()
    return y.float() * gate


def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(self.fc(x).relu()) + sum(part * 2 for part in self.second(x).unbind(-1))[..., None]


def broadcasts(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.fc(x)
    return (y + y.mean(0, keepdim=True).expand(y.shape[0], -1, -1)).reshape(-1, y.size(-1)).view(*y.shape)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return self.fc(x) * self.count


def counts_in_table(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.table["gain"] += 1
    return self.fc(x) * self.table["gain"]


def logs(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.sizes.append(x.dim())
    return self.fc(x)


def counts_globally(self: Any, x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return self.fc(x) * COUNT


def logs_globally(self: Any, x: torch.Tensor) -> torch.Tensor:
    LOG.append(x.dim())
    return self.fc(x) * len(LOG)


def changes_list_argument(self: Any, x: list[torch.Tensor]) -> torch.Tensor:
    x.append(x[0])
    return self.fc(x[0])


def recurses(self: Any, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
    return self.fc(x) if depth == 0 else self(x.relu(), depth - 1)


@contextlib.contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set a global or class attribute for a while; a dictionary's item too."""
    table = owner if isinstance(owner, dict) else vars(owner)
    before = table[name]
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
    try:
        yield
    finally:
        if isinstance(owner, dict):
            owner[name] = before
        else:
            setattr(owner, name, before)
