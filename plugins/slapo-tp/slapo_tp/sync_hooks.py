"""Run the collectives of ``sync`` as hooks: plain values, to copy, trace and compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_unary

from slapo_core import ArgumentError
from slapo_tp import collectives
from slapo_tp.collectives import RankGroup
from slapo_tp.forwards import AddBias, gives_fresh_output
from slapo_tp.private import has_global_forward_hooks, hooks_of, tree_flatten, tree_map_only, tree_unflatten

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class OutputHook:
    """Forward hook: a collective on the output, and its gradient on the output's gradient.

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
    """Forward pre-hook: a collective on an input, and its gradient on the input's gradient.

    Args:
        op: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        axis: the axis to gather or scatter.
        group: the ranks.
        path: of the module, for messages.
        inputs: which arguments, by position or name; None for the only one that is a floating-point tensor.
        parameters: the names of the forward's parameters, in order.
    """

    op: str
    axis: int
    group: RankGroup
    path: str = field(compare=False)
    inputs: tuple[int | str, ...] | None = None
    parameters: tuple[str, ...] = ()
    slapo_is_inlined = True

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if self.inputs is None and len(args) == 1 and not kwargs and _is_floating(args[0]):  # the usual call
            return (self._communicate(args[0]),), kwargs
        if self.inputs is None:
            count = sum(_is_floating(leaf) for leaf in tree_flatten((args, kwargs))[0])
            if count != 1:
                _refuse(
                    f"the module got {count} floating-point tensors as inputs",
                    self.path,
                    f'name those to synchronize: sync("fwd_pre", "{self.op}", inputs=(0,))',
                )
            return _change_all(self._communicate, args, kwargs)
        return _change_named(self._communicate, self.inputs, self.parameters, args, kwargs, self.path)

    def _communicate(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if self.op == "all_reduce":
            return collectives.all_reduce(tensor, self.group)
        _check_axis(tensor, self.axis, self.op, self.group, self.path)
        if self.op == "all_gather":
            return collectives.gather_sum(tensor, self.axis, self.group)
        return collectives.reduce_scatter(tensor, self.axis, self.group)


@dataclass(frozen=True)
class GradientHook:
    """Forward pre-hook: the inputs pass unchanged, and their gradients are summed over the ranks on the way back.

    Args:
        group: the ranks.
        path: of the module, for messages.
        inputs: which arguments, by position or name; None for every tensor that requires a gradient.
        parameters: the names of the forward's parameters, in order.
    """

    group: RankGroup
    path: str = field(compare=False)
    inputs: tuple[int | str, ...] | None = None
    parameters: tuple[str, ...] = ()
    slapo_is_inlined = True

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if not is_grad_enabled():
            return args, kwargs
        if self.inputs is None and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # the usual call
            return ((collectives.copy(args[0], self.group),) if args[0].is_floating_point() else args), kwargs
        done: list[tuple[Tensor, Tensor]] = []

        def communicate(tensor: Tensor) -> Tensor:
            # While a graph is recorded, do not read requires_grad: the graph would hold for one value only.
            if not (tensor.is_floating_point() if has_torch_function_unary(tensor) else tensor.requires_grad):
                return tensor
            for before, after in done:  # attention may get one tensor as query, key and value
                if before is tensor:
                    return after
            done.append((tensor, collectives.copy(tensor, self.group)))
            return done[-1][1]

        if self.inputs is None:
            return _change_all(communicate, args, kwargs)
        return _change_named(communicate, self.inputs, self.parameters, args, kwargs, self.path)


def _is_alone(module: nn.Module) -> bool:
    """Whether only this hook has seen the output: no other hook or forward may have kept it."""
    return len(hooks_of(module)[0]) == 1 and not has_global_forward_hooks() and gives_fresh_output(module)


def _change_all(change: Callable[[Tensor], Tensor], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return tuple([_change(change, value) for value in args]), {
        name: _change(change, value) for name, value in kwargs.items()
    }


def _change_named(
    change: Callable[[Tensor], Tensor],
    inputs: tuple[int | str, ...],
    parameters: tuple[str, ...],
    args: Args,
    kwargs: Kwargs,
    path: str,
) -> tuple[Args, Kwargs]:
    positional, named = list(args), dict(kwargs)
    for key in inputs:
        position, name = _place(key, parameters)
        if position is not None and position < len(positional):
            positional[position] = _change(change, positional[position])
        elif name in named:
            named[name] = _change(change, named[name])
        else:
            _refuse(f"the module was called without its input {key!r}", path, f"inputs={inputs} must be given")
    return tuple(positional), named


def _place(key: int | str, parameters: tuple[str, ...]) -> tuple[int | None, str | None]:
    if isinstance(key, str):
        return (parameters.index(key) if key in parameters else None), key
    return key, parameters[key] if key < len(parameters) else None


def _change(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list, Mapping)):
        return tree_map_only(Tensor, change, value)
    return value


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
    if op == "reduce_scatter" and tensor.shape[axis] % group.size:
        _refuse(
            f"reduce_scatter along axis {axis} of a tensor {tuple(tensor.shape)}: {tensor.shape[axis]} elements are "
            f"not divisible by {group.size} ranks",
            path,
            f"pad that axis to {-(-tensor.shape[axis] // group.size) * group.size} elements",
        )


def _refuse(message: str, path: str, hint: str) -> NoReturn:
    raise ArgumentError(f"tp.sync at '{path}': {message}", path=path, hint=hint)
