"""An optimiser's state by the untouched model's names: full tensors, scalars, and hyperparameters as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError
from slapo_core.ranks.world import World
from slapo_core.spec.layout import Layout
from slapo_core.weights.optimizer_parts import Held, Part, unite
from slapo_core.weights.sources import Source

if TYPE_CHECKING:
    from slapo_core.spec.state import LiveTensor
    from slapo_core.weights.state import TensorState

__all__ = ["OptimizerState"]

_SEPARATOR = "::"  # between a parameter's name and the key of its state: "fc.weight::exp_avg"


class OptimizerState:
    """The state of an optimiser over a scheduled model's parameters.

    Where pipeline stages have optimisers of their own, each rank collects that of its parameters, :meth:`meet` brings
    them together and :meth:`unite` makes one of them.

    Args:
        state: of the model.
        optimizer: its parameters are the model's.

    Raises:
        BuildError: a state tensor that is neither a scalar nor of its parameter's shape belongs to a sharded
            parameter, or a value is neither a tensor nor JSON.
    """

    def __init__(self, state: TensorState, optimizer: torch.optim.Optimizer) -> None:
        self._mesh = state.mesh
        self._optimizer = optimizer
        self._kind = type(optimizer).__name__
        self._before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        self._state = state
        origins = state.correspondence.survey.origins
        self._layouts: dict[int, tuple[str, Layout, tuple[int, ...]]] = {}
        for live in state.tensors():
            carried = bool(live.stands_for) and live.layout.origin in origins
            name = live.stands_for[0] if carried else _own_name(live, origins)
            self._layouts[id(live.tensor)] = (name, live.layout, tuple(live.tensor.shape))
        self._loaded: dict[str, Any] | None = None
        self._tensors: list[tuple[str, Layout, torch.Tensor]] = []
        self._groups = [self._group(group) for group in optimizer.param_groups]
        self._scalars: dict[str, dict[str, Any]] = {}
        for parameter, values in optimizer.state.items():
            self._collect(parameter, values)
        self._tensors.sort(key=lambda item: item[0])  # gathering is a collective: the same order on every rank
        self._order = [name for name, _, _ in self._layouts.values()]
        self._own = set(self._order) if state.correspondence.placement is None else set(self._of_this_rank())
        self._parts: list[Part] = []
        self._held: dict[str, Held] = {}  # what other ranks along pp hold too, or alone

    def meet(self) -> None:
        """Learn what the other ranks along ``pp`` have: a collective; before anything else is asked."""
        if self._state.correspondence.placement is None:
            return
        states = {key: Held((), tuple(layout.shape), value.dtype) for key, layout, value in self._tensors}
        with World(self._mesh, over="pp") as world:
            self._parts = world.gather(Part(self._kind, self._groups, self._scalars, states))

    def unite(self) -> None:
        """Make one state of what these ranks have.

        Raises:
            BuildError: their optimisers have other groups of parameters.
        """
        if self._parts:
            united = unite(self._parts, self._order)
            self._groups, self._scalars, self._held = united.groups, united.scalars, united.held

    # -- out --------------------------------------------------------------------------------------------------

    def gather(self) -> dict[str, torch.Tensor]:
        """State tensors, full, on the CPU: a collective."""
        own = {name: (layout, tensor) for name, layout, tensor in self._tensors}
        if not self._held:
            return {name: layout.full(value, self._mesh).to("cpu", copy=True) for name, (layout, value) in own.items()}
        found = {}
        for name, held in self._held.items():
            value = own[name][0].full(own[name][1], self._mesh) if name in own else None
            found[name] = self._state.from_holders(value, held.shape, held.dtype, {"pp": held.places}).to(
                "cpu", copy=True
            )
        return found

    def description(self) -> dict[str, Any]:
        """Everything else, as JSON values."""
        return {"type": self._kind, "groups": self._groups, "scalars": self._scalars}

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        hyperparameters = {
            key: _to_json(value, f"'{key}' of {self._kind}") for key, value in group.items() if key != "params"
        }
        return {"params": [self._layouts[id(p)][0] for p in group["params"]], "hyperparameters": hyperparameters}

    def _collect(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        name, layout, local_shape = self._layouts[id(parameter)]
        for key, value in state.items():
            full_key = f"{name}{_SEPARATOR}{key}"
            if not isinstance(value, torch.Tensor):
                self._scalars.setdefault(name, {})[key] = _to_json(value, f"state '{key}' of {self._kind}")
            elif value.dim() and tuple(value.shape) == local_shape:
                self._tensors.append((full_key, layout, value))
            elif not value.dim() or not self._is_split(layout):
                self._tensors.append((full_key, Layout(full_key, tuple(value.shape)), value))
            else:
                raise BuildError(
                    f"{self._kind} keeps '{key}' of shape {tuple(value.shape)} for '{name}', whose piece here has "
                    f"shape {local_shape}: how it lies in the full tensor is not known, so it cannot be saved",
                    hint="use an optimiser whose state has its parameters' shapes, or save the weights only: "
                    "engine.state_dict()",
                )

    def _of_this_rank(self) -> Iterator[str]:
        for live in self._state.tensors():
            if live.is_here:
                yield self._layouts[id(live.tensor)][0]

    def _is_split(self, layout: Layout) -> bool:
        return self._mesh is not None and any(self._mesh.size(mesh_dim) > 1 for mesh_dim, _ in layout.shards())

    # -- in ---------------------------------------------------------------------------------------------------

    def prepare(self, description: Mapping[str, Any], source: Source | None) -> None:
        """Check what :meth:`description` and :meth:`gather` gave against this optimiser, and read this rank's pieces.

        Raises:
            BuildError: another optimiser, or other groups of parameters.
        """
        if description.get("type") != self._kind:
            raise BuildError(
                f"the checkpoint holds the state of {description.get('type')}, and this engine's optimiser is "
                f"{self._kind}",
                hint="build with the optimiser of the checkpoint, or load the weights only: build(sch, weights=dir)",
            )
        saved = [sorted(group["params"]) for group in description["groups"]]
        present = [sorted(group["params"]) for group in self._groups]
        if saved != present:
            raise BuildError(_groups_differ(saved, present), hint="make the same parameter groups in the factory")
        states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in description["scalars"].items()}
        by_name = {name: (layout, shape) for name, layout, shape in self._layouts.values()}
        for key, shape in (source.shapes() if source is not None else {}).items():
            name, _, own_key = key.rpartition(_SEPARATOR)
            if name in by_name and name not in self._own:
                continue
            if name not in by_name:
                raise BuildError(f"the checkpoint holds state of '{key}', which is no parameter of this optimiser")
            layout = by_name[name][0]
            if not shape or shape != tuple(layout.shape):
                layout = Layout(key, shape)
            assert source is not None
            states.setdefault(name, {})[own_key] = source.read(key, layout, self._mesh)
        self._loaded = self._packed(description["groups"], states)

    def load(self) -> None:
        """Put the prepared state into the optimiser."""
        assert self._loaded is not None
        self._optimizer.load_state_dict(self._loaded)

    def take_back(self) -> None:
        """Give the optimiser the state that it had."""
        self._optimizer.__setstate__(self._before)

    def _packed(self, groups: list[Mapping[str, Any]], states: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.load_state_dict`` takes it: parameters numbered in the order of the groups."""
        state, packed, number = {}, [], 0
        for present, saved in zip(self._optimizer.param_groups, groups, strict=True):
            hyperparameters = {
                key: _from_json(value, present.get(key)) for key, value in saved["hyperparameters"].items()
            }
            names = [self._layouts[id(parameter)][0] for parameter in present["params"]]
            numbers = list(range(number, number + len(names)))
            number += len(names)
            packed.append({**hyperparameters, "params": numbers})
            state.update({index: states[name] for index, name in zip(numbers, names, strict=True) if name in states})
        return {"state": state, "param_groups": packed}


