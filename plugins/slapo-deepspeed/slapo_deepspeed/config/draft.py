"""Read a configuration and the schedule, and record every filled-in value."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_runtime.planning import device_of, parameter_types, samples_of

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.primitive import Record

_EXAMPLE = 'config={"zero_optimization": {"stage": 1}}, or config="ds_config.json"'


@dataclass(frozen=True)
class Source:
    """The source of a configuration, to name places in it.

    Args:
        file: the path of the JSON file; None for a dictionary.
    """

    file: str | None = None

    def of(self, key: str) -> str:
        """A place, e.g. ``"'zero_optimization.stage' of ds.json"``.

        Args:
            key: the keys on the way, with dots, e.g. ``"zero_optimization.stage"``.
        """
        return f"'{key}' of {self}"

    def __str__(self) -> str:
        return "config" if self.file is None else self.file


def read(config: Any) -> tuple[dict[str, Any], Source]:
    """A copy of the configuration, and where it comes from.

    Args:
        config: a dictionary as DeepSpeed takes it, the path of a JSON file, or None for an empty one.

    Raises:
        BuildError: it is neither, the file cannot be read, or a value is none that JSON has.
    """
    if config is None:
        return {}, Source()
    if isinstance(config, Mapping):
        source = Source()
        return {key: _plain(value, source, str(key)) for key, value in _keys(config, source, "")}, source
    if not isinstance(config, (str, os.PathLike)):
        raise BuildError(
            f"config must be a dictionary, or the path of a DeepSpeed JSON file (got {config!r})", hint=_EXAMPLE
        )
    file = os.fspath(config)
    if isinstance(file, bytes):
        raise BuildError(f"config must be a path as a string (got {file!r})", hint=_EXAMPLE)
    return _read_file(file), Source(file)


def _read_file(file: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as stream:
            found = json.load(stream, object_pairs_hook=_once_each, parse_constant=_no_constant)
    except OSError as error:
        why = error.strerror or str(error)
        raise BuildError(f"cannot read the DeepSpeed configuration {file!r}: {why}", hint=_EXAMPLE) from error
    except UnicodeDecodeError as error:
        raise BuildError(f"the DeepSpeed configuration {file!r} is not UTF-8 text", hint=_EXAMPLE) from error
    except json.JSONDecodeError as error:
        raise BuildError(
            f"the DeepSpeed configuration {file!r} is not JSON: {error.msg} in line {error.lineno}, column "
            f"{error.colno}",
            hint="plain JSON: no comments, no comma after the last entry",
        ) from error
    except _RefusedError as error:
        raise BuildError(f"the DeepSpeed configuration {file!r} {error}") from error
    if not isinstance(found, dict):
        raise BuildError(
            f"the DeepSpeed configuration {file!r} must be an object, {{...}} (got {type(found).__name__})",
            hint=_EXAMPLE,
        )
    return found


class _RefusedError(ValueError):
    """A value that the JSON parser refuses."""


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _RefusedError(f"has the key {key!r} twice: {json.dumps(made[key])} and {json.dumps(value)}")
        made[key] = value
    return made


def _no_constant(name: str) -> Any:
    raise _RefusedError(f"holds {name}, which JSON does not have")


def _keys(config: Mapping[Any, Any], source: Source, place: str) -> list[tuple[str, Any]]:
    for key in config:
        if not isinstance(key, str):
            raise BuildError(f"the keys of {source.of(place) if place else 'config'} must be strings (got {key!r})")
    return list(config.items())


def _plain(value: Any, source: Source, place: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item, source, f"{place}.{key}") for key, item in _keys(value, source, place)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, source, f"{place}[{number}]") for number, item in enumerate(value)]
    raise BuildError(
        f"{source.of(place)} must be a value that JSON has (got {value!r})",
        hint="a number, a string, true or false, null, a list or a dictionary of such",
    )


@dataclass(frozen=True)
class Facts:
    """Decisions made outside of the configuration: by the schedule and the arguments of ``build``.

    Args:
        mesh: as messages show it, e.g. ``"{'pp': 2, 'dp': 2}"``; ``"none"`` without one.
        dp: the number of replicas.
        pp: the number of ranks along the pipeline.
        tp: the number of ranks that hold shards of a parameter.
        device: the type of the device that the model trains on, e.g. ``"cpu"``.
        dtypes: of the parameters that are floating-point numbers, e.g. ``{"float32"}``.
        split: paths of parameters that a step splits over ``tp``; empty with one rank along it.
        captured: steps that replay GPU kernels at fixed addresses, e.g. ``"cudagraphify at 'layer.0'"``.
        samples: in the example inputs, which are the batch of a replica; None where they do not say.
        accumulate: the micro-batches that the user asks for; None where nothing is said.
        max_grad_norm: the norm that the user asks for; None where nothing is said.
        has_optimizer: whether there is a factory; None if unknown.
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
    def of(cls, schedule: Schedule, options: Mapping[str, Any]) -> Facts:
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


def _split(schedule: Schedule) -> Iterator[str]:
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


AUTO = "auto"
"""What configurations for transformers' Trainer say where a value is to be filled in."""


@dataclass
class Draft:
    """Values are found and set by keys with dots, e.g. ``"zero_optimization.stage"``.

    Args:
        config: a copy of the user's, which is filled in.
        source: where it comes from.
        facts: decided by the schedule and the arguments of ``build``.
        origins: key -> why it was filled in.
    """

    config: dict[str, Any]
    source: Source
    facts: Facts
    origins: dict[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value; None where there is none, and where it is to be filled in ("auto").

        Raises:
            BuildError: a key on the way is not an object.
        """
        value: Any = self.config
        for number, name in enumerate(names := key.split(".")):
            if value is None:
                return None
            if not isinstance(value, dict):
                place = ".".join(names[:number])
                raise BuildError(f"{self.source.of(place)} must be an object, {{...}} (got {value!r})")
            value = value.get(name)
        return None if value == AUTO else value

    def fill(self, key: str, value: Any, why: str) -> Any:
        """Set a value, note why, and give it back."""
        *way, name = key.split(".")
        inner = self.config
        for one in way:
            inner = inner.setdefault(one, {})
        inner[name] = value
        self.origins[key] = why
        return value

    def leave_out(self, key: str, why: str) -> None:
        """Take a key out of what DeepSpeed is given, and note why."""
        *way, name = key.split(".")
        inner = self.config
        for one in way:
            inner = inner[one]
        del inner[name]
        self.origins[key] = f"left out: {why}"
