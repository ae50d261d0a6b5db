"""How much memory a rank takes to load, save and export a model in safetensors, as shards of tp and of fully_shard.

The model is on the meta device, and a LLaMA of about 1B parameters in bfloat16 (`--layers` makes it smaller). Measured
is the peak of anonymous memory (RssAnon) of each rank over what it held with all imports, the process group and the
schedule, sampled every 5 ms: pages of mapped files are the system's, and not in it. Allowed are the rank's own shards,
the largest parameter, and 300 MiB. That of `state_dict()`, the
whole model, is measured beside it.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import save
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_core as slapo
from slapo_runtime.storage import sharded_over
from slapo_testing import preload_modules, run_ranks

ALLOWED_MIB = 300
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {}),
    "fsdp2": ({"dp": 2}, {"data_parallel": "fsdp"}),
}


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(num_hidden_layers=layers, vocab_size=32000, use_cache=False, tie_word_embeddings=False, **SIZES)


def write_model(directory: str, layers: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config(layers))
    engine: Any = slapo.build(slapo.create_schedule(model.to(dtype)))
    engine.export(directory)


def anonymous() -> float:
    """MiB of this process."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def peak_of(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result, and the highest anonymous memory meanwhile."""
    found, is_over = [anonymous()], threading.Event()

    def sample() -> None:
        while not is_over.is_set():
            found.append(anonymous())
            time.sleep(0.005)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        result = work()
    finally:
        is_over.set()
        thread.join()
    return result, max(found)


def scheduled(layers: int, dtype: torch.dtype, mesh: dict[str, int]) -> slapo.Schedule:
    with torch.device("meta"):
        model = LlamaForCausalLM(config(layers)).to(dtype)
    sch = slapo.create_schedule(model, mesh=mesh)
    if "tp" in mesh:
        for layer in sch["model.layers.*"]:
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                layer[name].shard("weight", axis=0).sync("bwd_post", "all_reduce")
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                layer[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        sch["model.embed_tokens"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
        sch["lm_head"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
    return sch


def measured(source: str, target: str, layers: int, dtype: torch.dtype, which: str) -> dict[str, Any]:
    """Load, save and export once in this process, a rank of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh, options = MESHES[which]
    sch = scheduled(layers, dtype, mesh)
    gc.collect()
    base = anonymous()
    engine, loading = peak_of(lambda: slapo.build(sch, weights=source, **options))
    shards: list[Any] = list(engine.module.parameters())
    own = sum((one.to_local() if sharded_over(one) else one).nbytes for one in shards) / 2**20
    peaks = {"loading": loading}
    works: dict[str, Callable[[], Any]] = {
        "saving": lambda: engine.save(f"{target}/saved"),
        "exporting": lambda: engine.export(f"{target}/exported"),
        "state_dict(), not bounded": engine.state_dict,
    }
    for name, work in works.items():
        gc.collect()
        _, peaks[name] = peak_of(work)
    return {"own": own, "base": base, "peaks": {name: peak - base for name, peak in peaks.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16, help="16 are 1.0B parameters (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    preload_modules("transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "slapo_tp")
    rows: list[dict[str, Any]] = []
    largest = 32000 * SIZES["hidden_size"] * dtype.itemsize / 2**20
    with tempfile.TemporaryDirectory() as directory:
        source = f"{directory}/model"
        run_ranks(write_model, source, options.layers, dtype, world_size=1, timeout=1800)
        whole = sum(file.stat().st_size for file in Path(source).glob("*.safetensors")) / 2**20
        for which in MESHES:
            target = f"{directory}/{which}"
            found = run_ranks(measured, source, target, options.layers, dtype, which, world_size=2, timeout=1800)
            for rank, one in enumerate(found):
                allowed = one["own"] + largest + ALLOWED_MIB
                for what, peak in one["peaks"].items():
                    row = {"mesh": which, "rank": rank, "what": what, "peak": peak, "allowed": allowed}
                    rows.append({**row, "own": one["own"], "largest": largest, "whole": whole, "base": one["base"]})
                    print(
                        f"{which}, rank {rank}, {what}: peak {peak:.0f} MiB over {one['base']:.0f}, allowed "
                        f"{allowed:.0f} (own shards {one['own']:.0f}, largest parameter {largest:.0f}, {ALLOWED_MIB}); "
                        f"the whole model {whole:.0f}",
                        flush=True,
                    )
            shutil.rmtree(target)
    save("checkpoint_memory", rows, layers=options.layers, dtype=options.dtype)


if __name__ == "__main__":
    main()
