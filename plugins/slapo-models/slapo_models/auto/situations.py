"""Further situations of a forward: in evaluation, and with one sample; a split must be right in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from slapo_models.auto.axes import Axis
from slapo_models.auto.candidates import Candidate, packing, pairs
from slapo_models.auto.operators import infer
from slapo_models.auto.placement import COPIES, Follow, Graph, LeftWhole
from slapo_models.auto.recording import Operator, Recording, Value, first_row, record


@dataclass(eq=False)
class Situation:
    """A recording that has operators which the first one has not.

    Args:
        name: for reasons, e.g. ``"in evaluation"``.
        graph: of the recording.
        inputs: of the recording.
        training: whether it is in training mode, with gradients.
        leaves: what proved splits are here.
    """

    name: str
    graph: Graph
    inputs: Any
    training: bool
    leaves: dict[Candidate, tuple[Axis, ...]] = field(default_factory=dict)

    def prove(self, candidate: Candidate) -> None:
        """Follow the same split here.

        Raises:
            LeftWhole: it cannot be proved right, or needs other collectives.
        """
        leaves = self._same(candidate)
        if not leaves:
            self.leaves[candidate] = ()
            return
        try:
            placement = Follow(self.graph, leaves).run()
        except LeftWhole as reason:
            raise LeftWhole(f"{self.name}: {reason}") from None
        expected = {path: places for path, places in candidate.placement.sums.items() if path in self.graph.calls_of}
        if placement.sums != expected:
            raise LeftWhole(f"{self.name}, other modules give partial sums")
        if self.training and placement.gradients.keys() - candidate.placement.gradients.keys():
            raise LeftWhole(f"{self.name}, gradients of other modules are partial")
        self.leaves[candidate] = leaves

    def _same(self, candidate: Candidate) -> tuple[Axis, ...]:
        """Return the leaves that cut the same parameters in the same way; none where none is read."""
        wanted = {member.names: _cut(member, candidate.leaves) for member in candidate.members}
        used = [value for value in dict.fromkeys(self.graph.recording.values.values()) if value.uses]
        own = [value for value in used if value.names in wanted]
        for leaves in self._choices((value.axes[wanted[value.names][0]] for value in own), len(candidate.leaves)):
            members = [value for value in used if not self.graph.leaves(value).isdisjoint(leaves)]
            try:
                if {value.names: _cut(value, leaves) for value in members} == {
                    value.names: wanted[value.names] for value in own
                }:
                    return leaves
            except LeftWhole:
                continue
        if own:
            raise LeftWhole(f"{self.name}, the forward cuts the axis in another way")
        return ()

    def _choices(self, axes: Iterable[Axis], number: int) -> Iterator[tuple[Axis, ...]]:
        if number > 1:
            return pairs(axes)
        return ((leaf,) for axis in axes for leaf in axis.leaves())


def _cut(value: Value, leaves: tuple[Axis, ...]) -> tuple[int, tuple[Any, ...]]:
    position = next(place for place, axis in enumerate(value.axes) if not set(leaves).isdisjoint(axis.leaves()))
    return position, packing(value.axes[position], leaves)


def further_situations(model: nn.Module, inputs: Any, graph: Graph) -> tuple[list[Situation], dict[str, None]]:
    """Record the model in evaluation and with one sample; return where it runs other operators.

    Args:
        model: on the meta device.
        inputs: one batch.
        graph: in training, with these inputs.

    Returns:
        the situations, and assumptions where one could not be recorded.
    """
    found: list[Situation] = []
    assumptions: dict[str, None] = {}
    for name, batch, training in (("in evaluation", inputs, False), ("with one sample", first_row(inputs), True)):
        if batch is None:
            continue
        try:
            recording = record(model, batch, training=training)
        except Exception:  # noqa: BLE001 - whatever the model raises there
            assumptions[f"the model does not run {name}"] = None
            continue
        if not _is_part(recording, graph.recording):
            found.append(Situation(name, Graph(recording, infer(recording)), batch, training))
    return found, assumptions


def _is_part(recording: Recording, full: Recording) -> bool:
    """Return whether each call runs operators of the same call of another recording, in the same order."""
    calls = {(call.path, call.number): call for call in full.calls}
    for call in recording.calls:
        other = calls.get((call.path, call.number))
        if other is None:
            return False
        rest = iter([_seen(operator) for operator in other.operators if operator.name not in COPIES])
        if not all(_seen(operator) in rest for operator in call.operators if operator.name not in COPIES):
            return False
    return True


def _seen(operator: Operator) -> str:
    return "aten::view" if operator.name == "aten::_unsafe_view" else operator.name
