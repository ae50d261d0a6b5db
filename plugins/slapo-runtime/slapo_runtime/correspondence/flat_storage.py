"""The storage of parameters and optimizer state in the flat tensors of a runtime.

A dialect gives the location of each parameter (:class:`StoredParameter`) and the groups of the optimizer
(:class:`StoredGroup`); state dicts, checkpoints and their loading follow from these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError, warn_user
from slapo_runtime.correspondence.storage import TorchOptimizer
from slapo_runtime.flat_shards import FlatShard, gathered, is_rounding
from slapo_runtime.ranks.world import World

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.storage import LiveTensor


@dataclass(frozen=True)
class StoredParameter:
    """The storage of one parameter on this rank.

    Args:
        main: this rank's shard of the main copy, which the optimizer steps; None if it steps the parameter itself, or
            if other replicas hold all of it.
        working: this rank's shard of the forward's copy, if replicas partition it, too (ZeRO-3).
        dtype: of the trained values.
        is_part: whether replicas hold shards of the trained values.
        optimizer: of torch, which steps it; None if it is not stepped.
    """

    main: FlatShard | None = None
    working: FlatShard | None = None
    dtype: torch.dtype = torch.float32
    is_part: bool = False
    optimizer: torch.optim.Optimizer | None = None

    @property
    def trained(self) -> FlatShard | None:
        """This rank's shard of the saved values; None: the parameter itself, or no elements."""
        return self.main or self.working


@dataclass
class StoredGroup:
    """One group of an optimizer, with the model's own parameters.

    Args:
        parameters: of the group, including parameters that other ranks hold.
        settings: the live settings of the group, without its parameters; loading writes into it.
    """

    parameters: Sequence[torch.Tensor]
    settings: dict[str, Any] = field(default_factory=dict)


