"""`Primitive`, and its values: promises, violations, selections, records, suggestions."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from slapo_core.errors import ArgumentError, place

if TYPE_CHECKING:
    from slapo_core.effects import Effect
    from slapo_core.tree.edit import Edit
    from slapo_core.tree.node import Node

__all__ = [
    "PRIMITIVE_TEMPLATE",
    "Change",
    "Equivalence",
    "Primitive",
    "Record",
    "Suggestion",
    "check_primitive",
    "primitive_violations",
    "public_signature",
    "shown",
]


@dataclass(frozen=True)
class Violation:
    """A condition that is not met, with the corrected call.

    Args:
        message: what, where, required, got; e.g. ``"axis 0 of 'weight' has 770 elements, not divisible by tp size 4"``.
        hint: the corrected argument or call, e.g. ``"axis=1 (768)"``.
        gradients_only: of ``slapo_check``: only gradients are wrong, so that an engine can still evaluate.
    """

    message: str
    hint: str | None = None
    gradients_only: bool = False

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"


class _Level(IntEnum):
    EXACT = 0
    REORDERED = 1
    APPROXIMATE = 2
    RANDOM = 3


@dataclass(frozen=True)
class Equivalence:
    """The numerical equivalence that a primitive promises.

    ``Equivalence.EXACT``
        The same operations in the same order: the same bits.
    ``Equivalence.REORDERED``
        The same real-number function; floating-point sums are associated differently.
    ``Equivalence.RANDOM``
        The same distribution; random numbers (dropout) come from another stream, so that ``verify`` compares numbers
        without dropout only. Every module still drops as often, and with the same probability, as in the reference
        model, and nothing in evaluation; within a step forward and backward still use the same numbers.
    ``Equivalence.APPROXIMATE(rtol, atol)``
        Another function, within the stated tolerances (quantization, a fast kernel).

    A promise that holds only under a condition says so: ``Equivalence.EXACT.provided("the module draws no random
    numbers")``. ``verify`` holds the step to it all the same, and so finds a model for which the condition fails.

    Args:
        level: one of the four, ordered from the strictest to the loosest.
        rtol: for APPROXIMATE, the difference allowed relative to the largest element of the reference tensor.
        atol: for APPROXIMATE, the absolute difference allowed.
        conditions: of the promise, e.g. ``("the module draws no random numbers",)``.
    """

    level: _Level
    rtol: float = 0.0
    atol: float = 0.0
    conditions: tuple[str, ...] = ()

    EXACT: ClassVar[Equivalence]
    REORDERED: ClassVar[Equivalence]
    RANDOM: ClassVar[Equivalence]

    @classmethod
    def APPROXIMATE(cls, rtol: float, atol: float = 0.0) -> Equivalence:
        """Another function that stays within ``rtol`` (relative) and ``atol`` (absolute)."""
        if rtol < 0 or atol < 0:
            raise ValueError(f"rtol and atol must not be negative (got rtol={rtol}, atol={atol})")
        return cls(_Level.APPROXIMATE, rtol, atol)

    @classmethod
    def weakest(cls, promises: Iterable[Equivalence]) -> Equivalence:
        """Return the promise of several steps, each with a promise, one after another."""
        level, rtol, atol = _Level.EXACT, 0.0, 0.0
        conditions: list[str] = []
        for promise in promises:
            level = max(level, promise.level)
            rtol += promise.rtol
            atol += promise.atol
            conditions += promise.conditions
        return cls(level, rtol, atol, tuple(dict.fromkeys(conditions)))

    def provided(self, condition: str) -> Equivalence:
        """Return the same promise with one more condition."""
        return replace(self, conditions=(*self.conditions, condition))

    @property
    def is_exact(self) -> bool:
        """Whether the same bits are promised."""
        return self.level is _Level.EXACT

    @property
    def is_random(self) -> bool:
        """Whether random numbers may come from another stream."""
        return self.level is _Level.RANDOM

    def __str__(self) -> str:
        name = self.level.name
        name += f"(rtol={self.rtol:g}, atol={self.atol:g})" if self.rtol or self.atol else ""
        return f"{name} provided {' and '.join(self.conditions)}" if self.conditions else name


Equivalence.EXACT = Equivalence(_Level.EXACT)
Equivalence.REORDERED = Equivalence(_Level.REORDERED)
Equivalence.RANDOM = Equivalence(_Level.RANDOM)


class Selection(ABC):
    """A part of the computation at and below a node, e.g. the matches of a pattern in graphs.

    A distribution with such parts derives from it, and publishes a :class:`Selector` that makes them.
    """

    @abstractmethod
    def located(self, node: Node) -> Selection | Violation:
        """Locate the same part in the present computation of ``node``, or say why it is missing."""

    @abstractmethod
    def divided(self, nodes: Sequence[Node]) -> list[tuple[Node, Selection]] | Violation:
        """Divide the selection over the nodes of a group; nodes without a part are left out."""

    @abstractmethod
    def outline(
        self, node: Node, edit: Edit, transform: Callable[[Callable[..., Any]], Callable[..., Any]], *, name: str
    ) -> None:
        """Make each part one call of ``transform(region)``, of a pure function ``region``.

        Args:
            node: where the primitive is applied.
            edit: of the primitive.
            transform: gives what runs instead; called once for each distinct region.
            name: of the call where the parts are printed.
        """

    @abstractmethod
    def replacement_violations(
        self, node: Node, new: Any, *, params: Mapping[str, str], name: str | None
    ) -> Iterator[Violation]:
        """Yield every reason why :meth:`replace` is impossible; change nothing."""

    @abstractmethod
    def replace(self, node: Node, edit: Edit, new: Any, *, params: Mapping[str, str], name: str | None) -> None:
        """Call ``new`` instead of each part.

        Args:
            node: where the primitive is applied.
            edit: of the primitive.
            new: a function or a module that computes the same, or the name of a pattern with a replacement.
            params: names of parameters of the old modules -> names in a new module.
            name: of the call, or of the new child; None: the name of ``new``.
        """

    def effects(self, node: Node) -> Iterator[Effect]:
        """Yield the calls of what :meth:`outline` or :meth:`replace` put in the place of each part.

        Args:
            node: where the primitive was applied; after all steps.
        """
        return iter(())


class Selector(ABC):
    """Makes a :class:`Selection` of a user's argument, e.g. a pattern; needs no naming in a schedule.

    Attributes:
        name: of the entry point in the group ``slapo.v1.selectors``.
    """

    name: ClassVar[str]

    @abstractmethod
    def given(self, value: Any) -> Selection | None:
        """Return the selection that ``value`` is already, e.g. a list of matches; None otherwise."""

    @abstractmethod
    def select(self, node: Node, value: Any) -> Selection | Violation | None:
        """Look for ``value`` at and below ``node``.

        Returns:
            the selection; why there is none; None if this distribution does not know ``value``.
        """


class Primitive(ABC):
    """One step of a schedule, as a value: the fields are the arguments.

    Subclass it as a frozen dataclass. The fields are checked against their annotations when the value is made,
    lists become tuples, and from the fields slapo derives JSON, hash, repr, signature and typed stubs::

        @dataclass(frozen=True)
        class Freeze(slapo.Primitive):
            \"\"\"Stop the gradient of a parameter. ...\"\"\"

            name = "hello.freeze"
            equivalence = slapo.Equivalence.EXACT
            parameter: str

            def preconditions(self, node): ...
            def apply(self, node, edit): ...
            def postconditions(self, node): ...

    A field called ``name_`` is what users write as ``name=``.

    Attributes:
        name: the full name ``<namespace>.<name>``, e.g. ``"tp.shard"``.
        equivalence: the promise about the numbers. Where the arguments decide, it is a property of the same name.
        named_functions: the fields that may hold a function which is saved by its name, ``"module:name"``, and so no
            other text of that form. Functions in other fields cannot be saved.
        selections: the fields that take a part of the module's computation, e.g. a match of a pattern, or the pattern.
            Before the preconditions each becomes a :class:`Selection` of the present computation.
        targets: the dialects that carry the step out in ``build``, e.g. ``frozenset({"torch"})``; others refuse it.
            None: the step is in effect by itself.
    """

    name: ClassVar[str]
    equivalence: ClassVar[Equivalence]
    named_functions: ClassVar[tuple[str, ...]] = ()
    selections: ClassVar[tuple[str, ...]] = ()
    targets: ClassVar[frozenset[str] | None] = None

    def __post_init__(self) -> None:
        _check_fields(self)

    def bind(self, node: Node) -> Self:
        """Return the step with fields that only the model determines filled in.

        Called before the preconditions, and after ``selections`` were located. The result is recorded and saved,
        compared over the ranks, and applied again by replay; so a step with nothing left to fill in returns itself.
        Most primitives do not need it.

        Args:
            node: where the step is about to be applied; must not be changed.

        Returns:
            a primitive of the same class; the default is the primitive itself.
        """
        return self

    def preconditions(self, node: Node) -> Iterator[Violation]:
        """Yield every reason why the primitive cannot be applied at ``node``; change nothing."""
        return iter(())

    @abstractmethod
    def apply(self, node: Node, edit: Edit) -> Node | None:
        """Change the model, through ``edit`` only.

        Returns:
            the node on which a chained call continues; None means ``node``.
        """

    def postconditions(self, node: Node) -> Iterator[Violation]:
        """Yield every sign that the primitive did not take effect at ``node``."""
        return iter(())

    def effects(self, node: Node) -> Iterator[Effect]:
        """Yield what a training step shows where this step is in effect; ``observe`` and ``verify`` look for it.

        Called on each rank after all steps, with the live model. A step without an effect on this rank, e.g. along a
        mesh dimension of one rank, yields none.

        Args:
            node: where the step was applied.
        """
        return iter(())

    def arguments(self) -> dict[str, Any]:
        """Return the fields by name, in order."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Format the call as users write it, without defaults: ``shard('weight', axis=0)``."""
        parts = []
        for position, field in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if _is_default(value, field.default):
                continue
            is_positional = position == 0 and not field.kw_only
            parts.append(shown(value) if is_positional else f"{field.name.removesuffix('_')}={shown(value)}")
        return f"{self.name.rpartition('.')[2]}({', '.join(parts)})"


def check_primitive(value: Any) -> None:
    """Refuse a value that cannot be a step.

    Raises:
        ArgumentError: not a primitive, a class instead of a value, or a class that breaks the rules of `Primitive`.
    """
    if not isinstance(value, Primitive):
        called = inspect.isclass(value) and issubclass(value, Primitive)
        got = f"the class {value.__name__}, not called" if called else repr(value)
        raise ArgumentError(
            f"apply takes a primitive value (got {got})", hint='sch["fc"].apply(Shard("weight", axis=0))'
        )
    cls = type(value)
    wrong = list(primitive_violations(cls))
    if not isinstance(name := inspect.getattr_static(cls, "name", None), str):
        wrong.append(f"{cls.__qualname__}.name must be a string (got {name!r})")
    if wrong:
        raise ArgumentError("; ".join(wrong), hint=PRIMITIVE_TEMPLATE.format(cls.__name__, cls.__name__.lower()))


PRIMITIVE_TEMPLATE = (
    "@dataclass(frozen=True) class {}(slapo.Primitive): name = 'my.{}', equivalence = slapo.Equivalence.EXACT, its "
    "arguments as fields, and def apply(self, node, edit)"
)
"""Of a primitive's class, for a hint."""

_METHODS = {
    "apply": "(self, node, edit)",
    "bind": "(self, node)",
    "preconditions": "(self, node)",
    "postconditions": "(self, node)",
    "effects": "(self, node)",
}
"""The methods that slapo calls, with their signatures."""


@functools.cache
def primitive_violations(cls: type) -> tuple[str, ...]:
    """Describe the rules of `Primitive` that a class breaks."""
    found = []
    for method, required in _METHODS.items():
        function = getattr(cls, method)
        try:
            inspect.signature(function).bind(*required.split(","))
        except ValueError:  # in C, which has no signature to show
            continue
        except TypeError:
            got = f"{method}{inspect.signature(function)}" if callable(function) else repr(function)
            found.append(f"{cls.__qualname__}.{method} must be callable as {method}{required} (got {got})")
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        got = "no dataclass" if parameters is None else "a dataclass that is not frozen"
        found.append(f"class {cls.__qualname__} must be decorated with @dataclass(frozen=True) (got {got})")
    equivalence = inspect.getattr_static(cls, "equivalence", None)
    if not isinstance(equivalence, (Equivalence, property)):
        found.append(f"{cls.__qualname__}.equivalence must be an Equivalence (got {equivalence!r})")
    return tuple(found)


@functools.cache
def public_signature(cls: type[Primitive]) -> inspect.Signature:
    """Return the public signature: a field ``name_`` becomes ``name=``."""
    signature = inspect.signature(cls)
    parameters = [each.replace(name=each.name.removesuffix("_")) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters)


def _check_fields(primitive: Primitive) -> None:
    """Freeze lists into tuples, and check every field against its annotation.

    Raises:
        ArgumentError: a field has another type than declared; the message names argument, type and value.
    """
    for name, (expected, default) in _declared_fields(type(primitive)).items():
        value = getattr(primitive, name)
        frozen = _freeze(value)
        if frozen is not value:
            object.__setattr__(primitive, name, frozen)
        if expected is Any or type(frozen) is expected or frozen is default:  # the author's own value
            continue
        from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

        try:
            check_type(frozen, expected, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        except TypeCheckError:
            raise ArgumentError(
                f"{primitive.name}: argument '{name}' must be {_type_name(expected)} (got {value!r})",
                hint="lists become tuples: the author annotates them as tuple[..., ...]"
                if isinstance(value, list) and typing.get_origin(expected) is list
                else _nearest(value, expected),
            ) from None


def _nearest(value: Any, expected: Any) -> str | None:
    """Suggest the closest string that a ``Literal`` of the annotation allows."""
    literals = [one for one in (expected, *typing.get_args(expected)) if typing.get_origin(one) is typing.Literal]
    allowed = [text for literal in literals for text in typing.get_args(literal) if isinstance(text, str)]
    close = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    return f"did you mean {close[0]!r}?" if close else None


@functools.cache
def _declared_fields(cls: type) -> dict[str, tuple[Any, Any]]:
    """Return the type and default of each field by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(cls)}


def _freeze(value: Any) -> Any:
    if type(value) in (list, tuple):
        items = tuple(_freeze(item) for item in value)
        unchanged = type(value) is tuple and all(new is old for new, old in zip(items, value, strict=True))
        return value if unchanged else items
    if isinstance(value, set):
        return frozenset(value)
    if type(value) is dict:  # a copy: the caller may change the original
        return {key: _freeze(item) for key, item in value.items()}
    return value


def _is_default(value: Any, default: Any) -> bool:
    if value is default or type(value) is not type(default):  # 1 is not True
        return value is default
    try:
        return bool(value == default)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays compare by element
        return False


def shown(value: Any) -> str:
    """Format a value in one line: a module or a tensor by its type, the rest in full."""
    if inspect.isclass(value):
        return value.__qualname__
    if isinstance(value, Selection):
        return str(value)
    text = repr(value)
    if "\n" not in text and not (callable(value) and " at 0x" in text):
        return text
    return getattr(value, "__qualname__", None) or f"{type(value).__name__}(...)"


def _type_name(expected: Any) -> str:
    return expected.__name__ if inspect.isclass(expected) else str(expected).replace("typing.", "")


@dataclass(frozen=True)
class Record:
    """A primitive that was applied.

    Args:
        index: its number in the schedule, from 1.
        primitive: the value that was applied.
        path: where, e.g. ``"encoder.layer.0.output.dense"``.
        distribution: the distribution that provides the primitive, e.g. ``"acme-slapo"``.
        version: that distribution's version, e.g. ``"0.1.0"``.
        location: the user's ``file:line`` that applied it, e.g. ``"bert_tp.py:41"``.
        edits: one line for each edit; they differ between ranks, so that equality ignores them.
    """

    index: int
    primitive: Primitive
    path: str
    distribution: str
    version: str
    location: str = dataclasses.field(default="", compare=False)
    edits: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """The primitive's full name, e.g. ``"tp.shard"``."""
        return self.primitive.name

    def __str__(self) -> str:
        return f"#{self.index} {self.primitive} at {place(self.path)}"


@dataclass(frozen=True)
class Change:
    """An added, replaced or removed step.

    Args:
        path: where, e.g. ``"encoder.layer.0.output.dense"``.
        primitive: the step there; None leaves ``instead_of`` out.
        instead_of: the step whose place it takes; None adds a step.
        first: of an added step: whether it goes before the other steps at this module, and not behind all steps.
    """

    path: str
    primitive: Primitive | None = None
    instead_of: Record | None = None
    first: bool = False

    def __str__(self) -> str:
        where = f"sch['{self.path}']" if self.path else "sch.root"
        if self.instead_of is None:
            return f"add {where}.{self.primitive}"
        if self.primitive is None:
            return f"leave {self.instead_of} out"
        return f"write {where}.{self.primitive} in place of #{self.instead_of.index}"


@dataclass(frozen=True)
class Suggestion:
    """Changes that belong together.

    Args:
        changes: all of them are tried at once.
        likely: whether it is worth a trial before anything is known about the place of the mistake.
    """

    changes: tuple[Change, ...]
    likely: bool = False

    def __str__(self) -> str:
        return "; ".join(map(str, self.changes))
