"""The private names of torch exist, and behave as slapo_verify expects."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.internals import parameters_of
from slapo_verify import private
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_storages_have_an_identity_that_views_share() -> None:
    x = torch.zeros(4)
    assert private.storage_id(x[1:]) == private.storage_id(x.untyped_storage()) != private.storage_id(torch.zeros(4))
    sparse = x.to_sparse()
    assert private.storage_id(sparse) == id(sparse)


def test_modules_convert_their_tensors_and_rnns_refresh_their_references() -> None:
    rnn = nn.LSTM(2, 3)
    assert private.apply_to_tensors(rnn, lambda tensor: tensor.double()) is rnn
    assert {parameter.dtype for parameter in rnn.parameters()} == {torch.float64}
    weight = nn.Parameter(torch.zeros(12, 2, dtype=torch.float64))
    parameters_of(rnn)["weight_ih_l0"] = weight
    assert rnn._flat_weights[0] is not weight
    private.refresh_flat_weights(rnn)
    assert rnn._flat_weights[0] is weight


def test_the_operator_of_item_is_this_one() -> None:
    seen = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(1)
    with Mode():
        x.item()
    assert seen == [private.LOCAL_SCALAR]


def test_a_backward_pass_goes_through_the_active_function_modes() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    weight = nn.Parameter(torch.ones(2))
    y = 2 * weight
    y.register_hook(lambda gradient: 3 * gradient)
    with Mode():
        private.run_backward((y,), (torch.ones(2),))
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0, 6.0]
    assert torch.Tensor.mul in seen or torch.Tensor.__rmul__ in seen


def test_trees_are_mapped() -> None:
    assert private.pytree.tree_map(lambda value: -value, {"a": [1, (2,)]}) == {"a": [-1, (-2,)]}
