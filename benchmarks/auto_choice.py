"""How good the predicted choice of a mesh is: measured trials until 97 % of the best of all measured points.

    python benchmarks/auto_choice.py                 # three models on two and four gloo ranks
    python benchmarks/auto_choice.py --cpu-time      # on a busy machine: see below
    python benchmarks/auto_choice.py --held-out      # two models of other shapes, on which nothing was set

Every mesh of dp, pp and tp with replicas or shards, and each number of micro-batches of a step of 16 samples, is
measured: at most a hundred points for a model. Trials go by predicted time, the fastest first; the best of the first
tenth is compared with the best of all. On a busy machine a step is the mean processor time of the ranks; with stages
times (micro-batches + stages - 1) / micro-batches, because waiting takes no processor time.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import save
from torch import nn

import slapo_core as slapo
import slapo_models
from slapo_estimate.block_profile import StepProfile
from slapo_estimate.depth import first_samples
from slapo_estimate.device import DeviceSpec
from slapo_estimate.device_benchmark import measure_device
from slapo_estimate.reduced_model import BlockKinds
from slapo_models.choice.search import Candidate, Search, apply_choice, ordered
from slapo_runtime.launcher import run_ranks

GOAL, SAMPLES, LENGTH, STEPS = 0.97, 16, 64, 3
CLOCKS = ("time of the slowest rank", "mean processor time of the ranks, with the waiting of stages")
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-4)
SIZES = {"vocab_size": 512, "attn_implementation": "eager"}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    return BertForMaskedLM(BertConfig(**SIZES, **sizes, **rates))


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**SIZES, **sizes, **rates, use_cache=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes, use_cache=False))


def mistral() -> nn.Module:
    """Deep and narrow."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 8, "num_attention_heads": 4}
    return MistralForCausalLM(MistralConfig(**SIZES, **sizes, num_key_value_heads=4, use_cache=False))


def opt() -> nn.Module:
    """Wide."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 256, "ffn_dim": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    given = {"word_embed_proj_dim": 256, "max_position_embeddings": LENGTH, "dropout": 0.0, "use_cache": False}
    return OPTForCausalLM(OPTConfig(**SIZES, **sizes, **given))


HELD_OUT: dict[str, Callable[[], nn.Module]] = {"mistral": mistral, "opt": opt}
MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt": gpt, "llama": llama, **HELD_OUT}


def steps(sch: slapo.Schedule, name: str) -> None:
    """Tensor parallelism by the family's schedule."""
    getattr(slapo_models, name)(sch, kernels=False)


def batch() -> dict[str, torch.Tensor]:
    """A step of all replicas."""
    ids = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) * 7 % 512
    return {"input_ids": ids, "labels": ids}


def measured(name: str, candidates: list[Candidate], cpu_time: bool) -> list[float]:
    """Run on each rank: seconds of a step of each candidate; infinite where it does not run."""
    torch.set_num_threads(1)
    clock = time.process_time if cpu_time else time.perf_counter
    found = []
    for candidate in candidates:
        torch.manual_seed(0)
        model = MODELS[name]()
        blocks = BlockKinds.of(model)
        replica = first_samples(batch(), SAMPLES // candidate.layout.dp)
        sch = slapo.create_schedule(model, mesh=candidate.mesh, example_inputs=replica)
        steps(sch, name)
        apply_choice(sch, blocks.paths, candidate)
        engine = slapo.build(sch, target="torch", optimizer=ADAMW, **candidate.options)
        seconds = []
        for _ in range(1 + STEPS):
            dist.barrier()
            before = clock()
            engine.train_step(replica)
            seconds.append(clock() - before)
        engine.close()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, seconds[1:])
        layout = candidate.layout
        waiting = (layout.microbatches + layout.pp - 1) / layout.microbatches
        step = [statistics.mean(own) * waiting if cpu_time else max(own) for own in zip(*every, strict=True)]
        found.append(statistics.median(step))
    return found


def quality(
    name: str, ranks: int, device: DeviceSpec, known: dict[tuple[int, int], StepProfile], *, cpu_time: bool
) -> dict[str, Any]:
    """Predict all points, and measure them in that order."""
    with torch.device("meta"):
        model = MODELS[name]()
    tell: Callable[[str], None] = print
    apply = functools.partial(steps, name=name)
    search = Search(model, BlockKinds.of(model), batch(), ranks, None, device, ADAMW, None, apply, tell, known=known)
    candidates = ordered(list(search.every()))
    seconds = run_ranks(measured, name, candidates, cpu_time, world_size=ranks, timeout=1500.0)[0]
    best, tenth = min(seconds), max(1, math.ceil(len(seconds) / 10))
    trials = next(number for number, each in enumerate(seconds, 1) if best / each >= GOAL)
    return {
        "points": len(seconds),
        "first": round(best / seconds[0], 3),
        "tenth": tenth,
        "best_of_tenth": round(best / min(seconds[:tenth]), 3),
        "trials_to_goal": trials,
        "worst": round(best / max(seconds), 3),
        "measured": [
            {
                "mesh": each.layout.mesh,
                **each.options,
                "predicted": round(each.prediction.time, 5),
                "step": round(own, 5),
            }
            for each, own in zip(candidates, seconds, strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true", help="measure processor time: on a machine that is busy")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--models", nargs="*", default=[name for name in MODELS if name not in HELD_OUT])
    parser.add_argument("--held-out", action="store_true", help="results/auto_choice_held_out.json")
    given = parser.parse_args()
    device = measure_device(ranks=2, dtypes=["float32"], tell=print)
    results: list[dict[str, Any]] = []
    known: dict[str, dict[tuple[int, int], StepProfile]] = {name: {} for name in MODELS}
    for ranks in given.ranks:
        for name in HELD_OUT if given.held_out else given.models:
            found = {
                "model": name,
                "ranks": ranks,
                **quality(name, ranks, device, known[name], cpu_time=given.cpu_time),
            }
            results.append(found)
            print(name, ranks, {key: value for key, value in found.items() if key != "measured"}, flush=True)
            save(
                "auto_choice_held_out" if given.held_out else "auto_choice",
                results,
                clock=CLOCKS[given.cpu_time],
                device=device.to_json(),
            )


if __name__ == "__main__":
    main()
