"""Precision on a GPU: the types of a first step, fused AdamW, GradScaler, `fully_shard` over one rank, and saves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import slapo_core as slapo
from tests.gpu.subjects import close, on_ranks, small_llama

ISLANDS = ("*norm*", "lm_head")


def batch(device: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(48, device=device).reshape(4, 12) % 96
    return {"input_ids": ids, "labels": ids.flip(1)}


def build(device: Any, **options: Any) -> Any:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    sch = slapo.create_schedule(small_llama(device, num_hidden_layers=2), example_inputs=batch(device))
    return slapo.build(sch, optimizer=factory, max_grad_norm=1.0, **options)


def rows(engine: Any) -> dict[str, list[str]]:
    return {row.what: sorted(row.dtypes) for row in engine.precision.seen}


@pytest.mark.gpu(5)
@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "bf16", "fp16-mixed"])
def test_first_step_shows_the_preset(device: torch.device, measured: Any, name: str) -> None:
    engine = build(device, precision=name, **({} if name == "fp32" else {"fp32": ISLANDS}))
    losses = [float(engine.train_step(batch(device)).loss) for _ in range(3)]
    found = rows(engine)
    measured(preset=name, losses=losses, seen=found)
    storage = ["bfloat16", "float32"] if name == "bf16" else ["float32"]
    assert found["parameters"] == found["gradients"] == found["moments"] == storage
    compute = {"fp32": "float32", "fp16-mixed": "float16"}.get(name, "bfloat16")
    assert found["matrix products"] == [compute]
    assert found["buffers"] == ["float32"]
    assert losses[2] < losses[0]


@pytest.mark.gpu(5)
def test_bf16_mixed_equals_a_loop_under_autocast(device: torch.device) -> None:
    engine = build(device, precision="bf16-mixed")
    model = small_llama(device, num_hidden_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        found = engine.train_step(batch(device)).loss
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert torch.equal(found, loss)
    close(engine.state_dict(), model.state_dict(), rtol=1e-6)


def sharded_alone(device: str) -> list[Any]:
    found = []
    for name in ("bf16-mixed", "fp16-mixed"):
        engine = build(device, precision=name, fp32=ISLANDS, data_parallel="fsdp")
        losses = [float(engine.train_step(batch(device)).loss) for _ in range(3)]
        found.append((name, losses, rows(engine), {str(one.dtype) for one in engine.state_dict().values()}))
    return found


@pytest.mark.gpu(5)
def test_shards_of_one_rank_are_gathered_in_the_lower_type(device: torch.device, measured: Any) -> None:
    (found,) = on_ranks(sharded_alone, device=device)
    for name, losses, seen, saved in found:
        measured(preset=name, losses=losses, seen=seen)
        lower = "bfloat16" if name == "bf16-mixed" else "float16"
        assert seen["weights in the forward"] == sorted([lower, "float32"])
        assert seen["reduction"] == seen["gradients"] == seen["moments"] == ["float32"]
        assert losses[2] < losses[0]
        assert saved == {"torch.float32"}


@pytest.mark.gpu(5)
def test_a_gradient_that_is_not_finite_skips_the_step(device: torch.device) -> None:
    engine = build(device, precision="fp16-mixed")
    before = engine.state_dict()
    scale = engine.scaler.get_scale()
    spoiled = next(iter(engine.module.parameters())).register_hook(lambda gradient: gradient * float("inf"))
    engine.train_step(batch(device))
    assert engine.scaler.get_scale() == scale / 2
    close(engine.state_dict(), before, rtol=0.0, atol=0.0)
    spoiled.remove()
    engine.train_step(batch(device))
    assert engine.scaler.get_scale() == scale / 2
    after = engine.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before if "layernorm" not in name)


def shards_beside_plain(device: str) -> list[Any]:
    found = []
    for name in ("fp32", "bf16-mixed"):
        plain, sharded = (build(device, precision=name, data_parallel=how) for how in ("ddp", "fsdp"))
        losses = [[float(one.train_step(batch(device)).loss) for _ in range(3)] for one in (plain, sharded)]
        found.append((name, losses, plain.state_dict(), sharded.state_dict()))
    return found


@pytest.mark.gpu(5)
def test_shards_of_one_rank_step_as_the_whole(device: torch.device, measured: Any) -> None:
    (found,) = on_ranks(shards_beside_plain, device=device)
    for name, losses, plain, sharded in found:
        measured(preset=name, losses=losses)
        tolerance = 1e-5 if name == "fp32" else 2e-2  # autocast and a gathered cast round at other places
        assert losses[1] == pytest.approx(losses[0], rel=tolerance)
        close(sharded, plain, rtol=tolerance, atol=1e-5 if name == "fp32" else 5e-3)


@pytest.mark.gpu(5)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16-mixed"])
def test_an_asynchronous_save_is_of_its_step(device: torch.device, measured: Any, tmp_path: Path, name: str) -> None:
    engine = build(device, precision=name)
    for _ in range(2):
        engine.train_step(batch(device))
    saved = {key: value.clone() for key, value in engine.state_dict().items()}
    begin = time.perf_counter()
    pending = engine.save(tmp_path, asynchronous=True)
    blocked = time.perf_counter() - begin
    losses = [float(engine.train_step(batch(device)).loss) for _ in range(3)]
    pending.wait()
    measured(preset=name, blocked_seconds=blocked)
    other = build(device, precision=name)
    other.load(tmp_path)
    close(other.state_dict(), saved, rtol=0.0, atol=0.0)
    assert [float(other.train_step(batch(device)).loss) for _ in range(3)] == losses
    close(other.state_dict(), engine.state_dict(), rtol=0.0, atol=0.0)
