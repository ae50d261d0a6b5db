"""How good `fit` chooses: fifty targets against every subset of twelve units.

python benchmarks/fit_quality.py                 some hundred subsets are estimated, the rest by the model of peaks
python benchmarks/fit_quality.py --sample 4096   every subset is estimated: about an hour for each model
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pickle
import random
import time
from typing import Any

import torch
from report import save
from torch import nn

import slapo_core as slapo
from slapo_core.estimation.child import Request, estimate_rank
from slapo_core.estimation.fitting.estimates import Checkpointed
from slapo_core.estimation.fitting.fitting import chain_for
from slapo_core.estimation.fitting.peaks import PeakModel
from slapo_core.estimation.fitting.units import units_of
from slapo_core.estimation.fitting.watching import WatchUnits
from slapo_core.estimation.source import of_schedule

TARGETS = 50
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


def compare(name: str, model: nn.Module, batch: Any, sample: int) -> dict[str, Any]:
    """Fifty targets between the least peak and the one without checkpointing."""
    sch = slapo.create_schedule(model.train(), example_inputs=batch)
    units = units_of(sch, None)
    source = pickle.dumps(of_schedule(sch))

    def play(paths: tuple[str, ...], *, watched: bool = False) -> Any:
        observer = WatchUnits(units) if watched else None
        source_ = Checkpointed(pickle.loads(source), paths)
        return estimate_rank(Request(source_, None, 0, (0,), batch, ADAMW, observer=observer))

    start = time.process_time()
    none, all_ = play((), watched=True), play(units, watched=True)
    seconds = (time.process_time() - start) / 2
    chain = chain_for(sch, units, [none.observed], [all_.observed], by_time=False)
    sets = torch.tensor(list(itertools.product([False, True], repeat=len(units))))
    predicted = PeakModel([none.observed], [all_.observed])
    peaks = predicted.peaks(sets)
    flops = none.flops + sets.to(torch.float64) @ predicted.flops
    order = random.Random(0).sample(range(len(sets)), min(sample, len(sets)))
    off = 0.0
    for number in order:
        real = play(tuple(unit for unit, chosen in zip(units, sets[number].tolist(), strict=True) if chosen))
        off = max(off, abs(real.memory.total - peaks[number].item()) / real.memory.total)
        peaks[number], flops[number] = real.memory.total, real.flops
    rungs = [play(tuple(units[number] for number in rung.units)) for rung in chain]
    least = max(peaks.min().item(), min(rung.memory.total for rung in rungs))
    rows: list[tuple[int, int]] = []
    worst_step = worst_again = 0.0
    for target in torch.linspace(least, none.memory.total, TARGETS).tolist():
        number = max(number for number, rung in enumerate(rungs) if rung.memory.total <= target)
        chosen = rungs[number]
        best = flops[peaks <= target].min().item()
        worst_step = max(worst_step, chosen.flops / best - 1)
        again = best - none.flops
        worst_again = max(worst_again, (chosen.flops - best) / again if again else 0.0)
        rows.append((len(chain[number].units), chosen.flops))
    monotone = all(now[0] <= before[0] and now[1] <= before[1] for before, now in itertools.pairwise(rows))
    return {
        "model": name,
        "units": len(units),
        "subsets_estimated": len(order),
        "targets": TARGETS,
        "rungs": len(chain),
        "least_peak_of_all_subsets": peaks.min().item(),
        "least_peak_of_fit": min(rung.memory.total for rung in rungs),
        "model_of_peaks_off_at_most": off,
        "step_longer_than_best_at_most": worst_step,
        "recomputed_more_than_best_at_most": worst_again,
        "monotone": monotone,
        "cpu_seconds_per_estimate": seconds,
    }


MODELS = {"three kinds of blocks": (mixed, 400), "BERT, 12 layers": (bert, 60), "T5, 6 + 6 layers": (t5, 60)}


def main() -> None:
    """Compare, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="subsets of each model that are estimated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name, (make, sample) in MODELS.items():
        row = compare(name, *make(), options.sample or sample)
        found.append(row)
        save("fit_quality", found)
        print(
            f"{name:<24} {row['subsets_estimated']} of {2 ** row['units']} subsets estimated, {row['rungs']} to choose "
            f"from; step at most {100 * row['step_longer_than_best_at_most']:.2f} % longer than with the best "
            f"({100 * row['recomputed_more_than_best_at_most']:.1f} % of what is computed again); model of peaks off "
            f"by at most {100 * row['model_of_peaks_off_at_most']:.2f} %; monotone: {row['monotone']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
