"""Models, batches and schedules on a device: what the tests of GPUs share."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks


def family(name: str) -> Any:
    """One of the families of the full schedules: its tiny model, batch and schedule."""
    return importlib.import_module("plugins.slapo-models.tests.families").FAMILIES[name]


def moved(batch: Any, device: Any, dtype: torch.dtype | None = None) -> Any:
    """Move a batch to a device; what is inexact gets the type."""
    if isinstance(batch, dict):
        return {name: moved(value, device, dtype) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(moved(value, device, dtype) for value in batch)
    return batch.to(device, dtype if batch.is_floating_point() else None)


def scheduled(
    name: str, device: Any, dtype: torch.dtype = torch.float32, *, mesh: dict[str, int] | None = None, **options: Any
) -> slapo.Schedule:
    """The full schedule of a family, half of its layers checkpointed; its regions are not compiled unless asked."""
    subject = family(name)
    batch = moved(subject.batch, device, dtype)
    sch = slapo.create_schedule(subject.make().to(device, dtype), mesh=mesh or {"tp": 1}, example_inputs=batch)
    compiler = {"compiler": "eager"} if subject.compiled else {}
    subject.schedule(sch, **{"checkpoint": 0.5, **compiler, **options})
    return sch


def small_llama(device: Any, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """A LLaMA of two layers, with attention that is written out unless ``sizes`` say else."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | sizes))).to(device, dtype)  # type: ignore[no-any-return]


def stack(device: Any, *, layers: int = 4, width: int = 32, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """Blocks of a few short kernels each."""
    torch.manual_seed(0)

    def block() -> nn.Sequential:
        between = [nn.BatchNorm1d(2 * width)] if norm else []
        return nn.Sequential(
            nn.Linear(width, 2 * width), *between, nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    return nn.Sequential(*[block() for _ in range(layers)]).to(device)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of what the parameters hold."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def close(found: dict[str, Any], expected: dict[str, Any], **tolerances: float) -> None:
    """Require the same names, and values that are close: relative to the largest of a tensor."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (found[name] is None) == (wanted is None), name
        if wanted is None:
            continue
        rtol = tolerances.get("rtol", 1e-4)
        apart, largest = (found[name].to(wanted.device) - wanted).abs().max(), wanted.abs().max()
        assert apart <= rtol * largest + tolerances.get("atol", 1e-6), (name, float(apart), float(largest))


def microseconds(function: Callable[[], Any], device: Any, *, calls: int = 50) -> tuple[float, float]:
    """Return microseconds of a call: those of the host, which only enqueues, and all."""

    def synchronize() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        function()
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    enqueued = time.perf_counter()
    synchronize()
    return 1e6 * (enqueued - start) / calls, 1e6 * (time.perf_counter() - start) / calls


def on_ranks(
    function: Callable[..., Any], *args: Any, device: Any, ranks: int = 1, backend: str | None = None
) -> list[Any]:
    """Call a function of ``args`` and the device's name in processes of their own, all on the one device.

    NCCL takes no two ranks of one GPU: these communicate over gloo. A process that hangs is ended before the test is.
    """
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and ranks > 1:
        function = functools.partial(_with_functional_collectives, function)
    shared = "nccl" if ranks == 1 else "cpu:gloo,cuda:gloo"
    chosen = backend if backend is not None else shared if is_cuda else "gloo"
    return run_ranks(function, *args, str(device), world_size=ranks, backend=chosen, timeout=50.0 if is_cuda else 600.0)


def _with_functional_collectives(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function where functional all-gathers and reduce-scatters of a GPU's tensors pass the host.

    Those of torch read the device's addresses over gloo, and the process ends (pytorch/pytorch#152645).
    """
    ops = torch.ops._c10d_functional
    library = torch.library.Library("_c10d_functional", "IMPL")

    def through_the_host(operator: Any) -> Callable[..., Tensor]:
        def run(tensor: Tensor, *args: Any) -> Tensor:
            return ops.wait_tensor.default(operator(tensor.cpu(), *args)).to(tensor.device)

        return run

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        library.impl(name, through_the_host(getattr(ops, name).default), "CUDA")
    return function(*args)


def batches(count: int, *, width: int = 32, samples: int = 4, device: Any = "cpu") -> Iterator[Tensor]:
    """Different ones, the same each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(samples, width, generator=generator).to(device)
