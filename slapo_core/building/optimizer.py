"""Making the optimiser, and making sure that it trains the engine's parameters and no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slapo_core.building.optimizer_probe import probe
from slapo_core.errors import OptimizerError

__all__ = ["make_optimizer"]

_CALL = "build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))"


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    factory: Callable[[list[torch.nn.Parameter]], Any] | None,
    originals: Mapping[int, str],
    split: Mapping[int, Sequence[int]],
) -> torch.optim.Optimizer | None:
    """Call the factory with the engine's parameters, and check what it made.

    Args:
        parameters: those to train, each once, by name.
        factory: the user's; None makes none.
        originals: the untouched model's names of its tensors, by the tensors' identity.
        split: the axes along which parameters are split over running ranks, by the parameters' identity.

    Raises:
        OptimizerError: it made something else, left out parameters that need training, took foreign ones, or makes of
            a piece of a parameter something else than that piece of what it makes of the whole.
    """
    if factory is None:
        return None
    optimizer = factory(list(parameters.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"the optimizer factory must return a torch.optim.Optimizer (got {type(optimizer).__name__})", hint=_CALL
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {id(parameter) for parameter in parameters.values()}
    foreign = [parameter for parameter in held if id(parameter) not in own]
    if foreign:
        raise OptimizerError(
            f"the optimiser holds {len(foreign)} parameters that are not the engine's: "
            + ", ".join(_names_of(originals, foreign)),
            hint=f"use the parameters that the factory is given: {_CALL}",
        )
    in_optimizer = {id(parameter) for parameter in held}
    left_out = [
        name for name, parameter in parameters.items() if parameter.requires_grad and id(parameter) not in in_optimizer
    ]
    if left_out:
        raise OptimizerError(
            f"the optimiser does not hold {len(left_out)} parameters that require a gradient: {', '.join(left_out)}",
            hint="give it all that the factory is given, or set requires_grad=False on those to freeze",
        )
    _require_elementwise(optimizer, parameters, split)
    return optimizer


def _require_elementwise(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], split: Mapping[int, Sequence[int]]
) -> None:
    kind = type(optimizer).__name__
    splits = [
        (number, parameter.dim(), axis)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        for axis in split.get(id(parameter), ())
    ]
    if not splits:
        return
    finding = probe(optimizer, splits)
    name = next(name for name, parameter in parameters.items() if id(parameter) in split)
    if finding.reason is not None:
        raise OptimizerError(
            f"{kind} cannot train parameters that are split over ranks, such as '{name}': {finding.reason}",
            hint="use an optimiser that treats elements one by one (SGD, AdamW), or a mesh that splits nothing: "
            'mesh={"dp": ...}',
        )
    if finding.unknown is not None:
        warnings.warn(
            f"whether {kind} treats the elements of a parameter one by one, as it must where parameters are split "
            f"over ranks ('{name}'), could not be tried: {finding.unknown}",
            stacklevel=10,
        )


def _names_of(originals: Mapping[int, str], foreign: list[torch.Tensor]) -> list[str]:
    return [
        f"'{originals[id(tensor)]}' of the untouched model"
        if id(tensor) in originals
        else f"one of shape {tuple(tensor.shape)}"
        for tensor in foreign
    ]
