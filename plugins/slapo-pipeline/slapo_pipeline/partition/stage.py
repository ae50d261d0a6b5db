"""`CutStage`: a stage that runs its part of the flat graph on its part of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core import GuardError
from slapo_core.spec.pipeline import StageModule
from slapo_core.tracing import GuardViolation, set_state, state

__all__ = ["CutStage", "Holder"]


class Holder(nn.Module):
    """Stands where a module stood that lies above a cut: it holds what is below, and is never called."""


class CutStage(StageModule):
    """See :class:`StageModule`.

    Args:
        index: of the stage.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        object.__setattr__(self, "_index", index)

    def hold(self, path: str, module: nn.Module) -> None:
        """Put a module of the model at its path."""
        owner, name = self._owner(path)
        owner.add_module(name, module)

    def hold_tensor(self, path: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
        """Put a parameter or buffer that an ancestor owns at its path."""
        owner, name = self._owner(path)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(name, tensor)
        else:
            owner.register_buffer(name, tensor, persistent=persistent)

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        *above, name = path.split(".")
        owner: nn.Module = self
        for part in above:
            if part not in owner._modules:
                owner.add_module(part, Holder())
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner, name

    def run_with(
        self,
        code: Callable[..., Any],
        sources: Sequence[tuple[str, Any]],
        require: Callable[[], None],
        violated: Callable[[GuardViolation], GuardError],
    ) -> None:
        """What the stage computes.

        Args:
            code: a function of this module and of ``sources``.
            sources: what it is given, in order: ``("input", name)``, ``("value", name)``, ``("constant", tensor)``, or
                ``("grad", None)``.
            require: raises where the model is not what it was.
            violated: makes the error for a guard.
        """
        self.__dict__["_code"] = (code, tuple(sources), require, violated)

    def forward(self, inputs: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        code, sources, require, violated = self.__dict__["_code"]
        require()
        given = []
        before = state()
        for kind, what in sources:
            if kind == "input":
                given.append(inputs[what])
            elif kind == "value":
                given.append(values[what])
            else:
                given.append(before[0] if kind == "grad" else what)
        try:
            made: dict[str, torch.Tensor] = code(self, *given)
        except GuardViolation as error:
            raise violated(error) from None
        finally:
            set_state(*before)
        return made
