"""A small BERT trains under `fsdp`, on replicas and beside tensor parallelism, as in plain PyTorch."""

import json
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from slapo_fsdp.cases import Block, Stack
from transformers import BertConfig, BertForMaskedLM

import slapo_core as slapo
from slapo_runtime.checkpoints.manifest import newest_checkpoint
from slapo_testing import preload_modules, run_ranks

preload_modules("transformers.models.bert.modeling_bert", "torch.distributed.fsdp", "slapo_tp", "slapo_fusion")
pytestmark = pytest.mark.filterwarnings("ignore:the schedule shards tensors")

SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_model(dtype=torch.float64):
    """With the embedding's weight in its head, too, and 61 rows of it, which 2 ranks do not divide."""
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=61, max_position_embeddings=16, **SIZES, **OFF)).to(dtype).train()


def make_batches(count=3):
    ids = torch.randint(61, (count, 8, 7), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one.flip(1)} for one in ids]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def split(sch):
    for layer in sch["bert.encoder.layer.*"]:
        attention = layer["attention.self"]
        for projection in ("query", "key", "value"):
            attention[projection].shard(["weight", "bias"], axis=0)
        attention.shard_attribute(["num_attention_heads", "all_head_size"])
        attention.sync("bwd_post", "all_reduce")
        layer["attention.output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["output.dense"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def traced_and_fused(sch):
    """A graph in the place of the forward that calls the blocks, and fused regions within these."""
    for layer in sch["bert.encoder.layer.*"]:
        layer.trace(flatten=True)
        layer.fuse("fusion.bias_gelu", compiler="eager")
    sch["bert.encoder"].trace()


def flat(sch):
    """A graph that has no calls of the blocks, before fully_shard gives these hooks."""
    sch["bert.encoder"].trace(flatten=True)


def schedule(mesh, model, *more):
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=make_batches(1)[0])
    if mesh.get("tp", 1) > 1:
        split(sch)
    sch["bert.encoder.layer.0"].checkpoint()
    for steps in more:
        steps(sch)
    return sch


def build(mesh, model=None, steps=(), **options):
    options = {"optimizer": sgd, "max_grad_norm": 0.5, **options}
    return slapo.build(schedule(mesh, make_model() if model is None else model, *steps), target="fsdp", **options)


def own(mesh, batch):
    place = dist.get_rank() // mesh.get("tp", 1)
    return {name: tensor.chunk(mesh["dp"])[place] for name, tensor in batch.items()}


def train(engine, mesh, batches=None):
    results = [engine.train_step(own(mesh, batch)) for batch in batches or make_batches()]
    losses = torch.stack([result.loss for result in results])
    dist.all_reduce(losses)  # tp ranks have the same one
    norms = [float(result.grad_norm) for result in results if result.grad_norm is not None]
    return losses / dist.get_world_size(), torch.tensor(norms), engine.state_dict()


def train_plain(dtype=torch.float64, make=sgd, max_grad_norm=0.5, prepare=lambda model: None):
    model = make_model(dtype)
    prepare(model)
    optimizer, losses, norms = make(list(model.parameters())), [], []
    for batch in make_batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if max_grad_norm is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)))
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.tensor(norms), {k: v.clone() for k, v in model.state_dict().items()}


def freeze(model):
    model.bert.encoder.layer[0].requires_grad_(False)
    model.bert.embeddings.LayerNorm.bias.requires_grad_(False)


def summed(engine):
    """Sum gradients over replicas instead of averaging them."""
    for group in engine._shards._units:
        group.set_gradient_divide_factor(1.0)
    return engine


def meta_model():
    with torch.device("meta"):
        return BertForMaskedLM(BertConfig(vocab_size=61, max_position_embeddings=16, **SIZES, **OFF)).double().train()


def trainings(mesh):
    run = partial(train, mesh=mesh)
    return {
        "float64": run(build(mesh)),
        "float32": run(build(mesh, make_model(torch.float32))),
        "summed": run(summed(build(mesh, make_model(torch.float32)))),
        "kept after the forward": run(build(mesh, reshard_after_forward=False)),
        "one group": run(build(mesh, wrap=[])),
        "groups in groups": run(build(mesh, wrap=["bert.encoder", "bert.encoder.layer.*", "*.*.*.*.attention"])),
        "accumulated": run(build(mesh, accumulate=2)),
        "traced and fused": run(build(mesh, steps=[traced_and_fused])),
        "one flat graph": run(build(mesh, steps=[flat])),
        "meta": run(build(mesh, meta_model(), weights=make_model().state_dict())),
        "adamw": run(build(mesh, optimizer=adamw, max_grad_norm=None)),
        "adamw accumulated": run(build(mesh, optimizer=adamw, max_grad_norm=None, accumulate=2)),
        "frozen": run(build(mesh, frozen())),
    }


