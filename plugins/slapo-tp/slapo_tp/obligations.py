"""Find missing and doubled reductions in a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from slapo_core import Node, Record, Schedule, Violation
from slapo_core.errors import place
from slapo_core.internals import children_of, hooks_of
from slapo_core.observers import only_looks
from slapo_tp.collectives import RankGroup
from slapo_tp.forwards import AddBias, FunctionHook
from slapo_tp.heads import KV_HEAD_COUNTS, heads_of
from slapo_tp.layers import layer_type_of
from slapo_tp.private import has_global_forward_hooks, has_gradient_hooks
from slapo_tp.split_state import (
    as_tuple,
    bias_is_left_out,
    gathers_itself,
    holders,
    makes_gradient_partial,
    most_holders,
    output_state,
    sites,
    split_axis,
    weight_name,
)
from slapo_tp.sync_gradient import summed_among_holders
from slapo_tp.sync_hooks import InputHook, OutputHook

OWN_HOOKS = (AddBias, FunctionHook, InputHook, OutputHook)
_SUMS = ("all_reduce", "reduce_scatter")


def missing_reductions(schedule: Schedule, mesh_dim: str) -> Iterator[Violation]:
    """Yield unreduced partial sums over ``mesh_dim``, and left-out biases never added."""
    assert schedule.mesh is not None
    nodes = list(schedule.root.walk())
    partial = [node for node in nodes if output_state(node, mesh_dim) == "partial"]
    group = RankGroup.along(schedule.mesh, mesh_dim)
    if not partial or _others_may_reduce(schedule, nodes, partial, group):
        return
    reduced = {node.path for node in partial if _reducer(schedule.root, node, group) is not None}
    hooks = [hook for node in nodes for _, hook in node.hooks]
    in_sequence = any(isinstance(hook, InputHook) and hook.op == "all_gather" and hook.group == group for hook in hooks)
    for node in partial:
        others = [site.path for site, _ in sites(node, weight_name(node)) if site.path != node.path]
        if any(path in reduced for path in others):
            continue  # a tied layer that is never called (the `shared` embedding of T5) needs no reduction
        if node.path not in reduced:
            yield _unreduced(node, mesh_dim, in_sequence=in_sequence)
        elif bias_is_left_out(node, mesh_dim) and not _adds_bias(node):
            yield _bias_lost(node, _reducer(schedule.root, node, group), mesh_dim)


def full_biases(schedule: Schedule, mesh_dim: str) -> Iterator[Violation]:
    """Yield layers split on their output axis whose bias is still full."""
    for node in schedule.root.walk():
        if output_state(node, mesh_dim) != "split" or "bias" not in node.parameters:
            continue
        if not _runs_own_forward(node) and not gathers_itself(node):
            continue
        axis = split_axis(node, weight_name(node), mesh_dim)
        if axis is not None and split_axis(node, "bias", mesh_dim) is None:
            layout = node.layout(weight_name(node))
            counts = dict(layout.shard_counts).get(mesh_dim)
            shards = f", shards={counts}" if counts is not None else ""
            sizes = dict(layout.packing).get(axis, ())
            sizes = sizes[: len(counts)] if isinstance(counts, tuple) else sizes
            if sizes:
                shards = f", packed={len(sizes) if len(set(sizes)) == 1 else sizes}{shards}"
            yield Violation(
                f"{_cause(node, mesh_dim)} split the output axis of {place(node.path)}, whose 'bias' is still full",
                f'write {_address(node.path)}.shard(["{weight_name(node)}", "bias"], axis={axis}{shards}), or add '
                f'{_address(node.path)}.shard("bias", axis=0{shards})',
            )


def _runs_own_forward(node: Node) -> bool:
    return node.runs_own_forward or (
        not node.forward_is_replaced and all(summed_among_holders(wrapper) for wrapper in node.wrappers)
    )


def doubled_reductions(schedule: Schedule, mesh_dim: str) -> Iterator[Violation]:
    """Yield ``bwd_post`` reductions around layers that reduce their input gradients themselves.

    Only if every layer below is split: an unsharded layer may give a partial gradient, which the outer one reduces.
    """
    assert schedule.mesh is not None
    nodes, group = list(schedule.root.walk()), RankGroup.along(schedule.mesh, mesh_dim)
    outer = [node for node in nodes if layer_type_of(node.module) is None and _reduces_gradients(node, group)]
    if not outer or any(not _is_known(schedule, record) for record in schedule.records):
        return
    for around in outer:
        below = list(around.walk())
        layers = [node for node in below if node.parameters]
        columns = [node for node in layers if makes_gradient_partial(node, mesh_dim)]
        if not columns or any(output_state(node, mesh_dim) is None for node in layers):
            continue
        if any(_is_unknown_code(node) for node in below):
            continue
        inner = [node for node in below[1:] if _reduces_gradients(node, group)]
        if all(any(_is_at_or_below(node, reducing) for reducing in inner) for node in columns):
            names = ", ".join(f"'{node.path}'" for node in inner)
            yield Violation(
                f"the gradients of the inputs of {place(around.path)} are reduced twice over mesh_dim '{mesh_dim}': by "
                f"sync('bwd_post') there, and at {names}",
                f"leave out the one at {place(around.path)}, or those at {names}",
                gradients_only=True,
            )


def missing_gradient_reductions(schedule: Schedule, mesh_dim: str) -> Iterator[Violation]:
    """Yield layers whose partial input gradient reaches a trained weight unreduced.

    Only within an nn.Sequential, where it is certain which layer gets which output; otherwise ``verify`` finds it.
    """
    assert schedule.mesh is not None
    if any(not _is_known(schedule, record) for record in schedule.records):
        return
    if has_global_forward_hooks():
        return
    group, found = RankGroup.along(schedule.mesh, mesh_dim), dict[str, Violation]()
    for sequence in schedule.root.walk():
        members = _in_order(sequence)
        for position, node in enumerate(members):
            if not makes_gradient_partial(node, mesh_dim):
                continue
            before = _trained_before(members[: position + 1], mesh_dim, group)
            if before is not None and node.path not in found:
                found[node.path] = Violation(
                    f"{_cause(node, mesh_dim)} made the gradient of the input of {place(node.path)} a partial sum, "
                    f"which no step reduces on its way to '{before.path}.weight'",
                    f'add {_address(node.path)}.sync("bwd_post", "all_reduce")',
                    gradients_only=True,
                )
    yield from found.values()


def _in_order(node: Node) -> list[Node]:
    """Return the members of an nn.Sequential in the order of their calls."""
    if type(node.module) is not nn.Sequential or _is_unknown_code(node):
        return []
    found = []
    for name in children_of(node.module):
        member: Node = node[name]
        inside = [] if member.hooks or member.wrappers else _in_order(member)
        found += inside or [member]
    return found


def _trained_before(members: Sequence[Node], mesh_dim: str, group: RankGroup) -> Node | None:
    """Return the trained layer before the last member whose gradient is not reduced."""
    *others, last = members
    if _changes_gradients(last) or any(kind != "forward" for kind, _ in last.hooks):
        return None
    for node in reversed(others):
        if _changes_gradients(node) or not type(node.module).__module__.startswith("torch.nn."):
            return None
        if not node.parameters and not node.hooks and not node.children:
            continue  # an activation, dropout
        weight = node.parameters.get("weight")
        if weight is None or not weight.requires_grad or has_gradient_hooks(weight):
            return None
        wanted = {"partial": "all_reduce", "split": "all_gather"}.get(output_state(node, mesh_dim) or "")
        if wanted is None and (node.wrappers or any(mesh_dim in _mesh_dims(node, name) for name in node.parameters)):
            return None  # sync_gradient wraps; of an unknown module the output is not known
        outputs = [hook for kind, hook in node.hooks if kind == "forward"]
        ops = [hook.op for hook in outputs if isinstance(hook, OutputHook) and hook.group == group]
        return node if len(ops) == len(outputs) and ops == ([] if wanted is None else [wanted]) else None
    return None


def _changes_gradients(node: Node) -> bool:
    """Return whether unknown code may reduce gradients here."""
    hooks = hooks_of(node.module)
    return _is_unknown_code(node) or bool(hooks["full_backward_pre"] or hooks["full_backward"])


def _mesh_dims(node: Node, name: str) -> tuple[str, ...]:
    layout = node.layout(name)
    return (*(mesh_dim for mesh_dim, _ in layout.shards()), *layout.partials())


def _reduces_gradients(node: Node, group: RankGroup) -> bool:
    """Return whether the gradients of all inputs are summed."""
    hooks = [hook for _, hook in node.hooks if isinstance(hook, InputHook)]
    return any(hook.op == "copy" and hook.group == group and hook.inputs is None for hook in hooks)


def _is_at_or_below(node: Node, other: Node) -> bool:
    return node.path == other.path or node.path.startswith(f"{other.path}.")


def cut_heads(schedule: Schedule, mesh_dim: str) -> Iterator[Violation]:
    """Yield attention layers whose output is split inside of a head."""
    assert schedule.mesh is not None
    size = schedule.mesh.size(mesh_dim)
    for node in schedule.root.walk():
        if size == 1 or node.parent is None or output_state(node, mesh_dim) != "split" or _gathers(node):
            continue
        weight, axis = node.parameters.get("weight"), split_axis(node, "weight", mesh_dim)
        if weight is None or axis is None:
            continue  # a norm of channels without one
        repeats = holders(node, "weight", mesh_dim)
        features = weight.shape[axis] * size // repeats
        found = ((name, heads) for name, heads in heads_of(node, features) if heads % (size // repeats))
        name, heads = next(found, (None, 1))
        if name is not None:
            hint = f"a {mesh_dim} size that divides {heads}"
            if name in KV_HEAD_COUNTS and size % heads == 0:
                hint += f", or the same head on several ranks: {_address(node.path)}.shard(..., shards={heads})"
            yield Violation(
                f"{_cause(node, mesh_dim)} cuts a head: 'weight' holds {heads} heads ('{name}') of "
                f"{features // heads} elements, not divisible by {mesh_dim} size {size}",
                hint,
            )


def repeated_shards(schedule: Schedule, mesh_dim: str) -> Iterator[Violation]:
    """Yield layers with shards on several ranks whose output a step all-gathers."""
    for node in schedule.root.walk():
        repeats = most_holders(node, weight_name(node), mesh_dim)
        if repeats > 1 and any(isinstance(hook, OutputHook) and hook.op == "all_gather" for _, hook in node.hooks):
            yield Violation(
                f"{_cause(node, mesh_dim)} leaves each shard of {place(node.path)} on {repeats} ranks, and sync "
                "all-gathers the output, which would repeat them",
                "leave that sync out, or shards=",
            )


def _gathers(node: Node) -> bool:
    """Return whether a collective here or around gathers the module's output."""
    if gathers_itself(node):
        return True
    around: Node | None = node
    while around is not None:
        if any(kind == "forward" and getattr(hook, "op", None) not in _SUMS for kind, hook in around.hooks):
            return True
        around = around.parent
    return False


