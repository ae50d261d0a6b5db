"""What crosses a boundary, without ranks: what DeepSpeed and Megatron do with it is done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime.stages.p2p_packing import P2PMessage, attached
from slapo_runtime.stages.partition import Value
from tests.messages import Messages

CPU = torch.device("cpu")


def described(name: str, tensor: torch.Tensor) -> Value:
    return Value(name, 0, (1,), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def arrived(message: tuple[torch.Tensor, ...], into: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """As both receive: leaves, each floating one with a gradient to come."""
    assert [(one.shape, one.dtype) for one in message] == [(one.shape, one.dtype) for one in into]
    assert all(one.is_contiguous() for one in message)
    found = [one.detach().clone() for one in message]
    return [one.requires_grad_(one.is_floating_point()) for one in found]


def sources() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    double = torch.randn(3, 4, generator=generator)
    return {
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False, True]),
        "soft": torch.tensor([float("nan"), -0.0, 1e-40]),
        "half": torch.randn(3, generator=generator).half(),
        "plain": torch.randn(2, generator=generator, dtype=torch.complex128),
        "hidden": double.clone().requires_grad_(),
        "turned": double.clone().requires_grad_(),
        "small": double.bfloat16().requires_grad_(),
        "spectrum": torch.randn(2, 2, generator=generator, dtype=torch.complex64).requires_grad_(),
        "scalar": torch.tensor(2.0, requires_grad=True),
        "empty": torch.ones(0, 3, requires_grad=True),
        "unused": torch.ones(2, requires_grad=True),
    }


def made(of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**of, "turned": of["turned"].t() * 2, "conjugate": of["spectrum"].conj()}


def used(values: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = (
        (values["hidden"] * values["turned"].t()).sum(),
        (values["small"].float() ** 2).sum() * values["scalar"],
        values["spectrum"].abs().sum() + values["conjugate"].imag.sum() + values["plain"].real.sum(),
        values["empty"].sum() + values["half"].sum() + values["mask"].sum() + values["ids"].sum(),
    )
    return torch.stack([part.float() for part in parts]).sum()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = [tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and torch.equal(*pair)


@pytest.mark.parametrize("joined", [False, True])
def test_values_arrive_bit_by_bit_and_their_gradients_come_back(joined: bool) -> None:
    reference, own = sources(), sources()
    used(made(reference)).backward()
    there = made(own)
    parcel = P2PMessage([described(name, one) for name, one in there.items()], backward=False, joined=joined)
    begun = []
    message = parcel.pack(there, None, sender="stage 0", device=CPU, backward_begins=lambda: begun.append(1))
    assert len([one for one in message if one.is_floating_point()]) == 1  # DeepSpeed goes backward once for each
    if joined:
        assert [(len(one), one._base) for one in message] == [(parcel.length, None)]  # Megatron frees no view
    received = arrived(message, parcel.empty(CPU))
    values, link = parcel.unpack([one.clone() for one in received])
    for name, one in there.items():
        assert values[name].dtype == one.dtype
        assert same_bits(values[name], one), name
    attached(used(values), link).backward()
    gradients = [one.grad for one in received if one.is_floating_point()]
    assert all(gradient is not None for gradient in gradients)
    buffer = gradients[0].clone()
    message[0].backward(gradient=buffer)
    buffer.fill_(float("nan"))  # where the next ones are received
    assert begun == [1]
    for name, one in own.items():
        if one.requires_grad and name != "unused":
            assert torch.equal(one.grad, reference[name].grad), name
    assert torch.equal(own["unused"].grad, torch.zeros(2))


def test_a_received_value_may_be_written_to_and_relayed() -> None:
    """Two values share a message, and not their counts of writes."""
    one, two = (torch.ones(3, requires_grad=True) for _ in range(2))
    there = {"one": one * 1, "two": two * 1}
    first = P2PMessage([described(name, value) for name, value in there.items()], backward=False)
    message = first.pack(there, None, sender="stage 0", device=CPU)
    received = arrived(message, first.empty(CPU))
    values, link = first.unpack([each.clone() for each in received])
    squares = values["one"] ** 2  # keeps it
    values["two"].mul_(3.0)
    on = {"squares": squares, "two": values["two"]}
    second = P2PMessage([described(name, value) for name, value in on.items()], backward=True)
    further = second.pack(on, link, sender="stage 1", device=CPU)
    last = arrived(further, second.empty(CPU))
    there, link = second.unpack([each.clone() for each in last])
    attached((there["squares"] * there["two"]).sum(), link).backward()
    further[0].backward(gradient=last[0].grad)
    message[0].backward(gradient=received[0].grad)
    assert torch.equal(one.grad, torch.full((3,), 6.0))
    assert torch.equal(two.grad, torch.full((3,), 3.0))


def test_a_rank_that_was_sent_gradients_gives_them_back_even_if_nothing_depends_on_them() -> None:
    start = torch.ones(2, requires_grad=True)
    first = P2PMessage([described("h", start)], backward=False)
    message = first.pack({"h": start * 1}, None, sender="stage 0", device=CPU)
    received = arrived(message, first.empty(CPU))
    _, link = first.unpack([one.clone() for one in received])
    second = P2PMessage([described("ids", torch.arange(3))], backward=True)
    further = second.pack({"ids": torch.arange(3)}, link, sender="stage 1", device=CPU)
    last = arrived(further, second.empty(CPU))
    values, link = second.unpack([one.clone() for one in last])
    weight = torch.ones(3, requires_grad=True)
    attached((values["ids"] * weight).sum(), link).backward()
    further[0].backward(gradient=last[0].grad)
    assert torch.equal(received[0].grad, torch.zeros(2))
    assert torch.equal(weight.grad, torch.arange(3.0))


@pytest.mark.parametrize("values", [{}, {"ids": torch.arange(3)}, {"h": torch.ones(3), "mask": torch.ones(()).bool()}])
def test_packed_messages_carry_a_floating_tensor(values: dict[str, torch.Tensor]) -> None:
    """Megatron waits for a gradient of every message, and knows one type of all."""
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            parcel = P2PMessage(
                [described(name, one) for name, one in values.items()],
                backward=False,
                joined=True,
                dtype=torch.bfloat16,
            )
            (message,) = parcel.pack(values, None, sender="stage 0", device=CPU)
            assert (message.dtype, message.requires_grad) == (torch.bfloat16, grads)
            received = arrived((message,), parcel.empty(CPU))
            there, link = parcel.unpack(received)
            assert there.keys() == values.keys()
            assert all(same_bits(there[name], one) for name, one in values.items())
            loss = attached(torch.zeros(()), link)
        if grads:
            loss.backward()
            assert torch.equal(received[0].grad, torch.zeros(parcel.length))


def test_a_message_whose_memory_was_taken_still_goes_backward() -> None:
    """As with ``deallocate_pipeline_outputs``, which leaves one element of it."""
    weight, ids = torch.ones(3, requires_grad=True), torch.arange(5)
    there = {"h": weight * 2, "ids": ids}
    parcel = P2PMessage([described(name, one) for name, one in there.items()], backward=True, joined=True)
    (message,) = parcel.pack(there, None, sender="stage 0", device=CPU)
    gradient = torch.ones(parcel.length)
    message.data = torch.empty(1)
    torch.autograd.Variable._execution_engine.run_backward((message,), (gradient,), False, False, (), True, True)
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_without_gradients_nothing_goes_back() -> None:
    parcel = P2PMessage([described("ids", torch.arange(3))], backward=False)
    message = parcel.pack({"ids": torch.arange(3)}, None, sender="stage 0", device=CPU)
    assert [one.dtype for one in message] == [torch.uint8]
    assert P2PMessage([], backward=False).pack({}, None, sender="stage 0", device=CPU) == ()
    assert P2PMessage([], backward=False).unpack(()) == ({}, None)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.ones(3), "'h' as (3,)"),
        (torch.ones(2).double(), "torch.float64"),
        (torch.ones(2, requires_grad=True) * 1, "requires grad"),
    ],
)
def test_sent_values_must_match_their_declaration(tensor: Any, word: str, message: Messages) -> None:
    parcel = P2PMessage([described("h", torch.ones(2))], backward=False)
    with pytest.raises(slapo.BuildError) as error:
        parcel.pack({"h": tensor}, None, sender="stage 0", device=CPU)
    message(error, "stage 0", word)
