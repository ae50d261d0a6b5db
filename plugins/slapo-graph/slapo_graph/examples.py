"""Example arguments of every module of a model, from one run, on fake tensors where possible."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slapo_core.internals import copies, forwards
from slapo_core.layout import fork_rng
from slapo_graph.graph import TracedForward
from slapo_graph.leaves import inlined_modules
from slapo_graph.private import TABLES, FakeTensor, SafeMetaTensors
from slapo_graph.tracing.fake import FakeMode, with_tensors
from slapo_graph.tracing.outside import Outside
from slapo_graph.tracing.reads import GlobalNames
from slapo_graph.tracing.session import caches_kept, drawn_back

Call = tuple[tuple[Any, ...], dict[str, Any]]


def example_calls(model: nn.Module, example_inputs: Any) -> tuple[dict[str, Call], Exception | None]:
    """Run ``model`` once on tensors without values, and note the first call of every module.

    A model that needs values on its way (it branches on them, or picks by them) is run on the inputs themselves, if it
    has values.

    Args:
        model: on any device, ``meta`` too; nothing in it is changed.
        example_inputs: a mapping (keyword arguments), a tuple (positional ones), or one argument.

    Returns:
        the arguments by path, as far as the run came; what ended it early, or None.
    """
    args, kwargs = call_with(example_inputs)
    tensors = [*model.parameters(), *model.buffers()]
    if all(type(tensor) in (nn.Parameter, torch.Tensor) for tensor in tensors):
        # The meta device takes a third of the time of fake tensors, and not all models.
        calls, error = _run_on_meta(model, args, kwargs)
        if error is None:
            devices = {tensor.device for tensor in tensors}
            device = devices.pop() if devices else torch.device("cpu")
            if not devices:
                return _Placed(calls, device), None
    with torch.no_grad():
        calls, error = _run(copied_model(model), args, kwargs, FakeMode())
    if error is None or any(tensor.is_meta for tensor in tensors):
        return calls, error
    return _run_with_values(lambda: (copied_model(model), ()), args, kwargs)


def scheduled_calls(model: nn.Module, example_inputs: Any) -> tuple[dict[str, Call], Exception | None]:
    """Note the first call of every module of a scheduled model: without values, as far as it runs so, or with them.

    Graphs that no step rewrote are left out: those modules run their own forward. Calls of modules that are part of a
    rewritten graph are not noted.

    Args:
        model: on any device, ``meta`` too; nothing in it is changed.
        example_inputs: a mapping (keyword arguments), a tuple (positional ones), or one argument.

    Returns:
        the arguments by path, as far as the run came; what ended it early, or None.
    """
    args, kwargs = call_with(example_inputs)
    copied, inlined = _own_forwards(model)
    calls, error = _run(copied, args, kwargs, FakeMode(), unseen=inlined)
    if error is None or any(tensor.is_meta for tensor in model.parameters()):
        return calls, error
    with_values, raised = _run_with_values(lambda: _own_forwards(model), args, kwargs)
    return (calls, error) if raised is not None else (with_values, None)


def _own_forwards(model: nn.Module) -> tuple[nn.Module, set[nn.Module]]:
    """Return a copy without graphs that no step rewrote, and the modules within the rewritten ones."""
    copied = copied_model(model)
    inlined: set[nn.Module] = set()  # a hook there would make another graph
    for module in copied.modules():
        forward = module.__dict__.get("forward")
        if not isinstance(forward, forwards.ModuleForward):
            continue
        graph = getattr(forward.base, "__func__", None)
        if isinstance(graph, TracedForward) and graph.rewrites:
            inlined |= {below for path, below in inlined_modules(module, graph.leaves).items() if path}
        elif isinstance(graph, TracedForward) and not forward.has_own:
            forward.set_base(None)
    return copied, inlined


def call_with(example_inputs: Any) -> Call:
    """Split example inputs into positional and keyword arguments.

    Args:
        example_inputs: a mapping (keyword arguments), a tuple (positional ones), or one argument.
    """
    if isinstance(example_inputs, Mapping):
        return (), {str(name): value for name, value in example_inputs.items()}
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {}


class _Placed(dict[str, Call]):
    """Calls on the meta device, given out for the device of the model."""

    def __init__(self, calls: dict[str, Call], device: torch.device) -> None:
        super().__init__(calls)
        self._device = device
        self._mode = FakeMode()

    def __getitem__(self, path: str) -> Call:
        args, kwargs = super().__getitem__(path)
        if self._device.type == "meta":
            return args, kwargs
        placed: Call = with_tensors((args, kwargs), self._place)
        return placed

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return FakeTensor(self._mode, tensor, self._device) if tensor.is_meta else tensor


def _run_on_meta(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[str, Call], Exception | None]:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
    with torch.no_grad(), SafeMetaTensors():
        return _run(copied_model(model, memo), args, kwargs, None, own=lambda tensor: tensor.to("meta"))


def _run_with_values(
    copy_model: Callable[[], tuple[nn.Module, Collection[nn.Module]]], args: Any, kwargs: Any
) -> tuple[dict[str, Call], Exception | None]:
    """Run copies on the tensors themselves; in evaluation mode too, for what training leaves out by chance."""
    with fork_rng(), torch.no_grad():
        copied, unseen = copy_model()
        calls, error = _run(copied, args, kwargs, None, unseen)
        if error is None and copied.training:
            copied, unseen = copy_model()
            calls = {**_run(copied.eval(), args, kwargs, None, unseen)[0], **calls}
    return calls, error


def _run(
    copied: nn.Module,
    args: Any,
    kwargs: Any,
    mode: FakeMode | None,
    unseen: Collection[nn.Module] = (),
    own: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[dict[str, Call], Exception | None]:
    """Run a copy, on which stays what the forward sets; on fake tensors of ``mode``, or on the tensors themselves."""
    on_meta = any(tensor.is_meta for tensor in copied.parameters())
    calls: dict[str, Call] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if mode is None:
            return tensor.detach().clone()
        return mode.from_tensor(tensor.to("meta") if on_meta else tensor, static_shapes=True)

    outside = Outside.of_call(copied, GlobalNames(type(copied).forward, copied.modules()), {})
    with mode or contextlib.nullcontext(), caches_kept(copied), drawn_back(), _noting(copied, calls, unseen):
        given, named = with_tensors((args, kwargs), own or copy_of)
        try:
            copied(*given, **named)
        except Exception as error:  # noqa: BLE001 - whoever needs a call that was not reached is told
            return calls, error
        finally:
            torch.clear_autocast_cache()
            if mode is not None or own is not None:  # they may hold tensors without values
                outside.put_back()
    return calls, None


def copied_model(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Copy the modules of a model; what cannot be copied (a lock, a process group) is shared.

    Args:
        model: any.
        memo: replacements for objects in the copy, by id; None: the same parameters, and copies of the buffers.
    """
    known = dict(memo) if memo is not None else {id(parameter): parameter for parameter in model.parameters()}
    try:
        return copies.deep_copy(model, dict(known))
    except TypeError:
        for module in model.modules():
            for name, value in vars(module).items():
                if name not in TABLES:
                    try:
                        copy.deepcopy(value, dict(known))
                    except TypeError:
                        known[id(value)] = value
        return copies.deep_copy(model, known)


@contextlib.contextmanager
def _noting(model: nn.Module, calls: dict[str, Call], unseen: Collection[nn.Module] = ()) -> Iterator[None]:
    def note(path: str) -> Callable[..., None]:
        def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in calls:  # a cache among them is filled afterwards: a copy of it
                calls[path] = with_tensors((args, kwargs), lambda tensor: tensor)

        return first

    handles = [
        module.register_forward_pre_hook(note(path), prepend=True, with_kwargs=True)
        for path, module in model.named_modules()
        if module not in unseen
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