def frozen():
    model = make_model()
    freeze(model)
    return model


def named(name, message):
    return f"{name}: {message}"


def assert_same(got, expected, tolerance):
    for one, other in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, check_dtype=False)
    assert list(got[2]) == list(expected[2])
    for name, tensor in expected[2].items():
        torch.testing.assert_close(
            got[2][name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_three_steps_are_those_of_plain_pytorch(mesh):
    plain = train_plain()
    adams = train_plain(make=adamw, max_grad_norm=None)
    expected = {"float32": train_plain(torch.float32), "frozen": train_plain(prepare=freeze)}
    expected |= {"adamw": adams, "adamw accumulated": adams}
    for found in run_ranks(trainings, mesh, world_size=mesh["dp"] * mesh.get("tp", 1), timeout=400):
        wrong = found.pop("summed")
        for name, got in found.items():
            try:
                assert_same(got, expected.get(name, plain), 1e-5 if name == "float32" else 1e-10)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
        with pytest.raises(AssertionError):  # a scale is seen, although the norm is clipped
            assert_same(wrong, expected["float32"], 1e-5)
        torch.testing.assert_close(wrong[1][0], 2 * expected["float32"][1][0], rtol=1e-4, atol=0)


def refusal(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"
    return ""


class Opaque:
    """An output in which fully_shard finds no tensors."""

    def __init__(self, loss):
        self.loss = loss


class Odd(Stack):
    def forward(self, x, y):
        return Opaque(super().forward(x, y)["loss"])


class Shared(Stack):
    """Three blocks, two of which share a parameter."""

    def __init__(self):
        super().__init__()
        self.blocks.append(Block(7))
        self.blocks[2].up.weight = self.blocks[0].up.weight


def shared(mesh):
    torch.manual_seed(0)
    engine = build_stack(mesh, Shared().double())
    return train(engine, mesh, stack_batches()), engine.plan.config["wrap"]


def stack_batches():
    torch.manual_seed(1)
    return [{"x": torch.randn(8, 6).double(), "y": torch.randn(8, 4).double()} for _ in range(3)]


def test_blocks_that_share_a_parameter_train_it_once():
    torch.manual_seed(0)
    model, losses = Shared().double(), []
    optimizer = adamw(model.parameters())
    for batch in stack_batches():
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    for found, wrapped in run_ranks(shared, {"dp": 2}, world_size=2):
        assert wrapped == ["blocks.1"]
        assert_same(found, (torch.stack(losses), torch.tensor([]), model.state_dict()), 1e-10)


def adopted(mesh):
    """What the user changes of the model after the build."""
    torch.manual_seed(0)
    engine = build_stack(mesh, Odd(), wrap=[])
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 4)}
    before = engine.state_dict()
    found = [refusal(lambda: engine.train_step(batch))]
    found.append([name for name, tensor in engine.state_dict().items() if not torch.equal(tensor, before[name])])
    torch.manual_seed(0)
    engine = build_stack(mesh, Stack())
    engine.train_step(batch)
    engine.module.blocks[0].requires_grad_(False)
    before = engine.state_dict()
    engine.train_step(batch)
    found.append([name for name, tensor in engine.state_dict().items() if torch.equal(tensor, before[name])])
    return found


def build_stack(mesh, model, **options):
    return slapo.build(slapo.create_schedule(model, mesh=mesh), target="fsdp", optimizer=adamw, **options)


def test_a_backward_that_fully_shard_does_not_see_is_refused_and_frozen_parameters_stay():
    for unseen, changed, frozen in run_ranks(adopted, {"dp": 2}, world_size=2):
        assert "BuildError: fully_shard did not see the backward" in unseen
        assert "the output of Odd" in unseen
        assert changed == []
        assert frozen == [f"blocks.0.{name}" for name, _ in Stack().blocks[0].named_parameters()]


def misuse(mesh, directory):
    """One engine through everything but three smooth steps."""
    found = {}
    model = make_model()
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    engine = build(mesh, model)
    del model
    found["full parameters that are left"] = sum(one() is not None for one in old)
    batches = make_batches()
    engine.train_step(own(mesh, batches[0]))
    before = engine.state_dict()
    with torch.no_grad():
        engine.module(**own(mesh, batches[1]))  # leaves the root's group gathered
    after = engine.state_dict()
    found["a forward of the user's changes"] = [name for name in before if not torch.equal(before[name], after[name])]
    with torch.no_grad():
        engine.module(**own(mesh, batches[1]))
    engine.load_state_dict({name: tensor + 1 for name, tensor in before.items()})
    engine.eval_step(own(mesh, batches[1]))  # shards again
    loaded = engine.state_dict()
    found["lost by loading"] = [name for name in before if not torch.equal(before[name] + 1, loaded[name])]
    engine.load_state_dict(before)
    found["a wrong batch"] = refusal(lambda: engine.train_step({"input_ids": torch.zeros(1, 1, 1, 1).long()}))
    found["a wrong batch to evaluate"] = refusal(lambda: engine.eval_step({"inputs": None}))
    found["evaluated"] = [float(engine.eval_step(own(mesh, batch)).loss) for batch in batches[1:2]]
    train(engine, mesh, batches[1:])
    found["trained"] = engine.state_dict()
    engine.save(directory)
    engine.close()
    found["closed"] = [refusal(lambda: engine.train_step(batches[0])), refusal(lambda: engine.eval_step(batches[0]))]
    found["state after close()"] = engine.state_dict()
    engine, calls = build(mesh, accumulate=2), []
    handle = engine.module.register_forward_pre_hook(lambda *_: calls.append(1) if not calls else 1 / 0)
    found["the second micro-batch"] = refusal(lambda: engine.train_step(own(mesh, batches[0])))
    handle.remove()
    found["after it"] = train(engine, mesh)
    adagrad = partial(torch.optim.Adagrad, lr=0.1)
    found["early state"] = refusal(lambda: build(mesh, optimizer=adagrad))
    tied = ["bert.embeddings", "bert.encoder.layer.*"]
    found["tied"] = refusal(lambda: build(mesh, wrap=tied))
    return found


def test_what_is_between_the_steps_changes_nothing(tmp_path):
    mesh = {"dp": 2, "tp": 2}
    whole = train_plain()
    plain = whole[2]
    for found in run_ranks(misuse, mesh, str(tmp_path), world_size=4, timeout=300):
        assert found["full parameters that are left"] == 0
        assert found["a forward of the user's changes"] == []
        assert found["lost by loading"] == []
        assert "ZeroDivisionError" in found["the second micro-batch"]
        assert_same(found["after it"], whole, 1e-10)
        assert "Error" in found["a wrong batch"]
        assert "Error" in found["a wrong batch to evaluate"]
        for name, tensor in plain.items():
            torch.testing.assert_close(found["trained"][name], tensor, rtol=1e-10, atol=1e-10)
            assert torch.equal(found["state after close()"][name], found["trained"][name])
        assert all("BuildError: the engine is closed" in text for text in found["closed"])
        assert "Adagrad has state before its first step" in found["early state"]
        assert "'bert.embeddings', whose parameter 'bert.embeddings.word_embeddings.weight'" in found["tied"]
    assert json.loads((newest_checkpoint(tmp_path) / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


def scheduled_and_weighed(directory):
    """Two steps, saved; two more by target "torch", which loads what was saved; the learning rates."""
    rates = []
    for target, steps in (("fsdp", range(2)), ("torch", range(2, 4))):
        engine = slapo.build(
            slapo.create_schedule(make_model(), mesh={"dp": 2}),
            target=target,
            optimizer=adamw,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 3], gamma=0.5),
            loss_weight=labels_of,
            accumulate=2,
        )
        if steps[0]:
            engine.load(directory)
        for step in steps:
            rates.append(engine.optimizer.param_groups[0]["lr"])
            own = {name: one.chunk(2)[dist.get_rank()] for name, one in uneven_batch(step).items()}
            engine.train_step(own)
        engine.save(directory)
        state = engine.state_dict()
        engine.close()
    return rates, state


def labels_of(batch):
    return (batch["labels"] != -100).sum()


def uneven_batch(step):
    batch = make_batches(4)[step]
    labels = batch["labels"].clone()
    for row, kept in enumerate((1, 0, 7, 5, 6, 7, 2, 3)):
        labels[row, kept:] = -100
    return {**batch, "labels": labels}


def test_the_learning_rate_is_scheduled_and_tokens_weigh_alike(tmp_path):
    model = make_model()
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 3], gamma=0.5)
    for step in range(4):
        optimizer.zero_grad()
        model(**uneven_batch(step)).loss.backward()
        optimizer.step()
        scheduler.step()
    for rates, state in run_ranks(scheduled_and_weighed, str(tmp_path), world_size=2):
        assert rates == pytest.approx([0.01, 0.005, 0.0025, 0.00125])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10)
