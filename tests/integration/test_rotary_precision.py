"""Lower precision is that of parameters: buffers, such as rotary frequencies, keep theirs under every dialect."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_megatron.model import lower_model
from slapo_testing import preload_modules, run_ranks
from tests.processor import Outcome, run_case

preload_modules("tests.support.cpu_megatron", "slapo_megatron.engine", "deepspeed", "transformers")

POSITION = 4000
MEGATRON = {"optimizer_config": {"bf16": True}, "ddp_config": {"grad_reduce_in_fp32": True}}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "Megatron": ("megatron", {"dp": 2}, MEGATRON),
    "Megatron, pipeline": ("megatron", {"pp": 2}, MEGATRON),
    **{
        f"DeepSpeed, {name}": (
            "deepspeed",
            mesh,
            {"config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}},
        )
        for name, mesh, stage in (
            ("ZeRO-1", {"dp": 2}, 1),
            ("ZeRO-3", {"dp": 2}, 3),
            ("pipeline", {"pp": 2}, 1),
        )
    },
}
"""Target, mesh, and options."""


def make() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2 * POSITION,
        initializer_range=0.3,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    """Tokens that are far from each other."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (2, 16), generator=generator)
    positions = (torch.arange(16) * POSITION // 15).expand(2, -1)
    mask = torch.ones_like(ids)  # without it, a gap between positions begins another sequence
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "attention_mask": mask}


def evaluated(target: str, mesh: dict[str, int], options: dict[str, Any]) -> float:
    from tests.support.cpu_megatron import install

    install()
    sch = slapo.create_schedule(make(), mesh=mesh, example_inputs=batch())
    if "pp" in mesh:
        sch["model.layers.0"].pipeline_split()
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    engine = slapo.build(sch, target=target, optimizer=optimizer, **options)
    engine.train_step(batch())
    engine.load_state_dict(make().state_dict())
    found = float(engine.eval_step(batch()).loss)
    engine.close()
    return found


def on_rank() -> dict[str, Outcome[Any]]:
    torch.set_num_threads(1)
    return {
        name: run_case(options.get("config", {}), evaluated, target, mesh, options)
        for name, (target, mesh, options) in CASES.items()
    }


@functools.cache
def found() -> list[dict[str, Outcome[Any]]]:
    return run_ranks(on_rank, world_size=2)


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model.eval()(**batch()).loss)


def with_low_parameters() -> nn.Module:
    model = make()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def test_megatron_casts_parameters_only() -> None:
    model = make()
    lower_model(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert loss_of(model) == pytest.approx(loss_of(with_low_parameters()))


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_of_float32(name: str) -> None:
    expected, wrong = loss_of(with_low_parameters()), loss_of(make().bfloat16())
    assert abs(wrong - expected) > 0.01 * expected  # what the case can see
    for rank in found():
        assert rank[name].get() == pytest.approx(expected, rel=2e-3)
