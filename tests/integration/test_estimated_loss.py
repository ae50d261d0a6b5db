"""Estimates of steps whose loss is computed from hidden states, against two real processes."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_core as slapo
import slapo_models
import slapo_tune
from slapo_core.errors import FitError
from slapo_estimate.device import DeviceSpec, Link
from slapo_estimate.results import RankEstimate
from slapo_estimate.simulation import RankResult, Request, simulate
from slapo_estimate.source import Functions
from slapo_runtime.launcher import run_ranks

from .test_estimated_targets import adamw, counted

WORDS, TOKENS, CHUNK = 4001, 256, 32  # the vocabulary is padded; the last chunk is shorter
DEVICE = DeviceSpec("a device", {"float32": 1e12}, bandwidth=1e11, launch=1e-6, links={"*": Link(1e10, 1e-5)})
CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def model(words: int = WORDS) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=words, **CONFIG, use_cache=False, attn_implementation="eager")  # type: ignore[arg-type]
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def batch(words: int = WORDS) -> dict[str, torch.Tensor]:
    ids = torch.arange(TOKENS - 8).reshape(2, -1) % words
    return {"input_ids": ids, "labels": ids}


def schedule(loss: str, words: int = WORDS, tp: int = 2) -> slapo.Schedule:
    sch = slapo.create_schedule(model(words), mesh={"tp": tp}, example_inputs=batch(words))
    slapo_models.llama(sch, kernels=False)
    if loss == "gathered":
        sch.undo()
        sch["lm_head"].sync("fwd_post", "all_gather")
    elif loss == "small chunks":
        sch.undo()
        sch["lm_head"].linear_cross_entropy(chunk=CHUNK)
    return sch


LOSSES = ("of the schedule", "small chunks")


def peaks() -> dict[str, int]:
    return {loss: counted("torch", {"loss": None}, functools.partial(schedule, loss), batch) for loss in LOSSES}


@pytest.mark.ranks
def test_peaks_are_those_of_real_ranks_and_each_chunk_communicates_once() -> None:
    real = run_ranks(peaks, world_size=2)[0]
    found = {loss: slapo.estimate(schedule(loss), batch(), optimizer=adamw, device=DEVICE) for loss in LOSSES}
    assert {loss: one.memory.total for loss, one in found.items()} == {
        loss: pytest.approx(peak, rel=0.02) for loss, peak in real.items()
    }
    assert real["small chunks"] < 0.8 * real["of the schedule"]
    sent = [each for each in found["small chunks"].kinds[0].collectives if each.kind == "all_gather"]
    tokens = [CHUNK] * ((TOKENS - 8) // CHUNK) + [(TOKENS - 8) % CHUNK]
    assert [each.bytes for each in sent] == [3 * count * 4 for count in tokens]  # maximum, log-sum-exp, target logit
    assert {(each.mesh_dim, each.ranks, each.phase) for each in sent} == {("tp", 2, "forward")}
    ((module, step),) = {(each.module, each.record.partition(" ")[2]) for each in sent}
    assert (module, step) == ("lm_head", f"linear_cross_entropy(chunk={CHUNK}) at 'lm_head'")
    assert found["small chunks"].time > found["of the schedule"].time > 0  # more collectives, as many products
    assert len({one.kinds[0].flops for one in found.values()}) == 1


@pytest.mark.breadth
@pytest.mark.ranks
def test_memory_grows_with_the_vocabulary_by_the_head_and_a_chunk() -> None:
    """Weights, moments and gradients of embeddings and head, the next gradient of the head, and a chunk's logits."""
    sizes = (4096, 16384)
    small, large = (
        slapo.estimate(schedule("small chunks", words), batch(words), optimizer=adamw).memory.total for words in sizes
    )
    rows = (sizes[1] - sizes[0]) // 2
    states, chunk = 2 * 4 * 32 * rows * 4, CHUNK * rows * 4  # a step begins with the gradients of the one before
    assert large - small < 1.02 * (states + 32 * rows * 4 + chunk)
    with pytest.raises(FitError):
        schedule("gathered", sizes[1]).fit(large, batch(sizes[1]), optimizer=adamw)
    assert not schedule("small chunks", sizes[1]).fit(large, batch(sizes[1]), optimizer=adamw).paths


