"""Compute a chunk's logits: their numbers, and their gradient in their own memory.

A chunk has one buffer of logits, in the head's type, which become their own gradient: divided by a factor for each
token, so that the factors are multiplied into hidden states (tokens x features) instead. Where the logits are of a
smaller type than the loss, or operations lie between, they are taken a block of tokens at a time; on a GPU with Triton
kernels take logits that are only cast.

With the vocabulary split over ranks a chunk takes one exchange: each rank's largest logit, the logarithm of its sum of
exponentials, the target's logit and (for label smoothing) the sum of logits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slapo_core.layout import is_simulated, kernel_device
from slapo_loss.private import assert_on_device, is_cast

Between = Callable[[Tensor], Tensor]
"""Elementwise operations between the head and its loss, e.g. ``lambda z: z.float()``: logits -> logits of one shape."""

Gather = Callable[[Tensor], Tensor]
"""Gathers over the ranks that hold the vocabulary: (...) -> (ranks, ...)."""

CHUNK_BYTES = {"cpu": 64 << 20}
"""The bound of all that a chunk takes, by type of device: logits, and what their loss and gradient need besides."""

OTHER_CHUNK_BYTES = 512 << 20
"""The same elsewhere: products of 1,000 tokens keep a GPU busy, where products of 100 wait for its memory."""

_BLOCKS = 4
"""Logits take the bound but for one part in so many, which is for a block of tokens."""

_COPIES = {"in place": 0, "kernels": 0, "cast": 3, "between": 12}
"""Tensors of a block's size, in the type of the loss, that exist at a time."""

_TILE = 128
"""A GPU's products take as many rows at a time."""

_LEAST_SHARE = 1e-30
"""Smaller probabilities of all of a rank's classes count as this one in gradients."""


@dataclass(frozen=True)
class Vocabulary:
    """Describe the part of a vocabulary that this process holds.

    Args:
        size: classes in all, without padding.
        start: the first class here.
        gather: over the ranks that hold the others; None where all of it is here.
        group: name of their process group.
    """

    size: int
    start: int = 0
    gather: Gather | None = None
    group: str | None = None


@dataclass(frozen=True)
class Objective:
    """Hold the options of `torch.nn.functional.cross_entropy`.

    Args:
        ignore_index: label of a token that has no part in the loss.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: share of the uniform distribution in the target, 0 to 1.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def check(self) -> None:
        """Raise as torch does for invalid values."""
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none' (got {self.reduction!r})")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0 (got {self.label_smoothing})")


def chunk_size(classes: int, dtype: torch.dtype, device: torch.device, way: str | None = None) -> int:
    """Return the number of tokens whose logits exist at a time.

    Args:
        classes: here, on this rank.
        dtype: of the head.
        device: of the head.
        way: ``"in place"`` for logits of float32 or float64 that nothing lies between, ``"cast"`` for those that are
            only cast, ``"kernels"`` for both by Triton, ``"between"`` for others; None: ``"kernels"`` where there are
            any, else ``"cast"``.
    """
    way = way or ("kernels" if has_kernels(dtype, device) else "cast")
    bound = CHUNK_BYTES.get(device.type, OTHER_CHUNK_BYTES)
    of_logits = bound if _COPIES[way] == 0 else bound - bound // _BLOCKS
    tokens = max(1, of_logits // max(1, classes * dtype.itemsize))
    return tokens - tokens % _TILE if device.type != "cpu" and tokens > _TILE else tokens


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether Triton kernels take logits of a type on a device."""
    return device.type == "cuda" and dtype.itemsize <= 4 and (is_simulated() or _has_triton())


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass
class Numbers:
    """Hold the numbers of a chunk's tokens: the log-sum-exp is ``shift + log_sum``.

    Args:
        shift: the largest logit.
        log_sum: logarithm of the sum of the exponentials, of logits without the shift.
        target: the label's logit; minus infinity where no rank has it.
        sum: of the logits, or of those by class weights.
        entropy: of the distribution.
        share: probability of the classes that are here; None for 1.
    """

    shift: Tensor
    log_sum: Tensor
    target: Tensor | None = None
    sum: Tensor | None = None
    entropy: Tensor | None = None
    share: Tensor | None = None


