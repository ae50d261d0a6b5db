"""Implement the loss of a head: in chunks, by torch, and by kernels of other packages.

Implementations are entry points of the group ``slapo.v1.losses``, in which a third party publishes a subclass of
`Implementation` under its name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo_core import ArgumentError, Equivalence
from slapo_loss import chunked
from slapo_loss.head_chunks import Between, Objective, Vocabulary
from slapo_loss.private import find_group, is_cast

AUTO = "chunked"
"""The implementation of ``"auto"``: it serves every situation, is exact, and sizes its chunks by device and type.

`benchmarks/loss_cost.py` measures it against the others.
"""


@dataclass(frozen=True)
class Situation:
    """Describe a loss to compute.

    Args:
        device: type of the head's device, e.g. ``"cuda"``; ``"meta"`` while it is not known.
        dtype: of the head.
        ranks: that hold the vocabulary.
        is_even: whether each of them holds as many classes as the others, without padding.
        has_bias: whether the head has one.
        has_class_weight: whether the loss weighs classes.
        has_operations: whether more than a cast lies between the head and the loss.
        objective: reduction, label smoothing and the ignored label.
    """

    device: str
    dtype: torch.dtype
    ranks: int = 1
    is_even: bool = True
    has_bias: bool = False
    has_class_weight: bool = False
    has_operations: bool = False
    objective: Objective = field(default_factory=Objective)


class Implementation(ABC):
    """Compute the cross entropy of a linear head: ``linear_cross_entropy(implementation="chunked")``.

    Attributes:
        name: what users write, e.g. ``"chunked"``.
        equivalence: what a step by it promises.
    """

    name: ClassVar[str]
    equivalence: ClassVar[Equivalence] = Equivalence.REORDERED

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def refuses(self, situation: Situation) -> str | None:
        """Return why it cannot serve a situation; None if it can."""

    @abstractmethod
    def compute(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        bias: Tensor | None,
        class_weight: Tensor | None,
        objective: Objective,
        vocabulary: Vocabulary,
        between: Between | None,
        chunk: int | None,
    ) -> Tensor:
        """Compute the loss: a scalar, or (tokens,) for ``reduction="none"``, in the type of the last operation.

        With the vocabulary over ranks it is the full loss on each; the gradient of hidden states is partial, and the
        schedule reduces it.

        Args:
            hidden: (tokens, features).
            weight: (classes here, features).
            labels: (tokens,), of the full vocabulary.
            bias: (classes here,).
            class_weight: (classes,), of the full vocabulary.
            objective: reduction, label smoothing and the ignored label.
            vocabulary: the classes here.
            between: elementwise operations on the logits.
            chunk: tokens whose logits exist at a time; None: the implementation chooses.
        """

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, between: Between | None = None, **given: Any
    ) -> Tensor:
        """Compute the loss, or refuse.

        Raises:
            ArgumentError: it cannot serve these arguments.
        """
        has_operations, dtype = False, hidden.dtype
        if between is not None:
            dtype, is_only_cast = is_cast(between, hidden.new_empty((1, 1)))
            has_operations = not is_only_cast
        situation = Situation(
            hidden.device.type,
            hidden.dtype,
            *_ranks(given["vocabulary"], weight),
            has_bias=given.get("bias") is not None,
            has_class_weight=given.get("class_weight") is not None,
            has_operations=has_operations,
            objective=given["objective"],
        )
        reason = self.refuses(situation)
        if reason is not None:
            raise refusal(self.name, reason)
        return self.compute(hidden, weight, labels, between=between, **given).to(dtype)


def refusal(name: str, reason: str) -> ArgumentError:
    """Return the error of an implementation that cannot serve."""
    return ArgumentError(
        f"linear_cross_entropy(implementation={name!r}) {reason}", hint='implementation="chunked" serves every loss'
    )


def _ranks(vocabulary: Vocabulary, weight: Tensor) -> tuple[int, bool]:
    if vocabulary.gather is None:
        return 1, weight.shape[0] == vocabulary.size
    ranks = -(-vocabulary.size // max(1, weight.shape[0]))
    return max(2, ranks), ranks * weight.shape[0] == vocabulary.size


class Chunked(Implementation):
    """Compute in chunks of tokens, exactly, on any device and in any type."""

    name = "chunked"

    def refuses(self, situation: Situation) -> str | None:
        return None

    def compute(self, hidden: Tensor, weight: Tensor, labels: Tensor, **given: Any) -> Tensor:
        return chunked.linear_cross_entropy(hidden, weight, labels, **given)

    __call__ = compute  # nothing is refused


class Torch(Implementation):
    """Call ``torch.nn.functional.linear_cross_entropy``, of torch 2.13 on."""

    name = "torch"

    def refuses(self, situation: Situation) -> str | None:
        if not hasattr(F, "linear_cross_entropy"):
            return f"requires torch 2.13 (got {torch.__version__})"
        if situation.objective.label_smoothing:
            return "does not smooth labels in chunks"
        return _one_plain_head(situation) or ("runs eagerly only" if torch.compiler.is_compiling() else None)

    def compute(self, hidden: Tensor, weight: Tensor, labels: Tensor, **given: Any) -> Tensor:
        objective, chunk = given["objective"], given["chunk"]
        sizes: Any = {"batch_chunk_size": chunk, "chunking_method": None} if chunk else {}
        is_kept = None
        if objective.reduction == "mean":
            # Of ignored labels alone it gives gradients that are not numbers, where cross_entropy gives zeros.
            is_kept = (labels != objective.ignore_index).any()
            labels = torch.where(is_kept, labels, int(objective.ignore_index == 0))
        found: Tensor = F.linear_cross_entropy(
            hidden,
            weight,
            labels,
            linear_bias=given["bias"],
            weight=given["class_weight"],
            reduction=objective.reduction,
            ignore_index=objective.ignore_index,
            options=torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True, **sizes),
        )
        return found if is_kept is None else torch.where(is_kept, found, torch.nan)


class Liger(Implementation):
    """Call Liger's fused linear cross entropy, tensor-parallel too."""

    name = "liger"

    def refuses(self, situation: Situation) -> str | None:
        reason = _kernels(situation, "liger_kernel") or _operations(situation)
        if reason is not None:
            return reason
        if situation.ranks == 1:
            if not situation.is_even:
                return "does not leave out padding of the vocabulary"
            if situation.objective.reduction == "none":
                return "gives wrong gradients of losses per token in some releases"
            return None
        if not hasattr(importlib.import_module("liger_kernel.ops"), "LigerFusedLinearScaledCrossEntropyTPFunction"):
            return "requires liger-kernel 0.8.3 for a vocabulary over ranks"
        if not situation.is_even:
            return f"requires a vocabulary that is a multiple of the {situation.ranks} ranks"
        if situation.has_bias or situation.has_class_weight or situation.objective.label_smoothing:
            return "has no bias, class weights or label smoothing with a vocabulary over ranks"
        return None

    def compute(self, hidden: Tensor, weight: Tensor, labels: Tensor, **given: Any) -> Tensor:
        ops, objective, vocabulary = (
            importlib.import_module("liger_kernel.ops"),
            given["objective"],
            given["vocabulary"],
        )
        if vocabulary.gather is None:
            arguments = (given["bias"], given["class_weight"], objective.ignore_index, 0.0, objective.label_smoothing)
            accumulated_in = (objective.reduction, None, False, torch.float32)
            found = ops.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, *arguments, *accumulated_in)
            return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]
        group = find_group(vocabulary.group)
        losses = ops.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
            _Divided.apply(hidden, group.size()),  # type: ignore[no-untyped-call]
            weight,
            labels,
            group,
            1.0,
            objective.ignore_index,
        )
        return _reduced(losses, labels, objective)


