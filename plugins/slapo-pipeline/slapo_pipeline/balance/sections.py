"""One run of the untouched model without values, in sections: before the blocks, each of them, and after."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_core import TraceError
from slapo_core.spec.accelerators import fork_rng
from slapo_core.tracing import copied_model
from slapo_pipeline.balance.flops import flops_of

__all__ = ["Call", "Section", "Sections", "run_in_sections"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Section:
    """What was computed in a part of the run.

    Attributes:
        flops: of matrix products, convolutions and attention, forward only.
        parameters: those that it used, by ``id``.
        modules: paths of those that were called in it, without those called by another one of them.
    """

    flops: int = 0
    parameters: set[int] = field(default_factory=set)
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sections:
    """A run.

    Attributes:
        before: up to the first block, from the last cut before it.
        blocks: each with what runs between the block before and itself.
        after: from the last block to the next cut, or to the end.
    """

    before: Section
    blocks: tuple[Section, ...]
    after: Section


def run_in_sections(model: nn.Module, call: Call, blocks: Sequence[str], cuts: Sequence[str] = ()) -> Sections:
    """Run a copy of ``model`` and say what each part of it took.

    Args:
        model: untouched; it shares its parameters with the copy, and nothing happens to them.
        call: what it is called with; tensors without values do, and are those of the model's device.
        blocks: paths of the blocks, in the order of their list.
        cuts: paths of modules after which the model is cut already.

    Raises:
        TraceError: it raised, or does not call the blocks once each, one after the other.
    """
    # Buffers are copied, and what the forward sets on modules stays on the copy.
    copied = copied_model(model)
    clock = _Clock(copied, blocks, cuts)
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    mode = next((mode for mode in (getattr(each, "fake_mode", None) for each in tensors) if mode is not None), None)
    with mode or contextlib.nullcontext(), fork_rng(), torch.no_grad(), clock.watching(), clock:
        try:
            copied(*call[0], **call[1])
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"without values the model raises {type(error).__name__}: {error}",
                hint='balance="parameters" on a schedule without example inputs needs no run; or cut after single '
                'modules: sch["encoder.layer.5"].pipeline_split()',
            ) from error
    return clock.sections()


class _Clock(TorchDispatchMode):
    """Knows in which section the run is, and adds what is dispatched to it."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], cuts: Sequence[str]) -> None:
        super().__init__()
        self._model, self._blocks, self._cuts = model, tuple(blocks), tuple(cuts)
        self._ids = {id(parameter) for parameter in model.parameters()}
        self._sections = [Section() for _ in range(len(blocks) + 2)]
        self._now = 0  # 0: before; 1 + i: block i, or what lies between it and the one before; then: after
        self._done = 0  # blocks
        self._ended = False  # by a cut after the blocks
        self._inside = 0  # calls of modules that hold no block, and are going on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._ended:
            section = self._sections[self._now]
            section.flops += flops_of(func, args, kwargs or {}, out)
            leaves = pytree.tree_leaves((args, kwargs))
            section.parameters.update(self._ids.intersection(id(each) for each in leaves))
        return out

    def sections(self) -> Sections:
        if self._done != len(self._blocks):
            raise TraceError(f"the model does not call '{self._blocks[self._done]}'", path=self._blocks[self._done])
        before, *blocks, after = self._sections
        return Sections(before, tuple(blocks), after)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the calls of the blocks and of the modules that are cut already."""
        handles = []
        for index, path in enumerate(self._blocks):
            block = self._model.get_submodule(path)
            handles.append(block.register_forward_pre_hook(self._entering(index), prepend=True))
            handles.append(block.register_forward_hook(self._left(index)))
        above = {path[:end] for path in self._blocks for end, sign in enumerate(f"{path}.") if sign == "."} | {""}
        for path, module in self._model.named_modules():
            if path not in above:
                handles.append(module.register_forward_pre_hook(self._called(path), prepend=True))
                handles.append(module.register_forward_hook(self._returned))
        for path in self._cuts:
            if path not in self._blocks[:-1]:  # a cut between the blocks is refused before
                handles.append(self._model.get_submodule(path).register_forward_hook(self._cut))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, index: int) -> Any:
        def enter(_module: nn.Module, _args: Any) -> None:
            if index != self._done:
                path = self._blocks[index]
                how = "more than once" if index < self._done else f"before '{self._blocks[self._done]}'"
                raise TraceError(
                    f"the model calls '{path}' {how}: only blocks that run once, in the order of their list, can be "
                    "cut into stages",
                    path=path,
                    hint='cut after single modules: sch["encoder.layer.5"].pipeline_split()',
                )
            self._now = 1 + index

        return enter

    def _left(self, index: int) -> Any:
        def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
            self._done = index + 1
            self._now = 2 + index

        return leave

    def _called(self, path: str) -> Any:
        def call(_module: nn.Module, _args: Any) -> None:
            if not self._inside and not self._ended:
                self._sections[self._now].modules.append(path)
            self._inside += 1

        return call

    def _returned(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        self._inside -= 1

    def _cut(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        if self._done == 0:
            self._sections[0] = Section()
        elif self._done == len(self._blocks):
            self._ended = True
