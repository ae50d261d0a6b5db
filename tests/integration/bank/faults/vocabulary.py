"""Tables of words and the layer in front of the output."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tests.integration.bank.faults.fault import fault
from tests.integration.bank.steps import Right, Wrong, step

TEXT = ("bert", "gpt2", "llama", "qwen3", "t5")


@fault("sum of a split table missing", "words of other ranks are zero: outputs", models=TEXT)
def lookup_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("lookup"):
        yield Wrong(
            right, each.path, right.without(position), near=right.places(each.part), add=((each.path, "sync("),)
        )


@fault("gather of the logits missing", "the output is one rank's piece: shapes")
def gather_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("gather"):
        yield Wrong(
            right, each.path, right.without(position), near=right.places(each.part),
            add=((each.path, "sync("),),
        )  # fmt: skip


@fault("logits gathered on the wrong axis", "sequences of the ranks side by side: shapes")
def gather_on_wrong_axis(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("gather"):
        axis = 0
        wrong = each.with_(args=("fwd_post", "all_gather"), kwargs=(("axis", axis),))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault(
    "table split by features, summed like words", "pieces of the features are added: shapes", models=("llama", "qwen3")
)
def table_by_features(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("table"):
        yield Wrong(
            right,
            each.path,
            right.changed(position, each.with_(kwargs=(("axis", 1),))),
            guilty=(position, position + 1),
        )


@fault("wrong range of words", "each rank looks up the other's words: outputs", models=("llama", "qwen3"))
def wrong_range(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("table"):
        wrong = each.with_(kwargs=(("axis", 0), ("packed", 2)))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault(
    "tied table: one end split only",
    "the two ends are no longer one tensor: weights after a step",
    models=("bert", "gpt2", "t5"),
    kinds=("layers",),
)
def tie_broken(right: Right) -> Iterator[Wrong]:
    head = {"bert": "cls.predictions.decoder", "gpt2": "lm_head", "t5": "lm_head"}[right.model]
    extra = step(head, "replace", untied)
    yield Wrong(right, head, (*right.steps, extra), guilty=(len(right.steps),))


@fault(
    "tie broken from outside",
    "two tensors where one was: weights after a step",
    models=("bert", "gpt2", "t5"),
    kinds=("layers",),
)
def tie_broken_outside(right: Right) -> Iterator[Wrong]:
    head = {"bert": "cls.predictions.decoder", "gpt2": "lm_head", "t5": "lm_head"}[right.model]
    yield Wrong(right, head, (*right.steps, step(head, "outside", cut_tie)), outside=True, near=(head,))


@fault(
    "tied table: only one end summed",
    "what the head or the table gives is partial: outputs",
    models=("bert", "gpt2", "t5"),
)
def one_end(right: Right) -> Iterator[Wrong]:
    for _, each in right.where("head"):
        rest = [n for n, e in right.where("lookup") if e.part == each.part]
        yield Wrong(
            right, each.path, right.without(*rest), near=right.places(each.part),
            add=tuple((right.steps[n].path, "sync(") for n in rest),
        )  # fmt: skip


@fault(
    "head split by its input without its input split",
    "whole inputs meet pieces of the weight: raises",
    models=("llama", "qwen3", "vit"),
)
def head_by_input(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("head"):
        if dict(each.kwargs)["axis"] == 0 and each.part == "head":
            wrong = each.with_(args=("weight",), kwargs=(("axis", 1),))
            yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=right.places("head"))


@fault("bias of the head not split", "pieces of the logits and the bias of all: raises", models=("bert", "vit"))
def head_bias_whole(right: Right) -> Iterator[Wrong]:
    if right.model == "bert":
        for position, each in right.where("bias"):
            yield Wrong(right, each.path, right.without(position), near=right.places(each.part))
    else:
        for position, each in right.where("head"):
            yield Wrong(
                right, each.path, right.changed(position, each.with_(args=("weight",))), guilty=(position,),
                near=right.places(each.part),
            )  # fmt: skip


def untied(old: nn.Linear) -> nn.Module:
    """A layer with a copy of the weight, which is another tensor for the optimizer."""

    class Untied(nn.Linear):
        def __init__(self) -> None:
            super().__init__(old.in_features, old.out_features, bias=old.bias is not None)
            self.own = nn.Parameter(old.weight.detach().clone())

        def forward(self, input):  # type: ignore[no-untyped-def]
            return nn.functional.linear(input, self.own, self.bias)

    return Untied()


def cut_tie(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach().clone())
