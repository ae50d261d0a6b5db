"""What ranks compare: a text for every value, a number for every tensor, and the first difference."""

from __future__ import annotations

import enum
import functools
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slapo_core.internals import describe
from slapo_runtime.ranks.checksums import checksum
from slapo_runtime.ranks.facts import RankFact, describe_tensor, first_difference


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Window:
    size: int
    handle: Any = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ((1, 2.5, "a", True), "(1, 2.5, 'a', True)"),
        ([1], "(1,)"),
        ({"b": {3, 1}, "a": None}, "{'a': None, 'b': {1, 3}}"),
        (torch.float8_e4m3fn, "torch.float8_e4m3fn"),
        (torch.device("cpu", 0), "'cpu'"),
        (Color.RED, "Color.RED"),
        (Window(3, object()), "Window(size=3, handle=<builtins.object>)"),
        (torch.nn.Linear, "<class torch.nn.modules.linear.Linear>"),
        (torch.nn.Linear(2, 2), "<torch.nn.modules.linear.Linear>"),
        (describe, "<function slapo_core.tree.render.describe>"),
        (Window(1).__eq__, "<function plugins.slapo-runtime.tests.test_rank_facts.Window.__eq__>"),
        (
            functools.partial(describe, 1, value=object()),
            "<functools.partial of <function slapo_core.tree.render.",
        ),
        (torch.nn.functional.gelu, "<function "),
        (torch.ones(2), "<torch.Tensor>"),
    ],
)
def test_a_value_has_the_same_text_in_every_process(value: Any, text: str) -> None:
    assert describe(value).startswith(text)
    assert " at 0x" not in describe(value)
    assert describe(value) == text or text.endswith((".", " "))


def test_tensor_facts_hold_shape_type_and_checksum() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert describe_tensor(tensor) == f"(2, 3), torch.float32, checksum {checksum(tensor):016x}"
    assert describe_tensor(tensor.to("meta")) == "(2, 3), torch.float32, without values"


TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128]
TYPES += [torch.int64, torch.uint16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_checksum_sees_every_bit_and_the_order_wherever_the_elements_lie(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(143).reshape(11, 13).remainder(7).to(dtype)
    total = checksum(tensor)
    for size in (1 << 20, 64, 8):  # also in pieces smaller than a row
        monkeypatch.setattr(sys.modules["slapo_runtime.ranks.checksums"], "_CHUNK", size)
        assert checksum(tensor.clone()) == total
        assert checksum(tensor.t().contiguous().t()) == total
        assert checksum(torch.stack([tensor, tensor], dim=-1)[..., 1]) == total
        assert checksum(torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[1:]) == total
    for row, column in ((0, 0), (5, 7), (10, 12)):
        other = tensor.clone()
        other[row, column] = 0 if tensor[row, column] else 1
        assert checksum(other) != total
    assert checksum(tensor.flip(0)) != total
    assert checksum(tensor[:, :-1]) != total


def test_a_checksum_of_anything_that_may_be_a_weight_or_an_input() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 5)) == 0
    assert checksum(torch.tensor(3.0)) == checksum(torch.tensor([3.0])) != checksum(torch.tensor(4.0))
    assert checksum(torch.nn.Parameter(torch.ones(3))) == checksum(torch.ones(3))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))
    wave = torch.tensor([1 + 2j, 3 - 4j])
    assert checksum(wave.conj()) == checksum(wave.conj().resolve_conj()) != checksum(wave)
    assert checksum(wave.conj().imag) == checksum(torch.tensor([-2.0, 4.0]))
    assert checksum(torch.ones(2, 3, device="meta")) == checksum(torch.zeros(6, device="meta"))
    with torch.inference_mode():
        assert checksum(torch.ones(3)) == checksum(torch.ones(3))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
def test_a_checksum_of_a_sparse_tensor_sees_values_and_places(layout: torch.layout) -> None:
    def sparse(dense: torch.Tensor) -> torch.Tensor:
        return dense.to_sparse(layout=layout, **({"blocksize": (2, 2)} if layout is torch.sparse_bsr else {}))

    diagonal = torch.eye(4)
    assert checksum(sparse(diagonal)) == checksum(sparse(diagonal.clone()))
    assert checksum(sparse(diagonal)) != checksum(sparse(2 * diagonal))
    assert checksum(sparse(diagonal)) != checksum(sparse(diagonal.flip(0)))


def test_a_checksum_needs_little_memory_beside_the_tensor() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    tensor = torch.zeros(1 << 12, 1 << 12)  # 64 MiB
    with Watch():
        assert checksum(tensor) == checksum(tensor.t())
    assert 0 < largest <= 8 << 20


EVERYBODY = {None: [(0, 1, 2)], "tp": [(0, 1), (2,)]}


def facts(**values: str | None) -> list[RankFact]:
    return [RankFact(what, value) for what, value in values.items()]


def test_the_first_difference_names_everybodys_value() -> None:
    ranks = {0: facts(seed="0", mesh="a"), 1: facts(seed="1", mesh="b"), 2: facts(seed="1", mesh="a")}
    assert first_difference(ranks, EVERYBODY) == "ranks disagree about seed:\n  rank 0: 0\n  ranks 1, 2: 1"
    assert first_difference(dict.fromkeys(range(3), ranks[0]), EVERYBODY) is None


def test_missing_fact_is_named_before_its_consequences() -> None:
    ranks = {0: facts(one="a", plugins="x"), 1: facts(one="a", two="b", plugins="x, y"), 2: facts(one="a", plugins="x")}
    assert first_difference(ranks, EVERYBODY) == "ranks disagree about two:\n  ranks 0, 2: (nothing)\n  rank 1: b"


def test_a_fact_with_a_scope_is_compared_among_these_ranks_only() -> None:
    def ranks(*values: str | None) -> dict[int, list[RankFact]]:
        return {rank: [RankFact("the seed", value, over="tp")] for rank, value in enumerate(values)}

    assert first_difference(ranks("0", "0", "7"), EVERYBODY) is None
    assert (
        first_difference(ranks("0", "1", "0"), EVERYBODY) == "ranks disagree about the seed:\n  rank 0: 0\n  rank 1: 1"
    )


def test_a_rank_that_cannot_tell_is_not_compared() -> None:
    assert first_difference({0: facts(gpu=None), 1: facts(gpu="0"), 2: facts(gpu="0")}, EVERYBODY) is None
    ranks = {0: facts(gpu=None), 1: facts(gpu="0"), 2: facts(gpu="1")}
    assert first_difference(ranks, EVERYBODY) == "ranks disagree about gpu:\n  rank 1: 0\n  rank 2: 1"
