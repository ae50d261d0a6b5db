"""Engines store, compute, reduce and step in the types of their precision, and the first step shows it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn import functional as F

import slapo_core as slapo
from slapo_core import BuildError
from slapo_runtime.planning import plan_of
from slapo_testing import preload_modules, run_ranks
from slapo_torch import precision as precisions
from slapo_torch.dialect import TorchDialect
from slapo_torch.precision import PRESETS, Float32, ModelPrecision
from tests.messages import Messages

preload_modules("torch.distributed.fsdp", "slapo_tp", "slapo_pipeline")
pytestmark = pytest.mark.filterwarnings("ignore:AdamW steps parameters in bfloat16")

ISLANDS = ("*norm*", "head")
BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """With a buffer like a rotary table, and a floating-point input."""

    def __init__(self, blocks: int = 2, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.register_buffer("table", torch.linspace(0.0, 1.0, 8))
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, shift: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        x = x + self.table.to(x.dtype) + shift
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), "logits": logits}


def make_model(*args: Any, **kwargs: Any) -> Model:
    torch.manual_seed(0)
    return Model(*args, **kwargs)


def make_batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (count, 4, 5), generator=draw)
    shift = torch.randn(count, 4, 1, 8, generator=draw) / 8
    return [{"ids": one, "shift": also, "labels": one.flip(1)} for one, also in zip(ids, shift, strict=True)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def build(model: nn.Module | None = None, **options: Any) -> Any:
    options = {"optimizer": adamw, "max_grad_norm": 1.0, **options}
    return slapo.build(slapo.create_schedule(make_model() if model is None else model), **options)


def seen(engine: Any) -> dict[str, set[str]]:
    return {row.what: set(row.dtypes) for row in engine.precision.seen}


def all_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


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


# -- planted faults -----------------------------------------------------------------------------------------------


def no_autocast(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(ModelPrecision, "forward", lambda self: torch.enable_grad())
    return {}


def no_main_weights(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(ModelPrecision, "wanted", lambda self, live: BF16)
    return {}


def no_float32_modules(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(Float32, "begin", lambda self, module, args, kwargs: None)
    return {}


def no_casts_of_inputs(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(precisions, "cast", lambda value, dtype: value)
    return {"precision": "bf16"}


def other_moments(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(round_moments)
        return optimizer

    return {"optimizer": factory}


def round_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()


def weights_turn(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The optimizer's step turns the main weights into bfloat16."""

    def turn(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data = parameter.data.bfloat16()

    def factory(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(turn)
        return optimizer

    return {"optimizer": factory}


def other_buffers(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    forward = Model.forward

    def changing(self: Model, **arguments: torch.Tensor) -> Any:
        self.table = self.table.bfloat16()
        return forward(self, **arguments)

    patch.setattr(Model, "forward", changing)
    return {}


def other_products(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    forward = Block.forward

    def within(self: Block, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return forward(self, x)

    patch.setattr(Block, "forward", within)
    return {}


PLANTED = {
    no_autocast: "torch.autocast('cpu') is in float32, not in bfloat16",
    no_main_weights: "is in bfloat16, not in float32",
    no_float32_modules: "autocast in 'blocks.0.norm' is in bfloat16",
    no_casts_of_inputs: "an input of 'blocks.0.up' is in float32, not in bfloat16",
    other_moments: "'exp_avg' of 'embed.weight' is in bfloat16",
    weights_turn: "'embed.weight' is in bfloat16",
    other_buffers: "buffer 'table' is in bfloat16",
    other_products: "the output of 'blocks.0.up' is in float16",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named_in_the_first_step(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"precision": "bf16-mixed", "fp32": ISLANDS, **plant(monkeypatch)}
    engine = build(**options)
    with pytest.raises(BuildError) as error:
        engine.train_step(make_batches()[0])
    assert PLANTED[plant] in str(error.value)
    assert f"precision='{options['precision']}'" in str(error.value)
    assert engine.precision.seen == ()


class Rounding(torch.optim.Optimizer):
    """With moments in bfloat16, deliberately."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("moment", torch.zeros_like(parameter, dtype=BF16)).add_(parameter.grad)
            parameter.sub_(0.1 * state["moment"])


def test_moments_of_an_own_optimizer_are_reported() -> None:
    engine = build(precision="bf16-mixed", optimizer=Rounding, elementwise=True)
    engine.train_step(make_batches()[0])
    assert seen(engine)["other optimizer state"] == {"bfloat16"}
    assert "reported, not checked" in str(engine.precision)


def test_fused_adamw_steps_main_weights() -> None:
    engine = build(precision="bf16-mixed", optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
    engine.train_step(make_batches()[0])
    assert seen(engine)["moments"] == {"float32"}


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


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


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


# -- ranks --------------------------------------------------------------------------------------------------------


def scheduled(mesh: dict[str, int], *, is_tied: bool = False) -> slapo.Schedule:
    sch = slapo.create_schedule(make_model(is_tied=is_tied), mesh=mesh, example_inputs=make_batches()[0])
    if mesh.get("tp", 1) > 1:
        for block in sch["blocks.*"]:
            block["up"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
            block["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    if mesh.get("pp", 1) > 1:
        sch["blocks.0"].pipeline_split()
    return sch


def train(
    mesh: dict[str, int], *, is_tied: bool = False, **options: Any
) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    sch = scheduled(mesh, is_tied=is_tied)
    engine = slapo.build(sch, optimizer=adamw, max_grad_norm=1.0, **options)
    dp = sch.mesh.size("dp")
    losses = []
    for batch in make_batches():
        own = {name: one.chunk(dp)[sch.mesh.rank("dp")] for name, one in batch.items()}
        losses.append(float(engine.train_step(own).loss))
    engine.eval_step(own)
    engine.check_replicas()
    return engine, losses, engine.state_dict()


def by_hand(mesh: Any, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """A loop with torch's fully_shard of the blocks and the root."""
    model = make_model()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for module in (*model.blocks, model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = adamw(model.parameters())
    for batch in make_batches():
        own = {name: one.chunk(mesh.size())[mesh.get_local_rank()] for name, one in batch.items()}
        optimizer.zero_grad()
        model(**own)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in model.state_dict().items()}


def fsdp_by_hand_and_by_build() -> None:
    engine, _, state = train({"dp": 2}, precision="bf16-mixed", data_parallel="fsdp")
    expected = by_hand(engine._context.schedule.mesh.device_mesh["dp"])
    for name, one in expected.items():
        assert torch.equal(state[name], one), name
        assert one.dtype == FP32
    assert seen(engine)["weights in the forward"] == seen(engine)["matrix products"] == {"bfloat16"}
    assert seen(engine)["reduction"] == seen(engine)["gradients"] == seen(engine)["moments"] == {"float32"}


def layouts() -> dict[str, tuple[list[float], dict[str, set[str]]]]:
    found = {}
    for name, mesh, options in (
        ("fsdp", {"dp": 2}, {"data_parallel": "fsdp"}),
        ("tp", {"tp": 2}, {}),
        ("tp, fsdp of one rank", {"tp": 2}, {"data_parallel": "fsdp"}),
        ("stages", {"pp": 2}, {"data_parallel": "fsdp"}),
    ):
        engine, losses, state = train(mesh, precision="bf16-mixed", fp32=ISLANDS, **options)
        assert {one.dtype for one in state.values()} == {FP32}, name
        found[name] = losses, seen(engine)
    engine, losses, state = train({"pp": 2}, is_tied=True, precision="bf16-mixed", fp32=("norm",), data_parallel="fsdp")
    assert torch.equal(state["head.weight"], state["embed.weight"])
    alone = build(make_model(is_tied=True), precision="bf16-mixed", fp32=("norm",))
    assert losses == pytest.approx([float(alone.train_step(batch).loss) for batch in make_batches()], rel=0.02)
    assert seen(engine)["weights in the forward"] == ({"bfloat16"} if engine._rank == 0 else {"bfloat16", "float32"})
    engine, losses, state = train({"pp": 2}, precision="bf16", fp32=ISLANDS)
    assert state["head.weight"].dtype == FP32
    assert state["blocks.0.up.weight"].dtype == BF16
    found["stages in bf16"] = losses, seen(engine)
    return found


def infinite_on_one_rank() -> list[Any]:
    found: list[Any] = []
    for mesh, options in (
        ({"tp": 2}, {}),
        ({"pp": 2}, {"data_parallel": "fsdp"}),
        ({"dp": 2}, {"data_parallel": "fsdp"}),
    ):
        sch = scheduled(mesh)
        engine = slapo.build(
            sch, optimizer=adamw, max_grad_norm=1.0, precision="fp16-mixed", lr_scheduler=step_lr, **options
        )
        batch = {name: one.chunk(sch.mesh.size("dp"))[sch.mesh.rank("dp")] for name, one in make_batches()[0].items()}
        engine.train_step(batch)
        scale, is_second = engine.scaler.get_scale(), sch.mesh.global_rank == 1
        before = {name: one.clone() for name, one in engine.state_dict().items()}

        def plant(optimizer: Any, is_second: bool = is_second) -> None:
            for parameter in optimizer.param_groups[0]["params"] if is_second else ():
                local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                local.fill_(torch.inf)

        unscale = engine.scaler.unscale_
        engine.scaler.unscale_ = lambda optimizer, plant=plant, unscale=unscale: (plant(optimizer), unscale(optimizer))
        norm = engine.train_step(batch).grad_norm
        after = engine.state_dict()
        is_kept = all(torch.equal(one, before[name]) for name, one in after.items())
        found.append(
            (is_kept, engine.scaler.get_scale() / scale, bool(norm.isfinite()), engine.lr_scheduler.last_epoch)
        )
        del engine.scaler.unscale_
        engine.train_step(batch)
        assert not all(torch.equal(one, before[name]) for name, one in engine.state_dict().items())
    return found


def planted_policies() -> list[str]:
    found = []
    for changes in ({"param_dtype": None}, {"reduce_dtype": BF16}):
        policy = ModelPrecision.policy

        def planted(self: Any, path: str, policy: Any = policy, changes: Any = changes) -> Any:
            made = policy(self, path)
            values = {"param_dtype": made.param_dtype, "reduce_dtype": made.reduce_dtype, **changes}
            return fsdp.MixedPrecisionPolicy(**values, cast_forward_inputs=False)

        ModelPrecision.policy = planted
        try:
            train({"dp": 2}, precision="bf16-mixed", data_parallel="fsdp")
            found.append("")
        except BuildError as error:
            found.append(str(error))
        finally:
            ModelPrecision.policy = policy
    return found


def on_ranks() -> Any:
    warnings.simplefilter("ignore")
    fsdp_by_hand_and_by_build()
    return layouts(), infinite_on_one_rank(), planted_policies()


@pytest.mark.ranks
def test_precision_over_ranks() -> None:
    losses = [float(build(precision="fp32").train_step(batch).loss) for batch in make_batches()[:1]]
    for found, skipped, planted in run_ranks(on_ranks, world_size=2, timeout=300):
        for name, (own, types) in found.items():
            if name != "fsdp":  # the loss of its own samples
                assert own[0] == pytest.approx(losses[0], rel=0.02), name
            assert (types["float32 modules"], types["matrix products"]) == ({"float32"}, {"bfloat16"}), name
            mixed = {"float32"} if "bf16" not in name else {"float32", "bfloat16"}
            assert types["gradients"] == types["moments"] == types["parameters"] == mixed, name
        assert skipped == [(True, 0.5, False, 1)] * 3
        assert "'embed.weight' in the forward is in float32, not in bfloat16" in planted[0]
        assert "the gradients of unit '' is in bfloat16, not in float32" in planted[1]
