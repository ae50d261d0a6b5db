"""`trace(tracer="fx")` computes what the forward computes, or refuses."""

import copy

import pytest
import torch
from slapo_fx import FxTracer
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo

X = torch.randn(3, 4, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(4, 8), nn.Linear(8, 4), 0.5
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x, scale=None, *, flip=False):
        h = self.down(F.gelu(self.up(x))) * self.gain + self.shift
        h = h if scale is None else h * scale
        return x - h if flip else x + h.reshape(x.shape[0], -1)


def scheduled(module):
    model = nn.Sequential(module).double()
    return copy.deepcopy(model), slapo.create_schedule(model, example_inputs=X)


@pytest.mark.parametrize("options", [{}, {"flatten": True}])
def test_a_graph_by_fx_computes_what_the_forward_computes(options):
    plain, sch = scheduled(Block())
    sch["0"].trace(tracer="fx", **options)
    assert len(sch["0"].find(F.gelu)) == 1
    for args, kwargs in (((X,), {}), ((X[:2], 3.0), {}), ((X, torch.tensor(2.0)), {"flip": True})):
        torch.testing.assert_close(sch["0"].module(*args, **kwargs), plain[0](*args, **kwargs))
    plain[0].gain = sch["0"].module.gain = 2.0
    torch.testing.assert_close(sch.model(X), plain(X))
    assert slapo.verify(sch).steps_verified == 1
    sch.undo(to=0)
    assert "forward" not in vars(sch["0"].module)


def branches(self, x):
    return x * 2 if x.sum() > 0 else x


def draws(self, x):
    return x + torch.rand(4)


def switches(self, x):
    with torch.no_grad():
        return x * 2


def sets(self, x):
    self.last = x
    return x * 2


def collects(self, x):
    self.seen.append(x)
    return x * 2


@pytest.mark.parametrize("forward", [branches, draws, switches, sets, collects])
def test_what_fx_cannot_say_is_refused(forward):
    made = type("Made", (nn.Module,), {"forward": forward, "seen": []})()
    sch = scheduled(made)[1]
    with pytest.raises(slapo.TraceError, match="tracer 'fx'"):
        sch["0"].trace(tracer="fx")
    assert not made.seen
    assert not hasattr(made, "last")
    assert FxTracer.name == "fx"


def test_matches_in_a_graph_by_fx_are_fused_and_recomputed():
    plain, sch = scheduled(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
    sch["0"].trace(tracer="fx", flatten=True)
    sch["0"].fuse("gelu", compiler="eager")
    sch["0"].checkpoint(match="linear")
    assert slapo.verify(sch).steps_verified == 3
    torch.testing.assert_close(sch.model(X), plain(X))