class FlatStorage:
    """The storage of a runtime's parameters.

    Args:
        held: by the identity of the parameter; the model holds the others itself.
        mesh: of the schedule; None for one process.
        device: of the process groups.
        groups: over which parameters are sharded: the replicas are their product; None: the group along ``dp``.
        order: parameters in the same order on all replicas, also on replicas without elements of some.
    """

    def __init__(
        self,
        held: Mapping[int, StoredParameter],
        mesh: Mesh | None,
        device: torch.device,
        *,
        groups: Sequence[Any] | None = None,
        order: Sequence[torch.Tensor] = (),
    ) -> None:
        self.held, self.order, self._device = held, order, device
        self._replicas = mesh.size("dp") if mesh is not None else 1
        own = [mesh.group("dp")] if mesh is not None and self._replicas > 1 else []
        self.groups: Sequence[Any] = own if groups is None else groups
        self.shard_mesh = mesh if self.groups else None

    def of(self, parameter: torch.Tensor) -> StoredParameter | None:
        """Return a parameter's storage; None if the model holds it itself."""
        return self.held.get(id(parameter))

    @property
    def are_parts(self) -> bool:
        """Whether replicas hold shards of a parameter."""
        return self._replicas > 1 and any(one.is_part for one in self.held.values())

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the mesh dimensions along which ranks hold shards of a parameter."""
        held = self.of(parameter)
        return ("dp",) if held is not None and held.is_part and self._replicas > 1 else ()

    def gather(
        self, parameter: torch.Tensor, shape: tuple[int, ...], place: FlatShard | None, own: Any
    ) -> torch.Tensor:
        """All-gather a tensor of a parameter's shape over its replicas.

        Args:
            parameter: of the tensor.
            shape: of the parameter.
            place: of this rank's shard; None if it has no elements.
            own: this rank's shard, flat.
        """
        groups = self.groups if self.partitioned(parameter) else []
        return gathered(own, 0 if place is None else place.offset, shape, groups, device=self._device)


class FlatTensors:
    """The implementation of :class:`slapo_runtime.correspondence.storage.TensorStorage` by flat tensors.

    Args:
        storage: of the parameters.
    """

    def __init__(self, storage: FlatStorage) -> None:
        self.storage = storage
        self._follows = True

    def end(self) -> None:
        """Stop comparing parameters with main weights, which may not be copied any more."""
        self._follows = False

    def is_full(self, parameter: torch.Tensor) -> bool:
        """Return whether a partitioned parameter is full in the model now."""
        return True

    def partitioned(self, live: LiveTensor) -> tuple[str, ...]:
        return self.storage.partitioned(live.tensor)

    def dtype(self, live: LiveTensor) -> torch.dtype:
        held = self.storage.of(live.tensor)
        return live.tensor.dtype if held is None else held.dtype

    def read(self, live: LiveTensor) -> torch.Tensor:
        held = self.storage.of(live.tensor)
        if held is None or (held.trained is None and not held.is_part):
            return live.tensor.detach()
        place = held.trained
        if place is None:
            return self.storage.gather(
                live.tensor, tuple(live.tensor.shape), None, live.tensor.new_empty(0, dtype=held.dtype)
            )
        return self.storage.gather(live.tensor, place.shape, place, place.of(place.flat))

    def loading(self, live: LiveTensor, value: torch.Tensor) -> Callable[[], None]:
        held = self.storage.of(live.tensor) or StoredParameter()
        parts = [(place, place.part(value).clone()) for place in (held.main, held.working) if place is not None]
        full = value if held.working is None or self.is_full(live.tensor) else None

        def write() -> None:
            with torch.no_grad():
                for place, part in parts:
                    place.of(place.flat).copy_(part)
                if full is not None:
                    live.tensor.data.copy_(full)

        return write

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        held = self.storage.of(live.tensor)
        if held is None or not self._follows or not self._is_copy(held, live.tensor):
            return None
        return live.tensor.detach() if held.working is None or self.is_full(live.tensor) else None

    def is_current(self, live: LiveTensor) -> bool:
        held = self.storage.of(live.tensor)
        if held is None or not self._follows:
            return True
        main, own = held.main, held.working
        if own is None:
            return main is None or is_rounding(main.part(live.tensor), main.of(main.flat))
        shard = own.of(own.flat)
        follows = main is None or is_rounding(shard, main.of(main.flat))
        return follows and (not self.is_full(live.tensor) or is_rounding(own.part(live.tensor), shard))

    @staticmethod
    def _is_copy(held: StoredParameter, parameter: torch.Tensor) -> bool:
        """Return whether the forward uses another tensor than the trained one."""
        if held.main is None and held.working is None:
            return held.is_part
        return held.working is not None or (held.main is not None and held.main.flat is not parameter)


class FlatOptimizer:
    """The implementation of :class:`slapo_runtime.correspondence.storage.OptimizerStorage` by flat tensors.

    Args:
        storage: of the parameters.
        groups: of the optimizer, in the order of the user's factory.
        names: of the parameters, by identity, for messages.
        runtime: its name, for messages.
        optimizers: of torch, of one class.
        scheduled: settings that the runtime sets before each step.

    Raises:
        BuildError: the optimizers are of several classes.
    """

    def __init__(
        self,
        storage: FlatStorage,
        groups: Sequence[StoredGroup],
        names: Mapping[int, str],
        runtime: str,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        scheduled: Collection[str] = (),
    ) -> None:
        self._storage, self._groups, self._names, self._runtime = storage, groups, names, runtime
        self._optimizers = list({id(one): one for one in optimizers}.values())
        self.scheduled = scheduled
        self.loaded: Sequence[Mapping[str, Any]] | None = None
        kinds = sorted({self.kind_of(one) for one in self._optimizers})
        if len(kinds) != 1:
            raise BuildError(
                f"{runtime}'s optimizers are {' and '.join(kinds)}: a checkpoint holds the state of one class"
            )
        self.kind = kinds[0]
        self._elsewhere: dict[int, dict[str, Any]] = {}

    # -- what differs from runtime to runtime -------------------------------------------------------------------

    def kind_of(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the equivalent class of torch."""
        return type(optimizer).__name__

    def state_of(self, held: StoredParameter) -> dict[str, Any]:
        """Return the live state of a parameter's flat tensor."""
        assert held.main is not None
        assert held.optimizer is not None
        return dict(held.optimizer.state.get(held.main.flat, {}))

    def put(self, optimizer: torch.optim.Optimizer, flat: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace the state of a flat tensor; an empty state removes it."""
        optimizer.state.pop(flat, None)
        if any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):  # also the steps
            state = {key: one.to(flat.device) if isinstance(one, torch.Tensor) else one for key, one in state.items()}
        if state:
            optimizer.state[flat] = state

    def settings_of(self, group: StoredGroup) -> dict[str, Any]:
        """Return the live settings of a group, which a runtime may keep elsewhere."""
        return group.settings

    def set_groups(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Set the settings of every group."""
        for group, values in zip(self._groups, settings, strict=True):
            self.settings_of(group).update(values)

    # -- the protocol ---------------------------------------------------------------------------------------------

    def gather_states(self) -> FlatOptimizer:
        """Gather the state of parameters that only other replicas hold: a collective over replicas."""
        order = self._storage.order
        own = {number: found for number, one in enumerate(order) if (found := self._described(one))}
        for number, found in merge_across_ranks(own, self._storage.shard_mesh).items():
            self._elsewhere[id(order[number])] = found
        return self

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        return [{**self.settings_of(group), "params": list(group.parameters)} for group in self._groups]

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        held = self._storage.of(parameter)
        return self._storage.partitioned(parameter) if held is not None and held.optimizer is not None else ()

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        held = self._storage.of(parameter)
        if held is None or held.optimizer is None:
            return self._own(parameter)
        described = self._described(parameter) or self._elsewhere.get(id(parameter), {})
        shape = parameter.shape if held.main is None else held.main.shape
        return {
            key: torch.empty(shape, dtype=value, device="meta") if isinstance(value, torch.dtype) else value
            for key, value in described.items()
        }

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        held = self._storage.of(parameter)
        if held is None or held.optimizer is None:
            value: torch.Tensor = self._own(parameter)[key]
            return value
        if held.main is None:
            empty = torch.empty(0, dtype=self._elsewhere[id(parameter)][key])
            return self._storage.gather(parameter, tuple(parameter.shape), None, empty)
        shard = held.main.of(self.state_of(held)[key])
        return self._storage.gather(parameter, held.main.shape, held.main, shard)

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        held = self._storage.of(parameter)
        if held is None or held.optimizer is None:
            self._own(parameter)[key].copy_(value)
        elif held.main is not None:
            held.main.of(self.state_of(held)[key]).copy_(held.main.part(value))

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        new = list(self._flat_states(states))
        plain = self._plain(states)

        def take() -> None:
            for load in plain:
                load()
            for optimizer, flat, state in new:
                self.put(optimizer, flat, state)
            self.set_groups(groups)
            self.loaded = groups

        return take

    # -- inside ---------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._groups:
            yield from group.parameters

    def _own(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """Return the state of a parameter that an optimizer steps directly."""
        return next((one.state[parameter] for one in self._optimizers if parameter in one.state), {})

    def _plain(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> list[Callable[[], None]]:
        """Prepare to load the states of parameters that optimizers step directly, as torch does."""
        loads = []
        for optimizer in self._optimizers:
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            own = {one: states[one] for one in stepped if self._storage.of(one) is None and one in states}
            if stepped and all(self._storage.of(one) is None and id(one) in self._names for one in stepped):
                settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
                loads.append(TorchOptimizer(optimizer).loading(settings, own))
        return loads

    def _described(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state by key, with dtypes for tensors of the parameter's shape."""
        held = self._storage.of(parameter)
        if held is None or held.main is None or held.optimizer is None:
            return {}
        return {
            key: value.dtype if _is_moment(key, value, held.main) else value
            for key, value in self.state_of(held).items()
        }

    def _flat_states(
        self, states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Any]]]:
        """Yield each flat tensor with its optimizer and its new state."""
        by_flat: dict[int, list[tuple[torch.Tensor, StoredParameter]]] = {}
        for parameter in self._parameters():
            held = self._storage.of(parameter)
            if held is not None and held.main is not None and held.optimizer is not None:
                by_flat.setdefault(id(held.main.flat), []).append((parameter, held))
        for inside in by_flat.values():
            held = inside[0][1]
            assert held.main is not None
            assert held.optimizer is not None
            yield held.optimizer, held.main.flat, self._state_of(held, inside, states)

    def _state_of(
        self,
        first: StoredParameter,
        inside: Iterable[tuple[torch.Tensor, StoredParameter]],
        states: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Combine the states of the parameters in a flat tensor, reading each once.

        Raises:
            BuildError: their numbers of steps differ, or a tensor does not have its parameter's shape.
        """
        assert first.main is not None
        flat, before = first.main.flat, self.state_of(first)
        found: dict[str, Any] = {}
        source: dict[str, str] = {}  # key -> the parameter that gave its shared value
        lacking = []
        for parameter, held in inside:
            place, name = held.main, self._names[id(parameter)]
            assert place is not None
            if parameter not in states:
                lacking.append(name)
                continue
            for key, value in states[parameter].items():
                if _is_tensor(key, value, place.shape):
                    if tuple(value.shape) == place.shape:
                        if not isinstance(found.get(key), torch.Tensor):
                            found[key] = torch.zeros_like(flat, requires_grad=False)
                        place.of(found[key]).copy_(place.part(value))
                    elif place.length == flat.numel() == parameter.numel():
                        found[key] = value.to(flat.device)  # factored state of a full parameter
                    else:
                        raise BuildError(
                            f"the checkpoint has '{key}' of shape {tuple(value.shape)} for '{name}' of shape "
                            f"{place.shape}: {self._runtime} only keeps tensors of the parameter's shape"
                        )
                elif key not in source:
                    source[key] = name
                    if not (value is None and isinstance(found.get(key), torch.Tensor)):
                        found[key] = _placed(value, before.get(key))
                elif value is not None and not _equal(found.get(key), value):
                    raise BuildError(
                        f"the checkpoint has '{key}' = {_shown(found[key])} for '{source[key]}' and {_shown(value)} "
                        f"for '{name}', but {self._runtime} keeps one number for both",
                        hint="put them into separate groups in the optimizer's factory, or switch off the partitioned "
                        "optimizer",
                    )
        if lacking and found:
            shown = ", ".join(lacking[:_SHOWN]) + (f" and {len(lacking) - _SHOWN} more" if lacking[_SHOWN:] else "")
            warn_user(
                f"the checkpoint has no optimizer state for {shown}, which were not trained before: {self._runtime} "
                "gives them zeros, and the number of steps of the others",
            )
        return found


_SHOWN = 4  # names in a message
_NUMBERS = ("step", "mu_product", "eta", "mu")  # of torch's optimizers, also where a parameter is a single number


def _is_moment(key: str, value: Any, place: FlatShard) -> bool:
    """Return whether a state value has one element for each element of its flat tensor."""
    return isinstance(value, torch.Tensor) and value.shape == place.flat.shape and key not in _NUMBERS


def _is_tensor(key: str, value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, torch.Tensor) and (bool(value.dim()) or (not shape and key not in _NUMBERS))


def _placed(value: Any, before: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(before.device, before.dtype) if isinstance(before, torch.Tensor) else value.clone()
    return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and one.dim():
        return False
    return one is not None and float(one) == float(other)


def _shown(value: Any) -> str:
    return str(value.item() if isinstance(value, torch.Tensor) and not value.dim() else value)


def merge_across_ranks(own: dict[int, Any], mesh: Mesh | None) -> dict[int, Any]:
    """Merge dictionaries over the replicas of a mesh, first rank first: a collective."""
    found: dict[int, Any] = {}
    for theirs in World(mesh, over="dp").gather_once(own):
        for number, value in theirs.items():
            found.setdefault(number, value)
    return found
