"""``find`` held against brute force."""

from __future__ import annotations

import random
import sys

from torch import nn

from slapo_core.errors import ArgumentError
from slapo_graph.patterns.definition import pattern_of

from .brute_force import places
from .cases import random_case
from .forms import as_graph, as_pattern

__all__ = ["compare"]


def compare(seed: int) -> str | int | None:
    """How ``find`` differs from brute force in the case ``seed``; the number of matches if it does not; None if the
    pattern is one that ``find`` refuses.

    Of the places that are left, one that begins first is taken, of these one of the earliest form.
    """
    case = random_case(seed)
    graph = as_graph(case, random.Random(seed))
    try:
        pattern = pattern_of(as_pattern(case, random.Random(seed)))
    except ArgumentError as error:
        return None if "returns an argument" in str(error) or "may return an argument" in str(error) else str(error)
    position = {node: number for number, node in enumerate(graph.nodes)}
    left = places(case)
    found = pattern.matches(graph, nn.Module())
    for match in found:
        if not left:
            return f"seed {seed}: {match} is no match"
        nodes = frozenset(position[node] for node in match.nodes)
        here = [place for place in left if place[1] == nodes]
        if not here:
            return f"seed {seed}: {match} is no match; expected one of {left[:3]}"
        best = (min(left[0][1]), left[0][0])
        if (min(nodes), min(place[0] for place in here)) != best:
            return f"seed {seed}: {match} came before {left[0]}"
        bound = {name: position[node] for name, node in match.captures.items()}
        if not any(dict(place[2]) == bound for place in here):
            return f"seed {seed}: {match} has wrong captures; expected {[place[2] for place in here]}"
        outputs = {
            each
            for each in nodes
            if each in case.results or any(each in call.operands for at, call in case.calls.items() if at not in nodes)
        }
        if {position[node] for node in match.outputs} != outputs:
            return f"seed {seed}: {match} has wrong outputs; expected {outputs}"
        left = [place for place in left if not place[1] & nodes]
    return f"seed {seed}: not found: {left[:3]}" if left else len(found)


def main(cases: int) -> None:
    """Compare that many cases; ends with what differs."""
    results = [compare(seed) for seed in range(cases)]
    differing = [result for result in results if isinstance(result, str)]
    if differing:
        sys.exit("\n".join(differing))
    numbers = [result for result in results if isinstance(result, int)]
    print(
        f"{cases} cases as brute force has them: {sum(numbers)} matches, {numbers.count(0)} cases without a match, "
        f"{cases - len(numbers)} patterns refused"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
