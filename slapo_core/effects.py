"""`Effect`: what a training step shows where a step of a schedule, or a runtime's option, is in effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "Calls",
    "Casts",
    "Collective",
    "Compiled",
    "Effect",
    "NeverAllocates",
    "Recomputes",
    "Replays",
]

Phase = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Effect:
    """A sign of a step in a training step; a subclass says which.

    Args:
        at: path of the module that shows it, whoever makes it there, e.g. the runtime; None: the module of the step.
    """

    at: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Collective(Effect):
    """A collective on the ranks of a mesh dimension, made by the step's hooks.

    Args:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``, ``"send"``
            or ``"recv"``.
        mesh_dim: e.g. ``"tp"``; of several dimensions together ``"dp_replicate_dp"``.
        per: of ``"forward"`` and ``"backward"`` the counts are per call of the module, without recomputation;
            in a backward pass only where an input of the module requires a gradient. ``"step"``: of a training step
            of an engine; a step of the schedule shows it only there.
        times: how often; None: at least once.
        dtype: of the tensors, e.g. ``"bfloat16"``; None: any.
        bytes: that this rank gives in a training step, less than twice as many with what else is exchanged; None: any.
    """

    kind: str
    mesh_dim: str
    per: Phase = "forward"
    times: int | None = None
    dtype: str | None = None
    bytes: int | None = None

    def __str__(self) -> str:
        count = "" if self.times is None else f"{self.times} x "
        of_type = "" if self.dtype is None else f" in {self.dtype}"
        size = "" if self.bytes is None else f" of {self.bytes:,} bytes"
        return f"{count}{self.kind} over '{self.mesh_dim}'{of_type}{size} in each {self.per}"


@dataclass(frozen=True)
class Calls(Effect):
    """Calls of a function or module that the step put in the place of others, in each call of the module.

    Args:
        name: as :func:`slapo_core.observers.happened` gets it, or the path of a module.
        times: how often; None: at least once.
        per: as of :class:`Collective`: ``"forward"`` or ``"backward"``.
    """

    name: str
    times: int | None = None
    per: Phase = "forward"

    def __str__(self) -> str:
        in_backward = "" if self.per == "forward" else f" in each {self.per}"
        return f"{'calls' if self.times is None else f'{self.times} calls'} of {self.name}{in_backward}"


@dataclass(frozen=True)
class Recomputes(Effect):
    """A forward of the module, or of a region of it, that the backward pass runs again."""

    def __str__(self) -> str:
        return "a forward that backward recomputes"


@dataclass(frozen=True)
class Compiled(Effect):
    """Compiled code in each call of the module.

    Args:
        graph_breaks: the most that are allowed; None: any number.
    """

    graph_breaks: int | None = 0

    def __str__(self) -> str:
        if self.graph_breaks is None:
            return "compiled code"
        return f"compiled code with {f'at most {self.graph_breaks}' if self.graph_breaks else 'no'} graph breaks"


@dataclass(frozen=True)
class Replays(Effect):
    """Replays of a CUDA graph, for each call of the module.

    Args:
        times: how often; None: at least once.
    """

    times: int | None = None

    def __str__(self) -> str:
        return "replays of a CUDA graph" if self.times is None else f"{self.times} replays of a CUDA graph"


@dataclass(frozen=True)
class Casts(Effect):
    """Types of the module's tensors.

    Args:
        storage: of its parameters, e.g. ``"float32"``; None: any.
        compute: of its matrix products; None: any.
    """

    storage: str | None = None
    compute: str | None = None

    def __str__(self) -> str:
        said = (self.storage and f"parameters in {self.storage}", self.compute and f"products in {self.compute}")
        return " and ".join(filter(None, said))


@dataclass(frozen=True)
class NeverAllocates(Effect):
    """The absence of a large tensor from the step's own computation.

    Args:
        features: elements of the last axis of the floating-point tensors that should not exist.
        rows: the most rows that one may have; None: fewer than the module's input.
    """

    features: int
    rows: int | None = None

    def __str__(self) -> str:
        rows = "all rows" if self.rows is None else f"more than {self.rows:,} rows"
        return f"no tensor of {rows} with {self.features:,} features"
