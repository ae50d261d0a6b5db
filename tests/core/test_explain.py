"""Promise: ``explain`` reports what every step changed, and folds only what is the same."""

from __future__ import annotations

import re

import torch
from torch import nn

import slapo_core as slapo
from slapo_core.tree.render import fold_numbers
from slapo_testing.models import MLP, Tied, bert
from tests.support.edits import Call, Halve


def _plain(text: str) -> str:
    """Without the version and the line numbers of this file."""
    text = re.sub(r"slapo-core [\w.+]+\]", "slapo-core V]", text)
    return re.sub(r"tests/core/test_explain\.py:\d+", "FILE:N", text)


def test_no_steps() -> None:
    assert slapo.create_schedule(MLP()).explain() == "no steps: the model runs as its author wrote it"


def test_steps_of_repeated_layers_are_folded() -> None:
    sch = slapo.create_schedule(bert(num_hidden_layers=4), mesh={"tp": 2})
    for layer in sch["bert.encoder.layer.*"]:
        layer["attention.self.query"].apply(Halve())
        layer.checkpoint()
    sch["bert.embeddings.*"][:1].annotate("weight", "mark", True)
    sch["bert.encoder.layer.[03].output.dense"].annotate("bias", "mark", True)
    sch.checkpoint()
    assert _plain(sch.explain()) == (
        """\
#1,3,5,7 halve() at 'bert.encoder.layer.{0-3}.attention.self.query' (x 4)  [test.halve, tests local]  FILE:N
    weight (16, 16) -> (8, 16), tp: S(0)
    bias (16,) -> (8,), tp: S(0)
#2,4,6,8 checkpoint() at 'bert.encoder.layer.{0-3}' (x 4)  [core.checkpoint, slapo-core V]  FILE:N
    forward wrapped by Checkpointed
#9 annotate('weight', key='mark', value=True) at 'bert.embeddings.word_embeddings'  """
        """[core.annotate, slapo-core V]  FILE:N
    weight.mark = True
#10-11 annotate('bias', key='mark', value=True) at 'bert.encoder.layer.{0,3}.output.dense' (x 2)  """
        """[core.annotate, slapo-core V]  FILE:N
    bias.mark = True
#12 checkpoint() at the root  [core.checkpoint, slapo-core V]  FILE:N
    forward wrapped by Checkpointed"""
    )


def test_tied_tensors_are_named() -> None:
    sch = slapo.create_schedule(Tied(), mesh={"tp": 2})
    sch["out"].apply(Halve())
    assert sch.records[0].edits == ("weight (10, 8) -> (5, 8), tp: S(0), tied with out.weight",)


def test_changes_below_the_node_have_paths_and_are_folded() -> None:
    def freeze(node, edit):
        for name in ("query", "key"):
            edit.set_requires_grad(node[name], "weight", False)

    sch = slapo.create_schedule(bert(num_hidden_layers=2))
    for layer in sch["bert.encoder.layer.*"]:
        layer["attention.self"].apply(Call(freeze))
    assert [line.strip() for line in sch.explain().splitlines()[1:]] == [
        "'query': weight is frozen",
        "'key': weight is frozen",
    ]


def test_many_numbers_and_names_in_quotes_are_folded() -> None:
    sch = slapo.create_schedule(bert(num_hidden_layers=10))
    noted = Call(lambda node, edit: edit.note(f"graph of '{node.path}'"))
    for layer in sch["bert.encoder.layer.*"]:
        layer.apply(noted)
        layer.checkpoint()
    first, effect, second, _ = _plain(sch.explain()).splitlines()
    assert first.startswith("#1,...,19 ")
    assert first.count("(x 10)") == 1
    assert effect.strip() == "graph of 'bert.encoder.layer.0'"
    assert second.startswith("#2,...,20 checkpoint() at 'bert.encoder.layer.{0-9}' (x 10)")


def test_different_effects_are_never_folded() -> None:
    """Numbers inside values are no layer numbers."""
    sch = slapo.create_schedule(MLP())
    values = iter([0.1, 0.2, 0.2])

    def rate(node: slapo.Node, edit: slapo.Edit) -> None:
        edit.set_attribute(node, "rate", next(values))

    change = Call(rate)
    for index in range(3):
        sch[f"layers.{index}"].apply(change)
    text = sch.explain()
    assert "rate (none) -> 0.1" in text
    assert "rate (none) -> 0.2" in text
    assert "'layers.{1-2}' (x 2)" in text


def test_places_that_are_no_full_grid_are_listed() -> None:
    sch = slapo.create_schedule(MLP())
    for path in ("layers.0.0", "layers.1.3"):
        sch[path].checkpoint()
    assert "checkpoint() at 'layers.0.0', 'layers.1.3' (x 2)" in sch.explain()


def test_replace_says_what_became_of_each_parameter() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    sch["0"].replace(nn.Linear(2, 2, bias=False), drop="bias")
    lines = sch.explain().splitlines()
    assert lines[1:] == [
        "    module Linear -> Linear",
        "    weight (2, 2), other values",
        "    parameters taken over from the old module: weight; dropped: bias",
    ]


def test_effects_of_a_step_survive_undo_of_later_ones() -> None:
    sch = slapo.create_schedule(MLP())
    sch["head"].apply(Call(lambda n, e: e.set_parameter(n, "weight", torch.zeros(1))))
    text = sch.explain()
    sch["layers.0"].checkpoint()
    sch.undo()
    assert sch.explain() == text


def test_numbers_fold_into_ranges() -> None:
    assert fold_numbers([0, 1, 2, 5]) == "0-2,5"
    assert fold_numbers([3]) == "3"
    assert fold_numbers([1, 3, 4]) == "1,3-4"
