"""Access Megatron's optimizer by the parameters of the model.

Apart from the optimizer's settings, a group of Megatron's has those of its scheduler (``wd_mult``,
``max_lr``, ...). Those are of the build: a checkpoint holds the optimizer's settings only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core import BuildError
from slapo_megatron.state.tensors import merge_across_ranks, shared_dims
from slapo_runtime.flat_shards import gathered

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_megatron.state.flat_layout import Held, Places

_OF_THE_BUILD = (
    "wd_mult",
    "lr_mult",
    "max_lr",
    "min_lr",
    "start_wd",
    "end_wd",
    "pre_wd_mult",
    "pre_lr_mult",
    "default_config",
    "is_expert_parallel",
    "is_decoupled_lr",
)
_FUSED = ("lr", "betas", "eps", "weight_decay")  # settings that a fused Adam shares with torch's


def counts_in_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer counts its steps once for each group: the fused Adam of Transformer Engine and of Apex."""
    return type(optimizer).__name__ == "FusedAdam"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of torch that computes the same."""
    if not counts_in_groups(optimizer):
        return type(optimizer).__name__
    return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a group in a checkpoint, and those that loading changes."""
    if counts_in_groups(optimizer):
        return {key: group[key] for key in _FUSED if key in group}
    return {key: value for key, value in group.items() if key != "params" and key not in _OF_THE_BUILD}


_STEP = "step"


