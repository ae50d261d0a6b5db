"""What static graphs cost, in CPU time: tracing the 24 layers of BERT-large, and calls of traced blocks and stages.

Each question is a function that gives its rows; more of them (find, rewrite) join ``QUESTIONS``. With ``--against
CHECKOUT``, only the Python that is added to each call is asked for, here and by the code of another checkout, in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from report import interleaved, ratio_of, save
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import slapo_core as slapo

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
ALLOWED_TRACE, ALLOWED_CALL, ALLOWED_HOST, ALLOWED_RATIO = 0.5, 1.1, 20e-6, 0.5
IDS = {"input_ids": torch.zeros(2, 16, dtype=torch.long)}


def bert(sizes: dict[str, int], device: str = "cpu") -> nn.Module:
    """A BERT with a small vocabulary."""
    with torch.device(device):
        return BertModel(BertConfig(vocab_size=1000, **sizes)).eval()


def trace_layers() -> Iterator[dict[str, Any]]:
    """``create_schedule(model, example_inputs=...)`` and ``sch["encoder.layer.*"].trace()``."""
    for device in ("meta", "cpu"):
        model = bert(LARGE, device)
        ids = {name: value.to(device) for name, value in IDS.items()}
        for flatten in (False, True):
            seconds = []
            for _ in range(7):
                start = time.process_time()
                sch = slapo.create_schedule(model, example_inputs=ids)
                sch["encoder.layer.*"].trace(flatten=flatten)
                seconds.append(time.process_time() - start)
                sch.undo(to=0)
            yield {
                "question": f"trace 24 layers, {device}{', flatten' if flatten else ''}",
                "seconds": statistics.median(seconds[1:]),
                "first": seconds[0],
                "allowed": ALLOWED_TRACE,
            }


def call_a_block() -> Iterator[dict[str, Any]]:
    """A forward of one block of a tiny BERT, traced against untraced, in turn; without gradients, the harder case."""
    torch.set_num_threads(1)
    plain = bert(TINY)
    x = torch.randn(2, 16, TINY["hidden_size"])
    for flatten in (False, True):
        model = copy.deepcopy(plain)
        slapo.create_schedule(model, example_inputs=IDS)["encoder.layer.*"].trace(flatten=flatten)
        blocks = [one.encoder.layer[0] for one in (model, plain)]

        def run(block: Any) -> Callable[[], None]:
            def calls() -> None:
                for _ in range(20):
                    block(x, None, encoder_hidden_states=None, past_key_values=None, position_ids=None)

            return calls

        with torch.no_grad():
            run(blocks[0])(), run(blocks[1])()
            traced, untraced = interleaved(run(blocks[0]), run(blocks[1]), pairs=60, clock=time.process_time)
        name = f"call of a block{', flatten' if flatten else ''}"
        each = statistics.median(untraced) / 20
        yield {"question": name, "untraced": each, **ratio_of(traced, untraced), "allowed": ALLOWED_CALL}


class Empty(nn.Module):
    """Does nothing with what it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0]


def first_argument(_module: nn.Module, *given: Any) -> Any:
    """Stand in for the code of a graph."""
    return given[0]


def emptied(block: nn.Module) -> None:
    """Leave only what runs around the code of a traced block's graphs."""
    for variant in block.forward.bottom.variants:  # type: ignore[union-attr]
        variant.code = first_argument


