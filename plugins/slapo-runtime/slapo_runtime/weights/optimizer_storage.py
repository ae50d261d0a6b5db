"""Storages of plain torch: the model's own tensors, and an optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError
from slapo_runtime.state import OptimizerStorage

if TYPE_CHECKING:
    from slapo_runtime.state import LiveTensor


class InPlace:
    """The implementation of :class:`slapo_runtime.state.TensorStorage` where the model holds its own tensors.

    Those that torch's ``fully_shard`` partitions over replicas are DTensors: full over these for who reads them.
    """

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        return sharded_over(live.tensor)

    def dtype(self, live: LiveTensor) -> torch.dtype:
        return live.tensor.dtype

    def read(self, live: LiveTensor) -> torch.Tensor:
        tensor: Any = live.tensor
        return tensor.detach().full_tensor() if sharded_over(tensor) else tensor  # type: ignore[no-any-return]

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        def assign() -> None:
            tensor: Any = live.tensor
            with torch.no_grad():
                if sharded_over(tensor):
                    from torch.distributed.tensor import distribute_tensor

                    own = value.to(tensor.device, tensor.dtype)
                    tensor.copy_(distribute_tensor(own, tensor.device_mesh, tensor.placements, src_data_rank=None))
                else:
                    tensor.copy_(value)

        return assign

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        return None

    def is_current(self, live: LiveTensor) -> bool:
        return True


class TorchOptimizer:
    """The implementation of :class:`slapo_runtime.state.OptimizerStorage` by an optimizer of the model's tensors.

    Args:
        optimizer: its parameters are the model's.
    """

    scheduled: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind = type(optimizer).__name__
        self._optimizer = optimizer
        self._before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        foreign = [key for key in optimizer.state if id(key) not in own]
        if foreign:
            raise BuildError(
                f"{self.kind} keeps state of {len(foreign)} tensors that are in none of its groups of parameters",
                hint="give it every parameter whose state it keeps",
            )

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        return self._optimizer.param_groups

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        return ()

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        return self._optimizer.state.get(parameter, {})

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        value: torch.Tensor = self._optimizer.state[parameter][key]
        return value

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        self._optimizer.state[parameter][key].copy_(value)

    def put(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """Replace a tensor of the state by one in its own type, which ``load_state_dict`` does not keep."""
        self._optimizer.state[parameter][key] = value.to(parameter.device)

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        """Prepare ``torch.optim.Optimizer.load_state_dict``, with parameters numbered by groups.

        What is returned may fail, because an optimizer may refuse what was read; :meth:`take_back` is for that.
        """
        packed: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        values = {parameter: dict(state) for parameter, state in states.items()}
        number = 0
        for present, settings in zip(self._optimizer.param_groups, groups, strict=True):
            numbers = list(range(number, number + len(present["params"])))
            number += len(numbers)
            packed.append({**settings, "params": numbers})
            for index, parameter in zip(numbers, present["params"], strict=True):
                if parameter in values:
                    state[index] = values[parameter]
        return lambda: self._optimizer.load_state_dict({"state": state, "param_groups": packed})

    def take_back(self) -> None:
        """Give the optimizer the state that it had when this was made."""
        self._optimizer.__setstate__(self._before)


def sharded_over(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh dimensions over which ``fully_shard`` partitions a tensor; none of a plain one."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "device_mesh"):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, one in zip(names, tensor.placements, strict=True) if not one.is_replicate())  # type: ignore[attr-defined]


def optimizer_storage(optimizer: torch.optim.Optimizer | OptimizerStorage | None) -> OptimizerStorage | None:
    """An optimizer in whatever form the state is given it."""
    return TorchOptimizer(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
