"""Draw schedules: units in any order, their steps interleaved, with undo on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.integration.bank.steps import Step
from tests.integration.orders.families import FAMILIES, Unit, after_merge, family

__all__ = ["Draw", "Undo", "draw", "resolved"]

SIZES = (1, 2, 2, 2, 4)
MOST_TRIES = 100


@dataclass(frozen=True)
class Undo:
    """Take back the last steps.

    Args:
        steps: how many.
    """

    steps: int

    def __str__(self) -> str:
        return f"undo {self.steps}"


@dataclass(frozen=True)
class Draw:
    """A schedule.

    Args:
        name: e.g. ``"draw 17"``.
        family: of the model.
        tp: size of the mesh.
        calls: steps, and undos of them.
        invalid: why units were drawn again: not right for the plain model, whatever slapo does.
    """

    name: str
    family: str
    tp: int
    calls: tuple[Step | Undo, ...]
    invalid: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.family}, tp {self.tp}: " + "; ".join(map(str, self.calls))


def draw(seed: int, *, most: int = 8, sizes: Sequence[int] = SIZES, without: str = "") -> Draw:
    """The schedule of a seed: 3 to ``most`` units of one family, as if no step had a precondition.

    What is drawn again is not right for the plain model: a second unit of its kind (two splits of one weight, two
    replacements of one match), or parts that cannot be divided by the ranks.

    Args:
        seed: any number.
        most: units.
        sizes: of the mesh, from which one is chosen.
        without: a primitive that is left out.
    """
    chance = random.Random(seed)
    name, tp = chance.choice(list(FAMILIES)), chance.choice(sizes)
    units, invalid = _units(chance, name, tp, chance.randint(3, most), without)
    calls: list[Step | Undo] = []
    order = _interleaved(chance, units, [])
    if chance.random() < 0.4:
        done = chance.randint(1, len(order))
        back = chance.randint(1, done)
        kept = order[: done - back]
        calls = [*order[:done], Undo(back)]
        calls += _interleaved(chance, units, kept)[len(kept) :]
    else:
        calls = list(order)
    return Draw(f"draw {seed}", name, tp, resolved(name, calls), tuple(invalid))


def _units(chance: random.Random, name: str, tp: int, count: int, without: str) -> tuple[dict[str, Unit], list[str]]:
    known = {each.name: each for each in family(name).values() if all(one.call != without for one in each.steps)}
    chosen: dict[str, Unit] = {}
    invalid: Counter[str] = Counter()
    for _ in range(MOST_TRIES):
        unit = known[chance.choice(list(known))]
        more = [unit, *(known[each] for each in unit.after)]
        more = [each for each in more if each.name not in chosen]
        if any(each.heads is not None and each.heads % tp for each in more):
            invalid["a number of heads that does not divide by the ranks"] += 1
        elif unit not in more or any(_clash(each, other) for each in more for other in chosen.values()):
            invalid["a second one of its kind at the same place"] += 1
        else:
            chosen |= {each.name: each for each in more}
            if len(chosen) >= count:
                break
    return chosen, list(invalid.elements())


def _clash(one: Unit, other: Unit) -> bool:
    if one.once == other.once:
        return True
    kinds = {one.once.split()[0], other.once.split()[0]}
    return kinds == {"tp"} and "tp" in (one.once, other.once)


def _interleaved(chance: random.Random, units: Mapping[str, Unit], kept: Sequence[Step]) -> list[Step]:
    """Steps of all units: those that are there, and then the others, each unit's in its order."""
    steps = list(kept)
    left = {name: [each for each in unit.steps if each not in steps] for name, unit in units.items()}
    while any(left.values()):
        ready = [
            name for name, unit in units.items() if left[name] and not any(left.get(before) for before in unit.after)
        ]
        steps.append(left[chance.choice(ready)].pop(0))  # by units, not by steps: a long one shall not come last
    return steps


def resolved(name: str, calls: Sequence[Step | Undo]) -> tuple[Step | Undo, ...]:
    """With splits of what was merged before in the place of splits of its parts; undos count what was applied."""
    made: list[Step | Undo] = []
    applied: list[list[Step]] = []
    for call in calls:
        if isinstance(call, Undo):
            back = sum(len(each) for each in applied[len(applied) - call.steps :])
            del applied[len(applied) - call.steps :]
            if back:
                made.append(Undo(back))
            continue
        found = after_merge(FAMILIES[name], [each for group in applied for each in group], call)
        applied.append([] if found is None else [found])
        if found is not None:
            made.append(found)
    return tuple(made)
