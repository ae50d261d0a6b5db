"""Which operations a traced forward contains, counted by a crude look at its nodes: the measure of what patterns miss.

Nothing of the pattern matcher is used here. Each count asks for one tell-tale node and a little of what stands around
it, and says nothing about whether the operation is written in a form that a pattern knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import fx, nn

__all__ = ["OPERATIONS", "count_operations"]

_THROUGH = {
    "to", "type", "type_as", "float", "half", "bfloat16", "dropout", "contiguous", "clone", "nan_to_num", "view",
    "reshape", "add", "add_", "mul", "mul_", "div", "div_", "sub", "masked_fill", "masked_fill_", "where", "permute",
    "transpose", "flatten", "unflatten", "unsqueeze", "squeeze", "truediv", "iadd", "imul", "itruediv", "getitem",
    "Dropout",
}  # fmt: skip
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__"}


def count_operations(module: nn.Module, graph: fx.Graph) -> Counter[str]:
    """How often each of :data:`OPERATIONS` is in ``graph``, which ``module`` runs."""
    names = {node: _name(module, node) for node in graph.nodes}
    return Counter({what: sum(1 for node in graph.nodes if counts(node, names)) for what, counts in OPERATIONS.items()})


Names = dict[fx.Node, str]


def _name(module: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        is_without = isinstance(called, nn.Linear) and called.bias is None
        return "LinearWithoutBias" if is_without else type(called).__name__
    if node.op == "call_method":
        return str(node.target).rstrip("_")
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target)).rstrip("_")
    return node.op


def _before(node: fx.Node, names: Names, *, depth: int) -> Iterator[fx.Node]:
    """What ``node`` is computed from, through operations that only scale, mask, cast or reshape."""
    for operand in node.all_input_nodes:
        yield operand
        if depth and names[operand] in _THROUGH:
            yield from _before(operand, names, depth=depth - 1)


def _after(node: fx.Node, names: Names, *, depth: int) -> Iterator[fx.Node]:
    for user in node.users:
        yield user
        if depth and names[user] in _THROUGH:
            yield from _after(user, names, depth=depth - 1)


def _is_attention(node: fx.Node, names: Names) -> bool:
    """A softmax between two matrix products."""
    return (
        names[node] in ("softmax", "Softmax")
        and any(names[each] in _PRODUCTS for each in _before(node, names, depth=8))
        and any(names[each] in _PRODUCTS for each in _after(node, names, depth=6))
    )


def _is_rms_norm(node: fx.Node, names: Names) -> bool:
    """The reciprocal root of a mean of squares of what was not centerd before."""
    if names[node] not in ("rsqrt", "sqrt", "pow"):
        return False
    means = [each for each in _before(node, names, depth=2) if names[each] == "mean"]
    squares = [each for mean in means for each in mean.all_input_nodes if names[each] in ("pow", "square", "mul")]
    return any(names[each] not in ("sub", "rsub") for square in squares for each in square.all_input_nodes)


def _is_gelu_by_erf(node: fx.Node, names: Names) -> bool:
    """An error function: GELU written out."""
    return names[node] == "erf"


def _is_gelu_by_tanh(node: fx.Node, names: Names) -> bool:
    """A hyperbolic tangent of something with the constant of GELU's approximation."""
    return names[node] == "tanh" and any(0.044715 in each.args for each in _before(node, names, depth=5))


def _is_gelu_of_bias(node: fx.Node, names: Names) -> bool:
    """GELU, written out or not, of a linear layer with a bias."""
    if names[node] not in ("gelu", "GELU") and not _is_gelu_by_erf(node, names) and not _is_gelu_by_tanh(node, names):
        return False
    deep = names[node] in ("erf", "tanh")
    return any(names[each] in ("Linear", "linear") for each in _before(node, names, depth=4 if deep else 0))


def _is_swiglu(node: fx.Node, names: Names) -> bool:
    """The product of a SiLU and something else."""
    if names[node] not in ("silu", "SiLU"):
        return False
    return any(names[user] == "mul" and node.args[0] not in user.args for user in _after(node, names, depth=1))


def _is_rotary(node: fx.Node, names: Names) -> bool:
    """A half negated and put together with another."""
    parts = node.args[0] if node.args else None
    return (
        names[node] in ("cat", "stack", "concat")
        and isinstance(parts, (list, tuple))
        and len(parts) == 2
        and sum(isinstance(part, fx.Node) and names[part] == "neg" for part in parts) == 1
    )


def _is_normed_sum(node: fx.Node, names: Names) -> bool:
    """A LayerNorm of a sum of two values, or of its rows."""
    if names[node] not in ("layer_norm", "LayerNorm") or not node.args:
        return False
    summed = node.args[0]
    if isinstance(summed, fx.Node) and names[summed] == "reshape":
        summed = summed.args[0]
    return isinstance(summed, fx.Node) and names[summed] in ("add", "iadd") and len(summed.all_input_nodes) == 2


def _is_qkv(node: fx.Node, names: Names) -> bool:
    """A value that exactly three linear layers read."""
    return sum(names[user] in ("Linear", "LinearWithoutBias", "linear") for user in node.users) == 3


OPERATIONS: dict[str, Callable[[fx.Node, Names], bool]] = {
    "fusion.sdpa": _is_attention,
    "fusion.bias_gelu": _is_gelu_of_bias,
    "fusion.gelu": _is_gelu_by_erf,
    "fusion.gelu_tanh": _is_gelu_by_tanh,
    "fusion.bias_dropout_add_norm": _is_normed_sum,
    "fusion.rms_norm": _is_rms_norm,
    "fusion.swiglu": _is_swiglu,
    "fusion.rotary": _is_rotary,
    "fusion.qkv": _is_qkv,
}
"""The pattern -> what tells a node of its operation."""
