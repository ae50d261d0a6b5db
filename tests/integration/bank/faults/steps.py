"""Steps that are right elsewhere: streams of random numbers, checkpoints, and the order of steps."""

from __future__ import annotations

from collections.abc import Iterator

from tests.integration.bank.faults.fault import fault
from tests.integration.bank.places import BLOCKS, DROPOUTS
from tests.integration.bank.steps import Right, Wrong, step


@fault(
    "recomputed with other random numbers",
    "gradients are those of another loss",
    models=("bert", "gpt2", "t5", "vit"),
    dropout=0.1,
)
def recomputed(right: Right) -> Iterator[Wrong]:
    for path in BLOCKS[right.model]:
        for number in range(2):
            wrong = step(path.format(n=number), "checkpoint", preserve_rng_state=False)
            yield Wrong(
                right, wrong.path, right.inserted(0, wrong), guilty=(0,),
                by_hand="dropout is off in the plain comparison; forward and backward see other masks",
            )  # fmt: skip


@fault(
    "ranks drop differently where all is whole",
    "the ranks' outputs differ, and their weights drift apart",
    models=("bert", "gpt2", "t5", "vit"),
    dropout=0.1,
)
def fork_where_whole(right: Right) -> Iterator[Wrong]:
    for number in range(2):
        path = DROPOUTS[right.model].format(n=number)
        yield Wrong(
            right, path, (*right.steps, step(path, "fork_rng")), guilty=(len(right.steps),),
            by_hand="dropout is off in the plain comparison; each rank drops other elements of one tensor",
        )  # fmt: skip


@fault(
    "ranks drop differently around a whole layer",
    "the ranks' outputs differ, and their weights drift apart",
    models=("bert", "t5", "vit", "gpt2"),
    dropout=0.1,
    at_most=1,
)
def fork_around(right: Right) -> Iterator[Wrong]:
    for path in BLOCKS[right.model]:
        at = path.format(n=1)
        steps = (*(e for e in right.steps if not (e.role == "random" and e.path.startswith(at))), step(at, "fork_rng"))
        yield Wrong(
            right, at, steps, guilty=(len(steps) - 1,),
            by_hand="dropout is off in the plain comparison; each rank drops other elements of whole tensors",
        )  # fmt: skip


@fault(
    "ranks drop alike where all is split",
    "the same elements of different heads are dropped: only the statistics",
    models=("bert", "t5", "vit", "llama", "qwen3"),
    dropout=0.1,
)
def fork_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("random"):
        yield Wrong(
            right, each.path, right.without(position), near=right.places(each.part), add=((each.path, "fork_rng("),),
            by_hand="each mask is right by itself, and those of different heads are the same",
        )  # fmt: skip
    if right.model in ("llama", "qwen3"):
        for part in ("attention.0", "attention.1"):
            path = next(each.path for _, each in right.where("backward") if each.part == part)
            yield Wrong(
                right, path, right.steps, near=right.places(part), add=((path, "fork_rng("),),
                by_hand="each mask is right by itself, and those of different heads are the same",
            )  # fmt: skip


@fault("replaced behind the split", "the split is lost: refused, or shapes", kinds=("layers",))
def replaced_behind(right: Right) -> Iterator[Wrong]:
    from tests.integration.bank.right import equal_module

    for _, each in right.where("column"):
        wrong = step(each.path, "replace", equal_module)
        yield Wrong(right, each.path, (*right.steps, wrong), guilty=(len(right.steps),))


@fault("checkpointed twice", "refused: it would run three times", kinds=("layers",), at_most=1)
def checkpointed_twice(right: Right) -> Iterator[Wrong]:
    path = BLOCKS[right.model][0].format(n=0)
    once = step(path, "checkpoint")
    yield Wrong(
        right, path, (once, once, *right.steps), guilty=(1,), by_hand="the second call recomputes what is recomputed"
    )


@fault(
    "gradient of a norm of heads summed twice", "doubled: gradients", kinds=("layers",), at_most=1, models=("qwen3",)
)
def summed_where_not_split(right: Right) -> Iterator[Wrong]:
    path = "model.layers.0.self_attn.q_norm"
    wrong = step(path, "sync_gradient", "weight")
    yield Wrong(right, path, (*right.steps, wrong), guilty=(len(right.steps),))
