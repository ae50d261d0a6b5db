"""``sync``: put a collective at a module's input, output, or input gradient."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.spec.edit import HookKind
from slapo_core.spec.preconditions import Distributed
from slapo_tp.collectives import RankGroup
from slapo_tp.layers import layer_type_of
from slapo_tp.left_out_bias import AddBias, FunctionHook
from slapo_tp.splits import bias_is_left_out, mesh_size, output_state
from slapo_tp.sync_hooks import GradientHook, InputHook, OutputHook
from slapo_tp.sync_rules import argument_violations, place_violations, resolve, unpadded_features

__all__ = ["Sync"]

Mode = Literal["fwd_pre", "fwd_post", "bwd_post", "forward", "backward"]
Op = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Sync(Primitive):
    """Let the ranks exchange a module's input, output, or input gradient.

    A layer split on its input axis leaves its bias out; its ``fwd_post`` reduction adds it, once, to the sum.

    Args:
        mode: ``"fwd_pre"`` (the input), ``"fwd_post"`` (the output) or ``"bwd_post"`` (the gradient of the input).
            ``"forward"`` is ``fwd_post`` with the op that the module's split asks for: all_reduce of a partial sum,
            all_gather of split features. ``"backward"`` is ``bwd_post`` with all_reduce.
        op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, or a function with the signature of torch's hook:
            ``fn(module, args, kwargs)`` for fwd_pre, ``fn(module, args, kwargs, output)`` for fwd_post, and
            ``fn(module, grad_input, grad_output)`` for bwd_post. Where the layer left its bias out, what the function
            gives says how the bias is added: the shape of the partial sum is the whole sum, an equal piece along an
            axis that is not the features' is this rank's piece, and any other shape is refused.
        axis: the tensor's axis to gather or scatter; negative counts from the end.
        mesh_dim: the mesh dimension whose ranks take part.
        inputs: for fwd_pre and bwd_post, the arguments meant, by position or name, e.g. ``("hidden_states",)``. None:
            the only floating-point tensor (fwd_pre), every tensor that requires a gradient (bwd_post).
        outputs: for fwd_post, the tensors meant, by position in the flattened output, e.g. ``(0,)``. None: the only
            floating-point tensor.

    Raises:
        PreconditionError: no mesh, nothing split here or below, or an op that does not fit the module's split; with the
            call to write instead.

    rewrite: (n ranks; ``x`` the input, ``y`` the output, ``dx`` and ``dy`` their gradients)
        ``fwd_post all_reduce``: ``y -> sum of y``; backward ``dy -> dy``

        ``fwd_post all_gather``: ``y (..., f/n) -> all y (..., f)``; backward ``dy -> this rank's piece of dy``; the
        padding of ``shard(..., pad=True)`` is cut off, and its gradient is zero

        ``fwd_post reduce_scatter``: ``y (s, ...) -> piece of the sum of y (s/n, ...)``; backward ``dy -> all dy``

        ``fwd_pre all_gather``: ``x (s/n, ...) -> all x (s, ...)``; backward ``dx -> piece of the sum of dx``

        ``fwd_pre reduce_scatter``: ``x (s, ...) -> piece of the sum of x (s/n, ...)``; backward ``dx -> all dx``

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

    def preconditions(self, node: Node) -> Iterator[Violation]:
        unplaced = list(Distributed(self.mesh_dim)(node))
        yield from unplaced or argument_violations(self, node) or place_violations(self, node)

    def apply(self, node: Node, edit: Edit) -> None:
        active = mesh_size(node, self.mesh_dim) > 1
        if not active:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: nothing to synchronize")
        for kind, hook in self._hooks(node):
            edit.add_hook(node, kind, hook, active=active)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        registered = [hook for _, hook in node.hooks]
        for kind, hook in self._hooks(node):
            if hook not in registered:
                yield Violation(f"the {kind} hook {hook} is not registered")

    def _hooks(self, node: Node) -> Iterator[tuple[HookKind, Callable[..., Any]]]:
        """The hooks that this step stands for, with torch's name of their kind."""
        assert node.mesh is not None
        mode, op, axis = resolve(self, node)
        group = RankGroup.along(node.mesh, self.mesh_dim)
        parameters: tuple[str, ...] = ()
        if self.inputs is not None:
            parameters = tuple(inspect.signature(type(node.module).forward).parameters)[1:]
        kind, add_bias = layer_type_of(node.module), None
        if mode == "fwd_post" and bias_is_left_out(node, self.mesh_dim):
            assert kind is not None
            add_bias = AddBias(kind.feature_axis, pieces=group if op == "reduce_scatter" else None)
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
        elif mode == "fwd_pre":
            yield "forward_pre", InputHook(str(op), axis, group, node.path, self.inputs, parameters)
        else:
            yield "forward_pre", GradientHook(group, node.path, self.inputs, parameters)
