"""The server that ranks are forked from: it imports their modules once, when it imports this one."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable

VARIABLE = "SLAPO_RANK_SERVER_MODULES"
"""The environment variable with the names of the modules; set for the server alone."""


def import_modules(names: Iterable[str]) -> str | None:
    """Import modules until one initializes CUDA, and return its name; those not installed are left out.

    A process with CUDA cannot be forked: its children can use no GPU.
    """
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return name
    return None


initializes_cuda: str | None = None
"""The module that initialized CUDA in the server, which ranks then refuse to start from."""

if VARIABLE in os.environ:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that torch.cuda.is_available() leaves the driver alone
    initializes_cuda = import_modules(os.environ.pop(VARIABLE).split(","))
