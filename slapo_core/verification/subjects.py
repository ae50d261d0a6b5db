"""Private copies of the untouched model, of the scheduled one, and of schedules that hold some of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ApplyError, SerializationError
from slapo_core.schedule.records import primitive_to_json
from slapo_core.schedule.schedule import Schedule
from slapo_core.verification.copies import convert, copy_model
from slapo_core.verification.counterparts import Counterparts, named_tensors
from slapo_core.verification.pristine import Step, copy_with_steps, train_as_at_first, untouched_with_steps
from slapo_core.weights.correspondence import Correspondence
from slapo_core.weights.initialise import Initialiser, cannot_initialise

if TYPE_CHECKING:
    from slapo_core.spec.record import Record
    from slapo_core.spec.state import LiveTensor

__all__ = ["Subjects"]


class Subjects:
    """Copies to experiment with; the user's model is only read.

    Args:
        schedule: not sealed.
        device: where tensors on the meta device get their values.
        seed: of these values.

    Raises:
        SealedError: the originals were dropped.
        WeightsError: a tensor on the meta device has no initialiser, or one of a lazy module no shape.
        HookError: a plugin's answer about a tensor cannot be right.
    """

    def __init__(self, schedule: Schedule, *, device: torch.device, seed: int) -> None:
        self.schedule = schedule
        self.device = device
        self._seed = seed
        self._redrawn: dict[str, torch.Tensor] = {}
        self.correspondence, self._originals = Correspondence.of(schedule)
        self.counterparts = Counterparts.of(self.correspondence, schedule.model)
        self._template = copy_model(schedule.model, shares_memory=True)
        self._untouched, self._steps = untouched_with_steps(schedule, shares_memory=True)
        with schedule.untouched() as model:
            self._values = self._initial_values(model)
        self.frozen = self._train_alike(schedule.tree.tensors.trained)

    @property
    def untouched(self) -> nn.Module:
        """The copy of the untouched model that all others are made from; to read only."""
        return self._untouched

    def tied_modules(self) -> list[frozenset[str]]:
        """For each parameter of the untouched model that several modules hold, their paths."""
        holders: dict[int, set[str]] = {}
        for name, parameter in self._untouched.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
        return [frozenset(paths) for paths in holders.values() if len(paths) > 1]

    def reference(self, dtype: torch.dtype | None) -> nn.Module:
        """A fresh copy of the untouched model."""
        model = copy_model(self._untouched, dtype=dtype)
        origins = self.correspondence.survey.origins
        _fill(model, lambda name, tensor: self._values[origins[name]].to(self.device, tensor.dtype, copy=True))
        for name, parameter in model.named_parameters():
            if origins[name] in self._redrawn:
                _set(parameter, self._redrawn[origins[name]])
        return convert(model, dtype)

    def candidate(self, dtype: torch.dtype | None) -> nn.Module:
        """A fresh copy of the scheduled model."""
        model = copy_model(self._template, dtype=dtype)
        self._fill_scheduled(model, self.schedule, self.counterparts)
        return convert(model, dtype)

    def redraw_constants(self) -> list[str]:
        """Give parameters without a spread of values random ones, in every copy from now on: their names.

        Zero biases, norms of ones and small gates (LayerScale, adaLN-zero) multiply the error of a step away. Each
        element is drawn from +-[0.5, 1.5].
        """
        parameters = dict(self._untouched.named_parameters())
        for name, original in self._originals.items():
            value = self._values.get(name, original).detach()
            if name in parameters and value.is_floating_point() and value.numel() and _has_no_spread(value):
                generator = torch.Generator().manual_seed(self._seed * 7919 + len(self._redrawn))
                drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5
                sign = torch.randint(2, value.shape, generator=generator) * 2 - 1
                self._redrawn[name] = (drawn * sign).to(self.device, value.dtype)
        return list(self._redrawn)

    def frozen_parameters(self) -> list[str]:
        """Parameters of the untouched model that are not trained, though no step decided it."""
        decided = self.schedule.tree.tensors.trained
        parameters = self._untouched.named_parameters()
        return [name for name, parameter in parameters if not parameter.requires_grad and name not in decided]

    def frozen_by(self, records: Sequence[Record]) -> list[str]:
        """Names of the parameters that ``records`` freeze, without saying so, in a model of which all is trained.

        Raises:
            SlapoError: as for :meth:`trial`.
        """
        schedule = self.trial(records, all_trained=True)
        table = schedule.tree.tensors
        found = []
        for name, parameter in schedule.model.named_parameters():
            origin = table.layout(parameter, name).origin or name
            if _can_be_trained(parameter) and not parameter.requires_grad and origin not in table.trained:
                found.append(name)
        return found

    def unfrozen_parameters(self) -> list[str]:
        """Parameters that were frozen before the first step and are trained now, though no step decided it."""
        return _unfrozen(self.schedule)

    def unfrozen_by(self, records: Sequence[Record]) -> list[str]:
        """Names of the parameters that ``records`` unfreeze, without saying so.

        Raises:
            SlapoError: as for :meth:`trial`.
        """
        return _unfrozen(self.trial(records, as_at_first=True))

    def trial(self, records: Sequence[Record], *, all_trained: bool = False, as_at_first: bool = False) -> Schedule:
        """A schedule of a fresh copy of the untouched model, with only ``records`` applied.

        Args:
            records: the steps.
            all_trained: whether they find every parameter trained, however the untouched model has it.
            as_at_first: whether they find the parameters trained that were so before the first step.

        Raises:
            SlapoError: a step is refused without the others, or cannot be repeated on a copy.
        """
        given = self.schedule
        model, steps = copy_with_steps(self._untouched, [self._step(record) for record in records])
        if all_trained:
            for parameter in model.parameters():
                parameter.requires_grad_(_can_be_trained(parameter))
        elif as_at_first:
            train_as_at_first(model, given)
        schedule = Schedule(
            model,
            mesh=given.mesh,
            plugins=given.plugins,
            registry=given.registry,
            example_inputs=given.example_inputs,
        )
        theirs = {id(item) for item in _parts(given.model)} | {id(item) for item in _parts(self._untouched)}
        for record in steps:
            if isinstance(record, SerializationError):
                raise record
            schedule.apply_at(schedule.tree.node(record.path), record.primitive)
            if not _is_data(record) and any(id(item) in theirs for item in _parts(model)):
                raise ApplyError(f"{record} gives the same module each time, so it cannot be tried on a copy")
        return schedule

    def _step(self, record: Record) -> Step:
        """The copy of a step of the schedule; a step that is only tried is taken as it is."""
        applied = self.schedule.records
        is_applied = 0 < record.index <= len(applied) and applied[record.index - 1] is record
        return self._steps[record.index - 1] if is_applied else record

    def ready(self, trial: Schedule, counterparts: Counterparts, dtype: torch.dtype | None) -> nn.Module:
        """The model of a trial with its values, to be run once."""
        self._fill_scheduled(trial.model, trial, counterparts)
        return convert(trial.model, dtype)

    def _train_alike(self, decided: Mapping[str, bool]) -> tuple[str, ...]:
        """Freeze in the untouched copy what steps froze on purpose, so that all else can be compared."""
        parameters = dict(self._untouched.named_parameters(remove_duplicate=False))
        changed = []
        for name, flag in decided.items():
            parameter = parameters.get(name)
            if parameter is not None and parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
                changed.append(f"{name} ({'trained' if flag else 'frozen'})")
        return tuple(changed)

    # -- values of what is on the meta device -----------------------------------------------------------------

    def _initial_values(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Full values of the untouched tensors that are on the meta device, by first name; the same on every rank."""
        on_meta = {name: tensor for name, tensor in self._originals.items() if tensor.is_meta}
        if not on_meta:
            return {}
        initialiser = Initialiser(model, self.schedule.hooks, seed=self._seed)
        found = {name: initialiser.value(name, tuple(tensor.shape)) for name, tensor in on_meta.items()}
        refused = [name for name, value in found.items() if value is None]
        if refused:
            raise cannot_initialise(refused)
        return {name: value for name, value in found.items() if value is not None}

    def _fill_scheduled(self, model: nn.Module, schedule: Schedule, counterparts: Counterparts) -> None:
        initialiser: list[Initialiser] = []

        def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
            live = counterparts.tensors[name]
            full = self._full(live, counterparts.correspondence)
            if full is None:
                if not initialiser:
                    initialiser.append(Initialiser(schedule.model, schedule.hooks, seed=self._seed, is_untouched=False))
                full = initialiser[0].value(live.name, tuple(live.layout.shape))
            if full is None:
                raise cannot_initialise([name])
            return live.layout.local(full, self.schedule.mesh).to(self.device, tensor.dtype)

        _fill(model, value)
        for name, parameter in model.named_parameters():
            live = counterparts.tensors.get(name)
            if live is not None and not self._redrawn.keys().isdisjoint(live.stands_for):
                full = self._full(live, counterparts.correspondence)
                assert full is not None
                _set(parameter, live.layout.local(full, self.schedule.mesh))

    def _full(self, live: LiveTensor, correspondence: Correspondence | None) -> torch.Tensor | None:
        """The whole value of a tensor that stands for untouched ones; None if a step added it."""
        values = {**self._values, **self._redrawn}
        parts = {name: values[name] if name in values else self._originals[name].detach() for name in live.stands_for}
        if not parts:
            return None
        if live.layout.origin:
            return parts[live.stands_for[0]]
        assert correspondence is not None
        return correspondence.translations.from_reference(live, parts)


