"""Real models, as their authors wrote them, under every step of the core and split over two processes.

A representative part of what ``tools/model_zoo.py --all`` runs; ``docs/results/models.md`` has the whole table.
"""

from __future__ import annotations

import pytest

from slapo_runtime.launcher import preload_modules, run_ranks
from tests.integration.zoo.checks import CHECKS, run_checks
from tests.integration.zoo.subjects import subject
from tests.integration.zoo.tensor_parallel import verify_on_ranks
from tests.tiers import sampled

TORCH = (
    "transformer", "lstm", "multihead attention", "resnet with batch norm", "depthwise convolution", "weight norm",
    "nested outputs", "shared modules", "own parameters", "spectral norm",
)  # fmt: skip
ARCHITECTURES = (  # one for each way of being written; all others are in docs/results/models.md
    "albert", "bart", "bert", "bloom", "deberta-v2", "gemma2", "gpt2", "llama", "mamba", "mixtral", "t5", "vit",
    "whisper",
)  # fmt: skip
REFUSED = {
    ("torch: weight norm", "meta build"): "cannot be initialized: ParametrizedLinear.reset_parameters()",
    ("torch: spectral norm", "meta build"): "cannot be initialized: ParametrizedLinear.reset_parameters()",
    ("torch: own parameters", "meta build"): "because no reset_parameters() or _init_weights() fills them: steps, mask",
}
SPLIT_WRONGLY = "apertus"  # the parameters of its activation would get the gradient of one rank's features only
SPLIT = sampled(("bert", "gpt2", "llama", "t5", "vit", "whisper"))  # all others are in docs/results/models.md

preload_modules("tests.integration.zoo.tensor_parallel")
preload_modules(*(f"transformers.models.{name}.modeling_{name}" for name in (*SPLIT, SPLIT_WRONGLY)))


@pytest.mark.parametrize("name", sampled([*(f"torch: {name}" for name in TORCH), *ARCHITECTURES], 3))
def test_an_unmodified_model_keeps_every_promise_of_the_core(name: str) -> None:
    results = run_checks(subject(name))
    assert list(results) == list(CHECKS)
    for check, result in results.items():
        reason = REFUSED.get((name, check))
        if reason is not None:
            assert result.startswith("refused: ")
            assert reason in result
        elif not result.startswith("none: "):
            assert result == "ok", f"{check}: {result}"


@pytest.mark.ranks
def test_generic_schedule_shards_families_over_two_processes() -> None:
    answers = run_ranks(verify_on_ranks, (*SPLIT, SPLIT_WRONGLY), world_size=2, timeout=180)
    assert answers[0] == answers[1]
    wrong = answers[0].pop(SPLIT_WRONGLY)
    assert wrong.startswith("refused: the scheduled model differs from the reference model, first in gradient of ")
    assert ".mlp.act_fn.alpha_" in wrong
    assert {name: result for name, result in answers[0].items() if not result.startswith("ok: ")} == {}
