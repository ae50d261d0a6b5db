"""Gather early-read parameters under ``overlap_param_gather``.

Megatron's distributed optimizer then leaves the all-gather of new values to hooks in front of each module's forward,
which wait for the module's own parameters. Reads by another module, e.g. a traced graph or a parent that
computes with the weight of a child, would be the values of the step before, in the parts of other replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_megatron.private import is_compiled, tree_leaves


class Gathering:
    """Watch the first forward of a chunk, and gather its early reads before every later one.

    Args:
        chunk: wrapped.
    """

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self._early: list[Any] | None = None  # buckets, once they are known

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Wrap a forward of the chunk; afterwards all gathers are complete."""
        if self._early is None:
            with self._watched():
                yield
        else:
            for group in self._early:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            yield
        for group in _each_once(self._chunk.param_to_bucket_group.values()):
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        model: nn.Module = self._chunk.module
        buckets: dict[nn.Parameter, Any] = self._chunk.param_to_bucket_group
        if any(map(is_compiled, model.modules())):
            yield  # what compiled code reads is not seen
            self._early = _each_once(buckets.values())
            return
        reads = _Reads({id(one) for one in buckets})
        handles = [one.register_forward_pre_hook(reads.called) for one in model.modules()]
        try:
            with reads:
                yield
        finally:
            for handle in handles:
                handle.remove()
        self._early = _each_once(group for one, group in buckets.items() if not reads.is_late(one))


class _Reads(TorchFunctionMode):
    """Which parameters torch's functions are given, and whether a module that holds them was called before."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self._watched, self._ready = watched, set[int]()
        self._early, self._late = set[int](), set[int]()

    def called(self, module: nn.Module, _: Any) -> None:
        self._ready.update(id(one) for one in module.parameters(recurse=False))

    def is_late(self, parameter: nn.Parameter) -> bool:
        """Whether it was read, and never before its module was called."""
        return id(parameter) in self._late - self._early

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)):
            if id(one) in self._watched:
                (self._late if id(one) in self._ready else self._early).add(id(one))
        return func(*args, **(kwargs or {}))


def _each_once(groups: Any) -> list[Any]:
    return list({id(group): group for group in groups}.values())
