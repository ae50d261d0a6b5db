"""Traced blocks against the reference model: at three sizes, in both modes, forward and backward."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core.errors import ArgumentError, GuardError, TraceError
from tests.integration.zoo.checks import NotApplicable, blocks
from tests.integration.zoo.resizing import at_other_sizes
from tests.integration.zoo.subjects import Subject, call

__all__ = ["TRACING", "differences", "every_tensor", "trace_every_block", "traces"]


def traces(subject: Subject, *, flatten: bool = False) -> str:
    """Trace every repeated block, compare with the reference model, and leave out in turn what is refused.

    Args:
        flatten: whether child modules become part of the graphs.

    Returns:
        ``"ok: 2/2"``, or ``"refused: 1/2, <path>: <reason>; ..."``: blocks traced, of all, and why the others are not.

    Raises:
        AssertionError: a traced model computed something else.
        NotApplicable: there is no block, or the reference model does not repeat its own result.
    """
    model, batch = subject.given()
    paths = _called(model, batch, blocks(model))
    if not paths:
        raise NotApplicable("no module in it is called with parameters of its own")
    batches = [batch, *at_other_sizes(model, batch)]
    refused: dict[str, str] = {}
    while len(refused) < len(paths):
        model, _ = subject.given()
        untouched = copy.deepcopy(model)
        sch = slapo.create_schedule(model, example_inputs=batch)
        refused |= trace_every_block(sch, [path for path in paths if path not in refused], flatten=flatten)
        try:
            for given in batches:
                for training in (True, False):
                    assert_same(sch.model, untouched, given, training=training)
            break
        except (TraceError, GuardError) as error:  # a variant that cannot be recorded, or a size that is refused
            if error.path is None or error.path not in paths or error.path in refused:
                raise
            refused[error.path] = reason(error)
    traced = f"{len(paths) - len(refused)}/{len(paths)}"
    if not refused:
        return f"ok: {traced}"
    reasons: dict[str, str] = {}
    for path, text in refused.items():
        reasons.setdefault(text.replace(f"'{path}'", "it"), path)
    return f"refused: {traced}; " + "; ".join(f"{path}: {text}" for text, path in reasons.items())


TRACING: Mapping[str, Callable[[Subject], str]] = {
    "trace": traces,
    "flattened": functools.partial(traces, flatten=True),
}
"""Column of the table -> the check."""


def trace_every_block(sch: slapo.Schedule, paths: list[str], *, flatten: bool = False) -> dict[str, str]:
    """Trace the modules at ``paths``; what was refused, with the reason."""
    refused = {}
    for path in paths:
        try:
            sch[path].trace(flatten=flatten)
        except (TraceError, ArgumentError) as error:
            refused[path] = reason(error)
    return refused


def reason(error: TraceError | GuardError | ArgumentError) -> str:
    """What was refused, and at which line, in a line."""
    return re.sub(r" at /\S*site-packages/", " at ", " ".join(error.message.split()))


def assert_same(model: nn.Module, untouched: nn.Module, batch: Any, *, training: bool) -> None:
    """Both give the same, bit by bit: outputs, gradients, buffers, and the state of the random numbers."""
    different = differences(model, untouched, batch, training=training)
    if different:
        twin = copy.deepcopy(untouched)
        if differences(twin, untouched, batch, training=training):
            raise NotApplicable("the reference model does not repeat its own result")
    assert not different, f"{'training' if training else 'evaluation'}: {'; '.join(different[:4])}"


def differences(model: nn.Module, untouched: nn.Module, batch: Any, *, training: bool) -> list[str]:
    """What of two runs is not the same, bit by bit."""
    mine, plain = (_run(each, batch, training=training) for each in (model, untouched))
    found = [f"{name}: only in one of the runs" for name in mine.keys() ^ plain.keys()]
    for name in mine.keys() & plain.keys():
        if not _identical(mine[name], plain[name]):
            found.append(f"{name}: {_how(mine[name], plain[name])}")
    return sorted(found)


def _run(model: nn.Module, batch: Any, *, training: bool) -> dict[str, Any]:
    """One call, forward and backward; everything that came of it, by name."""
    for parameter in model.parameters():
        parameter.grad = None
    model.train(training)
    batch = copy.deepcopy(batch)
    inputs = {name: tensor for name, tensor in every_tensor(batch) if tensor.is_floating_point()}
    for tensor in inputs.values():
        tensor.requires_grad_()
    torch.manual_seed(5)
    seen: dict[str, Any] = {f"output{name}": tensor for name, tensor in every_tensor(call(model, batch))}
    loss = sum(
        (tensor.double() * torch.linspace(-1, 1, tensor.numel(), dtype=torch.float64).view(tensor.shape)).sum()
        for tensor in seen.values()
        if tensor.requires_grad and tensor.is_floating_point()
    )
    if isinstance(loss, Tensor):
        loss.backward()
    seen |= {f"gradient of input{name}": tensor.grad for name, tensor in inputs.items()}
    seen |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    seen |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    seen["state of the random numbers"] = torch.get_rng_state()
    return seen


def every_tensor(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a nested value, by where they lie."""
    from slapo_graph.structure import children

    if isinstance(value, Tensor):
        yield name, value
        return
    for _, key, part in list(children(value) or ()):
        yield from every_tensor(part, f"{name}[{key!r}]")


def _identical(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape, one.requires_grad) != (other.dtype, other.shape, other.requires_grad):
        return False
    one, other = one.detach(), other.detach()
    if torch.equal(one, other):
        return True
    return bool(one.is_floating_point() and ((one == other) | (one.isnan() & other.isnan())).all())


def _how(one: Any, other: Any) -> str:
    if one is None or other is None:
        return "only in one of the runs"
    if (one.dtype, one.shape, one.requires_grad) != (other.dtype, other.shape, other.requires_grad):
        return f"{one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
    distance = (one.detach().double() - other.detach().double()).abs().max()
    return f"differs by up to {distance:.2g} of {other.detach().double().abs().max():.2g}"


def _called(model: nn.Module, batch: Any, paths: list[str]) -> list[str]:
    """Those that the batch reaches, without those that are another one's module."""
    by_module: dict[int, str] = {}
    for path in paths:
        by_module.setdefault(id(model.get_submodule(path)), path)
    model = copy.deepcopy(model)
    reached: set[str] = set()
    for path in by_module.values():
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: reached.add(path))  # type: ignore[misc]
    with torch.no_grad():
        call(model, copy.deepcopy(batch))
    return [path for path in by_module.values() if path in reached]
