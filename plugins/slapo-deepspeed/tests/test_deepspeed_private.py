"""The names of torch that are not public are in one module; those of DeepSpeed are tested with ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from slapo_deepspeed import private
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_gradient_hooks_are_in_this_table() -> None:
    module = nn.Linear(2, 2)
    assert private.gradient_hooks_of(module.weight) == {}
    handle = module.weight.register_post_accumulate_grad_hook(len)
    assert [*private.gradient_hooks_of(module.weight).values()] == [len]
    private.gradient_hooks_of(module.weight).pop(handle.id)
    assert private.gradient_hooks_of(module.weight) == {}


def test_zero_wrappers_have_these_methods() -> None:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for wrapper in (BF16_Optimizer, DeepSpeedZeroOptimizer):
        assert callable(wrapper._lazy_init_hp_params_optimizer_state)
    assert callable(DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank)


def test_a_function_computes_the_layers_of_marked_weights_in_every_thread() -> None:
    before, layer, marked, x, found = F.linear, nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2), []

    def compute(*_: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 2)

    with private.linear_through(compute, where=lambda weight: weight is marked.weight):
        assert torch.equal(layer(x), before(x, layer.weight, layer.bias))
        other = threading.Thread(target=lambda: found.append(marked(x)))
        other.start()
        other.join()
        found.append(marked(x))
    assert [out.any().item() for out in found] == [False, False]
    assert F.linear is before
    assert marked(x).any()


def test_linear_is_restored_after_a_block_that_replaced_it() -> None:
    before = F.linear
    with private.linear_restored():
        F.linear = torch.add  # type: ignore[assignment]
    assert F.linear is before


def test_accelerators_are_asked_for_dtypes_by_these_methods() -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    before = dict(vars(accelerator)), accelerator.supported_dtypes()
    with private.all_dtypes_supported():
        assert accelerator.is_fp16_supported()
        assert accelerator.is_bf16_supported()
        assert torch.float16 in accelerator.supported_dtypes()
    assert (dict(vars(accelerator)), accelerator.supported_dtypes()) == before
