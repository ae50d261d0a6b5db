"""What stands, in a stage, where a module of the model stood that lies above a cut."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Holder"]


class Holder(nn.Module):
    """Holds what is below, and the parameters and buffers of its own that the stage reads; it is never called.

    Its mode is that of the module that it stands for: ``train()`` on one is ``train()`` on the other.

    Args:
        ancestor: the module of the model.
    """

    def __init__(self, ancestor: nn.Module) -> None:
        self.__dict__["_ancestor"] = (ancestor,)  # in a tuple: no child
        super().__init__()

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Of the module of the model."""
        ancestor: nn.Module = self.__dict__["_ancestor"][0]
        return ancestor.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_modules" in self.__dict__:  # and not while it is being made
            self.__dict__["_ancestor"][0].training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: its forward is spread over stages."""
        name = type(self.__dict__["_ancestor"][0]).__name__
        raise RuntimeError(f"this {name} lies above a cut of the pipeline: its stages run it, and it is not called")

    def extra_repr(self) -> str:
        return f"of {type(self.__dict__['_ancestor'][0]).__name__}"
