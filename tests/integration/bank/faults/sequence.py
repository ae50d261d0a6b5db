"""Sequence parallelism: entered, left or gathered wrongly."""

from __future__ import annotations

from collections.abc import Iterator

from tests.integration.bank.faults.collectives import pair_of
from tests.integration.bank.faults.fault import fault
from tests.integration.bank.steps import Right, Step, Wrong, step

SEQUENCE = {"kinds": ("sequence",), "models": ("llama", "qwen3")}


def _near(right: Right, each: Step) -> tuple[str, ...]:
    return right.places(each.part)


def beside(right: Right, norm: Step) -> tuple[str, ...]:
    """The pair whose pieces a norm works on."""
    return (norm.path, norm.path.rpartition(".")[0], *pair_of(right, norm))


@fault(
    "sequence: gradient of a norm not summed",
    "each rank has seen its part of the sequence: gradients",
    at_most=6,
    **SEQUENCE,
)
def norm_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("norm"):
        yield Wrong(
            right, each.path, right.without(position), near=beside(right, each), add=((each.path, "sync_gradient("),)
        )


@fault(
    "sequence: gather in front of a pair missing",
    "attention sees one part of the sequence: raises, or outputs",
    at_most=3,
    **SEQUENCE,
)
def gather_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("whole"):
        yield Wrong(right, each.path, right.without(position), near=_near(right, each), add=((each.path, "sync("),))


@fault("sequence: scatter behind a pair missing", "pieces are added to a partial sum: raises", at_most=3, **SEQUENCE)
def scatter_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("pieces"):
        yield Wrong(right, each.path, right.without(position), near=_near(right, each), add=((each.path, "sync("),))


@fault(
    "sequence: all_reduce in the place of the scatter", "a piece and the whole sequence are added: raises", **SEQUENCE
)
def reduced(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("pieces"):
        wrong = each.with_(args=("fwd_post", "all_reduce"), kwargs=())
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault("sequence: gathered on the wrong axis", "parts of the sequence side by side as a batch: raises", **SEQUENCE)
def gathered_wrongly(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("whole"):
        kwargs = {**dict(each.kwargs), "axis": 0}
        yield Wrong(
            right, each.path, right.changed(position, each.with_(kwargs=tuple(kwargs.items()))), guilty=(position,)
        )


@fault("sequence: scattered on the wrong axis", "the batch is split, not the sequence: raises, or outputs", **SEQUENCE)
def scattered_wrongly(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("pieces"):
        yield Wrong(right, each.path, right.changed(position, each.with_(kwargs=(("axis", 0),))), guilty=(position,))


@fault(
    "sequence: entered and left on the batch",
    "norm gradients stay right, the batch is split: attention of others",
    **SEQUENCE,
)
def gathered_by_gradient_only(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("whole"):
        kwargs = tuple(item for item in each.kwargs if item[0] == "inputs")
        wrong = each.with_(args=("bwd_post", "all_reduce"), kwargs=kwargs)
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault("sequence: entered a layer late", "the first layer works on partial sums: outputs", at_most=1, **SEQUENCE)
def entered_late(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("enter"):
        wrong = each.with_(path="model.layers.1")
        yield Wrong(right, wrong.path, right.changed(position, wrong), guilty=(position,), near=_near(right, each))


@fault("sequence: never entered", "the first norm works on a partial sum: raises", at_most=1, **SEQUENCE)
def not_entered(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("enter"):
        yield Wrong(
            right, each.path, right.without(position), near=("model.embed_tokens", "model.layers.0"),
            add=(("model.embed_tokens", "sync("),),
        )  # fmt: skip


@fault(
    "sequence: entered too early",
    "positions and masks are made for a part of the sequence: raises, or outputs",
    at_most=1,
    **SEQUENCE,
)
def entered_early(right: Right) -> Iterator[Wrong]:
    for position, _ in right.where("enter"):
        wrong = step("model.embed_tokens", "sync", "fwd_post", "reduce_scatter", axis=1, role="enter", part="enter")
        yield Wrong(right, wrong.path, right.changed(position, wrong), guilty=(position,), near=(wrong.path,))


@fault(
    "sequence: left too early",
    "the last norm sees the whole sequence, and its gradient is summed: doubled",
    at_most=1,
    **SEQUENCE,
)
def left_early(right: Right) -> Iterator[Wrong]:
    for position, _ in right.where("leave"):
        wrong = step("model.norm", "sync", "fwd_pre", "all_gather", axis=1, role="leave", part="leave")
        norm = next(n for n, e in right.where("norm") if e.path == "model.norm")
        back = step("lm_head", "sync", "bwd_post", "all_reduce", part="leave")
        steps = right.changed(position, back, wrong)
        yield Wrong(right, wrong.path, steps, guilty=(position + 1, norm), near=("model.norm",))


@fault("sequence: never left", "each rank's logits are of its part of the sequence: shapes", at_most=1, **SEQUENCE)
def not_left(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("leave"):
        yield Wrong(right, each.path, right.without(position), near=_near(right, each), add=((each.path, "sync("),))


@fault(
    "sequence: left by a plain gather at the end",
    "the input of the head has one rank's gradient: gradients",
    at_most=1,
    **SEQUENCE,
)
def left_behind_norm(right: Right) -> Iterator[Wrong]:
    for position, _ in right.where("leave"):
        wrong = step("model.norm", "sync", "fwd_post", "all_gather", axis=1, part="leave")
        yield Wrong(
            right, wrong.path, right.changed(position, wrong), guilty=(position,),
            near=("lm_head", "model.norm"), add=(("lm_head", "sync("),),
        )  # fmt: skip


@fault(
    "gradient of a norm of heads not summed",
    "each rank has seen its own heads: gradients",
    models=("qwen3",),
    at_most=4,
)
def head_norm_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("norm"):
        yield Wrong(
            right, each.path, right.without(position), near=beside(right, each), add=((each.path, "sync_gradient("),)
        )


@fault("gradient summed that every rank has whole", "doubled: gradients of a norm")
def norm_doubled(right: Right) -> Iterator[Wrong]:
    from tests.integration.bank.places import NORMS

    for number in range(2):
        extra = step(NORMS[right.model].format(n=number), "sync_gradient", "weight")
        yield Wrong(right, extra.path, (*right.steps, extra), guilty=(len(right.steps),))


@fault("gradient of a table summed that is whole", "doubled: gradients of positions", models=("bert", "gpt2"))
def table_doubled(right: Right) -> Iterator[Wrong]:
    path = {"bert": "bert.embeddings.position_embeddings", "gpt2": "transformer.wpe"}[right.model]
    extra = step(path, "sync_gradient", "weight")
    yield Wrong(right, path, (*right.steps, extra), guilty=(len(right.steps),))
