"""Convert an optimizer's state to and from the reference model's names and full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError, OptimizerError
from slapo_core.layout import Layout
from slapo_runtime.correspondence.storage import TorchOptimizer
from slapo_runtime.ranks.world import gather_along
from slapo_runtime.weights.optimizer import ELEMENTWISE
from slapo_runtime.weights.optimizer_groups import RankState, StateTensor, matched_settings, merge
from slapo_runtime.weights.sources import WeightsSource

if TYPE_CHECKING:
    from slapo_runtime.correspondence.storage import LiveTensor, OptimizerStorage
    from slapo_runtime.weights.state import ModelState


_NAMING = ("params", "param_names")  # no settings
_SEPARATOR = "::"  # between a parameter's name and the key of its state: "fc.weight::exp_avg"


@dataclass(frozen=True)
class Moment:
    """A tensor of the state.

    Args:
        layout: of the full tensor.
        dtype: its type.
        is_typed: whether that is not the type of its parameter, to which torch would cast it.
        read: reads this rank's shard; a collective over ``partitioned``.
        partitioned: the mesh dimensions over which it is partitioned.
        held: the tensor itself of a torch optimizer, which may be a DTensor; None of another.
    """

    layout: Layout
    dtype: torch.dtype
    is_typed: bool
    read: Callable[[], torch.Tensor]
    partitioned: tuple[str, ...] = ()
    held: torch.Tensor | None = None


class OptimizerState:
    """The state of an optimizer over a scheduled model's parameters.

    With pipeline stages, each rank collects the state of its own parameters; :meth:`gather_ranks` gathers all states,
    and :meth:`merge` merges them.

    Args:
        state: of the model.
        optimizer: of the model's parameters.

    Raises:
        BuildError: a sharded parameter has a state tensor of another shape that is not a scalar, or a value is neither
            a tensor nor JSON.
        OptimizerError: it holds foreign parameters.
    """

    def __init__(self, state: ModelState, optimizer: OptimizerStorage) -> None:
        self._mesh = state.mesh
        self._storage = optimizer
        self._kind = optimizer.kind
        self._state = state
        origins = state.correspondence.survey.origins
        self._layouts: dict[int, tuple[str, Layout, tuple[int, ...]]] = {}
        for live in state.tensors():
            carried = bool(live.reference_names) and live.layout.origin in origins
            name = live.reference_names[0] if carried else _own_name(live, origins)
            shape = tuple(live.tensor.shape) if state.kept is None else live.layout.local_shape(self._mesh)
            self._layouts[id(live.tensor)] = (name, live.layout, shape)
        self._refuse_foreign()
        self._take: Callable[[], None] | None = None
        self._typed: list[tuple[torch.Tensor, str, Callable[[], Any]]] = []  # with another type than their parameters
        self._tensors: dict[str, Moment] = {}
        self._scalars: dict[str, dict[str, Any]] = {}
        self._groups = [self._group(group) for group in optimizer.param_groups]
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            self._collect(parameter, optimizer.state(parameter))
        self._tensors = dict(sorted(self._tensors.items()))  # gathered in the same order on every rank
        self._order = [name for name, _, _ in self._layouts.values()]
        self._own = set(self._order) if state.correspondence.placement is None else set(self._of_this_rank())
        self._parts: list[RankState] = []
        self._held: dict[str, StateTensor] = {}  # the tensors of all ranks along pp

    def gather_ranks(self) -> None:
        """Gather the states of the other pipeline ranks: a collective, before any other call."""
        if self._state.correspondence.placement is None:
            return
        states = {
            key: StateTensor((), tuple(one.layout.shape), one.dtype, one.is_typed) for key, one in self._tensors.items()
        }
        is_torch = isinstance(self._storage, TorchOptimizer)
        assert self._mesh is not None
        own = RankState(self._groups, self._scalars, states, is_torch)
        self._parts = gather_along(self._mesh, "pp", own)

    def merge(self) -> None:
        """Merge the states of the pipeline ranks."""
        if self._parts:
            merged = merge(self._parts, self._order)
            self._groups, self._scalars, self._held = merged.groups, merged.scalars, merged.held

    # -- out --------------------------------------------------------------------------------------------------

    def gather(self, *, wanted: bool) -> dict[str, torch.Tensor]:
        """Gather the full state tensors on the CPU, one after the other: a collective.

        Args:
            wanted: whether this rank keeps them; else it only takes part.
        """
        found = {}
        for name in self._held or self._tensors:
            one = self._tensors.get(name)
            value = one.layout.full(one.read(), self._mesh) if one is not None else None
            if name in self._held:
                held = self._held[name]
                value = self._state.from_holders(value, held.shape, held.dtype, {"pp": held.places})
            assert value is not None
            if wanted:
                found[name] = value.to("cpu", copy=True)
        return found

    def shards(self) -> Iterator[tuple[str, Moment, Mapping[str, tuple[int, ...]]]]:
        """Yield this rank's state tensors, with the holders along ``pp``, in the same order on all ranks."""
        for name, one in self._tensors.items():
            yield name, one, {"pp": self._held[name].places} if name in self._held else {}

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the full, merged state tensors."""
        own = {name: list(one.layout.shape) for name, one in self._tensors.items()}
        return {name: list(held.shape) for name, held in self._held.items()} or own

    def description(self) -> dict[str, Any]:
        """Return everything but the tensors, as JSON values."""
        held: Mapping[str, Moment | StateTensor] = {**self._tensors, **self._held}
        is_torchs = self._state.kept is None
        types = {key: str(one.dtype).removeprefix("torch.") for key, one in held.items() if is_torchs and one.is_typed}
        return {"type": self._kind, "groups": self._groups, "scalars": self._scalars, "types": types}

    def nested(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state by parameter and key, as a full one of ``torch.distributed.checkpoint``.

        Args:
            tensors: from :meth:`gather`.
        """
        states = {name: dict(values) for name, values in self._scalars.items()}
        for key, value in tensors.items():
            name, _, own_key = key.rpartition(_SEPARATOR)
            states.setdefault(name, {})[own_key] = value
        groups = [
            {**{key: _from_json(value, None) for key, value in one["hyperparameters"].items()}, "params": one["params"]}
            for one in self._groups
        ]
        in_order = {name: states[name] for name in dict.fromkeys(self._order) if name in states}
        return {"type": self._kind, "state": in_order, "param_groups": groups}

    def flat(self, nested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the description and the tensors of a :meth:`nested` state, for :meth:`prepare`.

        Raises:
            BuildError: a tensor does not have its parameter's shape, as this optimizer requires.
        """
        specs = self._state.correspondence.survey.specs
        scalars: dict[str, dict[str, Any]] = {}
        tensors: dict[str, torch.Tensor] = {}
        types = []
        for name, values in nested["state"].items():
            spec = specs.get(name)
            for key, value in values.items():
                if not isinstance(value, torch.Tensor):
                    scalars.setdefault(name, {})[key] = value
                    continue
                tensors[f"{name}{_SEPARATOR}{key}"] = value
                if spec is None or not value.dim():
                    continue
                if self._kind in ELEMENTWISE["torch"] and tuple(value.shape) != spec.shape:
                    raise BuildError(
                        f"the state holds '{key}' of shape {tuple(value.shape)} for '{name}' of shape {spec.shape}",
                        hint="load the state of an optimizer of the same model",
                    )
                if value.is_floating_point() and value.dtype != spec.dtype:
                    types.append(f"{name}{_SEPARATOR}{key}")
        groups = [
            {
                "params": group["params"],
                "hyperparameters": {key: _to_json(value, key) for key, value in group.items() if key not in _NAMING},
            }
            for group in nested["param_groups"]
        ]
        kind = nested.get("type", self._kind)
        return {"type": kind, "groups": groups, "scalars": scalars, "types": types}, tensors

    def _refuse_foreign(self) -> None:
        held = [parameter for group in self._storage.param_groups for parameter in group["params"]]
        foreign = [parameter for parameter in held if id(parameter) not in self._layouts]
        if foreign:
            raise OptimizerError(
                f"{self._kind} holds {len(foreign)} parameters that the scheduled model does not have, e.g. one of "
                f"shape {tuple(foreign[0].shape)}",
                hint="make the optimizer of sch.model.parameters(), after the last step and after fully_shard",
            )

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        hyperparameters = {
            key: _to_json(value, f"'{key}' of {self._kind}") for key, value in group.items() if key not in _NAMING
        }
        names = [self._layouts[id(p)][0] for p in group["params"]]
        return {"params": names, "hyperparameters": hyperparameters}

    def _collect(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        name, layout, local_shape = self._layouts[id(parameter)]
        is_full = self._owns_full(parameter) is not None
        for key, value in state.items():
            full_key = f"{name}{_SEPARATOR}{key}"
            if not isinstance(value, torch.Tensor):
                self._scalars.setdefault(name, {})[key] = _to_json(value, f"state '{key}' of {self._kind}")
            elif hasattr(value, "__tensor_flatten__"):  # made of other tensors, without own memory
                raise BuildError(
                    f"{self._kind} keeps '{key}' of '{name}' in a tensor made of others ({type(value).__name__}), "
                    "which safetensors cannot hold",
                    hint="use an optimizer with state in plain tensors, e.g. torch.optim.AdamW, or save the weights "
                    "only, by state_dict()",
                )
            elif value.dim() and tuple(value.shape) == local_shape and not is_full:
                self._tensors[full_key] = self._moment(layout, value, parameter, key)
            elif is_full or not value.dim() or not (self._is_split(layout) or value.is_meta):
                full = Layout(full_key, tuple(value.shape))
                own = Moment(full, value.dtype, _is_typed(value, parameter), partial(_same, value))
                self._tensors[full_key] = self._moment(full, value, parameter, key) if value.is_meta else own
            else:
                raise BuildError(
                    f"{self._kind} keeps '{key}' of shape {tuple(value.shape)} for '{name}' of local shape "
                    f"{local_shape}: its layout is unknown, so it cannot be saved",
                    hint="use an optimizer with state of its parameters' shapes, or save the weights only, by "
                    "state_dict()",
                )

    def _moment(self, layout: Layout, value: torch.Tensor, parameter: torch.Tensor, key: str) -> Moment:
        held = None
        if isinstance(self._storage, TorchOptimizer) and self._owns_full(parameter) is None:
            held = self._storage.held(parameter, key)
        read = partial(self._storage.read, parameter, key)
        is_typed = _is_typed(value, parameter)
        return Moment(layout, value.dtype, is_typed, read, self._storage.partitioned(parameter), held)

    def _owns_full(self, parameter: torch.Tensor) -> bool | None:
        return self._storage.owns_full(parameter) if isinstance(self._storage, TorchOptimizer) else None

    def _of_this_rank(self) -> Iterator[str]:
        for live in self._state.tensors():
            if live.is_local:
                yield self._layouts[id(live.tensor)][0]

    def _is_split(self, layout: Layout) -> bool:
        return self._mesh is not None and any(self._mesh.size(mesh_dim) > 1 for mesh_dim, _ in layout.shards())

    # -- in ---------------------------------------------------------------------------------------------------

    def prepare(self, description: Mapping[str, Any], source: WeightsSource | None) -> None:
        """Compare a saved :meth:`description` with this optimizer, and prepare to read this rank's shards.

        Raises:
            BuildError: the class of the optimizer or its parameter groups differ.
        """
        if description.get("type") != self._kind:
            raise BuildError(
                f"the checkpoint holds the state of {description.get('type')}, but this optimizer is {self._kind}",
                hint="make the optimizer of the checkpoint, or load the weights only: build(sch, weights=dir)",
            )
        parameters = {self._layouts[id(p)][0]: p for group in self._storage.param_groups for p in group["params"]}
        by_name = {name: layout for name, layout, _ in self._layouts.values()}
        states: dict[str, dict[str, Callable[[], Any]]] = {}
        for name, values in description["scalars"].items():
            states[name] = {key: partial(_same, value) for key, value in values.items()}
        shapes = source.shapes() if source is not None else {}
        settings = matched_settings(
            description["groups"],
            self._groups,
            states={*states, *(key.rpartition(_SEPARATOR)[0] for key in shapes)},
            frozen={self._layouts[id(live.tensor)][0] for live in self._state.tensors() if _is_frozen(live)},
            scheduled=self._storage.scheduled,
        )
        for key, shape in shapes.items():
            name, _, own_key = key.rpartition(_SEPARATOR)
            if name in by_name and name not in self._own:
                continue
            if name not in by_name:
                raise BuildError(f"the checkpoint holds state of '{key}', which is not a parameter of this optimizer")
            layout = by_name[name]
            is_full = name in parameters and self._owns_full(parameters[name]) is not None
            if is_full or not shape or shape != tuple(layout.shape):
                layout = Layout(key, shape)
            assert source is not None
            like = None if is_full else parameters.get(name)
            states.setdefault(name, {})[own_key] = partial(source.read_like, key, layout, self._mesh, like)
        groups = [  # settings that the checkpoint lacks, e.g. of a new scheduler, stay
            {key: value for key, value in present.items() if key != "params"}
            | {key: _from_json(value, present.get(key)) for key, value in values.items()}
            for present, values in zip(self._storage.param_groups, settings, strict=True)
        ]
        here = {parameters[name]: _WhenAsked(values) for name, values in states.items() if name in parameters}
        self._take = self._storage.loading(groups, here)
        self._typed = [
            (parameters[name], own_key, states[name][own_key])
            for name, _, own_key in (key.rpartition(_SEPARATOR) for key in description.get("types", ()))
            if name in parameters and own_key in states.get(name, ()) and self._owns_full(parameters[name]) is not False
        ]

    def load(self) -> None:
        """Load the prepared state into the optimizer."""
        assert self._take is not None
        self._take()
        if isinstance(self._storage, TorchOptimizer):
            for parameter, key, read in self._typed:
                self._storage.put(parameter, key, read())

    def take_back(self) -> None:
        """Restore the previous state of a torch optimizer."""
        if isinstance(self._storage, TorchOptimizer):
            self._storage.take_back()


class _WhenAsked(Mapping[str, Any]):
    """A mapping that reads its values at each access."""

    def __init__(self, values: Mapping[str, Callable[[], Any]]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _same(value: Any) -> Any:
    return value


def _is_typed(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return bool(value.dim()) and value.is_floating_point() and value.dtype != parameter.dtype


def _is_frozen(live: LiveTensor) -> bool:
    return live.is_parameter and not live.tensor.requires_grad


def _own_name(live: LiveTensor, origins: Mapping[str, str]) -> str:
    """Name a parameter that a step added, unlike any reference parameter."""
    return f"{live.name} as {tuple(live.layout.shape)} of its own" if live.name in origins else live.name


def _to_json(value: Any, what: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and not value.dim():
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_to_json(item, what) for item in value]
    raise BuildError(f"{what} cannot be saved: it is a {type(value).__name__}", hint="JSON carries numbers and strings")


def _from_json(value: Any, present: Any) -> Any:
    """Convert a saved hyperparameter to the type of the optimizer's present one."""
    if isinstance(present, torch.Tensor):
        return torch.tensor(value, dtype=present.dtype, device=present.device)
    return tuple(value) if isinstance(value, list) else value
