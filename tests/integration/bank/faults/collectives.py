"""Collectives that are missing, that are too many, or that are other ones."""

from __future__ import annotations

from collections.abc import Iterator

from tests.integration.bank.faults.fault import fault
from tests.integration.bank.steps import Right, Step, Wrong, step

BOTH = ("whole", "each")


def pair_of(right: Right, each: Step) -> tuple[str, ...]:
    """The modules of the step's pair that are in the same block as the step."""
    places = right.places(each.part)
    block = each.path.rsplit(".", 2)[0]
    close = tuple(path for path in places if path.startswith(block))
    return close if len(close) > 1 else places


@fault("forward sync missing", "each rank goes on with its own partial sum: outputs", kinds=BOTH, at_most=3)
def forward_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        yield Wrong(right, each.path, right.without(position), near=pair_of(right, each), add=((each.path, "sync("),))


@fault(
    "backward sync missing",
    "the input's gradient is one rank's part: gradients of layers before",
    kinds=("whole",),
    at_most=3,
)
def backward_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("backward"):
        yield Wrong(right, each.path, right.without(position), near=pair_of(right, each), add=((each.path, "sync("),))


@fault(
    "one backward sync of several missing", "the part of one column is not summed: gradients before", kinds=("each",)
)
def one_backward_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("backward"):
        yield Wrong(right, each.path, right.without(position), near=pair_of(right, each), add=((each.path, "sync("),))


@fault("both syncs of a pair missing", "partial sums forward and backward: outputs")
def both_missing(right: Right) -> Iterator[Wrong]:
    for part in dict.fromkeys(each.part for _, each in right.where("row")):
        positions = [n for n, each in right.where("forward", "backward") if each.part == part]
        row = next(each for _, each in right.where("row") if each.part == part)
        adds = tuple((right.steps[n].path, "sync(") for n in positions)
        yield Wrong(right, part, right.without(*positions), near=right.places(row.part), add=adds)


