"""Changes of the model that no step made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.integration.bank.faults.fault import Fault, fault
from tests.integration.bank.places import ACTIVATIONS, MLPS, NORMS
from tests.integration.bank.right import freeze_norms, hook_norms
from tests.integration.bank.steps import Right, Wrong, step

LISTS = {
    "bert": "bert.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers", "qwen3": "model.layers",
    "t5": "encoder.block", "vit": "vit.layers",
}  # fmt: skip


def changed_outside(
    name: str, breaks: str, places: dict[str, str], edit: Callable[[nn.Module], None], **more: Any
) -> Fault:
    """The class that edits a module behind the schedule's back, after the last step."""
    by_hand, is_users = more.pop("by_hand", ""), more.pop("is_users", False)

    @fault(name, breaks, models=tuple(places), **{"at_most": 1, **more})
    def make(right: Right) -> Iterator[Wrong]:
        for path in dict.fromkeys(places[right.model].format(n=number) for number in (1, 0)):
            edited = step(path, "outside", edit)
            near = (path, path.rpartition(".")[0])
            yield Wrong(right, path, (*right.steps, edited), near=near, outside=True, by_hand=by_hand)

    return dataclasses.replace(make, is_users=is_users)


def other_layer(module: nn.Module) -> None:
    """Swap the layers of a list."""
    assert isinstance(module, nn.ModuleList)
    module[0], module[1] = module[1], module[0]


def other_forward(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda *args, **kwargs: plain(*args, **kwargs) * 1.001  # type: ignore[method-assign]


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(scale_output)


def scale_output(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 1.001


def backward_hooked(module: nn.Module) -> None:
    module.register_full_backward_hook(scale_gradient)


def scale_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if each is None else each * 1.001 for each in inputs)


def other_eps(module: nn.Module) -> None:
    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    setattr(module, name, getattr(module, name) * 1000 + 1e-6)


def frozen(module: nn.Module) -> None:
    module.weight.requires_grad_(False)


def thawed(module: nn.Module) -> None:
    module.weight.requires_grad_(True)


def new_parameter(module: nn.Module) -> None:
    """A parameter of the same values: what the old one's hook did is lost."""
    module.weight = nn.Parameter(module.weight.detach().clone())


def gradient_hooked(module: nn.Module) -> None:
    module.weight.register_hook(lambda gradient: gradient * 1.5)


def accumulating(module: nn.Module) -> None:
    module.weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def other_values(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.01)


def other_module(module: nn.Module) -> None:
    """A module set as an attribute, without replace."""
    for name, child in module.named_children():
        if "act" in name:
            setattr(module, name, nn.Tanh())
            del child


swapped = changed_outside("layers in another order", "outputs", LISTS, other_layer)
values = changed_outside("pieces changed by hand", "outputs", MLPS, other_values)

# The reference model is the live one without its steps: what follows changes both.
forward_set = changed_outside("forward set by hand", "outputs", NORMS, other_forward, is_users=True)
hook_added = changed_outside("a forward hook added by hand", "outputs", NORMS, hooked, is_users=True)
backward_hook_added = changed_outside(
    "a backward hook added by hand", "gradients of layers before", NORMS, backward_hooked, is_users=True
)
eps_set = changed_outside("an attribute set by hand", "outputs", NORMS, other_eps, is_users=True)
frozen_outside = changed_outside(
    "a parameter frozen by hand", "it is not trained: weights after a step", NORMS, frozen, is_users=True
)
thawed_outside = changed_outside(
    "a frozen parameter trained by hand", "weights after a step", NORMS, thawed, prepare=freeze_norms, is_users=True
)
hook_lost = changed_outside(
    "a parameter's hook lost by hand", "its gradient is not scaled", NORMS, new_parameter, prepare=hook_norms,
    is_users=True,
)  # fmt: skip
gradient_hook = changed_outside(
    "a parameter's hook added by hand", "its gradient", NORMS, gradient_hooked, is_users=True
)
accumulate_hook = changed_outside(
    "a post-accumulate hook added by hand", "its gradient", NORMS, accumulating, is_users=True
)
module_set = changed_outside("a module set as an attribute", "outputs", {
    model: path.rpartition(".")[0] for model, path in ACTIVATIONS.items()
}, other_module, is_users=True)  # fmt: skip
