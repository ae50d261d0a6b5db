"""Tensors and attributes split wrongly, halfway, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from tests.integration.bank.faults.collectives import pair_of
from tests.integration.bank.faults.fault import fault
from tests.integration.bank.steps import Right, Wrong, step


@fault("column split on the input axis", "the layer's input has another size: raises, or outputs")
def wrong_axis_of_column(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("column"):
        kwargs = {**dict(each.kwargs), "axis": 1 - dict(each.kwargs)["axis"]}
        wrong = each.with_(args=("weight",), kwargs=tuple(kwargs.items()))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=pair_of(right, each))


@fault("row split on the output axis", "each rank has other features, which are summed: raises, or outputs")
def wrong_axis_of_row(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("row"):
        wrong = each.with_(kwargs=(("axis", 1 - dict(each.kwargs)["axis"]),))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=pair_of(right, each))


@fault("row not split", "the input is a piece, the weight is whole: raises")
def row_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("row"):
        yield Wrong(right, each.path, right.without(position), near=pair_of(right, each))


@fault("row neither split nor summed", "the input is a piece, the weight is whole: raises")
def row_and_sync_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("row"):
        yield Wrong(right, each.path, right.without(position, position + 1), near=pair_of(right, each))


@fault("column not split", "the row's input is whole, its weight a piece: raises")
def column_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("column"):
        yield Wrong(right, each.path, right.without(position), near=pair_of(right, each))


@fault(
    "bias of a column not split", "the bias has the size of all ranks' features: raises", models=("bert", "gpt2", "vit")
)
def bias_whole(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("column"):
        wrong = each.with_(args=("weight",))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,), near=pair_of(right, each))


@fault("fused weight split as one", "rank 0 gets queries, rank 1 values: outputs", models=("gpt2",))
def not_packed(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("column"):
        if "packed" in dict(each.kwargs):
            wrong = each.with_(kwargs=(("axis", 1),))
            yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault("fused weight split as two", "queries, keys and values are cut in the wrong places: outputs", models=("gpt2",))
def packed_in_two(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("column"):
        if "packed" in dict(each.kwargs):
            wrong = each.with_(kwargs=(("axis", 1), ("packed", 2)))
            yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault(
    "fused weight split in the wrong sizes", "queries, keys and values are cut in the wrong places", models=("gpt2",)
)
def packed_in_wrong_sizes(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("column"):
        if "packed" in dict(each.kwargs):
            wrong = each.with_(kwargs=(("axis", 1), ("packed", (30, 10, 20))))
            yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault(
    "plain weight split as a fused one",
    "rows of both halves are taken: outputs",
    models=("llama", "qwen3", "t5", "vit", "bert"),
)
def packed_wrongly(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("row"):
        wrong = each.with_(kwargs=(*each.kwargs, ("packed", 2)))
        yield Wrong(right, each.path, right.changed(position, wrong), guilty=(position,))


@fault(
    "number of heads not divided",
    "the module cuts its pieces as if they were whole: raises",
    models=("gpt2", "t5"),
    at_most=3,
)
def count_missing(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("count"):
        if right.model == "t5" and each.part != "cross.0":
            continue  # only the first attention without a bias of its own makes one, of as many heads as it is said
        yield Wrong(
            right, each.path, right.without(position), near=pair_of(right, each),
            add=((each.path, "shard_attribute("),),
        )  # fmt: skip


@fault(
    "attribute divided that is no count of heads",
    "the scale of the heads changes: raises, or outputs",
    models=("gpt2", "llama", "qwen3", "vit", "bert"),
)
def wrong_count(right: Right) -> Iterator[Wrong]:
    from tests.integration.bank.places import ATTENTIONS

    name = {"bert": "attention_head_size"}.get(right.model, "head_dim")
    for number in range(2):
        path = ATTENTIONS[right.model].format(n=number)
        extra = step(path, "shard_attribute", "num_key_value_groups" if right.model in ("llama", "qwen3") else name)
        yield Wrong(right, path, (*right.steps, extra), guilty=(len(right.steps),))


@fault(
    "keys and values not split",
    "each rank's queries meet all keys: outputs, or raises",
    models=("llama", "qwen3", "t5", "vit"),
)
def keys_whole(right: Right) -> Iterator[Wrong]:
    parts = dict.fromkeys(each.part for _, each in right.where("column") if each.part.startswith("attention"))
    for part in parts:
        columns = [(n, e) for n, e in right.where("column") if e.part == part]
        inside = columns[0][1].path.rpartition(".")[0]
        wanted = [n for n, e in columns if e.path.startswith(inside) and e.path.rpartition(".")[2][0] in "kv"]
        yield Wrong(right, part, right.without(*wanted), near=right.places(part))


@fault(
    "one step at a glob that catches too much",
    "the row is split like the columns: raises, or outputs",
    models=("llama", "qwen3"),
)
def glob_too_wide(right: Right) -> Iterator[Wrong]:
    for number in range(2):
        part = f"mlp.{number}"
        positions = [n for n, e in enumerate(right.steps) if e.part == part and e.role in ("column", "row")]
        wide = step(f"model.layers.{number}.mlp.*_proj", "shard", "weight", axis=0, role="column", part=part)
        steps = list(right.without(*positions))
        steps.insert(positions[0], wide)
        yield Wrong(right, wide.path, tuple(steps), guilty=(positions[0],), near=right.places(part))


@fault("a shared tensor split twice", "a piece of a piece: raises", models=("bert", "gpt2", "t5"))
def split_twice(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("lookup"):
        extra = step(each.path, "shard", "weight", axis=0, part=each.part)
        yield Wrong(right, each.path, right.inserted(position, extra), guilty=(position,))


@fault("positions split", "each rank looks its own rows up, and nobody adds them: outputs", models=("bert", "gpt2"))
def positions_split(right: Right) -> Iterator[Wrong]:
    path = {"bert": "bert.embeddings.position_embeddings", "gpt2": "transformer.wpe"}[right.model]
    for axis in (0, 1):
        extra = step(path, "shard", "weight", axis=axis)
        yield Wrong(right, f"{path}, axis {axis}", (*right.steps, extra), guilty=(len(right.steps),))


@fault("rotary frequencies split", "each rank turns by its own half of the angles: raises", models=("llama", "qwen3"))
def rotary_split(right: Right) -> Iterator[Wrong]:
    extra = step("model.rotary_emb", "shard", "inv_freq", axis=0)
    yield Wrong(right, extra.path, (*right.steps, extra), guilty=(len(right.steps),))


@fault("a norm split", "the norm has the size of a piece, its input that of all: raises")
def norm_split(right: Right) -> Iterator[Wrong]:
    from tests.integration.bank.places import NORMS

    names = ["weight", "bias"] if right.model in ("bert", "gpt2", "vit") else "weight"
    for number in range(2):
        extra = step(NORMS[right.model].format(n=number), "shard", names, axis=0)
        yield Wrong(right, extra.path, (*right.steps, extra), guilty=(len(right.steps),))


@fault(
    "split through the middle of a head",
    "a rank has half of a head: raises",
    models=("gpt2", "bert", "vit", "t5"),
    at_most=1,
)
def middle_of_a_head(right: Right) -> Iterator[Wrong]:
    import dataclasses

    steps = tuple(each for each in right.steps if each.role != "count")
    for position, each in enumerate(steps):
        if each.role == "column" and each.part.startswith("attention"):
            near = tuple(e.path for e in steps if e.part == each.part)
            wide = dataclasses.replace(right, name=f"{right.name}/4 ranks", ranks=4)
            packed = each.with_(kwargs=(("axis", dict(each.kwargs)["axis"]), ("packed", (each_size(right.model)))))
            yield Wrong(
                wide, each.path, (*steps[:position], packed, *steps[position + 1 :]), guilty=(position,), near=near
            )
            return


def each_size(model: str) -> tuple[int, ...]:
    return {"gpt2": (8, 52), "bert": (8, 12), "vit": (8, 12), "t5": (8, 16)}[model]


@fault("relative bias split by buckets", "each rank looks its own buckets up: raises, or outputs", models=("t5",))
def relative_bias_by_buckets(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("table"):
        yield Wrong(right, each.path, right.changed(position, each.with_(kwargs=(("axis", 0),))), guilty=(position,))


@fault("relative bias not split", "scores of a rank's heads, biases of all: raises", models=("t5",))
def relative_bias_whole(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("table"):
        stack = each.path.partition(".")[0]
        near = tuple(path for path in right.places(each.part) if path.startswith(f"{stack}.block.0"))
        yield Wrong(right, each.path, right.without(position), near=near)
