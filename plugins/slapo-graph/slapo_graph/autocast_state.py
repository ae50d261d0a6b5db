"""The state of gradients and autocast, which graphs switch where the recorded code did."""

from __future__ import annotations

import torch

from slapo_graph.private import set_grad_enabled

DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu")
State = tuple[bool, tuple[tuple[bool, torch.dtype], ...], bool]


def state() -> State:
    """Return the modes of gradients and of autocast for each kind of device."""
    return (
        torch.is_grad_enabled(),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES),
        torch.is_autocast_cache_enabled(),
    )


def set_state(grad: bool, autocast: tuple[tuple[bool, torch.dtype], ...], cache: bool) -> None:
    """Switch to a state of :func:`state`.

    Clear the autocast cache at the end of the outermost region, as torch does: cached casts may predate the optimizer's
    step, or have been made under ``no_grad``. Inside of a region of the caller they stay until its end.
    """
    is_graded_again = grad and not torch.is_grad_enabled()
    set_grad_enabled(grad)
    for kind, (enabled, dtype) in zip(DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)
    if torch.compiler.is_compiling() or (any(enabled for enabled, _ in autocast) and not is_graded_again):
        return
    torch.autocast_increment_nesting()
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