@dataclass
class Targets:
    """Describe the gradient: ``factors * (probabilities - one_hot * of_label - uniform)``.

    Args:
        factors: for each token.
        of_label: for each token; 0 where its label is on another rank.
        uniform: for each token, of label smoothing.
    """

    factors: Tensor
    of_label: Tensor
    uniform: Tensor | None

    def divide(self, share: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Normalize probabilities to the classes here; return their factor, if any."""
        share = share.clamp_min(_LEAST_SHARE)
        if dtype == torch.float16:  # its range has no room for quotients
            return share
        self.factors = self.factors * share
        self.of_label = self.of_label / share
        self.uniform = None if self.uniform is None else self.uniform / share
        return None


class ChunkedHead:
    """Hold the arguments of a call, and the state that its chunks share.

    Args:
        ways: that its logits may take beside ``"cast"`` and ``"between"``.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weight: Tensor | None,
        settings: tuple[Objective, Vocabulary, Between | None, int | None],
        *,
        ways: tuple[str, ...] = (),
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.objective, self.vocabulary, self.between, chunk = settings
        size, start = self.vocabulary.size, self.vocabulary.start
        self.classes = max(0, min(weight.shape[0], size - start))
        self.returned, self.way = hidden.dtype, "cast"
        if self.between is not None:
            shown, cast = is_cast(self.between, hidden.new_empty((1, 1)))
            self.returned, self.way = shown, "cast" if cast else "between"
        self.dtype = torch.promote_types(self.returned, torch.float32)
        self._device = device = kernel_device(hidden)
        is_float32 = self.dtype == torch.float32  # in which kernels compute
        if self.way == "cast" and is_float32 and "kernels" in ways and has_kernels(hidden.dtype, device):
            self.way = "kernels"
        elif self.way == "cast" and "in place" in ways and self.dtype == hidden.dtype:
            self.way = "in place"
        self.block_bytes = CHUNK_BYTES.get(device.type, OTHER_CHUNK_BYTES) // _BLOCKS
        tokens = chunk or chunk_size(self.classes, hidden.dtype, device, self.way)
        self.chunk = max(1, min(tokens, hidden.shape[0]))
        self._read_labels(labels, class_weight)
        self._buffer: Tensor | None = None

    def _read_labels(self, labels: Tensor, class_weight: Tensor | None) -> None:
        size, start = self.vocabulary.size, self.vocabulary.start
        kept = labels != self.objective.ignore_index
        known = torch.where(kept, labels, 0).long()
        _check_labels(known, size)
        self.kept = kept.to(self.dtype)
        self.target_weights, self.class_weight = self.kept, None
        if class_weight is not None:
            if class_weight.shape != (size,):
                raise RuntimeError(f"class weights must have shape ({size},) (got {tuple(class_weight.shape)})")
            class_weight = class_weight.to(self.dtype)
            self.target_weights = self.kept * class_weight[known]
            self.class_weight = class_weight.narrow(0, min(start, size), self.classes)
        self.total_weight = size if class_weight is None else class_weight.sum()
        self.labels = known - start
        self.is_local = (self.labels >= 0) & (self.labels < self.classes)
        self.labels = torch.where(self.is_local, self.labels, 0)

    def chunks(self) -> Iterator[slice]:
        tokens = self.hidden.shape[0]
        for start in range(0, tokens, self.chunk):
            yield slice(start, min(start + self.chunk, tokens))

    def _blocks(self, part: slice) -> Iterator[tuple[slice, slice]]:
        """Divide a chunk: yield rows of its logits, and their tokens."""
        row = max(1, self.classes * self.dtype.itemsize * _COPIES[self.way])
        rows, count = part.stop - part.start, max(1, self.block_bytes // row)
        for start in range(0, rows, count):
            stop = min(start + count, rows)
            yield slice(start, stop), slice(part.start + start, part.start + stop)

    def logits(self, part: slice) -> Tensor:
        """Compute the logits of a chunk, in a buffer that all chunks share."""
        if self._buffer is None:
            aligned = 0 if self._device.type == "cpu" else -self.classes % _TILE
            self._buffer = self.hidden.new_empty((self.chunk, self.classes + aligned))[:, : self.classes]
        hidden, out = self.hidden[part], self._buffer[: part.stop - part.start]
        weight = self.weight[: self.classes].t()
        if self.bias is None:
            return torch.mm(hidden, weight, out=out)
        return torch.addmm(self.bias[: self.classes], hidden, weight, out=out)

    def free(self) -> None:
        """Free the buffer of logits until the backward."""
        self._buffer = None

    def taken(self, part: slice, targets: Targets | None, *, entropy: bool = False) -> tuple[Tensor, Numbers]:
        """Compute the numbers of a chunk; given targets, turn its logits into their gradient."""
        logits = self.logits(part)
        is_split = self.vocabulary.gather is not None
        found: list[Numbers] = []
        if not self.classes:  # a rank that holds padding
            nothing = logits.new_full((logits.shape[0],), -torch.inf, dtype=self.dtype)
            zeros = torch.zeros_like(nothing)
            sums = zeros if self.objective.label_smoothing else None
            found.append(Numbers(nothing, zeros, nothing, sums, zeros if entropy else None))
        elif self.way == "kernels":
            found.append(self._numbers(logits, part, *_operators().log_sum_exp(logits)))
        elif self.way == "in place":
            found.append(self._softmax(logits, part))
        else:
            fused = None if is_split and self.way == "between" else targets
            found += [self._block(logits[rows], rows, tokens, fused, entropy) for rows, tokens in self._blocks(part)]
        numbers = found[0] if len(found) == 1 else _joined(found)
        if is_split:
            numbers = self._exchanged(numbers)
        if targets is not None and self.way == "between":
            if is_split:
                self.to_gradient(part, logits, targets, numbers)
        elif targets is not None and self.way == "kernels":
            self.to_gradient(part, logits, targets, numbers)
        elif targets is not None and self.classes:
            assert numbers.target is not None
            of_target = (numbers.target - numbers.shift - numbers.log_sum).exp()
            if numbers.share is not None:
                factor = targets.divide(numbers.share, logits.dtype)
                if factor is not None:
                    logits.mul_(factor.to(logits.dtype)[:, None])
                else:
                    of_target = of_target / numbers.share.clamp_min(_LEAST_SHARE)
            self._add_targets(logits, part, slice(None), targets, of_target)
        return logits, numbers

    def _block(self, block: Tensor, rows: slice, tokens: slice, targets: Targets | None, entropy: bool) -> Numbers:
        """Compute the numbers of a block; given targets, leave its gradient."""
        leaf, shown = self._shown(block, targets is not None)
        values = shown.detach()
        log_probs = values.log_softmax(1, dtype=self.dtype)
        numbers = self._numbers(values, tokens, values.amax(1).to(self.dtype), -log_probs.amax(1))
        if entropy:
            least = torch.finfo(self.dtype).min  # of masked classes: times a probability of 0
            numbers.entropy = -(log_probs.exp() * log_probs.clamp_min_(least)).sum(1)
        elif targets is not None and self.way == "cast":
            block.copy_(log_probs.exp_())
        elif targets is not None:
            self._add_targets(log_probs.exp_(), tokens, rows, targets)
            block.copy_(_through(leaf, shown, log_probs))
        return numbers

    def _softmax(self, logits: Tensor, part: slice) -> Numbers:
        """Compute the softmax of logits in place."""
        shift = logits.amax(1)
        numbers = self._numbers(logits, part, shift, shift)
        torch.softmax(logits, 1, out=logits)
        numbers.log_sum = -logits.amax(1).log()
        return numbers

    def _numbers(self, values: Tensor, tokens: slice, shift: Tensor, log_sum: Tensor) -> Numbers:
        target = values.gather(1, self.labels[tokens, None]).squeeze(1).to(self.dtype)
        target = torch.where(self.is_local[tokens], target, -torch.inf)
        found = Numbers(shift, log_sum, target)
        if self.objective.label_smoothing:
            weight = self.class_weight
            found.sum = values.sum(1, dtype=self.dtype) if weight is None else values.to(self.dtype) @ weight
        return found

    def _exchanged(self, own: Numbers) -> Numbers:
        """Exchange a chunk's numbers between the ranks of the vocabulary."""
        gather = self.vocabulary.gather
        assert gather is not None
        assert own.target is not None
        names = [name for name in ("sum", "entropy") if getattr(own, name) is not None]
        gathered = gather(torch.stack([own.shift, own.log_sum, own.target, *(getattr(own, name) for name in names)]))
        shifts, log_sums = gathered[:, 0], gathered[:, 1]
        shift = shifts.amax(0)
        of_ranks = log_sums + (shifts - shift)
        log_sum = of_ranks.logsumexp(0)
        found = Numbers(shift, log_sum, gathered[:, 2].amax(0))
        found.share = torch.exp(own.log_sum + (own.shift - shift) - log_sum)
        for place, name in enumerate(names, start=3):
            if name == "sum":
                found.sum = gathered[:, place].sum(0)
            else:
                log_shares = of_ranks - log_sum
                shares = log_shares.exp()
                found.entropy = torch.where(shares > 0, shares * (gathered[:, place] - log_shares), 0.0).sum(0)
        return found

    def losses(self, part: slice, numbers: Numbers) -> Tensor:
        """Return the loss of each token."""
        smoothing, size = self.objective.label_smoothing, self.vocabulary.size
        assert numbers.target is not None
        losses = self.target_weights[part] * ((numbers.shift - numbers.target) + numbers.log_sum)
        losses = torch.where(self.kept[part] > 0, losses, 0.0)  # the logits of an ignored token may be infinite
        if numbers.sum is None or not smoothing:
            return losses
        smooth = (numbers.shift * self.total_weight - numbers.sum) + numbers.log_sum * self.total_weight
        smooth = torch.where(self.kept[part] > 0, smooth, 0.0)
        return losses * (1 - smoothing) + smooth * (smoothing / size)

    def targets_of(self, part: slice, scales: Tensor | None) -> Targets:
        """Return the parts of the gradient of a chunk's loss.

        Args:
            part: the chunk.
            scales: gradients of the losses of its tokens; None: 1.
        """
        smoothing = self.objective.label_smoothing
        of_label, kept = self.target_weights[part], self.kept[part]
        if scales is not None:
            of_label, kept = torch.where(kept > 0, of_label * scales, 0.0), torch.where(kept > 0, scales, 0.0)
        factors, uniform = of_label, None
        if smoothing:
            of_label, uniform = of_label * (1 - smoothing), kept * (smoothing / self.vocabulary.size)
            factors = of_label + uniform * self.total_weight
            uniform = torch.where(factors == 0, 0.0, uniform / factors)
        share = torch.where(self.is_local[part] & (factors != 0), of_label / factors, 0.0)
        return Targets(factors, share, uniform)

    def to_gradient(
        self,
        part: slice,
        logits: Tensor,
        targets: Targets,
        numbers: Numbers,
        of_entropies: Tensor | None = None,
    ) -> None:
        """Turn logits into their gradient; its factors only with gradients of entropies."""
        if self.way == "kernels" and self.classes:
            labels, uniform, dtype = self.labels[part], targets.uniform, torch.float32
            smoothing = uniform if uniform is None else uniform.to(dtype)
            weight = None if uniform is None else self.class_weight
            numbers_of = numbers.shift.to(dtype), numbers.log_sum.to(dtype)
            _operators().to_gradient(logits, *numbers_of, labels, targets.of_label.to(dtype), smoothing, weight)
            return
        for rows, tokens in self._blocks(part) if self.classes else ():
            self._block_to_gradient(logits[rows], rows, tokens, targets, numbers, of_entropies)

    def _block_to_gradient(
        self,
        block: Tensor,
        rows: slice,
        tokens: slice,
        targets: Targets,
        numbers: Numbers,
        of_entropies: Tensor | None,
    ) -> None:
        leaf, shown = self._shown(block, self.way == "between")
        log_probs = shown.detach().to(self.dtype) - numbers.shift[rows, None]
        log_probs.sub_(numbers.log_sum[rows, None])
        if of_entropies is None:
            found = log_probs.exp_()
            self._add_targets(found, tokens, rows, targets)
        else:
            assert numbers.entropy is not None
            found = log_probs.exp()
            log_probs.clamp_min_(torch.finfo(self.dtype).min).add_(numbers.entropy[rows, None])
            found.mul_(log_probs.mul_(-of_entropies[rows, None]).add_(targets.factors[rows, None]))
            of_label = (targets.of_label * targets.factors)[rows]
            found.scatter_add_(1, self.labels[tokens, None], -of_label[:, None])
        block.copy_(_through(leaf, shown, found))

    def _shown(self, block: Tensor, differentiated: bool) -> tuple[Tensor | None, Tensor]:
        """Apply the operations between logits and their loss."""
        if self.between is None or self.way != "between":
            return None, block
        with torch.enable_grad() if differentiated else contextlib.nullcontext():
            leaf = block.detach().requires_grad_(differentiated)
            return (leaf if differentiated else None), self.between(leaf)

    def _add_targets(
        self, values: Tensor, tokens: slice, rows: slice, targets: Targets, of_target: Tensor | None = None
    ) -> None:
        """Subtract the parts of a gradient from probabilities.

        Args:
            values: the probabilities.
            tokens: of these rows.
            rows: of the targets.
            targets: the parts.
            of_target: probabilities of the labels in the type of the loss, where ``values`` are of a smaller one: that
                of a label is near 1, and their difference is the gradient.
        """
        labels, of_label = self.labels[tokens, None], targets.of_label[rows, None]
        if of_target is None or values.dtype == self.dtype:
            values.scatter_add_(1, labels, -of_label.to(values.dtype))
        else:
            differences = (of_target[:, None] - of_label).to(values.dtype)
            values.scatter_(1, labels, torch.where(self.is_local[tokens, None], differences, values.gather(1, labels)))
        if targets.uniform is not None:
            uniform = targets.uniform[rows].to(values.dtype)
            if self.class_weight is None:
                values.sub_(uniform[:, None])
            else:
                values.addr_(uniform, self.class_weight.to(values.dtype), alpha=-1)


def _operators() -> Any:
    from slapo_loss import operators

    return operators


def _through(leaf: Tensor | None, shown: Tensor, gradient: Tensor) -> Tensor:
    if leaf is None:
        return gradient
    (found,) = torch.autograd.grad(shown, leaf, gradient.to(shown.dtype))
    return found


def _joined(found: list[Numbers]) -> Numbers:
    def of(name: str) -> Tensor | None:
        return None if getattr(found[0], name) is None else torch.cat([getattr(one, name) for one in found])

    return Numbers(*(of(name) for name in ("shift", "log_sum", "target", "sum", "entropy")))  # type: ignore[arg-type]


def _check_labels(labels: Tensor, size: int) -> None:
    is_right = ((labels >= 0) & (labels < size)).all()
    try:
        assert_on_device(is_right, f"a label is out of bounds for {size} classes")
    except RuntimeError:
        wrong = labels[(labels < 0) | (labels >= size)]
        raise IndexError(f"label {int(wrong[0])} is out of bounds for {size} classes") from None
