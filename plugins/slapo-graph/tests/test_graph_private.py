"""The names of torch that are not public mean what graphs take them for, and stand in one module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import slapo_core
from slapo_graph import private
from tests.support.private_names import private_names


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", ["graph", "tracing.py"])
def test_no_other_module_uses_a_private_name_of_torch_or_those_of_the_core(place: str) -> None:
    path = Path(slapo_core.__file__).parent / place
    assert private_names(path) == []
    assert not [
        file for file in [path, *path.rglob("*.py")] if file.is_file() and "slapo_core.private" in file.read_text()
    ]


def test_the_scan_can_fail(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import torch\nfrom torch._C import _nn\ntorch.overrides._pop_mode()\n")
    (tmp_path / "objects.py").write_text(
        "class Own:\n    def read(self, module):\n        self._modules = module._modules\n"
        "        module.child._version += 1\n        getattr(module, '_forward_hooks')\n        return module._own\n"
    )
    (tmp_path / "private.py").write_text("import torch._C\n")
    assert sorted(private_names(tmp_path)) == [
        "bad.py: torch._C._nn",
        "bad.py: torch.overrides._pop_mode",
        "objects.py: '_forward_hooks'",
        "objects.py: module._modules",
        "objects.py: module.child._version",
    ]


def test_function_modes_can_be_counted_popped_and_pushed() -> None:
    before = private.number_of_function_modes()
    with Counting() as mode:
        assert private.number_of_function_modes() == before + 1
        assert private.function_modes()[-1] is mode
        assert private.pop_function_mode() is mode
        torch.ones(1) + 1
        assert mode.calls == 0
        private.push_function_mode(mode)
        torch.ones(1) + 1
        assert mode.calls == 2
        with private.DisableTorchFunction():
            torch.ones(1)
        assert mode.calls == 2
    with torch.device("meta"):
        assert isinstance(private.function_modes()[-1], private.DeviceContext)


def test_schemas_name_arguments_types_and_defaults() -> None:
    (schema,) = private.schemas_for_operator("aten::gelu_")
    assert [(each.name, str(each.type), each.kwarg_only) for each in schema.arguments] == [
        ("self", "Tensor", False),
        ("approximate", "str", True),
    ]
    assert schema.arguments[1].default_value == "none"
    assert schema.arguments[0].alias_info.is_write
    assert private.schemas_for_operator("aten::no_such_operator") == []


def test_operators_and_their_homes() -> None:
    add = torch.ops.aten.add
    assert isinstance(add, private.OpOverloadPacket)
    assert isinstance(add.Tensor, private.OpOverload)
    assert (add.Tensor.overloadpacket, add.Tensor.namespace, private.operator_name(add)) == (add, "aten", "aten::add")
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.dropout.default.tags
    assert private.NN.gelu is torch.nn.functional.gelu
    assert callable(private.VF.lstm)
    assert isinstance(private.GROUPED_MM, private.OpOverload)
    assert issubclass(nn.Dropout1d, private.Dropout)
    assert private.TensorBase in torch.Tensor.__mro__


def test_fake_tensors_stand_for_real_ones() -> None:
    with private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.ones(2, 3))
        assert type(fake) is private.FakeTensor
        assert (fake.fake_mode, fake.fake_device) == (mode, torch.device("cpu"))
        assert type(fake + torch.ones(3)) is private.FakeTensor
        with pytest.raises(private.DataDependentOutputException):
            (fake > 0).all().item()
        with pytest.raises(private.DynamicOutputShapeException):
            fake.nonzero()
        with private.disable_current_modes():
            assert type(torch.ones(1)) is torch.Tensor


def test_gradients_are_switched_and_trees_flattened() -> None:
    before = torch.is_grad_enabled()
    private.set_grad_enabled(not before)
    assert torch.is_grad_enabled() is not before
    private.set_grad_enabled(before)
    leaves, structure = private.pytree.tree_flatten({"a": [1, (2,)]})
    assert (leaves, private.tree_leaves({"a": [1, (2,)]})) == ([1, 2], [1, 2])
    assert private.pytree.tree_unflatten(leaves, structure) == {"a": [1, (2,)]}
    assert private.tree_map_only(int, lambda value: value + 1, [1, "x"]) == [2, "x"]
    assert private.disable_dynamo(lambda: 3)() == 3
    with private.TorchDispatchMode():
        pass


def test_modules_keep_their_tensors_children_and_hooks_in_these_tables() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert [*private.parameters_of(module[0])] == ["weight", "bias"]
    assert [*private.buffers_of(module[0])] == ["running_mean", "running_var", "num_batches_tracked"]
    assert [*private.children_of(module)] == ["0"]
    for table, name in zip(private.tables_of(module), private.TABLES, strict=True):
        assert table is getattr(module, name)
    assert not private.is_changed(module)
    module.register_forward_hook(len)
    module.register_forward_pre_hook(abs)
    module.register_full_backward_hook(max)
    module.register_full_backward_pre_hook(min)
    assert [[*hooks.values()] for hooks in private.hooks_of(module)] == [[len], [abs], [max], [min]]
    assert [getattr(module, name) for name in private.HOOK_TABLES] == [*private.hooks_of(module)]
    assert private.is_changed(module)


def test_a_module_that_was_compiled_can_be_called_uncompiled() -> None:
    module = nn.Linear(2, 2)
    assert (private.is_compiled(module), private.compiled_calls_of(module)) == (False, [])
    module.compile(backend=lambda graph, inputs: pytest.fail("compiled"))
    assert private.is_compiled(module)
    assert private.is_changed(module)
    assert len(private.compiled_calls_of(module)) == 1
    x = torch.ones(1, 2)
    assert torch.equal(private.call_uncompiled(module, x), module.forward(x))


def test_tensors_count_writes_and_name_their_storage_and_operators_their_arguments() -> None:
    x = torch.zeros(4)
    count, view = private.write_count(x), x[1:]
    view.add_(1)
    assert private.write_count(x) == count + 1
    assert (private.is_view(x), private.is_view(view)) == (False, True)
    assert private.storage_id(view) == private.storage_id(x) != private.storage_id(torch.zeros(4))
    assert [each.name for each in private.schema_of(torch.ops.aten.relu.default).arguments] == ["self"]


def test_erased_nodes_are_known() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    assert not private.is_erased(node)
    graph.erase_node(node)
    assert private.is_erased(node)
