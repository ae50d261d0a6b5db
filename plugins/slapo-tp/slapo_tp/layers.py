"""The kinds of modules whose forward this plugin knows: what each axis of their weight means.

A module belongs to a kind only when it runs the kind's own forward: a subclass with another forward is nobody's kind,
and then only its tensors are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from slapo_core import Violation
from slapo_core.spec.edit import Forward
from slapo_tp.forwards import fresh

__all__ = ["EMBEDDING", "LINEAR", "Axis", "LayerType", "layer_type_of", "partial_axis", "reads_weights_itself"]

Role = Literal["output", "input", "vocabulary", "channel"]


@dataclass(frozen=True)
class Axis:
    """What one axis of a weight holds.

    Args:
        role: ``"output"`` features, ``"input"`` features, the rows of a ``"vocabulary"``, or the ``"channel"``s of a
            module that computes each of them by itself: features of its input and of its output.
        attribute: the module's attribute that gives its size, e.g. ``"out_features"``.
    """

    role: Role
    attribute: str


@dataclass(frozen=True)
class LayerType:
    """A kind of module with parameters ``weight`` and, maybe, ``bias`` (one element for each output feature).

    Args:
        name: as users call it, e.g. ``"nn.Linear"``.
        axes: the leading axes of the weight; those after them cannot be split.
        feature_axis: the axis of the module's output that holds the output features, counted from the end; from the
            front where modules of the kind take any number of axes behind it.
        without_bias: its forward with the bias left out; None for a kind that has no bias.
        together: the parameters and buffers that can only be split by one step, such as those of a norm.
    """

    name: str
    axes: tuple[Axis, ...]
    feature_axis: int = -1
    without_bias: Forward | None = None
    together: tuple[str, ...] = ()

    def role(self, axis: int) -> Role | None:
        return self.axes[axis].role if axis < len(self.axes) else None

    def axis_of(self, role: Role) -> int | None:
        return next((position for position, axis in enumerate(self.axes) if axis.role == role), None)

    def refusals(self, module: nn.Module, axis: int) -> Iterator[Violation]:
        """Why this module's weight cannot be split along ``axis``."""
        if axis >= len(self.axes):
            splittable = " or ".join(f"axis={position} ({part.role})" for position, part in enumerate(self.axes))
            yield Violation(f"axis {axis} of 'weight' is a kernel axis of {self.name}", f"use {splittable}")
        if getattr(module, "groups", 1) != 1:
            yield Violation(f"{self.name} with groups={module.groups} cannot be split", "only groups=1 can")
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
    """The kind of a module; None if its forward is not one that this plugin knows."""
    cls = type(module)
    same = vars(cls).get("slapo_same_as", cls)  # its own way to compute what that class does
    kind = _BY_FORWARD.get(same.forward)
    if kind is None and cls.__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx"):
        return CONV1D  # transformers' own, recognised by name so that transformers is not needed
    return kind


def partial_axis(kind: LayerType) -> int | None:
    """The axis of the weight whose split makes the output a partial sum."""
    vocabulary = kind.axis_of("vocabulary")
    return kind.axis_of("input") if vocabulary is None else vocabulary


def reads_weights_itself(module: nn.Module, child: nn.Module) -> bool:
    """Whether ``module`` is nn.MultiheadAttention, which does not call ``child``, its output projection (or is it)."""
    is_attention = getattr(type(module), "forward", None) is nn.MultiheadAttention.forward
    return is_attention and (child is module or child is module._modules.get("out_proj"))


# -- forwards with the bias left out; argument names are those of the originals -------------------------------


@fresh
def _linear(module: Any, input: Tensor) -> Tensor:
    return F.linear(input, module.weight)


@fresh
def _convolution(module: Any, input: Tensor) -> Tensor:
    return module._conv_forward(input, module.weight, None)


@fresh
def _conv1d(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight


BATCH_NORM = LayerType(
    "nn.BatchNorm",
    (Axis("channel", "num_features"),),
    feature_axis=1,
    together=("weight", "bias", "running_mean", "running_var"),
)
LINEAR = LayerType("nn.Linear", (Axis("output", "out_features"), Axis("input", "in_features")), without_bias=_linear)
EMBEDDING = LayerType("nn.Embedding", (Axis("vocabulary", "num_embeddings"), Axis("output", "embedding_dim")))
CONV1D = LayerType("transformers' Conv1D", (Axis("input", "nx"), Axis("output", "nf")), without_bias=_conv1d)


def _convolution_kind(name: str, kernel_axes: int) -> LayerType:
    axes = (Axis("output", "out_channels"), Axis("input", "in_channels"))
    return LayerType(name, axes, feature_axis=-1 - kernel_axes, without_bias=_convolution)


_BY_FORWARD: dict[Callable[..., Any], LayerType] = {
    nn.Linear.forward: LINEAR,
    nn.Embedding.forward: EMBEDDING,
    nn.Conv1d.forward: _convolution_kind("nn.Conv1d", 1),
    nn.Conv2d.forward: _convolution_kind("nn.Conv2d", 2),
    nn.Conv3d.forward: _convolution_kind("nn.Conv3d", 3),
    nn.BatchNorm1d.forward: BATCH_NORM,  # and that of BatchNorm2d and BatchNorm3d
}
