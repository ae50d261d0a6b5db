"""`shard_attribute`: whole numbers divided, everything else refused with the call to write instead."""

from __future__ import annotations

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core import PreconditionError
from tests.messages import Messages


class Heads(nn.Module):
    layers = 2  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.causal, self.rate, self.odd = 4, 8, True, 0.5, 7
        self.proj = nn.Linear(8, 8)

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


ATTRIBUTES = [
    (("num_head",), "did you mean 'num_heads'?"),
    (("causal",), "got True"),
    (("rate",), "got 0.5"),
    (("proj",), "got a Linear"),
    (("width",), "property"),
    (("odd",), "7 elements"),
    (("num_heads", "num_heads"), "#1 shard_attribute('num_heads') at 'heads'"),
]


@pytest.mark.parametrize(("names", "word"), ATTRIBUTES, ids=[names[-1] for names, _ in ATTRIBUTES])
def test_shard_attribute_says_what_to_write_instead(names: tuple[str, ...], word: str, message: Messages) -> None:
    sch = slapo.create_schedule(nn.ModuleDict({"heads": Heads()}), mesh={"tp": 2})
    for name in names[:-1]:
        sch["heads"].shard_attribute(name)
    with pytest.raises(PreconditionError) as refused:
        sch["heads"].shard_attribute(names[-1])
    message(refused, f"shard_attribute('{names[-1]}') at 'heads': ", word)


def test_shard_attribute_divides_on_the_instance_and_undo_restores() -> None:
    heads = Heads()
    sch = slapo.create_schedule(nn.ModuleDict({"heads": heads}), mesh={"tp": 2})
    sch["heads"].shard_attribute(["num_heads", "layers"])
    assert (heads.num_heads, heads.layers, heads.width, Heads.layers) == (2, 1, 16, 2)
    assert sch.records[0].edits == ("num_heads 4 -> 2", "layers (none) -> 1")
    sch.undo()
    assert (heads.num_heads, heads.layers, heads.width) == (4, 2, 32)
    assert "layers" not in vars(heads)


def test_attribute_updated_by_shard_cannot_be_divided_again(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 8)), mesh={"tp": 2})
    with pytest.raises(PreconditionError) as refused:
        sch["0"].shard("weight", axis=0).shard_attribute("out_features")
    message(refused, "'out_features'", "mesh_dim 'tp' already", "tp.shard of its weight")
