"""The tracer ``record``: one run on fake tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from slapo_core.graph.arguments import MISSING, Parameters
from slapo_core.graph.fake import FakeMode
from slapo_core.graph.flags import Flag, Flags
from slapo_core.graph.functions import autograd_functions
from slapo_core.graph.guards import Guard
from slapo_core.graph.leaves import Leaves, inlined_modules
from slapo_core.graph.pruning import drop_unused
from slapo_core.graph.recorder import Recorder
from slapo_core.graph.recording import Recording
from slapo_core.graph.regions import set_state
from slapo_core.graph.structure import children, rebuild
from slapo_core.graph.submodules import module_calls

__all__ = ["Recorded", "record"]


@dataclass(frozen=True)
class Recorded:
    """A graph and what it holds for.

    Args:
        graph: reads parameters and modules relative to the recorded module.
        guards: numbered as the checks in ``graph``.
        flags: attributes that were read.
        captured: tensors that the code holds itself; the first arguments of the graph.
        code: of the graph; takes the module, what is captured, and one argument for each parameter that was given.
        has_regions: whether it switches gradients or autocast.
    """

    graph: fx.Graph
    guards: tuple[Guard, ...]
    flags: tuple[Flag, ...]
    captured: tuple[torch.Tensor, ...]
    code: Callable[..., Any] = field(repr=False)
    has_regions: bool = False


def record(
    module: nn.Module,
    forward: Callable[..., Any],
    parameters: Parameters,
    values: tuple[Any, ...],
    *,
    leaves: Leaves,
    fake: bool = True,
) -> Recorded:
    """Run ``forward`` once, on fake tensors like those of ``values``, and write down what it computes.

    Args:
        module: whose forward it is.
        forward: takes the module first.
        parameters: of ``forward``.
        values: one for each of them.
        leaves: says which modules below are called as they are.
        fake: False runs on the tensors themselves, where an operation has no fake implementation.

    Raises:
        Untraceable: it cannot be recorded.
    """
    recording = Recording(module, may_capture=fake)
    recorder = Recorder(recording)
    flags = Flags(recording.refusal)
    mode = FakeMode() if fake else None
    given: dict[str, Any] = {}
    with _alone(), mode or contextlib.nullcontext():
        for name, value in zip(parameters.names, values, strict=True):
            if value is not MISSING:
                node = recording.graph.placeholder(name)
                given[name] = recording.give(_fake(mode, value) if mode else value, node)
        call = inspect.BoundArguments(parameters.signature, {parameters.itself: module, **given})  # type: ignore[arg-type]
        with (
            flags.watching(inlined_modules(module, leaves)),
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
    return Recorded(
        graph,
        tuple(recording.guards),
        flags.seen,
        tuple(recording.captured),
        code=type(fx.GraphModule(module, graph)).forward,
        has_regions=any(node.target is set_state for node in graph.nodes),
    )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without the torch-function modes of others, who would take the recording for a run of the model."""
    others: list[Any] = []
    while torch._C._len_torch_function_stack():
        others.append(_pop_mode())
    for each in reversed(others):
        if isinstance(each, DeviceContext):  # `with torch.device(...)`: it decides where tensors are made
            _push_mode(each)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # of weights cast without values
        while torch._C._len_torch_function_stack():
            _pop_mode()
        for each in reversed(others):
            _push_mode(each)


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value, static_shapes=True)
    parts = children(value)
    if parts is None:
        return value
    return rebuild(value, [_fake(mode, part) for _, _, part in list(parts)])
