"""`Case`: one use of a primitive, the subject of each check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError, place
from slapo_core.layout import MESH_DIMS
from slapo_core.primitive import Primitive

if TYPE_CHECKING:
    import torch
    from torch import nn


PrimitiveOrFactory = Primitive | Callable[[], Primitive]
"""A primitive, or a function that makes one: for arguments that are live objects (a module)."""


@dataclass(frozen=True, eq=False)
class Case:
    """A primitive, a model to apply it to, and inputs to run the model with.

    Args:
        primitive: the primitive to apply, e.g. ``Freeze("weight")``; or a function that makes it, if an argument is a
            live object that one model uses up: ``lambda: Replace(nn.GELU())``.
        model: makes a model; called under a fixed seed, so that all calls give equal weights. A lambda is allowed: the
            model itself is sent to other processes.
        inputs: makes one batch as ``verify`` takes it: a tuple of positional arguments, a mapping of keyword arguments,
            or one argument. Called under a fixed seed.
        path: path at which the primitive is applied; ``""`` is the root.
        rejects: values that must be refused at ``path``, or ``(path, value)`` pairs.
        before: ``(path, primitive)`` steps that are applied first.
        after: ``(path, primitive)`` steps that complete the schedule, e.g. the all-reduce after a shard; applied only
            to compare outputs and gradients.
        mesh: mesh dimensions that the primitive needs, e.g. ``("tp",)``; on two ranks the last one has size 2. None
            tests the primitive without a mesh.
        device: device of models and batches, e.g. ``"cuda"``; None: the accelerator if there is one, else the CPU.
            Two ranks on one accelerator are connected by gloo.
        serializable: False for an argument that JSON cannot store; then saving must be refused.
        name: part of the test's id; default: the primitive's bare name.

    Raises:
        ArgumentError: an argument has a wrong type; the hint is the corrected call.
    """

    primitive: PrimitiveOrFactory
    _: KW_ONLY
    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    path: str = ""
    rejects: Sequence[PrimitiveOrFactory | tuple[str, PrimitiveOrFactory]] = ()
    before: Sequence[tuple[str, PrimitiveOrFactory]] = ()
    after: Sequence[tuple[str, PrimitiveOrFactory]] = ()
    mesh: Sequence[str] | None = None
    device: torch.device | str | None = None
    serializable: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        _require_value("primitive", self.primitive)
        require_factories(self, "model", "inputs")
        if isinstance(self.mesh, str) or (self.mesh is not None and not self.mesh):
            raise ArgumentError(
                f"Case: mesh must be a tuple of mesh dimensions (got {self.mesh!r})", hint='mesh=("tp",)'
            )
        for mesh_dim in self.mesh or ():
            if mesh_dim not in MESH_DIMS:
                raise ArgumentError(f"Case: unknown mesh dimension {mesh_dim!r}", hint=f"use {', '.join(MESH_DIMS)}")
        for field in ("before", "after"):
            for step in getattr(self, field):
                if not isinstance(step, tuple) or len(step) != 2 or not isinstance(step[0], str):
                    raise ArgumentError(
                        f"Case: {field} must hold (path, primitive) pairs (got {step!r})",
                        hint=f'{field}=[("fc1", Shard("weight", axis=0))]',
                    )
                _require_value(field, step[1])
        if isinstance(self.rejects, Primitive) or not isinstance(self.rejects, Sequence):
            raise ArgumentError(f"Case: rejects must be a list (got {self.rejects!r})", hint="rejects=[...]")
        for reject in self.rejects:
            _require_value("rejects", reject[1] if isinstance(reject, tuple) else reject)

    def value(self) -> Primitive:
        """Return the primitive."""
        return make_primitive(self.primitive)

    def rejected(self) -> tuple[tuple[str, Primitive], ...]:
        """Return the refused values as ``(path, primitive)`` pairs."""
        pairs = (item if isinstance(item, tuple) else (self.path, item) for item in self.rejects)
        return tuple((path, make_primitive(item)) for path, item in pairs)

    def mesh_sizes(self, size: int) -> dict[str, int] | None:
        """Return the mesh with ``size`` ranks in the last dimension; None for a case without a mesh."""
        if self.mesh is None:
            return None
        return {**dict.fromkeys(self.mesh, 1), self.mesh[-1]: size}

    @property
    def label(self) -> str:
        """Part of a test's id, e.g. ``"freeze"``."""
        return self.name or self.value().name.rpartition(".")[2]

    def __str__(self) -> str:
        where = place(self.path)
        return f"{self.value()} at {where}"


def make_primitive(primitive: PrimitiveOrFactory) -> Primitive:
    """Return the primitive, by its function if there is one."""
    if isinstance(primitive, Primitive):
        return primitive
    value = primitive()
    if not isinstance(value, Primitive):
        raise ArgumentError(f"Case: the function of a primitive must return a primitive (got {value!r})")
    return value


def _require_value(field: str, value: Any) -> None:
    if isinstance(value, type):
        raise ArgumentError(
            f"Case: {field} must be a value (got the class {value.__name__})", hint=f"{value.__name__}(...)"
        )
    if not isinstance(value, Primitive) and not callable(value):
        raise ArgumentError(f"Case: {field} must be a primitive or a function that returns one (got {value!r})")


def require_factories(case: Any, *fields: str) -> None:
    """Require that fields of a case are functions that make models or batches.

    Raises:
        ArgumentError: not a function; or a module, which all checks would share.
    """
    for field in fields:
        value = getattr(case, field)
        is_module = hasattr(value, "named_parameters") and not isinstance(value, type)
        if is_module or not callable(value):
            raise ArgumentError(
                f"{type(case).__name__}: {field} must be a function that makes one (got a {type(value).__name__})",
                hint=f"{field}=lambda: ...",
            )
