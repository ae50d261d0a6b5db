"""Promises of globs: what each wildcard selects, in the model's order, and never nothing."""

from __future__ import annotations

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core.errors import ArgumentError, PathError
from slapo_core.tree.selection import matching
from slapo_testing.models import MLP, Tied, bert
from tests.messages import Messages

PATHS = ["", "a", "a.b", "a.b.c", "a.b1", "a.0", "a.1", "a.10", "x", "x.b", "x.b.c"]


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("*", ["a", "x"]),
        ("**", PATHS),
        ("*.b", ["a.b", "x.b"]),
        ("a.*", ["a.b", "a.b1", "a.0", "a.1", "a.10"]),
        ("a.**", ["a.b", "a.b.c", "a.b1", "a.0", "a.1", "a.10"]),
        ("**.c", ["a.b.c", "x.b.c"]),
        ("**.b.*", ["a.b.c", "x.b.c"]),
        ("a.**.c", ["a.b.c"]),
        ("**.b", ["a.b", "x.b"]),
        ("**.a", ["a"]),
        ("a.?", ["a.b", "a.0", "a.1"]),
        ("a.??", ["a.b1", "a.10"]),
        ("a.[0-3]", ["a.0", "a.1"]),
        ("a.[!0-3]", ["a.b"]),
        ("a.b*", ["a.b", "a.b1"]),
        ("a.[b]", ["a.b"]),
        ("a.[01]0", ["a.10"]),
        ("a[!x]b", []),
        ("a?b", []),
        ("a*b", []),
        ("", [""]),
        ("?", ["a", "x"]),
        ("a.[", []),
    ],
)
def test_wildcards(pattern: str, selected: list[str]) -> None:
    if pattern:
        assert matching(pattern, PATHS) == selected
    else:
        assert matching(pattern, [path for path in PATHS if path]) == []


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.[0-11]", "sch['layers.*'][0:12]"),
        ("layers.[10-12].0", "sch['layers.*'][10:13]"),
        ("layers.[!0-11]", "sch['layers.*'][12:]"),
        ("layers.[!3-12].0", "sch['layers.*'][:3] and sch['layers.*'][13:]"),
        ("layers.[3-0]", "sch['layers.*'][0:4]"),
    ],
)
def test_range_of_numbers_is_refused_because_a_glob_has_none(pattern: str, hint: str, message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    with pytest.raises(PathError) as caught:
        sch[pattern]
    message(caught, "a set of single characters", f"  hint: {hint}")


@pytest.mark.parametrize(
    ("expression", "glob"),
    [
        (r"bert.encoder.layer.\d+", "sch['bert.encoder.layer.*']"),
        (r"bert\.encoder\.layer\.(0|2)", "sch['bert.encoder.layer.[02]']"),
        (r"^bert.encoder.layer.[0-9]+.attention$", "sch['bert.encoder.layer.*.attention']"),
        (r"bert.encoder.layer.[^1]\.attention", "sch['bert.encoder.layer.[!1].attention']"),
        ("bert.encoder.*attention", "sch['bert.encoder.**.attention']"),
        (r".*\.(query|key)", "'bert.encoder.layer.0.attention.self.query', "),
        (r"encoder\.layers\.\d", "** any number of levels"),
    ],
)
def test_a_regular_expression_is_told_with_the_glob_that_selects_the_same(
    expression: str, glob: str, message: Messages
) -> None:
    sch = slapo.create_schedule(bert())
    with pytest.raises(PathError) as caught:
        sch[expression]
    message(caught, "regular expression", glob)


def test_a_regular_expression_below_a_group(message: Messages) -> None:
    sch = slapo.create_schedule(bert())
    for expression, glob in ((r"attention\.\w+", ".attention.*']"), (r"attention.[a-z]+", "sch['attention.*']")):
        with pytest.raises(PathError) as caught:
            sch["bert.encoder.layer.*"][expression]
        message(caught, "regular expression", glob)


def test_glob_that_matches_nothing_is_an_error_with_close_matches(message: Messages) -> None:
    sch = slapo.create_schedule(bert())
    with pytest.raises(PathError) as caught:
        sch["bert.encoder.layers.*"]
    message(caught, "matches no module", "sch['bert.encoder.layer.*']")
    with pytest.raises(PathError, match="matches no module"):
        sch["zzz.*"]
    with pytest.raises(PathError):
        sch["bert.encoder.layer.*"]["nothing"]
    with pytest.raises(PathError) as caught:
        sch["bert.encoder.layer.*"]["nothing.*"]
    message(caught, "'nothing.*'", "3 nodes")
    with pytest.raises(PathError, match="not a range of numbers"):
        sch["**"]["[0-11]"]


def test_group_iterates_indexes_and_goes_down(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    group = sch["layers.*"]
    assert len(group) == 4
    assert [node.path for node in group] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert group[-1].path == "layers.3"
    assert [node.path for node in group[1:3]] == ["layers.1", "layers.2"]
    assert [node.path for node in group["0"]] == [f"layers.{i}.0" for i in range(4)]
    assert [node.path for node in group[:1]["[03]"]] == ["layers.0.0", "layers.0.3"]
    assert repr(group[1:]) == "<Group 'layers.*[1:None]': 3 nodes>"
    with pytest.raises(PathError) as caught:
        group[9:]
    message(caught, "selects none")
    with pytest.raises(IndexError):
        group[4]


def test_node_below_several_nodes_of_a_group_counts_once() -> None:
    sch = slapo.create_schedule(MLP(1))
    nested = sch["**"]["**.0.0"]
    assert [node.path for node in nested] == ["layers.0.0"]
    nested.annotate("weight", "mark", 1)
    assert len(sch.records) == 1


def test_group_broadcasts_and_chains() -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    group = sch["layers.*.0"].annotate("weight", "a", 1).annotate("bias", "b", 2)
    assert len(group) == 4
    assert [record.path for record in sch.records] == [f"layers.{i}.0" for i in range(4)] * 2
    assert all(layer[0].weight.a == 1 and layer[0].bias.b == 2 for layer in model.layers)


def test_shared_modules_are_selected_once_and_in_the_models_order() -> None:
    sch = slapo.create_schedule(Tied())
    assert [node.path for node in sch["*"]] == ["embed", "shared", "out"]
    assert [node.path for node in sch["again.**"]] == ["shared.0", "shared.1"]
    layer = nn.Sequential(nn.Linear(2, 2))
    albert = slapo.create_schedule(nn.ModuleList([layer, layer, layer]))
    assert [node.path for node in albert["*"]] == ["0"]
    assert [node.path for node in albert["2.*"]] == ["0.0"]
    albert["*"].checkpoint()
    assert len(albert.records) == 1


def test_glob_goes_on_from_a_node() -> None:
    sch = slapo.create_schedule(bert())
    layer = sch["bert.encoder.layer.1"]
    assert [node.path for node in layer["**.dense"]] == [
        "bert.encoder.layer.1.attention.output.dense",
        "bert.encoder.layer.1.intermediate.dense",
        "bert.encoder.layer.1.output.dense",
    ]
    assert len(sch["**.query"]) == 3
    assert len(sch["bert.encoder.layer.[02].attention.self.*"]) == 8


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.*.attn", "did you mean sch['layers.*.self_attn']?"),
        ("layers.*.attention", "below 'layers.*' there are self_attn, mlp"),
        ("layrs.*.mlp", "did you mean sch['layers.*.mlp']?"),
        ("**.selfattn", "did you mean sch['**.self_attn']?"),
        ("layers.*.mpl.0", "did you mean sch['layers.*.mlp.0']?"),
        ("layers.*.mlp.act", "below 'layers.*.mlp' there are 0"),
        ("layers[1]", "did you mean sch['layers.1']?"),
        ("x*", "the model has layers"),
    ],
)
def test_a_pattern_without_a_match_suggests_modules_of_the_level_that_is_wrong(pattern: str, hint: str) -> None:
    layers = [nn.ModuleDict({"self_attn": nn.Linear(1, 1), "mlp": nn.Sequential(nn.ReLU())}) for _ in range(2)]
    sch = slapo.create_schedule(nn.ModuleDict({"layers": nn.ModuleList(layers)}))
    with pytest.raises(PathError, match="matches no module") as caught:
        sch[pattern]
    assert caught.value.hint == hint


def test_in_says_whether_a_path_or_a_pattern_is_there_and_a_loop_is_told_what_to_write(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    for path in ("", "head", "layers.*", "layers.0.1"):
        assert path in sch
    for path in ("head.0", "lm_head", "layers.*.x", "layers."):
        assert path not in sch
    assert "0.1" in sch["layers"]
    assert "99" not in sch["layers"]
    assert sch["layers"][0] is sch["layers.0"], "and not the list itself"
    assert sch["layers"][1] is sch["layers.1"]
    for call, hint in (
        (lambda: 0 in sch, '"encoder.layer.0" in sch'),
        (lambda: list(sch), "for node in sch.root.walk()"),
        (lambda: list(sch["layers"]), "for node in sch['layers'].children"),
        (lambda: sch["layers"][:1], "sch['layers.*'][1:3]"),
        (lambda: sch["layers"][None], 'node["dense"]'),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()  # type: ignore[no-untyped-call]
        message(caught, hint)
