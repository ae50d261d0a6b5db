"""Run the collectives of ``sync`` as hooks to copy, trace and compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_unary

from slapo_core import ArgumentError
from slapo_core.errors import InputError, place
from slapo_core.observers import is_recording
from slapo_tp import collectives
from slapo_tp.collectives import RankGroup
from slapo_tp.forwards import AddBias, gives_fresh_output
from slapo_tp.overlap import with_source
from slapo_tp.private import forward_hooks_of, has_global_forward_hooks, tree_flatten, tree_unflatten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class OutputHook:
    """Communicate a module's output, and in backward its gradient (forward hook).

    Args:
        op: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        axis: the axis to gather or scatter.
        group: the ranks.
        path: of the module, for messages.
        outputs: which tensors of the flattened output; None for the only one.
        add_bias: adds the bias that the forward left out; None where there is none.
        is_fresh: whether the layer type's forward makes a new output and keeps no reference to it.
        length: features without padding, where the last axis is gathered; None where there is none.
    """

    op: str
    axis: int
    group: RankGroup
    path: str = field(compare=False)
    outputs: tuple[int, ...] | None = None
    add_bias: AddBias | None = None
    is_fresh: bool = False
    length: int | None = None
    slapo_is_inlined = True

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        if isinstance(output, Tensor) and self.outputs is None:
            output = self._communicate(output, overwrite=self.is_fresh and not is_compiling() and _is_alone(module))
        else:
            leaves, spec = tree_flatten(output)
            for position in self._positions(leaves):
                leaves[position] = self._communicate(leaves[position])
            output = tree_unflatten(leaves, spec)
        return output if self.add_bias is None else self.add_bias(module, args, kwargs, output)

    def _communicate(self, tensor: Tensor, *, overwrite: bool = False) -> Tensor:
        if self.op == "all_reduce":
            return collectives.all_reduce(tensor, self.group, overwrite=overwrite)
        _check_axis(tensor, self.axis, self.op, self.group, self.path)
        if self.op == "all_gather":
            length = self.length if self.axis in (-1, tensor.dim() - 1) else None
            return collectives.all_gather(tensor, self.axis, self.group, length)
        return collectives.reduce_scatter(tensor, self.axis, self.group)

    def _positions(self, leaves: list[Any]) -> tuple[int, ...]:
        floating = [position for position, leaf in enumerate(leaves) if _is_floating(leaf)]
        if self.outputs is None:
            for leaf in leaves:
                _refuse_held(leaf, _requires_grad, "the output", self.path, f"outputs=({_first(floating)},)")
            if len(floating) != 1:
                _refuse(
                    f"the output has {len(floating)} floating-point tensors, at the positions {floating}",
                    self.path,
                    f'name those to synchronize: sync("fwd_post", "{self.op}", outputs=({_first(floating)},))',
                )
            return tuple(floating)
        for position in self.outputs:
            if position not in floating:
                _refuse(
                    f"outputs={self.outputs}: not a floating-point tensor at position {position}; "
                    f"the output has some at the positions {floating}",
                    self.path,
                    f"outputs=({_first(floating)},)",
                )
        return self.outputs


@dataclass(frozen=True)
class InputHook:
    """Communicate a module's input, and in backward its gradient (forward pre-hook).

    Args:
        op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"split"``; ``"copy"`` passes the inputs
            unchanged, and sums their gradients over the ranks.
        axis: the axis to gather or scatter.
        group: the ranks.
        path: of the module, for messages.
        inputs: which arguments, by position or name; None for the only one that is a floating-point tensor, or, for
            ``"copy"``, for every tensor that requires a gradient.
        parameters: the names of the forward's parameters, in order.
        overlap: whether the module, a linear layer, may reduce the gradient itself.
    """

    op: str
    axis: int
    group: RankGroup
    path: str = field(compare=False)
    inputs: tuple[int | str, ...] | None = None
    parameters: tuple[str, ...] = ()
    overlap: bool = False
    slapo_is_inlined = True

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if self.op == "copy" and not is_grad_enabled():
            return args, kwargs
        if self.inputs is None and len(args) == 1 and not kwargs and _is_floating(args[0]):  # the usual call
            return (self._communicate(args[0]),), kwargs
        if self.op == "copy":
            change = InputChange(self._copy_if_differentiable, _requires_grad, self.path)
            return change.of(module, args, kwargs, self.inputs, self.parameters)
        count = 0
        if self.inputs is None:
            count = sum(_is_floating(tensor) for tensor in _tensors_in((args, kwargs)))
            if count > 1 or (count == 0 and not any(_held(value) for value in (*args, *kwargs.values()))):
                _refuse(
                    f"the module got {count} floating-point tensors as inputs",
                    self.path,
                    f'name those to synchronize: sync("fwd_pre", "{self.op}", inputs=(0,))',
                )
        change = InputChange(self._communicate, _requires_grad if count else _is_floating, self.path)
        return change.of(module, args, kwargs, self.inputs, self.parameters)

    def _communicate(self, tensor: Tensor) -> Tensor:
        if self.op == "copy":
            copied = collectives.copy(tensor, self.group)
            return with_source(copied, tensor, None, self.group, self) if self.overlap else copied
        if not tensor.is_floating_point():
            return tensor
        if self.op == "all_reduce":
            return collectives.all_reduce(tensor, self.group)
        _check_axis(tensor, self.axis, self.op, self.group, self.path)
        if self.op == "all_gather":
            gathered = collectives.gather_sum(tensor, self.axis, self.group)
            overlaps = self.overlap and is_grad_enabled()
            return with_source(gathered, tensor, self.axis, self.group, self) if overlaps else gathered
        if self.op == "split":
            return collectives.split(tensor, self.axis, self.group)
        return collectives.reduce_scatter(tensor, self.axis, self.group)

    def _copy_if_differentiable(self, tensor: Tensor) -> Tensor:
        # While a graph is recorded, do not read requires_grad: the graph would hold for one value only.
        if not (tensor.is_floating_point() if has_torch_function_unary(tensor) else tensor.requires_grad):
            return tensor
        return self._communicate(tensor)


class InputChange:
    """Change the tensors among the inputs of one call.

    Lists and mappings stay the same objects, because the module may add to them: they contain the changed tensors
    during the call, and the original ones again after it.

    Args:
        change: of one tensor.
        is_meant: whether a tensor inside of an object, where it cannot be changed, should be.
        path: of the module, for messages.
    """

    __slots__ = ("_change", "_containers", "_done", "_is_meant", "_path")

    def __init__(self, change: Callable[[Tensor], Tensor], is_meant: Callable[[Tensor], bool], path: str) -> None:
        self._change, self._is_meant, self._path = change, is_meant, path
        self._done: list[tuple[Tensor, Tensor]] = []
        self._containers: list[Any] = []

    def of(
        self,
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
        inputs: tuple[int | str, ...] | None,
        parameters: tuple[str, ...],
    ) -> tuple[Args, Kwargs]:
        """Change ``inputs``, or all, before a call of ``module``."""
        if inputs is None:
            args = tuple([self._changed(value, position) for position, value in enumerate(args)])
            kwargs = {name: self._changed(value, name) for name, value in kwargs.items()}
        else:
            args, kwargs = self._changed_named(inputs, parameters, args, kwargs)
        if self._containers and self._done:
            handle: Any = module.register_forward_hook(lambda *_: self._undo(handle), prepend=True, always_call=True)
        return args, kwargs

    def _changed_named(
        self, inputs: tuple[int | str, ...], parameters: tuple[str, ...], args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        positional, named = list(args), dict(kwargs)
        for key in inputs:
            position, name = _place(key, parameters)
            if position is not None and position < len(positional):
                positional[position] = self._changed(positional[position], key)
            elif name in named:
                named[name] = self._changed(named[name], key)
            else:
                hint = f"inputs={inputs} must be given"
                _refuse(f"the module was called without its input {key!r}", self._path, hint)
        # The module may put its inputs into the containers that were not named.
        self._containers += [value for value in (*args, *kwargs.values()) if _is_container(value)]
        return tuple(positional), named

    def _changed(self, value: Any, key: int | str) -> Any:
        if type(value) in _ATOMS:
            return value
        if isinstance(value, Tensor):
            for before, after in self._done:  # attention may get one tensor as query, key and value
                if before is value:
                    return after
            changed = self._change(value)
            if changed is not value:
                self._done.append((value, changed))
            return changed
        if isinstance(value, tuple):
            return _rebuilt(value, [self._changed(part, key) for part in value])
        if not _is_container(value):
            name = f"input {key!r}" if isinstance(key, str) else f"input {key}"
            _refuse_held(value, self._is_meant, name, self._path, 'inputs=("x",)')
        elif not any(value is container for container in self._containers):
            self._containers.append(value)
            for name, part in _entries(value):
                changed = self._changed(part, key)
                if changed is not part:
                    value[name] = changed
        return value

    def _undo(self, handle: Any) -> None:
        handle.remove()
        seen: list[Any] = []

        def original(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next((before for before, after in self._done if after is value), value)
            if isinstance(value, tuple):
                return _rebuilt(value, [original(part) for part in value])
            if _is_container(value) and not any(value is one for one in seen):
                seen.append(value)
                for name, part in _entries(value):
                    before = original(part)
                    if before is not part:
                        value[name] = before
            return value

        for container in self._containers:
            original(container)


def _is_alone(module: nn.Module) -> bool:
    """Return whether only this hook has a reference to the output."""
    return len(forward_hooks_of(module)) == 1 and not has_global_forward_hooks() and gives_fresh_output(module)


def _place(key: int | str, parameters: tuple[str, ...]) -> tuple[int | None, str | None]:
    if isinstance(key, str):
        return (parameters.index(key) if key in parameters else None), key
    return key, parameters[key] if key < len(parameters) else None


_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
_CONTAINERS = (list, dict, MutableSequence, MutableMapping)
_CODE = (nn.Module, type, FunctionType)


def _is_container(value: Any) -> bool:
    return type(value) not in _ATOMS and not isinstance(value, Tensor) and isinstance(value, _CONTAINERS)


def _entries(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, Mapping) else enumerate(container))


def _rebuilt(value: Any, parts: Sequence[Any]) -> Any:
    """Return a tuple of the parts: the same object if nothing changed."""
    if all(part is before for part, before in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, *_CONTAINERS)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(part)


def _held(value: Any, depth: int = 0) -> list[tuple[str, Tensor]]:
    """List the tensors in an object's attributes or entries, with their names.

    Modules are not entered, nor are key-value caches: these hold each rank's results for its own heads.
    """
    if type(value) in _ATOMS or isinstance(value, _CODE) or depth > 3:
        return []
    if isinstance(value, Tensor):
        return [("", value)] if depth else []
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return []
    if isinstance(value, (tuple, set, frozenset, Mapping, MutableSequence)):
        parts = _entries(value)
    else:
        slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
        own = {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in slots}}
        parts = list(own.items())
    return [(f"{name}.{below}".rstrip("."), tensor) for name, part in parts for below, tensor in _held(part, depth + 1)]


def _requires_grad(tensor: Tensor) -> bool:
    # While a graph is recorded, do not read it: the graph would hold for one value only.
    return not (has_torch_function_unary(tensor) and is_recording()) and tensor.requires_grad


def _refuse_held(value: Any, is_meant: Callable[[Tensor], bool], what: str, path: str, named: str) -> None:
    """Refuse an object whose tensors the collective would not reach."""
    for name, tensor in [] if isinstance(value, Tensor) else _held(value):
        if is_meant(tensor):
            raise InputError(
                f"tp.sync at {place(path)}: {what} is a {type(value).__name__}, and the collective does not reach its "
                f"tensor '{name}' {tuple(tensor.shape)}",
                path=path,
                hint="call sync at the layers below that take the tensors themselves, or give the module the tensors "
                f"as arguments, or in a tuple, list or dict; if none of them is meant, name the others: {named}",
            )


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _first(positions: list[int]) -> int:
    return positions[0] if positions else 0


def _check_axis(tensor: Tensor, axis: int, op: str, group: RankGroup, path: str) -> None:
    if not -tensor.dim() <= axis < tensor.dim():
        _refuse(
            f"{op} along axis {axis}, but the tensor has {tensor.dim()} axes {tuple(tensor.shape)}",
            path,
            f"use an axis from {-tensor.dim()} to {tensor.dim() - 1}",
        )
    if op in ("reduce_scatter", "split") and tensor.shape[axis] % group.size:
        _refuse(
            f"{op} along axis {axis} of a tensor {tuple(tensor.shape)}: {tensor.shape[axis]} elements are "
            f"not divisible by {group.size} ranks",
            path,
            f"pad that axis to {-(-tensor.shape[axis] // group.size) * group.size} elements",
        )


def _refuse(message: str, path: str, hint: str) -> NoReturn:
    raise ArgumentError(f"tp.sync at {place(path)}: {message}", path=path, hint=hint)