def _has_no_spread(value: torch.Tensor) -> bool:
    """Whether all elements are equal, or all below 1e-2 in magnitude."""
    return bool((value == value.reshape(-1)[0]).all()) or bool((value.abs() < 1e-2).all())


def _set(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def _fill(model: nn.Module, value: Any) -> None:
    """Give the tensors on the meta device their values, ties kept."""
    made: dict[int, torch.Tensor] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for own, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    filled = value(f"{module_name}.{own}" if module_name else own, tensor)
                    if isinstance(tensor, nn.Parameter):
                        filled = nn.Parameter(filled, requires_grad=tensor.requires_grad)
                        filled.__dict__.update(tensor.__dict__)
                    made[id(tensor)] = filled
                table[own] = made[id(tensor)]  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()  # it keeps further references


def _unfrozen(schedule: Schedule) -> list[str]:
    table = schedule.tree.tensors
    found = []
    for name, parameter in schedule.model.named_parameters():
        origin = table.layout(parameter, name).origin
        if parameter.requires_grad and table.trained_at_first.get(origin) is False and origin not in table.trained:
            found.append(name)
    return found


def _can_be_trained(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _parts(model: nn.Module) -> Iterator[Any]:
    yield from model.modules()
    yield from (tensor for _, tensor in named_tensors(model))


def _is_data(record: Record) -> bool:
    """Whether a step holds nothing but numbers and names, so that repeating it touches no object of the user."""
    try:
        primitive_to_json(record.primitive, where=str(record))
    except SerializationError:
        return False
    return True
