"""The RNG streams of stages: which device is seeded, and when states are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slapo_runtime.stages.runner import start_stream, step_seed, was_used

CPU = torch.device("cpu")


class Generators:
    """Two devices with a generator each, and the calls of a device module of torch."""

    def __init__(self) -> None:
        self.current = 0
        self.generators = [torch.Generator(), torch.Generator()]

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def manual_seed(self, seed: int) -> None:
        self.generators[self.current].manual_seed(seed)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generators[device.index].get_state()


def test_the_generator_of_the_stages_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = Generators()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    before = module.generators[0].get_state()
    states = start_stream(5, 0, 0, torch.device("cuda:1"), watched=True)
    assert states is not None
    assert module.current == 0
    assert torch.equal(before, module.generators[0].get_state())
    assert not was_used(states, torch.device("cuda:1"))
    torch.rand(1, generator=module.generators[1])
    assert was_used(states, torch.device("cuda:1"))


def test_streams_are_of_their_stage_and_micro_batch_and_the_generator_comes_back() -> None:
    before = torch.get_rng_state()
    drawn = set()
    with step_seed(CPU) as seed:
        for stage, number in ((0, 0), (0, 1), (1, 0), (0, 0)):
            assert start_stream(seed, stage, number, CPU, watched=False) is None
            drawn.add(float(torch.rand(())))
    assert len(drawn) == 3
    assert torch.equal(before, torch.get_rng_state())
