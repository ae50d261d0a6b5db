"""One batch as arguments of the model, copied for every run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError
from slapo_core.internals import describe
from slapo_runtime.ranks.facts import RankFact, describe_tensor
from slapo_verify.precision import is_inexact
from slapo_verify.private import pytree


@dataclass(frozen=True)
class Batch:
    """Hold a private copy of the inputs.

    Args:
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        watched: the floating-point and complex inputs by name, as leaves whose gradient can be read; empty unless
            asked for.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    watched: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Hold the arguments of a model's call; see :meth:`of`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """Read ``example_inputs``: a mapping (keyword arguments), a tuple (positional ones), or one argument.

        Raises:
            ArgumentError: there are none, or a tensor among them has no values.
        """
        if value is None:
            raise ArgumentError(
                "verify needs one batch to run the model on: none was given, and the schedule has no example_inputs",
                hint="verify(sch, {'input_ids': ids}), verify(sch, (x,)), or create_schedule(..., example_inputs=...)",
            )
        if isinstance(value, Mapping):
            inputs = cls((), {str(key): item for key, item in value.items()})
        else:
            inputs = cls(value if isinstance(value, tuple) else (value,), {})
        for name, tensor in inputs.tensors():
            if tensor.is_meta:
                raise ArgumentError(
                    f"example input '{name}' {tuple(tensor.shape)} is on the meta device, so it has no values",
                    hint=f"torch.randint or torch.randn of shape {tuple(tensor.shape)}",
                )
        return inputs

    def leaves(self) -> list[tuple[str, Any]]:
        """Yield every leaf with its name: ``input_ids`` for a keyword argument, ``0`` for the first positional one."""
        given = (list(self.args), dict(self.kwargs))
        return [(_name(path[1:]), leaf) for path, leaf in pytree.tree_flatten_with_path(given)[0]]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, leaf) for name, leaf in self.leaves() if isinstance(leaf, torch.Tensor)]

    @property
    def device(self) -> torch.device:
        """Device of the first tensor; the CPU if there is none."""
        return next((tensor.device for _, tensor in self.tensors()), torch.device("cpu"))

    def on_cpu(self) -> Inputs:
        """Move the batch to the CPU."""
        move = lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        return self._map(move)

    def _map(self, change: Callable[[Any], Any]) -> Inputs:
        return Inputs(pytree.tree_map(change, self.args), pytree.tree_map(change, dict(self.kwargs)))

    def variants(self, model: nn.Module) -> tuple[list[tuple[str, Inputs]], list[str]]:
        """Make batches of twice the size, the best to try first, each with a label; and why there is none.

        The first variant leaves out, too, the tensors that the model can be called without.
        """
        if any(tensor.is_nested for _, tensor in self.tensors()):
            return [], ["a batch of another size was not compared, because an input is a nested tensor"]
        found = self._batch_axis()
        if found is None:
            return [], ["a batch of another size was not compared, because no input has a batch axis"]
        axis, size = found
        larger = self._along(axis, size, lambda value: torch.cat([value, value.flip(axis)], axis))
        called = f"a batch of {2 * size}"
        optional = self._optional(model)
        if not optional:
            return [(called, larger)], []
        fewer = Inputs(larger.args, {name: value for name, value in larger.kwargs.items() if name not in optional})
        return [(f"{called} without {' and '.join(optional)}", fewer), (called, larger)], []

    def of_one(self) -> tuple[str, Inputs] | None:
        """Return the first sample alone, with a label; None for a batch of one."""
        found = None if any(tensor.is_nested for _, tensor in self.tensors()) else self._batch_axis()
        if found is None or found[1] == 1:
            return None
        axis, size = found
        return "a batch of 1", self._along(axis, size, lambda value: value.narrow(axis, 0, 1).clone())

    def _batch_axis(self) -> tuple[int, int] | None:
        """Return the batch axis and its size.

        It is the first axis along which all tensors have one size; if there is none, the first one, of those tensors
        that have as much there as the first tensor.
        """
        tensors = [tensor for _, tensor in self.tensors() if tensor.dim()]
        if not tensors or not tensors[0].numel():
            return None
        axis = 0
        for tried in (0, 1):
            having = [tensor for tensor in tensors if tensor.dim() > tried]
            if len(having) > tried and len({tensor.shape[tried] for tensor in having}) == 1:
                axis = tried
                break
        return axis, tensors[0].shape[axis]

    def _along(self, axis: int, size: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """Change the tensors that have ``size`` elements along ``axis``."""

        def changed(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() <= axis or leaf.shape[axis] != size:
                return leaf
            return change(leaf.detach()).requires_grad_(leaf.requires_grad)

        return self._map(changed)

    def _optional(self, model: nn.Module) -> list[str]:
        """List further tensors given by keyword that the model's forward has a default for."""
        parameters = inspect.signature(model.forward).parameters
        names = [name for name in self.kwargs if name in parameters and isinstance(self.kwargs[name], torch.Tensor)]
        optional = [name for name in names if parameters[name].default is not inspect.Parameter.empty]
        return optional if self.args else [name for name in optional if name != next(iter(self.kwargs))]

    def cast(self, dtype: torch.dtype | None) -> Inputs:
        """Convert the floating-point tensors of the batch; None leaves them."""

        def convert(leaf: Any) -> Any:
            if dtype is None or not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                return leaf
            return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

        return self._map(convert)

    def batch(self, dtype: torch.dtype | None, *, watch: bool = False) -> Batch:
        """Copy the inputs for a run, which may change them.

        Args:
            dtype: what floating-point tensors are converted to; None leaves them.
            watch: whether gradients of the floating-point and complex inputs are wanted.
        """
        watched: dict[str, torch.Tensor] = {}
        names = iter([name for name, _ in self.leaves()])

        def fresh(leaf: Any) -> Any:
            name = next(names)
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)
            tensor = leaf.detach().clone()
            if not is_inexact(leaf):
                return tensor
            if leaf.is_floating_point():
                tensor = tensor.to(dtype or leaf.dtype)
            if not watch:
                return tensor.requires_grad_(leaf.requires_grad)
            watched[name] = tensor.requires_grad_(True)
            return tensor.clone()  # no leaf: the model may work on its input in place

        copied = self._map(fresh)
        return Batch(copied.args, dict(copied.kwargs), watched)

    def facts(self, called: str = "example input") -> list[RankFact]:
        """Yield every leaf, to be compared across ranks."""
        return [
            RankFact(
                f"{called} '{name}'",
                describe_tensor(leaf) if isinstance(leaf, torch.Tensor) else describe(leaf),
            )
            for name, leaf in self.leaves()
        ]


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


Batches = tuple[tuple[str, Inputs], ...]
"""Batches, each with a label, e.g. ``"a batch of 4"``."""
