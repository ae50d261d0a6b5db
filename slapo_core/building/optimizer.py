"""Making the optimiser, and making sure that it trains the engine's parameters and no others."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.building.optimizer_probe import probe, probe_separately
from slapo_core.errors import OptimizerError
from slapo_core.ranks.facts import RankFact, describe
from slapo_core.ranks.world import World

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["make_optimizer", "same_groups"]

_SAME_GROUPS = "let the factory make the same groups with the same settings on every rank, empty ones too"
_CALL = "build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))"


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    factory: Callable[[list[torch.nn.Parameter]], Any] | None,
    originals: Mapping[int, str],
    split: Mapping[int, Sequence[int]],
    *,
    is_part: bool = False,
) -> torch.optim.Optimizer | None:
    """Call the factory with the engine's parameters, and check what it made.

    Args:
        parameters: those to train, each once, by name.
        factory: the user's; None makes none.
        originals: tensors that it must not take, by their identity: what to call them.
        split: the axes along which parameters are split over running ranks, by the parameters' identity.
        is_part: whether other ranks train other parameters of the same model. Where this one has none, the optimiser
            has the groups that the factory makes of any, all of them empty.

    Raises:
        OptimizerError: it made something else, left out parameters that need training, took foreign ones, or makes of
            a piece of a parameter something else than that piece of what it makes of the whole.
    """
    if factory is None:
        return None
    optimizer = factory(list(parameters.values())) if parameters or not is_part else _without_parameters(factory)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"the optimizer factory must return a torch.optim.Optimizer (got {type(optimizer).__name__})", hint=_CALL
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {id(parameter) for parameter in parameters.values()}
    foreign = [parameter for parameter in held if id(parameter) not in own]
    if foreign:
        of_stages = is_part and any(parameter.is_meta for parameter in foreign)
        raise OptimizerError(
            f"the optimiser holds {len(foreign)} parameters that are not the engine's: "
            + ", ".join(_names_of(originals, foreign)),
            hint="leave out what only other ranks hold: [p for name, p in model.named_parameters() if not p.is_meta]"
            if of_stages
            else f"use the parameters that the factory is given: {_CALL}",
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
    if is_part:
        _require_separable(optimizer)
    return optimizer


def same_groups(world: World, mesh: Mesh | None, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimisers of pipeline stages whose groups do not correspond: their state could not be saved as one.

    Args:
        world: the ranks, while ``build`` goes on.
        mesh: of the schedule.
        optimizer: this rank's.

    Raises:
        RankMismatchError: on every rank.
    """
    facts = list(_group_facts(optimizer))
    with contextlib.nullcontext(world) if world.is_open else World(mesh) as ranks:
        ranks.agree(facts, hint=_SAME_GROUPS)


def _group_facts(optimizer: torch.optim.Optimizer) -> Iterator[RankFact]:
    kind = type(optimizer).__name__
    yield RankFact("the optimiser that the factory made", kind)
    yield RankFact(f"the number of groups of parameters of {kind}", str(len(optimizer.param_groups)))
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                plain = value.item() if isinstance(value, torch.Tensor) and not value.dim() else value
                yield RankFact(f"'{key}' of group {number} of {kind}", describe(plain))


def _without_parameters(factory: Callable[[list[torch.nn.Parameter]], Any]) -> Any:
    """What the factory makes, with nothing in its groups: no optimiser can be made of no parameters."""
    nothing = torch.nn.Parameter(torch.empty(0, 0))
    optimizer = factory([nothing])
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one is not nothing]
    return optimizer


def _require_separable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimiser that needs all parameters at once, where each pipeline stage has only its own."""
    kind = type(optimizer).__name__
    axes = {
        (number, parameter.dim())
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    finding = probe_separately(optimizer, sorted(axes))
    if finding.reason is not None:
        raise OptimizerError(
            f"{kind} cannot train parameters that pipeline stages divide among them: {finding.reason}",
            hint="use an optimiser that treats parameters one by one (SGD, AdamW), or a mesh without 'pp'",
        )
    if finding.unknown is not None:
        warnings.warn(
            f"whether {kind} treats parameters one by one, as it must where pipeline stages divide them among them, "
            f"could not be tried: {finding.unknown}",
            stacklevel=10,
        )


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
            hint="use an optimiser that treats elements one by one (SGD, AdamW), or let nothing split them: "
            'mesh={"dp": ...}, and a runtime that keeps them whole',
        )
    if finding.unknown is not None:
        warnings.warn(
            f"whether {kind} treats the elements of a parameter one by one, as it must where parameters are split "
            f"over ranks ('{name}'), could not be tried: {finding.unknown}",
            stacklevel=10,
        )


def _names_of(originals: Mapping[int, str], foreign: list[torch.Tensor]) -> list[str]:
    return [
        originals[id(tensor)] if id(tensor) in originals else f"one of shape {tuple(tensor.shape)}"
        for tensor in foreign
    ]
