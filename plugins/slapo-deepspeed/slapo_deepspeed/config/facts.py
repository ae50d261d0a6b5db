"""What the schedule, and the arguments of ``build``, say about a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.spec.dialect import device_of, parameter_types, samples_of

if TYPE_CHECKING:
    from slapo_core.spec.primitive import Record
    from slapo_core.spec.request import ScheduledModel

__all__ = ["Facts"]


@dataclass(frozen=True)
class Facts:
    """What is decided outside of the configuration.

    Args:
        mesh: as messages show it, e.g. ``"{'pp': 2, 'dp': 2}"``; ``"none"`` without one.
        dp: the number of replicas.
        pp: the number of ranks along the pipeline.
        tp: the number of ranks that hold pieces of a parameter.
        device: the type of the device that the model trains on, e.g. ``"cpu"``.
        dtypes: of the parameters that are floating-point numbers, e.g. ``{"float32"}``.
        split: paths of parameters that a step splits over ``tp``; empty with one rank along it.
        captured: steps that replay what a GPU did at fixed addresses, e.g. ``"cudagraphify at 'layer.0'"``.
        samples: in the example inputs, which are the batch of a replica; None where they do not say.
        accumulate: the micro-batches that the user asks for; None where nothing is said.
        max_grad_norm: the norm that the user asks for; None where nothing is said.
        has_optimizer: whether there is a factory; None where nobody has said.
    """

    mesh: str
    dp: int
    pp: int
    tp: int
    device: str
    dtypes: frozenset[str]
    split: tuple[str, ...]
    captured: tuple[str, ...]
    samples: int | None
    accumulate: int | None
    max_grad_norm: float | None
    has_optimizer: bool | None

    @classmethod
    def of(cls, schedule: ScheduledModel, options: Mapping[str, Any]) -> Facts:
        """Read them from a schedule and the options of the dialect."""
        mesh, arguments = schedule.mesh, options.get("arguments") or {}
        sizes = {name: mesh.size(name) if mesh is not None else 1 for name in ("dp", "pp", "tp")}
        accumulate = arguments.get("accumulate", 1)
        return cls(
            mesh="none" if mesh is None else str(mesh),
            **sizes,
            device=device_of(schedule, arguments.get("device")),
            dtypes=parameter_types(schedule),
            split=tuple(_split(schedule)) if sizes["tp"] > 1 else (),
            captured=tuple(str(record) for record in schedule.records if _is_captured(record)),
            samples=samples_of(schedule.example_inputs, options.get("batch_axes") or {}),
            accumulate=accumulate if accumulate > 1 else None,
            max_grad_norm=arguments.get("max_grad_norm"),
            has_optimizer=arguments.get("has_optimizer"),
        )


def _split(schedule: ScheduledModel) -> Iterator[str]:
    for node in schedule.root.walk():
        for name in node.parameters:
            if any(mesh_dim == "tp" for mesh_dim, _ in node.layout(name).shards()):
                yield f"{node.path}.{name}" if node.path else name


def _is_captured(record: Record) -> bool:
    name, arguments = record.primitive.name, vars(record.primitive)
    if name == "fusion.compile":
        options = dict(arguments.get("options") or ())
        graphs = arguments.get("mode") in ("reduce-overhead", "max-autotune") or options.get("triton.cudagraphs")
        return bool(graphs)
    return name == "fusion.cudagraphify"
