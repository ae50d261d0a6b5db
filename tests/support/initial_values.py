"""A second opinion on initial values: the initializers themselves, run on the whole tensor, with numbers in blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_core.layout import Layout
from slapo_runtime.initialization.initializers import Rerun, copy_on_meta
from slapo_runtime.initialization.programs import blocks, record, seed_of

_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class InBlocks(TorchDispatchMode):
    """Draws what an initializer draws block by block, as a program does."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DRAWS or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        generator = torch.Generator()
        for number, box in enumerate(blocks(tuple(args[0].shape))):
            generator.manual_seed(seed_of(f"{self._key}:{number}"))
            part = args[0][tuple(slice(start, start + length) for start, length in box)]
            func(part, *args[1:], generator=generator)
        return args[0]


def differences(model: nn.Module) -> tuple[int, list[str]]:
    """How many tensors on the meta device have a program, and the names of those that it gives other values."""
    programs = record(model)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        again, wrong = Rerun(copy_on_meta(model)), []
        for name, program in programs.items():
            key = f"0:{name}"
            with InBlocks(key):
                expected = again.value(name, program.shape, 0)
            value = program.shard(Layout(name, program.shape), None, key)
            if expected is None or value.dtype != expected.dtype or not torch.equal(value, expected):
                wrong.append(name)
    return len(programs), wrong
