"""`shard_attribute`: whole numbers divided, everything else refused with the call to write instead."""

from __future__ import annotations

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core import PreconditionError


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
    (
        ("num_head",),
        "cannot apply shard_attribute('num_head') at 'heads': this Heads has no attribute 'num_head'; did you mean "
        "'num_heads'? its integer attributes: num_heads, head_dim, odd",
    ),
    (
        ("causal",),
        "cannot apply shard_attribute('causal') at 'heads': 'causal' must be a positive integer (got True); name a "
        "count or a size",
    ),
    (
        ("rate",),
        "cannot apply shard_attribute('rate') at 'heads': 'rate' must be a positive integer (got 0.5); name a count or "
        "a size",
    ),
    (
        ("proj",),
        "cannot apply shard_attribute('proj') at 'heads': 'proj' must be a positive integer (got a Linear); name a "
        "count or a size",
    ),
    (
        ("width",),
        "cannot apply shard_attribute('width') at 'heads': 'width' of Heads is a property; divide the attributes that "
        "it is computed from",
    ),
    (
        ("odd",),
        "cannot apply shard_attribute('odd') at 'heads': 'odd' has 7 elements, not divisible by tp size 2; choose a "
        "mesh size that divides it",
    ),
    (
        ("num_heads", "num_heads"),
        "cannot apply shard_attribute('num_heads') at 'heads': 'num_heads' is divided over mesh_dim 'tp' already, by "
        "#1 shard_attribute('num_heads') at 'heads'; leave 'num_heads' out",
    ),
]


@pytest.mark.parametrize(("names", "message"), ATTRIBUTES, ids=[message[13:60] for _, message in ATTRIBUTES])
def test_shard_attribute_says_what_to_write_instead(names: tuple[str, ...], message: str) -> None:
    sch = slapo.create_schedule(nn.ModuleDict({"heads": Heads()}), mesh={"tp": 2})
    for name in names[:-1]:
        sch["heads"].shard_attribute(name)
    with pytest.raises(PreconditionError) as refused:
        sch["heads"].shard_attribute(names[-1])
    assert str(refused.value) == message


def test_the_attributes_are_divided_on_the_instance_and_come_back() -> None:
    heads = Heads()
    sch = slapo.create_schedule(nn.ModuleDict({"heads": heads}), mesh={"tp": 2})
    sch["heads"].shard_attribute(["num_heads", "layers"])
    assert (heads.num_heads, heads.layers, heads.width, Heads.layers) == (2, 1, 16, 2)
    assert sch.records[0].effects == ("num_heads 4 -> 2", "layers (none) -> 1")
    sch.undo()
    assert (heads.num_heads, heads.layers, heads.width) == (4, 2, 32)
    assert "layers" not in vars(heads)


def test_an_attribute_that_shard_keeps_true_cannot_be_divided_again() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 8)), mesh={"tp": 2})
    with pytest.raises(PreconditionError) as refused:
        sch["0"].shard("weight", axis=0).shard_attribute("out_features")
    assert str(refused.value) == (
        "cannot apply shard_attribute('out_features') at '0': 'out_features' is divided over mesh_dim 'tp' already, by "
        "tp.shard of its weight; leave 'out_features' out"
    )
