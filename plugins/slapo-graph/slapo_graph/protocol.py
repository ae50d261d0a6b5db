"""The base class of tracers: what turns a module's forward into a graph."""

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
        value: what was asked, e.g. ``"x.shape[1] > 4"``.
        expected: the answer while recording.
        location: of the model, where it was asked.
    """

    value: str
    expected: Any
    location: Location


@dataclass(frozen=True)
class Flag:
    """An attribute that recorded code read: its value is held against ``expected`` at every call.

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
        """As the model's code has it: ``"self.config.use_bias"``."""
        return ".".join((self.owner or "self", *self.path, self.attribute))


@dataclass(frozen=True)
class Recorded:
    """A graph, and what it holds for.

    Args:
        graph: its placeholders are first what is ``captured``, then one for each argument that was given, in the order
            of the forward's parameters. Parameters (``get_attr``) and modules (``call_module``) are named relative to
            the traced module. The output is what the forward returns.
        guards: numbered as the calls of :func:`check` in the graph have them.
        flags: attributes that were read.
        captured: tensors that the graph holds itself.
        read: every attribute that was read, by modules that stay calls too: modules of the same structure in which all
            of them are equal share the graph. None if that is not known: the graph is for this module only.
    """

    graph: fx.Graph
    guards: tuple[Guard, ...] = ()
    flags: tuple[Flag, ...] = ()
    captured: tuple[torch.Tensor, ...] = ()
    read: tuple[Flag, ...] | None = None


class Tracer(ABC):
    """Turns a module's forward into a graph: ``sch["encoder"].trace(tracer="acme")``.

    A graph runs in place of the forward for the calls that it was asked for: one graph for every signature of inputs
    (which are None, the types of others, the number of axes and dtype of tensors), mode (train, eval) and dtype of the
    parameters. Whatever else the graph takes for granted must be a guard or a flag, or be refused: a graph that
    computes something else than the forward is the one thing that must not happen.

    Attributes:
        name: what users pass as ``trace(tracer=...)``.
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
        """The graph for calls like this one; nothing may be changed.

        Args:
            module: the traced module.
            forward: what it computes, called with the module first: its class's, or what the user set on the instance.
            arguments: what the parameters of ``forward`` get, in their order, without those that are left out;
                ``*args`` is a tuple there, ``**kwargs`` a dictionary. Tensors may be without values.
            leaves: says of a module below, and its path relative to ``module``, whether it stays a call.

        Raises:
            Untraceable: the forward does what this tracer cannot say.
        """


class Untraceable(Exception):  # noqa: N818 - not an error of the user's; TraceError is
    """A forward does what a graph cannot say.

    Args:
        problem: what it does, e.g. ``"branches on the values of a tensor"``.
        location: the line of the model; None if it is not known.
        hint: what to try.
    """

    def __init__(self, problem: str, location: Location | None = None, hint: str | None = None) -> None:
        super().__init__(problem if location is None else f"{problem} ({location[0]}:{location[1]})")
        self.problem, self.location, self.hint = problem, location, hint


class GuardViolation(Exception):  # noqa: N818 - becomes a GuardError
    """A call for which a graph is not valid."""

    def __init__(self, index: int, found: Any) -> None:
        super().__init__(index, found)
        self.index, self.found = index, found


def check(value: Any, expected: Any, index: int) -> None:
    """In a graph: go on only if ``value`` is what it was while recording.

    Args:
        value: a node.
        expected: a constant.
        index: of the guard.

    Raises:
        GuardViolation: it is another.
    """
    if expected is True or expected is False:  # torch.compile has a symbol for what is asked of a size that changes
        if value is None or bool(value) is not expected:
            raise GuardViolation(index, value)
    elif value is not expected and (type(value) is not type(expected) or value != expected):
        raise GuardViolation(index, value)
