"""What each operator does with axes: pairs them, cuts them, sums over them, or needs them in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from slapo_models.auto.axes import Axis, concatenation, divided, product, segment, unify, viewed
from slapo_models.auto.recording import CONSTANT, Operator, Recording, Value

Rule = Callable[[Operator], list[Axis] | None]
_RULES: dict[str, Rule] = {}


def infer(recording: Recording) -> dict[int, list[Axis]]:
    """Give every value its axes.

    Returns:
        operator's index -> the axes that it sums over, split of which makes its result a partial.
    """
    contractions: dict[int, list[Axis]] = {}
    for value in recording.values.values():
        _fresh(value)
    for operator in recording.operators:
        for value in operator.inputs:
            if value.made_by is None:
                _fresh(value)
                if value.origin == CONSTANT and value.shape:
                    _block(value, f"a constant of {operator.where}")
        summed = apply_rule(operator)
        if summed:
            contractions[operator.index] = list(summed)
        for value in operator.results:
            if value.changed_gradient:
                _block(value, value.changed_gradient)
    return contractions


def apply_rule(operator: Operator) -> list[Axis] | None:
    """Give an operator's results their axes; return the axes that it sums over."""
    rule = _rule_of(operator)
    try:
        summed = rule(operator)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):  # arguments that the rule does not know
        _unknown(operator)
        summed = None
    for value in operator.results:
        if len(value.axes) != len(value.shape) or any(
            axis.size != size for axis, size in zip(value.axes, value.shape, strict=True)
        ):
            value.axes = []
            _unknown(operator)
            break
    return summed


def _rule_of(operator: Operator) -> Rule:
    found = _RULES.get(operator.name)
    if found is not None:
        return found
    if operator.name.endswith("_") and operator.name[:-1] in _RULES:
        return _RULES[operator.name[:-1]]
    if operator.function is not None and torch.Tag.pointwise in operator.function.tags:
        return _pointwise
    return _unknown


def rule(*names: str) -> Callable[[Any], Any]:
    """Register the rule of operators by their names."""

    def register(function: Any) -> Any:
        for name in names:
            _RULES[f"aten::{name}" if "::" not in name else name] = function
        return function

    return register


def _fresh(value: Value) -> None:
    if not value.axes:
        value.axes = [Axis(size) for size in value.shape]


def _block(value: Value, reason: str, axes: Iterable[int] | None = None) -> None:
    for position in range(len(value.axes)) if axes is None else axes:
        value.axes[position].block(reason)


def _unknown(operator: Operator) -> None:
    for value in operator.inputs:
        _block(value, operator.where)
    for value in operator.results:
        _fresh(value)
        _block(value, operator.where)


def _merge(operator: Operator, inputs: Sequence[Value], shape: Sequence[int]) -> list[Axis]:
    """Unify the axes of broadcast inputs."""
    found: list[Axis] = []
    for position, size in enumerate(shape):
        axis: Axis | None = None
        for value in inputs:
            own = position - len(shape) + len(value.axes)
            if own < 0 or value.axes[own].size != size:
                continue
            if axis is None:
                axis = value.axes[own]
            else:
                unify(axis, value.axes[own], operator.where)
        found.append(axis if axis is not None else Axis(size))
    return found


@rule("detach", "alias", "_to_copy", "lift_fresh", "lift_fresh_copy", "zeros_like", "ones_like", "empty_like",
      "full_like", "rand_like", "randn_like", "native_dropout", "bernoulli", "where", "masked_fill", "copy", "fill_",
      "zero_", "normal_", "uniform_", "_conj", "_fused_dropout", "exponential_", "set_", "rrelu_with_noise",
      "collective::copy", "collective::all_reduce", "collective::all_reduce_", "slapo::overwritten")  # fmt: skip
def _pointwise(operator: Operator) -> None:
    inputs = list(dict.fromkeys(operator.inputs))
    if operator.name == "slapo::overwritten":
        inputs = [operator.arguments["self"]]
    for value in operator.results:
        value.axes = _merge(operator, inputs, value.shape)


@rule("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided", "rand",
      "randn", "scalar_tensor", "new_empty_strided", "empty_permuted")  # fmt: skip
def _created(operator: Operator) -> None:
    for value in operator.results:
        _fresh(value)


@rule("arange", "linspace", "randperm", "eye", "tril_indices", "randint", "_local_scalar_dense")
def _counted(operator: Operator) -> None:
    for value in operator.results:
        _fresh(value)
        _block(value, operator.where)


