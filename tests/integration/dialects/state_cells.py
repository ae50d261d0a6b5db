"""The cells of the matrix of states: a layout that goes on where another one was saved."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from slapo_runtime.correspondence.storage import optimizer_storage
from slapo_runtime.weights.optimizer_state import OptimizerState
from slapo_testing import run_ranks
from tests.integration.cells import Cell
from tests.integration.dialects.layouts import LAYOUTS, Trained, batch, build, replica_of, train_plain, world_size

__all__ = ["AFTER", "BEFORE", "CLOSE", "DIRECTORY", "StateCell", "save", "save_on_ranks"]

BEFORE, AFTER = 2, 5
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-6}
"""Of losses, norms, weights and moments of size 1: what sums in another order make of five steps."""

EVERYTHING = bool(os.environ.get("SLAPO_TEST_WHOLE"))

SAMPLES = 16  # that were trained on when it was saved

DIRECTORY = "SLAPO_SAVED_STATES"
"""The environment variable with the directory of the checkpoints."""


@dataclass
class Position:
    """A place in the data, which is saved and resumed with an engine."""

    samples: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.samples = state["samples"]


@dataclass(frozen=True)
class StateCell(Cell):
    """Load what a layout saved after two steps, and train for three more.

    Args:
        family: the layout that loads.
        mesh: the layout that saved.
    """

    def __str__(self) -> str:
        return f"{self.family} from {self.mesh}"

    @property
    def world_size(self) -> int:
        return world_size(self.family)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if _is_torch(self.family) and _is_torch(self.mesh) else torch.float32

    def differences(self) -> Iterator[str]:
        """What is not that of the uninterrupted training."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is left unused, nothing is lacking
            engine, position = _quietly_built(self.family, self.dtype, seed=7), Position()
            engine.attach("position", position)
            engine.load(_place(self.mesh, self.dtype))
        if (engine.steps, position.samples) != (BEFORE, SAMPLES):
            yield f"loaded after {engine.steps} steps and {position.samples} samples, not {BEFORE} and {SAMPLES}"
        yield from _draws(engine, self.mesh)
        yield from _state(engine, BEFORE, self.dtype)
        for step in range(BEFORE, AFTER):
            yield from _step(engine, step, self.dtype)
        engine.check_replicas()
        yield from _state(engine, AFTER, self.dtype)
        engine.close()


def save_on_ranks(cells: Iterable[StateCell]) -> None:
    """Write the checkpoints that cells load, in one launch for each number of ranks."""
    needed = {(world_size(cell.mesh), cell.mesh, cell) for cell in cells}
    for size, group in groupby(sorted(needed, key=lambda one: one[:2]), key=lambda one: one[0]):
        run_ranks(save, [cell for _, _, cell in group], world_size=size, timeout=600)


def save(cells: Sequence[StateCell]) -> None:
    """Train the layouts whose checkpoints cells load, and write these, on every rank of them."""
    torch.set_num_threads(1)
    for layout, dtype in dict.fromkeys((cell.mesh, cell.dtype) for cell in cells):
        engine = _quietly_built(layout, dtype)
        for step in range(BEFORE):
            assert not (found := list(_step(engine, step, dtype))), (layout, found)
        torch.manual_seed(_seed(replica_of(engine)[0]))
        engine.attach("position", Position(SAMPLES))
        asynchronous = dtype == torch.float32 and (EVERYTHING or "ZeRO" in layout)  # a worker for each rank
        pending = engine.save(_place(layout, dtype), asynchronous=asynchronous)
        if pending is not None:
            pending.wait()
        engine.close()


def _is_torch(layout: str) -> bool:
    return LAYOUTS[layout][0] == "torch"


def _place(layout: str, dtype: torch.dtype) -> Path:
    return Path(os.environ[DIRECTORY], str(dtype).removeprefix("torch."), layout.replace(" ", ""))


def _quietly_built(layout: str, dtype: torch.dtype, *, seed: int = 0) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the runtimes
        return build(layout, dtype, seed=seed)


# -- comparisons ------------------------------------------------------------------------------------------------------


def _seed(replica: int) -> int:
    return 1000 + replica


def _draws(engine: Any, saved: str) -> Iterator[str]:
    """What the default generator of a replica does not draw as before, if there was such a replica."""
    own, _ = replica_of(engine)
    mesh = LAYOUTS[saved][1] or {}
    if own >= mesh.get("dp_replicate", 1) * mesh.get("dp", 1):
        return
    wanted = torch.rand(4, generator=torch.Generator().manual_seed(_seed(own)))
    if not torch.equal(torch.rand(4), wanted):
        yield f"the RNG of replica {own} does not go on"


def _step(engine: Any, step: int, dtype: torch.dtype) -> Iterator[str]:
    own, replicas = replica_of(engine)
    expected = train_plain(AFTER, dtype)[step]
    result = engine.train_step({name: value.chunk(replicas)[own] for name, value in batch(step).items()})
    deepspeed = getattr(engine, "deepspeed", None)
    norm = result.grad_norm if deepspeed is None else deepspeed.get_global_grad_norm()
    loss = float(expected.losses.chunk(replicas)[own].mean())
    for what, found, wanted in (("loss", result.loss, loss), ("gradient norm", norm, expected.norm)):
        if not abs(float(found) - wanted) <= CLOSE[dtype] * max(1.0, abs(wanted)):
            yield f"the {what} of step {step} is {float(found)!r}, not {wanted!r}"


def _state(engine: Any, steps: int, dtype: torch.dtype) -> Iterator[str]:
    """What of weights, optimizer and learning rates is not that of so many steps."""
    expected: Trained = train_plain(AFTER, dtype)[steps - 1]
    close = functools.partial(_differing, steps, CLOSE[dtype])
    yield from close(engine.state_dict(), expected.state)
    moments = OptimizerState(engine._state, optimizer_storage(engine._kept_optimizer()))
    moments.gather_ranks()
    moments.merge()
    found = moments.gather(wanted=True)
    yield from close(found, {name: value for name, value in expected.moments.items() if value.dim() or name in found})
    if engine.lr_scheduler.get_last_lr() != expected.rates:
        yield f"learning rates after {steps} steps: {engine.lr_scheduler.get_last_lr()}, not {expected.rates}"


def _differing(
    steps: int, tolerance: float, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    if found.keys() != wanted.keys():
        yield f"after {steps} steps: {sorted(found.keys() ^ wanted.keys())} are in one of both only"
    for name in found.keys() & wanted.keys():
        one, other = found[name], wanted[name]
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"'{name}' after {steps} steps: {one.dtype} {[*one.shape]}, not {other.dtype} {[*other.shape]}"
        elif not torch.allclose(one, other, rtol=0, atol=tolerance):
            yield f"'{name}' after {steps} steps differs by {(one - other).abs().max():.2g}"
