"""The names of torch that are not public mean what this plugin takes them for, and are in one module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_tp import collectives, private
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_hooks_of_every_module_are_seen() -> None:
    assert not private.has_global_forward_hooks()
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        handle = register(lambda *_: None)  # type: ignore[arg-type,return-value]
        assert private.has_global_forward_hooks()
        handle.remove()
    assert not private.has_global_forward_hooks()


def test_tensors_without_memory_are_detected() -> None:
    with FakeTensorMode():
        fake = nn.Linear(2, 2).weight
    assert private.detect_fake_mode(fake) is not None
    assert private.detect_fake_mode(torch.ones(2)) is None
    assert isinstance(fake.detach(), private.FakeTensor)
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))


def test_trees_are_flattened_and_mapped() -> None:
    leaves, spec = private.tree_flatten({"a": [1, (2,)]})
    assert leaves == [1, 2]
    assert private.tree_unflatten([3, 4], spec) == {"a": [3, (4,)]}
    assert private.tree_map_only(int, lambda value: -value, ["x", 1]) == ["x", -1]


def test_functional_collectives_have_one_overload_each() -> None:
    for name in (
        "all_reduce",
        "all_reduce_",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "wait_tensor",
    ):
        assert getattr(private.FUNCTIONAL, name).overloads() == ["default"]


def test_hooks_of_modules_and_gradients_are_seen() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(abs)
    module.register_forward_hook(len)
    assert [*private.forward_hooks_of(module).values()] == [len]
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        weight = nn.Parameter(torch.ones(2))
        assert not private.has_gradient_hooks(weight)
        getattr(weight, register)(len)
        assert private.has_gradient_hooks(weight)


def test_changes_in_place_are_counted() -> None:
    tensor = torch.ones(2)
    assert private.version_of(tensor) == private.version_of(tensor.view_as(tensor)) == 0
    assert private.version_of(tensor.mul_(2)) == 1


def test_convolutions_run_without_their_bias() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    x = torch.randn(1, 2, 4, 4)
    assert torch.allclose(private.convolution(layer, x) + layer.bias[:, None, None], layer(x), atol=1e-6)


def test_gathered_tensors_of_a_gpu_go_through_the_host_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            if "all_gather_into_tensor" in str(function):
                sent.append(arguments[0].device.type)
            return function(*arguments, **(keywords or {}))

    def gathered() -> torch.Tensor:
        group = collectives.RankGroup(dist.group.WORLD.group_name, 1, 0, "")
        with FakeTensorMode(), Calls():
            return collectives.all_gather(torch.empty(2, 3, device="cuda"), 1, group)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        name = dist.group.WORLD.group_name
        asked = torch.compile(lambda x: x + private.is_gloo(name), fullgraph=True, backend="eager")
        assert asked(torch.zeros(1)) == private.is_gloo(name) == 1
        assert gathered().device.type == "cuda"
        monkeypatch.setattr(collectives, "is_gloo", lambda name: False)  # NCCL
        assert gathered().shape == (2, 3)
    finally:
        dist.destroy_process_group()
    assert sent == ["cpu", "cuda"]
