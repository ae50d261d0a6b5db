"""A replacement is repeated in variants whose match captured other things: with them, without them, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_graph import patterns
from tests.messages import Messages


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k
        if mask is not None:
            scores = scores + mask
        return F.softmax(scores, dim=-1) @ v


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, q: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attention(q, q.mT, q, mask)


def with_or_without_a_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k
    return F.softmax(patterns.any_of(scores + mask, scores), dim=-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k.mT, v, attn_mask=mask, scale=1.0)


def unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.mT, v, scale=1.0)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.mT, v, attn_mask=mask, scale=1.0)


Q, MASK = torch.randn(2, 5, 8), torch.randn(5, 5)


def replaced(new: object, *inputs: Tensor) -> tuple[nn.Module, nn.Module]:
    model = Model().eval()
    untouched = copy.deepcopy(model)
    sch = slapo.create_schedule(model, example_inputs=inputs)
    sch["attention"].trace()
    sch["attention"].replace(new, match=with_or_without_a_mask)
    return model, untouched


@pytest.mark.parametrize("first", [(Q,), (Q, MASK)])
def test_a_mask_that_comes_later_is_passed_and_one_that_is_absent_is_not(first: tuple[Tensor, ...]) -> None:
    model, untouched = replaced(sdpa, *first)
    for inputs in ((Q,), (Q, MASK), (Q, -MASK)):
        torch.testing.assert_close(model(*inputs), untouched(*inputs))


def test_a_replacement_that_cannot_take_the_mask_is_refused_where_one_is_given(message: Messages) -> None:
    model, untouched = replaced(unmasked, Q)
    torch.testing.assert_close(model(Q), untouched(Q))
    with pytest.raises(slapo.TraceError) as caught:
        model(Q, MASK)
    message(caught, "'k', 'q', 'v'")


def test_a_replacement_that_needs_the_mask_is_refused_where_there_is_none(message: Messages) -> None:
    model, untouched = replaced(masked, Q, MASK)
    torch.testing.assert_close(model(Q, MASK), untouched(Q, MASK))
    with pytest.raises(slapo.TraceError) as caught:
        model(Q)
    message(caught, "'k', 'q', 'v' there")
