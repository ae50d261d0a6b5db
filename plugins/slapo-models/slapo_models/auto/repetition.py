"""Plan tensor parallelism of a deep model with two blocks of each kind, where all blocks run alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn

from slapo_core.internals import children_of
from slapo_estimate.reduced_model import BlockKinds, block_of, places_of
from slapo_models.auto.candidates import Step
from slapo_models.auto.private import tree_leaves
from slapo_models.auto.recording import (
    BUFFER,
    INPUT,
    PARAMETER,
    Call,
    Recording,
    Value,
    first_row,
    record,
    tensors_in,
    without_memory,
)
from slapo_models.auto.report import AutoReport

_OUTSIDE = -1
_Signature: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class Split:
    """The steps of one split.

    Args:
        parameters: paths of the parameters and buffers that are split, in the model's order.
        steps: the steps.
    """

    parameters: tuple[str, ...]
    steps: tuple[Step, ...]

    def renamed(self, rename: Callable[[str], str]) -> Split:
        """Return the same split at other paths."""
        return Split(
            tuple(map(rename, self.parameters)),
            tuple(replace(step, path=rename(step.path)) for step in self.steps),
        )


@dataclass(frozen=True)
class Plan:
    """The steps of tensor parallelism.

    Args:
        splits: the splits, in the order of the model's parameters.
        vocabulary: the steps of embeddings and heads.
        report: the split parameters, and the full matrices with the reasons.
    """

    splits: tuple[Split, ...]
    vocabulary: tuple[Step, ...]
    report: AutoReport

    @property
    def steps(self) -> Iterator[Step]:
        """All steps, in their order."""
        for split in self.splits:
            yield from split.steps
        yield from self.vocabulary


@dataclass(frozen=True)
class Repetition:
    """A model that skips all but two blocks of each kind, whose plan holds for all blocks.

    Args:
        model: the reduced model, without memory.
        recording: of it.
        blocks: the blocks of the model.
        names: paths of the model's parameters and buffers, the first of each.
    """

    model: nn.Module
    recording: Recording
    blocks: BlockKinds
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, recording: Recording) -> Repetition | None:
        """Reduce a model, and compare what it runs with a recording of the model.

        Every block must run what the kept block of its kind runs: the same operators on tensors of the same shapes,
        that come from the same places: the block itself, the block before, or outside of the blocks. So it must in
        evaluation, of one sample.

        Args:
            model: the model.
            inputs: one batch.
            recording: of the model, with these inputs.

        Returns:
            the reduced model; None if most blocks would be kept, if it does not run, or if blocks differ.
        """
        blocks = BlockKinds.of(model)
        kept, few = blocks.kept(), without_memory(model)
        if 2 * len(kept) >= len(blocks.paths):
            return None
        tuples = {call.path: call.is_tuple for call in recording.calls}
        for path in (path for number, path in enumerate(blocks.paths) if number not in kept):
            container, _, name = path.rpartition(".")
            skipped = _skipped(few.get_submodule(path), is_tuple=tuples.get(path, False))
            children_of(few.get_submodule(container))[name] = skipped
        names = tuple(_path(*value.names[0]) for value in dict.fromkeys(recording.values.values()))
        sample = first_row(inputs)
        evaluated = inputs if sample is None else sample
        try:
            found = cls(few, record(few, inputs), blocks, names)
            is_alike = found._runs_alike(recording, found.recording) and found._runs_alike(
                record(model, evaluated, training=False), record(few, evaluated, training=False)
            )
        except Exception:  # noqa: BLE001 - e.g. it reads more of what a block returns
            return None
        return found if is_alike else None

    def _runs_alike(self, recording: Recording, few: Recording) -> bool:
        """Return whether each block, and the rest, runs what it runs in the reduced model."""
        places = places_of(self.blocks.paths)
        full, small = _signatures(recording, places), _signatures(few, places)
        if not full or not small or full[_OUTSIDE] != small[_OUTSIDE]:
            return False
        return all(full[number] == small[self._kept(number)] for number in places.values())

    def _kept(self, number: int) -> int:
        """Return the kept block that stands for a block: the first or second of its kind."""
        own = [other for other in self.blocks.kept() if self.blocks.kinds[other] == self.blocks.kinds[number]]
        return own[0] if number == own[0] else own[-1]

    def expanded(self, plan: Plan) -> Plan | None:
        """Expand a plan for the reduced model to all blocks.

        Returns:
            the model's plan; None if a split spans several blocks, or differs in two blocks of a kind.
        """
        paths, kinds, places = self.blocks.paths, self.blocks.kinds, places_of(self.blocks.paths)
        splits: list[Split] = []
        inside: dict[int, list[Split]] = {number: [] for number in self.blocks.kept()}
        for split in plan.splits:
            found = {block_of(path, places) for path in (*split.parameters, *(step.path for step in split.steps))}
            if len(found) > 1:
                return None
            number = found.pop()
            if number == _OUTSIDE:
                splits.append(split)
            else:
                inside[number].append(split.renamed(lambda path, start=paths[number]: path.removeprefix(start)))  # type: ignore[misc]
        first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
        if any(own != inside[first[kinds[number]]] for number, own in inside.items()):
            return None
        if any(block_of(step.path, places) != _OUTSIDE for step in plan.vocabulary):
            return None
        for start, kind in zip(paths, kinds, strict=True):
            splits += [split.renamed(lambda path, start=start: start + path) for split in inside[first[kind]]]  # type: ignore[misc]
        order = {name: position for position, name in enumerate(self.names)}
        splits.sort(key=lambda split: order[split.parameters[0]])
        return Plan(tuple(splits), plan.vocabulary, self._report(plan.report))

    def _report(self, report: AutoReport) -> AutoReport:
        places, paths = places_of(self.blocks.paths), self.blocks.paths
        stands: dict[str, str] = {}  # name -> name in a kept block
        for name in self.names:
            number = block_of(name, places)
            start = "" if number == _OUTSIDE else paths[number]
            stands[name] = (paths[self._kept(number)] if start else "") + name.removeprefix(start)
        return report.repeated(stands)


def _skipped(block: nn.Module, *, is_tuple: bool) -> nn.Module:
    """Copy a block without its layers; it returns its first tensor."""
    made = copy.copy(block)
    for table in ("_modules", "_parameters", "_buffers"):
        vars(made)[table] = {}
    vars(made)["forward"] = _first_in_tuple if is_tuple else _first
    return made


def _first(*args: Any, **kwargs: Any) -> Any:
    return next(tensors_in((args, kwargs)))


def _first_in_tuple(*args: Any, **kwargs: Any) -> tuple[Any]:
    return (_first(*args, **kwargs),)


def _signatures(recording: Recording, places: Mapping[str, int]) -> dict[int, list[_Signature]]:
    """Return what each block runs, and what runs outside of blocks, in comparable form.

    Args:
        recording: of a model.
        places: path of a block -> its number.

    Returns:
        number of a block, -1 for outside -> its operators and calls of modules; empty if a block is called twice.
    """
    owners = {call.path: block_of(call.path, places) for call in recording.calls}
    starts = {number: path for path, number in places.items()}
    called: dict[int, Call] = {}
    latest: dict[Call, int] = {}  # the last block before a call ends
    before: dict[int, int] = {}  # and before a block begins
    for call in recording.calls:
        latest[call] = next(reversed(called), _OUTSIDE)
        number = places.get(call.path, _OUTSIDE)
        if number in called:
            return {}
        if number != _OUTSIDE:
            before[number] = latest[call]
            called[number] = call
            for around in call.chain():
                latest[around] = number
    outputs = set(recording.outputs)
    given = {value: number for number, value in enumerate(_inputs(recording))}
    where: dict[int, tuple[int, int]] = {}
    found: dict[int, list[_Signature]] = {number: [] for number in (_OUTSIDE, *starts)}

    def relative(path: str, reader: int) -> str:
        return path.removeprefix(starts[reader]) if reader in starts and block_of(path, places) == reader else path

    def role(value: Value, reader: int, previous: int) -> _Signature:
        """Return where a value comes from, as a block or the outside sees it."""
        if value.origin in (PARAMETER, BUFFER):
            return ("state", *((relative(path, reader), name) for path, name in value.names))
        if value.made_by is None:
            return value.origin, given.get(value), value.shape, value.dtype, value.numbers
        owner, offset = where[value.made_by.index]
        position = value.made_by.results.index(value)
        if owner == reader:
            return "own", offset, position
        if previous != _OUTSIDE and value in called[previous].outputs:
            return "block before", called[previous].outputs.index(value)
        return owner, offset, position

    last = _OUTSIDE
    for operator in recording.operators:
        owner = owners[operator.call.path]
        last = owner if owner != _OUTSIDE else last
        previous = before.get(owner, last)
        results = tuple(
            (value.shape, value.dtype, value.needs_gradient, value.changed_gradient, value in outputs)
            for value in operator.results
        )
        numbers = tuple(leaf for leaf in tree_leaves(operator.arguments) if type(leaf) in (bool, int, str))
        where[operator.index] = (owner, len(found[owner]))
        roles = tuple(role(value, owner, previous) for value in operator.inputs)
        path = relative(operator.call.path, owner)
        found[owner].append((path, operator.call.number, operator.name, results, numbers, roles))
    for call in recording.calls:
        owner = owners[call.path]
        previous = before.get(owner, latest[call])
        entered = tuple((key, role(value, owner, previous)) for key, value in call.inputs.items())
        left = tuple(role(value, owner, previous) for value in call.outputs)
        found[owner].append((relative(call.path, owner), call.number, entered, left))
    return found


def _inputs(recording: Recording) -> Iterator[Value]:
    """Yield the model's inputs in the order of their first uses."""
    seen: set[Value] = set()
    for operator in recording.operators:
        for value in operator.inputs:
            if value.origin == INPUT and value not in seen:
                seen.add(value)
                yield value


def _path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
