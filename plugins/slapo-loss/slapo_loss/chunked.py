"""Cross entropy of a linear head in chunks of tokens: no tensor of all tokens by the whole vocabulary exists.

``rewrite: cross_entropy(between(hidden @ weight.T + bias), labels) -> chunks of it, and their gradients``

Where the loss is one number (``"mean"`` or ``"sum"``) a chunk's logits are made once: their gradient is known with
their log-sum-exp, so that the gradients of hidden states, weight and bias are made in the forward and scaled in the
backward. Where there is a loss per token the backward makes the logits again.

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
from torch.autograd.function import once_differentiable

from slapo_loss.private import add_product, assert_on_device, is_cast, keeps_graph, product

Between = Callable[[Tensor], Tensor]
"""Elementwise operations between the head and its loss, e.g. ``lambda z: z.float()``: logits -> logits of one shape."""

Gather = Callable[[Tensor], Tensor]
"""Gathers over the ranks that hold the vocabulary: (...) -> (ranks, ...)."""

CHUNK_BYTES = {"cpu": 64 << 20}
"""The bound of all that a chunk takes, by type of device: logits, and what their loss and gradient need besides."""

OTHER_CHUNK_BYTES = 512 << 20
"""The same elsewhere: products of 1,000 tokens keep a GPU busy, where those of 100 wait for its memory."""

_BLOCKS = 4
"""Logits take the bound but for one part in so many, which is for a block of tokens."""

_COPIES = {"in place": 0, "kernels": 0, "cast": 3, "between": 12}
"""Tensors of a block's size, in the type of the loss, that exist at a time."""

_TILE = 128
"""A GPU's products take as many rows at a time."""

_LEAST_SHARE = 1e-30
"""Probabilities of a rank's whole part of the vocabulary that are smaller count as this one in gradients."""


@dataclass(frozen=True)
class Vocabulary:
    """The part of a vocabulary that this process holds.

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
    """What `torch.nn.functional.cross_entropy` takes beside logits and labels.

    Args:
        ignore_index: label of a token that has no part in the loss.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: share of the uniform distribution in the target, 0 to 1.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def check(self) -> None:
        """Raise what torch raises for values that it does not take."""
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none' (got {self.reduction!r})")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0 (got {self.label_smoothing})")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    objective: Objective = Objective(),
    vocabulary: Vocabulary | None = None,
    between: Between | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute the cross entropy of ``hidden @ weight.T + bias`` in chunks of tokens.

    Args:
        hidden: (tokens, features).
        weight: (classes here, features); classes past the end of the vocabulary are padding.
        labels: (tokens,), of the whole vocabulary.
        bias: (classes here,).
        class_weight: (classes,), of the whole vocabulary.
        objective: reduction, label smoothing and the ignored label.
        vocabulary: what of it is here; None: all.
        between: elementwise operations on the logits.
        chunk: tokens whose logits exist at a time; None: as many as the bound of the device holds.

    Returns:
        a scalar, or (tokens,) for ``reduction="none"``.

    Raises:
        IndexError: a label is neither a class nor the ignored one; on a GPU, an assertion on the device.
    """
    objective.check()
    apply = _PerToken.apply if objective.reduction == "none" else _Reduced.apply
    settings = (objective, vocabulary or Vocabulary(weight.shape[0]), between, chunk)
    return _applied(apply, hidden, weight, bias, labels, class_weight, settings)  # type: ignore[no-any-return]


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocabulary: Vocabulary | None = None,
    between: Between | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each label, and the entropy of each distribution, in chunks of tokens.

    Args:
        hidden: (tokens, features).
        weight: (classes here, features).
        labels: (tokens,); an ignored one has log-probability 0.
        bias: (classes here,).
        temperature: by which logits are divided.
        ignore_index: the ignored label.
        vocabulary: what of it is here; None: all.
        between: elementwise operations on the logits, before the temperature.
        chunk: tokens whose logits exist at a time; None: as many as the bound of the device holds.

    Returns:
        log-probabilities (tokens,) and entropies (tokens,), in nats.
    """
    cooled = between if temperature == 1.0 else functools.partial(_cooled, between, temperature)
    settings = (Objective(ignore_index), vocabulary or Vocabulary(weight.shape[0]), cooled, chunk)
    return _applied(_LogProbs.apply, hidden, weight, bias, labels, None, settings)  # type: ignore[no-any-return]


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
    return device.type == "cuda" and dtype.itemsize <= 4 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _cooled(between: Between | None, temperature: float, logits: Tensor) -> Tensor:
    return (logits if between is None else between(logits)) / temperature


