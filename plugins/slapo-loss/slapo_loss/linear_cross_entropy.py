"""Compute a loss from hidden states instead of logits: the primitive ``linear_cross_entropy``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slapo_core import Edit, Equivalence, Node, PluginError, Primitive, Violation
from slapo_core.effects import Calls, Collective, Effect, NeverAllocates
from slapo_core.errors import warn_user
from slapo_core.observers import Forward, Origin, happened, is_recording, run_from, tell_verify
from slapo_core.plugins import current_registry
from slapo_loss.deferred import DeferredLogits
from slapo_loss.deferred_values import OUTPUT, ForwardCall, HeadTensors
from slapo_loss.head_chunks import Vocabulary, chunk_size
from slapo_loss.implementations import AUTO, Chunked, Implementation, Situation, refusal
from slapo_loss.private import is_transformed
from slapo_loss.ranks import Ranks
from slapo_loss.rules import gather_violations, head_violations, overlap_notes, root_of, split_violations
from slapo_loss.withheld import WithheldLogits


@dataclass(frozen=True)
class LinearCrossEntropy(Primitive):
    """Compute the loss of a head's logits from its hidden states, in chunks of tokens.

    In training, wherever the model's forward takes the cross entropy of the head's output: ``F.cross_entropy``,
    ``nn.CrossEntropyLoss``, ``log_softmax`` and ``nll_loss``. ``output.logits`` then has a shape and no values.
    In evaluation, and of a forward that computes no loss, the logits are there, full on every rank.

    Args:
        mesh_dim: the mesh dimension over which the head may be split along its classes.
        keep_logits: whether ``output.logits`` are computed besides, for metrics of training.
        chunk: tokens whose logits exist at a time; None: by the number of classes here, their type and the device.
        implementation: computes the loss: ``"chunked"``, ``"torch"``, ``"liger"``, ``"cce"``, or another one that is
            installed; ``"auto"`` is ``"chunked"``, which is exact and serves every loss.

    rewrite:
        ``logits = head(hidden); loss = cross_entropy(logits, labels)`` -> ``loss = linear_cross_entropy(hidden,
        head.weight, labels)``, without a tensor of all tokens by all classes

        ``head split along its classes (n ranks)``: the same of its shards; no ``sync("fwd_post", "all_gather")``
    """

    name = "loss.linear_cross_entropy"
    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)
    keep_logits: bool = dataclasses.field(default=False, kw_only=True)
    chunk: int | None = dataclasses.field(default=None, kw_only=True)
    implementation: str = dataclasses.field(default="auto", kw_only=True)

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        try:
            found: type[Implementation] = current_registry().load(self._chosen, "losses")
        except PluginError:  # said by its preconditions
            return Equivalence.REORDERED
        return found.equivalence

    @property
    def _chosen(self) -> str:
        return AUTO if self.implementation == "auto" else self.implementation

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if self.chunk is not None and self.chunk < 1:
            yield Violation(f"chunk must be at least 1 (got {self.chunk})", "leave it out")
        if self.mesh_dim != "tp" and (node.mesh is None or self.mesh_dim not in node.mesh):
            yield Violation(
                f"mesh_dim '{self.mesh_dim}' is not a dimension of the mesh ({node.mesh})", "leave mesh_dim out"
            )
        found = list(head_violations(node))
        yield from found or (
            *split_violations(node, self.mesh_dim),
            *gather_violations(node),
            *self._refusal(node),
        )

    def _refusal(self, node: Node) -> Iterator[Violation]:
        try:
            implementation = node.plugin("losses", self._chosen)()
        except PluginError as error:
            yield Violation(error.message, error.hint)
            return
        classes, weight, ranks = classes_of(node), weight_of(node), 1
        if weight.shape[0] < classes and node.mesh is not None and self.mesh_dim in node.mesh:
            ranks = node.mesh.size(self.mesh_dim)
        is_even, bias = weight.shape[0] * ranks == classes, getattr(node.module, "bias", None)
        reason = implementation.refuses(
            Situation(weight.device.type, weight.dtype, ranks, is_even, has_bias=bias is not None)
        )
        if reason is not None:
            refused = refusal(self._chosen, reason)
            yield Violation(refused.message, refused.hint)

    def apply(self, node: Node, edit: Edit) -> None:
        is_split = node.mesh is not None and self.mesh_dim in node.mesh and node.mesh.size(self.mesh_dim) > 1
        ranks = Ranks.along(node.mesh, self.mesh_dim) if node.mesh is not None and is_split else None
        scope, weight = Scope(node.path), weight_of(node)
        implementation = node.plugin("losses", self._chosen)()
        tokens = self.chunk or chunk_size(weight.shape[0], weight.dtype, weight.device)
        sized = f" in chunks of {tokens} tokens ({weight.device.type})" if self._chosen == AUTO else ""
        edit.note(f"choice: the loss is computed by '{self._chosen}'{sized}")
        for note in overlap_notes(node):
            edit.note(note)
        # Within what others wrap around these forwards, whatever comes first: a checkpoint that runs the root's forward
        # again opens a call again, and a wrapper around the head that exchanges its weight is in force.
        edit.wrap_forward(node, DeferHead(scope, classes_of(node), ranks, self.chunk, implementation), inside=True)
        edit.wrap_forward(root_of(node), SpanForward(scope, self.keep_logits), inside=True)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not any(isinstance(wrapper, DeferHead) for wrapper in node.wrappers):
            yield Violation("the head's forward is not wrapped")

    def effects(self, node: Node) -> Iterator[Effect]:
        scopes = [wrapper.scope for wrapper in node.wrappers if isinstance(wrapper, DeferHead)]
        if not node.module.training or any(scope.is_noted for scope in scopes):
            return
        yield Calls(self._chosen)
        if self._chosen != AUTO:
            return
        classes, weight = classes_of(node), weight_of(node)
        here = node.layout("weight").local_shape(node.mesh)[0] if "weight" in node.parameters else weight.shape[0]
        ranks = node.mesh.size(self.mesh_dim) if node.mesh is not None and self.mesh_dim in node.mesh else 1
        is_split = here < classes and ranks > 1
        if is_split:
            yield Collective("all_gather", self.mesh_dim)
        # Under autocast logits are smaller than the weight's type.
        rows = self.chunk or chunk_size(here, torch.bfloat16, weight.device, "in place")
        of_logits = {here, classes, here * ranks} if is_split else {here, classes}
        for features in () if self.keep_logits else sorted(of_logits - {weight.shape[-1]}):
            yield NeverAllocates(features, rows)


def classes_of(node: Node) -> int:
    """Return the number of classes of a head, of all ranks and without padding."""
    return node.layout("weight").shape[0] if "weight" in node.parameters else weight_of(node).shape[0]


def weight_of(node: Node) -> Tensor:
    """Return the weight of a head, or its parametrization's."""
    weight: Tensor = node.module.weight  # type: ignore[assignment]
    return weight


