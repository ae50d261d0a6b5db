"""Calls of modules: torch.nn's own as the functions that they stand for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slapo_core.graph.leaves import is_changed, is_predefined
from slapo_core.graph.patterns.calls import Attribute, Call
from slapo_core.graph.patterns.operations import finished, plain
from slapo_core.graph.patterns.schemas import parameter_name
from slapo_core.graph.structure import is_plain

__all__ = ["functional_form", "is_plain_module", "module_call", "settings"]

_FUNCTIONS = {
    nn.AvgPool1d: "avg_pool1d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AdaptiveAvgPool1d: "adaptive_avg_pool1d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.AlphaDropout: "alpha_dropout",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Bilinear: "bilinear",
    nn.CELU: "celu",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.ELU: "elu",
    nn.Embedding: "embedding",
    nn.GELU: "gelu",
    nn.GLU: "glu",
    nn.GroupNorm: "group_norm",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardswish: "hardswish",
    nn.Hardtanh: "hardtanh",
    nn.LayerNorm: "layer_norm",
    nn.LeakyReLU: "leaky_relu",
    nn.Linear: "linear",
    nn.LogSigmoid: "log_sigmoid",
    nn.LogSoftmax: "log_softmax",
    nn.MaxPool1d: "max_pool1d",
    nn.MaxPool2d: "max_pool2d",
    nn.Mish: "mish",
    nn.PReLU: "prelu",
    nn.RMSNorm: "rms_norm",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SELU: "selu",
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "silu",
    nn.Softmax: "softmax",
    nn.Softplus: "softplus",
    nn.Tanh: "tanh",
}


def is_plain_module(module: nn.Module) -> bool:
    """Whether a call of ``module`` is nothing but what torch.nn says: no hooks, no forward step, its own class."""
    return is_predefined(module) and not is_changed(module)


def functional_form(module: nn.Module) -> str | None:
    """The name of the function that a call of ``module`` stands for, e.g. ``"linear"``; None if there is none.

    There is none where the call does more than the function: hooks, steps, counting batches, other padding modes,
    weights that are computed anew (parametrisations).
    """
    name = _FUNCTIONS.get(type(module))
    if name is None or is_changed(module):
        return None
    if name == "batch_norm" and (module.training or getattr(module, "running_mean", None) is None):
        return None
    if getattr(module, "padding_mode", "zeros") != "zeros" or getattr(module, "return_indices", False):
        return None
    if getattr(module, "max_norm", None) is not None:  # writes to its weight
        return None
    return name


def settings(module: nn.Module) -> Any:
    """What :func:`module_call` depends on, to be compared later: class, hooks, settings, which tensors there are."""
    own = [(name, value) for name, value in vars(module).items() if isinstance(value, _COMPARED)]
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return type(module), is_changed(module), own, [name for name, tensor in tensors if tensor is not None]


_COMPARED = (bool, int, float, str, tuple, list, type(None))


@functools.cache
def _parameters(name: str) -> tuple[str, ...]:
    if name in _BUILTIN_PARAMETERS:
        return _BUILTIN_PARAMETERS[name]
    return tuple(inspect.signature(getattr(functional, name)).parameters)


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_POOLING = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
_BUILTIN_PARAMETERS: dict[str, tuple[str, ...]] = {
    "avg_pool1d": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
    "avg_pool2d": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "adaptive_avg_pool1d": ("input", "output_size"),
    "bilinear": ("input1", "input2", "weight", "bias"),
    "conv1d": _CONVOLUTION,
    "conv2d": _CONVOLUTION,
    "conv3d": _CONVOLUTION,
    "gelu": ("input", "approximate"),
    "linear": ("input", "weight", "bias"),
    "log_sigmoid": ("input",),
    "max_pool1d": _POOLING,
    "max_pool2d": _POOLING,
    "prelu": ("input", "weight"),
    "sigmoid": ("input",),
    "softplus": ("input", "beta", "threshold"),
    "tanh": ("input",),
}


@functools.cache
def _forward(forward: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(forward).parameters.values())[1:]


def forward_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The parameters of a module's forward, and the arguments of a call of it by their names, without defaults."""
    parameters = _forward(type(module).forward)
    names = tuple(each.name for each in parameters)
    given: dict[str, Any] = {}
    for position, value in enumerate(args):
        if position < len(parameters) and parameters[position].kind in _POSITIONAL:
            given[names[position]] = value
        else:
            given[str(position)] = value
    given.update(kwargs)
    for each in parameters:
        if each.name in given and type(given[each.name]) is type(each.default) and given[each.name] == each.default:
            del given[each.name]
    return names, given


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def module_call(
    module: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: Callable[[str], Any] | None = None,
) -> tuple[Call | None, tuple[str, ...], dict[str, Any]]:
    """What a call of a module below a graph's computes.

    Args:
        module: the one that is called.
        path: of it, relative to the traced module.
        args: of the call.
        kwargs: of the call.
        held: gives what stands for a parameter or buffer of the module, by its name.

    Returns:
        the call as an operation, if it is one of torch.nn with nothing around it; the parameters of its forward; the
        arguments by their names.
    """
    names, given = forward_arguments(module, plain(args), {name: plain(value) for name, value in kwargs.items()})
    if not is_plain_module(module):
        return None, names, given
    held = held or (lambda name: Attribute(f"{path}.{name}"))
    cls = type(module)
    function = functional_form(module)
    targets = (cls.__name__, path) if path else (cls.__name__,)
    if function is not None:
        arguments = {parameter_name(function, name): value for name, value in given.items()}
        for name in _parameters(function):
            if name in arguments or name in ("input", "_stacklevel", "return_indices"):
                continue
            tensor = _tensor(module, name)
            if tensor is not None:
                arguments[name] = held(name)
            elif hasattr(module, name):
                arguments[name] = plain(getattr(module, name))
        return finished(function, arguments, (function, *targets)), names, given
    own = {f"self.{name}": held(name) for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for name, value in vars(module).items():
        if not name.startswith("_") and is_plain(value):
            own[f"self.{name}"] = plain(value)
    operation = f"{cls.__module__}.{cls.__qualname__}"
    return Call(operation, {**given, **own}, names=(operation, *targets)), names, given


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found
