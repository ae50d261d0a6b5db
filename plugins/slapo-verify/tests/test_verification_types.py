"""Each tensor is held to the floating-point types that led to it, and these are as fine as the model allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from tests.messages import Messages


class NoDoubleKernel(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype is torch.float64:
            raise RuntimeError("'lookup' not implemented for 'Double'")
        return torch.tanh(input)


class Off(nn.Linear):
    """A linear layer that is wrong by a factor."""

    by = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.by


def off(by: float) -> nn.Module:
    module = Off(4, 4)
    module.by = by
    return module


def test_a_half_precision_model_without_float64_kernels_is_verified_in_float32() -> None:
    def scheduled() -> slapo.Schedule:
        model = nn.Sequential(nn.Linear(4, 4), NoDoubleKernel(), nn.Linear(4, 4))
        return slapo.create_schedule(model.to(torch.bfloat16))

    torch.manual_seed(0)
    batch = torch.randn(3, 4, dtype=torch.bfloat16)
    sch = scheduled()
    sch["2"].replace(off(1.0).to(torch.bfloat16))
    report = slapo.verify(sch, batch)
    assert (report.dtype, report.coarsest_dtype) == ("float32", "float32")
    (note,) = report.notes
    assert note.startswith(
        "compared in float32; not in float64, because the reference model raises: RuntimeError: 'lookup' not "
    )
    sch = scheduled()
    sch["2"].replace(off(1.001).to(torch.bfloat16))  # less than a rounding of bfloat16
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, batch)
    assert caught.value.tensor == "output"
    assert caught.value.message.splitlines()[1].endswith("(float32, REORDERED)")


def test_a_scheduled_model_that_cannot_run_in_float64_is_run_in_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(torch.bfloat16)
    sch = slapo.create_schedule(model)
    sch["1"].replace(NoDoubleKernel())
    report = slapo.verify(sch, torch.randn(3, 4, dtype=torch.bfloat16))
    assert report.dtype == "float32"
    assert report.notes[0].startswith(
        "compared in float32; not in float64, because the scheduled model raises: RuntimeError: 'lookup' not"
    )


class TwoHeads(nn.Module):
    """One of them in float32."""

    def __init__(self, *, as_number: bool = False) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Linear(4, 4), nn.Linear(4, 4)
        self.as_number = as_number

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        coarse = torch.softmax(self.coarse(x).float(), -1)
        scale = coarse.sum().item() if self.as_number else 1.0
        return self.fine(x) * scale, coarse.to(x.dtype)


@pytest.mark.parametrize("path", ["fine", "coarse"])
def test_a_part_in_float32_does_not_loosen_what_never_went_through_it(path: str) -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(TwoHeads())
    sch[path].replace(off(1 + 1e-7))
    if path == "coarse":
        report = slapo.verify(sch, torch.randn(3, 4))
        assert (report.dtype, report.coarsest_dtype) == ("float64", "float32")
        allowed = {entry.kind: entry.allowed for entry in report.largest}
        assert allowed["output"] > 1e-7
    else:
        with pytest.raises(slapo.VerifyError) as caught:
            slapo.verify(sch, torch.randn(3, 4))
        assert caught.value.tensor == "output[0]"
        assert caught.value.tolerance < 1e-9
        rule = caught.value.message.splitlines()[1]
        assert rule == "  allowed: 1e-10 * max|reference| + 1e-12 * scale (float64, REORDERED)"


def test_a_number_taken_out_of_a_tensor_carries_its_type_on() -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(TwoHeads(as_number=True))
    sch["fine"].replace(off(1 + 1e-7))
    assert slapo.verify(sch, torch.randn(3, 4))


class Branching(nn.Linear):
    """A linear layer that is wrong by a tenth for one type, in one place."""

    wrong_in: torch.dtype | None = None
    place = "forward"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        if input.dtype is not self.wrong_in:
            return out
        if self.place == "raises":
            raise ValueError("no kernel of this type")
        if self.place == "gradient":
            return out + 0.3 * (out - out.detach())
        if self.place == "evaluation" and self.training:
            return out
        return out * 1.3


def branching(wrong_in: torch.dtype | None, place: str, dtype: torch.dtype) -> nn.Module:
    module = Branching(4, 4)
    module.wrong_in, module.place = wrong_in, place
    return module.to(dtype)


def three_layers(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)


OWN = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", OWN)
@pytest.mark.parametrize(
    ("place", "tensor"),
    [
        ("forward", "output in the model's own types"),
        ("gradient", "gradient of 2.bias in the model's own types"),
        ("evaluation", "output in evaluation mode in the model's own types"),
    ],
)
def test_code_that_is_wrong_in_the_models_own_type_only_is_found_and_blamed(
    dtype: torch.dtype, place: str, tensor: str
) -> None:
    sch = slapo.create_schedule(three_layers(dtype))
    sch["0"].checkpoint()
    sch["2"].replace(branching(dtype, place, dtype))
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, torch.randn(3, 4, dtype=dtype))
    assert caught.value.tensor == tensor
    (step,) = caught.value.steps
    assert step.startswith("#2 replace(")
    assert str(dtype).removeprefix("torch.") in caught.value.message.splitlines()[1]


def test_code_that_raises_in_the_models_own_type_only_is_found_and_blamed() -> None:
    sch = slapo.create_schedule(three_layers(torch.float32))
    sch["0"].checkpoint()
    sch["2"].replace(branching(torch.float32, "raises", torch.float32))
    with pytest.raises(slapo.VerifyError, match="ValueError: no kernel") as caught:
        slapo.verify(sch, torch.randn(3, 4))
    (step,) = caught.value.steps
    assert step.startswith("#2 replace(")


@pytest.mark.parametrize("dtype", OWN)
def test_a_replacement_that_is_right_in_every_type_agrees(dtype: torch.dtype) -> None:
    sch = slapo.create_schedule(three_layers(dtype))
    sch["2"].replace(branching(None, "forward", dtype))
    report = slapo.verify(sch, torch.randn(3, 4, dtype=dtype))
    counts = {entry.kind: entry.compared for entry in report.largest if entry.kind.startswith("own ")}
    assert counts == {"own output": 1, "own buffer": 0, "own gradient": 6, "own evaluation output": 1}


def test_unsupported_types_of_the_reference_are_reported() -> None:
    model = three_layers(torch.float32)
    model[2] = branching(torch.float32, "raises", torch.float32)
    report = slapo.verify(slapo.create_schedule(model), torch.randn(3, 4))
    assert report.dtype == "float64"
    assert report.notes == (
        "the model's own types were not compared, because the reference model raises: ValueError: no kernel of this "
        "type",
    )


class Canceling(nn.Module):
    """Adds and takes away a number next to which its input is small, ``by`` times as large where it is float32."""

    def __init__(self, *, order: str = "first", by: float = 1.0) -> None:
        super().__init__()
        self.order, self.by = order, by

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        one, other = input.chunk(2, -1)
        scale = self.by if input.dtype is torch.float32 else 1.0
        if self.order == "first":
            return ((1e3 + one / 3) + other / 7 - 1e3) * scale
        return (one / 3 + other / 7) * scale


def test_two_orders_of_a_sum_may_differ_by_as_much_as_the_models_own_rounding() -> None:
    torch.manual_seed(0)
    batch = torch.randn(3, 8)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), Canceling()))
    sch["1"].replace(Canceling(order="second"), rtol=1e-9)
    report = slapo.verify(sch, batch)
    (own,) = (entry for entry in report.largest if entry.kind == "own output")
    assert 2e-5 < own.difference < own.allowed < 1e-3  # more than float32 would be allowed by itself
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), Canceling()))
    sch["1"].replace(Canceling(order="second", by=1.003), rtol=1e-9)
    with pytest.raises(slapo.VerifyError, match="own types"):
        slapo.verify(sch, batch)


def test_a_model_that_is_another_one_in_float32_gives_a_scheduled_one_little_room() -> None:
    torch.manual_seed(0)
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(8, 8), Canceling(order="second", by=1.5)))
    sch["1"].replace(Canceling(order="second", by=1.502))
    with pytest.raises(slapo.VerifyError, match="own types"):
        slapo.verify(sch, torch.randn(3, 8))


class Experts(nn.Module):
    """A mixture of experts with two rows of its router so close that rounding to bfloat16 decides between them."""

    def __init__(self, chooses: str = "topk") -> None:
        super().__init__()
        self.chooses = chooses
        self.up, self.router = nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 16, 16))
        with torch.no_grad():
            self.router.weight[1] = self.router.weight[0] + 1e-3 * torch.randn(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        scores = self.router(x).softmax(-1, dtype=torch.float32)  # as Mixtral has it
        if self.chooses == "topk":
            gates, chosen = scores.topk(1, -1)
        else:
            gates, chosen = scores.max(-1, keepdim=True)[0], scores.argmax(-1)[:, None]
        return (gates.to(x.dtype)[..., None, None] * self.experts[chosen] * x[:, None, None]).sum((1, 3))


class OtherOrder(nn.Linear):
    """A linear layer that sums two halves, as two ranks do; wrong in bfloat16 by a factor, if it has one."""

    def __init__(self, old: nn.Linear, *, by: float = 1.0) -> None:
        super().__init__(old.in_features, old.out_features, bias=False, dtype=old.weight.dtype)
        self.by = by

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (one, two), (left, right) = input.chunk(2, -1), self.weight.chunk(2, -1)
        out = one @ left.T + two @ right.T
        return out * self.by if input.dtype is torch.bfloat16 else out


def experts(chooses: str, path: str, *, by: float = 1.0) -> slapo.Schedule:
    torch.manual_seed(1)
    sch = slapo.create_schedule(Experts(chooses).to(torch.bfloat16))
    sch[path].replace(lambda old: OtherOrder(old, by=by))
    return sch


@pytest.mark.parametrize("chooses", ["topk", "argmax"])
def test_tokens_that_rounding_sends_to_other_experts_are_no_difference(chooses: str) -> None:
    batch = torch.randn(64, 16, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    report = slapo.verify(experts(chooses, "up"), batch, optimizer_steps=0)
    seen = {entry.kind: entry for entry in report.largest}["own output"]
    assert 0 < seen.difference < 0.1  # and 2.9 where a token goes to the other expert
    for path, by in (("up", 1.3), ("router", -1.0)):
        with pytest.raises(slapo.VerifyError) as caught:
            slapo.verify(experts(chooses, path, by=by), batch, optimizer_steps=0)
        assert caught.value.tensor == "output in the model's own types"
        assert caught.value.steps[0].startswith("#1 replace(")


class AsOnCuda(nn.Linear):
    """A linear layer that computes as CUDA does, where TF32 is allowed: with factors of 10 bits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if input.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            input, weight = (_of_ten_bits(factor) for factor in (input, weight))
        return nn.functional.linear(input, weight, self.bias)


