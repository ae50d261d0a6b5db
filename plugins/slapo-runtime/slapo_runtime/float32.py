"""Compute float32 products and convolutions in full precision, or in TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_backends: Any = torch.backends  # type checkers do not know the attributes of its modules
_OPERATIONS = (
    _backends.cuda.matmul,
    _backends.cudnn.conv,
    _backends.cudnn.rnn,
    _backends.mkldnn.matmul,
    _backends.mkldnn.conv,
    _backends.mkldnn.rnn,
)


@contextlib.contextmanager
def float32_products(*, tf32: bool = False) -> Iterator[None]:
    """Compute float32 products in one precision within the block, despite global flags.

    TF32 keeps 10 bits of a factor, oneDNN's bfloat16 (``torch.set_float32_matmul_precision("medium")``) 7 bits. torch
    has two sets of these flags, and functions that raise if they disagree: both are set, and restored.

    Args:
        tf32: whether products may be rounded to TF32; False is full precision.
    """
    saved = [operation.fp32_precision for operation in _OPERATIONS]
    _set_all("ieee")  # the getters of the older flags do not raise then, except for convolutions
    matmul, convolutions = torch.get_float32_matmul_precision(), _older_flag_of_convolutions()
    try:
        _set_older_flags("high" if tf32 else "highest", convolutions=tf32)
        _set_all("tf32" if tf32 else "ieee")
        yield
    finally:
        _set_older_flags(matmul, convolutions=convolutions)
        _set_all("none")  # inherit from the backend, or from all backends
        for operation, precision in zip(_OPERATIONS, saved, strict=True):
            if operation.fp32_precision != precision:
                operation.fp32_precision = precision


def _set_all(precision: str) -> None:
    for operation in _OPERATIONS:
        operation.fp32_precision = precision


def _set_older_flags(matmul: str, *, convolutions: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    _backends.cudnn.allow_tf32 = convolutions


def _older_flag_of_convolutions() -> bool:
    """Return the older flag; torch raises if the newer one differs."""
    try:
        return bool(_backends.cudnn.allow_tf32)
    except RuntimeError:
        return True
