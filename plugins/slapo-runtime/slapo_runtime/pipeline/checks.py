"""Checks of the answers about stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from slapo_core.errors import HookError
from slapo_core.private import buffers_of, parameters_of, write_count
from slapo_core.tree.index import walk
from slapo_runtime.partition import Liveness, Partition, Stage

# Tensors that several stages hold: in processes of their own each has another copy, so none may write to it.


def held_by(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer under each of its names."""
    for path, module in walk(model):
        prefix = f"{path}." if path else ""
        for table in (parameters_of(module), buffers_of(module)):
            yield from ((f"{prefix}{name}", tensor) for name, tensor in table.items() if tensor is not None)


def holders(stages: Sequence[Stage]) -> dict[int, tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Return tensors of several stages: id -> first name, tensor, stages."""
    found: dict[int, tuple[str, torch.Tensor, dict[int, None]]] = {}
    for stage in stages:
        for name, tensor in held_by(stage.module):
            found.setdefault(id(tensor), (name, tensor, {}))[2][stage.index] = None
    return {key: (name, tensor, tuple(where)) for key, (name, tensor, where) in found.items() if len(where) > 1}


class SharedState:
    """Detect a stage that changes tensors of other stages.

    Args:
        stages: of the model.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._shared = list(holders(stages).values())
        self._stages = stages
        self._before = [StateMark(tensor) for _, tensor, _ in self._shared]

    def changed(self) -> list[str]:
        """Return messages on shared tensors that a stage changed."""
        return [
            f"it changes '{name}', which the stages {', '.join(map(str, where))} hold: each has a copy of its own, and "
            "the others would not see it"
            for (name, _, where), before in zip(self._shared, self._before, strict=True)
            if not before.holds(self._at(name, where[0]))
        ]

    def _at(self, name: str, index: int) -> torch.Tensor | None:
        """Return a stage's present tensor of a name."""
        path, _, own = name.rpartition(".")
        return getattr(self._stages[index].module.get_submodule(path), own, None)


class StateMark:
    """Detect writes to a tensor, by version or by values.

    Norms write to buffers without telling, and whoever records a forward puts values back.

    Args:
        tensor: as it is now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        has_values = not isinstance(tensor, nn.Parameter) and not tensor.is_meta
        self._tensor, self._version = tensor, write_count(tensor)
        self._values = tensor.detach().clone() if has_values else None

    def holds(self, tensor: torch.Tensor | None) -> bool:
        """Whether ``tensor`` is the same object, with the same values."""
        if tensor is not self._tensor:
            return False
        if self._values is None:
            is_empty = tensor.is_meta and not isinstance(tensor, nn.Parameter)  # a buffer of another stage
            return is_empty or write_count(tensor) == self._version
        return torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(self._values))


# Whether what two plugins answered about stages fits together.


def check_partition(partition: Partition, plugin: str, model: nn.Module) -> None:
    """Refuse an answer to `slapo_partition` that contradicts the model.

    Args:
        partition: the answer.
        plugin: whose it is, e.g. ``"slapo-pipeline 0.1.0"``.
        model: that it was asked about.

    Raises:
        HookError: every contradiction.
    """
    _require_type("slapo_partition", plugin, partition, Partition)
    _refuse("slapo_partition", plugin, list(_of_modules(partition, model)))


def check_liveness(liveness: Liveness, partition: Partition, outputs: Sequence[str], plugin: str) -> None:
    """Refuse an answer to `slapo_liveness` that contradicts the partition.

    Args:
        liveness: the answer.
        partition: what it was asked about.
        outputs: values of the output that the last stage needs.
        plugin: whose answer it is.

    Raises:
        HookError: every contradiction.
    """
    _require_type("slapo_liveness", plugin, liveness, Liveness)
    _refuse("slapo_liveness", plugin, list(_of_liveness(liveness, partition, outputs)))


def made_problems(made: Any, stage: Stage, partition: Partition) -> list[str]:
    """Return how a stage's output contradicts its declaration."""
    if not isinstance(made, dict):
        return [f"it gives a {type(made).__name__}, not a dictionary"]
    missing = [f"it does not make '{name}'" for name in stage.makes if name not in made]
    more = [f"it makes '{name}' too" for name in made if name not in stage.makes]
    return (
        missing + more + [text for name in stage.makes if name in made for text in _made(made[name], name, partition)]
    )


def _made(tensor: Any, name: str, partition: Partition) -> Iterator[str]:
    value = partition.values[name]
    if not isinstance(tensor, torch.Tensor):
        yield f"'{name}' is a {type(tensor).__name__}, not a tensor"
    elif (tuple(tensor.shape), tensor.dtype) != (tuple(value.shape), value.dtype):
        yield f"'{name}' is {tuple(tensor.shape)} of {tensor.dtype}, not {tuple(value.shape)} of {value.dtype}"


def _require_type(hook: str, plugin: str, answer: Any, kind: type) -> None:
    if not isinstance(answer, kind):
        _refuse(hook, plugin, [f"it is a {type(answer).__name__}, not a {kind.__name__}"])


def _refuse(hook: str, plugin: str, problems: list[str]) -> None:
    if problems:
        raise HookError(f"the answer of {plugin} to {hook} is invalid: {'; '.join(problems)}", plugin=plugin)


def _of_modules(partition: Partition, model: nn.Module) -> Iterator[str]:
    """Check that stages hold the model's tensors, and declare shared ones as ties."""
    tensors = dict(held_by(model))
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    for stage in partition.stages:
        if stage.last is not None and stage.last not in dict(stage.module.named_modules(remove_duplicate=False)):
            yield f"stage {stage.index} is declared to end after '{stage.last}', which it does not hold"
        for name, tensor in held_by(stage.module):
            if tensors.get(name, None if isinstance(tensor, nn.Parameter) else tensor) is not tensor:
                which = "is not the model's" if name in tensors else "is none of the model's"
                yield f"'{name}' of stage {stage.index} {which}"
    said = {tie.name: tie.stages for tie in partition.ties}
    found = {
        first[key]: where
        for key, (_, tensor, where) in holders(partition.stages).items()
        if isinstance(tensor, nn.Parameter) and key in first
    }
    for name in dict.fromkeys((*found, *said)):
        if name not in said:
            yield f"'{name}' is held by the stages {_numbers(found[name])} without a tie"
        elif name not in found:
            yield f"'{name}' is declared as tied over the stages {_numbers(said[name])}, and only one stage holds it"
        elif said[name] != found[name]:
            yield (
                f"'{name}' is declared as tied over the stages {_numbers(said[name])}, and is held by "
                f"{_numbers(found[name])}"
            )


def _of_liveness(liveness: Liveness, partition: Partition, outputs: Sequence[str]) -> Iterator[str]:
    last = len(partition.stages) - 1
    if len(liveness.boundaries) != last:
        yield f"{len(partition.stages)} stages have {last} boundaries, and it names {len(liveness.boundaries)}"
        return
    for stage in partition.stages:
        there = {*liveness.received(stage.index), *stage.makes}
        for name in stage.uses:
            if name not in liveness.received(stage.index):
                yield f"stage {stage.index} reads '{name}', which is not sent to it"
        for name in liveness.sent(stage.index):
            if name not in there:
                yield f"stage {stage.index} sends '{name}', which it neither makes nor receives"
        if len(set(liveness.sent(stage.index))) != len(liveness.sent(stage.index)):
            yield f"stage {stage.index} sends a value twice"
    for name in outputs:
        if name not in {*liveness.received(last), *partition.stages[last].makes}:
            yield f"the last stage needs '{name}' for the loss, and it is not sent"


def _numbers(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))
