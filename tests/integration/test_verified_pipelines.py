"""A schedule with cuts is verified like any other: on tensor-parallel ranks, on a mesh with pp, and in many models.

A sample of what ``tools/pipeline_zoo.py`` runs; docs/results/models.md has the whole column.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from torch import nn

import slapo_core as slapo
from slapo_runtime.launcher import preload_modules, run_ranks
from tests.integration.zoo.pipelines import cut_verifies
from tests.integration.zoo.running import Row
from tests.integration.zoo.subjects import subject
from tests.integration.zoo.tensor_parallel import split
from tests.tiers import sampled

preload_modules("tests.integration.zoo.tensor_parallel", "transformers.models.gpt2.modeling_gpt2")

SAMPLE = {
    "t5": "ok: 2 and 3 stages",
    "mamba": "ok: 2 stages",
    "torch: resnet with batch norm": "ok: 2 stages",
}


@pytest.mark.parametrize("name", sampled(reversed(SAMPLE), 3))
def test_a_model_in_stages_is_the_reference_model(name: str) -> None:
    assert cut_verifies(subject(name)) == SAMPLE[name]


def _schedule(mesh: dict[str, int], *, wrong: bool = False) -> tuple[slapo.Schedule, Any]:
    model, batch = subject("gpt2").given()
    schedule = slapo.create_schedule(model, mesh=mesh, example_inputs=batch)
    if wrong:
        schedule["transformer.h.1.ln_1"].replace(nn.LayerNorm(model.config.n_embd, eps=0.5))
    elif "tp" in mesh:
        split(schedule)
    schedule["transformer.h.0"].pipeline_split()
    return schedule, batch


def _on_two_ranks() -> dict[str, str]:
    told: dict[str, str] = {}
    for name, mesh in (("tp", {"tp": 2}), ("pp", {"pp": 2})):
        schedule, batch = _schedule(mesh)
        told[name] = str(slapo.verify(schedule, batch, optimizer_steps=1)).partition("\n")[0]
    schedule, batch = _schedule({"tp": 2}, wrong=True)
    try:
        slapo.verify(schedule, batch, optimizer_steps=0)
    except slapo.VerifyError as error:
        told["wrong"] = str(error)
    return told


@pytest.mark.ranks
def test_ranks_verify_a_cut_model_and_blame_the_step_that_is_wrong() -> None:
    told, other = run_ranks(_on_two_ranks, world_size=2, timeout=120)
    assert told == other
    assert re.match(r"verified: GPT2LMHeadModel with \d+ steps agrees with the reference model \(2 ranks, ", told["tp"])
    assert told["pp"].startswith("verified: GPT2LMHeadModel with 1 steps agrees with the reference model (2 ranks, ")
    assert ":\n    #1 replace(" in told["wrong"]
    assert "pipeline_split" not in told["wrong"]


@pytest.mark.ranks
def test_a_declared_mesh_with_pp_verifies_a_cut_model() -> None:
    schedule, batch = _schedule({"pp": 2})
    assert slapo.verify(schedule, batch, optimizer_steps=0).world_size == 2


def test_the_column_is_filled_in_from_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("tools")
    tool = importlib.import_module("pipeline_zoo")
    page = """# Models

- **tp**: split

| check | yes | refused, with the reason | does not apply | failed |
|---|---|---|---|---|
| trace | 2 | 0 | 0 | 0 |
| tp | 1 | 1 | 0 | 0 |

| model | class | trace | tp |
|---|---|---|---|
| bert | Bert | 2/2 | yes |
| gpt2 | GPT2 | 2/2 | refused |

## Refused

- gpt2, tp: why
"""
    rows = [
        Row("bert", "Bert", 1.0, None, {"pipeline": "refused: a value cannot cross"}),
        Row("gpt2", "GPT2", 1.0, None, {"pipeline": "ok: 2 stages"}),
        Row("llama", "Llama", 0.0, "stays large"),
    ]
    filled = tool.with_column(page, rows)
    assert "- **pipeline**: cut after the middle block" in filled
    assert "| pipeline | 1 | 1 | 0 | 0 |\n| tp | 1 | 1 | 0 | 0 |" in filled
    assert "| model | class | trace | pipeline | tp |\n|---|---|---|---|---|\n" in filled
    assert "| bert | Bert | 2/2 | refused | yes |\n| gpt2 | GPT2 | 2/2 | yes | refused |" in filled
    assert "- bert, pipeline: a value cannot cross\n- gpt2, tp: why" in filled
    assert tool.with_column(filled, rows) == filled
    assert "causal language models: 1 of 2 verified, 1 refused" in tool.summary(rows)