def _unreduced(node: Node, mesh_dim: str, *, in_sequence: bool) -> Violation:
    """Report a partial sum; ``in_sequence``: some layers work on sequence shards."""
    also = ", and its bias is skipped but never added" if bias_is_left_out(node, mesh_dim) else ""
    hint = f'add {_address(node.path)}.sync("fwd_post", "all_reduce")'
    if in_sequence:
        hint += ', or "reduce_scatter" with the axis of the sequence where the layers behind it work on shards of that'
    return Violation(
        f"{_cause(node, mesh_dim)} made the output of {place(node.path)} a partial sum, which no step reduces{also}",
        hint,
    )


def _bias_lost(node: Node, reducer: Node | None, mesh_dim: str) -> Violation:
    assert reducer is not None
    return Violation(
        f"{_cause(node, mesh_dim)} leaves the bias of {place(node.path)} out, which the reduction at "
        f"{place(reducer.path)} does not add",
        f'move that reduction: {_address(node.path)}.sync("fwd_post", "all_reduce")',
    )


def _others_may_reduce(schedule: Schedule, nodes: Sequence[Node], partial: Sequence[Node], group: RankGroup) -> bool:
    """Return whether unknown hooks or forwards may reduce a partial output."""
    if has_global_forward_hooks():
        return True
    if any(not _is_known(schedule, record) for record in schedule.records):
        return True
    return any(_is_unknown_code(node) or _may_reduce_elsewhere(node, partial, group) for node in nodes)


