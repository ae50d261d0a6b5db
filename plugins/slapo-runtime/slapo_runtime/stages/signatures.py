"""Input signatures, by which batches share stages, and the cache of stages."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError, warn_user
from slapo_core.layout import accelerator
from slapo_runtime.batches import in_mode
from slapo_runtime.private import pytree
from slapo_runtime.stages.staged_model import Outputs, StagedModel, ask

if TYPE_CHECKING:
    from slapo_core import Schedule


_PLAIN = (bool, int, float, complex, str, bytes, tuple, slice, type(None), torch.dtype, torch.device, torch.Size)


class InputSignature:
    """The properties of a batch and a model's modes that decide about the stages.

    Two are equal if their arguments have the same names, structure and plain values, their tensors the same shape,
    type, device, ``requires_grad`` and identities among each other, and every module is in the same mode.

    Args:
        inputs: the arguments of the model's forward, by parameter.
        modes: of the modules, in their order.
    """

    def __init__(self, inputs: Mapping[str, Any], modes: Sequence[bool]) -> None:
        leaves, self._structure = pytree.tree_flatten(dict(inputs))
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves)))}
        self._leaves = [_tensor(leaf, first) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._modes = list(modes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InputSignature):
            return NotImplemented
        if (self._structure, self._modes) != (other._structure, other._modes):
            return False
        return all(map(_is_same, self._leaves, other._leaves))

    @property
    def unknown(self) -> str | None:
        """The type of an argument whose value may change; None without one."""
        return next((type(leaf).__name__ for leaf in self._leaves if not _is_plain(leaf)), None)

    __hash__ = None  # type: ignore[assignment]


def _tensor(tensor: torch.Tensor, first: Mapping[int, int]) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, first[id(tensor)])


def _is_plain(leaf: Any) -> bool:
    """Return whether a leaf is immutable and compared by value, e.g. numpy's scalars."""
    kind = type(leaf)
    is_number = kind.__module__ == "numpy" and kind.__hash__ is not None
    return kind in _PLAIN or isinstance(leaf, enum.Enum) or is_number


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and _is_plain(one) and bool(one == other)


def require_one_signature(inputs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse micro-batches with different input signatures, e.g. of lists with items of several sizes."""
    for name, value in inputs[0].items():
        if isinstance(value, (Mapping, tuple, list)):
            first = InputSignature({name: value}, ())
            if any(InputSignature({name: one.get(name)}, ()) != first for one in inputs[1:]):
                raise BuildError(
                    f"'{name}' differs between micro-batches in its structure, its plain values, or the shapes of its "
                    "tensors, but the stages of a pipeline are the same for all of them",
                    hint=f"pad the tensors of '{name}' to one size; or read batch['{name}'] in the loss: build(sch, "
                    "..., loss=lambda output, batch: ...)",
                )


_KEPT = 16  # signatures


class StagedModels:
    """Cache the stages of a materialized model for the most recent input signatures.

    Args:
        schedule: the schedule to build.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._modules = list(schedule.model.modules())
        self._parameters = list(schedule.model.parameters())
        self._kept: list[tuple[Any, InputSignature, StagedModel | None]] = []  # the most recent one last
        self._has_warned = False

    def of(
        self,
        inputs: Mapping[str, Any],
        *,
        training: bool,
        outputs: Outputs,
        batch_axes: Mapping[str, int | None] | None,
    ) -> StagedModel | None:
        """Return the stages for an input signature.

        Every rank calls it in the same way, with all tensors in their places. The trained parameters count, too.

        Args:
            inputs: the arguments of the model's forward, by parameter, of a micro-batch.
            training: for the mode of a training step, else for an evaluation; the model's own mode is restored.
            outputs: names of the values of the output that the last stage needs, or a function that picks them; None:
                all of them.
            batch_axes: see the hook `slapo_partition`.

        Returns:
            None if no step cuts the model.

        Raises:
            TraceError: the model cannot be cut there.
            HookError: a plugin's answer is invalid.
        """
        with in_mode(self._modules, training=training):
            signature = InputSignature(inputs, [module.training for module in self._modules])
            if signature.unknown is not None:
                if not self._has_warned:
                    self._has_warned = True
                    warn_user(
                        f"an argument of the model is of type {signature.unknown}, whose values are not compared: the "
                        "model is recorded and cut into stages again in every step",
                    )
                return ask(self._schedule, inputs, outputs, batch_axes)
            key = (
                [(parameter.requires_grad, parameter.dtype) for parameter in self._parameters],  # runtimes convert them
                outputs if outputs is None or callable(outputs) else tuple(outputs),
                dict(batch_axes or {}),
                _autocast(),
            )
            known = next((one for one in reversed(self._kept) if one[0] == key and one[1] == signature), None)
            if known is None:
                known = (key, signature, ask(self._schedule, inputs, outputs, batch_axes))
            self._kept = [*[one for one in self._kept if one is not known][1 - _KEPT :], known]
        return known[2]


def _autocast() -> tuple[Any, ...]:
    kinds = ("cpu", *({device.type} if (device := accelerator()) is not None else ()))
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
