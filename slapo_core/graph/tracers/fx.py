"""The tracer ``fx``: a symbolic run, which needs no inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from slapo_core.graph.arguments import call_of
from slapo_core.graph.functions import autograd_functions
from slapo_core.graph.location import first_line
from slapo_core.graph.pruning import drop_unused
from slapo_core.graph.reads import AttributeReads
from slapo_core.graph.recorder import Recorder
from slapo_core.graph.session import alone
from slapo_core.graph.submodules import module_calls
from slapo_core.graph.targets import query_of, writes_to_first
from slapo_core.graph.tracers.symbols import Symbol, SymbolicRecording, class_of_result
from slapo_core.spec.tracer import Recorded, Tracer

__all__ = ["FxTracer", "SymbolicRecorder"]


class FxTracer(Tracer):
    """Run the forward once on symbols (``torch.fx.Proxy``), and write down the torch calls it makes.

    It needs no inputs and runs nothing, factories and random numbers included; so the forward may not decide on
    anything about a tensor: its size, dtype or values. For small simple modules.
    """

    name = "fx"
    needs_inputs = False

    def trace(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any] | None,
        leaves: Callable[[nn.Module, str], bool],
    ) -> Recorded:
        recording = SymbolicRecording(module)
        recorder = recording.recorder = SymbolicRecorder(recording)
        reads = AttributeReads(recording.refusal, first_line(forward))
        signature = inspect.signature(forward)
        given: dict[str, Any] = {}
        with alone():
            if arguments is None:
                for name in _required(signature):
                    given[name] = recording.symbol(recording.graph.placeholder(name), torch.Tensor)
            else:
                for name, value in arguments.items():
                    given[name] = recording.give(value, recording.graph.placeholder(name))
            args, kwargs = call_of(signature, given)
            with (
                reads.watching(module, leaves),
                module_calls(recorder, leaves),
                autograd_functions(recorder),
                recorder,
            ):
                out = forward(module, *args, **kwargs)
            recorder.regions.finish()
            recording.graph.output(recording.node(out))
        drop_unused(recording.graph)
        recording.graph.lint()
        return Recorded(recording.graph, tuple(recording.guards), reads.seen, tuple(recording.captured), reads.read)


def _required(signature: inspect.Signature) -> list[str]:
    """The parameters that every call gives, without the module."""
    _, *parameters = signature.parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


class SymbolicRecorder(Recorder):
    """A mode in which every torch call is written down and none is run.

    Args:
        recording: where to.
    """

    recording: SymbolicRecording

    def __init__(self, recording: SymbolicRecording) -> None:
        super().__init__(recording)
        self.for_symbols = _ForSymbols(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if query_of(func) is not None and args and type(args[0]) is Symbol:  # torch.Tensor.size(x)
            return self.record_call(func, func, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def record_call(self, run: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.regions.enter()
        with self.paused():
            node = self.recording.call(func, args, kwargs)
            if writes_to_first(func) and args:
                if type(args[0]) is Symbol:
                    object.__setattr__(args[0], "node", node)
                    return args[0]
                return self.recording.know(args[0], node)
            return self.recording.symbol(node, class_of_result(func, args))

    def record_module(
        self, path: str, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.regions.enter()
        with self.paused():
            return self.recording.symbol(self.recording.call_module(path, args, kwargs))

    def write(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
        """A call of a function that is none of torch's: an operator."""
        self.regions.enter()
        with self.paused():
            nodes = tuple(self.recording.node(argument) for argument in args)
            named = {name: self.recording.node(value) for name, value in kwargs.items()}
            return self.recording.symbol(
                self.recording.compute(function, nodes, named), class_of_result(function, args)
            )


class _ForSymbols(fx.proxy.TracerBase):
    """What ``torch.fx.Proxy`` asks to write down the operators it knows."""

    def __init__(self, recorder: SymbolicRecorder) -> None:
        super().__init__()
        self.recorder, self.graph = recorder, recorder.recording.graph

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Any:
        return self.recorder.write(target, args, kwargs)