class StoredOptimizer:
    """The implementation of :class:`slapo_runtime.storage.OptimizerStorage`, as the optimizer is now.

    Args:
        places: of the engine, which has an optimizer.
        names: of the parameters, for messages.
        mesh: of the schedule; None for one process.
        device: that Megatron's groups send from.
        is_scheduled: whether a scheduler of Megatron sets rates and decays.

    Raises:
        BuildError: Megatron has optimizers of several kinds.
    """

    def __init__(
        self, places: Places, names: Mapping[int, str], mesh: Mesh | None, device: torch.device, *, is_scheduled: bool
    ) -> None:
        self._places, self._names, self._mesh, self._device = places, names, mesh, device
        self.scheduled: tuple[str, ...] = ("lr", "weight_decay") if is_scheduled else ()
        self.loaded: Sequence[Mapping[str, Any]] | None = None
        kinds = sorted({kind_of(inner) for inner in places.inner})
        if len(kinds) != 1:
            raise BuildError(f"Megatron's optimizers are {' and '.join(kinds)}: one checkpoint holds the state of one")
        self.kind = kinds[0]
        self._elsewhere: dict[int, dict[str, Any]] = {}

    def meet(self) -> StoredOptimizer:
        """Learn which state there is of parameters that lie on other replicas altogether: a collective over them."""
        described = {number: self._described(parameter) for number, parameter in enumerate(self._places.order)}
        own = {number: one for number, one in described.items() if one}
        for number, one in merge_across_ranks(own, self._places.shared).items():
            self._elsewhere[id(self._places.order[number])] = one
        return self

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        return [
            {**settings_of(inner, inner.param_groups[number]), "params": list(parameters)}
            for inner, number, parameters in self._places.groups
        ]

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        return shared_dims(self._held(parameter), self._mesh)

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        held = self._held(parameter)
        if held is None:
            return {}
        described = self._described(parameter)
        if held.is_part and not described:
            described = self._elsewhere.get(id(parameter), {})
        return {
            key: torch.empty(parameter.shape, dtype=value, device="meta") if isinstance(value, torch.dtype) else value
            for key, value in described.items()
        }

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        held = self._held(parameter)
        assert held is not None
        place, shape = held.place, tuple(parameter.shape)
        if not held.is_part:
            assert place is not None
            return place.of(held.inner.state[place.flat][key]).view(shape)
        if place is None:
            shard, offset = torch.empty(0, dtype=self._elsewhere[id(parameter)][key]), 0
        else:
            shard, offset = place.of(held.inner.state[place.flat][key]), place.offset
        return gathered(shard, offset, shape, self._places.shared, device=self._device)

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        held = self._held(parameter)
        if held is not None and held.place is not None:
            held.place.of(held.inner.state[held.place.flat][key]).copy_(held.place.part(value))

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        takes = [self._loading(inner, groups, states) for inner in self._places.inner]

        def take() -> None:
            for one in takes:
                one()
            self.loaded = groups

        return take

    # -- inside -------------------------------------------------------------------------------------------------

    def _loading(
        self,
        inner: torch.optim.Optimizer,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> Callable[[], None]:
        """Return the argument of ``torch.optim.Optimizer.load_state_dict``: stepped tensors by number."""
        stepped = {id(tensor): tensor for group in inner.param_groups for tensor in group["params"]}
        numbers = {key: number for number, key in enumerate(stepped)}
        packed: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        for (owner, _, parameters), settings in zip(self._places.groups, groups, strict=True):
            if owner is not inner:
                continue
            group = inner.param_groups[len(packed)]
            own = settings_of(inner, group) if counts_in_groups(inner) else settings
            known = {key: value for key, value in settings.items() if key in own}
            packed.append({**group, **known, "params": [numbers[id(tensor)] for tensor in group["params"]]})
            counts = {}
            for parameter in parameters:
                place = self._places.held[id(parameter)].place if id(parameter) in self._places.held else None
                if place is None or parameter not in states:
                    continue
                values = dict(self._parts(parameter, place, states[parameter]))
                if counts_in_groups(inner) and _STEP in values:
                    counts[self._names[id(parameter)]] = int(values.pop(_STEP))
                state[numbers[id(place.flat)]] = values
            if counts_in_groups(inner):
                packed[-1].pop(_STEP, None)
                packed[-1] |= _one_count(counts)
        return lambda: inner.load_state_dict({"state": state, "param_groups": packed})

    def _parts(self, parameter: torch.Tensor, place: Any, values: Mapping[str, Any]) -> Any:
        """Yield this rank's parts of a parameter's state; each value is read once."""
        for key in values:
            value = values[key]
            if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(parameter.shape) and key != _STEP:
                yield key, place.part(value).clone().view(place.flat.shape)
            elif isinstance(value, torch.Tensor) and value.dim() and place.length < parameter.numel():
                raise BuildError(
                    f"the checkpoint has '{key}' of shape {tuple(value.shape)} for '{self._names[id(parameter)]}' of "
                    f"shape {tuple(parameter.shape)}: Megatron's distributed optimizer keeps only tensors of the "
                    "parameter's shape"
                )
            else:
                yield key, value

    def _described(self, parameter: torch.Tensor) -> dict[str, Any]:
        """By key: the dtype of a tensor of the parameter's shape, or the value of anything else."""
        held = self._held(parameter)
        if held is None or held.place is None:
            return {}
        flat = held.place.flat
        state = held.inner.state.get(flat, {})
        found = {
            key: value.dtype
            if isinstance(value, torch.Tensor) and value.shape == flat.shape and key != _STEP
            else value
            for key, value in state.items()
        }
        if found and counts_in_groups(held.inner):
            group = next(one for one in held.inner.param_groups if any(flat is tensor for tensor in one["params"]))
            found[_STEP] = torch.tensor(float(group.get(_STEP, 0)))
        return found

    def _held(self, parameter: torch.Tensor) -> Held | None:
        return self._places.held.get(id(parameter))


def _one_count(counts: Mapping[str, int]) -> dict[str, int]:
    """The number of steps of a group, where all its parameters took the same."""
    if not counts:
        return {}
    first = next(iter(counts))
    for name, count in counts.items():
        if count != counts[first]:
            raise BuildError(
                f"the checkpoint has '{_STEP}' = {counts[first]} for '{first}' and {count} for '{name}', and a fused "
                "Adam keeps one number for both",
                hint="put them into groups of their own",
            )
    return {_STEP: counts[first]}
