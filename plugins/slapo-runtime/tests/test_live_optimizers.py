"""An optimizer that was made before the schedule trains nothing of what steps exchanged: its first step says so."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import slapo_core as slapo
from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.messages import Messages
from tests.support.building import Split, batches, real, split
from tests.support.edits import Call


def scheduled(model: nn.Module) -> slapo.Schedule:
    """Split as by rank 0 of two: the pieces are there in one process too."""
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["fc1"].apply(Split(("weight", "bias")))
    return sch


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    width = model.fc1.out_features if isinstance(model.fc1, nn.Linear) else 0
    out = model.fc1(next(batches(1))["x"]).sum()
    assert width
    optimizer.zero_grad()
    out.backward()
    optimizer.step()


def test_the_first_step_of_an_optimizer_made_before_the_schedule_is_refused_and_names_the_call(
    message: Messages,
) -> None:
    model = real("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sch = scheduled(model)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # it is not forgotten by being caught
        with pytest.raises(slapo.OptimizerError) as refused:
            trained(model, optimizer)
    message(refused, "this AdamW", "'fc1.weight' of shape (8, 6)", "torch.optim.AdamW(sch.model.parameters(), ...)")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    trained(model, torch.optim.AdamW(sch.model.parameters(), lr=0.1))  # the way out
    assert not torch.equal(before[0], model.fc1.weight)


def test_optimizer_is_checked_again_after_schedule_steps() -> None:
    model = real("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer)
    sch = scheduled(model)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, own)
    with pytest.raises(slapo.OptimizerError):
        trained(model, optimizer)
    sch.undo(to=0)
    trained(model, optimizer)  # it is right again
    with pytest.raises(slapo.OptimizerError, match=r"'fc1\.weight' of shape \(4, 6\)"):
        trained(model, own)  # and this one holds what undo took out
    sch["fc1"].apply(Split(("bias",)))
    with pytest.raises(slapo.OptimizerError, match=r"holds 1 parameters .* 'fc1\.bias' of shape \(8,\)"):
        optimizer.step()


def test_a_replaced_module_without_any_mesh_counts_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sch = slapo.create_schedule(model)
    sch["1"].replace(nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()  # the new module has the old one's parameters
    sch["0"].apply(Call(lambda node, edit: edit.replace_module(node, nn.Linear(4, 4))))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(slapo.OptimizerError, match=r"'0\.weight' of shape"):
        optimizer.step()


def test_later_parameter_group_is_checked() -> None:
    model = real("mlp")
    old = list(model.fc1.parameters())
    scheduled(model)
    optimizer = torch.optim.SGD(model.fc2.parameters(), lr=0.1)
    trained(model, optimizer)
    optimizer.add_param_group({"params": old})
    with pytest.raises(slapo.OptimizerError):
        trained(model, optimizer)


def drop(node: Any, edit: Any) -> None:
    edit.set_parameter(node, "bias", None)


def around(old: nn.Module) -> nn.Module:
    return nn.Sequential(old)


def test_valid_optimizers_are_accepted() -> None:
    plain = real("mlp")
    model = real("mlp")
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    sch = slapo.create_schedule(model)
    sch["fc1"].checkpoint()
    trained(model, mine)  # nothing was exchanged
    sch["fc1"].apply(Call(drop))
    trained(model, mine)  # a parameter that is given up, without another in its place
    sch.undo()
    sch["fc2"].replace(around)
    trained(model, mine)  # the parameters are elsewhere in the model
    trained(plain, other)

    one = split(slapo.create_schedule(real("mlp"), mesh={"tp": 1}), "mlp").model
    trained(one, torch.optim.SGD(one.parameters(), lr=0.1))

    frozen = real("mlp").requires_grad_(False)
    frozen.fc2.requires_grad_(True)
    all_of_it = torch.optim.SGD(frozen.parameters(), lr=0.1)
    scheduled(frozen)
    frozen.fc2(torch.ones(1, 8)).sum().backward()
    all_of_it.step()  # what was exchanged is not trained


def test_a_model_that_is_gone_is_not_spoken_of_and_nothing_is_kept_alive() -> None:
    model = real("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original, gone = weakref.ref(model.fc1.weight), weakref.ref(model)
    sch = scheduled(model)
    piece = weakref.ref(model.fc1.weight)
    del sch, model
    gc.collect()
    assert gone() is None
    assert piece() is None
    optimizer.step()
    del optimizer
    gc.collect()
    assert original() is None


def test_other_hooks_of_all_optimizers_run_after_a_scheduled_model_is_gone() -> None:
    called = []
    model = real("mlp")
    scheduled(model)
    handle = register_optimizer_step_pre_hook(lambda *_: called.append("theirs"))
    try:
        del model
        gc.collect()
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()
    finally:
        handle.remove()
    assert called == ["theirs"]


def test_a_compiled_step_is_left_alone() -> None:
    model = real("mlp")
    sch = scheduled(model)
    optimizer = torch.optim.SGD(sch.model.parameters(), lr=0.1)
    before = model.fc1.weight.detach().clone()
    model.fc1(next(batches(1))["x"]).sum().backward()
    torch.compile(optimizer.step, backend="eager", fullgraph=False)()
    assert not torch.equal(before, model.fc1.weight)


def test_optimizer_of_full_tensors_warns_once_about_shards(message: Messages) -> None:
    model = real("mlp")
    full = torch.optim.Adafactor(model.parameters())
    trained(model, full)
    scheduled(model)
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.warns(UserWarning, match="full tensors") as caught:
        trained(model, optimizer)
    message(caught[0].message, "Adafactor", "2 of its parameters")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, optimizer)
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_step_that_the_user_built_upon_stays_in_force_when_it_cannot_be_taken_back() -> None:
    model = real("mlp")
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["fc2"].apply(Split(("weight",), axis=1))
    sch["fc1"].apply(Split(("bias", "weight")))
    nn.utils.parametrizations.weight_norm(model.fc1)
    before = ModelSnapshot(model)
    uses = (lambda: slapo.state_dict(sch), lambda: sch.undo(to=0), lambda: sch.reference().__enter__())
    for use, error, words in zip(
        uses,
        (slapo.WeightsError, slapo.UndoError, slapo.UndoError),
        ("fc1.* was put into the model outside", *["step #2 .* cannot be undone"] * 2),
        strict=True,
    ):
        with pytest.raises(error, match=words):
            use()
        assert_bit_identical(before, model)
        assert len(sch.records) == 2
    nn.utils.parametrize.remove_parametrizations(model.fc1, "weight")
    sch.undo(to=0)
    assert tuple(model.fc1.weight.shape) == (8, 6)
