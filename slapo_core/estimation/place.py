"""Where in a training step an operation is: the phase, and the module that runs or whose backward pass runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slapo_core.estimation.private import current_autograd_node, next_sequence_number

__all__ = ["Place"]

_NO_SEQUENCE = 2**64 - 1  # of the nodes that add to a parameter's gradient


class Place:
    """What is asked of it while operations run; being asked is the only thing that costs.

    A forward pass numbers its autograd nodes in the order in which it makes them; so the number at which each module
    begins and ends says, in the backward pass, whose node runs.

    Args:
        paths: of the modules, by what ``id`` says; a module that is not among them counts as part of its caller.
        owners: of the parameters likewise: the path of the module that holds one.

    Attributes:
        step: ``"forward"``, ``"backward"`` or ``"optimizer"``; the training step says so.
    """

    def __init__(self, paths: Mapping[int, str], owners: Mapping[int, str]) -> None:
        self.step = "forward"
        self._paths, self._owners = dict(paths), dict(owners)
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._since: list[str] = []

    @classmethod
    def of(cls, model: nn.Module) -> Place:
        """Of a model whose modules and parameters stay the objects that they are."""
        modules = dict(model.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        owners: dict[int, str] = {}
        for path, module in modules.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners.setdefault(id(parameter), path)
        return cls(paths, owners)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it lasts, calls of modules are noticed; not by hooks, in whose presence wrappers may do otherwise."""
        call = nn.Module.__call__

        def noticed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            if path is None:
                return call(module, *args, **kwargs)
            self._stack.append(path)
            self._note()
            try:
                return call(module, *args, **kwargs)
            finally:
                self._stack.pop()
                self._note()

        nn.Module.__call__ = noticed  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def begin(self, step: str) -> None:
        """``"forward"``, ``"backward"`` or ``"optimizer"``."""
        self.step = step

    def forget(self) -> None:
        """What earlier forward passes did; their backward passes have run."""
        self._numbers.clear()
        self._since.clear()

    @property
    def phase(self) -> str:
        """``"forward"``, ``"backward"``, ``"recomputation"`` (of what was checkpointed) or ``"optimizer"``."""
        if self.step == "backward" and torch.is_grad_enabled() and current_autograd_node() is not None:
            return "recomputation"
        return self.step

    @property
    def module(self) -> str:
        """Path of the module that runs, or whose backward pass does; ``""`` for the model itself."""
        if self.step == "optimizer":
            return "optimizer"
        if self._stack or self.step == "forward":
            return self._stack[-1] if self._stack else ""
        return self._of(current_autograd_node())

    def _of(self, node: Any) -> str:
        if node is None:
            return ""
        number = node._sequence_nr()
        if number == _NO_SEQUENCE:
            return self._owners.get(id(getattr(node, "variable", None)), "")
        before = bisect_right(self._numbers, number)
        return self._since[before - 1] if before else ""

    def _note(self) -> None:
        """From the next node on, nodes are of the module on top; recomputation's too, whose numbers go on."""
        number, path = next_sequence_number(), self._stack[-1] if self._stack else ""
        if self._numbers and self._numbers[-1] == number:
            self._since[-1] = path
            return
        self._numbers.append(number)
        self._since.append(path)
