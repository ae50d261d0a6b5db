"""Define the cases and model of ``slapo plugins check``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo_loss.linear_cross_entropy import LinearCrossEntropy
from slapo_testing import Case


class Classifier(nn.Module):
    """Classify tokens: an embedding, a layer and a head, with their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.body(self.embed(ids))))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch() -> dict[str, Tensor]:
    """Return ids and labels, some of which are ignored."""
    labels = torch.randint(0, 10, (2, 5))
    labels[0, 3:] = -100
    return {"ids": torch.randint(0, 10, (2, 5)), "labels": labels}


def slapo_cases() -> list[Case]:
    """Return the cases of the primitives of slapo-loss."""
    rejects = [("", LinearCrossEntropy()), ("embed", LinearCrossEntropy()), ("head", LinearCrossEntropy(chunk=0))]
    return [Case(LinearCrossEntropy(), path="head", model=Classifier, inputs=batch, rejects=rejects)]
