"""The names of torch that are not public mean what graphs take them for, and stand in one module."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from slapo_core.internals import SafeFakeTensorMode
from slapo_graph import private
from tests.support.private_names import private_names


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_no_other_module_uses_a_private_name_of_torch_or_those_of_the_core() -> None:
    path = Path(private.__file__).parent
    assert private_names(path) == []
    assert not [file for file in path.rglob("*.py") if "slapo_core.private" in file.read_text()]


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
    with SafeFakeTensorMode() as mode:
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


def test_every_instance_has_its_mode_and_tables_and_no_class_computes_them() -> None:
    own = nn.Linear(2, 2).__dict__
    assert own["training"] is True
    assert own[private.PARAMETERS].keys() == {"weight", "bias"}
    assert own[private.CHILDREN] == {}
    assert private.HOOKS(own) == ({}, {}, {}, {})
    assert not any(name in own for name in private.FORWARDS)
    assert not any(hasattr(nn.Module, name) for name in ("training", private.PARAMETERS, private.CHILDREN))
    assert nn.Module.__eq__ is object.__eq__


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", "hpu"])
def test_autocast_of_every_kind_of_device_is_known(kind: str) -> None:
    assert not private.is_any_autocast_enabled()
    torch.set_autocast_enabled(kind, True)
    try:
        assert private.is_any_autocast_enabled()
    finally:
        torch.set_autocast_enabled(kind, False)


def test_a_module_that_was_compiled_can_be_called_uncompiled() -> None:
    module = nn.Linear(2, 2)
    assert (private.is_compiled(module), private.compiled_calls_of(module)) == (False, [])
    module.compile(backend=lambda graph, inputs: pytest.fail("compiled"))
    assert private.is_compiled(module)
    assert private.is_changed(module)
    assert private.FORWARDS[1] in module.__dict__
    assert len(private.compiled_calls_of(module)) == 1
    x = torch.ones(1, 2)
    assert torch.equal(private.call_uncompiled(nn.Module.__call__, module, x), module.forward(x))


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


def test_data_pointers_of_new_meta_tensors_are_refused() -> None:
    outside = torch.ones(2, 2, device="meta")
    with private.SafeMetaTensors():
        for tensor in (outside * 2, torch.empty(3, device="meta"), *(outside + 1).unbind(), (outside * 2)[1:]):
            with pytest.raises(RuntimeError, match="data pointer"):
                tensor.data_ptr()
        outside[1:].relu_()
    assert outside.data_ptr() == 0
    assert torch.ones(1).data_ptr() != 0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return factor * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return 7 * gradient, None


def test_custom_functions_are_called_through_a_function_also_where_apply_was_stored() -> None:
    doubled, seen = Doubled.apply, []

    def call(level: int, function: Any, run: Any, args: Any, kwargs: Any) -> Any:
        seen.append((level, function, args))
        return run(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with private.custom_functions_through(partial(call, 1)), private.custom_functions_through(partial(call, 2)):
        doubled(x, 2.0).sum().backward()
    assert seen == [(2, Doubled, (x, 2.0)), (1, Doubled, (x, 2.0))]
    assert Doubled.apply(x, 2.0).tolist() == [2, 2]
    assert len(seen) == 2
    assert x.grad is not None
    assert x.grad.tolist() == [7, 7]


def test_blocks_of_saved_tensors_hooks_are_announced() -> None:
    seen: list[str] = []
    with private.before_saved_tensors_hooks(lambda: seen.append("entered")), torch.autograd.graph.save_on_cpu():
        pass
    with torch.autograd.graph.save_on_cpu():
        pass
    assert seen == ["entered"]


def test_dropout_passes_its_default_on() -> None:
    mark, given = float("0.5"), []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            given.append((kwargs or {}).get("p"))
            return args[0]

    x = torch.ones(2, 2, 2)
    functions = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
    with private.dropout_default(mark), Seeing():
        for function in functions:
            function(x)
            function(x, 0.5)
    assert [p is mark for p in given] == [True, False] * 4
    assert [function.__defaults__[0] for function in functions] == [0.5] * 4
    assert not any(function.__defaults__[0] is mark for function in functions)


def test_methods_are_put_on_a_class_and_taken_off_again() -> None:
    class Own:
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    before = dict(vars(Own))
    restore = private.methods_put_on(Own, {"__setattr__": object.__setattr__, "read": len})
    assert restore is not None
    Own().x = 3
    restore()
    assert dict(vars(Own)) == before
    assert private.methods_put_on(list, {"read": len}) is None
