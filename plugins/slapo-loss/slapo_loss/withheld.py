"""Withhold logits of a forward whose loss is computed: `WithheldLogits`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slapo_core.errors import SlapoError
from slapo_loss.private import without_torch_function


class WithheldError(SlapoError, RuntimeError):
    """Report the use of logits that the forward did not compute.

    What to do: ``linear_cross_entropy(keep_logits=True)``, or ``slapo_loss.log_probs``.
    """


def withheld_error(path: str = "", use: str = "") -> WithheldError:
    """Return the error for a use of logits that were not computed.

    Args:
        path: of the head.
        use: name of the function.
    """
    head = f"sch['{path}']" if path else "sch[head]"
    return WithheldError(
        f"{use or 'this'} needs the logits{f' of {path!r}' if path else ''}, which this forward did not compute: its "
        "loss was taken of the hidden states, in chunks",
        path=path or None,
        hint=f"{head}.linear_cross_entropy(keep_logits=True) computes them besides; slapo_loss.log_probs(...) gives "
        "log-probabilities and entropies in chunks; in evaluation the model gives logits",
    )


class WithheldLogits(Tensor):
    """Stand for logits: carried, moved, cast and pickled, but not computed with.

    Args:
        shape: of the logits.
        dtype: of the logits.
        device: of the logits.
        path: of the head.
    """

    slapo_withheld = "its values are not computed where the loss is: keep_logits=True computes them"
    path: str

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, path: str = "") -> WithheldLogits:
        self: WithheldLogits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=device, requires_grad=False
        )
        self.path = path
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WithheldLogits({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: Any) -> WithheldLogits:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return WithheldLogits, (self.shape, self.dtype, self.device, self.path)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name in _ATTRIBUTES:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        own = args[0] if args and isinstance(args[0], WithheldLogits) else None
        if own is not None and name in _CARRIES:
            moved = func(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **(kwargs or {}))
            return WithheldLogits(own.shape, moved.dtype, moved.device, own.path)
        raise withheld_error("" if own is None else own.path, name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise withheld_error(use=str(func))


_ATTRIBUTES = frozenset(
    (
        "__format__", "__hash__", "__len__", "_backward_hooks", "_base", "_version", "device", "dim", "dtype",
        "element_size", "get_device", "grad", "grad_fn", "is_complex", "is_contiguous", "is_cpu", "is_cuda",
        "is_floating_point", "is_inference", "is_leaf", "is_meta", "is_mps", "is_mtia", "is_nested", "is_quantized",
        "is_sparse", "is_sparse_csr", "is_xla", "is_xpu", "itemsize", "layout", "names", "nbytes", "ndim",
        "ndimension", "nelement", "numel", "output_nr", "requires_grad", "retains_grad", "shape", "size", "stride",
    )
)  # fmt: skip
_CARRIES = frozenset(
    (
        "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "detach_", "double", "float", "half", "pin_memory",
        "requires_grad_", "to", "type",
    )
)  # fmt: skip
"""What runtimes do to every tensor of an output: moving it, casting it, taking it out of the graph."""
