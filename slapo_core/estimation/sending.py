"""What goes to the process that plays a rank: shapes instead of values, except integers, which models decide by."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slapo_core.errors import SerializationError
from slapo_core.estimation.values import is_followed

__all__ = ["require_sendable", "sendable_batch", "stripped"]


def stripped(modules: Iterable[nn.Module]) -> None:
    """Put tensors on the meta device in the place of parameters and buffers; ties stay, also between the modules.

    Args:
        modules: copies, whose tensors may share memory with others; not changed in place.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the original, so that its id stays its own
    for root in modules:
        for module in root.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or nn.parameter.is_lazy(tensor):
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = (tensor, _without_values(tensor))
                    table[name] = made[id(tensor)][1]  # type: ignore[assignment]


def sendable_batch(batch: Any) -> Any:
    """The batch with tensors on the meta device, except small integer ones."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch  # whatever the tokenizer makes
    return tree_map_only(torch.Tensor, _without_values, batch)


def require_sendable(name: str, value: Any, instead: str) -> None:
    """
    Args:
        name: of the argument.
        value: of the argument.
        instead: the corrected argument.

    Raises:
        SerializationError: pickle refuses the value, so that it cannot be given to another process.
    """
    try:
        pickle.dumps(value)
    except Exception as error:  # pickle raises several kinds, and whatever __reduce__ raises
        raise SerializationError(
            f"estimate plays each kind of rank in a process of its own, but {name} cannot be sent there: {error}",
            hint=f"{instead}, of functions at the top level of a module (no lambda, nothing inside of a function)",
        ) from error


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    if is_followed(tensor):
        return tensor.detach().cpu()
    with torch.no_grad():
        strided = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        made = (
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if strided
            else tensor.detach().to("meta")
        )
    if not isinstance(tensor, nn.Parameter):
        return made.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(made, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter
