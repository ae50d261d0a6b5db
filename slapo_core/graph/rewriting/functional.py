"""Modules of ``torch.nn`` as functions of their input and their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from slapo_core.graph.leaves import is_changed

__all__ = ["BY_KEYWORD", "FunctionalForm", "functional_form"]


@dataclass(frozen=True)
class FunctionalForm:
    """What calls of a module compute.

    Args:
        function: takes the input, then what the rest names, by position.
        tensors: names of parameters and buffers.
        constants: names of plain attributes that stay what they are once the module is made.
        reads: names of plain attributes that change while a model is used, such as the mode.
        order: of the arguments behind the input, by name.
        draws: whether it may draw random numbers.
    """

    function: Callable[..., Any]
    tensors: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    draws: bool = False


def _form(function: Callable[..., Any], order: str = "", *, reads: str = "", draws: bool = False) -> FunctionalForm:
    names = tuple(order.split())
    tensors = tuple(name for name in names if name in ("weight", "bias"))
    live = tuple(reads.split())
    constants = tuple(name for name in names if name not in tensors and name not in live)
    return FunctionalForm(function, tensors, constants, live, names, draws)


_FORMS: dict[type[nn.Module], FunctionalForm] = {
    nn.Linear: _form(F.linear, "weight bias"),
    nn.LayerNorm: _form(F.layer_norm, "normalized_shape weight bias eps"),
    nn.RMSNorm: _form(F.rms_norm, "normalized_shape weight eps"),
    nn.GroupNorm: _form(F.group_norm, "num_groups weight bias eps"),
    nn.Embedding: _form(F.embedding, "weight padding_idx max_norm norm_type scale_grad_by_freq sparse"),
    nn.Conv1d: _form(F.conv1d, "weight bias stride padding dilation groups"),
    nn.Conv2d: _form(F.conv2d, "weight bias stride padding dilation groups"),
    nn.Conv3d: _form(F.conv3d, "weight bias stride padding dilation groups"),
    nn.Dropout: _form(F.dropout, "p training inplace", reads="p training", draws=True),
    nn.GELU: _form(F.gelu, "approximate"),
    nn.ReLU: _form(F.relu, "inplace"),
    nn.SiLU: _form(F.silu, "inplace"),
    nn.Mish: _form(F.mish, "inplace"),
    nn.LeakyReLU: _form(F.leaky_relu, "negative_slope inplace"),
    nn.Softplus: _form(F.softplus, "beta threshold"),
    nn.Softmax: _form(F.softmax, "dim"),
    nn.LogSoftmax: _form(F.log_softmax, "dim"),
    nn.Tanh: _form(torch.tanh),
    nn.Sigmoid: _form(torch.sigmoid),
}
BY_KEYWORD = (F.gelu, F.softmax, F.log_softmax)
"""Their arguments behind the input go by keyword."""


def functional_form(module: nn.Module, node: fx.Node, *, hooked: bool = False) -> FunctionalForm | None:
    """How a call of ``module`` computes the same without it; None where that is not known for certain.

    Args:
        module: what is called.
        node: the call.
        hooked: whether to answer for one that is hooked, too: what it computes, not what happens around it.
    """
    form = _FORMS.get(type(module))
    if form is None or (not hooked and is_changed(module)):
        return None
    is_plain_call = (len(node.args) == 1 and not node.kwargs) or (not node.args and tuple(node.kwargs) == ("input",))
    if not is_plain_call:
        return None
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return None  # it writes to its weight
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.padding_mode != "zeros":
        return None
    if isinstance(module, nn.Softmax | nn.LogSoftmax) and module.dim is None:
        return None
    return form
