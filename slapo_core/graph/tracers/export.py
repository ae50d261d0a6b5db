"""The tracer ``export``: ``torch.export``, for what ``record`` refuses."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.utils import _pytree as pytree

from slapo_core.graph import regions
from slapo_core.graph.arguments import call_of
from slapo_core.graph.leaves import inlined_modules
from slapo_core.graph.location import first_line
from slapo_core.graph.reads import AttributeReads
from slapo_core.graph.recording import Recording
from slapo_core.graph.session import alone
from slapo_core.graph.tracers.conversion import convert
from slapo_core.graph.tracers.properties import properties_refused
from slapo_core.spec.tracer import Recorded, Tracer, Untraceable

__all__ = ["ExportTracer"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ExportTracer(Tracer):
    """Let ``torch.export`` trace the forward, into operators of ``torch.ops.aten``; its guards hold at every call.

    It knows more than the other tracers where values decide on shapes (``x[mask]``, ``nonzero``), and looks into every
    module below. Sizes stay symbolic where it finds that they can; but a size of 1 is fixed.
    """

    name = "export"
    keeps_calls = False

    def trace(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any] | None,
        leaves: Callable[[nn.Module, str], bool],
    ) -> Recorded:
        if arguments is None:
            raise Untraceable("is exported by running it, and it is not known what it is called with")
        if any(enabled for enabled, _ in regions.state()[1]):
            raise Untraceable(
                "is called under autocast, which torch.export leaves out", None, "trace with tracer='record'"
            )
        inlined = inlined_modules(module, leaves)
        changed = [path for path, _ in module.named_modules() if path not in inlined]
        if changed:
            raise Untraceable(
                f"holds '{changed[0]}', which is hooked or whose forward was changed; torch.export would lose that",
                None,
                "trace with tracer='record', or trace narrower nodes",
            )
        recording = Recording(module)
        reads = AttributeReads(recording.refusal, first_line(forward))
        real = {name: _without_fakes(value) for name, value in arguments.items()}
        given, kwargs = call_of(inspect.signature(forward), real)
        args = tuple(given)
        shapes = pytree.tree_map(_dynamic, (args, kwargs))
        with (
            alone(),
            _bare(module, forward) as twin,
            reads.watching(twin, leaves),
            properties_refused(recording),
        ):
            exported = _exported(twin, args, kwargs, shapes)
        convert(exported, recording, arguments)
        return Recorded(recording.graph, tuple(recording.guards), reads.seen, tuple(recording.captured))


def _exported(module: nn.Module, args: Any, kwargs: Any, shapes: Any) -> ExportedProgram:
    try:
        return export(module, args, kwargs, dynamic_shapes=_by_name(module, args, kwargs, shapes), strict=False)
    except Untraceable:
        raise
    except Exception as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, Untraceable):
            raise cause from None
        first = str(error).strip().partition("\n")[0]
        raise Untraceable(f"is refused by torch.export: {type(error).__name__}: {first}") from error


def _by_name(module: nn.Module, args: Any, kwargs: Any, shapes: Any) -> dict[str, Any]:
    """The dynamic shapes by parameter, as torch.export takes them."""
    given = inspect.signature(module.forward)
    bound = given.bind(*shapes[0], **shapes[1])
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if given.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def _dynamic(value: Any) -> Any:
    return dict.fromkeys(range(value.dim()), Dim.AUTO) if isinstance(value, torch.Tensor) else None


def _without_fakes(value: Any) -> Any:
    """Tensors that torch.export can make its own fake ones of."""

    def real(tensor: Any) -> Any:
        if not isinstance(tensor, torch._subclasses.FakeTensor):
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made.zero_().requires_grad_(tensor.requires_grad)

    return pytree.tree_map(real, value)


@contextlib.contextmanager
def _bare(module: nn.Module, forward: Callable[..., Any]) -> Iterator[nn.Module]:
    """A module around the same parameters and modules that runs ``forward``, without hooks: those run outside of it."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.update({name: OrderedDict() for name in _HOOKS})
    twin.__dict__["forward"] = MethodType(forward, twin)
    yield twin
