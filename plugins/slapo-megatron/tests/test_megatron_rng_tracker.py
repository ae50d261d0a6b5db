"""Dropout inside of Megatron's tracker: other elements on tensor-parallel ranks, the same in a recomputation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_testing import run_ranks

pytestmark = pytest.mark.ranks

WIDTH = 64


class Dropping(nn.Module):
    """As a layer of Megatron's that a user has replaced one by: it draws in the region of one tensor-parallel rank."""

    def __init__(self, name: str = "model-parallel-rng") -> None:
        super().__init__()
        self.name, self.scale, self.masks = name, nn.Parameter(torch.ones(WIDTH)), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork(self.name):
            dropped = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(dropped.detach()[0] != 0)
        return x * dropped * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.own = nn.Linear(4, WIDTH), Dropping()
        self.alike, self.down = Dropping("data-parallel-rng"), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.alike(self.own(self.up(x)))).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def built(mesh: dict[str, int], *, checkpointed: bool) -> tuple[slapo.Schedule, Any, Net]:
    torch.manual_seed(0)
    net = Net()
    sch = slapo.create_schedule(net, mesh=mesh)
    if checkpointed:
        sch["own"].checkpoint()
    return sch, slapo.build(sch, target="megatron", optimizer=sgd), net


@contextlib.contextmanager
def stateful() -> Iterator[None]:
    """A tracker that keeps states of its own, as Megatron's does on a GPU, in the place of ours."""
    from megatron.core.tensor_parallel import random as of_megatron

    class Stateful(of_megatron.CudaRNGStatesTracker):  # type: ignore[misc]
        def add(self, name: str, seed: int) -> None:
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            yield
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

    ours = of_megatron._CUDA_RNG_STATE_TRACKER
    of_megatron._CUDA_RNG_STATE_TRACKER = Stateful()
    for number, name in enumerate(("model-parallel-rng", "data-parallel-rng")):
        of_megatron._CUDA_RNG_STATE_TRACKER.add(name, 10 * number + dist.get_rank())
    try:
        yield
    finally:
        of_megatron._CUDA_RNG_STATE_TRACKER = ours


def masks_of(mesh: dict[str, int], *, checkpointed: bool = True, replaced: bool = True) -> dict[str, Any]:
    """What two steps drew: the forward, its recomputation, the next forward, and the scale's gradient in them."""
    _, engine, net = built(mesh, checkpointed=checkpointed)
    torch.manual_seed(5)
    gradients = []
    with contextlib.nullcontext() if replaced else stateful():
        for _ in range(2):
            engine.train_step({"x": torch.ones(2, 4)})
            gradients.append(net.own.scale.main_grad.clone())
        moved = torch.get_rng_state()
        engine.eval_step({"x": torch.ones(2, 4)})
        is_still = torch.equal(moved, torch.get_rng_state())
    engine.close()
    return {"own": net.own.masks[:-1], "alike": net.alike.masks[:-1], "gradients": gradients, "still": is_still}


def on_rank() -> dict[str, Any]:
    from tests.support.cpu_megatron import install

    install()
    from megatron.core.tensor_parallel import random as of_megatron

    found: dict[str, Any] = {}
    found["tracker before"] = type(of_megatron._CUDA_RNG_STATE_TRACKER).__name__
    for mesh in ({"tp": 2}, {"dp": 2}):
        name = next(iter(mesh))
        found[name] = masks_of(mesh)
        found[f"{name}, not checkpointed"] = masks_of(mesh, checkpointed=False)
        found[f"{name}, Megatron's"] = masks_of(mesh, replaced=False)
    found["tracker after"] = type(of_megatron._CUDA_RNG_STATE_TRACKER).__name__
    found["joined"] = joined()
    return found


def joined() -> dict[str, Any]:
    """The names of a tracker that the user's script has seeded; two engines, closed in the order of their making."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, random as of_megatron

    from slapo_megatron.rng_tracker import Following

    with stateful():
        theirs = of_megatron._CUDA_RNG_STATE_TRACKER
        theirs.add("mine", dist.get_rank())
        theirs._is_initialized = True
        _, first, _ = built({"dp": 2}, checkpointed=False)
        ours = get_cuda_rng_tracker()
        _, second, _ = built({"dp": 2}, checkpointed=False)
        first.close()
        stays = get_cuda_rng_tracker() is ours
        names = {name: int(seed) for name, seed in ours.get_states().items()}
        second.close()
        second.close()
        given_back = of_megatron._CUDA_RNG_STATE_TRACKER is theirs
        alone = Following()
        is_ours = of_megatron._CUDA_RNG_STATE_TRACKER is not theirs
        del alone  # as with an engine that nobody closed
        forgotten = is_ours and of_megatron._CUDA_RNG_STATE_TRACKER is theirs
        return {"names": names, "stays": stays, "given back": given_back, "forgotten": forgotten}


@functools.cache
def found() -> list[dict[str, Any]]:
    return run_ranks(on_rank, world_size=2)


def test_a_recomputation_drops_the_same_elements() -> None:
    for rank in found():
        for mesh in ("tp", "dp"):
            forward, again, second, second_again = rank[mesh]["own"]
            assert torch.equal(forward, again)
            assert torch.equal(second, second_again)
            assert not torch.equal(forward, second)
            assert 0 < int(forward.sum()) < WIDTH
            plain = rank[f"{mesh}, not checkpointed"]
            assert torch.equal(plain["own"][0], forward)
            torch.testing.assert_close(rank[mesh]["gradients"], plain["gradients"], rtol=0, atol=0)
            # Megatron's own tracker goes on in the recomputation, and the gradient is that of other elements.
            forward, again, *_ = rank[f"{mesh}, Megatron's"]["own"]
            assert not torch.equal(forward, again)


def test_tensor_parallel_ranks_draw_other_elements_by_the_one_name_and_the_same_by_the_other() -> None:
    first, second = found()
    for one, other in zip(first["tp"]["own"], second["tp"]["own"], strict=True):
        assert not torch.equal(one, other)
    for one, other in zip(first["tp"]["alike"], second["tp"]["alike"], strict=True):
        assert torch.equal(one, other)
    for name in ("own", "alike"):  # replicas whose generators stand alike, as Megatron's seeds say
        for one, other in zip(first["dp"][name], second["dp"][name], strict=True):
            assert torch.equal(one, other)


def test_an_evaluation_draws_nothing() -> None:
    for rank in found():
        assert rank["tp"]["still"]


def test_the_tracker_of_the_user_comes_back_when_the_last_engine_is_closed() -> None:
    first, second = found()
    for rank in (first, second):
        assert rank["tracker before"] == rank["tracker after"] == "NoneType"
        assert rank["joined"]["stays"]
        assert rank["joined"]["given back"]
        assert rank["joined"]["forgotten"]
    seeds = [rank["joined"]["names"] for rank in (first, second)]
    assert [*seeds[0]] == [*seeds[1]] == ["model-parallel-rng", "data-parallel-rng", "mine"]
    assert seeds[0]["mine"] != seeds[1]["mine"]
