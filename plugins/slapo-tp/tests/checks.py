"""What the tests of several processes share: a scheduled model against a reference copy of itself, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import slapo_core as slapo
from slapo_core.internals import Internals

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def rand(*shape: int) -> Tensor:
    """The same random input on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def same_as_untouched(
    build: Callable[[], nn.Module],
    apply: Callable[[slapo.Schedule], object],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    piece_axis: int | None = None,
    run: Callable[[nn.Module], nn.Module] = lambda model: model,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
) -> slapo.Schedule:
    """Compare outputs, all gradients, and three optimizer steps; AssertionError where they part.

    Args:
        build: makes the model.
        apply: schedules it.
        args: the inputs, the same on every rank; floating-point ones get a gradient.
        kwargs: the inputs by name.
        piece_axis: the axis of inputs and outputs of which each rank has a piece (sequence parallelism).
        run: what to call in the model's place, e.g. its compiled form.
        optimizer: made of the parameters.
    """
    torch.manual_seed(0)
    reference = build().double()
    model = copy.deepcopy(reference)
    sch = slapo.create_schedule(model, mesh={"tp": dist.get_world_size()})
    apply(sch)
    called = run(model)
    optimizers = [optimizer(module.parameters()) for module in (reference, model)]
    for _ in range(3):
        for each in optimizers:
            each.zero_grad()
        wanted, wanted_gradients = _run(reference, args, kwargs or {}, None)
        got, got_gradients = _run(called, args, kwargs or {}, piece_axis)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, _piece(other, piece_axis), **CLOSE, msg=lambda m: f"output: {m}")
        for one, other in zip(got_gradients, wanted_gradients, strict=True):
            torch.testing.assert_close(one, _piece(other, piece_axis), **CLOSE, msg=lambda m: f"input gradient: {m}")
        _compare(sch, reference, lambda parameter: parameter.grad, "gradient")
        for each in optimizers:
            each.step()
        _compare(sch, reference, lambda parameter: parameter.detach(), "value after a step")
    assert Internals(sch).hooks.call("slapo_check", schedule=sch) in ([], [[]]), (
        "a schedule that is right is called incomplete"
    )
    return sch


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int | None
) -> tuple[list[Tensor], list[Tensor]]:
    def own(tensor: Tensor) -> Tensor:
        piece = _piece(tensor, axis).detach()
        piece = piece if axis is None else piece.clone()
        return piece.requires_grad_(tensor.is_floating_point())

    args, kwargs = tree_map_only(Tensor, own, (args, kwargs))
    leaves = tree_leaves(module(*args, **kwargs))
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        shape = list(output.shape)
        if axis is not None:
            shape[axis] *= dist.get_world_size()
        # Weights that differ from element to element, so that no permutation goes unnoticed.
        loss = loss + (output * _piece(torch.randn(shape, generator=generator, dtype=torch.float64), axis)).sum()
    loss.backward()
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [output.detach() for output in outputs], [leaf.grad for leaf in inputs if leaf.grad is not None]


def _piece(tensor: Tensor, axis: int | None) -> Tensor:
    return tensor if axis is None else tensor.chunk(dist.get_world_size(), axis)[dist.get_rank()]


def _compare(
    sch: slapo.Schedule, reference: nn.Module, take: Callable[[nn.Parameter], Tensor | None], what: str
) -> None:
    for name, parameter in sch.model.named_parameters(remove_duplicate=False):
        path, _, own = name.rpartition(".")
        wanted, got = take(reference.get_parameter(name)), take(parameter)
        assert (wanted is None) == (got is None), f"{what} of {name}: {got} instead of {wanted}"
        if wanted is not None:
            wanted = Internals(sch).node(path).layout(own).local(wanted, sch.mesh)
            torch.testing.assert_close(got, wanted, **CLOSE, msg=lambda m, name=name: f"{what} of {name}: {m}")


def differs_from_untouched(*args: Any, **kwargs: Any) -> None:
    """A negative control: the comparison must fail, or the first forward refuse what is incomplete."""
    try:
        same_as_untouched(*args, **kwargs)
    except (AssertionError, RuntimeError, slapo.BuildError):
        return
    raise AssertionError("the comparison did not notice that the schedule is wrong")
