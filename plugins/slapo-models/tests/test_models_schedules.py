"""The full schedules: lines, kernels, collectives; verified, saved and replayed, estimated, tuned."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
import slapo_tune
from slapo_models import decoders, encoders, mixtures, vision
from tests.messages import Messages

from .families import EAGER, EXPERTS, FAMILIES, SIZES, TOKENS

ROOT = Path(__file__).parents[3]
PATIENCE = 1800.0  # seconds; the machine may be busy
EVERYTHING = {"kernels": True, "checkpoint": 0.5, "embeddings": True}


def sampled(*names: str) -> list[Any]:
    """All families, those not named in the whole run only."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.breadth) for name in FAMILIES]


def lines_of(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> int:
    """Lines of statements without headers of loops and branches and without the docstring, and those of its helpers."""
    headed = (ast.For, ast.If, ast.With, ast.FunctionDef)
    found = [each for each in ast.walk(function) if isinstance(each, ast.stmt) and not isinstance(each, headed)]
    if ast.get_docstring(function) is not None:
        found.remove(function.body[0])
    called = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)} & functions.keys()
    helpers = sum(lines_of(functions[name], functions) for name in called)
    return helpers + sum((each.end_lineno or each.lineno) - each.lineno + 1 for each in found)


def parsed(source: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)}


def schedule_functions() -> dict[str, ast.FunctionDef]:
    """The functions of all schedules."""
    return parsed("\n".join(map(inspect.getsource, (encoders, decoders, mixtures, vision))))


@pytest.mark.parametrize("name", FAMILIES)
def test_schedules_have_at_most_the_lines_of_the_papers_table(name: str) -> None:
    functions = schedule_functions()
    assert 0 < lines_of(functions[name], functions) <= (FAMILIES[name].paper or 21)  # the most that it has for a model


def test_line_count_includes_helpers_and_wrapped_statements_without_headers() -> None:
    source = '''
def helper(sch):
    """It helps."""
    sch.a()


def schedule(sch):
    """Schedule.

    More.
    """
    for each in sch:
        if each:
            each.b(
                1,
            )
    helper(sch)
'''
    functions = parsed(source)
    assert {name: lines_of(function, functions) for name, function in functions.items()} == {"helper": 1, "schedule": 5}


def scheduled(name: str, mesh: dict[str, int], **options: Any) -> slapo.Schedule:
    family = FAMILIES[name]
    sch = slapo.create_schedule(family.make(), mesh=mesh, example_inputs=family.batch)
    family.apply(sch, **{**EVERYTHING, **options})
    return sch


@pytest.mark.parametrize("name", sampled("bert", "gpt", "llama", "mixtral", "wide_resnet"))
def test_each_layer_has_its_kernels_and_the_schedule_can_be_replayed(name: str) -> None:
    family = FAMILIES[name]
    sch = scheduled(name, {"pp": 2, "tp": 2}, stages=2)
    layers = [layer.path for layer in sch[family.layers]]
    found = {pattern: dict.fromkeys(layers, 0) for pattern in family.kernels}
    for record in sch.records:
        for match in getattr(record.primitive, "match", None) or ():
            operations = re.sub(r"_[_\d]*(?=,|$)", "", str(match).partition(": ")[2])
            found[match.pattern.name or operations][match.path] += 1
    assert {pattern: tuple(counts.values()) for pattern, counts in found.items()} == family.kernels
    checkpointed = [record.path for record in sch.records if record.primitive.name == "core.checkpoint"]
    assert checkpointed == layers[: round(len(layers) / 2)]
    (cut,) = [record.path for record in sch.records if record.primitive.name == "pipeline.pipeline_split"]
    assert cut == layers[len(layers) // 2 - 1]

    again = slapo.replay(family.make(), sch.to_json(), example_inputs=family.batch)
    assert [str(record) for record in again.records] == [str(record) for record in sch.records]
    assert str(again[layers[-1]].graph) == str(sch[layers[-1]].graph)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(each, marks=pytest.mark.breadth) for each in ("gpt", "opt"))])
