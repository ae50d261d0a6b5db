"""Fake tensors, on which recordings run."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.internals import SafeFakeTensorMode
from slapo_graph.private import GROUPED_MM, FakeTensor, disable_current_modes, tree_leaves
from slapo_graph.structure import children, is_plain, rebuild

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class FakeMode(SafeFakeTensorMode):
    """Compute shapes and dtypes only, with real tensors (parameters) as if they were fake.

    Grouped matrix products accept every dtype: torch's shape function accepts bfloat16 only, its kernels float32 too.

    Torch's log of failing operations is disabled: the error has the message.

    Args:
        meta_device: the device that meta tensors from outside represent, e.g. parameters of other pipeline stages.
            None leaves them on the meta device.
        sizes: whether sizes may depend on values; otherwise an operation that makes such a tensor raises.
    """

    def __init__(self, meta_device: torch.device | None = None, *, sizes: bool = False) -> None:
        super().__init__()
        if sizes:
            from torch.fx.experimental.symbolic_shapes import ShapeEnv  # which imports sympy

            self.shape_env = ShapeEnv()
        self._meta_device = meta_device
        self._placed_meta: dict[int, tuple[torch.Tensor, FakeTensor]] = {}
        self._was_disabled: list[bool] = []

    def __enter__(self) -> Self:
        self._was_disabled.append(_LOG.disabled)
        _LOG.disabled = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _LOG.disabled = self._was_disabled.pop()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor that this mode uses for another one."""
        is_own = isinstance(tensor, FakeTensor) and tensor.fake_mode is self
        return tensor if is_own else self.from_tensor(tensor, static_shapes=True)

    def from_tensor(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
        if self._meta_device is not None and tensor.is_meta and not isinstance(tensor, FakeTensor):
            return self._fake_of_meta(tensor)
        return super().from_tensor(tensor, *args, **kwargs)

    def _fake_of_meta(self, tensor: torch.Tensor) -> FakeTensor:
        if id(tensor) not in self._placed_meta:
            with disable_current_modes():
                fake = FakeTensor(self, tensor.detach(), self._meta_device)
                fake.requires_grad_(tensor.requires_grad)
            self._placed_meta[id(tensor)] = (tensor, fake)
        return self._placed_meta[id(tensor)][1]

    def _placed(self, value: Any) -> Any:
        cls = type(value)
        if cls is FakeTensor:
            return value
        if cls in (tuple, list):
            return cls([self._placed(part) for part in value])
        if cls is dict:
            return {key: self._placed(part) for key, part in value.items()}
        if isinstance(value, torch.Tensor):
            return self._fake_of_meta(value) if value.is_meta else value
        if isinstance(value, torch.device) and value.type == "meta":
            return self._meta_device
        return value

    def _all_fake(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace real tensors by fake ones among arguments that hold both.

        torch does that after its cache lookup, and would compute every call with a parameter again.
        """
        kinds = {_kind(part) for value in (*args, *kwargs.values()) for part in _parts(value)}
        if not kinds >= {"fake", "real"} or torch.Tag.inplace_view in func.tags:
            return args, kwargs
        return [self._fake_in(value) for value in args], {key: self._fake_in(value) for key, value in kwargs.items()}

    def _fake_in(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self._fake_in(part) for part in value])
        return self.fake_tensor_converter.from_real_tensor(self, value) if _kind(value) == "real" else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._meta_device is not None:
            args, kwargs = self._placed(args), self._placed(kwargs or {})
        if func is GROUPED_MM and args[0].dtype is not torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        args, kwargs = self._all_fake(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def _parts(value: Any) -> Any:
    return value if type(value) in (list, tuple) else (value,)


def _kind(value: Any) -> str:
    cls = type(value)
    return "fake" if cls is FakeTensor else "real" if cls is torch.Tensor or cls is nn.Parameter else ""


def meta_device_of(module: nn.Module, arguments: Any) -> torch.device | None:
    """Return the device that a module's meta tensors represent: the arguments' device; None without meta tensors."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return None
    given = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in given if not tensor.is_meta), None)


def _grouped_product(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if a.dim() == 2:
        shape = (len(offs), a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[-1])
    else:
        shape = (a.shape[1], b.shape[1]) if b.dim() == 2 else (a.shape[0], a.shape[1], b.shape[-1])
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def without_values(mode: FakeMode, value: Any) -> Any:
    """Replace the tensors in ``value`` by fake ones; equal tensors stay equal."""
    return with_tensors(value, mode.fake)


def with_own_values(value: Any) -> Any:
    """Replace the tensors in ``value`` by copies."""
    return with_tensors(value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def with_tensors(value: Any, changed: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in ``value``, in containers and objects too.

    Objects are copied (a cache, say): modules that stay calls may change them.

    Args:
        value: arguments of a call.
        changed: returns the replacement of a tensor; called once for each.

    Raises:
        TypeError: an object cannot be copied.
    """
    known: dict[int, torch.Tensor] = {}

    def of(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if id(part) not in known:
                known[id(part)] = changed(part)
            return known[id(part)]
        parts = children(part)
        if parts is not None:
            return rebuild(part, [of(below) for _, _, below in list(parts)])
        if is_plain(part) or isinstance(part, nn.Module):
            return part.copy() if type(part) is set else part
        with _Copying(of):
            return copy.deepcopy(part)

    return of(value)


class _Copying(TorchFunctionMode):
    """Tensors that are copied within an object."""

    def __init__(self, copied: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.copied = copied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.copied(args[0])
        return func(*args, **(kwargs or {}))
