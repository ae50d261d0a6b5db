"""A snapshot sees every change of a model, and says which; it sees none where nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.support.kit_primitives import Net, batch


def model() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.config = Config(heads=4, sizes=[1, 2, 3])
    net.tied = net.fc1.weight
    net.lstm = nn.LSTM(2, 2)
    net.fc1.weight.data[0, 0] = float("nan")
    net.config.ratio = 0.0
    net.config.kept = {net.fc1, "a name"}
    net.fc2.register_forward_hook(hook)
    for _ in range(2):
        net.norm.register_forward_hook(hook)
    net(*batch()).sum().backward()
    net.norm.reset_running_stats()
    return net


class Marked(nn.Parameter):
    pass


class Config(SimpleNamespace):
    pass


class OtherConfig(SimpleNamespace):
    pass


def hook(module: Any, args: Any, output: Any) -> None:
    return None


def set_value(net: Net) -> None:
    net.fc2.weight.data[1, 2] = 5.0


def flip_sign_of_zero(net: Net) -> None:
    net.norm.running_mean[1] = -0.0


def swap_order(net: Net) -> None:
    weight = net.fc1._parameters.pop("weight")
    net.fc1._parameters["weight"] = weight


def swap_hooks(net: Net) -> None:
    net.norm._forward_hooks.move_to_end(next(iter(net.norm._forward_hooks)))


def swap_attributes(net: Net) -> None:
    net.fc1.__dict__["in_features"] = net.fc1.__dict__.pop("in_features")


def flip_one_bit(net: Net) -> None:
    net.fc2.bias.data.view(torch.int32)[0] ^= 1


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "value": (set_value, "fc2.weight (tensor): 1 of 16 elements differ, first [1, 2]: "),
    "sign of zero": (
        flip_sign_of_zero,
        "norm._buffers.running_mean (tensor): 1 of 8 elements differ, first [1]: 0.0 -> -0.0",
    ),
    "one bit": (flip_one_bit, "fc2.bias (tensor): 1 of 2 elements differ, first [0]: "),
    "scalar": (lambda net: net.norm.num_batches_tracked.add_(1), "1 of 1 elements differ, first []: 0 -> 1"),
    "same bits, another object": (
        lambda net: setattr(net.fc2, "weight", nn.Parameter(net.fc2.weight.detach().clone())),
        "fc2.weight: another object, Parameter (2, 8) as before",
    ),
    "shape": (
        lambda net: setattr(net.fc2, "weight", nn.Parameter(torch.zeros(1, 8))),
        "fc2.weight: another object, Parameter (2, 8) -> Parameter (1, 8)",
    ),
    "frozen": (lambda net: net.fc1.bias.requires_grad_(False), "fc1.bias (tensor): requires_grad True -> False"),
    "gradient": (lambda net: net.fc2.bias.grad.add_(1), "fc2.bias.grad (tensor): 2 of 2 elements differ"),
    "gradient gone": (lambda net: setattr(net.fc1.bias, "grad", None), "fc1.bias.grad: removed (was Tensor (8,))"),
    "gradient appears": (
        lambda net: setattr(net.lstm.weight_ih_l0, "grad", torch.zeros(8, 2)),
        "lstm.weight_ih_l0.grad: added (Tensor (8, 2))",
    ),
    "same gradient, another object": (
        lambda net: setattr(net.fc1.bias, "grad", net.fc1.bias.grad.clone()),
        "fc1.bias.grad: another object, Tensor (8,) as before",
    ),
    "class of a parameter": (
        lambda net: setattr(net.fc1.bias, "__class__", Marked),
        f"fc1.bias (tensor): type {nn.Parameter} -> {Marked}",
    ),
    "parameter attribute": (lambda net: setattr(net.fc1.bias, "mark", 1), "fc1.bias (attributes).mark: added (1)"),
    "parameter hook": (lambda net: net.fc1.bias.register_hook(print), "fc1.bias._backward_hooks"),
    "parameter order": (swap_order, "fc1._parameters (names): another order, ['weight', 'bias'] -> ['bias', 'weight']"),
    "emptied slot": (lambda net: setattr(net.fc1, "bias", None), "fc1.bias: Parameter (8,) became None"),
    "module": (lambda net: setattr(net, "drop", nn.Dropout(0.1)), "drop: another object, a Dropout as before"),
    "child": (lambda net: setattr(net, "extra", nn.ReLU()), "extra: added (a ReLU)"),
    "type": (
        lambda net: setattr(net.drop, "__class__", nn.AlphaDropout),
        "drop (type): another object, type Dropout -> type AlphaDropout",
    ),
    "type, of another module": (
        lambda net: setattr(net.drop, "__class__", type(net.norm)),
        "drop (type): another object, type Dropout -> type BatchNorm1d",
    ),
    "type of the same name": (
        lambda net: setattr(net.drop, "__class__", type("Dropout", (nn.Dropout,), {})),
        "drop (type): another object, type Dropout as before",
    ),
    "hook order": (swap_hooks, "norm._forward_hooks (names): another order, "),
    "hook": (lambda net: net.fc1.register_forward_hook(hook), "(function hook)"),
    "hook gone": (lambda net: net.fc2._forward_hooks.clear(), "removed (was function hook)"),
    "forward": (lambda net: setattr(net.fc1, "forward", len), "fc1.forward: added"),
    "forward of the class, set": (lambda net: setattr(net.fc1, "forward", net.fc1.forward), "fc1.forward: added"),
    "attribute order": (swap_attributes, "fc1 (names): another order, "),
    "persistence": (
        lambda net: net.norm._non_persistent_buffers_set.add("running_mean"),
        "norm._non_persistent_buffers_set (members): {} -> {'running_mean'}",
    ),
    "set": (lambda net: net.config.kept.add(net.fc2), "(root).config.kept (members): {'a name', Linear("),
    "sign of a zero in Python": (
        lambda net: setattr(net.config, "ratio", -0.0),
        "(root).config.ratio: 0.0 -> -0.0",
    ),
    "class of an object": (
        lambda net: setattr(net.config, "__class__", OtherConfig),
        "(root).config (type): another object, type Config -> type OtherConfig",
    ),
    "attribute": (lambda net: setattr(net.fc1, "in_features", 5), "fc1.in_features: 4 -> 5"),
    "type of an attribute": (lambda net: setattr(net.fc1, "in_features", 4.0), "fc1.in_features: 4 -> 4.0"),
    "mode": (lambda net: net.drop.eval(), "drop.training: True -> False"),
    "config": (lambda net: setattr(net.config, "heads", 2), "(root).config.heads: 4 -> 2"),
    "list": (lambda net: net.config.sizes.append(4), "(root).config.sizes (length): 3 -> 4"),
    "tie": (lambda net: setattr(net, "tied", nn.Parameter(torch.zeros(8, 4))), "(root).tied: another object"),
    "dtype": (lambda net: net.fc2.double(), "fc2.weight (tensor): dtype torch.float32 -> torch.float64"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_snapshot_detects_changes(name: str) -> None:
    change, says = CHANGES[name]
    net = model()
    before = ModelSnapshot(net)
    assert before.differences(net) == []
    change(net)
    lines = before.differences(net)
    assert any(says in line for line in lines), lines
    with pytest.raises(AssertionError, match="the model is not bit-identical to before:\n  "):
        assert_bit_identical(before, net)


def test_snapshot_detects_a_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    before = ModelSnapshot(net)
    monkeypatch.setattr(Net, "forward", hook)
    assert before.differences(net) == ["class Net.forward: another object, function Net.forward -> function hook"]


def test_snapshot_copies_values_and_changes_nothing() -> None:
    net = model()
    twin = copy.deepcopy(net)
    before, first = ModelSnapshot(net), net.fc1.weight.detach().clone()
    net.fc1.weight.data.add_(1)
    assert before.differences(net)
    net.fc1.weight.data.copy_(first)
    assert_bit_identical(before, net)
    assert net.state_dict().keys() == twin.state_dict().keys()


def test_copied_model_differs_from_the_snapshot() -> None:
    net = model()
    lines = ModelSnapshot(net).differences(copy.deepcopy(net))
    assert "(root): another object, a Net as before" in lines


def test_meta_models_and_exotic_tensors_are_compared() -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    net = nn.Module()
    net.register_buffer("flags", torch.tensor([True, False]))
    net.register_buffer("waves", torch.tensor([1 + 2j]).conj())
    net.register_buffer("brain", torch.ones(2, 3, dtype=torch.bfloat16).t())
    net.register_buffer("none", None)
    net.register_buffer("empty", torch.empty(0, 3))
    net.register_buffer("sparse", torch.eye(2).to_sparse())
    for item in (meta, net):
        assert ModelSnapshot(item).differences(item) == []
    before = ModelSnapshot(net)
    net.flags[0] = False
    net.brain[0, 1] = 2.0
    assert before.differences(net) == [
        "(root)._buffers.flags (tensor): 1 of 2 elements differ, first [0]: True -> False",
        "(root)._buffers.brain (tensor): 1 of 6 elements differ, first [0, 1]: 1.0 -> 2.0",
    ]
