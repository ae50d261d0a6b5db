"""This rank's part of the model: the modules of its stages, at the reference paths."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["Part"]


class Part(nn.Module):
    """Holds the modules and tensors of several stages; it has no forward, because the model runs on several ranks.

    ``part.get_submodule("encoder.layer.3")`` is the module of the scheduled model, the same object, where it runs on
    this rank. What stands at the path of a module that lies above a cut only holds what is below.

    Args:
        model: the scheduled one.
        stages: modules of the stages.
    """

    def __init__(self, model: nn.Module, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # no module of this one
        own = set(model.modules())
        for stage in stages:
            _merge(self, stage, own)

    def train(self, mode: bool = True) -> Part:
        """Put the whole model into a mode, of which other ranks have the rest: the same call on all of them."""
        if "_model" in self.__dict__:
            self.__dict__["_model"].train(mode)
        return super().train(mode)  # type: ignore[return-value]

    def forward(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("this is one rank's part of the model: call engine.train_step(batch) or eval_step")


class _Above(nn.Module):
    """Above a cut."""


def _merge(into: nn.Module, stage: nn.Module, own: set[nn.Module]) -> None:
    for name, parameter in stage._parameters.items():
        if name not in into._parameters:
            into.register_parameter(name, parameter)
    for name, buffer in stage._buffers.items():
        if name not in into._buffers:
            into.register_buffer(name, buffer, persistent=name not in stage._non_persistent_buffers_set)
    for name, child in stage._modules.items():
        there = into._modules.get(name)
        if child is None or there in own:
            continue
        if child in own:
            into.add_module(name, child)
            continue
        if there is None:  # what is above several stages is another object in each of them
            there = _Above()
            into.add_module(name, there)
        _merge(there, child, own)
