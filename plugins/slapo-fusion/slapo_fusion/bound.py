"""`Bound`: a kernel that runs in the place of a function, and is held to what that function gives."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_core import ApplyError
from slapo_fusion.kernels import WithBackward, found, missing_gradient
from slapo_fusion.shapes import differs, of_output, without_values
from slapo_fusion.watching import is_fake

__all__ = ["Bound", "Kernel", "named_inputs"]


@dataclass(frozen=True)
class Kernel:
    """Where a kernel comes from, as data: it is found again where a model is unpickled.

    Args:
        kernel: an operator's name, or a function.
        backward: gives the gradients, as :class:`~slapo_fusion.kernels.WithBackward` takes it; None: autograd knows.
        where: for messages, e.g. ``"bind('acme::gelu') at 'act'"``.
    """

    kernel: str | Callable[..., Any]
    backward: str | Callable[..., Any] | None
    where: str

    def load(self) -> Callable[..., Any]:
        """What to call.

        Raises:
            Unavailable: it cannot be had here.
        """
        forward = found(self.kernel)
        return forward if self.backward is None else WithBackward(forward, found(self.backward), self.where)


class Bound:
    """Calls a kernel in the place of a function.

    What the kernel gives has the shapes and types of what the function gives: held at the first call, if the function
    runs on tensors without values. A gradient that gets lost is an error at every call.

    Args:
        function: what it stands for: a forward that takes the module first, or a region.
        kernel: what runs.
        arguments: of a forward: the names of its parameters, or of the module's own tensors and attributes, in the
            kernel's order. None passes on what it is called with.
    """

    def __init__(self, function: Callable[..., Any], kernel: Kernel, arguments: tuple[str, ...] | None = None) -> None:
        functools.update_wrapper(self, function)
        self.function, self.kernel, self.arguments = function, kernel, arguments
        self._call = kernel.load()
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call(*self.inputs(*args, **kwargs))
        if is_fake():
            return self.function(*args, **kwargs)
        inputs = self.inputs(*args, **kwargs)
        output = self._call(*inputs)
        if missing_gradient(inputs, output):
            raise ApplyError(
                f"{self.kernel.where}: an input requires a gradient, and the kernel's output has none",
                hint="register its gradient (torch.library.register_autograd), or give bind(..., backward=...); "
                "freeze what leads to it, or call the model under torch.no_grad()",
            )
        if not self._is_checked:
            self._check(args, kwargs, output)
            self._is_checked = True
        return output

    def inputs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What the kernel is called with."""
        if self.arguments is None:
            return (*args, *kwargs.values())
        return named_inputs(self.function, self.arguments, args[0], args[1:], kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        problem = differs(without_values(self.function, args, kwargs), of_output(output))
        if problem is not None:
            raise ApplyError(
                f"{self.kernel.where}: {problem}",
                hint="the kernel must give what the code gives whose place it takes; undo this step",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self.function, "kernel": self.kernel, "arguments": self.arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def named_inputs(
    forward: Callable[..., Any],
    names: tuple[str, ...],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    """The values of a forward's parameters, or of the module's own tensors and attributes, in the order given."""
    call = inspect.signature(forward).bind(module, *args, **kwargs)
    call.apply_defaults()
    return tuple(call.arguments[name] if name in call.arguments else getattr(module, name) for name in names)
