"""The automatic schedule against reference models, by a comparison without slapo-verify.

A representative part of what ``tools/auto_models.py --all`` runs; ``docs/auto_matrix.md`` has the table.
"""

from __future__ import annotations

import pytest

from slapo_runtime.launcher import preload_modules, run_ranks
from tests.integration.zoo.automatic import plant_on_ranks

PLANTED = ("causal: qwen3", "causal: gpt2")

preload_modules("tests.integration.zoo.automatic")
preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "gpt2")))


@pytest.mark.ranks
def test_the_comparison_sees_each_step_that_is_left_out() -> None:
    answers = run_ranks(plant_on_ranks, PLANTED, "names", world_size=2, timeout=300)
    kinds = {kind for found in answers[0].values() for kind in found}
    assert kinds == {"tp.sync", "tp.sync_gradient", "tp.shard_attribute", "tp.shard"}
    for number, rank in enumerate(answers):
        for name, found in rank.items():
            assert all(result.startswith(("seen: ", "refused: ")) for result in found.values()), (number, name, found)
    seen = [kind for found in answers[0].values() for kind, result in found.items() if result.startswith("seen: ")]
    assert {"tp.sync", "tp.sync_gradient"} <= set(seen)
