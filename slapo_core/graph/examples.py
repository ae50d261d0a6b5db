"""With which arguments every module of a model is called: from one run without values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

from slapo_core.graph.structure import children, rebuild

__all__ = ["Call", "example_calls"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


def example_calls(model: nn.Module, example_inputs: Any) -> tuple[dict[str, Call], Exception | None]:
    """Run ``model`` once on tensors without values, and note the first call of every module.

    Args:
        model: on any device, ``meta`` too; nothing in it is changed.
        example_inputs: a mapping (keyword arguments), a tuple (positional ones), or one argument.

    Returns:
        the arguments by path, as far as the run came; what ended it early, or None.
    """
    if isinstance(example_inputs, Mapping):
        args: tuple[Any, ...] = ()
        kwargs = {str(name): value for name, value in example_inputs.items()}
    else:
        args, kwargs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {}
    tensors = [*model.parameters(), *model.buffers()]
    if all(type(tensor) in (nn.Parameter, torch.Tensor) for tensor in tensors):
        # The meta device takes a third of the time of fake tensors, and not all models.
        calls, error = _run_on_meta(model, args, kwargs)
        if error is None:
            devices = {tensor.device for tensor in tensors}
            device = devices.pop() if devices else torch.device("cpu")
            if not devices:
                return _Placed(calls, device), None
    return _run_on_fakes(model, args, kwargs)


class _Placed(dict[str, Call]):
    """Calls on the meta device; whoever asks for one gets it for the device of the model."""

    def __init__(self, calls: dict[str, Call], device: torch.device) -> None:
        super().__init__(calls)
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __getitem__(self, path: str) -> Call:
        args, kwargs = super().__getitem__(path)
        if self._device.type == "meta":
            return args, kwargs
        place = self._place
        return tuple(place(value) for value in args), {name: place(value) for name, value in kwargs.items()}

    def _place(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return FakeTensor(self._mode, value, self._device) if value.is_meta else value
        parts = children(value)
        return value if parts is None else rebuild(value, [self._place(part) for _, _, part in list(parts)])


def _run_on_meta(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[str, Call], Exception | None]:
    calls: dict[str, Call] = {}
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
    copied = copy.deepcopy(model, memo)
    with torch.no_grad(), _noting(copied, calls):
        try:
            copied(*map(_on_meta, args), **{name: _on_meta(value) for name, value in kwargs.items()})
        except Exception as error:  # noqa: BLE001 - tried on fake tensors then
            return calls, error
        finally:
            torch.clear_autocast_cache()
    return calls, None


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    parts = children(value)
    return value if parts is None else rebuild(value, [_on_meta(part) for _, _, part in list(parts)])


def _run_on_fakes(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[str, Call], Exception | None]:
    on_meta = any(tensor.is_meta for tensor in model.parameters())
    calls: dict[str, Call] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = _copy(model)  # what the forward sets on its modules stays on the copy
    with mode, torch.no_grad(), _noting(copied, calls):
        given = [_without_values(mode, value, on_meta) for value in args]
        named = {name: _without_values(mode, value, on_meta) for name, value in kwargs.items()}
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


def _without_values(mode: FakeTensorMode, value: Any, on_meta: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value.to("meta") if on_meta else value, static_shapes=True)
    parts = children(value)
    if parts is None:
        return value
    return rebuild(value, [_without_values(mode, part, on_meta) for _, _, part in list(parts)])
