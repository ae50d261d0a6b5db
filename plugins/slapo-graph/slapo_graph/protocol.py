"""The interface of tracers, which turn a forward into a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import fx, nn

__all__ = ["Flag", "Guard", "GuardViolation", "Location", "Recorded", "Tracer", "Untraceable", "check"]

Location = tuple[str, int]
"""File and line of the model."""


@dataclass(frozen=True)
class Guard:
    """A value that the recorded code depends on; the graph checks it with :func:`check`.

    Args:
        value: the expression, e.g. ``"x.shape[1] > 4"``.
        expected: its value while recording.
        location: of the expression in the model.
    """

    value: str
    expected: Any
    location: Location


@dataclass(frozen=True)
class Flag:
    """An attribute that recorded code read; its value is compared with ``expected`` at every call.

    Args:
        path: from the traced module to the object that has it, e.g. ``("config",)``.
        attribute: its name.
        expected: its value; of an object, its identity.
        owner: None for attributes of the traced module and what it holds; for a global name, the module that has it,
            e.g. ``"my_model.blocks"``.
    """

    path: tuple[str, ...]
    attribute: str
    expected: Any
    owner: str | None = None

    @property
    def name(self) -> str:
        """Return the name in the model's code: ``"self.config.use_bias"``."""
        return ".".join((self.owner or "self", *self.path, self.attribute))


@dataclass(frozen=True)
class Recorded:
    """A graph and its guards.

    Args:
        graph: its placeholders are the ``captured`` tensors, then one for each argument that was given, in the
            order of the forward's parameters. Parameters (``get_attr``) and modules (``call_module``) are named
            relative to
            the traced module. The output is what the forward returns.
        guards: numbered as the calls of :func:`check` in the graph have them.
        flags: attributes that recorded code read.
        captured: tensors that belong to the graph.
        read: every attribute that was read, by called modules too; modules of the same structure in which all of
            these are equal share the graph. None if unknown: the graph is for this module only.
    """

    graph: fx.Graph
    guards: tuple[Guard, ...] = ()
    flags: tuple[Flag, ...] = ()
    captured: tuple[torch.Tensor, ...] = ()
    read: tuple[Flag, ...] | None = None


class Tracer(ABC):
    """Turns a module's forward into a graph: ``sch["encoder"].trace(tracer="acme")``.

    A graph runs in place of the forward: one for each signature of inputs (None or not, types, number of axes and dtype
    of tensors), mode (train, eval) and dtype of the parameters. Any other assumption must be a guard or a flag, or be
    refused: a graph must never compute anything else than the forward.

    Attributes:
        name: for ``trace(tracer=...)``.
    """

    name: ClassVar[str]

    @abstractmethod
    def trace(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        leaves: Callable[[nn.Module, str], bool],
    ) -> Recorded:
        """Return the graph for calls like this one, without changing anything.

        Args:
            module: the traced module.
            forward: takes the module first; of its class, or set on the instance.
            arguments: by parameter of ``forward``, in their order, without omitted ones; ``*args`` is a tuple,
                ``**kwargs`` a dictionary. Tensors may be fake.
            leaves: whether a module below, at its path relative to ``module``, stays a call.

        Raises:
            Untraceable: this tracer cannot record the forward.
        """


class Untraceable(Exception):  # noqa: N818 - not an error of the user's; TraceError is
    """Signal a forward that a graph cannot represent.

    Args:
        problem: e.g. ``"branches on the values of a tensor"``.
        location: the line of the model; None if unknown.
        hint: a remedy.
    """

    def __init__(self, problem: str, location: Location | None = None, hint: str | None = None) -> None:
        super().__init__(problem if location is None else f"{problem} ({location[0]}:{location[1]})")
        self.problem, self.location, self.hint = problem, location, hint


class GuardViolation(Exception):  # noqa: N818 - becomes a GuardError
    """Signal a call for which a graph is not valid."""

    def __init__(self, index: int, found: Any) -> None:
        super().__init__(index, found)
        self.index, self.found = index, found


def check(value: Any, expected: Any, index: int) -> None:
    """Check in a graph that ``value`` is the same as while recording.

    Args:
        value: a node.
        expected: a constant.
        index: of the guard.

    Raises:
        GuardViolation: it differs.
    """
    if expected is True or expected is False:  # torch.compile has a symbol for a condition on a size
        if value is None or bool(value) is not expected:
            raise GuardViolation(index, value)
    elif value is not expected and (type(value) is not type(expected) or value != expected):
        raise GuardViolation(index, value)
