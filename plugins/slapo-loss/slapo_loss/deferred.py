"""Defer the logits between a head and its loss: `DeferredLogits`.

Deferred logits know the hidden states, the head, and the elementwise operations and views of tokens that the model
applied. ``cross_entropy``, and ``log_softmax`` with ``nll_loss``, compute their loss in chunks of tokens. Any other
function computes the logits, once, and everything after it works on them: views share their memory; in-place operations
and gradients are as in the plain model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slapo_loss.deferred_functions import FUNCTIONS, METADATA, OF_GRAPH, PROPERTIES, VIEWS
from slapo_loss.deferred_values import ForwardCall, HeadTensors, LogitsValues, ValuelessLogits, member
from slapo_loss.private import without_dynamo, without_torch_function


class DeferredLogits(ValuelessLogits):
    """Stand for logits without values; see the module's docstring.

    Args:
        hidden: hidden states, with their features on the last axis.
        head: the layer.
        call: the forward that it is part of.

    """

    @staticmethod
    def __new__(cls, hidden: Tensor, head: HeadTensors, call: ForwardCall) -> DeferredLogits:
        classes = head.vocabulary.size
        return member(cls, LogitsValues(hidden, head, call, hidden.dim() - 1, classes, hidden.dtype))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredLogits({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __format__(self, specification: str) -> str:
        return repr(self)

    @classmethod
    @without_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, DeferredLogits)]
        name = getattr(func, "__name__", str(func))
        if all(one.computed is None for one in given):
            if func in PROPERTIES or name in METADATA or (func in OF_GRAPH and given[0].shared.call.is_over):
                with without_torch_function():
                    return func(*args, **kwargs)
            handler = VIEWS.get(name) if args and isinstance(args[0], DeferredLogits) else None
            handler = handler or FUNCTIONS.get(name)
            found = NotImplemented if handler is None else handler(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        by = f"Tensor.{func.__self__.__name__}" if name in ("__get__", "__set__") else name
        return func(*_computed(args, by), **_computed(kwargs, by))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(
            f"{func} was called below torch.Tensor's functions with deferred logits\n"
            "  hint: leave linear_cross_entropy out, or call it through torch.Tensor"
        )


def _computed(value: Any, by: str) -> Any:
    if isinstance(value, DeferredLogits):
        return value.compute(by)
    if type(value) is dict:
        return {key: _computed(one, by) for key, one in value.items()}
    return type(value)(_computed(one, by) for one in value) if type(value) in (list, tuple) else value
