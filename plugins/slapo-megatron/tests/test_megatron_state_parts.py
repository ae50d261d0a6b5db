"""The optimizer of Megatron by parameters, where Transformer Engine or Apex make it; the names that we know it by."""

from __future__ import annotations

from typing import Any

import torch

from slapo_megatron.state import OptimizerLayout, StoredOptimizer, optimizer_layout, settings_of
from slapo_runtime.correspondence.flat_storage import FlatStorage, StoredParameter
from slapo_runtime.flat_shards import FlatShard


class FusedAdam(torch.optim.SGD):
    """As much of a fused Adam as is asked: it counts its steps in its groups."""

    adam_w_mode = True

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        for group in self.param_groups:
            for key in ("momentum", "dampening", "nesterov", "maximize", "foreach", "differentiable", "fused"):
                del group[key]
            group.update(betas=(0.9, 0.95), eps=1e-8, bias_correction=True, wd_mult=0.0)


def stored(*parameters: torch.Tensor) -> tuple[FusedAdam, StoredOptimizer]:
    inner = FusedAdam([{"params": list(parameters)}])
    held = {
        id(one): StoredParameter(FlatShard.full(one, tuple(one.shape)), None, one.dtype, optimizer=inner)
        for one in parameters
    }
    names = {id(one): f"p{number}" for number, one in enumerate(parameters)}
    storage = FlatStorage(held, None, torch.device("cpu"))
    return inner, StoredOptimizer(
        OptimizerLayout(held, [(inner, 0, list(parameters))]), storage, names, is_scheduled=False
    )


def test_a_fused_adam_is_saved_as_torchs_with_its_step_count() -> None:
    one, other = torch.zeros(3), torch.zeros(2)
    inner, storage = stored(one, other)
    assert storage.kind == "AdamW"
    assert set(settings_of(inner, inner.param_groups[0], inner.param_groups[0])) == {
        "lr",
        "betas",
        "eps",
        "weight_decay",
    }
    assert storage.state(one) == {}
    states = {each: {"step": torch.tensor(4.0), "exp_avg": torch.ones_like(each)} for each in (one, other)}
    settings = [{"lr": 0.3, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1, "amsgrad": False}]
    storage.loading(settings, states)()
    (group,) = inner.param_groups
    assert (group["step"], group["lr"], group["wd_mult"]) == (4, 0.3, 0.0)
    assert "amsgrad" not in group
    assert inner.state[one]["exp_avg"].tolist() == [1.0, 1.0, 1.0]
    assert "step" not in inner.state[one]
    found = storage.state(one)
    assert float(found["step"]) == 4.0
    assert found["exp_avg"].is_meta
    assert storage.read(one, "exp_avg").tolist() == [1.0, 1.0, 1.0]


class Unknown:
    """An optimizer of Megatron's that this plugin has never seen."""

    def __init__(self) -> None:
        from types import SimpleNamespace

        self.optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1)
        self.config = SimpleNamespace(use_precision_aware_optimizer=False)


def test_an_optimizer_that_keeps_state_elsewhere_is_a_limit_of_saving() -> None:
    unknown = Unknown()
    assert "Unknown keeps its main weights" in optimizer_layout(unknown, None).limit
    unknown.config.use_precision_aware_optimizer = True
    kept = optimizer_layout(unknown, None)
    assert "use_precision_aware_optimizer" in kept.limit
    assert (kept.held, kept.groups) == ({}, [])
    assert optimizer_layout(None, None) == OptimizerLayout()


def test_private_names_of_megatron_exist() -> None:
    """What ``state.py`` reads; the states of the integration tests show what it is."""
    import inspect

    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    wanted = {
        DistributedOptimizer: (
            "_get_model_param_range_map",
            "self.model_float16_groups",
            "self.shard_fp32_from_float16_groups",
            "self.model_fp32_groups",
            "self.shard_fp32_groups",
            "self.buffers = ",
            "self.data_parallel_group = ",
        ),
        Float16OptimizerWithFloat16Params: ("self.float16_groups = ", "self.fp32_from_float16_groups = "),
        ChainedOptimizer: ("self.chained_optimizers = ",),
        _ParamAndGradBuffer: ("self.param_index_map[param]",),
        OptimizerParamScheduler: ("self.num_steps += increment", "self.step(increment=num_steps)"),
    }
    lacking = [
        f"{owner.__name__}: {text}"
        for owner, texts in wanted.items()
        for text in texts
        if text not in inspect.getsource(owner)
    ]
    assert lacking == []


def test_rates_of_megatrons_scheduler_are_in_no_checkpoint_and_those_of_torchs_are() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    values = {"params": [], "lr": 0.1, "max_lr": 0.2, "min_lr": 0.0, "wd_mult": 1.0}
    assert settings_of(optimizer, {"wd_mult": 1.0, "max_lr": 0.5}, values) == {"lr": 0.1}
    assert settings_of(optimizer, {"max_lr": 0.5}, {"max_lr": 0.2}) == {"max_lr": 0.2}
