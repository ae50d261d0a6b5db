"""Predicted step time, memory and collectives of `slapo_models.auto` beside each family's schedule by hand.

Models of four layers and usual proportions; a training step of rank 0 at tp 2 and 4, by the data sheet of an H100.
*split*: both without kernels; *kernels*: by hand with its own, `auto` with those that pay on that device by its rule.

`python benchmarks/auto_against_hand.py [family ...]` (exit status 1 where a bound fails; all families are saved)
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from report import save
from torch import nn

import slapo_core as slapo
import slapo_models
from slapo_estimate.device import DEVICES
from slapo_estimate.reduced_model import BlockKinds
from slapo_models.auto.kernels import paying_kernels

H100 = DEVICES["h100"]
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-4)
SLOWER = 1.05
"""The most that auto's predicted time may be of the hand's; its memory may not be more."""

WIDTH, TOKENS = 1024, 256
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 4 * WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), TOKENS + 2),
    **dict.fromkeys(("head_dim", "d_kv"), 64),
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "moe_intermediate_size": WIDTH,
    "sliding_window": TOKENS // 2,
    "image_size": 128,
    "patch_size": 8,
}
"""Values of configurations, by the names that they have in any of them."""


def families() -> Any:
    """The module of the tests of slapo-models that has the tiny models."""
    root = str(Path(__file__).parents[1])
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module("plugins.slapo-models.tests.families")


def family(name: str) -> tuple[Any, nn.Module, Any]:
    """A family of the tests of slapo-models, its model in these sizes, and a batch."""
    tests = families()
    found, generator = tests.FAMILIES[name], torch.Generator().manual_seed(0)
    if name == "wide_resnet":
        pictures = torch.randn(8, 3, 128, 128, generator=generator)
        return found, tests.WideResNet(planes=64, classes=1000), (pictures,)
    tiny = found.make()
    known = tiny.config.to_dict()
    sizes: dict[str, Any] = {key: value for key, value in SIZES.items() if known.get(key) is not None}
    if "layer_types" in known:
        sizes["layer_types"] = [known["layer_types"][0]] * 3 + ["full_attention"]
    if name == "vit":
        sizes["id2label"] = {number: f"class {number}" for number in range(1000)}
        sizes["label2id"] = {label: number for number, label in sizes["id2label"].items()}
    config = type(tiny.config)(**{**known, **sizes}, attn_implementation="eager")
    model = type(tiny)(config)
    if name == "vit":
        pictures = torch.randn(8, 3, 128, 128, generator=generator)
        return found, model, {"pixel_values": pictures, "labels": torch.zeros(8, dtype=torch.long)}
    ids = torch.randint(3, 8192, (4, TOKENS), generator=generator)
    has_experts = any(name.endswith("experts.down_proj") for name, _ in model.named_parameters())
    dtype = torch.bfloat16 if has_experts else torch.float32  # of grouped products on a GPU
    return found, model.to(dtype), {"input_ids": ids, "labels": ids}


def predicted(sch: slapo.Schedule, found: Any) -> dict[str, Any]:
    """A training step of rank 0."""
    (estimate,) = sch.estimate(optimizer=ADAMW, loss=found.loss, device=H100, rank=0).kinds
    calls = Counter(f"{each.phase} {each.kind}" for each in estimate.collectives)
    return {
        "seconds": estimate.time,
        "bytes": estimate.memory.total,
        "collectives": dict(sorted(calls.items())),
        "collective_bytes": sum(each.bytes for each in estimate.collectives),
    }


def compare(name: str, tp: int, kernels: bool) -> dict[str, Any]:
    """Both schedules of one family on one mesh."""
    found, model, batch = family(name)
    model.train()
    by_hand = slapo.create_schedule(model, mesh={"tp": tp}, example_inputs=batch)
    found.schedule(by_hand, kernels=kernels)
    hand = predicted(by_hand, found)
    by_hand.undo(to=0)
    chosen: tuple[str, ...] = ()
    if kernels:
        chosen = tuple(paying_kernels(model, BlockKinds.of(model), batch, H100, found.loss).chosen)
    automatic = slapo.create_schedule(model, mesh={"tp": tp}, example_inputs=batch)
    report = slapo_models.auto(automatic, kernels=chosen or False)
    auto = predicted(automatic, found)
    return {
        "family": name,
        "tp": tp,
        "kernels": kernels,
        "time_ratio": auto["seconds"] / hand["seconds"],
        "memory_ratio": auto["bytes"] / hand["bytes"],
        "hand": hand,
        "auto": auto,
        "auto_kernels": list(chosen),
        "left_whole": {path: str(reason) for path, reason in report.left_whole.items()},
    }


def main() -> int:
    """Compare, print and save."""
    warnings.filterwarnings("ignore")
    rows: list[dict[str, Any]] = []
    for name in sys.argv[1:] or families().FAMILIES:
        for tp, kernels in ((2, False), (4, False), (2, True)):
            row = compare(name, tp, kernels)
            rows.append(row)
            print(
                f"{name:12} tp {tp} {'kernels' if kernels else 'split  '} time {row['time_ratio']:.3f} "
                f"memory {row['memory_ratio']:.3f} {'FAILS' if failed([row]) else ''} "
                f"{row['hand']['collectives']} {row['auto']['collectives']}",
                flush=True,
            )
        if not sys.argv[1:]:
            save("auto_against_hand", rows, device=H100.name, fails=len(failed(rows)))
    return 1 if failed(rows) else 0


def failed(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows where auto is slower than allowed, or takes more memory."""
    return [row for row in rows if row["time_ratio"] > SLOWER or row["memory_ratio"] > 1]


if __name__ == "__main__":
    sys.exit(main())
