"""Random graphs and patterns as plain descriptions, which know nothing of how ``find`` works."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ANY", "COMMUTATIVE", "Call", "Case", "Choice", "Wild", "random_case"]

ANY = "any constant"
UNARY, COMMUTATIVE, ORDERED = ("relu", "tanh"), ("add", "mul"), ("sub", "matmul")
AXES = (0, -1)


@dataclass(frozen=True)
class Wild:
    """A parameter of a pattern."""

    name: str


@dataclass(eq=False)
class Call:
    """A call, in a graph or in a pattern.

    Args:
        operation: ``"any"`` in a pattern for any_op.
        operands: positions of earlier nodes (graph); wildcards, calls and choices (pattern).
        constant: the axis of a softmax, the number that is added, the part that is taken; ``ANY`` in a pattern.
    """

    operation: str
    operands: tuple[Any, ...]
    constant: Any = None


@dataclass(eq=False)
class Choice:
    """any_of; or optional, where ``function`` names the operation and there is one alternative more: its operand."""

    alternatives: tuple[Any, ...]
    is_optional: bool = False


@dataclass
class Case:
    """A graph and a pattern.

    Args:
        inputs: how many the graph has; the first positions.
        calls: of the graph, by position.
        results: positions that the graph returns.
        outputs: of the pattern.
        wildcards: names of its parameters.
    """

    inputs: int
    calls: dict[int, Call]
    results: tuple[int, ...]
    outputs: tuple[Any, ...] = ()
    wildcards: list[str] = field(default_factory=list)


def random_case(seed: int) -> Case:
    """The case of that number: half of the patterns are cut out of the graph and then changed a little."""
    rng = random.Random(seed)
    case = _graph(rng)
    while True:
        made = _Cutting(rng, case) if rng.random() < 0.7 else _Inventing(rng, case)
        outputs = made.outputs()
        if outputs is not None:
            case.outputs, case.wildcards = outputs, made.used(outputs)
            return case


def _graph(rng: random.Random) -> Case:
    inputs = rng.randint(1, 3)
    calls: dict[int, Call] = {}
    palette = rng.sample(
        [*UNARY, *COMMUTATIVE, *ORDERED, "softmax", "shift", "chunk"], rng.randint(2, 8)
    )  # few kinds of calls: more that looks alike
    tensors = list(range(inputs))
    position = inputs
    for _ in range(rng.randint(4, 13)):
        near = tensors[-4:] if rng.random() < 0.7 else tensors
        operation = rng.choice(palette)
        if operation == "chunk":
            calls[position] = Call("chunk", (rng.choice(near),))
            for part in rng.choice([(0,), (1,), (0, 1), (0, 1)]):
                calls[position + 1 + part] = Call("getitem", (position,), part)
            parts = [each for each in calls if each > position]
            order = {old: position + 1 + number for number, old in enumerate(sorted(parts))}
            for old in sorted(parts):
                calls[order[old]] = calls.pop(old)
            tensors += order.values()
            position += 1 + len(parts)
            continue
        operands: tuple[int, ...] = (rng.choice(near),)
        constant: Any = None
        if operation in (*COMMUTATIVE, *ORDERED):
            operands = (*operands, rng.choice(near))
        elif operation == "softmax":
            constant = rng.choice(AXES)
        elif operation == "shift":
            constant = rng.choice((1.0, 2.0))
        calls[position] = Call(operation, operands, constant)
        tensors.append(position)
        position += 1
    used = {operand for call in calls.values() for operand in call.operands}
    ends = [each for each in calls if each not in used]
    return Case(inputs, calls, tuple(ends + rng.sample(sorted(calls), min(len(calls), rng.randint(0, 2)))))


class _Making:
    """What both ways to make a pattern share."""

    def __init__(self, rng: random.Random, case: Case) -> None:
        self.rng, self.case = rng, case
        self.count = 0

    def wild(self) -> Wild:
        if self.count and self.rng.random() < 0.25:
            return Wild(f"w{self.rng.randrange(self.count)}")
        self.count += 1
        return Wild(f"w{self.count - 1}")

    def used(self, outputs: tuple[Any, ...]) -> list[str]:
        names: dict[str, None] = {}

        def visit(value: Any) -> None:
            if isinstance(value, Wild):
                names.setdefault(value.name)
            for part in value.operands if isinstance(value, Call) else getattr(value, "alternatives", ()):
                visit(part)

        for output in outputs:
            visit(output)
        return list(names)

    def wrapped(self, value: Any) -> Any:
        """Sometimes behind a step that may be absent, or beside an alternative."""
        draw = self.rng.random()
        if draw < 0.06 and value is not None:
            return Choice((Call(self.rng.choice(UNARY), (value,)), value), is_optional=True)
        if draw < 0.12:
            return Choice((self.other(), value) if self.rng.random() < 0.5 else (value, self.other()))
        return value

    def other(self) -> Call:
        operation = self.rng.choice([*UNARY, *COMMUTATIVE, *ORDERED])
        return Call(operation, tuple(self.wild() for _ in range(1 if operation in UNARY else 2)))


class _Cutting(_Making):
    """A connected piece of the graph, with wildcards for what goes in, and some changes."""

    def outputs(self) -> tuple[Any, ...] | None:
        rng, calls = self.rng, self.case.calls
        piece = {rng.choice(sorted(calls))}
        users: dict[int, list[int]] = {}
        for position, call in calls.items():
            for operand in call.operands:
                users.setdefault(operand, []).append(position)
        for _ in range(rng.randint(0, 4)):
            around = {each for node in piece for each in (*calls[node].operands, *users.get(node, ())) if each in calls}
            if rng.random() < 0.3:  # brothers: other users of what goes in
                around |= {each for node in piece for operand in calls[node].operands for each in users[operand]}
            if around - piece:
                piece.add(rng.choice(sorted(around - piece)))
        made: dict[int, Any] = {}
        for position in sorted(piece):
            call = calls[position]
            operands = [self._operand(each, made) for each in call.operands]
            if call.operation in COMMUTATIVE and rng.random() < 0.5:
                operands.reverse()
            constant = call.constant
            operation = call.operation
            if constant is not None and operation != "getitem":
                constant = rng.choice((constant, constant, ANY, -1.0 if operation == "shift" else 0))
            if rng.random() < 0.06 and operation not in ("chunk", "getitem"):
                operation, constant = "any", None
            elif rng.random() < 0.06 and operation in (*COMMUTATIVE, *ORDERED):
                operation = rng.choice((*COMMUTATIVE, *ORDERED))
            made[position] = Call(operation, tuple(operands), constant)
            if operation != "chunk":
                made[position] = self.wrapped(made[position])
        used = {operand for position in piece for operand in calls[position].operands}
        ends = [position for position in sorted(piece) if position not in used]
        more = [position for position in sorted(piece) if position in used and rng.random() < 0.15]
        if any(isinstance(made[position], Call) and made[position].operation == "chunk" for position in (*ends, *more)):
            return None
        outputs = [made[position] for position in (*ends, *more)]
        rng.shuffle(outputs)
        return tuple(outputs)

    def _operand(self, position: int, made: dict[int, Any]) -> Any:
        if position in made and (self.rng.random() < 0.93 or self.case.calls[position].operation == "chunk"):
            return made[position]
        key = ("outside", position)
        known = self.__dict__.setdefault("outside", {})
        if key not in known or self.rng.random() < 0.15:
            known[key] = self.wild()
        return known[key]


class _Inventing(_Making):
    """Any pattern at all."""

    def outputs(self) -> tuple[Any, ...] | None:
        rng = self.rng
        values: list[Any] = [self.wild()]
        for _ in range(rng.randint(1, 4)):
            operation = rng.choice((*UNARY, *COMMUTATIVE, *ORDERED, "softmax", "shift", "any"))
            count = 2 if operation in (*COMMUTATIVE, *ORDERED) else rng.randint(1, 2) if operation == "any" else 1
            operands = tuple(rng.choice(values[-3:]) if rng.random() < 0.75 else self.wild() for _ in range(count))
            constant = None
            if operation == "softmax":
                constant = rng.choice((*AXES, ANY))
            elif operation == "shift":
                constant = rng.choice((1.0, 2.0, ANY))
            values.append(self.wrapped(Call(operation, operands, constant)))
        inside = {id(part) for value in values for part in _parts(value)}
        return tuple(value for value in values if not isinstance(value, Wild) and id(value) not in inside)


def _parts(value: Any) -> list[Any]:
    below = value.operands if isinstance(value, Call) else getattr(value, "alternatives", ())
    return [each for part in below for each in (part, *_parts(part))]
