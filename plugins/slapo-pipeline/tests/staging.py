"""What the tests of stages share: the run of the stages against the reference model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core import Schedule, create_schedule
from slapo_runtime.stages import StagedModel, staged


def bound(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter."""
    signature = inspect.signature(type(model).forward)
    found = dict(signature.bind(model, *args, **kwargs).arguments)
    found.pop(next(iter(signature.parameters)))
    return found


def cut(model: nn.Module, cuts: Sequence[str], *args: Any, **kwargs: Any) -> StagedModel:
    """The stages of ``model`` for a call like this one."""
    return asked(cut_schedule(model, cuts), *args, **kwargs)


def cut_schedule(model: nn.Module, cuts: Sequence[str]) -> Schedule:
    """A schedule that cuts ``model``."""
    schedule = create_schedule(model)
    for path in cuts:
        schedule[path].pipeline_split()
    return schedule


def asked(schedule: Schedule, *args: Any, **kwargs: Any) -> StagedModel:
    """The stages of a schedule for a call like this one."""
    found = staged(schedule, bound(schedule.model, args, kwargs))
    assert found is not None
    return found


def tensors(value: Any) -> list[Any]:
    """The leaves of nested values, in order: dataclasses and mappings by their items."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, int | float | str | bool):
        return [value]
    if isinstance(value, Mapping):
        return list(value) + [leaf for part in value.values() for leaf in tensors(part)]
    if isinstance(value, tuple | list):
        return [type(value)] + [leaf for part in value for leaf in tensors(part)]
    return [type(value)] + [leaf for part in vars(value).values() for leaf in tensors(part)]


def assert_same(found: Any, wanted: Any) -> None:
    """Equal, type for type and bit for bit, but for the last digits of float64."""
    assert type(found) is type(wanted)
    ours, theirs = tensors(found), tensors(wanted)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        else:
            assert one == other


def compare(
    model: nn.Module,
    cuts: Sequence[str],
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **kwargs: Any,
) -> StagedModel:
    """Hold output, gradients and buffers of the stages against those of a copy of the reference model.

    Args:
        model: in the mode in which it runs.
        cuts: paths.
        args: of its forward.
        loss: of its output; the sum of all floating tensors in it otherwise.
        kwargs: of its forward.
    """
    untouched = copy.deepcopy(model)
    call = bound(model, args, kwargs)
    made = cut(model, cuts, *args, **kwargs)
    torch.manual_seed(1)
    found = made.run(copy.deepcopy(call))
    torch.manual_seed(1)
    wanted = untouched(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    assert_same(found, wanted)
    loss = loss or total
    if any(parameter.requires_grad for parameter in model.parameters()):
        loss(found).backward()
        loss(wanted).backward()
    assert_same_gradients(model, untouched)
    if not any(True for _ in model.buffers()):  # which a second run would change again
        model.zero_grad()
        torch.manual_seed(1)
        run_apart(made, copy.deepcopy(call), loss)
        assert_same_gradients(model, untouched)
    for (name, one), (_, other) in zip(model.named_buffers(), untouched.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)
    return made


def assert_same_gradients(model: nn.Module, untouched: nn.Module) -> None:
    for (name, one), (_, other) in zip(model.named_parameters(), untouched.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12, msg=name)


def run_apart(made: StagedModel, inputs: Mapping[str, Any], loss: Callable[[Any], torch.Tensor]) -> None:
    """Forward and backward as processes do it: what a stage receives are leaves, whose gradients are sent back."""
    partition = made.partition
    received: dict[str, torch.Tensor] = {}
    runs = []

    def sent(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(partition.values[name].requires_grad)

    pieces: dict[str, torch.Tensor] = {}
    for stage in partition.stages:
        given = {name: received[name] for name in stage.uses}
        before = {name: tensor.detach().clone() for name, tensor in received.items()}
        out = stage.module({name: inputs[name] for name in stage.inputs}, given)
        for name, tensor in received.items():
            assert torch.equal(tensor, before[name]), f"stage {stage.index} wrote to '{name}', which it may relay"
        runs.append((stage, out, given))
        pieces.update((name, sent(name, out[name])) for name in partition.output.names if name in out)
        there = {**received, **out}
        received = {name: sent(name, there[name]) for name in made.liveness.sent(stage.index)}
    value = loss(partition.output.assemble(pieces))
    if not value.requires_grad:
        return
    value.backward()
    gradients = {name: piece.grad for name, piece in pieces.items() if piece.grad is not None}
    for _, out, given in reversed(runs):
        made_here = {name: tensor for name, tensor in out.items() if tensor.requires_grad and name in gradients}
        if made_here:
            torch.autograd.backward(list(made_here.values()), [gradients[name] for name in made_here])
        for name, leaf in given.items():
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad


def total(output: Any) -> torch.Tensor:
    """A loss of everything in the output, each tensor with its own weights."""
    parts = [leaf for leaf in tensors(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    weights = [torch.linspace(0.5, 1.5, part.numel(), dtype=part.dtype).view(part.shape) for part in parts]
    return sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))  # type: ignore[return-value]