def _is_known(schedule: Schedule, record: Record) -> bool:
    """Return whether a step cannot have added a reduction of its own."""
    if record.name.startswith(("tp.", "loss.")) or record.primitive.equivalence.is_exact:
        return True
    if record.name != "core.replace":
        return False
    try:
        new: Node = schedule.root[record.path]
    except LookupError:
        return True  # it went with a module around it
    return all(type(module).__module__.startswith("torch.nn.") for module in new.module.modules())


def _is_unknown_code(node: Node) -> bool:
    """Return whether hooks or a forward were set outside of the schedule."""
    by_steps = {id(function) for _, function in node.hooks}
    hooks = hooks_of(node.module)
    for function in (*hooks["forward_pre"].values(), *hooks["forward"].values()):
        if id(function) not in by_steps and not only_looks(function):
            return True
    forward = node.module.__dict__.get("forward")
    return forward is not None and (not node.wrappers or getattr(forward, "base", forward) is not None)


def _may_reduce_elsewhere(node: Node, partial: Sequence[Node], group: RankGroup) -> bool:
    """Return whether a collective here may reduce the module's input."""
    for kind, hook in node.hooks:
        if kind == "forward_pre" and not isinstance(hook, OWN_HOOKS):
            return True
        if isinstance(hook, InputHook) and hook.op in _SUMS:
            return True
        # A sum at the output of a module with a partial layer in it is that layer's.
        if kind == "forward" and layer_type_of(node.module) is None and _reduces(hook, group):
            start = f"{node.path}." if node.path else ""
            if not any(each.path.startswith(start) for each in partial):
                return True
    return False


