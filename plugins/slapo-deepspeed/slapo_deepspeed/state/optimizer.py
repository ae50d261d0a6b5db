"""DeepSpeed's optimizer by the parameters of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_deepspeed.state.flat_layout import flat_states
from slapo_runtime.flat_shards import gathered

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_deepspeed.state.flat_layout import Places
    from slapo_deepspeed.state.parameter_groups import Groups
    from slapo_runtime.flat_shards import Place


class DeepSpeedOptimizer:
    """The implementation of :class:`slapo_runtime.storage.OptimizerStorage`.

    Args:
        places: of the engine, which has an optimizer.
        groups: as the user's factory made them.
        names: of the parameters, for messages.
        mesh: of the schedule; None for one process.
        device: that the mesh's groups send from.
    """

    scheduled: tuple[str, ...] = ()

    def __init__(
        self,
        places: Places,
        groups: Groups,
        names: Mapping[int, str],
        mesh: Mesh | None,
        device: torch.device,
    ) -> None:
        self._places, self._groups, self._names, self._mesh, self._device = places, groups, names, mesh, device
        self.kind = type(self._inner).__name__
        groups.check(self._inner)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        inner = self._places.optimizer
        assert inner is not None
        return inner

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        return self._groups.shown(self._inner)

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        is_part = self._places.are_parts and self._mesh is not None and self._mesh.size("dp") > 1
        return ("dp",) if is_part and self._place(parameter) is not None else ()

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        place = self._place(parameter)
        if place is None:
            return self._inner.state.get(parameter, {})
        return {
            key: torch.empty(place.shape, dtype=value.dtype, device="meta") if _is_moment(value, place) else value
            for key, value in self._inner.state.get(place.flat, {}).items()
        }

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        place = self._place(parameter)
        if place is None:
            value: torch.Tensor = self._inner.state[parameter][key]
            return value
        shard = place.of(self._inner.state[place.flat][key])
        groups = [self._mesh.group("dp")] if self._mesh is not None and self.partitioned(parameter) else []
        return gathered(shard, place.offset, place.shape, groups, device=self._device)

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        place = self._place(parameter)
        if place is None:
            self._inner.state[parameter][key].copy_(value)
        else:
            place.of(self._inner.state[place.flat][key]).copy_(place.part(value))

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        inner = self._inner
        new = flat_states(inner, self._places.by_parameter, self._parameters(), states, self._names)
        own = {
            parameter: dict(states[parameter])
            for parameter in self._parameters()
            if self._place(parameter) is None and parameter in states
        }

        def take() -> None:
            if not self._places.by_parameter:
                _load(inner, own)
            for flat, state in new:
                inner.state.pop(flat, None)
                if state:
                    inner.state[flat] = state
            self._groups.set(groups, inner)
            self._places.link()

        return take

    def _place(self, parameter: torch.Tensor) -> Place | None:
        return self._places.by_parameter.get(id(parameter))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._groups for parameter in group.parameters]


def _is_moment(value: Any, place: Place) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.dim()) and value.shape == place.flat.shape


def _load(inner: torch.optim.Optimizer, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Give an optimizer of the model's own parameters their states, in the types that torch gives them."""
    groups, state, number = [], {}, 0
    for group in inner.param_groups:
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        groups.append({**group, "params": numbers})
        found = zip(numbers, group["params"], strict=True)
        state.update({index: dict(states[parameter]) for index, parameter in found if parameter in states})
    inner.load_state_dict({"state": state, "param_groups": groups})
