"""Loops of accelerate train a scheduled model as one process trains the reference model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.launcher import run_process, run_ranks

from .training_runs import model, padded, samples, schedule

Numbers = list[float]


def loop(accelerator: Any, made: Any, optimizer: Any, loader: Any, scheduler: Any, steps: range) -> Numbers:
    """A loop as of accelerate's pages: losses, counts, norms and learning rates of its steps."""
    found: Numbers = []
    for number, batch in enumerate(loader):
        if number not in steps:
            continue
        with accelerator.accumulate(made):
            loss = made(**batch).loss
            accelerator.backward(loss)
            found += [accelerator.gather(loss.detach()).mean().item()]
            found += [float(accelerator.reduce(batch["attention_mask"].sum(), "sum"))]
            if accelerator.sync_gradients:
                found += [float(accelerator.clip_grad_norm_(made.parameters(), 1.0)), scheduler.get_last_lr()[0]]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return found


def parts(made: Any) -> tuple[Any, Any, Any]:
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(samples(16, seed=2), batch_size=2, collate_fn=padded)  # type: ignore[arg-type]
    return optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def reference(directory: Path) -> tuple[Numbers, dict[str, Any]]:
    """Accumulate eight batches, in two steps, alone."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    made = model("gpt2")
    optimizer, loader, scheduler = parts(made)
    losses: Numbers = []
    for number, batch in enumerate(loader):
        loss = made(**batch).loss
        (loss / 4).backward()
        losses += [loss.item(), float(batch["attention_mask"].sum())]
        if number % 4 == 3:
            losses += [float(torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)), scheduler.get_last_lr()[0]]
            optimizer.step()
            scheduler.step()
            scheduler.step()  # as accelerate does for two processes
            optimizer.zero_grad()
    return losses, made.state_dict()


def on_ranks(directory: Path, fsdp: bool) -> tuple[Numbers, dict[str, Any], dict[str, Any]]:
    """A run, and another one that loads its state after the first step."""
    from accelerate import Accelerator

    from slapo_transformers import prepare

    results = []
    for is_resumed in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        sch = schedule("gpt2", model("gpt2"), {"dp": 2, "tp": 2}, fsdp=fsdp)
        optimizer, loader, scheduler = parts(sch.model)
        prepared = prepare(accelerator, sch, optimizer, loader, scheduler)
        if is_resumed:
            accelerator.load_state(str(directory))
            loop(accelerator, *prepared, range(2, 4))
        else:
            numbers = loop(accelerator, *prepared, range(2))
            accelerator.save_state(str(directory))
            numbers += loop(accelerator, *prepared, range(2, 4))
        results.append(slapo.state_dict(sch))
        objects = accelerator.gather_for_metrics([sch.mesh.rank("dp") if sch.mesh else 0], use_gather_object=True)
        assert objects == [0, 1]
        if fsdp:
            flags: list[bool] = []
            sch.model.set_requires_gradient_sync = flags.append  # type: ignore[assignment]
            with accelerator.no_sync(prepared[0]):
                assert flags == [False]
            assert flags == [False, True]
    return numbers, results[0], results[1]


def folded(numbers: Numbers) -> Numbers:
    """What two replicas log of the numbers of one process."""
    found: Numbers = []
    for first in range(0, len(numbers), 10):
        step = numbers[first : first + 10]
        for at in (0, 4):
            found += [(step[at] + step[at + 2]) / 2, step[at + 1] + step[at + 3]]
        found += step[8:10]
    return found


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_loops_of_accelerate_are_those_of_one_process(fsdp: bool, tmp_path: Path) -> None:
    alone, weights = run_process(reference, tmp_path)
    for numbers, trained, resumed in run_ranks(on_ranks, tmp_path / "state", fsdp, world_size=4):
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor(folded(alone)), rtol=1e-9, atol=0)
        for key, value in weights.items():
            torch.testing.assert_close(trained[key], value, rtol=1e-8, atol=1e-10)
            assert torch.equal(trained[key], resumed[key]), key


def scaled() -> tuple[Any, dict[str, Any]]:
    """Three steps under a scaler, the second one without finite gradients on the last rank."""
    from accelerate import Accelerator

    from slapo_transformers import prepare

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # accelerate makes it on a GPU alone
    sch = schedule("gpt2", model("gpt2"), {"tp": 2})
    optimizer, loader, _ = parts(sch.model)
    made, optimizer, loader = prepare(accelerator, sch, optimizer, loader)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # after the forward, which stays as it is
    steps = []
    for number, batch in zip(range(3), loader, strict=False):
        loss = made(**batch).loss
        accelerator.backward(loss)
        if number == 1 and torch.distributed.get_rank() == 1:
            next(sch.model.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        accelerator.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        steps.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()))
        optimizer.zero_grad()
    return steps, slapo.state_dict(sch)


def unscaled() -> dict[str, Any]:
    """The first and the third of these steps."""
    made = model("gpt2")
    optimizer, loader, _ = parts(made)
    for number, batch in zip(range(3), loader, strict=False):
        if number != 1:
            made(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return made.state_dict()  # type: ignore[no-any-return]


@pytest.mark.breadth
@pytest.mark.ranks
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    expected = unscaled()
    for steps, weights in run_ranks(scaled, world_size=2):
        assert steps == [(False, 4.0), (True, 2.0), (False, 2.0)]
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-8, atol=1e-10)


def test_a_learning_rate_that_ends_stays_there() -> None:
    from accelerate import Accelerator

    from slapo_transformers import prepare

    accelerator = Accelerator(cpu=True)
    sch = slapo.create_schedule(model("gpt2"))
    optimizer, _, _ = parts(sch.model)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=3)
    _, _, scheduler = prepare(accelerator, sch, optimizer, cycle)
    scheduler.steps = 2  # of two replicas
    for _ in range(3):
        scheduler.step()
    assert cycle.last_epoch == 3
