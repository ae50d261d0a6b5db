"""The compilers that ``fuse`` knows by name; third parties publish theirs as ``slapo.v1.compilers`` entry points."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slapo_core import ArgumentError, Compiler
from slapo_core.spec.accelerators import fork_rng
from slapo_core.spec.graph import Region
from slapo_fusion.compiled import Backend, Compiled, backend_problem

__all__ = ["AotEager", "Eager", "Inductor", "TorchScript"]


class Inductor(Compiler):
    """``torch.compile`` of the region as one graph, with symbolic sizes where they are seen to change."""

    name = "inductor"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        rest = dict(options)
        return _compiled(region, Backend("inductor", rest.pop("mode", None), tuple(sorted(rest.items()))))


class AotEager(Compiler):
    """What ``inductor`` is given, run operation by operation: to tell a fault of tracing from one of its kernels."""

    name = "aot_eager"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        return _compiled(region, Backend("aot_eager", options.get("mode"), tuple(sorted(options.items()))))


class Eager(Compiler):
    """The region as it is: one call in the graph, nothing compiled."""

    name = "eager"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        if options:
            raise ArgumentError(f"it has no option '{next(iter(options))}'", hint="leave options out")
        return region


class TorchScript(Compiler):
    """``torch.jit.trace`` of the region, as in the paper; traced anew for other types, not for other sizes.

    Under activation checkpointing the region runs uncompiled, with a warning: TorchScript lets no exception of Python
    through, by which the second run ends, and does not save the same in both.
    """

    name = "torchscript"
    deprecated = "PyTorch deprecates TorchScript: take 'inductor'"

    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        if options:
            raise ArgumentError(f"it has no option '{next(iter(options))}'", hint="leave options out")
        return _Scripted(region)


def _compiled(region: Region, backend: Backend) -> Compiled:
    problem = backend_problem(backend)
    if problem is not None:
        raise ArgumentError(problem[0], hint=problem[1])
    return Compiled(region, backend, where=f"{backend.backend} of a region", fullgraph=True)


class _Scripted:
    """One TorchScript function for each combination of what tracing takes for constant."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._traced: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            warnings.warn(
                "a region fused by TorchScript runs uncompiled, as it is under activation checkpointing: take "
                "compiler='inductor'",
                stacklevel=2,
            )
            return self._region(*args)
        places = [position for position, value in enumerate(args) if isinstance(value, Tensor)]
        tensors = tuple(args[position] for position in places)
        key = (
            tuple((value.dtype, value.device, value.dim(), value.requires_grad) for value in tensors),
            tuple(None if isinstance(value, Tensor) else (type(value), value) for value in args),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(tensors[0].device.type) if tensors else False,
        )
        traced = self._traced.get(key)
        if traced is None:
            traced = self._traced[key] = self._trace(args, places, tensors)
        return traced(*tensors)

    def _trace(self, args: tuple[Any, ...], places: list[int], tensors: tuple[Tensor, ...]) -> Callable[..., Any]:
        def on_tensors(*given: Tensor) -> Any:
            values = list(args)
            for position, tensor in zip(places, given, strict=True):
                values[position] = tensor
            return self._region(*values)

        with warnings.catch_warnings(), fork_rng():
            warnings.simplefilter("ignore", DeprecationWarning)  # said by `deprecated`
            made: Callable[..., Any] = torch.jit.trace(on_tensors, tensors, check_trace=False)
        return made