def _applied(apply: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """Call an autograd function as autocast would: the head in its type, losses in float32."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return apply(hidden, weight, bias, *rest)
    dtype = torch.get_autocast_dtype(kind)
    tensors = (one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in (hidden, weight, bias))
    *given, (objective, vocabulary, between, chunk) = rest
    under = functools.partial(_under_autocast, between, kind, dtype)
    with torch.autocast(kind, enabled=False):
        return apply(*tensors, *given, (objective, vocabulary, under, chunk))


def _under_autocast(between: Between | None, kind: str, dtype: torch.dtype, logits: Tensor) -> Tensor:
    if between is not None:
        with torch.autocast(kind, dtype=dtype):
            logits = between(logits)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Reduced(torch.autograd.Function):
    """One number, with its gradients made in the forward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        head, needs = _Head(*arguments, ways=("in place", "kernels")), ctx.needs_input_grad[:3]
        gradients = _Gradients(head, needs) if any(needs) else None
        norm, is_mean = head.target_weights.sum(), head.objective.reduction == "mean"
        total, mean = torch.zeros_like(norm), None
        if is_mean:
            mean = torch.where(head.kept.any(), norm.reciprocal(), 0.0)  # as torch: no label, no gradient
        is_late = head.hidden.dtype == torch.float16  # a mean may leave its range before the loss is scaled
        for part in head.chunks():
            targets = head.targets_of(part, None)
            logits, numbers = head.taken(part, targets if gradients is not None else None)
            total += head.losses(part, numbers).sum()
            if gradients is not None:
                gradients.add(part, logits, targets.factors if mean is None or is_late else targets.factors * mean)
        head.free()
        ctx.gradients, ctx.factor = gradients, mean if is_late else None
        return (total / norm if is_mean else total).to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("its gradients were used in another backward: backward(retain_graph=True) keeps them")
        is_kept = keeps_graph()
        if not is_kept:
            ctx.gradients = None
        scale = scale.to(gradients.dtype)
        return (*gradients.scaled(scale if ctx.factor is None else scale * ctx.factor, is_kept), None, None, None)


class _PerToken(torch.autograd.Function):
    """A number per token; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        head = _Head(*arguments, ways=("kernels",))
        losses, kept = head.kept.clone(), []
        for part in head.chunks():
            _, numbers = head.taken(part, None)
            losses[part] = head.losses(part, numbers)
            kept += [numbers.shift, numbers.log_sum]
        *tensors, ctx.settings = arguments
        ctx.save_for_backward(*tensors, *kept)
        return losses.to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scales: Tensor) -> Any:
        tensors, head = _again(ctx, "kernels")
        gradients = _Gradients(head, ctx.needs_input_grad[:3])
        for number, part in enumerate(head.chunks()):
            targets = head.targets_of(part, scales[part].to(head.dtype))
            logits = head.logits(part)
            head.to_gradient(part, logits, targets, _Numbers(*tensors[2 * number : 2 * number + 2]))
            gradients.add(part, logits, targets.factors)
        return (*gradients.scaled(None, False), None, None, None)


class _LogProbs(torch.autograd.Function):
    """A log-probability and an entropy per token; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        head = _Head(*arguments)
        log_probs, entropies, kept = head.kept.clone(), head.kept.clone(), []
        for part in head.chunks():
            _, numbers = head.taken(part, None, entropy=True)
            assert numbers.entropy is not None
            log_probs[part], entropies[part] = -head.losses(part, numbers), numbers.entropy
            kept += [numbers.shift, numbers.log_sum, numbers.entropy]
        *tensors, ctx.settings = arguments
        ctx.save_for_backward(*tensors, *kept)
        return log_probs.to(head.returned), entropies.to(head.returned)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_log_probs: Tensor, of_entropies: Tensor) -> Any:
        tensors, head = _again(ctx)
        gradients = _Gradients(head, ctx.needs_input_grad[:3])
        for number, part in enumerate(head.chunks()):
            targets = head.targets_of(part, -of_log_probs[part].to(head.dtype))
            logits = head.logits(part)
            shift, log_sum, entropy = tensors[3 * number : 3 * number + 3]
            numbers = _Numbers(shift, log_sum, entropy=entropy)
            head.to_gradient(part, logits, targets, numbers, of_entropies[part].to(head.dtype))
            gradients.add(part, logits, None)
        return (*gradients.scaled(None, False), None, None, None)


def _again(ctx: Any, *ways: str) -> tuple[tuple[Tensor, ...], _Head]:
    hidden, weight, bias, labels, class_weight, *kept = ctx.saved_tensors
    return tuple(kept), _Head(hidden, weight, bias, labels, class_weight, ctx.settings, ways=ways)


