"""Something to schedule: how to make it, and one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.integration.zoo.architectures import CannotMake, architectures
from tests.integration.zoo.torch_models import TORCH_MODELS

__all__ = ["Subject", "call", "copied", "subject", "subjects"]


@dataclass(frozen=True)
class Subject:
    """A model that can be made again and again, each time the same.

    Args:
        name: e.g. ``"bert"``, or ``"torch: lstm"``.
        model: the class's name.
        build: makes the model.
        batch: one batch for it, always the same.
    """

    name: str
    model: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module], Any]

    def make(self) -> nn.Module:
        """A fresh instance in training mode, with the same values every time.

        Raises:
            CannotMake: there is no tiny instance of it.
        """
        torch.manual_seed(0)
        return self.build().train()

    def given(self) -> tuple[nn.Module, Any]:
        """A fresh instance and its batch."""
        model = self.make()
        return model, self.batch(model)

    def check_that_it_runs(self) -> None:
        """Run the reference model.

        Raises:
            CannotMake: it does not run on the batch.
        """
        model, batch = self.given()
        try:
            call(model, batch)
        except Exception as error:
            raise CannotMake(f"running: {type(error).__name__}: {' '.join(str(error).split())[:160]}") from error


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch in the form that ``slapo.verify`` takes."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a model; tensors that a forward left in its modules lose their graph, which cannot be copied."""
    left = [tensor for module in model.modules() for tensor in (*vars(module).values(), *module.buffers(recurse=False))]
    memo = {id(one): one.detach().clone() for one in left if isinstance(one, torch.Tensor) and one.grad_fn is not None}
    return copy.deepcopy(model, memo)


def subjects() -> tuple[Subject, ...]:
    """Every model of torch.nn that is listed, and every architecture of transformers."""
    plain = [
        Subject(f"torch: {name}", build.__name__, build, lambda model, make_batch=batch: make_batch())
        for name, (build, batch) in TORCH_MODELS.items()
    ]
    known = [Subject(each.name, each.model, each.make, each.inputs) for each in architectures()]
    return (*plain, *known)


def subject(name: str) -> Subject:
    """One of :func:`subjects`, by its name."""
    return next(each for each in subjects() if each.name == name)
