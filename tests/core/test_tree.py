"""Promises of the tree: the same places as ``get_submodule``, facts, ties, aliases, and messages that help."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import ArgumentError, PathError, StaleError
from slapo_testing.models import CNN, MLP, MODELS, Tied, bert, run
from tests.messages import Messages
from tests.support.edits import Call, Halve, HookAll


def _error(call: Callable[[], Any], error: type[Exception] = PathError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def _assert_same_places(sch: slapo.Schedule, model: nn.Module) -> int:
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for path in paths:
        assert sch[path].module is model.get_submodule(path), path
    return len(paths)


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.parametrize("name", MODELS)
def test_every_path_addresses_what_get_submodule_gives_before_and_after(name: str) -> None:
    model = MODELS[name]()
    sch = slapo.create_schedule(model)
    count = _assert_same_places(sch, model)
    names = list(model.state_dict())
    loss = run(model.eval(), name).detach()
    for path in list(sch._core.tree.index.modules):
        node = sch[path]
        if type(node.module).forward is not nn.Module.forward:
            node.checkpoint()
        node.apply(HookAll())
        for parameter in node.parameters:
            node.annotate(parameter, "mark", path)
        if isinstance(node.module, (nn.Linear, nn.LayerNorm, nn.Conv2d)):
            sch.undo(to=node.records[0].index - 1)
            node.replace(copy.deepcopy(node.module))
        assert sch[path] is node
    assert _assert_same_places(sch, model) == count
    assert list(model.state_dict()) == names
    assert torch.equal(run(model, name), loss)
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, name), loss)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert not torch.equal(run(twin, name), loss)
    assert torch.equal(run(model, name), loss)
    sch.undo(to=0)
    assert _assert_same_places(sch, model) == count


def test_unknown_path_names_close_matches(message: Messages) -> None:
    sch = slapo.create_schedule(bert())
    message(_error(lambda: sch["bert.encoder.layer.0.atention.self"]), "sch['bert.encoder.layer.0.attention.self']")
    message(_error(lambda: sch["decoder"]), "'decoder'", "sch['cls.predictions.decoder']")
    message(_error(lambda: sch["bert.encoder.layer.7"]), "'bert.encoder.layer.7'")
    message(_error(lambda: sch["xyzzy"]), "'xyzzy'", "print(sch)")
    message(_error(lambda: sch["bert"]["encoderr"]), "'bert.encoderr'", "sch['bert.encoder']")


@pytest.mark.parametrize("path", [0, None, ("a",), b"head"])
def test_path_must_be_a_string(path: Any, message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    message(_error(lambda: sch[path], ArgumentError), f"got {path!r}")


@pytest.mark.parametrize("path", [".", "head.", ".head", "layers..0", "head.weight"])
def test_malformed_path_is_unknown(path: str, message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    message(_error(lambda: sch[path]), f"'{path}'")


def test_model_must_be_a_module(message: Messages) -> None:
    message(_error(lambda: slapo.create_schedule(MLP), ArgumentError), "got type")


def test_facts_of_a_node() -> None:
    model = CNN()
    sch = slapo.create_schedule(model)
    node = sch["blocks.0.bn1"]
    assert node.path == "blocks.0.bn1"
    assert node.module is model.blocks[0].bn1
    assert node.parent is sch["blocks.0"]
    assert node.parent.parent.parent is sch.root is sch[""]
    assert sch.root.parent is None
    assert [child.path for child in sch["blocks.0"].children] == ["blocks.0.conv1", "blocks.0.bn1", "blocks.0.conv2"]
    assert {name: tuple(p.shape) for name, p in node.parameters.items()} == {"weight": (4,), "bias": (4,)}
    assert node.buffers.keys() == {"running_mean", "running_var", "num_batches_tracked"}
    assert node.mesh is None
    assert [below.path for below in sch["blocks.1"].walk()][:2] == ["blocks.1", "blocks.1.conv1"]
    assert len(list(sch.root.walk())) == len(list(model.modules()))
    assert repr(sch["fc"]) == "<Node 'fc': Linear, weight (5, 4), bias (5,)>"
    assert repr(sch) == "<Schedule of CNN: 0 steps>"
    assert sch["stem"].parameters.keys() == {"weight"}, "an empty slot is no parameter"


def test_records_of_a_node() -> None:
    sch = slapo.create_schedule(MLP())
    sch["layers.0"].checkpoint()
    sch["layers.0.0"].annotate("weight", "mark", 1)
    sch["layers.1"].checkpoint()
    assert [record.index for record in sch["layers.0"].records] == [1]
    assert [record.index for record in sch["layers.0"].records_below()] == [1, 2]
    assert [record.index for record in sch.root.records_below()] == [1, 2, 3]
    assert sch["layers"].records == ()
    sch.undo()
    assert sch["layers.1"].records == ()


def test_record_names_the_users_line() -> None:
    sch = slapo.create_schedule(MLP())
    line = _error.__code__.co_firstlineno  # something of this file
    sch["layers.*"].checkpoint()
    file, _, number = sch.records[2].location.rpartition(":")
    assert file == "tests/core/test_tree.py"
    assert int(number) > line
    assert str(sch.records[2]) == "#3 checkpoint() at 'layers.2'"


def test_aliases_are_one_node() -> None:
    model = Tied()
    sch = slapo.create_schedule(model)
    assert sch["again"] is sch["shared"]
    assert sch["again.0"] is sch["shared.0"]
    assert sch["again"].path == "shared"
    assert sch["shared"].aliases == ("again",)
    assert sch["shared.0"].aliases == ("again.0",)
    assert sch["embed"].aliases == ()
    assert [node.path for node in sch["again.*"]] == ["shared.0", "shared.1"]
    sch["again"].checkpoint()
    assert [record.path for record in sch.records] == ["shared"]
    assert len(sch["shared"].records) == 1


def test_module_that_contains_itself_is_no_trap() -> None:
    model = MLP(1)
    model.layers[0].me = model  # type: ignore[assignment]
    sch = slapo.create_schedule(model)
    assert sch["layers.0.me"] is sch.root
    assert sch.root.aliases == ("layers.0.me",)
    assert [node.path for node in sch["layers.0.*"]] == ["", "layers.0.0", "layers.0.1", "layers.0.2", "layers.0.3"]
    assert "me: same module as ''" in str(sch)


def test_ties_are_known(message: Messages) -> None:
    model = Tied()
    sch = slapo.create_schedule(model)
    assert sch["out"].ties("weight") == ("embed.weight", "out.weight")
    assert sch["embed"].ties("weight") == ("embed.weight", "out.weight")
    assert sch["shared.0"].ties("bias") == ("shared.0.bias",)
    with torch.device("meta"):
        meta = bert()
    tied = ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")
    assert slapo.create_schedule(meta)["cls.predictions.decoder"].ties("weight") == tied
    text = _error(lambda: sch["out"].ties("bias"))
    assert _error(lambda: sch["out"].layout("bias")) == text
    message(text, "'out'", "'bias'", "it has weight")
    message(_error(lambda: sch.root.ties("x")), "the root", "'x'")


def test_removed_path_names_the_step(message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    kept = sch["layers.0.3"]
    parent = sch["layers.0"]
    sch["head"].checkpoint()
    parent.replace(nn.Sequential(nn.Identity()), drop=["0.weight", "0.bias", "3.weight", "3.bias"])
    message(
        _error(lambda: sch["layers.0.3"]),
        "'layers.0.3'",
        "step #2 replace(",
        "new module at 'layers.0'",
        "sch.undo(to=1)",
    )
    text = _error(lambda: kept.module, StaleError)
    message(text, "'layers.0.3'", "step #2 replace(", "sch.undo(to=1)")
    assert f" at 'layers.0', at {sch.records[1].location}, " in text
    assert _error(kept.checkpoint, StaleError) == text
    assert repr(kept) == "<Node 'layers.0.3': gone>"
    assert parent.module is model.layers[0]
    sch.undo()
    assert kept.module is model.layers[0][3]
    kept.checkpoint()


def test_changes_outside_of_the_schedule_are_noticed(message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    node = sch["head"]
    model.head = nn.Linear(8, 2)
    node.apply(Halve())
    assert model.head.weight.shape == (1, 8)
    model.extra = nn.ReLU()
    assert sch["extra"].module is model.extra
    model.later = nn.Tanh()
    assert "later: Tanh" in str(sch)
    held = sch["layers.3"]
    del model.layers[3]
    message(_error(held.checkpoint, StaleError), "'layers.3'", "outside of the schedule")


def test_name_with_glob_characters_is_a_name_first() -> None:
    model = nn.ModuleDict({"a[0]": nn.ReLU(), "a*": nn.Tanh(), "ab": nn.ReLU()})
    sch = slapo.create_schedule(model)
    assert sch["a[0]"].module is model["a[0]"]
    assert sch["a*"].module is model["a*"]


def test_replaced_node_goes_on_at_the_same_place() -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    node = sch["head"]
    old = node.module
    assert node.replace(nn.Linear(8, 4)) is node
    assert node.module is model.head is not old


def test_chained_call_continues_where_the_primitive_says() -> None:
    sch = slapo.create_schedule(MLP())

    def elsewhere(node: slapo.Node, edit: slapo.Edit) -> Any:
        edit.note("nothing")
        return node["0"]

    assert sch["layers.1"].apply(Call(elsewhere)) is sch["layers.1.0"]


# -- print(sch) ---------------------------------------------------------------------------------------------------


def test_print_of_a_small_model() -> None:
    sch = slapo.create_schedule(MLP(3), mesh={"tp": 2})
    sch["layers.1"].checkpoint()
    sch["head"].apply(Halve())
    assert str(sch) == (
        """\
