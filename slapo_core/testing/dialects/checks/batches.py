"""A batch may be a mapping, a tuple or one tensor, and the loss the model's or the caller's."""

from __future__ import annotations

from slapo_core.testing.dialects.bench import DialectBench
from slapo_core.testing.dialects.models import FORMS, OUTSIDE_LOSS

__all__ = ["batches_of_every_form", "labels_are_left_to_the_loss"]


def batches_of_every_form(bench: DialectBench) -> None:
    """Mappings, tuples and single tensors are given to the model as keyword, positional and single arguments."""
    for form, subject in FORMS.items():
        bench.compare_with_plain_training(
            subject=subject,
            under=f"with batches that are {form}",
            hint="let request.compute_loss(batch) call the model; torch.utils._pytree.tree_map changes any form",
        )


def labels_are_left_to_the_loss(bench: DialectBench) -> None:
    """With loss=, what a batch holds beyond the arguments of the forward goes to the loss alone."""
    bench.compare_with_plain_training(
        subject=OUTSIDE_LOSS,
        under="with loss= and labels that the model does not take",
        hint="let request.compute_loss(batch) call the model and the loss",
    )
