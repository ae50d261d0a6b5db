"""Every primitive, compiler and pattern of slapo-fusion on a GPU, against the model without it."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from tests.gpu.subjects import batches, close, gradients, microseconds, moved, scheduled, small_llama, stack

COMPILERS = ("inductor", "aot_eager", "eager", "torchscript")
WIDTH = 64
_ANY = slapo.patterns.any_constant()


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> None:
    torch._dynamo.reset()


class Layer(nn.Module):
    """A bias and GELU, then dropout, residual and norm, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.dropout, self.norm = nn.Dropout(0.2), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(F.gelu(self.up(x) + self.bias)) + x)


def layers(device: Any, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).to(device, dtype)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def dropout_add(x: Any, residual: Any, p: Any = _ANY, training: Any = _ANY) -> Any:
    return F.dropout(x, p, training) + residual


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Gradients of one step, from the same random numbers each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    output = model(x).float()
    (output * torch.linspace(-1.0, 1.0, output.numel(), device=output.device).view_as(output)).sum().backward()
    return gradients(model)


@pytest.mark.gpu(16)
@pytest.mark.filterwarnings("ignore:fuse.compiler='torchscript'")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_regions_of_each_compiler(device: torch.device, measured: Any, compiler: str, dtype: str) -> None:
    model, x = layers(device, getattr(torch, dtype)), torch.randn(32, WIDTH).to(device, getattr(torch, dtype))
    fused = copy.deepcopy(model)
    sch: Any = slapo.create_schedule(fused, example_inputs=x)
    sch["*"].trace()
    sch["*"].fuse(bias_gelu, compiler=compiler, name="bias_gelu")
    sch["*"].fuse(dropout_add, compiler=compiler)
    close(run(fused, x), run(model, x), rtol=1e-4 if dtype == "float32" else 5e-2)
    eager, ours = (microseconds(lambda network=network: run(network, x), device) for network in (model, fused))
    measured(compiler=compiler, dtype=dtype, eager_us=eager[1], fused_us=ours[1])
    for network in (model, fused):
        network.eval()
    longer = torch.randn(2, 5, WIDTH).to(device, x.dtype)
    torch.testing.assert_close(fused(longer), model(longer), rtol=2e-2, atol=2e-2 if x.dtype != torch.float32 else 1e-5)


@pytest.mark.gpu(16, needs="Triton")
def test_fused_kernels_of_a_full_schedule_by_inductor(device: torch.device, measured: Any) -> None:
    compiled = scheduled("llama", device, torch.bfloat16, compiler="inductor")
    grouped = scheduled("llama", device, torch.bfloat16)
    batch = grouped.example_inputs
    found = []
    for sch in (compiled, grouped):
        sch.model.zero_grad(set_to_none=True)
        sch.model(**batch).loss.backward()
        found.append(gradients(sch.model))
    close(*found, rtol=0.1)  # type: ignore[misc]


@pytest.mark.gpu(8)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_compiled_cuda_graphs_and_accumulated_gradients(device: torch.device, accumulate: int) -> None:
    """``compile(mode="reduce-overhead")``, whose graphs write outputs and gradients to the same memory each time."""
    options: Any = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "aot_eager"}
    plain = stack(device)
    compiled = copy.deepcopy(plain)
    sch: Any = slapo.create_schedule(compiled)
    sch["*"].compile(**options)
    for model in (plain, compiled):
        data = batches(3 * accumulate, device=device)
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            for _ in range(accumulate):
                model(next(data)).square().mean().backward()
    close(gradients(compiled), gradients(plain))


@pytest.mark.gpu(8)
def test_an_engine_with_compiled_cuda_graphs(device: torch.device) -> None:
    options: Any = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "aot_eager"}
    model, trained = stack(device, layers=2), []
    for network in (copy.deepcopy(model), model):
        sch: Any = slapo.create_schedule(network)
        if network is model:
            sch["*"].compile(**options)
        engine = slapo.build(
            sch,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            accumulate=2,
        )
        losses = [engine.train_step((x,)).loss for x in batches(4, device=device)]
        trained.append({**engine.state_dict(), "losses": torch.stack(losses)})
    close(trained[1], trained[0])


@pytest.mark.gpu(16)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers(device: torch.device, mode: str) -> None:
    if device.type == "cpu" and mode != "default":
        pytest.skip("not rehearsed: inductor has no such mode on the CPU")
    options: Any = {"mode": mode} if mode != "default" else {}
    model, x = layers(device), torch.randn(32, WIDTH, device=device)
    compiled = copy.deepcopy(model)
    sch: Any = slapo.create_schedule(compiled)
    sch["*"].compile(**options if device.type == "cuda" else {"backend": "aot_eager"})
    for _ in range(3):
        close(run(compiled, x), run(model, x))