@dataclass
class _Numbers:
    """What a chunk's losses are made of, for each token: its log-sum-exp is ``shift + log_sum``.

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
class _Targets:
    """The gradient of a chunk's loss by its logits: ``factors * (probabilities - one_hot * of_label - uniform)``.

    Args:
        factors: for each token.
        of_label: for each token; 0 where its label is on another rank.
        uniform: for each token, of label smoothing.
    """

    factors: Tensor
    of_label: Tensor
    uniform: Tensor | None

    def divide(self, share: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Let probabilities be those of the classes here; return by what they must be multiplied for that."""
        share = share.clamp_min(_LEAST_SHARE)
        if dtype == torch.float16:  # its range has no room for quotients
            return share
        self.factors = self.factors * share
        self.of_label = self.of_label / share
        self.uniform = None if self.uniform is None else self.uniform / share
        return None


class _Head:
    """The arguments of a call, and what its chunks share.

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
        if self.way == "cast" and "kernels" in ways and has_kernels(hidden.dtype, hidden.device):
            self.way = "kernels"
        elif self.way == "cast" and "in place" in ways and self.dtype == hidden.dtype:
            self.way = "in place"
        self.block_bytes = CHUNK_BYTES.get(hidden.device.type, OTHER_CHUNK_BYTES) // _BLOCKS
        self._chunk = chunk or chunk_size(self.classes, hidden.dtype, hidden.device, self.way)
        self._chunk = max(1, min(self._chunk, hidden.shape[0]))
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
        for start in range(0, tokens, self._chunk):
            yield slice(start, min(start + self._chunk, tokens))

    def _blocks(self, part: slice) -> Iterator[tuple[slice, slice]]:
        """Divide a chunk: rows of its logits, and the tokens that they are of."""
        row = max(1, self.classes * self.dtype.itemsize * _COPIES[self.way])
        rows, count = part.stop - part.start, max(1, self.block_bytes // row)
        for start in range(0, rows, count):
            stop = min(start + count, rows)
            yield slice(start, stop), slice(part.start + start, part.start + stop)

    def logits(self, part: slice) -> Tensor:
        """Compute the logits of a chunk, in a buffer that all chunks share."""
        if self._buffer is None:
            aligned = 0 if self.hidden.device.type == "cpu" else -self.classes % _TILE
            self._buffer = self.hidden.new_empty((self._chunk, self.classes + aligned))[:, : self.classes]
        hidden, out = self.hidden[part], self._buffer[: part.stop - part.start]
        weight = self.weight[: self.classes].t()
        if self.bias is None:
            return torch.mm(hidden, weight, out=out)
        return torch.addmm(self.bias[: self.classes], hidden, weight, out=out)

    def free(self) -> None:
        """Free the buffer of logits, for what runs until the backward."""
        self._buffer = None

    def taken(self, part: slice, targets: _Targets | None, *, entropy: bool = False) -> tuple[Tensor, _Numbers]:
        """Compute the numbers of a chunk; given targets, its logits become their gradient, without its factors."""
        logits = self.logits(part)
        is_split = self.vocabulary.gather is not None
        found: list[_Numbers] = []
        if not self.classes:  # a rank that holds padding
            nothing = logits.new_full((logits.shape[0],), -torch.inf, dtype=self.dtype)
            zeros = torch.zeros_like(nothing)
            sums = zeros if self.objective.label_smoothing else None
            found.append(_Numbers(nothing, zeros, nothing, sums, zeros if entropy else None))
        elif self.way == "kernels":
            found.append(self._numbers(logits, part, *_kernels().log_sum_exp(logits)))
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

    def _block(self, block: Tensor, rows: slice, tokens: slice, targets: _Targets | None, entropy: bool) -> _Numbers:
        """Compute the numbers of a block; given targets, leave what becomes its gradient."""
        leaf, shown = self._shown(block, targets is not None)
        values = shown.detach()
        log_probs = values.log_softmax(1, dtype=self.dtype)
        numbers = self._numbers(values, tokens, values.amax(1).to(self.dtype), -log_probs.amax(1))
        if entropy:
            least = torch.finfo(self.dtype).min  # of what is masked: times a probability of 0
            numbers.entropy = -(log_probs.exp() * log_probs.clamp_min_(least)).sum(1)
        elif targets is not None and self.way == "cast":
            block.copy_(log_probs.exp_())
        elif targets is not None:
            self._add_targets(log_probs.exp_(), tokens, rows, targets)
            block.copy_(_through(leaf, shown, log_probs))
        return numbers

    def _softmax(self, logits: Tensor, part: slice) -> _Numbers:
        """Compute the softmax of logits in place."""
        shift = logits.amax(1)
        numbers = self._numbers(logits, part, shift, shift)
        torch.softmax(logits, 1, out=logits)
        numbers.log_sum = -logits.amax(1).log()
        return numbers

    def _numbers(self, values: Tensor, tokens: slice, shift: Tensor, log_sum: Tensor) -> _Numbers:
        target = values.gather(1, self.labels[tokens, None]).squeeze(1).to(self.dtype)
        target = torch.where(self.is_local[tokens], target, -torch.inf)
        found = _Numbers(shift, log_sum, target)
        if self.objective.label_smoothing:
            weight = self.class_weight
            found.sum = values.sum(1, dtype=self.dtype) if weight is None else values.to(self.dtype) @ weight
        return found

    def _exchanged(self, own: _Numbers) -> _Numbers:
        """Exchange a chunk's numbers: those of the whole vocabulary."""
        gather = self.vocabulary.gather
        assert gather is not None
        assert own.target is not None
        names = [name for name in ("sum", "entropy") if getattr(own, name) is not None]
        gathered = gather(torch.stack([own.shift, own.log_sum, own.target, *(getattr(own, name) for name in names)]))
        shifts, log_sums = gathered[:, 0], gathered[:, 1]
        shift = shifts.amax(0)
        of_ranks = log_sums + (shifts - shift)
        log_sum = of_ranks.logsumexp(0)
        found = _Numbers(shift, log_sum, gathered[:, 2].amax(0))
        found.share = torch.exp(own.log_sum + (own.shift - shift) - log_sum)
        for place, name in enumerate(names, start=3):
            if name == "sum":
                found.sum = gathered[:, place].sum(0)
            else:
                log_shares = of_ranks - log_sum
                shares = log_shares.exp()
                found.entropy = torch.where(shares > 0, shares * (gathered[:, place] - log_shares), 0.0).sum(0)
        return found

    def losses(self, part: slice, numbers: _Numbers) -> Tensor:
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

    def targets_of(self, part: slice, scales: Tensor | None) -> _Targets:
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
        return _Targets(factors, share, uniform)

    def to_gradient(
        self,
        part: slice,
        logits: Tensor,
        targets: _Targets,
        numbers: _Numbers,
        of_entropies: Tensor | None = None,
    ) -> None:
        """Turn logits into their gradient, without its factors unless there is one of entropies."""
        if self.way == "kernels" and self.classes:
            labels, uniform, dtype = self.labels[part], targets.uniform, torch.float32
            smoothing = uniform if uniform is None else uniform.to(dtype)
            weight = None if uniform is None else self.class_weight
            numbers_of = numbers.shift.to(dtype), numbers.log_sum.to(dtype)
            _kernels().to_gradient(logits, *numbers_of, labels, targets.of_label.to(dtype), smoothing, weight)
            return
        for rows, tokens in self._blocks(part) if self.classes else ():
            self._block_to_gradient(logits[rows], rows, tokens, targets, numbers, of_entropies)

    def _block_to_gradient(
        self,
        block: Tensor,
        rows: slice,
        tokens: slice,
        targets: _Targets,
        numbers: _Numbers,
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
        """Let logits pass what lies between them and their loss."""
        if self.between is None or self.way != "between":
            return None, block
        with torch.enable_grad() if differentiated else contextlib.nullcontext():
            leaf = block.detach().requires_grad_(differentiated)
            return (leaf if differentiated else None), self.between(leaf)

    def _add_targets(
        self, values: Tensor, tokens: slice, rows: slice, targets: _Targets, of_target: Tensor | None = None
    ) -> None:
        """Subtract the parts of a gradient from probabilities.

        Args:
            values: the probabilities.
            tokens: that they are of.
            rows: of the targets.
            targets: the parts.
            of_target: probabilities of the labels in the type of the loss, where ``values`` are of a smaller one: that
                of a label is near 1, and their difference is what is learned.
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


def _kernels() -> Any:
    from slapo_loss import kernels

    return kernels


def _through(leaf: Tensor | None, shown: Tensor, gradient: Tensor) -> Tensor:
    if leaf is None:
        return gradient
    (found,) = torch.autograd.grad(shown, leaf, gradient.to(shown.dtype))
    return found


def _joined(found: list[_Numbers]) -> _Numbers:
    def of(name: str) -> Tensor | None:
        return None if getattr(found[0], name) is None else torch.cat([getattr(one, name) for one in found])

    return _Numbers(*(of(name) for name in ("shift", "log_sum", "target", "sum", "entropy")))  # type: ignore[arg-type]


def _check_labels(labels: Tensor, size: int) -> None:
    is_right = ((labels >= 0) & (labels < size)).all()
    try:
        assert_on_device(is_right, f"a label is out of bounds for {size} classes")
    except RuntimeError:
        wrong = labels[(labels < 0) | (labels >= size)]
        raise IndexError(f"label {int(wrong[0])} is out of bounds for {size} classes") from None


class _Sums:
    """Sums in a type of up to twice the size of what they become, half of them in its memory.

    Args:
        like: what they become: its shape, type and device.
        dtype: of the sums.
        block_bytes: of what is cast at a time.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, block_bytes: int) -> None:
        self._found = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        self._parts, self._block_bytes = [self._found], block_bytes
        if dtype != like.dtype:
            rows, columns = like.shape
            half = rows * like.dtype.itemsize // dtype.itemsize
            memory = self._found.view(-1)[: half * columns * dtype.itemsize // like.dtype.itemsize]
            rest = torch.zeros((rows - half, columns), dtype=dtype, device=like.device)
            self._parts = [memory.view(dtype).view(half, columns), rest]

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right`` to the first rows."""
        start = 0
        for part in self._parts:
            columns = left[:, start : start + part.shape[0]]
            add_product(part[: columns.shape[1]], columns, right, self._block_bytes)
            start += part.shape[0]

    def scaled(self, factor: Tensor | None, is_kept: bool) -> Tensor:
        """Return the sums in their final type, times a factor.

        Args:
            factor: a scalar; None: 1.
            is_kept: whether they are asked for again.
        """
        if len(self._parts) == 1 and not is_kept:
            return self._found if factor is None else self._found.mul_(_one_axis(factor))
        found, start = torch.empty_like(self._found) if is_kept else self._found, 0
        for part in self._parts:
            step = max(1, self._block_bytes // max(1, part.shape[1] * part.dtype.itemsize))
            for block in part.split(step):  # each ends before the next begins, in the same memory, too
                cast = block.to(found.dtype, copy=True) if factor is None else (block * factor).to(found.dtype)
                found[start : start + block.shape[0]] = cast
                start += block.shape[0]
        return found


def _one_axis(factor: Tensor) -> Tensor:
    """Let a scalar keep its type in products: on a GPU, one without axes is first cast to the other's."""
    return factor if factor.device.type == "cpu" else factor.reshape(1)


class _Gradients:
    """The gradients of hidden states, weight and bias, chunk by chunk."""

    def __init__(self, head: _Head, needs: Any) -> None:
        hidden, weight, bias = needs
        self._head, self.dtype = head, head.dtype
        given = head.weight.dtype
        is_one = head.hidden.shape[0] <= head._chunk and given != torch.float16  # unscaled sums may leave its range
        sums = given if is_one else torch.promote_types(given, torch.float32)
        self._hidden = torch.empty_like(head.hidden, memory_format=torch.contiguous_format) if hidden else None
        self._weight = _Sums(head.weight, sums, head.block_bytes) if weight else None
        has_bias = bias and head.bias is not None
        self._bias = (
            torch.zeros(head.weight.shape[:1], dtype=head.dtype, device=head.weight.device) if has_bias else None
        )

    def add(self, part: slice, logits: Tensor, factors: Tensor | None) -> None:
        """Add a chunk's: the gradients of its logits are ``factors[:, None] * logits``."""
        head = self._head
        hidden, classes = head.hidden[part], head.classes
        of_rows = None if factors is None else factors[:, None]
        if self._weight is not None:
            self._weight.add(logits, hidden if of_rows is None else (hidden * of_rows).to(hidden.dtype))
        if self._bias is not None:
            ones = torch.ones_like(logits[:, :1]) if of_rows is None else of_rows.to(logits.dtype)
            add_product(self._bias[:classes, None], logits, ones, head.block_bytes)
        if self._hidden is not None:
            self._hidden[part] = product(logits, head.weight[:classes], of_rows)

    def scaled(self, factor: Tensor | None, is_kept: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients, times a factor.

        Args:
            factor: a scalar; None: 1.
            is_kept: whether they are asked for again.
        """
        hidden, bias = self._hidden, self._bias
        if hidden is not None and factor is not None:
            of_all = _one_axis(factor)
            hidden = torch.mul(hidden, of_all, out=torch.empty_like(hidden)) if is_kept else hidden.mul_(of_all)
        if bias is not None:
            bias = (bias if factor is None else bias * factor).to(self._head.weight.dtype)
        return hidden, None if self._weight is None else self._weight.scaled(factor, is_kept), bias
