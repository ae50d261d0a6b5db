"""Base classes of what plugins add besides primitives and dialects: commands, compilers, patterns, samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import typer

    from slapo_core.spec.graph import Region

__all__ = ["STATUSES", "Command", "Compiler", "Pattern", "Point", "Sampler", "SearchSpace", "Trial"]


class Command(ABC):
    """A family of commands of a plugin: ``slapo <name> ...``.

    Published by an entry point of the group ``slapo.v1.commands``. It is imported when it is called, and not when
    ``slapo --help`` lists it.

    Attributes:
        name: the word after ``slapo``, e.g. ``"pipeline"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def app(self) -> typer.Typer:
        """Return the typer app, whose commands are ``slapo <name> <command>``.

        A `SlapoError` that it raises is printed without traceback, and ends the process with status 1.
        """


class Compiler(ABC):
    """Makes something faster of a region of a graph: ``fuse(match, compiler="inductor")``.

    Attributes:
        name: what users write, e.g. ``"inductor"``.
        deprecated: why another one should be taken, shown as a warning; None if nothing speaks against it.
    """

    name: ClassVar[str]
    deprecated: ClassVar[str | None] = None

    @abstractmethod
    def compile(self, region: Region, *, options: Mapping[str, Any]) -> Region:
        """A function that computes what ``region`` computes, gradients included.

        It is called with other sizes than the first ones too, in training and in evaluation.

        Args:
            region: takes tensors, numbers and modules, gives a tensor or a tuple of such.
            options: the user's options for the compiler.
        """


class Pattern(ABC):
    """A pattern with a name: ``sch.find("fusion.bias_gelu")``.

    The first line of the docstring is what ``slapo patterns list`` shows::

        class BiasGelu(slapo.Pattern):
            \"\"\"GELU of a sum with a bias.\"\"\"

            name = "fusion.bias_gelu"

            def forms(self):
                yield lambda x, bias: F.gelu(x + bias)
                yield lambda x, bias: F.gelu(x + bias, approximate="tanh")

    Attributes:
        name: the full name ``<namespace>.<name>``.
        replacement: what computes the same, called with the captures by name, for ``replace(match=...)`` without a new
            module; None if there is none. It must be right for every form.
        results_only: the replacement gives what the pattern returns, and no value inside of a match: one that the
            traced module gives out and does not use, such as the weights of an attention, is None then.
    """

    name: ClassVar[str]
    replacement: ClassVar[Callable[..., Any] | None] = None
    results_only: ClassVar[bool] = False

    @abstractmethod
    def forms(self) -> Iterable[Any]:
        """The ways in which models write it; each is anything that ``find`` takes, all with the same captures.

        Of two forms that match at one place, the earlier one counts.
        """


STATUSES = ("ok", "oom", "timeout", "crash", "wrong", "refused", "over_memory")
"""How a trial can end. ``refused`` (a step, or the space, refuses the point) and ``over_memory`` (the estimate says
that it does not fit) are never started."""

Point = Mapping[str, Any]
"""One choice for each symbol of the space, in the order in which they were chosen."""


@dataclass(frozen=True)
class Trial:
    """A point that was tried, or pruned.

    Args:
        number: from 0, in the order of the proposals.
        point: the choices.
        status: one of :data:`STATUSES`.
        value: the objective, e.g. samples per second; None unless the status is ``"ok"``.
        reason: why it was not ``"ok"``; empty otherwise.
        predicted: by the estimate: ``{"memory": bytes, "time": seconds}``, or a part of it.
        measured: by the trial: ``{"memory": bytes, "time": seconds, ...}``.
        seconds: how long it took.
    """

    number: int
    point: Point
    status: str
    value: float | None = None
    reason: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class SearchSpace(Protocol):
    """The interface of a search space for samplers.

    Values are plain data: None, booleans, numbers, strings, tuples of these. Points that are equal are the same point.
    """

    def points(self) -> Iterable[Point]:
        """Every point that the space allows, in the order of its candidates; the same at every call.

        They are made one after the other, and there may be millions: take as many as needed.
        """

    def draw(self, pick: Callable[[str, tuple[Any, ...]], int]) -> Point | None:
        """The point of one run of the user's function, which chooses symbol by symbol.

        Args:
            pick: is given a symbol's name and its candidates, in their natural order, and gives the index of one.

        Returns:
            the point; None if the space refuses the choices.
        """

    def predicted_memory(self, point: Point) -> int | None:
        """Bytes that the estimate says the fullest rank needs; None where nothing is estimated, e.g. since a step is
        refused at this point. Takes seconds at first, and nothing when asked again.
        """

    @property
    def memory(self) -> int | None:
        """The limit of a rank's memory in bytes; None for none."""


class Sampler(ABC):
    """Proposes points; published by an entry point of the group ``slapo.v1.samplers``.

    A sampler keeps nothing: what it proposes is a function of its arguments alone, so that a search that was killed
    goes on where it was. Its class takes no arguments. ``slapo plugins check`` holds it to that.

    Attributes:
        name: what ``tune(sampler=...)`` calls it, e.g. ``"coordinate"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def suggest(self, space: SearchSpace, history: Sequence[Trial], seed: int) -> Point | None:
        """The point to try next.

        Args:
            space: what may be chosen.
            history: all trials so far, oldest first, the pruned ones and those that failed among them.
            seed: of the search.

        Returns:
            a point of the space that the history does not have; None to end the search.
        """
