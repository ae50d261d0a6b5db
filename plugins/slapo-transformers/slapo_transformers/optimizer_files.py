"""The optimizer's file of a host: torch's form, with full tensors, numbered as in the reference model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slapo_core import OptimizerError, Schedule


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by names in torch's form, which the reference model's optimizer loads.

    Args:
        state: of :func:`slapo_core.optimizer_state_dict`; empty on ranks that do not write it.

    Returns:
        parameters by number, with ``param_names`` in each group.
    """
    if not state:
        return {}
    order = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: place for place, name in enumerate(order)}
    groups = [
        {**group, "params": [number[name] for name in group["params"]], "param_names": list(group["params"])}
        for group in state["param_groups"]
    ]
    return {**state, "state": {number[name]: values for name, values in state["state"].items()}, "param_groups": groups}


def named(state: Mapping[str, Any], sch: Schedule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a state in torch's form by names: of :func:`numbered`, or of the reference model's optimizer.

    Args:
        state: in torch's form; without ``param_names``, its groups are the optimizer's, in the same order.
        sch: the schedule.
        optimizer: to load it.

    Raises:
        OptimizerError: without ``param_names``, and with other groups than the optimizer's.
    """
    groups = state["param_groups"]
    names = [group.get("param_names") for group in groups]
    if None in names:
        of = {id(parameter): name for name, parameter in sch.model.named_parameters()}
        names = [[of.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
        if [len(one) for one in names] != [len(group["params"]) for group in groups]:
            saved = [len(group["params"]) for group in groups]
            raise OptimizerError(
                f"the saved groups have {saved} parameters by number, the groups of {type(optimizer).__name__} "
                f"{[len(one) for one in names]}",
                hint="save slapo.optimizer_state_dict(sch, optimizer), by names",
            )
    name_of = {
        number: name
        for group, own in zip(groups, names, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    settings = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    return {
        **state,
        "state": {name_of[number]: values for number, values in state["state"].items()},
        "param_groups": [{**group, "params": list(own)} for group, own in zip(settings, names, strict=True)],
    }
