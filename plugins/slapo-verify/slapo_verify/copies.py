"""Copy the reference model, the scheduled model, and parts of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import Schedule
from slapo_core.errors import ApplyError, SerializationError
from slapo_core.internals import Internals, buffers_of, hooks_of, parameters_of, primitive_to_json
from slapo_core.observers import only_looks
from slapo_core.primitive import Record
from slapo_runtime.correspondence import Correspondence
from slapo_runtime.initialization import Initializer, cannot_initialize
from slapo_runtime.schedule_copies import (
    Step,
    copy_model,
    copy_with_steps,
    reference_with_steps,
    train_as_at_first,
)
from slapo_verify.precision import is_inexact, plain
from slapo_verify.private import apply_to_tensors, refresh_flat_weights

if TYPE_CHECKING:
    from slapo_runtime.correspondence.storage import LiveTensor


def convert(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Convert the floating-point tensors in place; None leaves them."""
    return model if dtype is None else apply_to_tensors(model, lambda t: t.to(dtype) if t.is_floating_point() else t)


def changed_outside(schedule: Schedule, copied: Schedule) -> str | None:
    """Find the first module or tensor that differs from the repeated schedule's.

    Args:
        schedule: only read.
        copied: by :func:`repeated`.
    """
    live, made = ({name: (what, values) for name, what, values in _contents(one)} for one in (schedule, copied))
    for name in dict.fromkeys((*live, *made)):
        if name not in live or name not in made or live[name][0] != made[name][0]:
            return name
        one, other = live[name][1], made[name][1]
        if one is not None and other is not None and not torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True):
            return name
    return None


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's norms that a forward in training mode writes, e.g. before verify: state, not a change of steps."""


