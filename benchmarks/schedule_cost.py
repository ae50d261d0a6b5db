"""What scheduling costs, in CPU time of the process, on full-size models on the meta device.

The figures to compare with are those of the 2024 reference implementation for ``create_schedule`` alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from report import save
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import slapo_core as slapo

REFERENCE_MS = {"BERT-large": 13.9, "GPT-2-XL": 23.5, "LLaMA-70B": 38.4}
REPEATS = 15


def models() -> Iterator[tuple[str, Callable[[], torch.nn.Module]]]:
    bert = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    gpt = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    llama = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    yield "BERT-large", lambda: BertForMaskedLM(bert)
    yield "GPT-2-XL", lambda: GPT2LMHeadModel(gpt)
    yield "LLaMA-70B", lambda: LlamaForCausalLM(llama)


def milliseconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        run()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def visit(model: torch.nn.Module) -> int:
    sch = slapo.create_schedule(model)
    return sum(node.module is not None for node in sch.root.walk())


def shard_bert(sch: slapo.Schedule) -> None:
    for layer in sch["bert.encoder.layer.*"]:
        attention = layer["attention.self"]
        for projection in ("query", "key", "value"):
            attention[projection].shard(["weight", "bias"], axis=0)
        attention.sync("bwd_post", "all_reduce")
        layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def main() -> None:
    rows = []
    print(f"{'model':<12}{'nodes':>7}{'create + visit':>17}{'allowed':>10}")
    for name, make in models():
        with torch.device("meta"):
            model = make()
        cost, nodes, allowed = milliseconds(lambda m=model: visit(m)), visit(model), REFERENCE_MS[name] / 3
        print(f"{name:<12}{nodes:>7}{cost:>14.2f} ms{allowed:>7.1f} ms")
        rows.append(
            {"what": "create_schedule + visit", "model": name, "nodes": nodes, "ms": cost, "allowed_ms": allowed}
        )
        if name == "BERT-large":
            bert = model
    times = []
    for _ in range(REPEATS):
        sch = slapo.create_schedule(bert, mesh={"tp": 2})
        start = time.process_time()
        shard_bert(sch)
        times.append((time.process_time() - start) * 1e3)
        steps = len(sch.records)
        sch.undo(to=0)
    cost = statistics.median(times)
    print(f"shard + sync on all 24 layers of BERT-large, {steps} steps: {cost:.1f} ms (allowed 150 ms)")
    rows.append({"what": "shard + sync", "model": "BERT-large", "steps": steps, "ms": cost, "allowed_ms": 150.0})
    save("schedule_cost", rows)


if __name__ == "__main__":
    main()
