"""Operations of each stage: one run of a copy of the model without values, counted up to each cut."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core.spec.accelerators import fork_rng
from slapo_core.tracing import FakeMode, copied_model
from slapo_pipeline.balance.flops import FlopCount

__all__ = ["flops_by_stage"]


def flops_by_stage(model: nn.Module, inputs: Mapping[str, Any], cuts: Sequence[str]) -> list[int]:
    """Of the forward between the ends of the calls of the modules that are named.

    Args:
        model: as it is now; a copy runs, which shares its parameters.
        inputs: arguments of its forward, by parameter; their values do not matter.
        cuts: paths, in the order in which the model calls them.

    Raises:
        Exception: whatever the model raises without values.
    """
    copied = copied_model(model)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    mode = FakeMode() if device.type != "meta" else None

    def without_values(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        return mode.from_tensor(leaf.detach()) if mode is not None else leaf.detach().to("meta")

    count = FlopCount()
    ends: list[int] = []
    for path in cuts:
        copied.get_submodule(path).register_forward_hook(lambda *_: ends.append(count.total))
    given = pytree.tree_map(without_values, dict(inputs))
    with mode or contextlib.nullcontext(), fork_rng(), torch.no_grad(), count:
        _call(copied, given)
    ends.append(count.total)
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    import inspect

    bound = inspect.signature(model.forward).bind_partial()
    bound.arguments.update(inputs)
    return model(*bound.args, **bound.kwargs)