def _reducer(root: Node, node: Node, group: RankGroup) -> Node | None:
    """Return the module, this or one around it, that reduces the partial sum."""
    for path in (node.path, *node.aliases):
        levels = path.split(".") if path else []
        for depth in range(len(levels), -1, -1):
            around: Node = root[".".join(levels[:depth])] if depth else root
            if any(kind == "forward" and _reduces(hook, group) for kind, hook in around.hooks):
                return around
    return None


def _reduces(hook: Any, group: RankGroup) -> bool:
    if isinstance(hook, OutputHook):
        return hook.op in _SUMS and hook.group == group
    if isinstance(hook, FunctionHook):
        return hook.group == group
    return not isinstance(hook, OWN_HOOKS)  # a function of the user's may be any collective


def _adds_bias(node: Node) -> bool:
    return any(
        kind == "forward" and (not isinstance(hook, OutputHook) or hook.add_bias is not None)
        for kind, hook in node.hooks
    )


def _cause(node: Node, mesh_dim: str) -> str:
    """Format the step that split the weight, with the user's line."""
    for site, name in sites(node, weight_name(node)):
        for record in reversed(site.records):
            arguments: Any = record.primitive
            if record.name == "tp.shard" and arguments.mesh_dim == mesh_dim and name in as_tuple(arguments.names):
                return f"{record} ({record.location})" if record.location else str(record)
    return f"a split over mesh_dim '{mesh_dim}'"


def _address(path: str) -> str:
    return f"sch['{path}']" if path else "sch.root"