MLP
├─ layers: ModuleList
│  ├─ 0: Sequential
│  │  ├─ 0: Linear  weight (16, 8), bias (16,)
│  │  ├─ 1: Dropout
│  │  ├─ 2: ReLU
│  │  └─ 3: Linear  weight (8, 16), bias (8,)
│  ├─ 1: Sequential  <- checkpoint()
│  │  ├─ 0: Linear  weight (16, 8), bias (16,)
│  │  ├─ 1: Dropout
│  │  ├─ 2: ReLU
│  │  └─ 3: Linear  weight (8, 16), bias (8,)
│  └─ 2: Sequential
│     ├─ 0: Linear  weight (16, 8), bias (16,)
│     ├─ 1: Dropout
│     ├─ 2: ReLU
│     └─ 3: Linear  weight (8, 16), bias (8,)
└─ head: Linear  weight (2, 8) of (4, 8) [tp: S(0)], bias (2,) of (4,) [tp: S(0)]  <- halve()"""
    )
    assert repr(sch) == "<Schedule of MLP: 2 steps, mesh={'tp': 2}>"


def test_print_of_aliases_and_of_a_plain_sequence() -> None:
    assert str(slapo.create_schedule(Tied())) == (
        """\
Tied
├─ embed: Embedding  weight (10, 8)
├─ shared: Sequential
│  ├─ 0: Linear  weight (8, 8), bias (8,)
│  └─ 1: Tanh
├─ again: same module as 'shared'
└─ out: Linear  weight (10, 8) tied to embed.weight"""
    )
    assert str(slapo.create_schedule(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Tanh()))) == (
        "Sequential\n├─ 0-1 x 2: ReLU\n└─ 2: Tanh"
    )


def test_print_of_bert_folds_its_layers() -> None:
    sch = slapo.create_schedule(bert())
    sch["bert.encoder.layer.*"].checkpoint()
    tie = "tied to bert.embeddings.word_embeddings.weight"
    decoder = f"weight (50, 16) {tie}, bias (50,) tied to cls.predictions.bias"
    assert str(sch) == (
        f"""\
