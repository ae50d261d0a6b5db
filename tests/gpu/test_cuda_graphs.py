"""Captured modules compute what they compute uncaptured: gradients, statistics, random numbers; and what it saves.

On the CPU ``cudagraphify`` does nothing: there a rehearsal compares the model with itself.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
import slapo_models
from tests.gpu.subjects import batches, close, gradients, microseconds, on_ranks, small_llama, stack


def captured(model: nn.Module, glob: str = "*") -> nn.Module:
    """The same model, each block a graph; the original stays."""
    sch: Any = slapo.create_schedule(copy.deepcopy(model))
    sch[glob].cudagraphify()
    return sch.model  # type: ignore[no-any-return]


def stepped(model: nn.Module, accumulate: int, device: Any, *, steps: int = 3, autocast: bool = False) -> Any:
    """Gradients of each step, and the losses; the weights move."""
    found, losses = [], []
    data = batches(steps * accumulate, device=device)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        for _ in range(accumulate):
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                loss = model(next(data)).float().square().mean() / accumulate
            loss.backward()
            losses.append(float(loss.detach()))
        found.append(gradients(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    return found, losses


@pytest.mark.gpu(2)
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_gradients_of_several_micro_batches_are_their_sum(device: torch.device, accumulate: int) -> None:
    model = stack(device)
    graphs = captured(model)
    expected, losses = stepped(model, accumulate, device)
    found, ours = stepped(graphs, accumulate, device)
    assert ours == pytest.approx(losses, rel=1e-4)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_engine_trains_captured_blocks_as_others(device: torch.device, accumulate: int) -> None:
    model = stack(device)
    trained = []
    for network in (copy.deepcopy(model), model):
        sch: Any = slapo.create_schedule(network)
        if network is model:
            sch["*"].cudagraphify()
        engine = slapo.build(
            sch,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            loss=lambda output, batch: output.square().mean(),
            accumulate=accumulate,
            max_grad_norm=1.0,
        )
        for x in batches(4, device=device):
            engine.train_step((x,))
        trained.append(engine.state_dict())
    close(trained[1], trained[0])


@pytest.mark.gpu(2.1)
def test_autocast_may_come_and_go(device: torch.device) -> None:
    model = stack(device)
    graphs = captured(model)
    (x,) = batches(1, device=device)
    for autocast in (False, True, False, True):
        outputs = []
        for network in (model, graphs):
            network.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                output = network(x)
            output.float().square().mean().backward()
            outputs.append(output.detach().clone())
        assert outputs[1].dtype == outputs[0].dtype == (torch.bfloat16 if autocast else torch.float32)
        torch.testing.assert_close(outputs[1], outputs[0])
        close(gradients(graphs), gradients(model), rtol=2e-2 if autocast else 1e-4)


@pytest.mark.gpu(2.1)
def test_a_capture_counts_no_batch_twice_and_draws_no_numbers(device: torch.device) -> None:
    model = stack(device, norm=True)
    graphs = captured(model)
    numbers = []
    for network in (model, graphs):
        torch.manual_seed(5)
        for x in batches(3, device=device):
            network(x).square().mean().backward()
        numbers.append(torch.rand(4, device=device))
    assert torch.equal(*numbers)
    close(
        {name: buffer.float() for name, buffer in graphs.named_buffers()},
        {name: buffer.float() for name, buffer in model.named_buffers()},
    )
    assert int(graphs.get_buffer("0.1.num_batches_tracked")) == 3


@pytest.mark.gpu(2.2)
def test_each_replay_drops_other_elements(device: torch.device) -> None:
    graphs = captured(stack(device, layers=1, dropout=0.5))
    (x,) = batches(1, device=device)
    outputs = []
    for _ in range(3):
        output = graphs(x)
        outputs.append(output.detach().clone())
        output.sum().backward()
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.gpu(2.2)
def test_layers_of_transformers_are_captured_with_keywords_and_tuples(device: torch.device) -> None:
    model = small_llama(device, attn_implementation="sdpa")
    graphs = captured(model, "model.layers.*")
    ids = torch.arange(64, device=device).reshape(2, 32) * 5 % 96
    for step in range(3):
        losses = []
        for network in (model, graphs):
            network.zero_grad(set_to_none=True)
            for part in (ids, ids.flip(1)):
                loss = network(input_ids=part, labels=(part + step) % 96).loss
                loss.backward()
            losses.append(float(loss.detach()))
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        close(gradients(graphs), gradients(model), rtol=1e-3)


def captured_kernels(device: str) -> list[tuple[float, float]]:
    """Losses of plain layers, and of captured ones with the kernels of the full schedule."""
    model = small_llama(device, torch.bfloat16)
    ids = torch.arange(64, device=device).reshape(2, 32) * 5 % 96
    batch = {"input_ids": ids, "labels": ids.flip(1)}
    sch: Any = slapo.create_schedule(copy.deepcopy(model), mesh={"tp": 1}, example_inputs=batch)
    slapo_models.llama(sch, attention="fusion.causal_sdpa", compiler="inductor")
    sch["model.layers.*"].cudagraphify()
    losses = []
    for _ in range(3):
        pair = [network(**batch).loss for network in (model, sch.model)]
        for loss in pair:
            loss.backward()
        losses.append(tuple(map(float, pair)))
    return losses


@pytest.mark.gpu(2.2)
def test_replaced_and_fused_kernels_are_captured(device: torch.device) -> None:
    """In a process of its own: a capture that fails leaves the random number generator unusable."""
    ((*losses,),) = on_ranks(captured_kernels, device=device)
    for expected, found in losses:
        assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.gpu(2.3)
def test_a_forward_without_its_backward_leaves_the_graph_usable(device: torch.device) -> None:
    model = stack(device)
    graphs = captured(model)
    first, second = batches(2, device=device)
    graphs(first)  # as where a loss is skipped
    expected, found = model(second), graphs(second)
    for output in (expected, found):
        output.square().mean().backward()
    torch.testing.assert_close(found, expected)
    close(gradients(graphs), gradients(model))


@pytest.mark.gpu(2.3)
def test_parameters_that_move_or_are_replaced_are_the_ones_that_are_read(device: torch.device) -> None:
    model = stack(device, layers=1)
    graphs = captured(model)
    for change in ("nothing", "data", "parameter"):
        for network in (model, graphs):
            first: Any = network.get_submodule("0.0")
            if change == "data":
                first.weight.data = first.weight.data.flip(0).clone()
            elif change == "parameter":
                first.weight = nn.Parameter(2 * first.weight.detach())
        (x,) = batches(1, device=device)
        outputs = []
        for network in (model, graphs):
            network.zero_grad(set_to_none=True)
            output: Tensor = network(x)
            output.square().mean().backward()
            outputs.append(output.detach().clone())
        torch.testing.assert_close(outputs[1], outputs[0], msg=change)
        close(gradients(graphs), gradients(model))


@pytest.mark.gpu(2.9)
def test_time_of_a_captured_call(device: torch.device, measured: Any) -> None:
    """Twelve blocks of short kernels, forward and backward: numbers for the tables."""
    model = stack(device, layers=12)
    (x,) = batches(1, device=device)

    def call(network: nn.Module) -> None:
        network(x).sum().backward()

    graphs = captured(model)
    eager, replayed = (microseconds(lambda network=network: call(network), device) for network in (model, graphs))
    calls = {
        "eager_host_us": eager[0],
        "eager_us": eager[1],
        "graphs_host_us": replayed[0],
        "graphs_us": replayed[1],
    }
    measured(blocks=12, **calls)
    assert all(value > 0 for value in calls.values())