def _contents(schedule: Schedule) -> Iterator[tuple[str, Any, torch.Tensor | None]]:
    """Yield every module and tensor: a description, and reproducible values."""
    for path, module in schedule.model.named_modules():
        tables = hooks_of(module)
        hooks = (*tables["forward_pre"].values(), *tables["forward"].values())
        own = [hook for hook in hooks if not only_looks(hook)]
        yield path, (type(module).__qualname__, len(own)), None
    modules = dict(schedule.model.named_modules(remove_duplicate=False))
    for name, tensor in named_tensors(schedule.model):
        origin = Internals(schedule).tree.tensors.layout(tensor, name).origin
        path, _, own_name = name.rpartition(".")
        is_drawn = tensor.is_meta or (isinstance(tensor, nn.Parameter) and not origin)
        is_drawn = is_drawn or (own_name in _STATISTICS and hasattr(modules[path], "track_running_stats"))
        yield name, (tensor.shape, tensor.requires_grad, origin), None if is_drawn else plain(tensor.detach())


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then buffers, under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@dataclass(frozen=True)
class Counterparts:
    """Map names of the scheduled model to reference tensors, for every copy.

    Args:
        correspondence: of the schedule; None where no tensor is compared.
        tensors: every name in the scheduled model, aliases and ties included.
        places: name in the scheduled model -> the place of its tensor in the model's order; tied names share the first.
        modules: the paths of all modules of the scheduled model.
    """

    correspondence: Correspondence | None = None
    tensors: Mapping[str, LiveTensor] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, correspondence: Correspondence, model: nn.Module) -> Counterparts:
        """Make the counterparts of the scheduled ``model`` itself."""
        tensors = correspondence.by_name(model)
        first: dict[int, int] = {}
        places = {name: first.setdefault(id(live.tensor), place) for place, (name, live) in enumerate(tensors.items())}
        paths = frozenset(path for path, _ in model.named_modules(remove_duplicate=False))
        return cls(correspondence, tensors, places, paths)

    def explained(self, name: str) -> str | None:
        """Return the reference tensor's name that ``name`` corresponds to by its layout."""
        live = self.tensors.get(name)
        return live.reference_names[0] if live is not None and live.reference_names and live.layout.origin else None

    def expected(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the reference tensor ``full`` for ``name``."""
        assert self.correspondence is not None
        return self.tensors[name].layout.local(full, self.correspondence.mesh)

    def translated(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Translate a tensor to reference tensors by a plugin; empty if a step added it."""
        live = self.tensors.get(name)
        if self.correspondence is None or live is None or not live.reference_names:
            return {}
        full = live.layout.full(tensor, self.correspondence.mesh)
        return self.correspondence.translations.to_reference(live, full)

    def reference_names(self, name: str) -> tuple[str, ...]:
        """Return the reference tensors of a live one, e.g. merged ones."""
        live = self.tensors.get(name)
        return tuple(live.reference_names) if live is not None else ()

    def is_full(self, name: str) -> bool:
        """Return whether every rank holds the full reference tensor under this name."""
        live = self.tensors.get(name)
        return live is not None and self.explained(name) is not None and not live.layout.placements

    def is_frozen(self, name: str) -> bool:
        """Return whether a parameter of the scheduled model is not trained."""
        live = self.tensors.get(name)
        return live is not None and isinstance(live.tensor, nn.Parameter) and not live.tensor.requires_grad

    def full_beside_shards(self, path: str) -> list[str]:
        """List the full parameters of a module that has shards of others.

        Empty where the weight is among the shards: of such a layer it is known how its bias is added.
        """
        own = {name: live for name, live in self.tensors.items() if name.rpartition(".")[0] == path}
        sharded = {name.rpartition(".")[2] for name, live in own.items() if live.layout.is_sharded}
        if not sharded or "weight" in sharded:
            return []
        return [name for name, live in own.items() if isinstance(live.tensor, nn.Parameter) and self.is_full(name)]

    def is_split_around(self, path: str) -> bool:
        """Return whether a tensor of a module, or of its siblings, is sharded."""
        around = path.rpartition(".")[0]
        return any(
            live.layout.is_sharded for name, live in self.tensors.items() if not around or name.startswith(f"{around}.")
        )

    def first_name(self, name: str) -> str:
        """Return the first name of a reference tensor."""
        return self.correspondence.survey.origins.get(name, name) if self.correspondence is not None else name


class ModelCopies:
    """Make copies to experiment with; the user's model is only read.

    Args:
        schedule: not sealed.
        device: where tensors on the meta device get their values.
        seed: of these values.

    Attributes:
        reference_model: the copy of the reference model that all others are made from; to read only.

    Raises:
        SealedError: the originals were dropped.
        WeightsError: a tensor on the meta device has no initializer, or one of a lazy module no shape.
        HookError: a plugin's answer about a tensor is invalid.
    """

    def __init__(self, schedule: Schedule, *, device: torch.device, seed: int) -> None:
        self.schedule = schedule
        self.device = device
        self._seed = seed
        self._redrawn: dict[str, torch.Tensor] = {}
        self.correspondence, self._originals = Correspondence.of(schedule)
        self.counterparts = Counterparts.of(self.correspondence, schedule.model)
        self._template = copy_model(schedule.model, shares_memory=True)
        self.reference_model, self._steps = reference_with_steps(schedule, shares_memory=True)
        with schedule.reference() as model:
            self._values = self._initial_values(model)
        self.frozen = self._train_alike(Internals(schedule).tree.tensors.trained)

    def tied_modules(self) -> list[frozenset[str]]:
        """List sets of module paths that share a parameter of the reference model."""
        holders: dict[int, set[str]] = {}
        for name, parameter in self.reference_model.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
        return [frozenset(paths) for paths in holders.values() if len(paths) > 1]

    def reference(self, dtype: torch.dtype | None) -> nn.Module:
        """Make a fresh copy of the reference model."""
        model = copy_model(self.reference_model, dtype=dtype)
        origins = self.correspondence.survey.origins
        _fill(model, lambda name, tensor: self._values[origins[name]].to(self.device, tensor.dtype, copy=True))
        for name, parameter in model.named_parameters():
            if origins[name] in self._redrawn:
                _set(parameter, self._redrawn[origins[name]])
        return convert(model, dtype)

    def candidate(self, dtype: torch.dtype | None) -> nn.Module:
        """Make a fresh copy of the scheduled model."""
        model = copy_model(self._template, dtype=dtype)
        self._fill_scheduled(model, self.schedule, self.counterparts)
        return convert(model, dtype)

    def redraw_constants(self) -> list[str]:
        """Randomize (nearly) constant parameters in all further copies; return their names.

        Zero biases, norms of ones and small gates (LayerScale, adaLN-zero) multiply the error of a step away. Each
        element is drawn from +-[0.5, 1.5].
        """
        parameters = dict(self.reference_model.named_parameters())
        for name, original in self._originals.items():
            value = self._values.get(name, original).detach()
            is_drawn = name in parameters and value.is_floating_point() and value.numel() and plain(value) is value
            if is_drawn and _has_no_spread(value):
                generator = torch.Generator().manual_seed(self._seed * 7919 + len(self._redrawn))
                drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5
                sign = torch.randint(2, value.shape, generator=generator) * 2 - 1
                self._redrawn[name] = (drawn * sign).to(self.device, value.dtype)
        return list(self._redrawn)

    def restore_constants(self) -> None:
        """Give further copies the constant parameters' own values."""
        self._redrawn.clear()

    def frozen_parameters(self) -> list[str]:
        """List the reference model's frozen parameters that no step decided."""
        decided = Internals(self.schedule).tree.tensors.trained
        parameters = self.reference_model.named_parameters()
        return [name for name, parameter in parameters if not parameter.requires_grad and name not in decided]

    def frozen_by(self, records: Sequence[Record]) -> list[str]:
        """List the parameters that ``records`` freeze without declaring it.

        Raises:
            SlapoError: as for :meth:`trial`.
        """
        schedule = self.trial(records, _train_all)
        table = Internals(schedule).tree.tensors
        return [
            name
            for name, parameter in schedule.model.named_parameters()
            if is_inexact(parameter)
            and not parameter.requires_grad
            and (table.layout(parameter, name).origin or name) not in table.trained
        ]

    def unfrozen_parameters(self) -> list[str]:
        """List parameters frozen before the first step and trained now, undeclared."""
        return _unfrozen(self.schedule)

    def unfrozen_by(self, records: Sequence[Record]) -> list[str]:
        """List the parameters that ``records`` unfreeze without declaring it.

        Raises:
            SlapoError: as for :meth:`trial`.
        """
        return _unfrozen(self.trial(records, lambda model: train_as_at_first(model, self.schedule)))

    def trial(self, records: Sequence[Record], prepare: Callable[[nn.Module], None] | None = None) -> Schedule:
        """Make a schedule of a fresh reference copy, with only ``records`` applied.

        Args:
            records: the steps.
            prepare: called with the copy before the first step.

        Raises:
            SlapoError: a step is refused without the others, or cannot be repeated on a copy.
        """
        given = self.schedule
        model, steps = copy_with_steps(self.reference_model, [self._step(record) for record in records])
        if prepare is not None:
            prepare(model)
        schedule = Schedule(
            model,
            mesh=given.mesh,
            plugins=Internals(given).plugins,
            registry=Internals(given).registry,
            example_inputs=given.example_inputs,
        )
        theirs = {id(item) for item in (*_parts(given.model), *_parts(self.reference_model))}
        for record in steps:
            if isinstance(record, SerializationError):
                raise record
            Internals(schedule).apply(Internals(schedule).node(record.path), record.primitive)
            if not _is_data(record) and any(id(item) in theirs for item in _parts(model)):
                raise ApplyError(f"{record} gives the same module each time, so it cannot be tried on a copy")
        return schedule

    def _step(self, record: Record) -> Step:
        """Return the copy of an applied step; other steps as they are."""
        applied = self.schedule.records
        is_applied = 0 < record.index <= len(applied) and applied[record.index - 1] is record
        return self._steps[record.index - 1] if is_applied else record

    def ready(self, trial: Schedule, counterparts: Counterparts, dtype: torch.dtype | None) -> nn.Module:
        """Give the model of a trial its values, to be run once."""
        self._fill_scheduled(trial.model, trial, counterparts)
        return convert(trial.model, dtype)

    def _train_alike(self, decided: Mapping[str, bool]) -> tuple[str, ...]:
        """Freeze in the reference copy the parameters that steps froze on purpose."""
        parameters = dict(self.reference_model.named_parameters(remove_duplicate=False))
        changed = []
        for name, flag in decided.items():
            parameter = parameters.get(name)
            if parameter is not None and parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
                changed.append(f"{name} ({'trained' if flag else 'frozen'})")
        return tuple(changed)

    # -- values of tensors on the meta device -----------------------------------------------------------------

    def _initial_values(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Initialize reference tensors on the meta device; the same on every rank."""
        on_meta = {name: tensor for name, tensor in self._originals.items() if tensor.is_meta}
        if not on_meta:
            return {}
        initializer = Initializer(model, Internals(self.schedule).hooks, seed=self._seed)
        found = {name: initializer.value(name, tuple(tensor.shape)) for name, tensor in on_meta.items()}
        refused = [name for name, value in found.items() if value is None]
        if refused:
            raise cannot_initialize(refused)
        return {name: value for name, value in found.items() if value is not None}

    def _fill_scheduled(self, model: nn.Module, schedule: Schedule, counterparts: Counterparts) -> None:
        initializer: list[Initializer] = []

        def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
            live = counterparts.tensors[name]
            full = self._full(live, counterparts.correspondence)
            if full is None:
                if not initializer:
                    initializer.append(
                        Initializer(schedule.model, Internals(schedule).hooks, seed=self._seed, is_reference=False)
                    )
                full = initializer[0].value(live.name, tuple(live.layout.shape))
            if full is None:
                raise cannot_initialize([name])
            return live.layout.local(full, self.schedule.mesh).to(self.device, tensor.dtype)

        _fill(model, value)
        for name, parameter in model.named_parameters():
            live = counterparts.tensors.get(name)
            if live is not None and not self._redrawn.keys().isdisjoint(live.reference_names):
                full = self._full(live, counterparts.correspondence)
                assert full is not None
                _set(parameter, live.layout.local(full, self.schedule.mesh))

    def _full(self, live: LiveTensor, correspondence: Correspondence | None) -> torch.Tensor | None:
        """Return the full value of a corresponding tensor; None if a step added it."""
        values = {**self._values, **self._redrawn}
        parts = {
            name: values[name] if name in values else self._originals[name].detach() for name in live.reference_names
        }
        if not parts:
            return None
        if live.layout.origin:
            return parts[live.reference_names[0]]
        assert correspondence is not None
        return correspondence.translations.from_reference(live, parts)


def _has_no_spread(value: torch.Tensor) -> bool:
    """Return whether all elements are equal, or all below 1e-2 in magnitude."""
    return bool((value == value.reshape(-1)[0]).all()) or bool((value.abs() < 1e-2).all())


def _set(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def _fill(model: nn.Module, value: Any) -> None:
    """Give the tensors on the meta device their values, ties kept."""
    made: dict[int, torch.Tensor] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for table in (parameters_of(module), buffers_of(module)):
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
            refresh_flat_weights(module)  # it keeps further references


def _unfrozen(schedule: Schedule) -> list[str]:
    table = Internals(schedule).tree.tensors
    trained = [each for each in schedule.model.named_parameters() if each[1].requires_grad]
    origins = {name: table.layout(parameter, name).origin for name, parameter in trained}
    return [
        name
        for name, origin in origins.items()
        if table.trained_at_first.get(origin) is False and origin not in table.trained
    ]


def _train_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(is_inexact(parameter))


def _parts(model: nn.Module) -> Iterator[Any]:
    yield from model.modules()
    yield from (tensor for _, tensor in named_tensors(model))


def _is_data(record: Record) -> bool:
    """Return whether a step consists of numbers and names only."""
    try:
        primitive_to_json(record.primitive, where=str(record))
    except SerializationError:
        return False
    return True
