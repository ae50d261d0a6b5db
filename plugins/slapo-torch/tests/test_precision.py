"""Engines store, compute, reduce and step in the types of their precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_core import BuildError
from slapo_runtime.planning import plan_of
from slapo_torch import precision as precisions
from slapo_torch.dialect import TorchDialect
from slapo_torch.precision import PRESETS
from tests.messages import Messages

from .precise_models import BF16, FP32, ISLANDS, Model, adamw, all_hooks, build, make_batches, make_model, seen, step_lr

pytestmark = pytest.mark.filterwarnings("ignore:AdamW steps parameters in bfloat16")


# -- presets ------------------------------------------------------------------------------------------------------

SEEN = {  # storage, weights in the forward, matrix products
    "fp32": ("float32", "float32", "float32"),
    "bf16-mixed": ("float32", "float32", "bfloat16"),
    "bf16": ("bfloat16", "bfloat16", "bfloat16"),
    "fp16-mixed": ("float32", "float32", "float16"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_first_step_shows_the_preset(name: str) -> None:
    engine = build(make_model().double(), precision=name)
    assert "first training step" in str(engine.precision)
    before = all_hooks(engine.module)
    engine.train_step(make_batches()[0])
    assert all_hooks(engine.module) == before, "hooks of the first step stay"
    storage, weights, products = SEEN[name]
    found = seen(engine)
    assert (found["parameters"], found["gradients"], found["moments"]) == ({storage}, {storage}, {storage})
    assert (found["weights in the forward"], found["matrix products"]) == ({weights}, {products})
    assert found["buffers"] == {"float64"}, "buffers keep their types"
    state = engine.state_dict()
    assert {str(state[key].dtype) for key, _ in engine.module.named_parameters()} == {f"torch.{storage}"}
    assert f"precision {name}" in str(engine.precision)
    assert "moments" in str(engine.precision)
    engine.eval_step(make_batches()[1])


def test_without_precision_types_are_the_models() -> None:
    engine = build(make_model().double(), optimizer=adamw)
    assert engine.precision is None
    assert engine.scaler is None
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float64}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bf16_mixed_equals_a_loop_under_autocast(accumulate: int) -> None:
    engine = build(precision="bf16-mixed", accumulate=accumulate)
    model = make_model()
    optimizer = adamw(model.parameters())
    for batch in make_batches():
        found = engine.train_step(batch)
        optimizer.zero_grad()
        losses = []
        for part in range(accumulate):
            with torch.autocast("cpu", BF16):
                loss = model(**{name: one.chunk(accumulate)[part] for name, one in batch.items()})["loss"]
            (loss / accumulate).backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert torch.equal(found.loss, torch.stack(losses).mean())
        assert torch.equal(found.grad_norm, norm)
    for name, expected in model.state_dict().items():
        assert torch.equal(engine.state_dict()[name], expected), name
    with torch.autocast("cpu", BF16), torch.no_grad():
        assert torch.equal(engine.eval_step(batch).loss, model.eval()(**batch)["loss"])


# -- float32 modules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16", "fp16-mixed"])
def test_float32_modules_compute_and_store_in_float32(name: str) -> None:
    engine = build(precision=name, fp32=ISLANDS)
    assert engine.precision.fp32 == ("blocks.0.norm", "blocks.1.norm", "norm", "head")
    taken: dict[str, torch.dtype] = {}

    def note(path: str) -> Callable[..., None]:
        return lambda module, args, output: taken.update({path: output.dtype})

    for path in ("blocks.0.norm", "norm", "head"):
        engine.module.get_submodule(path).register_forward_hook(note(path))
    found = engine.train_step(make_batches()[0])
    assert found.output["logits"].dtype == FP32, "the head outside of repeated blocks returns float32"
    assert taken["head"] == FP32
    assert taken["norm"] == (BF16 if name == "bf16" else FP32), "that of its input"
    assert {module.weight.dtype for module in (engine.module.norm, engine.module.head)} == {FP32}
    assert seen(engine)["float32 modules"] == {"float32"}
    assert engine.state_dict()["head.weight"].dtype == FP32
    assert not torch.is_autocast_enabled("cpu")


def test_a_float32_module_rounds_its_result_only() -> None:
    engine = build(precision="bf16", fp32=("*norm",), optimizer=None)
    norm = engine.module.blocks[0].norm
    x = torch.randn(3, 8).bfloat16()
    expected = F.layer_norm(x.float(), (8,), norm.weight, norm.bias).bfloat16()
    assert torch.equal(norm(x), expected)
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(norm(x), F.layer_norm(x.float(), (8,), norm.weight, norm.bias).double())


def test_a_count_of_items_is_not_rounded() -> None:
    count = torch.tensor(4097.0)
    arguments = {"x": torch.ones(2), "pair": [torch.ones(1), 3], "num_items_in_batch": count}
    found = precisions.cast(arguments, BF16)
    assert found["x"].dtype == found["pair"][0].dtype == BF16
    assert found["num_items_in_batch"] is count


def test_autocast_is_back_after_a_float32_module_fails() -> None:
    engine = build(precision="bf16-mixed", fp32=("head",))
    with torch.autocast("cpu", BF16):
        with pytest.raises(RuntimeError):
            engine.module.head(torch.randn(2, 7))
        assert torch.is_autocast_enabled("cpu")
        assert engine.module.head(torch.randn(2, 8)).dtype == FP32
    assert engine.module.head._forward_hooks


def test_a_traced_and_a_checkpointed_block_keep_float32_modules() -> None:
    losses = []
    for steps in (False, True):
        sch = slapo.create_schedule(make_model(), example_inputs=make_batches()[0])
        if steps:
            sch["blocks.0"].trace()
            sch["blocks.1"].checkpoint()
        engine = slapo.build(sch, optimizer=adamw, precision="bf16-mixed", fp32=ISLANDS)
        losses.append([float(engine.train_step(batch).loss) for batch in make_batches()])
        assert seen(engine)["float32 modules"] == {"float32"}
    assert losses[0] == losses[1]


def test_a_tied_head_computes_in_float32_under_autocast() -> None:
    engine = build(make_model(is_tied=True), precision="bf16-mixed", fp32=("head",))
    assert engine.train_step(make_batches()[0]).output["logits"].dtype == FP32


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "options", "word"),
    [
        (None, {"precision": "bfloat16"}, "precision must be one of"),
        (None, {"bf16": True}, "no option 'bf16'"),
        (None, {"fp32": ("head",)}, "lower precision"),
        (None, {"precision": "bf16", "fp32": ("*norms*",)}, "matches no module"),
        (None, {"precision": "bf16", "fp32": ("*norm.weight",)}, "matches no module"),
        (None, {"precision": "bf16", "fp32": (3,)}, "patterns of module names"),
        ({"pp": 2}, {"precision": "bf16-mixed"}, "a pipeline does not"),
        ({"dp": 2}, {"precision": "bf16-mixed", "data_parallel": "fsdp", "fp32": ("head",)}, "one unit holds"),
        (None, {"precision": "bf16", "fp32": ("head",)}, "stored once"),
    ],
)
def test_what_cannot_run_is_refused(
    mesh: dict[str, int] | None, options: dict[str, Any], word: str, message: Messages
) -> None:
    sch = slapo.create_schedule(make_model(is_tied=True), mesh=mesh, example_inputs=make_batches()[0])
    with pytest.raises(BuildError) as error:
        plan_of(TorchDialect(), sch, options)
    message(error, word)


def test_a_unit_within_a_traced_module_is_refused(message: Messages) -> None:
    sch = slapo.create_schedule(make_model(), mesh={"dp": 2}, example_inputs=make_batches()[0])
    sch["blocks.1"].trace()
    options = {"precision": "bf16-mixed", "data_parallel": "fsdp"}
    plan_of(TorchDialect(), sch, {**options, "fp32": ("head", "blocks.1")})
    with pytest.raises(BuildError) as error:
        plan_of(TorchDialect(), sch, {**options, "fp32": ("blocks.1.norm",)})
    message(error, "within the traced module")


def test_plan_says_what_is_cast_where() -> None:
    sch = slapo.create_schedule(make_model(), mesh={"dp": 2})
    made = plan_of(TorchDialect(), sch, {"precision": "bf16-mixed", "data_parallel": "fsdp", "fp32": ISLANDS})
    assert "blocks.0, blocks.0.norm, ... head (6 units), and the root's unit" in made.steps[1]
    assert "a step reduces gradients 7 times" in made.steps[2]
    assert made.steps[3].endswith("fully_shard gathers parameters in bfloat16, and reduces gradients in float32")
    assert "blocks.0.norm, blocks.1.norm, norm, ... head (4 modules)" in made.steps[4]


def test_a_failed_build_restores_the_types() -> None:
    model = make_model().double()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: (one, one.data_ptr()) for name, one in model.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        build(model, precision="bf16-mixed", optimizer=lambda parameters: 1 / 0)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert parameter.data_ptr() == before[name][1]
        assert parameter.dtype == torch.float64
    assert model.head.weight.grad is not None
    build(model, precision="fp32").train_step(make_batches()[0])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_are_read_into_the_type_of_the_main_weights(device: str) -> None:
    weights = make_model().state_dict()
    with torch.device(device):
        model = Model().bfloat16()
    state = build(model, weights=weights, precision="bf16-mixed").state_dict()
    for name, _ in model.named_parameters():
        assert torch.equal(state[name], weights[name]), "rounded to the model's type"


def test_initial_values_are_drawn_before_they_are_cast() -> None:
    drawn = []
    for name in ("fp32", "bf16"):
        with torch.device("meta"):
            model = Model()
        model.table = torch.ones(8)
        drawn.append(build(model, precision=name, seed=3).state_dict())
    for name, _ in model.named_parameters():
        assert torch.equal(drawn[0][name].bfloat16(), drawn[1][name])


@pytest.mark.parametrize(("before", "after"), [("bf16", "bf16-mixed"), ("bf16-mixed", "bf16"), ("bf16", None)])
def test_moments_are_loaded_in_the_type_of_the_precision(tmp_path: Path, before: str, after: str | None) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    engine, other = (build(precision=one, optimizer=sgd) for one in (before, after))
    engine.train_step(make_batches()[0])
    engine.save(tmp_path)
    other.load(tmp_path)
    other.train_step(make_batches()[1])
    wanted = BF16 if after == "bf16" else FP32
    assert {one["momentum_buffer"].dtype for one in other.optimizer.state.values()} == {wanted}


def test_moments_of_another_type_than_their_parameters_are_loaded_in_it(tmp_path: Path) -> None:
    engine, other = build(precision="bf16"), build(precision="bf16")
    engine.train_step(make_batches()[0])
    for state in engine.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-9
    engine.save(tmp_path)
    other.load(tmp_path)
    for own, loaded in zip(engine.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert torch.equal(own["exp_avg"], loaded["exp_avg"])
        assert loaded["exp_avg"].dtype == FP32
        assert loaded["exp_avg_sq"].dtype == BF16


# -- the scale of the loss ----------------------------------------------------------------------------------------


def test_a_step_with_an_infinite_gradient_is_skipped(tmp_path: Path) -> None:
    engine = build(precision="fp16-mixed", lr_scheduler=step_lr)
    batches = make_batches()
    engine.train_step(batches[0])
    before, scale = engine.state_dict(), engine.scaler.get_scale()
    before = {name: one.clone() for name, one in before.items()}
    handle = engine.module.embed.weight.register_hook(lambda gradient: gradient * torch.inf)
    assert not engine.train_step(batches[1]).grad_norm.isfinite()
    handle.remove()
    assert all(torch.equal(one, before[name]) for name, one in engine.state_dict().items())
    assert engine.scaler.get_scale() == scale / 2
    assert engine.lr_scheduler.last_epoch == 1, "the scheduler skips, too"
    engine.save(tmp_path)
    other = build(precision="fp16-mixed", lr_scheduler=step_lr)
    other.load(tmp_path)
    assert other.scaler.get_scale() == scale / 2
    for one in (engine, other):
        one.train_step(batches[2])
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in engine.state_dict().items())


def test_a_skipped_first_step_leaves_the_check_for_the_next() -> None:
    engine = build(precision="fp16-mixed")
    handle = engine.module.embed.weight.register_hook(lambda gradient: gradient * torch.inf)
    engine.train_step(make_batches()[0])
    assert engine.precision.seen == ()
    handle.remove()
    engine.train_step(make_batches()[0])
    assert seen(engine)["moments"] == {"float32"}
