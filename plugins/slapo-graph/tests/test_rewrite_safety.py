"""What would change what the model computes is refused before anything is touched, with the reason and the nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_graph import patterns
from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.messages import Messages

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


class Forward(nn.Module):
    """A model made of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.bn, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def traced(function: Callable[..., Any]) -> slapo.Schedule:
    schedule = slapo.create_schedule(Forward(function), example_inputs=X)
    schedule.trace()
    return schedule


def refusal(schedule: slapo.Schedule, step: Callable[[], Any]) -> str:
    graph, before = schedule.root.graph, ModelSnapshot(schedule.model)
    with pytest.raises((slapo.ApplyError, slapo.PreconditionError)) as caught:
        step()
    assert schedule.root.graph is graph
    assert_bit_identical(before, ModelSnapshot(schedule.model))
    return str(caught.value)


def same_as_before(schedule: slapo.Schedule, *, training: bool = True) -> None:
    untouched = copy.deepcopy(Forward(schedule.model.function))  # type: ignore[arg-type]
    for x in (X, X[:1], X + 1):
        results = []
        for model in (schedule.model.train(training), untouched.train(training)):
            torch.manual_seed(3)
            results.append(model(x.clone()))
        torch.testing.assert_close(*results, rtol=0, atol=0)
    torch.testing.assert_close(dict(schedule.model.named_buffers()), dict(untouched.named_buffers()), rtol=0, atol=0)


def relu_of_sum(x: Any, y: Any) -> Any:
    return torch.relu(x + 1) * y


def test_match_that_is_not_convex_is_refused(message: Messages) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a = x + 1
        return torch.relu(a) * torch.tanh(a)

    # (x + 1) and the product are the match, and tanh lies between them.
    schedule = traced(forward)
    matches = schedule.find(lambda x, y: torch.relu(x + 1) * y)
    text = refusal(schedule, lambda: schedule.checkpoint(matches))
    message(text, "not convex", "'add' (inside)", "'tanh' (outside)", "'mul' (inside)")


def in_place_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    base = x * 2
    a = base + 1
    base.add_(5)
    return torch.relu(a) * base


def in_place_on_a_view_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    base = x * 2
    a = base + 1
    base.view(-1)[0] = 7
    return torch.relu(a) * base


@pytest.mark.parametrize("function", [in_place_between, in_place_on_a_view_between])
def test_a_write_in_place_between_the_nodes_of_a_match(function: Callable[..., Any]) -> None:
    schedule = traced(function)
    schedule.checkpoint(lambda x: torch.relu(x + 1))  # the write waits for the call, which reads what is written to
    same_as_before(schedule)
    code = str(schedule.root.graph)
    write = "add_(5)" if function is in_place_between else "view[0] = 7"
    assert code.index("checkpointed = ") < code.index(write)


def test_a_write_that_the_match_needs(message: Messages) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        a = base + 1
        base.add_(5)
        return torch.relu(a) * base

    schedule = traced(forward)
    text = refusal(schedule, lambda: schedule.checkpoint(relu_of_sum))
    message(text, "what 'add' reads")


def test_write_to_an_input_of_a_recomputed_match() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        base = self.fc(x)
        return torch.relu(base.add_(1)) + base

    schedule = traced(forward)
    schedule.checkpoint(lambda x: torch.relu(x.add_(1)))  # written to is a copy, which the second run finds unwritten
    same_as_before(schedule)
    slapo.verify(schedule, X)
    schedule.undo()
    # What reads base later reads the result of add_, so that something new may stand there.
    schedule.replace(lambda x: (x + 1, torch.relu(x + 1)), lambda x: torch.relu(x.add_(1)), name="new")
    same_as_before(schedule)


def test_a_write_to_an_alias_that_is_read_later(message: Messages) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        base = x * 2
        flat = base.view(-1)
        return torch.relu(base.add_(1)).sum() + flat.sum()

    schedule = traced(forward)
    text = refusal(schedule, lambda: schedule.replace(lambda x: torch.relu(x + 1), lambda x: torch.relu(x.add_(1))))
    message(text, "'add_' writes in place")


def one_memory_twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    base = x * 2
    return torch.relu(base[0].add_(base[:, 0].sum()))


def a_view_that_is_returned(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    base = x * 2
    flat = base.view(-1)
    return torch.relu(base.add_(flat.sum())), flat


def an_argument_of_the_model(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.view(-1).add_(x.sum()))


WRITES = [
    (one_memory_twice, lambda x, y: torch.relu(x.add_(y.sum())), "receives twice"),
    (a_view_that_is_returned, lambda x, y: torch.relu(x.add_(y)), "what 'output' reads"),
    (an_argument_of_the_model, lambda x, y: torch.relu(x.add_(y)), "to an argument"),
]


@pytest.mark.parametrize(("function", "pattern", "word"), WRITES, ids=[each[0].__name__ for each in WRITES])
def test_a_write_that_a_copy_would_hide(
    function: Callable[..., Any], pattern: Callable[..., Any], word: str, message: Messages
) -> None:
    schedule = traced(function)
    message(refusal(schedule, lambda: schedule.checkpoint(pattern)), "in place", word)


def test_a_write_to_a_value_of_its_own_is_right() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x * 2, inplace=True) + 1

    schedule = traced(forward)
    schedule.checkpoint(lambda x: F.relu(x * 2, inplace=True))
    same_as_before(schedule)


