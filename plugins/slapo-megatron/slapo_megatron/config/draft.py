"""Read the schedule, and record the options with every filled-in value and its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import slapo_core
from slapo_core import SlapoError
from slapo_megatron.config.field_types import field_types_of
from slapo_runtime.planning import device_of, parameter_types

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.primitive import Record
    from slapo_runtime.stages import StagedModel


class StagesOf:
    """The stages of a schedule for its example inputs, asked for once.

    Args:
        schedule: to plan.
        options: of the dialect, which say whether there is a loss.
    """

    def __init__(self, schedule: Schedule, options: Mapping[str, Any]) -> None:
        self._schedule = schedule
        self._has_loss = bool((options.get("arguments") or {}).get("has_loss"))
        self._found: StagedModel | SlapoError | None = None

    def ask(self) -> StagedModel:
        """
        Raises:
            SlapoError: there are none, or no example inputs.
        """
        if self._found is None:
            try:
                self._found = slapo_core.stages(self._schedule, whole_output=self._has_loss)
            except SlapoError as error:
                self._found = error
        if isinstance(self._found, SlapoError):
            raise self._found
        return self._found

    @property
    def count(self) -> int | None:
        """Return the number of stages; None if unknown: build and the plan say why."""
        try:
            return len(self.ask().partition.stages)
        except SlapoError:
            return None


@dataclass(frozen=True)
class Facts:
    """Decisions made outside of the options: by the schedule and the arguments of ``build``.

    Args:
        mesh: as messages show it, e.g. ``"{'pp': 2, 'dp': 2}"``; ``"none"`` without one.
        sizes: mesh_dim -> number of ranks, for all three of them.
        stages: how many stages the model is cut into; None where that is not known before ``build``, or there is one
            rank along ``pp``.
        device: the type of the device that the model trains on, e.g. ``"cpu"``.
        dtypes: of the parameters that are trained, or, where none is, of all, e.g. ``{"float32"}``.
        cuts_sequences: whether a step scatters activations over ``tp``, as sequence parallelism does, or a parameter is
            marked so.
        accumulate: the micro-batches that the user asks for; None where nothing is said.
        max_grad_norm: the norm that the user asks for; None where nothing is said.
        has_optimizer: whether there is a factory; None if unknown.
    """

    mesh: str
    sizes: Mapping[str, int]
    stages: int | None
    device: str
    dtypes: frozenset[str]
    cuts_sequences: bool
    accumulate: int | None
    max_grad_norm: float | None
    has_optimizer: bool | None

    @classmethod
    def of(cls, schedule: Schedule, options: Mapping[str, Any], stages: StagesOf) -> Facts:
        """Read them from a schedule, the options of the dialect, and the stages of the schedule."""
        mesh, arguments = schedule.mesh, options.get("arguments") or {}
        sizes = {name: mesh.size(name) if mesh is not None else 1 for name in ("dp", "pp", "tp")}
        accumulate = arguments.get("accumulate", 1)
        return cls(
            mesh="none" if mesh is None else str(mesh),
            sizes=sizes,
            stages=stages.count if sizes["pp"] > 1 else None,
            device=device_of(schedule, arguments.get("device")),
            dtypes=_trained_types(schedule) or parameter_types(schedule),
            cuts_sequences=any(_cuts_sequences(record) for record in schedule.records)
            or any(getattr(one, "sequence_parallel", False) for one in schedule.model.parameters()),
            accumulate=accumulate if accumulate > 1 else None,
            max_grad_norm=arguments.get("max_grad_norm"),
            has_optimizer=arguments.get("has_optimizer"),
        )

    @property
    def per_rank(self) -> int | None:
        """Stages on each rank along ``pp``; None where it is not known."""
        if self.stages is None or self.stages % self.sizes["pp"]:
            return None
        return self.stages // self.sizes["pp"]


def trains(options: Mapping[str, Any]) -> bool:
    """Whether an engine with these options trains: there is a factory, or a rate for Megatron's own optimizer.

    Args:
        options: of the plan.
    """
    has_factory = (options.get("arguments") or {}).get("has_optimizer")
    return bool(has_factory) or options["optimizer_config"].get("lr") is not None


def _trained_types(schedule: Schedule) -> frozenset[str]:
    return frozenset(str(one.dtype).removeprefix("torch.") for one in schedule.model.parameters() if one.requires_grad)


def _cuts_sequences(record: Record) -> bool:
    return record.primitive.name == "tp.sync" and getattr(record.primitive, "op", None) == "reduce_scatter"


@dataclass
class Draft:
    """Values are found and set by the name of an option and of a field, e.g. ``"optimizer_config", "clip_grad"``.

    Args:
        options: for ``optimizer_config``, ``ddp_config``, ``model_parallel_config`` and ``scheduler``: a copy of what
            the user gave, which is filled in.
        facts: decided by the schedule and the arguments of ``build``.
        origins: ``"optimizer_config.clip_grad"`` -> why it was filled in.
        has_optimizer_config: whether the user gave an ``optimizer_config``.
    """

    options: dict[str, dict[str, Any]]
    facts: Facts
    origins: dict[str, str] = field(default_factory=dict)
    has_optimizer_config: bool = False

    def given(self, option: str, name: str) -> bool:
        """Whether the user said something."""
        return name in self.options[option]

    def get(self, option: str, name: str) -> Any:
        """Return the value; if not given, Megatron's default; None for an unknown field."""
        if name in self.options[option]:
            return self.options[option][name]
        field_type = field_types_of(option).get(name)
        return None if field_type is None else field_type.default

    @property
    def may_train(self) -> bool:
        """Whether there is an optimizer; True if a factory is possible."""
        return self.facts.has_optimizer is not False or self.get("optimizer_config", "lr") is not None

    def fill(self, option: str, name: str, value: Any, why: str) -> Any:
        """Set a value, note why, and give it back."""
        self.options[option][name] = value
        self.origins[f"{option}.{name}"] = why
        return value

    @staticmethod
    def place(option: str, name: str) -> str:
        """For messages: ``"'clip_grad' of optimizer_config"``."""
        return f"'{name}' of {option}"