BertForMaskedLM
├─ bert: BertModel
│  ├─ embeddings: BertEmbeddings
│  │  ├─ word_embeddings: Embedding  weight (50, 16)
│  │  ├─ position_embeddings: Embedding  weight (16, 16)
│  │  ├─ token_type_embeddings: Embedding  weight (2, 16)
│  │  ├─ LayerNorm: LayerNorm  weight (16,), bias (16,)
│  │  └─ dropout: Dropout
│  └─ encoder: BertEncoder
│     └─ layer: ModuleList
│        └─ layer.0-2 x 3: BertLayer  <- checkpoint()
│           ├─ attention: BertAttention
│           │  ├─ self: BertSelfAttention
│           │  │  ├─ query: Linear  weight (16, 16), bias (16,)
│           │  │  ├─ key: Linear  weight (16, 16), bias (16,)
│           │  │  ├─ value: Linear  weight (16, 16), bias (16,)
│           │  │  └─ dropout: Dropout
│           │  └─ output: BertSelfOutput
│           │     ├─ dense: Linear  weight (16, 16), bias (16,)
│           │     ├─ LayerNorm: LayerNorm  weight (16,), bias (16,)
│           │     └─ dropout: Dropout
│           ├─ intermediate: BertIntermediate
│           │  ├─ dense: Linear  weight (32, 16), bias (32,)
│           │  └─ intermediate_act_fn: GELUActivation
│           └─ output: BertOutput
│              ├─ dense: Linear  weight (16, 32), bias (16,)
│              ├─ LayerNorm: LayerNorm  weight (16,), bias (16,)
│              └─ dropout: Dropout
└─ cls: BertOnlyMLMHead
   └─ predictions: BertLMPredictionHead  bias (50,)
      ├─ transform: BertPredictionHeadTransform
      │  ├─ dense: Linear  weight (16, 16), bias (16,)
      │  ├─ transform_act_fn: GELUActivation
      │  └─ LayerNorm: LayerNorm  weight (16,), bias (16,)
      └─ decoder: Linear  {decoder}"""
    )
    sch.undo()
    text = str(sch)
    assert "layer.0-1 x 2: BertLayer  <- checkpoint()" in text
    assert "─ 2: BertLayer\n" in text
    assert text.count("query") == 2


def test_a_lazy_module_is_drawn_and_building_it_says_to_run_it_first(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
    assert str(sch).splitlines()[1] == "├─ 0: LazyLinear  weight (no shape yet), bias (no shape yet)"
    assert repr(sch["0"]) == "<Node '0': LazyLinear, weight (no shape yet), bias (no shape yet)>"
    told = set()
    for call in (slapo.build, lambda schedule: slapo.verify(schedule, torch.randn(2, 8))):
        with pytest.raises(slapo.WeightsError) as caught:
            call(sch)
        told.add(str(caught.value))
    message(*told, "0.weight, 0.bias")
