"""What a trial measures of memory: also where another thread gives blocks back, of which the profiler hears nothing."""

from __future__ import annotations

import threading

import torch

from slapo_tune.training import MemoryMeter

MIB = 2**20


def given_back_elsewhere(tensors: list[torch.Tensor]) -> None:
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()


def test_blocks_freed_by_another_thread_do_not_add_up() -> None:
    meter = MemoryMeter("cpu")
    with meter.measuring():
        kept = torch.empty(64 * MIB, dtype=torch.uint8)
        with meter.steps():
            for _ in range(8):
                given_back_elsewhere([torch.empty(64 * MIB, dtype=torch.uint8)])
    # One of them at a time; two where the system gave the second one another address.
    assert kept.nbytes + 64 * MIB <= meter.peak <= kept.nbytes + 3 * 64 * MIB


def test_peak_is_the_maximum_of_allocated_bytes_in_steps() -> None:
    meter = MemoryMeter("cpu")
    with meter.measuring():
        kept = torch.empty(8 * MIB, dtype=torch.uint8)
        passing = torch.empty(32 * MIB, dtype=torch.uint8)  # before the steps: does not count
        del passing
        with meter.steps():
            first = torch.empty(4 * MIB, dtype=torch.uint8)
            second = torch.empty(2 * MIB, dtype=torch.uint8)
            del first
            third = torch.empty(1 * MIB, dtype=torch.uint8)
    assert meter.peak == 14 * MIB
    del kept, second, third
