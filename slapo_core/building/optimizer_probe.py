"""Does an optimiser treat the elements of a tensor one by one? Tried on small tensors, before it is given pieces.

On a rank that holds a piece of a parameter, the optimiser sees the piece only. Adam makes of it what it would have made
of the whole; an optimiser whose update of an element depends on other elements (a norm, statistics of rows and columns,
an orthogonalised matrix, an estimate over all parameters) makes something else, on every mesh another.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Finding", "probe", "probe_separately"]

_KNOWN = re.compile(r"lbfgs|shampoo|soap|galore", re.IGNORECASE)  # whose first steps may not show it, or need a closure
_ALL_AT_ONCE = re.compile(r"lbfgs", re.IGNORECASE)  # it needs a closure
_EDGE = 4  # elements along an axis of the small tensors; even, so that halves are alike
_STEPS = 3
_ALLOWED = 1e-6  # of the largest update, in float64


@dataclass(frozen=True)
class Finding:
    """What came of trying an optimiser.

    Args:
        reason: why it must not be given pieces; None if nothing speaks against it.
        unknown: why it could not be tried; None if it could.
    """

    reason: str | None = None
    unknown: str | None = None


def probe(optimizer: torch.optim.Optimizer, splits: Iterable[tuple[int, int, int]]) -> Finding:
    """Take some steps with a whole tensor and with its two halves, each beside a tensor that both ranks hold.

    The optimiser itself, its parameters and all random states stay as they are.

    Args:
        optimizer: as the user's factory made it.
        splits: ``(group, axes, axis)`` of each parameter that is split: the number of its group, how many axes it has,
            and the one that is split.
    """
    kind = type(optimizer)
    if any(_KNOWN.search(cls.__name__) for cls in kind.__mro__):
        return Finding(reason="it computes an element's update from other elements too")
    for group, axes, axis in dict.fromkeys(splits):
        try:
            with _forked(optimizer, group):
                finding = _try(optimizer, group, axes, axis)
        except Exception as error:  # noqa: BLE001 - somebody else's code on tensors that it was not made for: told
            return Finding(unknown=f"{type(error).__name__}: {error}")
        if finding != Finding():
            return finding
    return Finding()


def probe_separately(optimizer: torch.optim.Optimizer, shapes: Iterable[tuple[int, int]]) -> Finding:
    """Take some steps with two tensors at once, and with each alone, as ranks that hold one of them would.

    Args:
        optimizer: as for :func:`probe`.
        shapes: ``(group, axes)`` of parameters: the number of the group, and how many axes they have.
    """
    if any(_ALL_AT_ONCE.search(cls.__name__) for cls in type(optimizer).__mro__):
        return Finding(reason="it computes the update of a parameter from the others too")
    for group, axes in dict.fromkeys(shapes):
        try:
            with _forked(optimizer, group):
                finding = _try_separately(optimizer, group, axes)
        except Exception as error:  # noqa: BLE001 - somebody else's code on tensors that it was not made for: told
            return Finding(unknown=f"{type(error).__name__}: {error}")
        if finding != Finding():
            return finding
    return Finding()


def _try_separately(optimizer: torch.optim.Optimizer, group: int, axes: int) -> Finding:
    generator = torch.Generator().manual_seed(0)
    device = optimizer.param_groups[group]["params"][0].device
    starts = [torch.randn((_EDGE,) * axes, generator=generator, dtype=torch.float64) for _ in range(2)]
    gradients = [
        [torch.randn((_EDGE,) * axes, generator=generator, dtype=torch.float64) * (1 + 9 * step) for _ in starts]
        for step in range(_STEPS)
    ]

    def run(chosen: Sequence[int]) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(starts[number].clone().to(device)) for number in chosen]
        twin = _twin(optimizer, group, parameters)
        for one_step in gradients:
            for number, parameter in zip(chosen, parameters, strict=True):
                parameter.grad = one_step[number].clone().to(device)
            type(optimizer).step(twin)
        return [parameter.detach().cpu() for parameter in parameters]

    before = torch.get_rng_state()
    both = run((0, 1))
    if not torch.equal(before, torch.get_rng_state()):
        return Finding()  # it adds noise: two runs differ in any case
    if torch.equal(both[0], starts[0]):
        return Finding(unknown="its step() does not change a parameter that was put into its groups")
    for number in range(2):
        if _differ(both[number] - starts[number], run((number,))[0] - starts[number]):
            return Finding("its update of one parameter depends on the others, which other ranks hold")
    return Finding()


def _forked(optimizer: torch.optim.Optimizer, group: int) -> AbstractContextManager[None]:
    device = optimizer.param_groups[group]["params"][0].device
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _try(optimizer: torch.optim.Optimizer, group: int, axes: int, axis: int) -> Finding:
    generator = torch.Generator().manual_seed(0)
    device = optimizer.param_groups[group]["params"][0].device

    def values() -> torch.Tensor:
        return torch.randn((_EDGE,) * axes, generator=generator, dtype=torch.float64)

    split, common = values(), values()
    gradients = [(values() * (1 + step), values()) for step in range(_STEPS)]

    def run(part: slice | None) -> tuple[list[torch.Tensor], Any]:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if part is None else tensor.narrow(axis, part.start, part.stop - part.start)

        parameters = [torch.nn.Parameter(t.contiguous().to(device)) for t in (own(split).clone(), common.clone())]
        twin = _twin(optimizer, group, parameters)
        for first, second in gradients:
            parameters[0].grad = own(first).contiguous().clone().to(device)
            parameters[1].grad = second.clone().to(device)
            type(optimizer).step(twin)
        return [parameter.detach().cpu() for parameter in parameters], twin

    before = torch.get_rng_state()
    whole, twin = run(None)
    if not torch.equal(before, torch.get_rng_state()):
        return Finding()  # it adds noise: two runs differ in any case
    if torch.equal(whole[0], split):
        return Finding(unknown="its step() does not change a parameter that was put into its groups")
    low, high = run(slice(0, _EDGE // 2))[0], run(slice(_EDGE // 2, _EDGE))[0]
    if _differ(whole[0] - split, torch.cat([low[0], high[0]], dim=axis) - split):
        return Finding("its update of a tensor's half is not half of its update of the tensor")
    if _differ(whole[1] - common, low[1] - common) or _differ(low[1] - common, high[1] - common):
        return Finding("its update of one tensor depends on the others, of which each rank has other pieces")
    return Finding(_factored(twin))


def _twin(optimizer: torch.optim.Optimizer, group: int, parameters: Sequence[torch.nn.Parameter]) -> Any:
    """The same optimiser with the settings of a group, without state, over other parameters."""
    twin: Any = object.__new__(type(optimizer))
    hooks = {name: OrderedDict[Any, Any]() for name in vars(optimizer) if name.endswith("_hooks")}
    left_out = ("step", "state", "param_groups", *hooks)
    attributes = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    memo = {id(one): one for one in (optimizer, *(p for group in optimizer.param_groups for p in group["params"]))}
    twin.__dict__.update(copy.deepcopy(attributes, memo), **hooks)  # its steps leave no trace in the user's object
    settings = {key: copy.deepcopy(value) for key, value in optimizer.param_groups[group].items() if key != "params"}
    if "lr" in settings and not float(settings["lr"] or 0):
        settings["lr"] = 0.01  # of a warm-up, which starts from none
    twin.state = defaultdict(dict)
    twin.param_groups = [{**settings, "params": list(parameters)}]
    return twin


def _factored(twin: Any) -> str | None:
    for parameter, state in twin.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                return (
                    f"it keeps '{key}' of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}, whose place in the full tensor is not known"
                )
    return None


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) > _ALLOWED * float(one.abs().max()) + 1e-14
