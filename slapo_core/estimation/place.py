"""Where in a training step an operation is: the phase, and the module that runs or whose backward pass runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core.estimation.private import current_autograd_node, next_sequence_number
from slapo_core.graph.session import PATCHING
from slapo_core.spec.watching import Origin, attributed

__all__ = ["At", "Place"]

_NO_SEQUENCE = 2**64 - 1  # of the nodes that add to a parameter's gradient


class At(NamedTuple):
    """Whose code runs.

    Args:
        module: path of the module.
        record: the step of the schedule that put the code there, as in ``str(record)``; empty for the model's own.
    """

    module: str
    record: str = ""


_MODEL = At("")


class Place:
    """What is asked of it while operations run; being asked is the only thing that costs.

    A forward pass numbers its autograd nodes in the order in which it makes them; so the number at which each module
    begins and ends says, in the backward pass, whose node runs.

    Args:
        paths: of the modules, by what ``id`` says; a module that is not among them counts as part of its caller.
        owners: of the parameters likewise: the path of the module that holds one.

    Attributes:
        step: ``"forward"``, ``"backward"`` or ``"optimizer"``; the training step says so.
        hooks: path of a module and a hook there -> the step that registered it, as in ``str(record)``.
    """

    def __init__(self, paths: Mapping[int, str], owners: Mapping[int, str]) -> None:
        self.step = "forward"
        self._modules = {module: At(path) for module, path in paths.items()}
        self._owners = {parameter: At(path) for parameter, path in owners.items()}
        self.hooks: dict[tuple[str, Any], str] = {}
        self._stack: list[At] = []
        self._numbers: list[int] = []
        self._since: list[At] = []

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

        def noticed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            at = self._modules.get(id(module))
            return call(module, *args, **kwargs) if at is None else self.run(at, call, module, *args, **kwargs)

        with PATCHING:
            call = nn.Module.__call__
            nn.Module.__call__ = noticed  # type: ignore[method-assign]
            try:
                with attributed(self._run_from):
                    yield
            finally:
                nn.Module.__call__ = call  # type: ignore[method-assign]

    def run(self, at: At, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, which is code of ``at``."""
        self._stack.append(at)
        self._note()
        try:
            return function(*args, **kwargs)
        finally:
            self._stack.pop()
            self._note()

    def _run_from(self, origin: Origin, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run what a graph holds of a hook below the module that runs."""
        path = ".".join(filter(None, (self._now().module, origin.module)))
        return self.run(At(path, self.hooks.get((path, origin.hook), "")), function, *args)

    def own_code(self, module: nn.Module) -> At:
        """Where the forward of a module runs, without what steps put around it."""
        return self._modules.get(id(module), _MODEL)

    def came_by(self, module: nn.Module, record: str) -> None:
        """The module's own forward is what a step put there."""
        self._modules[id(module)] = At(self.own_code(module).module, record)

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
        return "optimizer" if self.step == "optimizer" else self._now().module

    @property
    def record(self) -> str:
        """The step whose code runs, or made what runs in the backward pass, as in ``str(record)``; empty for none."""
        return "" if self.step == "optimizer" else self._now().record

    def _now(self) -> At:
        if self._stack:
            return self._stack[-1]
        node = current_autograd_node() if self.step == "backward" else None
        if node is None:
            return _MODEL
        number = node._sequence_nr()
        if number == _NO_SEQUENCE:
            return self._owners.get(id(getattr(node, "variable", None)), _MODEL)
        before = bisect_right(self._numbers, number)
        return self._since[before - 1] if before else _MODEL

    def _note(self) -> None:
        """From the next node on, nodes are of the code on top; recomputation's too, whose numbers go on."""
        number, at = next_sequence_number(), self._stack[-1] if self._stack else _MODEL
        if self._numbers and self._numbers[-1] == number:
            self._since[-1] = at
            return
        self._numbers.append(number)
        self._since.append(at)
