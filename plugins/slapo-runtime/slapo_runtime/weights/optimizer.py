"""Make the optimizer, and check that it trains exactly the engine's parameters."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_core.errors import OptimizerError
from slapo_core.internals import describe
from slapo_runtime.correspondence.storage import is_distributed
from slapo_runtime.ranks.facts import RankFact
from slapo_runtime.ranks.world import World
from slapo_runtime.weights.parameter_groups import GroupedFactory

if TYPE_CHECKING:
    from slapo_core.layout import Mesh


ELEMENTWISE = {
    "torch": ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adagrad"],
    "deepspeed": ["FusedAdam", "FusedLion", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"],
    "apex": ["FusedAdam", "FusedSGD", "FusedAdagrad"],
    "transformer_engine": ["FusedAdam", "FusedSGD"],
}
"""Optimizers, by package, whose update of an element depends on that element alone; exact classes, not subclasses."""

BY_PARAMETER = {"torch": ("Adafactor", "Muon"), "transformers": ("Adafactor",)}
"""Optimizers, by package, whose update of a parameter depends on that full parameter alone."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SAME_GROUPS = "let the factory make the same groups with the same settings on every rank, empty ones too"
_CALL = "build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))"


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter],
    factory: Callable[[list[torch.nn.Parameter]], Any] | None,
    originals: Mapping[int, str],
    split: Mapping[int, Sequence[int]],
    *,
    is_part: bool = False,
    elementwise: bool = False,
    by_parameter: Callable[[type], bool] = lambda kind: False,
    gathers: Callable[[torch.optim.Optimizer], object] | None = None,
) -> torch.optim.Optimizer | None:
    """Call the factory with the engine's parameters, and check its optimizer.

    Args:
        parameters: of the engine, each once, by name.
        factory: the user's; None makes none.
        originals: foreign tensors, by identity, with their names for messages.
        split: the axes along which parameters are split over running ranks, by the parameters' identity.
        is_part: whether other ranks train other parameters of the same model. A rank without parameters gets an
            optimizer with the factory's groups, all empty.
        elementwise: whether the user declares the optimizer element-wise.
        by_parameter: whether a plugin declares that the update of a parameter depends on that full parameter alone.
        gathers: makes the steps of such an optimizer gather split parameters; None if the runtime cannot do so.

    Raises:
        OptimizerError: the factory made something else, or an optimizer whose ``step`` requires a closure, that omits
            trained parameters, has foreign ones, or is not known to be element-wise where a parameter is split, or
            where other ranks train other parameters.
    """
    if factory is None:
        return None
    makes_empty = is_part and not parameters and not isinstance(factory, GroupedFactory)  # which has empty groups
    optimizer = _without_parameters(factory) if makes_empty else factory(list(parameters.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"the optimizer factory must return a torch.optim.Optimizer (got {type(optimizer).__name__})", hint=_CALL
        )
    _refuse_closure(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {id(parameter) for parameter in parameters.values()}
    foreign = [parameter for parameter in held if id(parameter) not in own]
    if foreign:
        of_stages = is_part and any(parameter.is_meta for parameter in foreign)
        raise OptimizerError(
            f"the optimizer holds {len(foreign)} parameters that are not the engine's: "
            + ", ".join(_names_of(originals, foreign)),
            hint="leave out the parameters of other ranks: [p for name, p in model.named_parameters() if not p.is_meta]"
            if of_stages
            else f"use the parameters that the factory is given: {_CALL}",
        )
    in_optimizer = {id(parameter) for parameter in held}
    left_out = [
        name for name, parameter in parameters.items() if parameter.requires_grad and id(parameter) not in in_optimizer
    ]
    if left_out:
        raise OptimizerError(
            f"the optimizer does not hold {len(left_out)} parameters that require a gradient: {', '.join(left_out)}",
            hint="give it all parameters of the factory's list, or freeze the others by requires_grad=False",
        )
    if not elementwise:
        _require_elementwise(optimizer, parameters, split, is_part=is_part, by_parameter=by_parameter, gathers=gathers)
    return optimizer


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose ``step`` requires a closure."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    required = [one.name for one in parameters if one.default is one.empty and one.kind in _POSITIONAL]
    if required:
        kind = type(optimizer).__name__
        raise OptimizerError(
            f"{kind}.step() requires {', '.join(map(repr, required))}, but a training step of an engine calls step() "
            "without arguments, once for each batch",
            hint=f"torch.optim.AdamW or another optimizer without a closure; {kind} in a loop of your own, without "
            "build(): optimizer.step(closure)",
        )


_LOST = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Relative size of updates lost to rounding, by type: at most half of the distance to the next number."""

_ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
"""Optimizers of torch whose update of an element is about as large as the learning rate."""


@torch.no_grad()
def lost_updates(optimizer: torch.optim.Optimizer) -> str | None:
    """Describe 16-bit parameters that lose updates to rounding.

    A sample of each parameter is examined: half of its elements must be too large for such an update to change them.

    Returns:
        the problem with hints; None for other optimizers, types and learning rates.
    """
    if type(optimizer).__name__ not in _ADAM or not type(optimizer).__module__.startswith("torch.optim"):
        return None
    lost = seen = 0
    kinds = set()
    rate = 0.0
    for group in optimizer.param_groups:
        rate = float(group.get("initial_lr", group["lr"]))
        for parameter in group["params"]:
            if parameter.dtype in _LOST and parameter.requires_grad and parameter.numel() and not parameter.is_meta:
                own = parameter.to_local() if is_distributed(parameter) else parameter
                some = own.detach().flatten()[:_SAMPLE].float().abs()
                lost += int((some * _LOST[parameter.dtype] > rate).sum()) * parameter.numel() // max(1, some.numel())
                seen += parameter.numel()
                kinds.add(str(parameter.dtype).removeprefix("torch."))
    if not rate or 2 * lost <= seen:
        return None
    return (
        f"{type(optimizer).__name__} steps parameters in {' and '.join(sorted(kinds))} with a learning rate of "
        f"{rate:g}: rounding loses updates of that size in {lost / seen:.0%} of their elements, which then never "
        "change. Keep the parameters in float32 (from_pretrained(..., dtype=torch.float32)), and compute under "
        'torch.autocast("cuda", torch.bfloat16) or fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype='
        'torch.bfloat16)); or use target="deepspeed" or "megatron" with bf16, which have main weights in float32; or '
        "an optimizer with stochastic rounding"
    )


def warn_of_lost_updates(optimizer: torch.optim.Optimizer | None, *, stacklevel: int) -> None:
    """Warn of :func:`lost_updates`, once for each optimizer, on the first process."""
    if optimizer is None or optimizer in _LOOKED_AT or (dist.is_initialized() and dist.get_rank() > 0):
        return
    _LOOKED_AT.add(optimizer)
    problem = lost_updates(optimizer)
    if problem is not None:
        warnings.warn(problem, stacklevel=stacklevel)


_LOOKED_AT: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_SAMPLE = 4096  # elements of each parameter


def same_groups(mesh: Mesh | None, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers of pipeline stages with different groups, whose states cannot be merged.

    Args:
        mesh: of the schedule.
        optimizer: this rank's.

    Raises:
        RankMismatchError: on every rank.
    """
    facts = list(_group_facts(optimizer))
    with World(mesh) as world:
        world.agree(facts, hint=_SAME_GROUPS)


def _group_facts(optimizer: torch.optim.Optimizer) -> Iterator[RankFact]:
    kind = type(optimizer).__name__
    yield RankFact("the optimizer that the factory made", kind)
    yield RankFact(f"the number of groups of parameters of {kind}", str(len(optimizer.param_groups)))
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                plain = value.item() if isinstance(value, torch.Tensor) and not value.dim() else value
                yield RankFact(f"'{key}' of group {number} of {kind}", describe(plain))


def _without_parameters(factory: Callable[[list[torch.nn.Parameter]], Any]) -> Any:
    """Make an optimizer with empty groups, by way of an empty parameter."""
    nothing = torch.nn.Parameter(torch.empty(0, 0))
    optimizer = factory([nothing])
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one is not nothing]
    return optimizer


def _require_elementwise(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    split: Mapping[int, Sequence[int]],
    *,
    is_part: bool,
    by_parameter: Callable[[type], bool],
    gathers: Callable[[torch.optim.Optimizer], object] | None,
) -> None:
    """Refuse an optimizer that is not element-wise for sharded parameters, or let it gather them."""
    kind, package = type(optimizer), type(optimizer).__module__.partition(".")[0]
    if kind.__name__ in ELEMENTWISE.get(package, ()):
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    name = next(
        (name for name, parameter in parameters.items() if id(parameter) in held and id(parameter) in split), None
    )
    if name is None and not is_part:
        return
    is_by_parameter = kind.__name__ in BY_PARAMETER.get(package, ()) or by_parameter(kind)
    if name is not None and is_by_parameter and gathers is not None:
        gathers(optimizer)
        return
    if name is not None:
        where, instead = f"'{name}' is split over ranks, and each updates its shard alone", 'mesh={"dp": ...}'
    elif not is_by_parameter:
        where, instead = "each pipeline stage updates its own parameters alone", "a mesh without 'pp'"
    else:
        return
    raise OptimizerError(
        f"{kind.__name__} is not known to be element-wise: {where}, which is right only if an element's update "
        "depends on that element's own gradients",
        hint="use an element-wise optimizer (SGD, AdamW), or keep the parameters together: "
        f"{instead}; if {kind.__name__} is element-wise, declare it: build(..., elementwise=True)",
    )


def _names_of(originals: Mapping[int, str], foreign: list[torch.Tensor]) -> list[str]:
    return [
        originals[id(tensor)] if id(tensor) in originals else f"one of shape {tuple(tensor.shape)}"
        for tensor in foreign
    ]
