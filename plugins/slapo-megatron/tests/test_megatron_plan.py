"""A plan says which groups, buckets and optimizer there will be, what crosses stages, and where every value is from."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_megatron
from slapo_core.dialect import BuildArguments
from slapo_megatron.dialect import MegatronDialect, violations
from slapo_runtime.installed import Runtime
from tests.messages import Messages
from tests.support.dialect_models import Masked

from .planned import plan, refusal, schedule_of


def cut() -> slapo.Schedule:
    schedule = slapo.create_schedule(Masked(), mesh={"dp": 2, "pp": 2}, example_inputs=torch.zeros(6, 4))
    schedule["first"].pipeline_split()
    return schedule


def test_the_plan_lists_groups_training_and_configurations() -> None:
    made = plan(
        {"dp": 2, "tp": 2},
        optimizer_config={"lr": 1e-3, "bf16": True, "use_distributed_optimizer": True},
        ddp_config={"overlap_grad_reduce": True, "bucket_size": 1000},
        scheduler={"lr_decay_style": "cosine", "lr_warmup_steps": 10, "lr_decay_steps": 100},
        arguments=BuildArguments(accumulate=2, max_grad_norm=0.5),
    )
    head, _, rest = str(made).partition("  Megatron's configurations:\n")
    assert head == (
        "plan for target 'megatron'\n"
        "  the scheduled Sequential, 0 steps applied\n"
        "  Megatron's process groups: of {'dp': 2, 'tp': 2}, made here in order 'pp-tp-dp', or the script's own of the "
        "same ranks\n"
        "  ranks: 0: dp 0, tp 0; 1: dp 0, tp 1; 2: dp 1, tp 0; 3: dp 1, tp 1\n"
        "  the ranks of mesh_dim 'tp' use the RNG state of the first rank\n"
        "  a step: 2 micro-batches on each of 2 replicas, one after the other\n"
        "  bf16: the model computes in it, the optimizer has main parameters in float32\n"
        "  gradients: accumulated and averaged in float32, buckets of 1000 parameters while the backward pass goes on\n"
        "  optimizer: Megatron's adam, lr 0.001\n"
        "  scheduler: cosine, one step after each of the optimizer; no decay of biases and 1-D\n"
        "  distributed optimizer: 2 replicas partition the state of the optimizer\n"
        "  gradients are clipped to a norm of 0.5 over all ranks\n"
    )
    assert "    optimizer_config.clip_grad: 0.5  (filled in: build(max_grad_norm=0.5))\n" in rest
    assert "    optimizer_config.lr: 0.001" in rest.splitlines()
    assert "    model_parallel_config.tensor_model_parallel_size: 2  (filled in: 'tp' of the mesh)\n" in rest


def test_the_plan_lists_messages_between_stages_and_their_ranks() -> None:
    lines = str(plan(schedule=cut())).splitlines()
    (sent,) = [line for line in lines if " sends " in line]
    assert sent.startswith("  stage 0 sends stage 1: ")
    assert "float32" in sent
    assert "  a pipeline over 2 ranks, a stage on each: 1F1B" in lines
    interleaved = str(plan(schedule=schedule_of({"pp": 2}, samples=4, cuts=3)))
    assert "  a pipeline over 2 ranks, 2 stages on each, alternating: interleaved 1F1B\n" in interleaved
    without = str(plan({"pp": 2}))
    assert "the values sent between stages are unknown before the first batch: there are no example inputs" in without
    assert "1F1B with one stage a rank, interleaved 1F1B with several" in without
    assert "the values sent between stages are unknown: no step cuts" in str(
        plan(schedule=schedule_of({"pp": 2}, samples=4))
    )


def test_the_plan_of_an_evaluating_engine_has_no_optimizer() -> None:
    lines = str(plan(arguments=BuildArguments())).splitlines()
    assert "  no optimizer: it only evaluates" in lines
    assert not [line for line in lines if line.startswith("  gradients")]
    assert "optimizer: that of the factory given to build; without one the engine only evaluates" in str(plan())


def test_a_plan_changes_nothing_draws_nothing_and_makes_no_groups() -> None:
    schedule = cut()
    state, modes = copy.deepcopy(schedule.model.state_dict()), [one.training for one in schedule.model.modules()]
    random = torch.get_rng_state()
    plan(schedule=schedule, optimizer_config={"lr": 1.0})
    assert torch.equal(random, torch.get_rng_state())
    assert modes == [one.training for one in schedule.model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in schedule.model.state_dict().items())
    assert len(schedule.records) == 1
    assert not torch.distributed.is_initialized()


def test_a_plan_can_be_asked_for_with_the_arguments_of_build() -> None:
    config = {"use_distributed_optimizer": True}
    made = slapo_megatron.plan(schedule_of({"dp": 2}), ddp_config=config, optimizer=torch.optim.AdamW, accumulate=2)
    assert made == plan({"dp": 2}, ddp_config=config, arguments=BuildArguments(has_optimizer=True, accumulate=2))
    assert made.notes == ("arguments", "origins")


@pytest.mark.parametrize("found", [None, "0.15.0"])
def test_without_megatron_or_with_an_old_version_there_is_no_plan(
    monkeypatch: pytest.MonkeyPatch, found: str | None, message: Messages
) -> None:
    monkeypatch.setattr(Runtime, "version", property(lambda _: found))
    message(refusal(), "not installed" if found is None else f"{found} is installed", "pip install ")


def test_a_newer_version_than_tested_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "version", property(lambda _: "0.20.1"))
    with pytest.warns(UserWarning, match=r"0\.20\.1 is newer .* 0\.19"):
        plan()


def test_steps_along_other_dimensions_than_tp_are_named(message: Messages) -> None:
    schedule = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh={"dp": 2, "tp": 2})
    schedule["0"].shard("weight", axis=0, mesh_dim="dp")
    (reason,) = violations(schedule)
    message(reason, "mesh_dim 'dp'", "replicas")
    right = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh={"dp": 2, "tp": 2})
    right["0"].shard(["weight", "bias"], axis=0)
    assert list(violations(right)) == []


def test_options_that_contradict_the_number_of_stages_are_refused() -> None:
    dialect = MegatronDialect()
    assert dialect.stage_ranks(plan({"pp": 2}), 4, 2) == (0, 1, 0, 1)
    made = plan({"pp": 2}, model_parallel_config={"virtual_pipeline_model_parallel_size": 3})
    with pytest.raises(slapo.BuildError, match="is 3, but is 2 by 4 stages on 2 ranks"):
        dialect.stage_ranks(made, 4, 2)
    assert "'batch_p2p_comm' of model" in refusal({"pp": 2}, model_parallel_config={"batch_p2p_comm": True})


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and Megatron runs")
def test_without_cuda_build_refuses_before_megatron() -> None:
    code = (
        "import torch, slapo_core as slapo\n"
        "sch = slapo.create_schedule(torch.nn.Linear(2, 2))\n"
        "try: slapo.build(sch, target='megatron', optimizer=torch.optim.SGD, loss=lambda *_: None)\n"
        "except slapo.BuildError as error: print(error)\n"
        "assert not sch.is_sealed and not torch.distributed.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "CUDA devices, and torch has none here: " in done.stdout  # why, in words of torch's
    assert '\n  hint: target="torch"' in done.stdout


@pytest.mark.parametrize("options", [{"config": {}}, {"pipeline_schedule": "1f1b"}, {"bucket_cap_mb": 25}], ids=str)
def test_options_of_other_targets_are_refused(options: dict[str, Any], message: Messages) -> None:
    message(refusal(**options), f"{next(iter(options))} is not an option", "optimizer_config")


def test_complex_parameters_are_refused() -> None:
    model: Any = nn.Linear(2, 2)
    schedule = slapo.create_schedule(model)
    assert list(violations(schedule)) == []
    model.spectrum = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    (reason,) = violations(slapo.create_schedule(model))
    assert "'spectrum' is complex" in str(reason)
    model.spectrum.requires_grad_(False)
    assert list(violations(slapo.create_schedule(model))) == []
