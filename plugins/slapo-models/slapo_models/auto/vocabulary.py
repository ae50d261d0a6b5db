"""Embeddings and heads that are split along the vocabulary or the classes, and the loss from the head's shards."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from slapo_models.auto.candidates import Step
from slapo_models.auto.placement import Graph, LeftWhole
from slapo_models.auto.recording import PARAMETER, Operator, Value

_LOSSES = ("aten::_log_softmax", "aten::nll_loss_forward")
_LEAST_ROWS = 4  # times the classes of a head without an embedding are its width: fewer do not pay for collectives
_BEHIND_A_LOOKUP = frozenset(
    f"aten::{name}" for name in ("mul", "mul_", "div", "div_", "_to_copy", "view", "_unsafe_view", "detach", "clone")
)


def vocabularies(graph: Graph) -> Iterator[tuple[Value, list[Step] | LeftWhole]]:
    """Yield each weight of a vocabulary with the steps that split it, or why it stays full."""
    heads, embeddings = _heads(graph), _embeddings(graph)
    rows = {value.shape[0] for value in heads}
    largest = max((value.shape[0] for value in embeddings), default=0)
    for value in dict.fromkeys((*embeddings, *heads)):
        own = embeddings.get(value, [])
        if value not in heads and (value.shape[0] not in rows if rows else value.shape[0] != largest):
            continue
        is_classifier = value.shape[0] not in {each.shape[0] for each in embeddings}
        if is_classifier and not (_LEAST_ROWS * value.shape[0] >= value.shape[1] and _losses(graph, value)):
            continue
        try:
            yield value, _steps(graph, value, own, heads.get(value), is_classifier=is_classifier)
        except LeftWhole as reason:
            yield value, reason


def _embeddings(graph: Graph) -> dict[Value, list[Operator]]:
    """Return weight -> lookups by ids, of modules whose forward is one lookup."""
    found: dict[Value, list[Operator]] = {}
    for operator in graph.recording.operators:
        if operator.name == "aten::embedding":
            weight = operator.arguments["weight"]
            if (operator.call.path, "weight") in weight.names and isinstance(operator.call.module, nn.Embedding):
                found.setdefault(weight, []).append(operator)
    return found


def _heads(graph: Graph) -> dict[Value, str]:
    """Return weight -> path of the linear layers that give logits."""
    found: dict[Value, str] = {}
    for call in graph.recording.calls:
        if type(call.module) is not nn.Linear:
            continue
        weight = graph.recording.values[f"{call.path}.weight".lstrip(".")]
        outputs = call.outputs[:1]
        leaves = set(weight.axes[0].leaves())
        is_returned = any(leaves & graph.leaves(value) for value in graph.outputs) and outputs
        if is_returned or _losses(graph, weight):
            found[weight] = call.path
    return found


def _losses(graph: Graph, head: Value) -> set[str]:
    """Return the operators of a loss that read the rows of a head."""
    operators = (operator for leaf in head.axes[0].leaves() for operator in graph.operators_of.get(leaf, ()))
    return {operator.name for operator in operators} & set(_LOSSES)


def _require_linear(lookup: Operator) -> None:
    """Require that the module of a lookup returns it, scaled at most: zeros for other ranks' rows must stay zeros."""
    call, derived = lookup.call, set(lookup.results)
    text = f"{type(call.module).__name__} does more than look up rows"
    for operator in call.operators[call.operators.index(lookup) + 1 :]:
        own = [value for value in operator.inputs if value in derived]
        if own and (operator.name not in _BEHIND_A_LOOKUP or len(own) > 1):
            raise LeftWhole(text)
        if own and any(value.origin == PARAMETER for value in operator.inputs):
            raise LeftWhole(text)
        derived.update(operator.results if own else ())
    if len(call.outputs) != 1 or call.outputs[0] not in derived:
        raise LeftWhole(text)


def _steps(graph: Graph, value: Value, lookups: list[Operator], head: str | None, *, is_classifier: bool) -> list[Step]:
    for use in value.uses:
        is_head = head is not None and use.call.path == head
        if use not in lookups and not is_head:
            raise LeftWhole(f"{use.where} reads it besides")
    for lookup in lookups:
        _require_linear(lookup)
    rows = f"its {value.shape[0]} rows"
    paths = list(dict.fromkeys(operator.call.path for operator in lookups))
    first = head if head is not None and not paths else paths[0]
    found = [Step(first, "shard", ("weight",), (("axis", 0), ("pad", True)), f"{rows} are a vocabulary")]
    for path in paths:
        found.append(Step(path, "sync", ("fwd_post", "all_reduce"), (), "each rank looks up its own rows"))
    if head is None:
        return found
    bias = graph.recording.values.get(f"{head}.bias")
    if bias is not None:
        path, name = bias.names[0]
        if not paths and path == head:
            found[0] = Step(first, "shard", (("weight", "bias"),), (("axis", 0), ("pad", True)), found[0].reason)
        else:
            found.append(Step(path, "shard", (name,), (("axis", 0), ("pad", True)), "it goes with the head's classes"))
    found.append(Step(head, "sync", ("bwd_post", "all_reduce"), (), "each rank's classes see a part of the gradient"))
    if _losses(graph, value) and not is_classifier:
        found.append(Step(head, "linear_cross_entropy", (), (), "its logits are read by a cross entropy"))
    else:
        found.append(Step(head, "sync", ("fwd_post", "all_gather"), (), "its logits are read in full"))
    return found
