"""Spaces: what a space function may do, what is refused, and what stays the same."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slapo_tune.errors import SpaceError
from slapo_tune.plain_data import decode, encode
from slapo_tune.space import Space, describe
from tests.messages import Messages


def polygon(s: Any) -> None:
    batch = s.choose("batch", range(8, 41, 8))
    s.choose("checkpoint", (ratio / 4 for ratio in range(5) if batch * (4 - ratio) <= 96))
    s.require(batch % 3 != 1, "the batch divides over dp")
    if batch > 24:
        s.choose("kernel", ["eager", "flash"])


def test_later_candidates_depend_on_earlier_choices() -> None:
    space = Space.of(polygon)
    points = list(space.points())
    assert points[:2] == [{"batch": 8, "checkpoint": 0.0}, {"batch": 8, "checkpoint": 0.25}]
    assert points[-1] == {"batch": 32, "checkpoint": 1.0, "kernel": "flash"}
    assert len(points) == 5 + 5 + 2 * 4
    assert all(point in space for point in points)
    assert {"batch": 32, "checkpoint": 0.0, "kernel": "flash"} not in space
    assert {"batch": 8} not in space
    assert {**points[0], "kernel": "flash"} not in space
    assert {reason for _, reason in space.refused()} == {"the batch divides over dp"}
    assert describe(space) == (
        "18 points, 8 refused\n"
        "batch  8, 16, 24, 32, 40\n"
        "checkpoint  0.0, 0.25, 0.5, 0.75, 1.0\n"
        "kernel  eager, flash\n"
        "refused 8: the batch divides over dp"
    )
    assert Space.of(space) is space


def test_large_space_is_walked_lazily() -> None:
    runs = 0

    def large(s: Any) -> None:
        nonlocal runs
        runs += 1
        for digit in range(9):
            s.choose(f"x{digit}", range(10))

    space = Space(large)
    first = list(itertools.islice(space.points(), 100))
    assert runs == 100
    assert list(itertools.islice(space.points(), 100)) == first
    assert runs == 100  # kept
    last = dict.fromkeys((f"x{digit}" for digit in range(9)), 9)
    assert last in space
    assert space.draw(lambda name, candidates: 9) == last
    assert runs == 101
    assert "refused, and more\n" in describe(space, 50)


def refusing(reason: str) -> Callable[[Any], None]:
    def space(s: Any) -> None:
        with contextlib.suppress(Exception):  # what a user may write
            s.require(s.choose("batch", [1, 2]) > 5, reason)
        s.choose("more", [1])

    return space


def bad_type(s: Any) -> None:
    s.choose("dtype", [torch.float32])


def raising(s: Any) -> None:
    s.choose("a", [5])
    raise KeyError("five")


CASES: dict[str, tuple[Callable[[Any], Any], str, str | None]] = {
    "no candidates": (lambda s: s.choose("a", []), "'a' has no candidates", "add candidates"),
    "all refused": (refusing("too large"), "2 x 'too large'", "require less"),
    "twice": (
        lambda s: (s.choose("a", [1, 2]), s.choose("a", [1, 3])),
        "'a' is chosen from",
        "another name",
    ),
    "double": (lambda s: s.choose("a", [1, 2, 1]), "twice", "dict.fromkeys"),
    "equal": (lambda s: s.choose("a", [1, True]), "equals candidate 1", None),
    "nan": (lambda s: s.choose("a", [float("nan")]), "nan", None),
    "infinite": (lambda s: s.choose("a", [float("inf")]), "inf", None),
    "list": (lambda s: s.choose("a", [[1, 2]]), "mutable", "(1, 2)"),
    "dtype": (bad_type, "a dtype", "'float32'"),
    "tensor": (lambda s: s.choose("a", torch.arange(3)), "a Tensor", "[0, ...]"),
    "set": (lambda s: s.choose("a", {1, 2}), "a set", "sorted"),
    "string": (lambda s: s.choose("a", "abc"), "got the string 'abc'", "['abc']"),
    "number": (lambda s: s.choose("a", 7), "got 7", "[7]"),
    "endless": (lambda s: s.choose("a", itertools.count()), "at most 100000", "range"),
    "endless loop": (lambda s: [s.choose("a", [1]) for _ in itertools.count()], "more than 10000 times", None),
    "name": (lambda s: s.choose(3, [1]), "got 3", None),
    "swapped": (lambda s: s.require("small", s.choose("a", [1]) > 0), "condition", None),
    "raises": (raising, "KeyError: 'five' (after choosing a=5)", None),
    "exits": (lambda s: sys.exit(s.choose("a", [3])), "SystemExit: 3 (after choosing a=3)", None),
    "generator": (lambda s: (s.choose(name, [1]) for name in "ab"), "generator", "def space(s)"),
}


@pytest.mark.parametrize("case", CASES)
def test_invalid_space_functions_are_refused(case: str, message: Messages) -> None:
    function, word, hint = CASES[case]
    space = Space(function)
    with pytest.raises(SpaceError) as caught:
        (list(space.points()), space.fingerprint())
    message(caught, word)
    assert hint is None or hint in (caught.value.hint or "")


def test_random_space_functions_are_refused() -> None:
    space = Space(lambda s: (s.choose("a", [1, 2]), s.choose("b", [random.random()])))
    with pytest.raises(SpaceError, match="not deterministic") as caught:
        (list(space.points()), space.fingerprint())
    assert "after choosing a=1 it chose 'b' from" in caught.value.message
    assert "no random numbers" in (caught.value.hint or "")


def test_function_that_catches_refusals_has_no_points() -> None:
    def catching(s: Any) -> None:
        try:
            s.choose("a", [float("nan")])
        except Exception:  # noqa: BLE001
            s.choose("a", [1])

    with pytest.raises(SpaceError, match="JSON"):
        next(Space(catching).points())


def test_space_without_symbols_is_one_point() -> None:
    assert list(Space(lambda s: None).points()) == [{}]
    assert describe(Space(lambda s: None)) == "1 point, 0 refused"


def test_branches_may_differ_in_symbols_and_order() -> None:
    def branches(s: Any) -> None:
        if s.choose("tp", [1, 2]) == 1:
            s.choose("a", [1]), s.choose("b", [2])
        else:
            s.choose("b", [2]), s.choose("a", [1])

    assert [list(point) for point in Space(branches).points()] == [["tp", "a", "b"], ["tp", "b", "a"]]


def test_values_keep_their_types_in_json() -> None:
    point = {"a": (1, (2.0, "x"), ()), "b": True, "c": 1, "d": 1.0, "e": None, "f": "é\ud800", "g": 2**70}
    again = decode(json.loads(json.dumps(encode(point))))
    assert again == point
    assert [type(value) for value in again.values()] == [type(value) for value in point.values()]


FINGERPRINT = """
from slapo_tune.space import Space
def space(s):
    batch = s.choose("batch", range(8, 41, 8))
    s.choose("kernel", {"eager": 0, "flash": 1} if batch > 8 else ("é", None, (1, True)))
    s.require(batch < 40, "small")
print(Space(space).fingerprint())
"""


@pytest.mark.ranks
def test_fingerprint_is_equal_in_all_processes_and_differs_between_spaces() -> None:
    found = set()
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", FINGERPRINT], capture_output=True, text=True, env=environ, check=True
        )
        found.add(done.stdout.strip())
    assert len(found) == 1

    def space(*values: Any, limit: int = 9, name: str = "a") -> Callable[[Any], None]:
        return lambda s: s.require(s.choose(name, values) < limit, "limit")

    others = [
        space(1, 2),
        space(2, 1),
        space(1, 2, 3),
        space(1, 2.0),
        space(1, 2, limit=2),
        space(1, 2, name="b"),
        polygon,
    ]
    prints = [Space(other).fingerprint() for other in others]
    assert len(set(prints)) == len(prints)
    assert Space(space(1, 2)).fingerprint() == prints[0]
