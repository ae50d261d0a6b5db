"""`StagedCalls`: the stages of one scheduled model, made once for every form of a batch and every mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from slapo_core.errors import HookError
from slapo_core.pipeline.staged import Staged, staged
from slapo_core.spec.pipeline import Extent, Value

if TYPE_CHECKING:
    from slapo_core.schedule.copied import ScheduledCopy
    from slapo_core.schedule.schedule import Schedule

__all__ = ["Extents", "StagedCalls"]


class StagedCalls:
    """Asks the plugins for stages, and keeps them.

    Two calls have one form if their arguments have the same names, structure and plain values, their tensors the same
    shape, type, device and need of a gradient, the same ones of them are one object, and every module is in the same
    mode.

    Args:
        schedule: its model is in the mode in which it is to run whenever stages are asked for.
        outputs: see :func:`~slapo_core.pipeline.staged.staged`.
        batch_axes: likewise.
        extents: shared with others that are asked about the same model; None: its own.
    """

    def __init__(
        self,
        schedule: Schedule | ScheduledCopy,
        *,
        outputs: Sequence[str] | None = None,
        batch_axes: Mapping[str, int | None] | None = None,
        extents: Extents | None = None,
    ) -> None:
        self._schedule, self._outputs, self._batch_axes = schedule, outputs, batch_axes
        self._extents = extents if extents is not None else Extents()
        self._known: list[tuple[_Form, Staged | None]] = []

    def of(self, inputs: Mapping[str, Any]) -> Staged | None:
        """The stages for a call; None where no plugin cuts the model.

        Args:
            inputs: the arguments of the model's forward, by parameter.

        Raises:
            TraceError: it cannot be cut there.
            HookError: an answer of a plugin cannot be right, or contradicts that for a batch of another size.
        """
        form = _Form(inputs, [module.training for module in self._schedule.model.modules()])
        for known, stages in self._known:
            if known == form:
                return stages
        made = staged(self._schedule, inputs, outputs=self._outputs, batch_axes=self._batch_axes)
        if made is not None and not self._batch_axes:
            self._extents.add(form, made)
        self._known.append((form, made))
        return made


class Extents:
    """What was said of shapes with the number of samples left open, for batches that differ in nothing else."""

    def __init__(self) -> None:
        self._known: list[tuple[_Form, Mapping[str, Value]]] = []

    def add(self, form: _Form, made: Staged) -> None:
        """Hold what is said of a further form against what was said before.

        Raises:
            HookError: a value is said to have another shape.
        """
        for known, values in self._known:
            if known.is_like(form):
                for name, value in values.items():
                    again = made.partition.values.get(name)
                    if again is not None and not _agree(value.symbolic_shape, again.symbolic_shape):
                        raise HookError(
                            f"the answer of {made.partition_by} to slapo_partition cannot be right: with the batch "
                            f"left open '{name}' is {_shown(value)}, and {_shown(again)}",
                            plugin=made.partition_by,
                        )
        self._known.append((form, made.partition.values))


def _agree(one: tuple[int | Extent, ...] | None, other: tuple[int | Extent, ...] | None) -> bool:
    return one is None or other is None or one == other


def _shown(value: Value) -> str:
    return f"({', '.join(map(str, value.symbolic_shape or ()))}) where it is {value.shape}"


class _Form:
    """What stages are made for; compared, never hashed: arguments need not be hashable."""

    def __init__(self, inputs: Mapping[str, Any], modes: Sequence[bool]) -> None:
        leaves, self._structure = pytree.tree_flatten(dict(inputs))
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves)))}
        self._leaves = [_tensor(leaf, first) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._modes = list(modes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Form):
            return NotImplemented
        if (self._structure, self._modes) != (other._structure, other._modes):
            return False
        return all(map(_is_same, self._leaves, other._leaves))

    def is_like(self, other: _Form) -> bool:
        """Whether they differ in the number of samples at most: in the first axis of tensors."""
        if (self._structure, self._modes) != (other._structure, other._modes):
            return False
        return all(
            _is_same((one[0][1:], *one[1:]), (two[0][1:], *two[1:]))
            if type(one) is type(two) is tuple
            else _is_same(one, two)
            for one, two in zip(self._leaves, other._leaves, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def _tensor(tensor: torch.Tensor, first: Mapping[int, int]) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, first[id(tensor)])


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    plain = (bool, int, float, complex, str, bytes, tuple, torch.dtype, torch.device, torch.Size)
    return type(one) is type(other) and type(one) in plain and bool(one == other)
