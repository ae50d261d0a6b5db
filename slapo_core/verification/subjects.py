"""Private copies of the untouched model, of the scheduled one, and of schedules that hold some of its steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ApplyError
from slapo_core.schedule.records import primitive_to_json
from slapo_core.schedule.schedule import Schedule
from slapo_core.spec.layout import Layout
from slapo_core.verification.correspondence import named_tensors
from slapo_core.verification.determinism import switch_dropout_off
from slapo_core.weights.initialise import cannot_initialise, initialising
from slapo_core.weights.survey import live_tensors, refuse_lazy, survey
from slapo_core.weights.translation import Translations

if TYPE_CHECKING:
    from slapo_core.spec.record import Record

__all__ = ["Subjects", "copy_model"]


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters keep the attributes that were set on them."""
    copied = copy.deepcopy(model)
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        original = model.get_parameter(name)
        for key, value in original.__dict__.items():
            parameter.__dict__.setdefault(key, value)
    return copied


class Subjects:
    """Copies to experiment with; the user's model is only read.

    Args:
        schedule: not sealed.
        device: where tensors on the meta device get their values.
        seed: of these values.

    Raises:
        SealedError: the originals were dropped.
        WeightsError: a tensor on the meta device has no initialiser, or one of a lazy module no shape.
    """

    def __init__(self, schedule: Schedule, *, device: torch.device, seed: int) -> None:
        self.schedule = schedule
        self.device = device
        self._seed = seed
        refuse_lazy(schedule.model)
        self._template = copy_model(schedule.model)
        with schedule.untouched() as model:
            self._untouched = copy_model(model)
            self._values = self._initial_values(dict(named_tensors(model)))
        self.layouts: dict[str, Layout] = dict(schedule.tree.layouts)
        self.frozen = self._train_alike(schedule.tree.trainable)
        added = {
            name: tensor
            for name, tensor in named_tensors(schedule.model)
            if tensor.is_meta and self._origin(name, self.layouts) not in self._values
        }
        self._added = self._translated_values() if added else {}
        self._added |= self._initial_values({name: t for name, t in added.items() if name not in self._added})

    @property
    def untouched(self) -> nn.Module:
        """The copy of the untouched model that all others are made from; to read only."""
        return self._untouched

    def reference(self, dtype: torch.dtype | None) -> nn.Module:
        """A fresh copy of the untouched model."""
        model = copy_model(self._untouched)
        self._fill(model, {}, {})
        return _prepared(model, dtype)

    def candidate(self, dtype: torch.dtype | None) -> nn.Module:
        """A fresh copy of the scheduled model."""
        model = copy_model(self._template)
        self._fill(model, self.layouts, self._added)
        return _prepared(model, dtype)

    def trial(
        self, records: Sequence[Record], dtype: torch.dtype | None
    ) -> tuple[nn.Module, Mapping[str, Layout], Schedule]:
        """A fresh copy of the untouched model with only ``records`` applied.

        Raises:
            SlapoError: a step is refused without the others, or cannot be repeated on a copy.
        """
        given = self.schedule
        model = copy_model(self._untouched)
        schedule = Schedule(
            model, mesh=given.mesh, plugins=given.plugins, registry=given.registry, example_inputs=given.example_inputs
        )
        theirs = {id(item) for item in _parts(given.model)} | {id(item) for item in _parts(self._untouched)}
        for record in records:
            schedule.apply_at(schedule.tree.node(record.path), copy.deepcopy(record.primitive))
            if not _is_data(record) and any(id(item) in theirs for item in _parts(model)):
                raise ApplyError(f"{record} gives the same module each time, so it cannot be tried on a copy")
        layouts = dict(schedule.tree.layouts)
        self._fill(model, layouts, self._added)
        return _prepared(model, dtype), layouts, schedule

    def _train_alike(self, decided: Mapping[str, bool]) -> tuple[str, ...]:
        """Freeze in the untouched copy what steps froze on purpose, so that all else can be compared."""
        parameters = dict(self._untouched.named_parameters(remove_duplicate=False))
        changed = []
        for name, flag in decided.items():
            parameter = parameters.get(self._origin(name, self.layouts))
            if parameter is not None and parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
                changed.append(f"{name} ({'trained' if flag else 'frozen'})")
        return tuple(changed)

    def _initial_values(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full values of those that are on the meta device, the same on every rank."""
        values: dict[str, torch.Tensor] = {}
        by_object: dict[int, torch.Tensor] = {}
        refused: list[str] = []
        on_meta = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
        if not on_meta:
            return values
        tree = self.schedule.tree
        with initialising(tree, self.schedule.hooks, seed=self._seed) as initialiser:
            for name, tensor in on_meta.items():
                if id(tensor) not in by_object:
                    if name.rpartition(".")[0] not in tree.index.modules:
                        continue  # an alias: its canonical name is among the others
                    value = initialiser.value(name, tuple(tensor.shape))
                    if value is None:
                        refused.append(name)
                        continue
                    by_object[id(tensor)] = value
                values[name] = by_object[id(tensor)]
        if refused:
            raise cannot_initialise(refused)
        return values

    def _translated_values(self) -> dict[str, torch.Tensor]:
        """Full values of tensors on the meta device that, as a plugin says, stand for untouched ones."""
        surveyed, untouched = survey(self.schedule)
        lives = live_tensors(self.schedule.tree)
        translations = Translations.of(self.schedule.tree, surveyed, self.schedule.hooks, lives)
        values: dict[str, torch.Tensor] = {}
        for live in lives:
            if live.tensor.is_meta and live.name in translations.stands_for:
                names = [spec.name for spec in translations.stands_for[live.name]]
                parts = {name: self._values[name] if name in self._values else untouched[name] for name in names}
                values[live.name] = translations.from_reference(live, parts)
        return values

    def _fill(self, model: nn.Module, layouts: Mapping[str, Layout], added: Mapping[str, torch.Tensor]) -> None:
        """Give the tensors on the meta device their values, ties kept."""
        made: dict[int, torch.Tensor] = {}
        for module_name, module in model.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                for own, tensor in table.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        name = f"{module_name}.{own}" if module_name else own
                        made[id(tensor)] = self._value(name, tensor, layouts, added)
                    table[own] = made[id(tensor)]  # type: ignore[assignment]
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()  # it keeps further references

    def _value(
        self, name: str, tensor: torch.Tensor, layouts: Mapping[str, Layout], added: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        layout = layouts.get(name)
        full = self._values.get(self._origin(name, layouts))
        if full is None:
            full = added[name]
        mesh = self.schedule.mesh
        local = layout.local(full, mesh) if layout is not None else full.clone()
        local = local.to(self.device, tensor.dtype)
        if not isinstance(tensor, nn.Parameter):
            return local
        value = nn.Parameter(local, requires_grad=tensor.requires_grad)
        value.__dict__.update(tensor.__dict__)
        return value

    @staticmethod
    def _origin(name: str, layouts: Mapping[str, Layout]) -> str:
        return layouts[name].origin if name in layouts else name


def _prepared(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    switch_dropout_off(model)
    return model.double() if dtype is torch.float64 else model


def _parts(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield module
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def _is_data(record: Record) -> bool:
    """Whether a step holds nothing but numbers and names, so that repeating it touches no object of the user."""
    from slapo_core.errors import SerializationError

    try:
        primitive_to_json(record.primitive, where=str(record))
    except SerializationError:
        return False
    return True