@rule("view", "_unsafe_view", "_reshape_alias", "view_copy")
def _view(operator: Operator) -> None:
    (result,) = operator.results
    source = operator.arguments["self"]
    if result.dtype != source.dtype and result.shape != source.shape:
        _unknown(operator)
    elif 0 in source.shape:
        _created(operator)
    else:
        result.axes = viewed(source.axes, result.shape, operator.where)


def _dim(value: Value, dim: int) -> int:
    return dim % len(value.axes) if value.axes else 0


@rule("view_as_complex")
def _view_as_complex(operator: Operator) -> None:
    source = operator.arguments["self"]
    source.axes[-1].block(operator.where)
    operator.results[0].axes = source.axes[:-1]


@rule("view_as_real")
def _view_as_real(operator: Operator) -> None:
    new = Axis(2)
    new.block(operator.where)
    operator.results[0].axes = [*operator.arguments["self"].axes, new]


@rule("t")
def _t(operator: Operator) -> None:
    operator.results[0].axes = operator.arguments["self"].axes[::-1]


@rule("transpose")
def _transpose(operator: Operator) -> None:
    source = operator.arguments["self"]
    axes = list(source.axes)
    a, b = (_dim(source, operator.arguments[name]) for name in ("dim0", "dim1"))
    axes[a], axes[b] = axes[b], axes[a]
    operator.results[0].axes = axes


@rule("permute")
def _permute(operator: Operator) -> None:
    source = operator.arguments["self"]
    operator.results[0].axes = [source.axes[_dim(source, dim)] for dim in operator.arguments["dims"]]


@rule("unsqueeze")
def _unsqueeze(operator: Operator) -> None:
    source, dim = operator.arguments["self"], operator.arguments["dim"]
    axes = list(source.axes)
    axes.insert(dim if dim >= 0 else dim + len(axes) + 1, Axis(1))
    operator.results[0].axes = axes


