"""How much more is computed again with what `fit` chooses than with the best choice, at twenty targets.

The best of all numbers of first blocks of each class: all are estimated. `python benchmarks/fit_quality.py`
"""

from __future__ import annotations

import functools
import itertools
import pickle
from typing import Any

import torch
from report import save
from torch import nn

import slapo_core as slapo
from slapo_estimate.blocks import blocks_of
from slapo_estimate.fit import Checkpointed
from slapo_estimate.simulation import Request, estimate_rank
from slapo_estimate.source import of_schedule

TARGETS = 20
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-3)


class Block(nn.Module):
    """Residual; three kinds, which keep and compute different amounts."""

    def __init__(self, size: int, kind: int) -> None:
        super().__init__()
        self.kind = kind
        wide = size * (1, 4, 2)[kind]
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, wide), nn.Linear(wide, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        if self.kind == 0:  # much to keep, little to compute
            y = torch.tanh(torch.sigmoid(torch.tanh(y) * 2) * 2)
        if self.kind == 2:
            y = torch.softmax(y @ y.transpose(1, 2), dim=-1) @ y
        return x + self.down(nn.functional.gelu(y))


class Mixed(nn.Module):
    """Twelve blocks, the kinds in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(32, number % 3) for number in range(12))
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return self.head(x).square().mean()


def bert() -> tuple[nn.Module, Any]:
    """Twelve layers, alike."""
    from transformers import BertConfig, BertForMaskedLM

    ids = torch.zeros(4, 64, dtype=torch.long)
    config = BertConfig(
        hidden_size=64, num_hidden_layers=12, num_attention_heads=4, intermediate_size=256, vocab_size=128
    )
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


def t5() -> tuple[nn.Module, Any]:
    """Six layers each way, which keep and compute different amounts."""
    from transformers import T5Config, T5ForConditionalGeneration

    ids = torch.zeros(4, 64, dtype=torch.long)
    config = T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=6, num_heads=4, vocab_size=128, decoder_start_token_id=0
    )
    config.use_cache = False
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :32].clone()}


def mixed() -> tuple[nn.Module, Any]:
    """Twelve blocks of three kinds."""
    return Mixed(), torch.zeros(8, 48, 32)


def compare(name: str, model: nn.Module, batch: Any) -> dict[str, Any]:
    """Targets between the least peak and the one without checkpointing."""
    sch = slapo.create_schedule(model.train(), example_inputs=batch)
    source = pickle.dumps(of_schedule(sch))
    classes: dict[Any, list[str]] = {}
    for path in blocks_of(sch, None):
        block = model.get_submodule(path)
        classes.setdefault((getattr(block, "kind", None), path.rpartition(".")[0]), []).append(path)

    def estimated(paths: tuple[str, ...]) -> tuple[int, int]:
        played = estimate_rank(Request(Checkpointed(pickle.loads(source), paths), None, 0, (0,), batch, ADAMW))
        return played.memory.total, played.flops

    numbers = itertools.product(*(range(len(paths) + 1) for paths in classes.values()))
    sets = [
        tuple(path for paths, count in zip(classes.values(), counts, strict=True) for path in paths[:count])
        for counts in numbers
    ]
    known = [estimated(paths) for paths in sets]
    free_peak, free_flops = known[sets.index(())]
    try:
        sch.fit(1, optimizer=ADAMW)
        raise AssertionError("no step fits a byte")
    except slapo.FitError as error:
        least = error.least
    rows: list[tuple[int, int]] = []
    worst_step = worst_again = 0.0
    estimates = []
    for target in torch.linspace(least, free_peak, TARGETS).int().tolist():
        fit = sch.fit(target, optimizer=ADAMW)
        sch.undo(to=0)
        chosen, best = free_flops + fit.recomputed, min(flops for peak, flops in known if peak <= target)
        worst_step = max(worst_step, chosen / best - 1)
        worst_again = max(worst_again, (chosen - best) / (best - free_flops) if best > free_flops else 0.0)
        rows.append((len(fit.paths), fit.recomputed))
        estimates.append(fit.estimates)
    monotone = all(now[0] <= before[0] and now[1] <= before[1] for before, now in itertools.pairwise(rows))
    return {
        "model": name,
        "blocks": sum(map(len, classes.values())),
        "sets_estimated": len(sets),
        "targets": TARGETS,
        "least_peak_of_all_sets": min(peak for peak, _ in known),
        "least_peak_of_fit": least,
        "step_longer_than_best_at_most": worst_step,
        "recomputed_more_than_best_at_most": worst_again,
        "monotone": monotone,
        "estimates_for_all_targets": sum(estimates),
    }


MODELS = {"three kinds of blocks": mixed, "BERT, 12 layers": bert, "T5, 6 + 6 layers": t5}


def main() -> None:
    """Compare, print and keep."""
    torch.set_num_threads(1)
    found = []
    for name, make in MODELS.items():
        row = compare(name, *make())
        found.append(row)
        save("fit_quality", found)
        print(
            f"{name:<24} step at most {100 * row['step_longer_than_best_at_most']:.2f} % longer than with the best of "
            f"{row['sets_estimated']} ({100 * row['recomputed_more_than_best_at_most']:.1f} % of what is computed "
            f"again); least peak {row['least_peak_of_fit']} of {row['least_peak_of_all_sets']}; monotone: "
            f"{row['monotone']}; {row['estimates_for_all_targets']} estimates",
            flush=True,
        )


if __name__ == "__main__":
    main()
