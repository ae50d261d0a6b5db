"""Promises of ``replace``: every parameter, tie, hook and mode of the old module is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import ApplyError, PreconditionError
from slapo_core.primitives.checkpoint import checkpoints
from slapo_testing import ModelSnapshot, assert_bit_identical
from slapo_testing.models import MLP, Block, Odd, Tied
from tests.messages import Messages
from tests.support.building import Split
from tests.support.edits import Call, Halve


class Scaled(nn.Module):
    """Like ``nn.Linear``, with other names."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * nn.functional.linear(x, self.matrix, self.bias)


class LoRA(nn.Module):
    """The old layer lives on inside."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.zeros(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def _refusal(call: Callable[[], Any], error: type[Exception] = PreconditionError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_module_takes_over_the_old_weights_as_the_same_objects() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(2, 8)
    before, expected = ModelSnapshot(model), model(x)
    weight, bias = model.head.weight, model.head.bias
    new = nn.Linear(8, 4)
    sch = slapo.create_schedule(model)
    node = sch["head"].replace(new)
    assert node.module is model.head is sch["head"].module is new
    assert new.weight is weight
    assert new.bias is bias
    assert torch.equal(model(x), expected)
    assert sch.records[0].edits == (
        "module Linear -> Linear",
        "weight (4, 8), other values",
        "bias (4,), other values",
        "parameters taken over from the old module: weight, bias",
    )
    own = [name for name, _ in new.named_parameters()]
    sch.undo()
    assert_bit_identical(before, model)
    assert own == ["weight", "bias"]
    assert new.weight is not weight, "the new module has its own weights again"


def test_factory_gets_the_old_module() -> None:
    model = MLP()
    old, seen = model.head, []

    def make(module: nn.Module) -> nn.Module:
        seen.append(module)
        return nn.Linear(8, 4)

    slapo.create_schedule(model)["head"].replace(make)
    assert seen == [old]
    assert model.head is not old


def test_renamed_parameters_keep_their_origin() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(2, 8)
    weight, expected = model.head.weight, model(x)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["head"].replace(Scaled(8, 4), params={"weight": "matrix"})
    assert model.head.matrix is weight
    assert torch.equal(model(x), expected)
    assert sch["head"].layout("matrix").origin == "head.weight"
    assert sch.records[0].edits[-1] == (
        "parameters taken over from the old module: matrix, bias; added: gain; renamed: weight -> matrix"
    )
    sch["head"].apply(Halve())
    assert sch["head"].layout("matrix").origin == "head.weight"
    assert sch["head"].layout("matrix").shape == (4, 8)
    assert sch["head"].layout("gain").origin == ""
    sch.undo(to=0)
    assert sch._core.tree.layouts == {}
    assert sch["head"].layout("weight").origin == "head.weight"


def test_lora_wraps_the_old_module_and_knows_where_its_weights_came_from() -> None:
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(2, 8)
    old, expected = model.head, model(x)
    calls: list[str] = []
    old.register_forward_hook(lambda *_: calls.append("ran"))
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["head"].apply(Halve())
    sch.undo()
    sch["head"].replace(lambda old: LoRA(old))
    assert model.head.base is old is sch["head.base"].module
    assert torch.equal(model(x), expected)
    assert calls == ["ran"], "the hook runs where it is, once"
    assert sch["head.base"].layout("weight").origin == "head.weight"
    assert sch["head.base"].layout("bias").origin == "head.bias"
    assert sch["head"].layout("up").origin == ""
    sch.undo()
    assert_bit_identical(before, model)


def test_lora_after_a_shard_keeps_the_layout() -> None:
    model = MLP()
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["head"].apply(Halve())
    layout = sch["head"].layout("weight")
    assert layout.shards() == (("tp", 0),)
    sch["head"].replace(lambda old: LoRA(old))
    assert sch["head.base"].layout("weight") == layout
    assert "head.weight" not in sch._core.tree.layouts
    sch.undo()
    assert sch["head"].layout("weight") == layout
    assert "head.base.weight" not in sch._core.tree.layouts


def test_dropped_and_unknown_parameters(message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    message(_refusal(lambda: sch["head"].replace(nn.Linear(8, 4, bias=False))), "'bias' (4,)", 'drop=["bias"]')
    message(_refusal(lambda: sch["head"].replace(nn.Linear(8, 4), drop="biass")), "'biass'")
    sch["head"].replace(nn.Linear(8, 4, bias=False), drop="bias")
    assert sch.records[0].edits[-1] == "parameters taken over from the old module: weight; dropped: bias"
    assert sch["head"].parameters.keys() == {"weight"}


@pytest.mark.parametrize(
    ("path", "new", "word"),
    [
        ("", nn.ReLU(), "the root"),
        ("head", nn.Linear, "class Linear"),
        ("head", 3, "got 3"),
        ("head", nn.Linear(9, 4), "shape (4, 8)"),
    ],
)
def test_module_with_other_tensors_is_refused(path: str, new: Any, word: str, message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    before = ModelSnapshot(model)
    message(_refusal(lambda: sch._core.tree.node(path).replace(new)), word)
    assert_bit_identical(before, model)


def test_a_module_that_needs_another_argument_is_refused() -> None:
    sch = slapo.create_schedule(MLP())
    before = ModelSnapshot(sch.model)
    assert "argument 'input2'" in _refusal(lambda: sch["head"].replace(nn.Bilinear(8, 2, 4)))
    assert_bit_identical(before, sch.model)


def test_module_of_the_model_itself_is_refused(message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    message(_refusal(lambda: sch["layers.0.0"].replace(model.layers[0][0])), "'layers.0.0'", "the old one")
    message(_refusal(lambda: sch["layers.0.0"].replace(model.layers[1][0])), "in the model already")
    holder = nn.Module()
    holder.inner = model.layers
    holder.forward = model.layers[0].forward  # type: ignore[method-assign]
    message(_refusal(lambda: sch["layers.0"].replace(holder)), "contains 'layers'")
    message(_refusal(lambda: sch["head"].replace(lambda old: old), ApplyError), "the old one")


def test_factory_that_fails_or_returns_no_module(message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    before = ModelSnapshot(model)
    message(_refusal(lambda: sch["head"].replace(lambda old: None), ApplyError), "'head'", "got None")
    assert "ZeroDivisionError: division by zero" in _refusal(lambda: sch["head"].replace(lambda old: 1 / 0), ApplyError)
    text = _refusal(lambda: sch["head"].replace(lambda old: nn.Linear(3, 3)), ApplyError)
    message(text, "does not fit", "shape (4, 8)")
    assert_bit_identical(before, model)


class Keywords(nn.Module):
    def forward(self, a: Any, b: Any = None, *, c: Any = 1) -> Any:
        return a


class Permuted(nn.Module):
    def forward(self, b: Any, a: Any = None, *, c: Any = 1) -> Any:
        return a


class Renamed(nn.Module):
    def forward(self, hidden: Any, mask: Any = None, *, c: Any = 1) -> Any:
        return hidden


class NoKeyword(nn.Module):
    def forward(self, a: Any, b: Any = None) -> Any:
        return a


class NeedsMore(nn.Module):
    def forward(self, a: Any, b: Any, d: Any, *, c: Any = 1) -> Any:
        return a


class TakesAll(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0]


@pytest.mark.parametrize(
    ("new", "word"),
    [
        (Permuted(), "does not take what forward"),
        (NoKeyword(), "keyword argument 'c'"),
        (NeedsMore(), "argument 'd'"),
        (TakesAll(), None),
        (Keywords(), None),
        (Renamed(), None),
    ],
)
def test_signature_of_the_new_forward(new: nn.Module, word: str | None, message: Messages) -> None:
    sch = slapo.create_schedule(nn.ModuleDict({"m": Keywords()}))
    if word is None:
        sch["m"].replace(new)
    else:
        message(_refusal(lambda: sch["m"].replace(new)), word)


def test_ties_are_kept() -> None:
    model = Tied()
    weight = model.embed.weight
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    sch["out"].replace(nn.Linear(8, 10, bias=False))
    assert model.out.weight is model.embed.weight is weight
    assert sch["embed"].ties("weight") == ("embed.weight", "out.weight")
    sch["embed"].replace(nn.Embedding(10, 8))
    assert model.out.weight is model.embed.weight is weight
    sch.undo(to=0)
    assert_bit_identical(before, model)


def test_shared_module_is_replaced_under_every_name() -> None:
    model = Tied()
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    sch["again"].replace(lambda old: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    assert model.shared is model.again is sch["shared"].module
    sch["again.0"].replace(nn.Linear(8, 8))
    assert model.shared[0] is model.again[0]
    sch.undo(to=0)
    assert_bit_identical(before, model)


def test_two_weights_never_become_one(message: Messages) -> None:
    class Two(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            if tie:
                self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    sch = slapo.create_schedule(nn.ModuleDict({"m": Two(tie=False)}))
    message(_refusal(lambda: sch["m"].replace(Two(tie=True))), "'a.weight' and 'b.weight'", "one tensor")
    model = nn.ModuleDict({"m": Two(tie=True)})
    slapo.create_schedule(model)["m"].replace(Two(tie=False))
    assert model["m"].a.weight is model["m"].b.weight, "the tie of the old one stays"


def test_hooks_of_the_user_run_on_the_new_module() -> None:
    torch.manual_seed(0)
    model, x = Odd(), torch.randn(1, 2, 8)
    calls: list[str] = []
    hooked = model.hooked
    hooked.register_forward_pre_hook(lambda m, args: calls.append(f"pre {type(m).__name__}"))
    hooked.register_forward_hook(lambda m, args, kwargs, out: calls.append("post") or out * 2, with_kwargs=True)
    hooked.register_forward_hook(lambda m, args, out: out + 1)
    hooked.register_full_backward_pre_hook(lambda m, grad: calls.append("backward"))
    expected = model(x)
    expected.sum().backward()
    first = list(calls)
    calls.clear()

    class Linear(nn.Linear):
        pass

    before = ModelSnapshot(model)
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad()
    sch = slapo.create_schedule(model)
    sch["hooked"].replace(Linear(8, 8))
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert first == ["pre Linear", "post", "backward"]
    assert calls == ["pre Linear", "post", "pre Linear", "post", "backward"]
    sch.undo()
    for parameter in model.parameters():
        parameter.grad = gradients[parameter]
    assert_bit_identical(before, model)
    assert model.hooked is hooked


def test_replaced_module_keeps_wrappers_that_fit_any_forward() -> None:
    model = nn.Sequential(Block(4), Block(4))
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    sch["0"].replace(Block(4))
    assert checkpoints(sch["0"])
    assert slapo.verify(sch, torch.randn(2, 4, 8, 8), optimizer_steps=0).steps_verified == 2
    sch.undo(to=0)
    assert_bit_identical(before, model)


def test_changed_forward_or_hooks_below_are_never_lost_silently(message: Messages) -> None:
    model = nn.Sequential(Block(4), Block(4))
    sch = slapo.create_schedule(model)
    sch["0.conv1"].checkpoint()
    message(_refusal(lambda: sch["0"].replace(Block(4))), "the forward of '0.conv1'", "#1 checkpoint() at '0.conv1'")
    handle = model[1].bn1.register_forward_hook(lambda *_: None)
    message(_refusal(lambda: sch["1"].replace(Block(4))), "drop hooks of '1.bn1' (1 set")
    handle.remove()
    sch["1"].replace(Block(4))
    # What lives on inside of the new module is not lost.
    sch["0"].replace(lambda old: nn.Sequential(old))
    assert "forward" in sch["0.0.conv1"].module.__dict__


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_carried(training: bool) -> None:
    model = nn.Sequential(Block(4)).train(training)
    new = Block(4).train(not training)
    before = ModelSnapshot(new)
    sch = slapo.create_schedule(model)
    sch["0"].replace(new)
    assert {module.training for module in model.modules()} == {training}
    sch.undo()
    assert_bit_identical(before, new)


def test_buffers_are_taken_over() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(4))
    model[0].bn1.running_mean.normal_()
    mean = model[0].bn1.running_mean
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    sch["0.bn1"].replace(nn.BatchNorm2d(4))
    assert model[0].bn1.running_mean is mean
    assert "0.bn1.running_mean" in model.state_dict()
    assert "'running_mean' is a buffer of shape (4,)" in _refusal(
        lambda: sch["0.bn1"].replace(nn.InstanceNorm2d(5, affine=True, track_running_stats=True))
    )
    sch.undo()
    assert_bit_identical(before, model)


def test_meta_model_stays_on_meta_and_keeps_its_ties() -> None:
    with torch.device("meta"):
        model = Tied()
    weight = model.embed.weight
    sch = slapo.create_schedule(model)
    sch["out"].replace(nn.Linear(8, 10, bias=False))
    assert model.out.weight is model.embed.weight is weight
    assert all(parameter.is_meta for parameter in model.parameters())


def test_equivalence_follows_from_the_arguments() -> None:
    sch = slapo.create_schedule(MLP())
    sch["head"].replace(nn.Linear(8, 4))
    sch["layers.0.0"].replace(nn.Linear(8, 16), rtol=1e-3)
    sch["layers.0.1"].replace(nn.Identity(), atol=0.5)
    assert [str(record.primitive.equivalence) for record in sch.records] == [
        "REORDERED",
        "APPROXIMATE(rtol=0.001, atol=0)",
        "APPROXIMATE(rtol=0, atol=0.5)",
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_new_tensor_does_not_take_over_a_shard_of_its_shape(size: int, message: Messages) -> None:
    """It would fit on meshes of that size only."""
    model = MLP()
    sch = slapo.create_schedule(model, mesh={"tp": size})
    sch["head"].apply(Split(("weight",)))
    new = nn.Linear(8, 4 // size)
    new.bias = model.head.bias
    message(_refusal(lambda: sch["head"].replace(new)), "'weight' is a shard (tp: S(0))", 'drop=["weight"]')


def test_layout_of_a_module_shared_with_another_place_survives_replacing_its_first_place() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Embedding(4, 8))
            self.decoder = nn.Sequential(self.encoder[0])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.encoder(ids) + self.decoder(ids)

    model = Two()
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["decoder.0"].apply(Halve())
    layout = sch["decoder.0"].layout("weight")

    def with_the_same_weight(old: nn.Sequential) -> nn.Module:
        new = nn.Sequential(nn.Embedding(2, 8))
        new[0].weight = old[0].weight
        return new

    sch["encoder"].replace(with_the_same_weight)
    assert model.encoder[0].weight is model.decoder[0].weight
    assert sch["decoder.0"].layout("weight") == layout
    assert sch["encoder.0"].layout("weight") == layout
    with sch.rewound(1):
        assert sch["decoder.0"].layout("weight") == layout
    assert sch["decoder.0"].layout("weight") == layout
    sch.undo()
    assert sch["decoder.0"].layout("weight") == layout
    sch.undo()
    assert sch._core.tree.layouts == {}


def test_a_module_that_is_elsewhere_too_stays_known_when_one_place_of_it_goes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.BatchNorm1d(2))
            self.decoder = nn.Sequential(self.encoder[0])

    def give_another_buffer(model: Two) -> None:
        model.decoder[0].running_mean = torch.zeros(2)  # the user's, of a module that no step put in or took out

    replaced, added = Two(), Two()
    sch = slapo.create_schedule(replaced)
    sch["encoder"].replace(lambda old: nn.Sequential(nn.BatchNorm1d(2)))
    give_another_buffer(replaced)
    sch._core.tree.tensors.check_unchanged()
    sch = slapo.create_schedule(added)
    sch["encoder.0"].annotate("weight", "key", 1)
    shared = nn.Sequential(added.encoder[0])
    sch.apply(Call(lambda node, edit: edit.add_module(node, "again", shared) and None))
    sch.undo()
    give_another_buffer(added)
    sch._core.tree.tensors.check_unchanged()
