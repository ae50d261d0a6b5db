"""Float32 products in one precision, and torch's flags, old and new, as they were before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import backends

from slapo_runtime.float32 import float32_products

ALL = [backends, backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
ALL += [backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]


def flags() -> list[object]:
    """All flags as they are read, the older ones also where reading them raises."""
    found: list[object] = [each.fp32_precision for each in ALL]
    for read in (
        torch.get_float32_matmul_precision,
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: backends.cudnn.allow_tf32,
    ):
        try:
            found.append(read())
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
    return found


def new_mixed_with_old() -> None:
    torch.set_float32_matmul_precision("high")
    backends.cuda.matmul.fp32_precision = "ieee"
    backends.cudnn.conv.fp32_precision = "ieee"


def bf16_by_new() -> None:
    backends.mkldnn.matmul.fp32_precision = "bf16"


def for_all_backends() -> None:
    backends.fp32_precision = "tf32"


def old_convolutions_off() -> None:
    backends.cudnn.allow_tf32 = False


SETTINGS: list[Callable[[], object]] = [
    lambda: None,
    lambda: torch.set_float32_matmul_precision("high"),
    lambda: torch.set_float32_matmul_precision("medium"),
    old_convolutions_off,
    new_mixed_with_old,
    bf16_by_new,
    for_all_backends,
]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for each, value in ((backends.cuda.matmul, "none"), (backends.cudnn.conv, "tf32"), (backends.cudnn.rnn, "tf32")):
        each.fp32_precision = value
    for each in (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn):
        each.fp32_precision = "none"


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_products_have_the_asked_precision_and_all_flags_come_back(setting: int, tf32: bool) -> None:
    SETTINGS[setting]()
    before = flags()
    with float32_products(tf32=tf32):
        name = "tf32" if tf32 else "ieee"
        operations = (each for each in ALL if each not in (backends, backends.cudnn, backends.mkldnn))
        assert [each.fp32_precision for each in operations] == [name] * 6
        assert flags()[-3:] == (["high", True, True] if tf32 else ["highest", False, False])  # and none raises
    assert flags() == before


def test_flags_of_all_backends_hold_again_after_the_block() -> None:
    with float32_products():
        pass
    backends.fp32_precision = "tf32"
    assert backends.cuda.matmul.fp32_precision == backends.mkldnn.conv.fp32_precision == "tf32"
