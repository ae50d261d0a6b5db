"""``checkpoint`` with a match: backward runs each again as one region, with the same gradients and less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_graph import patterns

from .test_rewrite_functions import X, assert_same, biased, stack


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """What autograd keeps between forward and backward, but for parameters; each storage once."""
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x.clone().requires_grad_())
    out.sum().backward()
    return sum(kept.values())


def feed_forward(x: Any, up: Any, bias: Any, down: Any, offset: Any) -> Any:
    return F.linear(F.gelu(F.linear(x, up) + bias), down, offset)


def test_every_match_runs_again_with_the_same_gradients_and_less_memory() -> None:
    model, untouched, schedule = stack()
    schedule.checkpoint(feed_forward)
    for number in range(2):
        assert str(schedule[f"blocks.{number}"].graph).count("checkpointed = checkpointed(") == 1
    assert_same(model, untouched)
    assert saved_bytes(model, X) < 0.8 * saved_bytes(untouched, X)
    report = str(slapo.verify(schedule, X))
    assert "gradients with dropout" in report


def test_several_matches_of_one_graph_share_one_region() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(F.gelu(x * 1.5))
            return x

    model = Chain()
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule.trace()
    schedule.checkpoint(lambda x: torch.tanh(F.gelu(x * 1.5)))
    code = str(schedule.root.graph)
    assert code.count("checkpointed(") == 3
    assert code.count("gelu") == 0
    graph: Any = schedule.root.graph
    calls = {node.target for node in graph.first.recorded.graph.nodes if node.op == "call_function"}
    assert len(calls) == 1
    assert_same(model, Chain())
    assert saved_bytes(model, X) <= 0.6 * saved_bytes(Chain(), X)


def test_identical_layers_share_one_region_too() -> None:
    _, _, schedule = stack()
    schedule["blocks.*"].checkpoint(feed_forward)
    targets = set()
    for number in range(2):
        graph: Any = schedule[f"blocks.{number}"].graph
        targets |= {node.target for node in graph.first.recorded.graph.nodes if node.name.startswith("checkpointed")}
    assert len({target.function.__wrapped__ for target in targets}) == 1


def test_several_outputs_and_modules_that_stay_modules() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm = nn.BatchNorm1d(3)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
            y, weights = self.attention(self.norm(x), x, x, average_attn_weights=False)
            return y * scale + weights.sum()

    model = Gate().double()
    untouched = copy.deepcopy(model)
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule.trace()
    schedule.checkpoint("*attention*")
    schedule.checkpoint("*norm*")
    assert_same(model, untouched, X, X[:1])
    torch.testing.assert_close(dict(model.named_buffers()), dict(untouched.named_buffers()), rtol=0, atol=0)


def test_a_leaf_that_counts_its_calls_is_recomputed_as_seen() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.tanh(self.linear(x) * self.calls)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Counting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * 2) * 3

    model = nn.Sequential(Around()).double()
    plain = copy.deepcopy(model)
    schedule = slapo.create_schedule(model, example_inputs=X)
    schedule["0"].trace().checkpoint(lambda x: patterns.call_module("inner", x * 2) * 3)
    for each in (model, plain):
        (each(X).sum() + each(X).square().sum()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert model[0].inner.calls == plain[0].inner.calls == 2


def test_without_the_random_state_verify_objects_to_dropout() -> None:
    _, _, schedule = stack()
    pattern = lambda x, y: patterns.call_module("norm", patterns.call_module("drop", x) + y)  # noqa: E731
    schedule["blocks.0"].checkpoint(pattern, preserve_rng_state=False)
    with pytest.raises(slapo.VerifyError, match="recomputed dropout"):
        slapo.verify(schedule, X)
    schedule.undo()
    schedule["blocks.0"].checkpoint(pattern)
    slapo.verify(schedule, X)


def test_undo_puts_the_old_graph_back_and_replay_finds_every_match() -> None:
    model, untouched, schedule = stack()
    before = schedule["blocks.0"].graph
    schedule["blocks.*"].checkpoint(biased)
    again = slapo.replay(copy.deepcopy(untouched), schedule.to_json(), example_inputs=X)
    assert "checkpointed" in str(again["blocks.1"].graph)
    assert_same(again.model, untouched)
    schedule.undo(to=2)
    assert schedule["blocks.0"].graph is before
    assert_same(model, untouched)


def test_torch_compile_runs_it() -> None:
    model, untouched, schedule = stack()
    schedule["blocks.*"].checkpoint(feed_forward)
    compiled = torch.compile(model.eval(), backend="aot_eager")
    torch.testing.assert_close(compiled(X), untouched.eval()(X))
