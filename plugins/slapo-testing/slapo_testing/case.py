"""`Case`: one use of a primitive that every check tries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError
from slapo_core.layout import MESH_DIMS
from slapo_core.primitive import Primitive

if TYPE_CHECKING:
    import torch
    from torch import nn


Making = Primitive | Callable[[], Primitive]
"""A primitive, or a function that makes a new one: for arguments that are live objects (a module)."""


@dataclass(frozen=True, eq=False)
class Case:
    """A primitive, a model to apply it to, and inputs to run the model with.

    Args:
        primitive: the value to apply, e.g. ``Freeze("weight")``; or a function that makes it, where an argument is a
            live object that one model may use up: ``lambda: Replace(nn.GELU())``.
        model: makes a fresh model; called under a fixed random seed, so that every call gives the same weights. A
            lambda is allowed: other processes get the model that it makes.
        inputs: makes one batch as ``verify`` takes it: a tuple of positional arguments, a mapping of keyword arguments,
            or one argument. Called under a fixed random seed.
        path: where the primitive is applied; ``""`` is the root.
        rejects: values that must be refused at ``path``, or ``(path, value)`` pairs.
        before: ``(path, primitive)`` steps that are applied first.
        after: ``(path, primitive)`` steps that complete the schedule where the primitive alone does not, e.g.
            the all-reduce after a shard; applied only where outputs and gradients are compared.
        mesh: mesh dimensions that the primitive needs, e.g. ``("tp",)``; on two ranks the last one has size 2. None
            tests the primitive without a mesh.
        device: where models and batches are put, e.g. ``"cuda"``; None: the accelerator if there is one, else the CPU.
            Two ranks on one accelerator are connected by gloo.
        serializable: False for a case with an argument that JSON cannot carry; then saving must say so.
        name: stands in the test's id; default: the primitive's bare name.

    Raises:
        ArgumentError: an argument of another kind; the message gives the call to write.
    """

    primitive: Making
    _: KW_ONLY
    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    path: str = ""
    rejects: Sequence[Making | tuple[str, Making]] = ()
    before: Sequence[tuple[str, Making]] = ()
    after: Sequence[tuple[str, Making]] = ()
    mesh: Sequence[str] | None = None
    device: torch.device | str | None = None
    serializable: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        _require_value("primitive", self.primitive)
        _require_factory("model", self.model)
        _require_factory("inputs", self.inputs)
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
        """The primitive."""
        return made(self.primitive)

    def rejected(self) -> tuple[tuple[str, Primitive], ...]:
        """``(path, primitive)`` of everything that must be refused."""
        pairs = (item if isinstance(item, tuple) else (self.path, item) for item in self.rejects)
        return tuple((path, made(item)) for path, item in pairs)

    def mesh_sizes(self, size: int) -> dict[str, int] | None:
        """Return the mesh with ``size`` ranks in the last dimension; None for a case without a mesh."""
        if self.mesh is None:
            return None
        return {**dict.fromkeys(self.mesh, 1), self.mesh[-1]: size}

    @property
    def label(self) -> str:
        """The case's part of a test's id, e.g. ``"freeze"``."""
        return self.name or self.value().name.rpartition(".")[2]

    def __str__(self) -> str:
        where = f"'{self.path}'" if self.path else "the root"
        return f"{self.value()} at {where}"


def made(primitive: Making) -> Primitive:
    """The primitive, made now if a function was given."""
    if isinstance(primitive, Primitive):
        return primitive
    value = primitive()
    if not isinstance(value, Primitive):
        raise ArgumentError(f"Case: the function given for a primitive must return one (got {value!r})")
    return value


def _require_value(field: str, value: Any) -> None:
    if isinstance(value, type):
        raise ArgumentError(
            f"Case: {field} must be a value (got the class {value.__name__})", hint=f"{value.__name__}(...)"
        )
    if not isinstance(value, Primitive) and not callable(value):
        raise ArgumentError(f"Case: {field} must be a primitive, or a function that makes one (got {value!r})")


def _require_factory(field: str, value: Any) -> None:
    # A live module is callable too: a module class is a fine factory, an instance would be shared by all checks.
    live = hasattr(value, "named_parameters") and not isinstance(value, type)
    if live or not callable(value):
        raise ArgumentError(
            f"Case: {field} must be a function that makes a fresh one (got a {type(value).__name__})",
            hint=f"{field}=lambda: ...",
        )
