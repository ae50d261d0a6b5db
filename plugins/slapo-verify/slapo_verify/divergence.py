"""Compare full tensors between ranks with dropout on.

Each rank sends the others a few numbers of its outputs and gradients, and its RNG state at each dropout call; ranks
with different samples are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.layout import DATA_DIMS
from slapo_verify.compare import Difference, fingerprint
from slapo_verify.copies import Counterparts
from slapo_verify.dropout import Draw
from slapo_verify.precision import is_inexact
from slapo_verify.search import is_below

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_core.primitive import Record


_SHOWN = 3  # paths in a message
Place = tuple[str, int]  # a module's path, and the number of its dropout call


@dataclass(frozen=True)
class RankSummary:
    """Summarize one rank's forward and backward with dropout in a few numbers.

    Args:
        rank: its global rank.
        samples: its place along the mesh dimensions whose ranks see other samples.
        fingerprints: kind and name of outputs, and of gradients of its full parameters -> two numbers of each.
        draws: of each dropout call the shape, and a hash of the RNG state.
    """

    rank: int
    samples: tuple[int, ...]
    fingerprints: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    draws: Mapping[Place, tuple[tuple[int, ...], int]] = field(default_factory=dict)


def summarize(
    mesh: Mesh, outputs: Mapping[str, Any], gradients: Mapping[str, Any], draws: Sequence[Draw], names: Counterparts
) -> RankSummary:
    """Summarize this rank's run.

    Args:
        mesh: with this rank's place.
        outputs: with dropout on.
        gradients: likewise, of all parameters.
        draws: the forward's dropout calls.
        names: to know which parameters are full.
    """
    found = {("output with dropout", name): fingerprint(value) for name, value in outputs.items() if _is_number(value)}
    for name, value in gradients.items():
        if _is_number(value) and names.is_full(name):
            found["gradient with dropout", name] = fingerprint(value)
    samples = tuple(mesh.rank(mesh_dim) for mesh_dim in DATA_DIMS)
    return RankSummary(
        mesh.global_rank, samples, found, {place: (d.shape, d.state) for place, d in _placed(draws).items()}
    )


def diverged(
    ranks: Sequence[RankSummary], reference_model: Sequence[Draw], records: Sequence[Record], dtype: torch.dtype
) -> list[Difference]:
    """Find the first full tensor that differs between ranks.

    Args:
        ranks: of all ranks.
        reference_model: dropout of the reference model.
        records: the steps: the one that gives ranks different RNG streams is named, if it is known.
        dtype: the coarsest type in which the model computes.
    """
    found = next(_divergences(ranks, math.sqrt(torch.finfo(dtype).eps)), None)
    if found is None:
        return []
    (kind, name), one, other, apart, allowed = found
    where = f"{'gradient of ' if kind.startswith('gradient') else ''}{name}"
    result = (
        f"ranks {one.rank} and {other.rank} hold the full tensor and get different values of {where}: replicas of "
        "parameters will diverge"
    )
    rule = (
        "with dropout on, ranks with the same samples have the same outputs and the same gradients of full parameters"
    )
    shapes = {place: draw.shape for place, draw in _placed(reference_model).items()}
    drawn = [path for path in _full_paths(ranks, shapes) if not _drawn_alike(ranks, (path, 0))]
    forking = {path: step for path in drawn if (step := _forking(records, path)) is not None}
    if not forking:
        by_rng = bool(drawn) or kind.startswith("output")  # outputs agree without dropout
        why = f"{'' if by_rng else 'a reduction is missing, or '}the RNG state differs across ranks"
        problem = f"{why}: {result}"
        return [Difference("diverged dropout", name, problem, apart, allowed, None, rule)]
    path, step = next(iter(forking.items()))
    problem = f"each rank drops different elements of a full tensor {shapes[path, 0]}: {result}"
    hint = _instead(step, ranks, shapes)
    by = tuple(dict.fromkeys(step.index for step in forking.values()))
    return [Difference("diverged dropout", path, problem, math.inf, allowed, hint, rule, by)]


def advice(ranks: Sequence[RankSummary], reference_model: Sequence[Draw]) -> str | None:
    """Note where ranks drop the same elements of different shards.

    Args:
        ranks: of all ranks.
        reference_model: dropout of the reference model.
    """
    shapes = {place: draw.shape for place, draw in _placed(reference_model).items()}
    shards = [place for group in _groups(ranks) for place in _shared(group) if _is_shard(place, group[0], shapes)]
    alike = [path for path, number in dict.fromkeys(shards) if _drawn_alike(ranks, (path, number))]
    paths = list(dict.fromkeys(alike))
    if not paths:
        return None
    full = _full_paths(ranks, shapes)
    free = [path for path in paths if not any(is_below(other, path) for other in full)]
    more = f" (and at {len(paths) - 1} more)" if len(paths) > 1 else ""
    start = f"the ranks drop the same elements of different shards at '{paths[0]}'{more}: "
    if free:
        calls = ", ".join(f'sch["{path}"].fork_rng()' for path in free[:_SHOWN])
        return f"{start}{calls}{' and so on' if len(free) > _SHOWN else ''} gives each rank its own RNG stream"
    return (
        f"{start}fork_rng() there would also apply to dropout of a full tensor; set one of the two probabilities "
        "to 0, or keep the equal dropout"
    )


def without_effect(
    ranks: Sequence[RankSummary], reference_model: Sequence[Draw], records: Sequence[Record]
) -> str | None:
    """Note steps that promise other random numbers where nothing is dropped."""
    paths = {path for rank in ranks for path, _ in rank.draws}
    graphs = {each.path for each in records if getattr(each.primitive, "flatten", False)} & paths
    idle = [
        f"{each.primitive} at '{each.path}'"
        for each in records
        if each.primitive.equivalence.is_random
        and not any(is_below(path, each.path) for path in paths)
        and not any(is_below(each.path, graph) for graph in graphs)  # what a flat graph drops counts to its module
    ]
    if not ranks or not reference_model or not idle:
        return None
    more = f" (and {len(idle) - 1} more)" if len(idle) > 1 else ""
    return f"no dropout was seen at or below {idle[0]}{more}: another module drops"


# -- where ----------------------------------------------------------------------------------------------------


def _divergences(
    ranks: Sequence[RankSummary], share: float
) -> Iterator[tuple[tuple[str, str], RankSummary, RankSummary, float, float]]:
    for group in _groups(ranks):
        first = group[0]
        largest: dict[str, float] = {}
        for (kind, _), (norm, _) in first.fingerprints.items():
            largest[kind] = max(largest.get(kind, 0.0), norm if math.isfinite(norm) else 0.0)
        for place, mine in first.fingerprints.items():
            allowed = share * largest[place[0]]
            for other in group[1:]:
                theirs = other.fingerprints.get(place, mine)
                apart = max((abs(a - b) for a, b in zip(mine, theirs, strict=True) if a != b), default=0.0)
                if apart > allowed:  # NaN on all of them is not a divergence
                    yield place, first, other, apart, allowed


def _full_paths(ranks: Sequence[RankSummary], shapes: Mapping[Place, tuple[int, ...]]) -> list[str]:
    found = [
        place for group in _groups(ranks) for place in _shared(group) if group[0].draws[place][0] == shapes.get(place)
    ]
    times = _times(shapes)
    return [
        path for path in dict.fromkeys(path for path, _ in found) if times[path] == _times(ranks[0].draws).get(path)
    ]


def _drawn_alike(ranks: Sequence[RankSummary], place: Place) -> bool:
    return all(len({rank.draws[place][1] for rank in group if place in rank.draws}) <= 1 for group in _groups(ranks))


def _is_shard(place: Place, rank: RankSummary, shapes: Mapping[Place, tuple[int, ...]]) -> bool:
    return place in shapes and rank.draws[place][0] != shapes[place]


def _groups(ranks: Sequence[RankSummary]) -> list[list[RankSummary]]:
    """Group ranks with the same samples, where there are several."""
    by_samples: dict[tuple[int, ...], list[RankSummary]] = {}
    for rank in ranks:
        by_samples.setdefault(rank.samples, []).append(rank)
    return [group for group in by_samples.values() if len(group) > 1]


def _shared(group: Sequence[RankSummary]) -> list[Place]:
    """List places where all ranks of a group use dropout."""
    return [place for place in group[0].draws if all(place in rank.draws for rank in group)]


def _placed(draws: Sequence[Draw]) -> dict[Place, Draw]:
    placed: dict[Place, Draw] = {}
    seen: dict[str, int] = {}
    for draw in draws:
        number = seen.setdefault(draw.path, 0)
        seen[draw.path] += 1
        placed[draw.path, number] = draw
    return placed


def _times(places: Mapping[Place, Any]) -> dict[str, int]:
    return {path: number + 1 for path, number in sorted(places)}


# -- which step -----------------------------------------------------------------------------------------------


def _forking(records: Sequence[Record], path: str) -> Record | None:
    """Return the innermost step at or above a module that promises RANDOM."""
    around = [each for each in records if each.primitive.equivalence.is_random and is_below(path, each.path)]
    return max(around, key=lambda each: len(each.path), default=None)


def _instead(step: Record, ranks: Sequence[RankSummary], shapes: Mapping[Place, tuple[int, ...]]) -> str:
    """Suggest to move the step to modules below that drop only shards."""
    full = _full_paths(ranks, shapes)
    shards = [
        path
        for group in _groups(ranks)
        for path, number in _shared(group)
        if is_below(path, step.path) and _is_shard((path, number), group[0], shapes)
    ]
    places = [path for path in dict.fromkeys(shards) if not any(is_below(other, path) for other in full)]
    calls = ", ".join(f"sch['{path}'].{step.primitive}" for path in places[:_SHOWN])
    place = f"'{step.path}'" if step.path else "the root"
    remove = f"remove {step.primitive} at {place}"
    return f"{remove}; where shards are dropped: {calls}" if calls else f"{remove}: no module in it drops shards only"


# -- numbers --------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_inexact(value) and value.numel() > 0
