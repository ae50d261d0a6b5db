"""Modules that keep what they compute with where a tracer may not look: in objects, lists, and under two names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TENSORS = {"gain": torch.tensor(2.0)}


class Holder:
    def __init__(self, gain: float) -> None:
        self.gain, self.tensor = gain, torch.tensor(gain)


class Slots:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 2.0


class Scale(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.alias = self.fc
        self.second.weight = self.fc.weight
        self.holder, self.slots, self.scales, self.table = Holder(2.0), Slots(), [Scale(2.0)], {"one": Holder(2.0)}
        self.gain = 2.0


def model(compute: Any) -> type[nn.Module]:
    """A class whose forward is ``compute``."""
    return type("Holding", (Base,), {"forward": compute, "__module__": __name__})


def two_names(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) + self.alias(x)


def tied(self: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.fc.weight) + nn.functional.linear(x, self.second.weight) * 2


def tensor_of_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * self.holder.tensor


def slots(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * self.slots.gain


def module_in_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.scales[0](self.fc(x))


def object_in_table(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * self.table["one"].gain


def global_tensors(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * TENSORS["gain"]


def own_dictionary(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * self.__dict__["gain"]


def variables(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * vars(self.holder)["gain"]


def inference_mode(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.fc(x) * (2 if torch.is_inference_mode_enabled() else 1)