def space(s: Any) -> None:
    s.choose("loss", ["gathered", "small chunks"])


def chosen(sch: slapo.Schedule, point: Any) -> None:
    slapo_models.llama(sch, kernels=False)
    if point["loss"] == "gathered":
        sch.undo()
        sch["lm_head"].sync("fwd_post", "all_gather")


def two_ranks(point: Any) -> dict[str, int]:
    return {"tp": 2}


def same_batch(point: Any) -> Any:
    return batch()


@pytest.mark.breadth
@pytest.mark.ranks
def test_a_search_chooses_the_loss_that_fits(tmp_path: Path) -> None:
    result = slapo_tune.tune(
        model,
        space,
        chosen,
        world_size=2,
        mesh=two_ranks,
        batch=same_batch,
        optimizer=adamw,
        memory="12MB",
        sampler="exhaustive",
        log=tmp_path / "run.jsonl",
        warmup=0,
        steps=1,
        verify=False,
    )
    assert [(trial.point["loss"], trial.status) for trial in result.trials] == [
        ("gathered", "over_memory"),
        ("small chunks", "ok"),
    ]


def half_model() -> nn.Module:
    return model().bfloat16()


def in_chunks(sch: slapo.Schedule, tokens: int | None) -> None:
    if tokens != 0:
        sch["lm_head"].linear_cross_entropy(chunk=tokens)


def on(device: DeviceSpec, tokens: int | None) -> RankEstimate:
    """Estimate the loss in chunks of so many tokens, or plain if there are none, on one rank."""
    source = Functions(half_model, in_chunks, (tokens,))
    found = simulate(Request(source, None, 0, (0,), batch(), adamw, None, device))
    assert isinstance(found, RankResult)
    return found.estimate


@pytest.mark.breadth
def test_chunks_of_a_gpu_take_its_kernels() -> None:
    """Products of bfloat16 summed in float32, and a softmax in place, where a CPU casts to float32 before."""
    rates = {"bfloat16": 1e12, "float32": 1e9}
    products = DeviceSpec("a GPU", rates, bandwidth=1e30, launch=0.0, type="cuda")
    moves = dataclasses.replace(products, flops=dict.fromkeys(rates, 1e30), bandwidth=1e9)
    plain, chunked, whole = (on(products, tokens) for tokens in (0, CHUNK, None))
    assert plain.flops == chunked.flops == whole.flops
    assert chunked.time == pytest.approx(plain.time)
    assert whole.time == pytest.approx(plain.time)
    assert on(moves, None).time < on(moves, 0).time  # type: ignore[operator]
    logits = 4096 * 2  # bytes of a row, aligned; without chunk= a GPU has all rows at a time, and no sums in float32
    rest = (TOKENS - 8 - CHUNK) * logits - (WORDS + 1) // 2 * CONFIG["hidden_size"] * 4
    assert whole.memory.activations - chunked.memory.activations == pytest.approx(rest, rel=0.05)
    on_cpu = on(dataclasses.replace(products, type="cpu"), CHUNK)
    assert on_cpu.flops == plain.flops
    assert on_cpu.time > 100 * plain.time  # type: ignore[operator]


@pytest.mark.ranks
def test_the_last_stage_of_a_pipeline_has_the_loss() -> None:
    sch = slapo.create_schedule(model(), mesh={"pp": 2, "tp": 2}, example_inputs=batch())
    slapo_models.llama(sch, kernels=False, stages=2)
    first, last = slapo.estimate(sch, batch(), optimizer=adamw, microbatches=2, pipeline_schedule="1f1b").kinds
    sent = [[each.bytes for each in kind.collectives if each.kind == "all_gather"] for kind in (first, last)]
    assert sent == [[], 2 * [3 * (TOKENS - 8) // 2 * 4]]
