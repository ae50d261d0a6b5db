"""Compute a loss from hidden states instead of logits: the primitive ``linear_cross_entropy``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.observers import Forward
from slapo_loss.chunked import Vocabulary
from slapo_loss.deferred import Call, DeferredLogits, Head
from slapo_loss.private import gather_functional, tree_map_only


@dataclass(frozen=True)
class LinearCrossEntropy(Primitive):
    """Compute the loss of a head's logits from its hidden states, in chunks of tokens.

    Args:
        mesh_dim: the mesh dimension over which the head may be split along its classes.
        keep_logits: whether ``output.logits`` are computed besides, for metrics of training.
        chunk: tokens whose logits exist at a time; None: as many as 64 MiB of logits hold.

    rewrite:
        ``logits = head(hidden); loss = cross_entropy(logits, labels)`` -> ``loss = linear_cross_entropy(hidden,
        head.weight, labels)``, without a tensor of all tokens by the whole vocabulary
    """

    name = "loss.linear_cross_entropy"
    equivalence = Equivalence.REORDERED

    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)
    keep_logits: bool = dataclasses.field(default=False, kw_only=True)
    chunk: int | None = dataclasses.field(default=None, kw_only=True)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if not isinstance(node.module, nn.Linear):
            yield Violation(
                f"the head must be an nn.Linear (got {type(node.module).__name__})", "name the layer that gives logits"
            )
        if node.parent is None:
            yield Violation("the root is not a head", "name the layer that gives logits")

    def apply(self, node: Node, edit: Edit) -> None:
        root = node
        while root.parent is not None:
            root = root.parent
        group = None
        if node.mesh is not None and node.mesh.size(self.mesh_dim) > 1:
            running = None if node.mesh.is_abstract else node.mesh.group(self.mesh_dim)
            name = None if running is None else running.group_name
            group = Ranks(name, node.mesh.size(self.mesh_dim), node.mesh.rank(self.mesh_dim))
        key = node.path
        edit.wrap_forward(node, DeferHead(key, node.layout("weight").shape[0], group, self.chunk))
        edit.add_hook(root, "forward_pre", Begin(key), prepend=True)
        edit.add_hook(root, "forward", End(key, self.keep_logits))


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold a vocabulary."""

    name: str | None
    size: int
    rank: int

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather: (...) -> (ranks, ...)."""
        assert self.name is not None
        return gather_functional(tensor, self.size, self.name)


_CALLS: ContextVar[dict[str, list[Call]]] = ContextVar("calls")


def calls_of(key: str) -> list[Call]:
    found = _CALLS.get(None)
    if found is None:
        found = {}
        _CALLS.set(found)
    return found.setdefault(key, [])


@dataclass(frozen=True)
class Begin:
    key: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        calls_of(self.key).append(Call())


@dataclass(frozen=True)
class End:
    key: str
    keep_logits: bool

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = calls_of(self.key).pop()
        if not call.used or self.keep_logits:
            output = tree_map_only(DeferredLogits, lambda logits: logits.compute("the output"), output)
        call.is_over = True
        return output


@dataclass(frozen=True)
class DeferHead:
    """Wrapper of a head's forward."""

    key: str
    classes: int
    ranks: Ranks | None
    chunk: int | None

    def __call__(self, forward: Forward) -> Forward:
        return DeferredForward(self, forward)


@dataclass(frozen=True, eq=False)
class DeferredForward:
    settings: DeferHead
    forward: Forward

    def __call__(self, module: Any, input: Tensor) -> Any:
        settings, weight, bias = self.settings, module.weight, module.bias
        ranks = settings.ranks if weight.shape[0] < settings.classes else None
        calls = calls_of(settings.key)
        if not calls or not (module.training and torch.is_grad_enabled()):
            logits = self.forward(module, input)
            return logits if ranks is None else whole(logits, ranks, settings.classes)
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        start, gather = 0, None
        if ranks is not None:
            start, gather = min(ranks.rank * weight.shape[0], settings.classes), ranks.gather
        vocabulary = Vocabulary(settings.classes, start, gather)
        chunk = settings.chunk or max(1, (64 << 20) // (weight.shape[0] * 4))
        head = Head(weight, bias, vocabulary, None if ranks is None else Whole(ranks, settings.classes), chunk)
        return DeferredLogits(input, head, calls[-1])


@dataclass(frozen=True)
class Whole:
    ranks: Ranks
    classes: int

    def __call__(self, logits: Tensor) -> Tensor:
        return whole(logits, self.ranks, self.classes)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ranks: Ranks, classes: int) -> Tensor:
        ctx.ranks, ctx.own = ranks, logits.shape[-1]
        return torch.cat(list(ranks.gather(logits.contiguous())), dim=-1)[..., :classes]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        start = ctx.ranks.rank * ctx.own
        own = gradient[..., start : start + ctx.own]
        return F.pad(own, (0, ctx.own - own.shape[-1])), None, None


def whole(logits: Tensor, ranks: Ranks, classes: int) -> Tensor:
    return _Gather.apply(logits, ranks, classes)  # type: ignore[no-any-return]
