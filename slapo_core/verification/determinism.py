"""The fixed conditions of a run: dropout off, known seeds, backward in this thread, the caller's state put back."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

__all__ = ["fixed_conditions", "switch_dropout_off"]

_DROPOUT = {
    F.alpha_dropout,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.feature_alpha_dropout,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.dropout,
    torch.dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
}
_SDPA_DROPOUT_POSITION = 4  # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)


def switch_dropout_off(model: nn.Module) -> None:
    """Set every dropout probability of torch's own modules to 0; for a copy that nobody else uses."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0


class _NoDropout(TorchFunctionMode):
    """Dropout called as a function returns its input, whatever module calls it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is torch.native_dropout:
            source = args[0] if args else kwargs["input"]
            return source, torch.ones_like(source, dtype=torch.bool)
        if func is F.scaled_dot_product_attention:
            args = (*args[:_SDPA_DROPOUT_POSITION], *((0.0,) if len(args) > _SDPA_DROPOUT_POSITION else ()), *args[5:])
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        elif func is F.multi_head_attention_forward:
            call = inspect.signature(func).bind(*args, **kwargs)
            call.arguments["dropout_p"] = 0.0
            args, kwargs = call.args, call.kwargs
        return func(*args, **kwargs)


@contextlib.contextmanager
def fixed_conditions(seed: int) -> Iterator[None]:
    """Run the block reproducibly, and leave every random number generator as it was.

    Backward runs in the calling thread, where the mode that switches dropout off holds, so that a forward that
    activation checkpointing recomputes is computed like the first time.

    Args:
        seed: for torch's, Python's and, where it is imported, numpy's global generator.
    """
    python_state = random.getstate()
    numpy_random: Any = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    try:
        with torch.random.fork_rng(), torch.autograd.set_multithreading_enabled(False), _NoDropout():
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy_random is not None:
                numpy_random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
