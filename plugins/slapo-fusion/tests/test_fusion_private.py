"""The names of torch that are not public mean what this plugin takes them for, and stand in one module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from slapo_fusion import private
from tests.support.private_names import private_names


class Mode(TorchFunctionMode):
    pass


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_modes_can_be_counted_popped_and_pushed() -> None:
    before = private.number_of_function_modes()
    with Mode() as mode:
        assert private.number_of_function_modes() == before + 1
        assert private.pop_function_mode() is mode
        private.push_function_mode(mode)
        assert private.function_modes()[-1] is mode
    with torch.device("meta"):
        assert isinstance(private.function_modes()[-1], private.DeviceContext)
    with private.FakeTensorMode() as fake:
        assert private.number_of_dispatch_modes() == 1
        assert private.dispatch_modes()[-1] is fake


def test_operators_say_whether_they_have_a_gradient() -> None:
    assert isinstance(torch.ops.aten.relu, private.OpOverloadPacket)
    assert isinstance(torch.ops.aten.relu.default, private.OpOverload)
    assert private.has_kernel_for("aten::relu", "Autograd")
    assert not private.has_kernel_for("aten::relu", "CompositeImplicitAutograd")

    @torch.library.custom_op("slapo_fusion_tests::without_gradient", mutates_args=())
    def without_gradient(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    operator = private.OPDEFS["slapo_fusion_tests::without_gradient"]
    assert not private.has_registered_backward(operator)
    operator.register_autograd(lambda context, gradient: gradient)
    assert private.has_registered_backward(operator)


def test_checkpoints_are_seen_and_end_their_second_run_by_an_exception() -> None:
    assert private.top_saved_tensors_hooks(False) is None
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert private.top_saved_tensors_hooks(False) is not None
    ended = []

    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.exp().sin()
        except private.StopRecomputation:
            ended.append(True)
            raise

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert ended == [True]


def test_the_compiler_says_what_it_knows() -> None:
    assert {"eager", "aot_eager", "inductor"} <= set(private.backend_names())
    assert callable(private.lookup_backend("eager"))
    assert "max-autotune" in private.inductor_modes()
    assert private.inductor_modes("max-autotune")["max_autotune"] is True
    assert "fallback_random" in private.inductor_options()
    with pytest.raises(private.compile_errors()):
        private.lookup_backend("no-such-backend")
    before = torch._dynamo.config.recompile_limit
    limit = private.with_recompile_limit(3, lambda plus: torch._dynamo.config.recompile_limit + plus, plus=1)
    assert (limit, torch._dynamo.config.recompile_limit) == (3 + 1, before)


def test_a_module_s_tables_a_tensor_s_hooks_and_version_and_copies_of_many() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    tables = private.tables_of(module, hooks=True)
    module.register_buffer("scratch", torch.zeros(1))
    module.register_forward_hook(len)
    module.register_forward_pre_hook(len)
    module.kind = "x"
    assert [list(table)[-1] for table in tables[:4] if table] == ["kind", "scratch", "0"]
    assert [len(table) for table in tables[4:]] == [1, 1]
    assert len(private.tables_of(module, hooks=False)) == 4
    weight = module[0].weight
    assert not private.has_tensor_hooks(weight)
    weight.register_hook(lambda gradient: gradient)
    assert private.has_tensor_hooks(weight)
    before = private.version_of(weight)
    with torch.no_grad():
        weight.add_(1.0)
        copies = private.clone_all([weight, weight.bfloat16()])
    assert private.version_of(weight) == before + 1
    assert [copy.data_ptr() == weight.data_ptr() for copy in copies] == [False, False]
    assert torch.equal(copies[0], weight)
    assert copies[1].dtype == torch.bfloat16
    assert list(private.clone_all([])) == []
    private.assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="the reason"):
        private.assert_on_device(torch.tensor(False), "the reason")


def test_trees() -> None:
    leaves, spec = private.tree_flatten({"a": [1, None]})
    assert leaves == [1, None]
    assert private.tree_unflatten([2, 3], spec) == {"a": [2, 3]}
    assert private.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert private.tree_map_only(int, lambda value: value + 1, [1, "x"]) == [2, "x"]


def test_non_persistent_buffers_are_in_this_set() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].register_buffer("scratch", torch.zeros(1), persistent=False)
    assert private.non_persistent_buffers_of(module[0]) == {"scratch"}


def test_backward_hooks_and_the_check_of_a_norm_s_input() -> None:
    for kind in ("", "pre_"):
        module = nn.BatchNorm1d(2)
        assert not private.has_backward_hooks(module)
        getattr(module, f"register_full_backward_{kind}hook")(len)
        assert private.has_backward_hooks(module)
    private.check_input_axes(module, torch.ones(3, 2))
    with pytest.raises(ValueError, match="2D or 3D"):
        private.check_input_axes(module, torch.ones(3))
