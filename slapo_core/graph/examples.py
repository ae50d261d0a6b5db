"""With which arguments every module of a model is called: from one run, without values where that is enough."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slapo_core.graph.caches import caches_kept
from slapo_core.graph.fake import FakeMode
from slapo_core.graph.randomness import drawn_back
from slapo_core.graph.structure import children, rebuild

__all__ = ["Call", "example_calls"]

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
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    calls, error = _calls(model, example_inputs, FakeMode(), on_meta)
    if error is None or on_meta:
        return calls, error
    with torch.random.fork_rng():
        return _calls(model, example_inputs, None, on_meta)


def _calls(
    model: nn.Module, example_inputs: Any, mode: FakeMode | None, on_meta: bool
) -> tuple[dict[str, Call], Exception | None]:
    if isinstance(example_inputs, Mapping):
        args: tuple[Any, ...] = ()
        kwargs = {str(name): value for name, value in example_inputs.items()}
    else:
        args, kwargs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {}
    calls: dict[str, Call] = {}
    copied = _copy(model)  # what the forward sets on its modules stays on the copy
    with mode or contextlib.nullcontext(), torch.no_grad(), caches_kept(model), drawn_back(), _noting(copied, calls):
        given = [_own(mode, value, on_meta) for value in args]
        named = {name: _own(mode, value, on_meta) for name, value in kwargs.items()}
        try:
            copied(*given, **named)
        except Exception as error:  # noqa: BLE001 - whoever needs a call that was not reached is told
            return calls, error
        finally:
            torch.clear_autocast_cache()
    return calls, None


def _copy(model: nn.Module) -> nn.Module:
    """A copy of the modules around the same parameters, and copies of the buffers."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


@contextlib.contextmanager
def _noting(model: nn.Module, calls: dict[str, Call]) -> Iterator[None]:
    def note(path: str) -> Callable[..., None]:
        def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, (args, kwargs))

        return first

    handles = [
        module.register_forward_pre_hook(note(path), prepend=True, with_kwargs=True)
        for path, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own(mode: FakeMode | None, value: Any, on_meta: bool) -> Any:
    """``value`` with tensors that the run may change; without values, if there is a ``mode``."""
    if isinstance(value, torch.Tensor):
        if mode is None:
            return value.detach().clone()
        return mode.from_tensor(value.to("meta") if on_meta else value, static_shapes=True)
    parts = children(value)
    if parts is None:
        return value
    return rebuild(value, [_own(mode, part, on_meta) for _, _, part in list(parts)])
