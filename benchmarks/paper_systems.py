"""What trains a model of the paper's evaluation on the ranks of a process group: slapo's schedules, and what else does.

Every function gives a training step: it takes the same samples as all others, and gives the mean loss.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from dialect_models import adamw
from dialects import mean_over_ranks
from paper_models import STEPS, batch_of, loss_of, make, schedule, sizes
from torch import nn

import slapo_core as slapo

__all__ = ["ALONE", "BESIDE_MEGATRON", "TOGETHER", "measure"]

Step = Callable[[], float]
COMPARED = 3  # steps whose losses are compared before steps are timed
MICROBATCHES = 2


def scheduled(
    name: str,
    size: str,
    compiler: str,
    *,
    step: str,
    mesh: Mapping[str, int],
    target: str = "torch",
    others: Mapping[str, Any] | None = None,
) -> Step:
    """Under slapo-models' schedule, up to a step of the ablation, with ``others`` in place of its options."""
    replicas, stages = mesh.get("dp", 1), mesh.get("pp", 1)
    rank = dist.get_rank() if replicas > 1 else 0
    batch = batch_of(name, size, rank, replicas)
    sch = slapo.create_schedule(make(name, size), mesh={"tp": 1, **mesh}, example_inputs=batch)
    schedule(sch, name, {**(STEPS[step].options or {}), **(others or {})}, compiler)
    given: dict[str, Any] = {"optimizer": adamw, "loss": loss_of(name)}
    if stages > 1:
        given |= {"microbatches": MICROBATCHES, "pipeline_schedule": "1f1b"}
    if target == "deepspeed":
        given = {"optimizer": adamw, "loss": loss_of(name), "config": _deepspeed_config(name, size, replicas)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was never verified")  # the losses are compared
        engine = slapo.build(sch, target=target, **given)
    return lambda: mean_over_ranks(engine.train_step(batch).loss)


def unscheduled(name: str, size: str, compiler: str, *, attention: str | None = None) -> Step:
    """The model as it is, by torch, with replicas on all ranks; as transformers runs it by itself, or as it says."""
    model = make(name, size, attention)
    run = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    return _by_torch(name, size, run, model, dist.get_rank(), dist.get_world_size())


def deepspeed(name: str, size: str, compiler: str) -> Step:
    """The model as it is, by DeepSpeed, under ZeRO-1."""
    import deepspeed

    from slapo_deepspeed.runtime import start

    start(None)  # on a CPU, without compiling an operator for minutes
    model, ranks = make(name, size, None), dist.get_world_size()
    config = _deepspeed_config(name, size, ranks)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    batch = batch_of(name, size, dist.get_rank(), ranks)

    def step() -> float:
        loss = _loss(name, engine, batch)
        engine.backward(loss)
        engine.step()
        return mean_over_ranks(loss)

    return step


def dtensor(name: str, size: str, compiler: str) -> Step:
    """The layers in parallel by DTensor's ``parallelize_module``, as its tutorial writes a plan."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, ranks = make(name, size, None), dist.get_world_size()
    layers, first, second = _PLANS[name]
    plan: dict[str, Any] = {}
    for path, _ in model.named_modules():
        for patterns, style in ((first, ColwiseParallel), (second, RowwiseParallel)):
            if any(fnmatchcase(path, f"{layers}.{pattern}") for pattern in patterns):
                plan[path] = style()
    parallelize_module(model, dist.init_device_mesh("cpu", (ranks,)), plan)
    for module in model.modules():  # forwards that count heads by themselves
        for attribute in {"opt": ("num_heads",), "t5": ("n_heads", "inner_dim")}.get(name, ()):
            if isinstance(getattr(module, attribute, None), int):
                setattr(module, attribute, getattr(module, attribute) // ranks)
    return _by_torch(name, size, model, model, 0, 1)


_ENCODER = (
    [f"attention.self.{each}" for each in ("query", "key", "value")],
    ["attention.output.dense", "output.dense"],
)
_PROJECTIONS = [f"self_attn.{each}_proj" for each in "qkv"]
_PLANS: dict[str, tuple[str, list[str], list[str]]] = {
    "bert": ("bert.encoder.layer.*", [*_ENCODER[0], "intermediate.dense"], _ENCODER[1]),
    "roberta": ("roberta.encoder.layer.*", [*_ENCODER[0], "intermediate.dense"], _ENCODER[1]),
    "gpt": ("transformer.h.*", ["attn.c_attn", "mlp.c_fc"], ["attn.c_proj", "mlp.c_proj"]),
    "opt": ("model.decoder.layers.*", [*_PROJECTIONS, "fc1"], ["self_attn.out_proj", "fc2"]),
    "t5": (
        "*coder.block.*.layer.*",
        [*(f"*Attention.{each}" for each in "qkv"), "*Attention.relative_attention_bias", "DenseReluDense.wi"],
        ["*Attention.o", "DenseReluDense.wo"],
    ),
    "llama": (
        "model.layers.*",
        [*_PROJECTIONS, "mlp.gate_proj", "mlp.up_proj"],
        ["self_attn.o_proj", "mlp.down_proj"],
    ),
    "wide_resnet": ("layer*.*", ["conv1"], ["conv2"]),
}
"""The layers, and what is split by its outputs and by its inputs."""


def megatron(name: str, size: str, compiler: str) -> Step:
    """Megatron-core's own model of the same sizes, with its own layers and tensor parallelism; other initial values."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if name not in ("bert", "gpt", "llama"):
        raise NotImplementedError(f"not compared with Megatron-core's layers: {name}")
    from tests.support.cpu_megatron import install

    install()  # after all others have recorded their graphs: it puts a function in the place of Tensor.type
    own, ranks = sizes(name, size), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    # Without dropout nothing is drawn, and the tracker's fork, which wants CUDA, has nothing to do.
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    kinds: dict[str, Any] = {}
    if name == "llama":
        kinds = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": nn.functional.silu}
        kinds |= {"add_bias_linear": False, "layernorm_epsilon": 1e-6}
    config = TransformerConfig(
        num_layers=own["layers"],
        hidden_size=own["width"],
        ffn_hidden_size=own["inner"],
        num_attention_heads=own["heads"],
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **kinds,
    )
    torch.manual_seed(0)
    shared = {"config": config, "vocab_size": own["vocabulary"], "max_sequence_length": own["length"]}
    ids = batch_of(name, size)["input_ids"]
    places = torch.arange(own["length"]).expand_as(ids).contiguous()
    if name == "bert":
        model: nn.Module = BertModel(
            **shared, num_tokentypes=0, transformer_layer_spec=bert_layer_local_spec, add_binary_head=False
        )
        run = functools.partial(model, ids, torch.ones_like(ids), lm_labels=ids)
    else:
        model = GPTModel(
            **shared,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
            position_embedding_type="rope" if name == "llama" else "learned_absolute",
            share_embeddings_and_output_weights=name == "gpt",
        )
        later = torch.triu(torch.ones(1, 1, own["length"], own["length"], dtype=torch.bool), 1)
        run = functools.partial(model, ids, places, later, labels=ids.roll(-1, 1))
    optimizer = adamw(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        output = run()
        loss = (output[0] if isinstance(output, tuple) else output).mean()
        loss.backward()
        optimizer.step()
        return mean_over_ranks(loss)

    return step


def _by_torch(name: str, size: str, run: nn.Module, model: nn.Module, replica: int, replicas: int) -> Step:
    batch, optimizer = batch_of(name, size, replica, replicas), adamw(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(name, run, batch)
        loss.backward()
        optimizer.step()
        return mean_over_ranks(loss)

    return step


def _loss(name: str, run: Any, batch: Any) -> torch.Tensor:
    given = loss_of(name)
    return run(**batch).loss if given is None else given(run(*batch), batch)  # type: ignore[no-any-return]


def _deepspeed_config(name: str, size: str, replicas: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": sizes(name, size)["batch"] // replicas,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


_TP, _DP, _PP = {"tp": 2}, {"dp": 2}, {"pp": 2}
ALONE: dict[str, Callable[..., Step]] = {
    "unscheduled": functools.partial(unscheduled, attention="eager"),
    "unscheduled, its own attention kernel": unscheduled,
    "+ kernels": functools.partial(scheduled, step="+ kernels", mesh={}),
    "+ checkpoint": functools.partial(scheduled, step="+ checkpoint", mesh={}),
}
"""On one rank; the first is the reference."""

TOGETHER: dict[str, Callable[..., Step]] = {
    "DistributedDataParallel": unscheduled,
    "DeepSpeed ZeRO-1": deepspeed,
    "DTensor parallelize_module": dtensor,
    "+ kernels, dp 2": functools.partial(scheduled, step="+ kernels", mesh=_DP),
    "+ kernels, dp 2, target deepspeed": functools.partial(scheduled, step="+ kernels", mesh=_DP, target="deepspeed"),
    "+ shard layers, tp 2": functools.partial(scheduled, step="+ shard layers", mesh=_TP),
    "+ shard embeddings, tp 2": functools.partial(scheduled, step="+ shard embeddings", mesh=_TP),
    "+ pipeline, pp 2": functools.partial(scheduled, step="+ pipeline", mesh=_PP),
}
"""On two ranks; ratios are to the first."""

BESIDE_MEGATRON: dict[str, Callable[..., Step]] = {
    "+ shard embeddings, tp 2": functools.partial(
        scheduled, step="+ shard embeddings", mesh=_TP, others={"checkpoint": 0.0}
    ),
    "Megatron-core's layers, tp 2": megatron,
}
"""On two ranks, nothing recomputed; ratios are to the last. On a CPU Megatron-core runs by the shim of the tests."""


def measure(name: str, size: str, systems: str, compiler: str, rounds: int) -> dict[str, dict[str, Any]]:
    """On every rank: losses of the first steps, then seconds of steps taken in turn.

    Args:
        name: of the model.
        size: ``"cpu"`` or ``"small"``.
        systems: name of a table of this file.
        compiler: of fused regions.
        rounds: of one step of each system; the first system changes from round to round.

    Returns:
        by system: ``losses`` and ``seconds``, or ``refused``, why it does not train the model.
    """
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for system, function in globals()[systems].items():
        try:
            step = function(name, size, compiler)
            found[system] = {"losses": [step() for _ in range(COMPARED)], "seconds": []}
            steps[system] = step
        except Exception as error:  # noqa: BLE001 - a result, too
            found[system] = {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    for number in range(rounds):
        order = list(steps)
        for system in (*order[number % len(order) :], *order[: number % len(order)]):
            dist.barrier()
            begin = time.perf_counter()
            steps[system]()
            found[system]["seconds"].append(time.perf_counter() - begin)
    return found