def test_random_numbers_are_drawn_in_the_same_order(message: Messages) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a = F.dropout(x, 0.5, True)
        b = F.dropout(x, 0.25, True)
        return torch.relu(F.dropout(a + 1, 0.5, True) * 2) + b

    schedule = traced(forward)
    pattern = lambda x: torch.relu(F.dropout(F.dropout(x, 0.5, True) + 1, 0.5, True) * 2)  # noqa: E731
    text = refusal(schedule, lambda: schedule.checkpoint(pattern))
    message(text, "use the RNG")
    schedule.checkpoint(lambda x: torch.relu(F.dropout(x + 1, 0.5, True) * 2))  # a negative control
    same_as_before(schedule)


def test_a_switch_of_gradients_inside_of_a_match(message: Messages) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a = self.fc(x)
        with torch.no_grad():
            b = torch.tanh(x)
        return torch.relu(a) + b

    schedule = traced(forward)
    pattern = lambda x: torch.relu(patterns.call_module("fc", x))  # noqa: E731
    text = refusal(schedule, lambda: schedule.checkpoint(pattern))
    message(text, "gradients or autocast")

    def inside(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            b = torch.relu(torch.tanh(x) + 1)
        return self.fc(x) + b  # type: ignore[no-any-return]

    schedule = traced(inside)
    schedule.replace(lambda x: torch.relu(x + 1), lambda x: torch.relu(x + 1))
    same_as_before(schedule)
    assert schedule.model(X.requires_grad_()).requires_grad
    X.requires_grad_(False)


def test_buffers_that_a_match_writes_are_written_once() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(x))

    schedule = traced(forward)
    schedule.checkpoint(lambda x: torch.relu(patterns.call_module("bn", x)))
    same_as_before(schedule)
    model = schedule.model.train()
    before = int(model.bn.num_batches_tracked)  # type: ignore[arg-type, union-attr]
    model(X.clone().requires_grad_()).sum().backward()
    assert int(model.bn.num_batches_tracked) == before + 1  # type: ignore[arg-type, union-attr]


def test_hooks_of_replaced_modules_refuse_the_rewrite(message: Messages) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))

    pattern = lambda x: torch.relu(patterns.call_module("fc", x))  # noqa: E731
    seen: list[int] = []
    schedule = traced(forward)
    handle = schedule.model.fc.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr, operator]
    text = refusal(schedule, lambda: schedule.replace(lambda x: torch.relu(x), pattern))
    message(text, "'fc' calls 'fc'", "hooks")
    schedule.checkpoint(pattern)  # the region calls the module, hooks and all
    schedule.model(X)
    assert seen
    handle.remove()

    schedule = traced(forward)
    schedule["fc"].checkpoint()
    text = refusal(schedule, lambda: schedule.replace(lambda x: torch.relu(x), pattern))
    message(text, "'fc'", "#2 checkpoint() at 'fc'")


def test_hook_on_a_replaced_module_is_refused(message: Messages) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))

    schedule = traced(forward)
    schedule.checkpoint(lambda x, w, b: torch.relu(F.linear(x, w, b)))
    schedule.model(X)
    text = refusal(schedule, lambda: schedule["fc"].checkpoint())
    message(text, "'fc' is no longer called", "the root")
    text = refusal(schedule, lambda: schedule["fc"].replace(nn.Linear(4, 4)))
    message(text, "'fc' is no longer called")
    schedule.model.fc.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    with pytest.raises(slapo.GuardError) as caught:
        schedule.model(X)
    message(caught, "'fc' got hooks")


def test_a_call_that_was_taken_out_gets_no_hook_after_calls_that_were_right() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))

    schedule = traced(forward)
    schedule.replace(lambda x: torch.tanh(x), lambda x: torch.relu(patterns.call_module("fc", x)))
    for _ in range(3):
        assert torch.equal(schedule.model(X), torch.tanh(X))
    handle = schedule.model.fc.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    with pytest.raises(slapo.GuardError, match="'fc' got hooks"):
        schedule.model(X)
    handle.remove()
    assert torch.equal(schedule.model(X), torch.tanh(X))


def test_unused_inputs_are_dropped_only_without_side_effects() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tril(torch.ones(3, 3))
        noise = torch.rand(3, 3)
        return torch.relu((x * 2) + (mask @ x) + (noise @ x))

    schedule = traced(forward)
    schedule.replace(
        lambda x, mask, noise: torch.relu(x + x), lambda x, mask, noise: torch.relu((x * 2) + mask @ x + noise @ x)
    )
    # The function takes them all: both stay.
    assert "tril" in str(schedule.root.graph)
    schedule.undo()

    class Ignoring(nn.Module):
        def forward(self, x: torch.Tensor, mask: Any = None, noise: Any = None) -> torch.Tensor:
            return torch.relu(x * 2)

    match = schedule.find(lambda x, mask, noise: torch.relu((x * 2) + mask @ x + noise @ x))
    graph: Any = schedule.root.graph
    new = graph.replaced(schedule.model, match, torch.relu, arguments=("x",), name="plain")
    code = str(new)
    assert "rand" in code  # it draws, and what draws after it must get the same numbers
    assert "tril" not in code
    assert "ones" not in code
