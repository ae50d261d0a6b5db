"""What the processor lacks: a case that needs it is skipped with the reason, and takes no other case with it.

DeepSpeed trains in fp16 and bf16 only where its accelerator reports them: in fp16 on CPUs with AVX512-FP16 or AMX-FP16.
Torch and Megatron compute in both types on every CPU. ``pytest --without fp16 --without bf16`` lets torch and DeepSpeed
report the types as unsupported, in the process of the tests and in its ranks; a program that a test starts is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from unittest import mock

import pytest

import slapo_core as slapo

__all__ = ["DTYPES", "Outcome", "lacks", "reporting", "run_case"]

T = TypeVar("T")

DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
"""Names of torch's types by DeepSpeed's names."""
_WITHHELD = "SLAPO_TEST_WITHOUT"


def lacks(dtype: str) -> str | None:
    """Say why DeepSpeed does not train in a type on this processor; None where it does.

    Args:
        dtype: ``"fp16"`` or ``"bf16"``.
    """
    device = _accelerator()
    if dtype in _reported(device):
        return None
    return f"DeepSpeed reports no {dtype} for this processor ({device.device_name()})"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of one of several cases in a launch of ranks.

    Args:
        value: what the case returned.
        lacks: what it needs and the processor lacks.
        error: the text of its error.
    """

    value: T | None = None
    lacks: str | None = None
    error: str | None = None

    def get(self) -> T:
        """Return the value, or skip or fail the test that asks for it."""
        if self.lacks is not None:
            pytest.skip(self.lacks)
        if self.error is not None:
            pytest.fail(self.error)
        return self.value  # type: ignore[return-value]


def run_case(config: Mapping[str, Any], function: Callable[..., T], *args: Any, **kwargs: Any) -> Outcome[T]:
    """Call a function on every rank, unless DeepSpeed does not train in a type that its configuration enables.

    Args:
        config: of DeepSpeed, e.g. ``{"bf16": {"enabled": True}}``.
        function: the case; a `SlapoError` of every rank is its outcome.
        args: its arguments.
        kwargs: likewise.
    """
    for dtype in DTYPES:
        if config.get(dtype, {}).get("enabled") and (reason := lacks(dtype)):
            return Outcome(lacks=reason)
    try:
        return Outcome(function(*args, **kwargs))
    except slapo.SlapoError as error:
        return Outcome(error=f"{type(error).__name__}: {error}")


def _accelerator() -> Any:
    from slapo_deepspeed.runtime import import_deepspeed

    import_deepspeed("cpu")
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def _reported(device: Any) -> list[str]:
    is_supported = {"fp16": device.is_fp16_supported, "bf16": device.is_bf16_supported}
    return [dtype for dtype, ask in is_supported.items() if ask()]


# -- reports ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reporting(dtypes: Collection[str]) -> Iterator[None]:
    """Let DeepSpeed report these types and no others as supported, for plans: these compute nothing."""
    device = _accelerator()
    with (
        mock.patch.object(device, "is_fp16_supported", return_value="fp16" in dtypes),
        mock.patch.object(device, "is_bf16_supported", return_value="bf16" in dtypes),
    ):
        yield


class _Unsupported:
    """An operator that returns False; torch reads its other attributes."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def _withhold(dtypes: Collection[str]) -> None:
    """Let torch and DeepSpeed report these types as unsupported until this process ends."""
    import torch

    for dtype in dtypes:
        name = f"_is_mkldnn_{dtype}_supported"
        setattr(torch.ops.mkldnn, name, _Unsupported(getattr(torch.ops.mkldnn, name)))
    if importlib.util.find_spec("deepspeed") is None:
        return
    kind: Any = type(_accelerator())
    supported = kind.supported_dtypes
    withheld = {getattr(torch, DTYPES[dtype]) for dtype in dtypes}
    kind.supported_dtypes = lambda self: [dtype for dtype in supported(self) if dtype not in withheld]
    if "bf16" in dtypes:  # of fp16 it asks torch
        kind.is_bf16_supported = lambda self: False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without",
        action="append",
        default=[],
        choices=list(DTYPES),
        help="a type that torch and DeepSpeed report as unsupported by the processor, here and on ranks",
    )


def pytest_configure(config: pytest.Config) -> None:
    dtypes = config.getoption("--without")
    if dtypes:
        os.environ[_WITHHELD] = ",".join(dtypes)
        _withhold(dtypes)


def pytest_report_header(config: pytest.Config) -> list[str]:
    dtypes = config.getoption("--without")
    return [f"processor: as if it had no {' and no '.join(dtypes)}"] if dtypes else []


if _WITHHELD in os.environ:  # on a rank, or in the server that ranks are forked from
    _withhold(os.environ[_WITHHELD].split(","))