def _own_name(live: LiveTensor, origins: Mapping[str, str]) -> str:
    """The name of a parameter that no untouched one is: never that of an untouched one, whose state is another."""
    return f"{live.name} as {tuple(live.layout.shape)} of its own" if live.name in origins else live.name


def _groups_differ(saved: list[list[str]], present: list[list[str]]) -> str:
    if len(saved) != len(present):
        return f"the checkpoint has {len(saved)} groups of parameters, and this optimiser {len(present)}"
    for number, (old, new) in enumerate(zip(saved, present, strict=True)):
        gone, more = sorted(set(old) - set(new)), sorted(set(new) - set(old))
        if gone or more:
            parts = [f"only in the checkpoint: {', '.join(gone)}"] if gone else []
            parts += [f"only in this optimiser: {', '.join(more)}"] if more else []
            return f"group {number} of the optimiser holds other parameters than the checkpoint: {'; '.join(parts)}"
    return "a parameter stands twice in a group of the optimiser"


def _to_json(value: Any, what: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and not value.dim():
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_to_json(item, what) for item in value]
    raise BuildError(f"{what} cannot be saved: it is a {type(value).__name__}", hint="JSON carries numbers and strings")


def _from_json(value: Any, present: Any) -> Any:
    """A saved hyperparameter, in the kind that the optimiser holds now."""
    if isinstance(present, torch.Tensor):
        return torch.tensor(value, dtype=present.dtype, device=present.device)
    return tuple(value) if isinstance(value, list) else value
