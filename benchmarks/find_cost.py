"""What finding a pattern costs, in CPU time of the process: BERT-large on the meta device, as one graph and by layer.

Each pattern is found in a graph that has it, and in one that nearly has it: one call, constant or connection differs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import save
from torch.nn import functional as F
from transformers import BertConfig, BertModel

import slapo_core as slapo
from slapo_graph.patterns import any_constant, any_op, optional
from slapo_graph.patterns.definition import pattern_of
from slapo_graph.primitives.find import first_graph

ALLOWED_MS = 30
REPEATS = 15
ANY = any_constant()


def bias_gelu(x: Any, weight: Any, bias: Any) -> Any:
    return F.gelu(F.linear(x, weight, bias))


def residual_norm(x: Any, weight: Any, bias: Any, residual: Any, scale: Any, shift: Any, shape=ANY, eps=ANY) -> Any:
    dropped = optional(F.dropout, F.linear(x, weight, bias), any_constant(), training=any_constant())
    return F.layer_norm(dropped + residual, shape, scale, shift, eps)


def attention(query: Any, key: Any, value: Any, mask: Any, scale=ANY, p=ANY, training=ANY) -> Any:
    scores = torch.matmul(query, key.transpose(2, 3)) * scale + mask
    return torch.matmul(F.dropout(F.softmax(scores, dim=-1), p, training), value).transpose(1, 2)


def projections(x: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    return F.linear(x, a, b), F.linear(x, c, d), F.linear(x, e, f)


def feed_forward(x: Any, a: Any, b: Any, c: Any, d: Any, scale: Any, shift: Any, p=ANY, shape=ANY, eps=ANY) -> Any:
    down = F.linear(F.gelu(F.linear(x, a, b)), c, d)
    return F.layer_norm(F.dropout(down, p, any_constant()) + x, shape, scale, shift, eps)


def twelve(x: Any, a: Any, b: Any, c: Any, d: Any, s: Any, t: Any, u: Any, v: Any, w: Any, y: Any, z: Any) -> Any:
    above = feed_forward(x, a, b, c, d, s, t, any_constant(), any_constant(), any_constant())
    query = F.linear(above, u, v).view(any_constant(), any_constant(), -1, any_constant())
    return above, query, F.linear(above, w, y), F.linear(above, z)


def twelve_any(a: Any) -> Any:
    for _ in range(12):
        a = any_op(a)
    return a


PATTERNS: dict[str, Any] = {
    "linear + GELU": bias_gelu,
    "linear + dropout + residual + LayerNorm": residual_norm,
    "attention": attention,
    "Q, K and V": projections,
    "feed-forward": feed_forward,
    "*gelu*": "*gelu*",
}
NEAR_MISSES: dict[str, Any] = {
    "linear + SiLU": lambda x, w, b: F.silu(F.linear(x, w, b)),
    "attention, softmax over the first axis": lambda q, k, v: torch.matmul(
        F.dropout(F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.125, dim=0), 0.1), v
    ),
    "attention, then ReLU": lambda q, k, v, m: F.relu(attention(q, k, v, m, ANY, ANY, ANY)),
    "four projections": lambda x, a, b, c, d, e, f, g, h: (*projections(x, a, b, c, d, e, f), F.linear(x, g, h)),
    "feed-forward, residual from elsewhere": lambda x, a, b, c, d, s, t: F.layer_norm(
        F.dropout(F.linear(F.gelu(F.linear(x, a, b)), c, d), ANY, ANY) + a, ANY, s, t, ANY
    ),
    "feed-forward and three projections": twelve,
    "twelve sums": lambda a, b, c: sum([a, b, c] * 4, start=a + b),
    "twelve calls of any kind in a row": twelve_any,
}


def milliseconds(run: Callable[[], object]) -> tuple[float, float]:
    """Of the first run, and the median of the others."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.process_time()
        run()
        times.append((time.process_time() - start) * 1e3)
    return times[0], statistics.median(times[1:])


def schedules() -> dict[str, slapo.Schedule]:
    config = BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
    config._attn_implementation = "eager"
    ids = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    made = {}
    for name in ("one graph", "24 layers"):
        with torch.device("meta"):
            model = BertModel(config)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        made[name] = slapo.create_schedule(model, example_inputs=inputs)
        made[name].trace(flatten=True) if name == "one graph" else made[name]["encoder.layer.*"].trace(flatten=True)
    return made


def main() -> int:
    rows = []
    for place, schedule in schedules().items():
        nodes = [node for node in schedule.root.walk() if node.graph is not None]
        count = sum(len(first_graph(node).nodes) for node in nodes)
        schedule.find("nothing")  # the first one imports

        def indexing(schedule: slapo.Schedule = schedule, nodes: Any = nodes) -> None:
            for node in nodes:
                vars(first_graph(node)).pop("_slapo_calls", None)
            schedule.find("nothing")

        once = milliseconds(indexing)[1]
        for kind, patterns in (("found", PATTERNS), ("near miss", NEAR_MISSES)):
            for name, pattern in patterns.items():
                calls = max(len(form.steps) for form in pattern_of(pattern).alternatives)
                first, median = milliseconds(lambda: schedule.find(pattern))  # noqa: B023 - it is called at once
                matches = len(schedule.find(pattern))
                rows.append(
                    {
                        "graph": place,
                        "nodes": count,
                        "pattern": name,
                        "calls": calls,
                        "kind": kind,
                        "matches": matches,
                        "first_ms": round(first, 2),
                        "with_indexing_ms": round(once, 2),
                        "median_ms": round(median, 2),
                        "held": median < ALLOWED_MS,
                    }
                )
                assert bool(matches) == (kind == "found") or "any kind" in name, (name, matches)
    for row in rows:
        print(
            f"{row['graph']:10} {row['nodes']:5} nodes  {row['kind']:9} {row['pattern']:42} {row['calls']:2} calls "
            f"{row['matches']:3} matches  {row['median_ms']:6.1f} ms (first {row['first_ms']:.1f}, "
            f"a glob on new graphs {row['with_indexing_ms']:.1f})"
        )
    save("find_cost", rows)
    return 0 if all(row["held"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
