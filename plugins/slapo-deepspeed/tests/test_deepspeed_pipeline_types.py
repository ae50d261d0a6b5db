"""Pipelines in bf16, with DeepSpeed's own optimizer, with gradients kept in another type, and without an optimizer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.messages import Messages
from tests.processor import Outcome, run_case
from tests.support.words_model import IDS, Words, adamw, by_hand, loss_of

pytestmark = [pytest.mark.ranks, pytest.mark.breadth]
preload_modules(
    "deepspeed.pipe",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "slapo_deepspeed.pipeline",
    "slapo_pipeline.partition.hook",
)

CONFIGURED = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}}
RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "by its own optimizer": ({"optimizer": CONFIGURED}, True),
    "bf16": ({"bf16": {"enabled": True}, "gradient_clipping": 0.1}, True),
    "bf16 without ZeRO": (
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}, "gradient_clipping": 0.1},
        True,
    ),
    "bf16, the last rank uses the tie without a gradient": (
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        False,
    ),
    "the last rank uses the tie without a gradient": ({}, False),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 0.1}, True),
    "gradients kept in another type": ({"data_types": {"grad_accum_dtype": "bf16"}}, True),
    "gradients kept in another type, none on the last rank": ({"data_types": {"grad_accum_dtype": "bf16"}}, False),
}


def compared(config: dict[str, Any], both: bool) -> tuple[float, float]:
    """The largest difference of losses, and of the last weights, from a training by hand with masters in float32."""
    sch = slapo.create_schedule(Words(both=both), mesh={"pp": 2}, example_inputs={"ids": IDS[:2]})
    sch["one"].pipeline_split()
    own = {} if "optimizer" in config else {"optimizer": adamw}
    engine = slapo.build(
        sch, target="deepspeed", config={"gradient_accumulation_steps": 4, **config}, loss=loss_of, **own
    )
    low = torch.bfloat16 if "bf16" in config else torch.float16 if "fp16" in config else torch.float32
    differences, wanted = [], {}
    for loss, main in by_hand(Words(both=both), low, config.get("gradient_clipping", 0.0)):
        differences.append(abs(float(engine.train_step({"ids": IDS}).loss) - loss))
        wanted = main
    engine.check_replicas()
    state = engine.state_dict()
    worst = max(float((state[name].float() - tensor).abs().max()) for name, tensor in wanted.items())
    engine.close()
    return max(differences), worst


def only_evaluated() -> list[str]:
    """What is refused, and what an evaluation without an optimizer gives otherwise."""
    model = Words(both=True)
    sch = slapo.create_schedule(model, mesh={"pp": 2}, example_inputs={"ids": IDS[:2]})
    sch["one"].pipeline_split()
    engine = slapo.build(sch, target="deepspeed", config={"gradient_accumulation_steps": 2}, loss=loss_of)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(slapo.BuildError) as under:
        engine.eval_step({"ids": IDS})
    with pytest.raises(slapo.BuildError) as configured:
        compared({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, True)
    loss = float(engine.eval_step({"ids": IDS}).loss)
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step({"ids": IDS})
    with torch.no_grad():
        wanted = float(loss_of(Words(both=True)(IDS), {"ids": IDS}))
    engine.close()
    what_differs = "" if abs(loss - wanted) < 1e-6 else f"{loss} instead of {wanted}"
    return [str(error.value), what_differs, str(under.value), str(configured.value)]


def on_rank() -> tuple[dict[str, Outcome[tuple[float, float]]], list[str]]:
    torch.set_num_threads(1)
    return {name: run_case(run[0], compared, *run) for name, run in RUNS.items()}, only_evaluated()


@functools.cache
def on_ranks() -> list[tuple[dict[str, Outcome[tuple[float, float]]], list[str]]]:
    return run_ranks(on_rank, world_size=2)


@pytest.mark.parametrize("name", RUNS)
def test_types_and_optimizers(name: str) -> None:
    for found, _ in on_ranks():
        loss, weights = found[name].get()
        is_exact = not any(one in name for one in ("bf16", "fp16", "another type"))
        assert loss < (1e-5 if is_exact else 1e-2), loss
        assert weights < (1e-5 if is_exact else 2e-3), weights


def test_an_evaluation_needs_no_optimizer_and_knows_no_autocast(message: Messages) -> None:
    first, second = (told for _, told in on_ranks())
    assert first == second
    refusal, evaluated, under_autocast, autocast = first
    message(refusal, "without an optimizer")
    assert evaluated == ""
    message(under_autocast, "target 'deepspeed'", "torch.autocast")
    message(autocast, "'torch_autocast.enabled' of config", "pipeline")
