"""TRL's trainers: their forward runs beneath the steps at the root, and calls the head; adapters stay as scheduled.

TRL sets a forward on the model that runs the backbone and multiplies by the weight of the head, past its module. Here
that forward comes beneath what steps put around the root, and gets the numbers of each token from calls of the head.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slapo_core import ArgumentError
from slapo_core.internals import forwards, has_steps

_BYTES = 256 << 20
"""Of the logits that exist at a time."""
_FUNCTION = "_ChunkedLogProbFunction"
"""The name by which TRL's forward calls what multiplies by the head's weight."""


@contextlib.contextmanager
def scheduled_adapters(model: Any) -> Iterator[None]:
    """Let a trainer, while it is made, find the adapter ``"ref"`` that the schedule knows, in place of adding it.

    Args:
        model: of the schedule; a model without adapters of peft is left alone.
    """
    if not hasattr(model, "peft_config"):
        yield
        return

    def add_adapter(name: str, *_: Any, **__: Any) -> None:
        if name not in model.peft_config:
            raise ArgumentError(
                f"the trainer adds the adapter '{name}', a copy of 'default', but the steps of the schedule were "
                "applied without it",
                hint=f"model.add_adapter('{name}', model.peft_config['default']) before create_schedule(model), and "
                f'the steps at both: sch["...q_proj.lora_B.*"].shard("weight", axis=0)',
            )

    model.add_adapter = add_adapter
    try:
        yield
    finally:
        del model.add_adapter


def run_steps(args: Any, *models: Any) -> None:
    """Have TRL's forwards run the steps at the root and at the head; models without either keep theirs.

    Args:
        args: of the trainer.
        models: trained ones and references; None is left out.

    Raises:
        ArgumentError: a step replaced the forward of the root, or an argument's loss is not one of calls of the head.
    """
    for model in models:
        if model is not None:
            _run_steps(args, model.get_base_model() if hasattr(model, "peft_config") else model)


def _run_steps(args: Any, model: Any) -> None:
    function: Any = getattr(vars(model).get("forward"), "__func__", None)
    is_fused = getattr(getattr(function, "__code__", None), "co_name", "") == "_fused_forward"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    calls_head = head is not None and has_steps(head)
    if calls_head and getattr(args, "loss_type", None) == "chunked_nll":  # of releases before 1.15
        raise ArgumentError(
            "loss_type='chunked_nll' reads the weight of the head past the steps at it", hint='loss_type="nll"'
        )
    if calls_head and (getattr(args, "entropy_coef", None) or getattr(args, "use_adaptive_entropy", None)):
        raise ArgumentError(
            "entropy_coef takes gradients of entropies, which have none where steps are at the head",
            hint="entropy_coef=0.0, or leave the head without steps",
        )
    if not is_fused:
        return
    free = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    own = free["original_forward"].cell_contents
    is_wrapped = isinstance(own, forwards.ModuleForward)
    if is_wrapped and own.base is not None and not own.has_own:
        raise ArgumentError(
            f"a step replaced the forward of this {type(model).__name__}, which the trainer does not call: it calls "
            "the model without its head, and then the head",
            hint='apply it below the root: sch["model"], sch["lm_head"]',
        )
    if not is_wrapped and not calls_head:
        return
    bottom = own.bottom if is_wrapped else getattr(own, "__func__", None)
    forward = MethodType(_through_steps(function, free, bottom, calls_head), model)
    if is_wrapped:
        own.set_base(forward)
    vars(model)["forward"] = own if is_wrapped else forward


def _through_steps(
    function: FunctionType, free: dict[str, CellType], bottom: Callable[..., Any] | None, calls_head: bool
) -> Callable[..., Any]:
    """Return TRL's forward with the numbers of a head that is called.

    Args:
        function: TRL's.
        free: its free variables.
        bottom: the forward beneath all steps, which takes the module first; None for the one it has.
        calls_head: whether steps are at the head.
    """

    @functools.wraps(function)
    def forward_through_steps(self: Any, *args: Any, **kwargs: Any) -> Any:
        names, cells = function.__globals__, dict(free)
        if calls_head:
            names = {**names, _FUNCTION: _HeadCalls(self)}
        if bottom is not None:
            cells["original_forward"] = CellType(functools.partial(bottom, self))
        called = FunctionType(function.__code__, names, function.__name__, function.__defaults__, tuple(cells.values()))
        called.__kwdefaults__ = function.__kwdefaults__
        return called(self, *args, **kwargs)

    return forward_through_steps


class _HeadCalls:
    """Stand for TRL's function of a head's weight: the numbers of each token, of calls of the head.

    Args:
        model: whose head it is.
    """

    def __init__(self, model: Any) -> None:
        self._head = model.get_output_embeddings()
        self._classes = model.config.get_text_config().vocab_size

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return log-probabilities, entropies, ``log(sum(p ** 2))``, mean logits, and whether labels are the first.

        Arguments as of TRL's function: ``hidden`` (tokens, features), ``labels`` (tokens,).
        """

        def logits(part: Tensor) -> Tensor:
            found: Tensor = self._head(part)
            if found.shape[-1] != self._classes:
                raise ArgumentError(
                    f"the head gives {found.shape[-1]} of {self._classes} logits",
                    hint='sch["lm_head"].linear_cross_entropy(), or sync("fwd_post", "all_gather")',
                )
            found = found if found.dtype == torch.float64 else found.float()
            found = found * scale
            return (found if softcap is None else softcap * torch.tanh(found / softcap)) / temperature

        def numbers(part: Tensor, labels: Tensor) -> tuple[Tensor | None, ...]:
            found = logits(part)
            return (_log_probs(found, labels), *_statistics(found, labels, outputs))

        count = max(1, _BYTES // (4 * self._classes))
        if torch.is_grad_enabled() and self._defers():
            with torch.no_grad():
                parts = zip(hidden.split(count), labels.split(count), strict=True)
                found = _joined([numbers(*part) for part in parts])
            return (_log_probs(logits(hidden), labels), *found[1:])
        parts = zip(hidden.split(count), labels.split(count), strict=True)
        return _joined([checkpoint(numbers, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])

    def _defers(self) -> bool:
        """Return whether ``linear_cross_entropy`` takes the loss of this head without logits."""
        wrappers = forwards.ModuleForward.of(self._head).wrappers
        return self._head.training and any(getattr(one, "slapo_gathers_output", False) for one in wrappers)


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(logits, labels, reduction="none")


def _statistics(logits: Tensor, labels: Tensor, outputs: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    logits = logits.detach()
    log_probs = logits.log_softmax(-1)
    entropy = torch.special.entr(log_probs.exp()).sum(-1) if "entropy" in outputs else None
    squares = (2 * log_probs).logsumexp(-1) if "log_sum_sq_probs" in outputs else None
    mean = logits.mean(-1) if "mean_logits" in outputs else None
    is_first = logits.argmax(-1) == labels if "is_top1" in outputs else None
    return entropy, squares, mean, is_first


def _joined(parts: list[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    return tuple(None if found[0] is None else torch.cat(found) for found in zip(*parts, strict=True))  # type: ignore[arg-type]
