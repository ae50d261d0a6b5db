"""Convert an optimizer's state to and from the reference model's names and full tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError, OptimizerError
from slapo_core.layout import Layout
from slapo_runtime.correspondence.storage import TorchOptimizer
from slapo_runtime.weights.files import Source
from slapo_runtime.weights.optimizer import ELEMENTWISE
from slapo_runtime.world import gather_along

if TYPE_CHECKING:
    from slapo_runtime.correspondence.state import ModelState
    from slapo_runtime.correspondence.storage import LiveTensor, OptimizerStorage


_SHOWN = 4  # names in a message
_HINT = "make groups in the factory that have one value each, as the checkpoint has it; or load the weights only"
_NOTHING = object()

_Group = Mapping[str, Any]  # "params": names; "hyperparameters": settings, as JSON


def matched_settings(
    saved: Sequence[_Group],
    present: Sequence[_Group],
    *,
    states: Collection[str],
    frozen: Collection[str],
    scheduled: Collection[str],
) -> list[dict[str, Any]]:
    """Match the saved settings to an optimizer's groups.

    Args:
        saved: the groups of the checkpoint.
        present: those of the optimizer.
        states: the parameters of which the checkpoint holds state.
        frozen: those of the optimizer that are not trained.
        scheduled: settings that the runtime sets again whatever is loaded.

    Raises:
        BuildError: other parameters; or settings that these groups cannot have.
    """
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    own = {name for group in present for name in group["params"]}
    gone = sorted(name for name in group_of if name not in own and name in states)
    more = sorted(own - set(group_of) - set(frozen))
    if gone or more:
        raise BuildError(_others(gone, more), hint="make the optimizer of the parameters of the checkpoint")
    found, feeding = [], []
    for number, group in enumerate(present):
        names = [name for name in group["params"] if name in group_of]
        feeding.append(list(dict.fromkeys(group_of[name] for name in names)))
        if names:
            found.append(_united(saved, group_of, number, names))
        else:
            same_place = saved[number] if number < len(saved) and not saved[number]["params"] else group
            found.append(dict(same_place["hyperparameters"]))
    _refuse_levelled(saved, present, feeding, scheduled)
    return found


def _united(saved: Sequence[_Group], group_of: Mapping[str, int], number: int, names: Sequence[str]) -> dict[str, Any]:
    """The one value of each setting that the parameters of a group had."""
    first = saved[group_of[names[0]]]["hyperparameters"]
    for name in names:
        other = saved[group_of[name]]["hyperparameters"]
        for key in sorted({*first, *other}):
            one, two = first.get(key, _NOTHING), other.get(key, _NOTHING)
            if one != two:
                raise BuildError(
                    f"group {number} of this optimizer holds '{names[0]}' and '{name}', and the checkpoint has '{key}' "
                    f"= {_shown(one)} for the one and {_shown(two)} for the other",
                    hint=_HINT,
                )
    return dict(first)


def _refuse_levelled(
    saved: Sequence[_Group], present: Sequence[_Group], feeding: Sequence[Sequence[int]], scheduled: Collection[str]
) -> None:
    """Refuse where two groups that differ now would have the same after it."""
    first_of: dict[int, int] = {}
    for number, sources in enumerate(feeding):
        for source in sources:
            before = first_of.setdefault(source, number)
            here, there = present[before]["hyperparameters"], present[number]["hyperparameters"]
            for key in sorted({*here, *there} - set(scheduled)):
                one, two = here.get(key, _NOTHING), there.get(key, _NOTHING)
                if one != two:
                    value = saved[source]["hyperparameters"].get(key, _NOTHING)
                    raise BuildError(
                        f"groups {before} and {number} of this optimizer have '{key}' = {_shown(one)} and "
                        f"{_shown(two)}, and the checkpoint has {_shown(value)} for the parameters of both",
                        hint=_HINT,
                    )


def _others(gone: list[str], more: list[str]) -> str:
    parts = [f"only in the checkpoint: {_listed(gone)}"] if gone else []
    parts += [f"only in this optimizer: {_listed(more)}"] if more else []
    return f"the optimizer holds other parameters than that of the checkpoint: {'; '.join(parts)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _shown(value: Any) -> str:
    return "nothing" if value is _NOTHING else repr(value)


@dataclass(frozen=True)
class StateTensor:
    """A tensor of an optimizer's state.

    Args:
        places: of the ranks along ``pp`` that hold it, ascending.
        shape: whole.
        dtype: its element type.
    """

    places: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class RankState:
    """The optimizer state of one pipeline rank.

    Args:
        groups: its parameters by name, and its settings, of each group.
        scalars: by parameter and key.
        tensors: by full key.
        empty_ones_count: whether the settings of a group without parameters here are those of the group elsewhere.
    """

    groups: Sequence[Mapping[str, Any]]
    scalars: Mapping[str, dict[str, Any]]
    tensors: Mapping[str, StateTensor]
    empty_ones_count: bool = True


@dataclass(frozen=True)
class United:
    """The merged optimizer state of all pipeline ranks."""

    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]
    held: dict[str, StateTensor]


def unite(parts: Sequence[RankState], order: Sequence[str]) -> United:
    """Merge the optimizer states of pipeline ranks: groups by their number, shared tensors once.

    `make_optimizer` and the comparison of replicas ensure that the groups correspond.

    Args:
        parts: in the order of the ranks along ``pp``.
        order: the names of all parameters, in that of the model.
    """
    first = parts[0]
    position = {name: number for number, name in enumerate(order)}
    groups = []
    for number, group in enumerate(first.groups):
        names = dict.fromkeys(name for part in parts for name in part.groups[number]["params"])
        counting = next((part.groups[number] for part in parts if _counts(part, number)), group)
        groups.append({**counting, "params": sorted(names, key=lambda name: position[name])})
    scalars: dict[str, dict[str, Any]] = {}
    held: dict[str, StateTensor] = {}
    for place, part in enumerate(parts):
        for name, values in part.scalars.items():
            scalars.setdefault(name, values)
        for key, one in part.tensors.items():
            before = held[key].places if key in held else ()
            held[key] = replace(one, places=(*before, place))
    return United(groups, scalars, {key: held[key] for key in sorted(held)})


def _counts(part: RankState, number: int) -> bool:
    return part.empty_ones_count or bool(part.groups[number]["params"])


_NAMING = ("params", "param_names")  # which are not settings
_SEPARATOR = "::"  # between a parameter's name and the key of its state: "fc.weight::exp_avg"


@dataclass(frozen=True)
class _Moment:
    """A tensor of the state: its layout, type, and reader of this rank's shard."""

    layout: Layout
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class OptimizerState:
    """The state of an optimizer over a scheduled model's parameters.

    Where pipeline stages have optimizers of their own, each rank collects that of its parameters, :meth:`meet` brings
    them together and :meth:`unite` makes one of them.

    Args:
        state: of the model.
        optimizer: its parameters are the model's.

    Raises:
        BuildError: a state tensor that is neither a scalar nor of its parameter's shape belongs to a sharded
            parameter, or a value is neither a tensor nor JSON.
        OptimizerError: it holds parameters that are not the model's.
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
        self._typed: list[tuple[torch.Tensor, str, Callable[[], Any]]] = []  # of another type than their parameters
        self._tensors: dict[str, _Moment] = {}
        self._scalars: dict[str, dict[str, Any]] = {}
        self._groups = [self._group(group) for group in optimizer.param_groups]
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            self._collect(parameter, optimizer.state(parameter))
        self._tensors = dict(sorted(self._tensors.items()))  # gathering is a collective: in one order on every rank
        self._order = [name for name, _, _ in self._layouts.values()]
        self._own = set(self._order) if state.correspondence.placement is None else set(self._of_this_rank())
        self._parts: list[RankState] = []
        self._held: dict[str, StateTensor] = {}  # what other ranks along pp hold too, or alone

    def meet(self) -> None:
        """Gather the states of the other pipeline ranks: a collective, before any other call."""
        if self._state.correspondence.placement is None:
            return
        states = {key: StateTensor((), tuple(one.layout.shape), one.dtype) for key, one in self._tensors.items()}
        is_torch = isinstance(self._storage, TorchOptimizer)
        assert self._mesh is not None
        own = RankState(self._groups, self._scalars, states, is_torch)
        self._parts = gather_along(self._mesh, "pp", own)

    def unite(self) -> None:
        """Merge the states of the pipeline ranks."""
        if self._parts:
            united = unite(self._parts, self._order)
            self._groups, self._scalars, self._held = united.groups, united.scalars, united.held

    # -- out --------------------------------------------------------------------------------------------------

    def gather(self, *, wanted: bool) -> dict[str, torch.Tensor]:
        """State tensors, full, on the CPU, one after the other: a collective.

        Args:
            wanted: whether this rank keeps them; else it only takes part, and has nothing in the end.
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

    def shards(self) -> Iterator[tuple[str, Layout, Callable[[], torch.Tensor], Mapping[str, tuple[int, ...]]]]:
        """Yield this rank's state tensors: name, layout, reader and holders along ``pp``.

        Reading is a collective over what a runtime partitions; in one order on the ranks that share one.
        """
        for name, one in self._tensors.items():
            holders = {"pp": self._held[name].places} if name in self._held else {}
            yield name, one.layout, one.read, holders

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the full, merged state tensors."""
        own = {name: list(one.layout.shape) for name, one in self._tensors.items()}
        return {name: list(held.shape) for name, held in self._held.items()} or own

    def description(self) -> dict[str, Any]:
        """Everything else, as JSON values."""
        held = {key: (one.layout.shape, one.dtype) for key, one in self._tensors.items()}
        held |= {key: (one.shape, one.dtype) for key, one in self._held.items()}
        specs = self._state.correspondence.survey.specs
        types = {}
        for key, (shape, dtype) in held.items() if self._state.kept is None else ():
            spec = specs.get(key.rpartition(_SEPARATOR)[0])
            if spec is not None and shape and dtype.is_floating_point and dtype != spec.dtype:
                types[key] = str(dtype).removeprefix("torch.")  # torch would give it the parameter's type back
        return {"type": self._kind, "groups": self._groups, "scalars": self._scalars, "types": types}

    def nested(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state by parameter and key, as ``torch.distributed.checkpoint`` gives a full one.

        Args:
            tensors: of :meth:`gather`.
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
        """Return the description and the tensors of what :meth:`nested` gave, for :meth:`prepare`.

        Raises:
            BuildError: a tensor has another shape than its parameter, which this optimizer's state always has.
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
                        f"the state holds '{key}' of shape {tuple(value.shape)} for '{name}', whose shape is "
                        f"{spec.shape}",
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
        for key, value in state.items():
            full_key = f"{name}{_SEPARATOR}{key}"
            if not isinstance(value, torch.Tensor):
                self._scalars.setdefault(name, {})[key] = _to_json(value, f"state '{key}' of {self._kind}")
            elif hasattr(value, "__tensor_flatten__"):  # made of other tensors, and without memory of its own
                raise BuildError(
                    f"{self._kind} keeps '{key}' of '{name}' in a tensor made of others ({type(value).__name__}), "
                    "which safetensors cannot hold",
                    hint="use an optimizer whose state is of plain tensors, e.g. torch.optim.AdamW, or save the "
                    "weights only, by state_dict()",
                )
            elif value.dim() and tuple(value.shape) == local_shape:
                self._tensors[full_key] = _Moment(layout, value.dtype, partial(self._storage.read, parameter, key))
            elif not value.dim() or not (self._is_split(layout) or value.is_meta):
                whole = Layout(full_key, tuple(value.shape))
                read = partial(self._storage.read, parameter, key) if value.is_meta else partial(_same, value)
                self._tensors[full_key] = _Moment(whole, value.dtype, read)
            else:
                raise BuildError(
                    f"{self._kind} keeps '{key}' of shape {tuple(value.shape)} for '{name}', whose local shape "
                    f"is {local_shape}: its layout is unknown, so it cannot be saved",
                    hint="use an optimizer whose state has its parameters' shapes, or save the weights only, by "
                    "state_dict()",
                )

    def _of_this_rank(self) -> Iterator[str]:
        for live in self._state.tensors():
            if live.is_local:
                yield self._layouts[id(live.tensor)][0]

    def _is_split(self, layout: Layout) -> bool:
        return self._mesh is not None and any(self._mesh.size(mesh_dim) > 1 for mesh_dim, _ in layout.shards())

    # -- in ---------------------------------------------------------------------------------------------------

    def prepare(self, description: Mapping[str, Any], source: Source | None) -> None:
        """Check what :meth:`description` and :meth:`gather` gave against this optimizer, and read this rank's shards.

        Raises:
            BuildError: another optimizer, or other groups of parameters.
        """
        if description.get("type") != self._kind:
            raise BuildError(
                f"the checkpoint holds the state of {description.get('type')}, and this optimizer is {self._kind}",
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
            if not shape or shape != tuple(layout.shape):
                layout = Layout(key, shape)
            assert source is not None
            states.setdefault(name, {})[own_key] = partial(source.read, key, layout, self._mesh)
        groups = [  # what the checkpoint does not have, a new scheduler's rates for one, stays
            {key: value for key, value in present.items() if key != "params"}
            | {key: _from_json(value, present.get(key)) for key, value in values.items()}
            for present, values in zip(self._storage.param_groups, settings, strict=True)
        ]
        here = {parameters[name]: _WhenAsked(values) for name, values in states.items() if name in parameters}
        self._take = self._storage.loading(groups, here)
        self._typed = [
            (parameters[name], own_key, states[name][own_key])
            for name, _, own_key in (key.rpartition(_SEPARATOR) for key in description.get("types", ()))
            if name in parameters and own_key in states.get(name, ())
        ]

    def load(self) -> None:
        """Put the prepared state into the optimizer."""
        assert self._take is not None
        self._take()
        if isinstance(self._storage, TorchOptimizer):
            for parameter, key, read in self._typed:
                self._storage.put(parameter, key, read())

    def take_back(self) -> None:
        """Restore the previous state of an optimizer of torch."""
        if isinstance(self._storage, TorchOptimizer):
            self._storage.take_back()


class _WhenAsked(Mapping[str, Any]):
    """Values that are read each time when they are asked for."""

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


def _is_frozen(live: LiveTensor) -> bool:
    return live.is_parameter and not live.tensor.requires_grad


def _own_name(live: LiveTensor, origins: Mapping[str, str]) -> str:
    """Name a parameter that a step added: never as a reference parameter, whose state is another."""
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
    """A saved hyperparameter, in the kind that the optimizer holds now."""
    if isinstance(present, torch.Tensor):
        return torch.tensor(value, dtype=present.dtype, device=present.device)
    return tuple(value) if isinstance(value, list) else value
