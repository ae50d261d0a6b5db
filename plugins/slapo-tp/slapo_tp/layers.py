"""Register the known layer types: the roles of their weights' axes.

A module is of a type only when it runs the type's own forward, or, of torch's classes, that of a subclass which calls
theirs by ``super()``. A subclass with another forward is of no type, until :func:`register_layer` names it; of a layer
of no type only the tensors are split.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from slapo_core import ArgumentError, Violation
from slapo_core.internals import children_of, parameters_of
from slapo_core.observers import Forward
from slapo_tp.forwards import fresh
from slapo_tp.private import convolution

Role = Literal["output", "input", "hidden", "vocabulary", "channel"]


@dataclass(frozen=True)
class Axis:
    """Describe the role of one axis of a weight.

    Args:
        role: ``"output"`` features, ``"input"`` features, ``"hidden"`` ones that neither the input nor the output of
            the layer has (those between the two matrices of an expert), the rows of a ``"vocabulary"``, or the
            ``"channel"``s of a layer that computes each of them separately: features of its input and of its output.
        attribute: the module's attribute that gives its size, e.g. ``"out_features"``, which is divided with it; None
            where there is none.
        divided: other attributes that are divided by the ranks with it.
    """

    role: Role
    attribute: str | None = None
    divided: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerType:
    """Describe a layer type for ``shard`` and ``sync``; see :func:`register_layer`.

    The layer has a weight and, maybe, ``bias``: one element for each output feature, added to the output.

    Args:
        name: as users call it, e.g. ``"nn.Linear"``.
        axes: of the weight; None for an axis that cannot be split, as can those after the last one.
        feature_axis: the axis of the layer's output that holds the output features, counted from the end; from the
            front where such layers take any number of axes behind it.
        without_bias: its forward with the bias left out, as ``function(layer, x)``; without one, a layer with a bias
            cannot be split on its input axis, or on hidden features.
        together: the parameters and buffers that only one step can split (a norm's).
        weight: the name of the parameter, or buffer, that the axes are of.
        is_fresh: whether the forward makes a new output and keeps no reference to it, so that a reduction may
            overwrite the output.
    """

    name: str
    axes: tuple[Axis | None, ...]
    feature_axis: int = -1
    without_bias: Forward | None = None
    together: tuple[str, ...] = ()
    weight: str = "weight"
    is_fresh: bool = False

    def role(self, axis: int) -> Role | None:
        """Return the role of an axis of the weight; None if it cannot be split."""
        own = self.axes[axis] if axis < len(self.axes) else None
        return own.role if own is not None else None

    def axis_of(self, role: Role) -> int | None:
        """Return the axis of the weight with this role; None if there is none."""
        return next((position for position, axis in enumerate(self.axes) if axis and axis.role == role), None)

    def sums_over(self, axis: int) -> bool:
        """Return whether the output, without its bias, is a sum over the axis."""
        return self.role(axis) in ("input", "hidden")

    def refusals(self, module: nn.Module, axis: int) -> Iterator[Violation]:
        """Yield the reasons why this module's weight cannot be split along ``axis``."""
        if self.role(axis) is None:
            known = [f"axis={position} ({part.role})" for position, part in enumerate(self.axes) if part]
            what = f"is a kernel axis of {self.name}" if axis >= len(self.axes) else f"of {self.name} cannot be split"
            yield Violation(f"axis {axis} of '{self.weight}' {what}", f"use {' or '.join(known)}")
        if self.sums_over(axis) and self.without_bias is None and parameters_of(module).get("bias") is not None:
            yield Violation(
                f"{self.name} adds its bias on every rank, and its layer type gives no forward without it",
                "register_layer(..., LayerType(..., without_bias=lambda layer, x: ...))",
            )
        if getattr(module, "max_norm", None) is not None:
            yield Violation(
                f"{self.name} with max_norm={module.max_norm} rescales rows by their norm while it runs",
                "only max_norm=None can be split",
            )
        if getattr(module, "scale_grad_by_freq", False) and self.role(axis) == "vocabulary":
            yield Violation(
                f"{self.name} with scale_grad_by_freq=True counts the ids of all rows",
                f"use axis={self.axis_of('output')}",
            )


def layer_type_of(module: nn.Module) -> LayerType | None:
    """Return the type of a module; None if its forward is unknown."""
    cls: Any = type(module)
    same = vars(cls).get("slapo_same_as", cls)  # its own way to compute what that class does
    kind = _BY_FORWARD.get(same.forward)
    if kind is None and cls.__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx"):
        return CONV1D  # transformers' own, recognized by name so that transformers is not needed
    if kind is None:
        kind = _type_below(cls)
    return _of_groups(kind) if kind is not None and getattr(module, "groups", 1) != 1 else kind


class SubclassType(LayerType):
    """Describe a subclass whose forward calls its base class's by ``super()``.

    The subclass may change the result, reading size attributes for that: they stay.
    """


@functools.lru_cache(maxsize=1024)
def _type_below(cls: Any) -> SubclassType | None:
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        known = _BY_FORWARD.get(forward)
        if known is not None and base.__module__.startswith("torch.nn."):
            own = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
            return SubclassType(**{**own, "without_bias": None, "is_fresh": False})
        if forward is not None and not _calls_base(forward):
            return None
    return None


def _calls_base(forward: Any) -> bool:
    function = inspect.unwrap(forward)
    code = function.__code__ if isinstance(function, FunctionType) else None
    return code is not None and "__class__" in code.co_freevars and "forward" in code.co_names


@functools.lru_cache(maxsize=64)
def _of_groups(kind: LayerType) -> LayerType:
    """Return the type of a convolution with groups of channels."""
    channels = Axis("channel", "out_channels", ("in_channels", "groups"))
    return LayerType(f"{kind.name} with groups", (channels, None), kind.feature_axis, together=("weight", "bias"))


def register_layer(layer_class: type[nn.Module], layer_type: LayerType) -> None:
    """Register the type of a class of layers for ``shard`` and ``sync``.

    To be called where the class is defined, or imported, so that every process that holds such a layer has done so.

    Args:
        layer_class: with a forward of its own.
        layer_type: what its forward does with its weight.

    Raises:
        ArgumentError: the class has no forward of its own, or one that is registered with another type; or the type
            has a vocabulary, for which only nn.Embedding's own forward knows what to do with the ids of other ranks.
    """
    known = _BY_FORWARD.get(layer_class.forward)
    if layer_class.forward is nn.Module.forward or known not in (None, layer_type):
        what = "has no forward" if known is None else f"runs the forward of {known.name}, which is registered already"
        raise ArgumentError(
            f"{layer_class.__name__} {what}",
            hint="register a class that has a forward of its own, and register it once",
        )
    if layer_type.axis_of("vocabulary") is not None:
        raise ArgumentError(
            f"{layer_type.name} has a vocabulary, which only nn.Embedding can split", hint="split its output axis"
        )
    _BY_FORWARD[layer_class.forward] = layer_type


def partial_axis(kind: LayerType) -> int | None:
    """Return the weight's axis whose split makes the output a partial sum."""
    axes = [kind.axis_of(role) for role in ("vocabulary", "input", "hidden")]
    return next((axis for axis in axes if axis is not None), None)


def reads_weights_itself(module: nn.Module, child: nn.Module) -> bool:
    """Return whether ``module`` is nn.MultiheadAttention, and ``child`` its projection or itself."""
    is_attention = getattr(type(module), "forward", None) is nn.MultiheadAttention.forward
    return is_attention and (child is module or child is children_of(module).get("out_proj"))


# -- forwards with the bias left out; with the originals' argument names -------------------------------


@fresh
def _linear(module: Any, input: Tensor) -> Tensor:
    return F.linear(input, module.weight)


@fresh
def _convolution(module: Any, input: Tensor) -> Tensor:
    return convolution(module, input)


@fresh
def _conv1d(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight


BATCH_NORM = LayerType(
    "nn.BatchNorm",
    (Axis("channel", "num_features"),),
    feature_axis=1,
    together=("weight", "bias", "running_mean", "running_var"),
)
LINEAR = LayerType(
    "nn.Linear", (Axis("output", "out_features"), Axis("input", "in_features")), without_bias=_linear, is_fresh=True
)
EMBEDDING = LayerType(
    "nn.Embedding", (Axis("vocabulary", "num_embeddings"), Axis("output", "embedding_dim")), is_fresh=True
)
CONV1D = LayerType(
    "transformers' Conv1D", (Axis("input", "nx"), Axis("output", "nf")), without_bias=_conv1d, is_fresh=True
)


def _convolution_kind(name: str, kernel_axes: int) -> LayerType:
    axes = (Axis("output", "out_channels"), Axis("input", "in_channels"))
    return LayerType(name, axes, feature_axis=-1 - kernel_axes, without_bias=_convolution, is_fresh=True)


_BY_FORWARD: dict[Callable[..., Any], LayerType] = {
    nn.Linear.forward: LINEAR,
    nn.Embedding.forward: EMBEDDING,
    nn.Conv1d.forward: _convolution_kind("nn.Conv1d", 1),
    nn.Conv2d.forward: _convolution_kind("nn.Conv2d", 2),
    nn.Conv3d.forward: _convolution_kind("nn.Conv3d", 3),
    nn.BatchNorm1d.forward: BATCH_NORM,  # and that of BatchNorm2d and BatchNorm3d
}