def test_attention_by_causal_masks_is_right_and_finds_padding(name: str) -> None:
    family = FAMILIES[name]
    sch = slapo.create_schedule(family.make(), mesh={"tp": 1}, example_inputs=family.batch)
    family.apply(sch, attention="fusion.causal_sdpa")
    slapo.verify(sch, family.batch)
    padded = {**family.batch, "attention_mask": torch.ones_like(family.batch["input_ids"])}
    padded["attention_mask"][0, -3:] = 0
    with pytest.raises(RuntimeError, match="the mask is not causal"):
        sch.model(**padded)


def test_the_pages_show_lines_and_kernels() -> None:
    functions, readme = (
        schedule_functions(),
        (ROOT / "plugins" / "slapo-models" / "README.md").read_text(encoding="utf-8"),
    )
    for name, family in FAMILIES.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*\| (\d+) \| (\d+|-) \|$", readme, re.MULTILINE)
        assert row == (str(lines_of(functions[name], functions)), str(family.paper or "-"))

    page = (ROOT / "docs" / "guides" / "real-models.md").read_text(encoding="utf-8")
    for name, family in FAMILIES.items():
        (row,) = re.findall(rf"^\| (?:`\w+`, )*`{name}`(?:, `\w+`)* \| (.*?) \|", page, re.MULTILINE)
        counts = {(pattern, count) for pattern, counts in family.kernels.items() for count in counts}
        told = {(name, int(found)) for name, found, wanted in re.findall(r"`([^`]+)` (\d+)/(\d+)", row)}
        assert told == {(pattern.removeprefix("fusion."), count) for pattern, count in counts}


@pytest.mark.breadth
def test_the_program_of_the_readme_schedules_its_model() -> None:
    readme = (ROOT / "plugins" / "slapo-models" / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(program, "README.md", "exec"), names)
    called = Counter(record.primitive.name for record in names["sch"].records)
    assert (called["graph.trace"], called["core.checkpoint"], called["pipeline.pipeline_split"]) == (4, 2, 1)


def test_layer_without_a_match_is_refused(message: Messages) -> None:
    family = FAMILIES["gpt"]
    model = family.make()
    model.transformer.h[1].mlp.act = nn.ReLU()  # type: ignore[union-attr, index]
    sch = slapo.create_schedule(model, mesh={"tp": 2}, example_inputs=family.batch)
    with pytest.raises(slapo.PreconditionError) as refused:
        family.apply(sch)
    assert refused.value.path == "transformer.h.1"
    message(refused, "gelu_tanh", "transformer.h.1")
    assert not [record for record in sch.records if record.primitive.name == "core.replace" and "gelu" in str(record)]


@pytest.mark.ranks
@pytest.mark.parametrize("name", sampled("llama"))
def test_a_layer_has_the_collectives_of_megatrons_layout(name: str) -> None:
    """Two all-reduces each way; T5's decoder one more forward, and two more backward. Logits are gathered once."""
    family = FAMILIES[name]
    sch = scheduled(name, {"tp": 2}, checkpoint=0.0)
    (kind,) = sch.estimate(loss=family.loss, timeout=PATIENCE).kinds
    layers = {layer.path: Counter[tuple[str, str]]() for layer in sch[family.layers]}
    around = Counter[tuple[str, str]]()
    for each in kind.collectives:
        path = next((path for path in layers if f"{each.module}.".startswith(f"{path}.")), None)
        (around if path is None else layers[path])[each.phase, each.kind] += 1
    for path, counts in layers.items():
        assert counts == family.collectives(path), path
    lookups = {"wide_resnet": 0, "t5": 2}.get(name, 1)
    head = {("forward", "all_gather"): 1, ("backward", "all_reduce"): 1}
    assert around == head | ({("forward", "all_reduce"): lookups} if lookups else {})


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh", [{"pp": 2, "tp": 2}, *(pytest.param({"tp": tp}, marks=pytest.mark.breadth) for tp in (2, 4))], ids=str
)
@pytest.mark.parametrize("name", sampled("llama"))
def test_the_full_schedule_is_verified(name: str, mesh: dict[str, int]) -> None:
    sch = scheduled(name, mesh, stages=mesh.get("pp", 1))
    report = slapo.verify(sch, optimizer_steps=1, timeout=PATIENCE)
    assert report.steps_verified == len(sch.records)
    assert not any("no dropout" in note for note in report.notes)  # every fork_rng is around one
    assert {"output", "gradient", "parameter"} <= {each.kind for each in report.largest if each.compared}