@rule("squeeze")
def _squeeze(operator: Operator) -> None:
    source = operator.arguments["self"]
    dims = operator.arguments.get("dim")
    every = range(len(source.axes)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {_dim(source, dim) for dim in every}
    operator.results[0].axes = [
        axis for position, axis in enumerate(source.axes) if position not in gone or axis.size != 1
    ]


@rule("expand")
def _expand(operator: Operator) -> None:
    (result,) = operator.results
    result.axes = _merge(operator, [operator.arguments["self"]], result.shape)


@rule("repeat")
def _repeat(operator: Operator) -> None:
    source, repeats = operator.arguments["self"], operator.arguments["repeats"]
    axes = [*(Axis(1) for _ in range(len(repeats) - len(source.axes))), *source.axes]
    operator.results[0].axes = [
        axis if times == 1 else product([Axis(times), axis]) for times, axis in zip(repeats, axes, strict=True)
    ]


@rule("slice")
def _slice(operator: Operator) -> None:
    source = operator.arguments["self"]
    dim = _dim(source, operator.arguments.get("dim", 0))
    size, step = source.shape[dim], operator.arguments.get("step", 1)
    start, stop = operator.arguments.get("start"), operator.arguments.get("end")
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    stop = size if stop is None else min(max(stop + size if stop < 0 else stop, 0), size)
    axes = list(source.axes)
    if step == 1:
        axes[dim] = segment(axes[dim], start, stop, operator.where)
    else:
        halves = divided(axes[dim], size // step, operator.where) if size % step == 0 and start < step else None
        if halves is None or operator.results[0].shape[dim] != halves[0].size:
            axes[dim].block(operator.where)
            axes[dim] = Axis(operator.results[0].shape[dim])
            axes[dim].block(operator.where)
        else:
            halves[1].block(operator.where)
            axes[dim] = halves[0]
    operator.results[0].axes = axes


@rule("select")
def _select(operator: Operator) -> None:
    source = operator.arguments["self"]
    dim = _dim(source, operator.arguments["dim"])
    source.axes[dim].block(operator.where)
    operator.results[0].axes = [*source.axes[:dim], *source.axes[dim + 1 :]]


@rule("unbind")
def _unbind(operator: Operator) -> None:
    source = operator.arguments["self"]
    dim = _dim(source, operator.arguments.get("dim", 0))
    source.axes[dim].block(operator.where)
    for result in operator.results:
        result.axes = [*source.axes[:dim], *source.axes[dim + 1 :]]


@rule("split", "split_with_sizes", "unsafe_split", "split_copy", "unsafe_split_with_sizes")
def _split(operator: Operator) -> None:
    source = operator.arguments["self"]
    dim = _dim(source, operator.arguments.get("dim", 0))
    position = 0
    for result in operator.results:
        size = result.shape[dim]
        axes = list(source.axes)
        axes[dim] = segment(axes[dim], position, position + size, operator.where)
        result.axes = axes
        position += size


@rule("cat")
def _cat(operator: Operator) -> None:
    tensors = [value for value in operator.arguments["tensors"] if value.shape != (0,)]
    (result,) = operator.results
    dim = operator.arguments.get("dim", 0) % len(result.shape)
    axes = _merge(operator, tensors, [1 if each == dim else size for each, size in enumerate(result.shape)])
    axes[dim] = concatenation([value.axes[dim] for value in tensors])
    result.axes = axes


@rule("stack")
def _stack(operator: Operator) -> None:
    tensors, (result,) = operator.arguments["tensors"], operator.results
    dim = operator.arguments.get("dim", 0) % len(result.shape)
    axes = _merge(operator, tensors, tensors[0].shape)
    new = Axis(len(tensors))
    new.block(operator.where)
    result.axes = [*axes[:dim], new, *axes[dim:]]


@rule("constant_pad_nd")
def _pad(operator: Operator) -> None:
    source, (result,), pad = operator.arguments["self"], operator.results, operator.arguments["pad"]
    axes = list(source.axes)
    for number in range(len(pad) // 2):
        if pad[2 * number] or pad[2 * number + 1]:
            position = len(axes) - 1 - number
            axes[position].block(operator.where)
            axes[position] = Axis(result.shape[position])
            axes[position].block(operator.where)
    result.axes = axes


@rule("sum", "mean", "amax", "amin", "var", "var_mean", "std", "std_mean", "any", "all", "max", "min", "argmax",
      "argmin", "logsumexp", "linalg_vector_norm", "norm", "prod", "median", "count_nonzero", "nansum")  # fmt: skip
def _reduce(operator: Operator) -> None:
    source: Any = operator.arguments.get("self", operator.arguments.get("x"))
    if isinstance(operator.arguments.get("other"), Value):  # of two tensors, element by element
        return _pointwise(operator)
    dims = operator.arguments.get("dim")
    every = dims is None or dims == []
    given: Any = range(len(source.axes)) if every else [dims] if isinstance(dims, int) else dims
    gone = {_dim(source, dim) for dim in given}
    _block(source, operator.where, gone)
    for result in operator.results:
        kept = len(result.shape) == len(source.axes)
        result.axes = [
            Axis(1) if position in gone else axis
            for position, axis in enumerate(source.axes)
            if kept or position not in gone
        ]
    return None


@rule("_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "logcumsumexp", "_safe_softmax", "flip", "roll",
      "tril", "triu", "topk", "cummax")  # fmt: skip
def _along(operator: Operator) -> None:
    source = operator.arguments["self"]
    dims = operator.arguments.get("dim", operator.arguments.get("dims", -1))
    if operator.name in ("aten::tril", "aten::triu", "aten::tril_", "aten::triu_"):
        dims = [-1, -2]
    own = {_dim(source, dim) for dim in ([dims] if isinstance(dims, int) else dims)}
    _block(source, operator.where, own)
    for result in operator.results:
        result.axes = [
            axis if axis.size == size else Axis(size) for axis, size in zip(source.axes, result.shape, strict=True)
        ]
        _block(result, operator.where, own)
    return


@rule("native_layer_norm", "_fused_rms_norm")
def _norm(operator: Operator) -> None:
    source = operator.arguments["input"]
    number = len(operator.arguments["normalized_shape"])
    for name in ("weight", "bias"):
        own = operator.arguments.get(name)
        if own is not None:
            for a, b in zip(source.axes[-number:], own.axes, strict=True):
                unify(a, b, operator.where)
    _block(source, operator.where, range(len(source.axes) - number, len(source.axes)))
    operator.results[0].axes = list(source.axes)
    for result in operator.results[1:]:
        result.axes = [
            axis if axis.size == size else Axis(size) for axis, size in zip(source.axes, result.shape, strict=False)
        ]


@rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update",
      "_native_batch_norm_legit_no_training")  # fmt: skip
def _batch_norm(operator: Operator) -> None:
    source = operator.arguments["input"]
    for name in ("weight", "bias", "running_mean", "running_var"):
        own = operator.arguments.get(name)
        if own is not None:
            unify(source.axes[1], own.axes[0], operator.where)
    _block(source, operator.where, [position for position in range(len(source.axes)) if position != 1])
    operator.results[0].axes = list(source.axes)
    for result in operator.results[1:]:
        result.axes = [source.axes[1] if size == source.shape[1] else Axis(size) for size in result.shape]


@rule("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")
def _product(operator: Operator) -> list[Axis]:
    values = operator.arguments
    a: Any = values.get("mat1", values.get("batch1", values.get("self")))
    b: Any = values.get("mat2", values.get("batch2"))
    if operator.name in ("aten::addmm", "aten::baddbmm", "aten::mm", "aten::bmm"):
        unify(a.axes[-1], b.axes[-2], operator.where)
        axes = [*a.axes[:-1], b.axes[-1]]
        if len(a.axes) == 3:
            unify(a.axes[0], b.axes[0], operator.where)
        result = operator.results[0]
        if operator.name in ("aten::addmm", "aten::baddbmm"):
            full = Value(result.shape, result.dtype, axes=axes)
            axes = _merge(operator, [full, values["self"]], result.shape)
        result.axes = axes
        return [a.axes[-1]]
    if operator.name == "aten::_grouped_mm" and (len(a.axes), len(b.axes)) == (2, 3):
        unify(a.axes[-1], b.axes[-2], operator.where)
        b.axes[0].block(operator.where)
        a.axes[0].block(operator.where)
        operator.results[0].axes = [a.axes[0], b.axes[-1]]
        return [a.axes[-1]]
    _unknown(operator)
    return []


@rule("linalg_solve_triangular")
def _solve(operator: Operator) -> None:
    """Solve for each matrix of a batch."""
    matrix, right = operator.arguments["self"], operator.arguments["B"]
    _block(matrix, operator.where, range(len(matrix.axes) - 2, len(matrix.axes)))
    right.axes[-1 if operator.arguments.get("left") is False else -2].block(operator.where)
    batch = _merge(operator, [_without_matrix(matrix), _without_matrix(right)], operator.results[0].shape[:-2])
    operator.results[0].axes = [*batch, *right.axes[-2:]]


def _without_matrix(value: Value) -> Value:
    return Value(value.shape[:-2], value.dtype, axes=value.axes[:-2])


@rule("convolution", "_convolution", "convolution_overrideable")
def _convolution(operator: Operator) -> list[Axis]:
    source, weight, (result,) = operator.arguments["input"], operator.arguments["weight"], operator.results
    groups, bias = operator.arguments["groups"], operator.arguments.get("bias")
    rest = [Axis(size) for size in result.shape[2:]]
    for axis in (*source.axes[2:], *weight.axes[2:], *rest):
        axis.block(operator.where)
    if operator.arguments["transposed"]:
        _unknown(operator)
        return []
    output = weight.axes[0]
    if bias is not None:
        unify(output, bias.axes[0], operator.where)
    result.axes = [source.axes[0], output, *rest]
    if groups == 1:
        unify(source.axes[1], weight.axes[1], operator.where)
        return [source.axes[1]]
    if groups == source.shape[1] == result.shape[1]:
        unify(source.axes[1], output, operator.where)
        return []
    _block(source, operator.where, [1])
    output.block(operator.where)
    return []


@rule("embedding")
def _embedding(operator: Operator) -> None:
    weight, indices = operator.arguments["weight"], operator.arguments["indices"]
    weight.axes[0].block(operator.where)
    operator.results[0].axes = [*indices.axes, weight.axes[1]]


@rule("index_select")
def _index_select(operator: Operator) -> None:
    source, index = operator.arguments["self"], operator.arguments["index"]
    dim = _dim(source, operator.arguments["dim"])
    source.axes[dim].block(operator.where)
    operator.results[0].axes = [*source.axes[:dim], index.axes[0] if index.axes else Axis(1), *source.axes[dim + 1 :]]


@rule("index", "_unsafe_index")
def _index(operator: Operator) -> None:
    source, (result,) = operator.arguments["self"], operator.results
    indices = list(operator.arguments["indices"])
    indices += [None] * (len(source.axes) - len(indices))
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return _mask_index(operator, source, indices, result)
    places = [position for position, index in enumerate(indices) if index is not None]
    numbers = indices[places[0]].numbers if len(places) == 1 else None
    if numbers:
        size = source.shape[places[0]]
        first = numbers[0] % size
        if [number % size for number in numbers] == list(range(first, first + len(numbers))):  # a slice
            axes = list(source.axes)
            axes[places[0]] = segment(axes[places[0]], first, first + len(numbers), operator.where)
            result.axes = axes
            return None
    _block(source, operator.where, places)
    given = [indices[position] for position in places]
    length = max(len(value.shape) for value in given)
    kept = [axis for position, axis in enumerate(source.axes) if position not in places]
    is_together = places == list(range(places[0], places[0] + len(places)))
    start = places[0] if is_together else 0
    middle = _merge(operator, given, result.shape[start : start + length])
    result.axes = [*kept[:start], *middle, *kept[start:]]
    return None


def _mask_index(operator: Operator, source: Value, indices: list[Any], result: Value) -> None:
    masks = [index for index in indices if index is not None]
    if len(masks) != 1 or indices[0] is None:
        return _unknown(operator)
    number = len(masks[0].shape)
    _block(source, operator.where, range(number))
    new = Axis(result.shape[0])
    new.block(operator.where)
    result.axes = [new, *source.axes[number:]]
    return None


@rule("index_put", "_index_put_impl_", "_unsafe_index_put")
def _index_put(operator: Operator) -> None:
    source, values = operator.arguments["self"], operator.arguments["values"]
    indices = list(operator.arguments["indices"])
    places = [position for position, index in enumerate(indices) if index is not None]
    number = sum(
        len(index.shape) if index.dtype in (torch.bool, torch.uint8) else 1 for index in indices if index is not None
    )
    if not places or places[0] != 0 or places != list(range(len(places))):
        return _unknown(operator)
    _block(source, operator.where, range(number))
    kept = source.axes[number:]
    for a, b in zip(reversed(kept), reversed(values.axes), strict=False):
        if a.size == b.size:
            unify(a, b, operator.where)
    for result in operator.results:
        result.axes = list(source.axes)
    return None


@rule("index_add", "index_copy", "scatter", "scatter_add", "gather", "index_fill", "scatter_reduce")
def _by_index(operator: Operator) -> None:
    source, dim = operator.arguments["self"], _dim(operator.arguments["self"], operator.arguments["dim"])
    _block(source, operator.where, [dim])
    others = [operator.arguments.get(name) for name in ("source", "src", "index")]
    for value in others:
        if isinstance(value, Value) and len(value.axes) == len(source.axes):
            for position, axis in enumerate(value.axes):
                if position == dim or axis.size != source.shape[position]:
                    axis.block(operator.where)
                    source.axes[position].block(operator.where)
                else:
                    unify(axis, source.axes[position], operator.where)
    index = operator.arguments.get("index")
    for result in operator.results:
        like = index if operator.name == "aten::gather" else source
        result.axes = list(like.axes)  # type: ignore[union-attr]


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
      "_scaled_dot_product_flash_attention", "_scaled_dot_product_fused_attention_overrideable",
      "_scaled_dot_product_cudnn_attention")  # fmt: skip
def _attention(operator: Operator) -> None:
    query, key, value = (operator.arguments[name] for name in ("query", "key", "value"))
    mask = operator.arguments.get("attn_mask", operator.arguments.get("attn_bias"))
    unify(query.axes[0], key.axes[0], operator.where)
    unify(key.axes[0], value.axes[0], operator.where)
    unify(key.axes[1], value.axes[1], operator.where)
    unify(key.axes[2], value.axes[2], operator.where)
    if query.shape[1] == key.shape[1]:
        unify(query.axes[1], key.axes[1], operator.where)
    else:
        halves = divided(query.axes[1], key.shape[1], operator.where)
        if halves is None:
            query.axes[1].block(operator.where)
            key.axes[1].block(operator.where)
        else:
            unify(halves[0], key.axes[1], operator.where)
    for axis in (query.axes[3], key.axes[3], query.axes[2], key.axes[2]):
        axis.block(operator.where)
    if isinstance(mask, Value):
        for position, axis in zip((3, 2, 1, 0), reversed(mask.axes), strict=False):
            own = key.axes[2] if position == 3 else query.axes[position]
            if axis.size == own.size:
                unify(axis, own, operator.where)
    result = operator.results[0]
    result.axes = [*query.axes[:3], value.axes[3]]
    for other in operator.results[1:]:
        other.axes = [
            axis if axis.size == size else Axis(size) for axis, size in zip(query.axes, other.shape, strict=False)
        ]


@rule("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "max_pool3d_with_indices", "avg_pool1d",
      "adaptive_avg_pool1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "avg_pool3d",
      "_adaptive_avg_pool3d", "_upsample_bilinear2d_aa")  # fmt: skip
def _pool(operator: Operator) -> None:
    source = operator.arguments["self"]
    number = 3 if "3d" in operator.name else 1 if "1d" in operator.name else 2
    _block(source, operator.where, range(len(source.axes) - number, len(source.axes)))
    for result in operator.results:
        kept = source.axes[: len(source.axes) - number]
        new = [Axis(size) for size in result.shape[len(kept) :]]
        result.axes = [*kept, *new]
        for axis in new:
            axis.block(operator.where)
