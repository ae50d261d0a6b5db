"""What code that hides its torch calls (compiled code) asks about the ``verify`` that runs it."""

from __future__ import annotations

__all__ = ["dropout_is_off"]


def dropout_is_off() -> bool:
    """Whether ``verify`` has switched dropout off around this call.

    It does so by a torch-function mode, which sees what Python calls. Code that calls nothing, such as a kernel that
    drops elements itself, has to leave that out while this is true.
    """
    import torch

    if not torch._C._len_torch_function_stack():
        return False
    modes = torch.overrides._get_current_function_mode_stack()
    return any(getattr(mode, "slapo_switches_dropout_off", False) for mode in modes)
