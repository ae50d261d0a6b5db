"""A pattern is plain data: comparable, hashable, and the same after JSON and pickle."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from slapo_core.errors import ReplayError, SerializationError
from slapo_core.internals import describe, find_function
from slapo_graph.patterns import any_constant, any_of, any_op, call_module, capture, optional, where
from slapo_graph.patterns.definition import pattern_of
from slapo_graph.patterns.pattern import GraphPattern
from tests.messages import Messages

from .finding import Block
from .oracle.cases import random_case
from .oracle.forms import as_pattern


def is_module_call(node: fx.Node) -> bool:
    return node.op == "call_module"


PATTERNS: dict[str, Any] = {
    "function": lambda x, bias: F.gelu(x + bias),
    "constants": lambda x: x.masked_fill(x > 0, -math.inf).to(torch.float16) * 1e-300 + 1j,
    "layout": lambda x: x.to(memory_format=torch.channels_last),
    "device": lambda x: x.to(torch.device("cpu")),
    "index": lambda x, n: x[..., 1:n, None, ::2],
    "nothing": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=None, scale=None, dropout_p=math.nan),
    "module": Block(),
    "words": lambda x: any_op(optional(F.dropout, capture("a", x * 2), any_constant()), call_module("b", x, None)),
    "alternatives": any_of("*gelu*", re.compile("relu", re.IGNORECASE), nn.SiLU()),
    "predicate": where(is_module_call),
    "results": lambda x: {"a": F.relu(x), "b": [F.silu(x), (F.gelu(x),)]},
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_the_same_after_json_and_pickle(name: str) -> None:
    pattern = pattern_of(PATTERNS[name])
    text = json.dumps(pattern.to_data())
    again = GraphPattern.from_data(json.loads(text), lambda function: find_function(function, where="the predicate"))
    assert again == pattern == pickle.loads(pickle.dumps(pattern))
    assert hash(again) == hash(pattern) == hash(pattern_of(PATTERNS[name]))
    assert again == pattern_of(PATTERNS[name])
    assert json.dumps(again.to_data()) == text


def test_random_patterns_are_the_same_after_json() -> None:
    for seed in range(200):
        case = random_case(seed)
        pattern = pattern_of(as_pattern(case, random.Random(seed)))
        assert GraphPattern.from_data(json.loads(json.dumps(pattern.to_data()))) == pattern


def test_patterns_that_find_other_things_differ() -> None:
    patterns = [*map(pattern_of, PATTERNS.values())]
    for one, other in ((1, 1.0), (0, True), (0.0, -0.0), (torch.float16, torch.float32), (None, "")):
        patterns += [pattern_of(lambda x, c=value: x.to(c)) for value in (one, other)]
    patterns += [pattern_of(lambda x, y: x - y), pattern_of(lambda x, y: y - x)]
    assert len(set(patterns)) == len(patterns)
    assert pattern_of(lambda x: F.softmax(x, dim=-1)) == pattern_of(lambda x: x.softmax(-1))


def test_ranks_compare_a_pattern_by_one_line_that_tells_it_from_others() -> None:
    text = describe(("fused", pattern_of(PATTERNS["alternatives"])))
    assert text == describe(("fused", GraphPattern.from_data(pattern_of(PATTERNS["alternatives"]).to_data())))
    assert len(text) < 150
    one, other = (describe(pattern_of(pattern)) for pattern in (lambda x: x * 2, lambda x: x * 3))
    assert one.startswith("<the pattern, sha256 ")
    assert one != other


def test_a_pattern_holds_no_live_object() -> None:
    model = Block()
    data = pickle.dumps(pattern_of(model))
    assert b"Block" not in pickle.dumps(pattern_of(model).alternatives)
    assert len(data) < 5000


def test_a_predicate_that_has_no_name_cannot_be_saved(message: Messages) -> None:
    with pytest.raises(SerializationError) as error:
        pattern_of(where(lambda node: True)).to_data()
    message(error, "cannot be saved", "top level", "\n  hint: ")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["forms"].clear(),
        lambda data: data.pop("text"),
        lambda data: data["forms"][0]["Form"].update(steps=[]),
        lambda data: data["forms"][0]["Form"].pop("inputs"),
        lambda data: data["forms"][0]["Form"]["steps"][0].update(Popen={}),
        lambda data: data["forms"].__setitem__(0, {"Unknown": {}}),
        lambda data: data["forms"].__setitem__(0, {"constant": {"dtype": "save"}}),
        lambda data: data["forms"].__setitem__(0, {"function": "os:system"}),
    ],
)
def test_invalid_saved_pattern_raises(change: Any) -> None:
    data = json.loads(json.dumps(pattern_of(lambda x: F.relu(x)).to_data()))
    change(data)
    with pytest.raises(ReplayError, match="not a saved pattern"):
        GraphPattern.from_data(data)
