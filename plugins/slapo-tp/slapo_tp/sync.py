"""Reduce or gather values between split layers: ``sync``, and its checks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.effects import Calls, Collective, Effect
from slapo_core.internals import children_of
from slapo_core.observers import HookKind
from slapo_tp.collectives import RankGroup
from slapo_tp.forwards import AddBias, FunctionHook
from slapo_tp.layers import LINEAR, layer_type_of, partial_axis
from slapo_tp.overlap import OVERLAPPED, can_overlap, under_weight_gradient
from slapo_tp.preconditions import needs_mesh
from slapo_tp.split_state import (
    bias_is_left_out,
    gathers_itself,
    has_split_below,
    makes_gradient_partial,
    mesh_size,
    output_state,
    own_tensor,
)
from slapo_tp.sync_hooks import InputHook, OutputHook


def resolve(sync: Sync, node: Node) -> tuple[str, str | Callable[..., Any] | None, int]:
    """Resolve mode, op and axis; op is None where undetermined."""
    if sync.mode == "backward":
        return "bwd_post", sync.op or "all_reduce", sync.axis
    if sync.mode != "forward":
        return sync.mode, sync.op, sync.axis
    if sync.op is not None:
        return "fwd_post", sync.op, sync.axis
    state, kind = output_state(node, sync.mesh_dim), layer_type_of(node.module)
    if state == "split" and kind is not None:
        return "fwd_post", "all_gather", kind.feature_axis
    return "fwd_post", "all_reduce" if state == "partial" else None, sync.axis


def unpadded_features(node: Node) -> int | None:
    """Return the number of output features without padding; None without padding.

    Of this layer, or of one below whose output no step there gathers.
    """
    for below in node.walk():
        gathered = below.path != node.path and any(isinstance(hook, OutputHook) for _, hook in below.hooks)
        kind = layer_type_of(below.module)
        if kind is not None and kind.name == LINEAR.name and not gathered:
            layouts = [below.layout(name) for name in ("weight", "bias") if own_tensor(below, name) is not None]
            padded = [layout.shape[0] for layout in layouts if layout.padding]
            if padded:
                return padded[0]
    return None


def argument_violations(sync: Sync, node: Node) -> Iterator[Violation]:
    """Refuse arguments that exclude each other."""
    mode, op, _ = resolve(sync, node)
    if op is None and sync.mode == "forward":
        if not has_split_below(node, sync.mesh_dim):
            return  # refused by place_violations
        yield Violation(
            f"cannot tell from its own weight whether the output of this {type(node.module).__name__} is partial",
            'use sync("fwd_post", "all_reduce") for a partial sum, sync("fwd_post", "all_gather") for a shard',
        )
    elif op is None:
        yield Violation(f"mode '{mode}' needs an op", f'use sync("{mode}", "all_reduce")')
    elif mode == "bwd_post" and op in ("all_gather", "reduce_scatter"):
        instead = "all_gather" if op == "reduce_scatter" else "reduce_scatter"
        yield Violation(
            f"the gradient of an input that passes unchanged has that input's shape, which {op} would change",
            f'use sync("fwd_pre", "{instead}", axis={sync.axis}), whose backward is the {op}',
        )
    elif op == "split" and mode != "fwd_pre":
        yield Violation(
            f"split takes this rank's shard of an input (got mode='{mode}')",
            f'use sync("fwd_pre", "split"{_axis(sync.axis)}) at the module that works on the shard',
        )
    if sync.axis != -1 and (op == "all_reduce" or callable(op) or op is None):
        yield Violation(
            f"axis applies only to all_gather, reduce_scatter and split (got axis={sync.axis})", "leave it out"
        )
    if sync.inputs is not None and (mode == "fwd_post" or callable(op)):
        yield Violation(f"inputs={sync.inputs} belongs to built-in ops of fwd_pre and bwd_post", "leave it out")
    if sync.outputs is not None and (mode != "fwd_post" or callable(op)):
        yield Violation(f"outputs={sync.outputs} belongs to built-in ops of fwd_post", "leave it out")
    if sync.overlap:
        yield from _overlap_violations(sync, node, mode, op)
    if sync.inputs is not None:
        yield from _unknown_inputs(sync.inputs, node)
    if any(position < 0 for position in sync.outputs or ()):
        yield Violation(f"outputs must be non-negative positions (got {sync.outputs})", "outputs=(0,)")


def _overlap_violations(sync: Sync, node: Node, mode: str, op: object) -> Iterator[Violation]:
    """Refuse an overlap without a weight gradient to compute meanwhile."""
    if (mode, op) not in (("bwd_post", "all_reduce"), ("fwd_pre", "all_gather")):
        yield Violation(
            "overlap=True belongs to a reduction of the input's gradient",
            'use sync("bwd_post", "all_reduce", overlap=True) or sync("fwd_pre", "all_gather", overlap=True)',
        )
    elif not can_overlap(node.module) or not (node.runs_own_forward or gathers_itself(node)):
        layers = [
            below
            for below in node.walk()
            if below.path != node.path and can_overlap(below.module) and makes_gradient_partial(below, sync.mesh_dim)
        ]
        call = f'sync("{mode}", "{op}"{_axis(sync.axis)}, overlap=True)'
        yield Violation(
            f"overlap=True needs the weight's gradient of one linear layer, and this {type(node.module).__name__} is "
            + ("one with another forward" if can_overlap(node.module) else "not one"),
            " and ".join(f"sch['{below.path}'].{call}" for below in layers) or "leave overlap=True out",
        )


def place_violations(sync: Sync, node: Node) -> Iterator[Violation]:
    """Refuse a collective that does not fit the split tensors or earlier ones."""
    mode, op, axis = resolve(sync, node)
    if not has_split_below(node, sync.mesh_dim):
        yield _nothing_split(sync, node, mode, op)
        return
    repeated = _repeated(sync, node, mode, op)
    if repeated is not None:
        yield repeated
    elif mode == "fwd_post" and not callable(op):
        yield from _output_violations(sync, node, str(op), axis)
        if op != "all_gather":
            yield from _biases_below(sync, node, str(op), axis)
    elif mode == "bwd_post" and not callable(op):
        yield from _gradient_violations(sync, node)


def _nothing_split(sync: Sync, node: Node, mode: str, op: object) -> Violation:
    """Refuse a collective at a module without shards; write the step to add."""
    message = f"nothing was split over mesh_dim '{sync.mesh_dim}' on this module or below it"
    kind = layer_type_of(node.module)
    if kind is not None and mode == "fwd_post" and op in ("all_reduce", "reduce_scatter"):
        message += ": its output is full on every rank, not a partial sum"
        axis = partial_axis(kind)
        before = f'write shard("{kind.weight}", axis={axis}) before, which makes it one'
        hint = before if axis is not None else "remove this call"
    elif kind is not None:
        hint = f'write shard("{kind.weight}", axis=...) before'
    elif node.children and not node.parameters:
        hint = "shard the layers below it before"
    else:
        hint = "put it at the layer that is split, or at a module around that layer"
        if sync.axis != -1:
            hint += ": under sequence parallelism, at the first and the last block"
    return Violation(message, hint)


def _unknown_inputs(inputs: tuple[int | str, ...], node: Node) -> Iterator[Violation]:
    parameters = list(inspect.signature(type(node.module).forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    accepts_any = len(names) < len(parameters)
    unknown = [key for key in inputs if (key not in names if isinstance(key, str) else not 0 <= key < len(names))]
    if unknown and (not accepts_any or any(isinstance(key, int) and key < 0 for key in unknown)):
        yield Violation(
            f"forward of {type(node.module).__name__} has no input {unknown[0]!r}",
            f"it has {', '.join(names) or 'none'}",
        )


def _repeated(sync: Sync, node: Node, mode: str, op: object) -> Violation | None:
    """Refuse a second collective on the same tensor."""
    for record in node.records:
        before: Any = record.primitive
        if record.name != "tp.sync" or before.mesh_dim != sync.mesh_dim:
            continue
        before_mode, before_op, _ = resolve(before, node)
        if before == sync:
            return Violation(f"step {record} is the same sync", "remove this call")
        if callable(op) or callable(before_op):
            continue
        if mode == before_mode == "fwd_post" and _overlap(sync.outputs, before.outputs):
            return Violation(f"the output is synchronized already, by {record}", "remove one of the two")
        if mode != "fwd_post" and before_mode != "fwd_post" and _overlap(sync.inputs, before.inputs):
            both = {mode, before_mode}
            if len(both) == 1 or {op, before_op} == {"all_gather", "all_reduce"}:
                what = "input" if mode == before_mode == "fwd_pre" else "gradient of the input"
                return Violation(f"the {what} is synchronized already, by {record}", "remove one of the two")
    return None


def _overlap(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    return one is None or other is None or bool(set(one) & set(other))


def _output_violations(sync: Sync, node: Node, op: str, axis: int) -> Iterator[Violation]:
    state, kind = output_state(node, sync.mesh_dim), layer_type_of(node.module)
    if kind is None:
        return
    if state == "split" and op != "all_gather":
        partial = partial_axis(kind)
        split = " of a split input" if partial is not None and kind.role(partial) == "input" else ""
        instead = f', or shard("{kind.weight}", axis={partial}), whose output is a partial sum{split}'
        instead = instead if partial is not None else ""
        yield Violation(
            f"the weight is split on its output axis, so each rank has other features, which {op} would add up",
            f'use sync("fwd_post", "all_gather"{_axis(kind.feature_axis)}){instead}',
        )
    elif state == "split" and axis < 0 > kind.feature_axis != axis:
        yield Violation(
            f"the output is split on axis {kind.feature_axis}, not on axis {axis}",
            f'use sync("fwd_post", "all_gather"{_axis(kind.feature_axis)})',
        )
    elif state == "partial" and op == "all_gather":
        yield Violation(
            "the output is a partial sum on each rank, which all_gather would not add up",
            'use sync("fwd_post", "all_reduce"), or sync("fwd_post", "reduce_scatter", axis=...)',
        )
    elif op == "reduce_scatter" and axis == kind.feature_axis and bias_is_left_out(node, sync.mesh_dim):
        yield Violation(
            "the bias that the layer left out is full: it cannot be added to a shard of the output features",
            'use sync("fwd_post", "reduce_scatter", axis=...) with another axis, e.g. the sequence',
        )


def _biases_below(sync: Sync, node: Node, op: str, axis: int) -> Iterator[Violation]:
    """Refuse a reduction around a layer that left its bias out."""
    call = f'sync("fwd_post", "{op}"{_axis(axis) if op == "reduce_scatter" else ""})'
    for below in node.walk() if children_of(node.module) else ():
        if below.path == node.path or not bias_is_left_out(below, sync.mesh_dim):
            continue
        if not any(r.name == "tp.sync" and resolve(r.primitive, below)[0] == "fwd_post" for r in below.records):  # type: ignore[arg-type]
            yield Violation(
                f"'{below.path}' gives a partial sum and left its bias out, which only a sync there adds",
                f"use sch['{below.path}'].{call}",
            )


def _gradient_violations(sync: Sync, node: Node) -> Iterator[Violation]:
    state, kind = output_state(node, sync.mesh_dim), layer_type_of(node.module)
    if kind is None or state is None:
        return
    if kind.role(0) == "channel":
        yield Violation(
            "the channels are split, so each rank's input is its own shard with its own gradient",
            "remove this call; it belongs to the layer before that is split on its output axis",
        )
    elif makes_gradient_partial(node, sync.mesh_dim):
        return
    elif kind.axis_of("input") is None:
        yield Violation(f"the inputs of {kind.name} are ids, which have no gradient", "remove this call")
    elif state == "partial":
        yield Violation(
            "the weight is split on its input axis, so each rank's input is its own shard with its own gradient",
            "remove this call; it belongs to the layer that is split on its output axis, or split this layer with "
            f"axis={kind.axis_of('output')}",
        )


def _axis(axis: int) -> str:
    return "" if axis == -1 else f", axis={axis}"


_CONJUGATES: dict[tuple[str, str], str] = {
    ("fwd_pre", "all_gather"): "reduce_scatter",
    ("fwd_pre", "reduce_scatter"): "all_gather",
    ("fwd_pre", "split"): "all_gather",
    ("fwd_post", "reduce_scatter"): "all_gather",
}
"""Mode and op -> the collective of the backward pass, where there is one."""

Mode = Literal["fwd_pre", "fwd_post", "bwd_post", "forward", "backward"]
Op = Literal["all_reduce", "all_gather", "reduce_scatter", "split"]


@dataclass(frozen=True)
class Sync(Primitive):
    """Let the ranks exchange a module's input, output, or input gradient.

    A layer split on its input axis leaves its bias out; its ``fwd_post`` reduction adds it, once, to the sum.

    Args:
        mode: ``"fwd_pre"`` (the input), ``"fwd_post"`` (the output) or ``"bwd_post"`` (the gradient of the input).
            ``"forward"`` is ``fwd_post`` with the op that the module's split asks for: all_reduce of a partial sum,
            all_gather of split features. ``"backward"`` is ``bwd_post`` with all_reduce.
        op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"split"`` (fwd_pre only: a full input is cut,
            nothing is summed), or a function with the signature of torch's hook:
            ``fn(module, args, kwargs)`` for fwd_pre, ``fn(module, args, kwargs, output)`` for fwd_post, and
            ``fn(module, grad_input, grad_output)`` for bwd_post. If the layer's bias was left out, the shape of its
            result decides how to add the bias: the partial sum's shape means the full sum, an equal shard along an
            axis other than the features' means this rank's shard; any other shape is refused.
        axis: the tensor's axis to gather, scatter or split; negative counts from the end.
        mesh_dim: the mesh dimension whose ranks take part.
        inputs: for fwd_pre and bwd_post, the arguments meant, by position or name, e.g. ``("hidden_states",)``. None:
            the only floating-point tensor (fwd_pre), every tensor that requires a gradient (bwd_post).
        outputs: for fwd_post, the tensors meant, by position in the flattened output, e.g. ``(0,)``. None: the only
            floating-point tensor.
        overlap: compute the gradient of the layer's weight while the gradient of its input is reduced: at one linear
            layer split on its output axis, for bwd_post with all_reduce or fwd_pre with all_gather. Results are the
            same. ``torch.compile`` gets the collective, the weight's gradient and the wait in this order.

    Raises:
        PreconditionError: no mesh, nothing split here or below, or an op that does not fit the module's split; with the
            call to write instead.

    rewrite: (n ranks; ``x`` the input, ``y`` the output, ``dx`` and ``dy`` their gradients)
        ``fwd_post all_reduce``: ``y -> sum of y``; backward ``dy -> dy``

        ``fwd_post all_gather``: ``y (..., f/n) -> all y (..., f)``; backward ``dy -> this rank's shard of dy``; the
        padding of ``shard(..., pad=True)`` is cut off, and its gradient is zero

        ``fwd_post reduce_scatter``: ``y (s, ...) -> shard of the sum of y (s/n, ...)``; backward ``dy -> all dy``

        ``fwd_pre all_gather``: ``x (s/n, ...) -> all x (s, ...)``; backward ``dx -> shard of the sum of dx``

        ``fwd_pre reduce_scatter``: ``x (s, ...) -> shard of the sum of x (s/n, ...)``; backward ``dx -> all dx``

        ``fwd_pre split``: ``x (s, ...) -> this rank's shard of x (s/n, ...)``; backward ``dx -> all dx``

        ``fwd_pre all_reduce``: ``x -> sum of x``; backward ``dx -> dx``

        ``bwd_post all_reduce``: ``x -> x``; backward ``dx -> sum of dx``

    On a mesh dimension of one rank nothing changes.

    Source: paper section 3.2.2, ``.sync(type)``; ``megatron/core/tensor_parallel/mappings.py``.
    """

    name = "tp.sync"
    equivalence = Equivalence.REORDERED

    mode: Mode
    op: Op | Callable[..., Any] | None = None
    axis: int = dataclasses.field(default=-1, kw_only=True)
    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)
    inputs: tuple[int | str, ...] | None = dataclasses.field(default=None, kw_only=True)
    outputs: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    overlap: bool = dataclasses.field(default=False, kw_only=True)

    @needs_mesh
    def preconditions(self, node: Node) -> Iterator[Violation]:
        yield from list(argument_violations(self, node)) or place_violations(self, node)

    def apply(self, node: Node, edit: Edit) -> None:
        active = mesh_size(node, self.mesh_dim) > 1
        if not active:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: nothing to synchronize")
        for kind, hook in self._hooks(node):
            edit.add_hook(node, kind, hook, active=active)
        if self.overlap:
            weight = node.parameters.get("weight")
            if weight is not None and not weight.requires_grad:
                edit.note("overlap=True has no effect: the weight is frozen, so there is no gradient to compute beside")
            elif gathers_itself(node):
                edit.note("overlap=True has no effect on a loss computed from shards: its forward makes all gradients")
            edit.wrap_forward(node, under_weight_gradient, active=active, inside=True)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        registered = [hook for _, hook in node.hooks]
        for kind, hook in self._hooks(node):
            if hook not in registered:
                yield Violation(f"the {kind} hook {hook} is not registered")
        if self.overlap and under_weight_gradient not in node.wrappers:
            yield Violation("the module's forward is not wrapped")

    def effects(self, node: Node) -> Iterator[Effect]:
        mode, op, _ = resolve(self, node)
        if not isinstance(op, str) or mesh_size(node, self.mesh_dim) == 1:
            return
        # Named inputs may be None, one tensor twice, or containers of several.
        times = None if self.inputs is not None else len(self.outputs) if self.outputs is not None else 1
        if mode == "bwd_post":
            yield Collective(op, self.mesh_dim, "backward")
        else:
            if op != "split":
                yield Collective(op, self.mesh_dim, "forward", times)
            conjugate = _CONJUGATES.get((mode, op))
            if conjugate is not None:
                yield Collective(conjugate, self.mesh_dim, "backward", times)
            bias = own_tensor(node, "bias") if bias_is_left_out(node, self.mesh_dim) else None
            if (mode, op) == ("fwd_post", "reduce_scatter") and bias is not None and bias.requires_grad:
                yield Collective("all_reduce", self.mesh_dim, "backward", 1)  # each rank's part of its gradient
        weight = node.parameters.get("weight")
        if self.overlap and weight is not None and weight.requires_grad and not gathers_itself(node):
            yield Calls(OVERLAPPED, 1, "backward")

    def _hooks(self, node: Node) -> Iterator[tuple[HookKind, Callable[..., Any]]]:
        """Yield the hooks of this step, with torch's name of their kind."""
        assert node.mesh is not None
        mode, op, axis = resolve(self, node)
        group = RankGroup.along(node.mesh, self.mesh_dim)
        parameters: tuple[str, ...] = ()
        if self.inputs is not None:
            parameters = tuple(inspect.signature(type(node.module).forward).parameters)[1:]
        kind, add_bias = layer_type_of(node.module), None
        if mode == "fwd_post" and bias_is_left_out(node, self.mesh_dim):
            assert kind is not None
            add_bias = AddBias(kind.feature_axis, shards=group if op == "reduce_scatter" else None)
        if callable(op):
            torch_kind: dict[str, HookKind] = {
                "fwd_pre": "forward_pre", "fwd_post": "forward", "bwd_post": "full_backward"
            }  # fmt: skip
            hook = op if add_bias is None else FunctionHook(op, add_bias.feature_axis, group, node.path)
            yield torch_kind[mode], hook
        elif mode == "fwd_post":
            yield (
                "forward",
                OutputHook(
                    str(op),
                    axis,
                    group,
                    node.path,
                    self.outputs,
                    add_bias,
                    kind is not None and kind.is_fresh and output_state(node, self.mesh_dim) == "partial",
                    unpadded_features(node) if op == "all_gather" else None,
                ),
            )
        else:
            op = str(op) if mode == "fwd_pre" else "copy"
            yield "forward_pre", InputHook(op, axis, group, node.path, self.inputs, parameters, self.overlap)
