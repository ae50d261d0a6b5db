"""The tracer ``record``: one run on fake tensors."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

from slapo_core.graph.flags import Flags
from slapo_core.graph.functions import autograd_functions
from slapo_core.graph.pruning import drop_unused
from slapo_core.graph.recorder import Recorder
from slapo_core.graph.recording import Recording
from slapo_core.graph.structure import children, rebuild
from slapo_core.graph.submodules import module_calls
from slapo_core.graph.tracers.isolation import alone
from slapo_core.spec.tracer import Recorded, Tracer, Untraceable

__all__ = ["RecordTracer"]


class RecordTracer(Tracer):
    """Run the forward once, on tensors without values, and write down the torch calls it makes.

    The default where it is known what the module is called with. Sizes stay symbolic; what the forward decided on is
    a guard. Refused is what depends on the values of tensors.
    """

    name = "record"

    def trace(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any] | None,
        leaves: Callable[[nn.Module, str], bool],
    ) -> Recorded:
        if arguments is None:
            raise Untraceable("is recorded by running it, and it is not known what it is called with")
        try:
            with _quiet():
                return record(module, forward, arguments, leaves)
        except (RuntimeError, NotImplementedError) as fake_error:
            if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
                raise
            # An operation without a fake implementation: on the tensors themselves, as the forward would run.
            real = {name: _copied(value) for name, value in arguments.items()}
            try:
                with torch.random.fork_rng():
                    return record(module, forward, real, leaves, fake=False)
            except (RuntimeError, NotImplementedError):
                raise fake_error from None


def record(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    leaves: Callable[[nn.Module, str], bool],
    *,
    fake: bool = True,
) -> Recorded:
    """Run ``forward`` once, on fake tensors like those of ``arguments``, and write down what it computes.

    Args:
        module: whose forward it is.
        forward: takes the module first.
        arguments: by parameter.
        leaves: says which modules below are called as they are.
        fake: False runs on the tensors themselves, where an operation has no fake implementation.

    Raises:
        Untraceable: it cannot be recorded.
    """
    recording = Recording(module, may_capture=fake)
    recorder = Recorder(recording)
    flags = Flags(recording.refusal)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    signature = inspect.signature(forward)
    given: dict[str, Any] = {}
    with alone(), mode or contextlib.nullcontext():
        for name, value in arguments.items():
            node = recording.graph.placeholder(name)
            given[name] = recording.give(_fake(mode, value) if mode else value, node)
        call = inspect.BoundArguments(signature, {next(iter(signature.parameters)): module, **given})  # type: ignore[arg-type]
        with (
            flags.watching(module, leaves),
            module_calls(recorder, leaves),
            autograd_functions(recorder),
            recorder,
        ):
            out = forward(*call.args, **call.kwargs)
        recorder.regions.finish()
        recording.graph.output(recording.node(out))
    graph = recording.graph
    drop_unused(graph)
    graph.lint()
    return Recorded(graph, tuple(recording.guards), flags.seen, tuple(recording.captured), flags.read)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of the stack of a fake operation that fails: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    parts = children(value)
    return value if parts is None else rebuild(value, [_copied(part) for _, _, part in list(parts)])


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value, static_shapes=True)
    parts = children(value)
    if parts is None:
        return value
    return rebuild(value, [_fake(mode, part) for _, _, part in list(parts)])