@fault("backward sync in the place of the forward one", "the output stays a partial sum: outputs")
def backward_for_forward(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        yield Wrong(
            right, each.path, right.changed(position, each.with_(args=("bwd_post", "all_reduce"))), guilty=(position,),
            near=pair_of(right, each),
        )  # fmt: skip


@fault("forward sync in the place of the backward one", "outputs that differ by rank are summed: outputs")
def forward_for_backward(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("backward"):
        kwargs = tuple(item for item in each.kwargs if item[0] != "inputs")
        if "attention" in each.part or "cross" in each.part:
            kwargs = (*kwargs, ("outputs", (0,)))
        wrong = each.with_(args=("fwd_post", "all_reduce"), kwargs=kwargs)
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=pair_of(right, each))


@fault("input summed in the place of its gradient", "whole inputs are added up over the ranks: outputs")
def input_summed(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("backward"):
        wrong = each.with_(args=("fwd_pre", "all_reduce"))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault("partial sums gathered", "the features of the ranks side by side, not added: shapes")
def partial_gathered(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        wrong = each.with_(args=("fwd_post", "all_gather"))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault("pieces of the vocabulary summed", "logits of different words are added: shapes")
def pieces_summed(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("gather"):
        wrong = each.with_(args=("fwd_post", "all_reduce"), kwargs=())
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault("reduce_scatter in the place of all_reduce", "each rank keeps a part of the sequence: shapes")
def scattered(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        wrong = each.with_(args=("fwd_post", "reduce_scatter"), kwargs=(("axis", 1),))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault("forward sync at the module around as well", "the sum is summed again: outputs double")
def doubled_above(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        above = each.path.rpartition(".")[0]
        given = {"outputs": (0,)} if "attention" in each.part or "cross" in each.part else {}
        extra = step(above, "sync", "fwd_post", "all_reduce", part=each.part, **given)
        yield Wrong(right, above, right.inserted(position + 1, extra), guilty=(position + 1,))


@fault("the same sync twice", "sums are summed again: outputs or gradients")
def twice(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward", "backward"):
        yield Wrong(right, each.path, right.inserted(position + 1, each), guilty=(position + 1,))


@fault("gradient summed around and inside", "the input's gradient is summed twice: gradients before", at_most=3)
def summed_twice(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("backward"):
        columns = [
            one for _, one in right.where("column") if one.part == each.part and one.path.startswith(each.path + ".")
        ]
        if columns:
            extra = step(columns[0].path, "sync", "bwd_post", "all_reduce", part=each.part)
            yield Wrong(right, columns[0].path, right.inserted(position + 1, extra), guilty=(position, position + 1))


@fault("whole output summed", "a layer that no step split is added up: outputs double", kinds=("layers",))
def whole_summed(right: Right) -> Iterator[Wrong]:
    from tests.integration.bank.places import BLOCKS

    for path in BLOCKS[right.model]:
        for number in range(2):
            given = {"outputs": (0,)} if right.model == "t5" else {}
            extra = step(path.format(n=number), "sync", "fwd_post", "all_reduce", **given)
            yield Wrong(right, extra.path, (*right.steps, extra), guilty=(len(right.steps),))


@fault("whole gradient summed", "a gradient that every rank has whole is added up: gradients before", kinds=("layers",))
def whole_gradient_summed(right: Right) -> Iterator[Wrong]:
    from tests.integration.bank.places import BLOCKS

    for path in BLOCKS[right.model]:
        for number in (1, 0):
            given = {} if right.model in ("gpt2", "vit") else {"inputs": ("hidden_states",)}
            if right.model in ("gpt2", "vit"):
                given = {"inputs": (0,)}
            extra = step(path.format(n=number), "sync", "bwd_post", "all_reduce", **given)
            if number or right.model == "t5":
                yield Wrong(right, extra.path, (*right.steps, extra), guilty=(len(right.steps),))


@fault("sync at the layer of another block", "one sum too many there, none here: outputs")
def at_another_layer(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward", "backward"):
        other = _other(each.path)
        if other != each.path and other in {one.path for one in right.steps}:
            wrong = each.with_(path=other)
            yield Wrong(
                right, f"{each.args[0]} of {each.path} at {other}", right.changed(position, wrong), guilty=(position,),
                near=pair_of(right, each),
            )  # fmt: skip


@fault("sync of one output or input too few", "gradients of one input only are summed", models=("llama", "qwen3"))
def wrong_input(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("backward"):
        if dict(each.kwargs).get("inputs"):
            wrong = each.with_(kwargs=(("inputs", ("position_embeddings",)),))
            yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=pair_of(right, each))


@fault("sync by a function that averages", "a mean in the place of a sum: outputs")
def averaged(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        wrong = each.with_(args=("fwd_post", average))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=(each.path,))


@fault("sync by a function that does not communicate", "the partial sum goes on: outputs")
def no_communication(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        wrong = each.with_(args=("fwd_post", pass_on))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=(each.path,))


@fault("sync by a function without a backward", "the sum is right, its gradient is lost: gradients", at_most=1)
def no_backward(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        wrong = each.with_(args=("fwd_post", detached_sum))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=(each.path,))


def average(module: object, args: object, kwargs: object, output: object) -> object:
    return _sum(output) / 2


def pass_on(module: object, args: object, kwargs: object, output: object) -> object:
    return output


def detached_sum(module: object, args: object, kwargs: object, output: object) -> object:
    import torch.distributed as dist

    total = output.detach().clone()  # type: ignore[attr-defined]
    dist.all_reduce(total)
    return total


def _sum(output: object) -> object:
    import torch.distributed as dist

    total = output.detach().clone()  # type: ignore[attr-defined]
    dist.all_reduce(total)
    return output + (total - output.detach())  # type: ignore[attr-defined, operator]


def _other(path: str) -> str:
    return ".".join({"0": "1", "1": "0"}.get(name, name) if not done else name for name, done in _first_number(path))


def _first_number(path: str) -> Iterator[tuple[str, bool]]:
    done = False
    for name in path.split("."):
        yield name, done
        done = done or name.isdigit()