def added(calls: Callable[[], Any], baseline: Callable[[], Any]) -> float:
    """Seconds of CPU time by which one call takes longer than another."""

    def repeated(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(100):
                call()

        return run

    calls(), baseline()
    longer, shorter = interleaved(repeated(calls), repeated(baseline), pairs=15, clock=time.process_time)
    return statistics.median(one - other for one, other in zip(longer, shorter, strict=True)) / 100


def host_times() -> Iterator[tuple[str, float]]:
    """Python that is added to a call of a traced block or a stage: all but what its graph and its modules compute."""
    torch.set_num_threads(1)
    small: dict[str, Any] = {"vocab_size": 1000, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
    gpt2 = {"n_embd": 128, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    models: dict[str, tuple[Callable[[], nn.Module], str]] = {
        "BERT": (lambda: bert(TINY).train(), "encoder.layer"),
        "GPT-2": (lambda: GPT2Model(GPT2Config(n_layer=2, **gpt2, **small)), "h"),
        "LLaMA": (lambda: LlamaModel(LlamaConfig(**heads, **small)), "layers"),
    }
    for name, (make, layers) in models.items():
        for flatten in (False, True):
            block, args, kwargs = traced_block(make(), layers, flatten=flatten)
            empty = Empty()
            yield (
                f"{name} block{', flatten' if flatten else ''}",
                added(lambda: block(*args, **kwargs), lambda: empty(*args, **kwargs)),  # noqa: B023 - called at once
            )
    block, args, kwargs = traced_block(bert(TINY).train(), "encoder.layer", flatten=False, checkpointed=True)
    empty, x = Empty(), args[0].requires_grad_()
    yield (
        "BERT block, checkpointed",
        added(
            lambda: block(x, *args[1:], **kwargs),
            lambda: checkpoint(empty, x, *args[1:], use_reentrant=False, **kwargs),
        ),
    )
    plain = GPT2Model(GPT2Config(n_layer=12, **gpt2, **small))
    whole = copy.deepcopy(plain)
    slapo.create_schedule(whole, example_inputs=IDS)["h.*"].trace()
    whole(**IDS)
    for traced, block in zip(whole.h, plain.h, strict=True):
        emptied(traced)
        block.forward = Empty().forward
    yield "12 layers of GPT-2", added(lambda: whole(**IDS), lambda: plain(**IDS))
    sch = slapo.create_schedule(GPT2Model(GPT2Config(n_layer=12, **gpt2, **small)), mesh={"pp": 2}, example_inputs=IDS)
    sch["h.5"].pipeline_split()
    first, second = (stage.module for stage in slapo.stages(sch, IDS).partition.stages)
    values = first(IDS, {})
    made = second(IDS, values)
    vars(second)["_program"] = replace(vars(second)["_program"], code=lambda *_: made)
    yield "stage, each micro-batch", added(lambda: second(IDS, values), lambda: empty(IDS, values))


def traced_block(
    model: nn.Module, layers: str, *, flatten: bool, checkpointed: bool = False
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The first layer of a model, traced and emptied, and what the model calls it with."""
    block, calls = model.get_submodule(f"{layers}.0"), []
    handle = block.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    with torch.no_grad():
        model(**IDS)
    handle.remove()
    sch = slapo.create_schedule(model, example_inputs=IDS)
    sch[f"{layers}.*"].trace(flatten=flatten)
    if checkpointed:
        sch[f"{layers}.*"].checkpoint()
    args, kwargs = calls[0]
    block(*args, **kwargs)
    emptied(block)
    return block, args, kwargs


def host_time() -> Iterator[dict[str, Any]]:
    """What is added to each call, in seconds."""
    for name, seconds in host_times():
        allowed = ALLOWED_HOST * (12 if name.startswith("12") else 4 if "checkpoint" in name else 1)
        yield {"question": f"added: {name}", "seconds": seconds, "allowed": allowed}


def host_time_against(checkout: Path, rounds: int = 5) -> Iterator[dict[str, Any]]:
    """What is added to each call, here and by the code of another checkout, in turn."""
    times: dict[str, list[dict[str, float]]] = {"here": [], "there": []}
    pythons = {"here": sys.executable, "there": str(checkout / ".venv/bin/python")}
    for number in range(rounds):
        for where in ("here", "there") if number % 2 else ("there", "here"):
            made = subprocess.run([pythons[where], __file__, "--host"], check=True, capture_output=True, text=True)
            times[where].append(json.loads(made.stdout.splitlines()[-1]))
    for name in times["here"][0]:
        here, there = ([each[name] for each in times[where]] for where in ("here", "there"))
        found = {"seconds": statistics.median(here), "seconds_there": statistics.median(there)}
        ratio = found["seconds"] / found["seconds_there"]
        yield {
            "question": f"added: {name}, against",
            **found,
            "ratio": ratio,
            "rounds": rounds,
            "allowed": 1.0 if "stage" in name or "checkpoint" in name else ALLOWED_RATIO,
        }


QUESTIONS: tuple[Callable[[], Iterator[dict[str, Any]]], ...] = (trace_layers, call_a_block, host_time)


def main() -> None:
    """Ask everything, print it and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="a checkout with a .venv of its own")
    parser.add_argument("--host", action="store_true", help="print what is added to each call, as JSON")
    options = parser.parse_args()
    if options.host:
        print(json.dumps(dict(host_times())))
        return
    asked = QUESTIONS if options.against is None else (lambda: host_time_against(options.against),)
    rows = []
    for question in asked:
        for row in question():
            rows.append(row)
            value, unit, scale = row.get("ratio", row.get("seconds")), "ms", 1000
            if row["allowed"] < 1e-3:
                unit, scale = "us", 1_000_000
            shown = f"{value:.3f}" if "ratio" in row else f"{scale * value:.0f} {unit}"
            bound = row["allowed"] if "ratio" in row else f"{scale * row['allowed']:.0f} {unit}"
            print(f"{row['question']:<36} {shown:>9}   allowed {bound}", flush=True)
    save("graph_cost" if options.against is None else "graph_cost_against", rows)


if __name__ == "__main__":
    main()