def tied_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes, **EAGER, use_cache=False, tie_word_embeddings=True))  # type: ignore[no-any-return]


def mixture_with_a_routers_loss() -> nn.Module:
    """A Mixtral whose router has a gradient of its own, full on every rank, beside that of the experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    own = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    return MixtralForCausalLM(MixtralConfig(**EXPERTS, **own))  # type: ignore[no-any-return]


@pytest.mark.breadth
@pytest.mark.ranks
def test_the_routers_own_loss_is_not_summed_over_the_ranks() -> None:
    sch = slapo.create_schedule(mixture_with_a_routers_loss(), mesh={"tp": 2}, example_inputs=TOKENS)
    FAMILIES["mixtral"].apply(sch, kernels=False)
    assert slapo.verify(sch, optimizer_steps=1, timeout=PATIENCE).steps_verified == len(sch.records)
    wrong = slapo.create_schedule(mixture_with_a_routers_loss(), mesh={"tp": 2}, example_inputs=TOKENS)
    for layer in wrong["model.layers.*.mlp"]:
        layer["experts"].shard("gate_up_proj", axis=1, packed=2).shard("down_proj", axis=2).sync(
            "fwd_post", "all_reduce"
        )
        layer.sync("bwd_post", "all_reduce")["gate"].sync_gradient("weight")
    with pytest.raises(slapo.VerifyError, match=r"gradient of model\.layers\.1"):
        slapo.verify(wrong, optimizer_steps=1, timeout=PATIENCE, blame_seconds=0)


def gated_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    form = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **form, **EAGER, use_cache=False))  # type: ignore[no-any-return]


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh", [{"tp": 2}, pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.breadth)], ids=lambda mesh: f"pp {len(mesh)}"
)
@pytest.mark.parametrize(
    ("name", "make"), [("llama", tied_llama), pytest.param("t5", gated_t5, marks=pytest.mark.breadth)]
)
def test_tied_and_gated_models_of_a_family_take_its_schedule(
    name: str, make: Callable[[], nn.Module], mesh: dict[str, int]
) -> None:
    sch = slapo.create_schedule(make(), mesh=mesh, example_inputs=TOKENS)
    FAMILIES[name].apply(sch, **EVERYTHING, stages=mesh.get("pp", 1))
    assert slapo.verify(sch, optimizer_steps=1, timeout=PATIENCE).steps_verified == len(sch.records)


def space(s: Any) -> None:
    s.choose("tp", (1, 2))
    s.choose("checkpoint", (0.0, 0.5))
    s.choose("kernels", (False, True))


def tuned(name: str, sch: slapo.Schedule, point: Any) -> None:
    FAMILIES[name].apply(sch, kernels=point["kernels"], checkpoint=point["checkpoint"])


def tuned_batch(name: str, point: Any) -> Any:
    return FAMILIES[name].batch


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_recomputation_and_kernels_are_tuned(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    result = slapo_tune.tune(
        family.make,
        space,
        functools.partial(tuned, name),
        world_size=2,
        mesh=lambda point: {"dp": 2 // point["tp"], "tp": point["tp"]},
        batch=functools.partial(tuned_batch, name),
        optimizer=torch.optim.AdamW,
        loss=family.loss,
        memory="1GiB",
        sampler="exhaustive",
        log=tmp_path / "run.jsonl",
        warmup=0,
        steps=1,
    )
    assert result.counts == {"ok": 8}
    assert result.winner is not None
    assert result.winner.right


def eight_heads() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(**sizes, **EAGER, max_position_embeddings=32))  # type: ignore[no-any-return]


@functools.cache
def saved() -> str:
    """Kernels, a checkpoint, shards, and a vocabulary of 97 that no size divides: saved with two ranks."""
    sch = slapo.create_schedule(eight_heads(), mesh={"tp": 2}, example_inputs=TOKENS)
    FAMILIES["bert"].apply(sch, **EVERYTHING)
    return sch.to_json()


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_schedule_file_is_replayed_estimated_and_verified_at_each_size(tp: int) -> None:
    sch = slapo.replay(eight_heads(), saved(), mesh={"tp": tp}, example_inputs=TOKENS)
    assert slapo.replay(eight_heads(), sch.to_json(), example_inputs=TOKENS).to_json() == sch.to_json()
    (kind,) = sch.estimate(timeout=PATIENCE).kinds
    assert kind.ranks == tuple(range(tp))
    weights = sch.model.get_submodule("bert.encoder.layer.1.output.dense").weight.shape, -(-97 // tp)
    assert weights == ((64, 64 // tp), sch.model.bert.embeddings.word_embeddings.weight.shape[0])  # type: ignore[union-attr, index]
    calls = Counter((each.phase, each.kind) for each in kind.collectives)
    # two layers, embeddings and head; backward, the forward of the checkpointed layer again
    sums = {("forward", "all_reduce"): 5, ("forward", "all_gather"): 1, ("backward", "all_reduce"): 7}
    assert calls == ({} if tp == 1 else sums)
    report = slapo.verify(sch, optimizer_steps=1, timeout=PATIENCE)
    assert report.steps_verified == len(sch.records)


def grouped(kv_heads: int) -> nn.Module:
    """A LLaMA of 16 query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": kv_heads}
    more = {"intermediate_size": 48, "max_position_embeddings": 32, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes, **more}, **EAGER))  # type: ignore[no-any-return]