class Pieces(nn.Module):
    """What ``decompose`` knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.up, self.rows, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.batch(self.conv(x))).mean((2, 3))
        return self.norm(self.rows(self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.gpu(16)
def test_decomposed_modules(device: torch.device) -> None:
    torch.manual_seed(0)
    sch: Any = slapo.create_schedule(nn.Sequential(Pieces()).to(device))
    for name in ("batch", "up", "rows", "norm"):
        sch[f"0.{name}"].decompose()
    assert slapo.verify(sch, torch.randn(4, 3, 8, 8, device=device)).steps_verified == 4


@pytest.mark.gpu(16)
@pytest.mark.filterwarnings("ignore")
def test_quantized_layers(device: torch.device) -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    model = stack(device, layers=2)
    sch: Any = slapo.create_schedule(model)
    sch["*"].quantize()
    assert slapo.verify(sch, torch.randn(4, 32, device=device)).steps_verified == 2


@pytest.mark.gpu(16)
def test_bound_operators_of_torch_and_a_fallback(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, device=device)
    sch: Any = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device), example_inputs=x)
    sch["0"].bind("aten::linear")
    sch["1"].bind("nobody::wrote_it", fallback=True)
    assert slapo.verify(sch).steps_verified == 2


# -- patterns ---------------------------------------------------------------------------------------------------------

PATTERNS = (
    "bias_dropout_add_norm",
    "bias_gelu",
    "causal_sdpa",
    "gelu",
    "gelu_tanh",
    "qkv",
    "rms_norm",
    "rotary",
    "sdpa",
    "swiglu",
    "swiglu_projections",
)
REPLACED = ("fusion.sdpa", "fusion.causal_sdpa", "fusion.rms_norm", "fusion.gelu", "fusion.gelu_tanh")


def forms() -> dict[str, Any]:
    """Operations as people write them, by names, with the pattern that finds each."""
    return importlib.import_module("plugins.slapo-fusion.tests.written_out").FOUND  # type: ignore[no-any-return]


class Below(nn.Module):
    """A root, so that what is written out is a module below it, and a parameter that every output depends on."""

    def __init__(self, function: Any, shape: torch.Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        written: Any = importlib.import_module("plugins.slapo-fusion.tests.written_out").Written
        self.op = written(function)
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, first: Tensor, *others: Tensor) -> Any:
        return self.op(first + self.shift, *others)


@pytest.mark.gpu(15)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_forms_of_a_pattern(device: torch.device, pattern: str) -> None:
    """Each form is found, and replaced or fused computes the same."""
    cases = {form: case for form, case in forms().items() if case[0] == f"fusion.{pattern}"}
    assert cases
    for form, (name, function, given) in cases.items():
        inputs = moved(given, device)
        sch: Any = slapo.create_schedule(Below(function, given[0].shape[1:]).to(device), example_inputs=inputs)
        sch["op"].trace(flatten=True)
        if name in REPLACED:
            sch["op"].replace(match=name)
        elif name != "fusion.qkv":  # has several outputs, for `merge`
            sch["op"].fuse(name, compiler="eager")
        else:
            sch["op"].checkpoint(match=name)
        assert slapo.verify(sch, inputs).steps_verified == 2, form


@pytest.mark.gpu(15)
def test_merged_projections(device: torch.device) -> None:
    ids = torch.arange(64, device=device).reshape(2, 32)
    batch = {"input_ids": ids, "labels": ids}
    sch: Any = slapo.create_schedule(small_llama(device), mesh={"tp": 1}, example_inputs=batch)
    for layer in sch["model.layers.*"]:
        layer.trace(flatten=True)
        layer.merge(("mlp.gate_proj", "mlp.up_proj"))
    assert slapo.verify(sch).steps_verified == 4


# -- errors -----------------------------------------------------------------------------------------------------------


class Greedy(nn.Module):
    """Takes more memory than there is, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.weight).unsqueeze(0).expand(x.shape[0] * x.shape[0], *x.shape) + 1.0).sum()


@pytest.mark.gpu(14)
@pytest.mark.parametrize("how", ["aot_eager", "inductor", "compile"])
def test_out_of_memory_goes_through_as_it_is(device: torch.device, how: str) -> None:
    """A region is neither run again nor called a fault of its compiler; and a small batch works afterwards."""
    is_cuda = device.type == "cuda"
    samples = 448 if is_cuda else 1 << 16  # cubed, times 32 bytes: 2.7 GiB of 1 GiB; more than any host has
    small, large = torch.ones(4, 8, device=device), torch.ones(samples, 8, device=device)
    sch: Any = slapo.create_schedule(nn.Sequential(Greedy()).to(device), example_inputs=small)
    if how == "compile":
        sch["0"].compile(backend="aot_eager")
    else:
        sch["0"].trace()
        sch["0"].fuse(lambda y: y + 1.0, compiler=how)
    sch.model(small).backward()
    if is_cuda:
        torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.mem_get_info()[1])
    try:
        # The CPU's allocator raises no error of this class, which a compiler may wrap.
        with pytest.raises(torch.OutOfMemoryError if is_cuda else Exception, match="memory"):
            sch.model(large)
    finally:
        if is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
    sch.model(small).backward()
