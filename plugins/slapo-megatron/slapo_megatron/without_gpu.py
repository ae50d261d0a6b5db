"""Run Megatron-core on the CPU in a process that simulates a rank: replace the CUDA names that it uses.

For estimates, on tensors without memory. In modules of ``megatron`` the global name ``torch`` becomes a proxy; torch
itself is unchanged, except for two methods of tensors, which check their caller.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

from slapo_megatron.private import tensors_of_megatron_are_on_gpu, tree_map

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
_LIKE = ("empty_like", "ones_like", "zeros_like")
_PACKAGES = ("distributed", "dist_checkpointing", "dist_checkpointing.strategies", "optimizer", "pipeline_parallel")


class _Module(types.ModuleType):
    """A proxy of a module with some names replaced."""

    def __init__(self, original: types.ModuleType, names: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(names)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def run_without_gpu() -> None:
    """Let Megatron use the CPU as its GPU, in this process and its forks."""
    import megatron.core

    tensors_of_megatron_are_on_gpu()
    if isinstance(megatron.core.parallel_state.torch, _Module):
        return
    for package in (*_PACKAGES, "tensor_parallel"):
        module = importlib.import_module(f"megatron.core.{package}")
        for found in pkgutil.iter_modules(module.__path__, f"{module.__name__}."):
            with contextlib.suppress(ImportError):  # modules of packages that are not installed do not run either
                importlib.import_module(found.name)
    on_cpu = _torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and getattr(module, "torch", None) is torch:
            module.torch = on_cpu  # type: ignore[attr-defined]


def _torch() -> _Module:
    cuda = _Module(
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            "synchronize": lambda *_, **__: None,
            "current_stream": lambda *_, **__: None,
        },
    )
    made = {name: _on_cpu(getattr(torch, name)) for name in (*_FACTORIES, *_LIKE)}
    return _Module(torch, {"cuda": cuda, "distributed": _Module(dist, {"new_group": _new_group}), **made})


def _new_group(*args: Any, **kwargs: Any) -> Any:
    """Make a process group; a fake one where the default group is fake."""
    return dist.new_group(*args, **(kwargs | {"backend": "fake"} if dist.get_backend() == "fake" else kwargs))


def _on_cpu(factory: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if factory is torch.tensor and isinstance(args[0], list):  # its numbers may be tensors without memory
            args = (tree_map(_number, args[0]), *args[1:])
        return factory(*args, **kwargs)

    return made


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
