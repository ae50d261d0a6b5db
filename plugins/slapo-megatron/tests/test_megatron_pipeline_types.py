"""Megatron's pipeline in lower precision, with losses that are given, and without an optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.messages import Messages
from tests.support.words_model import IDS, Words, adamw, by_hand, loss_of

pytestmark = pytest.mark.ranks
preload_modules("slapo_megatron.pipeline", "slapo_pipeline.partition.hook")

ONE, TWICE = ("one",), ("emb", "one", "two")
SETTINGS = {"lr": 1e-2, "adam_eps": 1e-4, "adam_beta2": 0.999, "weight_decay": 0.0, "clip_grad": 0.1}
SHARDED = {"use_distributed_optimizer": True}


def configured(ddp: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    low = {name: True for name in ("bf16", "fp16") if name in settings}
    return {"optimizer_config": {**SETTINGS, **settings}, "ddp_config": ddp or {}, "model_parallel_config": low}


RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any], bool]] = {
    "by a factory": (ONE, {"optimizer": adamw, "max_grad_norm": 0.1}, True),
    "the last stage uses the tie without a gradient": (TWICE, configured(), False),
    "bf16": (TWICE, configured({"grad_reduce_in_fp32": True}, bf16=True), True),
    "bf16, distributed": (ONE, configured(SHARDED, bf16=True, **SHARDED), True),
    "bf16, the last stage uses the tie without a gradient": (ONE, configured(bf16=True), False),
    "fp16": (TWICE, configured(fp16=True, initial_loss_scale=256.0), True),
}


def build(cuts: tuple[str, ...], *, both: bool = True, **options: Any) -> Any:
    sch = slapo.create_schedule(Words(both=both), mesh={"pp": 2}, example_inputs={"ids": IDS[:2]})
    for path in cuts:
        sch[path].pipeline_split()
    return slapo.build(sch, target="megatron", microbatches=4, loss=loss_of, **options)


def compared(cuts: tuple[str, ...], options: dict[str, Any], both: bool) -> tuple[float, float]:
    """The largest difference of losses, and of the last weights, from a training by hand with main parameters."""
    engine = build(cuts, both=both, **options)
    settings = options.get("optimizer_config", {})
    low = torch.bfloat16 if settings.get("bf16") else torch.float16 if settings.get("fp16") else torch.float32
    decay = 0.01 if "optimizer" in options else 0.0
    assert {one.dtype for one in engine.module.parameters()} == {low}
    differences, wanted = [], {}
    for loss, main in by_hand(Words(both=both), low, clip=0.1, weight_decay=decay):
        result = engine.train_step({"ids": IDS})
        assert result.loss.dtype == torch.float32
        differences.append(abs(float(result.loss) - loss))
        wanted = main
    engine.check_replicas()
    state = engine.state_dict()
    worst = max(float((state[name].float() - tensor).abs().max()) for name, tensor in wanted.items())
    engine.close()
    return max(differences), worst


def skipped() -> tuple[list[float], bool]:
    """Norms of steps whose scaled gradients overflow at first; and whether all is finite after them."""
    engine = build(ONE, **configured(fp16=True, initial_loss_scale=2.0**26, hysteresis=1))
    norms = [float(engine.train_step({"ids": IDS}).grad_norm) for _ in range(16)]
    state = engine.state_dict()
    engine.close()
    return norms, all(bool(tensor.isfinite().all()) for tensor in state.values())


def only_evaluated() -> list[str]:
    """What is refused, and what an evaluation without an optimizer gives otherwise."""
    engine = build(TWICE)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(slapo.BuildError) as under:
        engine.eval_step({"ids": IDS})
    loss, again = (float(engine.eval_step({"ids": IDS}).loss) for _ in range(2))
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step({"ids": IDS})
    with torch.no_grad():
        wanted = float(loss_of(Words()(IDS), {"ids": IDS}))
    engine.close()
    what_differs = "" if abs(loss - wanted) < 1e-6 and loss == again else f"{loss}, {again} instead of {wanted}"
    return [str(error.value), str(under.value), what_differs]


def on_rank() -> Any:
    from tests.support.cpu_megatron import install

    install()
    torch.set_num_threads(1)
    return {name: compared(*run) for name, run in RUNS.items()}, skipped(), only_evaluated()


def test_types_losses_and_optimizers(message: Messages) -> None:
    for found, (norms, is_finite), (refusal, under_autocast, evaluated) in run_ranks(on_rank, world_size=2):
        for name, (loss, weights) in found.items():
            is_exact = "16" not in name
            assert loss < (1e-5 if is_exact else 1e-3), (name, loss)
            assert weights < (1e-5 if is_exact else 1e-3), (name, weights)
        assert norms[0] == float("inf")
        assert 0 < norms[-1] < 10
        assert is_finite
        message(refusal, "without an optimizer")
        message(under_autocast, "target 'megatron'", "torch.autocast")
        assert evaluated == ""
