"""examples/bert_appendix.py: the paper's appendix, small: verified, trained, and no longer than the paper's."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import slapo_core as slapo
from slapo_graph.patterns import call_module
from slapo_testing import preload_modules, run_ranks
from slapo_testing.models import bert
from tests.integration.example_runs import EXAMPLES, example, text_for

SMALL = ["--steps", "3", "--batch-size", "2", "--length", "32", "--vocab-size", "600", "--compiler", "eager"]
SMALL += ["--device", "cpu"]

preload_modules("transformers.models.bert.modeling_bert", "slapo_tp", "slapo_fusion", "torch._dynamo")


def run(*arguments: str) -> tuple[int, str]:
    """The exit status of the script in this process, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return example("bert_appendix").main(arguments), printed.getvalue()


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_appendix_trains_as_the_untouched_model_does(tmp_path: Path) -> None:
    """Each part as the script runs it, in processes that have imported everything: ``bert_tp.py`` starts its own."""
    options = [*SMALL, "--text", str(text_for(tmp_path)), "--output", str(tmp_path)]
    assert run(*options, "--role", "plain")[0] == 0
    (status, printed), (other, _) = run_ranks(run, *options, "--role", "scheduled", world_size=2, timeout=600)
    assert status == other == 0
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert example("bert_tp").compare(example("bert_tp").parser().parse_args(options[:8] + options[10:])) == 0
    assert "the loss curves agree" in shown.getvalue()
    assert "verified: BertForMaskedLM with " in printed
    for step in (
        "replace('fusion.sdpa', match=<1 match of the pattern 'fusion.sdpa'>)",
        "fuse(<1 match of the pattern 'fusion.bias_gelu'>",
        "fuse(<2 matches of the pattern 'fusion.bias_dropout_add_norm'>",
    ):
        assert step in printed
    plain, scheduled = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "scheduled"))
    assert len(plain["losses"]) == len(scheduled["losses"]) == 3
    assert plain["losses"][0] == pytest.approx(scheduled["losses"][0], abs=1e-5)


def test_the_schedule_is_not_longer_than_the_paper_s() -> None:
    tree = ast.parse((EXAMPLES / "bert_appendix.py").read_text())
    (schedule,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "schedule_bert"]
    lines = (EXAMPLES / "bert_appendix.py").read_text().splitlines()[schedule.body[1].lineno - 1 : schedule.end_lineno]
    assert len([line for line in lines if not line.strip().startswith("#")]) <= 21


def test_the_patterns_of_the_paper_are_found_as_they_are_written_there() -> None:
    ids = {
        "input_ids": torch.tensor([[1, 5, 7, 9], [3, 4, 5, 6]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
    }
    sch = slapo.create_schedule(bert(num_hidden_layers=1), example_inputs=ids)
    layer = sch["bert.encoder.layer.0"]
    for name in ("intermediate.dense", "attention.output.dense", "output.dense"):
        layer[name].decompose()
    layer.trace(flatten=True)
    layer.fuse(layer.find(lambda x, bias: F.gelu(bias + x)), compiler="eager", name="BiasGeLU")
    for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
        found = layer.find(lambda x, bias, residual: call_module(norm, F.dropout(bias + x) + residual))  # noqa: B023
        assert [match.captures["p"] for match in found] == [("constant", 0.1)]
        layer.fuse(found, compiler="eager", name="LNResidual")
    layer.replace(
        lambda q, k, v, mask, p, training: F.scaled_dot_product_attention(q, k, v, mask, p if training else 0.0),
        match=lambda q, k, v, mask: F.dropout(F.softmax(q @ k.transpose(2, 3) * 8**-0.5 + mask, dim=-1)) @ v,
        name="attention",
    )
    assert slapo.verify(sch, optimizer_steps=0).steps_verified == len(sch.records) == 8