def check_grouped(sch: slapo.Schedule, kv_heads: int, tp: int) -> None:
    attention: Any = sch["model.layers.0.self_attn"].module
    assert attention.k_proj.weight.shape == (4 * max(1, kv_heads // tp), 64)
    assert attention.num_key_value_groups == 16 // max(kv_heads, tp)
    assert slapo.verify(sch, optimizer_steps=1, timeout=PATIENCE).steps_verified == len(sch.records)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize(("tp", "kv_heads"), [*((tp, kv) for tp in (1, 2, 4, 8) for kv in (2, 4, 8)), (16, 8)])
def test_schedule_is_right_with_fewer_and_more_kv_heads_than_ranks(tp: int, kv_heads: int) -> None:
    sch = slapo.create_schedule(grouped(kv_heads), mesh={"tp": tp}, example_inputs=TOKENS)
    FAMILIES["llama"].apply(sch, **EVERYTHING)
    check_grouped(sch, kv_heads, tp)


@functools.cache
def saved_with_two_kv_heads() -> str:
    sch = slapo.create_schedule(grouped(2), mesh={"tp": 4}, example_inputs=TOKENS)
    FAMILIES["llama"].apply(sch, **EVERYTHING)
    return sch.to_json()


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("tp", [2, 8])
def test_a_file_saved_with_two_ranks_for_each_kv_head_is_replayed_with_one_and_with_four(tp: int) -> None:
    sch = slapo.replay(grouped(2), saved_with_two_kv_heads(), mesh={"tp": tp}, example_inputs=TOKENS)
    check_grouped(sch, 2, tp)


def sizes_of_ranks(most: int, s: Any) -> None:
    s.choose("tp", [size for size in (1, 2, 4, 8) if size <= most])


def added(document: str, sch: slapo.Schedule, point: Any) -> None:
    slapo.replay(sch, document)


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("most", [2, 8])
def test_schedule_file_is_tuned_over_sizes(most: int, tmp_path: Path) -> None:
    result = slapo_tune.tune(
        eight_heads,
        functools.partial(sizes_of_ranks, most),
        functools.partial(added, saved()),
        world_size=most,
        mesh=lambda point: {"dp": most // point["tp"], "tp": point["tp"]},
        batch=functools.partial(tuned_batch, "bert"),
        optimizer=torch.optim.AdamW,
        memory="1GiB",
        sampler="exhaustive",
        log=tmp_path / "run.jsonl",
        warmup=0,
        steps=1,
    )
    assert result.counts == {"ok": most.bit_length()}
    assert result.winner is not None
    assert result.winner.right


@pytest.mark.breadth
@pytest.mark.ranks
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_schedule_file_is_fitted_at_each_size(tp: int) -> None:
    sch = slapo.replay(eight_heads(), saved(), mesh={"tp": tp}, example_inputs=TOKENS)
    peak = sch.estimate(timeout=PATIENCE).memory.total
    fit = sch.fit(memory=peak - 1, timeout=PATIENCE)
    assert fit.estimate.memory.total < peak
    assert [record.primitive.name for record in sch.records[-1:]] == ["core.checkpoint"]
