"""The presets of precision on a GPU: the types of a first step, fused AdamW, and `fully_shard` over one rank."""

from __future__ import annotations

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
