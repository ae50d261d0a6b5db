"""What the user gave to `build`, beside the schedule and the options of the dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slapo_core.errors import BuildError, OptimizerError
from slapo_core.spec.accelerators import device_of
from slapo_core.spec.dialect import BuildArguments

__all__ = ["Arguments"]


@dataclass(frozen=True)
class Arguments:
    """The arguments of :func:`slapo_core.build`, as they were given."""

    optimizer: Any
    weights: Any
    loss: Any
    max_grad_norm: float | None
    device: torch.device | str | None
    seed: int
    accumulate: int = 1
    elementwise: bool = False

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            OptimizerError: an optimizer instead of a factory.
            BuildError: a bad number, or a loss that cannot be called.
        """
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            name = type(optimizer).__name__
            rate = optimizer.param_groups[0].get("lr")
            shown = f", lr={float(rate):g}" if isinstance(rate, (int, float)) else ""
            raise OptimizerError(
                f"optimizer must be a factory (got the optimizer {name}, made before the schedule was built, which "
                "holds the parameters of the reference model)",
                hint=f"build(sch, optimizer=lambda params: torch.optim.{name}(params{shown}))",
            )
        if optimizer is not None and not callable(optimizer):
            raise OptimizerError(
                f"optimizer must be a factory (got {optimizer!r})",
                hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
            )
        if self.loss is not None and not callable(self.loss):
            raise BuildError(
                f"loss must be a function of the output and the batch (got {self.loss!r})",
                hint="loss=lambda output, batch: ...",
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise BuildError(
                f"max_grad_norm must be positive (got {self.max_grad_norm})", hint="max_grad_norm=1.0, or None"
            )

        if type(self.accumulate) is not int or self.accumulate < 1:
            raise BuildError(
                f"accumulate must be a positive number of micro-batches (got {self.accumulate!r})", hint="accumulate=4"
            )

    def for_plan(self) -> BuildArguments:
        """What a dialect may make part of its plan."""
        return BuildArguments(
            has_optimizer=self.optimizer is not None,
            has_loss=self.loss is not None,
            max_grad_norm=self.max_grad_norm,
            accumulate=self.accumulate,
            device=self.torch_device(),
        )

    def torch_device(self) -> torch.device | None:
        """The device with its index, so that it compares equal to that of a tensor."""
        if self.device is None:
            return None
        device = torch.device(self.device)
        return device_of(device.type) if device.index is None and device.type not in ("cpu", "meta") else device