def _of_ten_bits(value: torch.Tensor) -> torch.Tensor:
    return value + ((value.detach() * 4097) - (value.detach() * 4097 - value.detach()) - value.detach())


class Elementwise(nn.Linear):
    """The same without products of matrices; wrong by ``by`` in float32."""

    by = 0.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = (input.unsqueeze(-2) * self.weight).sum(-1) + self.bias
        return out * (1 + self.by) if input.dtype is torch.float32 else out


class FullPrecision(nn.Linear):
    """Refuses to run where products of float32 may be rounded."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        backends = torch.backends
        for each in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul):
            assert each.fp32_precision == "ieee"
        assert (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32) == ("highest", False)
        return super().forward(input)


@pytest.fixture
def with_tf32() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("with_tf32")
def test_tf32_is_off_while_models_are_compared_and_on_again_afterwards() -> None:
    sch = slapo.create_schedule(nn.Sequential(Elementwise(64, 64), FullPrecision(64, 64)))
    sch["0"].replace(AsOnCuda(64, 64))
    assert slapo.verify(sch, torch.randn(8, 64))
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"


@pytest.mark.usefixtures("with_tf32")
def test_mistakes_do_not_hide_in_the_rounding_of_tf32() -> None:
    wrong = Elementwise(64, 64)
    wrong.by = 2e-4
    sch = slapo.create_schedule(nn.Sequential(AsOnCuda(64, 64)))
    sch["0"].replace(wrong)
    with pytest.raises(slapo.VerifyError, match="own types"):
        slapo.verify(sch, torch.randn(8, 64))


@pytest.mark.ranks
def test_tf32_is_off_in_the_processes_of_an_abstract_mesh() -> None:
    sch = slapo.create_schedule(nn.Sequential(FullPrecision(4, 4)), mesh={"dp": 2})
    sch["0"].checkpoint()
    assert slapo.verify(sch, torch.randn(2, 4)).world_size == 2


class HalfOnly(nn.Linear):
    """A layer whose kernel takes half precision only, as of FlashAttention; wrong by a factor, if it has one."""

    by = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (one, two), (left, right) = input.chunk(2, -1), self.weight.chunk(2, -1)
        out = torch.mm(one, left.T) + torch.mm(two, right.T)
        if out.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("only fp16 and bf16 are supported")
        return (out + self.bias) * self.by


def half_only(dtype: torch.dtype, by: float = 1.0, **mesh: Any) -> slapo.Schedule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16)).to(dtype)
    sch = slapo.create_schedule(model, **mesh)
    sch["0"].checkpoint()
    kernel = HalfOnly(16, 16)
    kernel.by = by
    sch["2"].replace(kernel.to(dtype))
    return sch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_of_half_precision_is_compared_in_its_own_type(dtype: torch.dtype) -> None:
    name, batch = str(dtype).removeprefix("torch."), torch.randn(8, 16, dtype=dtype)
    report = slapo.verify(half_only(dtype), batch)
    assert (report.dtype, report.coarsest_dtype) == (name, name)
    assert report.notes[0].startswith(
        f"compared in the model's own types ({name}); not in float64 or float32, because the scheduled model raises: "
        "RuntimeError: only fp16 and bf16 are supported"
    )
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(half_only(dtype, by=1.3), batch)
    assert caught.value.tensor == "output"
    (step,) = caught.value.steps
    assert step.startswith("#2 replace(HalfOnly")
    assert f"({name}, REORDERED)" in caught.value.message.splitlines()[1]


def test_a_kernel_of_half_precision_in_a_model_of_float32_is_compared_under_autocast(message: Messages) -> None:
    batch = torch.randn(8, 16)
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(half_only(torch.float32), batch)
    message(caught, "with torch.autocast('cpu', torch.bfloat16)")
    with torch.autocast("cpu", torch.bfloat16):
        report = slapo.verify(half_only(torch.float32), batch)
        assert (report.dtype, report.coarsest_dtype) == ("float32", "bfloat16")
        compared = {entry.kind: entry.compared for entry in report.largest}
        assert compared["updated output"] == 1
        with pytest.raises(slapo.VerifyError) as caught:
            slapo.verify(half_only(torch.float32, by=1.3), batch)
    (step,) = caught.value.steps
    assert step.startswith("#2 replace(HalfOnly")


@pytest.mark.ranks
def test_processes_of_an_abstract_mesh_run_under_the_callers_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = slapo.verify(half_only(torch.float32, mesh={"dp": 2}), torch.randn(8, 16))
    assert (report.world_size, report.coarsest_dtype) == (2, "bfloat16")


def test_models_are_compared_in_a_precision_of_build(message: Messages) -> None:
    batch = torch.randn(8, 16)
    report = slapo.verify(half_only(torch.float32), batch, precision="bf16-mixed")
    assert (report.dtype, report.coarsest_dtype) == ("float32", "bfloat16")
    with pytest.raises(slapo.VerifyError) as wrong:
        slapo.verify(half_only(torch.float32, by=1.3), batch, precision="bf16-mixed")
    assert wrong.value.steps[0].startswith("#2 replace(HalfOnly")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(slapo.VerifyError):  # half precision is off
        slapo.verify(half_only(torch.float32), batch, precision="fp32")
    with pytest.raises(slapo.ArgumentError) as caught:
        slapo.verify(half_only(torch.float32), batch, precision="bf16")
    message(caught, "precision must be")