class Scope:
    """Share state among the wrappers of one step: the same object in copies of the model.

    Args:
        path: of the head.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.has_warned = False
        self.is_noted = False  # by verify: that the last forward in training took no loss from hidden states


@dataclass
class OpenCall(ForwardCall):
    """Describe a forward of the model during which a head defers its logits."""

    scope: Scope = field(default_factory=lambda: Scope(""))
    has_deferred: bool = False


_OPEN: ContextVar[tuple[OpenCall, ...]] = ContextVar("open calls", default=())
"""The forwards that run here, outermost first."""


def open_call(scope: Scope) -> OpenCall | None:
    """Return the innermost forward that runs for a step; None outside of any."""
    for call in reversed(_OPEN.get()):
        if call.scope is scope:
            # A checkpoint runs a part of a forward again, in the context of its first run.
            return OpenCall(scope=scope) if call.is_over else call
    return None


@dataclass(frozen=True)
class SpanForward:
    """Wrap the root's forward: during it the head's logits may be deferred, not after it.

    Args:
        scope: shared with the wrapper of the head.
        keep_logits: whether the logits in the output are computed besides.
        has_head: whether the forward is to call the head.
    """

    scope: Scope
    keep_logits: bool
    has_head: bool = True

    slapo_goes_around = True

    def slapo_of_stage(self, is_last: bool) -> SpanForward:
        """Return the wrapper of a stage: logits sent to a later stage have values."""
        return self if is_last else dataclasses.replace(self, keep_logits=True, has_head=False)

    def __call__(self, forward: Forward) -> Forward:
        scope, keep_logits, has_head = self.scope, self.keep_logits, self.has_head
        origin = Origin(scope.path, self, is_below_root=True)

        @functools.wraps(forward)
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or is_recording():
                return forward(module, *args, **kwargs)
            call = OpenCall(scope=scope)
            before = _OPEN.get()
            _OPEN.set((*before, call))  # its token, of each forward another, would have torch.compile compile again
            try:
                output = forward(module, *args, **kwargs)
                if call.has_deferred:
                    return closed(call, output, origin, keep_logits=keep_logits)
                if has_head and module.training:
                    warn_of_no_effect(scope, "whose head did not run in training mode", origin)
                return output
            finally:
                _OPEN.set(before)
                call.is_over = True

        return run


def closed(call: OpenCall, output: Any, origin: Origin, *, keep_logits: bool) -> Any:
    """End a forward: return its output with logits, or with withheld ones."""
    if call.used:
        call.scope.is_noted = False
    else:
        by = f": {call.computed[0]} took its logits" if call.computed else ""
        warn_of_no_effect(call.scope, f"which computes no cross entropy of the head's logits{by}", origin)
        call.scope.is_noted = call.scope.is_noted and not call.computed

    def end(logits: DeferredLogits) -> Tensor:
        if logits.call is not call:
            return logits
        if keep_logits or not call.used:
            return logits.compute(OUTPUT)
        return WithheldLogits(logits.shape, logits.dtype, logits.device, call.scope.path)

    return exchanged(output, end, {})


def warn_of_no_effect(scope: Scope, why: str, origin: Origin) -> None:
    """Warn once, or let verify note, that a forward in training took no loss from hidden states."""
    text = (
        f"linear_cross_entropy at '{scope.path}' had no effect on this forward in training, {why}; give the model its "
        "labels, or leave the step out"
    )
    scope.is_noted = tell_verify(text)
    if scope.is_noted:
        return
    if not torch.compiler.is_compiling():
        run_from(origin, happened, "fallback", f"a forward {why}")
    if not scope.has_warned:
        scope.has_warned = True
        warn_user(text)


_ATOMS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, Tensor, nn.Parameter))


def exchanged(value: Any, end: Callable[[DeferredLogits], Tensor], seen: dict[int, Any]) -> Any:
    """Exchange the deferred logits in an output; containers are changed in place.

    Args:
        value: a part of the output.
        end: gives their replacement.
        seen: the parts that were entered.
    """
    if type(value) in _ATOMS or id(value) in seen:
        return value
    if isinstance(value, DeferredLogits):
        return end(value)
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value):
        return value
    seen[id(value)] = value
    if isinstance(value, tuple):
        parts = [exchanged(part, end, seen) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, (MutableMapping, MutableSequence)):
        entries = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        for key, part in list(entries):
            if (new := exchanged(part, end, seen)) is not part:
                value[key] = new
    for name, part in list(getattr(value, "__dict__", {}).items()):
        if (new := exchanged(part, end, seen)) is not part:
            object.__setattr__(value, name, new)
    return value


@dataclass(frozen=True)
class DeferHead:
    """Wrap a head's forward: in training, within a forward of the model, defer its logits.

    Args:
        scope: shared with the wrapper of the root.
        classes: of all ranks.
        ranks: that may hold shards of the classes; None: all of them are here.
        chunk: tokens whose logits exist at a time; None: by the size of their logits.
    """

    scope: Scope
    classes: int
    ranks: Ranks | None
    chunk: int | None
    implementation: Implementation = dataclasses.field(default_factory=Chunked)

    slapo_gathers_output = True

    def __call__(self, forward: Forward) -> Forward:
        @functools.wraps(forward)
        def run(module: Any, input: Tensor) -> Any:
            weight = module.weight
            ranks = self.ranks if weight.shape[0] < self.classes else None
            if module.training and torch.is_grad_enabled() and not is_recording() and not is_transformed():
                call = open_call(self.scope)
                if call is not None:
                    call.has_deferred = True
                    return self._deferred(module, input, weight, ranks, call)
            logits = forward(module, input)
            return logits if ranks is None else GatherLogits(ranks, self.classes)(logits)

        return run

    def _deferred(
        self, module: Any, input: Tensor, weight: Tensor, ranks: Ranks | None, call: ForwardCall
    ) -> DeferredLogits:
        bias, kind = module.bias, input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, weight = _cast(input, dtype), _cast(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        vocabulary, gather = Vocabulary(self.classes), None
        if ranks is not None:
            start = min(ranks.rank * weight.shape[0], self.classes)
            vocabulary = Vocabulary(self.classes, start, ranks.gather, ranks.name)
            gather = GatherLogits(ranks, self.classes)
        origin = Origin(self.scope.path, self, is_below_root=True)
        head = HeadTensors(weight, bias, vocabulary, gather, self.chunk, self.implementation, origin)
        return DeferredLogits(input, head, call)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast does, which leaves float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


@dataclass(frozen=True)
class GatherLogits:
    """Gather logits over the ranks: (..., classes here) -> (..., classes)."""

    ranks: Ranks
    classes: int

    def __call__(self, logits: Tensor) -> Tensor:
        # The padding is cut off outside of the function: in-place operations on views made inside of one are errors.
        gathered: Tensor = _Gather.apply(logits, self.ranks)  # type: ignore[no-untyped-call]
        return gathered[..., : self.classes]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.own = ranks, logits.shape[-1]
        return torch.cat(list(ranks.gather(logits.contiguous())), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(-1, ctx.ranks.rank * ctx.own, ctx.own), None
