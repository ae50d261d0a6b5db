"""With dropout on, full tensors must stay the same on all ranks: outputs, and gradients of replicas.

A rank cannot see it alone. Each tells the others a few numbers of what it got, and where its generator stood at each
dropout; ranks that see other samples are not held against one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.layout import DATA_DIMS
from slapo_verify.compare import Difference, marks
from slapo_verify.copies import Counterparts
from slapo_verify.dropout import Draw
from slapo_verify.precision import is_inexact
from slapo_verify.search import is_below

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_core.primitive import Record


_SHOWN = 3  # paths in a message
Place = tuple[str, int]  # a module, and the how manyth of its draws


@dataclass(frozen=True)
class Told:
    """One rank's forward and backward with dropout, in a few numbers.

    Args:
        rank: its global rank.
        samples: its place along the mesh dimensions whose ranks see other samples.
        marks: kind and name of outputs, and of the gradients of parameters that it holds whole -> two numbers of each.
        draws: of each dropout call the shape, and a hash of the RNG state.
    """

    rank: int
    samples: tuple[int, ...]
    marks: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    draws: Mapping[Place, tuple[tuple[int, ...], int]] = field(default_factory=dict)


def tell(
    mesh: Mesh, outputs: Mapping[str, Any], gradients: Mapping[str, Any], draws: Sequence[Draw], names: Counterparts
) -> Told:
    """Summarize this rank's run.

    Args:
        mesh: with this rank's place.
        outputs: with dropout on.
        gradients: likewise, of all parameters.
        draws: those of the forward.
        names: to know which parameters are whole.
    """
    found = {("output with dropout", name): marks(value) for name, value in outputs.items() if _is_number(value)}
    for name, value in gradients.items():
        if _is_number(value) and names.is_full(name):
            found["gradient with dropout", name] = marks(value)
    samples = tuple(mesh.rank(mesh_dim) for mesh_dim in DATA_DIMS)
    return Told(mesh.global_rank, samples, found, {place: (d.shape, d.state) for place, d in _placed(draws).items()})


def diverged(
    told: Sequence[Told], reference_model: Sequence[Draw], records: Sequence[Record], dtype: torch.dtype
) -> list[Difference]:
    """Find the first full tensor that differs between ranks; the same answer on every rank.

    Args:
        told: by all ranks.
        reference_model: dropout of the reference model.
        records: the steps: the one that gives ranks different RNG streams is named, if it can be said.
        dtype: the coarsest type in which the model computes.
    """
    found = next(_divergences(told, math.sqrt(torch.finfo(dtype).eps)), None)
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
    drawn = [path for path in _whole(told, shapes) if not _drawn_alike(told, (path, 0))]
    forking = {path: step for path in drawn if (step := _forking(records, path)) is not None}
    if not forking:
        problem = f"the RNG state differs across ranks: {result}"
        return [Difference("diverged dropout", name, problem, apart, allowed, None, rule)]
    path, step = next(iter(forking.items()))
    problem = f"each rank drops different elements of a full tensor {shapes[path, 0]}: {result}"
    hint = _instead(step, told, shapes)
    by = tuple(dict.fromkeys(step.index for step in forking.values()))
    return [Difference("diverged dropout", path, problem, math.inf, allowed, hint, rule, by)]


def advice(told: Sequence[Told], reference_model: Sequence[Draw]) -> str | None:
    """Note where ranks drop the same elements of different shards; the same on every rank.

    Args:
        told: by all ranks.
        reference_model: dropout of the reference model.
    """
    shapes = {place: draw.shape for place, draw in _placed(reference_model).items()}
    shards = [place for group in _groups(told) for place in _shared(group) if _is_shard(place, group[0], shapes)]
    alike = [path for path, number in dict.fromkeys(shards) if _drawn_alike(told, (path, number))]
    paths = list(dict.fromkeys(alike))
    if not paths:
        return None
    whole = _whole(told, shapes)
    free = [path for path in paths if not any(is_below(other, path) for other in whole)]
    more = f" (and at {len(paths) - 1} more)" if len(paths) > 1 else ""
    start = f"the ranks drop the same elements of different shards at '{paths[0]}'{more}: "
    if free:
        calls = ", ".join(f'sch["{path}"].fork_rng()' for path in free[:_SHOWN])
        return f"{start}{calls}{' and so on' if len(free) > _SHOWN else ''} gives each rank its own RNG stream"
    return (
        f"{start}fork_rng() there would also apply to dropout of a full tensor; set one of the two probabilities "
        "to 0, or keep the equal dropout"
    )


def without_effect(told: Sequence[Told], reference_model: Sequence[Draw], records: Sequence[Record]) -> str | None:
    """Note steps that promise other random numbers where nothing is dropped; the same on every rank."""
    paths = {path for rank in told for path, _ in rank.draws}
    graphs = {each.path for each in records if getattr(each.primitive, "flatten", False)} & paths
    idle = [
        f"{each.primitive} at '{each.path}'"
        for each in records
        if each.primitive.equivalence.is_random
        and not any(is_below(path, each.path) for path in paths)
        and not any(is_below(each.path, graph) for graph in graphs)  # what a flat graph drops counts to its module
    ]
    if not told or not reference_model or not idle:
        return None
    more = f" (and {len(idle) - 1} more)" if len(idle) > 1 else ""
    return f"no dropout was seen at or below {idle[0]}{more}: another module drops"


# -- where ----------------------------------------------------------------------------------------------------


def _divergences(told: Sequence[Told], share: float) -> Iterator[tuple[tuple[str, str], Told, Told, float, float]]:
    for group in _groups(told):
        first = group[0]
        largest: dict[str, float] = {}
        for (kind, _), (norm, _) in first.marks.items():
            largest[kind] = max(largest.get(kind, 0.0), norm if math.isfinite(norm) else 0.0)
        for place, mine in first.marks.items():
            allowed = share * largest[place[0]]
            for other in group[1:]:
                theirs = other.marks.get(place, mine)
                apart = max((abs(a - b) for a, b in zip(mine, theirs, strict=True) if a != b), default=0.0)
                if apart > allowed:  # NaN on all of them is not a divergence
                    yield place, first, other, apart, allowed


def _whole(told: Sequence[Told], shapes: Mapping[Place, tuple[int, ...]]) -> list[str]:
    found = [
        place for group in _groups(told) for place in _shared(group) if group[0].draws[place][0] == shapes.get(place)
    ]
    times = _times(shapes)
    return [path for path in dict.fromkeys(path for path, _ in found) if times[path] == _times(told[0].draws).get(path)]


def _drawn_alike(told: Sequence[Told], place: Place) -> bool:
    return all(len({rank.draws[place][1] for rank in group if place in rank.draws}) <= 1 for group in _groups(told))


def _is_shard(place: Place, rank: Told, shapes: Mapping[Place, tuple[int, ...]]) -> bool:
    return place in shapes and rank.draws[place][0] != shapes[place]


def _groups(told: Sequence[Told]) -> list[list[Told]]:
    """Group ranks with the same samples, where there are several."""
    by_samples: dict[tuple[int, ...], list[Told]] = {}
    for rank in told:
        by_samples.setdefault(rank.samples, []).append(rank)
    return [group for group in by_samples.values() if len(group) > 1]


def _shared(group: Sequence[Told]) -> list[Place]:
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
    """Return the innermost step at or above a module that promises other random numbers."""
    around = [each for each in records if each.primitive.equivalence.is_random and is_below(path, each.path)]
    return max(around, key=lambda each: len(each.path), default=None)


def _instead(step: Record, told: Sequence[Told], shapes: Mapping[Place, tuple[int, ...]]) -> str:
    """Suggest to move the step to the modules below it that drop only shards."""
    whole = _whole(told, shapes)
    shards = [
        path
        for group in _groups(told)
        for path, number in _shared(group)
        if is_below(path, step.path) and _is_shard((path, number), group[0], shapes)
    ]
    places = [path for path in dict.fromkeys(shards) if not any(is_below(other, path) for other in whole)]
    calls = ", ".join(f"sch['{path}'].{step.primitive}" for path in places[:_SHOWN])
    place = f"'{step.path}'" if step.path else "the root"
    remove = f"remove {step.primitive} at {place}"
    return f"{remove}; where shards are dropped: {calls}" if calls else f"{remove}: no module in it drops shards only"


# -- numbers --------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_inexact(value) and value.numel() > 0
