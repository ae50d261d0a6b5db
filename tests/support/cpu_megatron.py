"""Megatron-core on CPUs, for tests only: what its code asks of CUDA by name is answered for the CPU.

Importing this module installs it. Only calls from modules of ``megatron`` are answered so: a hard-coded ``"cuda"``
in code of ours still fails. The modules of Megatron get a stand-in for their global name ``torch``; torch itself stays
as it is, but for two methods of tensors, which look at who calls them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from typing import Any

import torch

__all__ = ["install"]

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)
_PACKAGES = (
    "distributed",
    "dist_checkpointing",
    "dist_checkpointing.strategies",
    "optimizer",
    "pipeline_parallel",
    "tensor_parallel",
)


class _Module(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, original: types.ModuleType, names: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(names)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def _on_cpu(factory: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _torch() -> _Module:
    cuda = _Module(
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            "synchronize": lambda *_, **__: None,
            "current_stream": lambda *_, **__: None,
        },
    )
    return _Module(torch, {"cuda": cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}})


def _is_called_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron")


def _patch_methods() -> None:
    moved, kind = torch.Tensor.cuda, torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _is_called_by_megatron() else moved(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        if not args and not kwargs and _is_called_by_megatron():
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    type_.__name__ = "type"  # by which torch's function modes know a method
    torch.Tensor.cuda, torch.Tensor.type = cuda, type_  # type: ignore[method-assign, assignment]


def _communicate(
    self: Any,
    *,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Any,
    wait_on_reqs: bool = True,
) -> tuple[Any, Any, Any]:
    """Messages between stages over gloo, with tags: Megatron relies on the order of a CUDA stream.

    What is sent is detached: Megatron frees the memory of a sent tensor, perhaps before it has arrived.
    """
    (coming,), (back,) = self._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
    group, size, rank = self.pp_group, self.pp_group.size(), self.pp_group.rank()
    following, previous = (rank + 1) % size, (rank - 1) % size
    works: dict[str, Any] = {}
    received: list[torch.Tensor | None] = [None, None]
    if tensor_send_next is not None:
        works["send_next"] = group.send([tensor_send_next.detach().contiguous()], following, 0)
    if tensor_send_prev is not None:
        works["send_prev"] = group.send([tensor_send_prev.detach().contiguous()], previous, 1)
    for tag, name, wanted, length, place in (
        (0, "recv_prev", recv_prev, coming, previous),
        (1, "recv_next", recv_next, back, following),
    ):
        if wanted:
            tensor = torch.empty(length, dtype=self.config.pipeline_dtype)
            works[name] = group.recv([tensor], place, tag)
            received[tag] = tensor.requires_grad_()
    for work in works.values() if wait_on_reqs else ():
        work.wait()
    return (*received, None if wait_on_reqs else works)


def take_back() -> None:
    """Tensors have torch's own methods again: for a process that goes on with other tests."""
    del torch.Tensor.cuda, torch.Tensor.type


def install() -> None:
    """Once a process; forked ranks have it with what was imported before."""
    import megatron.core

    if "type" not in vars(torch.Tensor):
        _patch_methods()
    if isinstance(megatron.core.parallel_state.torch, _Module):
        return
    for package in _PACKAGES:
        module = importlib.import_module(f"megatron.core.{package}")
        for found in pkgutil.iter_modules(module.__path__, f"{module.__name__}."):
            try:
                importlib.import_module(found.name)
            except ImportError:
                continue  # what needs packages that are not installed is not run either
    stand_in = _torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and getattr(module, "torch", None) is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    from slapo_megatron.pipeline import Communicator

    Communicator._communicate = _communicate  # type: ignore[method-assign]


install()