class Cce(Implementation):
    """Call Apple's cut cross entropy, which skips small blocks of the gradient."""

    name = "cce"
    equivalence = Equivalence.APPROXIMATE(2e-2).provided("skipped blocks of the gradient are below the filter's limit")

    def refuses(self, situation: Situation) -> str | None:
        reason = _kernels(situation, "cut_cross_entropy") or _one_plain_head(situation)
        if reason is not None:
            return reason
        if situation.has_class_weight or situation.objective.label_smoothing:
            return "has no class weights or label smoothing"
        if situation.dtype not in (torch.float16, torch.bfloat16):
            return f"requires a head of float16 or bfloat16 (got {situation.dtype})"
        if situation.has_bias and "bias" not in _parameters(self._function()):
            return "requires a release of cut-cross-entropy whose linear_cross_entropy takes a bias"
        return None

    def compute(self, hidden: Tensor, weight: Tensor, labels: Tensor, **given: Any) -> Tensor:
        objective = given["objective"]
        bias: Any = {} if given["bias"] is None else {"bias": given["bias"]}
        found: Tensor = self._function()(
            hidden, weight, labels, ignore_index=objective.ignore_index, reduction=objective.reduction, **bias
        )
        return found

    @staticmethod
    def _function() -> Callable[..., Any]:
        found: Callable[..., Any] = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return found


def _kernels(situation: Situation, module: str) -> str | None:
    if situation.device not in ("cuda", "meta"):
        return f"requires a GPU (got device '{situation.device}')"
    if not _is_installed(module):
        return f"requires the package {module.replace('_', '-')}, which is not installed"
    return None


@functools.cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _operations(situation: Situation) -> str | None:
    if situation.has_operations:
        return "takes no operations between the head and its loss, e.g. softcapping"
    return None


def _one_plain_head(situation: Situation) -> str | None:
    if situation.ranks > 1:
        return f"does not compute with a vocabulary over ranks (got {situation.ranks})"
    if not situation.is_even:
        return "does not leave out padding of the vocabulary"
    return _operations(situation)


def _reduced(losses: Tensor, labels: Tensor, objective: Objective) -> Tensor:
    if objective.reduction == "none":
        return losses
    total = losses.sum()
    return total / (labels != objective.ignore_index).sum() if objective.reduction == "mean" else total


class _Divided(torch.autograd.Function):
    """Divide the gradient by the ranks: the schedule sums it a second time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.ranks, None
