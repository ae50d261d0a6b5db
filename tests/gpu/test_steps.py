"""Training steps on a GPU: no wait for the device in code of ours, and what recorded layers cost the host."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import slapo_core as slapo
from tests.gpu.subjects import close, gradients, microseconds, on_ranks, stack
from tests.gpu.targets import WATCHED, watched, watched_steps


@pytest.mark.gpu(4, needs="torch.cuda.set_sync_debug_mode")
def test_a_synchronization_is_seen_and_named(device: torch.device) -> None:
    """The instrument: a copy to the host, one to the device, and none."""
    x = torch.ones(3, device=device)
    assert watched(lambda: x * 2, str(device)) == []
    for waits in (lambda: float(x.sum()), lambda: torch.tensor([1.0, 2.0]).to(device)):
        found = watched(waits, str(device))
        assert found
        assert "test_steps.py" in found[0]


@pytest.mark.gpu(4)
@pytest.mark.parametrize("target", WATCHED)
def test_no_code_of_ours_waits_for_the_device_in_a_step(device: torch.device, measured: Any, target: str) -> None:
    if importlib.util.find_spec(target) is None:
        pytest.skip(f"{target} is not installed")
    (found,) = on_ranks(watched_steps, target, device=device)
    for name, stacks in found.items():
        measured(target=target, way=name, own=stacks["own"], others=stacks["others"][:8])
    assert {name: stacks["own"] for name, stacks in found.items()} == {name: [] for name in WATCHED[target]}


# -- recorded layers --------------------------------------------------------------------------------------------------


def gpt2(device: torch.device) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    layers = 12 if device.type == "cuda" else 2
    sizes: dict[str, Any] = {"vocab_size": 512, "n_embd": 256, "n_layer": layers, "n_head": 4, "n_positions": 64}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, use_cache=False)).to(device, dtype)  # type: ignore[no-any-return]


@pytest.mark.gpu(5)
@pytest.mark.parametrize("flatten", [False, True])
def test_host_time_of_traced_layers(device: torch.device, measured: Any, flatten: bool) -> None:
    """GPT-2 in bfloat16 with one sequence: the time in which a step is enqueued, a layer; and the same gradients."""
    ids = torch.arange(32, device=device).reshape(1, 32)
    batch = {"input_ids": ids, "labels": ids}
    models = {"plain": gpt2(device), "traced": gpt2(device)}
    sch: Any = slapo.create_schedule(models["traced"], example_inputs=batch)
    sch["transformer.h.*"].trace(flatten=flatten)
    taken = {}
    for name, model in models.items():

        def step(model: nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            model(**batch).loss.backward()

        def forward(model: nn.Module = model) -> None:
            model(**batch)

        taken[f"{name}_forward_host_us"], taken[f"{name}_forward_us"] = microseconds(forward, device, calls=20)
        taken[f"{name}_step_host_us"], taken[f"{name}_step_us"] = microseconds(step, device, calls=20)
    layers = len(models["plain"].transformer.h)
    per_layer = (taken["traced_forward_host_us"] - taken["plain_forward_host_us"]) / layers
    measured(layers=layers, flatten=flatten, host_us_per_traced_layer=per_layer, **taken)
    close(gradients(models["traced"]), gradients(models["plain"]), rtol=2e-2)  # sums of embeddings have no order


def casts(function: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::_to_copy")


class Normed(nn.Module):
    """A layer with a part in float32, as many have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            scale = x.float().square().mean(-1, keepdim=True).add(1.0).rsqrt()
        return x + self.down(torch.relu(self.up(x * scale)))


@pytest.mark.gpu(15)
def test_recorded_layers_cast_their_weights_under_autocast_once_a_step(device: torch.device, measured: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Normed(), Normed()).to(device)
    recorded = copy.deepcopy(plain)
    x = torch.randn(4, 32, device=device)
    sch: Any = slapo.create_schedule(recorded, example_inputs=x)
    sch["*"].trace()
    counts, outputs = [], []
    for model in (plain, recorded):

        def step(model: nn.Module = model) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                output: Tensor = model(x) + model(x)
            output.float().square().mean().backward()
            return output

        outputs.append(step().detach())  # recorded anew for this type
        counts.append(casts(step))
    measured(casts_plain=counts[0], casts_recorded=counts[1])
    torch.testing.assert_close(outputs[1], outputs[0])
    assert counts[1] <= counts[0]


@pytest.mark.gpu(16)
def test_copies_of_a_step(device: torch.device, measured: Any) -> None:
    """Kinds and numbers of copies between host and device in one step: none, where the batch is on the device."""
    model = stack(device)
    sch: Any = slapo.create_schedule(model)
    engine = slapo.build(
        sch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss=lambda output, batch: output.square().mean(),
        accumulate=2,
        max_grad_norm=1.0,
    )
    x = torch.randn(4, 32, device=device)
    for _ in range(3):
        engine.train_step((x,))
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]) as profiler:
        engine.train_step((x,))
        if device.type == "cuda":
            torch.cuda.synchronize()
    copies = {event.key: event.count for event in profiler.key_averages() if "Memcpy" in event.key}
    measured(copies=copies)
    assert not [name for name in copies if "DtoH" in name or "HtoD" in name], copies
