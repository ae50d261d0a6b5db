"""What a replacement took from the modules that it swallowed is held: another dropout probability is not ignored."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_graph import patterns


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.drop(x * 2))


def dropped(x: Tensor, p: float = patterns.any_constant(), training: bool = patterns.any_constant()) -> Tensor:
    return torch.relu(F.dropout(x * 2, p, training))


def fused(x: Tensor, p: float, training: bool) -> Tensor:
    return torch.relu(F.dropout(2 * x, p, training))


X = torch.randn(4, 8)


def replaced() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(8, 8), Block())
    untouched = copy.deepcopy(model)
    sch = slapo.create_schedule(model, example_inputs=X)
    sch["1"].trace()
    sch["1"].replace(fused, match=dropped)
    return model, untouched


def test_an_absorbed_module_s_changed_setting_is_followed() -> None:
    model, untouched = replaced()
    model[1].drop.p = untouched[1].drop.p = 0.0
    torch.testing.assert_close(model(X), untouched(X))


def test_its_mode_is_followed() -> None:
    model, untouched = replaced()
    for each in (model, untouched):
        each[1].drop.eval()
    torch.testing.assert_close(model(X), untouched(X))
    for each in (model, untouched):
        each[1].drop.train()
    outputs = []
    for each in (model, untouched):
        torch.manual_seed(1)
        outputs.append(each(X))
    torch.testing.assert_close(*outputs)
