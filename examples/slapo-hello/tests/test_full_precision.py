"""The kit's checks on `hello.full_precision`, and what it is for."""

import pickle

import torch
from slapo_hello import FullPrecision
from torch import nn

import slapo_core as slapo
from slapo_testing import Case, parametrize_checks


def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def make_inputs():
    return (torch.randn(3, 4),)


CASE = Case(
    FullPrecision(),
    model=make_model,
    inputs=make_inputs,
    path="2",
    before=[("1", FullPrecision())],
    rejects=[("1", FullPrecision())],
)


@parametrize_checks([CASE])
def test_full_precision(check):
    check()


def test_under_autocast_only_the_chosen_module_runs_in_full_precision():
    model = make_model()
    sch = slapo.create_schedule(model)
    sch["0"].hello.full_precision()
    dtypes = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda module, args, output, name=name: dtypes.update({name: output.dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(3, 4).bfloat16())
    assert dtypes == {"0": torch.float32, "1": torch.float32, "2": torch.bfloat16}
    sch.undo()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(*make_inputs())
    assert dtypes["0"] == torch.bfloat16


def test_a_scheduled_model_can_be_pickled():
    model = make_model()
    slapo.create_schedule(model)["0"].hello.full_precision()
    loaded = pickle.loads(pickle.dumps(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loaded[0](*make_inputs()).dtype == torch.float32
