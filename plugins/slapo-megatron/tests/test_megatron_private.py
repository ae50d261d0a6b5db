"""The names of torch that are not public are in one module; those about process groups are tested with ranks."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from slapo_megatron import private
from slapo_runtime.launcher import run_process
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_trees_are_mapped() -> None:
    assert private.tree_map(lambda value: -value, {"a": [1, (2,)]}) == {"a": [-1, (-2,)]}


def test_modules_keep_their_tensors_and_children_in_these_tables() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].register_buffer("scratch", torch.zeros(1), persistent=False)


def test_names_of_megatron() -> None:
    import inspect

    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    assert callable(DistributedOptimizer._get_model_param_range_map)
    source = inspect.getsource(_ParamAndGradBucketGroup)
    for name in ("if self.is_last_microbatch:", "self.is_last_microbatch = True", "def finish_param_sync"):
        assert name in source
    for name in ("self.bucket_groups", "self.expert_parallel_bucket_groups"):
        assert name in inspect.getsource(DistributedDataParallel)


@pytest.mark.ranks
def test_only_megatron_takes_tensors_for_those_of_a_gpu() -> None:
    assert run_process(_kinds, timeout=60.0) == ["torch.FloatTensor", "torch.cuda.FloatTensor", True, "type", "float16"]


def _asked(x: torch.Tensor) -> tuple[Any, Any]:
    return x.type(), x.cuda()


def _kinds() -> list[Any]:
    private.tensors_of_megatron_are_on_gpu()
    private.tensors_of_megatron_are_on_gpu()  # a second time changes nothing
    x = torch.ones(2)
    kind, moved = FunctionType(_asked.__code__, {"__name__": "megatron.core.optimizer"})(x)
    return [x.type(), kind, moved is x, torch.Tensor.type.__name__, str(x.type(torch.float16).dtype).split(".")[1]]
