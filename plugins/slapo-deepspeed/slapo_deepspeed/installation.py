"""Find the installed DeepSpeed without importing it, and examine it for ``slapo doctor``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slapo_core.hookspecs import Fact, Problem
from slapo_runtime.installed import Runtime

RUNTIME = Runtime("deepspeed", "slapo-deepspeed", "deepspeed", tested="0.19")


def examine() -> Iterator[Fact | Problem]:
    """Versions, the accelerator that DeepSpeed will choose, and what its compiled operators need."""
    yield from RUNTIME.facts()
    device = _device()
    chosen = os.environ.get("DS_ACCELERATOR")
    yield Fact("accelerator", f"{chosen or device} ({'found' if chosen is None else f'DS_ACCELERATOR={chosen}'})")
    if chosen not in (None, "", "cpu", device):
        yield Problem(
            f"DS_ACCELERATOR={chosen}, but torch finds no such device (it finds {device})",
            f"unset DS_ACCELERATOR, or export DS_ACCELERATOR={device}",
        )
    yield from _compilers(chosen or device)
    yield from _broken_builds()


def _device() -> str:
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if kind is None else kind.type


def _compilers(device: str) -> Iterator[Fact | Problem]:
    """Operators of DeepSpeed are compiled when they are first used; on CPUs this plugin uses none of them."""
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    yield Fact("C++ compiler", found or "none")
    if device == "cuda":
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        nvcc = shutil.which("nvcc") or (home and shutil.which("nvcc", path=str(Path(home) / "bin")))
        yield Fact("nvcc", nvcc or "none")
        missing = [name for name, path in (("a C++ compiler", found), ("nvcc", nvcc)) if not path]
    elif device == "cpu":
        if not found:
            yield Fact(
                "without a C++ compiler", "ZeRO and pipelines run; offloading with Adam of the configuration does not"
            )
        return
    else:
        missing = [] if found else ["a C++ compiler"]
    if missing:
        yield Problem(
            f"DeepSpeed compiles its own Adam at first use; not found: {', '.join(missing)}",
            'optimizer=lambda params: torch.optim.AdamW(params, ...) of build, or "torch_adam": true among '
            '"optimizer.params" of the configuration; or install it, and set CUDA_HOME',
        )


def _broken_builds() -> Iterator[Problem]:
    """A build that was killed leaves a lock file, for which the next one waits without end."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(given) if given else Path(os.path.expanduser("~/.cache/torch_extensions"))
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        yield Problem(
            f"{lock.parent.name} is being compiled, or was when its process was killed: the next one waits for "
            f"{lock} to vanish",
            f"rm {lock}  (if nothing compiles it now)",
        )
