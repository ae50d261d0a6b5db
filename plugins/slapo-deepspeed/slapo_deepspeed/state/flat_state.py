"""The state of an optimizer that steps flat tensors, made of the states of the parameters that lie in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError

if TYPE_CHECKING:
    from slapo_core.spec.flat_shards import Place

__all__ = ["flat_states"]

_SHOWN = 4  # names in a message
_NUMBERS = ("step", "mu_product", "eta", "mu")  # of torch's optimizers, also where a parameter is a single number


def flat_states(
    optimizer: torch.optim.Optimizer,
    places: Mapping[int, Place],
    parameters: Iterable[torch.Tensor],
    states: Mapping[torch.Tensor, Mapping[str, Any]],
    names: Mapping[int, str],
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """For each flat tensor, its new state; an empty one where no parameter in it has any. Nothing is changed.

    Args:
        optimizer: that steps them.
        places: of parameters in flat tensors, by identity.
        parameters: all of the optimizer.
        states: of those that have one; each is read once, one after the other.
        names: of parameters, for messages.

    Raises:
        BuildError: parameters in one flat tensor are to have different numbers of steps, or tensors of another shape.
    """
    by_flat: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for parameter in parameters:
        place = places.get(id(parameter))
        if place is not None:
            by_flat.setdefault(id(place.flat), (place.flat, []))[1].append(parameter)
    return [
        (flat, _state_of(flat, optimizer.state.get(flat, {}), inside, places, states, names))
        for flat, inside in by_flat.values()
    ]


def _state_of(
    flat: torch.Tensor,
    before: Mapping[str, Any],
    parameters: list[torch.Tensor],
    places: Mapping[int, Place],
    states: Mapping[torch.Tensor, Mapping[str, Any]],
    names: Mapping[int, str],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    said: dict[str, str] = {}  # which parameter gave a value that all of them share
    lacking = [names[id(one)] for one in parameters if one not in states]
    if len(lacking) == len(parameters):
        return {}
    for parameter in parameters:
        place, name = places[id(parameter)], names[id(parameter)]
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and (value.dim() or (not place.shape and key not in _NUMBERS)):
                if tuple(value.shape) != place.shape:
                    raise BuildError(
                        f"the checkpoint has '{key}' of shape {tuple(value.shape)} for '{name}' of shape "
                        f"{place.shape}: DeepSpeed keeps only what has the shape of the parameter"
                    )
                if not isinstance(found.get(key), torch.Tensor):
                    found[key] = torch.zeros_like(flat, requires_grad=False)
                place.of(found[key]).copy_(place.part(value))
            elif key not in said:
                said[key] = name
                if not (value is None and isinstance(found.get(key), torch.Tensor)):
                    found[key] = _placed(value, before.get(key))
            elif value is not None and not _equal(found.get(key), value):
                raise BuildError(
                    f"the checkpoint has '{key}' = {_shown(found[key])} for '{said[key]}' and {_shown(value)} for "
                    f"'{name}', and DeepSpeed keeps one number for both",
                    hint="put them into groups of their own in the optimizer's factory, or use ZeRO 0",
                )
    if lacking:
        shown = ", ".join(lacking[:_SHOWN]) + (f" and {len(lacking) - _SHOWN} more" if lacking[_SHOWN:] else "")
        warnings.warn(
            f"the checkpoint has no state of the optimizer for {shown}, which were not trained before: DeepSpeed gives "
            "them zeros, and the number of steps of the others",
            stacklevel=2,
        )
    return found


def _placed(value: Any, before: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(before.device, before.dtype) if isinstance(before, torch.Tensor) else value.clone()
    return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and one.dim():
        return False
    return one is not None and float(one) == float(other)


def _shown(value: Any) -> str:
    return str(value.item() if isinstance(value, torch.Tensor) and not value.dim() else value)
