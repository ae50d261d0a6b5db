"""Shards, tensor-parallel ranks and stages compute in their precision, and skip steps together."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import slapo_core as slapo
from slapo_core import BuildError
from slapo_testing import preload_modules, run_ranks
from slapo_torch.precision import ModelPrecision

from .precise_models import BF16, FP32, ISLANDS, adamw, build, make_batches, make_model, seen, step_lr

preload_modules("torch.distributed.fsdp", "slapo_tp", "slapo_pipeline")
pytestmark = pytest.mark.ranks


def scheduled(mesh: dict[str, int], *, is_tied: bool = False) -> slapo.Schedule:
    sch = slapo.create_schedule(make_model(is_tied=is_tied), mesh=mesh, example_inputs=make_batches()[0])
    if mesh.get("tp", 1) > 1:
        for block in sch["blocks.*"]:
            block["up"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
            block["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if mesh.get("pp", 1) > 1:
        sch["blocks.0"].pipeline_split()
    return sch


def train(
    mesh: dict[str, int], *, is_tied: bool = False, **options: Any
) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    sch = scheduled(mesh, is_tied=is_tied)
    engine = slapo.build(sch, optimizer=adamw, max_grad_norm=1.0, **options)
    dp = sch.mesh.size("dp")
    losses = []
    for batch in make_batches():
        own = {name: one.chunk(dp)[sch.mesh.rank("dp")] for name, one in batch.items()}
        losses.append(float(engine.train_step(own).loss))
    engine.eval_step(own)
    engine.check_replicas()
    return engine, losses, engine.state_dict()


def by_hand(mesh: Any, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """A loop with torch's fully_shard of the blocks and the root."""
    model = make_model()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for module in (*model.blocks, model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = adamw(model.parameters())
    for batch in make_batches():
        own = {name: one.chunk(mesh.size())[mesh.get_local_rank()] for name, one in batch.items()}
        optimizer.zero_grad()
        model(**own)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in model.state_dict().items()}


def fsdp_by_hand_and_by_build() -> None:
    engine, _, state = train({"dp": 2}, precision="bf16-mixed", data_parallel="fsdp")
    expected = by_hand(engine._context.schedule.mesh.device_mesh["dp"])
    for name, one in expected.items():
        assert torch.equal(state[name], one), name
        assert one.dtype == FP32
    assert seen(engine)["weights in the forward"] == seen(engine)["matrix products"] == {"bfloat16"}
    assert seen(engine)["reduction"] == seen(engine)["gradients"] == seen(engine)["moments"] == {"float32"}


def layouts() -> dict[str, tuple[list[float], dict[str, set[str]]]]:
    found = {}
    for name, mesh, options in (
        ("fsdp", {"dp": 2}, {"data_parallel": "fsdp"}),
        ("tp", {"tp": 2}, {}),
        ("tp, fsdp of one rank", {"tp": 2}, {"data_parallel": "fsdp"}),
        ("stages", {"pp": 2}, {"data_parallel": "fsdp"}),
    ):
        engine, losses, state = train(mesh, precision="bf16-mixed", fp32=ISLANDS, **options)
        assert {one.dtype for one in state.values()} == {FP32}, name
        found[name] = losses, seen(engine)
    engine, losses, state = train({"pp": 2}, is_tied=True, precision="bf16-mixed", fp32=("norm",), data_parallel="fsdp")
    assert torch.equal(state["head.weight"], state["embed.weight"])
    alone = build(make_model(is_tied=True), precision="bf16-mixed", fp32=("norm",))
    assert losses == pytest.approx([float(alone.train_step(batch).loss) for batch in make_batches()], rel=0.02)
    assert seen(engine)["weights in the forward"] == ({"bfloat16"} if engine._rank == 0 else {"bfloat16", "float32"})
    engine, losses, state = train({"pp": 2}, precision="bf16", fp32=ISLANDS)
    assert state["head.weight"].dtype == FP32
    assert state["blocks.0.up.weight"].dtype == BF16
    found["stages in bf16"] = losses, seen(engine)
    return found


def infinite_on_one_rank() -> list[Any]:
    found: list[Any] = []
    for mesh, options in (
        ({"tp": 2}, {}),
        ({"pp": 2}, {"data_parallel": "fsdp"}),
        ({"dp": 2}, {"data_parallel": "fsdp"}),
    ):
        sch = scheduled(mesh)
        engine = slapo.build(
            sch, optimizer=adamw, max_grad_norm=1.0, precision="fp16-mixed", lr_scheduler=step_lr, **options
        )
        batch = {name: one.chunk(sch.mesh.size("dp"))[sch.mesh.rank("dp")] for name, one in make_batches()[0].items()}
        engine.train_step(batch)
        scale, is_second = engine.scaler.get_scale(), sch.mesh.global_rank == 1
        before = {name: one.clone() for name, one in engine.state_dict().items()}

        def plant(optimizer: Any, is_second: bool = is_second) -> None:
            for parameter in optimizer.param_groups[0]["params"] if is_second else ():
                local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                local.fill_(torch.inf)

        unscale = engine.scaler.unscale_
        engine.scaler.unscale_ = lambda optimizer, plant=plant, unscale=unscale: (plant(optimizer), unscale(optimizer))
        norm = engine.train_step(batch).grad_norm
        after = engine.state_dict()
        is_kept = all(torch.equal(one, before[name]) for name, one in after.items())
        found.append(
            (is_kept, engine.scaler.get_scale() / scale, bool(norm.isfinite()), engine.lr_scheduler.last_epoch)
        )
        del engine.scaler.unscale_
        engine.train_step(batch)
        assert not all(torch.equal(one, before[name]) for name, one in engine.state_dict().items())
    return found


def planted_policies() -> list[str]:
    found = []
    for changes in ({"param_dtype": None}, {"reduce_dtype": BF16}):
        policy = ModelPrecision.policy

        def planted(self: Any, path: str, policy: Any = policy, changes: Any = changes) -> Any:
            made = policy(self, path)
            values = {"param_dtype": made.param_dtype, "reduce_dtype": made.reduce_dtype, **changes}
            return fsdp.MixedPrecisionPolicy(**values, cast_forward_inputs=False)

        ModelPrecision.policy = planted
        try:
            train({"dp": 2}, precision="bf16-mixed", data_parallel="fsdp")
            found.append("")
        except BuildError as error:
            found.append(str(error))
        finally:
            ModelPrecision.policy = policy
    return found


def on_ranks() -> Any:
    warnings.simplefilter("ignore")
    fsdp_by_hand_and_by_build()
    return layouts(), infinite_on_one_rank(), planted_policies()


def test_precision_over_ranks() -> None:
    losses = [float(build(precision="fp32").train_step(batch).loss) for batch in make_batches()[:1]]
    for found, skipped, planted in run_ranks(on_ranks, world_size=2, timeout=300):
        for name, (own, types) in found.items():
            if name != "fsdp":  # the loss of its own samples
                assert own[0] == pytest.approx(losses[0], rel=0.02), name
            assert (types["float32 modules"], types["matrix products"]) == ({"float32"}, {"bfloat16"}), name
            mixed = {"float32"} if "bf16" not in name else {"float32", "bfloat16"}
            assert types["gradients"] == types["moments"] == types["parameters"] == mixed, name
        assert skipped == [(True, 0.5, False, 1)] * 3
        assert "'embed.weight' in the forward is in float32, not in bfloat16" in planted[0]
        assert "the gradients of unit '' is in bfloat16, not in float32" in planted[1]
